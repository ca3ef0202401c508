"""Members as tensors and plain values, and those that are finished in a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import files
from ..files import typed
from .law import Law
from .members import Members
from .network import ACTIVATIONS, Network

KEPT = r"configuration-\d+"  # the names of files, without their ends
TENSORS = ("theta", "alpha", "beta", "groups", "best_step", "error", "gamma", "root")


def part_state(part: Members) -> dict[str, Any]:
    state: dict[str, Any] = {name: getattr(part, name) for name in TENSORS}
    network = part.network
    return state | {"sizes": list(network.sizes), "activation": network.activation, "steps": part.steps}


def part_from(state: Any, law: Law) -> Members:
    """What `part_state` has made. Anything else is a ValueError: a file may have been made by anybody."""
    entries(state, {*TENSORS, "sizes", "activation", "steps"}, "a network")
    sizes = typed(state["sizes"], list[int], "sizes")
    if len(sizes) < 2 or min(sizes) < 1 or state["activation"] not in [*ACTIVATIONS]:
        raise ValueError(f"there is no network of the sizes {sizes} with {state['activation']!r}")
    network = Network(tuple(sizes), state["activation"])
    k, n = tensor(state["theta"], "theta", torch.float64, (None, network.n)).shape
    groups = tensor(state["groups"], "groups", torch.long, (n,))
    count = tensor(state["alpha"], "alpha", torch.float64, (k, None)).shape[1]
    if int(groups.min()) < 0 or int(groups.max()) >= count:
        raise ValueError(f"a group of weights is none of {count}")
    for name in ("beta", "gamma"):
        tensor(state[name], name, torch.float64, (k,))
    tensor(state["error"], "error", torch.float64, (k,), finite=False)
    tensor(state["best_step"], "best_step", torch.long, (k,))
    if state["root"] is not None:
        tensor(state["root"], "root", torch.float32, (k, n, n))
    steps = state["steps"]
    if not isinstance(steps, list) or len(steps) != k or not all(map(_is_history, steps)):
        raise ValueError(f"there are no steps of {k} members")
    tensors = {name: state[name] for name in TENSORS}
    return Members(network, law, **tensors, steps=[[tuple(step) for step in some] for some in steps])


def _is_history(steps: Any) -> bool:
    """Loss, error of what is held out, λ and whether the step was accepted, for each step"""
    kinds = [float, float, float, bool]
    return isinstance(steps, list) and all(
        isinstance(step, (list, tuple)) and [type(value) for value in step] == kinds for step in steps
    )


def entries(state: Any, names: set[str], what: str) -> None:
    if not isinstance(state, dict) or set(state) != names:
        raise ValueError(f"the entries of {what} are not {', '.join(sorted(names))}")


def tensor(t: Any, name: str, dtype: torch.dtype, shape: tuple[int | None, ...], *, finite: bool = True) -> Tensor:
    """Refuses another shape (None is any number of at least one), numbers that are not finite, and a tensor of more
    elements than the file has: in copies of it memory would run out."""
    if type(t) is not Tensor or t.dtype != dtype or t.layout != torch.strided or t.device.type != "cpu":
        raise ValueError(f"{name} is no tensor of {dtype}")
    fits = len(t.shape) == len(shape) and all(a == b or (b is None and a) for a, b in zip(t.shape, shape, strict=True))
    if not fits or t.numel() * t.element_size() > t.untyped_storage().nbytes():
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has the shape {tuple(t.shape)}, not ({wanted})")
    if finite and t.is_floating_point() and not bool(t.isfinite().all()):
        raise ValueError(f"{name} is not finite")
    return t


# --- files ---


def save_part(folder: Path | None, number: int, mark: str, part: Members) -> None:
    if folder is not None:
        files.save(_path(folder, number), {"mark": mark, "part": part_state(part)})


def load_parts(folder: Path | None, count: int, mark: str, law: Law) -> dict[int, Members]:
    """What was kept for these samples and settings, by number. All of it is read before any of it is used."""
    paths = {} if folder is None else {number: _path(folder, number) for number in range(count)}
    return {number: _load_part(path, mark, law) for number, path in paths.items() if os.path.lexists(path)}


def _load_part(path: Path, mark: str, law: Law) -> Members:
    way = "move it away, and the same command trains these networks again"
    try:
        if path.is_symlink() or not path.is_file():
            raise files.Damaged(f"{path} is no file that marquardt has written")
        state, is_sealed = files.load(path)
        if not is_sealed:
            raise files.Damaged(f"{path} has no checksum: it is damaged, or of an earlier version")
        entries(state, {"mark", "part"}, path.name)
        part = part_from(state["part"], law)
    except files.Damaged as error:
        raise ValueError(f"{error}; {way}") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged, or no file of marquardt ({error}); {way}") from None
    if state["mark"] != mark:
        raise ValueError(f"{path} is of other samples or settings: name another folder, or move this file away")
    return part


def _path(folder: Path, number: int) -> Path:
    return folder / f"configuration-{number + 1}.pt"
