"""least_squares: the way from its arguments to the solver and back, and what a fit returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ..surroundings import undisturbed
from .arrays import HAS_NUMPY, floating, kind, readable, refuse, tensor
from .factor import Box
from .problems import Problems, build
from .robust import LOSSES, RobustLoss, checked
from .search import search
from .solve import BAD, BOTH, FTOL, GTOL, LIMIT, RUNNING, STOPPED, STUCK, XTOL, Options, Progress

EVALUATIONS = 400  # for each parameter and one more, by default


TOLERANCE = (
    lambda v: v is None or (isinstance(v, Real) and 0 <= float(v) < 1),
    "a number of at least 0 and below 1, or None to switch the test off",
)
RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "jac": (
        lambda v: callable(v) or v in ("auto", "2-point", "3-point"), "pass 'auto', '2-point', '3-point' or a function",
    ),
    "method": (
        lambda v: v in ("lm", "trf"), "pass 'lm'; it takes bounds and losses too ('trf' is accepted for it)",
    ),
    "ftol": TOLERANCE, "xtol": TOLERANCE, "gtol": TOLERANCE,
    "x_scale": (lambda v: not isinstance(v, str) or v == "jac", "pass 'jac' or the scale of the parameters"),
    "loss": (
        lambda v: callable(v) or v in ("linear", *LOSSES),
        f"pass one of {', '.join(map(repr, ('linear', *LOSSES)))}, or a function z → (ρ, ρ', ρ'')",
    ),
    "f_scale": (
        lambda v: isinstance(v, Real) and 0 < float(v) < math.inf, "where inliers end, a finite positive number",
    ),
    "max_nfev": (lambda v: v is None or (isinstance(v, Integral) and int(v) >= 1), "an integer of at least 1"),
    "verbose": (lambda v: isinstance(v, int) and v in (0, 1, 2), "pass 0, 1 or 2"),
    "dtype": (
        lambda v: v in (torch.float32, torch.float64), "pass torch.float64 or torch.float32, in which LAPACK works",
    ),
}  # fmt: skip

MESSAGES = {
    RUNNING: "The fit is under way.",
    STUCK: "No step makes the cost smaller, though the point is not stationary.",
    STOPPED: "`callback` raised StopIteration.",
    BAD: "The residuals or their Jacobian are not finite at the start.",
    LIMIT: "The maximum number of function evaluations is reached.",
    GTOL: "The residuals are orthogonal to the Jacobian to within `gtol`.",
    FTOL: "The cost cannot be made smaller, to within `ftol` or the precision of the arithmetic.",
    XTOL: "The parameters are known to within `xtol`.",
    BOTH: "Both `ftol` and `xtol` are reached.",
}


@dataclass(frozen=True, repr=False)
class Result:
    """SciPy's fields. Of many problems each has a leading dimension, except `message`.

    `fun` is what the function returned; `jac` and `grad` include weights and loss: `jac.T @ jac` approximates the
    Hessian of the cost. `status` is SciPy's, and −3 where no step succeeds at a point that is not stationary.
    """

    x: Any
    cost: Any
    fun: Any
    jac: Any
    grad: Any
    optimality: Any  # largest gradient component among the variables that are not held by a bound
    active_mask: Any  # −1 at a lower bound, 1 at an upper one, 0 between
    nfev: Any
    njev: Any
    status: Any
    message: str
    success: Any

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def keys(self) -> list[str]:
        return list(vars(self))

    def __repr__(self) -> str:
        return "\n".join(f"{name:>12}: {str(self[name]).replace(chr(10), chr(10) + ' ' * 14)}" for name in self.keys())


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
    refuse(x0=x0, bounds=bounds, x_scale=x_scale, args=args, kwargs=kwargs, f_scale=f_scale, weights=weights)
    _check(
        fun, args, kwargs, jac=jac, method=method, ftol=ftol, xtol=xtol, gtol=gtol, x_scale=x_scale, loss=loss,
        f_scale=f_scale, max_nfev=max_nfev, verbose=verbose, dtype=dtype,
    )  # fmt: skip
    differentiated = torch.is_grad_enabled()
    x, numpy, rounding = _start(x0, batched, dtype)
    options = Options(
        float(ftol or 0), float(xtol or 0), float(gtol or 0),
        EVALUATIONS * (x.shape[-1] + 1) if max_nfev is None else int(max_nfev),
        geodesic=geodesic, restarts=restarts, capture=capture and x.is_cuda, x_scale=_scale(x_scale, x),
    )  # fmt: skip
    lower, upper = _checked(bounds, x, rounding)
    x = x.clamp(lower, upper)
    report = Report(numpy, verbose, callback)
    with torch.no_grad():
        problems, note = build(fun, x, jac, tuple(args), kwargs, batched, (lower, upper), numpy, differentiated)
        if numpy:
            readable(x)  # as the result must be: before the work rather than after it
        free = bool(lower.isneginf().all()) and bool(upper.isposinf().all())
        box = None if free else Box(lower, upper)
        rho = RobustLoss(checked(loss) if callable(loss) else LOSSES.get(loss), float(f_scale))
        problems = replace(problems, weight=_root(weights, problems, x), loss=rho, box=box)
        s = search(problems, x, options, report)
        if not batched and int(s.status) == BAD:
            raise _not_finite(problems, x)
        return report.end(problems, s, note)


def _check(fun: Any, args: Any, kwargs: Any, **options: Any) -> None:
    if not callable(fun):
        raise TypeError(f"fun is {kind(fun)}: it must be a function, the first argument of least_squares(fun, x0)")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple of what fun takes after x, not {kind(args)}: for one, args=(data,)")
    if not isinstance(kwargs, dict):
        raise TypeError(f"kwargs must be a dict, not {kind(kwargs)}")
    for name, value in options.items():
        fine, way = RULES[name]
        if not fine(value):
            raise ValueError(f"{name}={value!r}: {way}")


def _start(x0: Any, batched: bool, dtype: torch.dtype) -> tuple[Tensor, bool, float]:
    """x0 as (B, n), whether the results are NumPy arrays, and its relative rounding where that is coarser."""
    numpy = not isinstance(x0, Tensor) and HAS_NUMPY
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


def _scale(x_scale: Any, x: Tensor) -> Tensor | None:
    if isinstance(x_scale, str):
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


def describe(problems: Problems, s: Progress, raw: Tensor, notes: list[str], numpy: bool) -> Result:
    """The result of what has been reached; `raw` are the residuals without weights."""
    ft, J = problems.loss.corrected(s.f, s.J)
    g = (J.mT @ ft.unsqueeze(-1)).squeeze(-1)  # (B, n)
    box = problems.box
    held = torch.zeros_like(s.x, dtype=torch.bool) if box is None else box.held(s.x, g)
    side = torch.zeros_like(s.x, dtype=torch.int64) if box is None else box.side(s.x)
    values = {  # copies, where they may be what the functions were given
        "x": s.x, "cost": 0.5 * s.scale**2, "fun": raw.clone(), "jac": J.clone(), "grad": g,
        "optimality": torch.where(held, 0, g).abs().amax(-1), "active_mask": side,
        "nfev": s.nfev, "njev": s.njev, "status": s.status, "success": s.status > 0,
    }  # fmt: skip
    if problems.batched:
        text = f"{int((s.status > 0).sum()):,} of {len(s.x):,} problems solved."
        for code, message in MESSAGES.items():
            count = int((s.status == code).sum())
            text += f" {count:,}: {message}" if count else ""
        out: dict[str, Any] = {k: v.cpu().numpy() if numpy else v for k, v in values.items()}
    else:
        text = MESSAGES[int(s.status)]
        out = {k: v[0] for k, v in values.items()}
        out = {k: v.item() if v.ndim == 0 else v.cpu().numpy() if numpy else v for k, v in out.items()}
    return Result(message=" ".join([text, *notes]), **out)


@dataclass(frozen=True)
class Report:
    """Lines of text and the user's callback after each iteration, and the result at the end."""

    numpy: bool
    verbose: int
    callback: Callable[[Result], Any] | None

    def __call__(self, problems: Problems, s: Progress, nit: int) -> None:
        """After an iteration."""
        if self.verbose == 2:
            if nit == 0:
                print(f"{'iteration':>9} {'running':>9} {'evaluations':>11} {'cost':>13} {'cosine':>10}")
            running = int((s.status == RUNNING).sum())
            print(f"{nit:>9} {running:>9} {_brief(s.nfev):>11} {_brief(s.scale**2 / 2):>13} {_brief(s.cosine):>10}")
        if self.callback is not None:
            s = s.copy()  # a recording goes on in the same memory
            self.callback(describe(problems, s, s.f, [f"Iteration {nit}."], self.numpy))

    def end(self, problems: Problems, s: Progress, note: str) -> Result:
        """`note` says how the Jacobian comes about, if that is worth a word."""
        n, notes = s.x.shape[-1], [note] if note else []
        m = problems.m if problems.weight is None else int((problems.weight != 0).sum(-1).min())
        if m < n:
            notes.append(f"There are fewer residuals ({m}) than parameters ({n}): the minimum is not unique.")
        result = describe(problems, s, problems.raw(s.x), notes, self.numpy)
        if self.verbose:
            cost, nfev, njev = map(_brief, (s.scale**2 / 2, s.nfev, s.njev))
            print(f"{result.message}\ncost {cost}, {nfev} evaluations, {njev} Jacobians")
        return result


def _brief(values: Tensor) -> str:
    """Of many problems the median."""
    value = values.double().median().item() if len(values) > 1 else values.item()
    return f"{value:.6g}"
