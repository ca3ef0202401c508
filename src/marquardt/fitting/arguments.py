"""The arguments of least_squares, checked one by one."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from .arrays import floating, has_numpy, kind, tensor
from .bounds import Box

EVALUATIONS = 400  # for each parameter and one more, by default


def check_choices(method: str, jac: Any, verbose: int) -> None:
    if method not in ("lm", "trf"):
        raise ValueError(f"method={method!r}: pass 'lm'; it takes bounds and losses too ('trf' is accepted for it)")
    if not callable(jac) and jac not in ("auto", "2-point", "3-point"):
        raise ValueError(f"jac={jac!r}: pass 'auto', '2-point', '3-point' or a function")
    if not isinstance(verbose, int) or verbose not in (0, 1, 2):
        raise ValueError(f"verbose={verbose!r}: pass 0, 1 or 2")


def check_function(fun: Any, args: Any, kwargs: Any, dtype: Any) -> None:
    if not callable(fun):
        raise TypeError(f"fun is {kind(fun)}: it must be a function, the first argument of least_squares(fun, x0)")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple of what fun takes after x, not {kind(args)}: for one, args=(data,)")
    if not isinstance(kwargs, dict):
        raise TypeError(f"kwargs must be a dict, not {kind(kwargs)}")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype={dtype!r}: pass torch.float64 or torch.float32, in which LAPACK works")


def start(x0: Any, batched: bool, dtype: torch.dtype) -> tuple[Tensor, bool, float]:
    """x0 as (B, n), whether the results are NumPy arrays, and its relative rounding where that is coarser."""
    numpy = not isinstance(x0, Tensor) and has_numpy()
    try:
        x = tensor(x0)
    except (TypeError, ValueError, RuntimeError) as error:
        what = kind(x0) if callable(x0) else f"x0={x0!r}"
        raise TypeError(f"{what}: the start must be a vector of real numbers, as in least_squares(fun, x0)") from error
    if x.is_complex():
        raise TypeError("x0 is complex: fit the real and imaginary parts as separate real parameters")
    if x.ndim == 0 and not batched:
        x = x.reshape(1)
    if x.ndim != 1 + batched or 0 in x.shape:
        wanted = (
            "(problems, parameters), batched=True" if batched else "(parameters,); for many problems pass batched=True"
        )
        raise ValueError(f"x0 has shape {tuple(x.shape)}: it must be {wanted}")
    given = torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0
    x = x.detach().to(dtype, copy=True).reshape(-1, x.shape[-1])
    if not bool(x.isfinite().all()):
        raise ValueError(f"x0 is not finite at {tuple((~x.isfinite()).nonzero()[0].tolist()[not batched :])}")
    return x, numpy, given if given > torch.finfo(dtype).eps else 0.0


def evaluations(max_nfev: int | None, n: int) -> int:
    """The most that n parameters may take."""
    limit = EVALUATIONS * (n + 1) if max_nfev is None else max_nfev
    if not isinstance(limit, Integral) or limit < 1:
        raise ValueError(f"max_nfev={max_nfev!r}: an integer of at least 1")
    return int(limit)


def tolerance(name: str, value: float | None) -> float:
    if value is None:
        return 0.0
    if not isinstance(value, Real) or not 0 <= value < 1:
        raise ValueError(f"{name}={value!r}: a number of at least 0 and below 1, or None to switch the test off")
    return float(value)


def scale(x_scale: Any, x: Tensor) -> Tensor | None:
    if isinstance(x_scale, str):
        if x_scale != "jac":
            raise ValueError(f"x_scale={x_scale!r}: pass 'jac' or the scale of the parameters")
        return None
    found = _fitted("x_scale", x_scale, x[:1])[0]
    if not bool(((found > 0) & found.isfinite()).all()):
        raise ValueError(f"x_scale={x_scale!r}: the scales must be finite and positive")
    return found


def box(bounds: Any, x: Tensor, rounding: float) -> tuple[Box | None, Tensor, Tensor]:
    """`rounding` is that of x0: 0.1 in float32 is more than 0.1."""
    lower, upper = limits(bounds, x)
    if bool((lower.isnan() | upper.isnan()).any()):
        raise ValueError("bounds contain NaN: pass -inf or inf where there is none")
    slack = rounding / 2 * x.abs()
    outside = (x + slack < lower) | (x - slack > upper)
    order = "bounds are (lower, upper), each a number or one for each parameter"
    for wrong, text in ((lower > upper, "the lower bound lies above the upper one"),
                        (outside, "x0 is infeasible: it lies outside the bounds")):  # fmt: skip
        if bool(wrong.any()):
            b, j = wrong.nonzero()[0].tolist()
            values = ", ".join(f"{k} {float(v[b, j]):g}" for k, v in (("lower", lower), ("x0", x), ("upper", upper)))
            raise ValueError(f"{text} at parameter {j}{f' of problem {b}' if len(x) > 1 else ''}: {values}; {order}")
    free = bool(lower.isneginf().all()) and bool(upper.isposinf().all())
    return None if free else Box(lower, upper), lower, upper


def limits(bounds: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The lower and the upper bounds, (B, n) each."""
    if hasattr(bounds, "lb"):  # scipy.optimize.Bounds
        bounds = (bounds.lb, bounds.ub)
    try:
        lower, upper = bounds
    except (TypeError, ValueError):
        raise ValueError(f"bounds={bounds!r}: pass (lower, upper), each a number or one for each parameter") from None
    return _fitted("the lower bound", lower, x), _fitted("the upper bound", upper, x)


def _fitted(name: str, value: Any, x: Tensor) -> Tensor:
    """A number, one for each parameter, or one for each parameter of each problem, as (B, n)."""
    given = floating(name, value).to(x)
    try:
        return given.expand_as(x)
    except RuntimeError:
        wanted = " or ".join(str(tuple(x.shape[i:])) for i in range(len(x) == 1, 2))
        raise ValueError(f"{name} has shape {tuple(given.shape)}: it must be a number or {wanted}") from None
