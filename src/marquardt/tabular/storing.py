"""Members as tensors and plain values, and those that are finished in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..training.checkpoint import write
from .law import Law
from .members import Members
from .network import Network

TENSORS = ("theta", "alpha", "beta", "groups", "best_step", "error", "gamma", "root")


def part_state(part: Members) -> dict[str, Any]:
    state: dict[str, Any] = {name: getattr(part, name) for name in TENSORS}
    network = part.network
    return state | {"sizes": list(network.sizes), "activation": network.activation, "steps": part.steps}


def part_from(state: dict[str, Any], law: Law) -> Members:
    network = Network(tuple(state["sizes"]), state["activation"])
    tensors = {name: state[name] for name in TENSORS}
    return Members(network, law, **tensors, steps=state["steps"])


def save_part(folder: Path | None, number: int, mark: str, part: Members) -> None:
    if folder is not None:
        write(folder / f"configuration-{number + 1}.pt", {"mark": mark, "part": part_state(part)})


def load_part(folder: Path | None, number: int, mark: str, law: Law) -> Members | None:
    """What was kept for these samples and settings, None if there is nothing"""
    if folder is None or not (path := folder / f"configuration-{number + 1}.pt").exists():
        return None
    state = torch.load(path, weights_only=True)
    if state["mark"] != mark:
        raise ValueError(f"{path} is of other samples or settings: name another folder, or delete this one")
    return part_from(state["part"], law)
