"""curve_fit: parameters of a curve by least squares, their covariance, and bands around the curve."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from ..surroundings import undisturbed, unless_interrupted
from .arrays import HAS_NUMPY, array, floating, gathered, kind, like, readable, refuse, returned, tensor
from .least_squares import MESSAGES, Result, least_squares, limits
from .problems import build

LIGHT = 1e-5  # of the largest 1/σ: what has less may be there to fill up an array
NOTHING = 1e-8  # part of the cost, and of what determines one parameter, that such a point has at most
SHARE = 1e-3  # of a direction that the data leave free: parameters with less have no part in it


@undisturbed
def curve_fit(
    f: Callable[..., Any],
    xdata: Any,
    ydata: Any,
    p0: Any = None,
    sigma: Any = None,
    absolute_sigma: bool = False,
    check_finite: bool | None = None,
    bounds: Any = (-math.inf, math.inf),
    method: str | None = None,
    jac: Any = None,
    *,
    full_output: bool = False,
    nan_policy: str | None = None,
    batched: bool = False,
    **kwargs: Any,
) -> CurveFit:
    """Fit y = f(x, *p) to data: scipy.optimize.curve_fit with exact derivatives, and bands.

    The result holds arrays for arrays and plain numbers (tensors if NumPy is not installed), and tensors for tensors.

    With `batched` ydata is (B, m), B data sets; p0 and each bound (B, n) or (n,), sigma (m,), (B, m) or (B, m, m).
    xdata is shared by all sets, (m,) or (k, m), or has a leading dimension B, one for each set; if k = B, the reading
    in which f returns m values is taken. A single fit that fails raises a RuntimeError; with `batched` every fit has
    its own success, status and message.

    Args:
        f: the curve, f(x, *p), of torch tensors; of NumPy arrays it works through differences.
        xdata: where the curve is observed: (m,), (k, m), or anything that f takes.
        ydata: observations, (m,).
        p0: where the fit starts; None for ones, or the middle of finite bounds.
        sigma: standard deviations (m,), or the covariance (m, m) of ydata; inf leaves a point out.
        absolute_sigma: whether sigma is known; otherwise pcov is scaled by the residuals.
        check_finite: whether NaN and infinities are refused; None refuses them if no `nan_policy` is given.
        bounds: (lower, upper), numbers or one for each parameter; equal ones fix it, with an error of 0.
        method: as in least_squares; None for "lm".
        jac: jac(x, *p) → (m, n), or as in least_squares; None for exact derivatives.
        full_output: an option of SciPy that is refused: its content is in `.result`.
        nan_policy: "raise", or "omit" to leave out the points with NaN.
        batched: whether there are many data sets.
        kwargs: of least_squares; `maxfev` is `max_nfev`.

    Returns:
        popt and pcov, to unpack, with `perr`, `predict`, `confidence_band` and `prediction_band`.

    >>> t = torch.linspace(0, 4, 50)
    >>> fit = mq.curve_fit(lambda t, a, b: a * torch.exp(-b * t), t, 2.5 * torch.exp(-1.3 * t))
    >>> fit.popt
    tensor([2.5000, 1.3000], dtype=torch.float64)
    """
    _check(f, full_output, nan_policy, kwargs)
    refuse(xdata=xdata, ydata=ydata, p0=p0, sigma=sigma, bounds=bounds)
    tensors = [a for a in (xdata, ydata, p0) if isinstance(a, Tensor)]
    device = next((t.device for t in tensors if t.device.type != "cpu"), None)
    x, y = _points(xdata, ydata, device, batched)
    x, y, sigma = _finite(x, y, sigma, nan_policy is None if check_finite is None else check_finite, nan_policy)
    start = _guess(f, p0, bounds, y, batched)
    data = Deviations(f, jac, x, y, sigma, start, batched)
    if "maxfev" in kwargs:
        kwargs["max_nfev"] = kwargs.pop("maxfev") or None  # 0 is SciPy's default
    result = least_squares(
        data.residuals, readable(start) if HAS_NUMPY and not tensors else start,
        jac=data.slopes if callable(jac) else jac or "auto", bounds=bounds, method=method or "lm",
        args=data.args, batched=batched, **kwargs,
    )  # fmt: skip
    if not batched and not result.success:
        raise RuntimeError(f"no fit: {result.message}")
    return _fit(result, f, data, bounds, kwargs.get("weights"), absolute_sigma)


def _check(f: Any, full_output: bool, nan_policy: str | None, kwargs: dict[str, Any]) -> None:
    if not callable(f):
        raise TypeError(f"f is {kind(f)}: it must be the function, the first of curve_fit(f, xdata, ydata)")
    if "args" in kwargs or "kwargs" in kwargs:
        raise TypeError(
            "curve_fit takes no args or kwargs for f: pass lambda x, a, b: f(x, a, b, more) with them inside"
        )
    if full_output:
        raise ValueError(
            "full_output=True: curve_fit returns popt and pcov; the rest is in curve_fit(f, xdata, ydata).result"
        )
    if nan_policy not in (None, "raise", "omit"):
        raise ValueError(f"nan_policy={nan_policy!r}: pass None, 'raise' or 'omit'")
    if "maxfev" in kwargs and "max_nfev" in kwargs:
        raise TypeError("maxfev and max_nfev are one and the same: pass one of them")


def _points(xdata: Any, ydata: Any, device: torch.device | None, batched: bool) -> tuple[Any, Tensor]:
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
        wanted = "(data sets, points), with batched=True" if batched else "(points,)"
        if not batched and y.numel() == max(y.shape, default=0) > 0:
            wanted += ": pass it flat, as ydata.reshape(-1)"
        elif not batched and y.ndim == 2 and y.numel():
            wanted += "; for a data set in each row pass batched=True"
        raise ValueError(f"ydata has shape {tuple(y.shape)}: it must be {wanted}")
    return x, y


def _finite(x: Any, y: Tensor, sigma: Any, required: bool, policy: str | None) -> tuple[Any, Tensor, Any]:
    """The data, finite where that is required; the points without NaN, or an error, as nan_policy says."""
    data = {name: t for name, t in (("xdata", x), ("ydata", y)) if isinstance(t, Tensor)}
    for name, t in data.items() if required else ():
        if not bool(t.isfinite().all()):
            raise ValueError(f"{name} contains NaN or infinities: leave those points out, or see nan_policy")
    if policy is None or not any(bool(t.isnan().any()) for t in data.values()):
        return x, y, sigma
    if policy == "raise":
        raise ValueError("xdata or ydata contains NaN: leave those points out, nan_policy='omit'")
    if y.ndim > 1:
        raise ValueError("nan_policy='omit' would leave data sets of different length: fit them one by one")
    if not isinstance(x, Tensor) or x.shape[-1:] != y.shape:
        raise ValueError("nan_policy='omit' needs xdata as an array, with the points as its last dimension")
    keep = ~(y.isnan() | x.isnan().reshape(-1, len(y)).any(0))
    if sigma is not None:
        sigma = gathered(sigma)
        sigma = sigma[keep] if sigma.ndim == 1 else sigma[keep][:, keep] if sigma.ndim == 2 else sigma
    return x[..., keep], y[keep], sigma


def _guess(f: Callable[..., Any], p0: Any, bounds: Any, y: Tensor, batched: bool) -> Tensor:
    """The start, as given or from the bounds: (n,), or (B, n)."""
    named, most = parameters(f)
    if p0 is not None:
        p = floating("p0", p0).to(y.device)
        p = p.reshape(-1) if p.ndim == 0 else p
        if not sum(name.default is name.empty for name in named) <= p.shape[-1] <= most:
            takes = f"{len(named)} parameters after x ({', '.join(name.name for name in named)})"
            way = "pass a number for each of them"
            if len(named) == 1:  # a function of one vector, as of least_squares
                way += "; it is called as f(x, *p), so for an f(x, p) of a vector pass lambda x, *p: f(x, p)"
            raise ValueError(f"p0 has length {p.shape[-1]}, f takes {takes}: {way}")
        if p.ndim > 1 + batched or 0 in p.shape or (p.ndim == 2 and len(p) != len(y)):
            sets, wanted = (f" for {len(y)} data sets", ", or a row for each set") if batched else ("", "")
            raise ValueError(f"p0 has shape {tuple(p.shape)}{sets}: pass a number for each parameter, (n,){wanted}")
        if not bool(p.isfinite().all()):
            raise ValueError(f"p0 is not finite: {p.tolist()}")
        return p.expand(len(y), -1).clone() if batched and p.ndim == 1 else p
    if not named:
        raise ValueError(
            "p0 is needed: the signature of f does not say how many parameters there are after x, as f(x, a, b) does"
        )
    p = y.new_ones(len(y) if batched else 1, len(named))
    low, high = limits(bounds, p)
    below = torch.where(high.isfinite(), high - 1, p)
    above = torch.where(high.isfinite(), (low + high) / 2, low + 1)
    p = torch.where(low.isfinite(), above, below)
    return p if batched else p[0]


def parameters(f: Callable[..., Any]) -> tuple[list[inspect.Parameter], float]:
    """What f takes after x as far as it is named, and how many in all."""
    try:
        names = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):  # a function of another language
        return [], math.inf
    positional = [name for name in names if name.kind in (name.POSITIONAL_ONLY, name.POSITIONAL_OR_KEYWORD)]
    return positional[1:], math.inf if any(name.kind == name.VAR_POSITIONAL for name in names) else len(positional) - 1


def names(f: Callable[..., Any], n: int) -> list[str]:
    """Of the n parameters that are fitted, as f has them, or by number."""
    known = [name.name for name in parameters(f)[0]]
    return known[:n] if len(known) >= n else [f"parameter {j}" for j in range(n)]


def _fit(
    result: Result, f: Callable[..., Any], data: Deviations, bounds: Any, weights: Any, known: bool
) -> CurveFit:  # fmt: skip
    x, J, cost, r = (tensor(part) for part in (result.x, result.jac, result.cost, result.fun))
    if not data.batched:
        x, J, cost, r = (part.unsqueeze(0) for part in (x, J, cost, r))
    lower, upper = limits(bounds, x)
    size = torch.ones_like(r) if weights is None else tensor(weights).to(r).sqrt().expand_as(r)
    light = size if data.sigma is None else size / data.sigma.to(r)
    errors = Covariance(J, cost, r * size, light, lower == upper, known)
    missing = errors.unknown & torch.as_tensor(result.success)  # of the others `success` tells
    if bool(missing.any()):
        i = int(missing.int().argmax())
        which = f" of {int(missing.sum())} of {len(x)} data sets" if data.batched else ""
        first = f"in data set {i} " if data.batched else ""
        called = names(f, x.shape[-1])
        reason = errors.reason(i, called)
        if "x" in called:
            reason += f". Note that f is called with xdata first, and x is fitted: f(xdata, {', '.join(called)})"
        warnings.warn(
            f"the covariance of the parameters{which} could not be estimated; infinite: {first}{reason}", stacklevel=4
        )
    return CurveFit(
        result.x, like(errors.matrix if data.batched else errors.matrix[0], result.x), result, f,
        like(errors.dof, result.x) if data.batched else int(errors.dof),
        errors.noise if data.batched else float(errors.noise),
        known, data.root is not None or weights is not None, data.batched, data.x_ndim,
    )  # fmt: skip


# The curve of a user, who wrote it for tensors or for arrays.


def independent(x: Any, like: Tensor) -> Any:
    """x as a tensor like this one if it is an array or numbers; whatever else f takes stays as it is."""
    typed = hasattr(x, "dtype") or isinstance(x, (list, tuple, int, float, str))
    return floating("xdata", x).to(like) if typed else x


def values(model: Any, p: Any) -> Tensor:
    """What f returned for the parameters p."""
    if isinstance(model, (list, tuple)):
        shapes = {tuple(getattr(value, "shape", ())) for value in model}
        if len(shapes) > 1:
            raise ValueError(
                f"f returned a {type(model).__name__} of shapes {sorted(shapes)}: it must return the curve"
            )
    return returned("f", model, p, "the curve at x")


class Deviations:
    """Of the curve from one data set, or from B of m points each, in units of sigma, as least_squares takes them:
    p ↦ f(x, *p) − y, and its slopes. f, called with parameters p, tells whether x is one for all or has one for each.
    """

    def __init__(
        self, f: Callable[..., Any], jac: Any, x: Any, y: Tensor, sigma: Any, p: Tensor, batched: bool
    ) -> None:
        self.x, self.batched = x, batched  # the points are its last dimension; or whatever else f takes
        self.own_x = batched and _own_x(f, x, p, y)
        # σ, (m,), or L, (m, m), with the covariance LLᵀ; of many data sets with a leading dimension
        self.root = None if sigma is None else _root(sigma, y, batched)
        if callable(jac):
            f, jac = (fed(g, x[0] if self.own_x else x, p[0] if batched else p) for g in (f, jac))
        self.f, self.jac = f, jac
        # σ of each point; with a covariance that given the points before it
        self.sigma = self.root
        if self.root is not None and self.root.ndim == 2 + batched:
            self.sigma = self.root.diagonal(dim1=-2, dim2=-1)
        # Dimensions of the x that f takes; None if x is no array.
        self.x_ndim = x.ndim - self.own_x if isinstance(x, Tensor) else None
        # What fun gets besides p: y, and of many data sets all else that is of one of them.
        each = ((y, True), (x, self.own_x), (self.root, batched and self.root is not None))
        self.args = tuple(t for t, own in each if own)

    def residuals(self, p: Any, *args: Any) -> Tensor:
        x, y, root = self._split(p, args)
        try:
            model = values(self.f(x, *p), p).to(y.device)
        except Exception as error:  # of f, and so it stays
            if hasattr(error, "add_note"):  # Python 3.11
                shape = f" of shape {tuple(x.shape)}" if hasattr(x, "shape") else ""
                call = f"f(x, {', '.join(names(self.f, len(p)))})"
                error.add_note(f"f was called as {call}: x is a {type(x).__name__}{shape}, the others are numbers")
            raise
        if model.ndim and model.shape != y.shape:
            raise ValueError(mismatch(tuple(model.shape), x, tuple(y.shape)))
        return _white(model - y, root)

    def slopes(self, p: Any, *args: Any) -> Tensor:
        x, _, root = self._split(p, args)
        return _white(gathered(self.jac(x, *p)), root)

    def _split(self, p: Any, args: tuple[Any, ...]) -> tuple[Any, Tensor, Tensor | None]:
        """x, y and the root of sigma that go with p."""
        y, *rest = args
        x = like(rest.pop(0) if self.own_x else self.x, p)
        return x, y, rest.pop(0) if rest else self.root


def _white(r: Tensor, root: Tensor | None) -> Tensor:
    """r/σ, or L⁻¹r, of the residuals (m,) of one data set or of their slopes (m, n)."""
    if root is None:
        return r
    columns = r.to(root).reshape(len(r), -1)
    if root.ndim == 2:
        columns = torch.linalg.solve_triangular(root, columns, upper=False)
    else:
        columns = columns / root.unsqueeze(-1)
    return columns.reshape(r.shape)


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
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return tuple(values(fed(f, x, p)(x, *p), p).shape)
    except Exception as error:  # f may raise anything
        unless_interrupted(error)
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

    for function in (g, on_arrays):
        try:
            with warnings.catch_warnings():
                # NumPy's, for what it does with tensors.
                warnings.simplefilter("error" if function is g else "ignore", DeprecationWarning)
                function(x, *p)
            return function
        except Exception as error:  # a function of arrays may raise anything on a tensor
            unless_interrupted(error)
    return g  # it fails on both: the fit will tell


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


# What the data say about the parameters.


class Covariance:
    """noise²(JᵀJ)⁻¹ of B fits with n parameters each; infinite where the data do not determine it.

    By an SVD of J with columns of length 1, for the parameters that are not fixed. J (B, m, n) is weighted, as the
    residuals `own` (B, m) are; `weight` (B, m) is that of these, 1/σ, and `fixed` (B, n) says which bounds are equal.
    `known`: whether σ is, so that the noise is 1.
    """

    def __init__(self, J: Tensor, cost: Tensor, own: Tensor, weight: Tensor, fixed: Tensor, known: bool) -> None:
        J = torch.where(fixed.unsqueeze(-2), 0, J)
        length = J.norm(dim=-2)
        unit = torch.where(length > 0, length, 1)
        U, s, Vh = torch.linalg.svd((J / unit.unsqueeze(-2)).nan_to_num(0.0, 0.0, 0.0), full_matrices=False)
        inside = s > max(J.shape[-2:]) * torch.finfo(J.dtype).eps * s[..., :1]

        # A point without weight is no observation, and one of almost none neither if nothing shows that it is there.
        # One of little weight may matter: where the curve varies by decades, or one point is nearly exact.
        leverage = (U * inside.unsqueeze(-2)).square().sum(-1)
        unseen = (leverage <= NOTHING) & (own.square() <= 2 * NOTHING * cost.unsqueeze(-1))
        counts = ~((weight == 0) | ((weight <= LIGHT * weight.amax(-1, keepdim=True)) & unseen))
        free = (~fixed).sum(-1)
        self.known, self.points = known, counts.sum(-1)  # those with weight, (B,)
        self.dof = self.points - free  # (B,)
        # Standard deviation of a point with sigma = 1: (B,)
        self.noise = torch.ones_like(cost) if known else (2 * cost / self.dof.clamp(min=1)).sqrt()

        V = Vh.mT * (inside / torch.where(inside, s, 1)).unsqueeze(-2) / unit.unsqueeze(-1)
        some = (inside.sum(-1) == free) & (known | (self.dof > 0)) & J.isfinite().flatten(1).all(-1)
        matrix = torch.where(some[..., None, None], V @ V.mT * self.noise.to(J)[..., None, None] ** 2, math.inf)
        self.matrix = torch.where(fixed.unsqueeze(-1) | fixed.unsqueeze(-2), 0, matrix)  # (B, n, n)
        self.unknown = ~self.matrix.isfinite().flatten(1).all(-1)

        # Free parameters without influence, and those that only count together with others: what of each is in no
        # direction that the data determine is 1 less the part in those that they do. (B, n)
        self.still = (length == 0) & ~fixed
        lost = 1 - (Vh * inside.unsqueeze(-1)).square().sum(-2)
        self.alike = (lost > SHARE**2) & ~self.still & ~fixed

    def reason(self, i: int, names: list[str]) -> str:
        """Why that of fit i is infinite, and the way out."""
        m, n = int(self.points[i]), int(self.points[i] - self.dof[i])
        still, alike = ([names[j] for j in which[i].nonzero().flatten().tolist()] for which in (self.still, self.alike))
        if m < n:
            return f"{m} points do not determine {n} parameters. Take more points, or fix parameters by equal bounds"
        if still:
            return (
                f"the curve does not depend on {_listed(still)} there. Start elsewhere (p0), or fix what has no "
                "influence by equal bounds"
            )
        if alike:
            return f"the points do not tell {_listed(alike)} apart. Leave one out, or fix it by equal bounds"
        if m == n and not self.known:
            return (
                f"as many points as parameters, {n}, leave nothing to estimate the noise from. Take more points, or "
                "pass sigma and absolute_sigma=True"
            )
        return "the Jacobian there is not finite or too large"


def _listed(names: list[str]) -> str:
    if len(names) > 6:
        names = [*names[:5], f"{len(names) - 5} others"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def quantile(p: float, nu: Tensor) -> Tensor:
    """t with P(T ≤ t) = p > ½, for ν degrees of freedom (k,).

    By Newton's method: the distribution is concave for t > 0, so that from 0 no step goes too far. The tail is an
    integral by double exponential quadrature (Takahasi and Mori 1974).
    """
    u = torch.linspace(-4.5, 4.5, 401, dtype=torch.float64)
    s = (math.pi / 2 * u.sinh()).exp()  # 0 to ∞
    ds = s * math.pi / 2 * u.cosh() * (u[1] - u[0])
    nu = nu.double().cpu().unsqueeze(-1)

    def density(t: Tensor) -> Tensor:
        return ((t * t / nu).log1p() * (-(nu + 1) / 2)).exp()

    def tail(t: Tensor) -> Tensor:
        return (density(t + s) * ds).sum(-1, keepdim=True)

    t = torch.zeros_like(nu)
    beyond = 2 * (1 - p) * tail(t)
    for _ in range(100):
        step = (tail(t) - beyond) / density(t)
        t = t + step
        if bool((step.abs() <= 1e-15 * t).all()):
            break
    return t.squeeze(-1)


@dataclass(frozen=True, repr=False)
class CurveFit:
    """The outcome of curve_fit; unpacks and is indexed as the pair popt, pcov."""

    popt: Any  # (n,), or (B, n)
    pcov: Any  # (n, n), or (B, n, n)
    result: Result
    f: Callable[..., Any]
    dof: Any  # points with weight less free parameters; of many fits (B,)
    noise: Any  # standard deviation of a point with sigma = 1; estimated unless absolute_sigma
    known: bool  # sigma is absolute
    weighted: bool  # sigma or weights were given
    batched: bool
    x_ndim: int | None  # dimensions of the x that f takes; None where x is no array

    def __iter__(self) -> Iterator[Any]:
        return iter((self.popt, self.pcov))

    def __getitem__(self, index: int | slice) -> Any:
        return (self.popt, self.pcov)[index]

    def __len__(self) -> int:
        return 2

    def __repr__(self) -> str:
        return f"CurveFit(popt={self.popt}, perr={self.perr})"

    @property
    def success(self) -> Any:
        """Whether a minimum was found; of many fits (B,)."""
        return self.result.success

    @property
    def status(self) -> Any:
        """Why the fit ended, in the numbers of least_squares; of many (B,)."""
        return self.result.status

    @property
    def message(self) -> str | list[str]:
        """The same in words; of many fits a list, and result.message counts them."""
        return [MESSAGES[status] for status in self.status.tolist()] if self.batched else self.result.message

    @property
    def perr(self) -> Any:
        """Standard errors of the parameters."""
        return like(tensor(self.pcov).diagonal(dim1=-2, dim2=-1).sqrt(), self.popt)

    def predict(self, x: Any) -> Any:
        """The curve at x; of many fits (B, points), at an x for all of them or at one for each."""
        return like(self._curve(x)[0], self.popt)

    def confidence_band(self, x: Any, level: float = 0.95) -> tuple[Any, Any]:
        """Lower and upper limit of the curve at x: where it lies with this probability, point by point.

        f ± t·√diag(J·pcov·Jᵀ)     J = ∂f/∂p at x; Student's t, normal where sigma is absolute
        """
        y, variance = self._curve(x)
        return self._band(y, variance, level)

    def prediction_band(self, x: Any, level: float = 0.95, sigma: Any = None) -> tuple[Any, Any]:
        """Lower and upper limit of a new observation at x. `sigma` is its own, in the units of the fit's sigma."""
        if sigma is None and self.weighted:
            raise ValueError(
                "the fit has sigma or weights: pass sigma of the new observations, or 1/√weight: "
                "prediction_band(x, sigma=sigma)"
            )
        y, variance = self._curve(x)
        noise = tensor(self.noise).to(y).unsqueeze(-1) if self.batched else tensor(self.noise).to(y)
        own = noise * (1.0 if sigma is None else gathered(sigma).to(y))
        return self._band(y, variance + own**2, level)

    def _band(self, y: Tensor, variance: Tensor, level: float) -> tuple[Any, Any]:
        if not 0 < level < 1:
            raise ValueError(f"level={level!r}: a probability between 0 and 1, such as 0.95")
        dof = tensor(self.dof).to(y)
        if not self.known and bool((dof < 1).all()):
            raise ValueError("no band: as many parameters as points leave nothing to estimate the noise from")
        each, of = dof.clamp(min=1).unique(return_inverse=True)  # where it is 0 the variance is infinite
        p = (1 + level) / 2
        t = NormalDist().inv_cdf(p) if self.known else quantile(p, each).to(y)[of].unsqueeze(-1)  # (1,) or (B, 1)
        half = t * variance.sqrt()
        return like(y - half, self.popt), like(y + half, self.popt)

    def _curve(self, x: Any) -> tuple[Tensor, Tensor]:
        """f and diag(J·pcov·Jᵀ): (k,) or (B, k)."""
        refuse("Call f(x, *popt) itself, which has one, or pass x.detach()", x=x)
        p, cov = tensor(self.popt), tensor(self.pcov)
        p, cov = (p, cov) if self.batched else (p.unsqueeze(0), cov.unsqueeze(0))
        at = independent(x, p)
        own: tuple[Tensor, ...] = ()
        if isinstance(at, Tensor) and self.x_ndim is not None and at.ndim > self.x_ndim:
            if not self.batched or at.ndim > self.x_ndim + 1 or len(at) != len(p):
                wanted = f"{self.x_ndim} dimensions" + f", or {len(p)} such x, one for each fit" * self.batched
                raise ValueError(f"x has shape {tuple(at.shape)}: it must have {wanted}, as xdata has")
            own = (at,)

        def curve(p: Any, *own: Tensor) -> Tensor:
            z = like(own[0] if own else at, p)
            y = values(self.f(z, *p), p)
            if y.ndim == 0 and isinstance(at, Tensor) and z.ndim == self.x_ndim:  # a constant
                y = y.expand(z.shape[-1])
            return y.reshape(-1)

        far = torch.full_like(p, math.inf)
        numpy = not isinstance(self.popt, Tensor)
        with torch.no_grad():
            problems, _ = build(curve, p, "auto", own, {}, self.batched, (-far, far), numpy)
            if numpy:
                readable(p)  # as the curve must be
            y, J = problems.raw(p), problems.jacobian(p)
        unknown = ~cov.isfinite().flatten(1).all(-1, keepdim=True)
        variance = torch.where(unknown, math.inf, ((J @ cov) * J).sum(-1).clamp(min=0))
        return (y, variance) if self.batched else (y[0], variance[0])
