"""Checkpoints by torch.distributed.checkpoint, which any number of ranks can go on from.

    folder/12/        the last one: what torch.distributed.checkpoint has written, and contents.pt for all but tensors
    folder/13.part/   one that is being written, or that a killed process has left: never read

A checkpoint gets its name when it is complete, and only then the one before it is removed.
"""

from __future__ import annotations

import io
import os
import shutil
import warnings
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

from . import generators
from .model.checks import unwrapped
from .model.shards import sharded
from .optimizer import LM
from .ranks import Ranks

VERSION = 1
CONTENTS = "contents.pt"

# Marks the place of a tensor among what is plain.
STORED = "torch.distributed.checkpoint"


def save_checkpoint(folder: str | PathLike[str], model: nn.Module, opt: LM, **more: Any) -> None:
    """Saves model, optimizer, the random numbers of every rank, and `more`: tensors and plain values by name.

    All ranks of the optimizer's group call it, unlike `if rank == 0: torch.save(...)`; `more` is that of rank 0.
    The folder is on a file system that all of them see. It is written whole or not at all: until the new one is
    complete, the last one stays. One process without torch.distributed can save and load as well.

    Args:
        folder: of the checkpoints, which is made if it is not there.
        model: whose state_dict is saved.
        opt: that trains it.
        more: tensors and plain values by name, which `load_checkpoint` returns.

    >>> mq.save_checkpoint("run", model, opt, epoch=3)
    >>> epoch = mq.load_checkpoint("run", model, opt)["epoch"]
    """
    check_optimizer(opt)
    refuse(model)
    ranks = opt._ranks
    with ranks.together():
        content = {"model": unwrapped(model, None)[0].state_dict(), "optimizer": opt.state_dict(), "more": more}
        write(Path(folder), content, generators.states(), ranks)


def load_checkpoint(folder: str | PathLike[str], model: nn.Module, opt: LM) -> dict[str, Any]:
    """Loads the last checkpoint of `save_checkpoint` into model and optimizer, and returns what was saved beside them.

    The number of ranks may be another one. Each rank gets the random numbers that it had; one that was not there
    begins with a seed of its own. If the checkpoint is of another model or optimizer nothing changes. All ranks of the
    optimizer's group call it.

    Args:
        folder: that `save_checkpoint` has written to.
        model: made as the one that was saved.
        opt: made with the same options.

    Returns:
        What was saved beside them, by name.

    >>> mq.save_checkpoint("run", model, opt, epoch=3)
    >>> mq.load_checkpoint("run", model, opt)["epoch"]
    3
    """
    check_optimizer(opt)
    refuse(model)
    ranks, inner = opt._ranks, unwrapped(model, None)[0]
    with ranks.together():
        ranks.same(f"the checkpoint in {folder}")
        own = inner.state_dict()
        content, random = read(Path(folder), ranks, {"model": own})
        path = Path(folder)
        check_model(path, content.get("model"), own)
        ranks.same(f"the checkpoint {path} is read")  # by all, or none of them changes
        try:
            opt.load_state_dict(content["optimizer"])
        except (TypeError, ValueError) as error:
            raise type(error)(f"the checkpoint {path} is of another optimizer: {error}") from None
        inner.load_state_dict(content["model"])
        generators.set_states(generators.of_rank(random, ranks.rank))
        return dict(content["more"])


def check_optimizer(opt: Any) -> None:
    if not isinstance(opt, LM):
        raise TypeError(f"the optimizer is {type(opt).__name__}: checkpoints are of marquardt.LM")


def refuse(model: nn.Module) -> None:
    """The state of an optimizer of shards is that of its rank."""
    if any(sharded(p) for p in model.parameters()):
        raise TypeError(
            "mq.save_checkpoint and mq.load_checkpoint take no model whose parameters are sharded: save its state_dict "
            "by torch.distributed.checkpoint, and opt.state_dict() by torch.save in a file for every rank "
            "(docs/sharded.md)"
        )


def check_model(path: Path, there: Any, here: Mapping[str, Any]) -> None:
    if not isinstance(there, Mapping):
        raise ValueError(f"{path} is no checkpoint of mq.save_checkpoint: mq.fit(checkpoint=…) goes on with its own")
    for name in dict.fromkeys([*there, *here]):
        before, now = (shape(found[name]) if name in found else "missing" for found in (there, here))
        if before != now:
            raise ValueError(
                f"the checkpoint {path} is of another model: {name!r} is {now} in this one, and was {before}. Make the "
                "model as it was, or name another folder"
            )


def shape(item: Any) -> str:
    return str(tuple(item.shape)) if isinstance(item, Tensor) else "no tensor"


# A folder of checkpoints.


