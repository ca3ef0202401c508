"""The curve f(x, *p) of a user, who wrote it for tensors or for arrays, and the data that it is fitted to."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..surroundings import unless_interrupted
from .arrays import array, floating, gathered, kind, like


def independent(x: Any, like: Tensor) -> Any:
    """x as a tensor like this one if it is an array or numbers; whatever else f takes stays as it is."""
    typed = hasattr(x, "dtype") or isinstance(x, (list, tuple, int, float, str))
    return floating("xdata", x).to(like) if typed else x


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


@dataclass(frozen=True)
class Deviations:
    """Of the curve from one data set, or from B of m points each, in units of sigma, as least_squares takes them:
    p ↦ f(x, *p) − y, and its slopes."""

    f: Callable[..., Any]
    jac: Any
    x: Any  # a tensor, the points as its last dimension, or whatever else f takes
    y: Tensor  # (m,), or (B, m)
    batched: bool
    own_x: bool  # x has an entry for each data set
    root: Tensor | None  # σ, (m,), or L, (m, m), with the covariance LLᵀ; of many data sets with a leading dimension

    @property
    def x_ndim(self) -> int | None:
        """Dimensions of the x that f takes; None if x is no array."""
        return self.x.ndim - self.own_x if isinstance(self.x, Tensor) else None

    @property
    def args(self) -> tuple[Tensor, ...]:
        """What fun gets besides p: y, and of many data sets all else that is of one of them."""
        if not self.batched:
            return (self.y,)
        return (self.y, *((self.x,) if self.own_x else ()), *(() if self.root is None else (self.root,)))

    @property
    def precision(self) -> Any:
        """1/σ of each point; with a covariance σ given the points before it."""
        assert self.root is not None
        return 1 / (self.root.diagonal(dim1=-2, dim2=-1) if self.root.ndim == 2 + self.batched else self.root)

    def residuals(self, p: Any, *args: Any) -> Any:
        x, y, root = self._split(p, args)
        try:
            model = values(self.f(x, *p), p)
        except Exception as error:  # of f, and so it stays
            if hasattr(error, "add_note"):  # Python 3.11
                shape = f" of shape {tuple(x.shape)}" if hasattr(x, "shape") else ""
                call = f"f(x, {', '.join(names(self.f, len(p)))})"
                error.add_note(f"f was called as {call}: x is a {type(x).__name__}{shape}, the others are numbers")
            raise
        if model.ndim and tuple(model.shape) != tuple(y.shape):
            raise ValueError(mismatch(tuple(model.shape), x, tuple(y.shape)))
        return self._white(model - like(y, p), root)

    def slopes(self, p: Any, *args: Any) -> Any:
        x, _, root = self._split(p, args)
        return self._white(gathered(self.jac(x, *p)), root)

    def _split(self, p: Any, args: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        """x, y and the root of sigma that go with p."""
        y, *rest = args
        x = like(rest.pop(0) if self.own_x else self.x, p)
        return x, y, rest.pop(0) if rest else self.root

    def _white(self, r: Any, root: Any) -> Any:
        """r/σ, or L⁻¹r, of the residuals (m,) of one data set or of their slopes (m, n)."""
        if root is None:
            return r
        r = torch.as_tensor(r).to(root)
        columns = r if r.ndim == 2 else r.unsqueeze(-1)
        if root.ndim == 2:
            columns = torch.linalg.solve_triangular(root, columns, upper=False)
        else:
            columns = columns / root.unsqueeze(-1)
        return columns if r.ndim == 2 else columns.squeeze(-1)


def deviations(
    f: Callable[..., Any], jac: Any, x: Any, y: Tensor, sigma: Any, p: Tensor, batched: bool
) -> Deviations:  # fmt: skip
    """With an x for all data sets or one for each: f, called with parameters p, tells which."""
    own_x = batched and _own_x(f, x, p, y)
    root = None if sigma is None else _root(sigma, y, batched)
    if callable(jac):
        f, jac = (fed(g, x[0] if own_x else x, p[0] if batched else p) for g in (f, jac))
    return Deviations(f, jac, x, y, batched, own_x, root)


def _own_x(f: Callable[..., Any], x: Any, p: Tensor, y: Tensor) -> bool:
    """Whether x has an entry for each data set: f returns a value for each point where it gets the x it is made for."""
    if not isinstance(x, Tensor) or x.ndim < 2 or len(x) != len(y):
        return False
    points = tuple(y.shape[1:])
    for_all, for_each = (shape(f, z, p[0]) == points for z in (x, x[0]))
    if for_all and for_each:
        raise ValueError(
            f"xdata of shape {tuple(x.shape)} may be that of all {len(y)} data sets or hold one for each: f returns "
            f"{points} either way. Pass one for each, with the dimensions that f expects after the first"
        )
    return not for_all


def shape(f: Callable[..., Any], x: Tensor, p: Tensor) -> tuple[int, ...] | None:
    """Of what f returns for this x; None if it takes no such x."""
    for as_given in (Tensor.detach, array):
        try:
            q = as_given(p)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return tuple(values(f(like(x, q), *q), q).shape)
        except Exception as error:  # a function of arrays may raise anything on a tensor, and the reverse
            unless_interrupted(error)
            continue
    return None


def _root(sigma: Any, y: Tensor, batched: bool) -> Tensor:
    """σ, or L with the covariance LLᵀ."""
    s = floating("sigma", sigma).to(y)
    m = y.shape[-1]
    shapes = {0: (), 1: (m,), 2: tuple(y.shape) if batched else (m, m), 3: (len(y), m, m)}
    if s.ndim > 2 + batched or tuple(s.shape) != shapes[s.ndim]:
        raise ValueError(f"sigma has shape {tuple(s.shape)} for ydata of shape {tuple(y.shape)}")
    if s.ndim <= 1 + batched:
        if not bool((s > 0).all()) or bool(s.isinf().expand_as(y).all(-1).any()):
            raise ValueError("sigma must be positive; inf leaves a point out, but not all of them")
        return s.expand_as(y)
    L, info = torch.linalg.cholesky_ex(s)
    if bool(info.any()) or not torch.allclose(s, s.mT, rtol=1e-8):
        raise ValueError("sigma must be a symmetric and positive definite covariance matrix")
    return L  # type: ignore[no-any-return]


def fed(g: Callable[..., Any], x: Any, p: Tensor) -> Callable[..., Any]:
    """g; where it is a function of arrays alone, one that takes tensors too."""

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


def mismatch(model: tuple[int, ...], x: Any, y: tuple[int, ...]) -> str:
    """What to say of a curve that has another shape than the data, by the shape of the x that f got."""
    text = f"f returned shape {model} for ydata of shape {y}"
    if not hasattr(x, "shape"):
        return text
    of_x, m = tuple(x.shape), y[-1]
    text += f" and xdata of shape {of_x}"
    if len(of_x) == 2 and of_x[0] == m != of_x[1]:
        return f"{text}: the points are the last dimension of xdata; pass " + (
            "xdata.reshape(-1)" if of_x[1] == 1 else "xdata.T, of which f gets the variables as x[0], x[1], …"
        )
    if of_x[-1:] != (m,) and of_x:
        return f"{text}: pass as many points in both"
    return f"{text}: f must return a value for each point"


def names(f: Callable[..., Any], n: int) -> list[str]:
    """Of the n parameters that are fitted, as f has them, or by number."""
    known = [name.name for name in parameters(f)[0]]
    return known[:n] if len(known) >= n else [f"parameter {j}" for j in range(n)]


def parameters(f: Callable[..., Any]) -> tuple[list[inspect.Parameter], float]:
    """What f takes after x as far as it is named, and how many in all."""
    try:
        names = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):  # a function of another language
        return [], math.inf
    positional = [name for name in names if name.kind in (name.POSITIONAL_ONLY, name.POSITIONAL_OR_KEYWORD)]
    return positional[1:], math.inf if any(name.kind == name.VAR_POSITIONAL for name in names) else len(positional) - 1


def points(xdata: Any, ydata: Any, device: torch.device | None, batched: bool) -> tuple[Any, Tensor]:
    """x and y in float64."""
    for name, data in (("xdata", xdata), ("ydata", ydata)):
        if data is None or callable(data):
            raise TypeError(f"{name} is {kind(data)}: the arguments are f, xdata and ydata, in this order")
    y = floating("ydata", ydata)
    y = y if device is None else y.to(device)
    x = independent(xdata, y)
    if y.ndim == 0 and isinstance(x, Tensor) and x.ndim:  # one number for all points
        y = y.expand(x.shape[-1])
    if y.ndim != 1 + batched or not y.numel():
        shape = f"ydata has shape {tuple(y.shape)}: it must be"
        if batched:
            raise ValueError(f"{shape} (data sets, points), with batched=True")
        if y.numel() == max(y.shape, default=0) > 0:
            raise ValueError(f"{shape} (points,): pass it flat, as ydata.reshape(-1)")
        rows = "; for a data set in each row pass batched=True" if y.ndim == 2 and y.numel() else ""
        raise ValueError(f"{shape} (points,){rows}")
    return x, y


def require_finite(x: Any, y: Tensor) -> None:
    for name, data in (("xdata", x), ("ydata", y)):
        if isinstance(data, Tensor) and not bool(data.isfinite().all()):
            raise ValueError(f"{name} contains NaN or infinities: leave those points out, or see nan_policy")


def without_nan(x: Any, y: Tensor, sigma: Any, policy: str, batched: bool) -> tuple[Any, Tensor, Any]:
    """The points without NaN, or an error, as nan_policy says."""
    if not any(isinstance(data, Tensor) and bool(data.isnan().any()) for data in (x, y)):
        return x, y, sigma
    if policy == "raise":
        raise ValueError("xdata or ydata contains NaN: leave those points out, nan_policy='omit'")
    if batched:
        raise ValueError("nan_policy='omit' would leave data sets of different length: fit them one by one")
    if not isinstance(x, Tensor) or x.shape[-1:] != y.shape:
        raise ValueError("nan_policy='omit' needs xdata as an array, with the points as its last dimension")
    keep = ~(y.isnan() | x.isnan().reshape(-1, len(y)).any(0))
    if sigma is not None:
        sigma = gathered(sigma)
        sigma = sigma[keep] if sigma.ndim == 1 else sigma[keep][:, keep] if sigma.ndim == 2 else sigma
    return x[..., keep], y[keep], sigma
