"""Which processes take a step together: `group=` of LM."""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .base import ALONE, Ranks
from .several import Several

AVAILABLE = dist.is_available()

# Every process group has one, whose control group all ranks have made together; it goes when the group is destroyed.
_made: WeakKeyDictionary[Any, Several] = WeakKeyDictionary()


def of(group: Any) -> Ranks:
    """None: the default process group, if it has several ranks. False: this process by itself. A process group or a
    DeviceMesh of one dimension: that one, also if it has one rank alone."""
    if group is False or not AVAILABLE:
        return ALONE
    if group is None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return ALONE
        group = dist.group.WORLD
    if hasattr(group, "get_group"):  # a DeviceMesh
        if group.ndim != 1:
            raise ValueError(f"group= is a DeviceMesh of {group.ndim} dimensions: pass one of them, mesh['dp']")
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process is no member of the group that group= names: make the optimizer on its ranks")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group={group!r}: a process group of torch.distributed, None for the default one, or False for runs that "
            "are independent of the other ranks"
        )
    if group not in _made:
        _made[group] = Several(group)
    return _made[group]


def check_joined(group: Any) -> None:
    """Processes that torchrun has started, and that do not know of each other."""
    launched = AVAILABLE and dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", 1)) > 1
    if launched and group is None and not dist.is_initialized():
        raise RuntimeError(
            f"torchrun has started {os.environ['WORLD_SIZE']} processes, and each would train by itself: call "
            "torch.distributed.init_process_group() first, or pass group=False if that is meant"
        )
