"""curve_fit: parameters of a curve by least squares."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..surroundings import undisturbed
from .arrays import floating, has_numpy, kind, like, readable, refuse, tensor
from .curve import Deviations, deviations, names, parameters, points, require_finite, without_nan
from .fit import CurveFit, covariance
from .least_squares import least_squares, limits
from .result import Result


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
    x, y = points(xdata, ydata, device, batched)
    if check_finite or (check_finite is None and nan_policy is None):
        require_finite(x, y)
    elif nan_policy is not None:
        x, y, sigma = without_nan(x, y, sigma, nan_policy, batched)
    start = _guess(f, p0, bounds, y, batched)
    data = deviations(f, jac, x, y, sigma, start, batched)
    if "maxfev" in kwargs:
        kwargs["max_nfev"] = kwargs.pop("maxfev") or None  # 0 is SciPy's default
    result = least_squares(
        data.residuals, readable(start) if has_numpy() and not tensors else start,
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
        if p.ndim > 1 + batched or 0 in p.shape:
            wanted = "(n,), or a row for each data set" if batched else "a number for each parameter, (n,)"
            raise ValueError(f"p0 has shape {tuple(p.shape)}: pass {wanted}")
        if not bool(p.isfinite().all()):
            raise ValueError(f"p0 is not finite: {p.tolist()}")
        if batched and p.ndim == 2 and len(p) != len(y):
            raise ValueError(f"p0 has shape {tuple(p.shape)} for {len(y)} data sets: pass (n,), or a row for each set")
        return p.expand(len(y), -1).clone() if batched and p.ndim == 1 else p
    if not named:
        raise ValueError(
            "p0 is needed: the signature of f does not say how many parameters there are after x, as f(x, a, b) does"
        )
    p = y.new_ones(len(y) if batched else 1, len(named))
    low, high = limits(bounds, p)
    p = torch.where(low.isfinite() & high.isfinite(), (low + high) / 2, p)
    p = torch.where(low.isfinite() & ~high.isfinite(), low + 1, p)
    p = torch.where(~low.isfinite() & high.isfinite(), high - 1, p)
    return p if batched else p[0]


def _fit(
    result: Result, f: Callable[..., Any], data: Deviations, bounds: Any, weights: Any, known: bool
) -> CurveFit:  # fmt: skip
    x, J, cost, r = (tensor(part) for part in (result.x, result.jac, result.cost, result.fun))
    if not data.batched:
        x, J, cost, r = (part.unsqueeze(0) for part in (x, J, cost, r))
    lower, upper = limits(bounds, x)
    size = torch.ones_like(r) if weights is None else tensor(weights).to(r).sqrt().expand_as(r)
    light = size if data.root is None else size * data.precision.to(r)
    errors = covariance(J, cost, r * size, light, lower == upper, known)
    missing = errors.unknown & torch.as_tensor(result.success)  # of the others `success` tells
    if bool(missing.any()):
        i = int(missing.int().argmax())
        which = f" of {int(missing.sum())} of {len(x)} data sets" if data.batched else ""
        first = f"in data set {i} " if data.batched else ""
        called = names(f, x.shape[-1])
        reason = errors.reason(i, called, known)
        if "x" in called:
            reason += f". Note that f is called with xdata first, and x is fitted: f(xdata, {', '.join(called)})"
        warnings.warn(
            f"the covariance of the parameters{which} could not be estimated; infinite: {first}{reason}", stacklevel=4
        )
    weighted = data.root is not None or weights is not None
    return CurveFit(
        result.x, like(errors.matrix if data.batched else errors.matrix[0], result.x), result, f,
        like(errors.dof, result.x) if data.batched else int(errors.dof),
        errors.noise if data.batched else float(errors.noise),
        known, weighted, data.batched, data.x_ndim,
    )  # fmt: skip
