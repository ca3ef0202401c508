"""The generators of random numbers that a fit may depend on, as they are saved."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..sources import Source, Stream


def generators(data: Source) -> dict[str, Any]:
    """The states of torch's, Python's and NumPy's, and of a DataLoader's own: tensors and plain numbers."""
    version, numbers, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": [version, list(numbers), gauss],
        "loader": [g.get_state() for g in _own(data)],
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, place, has_gauss, gauss = numpy.random.get_state()
        found["numpy"] = [str(kind), keys.tolist(), int(place), int(has_gauss), float(gauss)]
    return found


def set_generators(states: dict[str, Any], data: Source) -> None:
    torch.set_rng_state(states["torch"].cpu())
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([state.cpu() for state in states["cuda"]])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    for g, state in zip(_own(data), states["loader"], strict=True):
        g.set_state(state.cpu())
    if "numpy" in states:
        import numpy as np

        kind, keys, *rest = states["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002


@contextmanager
def unchanged(data: Source) -> Iterator[None]:
    """Batches of their own come in the same order every time: the generators are afterwards as they were."""
    before = generators(data) if isinstance(data, Stream) else None
    yield
    if before is not None:
        set_generators(before, data)


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
