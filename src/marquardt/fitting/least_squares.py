"""least_squares: the way from its arguments to the solver and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..surroundings import undisturbed
from . import arguments
from .arrays import floating
from .options import Options
from .problems import Problems, build
from .progress import BAD
from .report import Report
from .result import Result
from .robust import resolve
from .search import search
from .tracked import readable, refuse


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
    Jacobian; one of NumPy arrays alone works through differences, and the message says so. A tensor x0 gives tensors,
    an array or plain numbers give NumPy arrays; without NumPy those give tensors, too. Integers are taken as real
    numbers. fun may change its x, a copy, but must leave args and kwargs as they are; where it works on tensors it gets
    those as tensors of x's precision.

    With `batched` x0 is (B, n), B independent problems. fun is still that of one: torch.func.vmap makes it that of
    many. The arrays in args have a leading dimension B, kwargs are for all. Each problem has its own steps and its own
    end.

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
        f_scale: C, the residual from which on a loss counts less than its square.
        max_nfev: evaluations of fun, at most; None for 400 of each parameter and one more.
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
    arguments.check_function(fun, args, {} if kwargs is None else kwargs, dtype)
    refuse(x0=x0, bounds=bounds, x_scale=x_scale, args=args, kwargs=kwargs, f_scale=f_scale, weights=weights)
    differentiated = torch.is_grad_enabled()
    x, numpy, rounding = arguments.start(x0, batched, dtype)
    arguments.check_choices(method, jac, verbose)
    limit = arguments.evaluations(max_nfev, x.shape[-1])
    options = Options(
        arguments.tolerance("ftol", ftol), arguments.tolerance("xtol", xtol), arguments.tolerance("gtol", gtol), limit,
        geodesic=geodesic, restarts=restarts, capture=capture and x.is_cuda, x_scale=arguments.scale(x_scale, x),
    )  # fmt: skip
    rho = resolve(loss, float(f_scale) if isinstance(f_scale, Real) else f_scale)
    box, lower, upper = arguments.box(bounds, x, rounding)
    x = x.clamp(lower, upper)
    report = Report(rho, batched, numpy, verbose, callback)
    with torch.no_grad():
        problems, note = build(fun, x, jac, tuple(args), kwargs or {}, batched, lower, upper, numpy, differentiated)
        if numpy:
            readable(x)  # as the result must be: before the work rather than after it
        problems = _weighted(problems, weights, x)
        s = search(problems, x, rho, box, options, report)
        if not batched and int(s.status) == BAD:
            raise _not_finite(problems, x)
        return report.end(s, box, problems, note)


def _weighted(problems: Problems, weights: Any, x: Tensor) -> Problems:
    if weights is None:
        return problems
    w = floating("weights", weights).to(x)
    shapes = [(problems.m,), *([(len(x), problems.m)] if problems.batched else [])]
    if tuple(w.shape) not in shapes:
        raise ValueError(f"weights have shape {tuple(w.shape)}: they must be {' or '.join(map(str, shapes))}")
    if not bool(((w >= 0) & w.isfinite()).all()):
        raise ValueError("weights must be finite and at least 0")
    return replace(problems, weight=w.sqrt())


def _not_finite(problems: Problems, x: Tensor) -> ValueError:
    for name, value in (("residual", problems.raw(x)[0]), ("row of the Jacobian", problems.jacobian(x)[0])):
        bad = ~value.isfinite().reshape(problems.m, -1).all(-1)
        if bool(bad.any()):
            return ValueError(
                f"{int(bad.sum())} of {problems.m} residuals at x0: the {name} {int(bad.nonzero()[0])} is not finite. "
                "Start elsewhere, or check the data for NaN"
            )
    return ValueError("the residuals at x0 are too large to square: divide them by their size")
