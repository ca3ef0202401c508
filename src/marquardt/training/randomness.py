"""The generators of random numbers that a fit may depend on, as they are saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from ..generators import WAY_OUT, check, check_state, set_states, states
from ..sources import Source, Stream
from ..surroundings import back_afterwards


def generators(data: Source) -> dict[str, Any]:
    """The states of torch's, Python's and NumPy's, and of a DataLoader's own: tensors and plain numbers."""
    return {**states(), "loader": [g.get_state() for g in _own(data)]}


def check_generators(found: Any, data: Source) -> None:
    """Raises ValueError, with the entry by name, if `set_generators` could not set them."""
    check(found)
    loader, own = found.get("loader"), list(_own(data))
    if not isinstance(loader, list) or len(loader) != len(own):
        there = len(loader) if isinstance(loader, list) else type(loader).__name__
        raise ValueError(f"the random states 'loader' are {there}, the data have {len(own)} generators: {WAY_OUT}")
    for g, state in zip(own, loader, strict=True):
        check_state(state, "loader", g.device)


def set_generators(found: dict[str, Any], data: Source) -> None:
    """All of them, or none if one is damaged"""
    check_generators(found, data)
    set_states(found)
    for g, state in zip(_own(data), found["loader"], strict=True):
        g.set_state(state.cpu())


@contextmanager
def unchanged(data: Source) -> Iterator[None]:
    """Batches of their own come in the same order every time: the generators are afterwards as they were."""
    before = generators(data) if isinstance(data, Stream) else None
    with nullcontext() if before is None else back_afterwards(partial(set_generators, before, data)):
        yield


def _own(data: Source) -> Iterator[torch.Generator]:
    """Of a DataLoader and its samplers, each once"""
    if not isinstance(data, Stream):
        return
    seen: list[torch.Generator] = []
    loader = data.data
    for holder in (loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler"))):
        g = getattr(holder, "generator", None)
        if isinstance(g, torch.Generator) and not any(g is other for other in seen):
            seen.append(g)
            yield g
