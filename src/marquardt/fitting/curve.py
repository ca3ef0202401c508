"""The curve f(x, *p) of a user, who wrote it for tensors or for arrays."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..surroundings import unless_interrupted
from .arrays import array, floating, gathered, like


def independent(x: Any, like: Tensor) -> Any:
    """x as a tensor like this one if it is an array or numbers; whatever else f takes stays as it is."""
    typed = hasattr(x, "dtype") or isinstance(x, (list, tuple, int, float, str))
    return floating("xdata", x).to(like) if typed else x


class Curve:
    """p ↦ f(x, *p), with x as a tensor or as NumPy, whichever p is."""

    def __init__(self, f: Callable[..., Any], x: Any, ndim: int | None) -> None:
        self.f, self.x, self.ndim = f, x, ndim

    def __call__(self, p: Any, *own: Tensor) -> Any:
        x = like(own[0] if own else self.x, p)
        y = values(self.f(x, *p), p)
        if y.ndim == 0 and isinstance(self.x, Tensor) and x.ndim == self.ndim:  # a constant
            y = y + like(self.x.new_zeros(x.shape[-1:]), p)
        return y.reshape(-1)


def values(model: Any, p: Any) -> Any:
    """What f returned, as a tensor where p is one and as an array where not."""
    if model is None:
        raise TypeError("f returned None: it must return the curve at x")
    if isinstance(model, (list, tuple)):
        shapes = {tuple(getattr(value, "shape", ())) for value in model}
        if len(shapes) > 1:
            raise ValueError(
                f"f returned a {type(model).__name__} of shapes {sorted(shapes)}: it must return the curve"
            )
    if isinstance(model, (list, tuple)) and any(isinstance(value, Tensor) for value in model):
        return torch.stack([torch.as_tensor(value, dtype=p.dtype, device=p.device) for value in model])
    if isinstance(p, Tensor) and not isinstance(model, Tensor):
        raise TypeError(f"f returned {type(model).__name__} for tensors: it must return the curve at x, a tensor")
    return model if hasattr(model, "ndim") else array(floating("the curve that f returns", model))


def shape(f: Callable[..., Any], x: Tensor, p: Tensor) -> tuple[int, ...] | None:
    """Of what f returns for this x; None if it takes no such x."""
    for kind in (Tensor.detach, array):
        try:
            q = kind(p)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return tuple(values(f(like(x, q), *q), q).shape)
        except Exception as error:  # a function of arrays may raise anything on a tensor, and the reverse
            unless_interrupted(error)
            continue
    return None


def fed(g: Callable[..., Any], x: Any, p0: Tensor, batched: bool) -> Callable[..., Any]:
    """g; where it is a function of arrays alone, one that takes tensors too."""
    p = p0[0] if batched else p0

    def on_arrays(x: Any, *p: Any) -> Any:
        value = g(array(x), *map(array, p))
        return gathered(value).to(p[0].device) if isinstance(p[0], Tensor) else value

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # NumPy's, for what it does with tensors
            g(x, *p)
    except Exception as error:  # a function of arrays may raise anything on a tensor
        unless_interrupted(error)
        try:
            on_arrays(x, *p)
        except Exception as error:  # it fails on both: the fit will tell
            unless_interrupted(error)
            return g
        return on_arrays
    return g
