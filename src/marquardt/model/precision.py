"""In which precision the model computes, and that what is made of its outputs is not coarser than float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

COARSE = (torch.bfloat16, torch.float16)


class Autocast(NamedTuple):
    """torch.autocast as the caller of a step has set it: for the forward passes of the model and nothing else."""

    device: str
    enabled: bool
    dtype: torch.dtype
    cache: bool

    @classmethod
    def of_caller(cls, device: torch.device) -> Autocast:
        kind = device.type
        return cls(
            kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
        )

    def __call__(self) -> AbstractContextManager[Any]:
        """Around a forward pass"""
        if not self.enabled:
            return without_autocast(self.device)
        return torch.autocast(self.device, self.dtype, cache_enabled=self.cache)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def full(item: Any) -> Any:
    """Tensors of bfloat16 and float16 in float32, also in a dataclass: losses and their derivatives need its digits."""
    if item is None:
        return None
    if item.__class__ is Tensor:
        return item.float() if item.dtype in COARSE else item
    return widened(item) if isinstance(item, Tensor) else tree_map(_full, item)


def _full(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return widened(leaf)
    if not is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    found = copy(leaf)
    for f in fields(leaf):
        object.__setattr__(found, f.name, full(getattr(leaf, f.name)))
    return found


def widened(t: Tensor) -> Tensor:
    return t.float() if t.dtype in COARSE else t


def wide(dtype: torch.dtype) -> torch.dtype:
    """That of θ, of gradients and of rows, for a parameter of this dtype"""
    return torch.float32 if dtype in COARSE else dtype
