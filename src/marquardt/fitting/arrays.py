"""Tensors, NumPy arrays and plain numbers, and the ways between them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


def tensor(value: Any) -> Tensor:
    """Without a gradient; plain numbers in float64, where torch would take its default."""
    if hasattr(value, "strides"):  # NumPy: torch takes neither foreign byte orders nor negative strides
        value = value.astype(value.dtype.newbyteorder("="), order="C")
    plain = not hasattr(value, "dtype")
    t = torch.as_tensor(value, dtype=None if not plain else torch.complex128 if _complex(value) else torch.float64)
    return t.detach()


@cache
def has_numpy() -> bool:
    """Whether torch can make NumPy arrays: NumPy is no dependency."""
    try:
        torch.empty(0).numpy()
    except RuntimeError:
        return False
    return True


def _complex(value: Any) -> bool:
    return isinstance(value, complex) or (isinstance(value, (list, tuple)) and any(map(_complex, value)))


def floating(name: str, data: Any) -> Tensor:
    t = gathered(data)
    if t.is_complex():
        raise TypeError(f"{name} is complex: fit real and imaginary parts as one real vector")
    return t.to(torch.float64)


def gathered(data: Any) -> Tensor:
    """A tensor of arrays in the machine's byte order and with strides that torch takes, or of lists of such."""
    if isinstance(data, (list, tuple)) and any(getattr(part, "ndim", 0) for part in data):
        return torch.stack([gathered(part) for part in data])
    if isinstance(data, Tensor) or not hasattr(data, "dtype"):
        return tensor(data)
    return tensor(data.__array__().astype(data.dtype.newbyteorder("="), order="C"))


def array(data: Any) -> Any:
    """A tensor as an array; anything else as it is."""
    return data.detach().cpu().numpy() if isinstance(data, Tensor) else data


def like(data: Any, p: Any) -> Any:
    """A tensor as it is if p is one, too, and as an array if not; anything else as it is."""
    return data if isinstance(p, Tensor) else array(data)