def latest(folder: Path) -> Path | None:
    """The last one that is complete."""
    numbers = [int(path.name) for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    return folder / str(max(numbers)) if numbers else None


def write(folder: Path, content: Any, own: Any, ranks: Ranks) -> None:
    """`content` is the same on all ranks, but for DTensors, of which each has its shard; `own` is that of this rank."""
    ranks.same(f"a checkpoint in {folder}")
    last = latest(folder) if ranks.rank == 0 else None
    number = ranks.agreed(1 if last is None else int(last.name) + 1)
    part, path = folder / f"{number}.part", folder / str(number)
    if ranks.rank == 0:
        for old in folder.glob("*.part"):
            shutil.rmtree(old)
        part.mkdir(parents=True)
    ranks.same(f"the checkpoint {path}")
    if not part.is_dir():
        raise OSError(
            f"rank {ranks.rank} does not see {part}, which rank 0 has made: name a folder that all ranks share"
        )
    tensors, plain = taken_apart(content)
    packed = pack({"marquardt": VERSION, "content": plain, "ranks": ranks.every(own)})
    ranks.through(f"the tensors of {path}", lambda group: dump(tensors, part, group))
    if ranks.rank == 0:
        put(part / CONTENTS, packed)
        os.rename(part, path)
        settle(folder)
        if last is not None:
            old = last.rename(last.with_name(f"{last.name}.part"))  # half of it must not be taken for a whole one
            shutil.rmtree(old)
    ranks.same(f"the checkpoint {path} is complete")


def read(folder: Path, ranks: Ranks, like: Any = None) -> tuple[Any, list[Any]]:
    """What was written, and what each rank had of its own. DTensors come as the tensors of the same name in `like`, or
    as they were; as plain tensors if there are none now."""
    path = ranks.agreed(latest(folder))
    if path is None:
        raise FileNotFoundError(f"{folder} holds no checkpoint that is complete: begin anew, or name another folder")
    try:
        found = torch.load(path / CONTENTS, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        raise unreadable(path, error) from error
    if not isinstance(found, dict) or found.get("marquardt") != VERSION:
        raise ValueError(f"{path} is no checkpoint of this version of marquardt: name another folder")
    return put_together(path, found["content"], placed(like)), found["ranks"]


def unreadable(path: Path, error: BaseException) -> ValueError:
    return ValueError(
        f"{path} is no checkpoint, or damaged ({type(error).__name__}: {error}): remove it, or name another folder"
    )


def pack(plain: Any) -> bytes:
    """As it can be loaded without running code, which is tried at once."""
    file = io.BytesIO()
    torch.save(plain, file)
    try:
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception as error:
        raise TypeError(f"a checkpoint holds tensors, numbers, strings, lists and dicts alone: {error}") from None
    return file.getvalue()


def put(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    settle(path.parent)


def settle(folder: Path) -> None:
    """The names in it are on the disk, too; some systems have no such thing."""
    try:
        file = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(file)
    finally:
        os.close(file)


# Tensors.


def taken_apart(content: Any) -> tuple[dict[str, Tensor], Any]:
    """The tensors by their places, and everything with these in their stead."""
    leaves, tree = tree_flatten_with_path(content)
    tensors = {keystr(place): leaf.detach() for place, leaf in leaves if isinstance(leaf, Tensor)}
    plain = [stored(keystr(place), leaf) if isinstance(leaf, Tensor) else leaf for place, leaf in leaves]
    return tensors, tree_unflatten(plain, tree)


def stored(key: str, t: Any) -> dict[str, Any]:
    """How a tensor is found again; with the dimensions that a DTensor is sharded by, None if it is replicated"""
    cuts = [getattr(p, "dim", None) for p in t.placements] if hasattr(t, "placements") else None
    return {STORED: key, "shape": list(t.shape), "dtype": t.dtype, "cuts": cuts}


def put_together(path: Path, plain: Any, like: dict[str, Any]) -> Any:
    def is_stored(item: Any) -> bool:
        return isinstance(item, dict) and STORED in item

    from torch.distributed.checkpoint.api import CheckpointException  # which takes a while, and few need it
    from torch.distributed.checkpoint.state_dict_loader import load

    mesh = next((t.device_mesh for t in like.values() if hasattr(t, "device_mesh")), None)
    asked = [item for item in tree_leaves(plain, is_leaf=is_stored) if is_stored(item)]
    tensors = {item[STORED]: empty(item, like.get(item[STORED]), mesh) for item in asked}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this rank reads by itself, which is meant
            load(tensors, checkpoint_id=path, no_dist=True)
    except (Exception, CheckpointException) as error:
        raise unreadable(path, error) from error
    return tree_map(lambda item: tensors[item[STORED]] if is_stored(item) else item, plain, is_leaf=is_stored)


def empty(item: dict[str, Any], like: Any, mesh: Any) -> Tensor:
    if hasattr(like, "placements") and list(like.shape) == item["shape"]:
        return torch.empty_like(like, dtype=item["dtype"])
    if mesh is None or item["cuts"] is None:
        return torch.empty(item["shape"], dtype=item["dtype"])
    from torch.distributed import tensor

    placements = [tensor.Replicate() if cut is None else tensor.Shard(cut) for cut in item["cuts"]]
    found: Tensor = tensor.empty(*item["shape"], dtype=item["dtype"], device_mesh=mesh, placements=placements)
    return found


def placed(like: Any) -> dict[str, Any]:
    return {keystr(place): leaf for place, leaf in tree_flatten_with_path(like)[0]}


def dump(tensors: dict[str, Any], path: Path, group: Any) -> None:
    """By all ranks of the group, or by one process."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process, which is so
            save(tensors, checkpoint_id=path, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        rank, (first, _) = next(iter(error.failures.items()))
        raise OSError(
            f"{path} could not be written by rank {rank} ({type(first).__name__}: {first}): free some space or choose "
            "another folder; the checkpoint before it is kept"
        ) from error
