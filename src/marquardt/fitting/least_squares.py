"""least_squares: the way from its arguments to the solver and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ..surroundings import undisturbed
from .arrays import floating, has_numpy, kind, readable, refuse, tensor
from .factor import Box
from .problems import Problems, build
from .result import Report, Result
from .robust import resolve
from .search import search
from .solve import BAD, Options

EVALUATIONS = 400  # for each parameter and one more, by default


@undisturbed
def least_squares(
    fun: Callable[..., Any], x0: Any, jac: Any = "auto", bounds: Any = (-math.inf, math.inf), method: str = "lm",
    ftol: float | None = None, xtol: float | None = 1e-10, gtol: float | None = 1e-10, x_scale: Any = "jac",
    loss: Any = "linear", f_scale: float = 1.0, max_nfev: int | None = None, verbose: int = 0,
    args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, callback: Callable[[Result], Any] | None = None,
    *, weights: Any = None, batched: bool = False, geodesic: bool = False, restarts: bool = True,
    capture: bool = False, dtype: torch.dtype = torch.float64,
) -> Result:  # fmt: skip
    """Minimise ½Σ C²ρ(wᵢfᵢ(x)²/C²) within bounds: scipy.optimize.least_squares on tensors, one problem or many.

    fun(x, *args, **kwargs) → residuals of one problem, x of shape (n,). A function of torch tensors gets an exact
    Jacobian; for a function that works on NumPy arrays alone the Jacobian is formed by differences, and the message
    says so. The result holds tensors if x0 is a tensor, and NumPy arrays if x0 is an array or plain numbers (tensors if
    NumPy is not installed). Integers are converted to real numbers. fun may change its x, which is a copy, but not args
    and kwargs; a function of tensors receives these as tensors of x's precision.

    With `batched` x0 has the shape (B, n), for B independent problems. fun is still the function of one problem;
    torch.func.vmap applies it to all. The arrays in args have a leading dimension B, kwargs are the same for all. Every
    problem is stepped and stopped separately.

    Args:
        fun: the residuals of one problem.
        x0: where it starts, (n,).
        jac: "auto", "2-point", "3-point", or a function like fun that returns (m, n).
        bounds: (lower, upper), numbers or one for each parameter; with `batched` also (B, n).
        method: "lm" or "trf", two names for the one algorithm.
        ftol: relative decrease of the cost, predicted and actual; None for as far as the arithmetic allows.
        xtol: estimated relative error of every parameter.
        gtol: cosine of the angle between the residuals and the space that the columns of the Jacobian span.
        x_scale: "jac", or the scale of the parameters.
        loss: "linear", "huber", "soft_l1", "cauchy", "arctan", or a function z → (ρ, ρ', ρ'').
        f_scale: C, the residual above which a loss counts less than its square.
        max_nfev: evaluations of fun, at most; None for 400·(n + 1).
        verbose: 0, 1 or 2.
        args: of fun, after x.
        kwargs: of fun.
        callback: called with a Result after each iteration; StopIteration ends the fit.
        weights: of the squared residuals.
        batched: whether there are many problems.
        geodesic: second-order correction of each step.
        restarts: if the fit ends in no minimum, try again from x0 with smaller steps; nfev counts all.
        capture: on a GPU an iteration is recorded as a CUDA graph and replayed, so the function is seldom called but
            must always do the same on tensors.
        dtype: of the arithmetic.

    Returns:
        SciPy's fields: `x`, `cost`, `fun`, `jac`, `status`, `message`, `success`, …

    >>> rosenbrock = lambda p: torch.stack([10 * (p[1] - p[0] ** 2), 1 - p[0]])
    >>> mq.least_squares(rosenbrock, torch.tensor([-1.2, 1.0], dtype=torch.float64)).x
    tensor([1., 1.], dtype=torch.float64)
    """
    kwargs = {} if kwargs is None else kwargs
    _check(fun, args, kwargs, dtype, method, jac, verbose, max_nfev)
    refuse(x0=x0, bounds=bounds, x_scale=x_scale, args=args, kwargs=kwargs, f_scale=f_scale, weights=weights)
    differentiated = torch.is_grad_enabled()
    x, numpy, rounding = _start(x0, batched, dtype)
    options = Options(
        _tolerance("ftol", ftol), _tolerance("xtol", xtol), _tolerance("gtol", gtol),
        EVALUATIONS * (x.shape[-1] + 1) if max_nfev is None else int(max_nfev),
        geodesic=geodesic, restarts=restarts, capture=capture and x.is_cuda, x_scale=_scale(x_scale, x),
    )  # fmt: skip
    rho = resolve(loss, float(f_scale) if isinstance(f_scale, Real) else f_scale)
    lower, upper = _checked(bounds, x, rounding)
    x = x.clamp(lower, upper)
    report = Report(numpy, verbose, callback)
    with torch.no_grad():
        problems, note = build(fun, x, jac, tuple(args), kwargs, batched, lower, upper, numpy, differentiated)
        if numpy:
            readable(x)  # as the result must be: before the work rather than after it
        free = bool(lower.isneginf().all()) and bool(upper.isposinf().all())
        problems = replace(
            problems, weight=_root(weights, problems, x), loss=rho, box=None if free else Box(lower, upper)
        )
        s = search(problems, x, options, report)
        if not batched and int(s.status) == BAD:
            raise _not_finite(problems, x)
        return report.end(problems, s, note)


def _check(
    fun: Any, args: Any, kwargs: Any, dtype: Any, method: str, jac: Any, verbose: int, max_nfev: Any
) -> None:  # fmt: skip
    if not callable(fun):
        raise TypeError(f"fun is {kind(fun)}: it must be a function, the first argument of least_squares(fun, x0)")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple of what fun takes after x, not {kind(args)}: for one, args=(data,)")
    if not isinstance(kwargs, dict):
        raise TypeError(f"kwargs must be a dict, not {kind(kwargs)}")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype={dtype!r}: pass torch.float64 or torch.float32, in which LAPACK works")
    if method not in ("lm", "trf"):
        raise ValueError(f"method={method!r}: pass 'lm'; it takes bounds and losses too ('trf' is accepted for it)")
    if not callable(jac) and jac not in ("auto", "2-point", "3-point"):
        raise ValueError(f"jac={jac!r}: pass 'auto', '2-point', '3-point' or a function")
    if not isinstance(verbose, int) or verbose not in (0, 1, 2):
        raise ValueError(f"verbose={verbose!r}: pass 0, 1 or 2")
    if max_nfev is not None and (not isinstance(max_nfev, Integral) or max_nfev < 1):
        raise ValueError(f"max_nfev={max_nfev!r}: an integer of at least 1")


def _start(x0: Any, batched: bool, dtype: torch.dtype) -> tuple[Tensor, bool, float]:
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


def _tolerance(name: str, value: float | None) -> float:
    if value is None:
        return 0.0
    if not isinstance(value, Real) or not 0 <= value < 1:
        raise ValueError(f"{name}={value!r}: a number of at least 0 and below 1, or None to switch the test off")
    return float(value)


def _scale(x_scale: Any, x: Tensor) -> Tensor | None:
    if isinstance(x_scale, str):
        if x_scale != "jac":
            raise ValueError(f"x_scale={x_scale!r}: pass 'jac' or the scale of the parameters")
        return None
    scale = _expanded("x_scale", x_scale, x[:1])[0]
    if not bool(((scale > 0) & scale.isfinite()).all()):
        raise ValueError(f"x_scale={x_scale!r}: the scales must be finite and positive")
    return scale


def _checked(bounds: Any, x: Tensor, rounding: float) -> tuple[Tensor, Tensor]:
    """The bounds of each problem, with x between them up to the rounding of x0: 0.1 in float32 is more than 0.1."""
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
    return lower, upper


def limits(bounds: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The lower and the upper bounds, (B, n) each."""
    if hasattr(bounds, "lb"):  # scipy.optimize.Bounds
        bounds = (bounds.lb, bounds.ub)
    try:
        lower, upper = bounds
    except (TypeError, ValueError):
        raise ValueError(f"bounds={bounds!r}: pass (lower, upper), each a number or one for each parameter") from None
    return _expanded("the lower bound", lower, x), _expanded("the upper bound", upper, x)


def _expanded(name: str, value: Any, x: Tensor) -> Tensor:
    """A number, one for each parameter, or one for each parameter of each problem, as (B, n)."""
    given = floating(name, value).to(x)
    try:
        return given.expand_as(x)
    except RuntimeError:
        wanted = " or ".join(str(tuple(x.shape[i:])) for i in range(len(x) == 1, 2))
        raise ValueError(f"{name} has shape {tuple(given.shape)}: it must be a number or {wanted}") from None


def _root(weights: Any, problems: Problems, x: Tensor) -> Tensor | None:
    """√w: (m,) or (B, m)."""
    if weights is None:
        return None
    w = floating("weights", weights).to(x)
    shapes = [(problems.m,), *([(len(x), problems.m)] if problems.batched else [])]
    if tuple(w.shape) not in shapes:
        raise ValueError(f"weights have shape {tuple(w.shape)}: they must be {' or '.join(map(str, shapes))}")
    if not bool(((w >= 0) & w.isfinite()).all()):
        raise ValueError("weights must be finite and at least 0")
    return w.sqrt()


def _not_finite(problems: Problems, x: Tensor) -> ValueError:
    for name, value in (("residual", problems.raw(x)[0]), ("row of the Jacobian", problems.jacobian(x)[0])):
        bad = ~value.isfinite().reshape(problems.m, -1).all(-1)
        if bool(bad.any()):
            return ValueError(
                f"{int(bad.sum())} of {problems.m} residuals at x0: the {name} {int(bad.nonzero()[0])} is not finite. "
                "Start elsewhere, or check the data for NaN"
            )
    return ValueError("the residuals at x0 are too large to square: divide them by their size")
