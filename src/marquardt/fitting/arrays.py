"""Tensors, NumPy arrays and plain numbers, and the ways between them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


def tensor(value: Any) -> Tensor:
    """Without a gradient; plain numbers in float64, where torch would take its default."""
    if isinstance(value, Tensor):
        return value.detach()
    if hasattr(value, "__array__"):  # torch takes neither foreign byte orders nor negative strides
        value = value.__array__()
        value = value.astype("f8" if value.dtype == "O" else value.dtype.newbyteorder("="), order="C")
        return torch.as_tensor(value)
    return torch.as_tensor(value, dtype=torch.complex128 if _complex(value) else torch.float64)


@cache
def has_numpy() -> bool:
    """Whether torch can make NumPy arrays: NumPy is no dependency."""
    try:
        with torch._C._DisableFuncTorch():  # inside a transform no tensor has an array, and this is asked only once
            torch.empty(0).numpy()
    except RuntimeError:
        return False
    return True


def _complex(value: Any) -> bool:
    return isinstance(value, complex) or (isinstance(value, (list, tuple)) and any(map(_complex, value)))


def floating(name: str, data: Any) -> Tensor:
    """Real numbers in float64; `name` is that of the argument in errors."""
    try:
        t = gathered(data)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"{name} must hold real numbers, not {kind(data)}") from error
    if t.is_complex():
        raise TypeError(f"{name} is complex: fit real and imaginary parts as one real vector")
    return t.to(torch.float64)


def kind(data: Any) -> str:
    """What somebody gave instead of numbers, in words."""
    name, dtype = type(data).__name__, str(getattr(data, "dtype", ""))
    if "datetime" in dtype or "timedelta" in dtype:
        return f"a {name} of {dtype}: pass the time since the first in seconds or days"
    if callable(data):
        return "a function"
    if isinstance(data, (list, tuple)):
        if len({len(part) for part in data if hasattr(part, "__len__") and not isinstance(part, str)}) > 1:
            return f"a {name} of rows of different length"
        odd = [part for part in _leaves(data) if part is None or isinstance(part, (str, bytes, dict))]
        return f"a {name} with {odd[0]!r}" if odd else f"a {name}"
    return f"{data!r}" if data is None or isinstance(data, str) else f"a {name}{f' of {dtype}' if dtype else ''}"


def _leaves(data: Any) -> Any:
    for part in data:
        yield from _leaves(part) if isinstance(part, (list, tuple)) else (part,)


def gathered(data: Any) -> Tensor:
    """A tensor of arrays, or of lists of such."""
    if isinstance(data, (list, tuple)) and any(getattr(part, "ndim", 0) for part in data):
        return torch.stack([gathered(part) for part in data])
    return tensor(data)


def array(data: Any) -> Any:
    """A tensor as an array; anything else as it is."""
    return data.detach().cpu().numpy() if isinstance(data, Tensor) else data


def like(data: Any, p: Any) -> Any:
    """A tensor as it is if p is one, too, and as an array if not; anything else as it is."""
    return data if isinstance(p, Tensor) else array(data)
