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
    """Nothing changes if one of them is damaged."""
    version, numbers, gauss = found["python"]
    python, cuda = (version, tuple(numbers), gauss), []
    random.Random().setstate(python)
    torch.Generator().set_state(found["torch"].cpu())
    if not isinstance(gauss, (float, type(None))):
        raise ValueError(f"the state of Python's random numbers has {gauss!r}")
    if found["cuda"] and torch.cuda.is_available():
        cuda = [state.cpu() for state in found["cuda"][: torch.cuda.device_count()]]
        for state in cuda:
            torch.Generator("cuda").set_state(state)
    numpy = None if "numpy" not in found else of_numpy(*found["numpy"])
    seed = found.get("seed")
    if seed is not None and not (type(seed) is int and 0 <= seed < 2**32):
        raise ValueError(f"the seed is {seed!r}")
    torch.set_rng_state(found["torch"].cpu())
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(python)
    if numpy is not None:
        import numpy as np

        np.random.set_state(numpy)  # noqa: NPY002
    if seed is not None:
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            np.random.seed(seed)  # noqa: NPY002


def of_numpy(kind: str, keys: Sequence[int], place: int, has_gauss: int, gauss: float) -> Any:
    """As NumPy takes it, which would read numbers from elsewhere in the memory at a place that is none of its own."""
    import numpy as np

    found = np.array(keys, dtype=np.uint32)
    fits = kind == "MT19937" and found.shape == (624,) and type(place) is int and 0 <= place <= 624
    if not fits or has_gauss not in (0, 1) or type(gauss) is not float:
        raise ValueError("the state of NumPy's random numbers is none")
    return kind, found, place, has_gauss, gauss


def of_rank(saved: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
    """Those that this rank had. A rank that was none of them begins anew, with a seed from rank 0's and its number."""
    if rank < len(saved):
        return dict(saved[rank])
    drawn = torch.Generator()
    drawn.set_state(saved[0]["torch"].cpu())
    return {**saved[0], "seed": (int(torch.randint(2**31, (), generator=drawn)) + rank) % 2**32}
