"""The states of the generators of random numbers of this process, as they are saved: tensors and plain numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from .values import is_count

WAY_OUT = "the random numbers of this state are damaged: load another one"


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
    """All of them, or none if one is damaged"""
    check(found)
    torch.set_rng_state(found["torch"].cpu())
    if found["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([state.cpu() for state in found["cuda"][: torch.cuda.device_count()]])
    version, numbers, gauss = found["python"]
    random.setstate((version, tuple(numbers), gauss))
    seed = found.get("seed")
    if seed is not None:
        torch.manual_seed(seed)
        random.seed(seed)
    if "numpy" in found:
        with suppress(ImportError):  # then nothing draws from it either
            import numpy as np

            kind, keys, *rest = found["numpy"]
            np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
            if seed is not None:
                np.random.seed(seed)  # noqa: NPY002


def of_rank(saved: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
    """Those that this rank had. A rank that was none of them begins anew, with a seed from rank 0's and its number."""
    if rank < len(saved):
        return dict(saved[rank])
    drawn = torch.Generator()
    drawn.set_state(saved[0]["torch"].cpu())
    return {**saved[0], "seed": (int(torch.randint(2**31, (), generator=drawn)) + rank) % 2**32}


# What was read from outside, tried on generators of which nothing is drawn.


def check(found: Any) -> None:
    """Raises ValueError, with the entry by name, if these are no states that `set_states` could set."""
    if not isinstance(found, dict):
        raise ValueError(f"the states of the random numbers are {type(found).__name__}, not a dict: {WAY_OUT}")
    for name in ("torch", "cuda", "python"):
        if name not in found:
            raise ValueError(f"the states of the random numbers have no entry {name!r}: {WAY_OUT}")
    if not isinstance(found["cuda"], list):
        raise ValueError(f"the random state 'cuda' is {type(found['cuda']).__name__}, not a list: {WAY_OUT}")
    check_state(found["torch"], "torch")
    for i, state in enumerate(found["cuda"]):
        check_state(state, f"cuda:{i}", torch.device("cuda", i))
    for name, check_own in (("python", _check_python), ("numpy", _check_numpy)):
        if name in found:
            try:
                gauss = check_own(*found[name])
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"the random state {name!r} is none of {name} ({error}): {WAY_OUT}") from error
            if gauss is not None and not (type(gauss) is float and abs(gauss) < 100):
                raise ValueError(f"the random state {name!r} keeps {gauss!r}, no normal number: {WAY_OUT}")
    seed = found.get("seed", 0)
    if not is_count(seed) or seed >= 2**32:
        raise ValueError(f"the seed of the random numbers is {seed!r}, not an integer below 2³²: {WAY_OUT}")


def check_state(state: Any, name: str, device: torch.device = torch.device("cpu")) -> None:
    """Of one of torch's generators"""
    if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.ndim != 1:
        what = f"{state.dtype} of {state.ndim} dimensions" if isinstance(state, Tensor) else type(state).__name__
        raise ValueError(f"the random state {name!r} is {what}, not a row of bytes: {WAY_OUT}")
    if device.type == "cuda" and not (torch.cuda.is_available() and device.index < torch.cuda.device_count()):
        return
    try:
        torch.Generator(device).set_state(state.cpu())
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the random state {name!r} is none of torch ({error}): {WAY_OUT}") from error


# They return the second of two normal numbers, which is kept for the next draw.


def _check_python(version: Any, numbers: Any, gauss: Any) -> Any:
    random.Random().setstate((version, tuple(numbers), gauss))
    return gauss


def _check_numpy(kind: Any, keys: Any, place: Any, has_gauss: Any, gauss: Any) -> Any:
    """NumPy itself looks neither at the place among the keys nor at the number that is kept."""
    whole = [*keys, place, has_gauss]
    if kind != "MT19937" or len(whole) != 626 or any(type(k) is not int or not 0 <= k < 2**32 for k in whole):
        raise ValueError("it is no Mersenne Twister")
    if place > 624 or has_gauss > 1 or not any(keys):
        raise ValueError(f"it has the place {place} of 624 and {has_gauss} kept")
    return gauss
