"""The states of the generators of random numbers of this process, as they are saved: tensors and plain numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch


def states() -> dict[str, Any]:
    """Torch's, Python's and NumPy's"""
    version, numbers, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": [version, list(numbers), gauss],
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, place, has_gauss, gauss = numpy.random.get_state()
        found["numpy"] = [str(kind), keys.tolist(), int(place), int(has_gauss), float(gauss)]
    return found


def set_states(found: dict[str, Any]) -> None:
    torch.set_rng_state(found["torch"].cpu())
    if found["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([state.cpu() for state in found["cuda"][: torch.cuda.device_count()]])
    version, numbers, gauss = found["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "numpy" in found:
        import numpy as np

        kind, keys, *rest = found["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    if "seed" in found:
        torch.manual_seed(found["seed"])
        random.seed(found["seed"])
        if "numpy" in found:
            np.random.seed(found["seed"])  # noqa: NPY002


def of_rank(saved: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
    """Those that this rank had. A rank that was none of them begins anew, with a seed from rank 0's and its number."""
    if rank < len(saved):
        return dict(saved[rank])
    drawn = torch.Generator()
    drawn.set_state(saved[0]["torch"].cpu())
    return {**saved[0], "seed": (int(torch.randint(2**31, (), generator=drawn)) + rank) % 2**32}
