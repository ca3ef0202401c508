"""curve_fit: parameters of a curve, their covariance, and bands around it."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .least_squares import least_squares, limits
from .problems import build, has_numpy, tensor
from .result import Result
from .student import quantile


@dataclass(frozen=True, repr=False)
class Fit:
    """The outcome of curve_fit; unpacks and is indexed as the pair popt, pcov."""

    popt: Any  # (n,), or (B, n)
    pcov: Any  # (n, n), or (B, n, n)
    result: Result
    f: Callable[..., Any]
    dof: int  # points less parameters
    noise: Any  # standard deviation of a point with sigma = 1; estimated unless absolute_sigma
    known: bool  # sigma is absolute
    weighted: bool  # sigma was given
    batched: bool
    x_ndim: int | None  # dimensions of the x that f takes; None where x is no array

    def __iter__(self) -> Iterator[Any]:
        return iter((self.popt, self.pcov))

    def __getitem__(self, index: int | slice) -> Any:
        return (self.popt, self.pcov)[index]

    def __len__(self) -> int:
        return 2

    def __repr__(self) -> str:
        return f"Fit(popt={self.popt}, perr={self.perr})"

    @property
    def perr(self) -> Any:
        """Standard errors of the parameters."""
        return self._like(tensor(self.pcov).diagonal(dim1=-2, dim2=-1).sqrt())

    def predict(self, x: Any) -> Any:
        """The curve at x; of many fits (B, points), at an x for all of them or at one for each."""
        return self._like(self._curve(x)[0])

    def confidence_band(self, x: Any, level: float = 0.95) -> tuple[Any, Any]:
        """Lower and upper limit of the curve at x: where it lies with this probability, point by point.

        f ± t·√diag(J·pcov·Jᵀ)     J = ∂f/∂p at x; Student's t, normal where sigma is absolute
        """
        y, variance = self._curve(x)
        return self._band(y, variance, level)

    def prediction_band(self, x: Any, level: float = 0.95, sigma: Any = None) -> tuple[Any, Any]:
        """Lower and upper limit of a new observation at x. `sigma` is its own, in the units of the fit's sigma."""
        if sigma is None and self.weighted:
            raise ValueError("the fit has sigma: pass that of the new observations, prediction_band(x, sigma=…)")
        y, variance = self._curve(x)
        noise = tensor(self.noise).to(y).unsqueeze(-1) if self.batched else tensor(self.noise).to(y)
        own = noise * (1.0 if sigma is None else _tensor(sigma).to(y))
        return self._band(y, variance + own**2, level)

    def _band(self, y: Tensor, variance: Tensor, level: float) -> tuple[Any, Any]:
        if not 0 < level < 1:
            raise ValueError(f"level={level!r}: a probability between 0 and 1, such as 0.95")
        if not self.known and self.dof < 1:
            raise ValueError("no band: as many parameters as points leave nothing to estimate the noise from")
        half = quantile((1 + level) / 2, math.inf if self.known else self.dof) * variance.sqrt()
        return self._like(y - half), self._like(y + half)

    def _curve(self, x: Any) -> tuple[Tensor, Tensor]:
        """f and diag(J·pcov·Jᵀ): (k,) or (B, k)."""
        p, cov = tensor(self.popt), tensor(self.pcov)
        p, cov = (p, cov) if self.batched else (p.unsqueeze(0), cov.unsqueeze(0))
        call = _Curve(self.f, x, p, self.x_ndim)
        own: tuple[Tensor, ...] = ()
        if isinstance(call.tensor, Tensor) and self.x_ndim is not None and call.tensor.ndim > self.x_ndim:
            if not self.batched or call.tensor.ndim > self.x_ndim + 1 or len(call.tensor) != len(p):
                wanted = f"{self.x_ndim} dimensions" + f", or {len(p)} such x, one for each fit" * self.batched
                raise ValueError(f"x has shape {tuple(call.tensor.shape)}: it must have {wanted}, as xdata has")
            own = (call.tensor,)
        far = torch.full_like(p, math.inf)
        with torch.no_grad():
            problems, _ = build(call, p, "auto", own, {}, self.batched, -far, far, not isinstance(self.popt, Tensor))
            y, J = problems.raw(p), problems.jacobian(p)
        variance = ((J @ cov) * J).sum(-1).clamp(min=0)
        return (y, variance) if self.batched else (y[0], variance[0])

    def _like(self, value: Tensor) -> Any:
        return value if isinstance(self.popt, Tensor) else value.cpu().numpy()


class _Curve:
    """p ↦ f(x, *p), with x as a tensor or as NumPy, whichever p is."""

    def __init__(self, f: Callable[..., Any], x: Any, like: Tensor, ndim: int | None = None) -> None:
        self.f, self.given, self.ndim = f, x, ndim
        typed = hasattr(x, "dtype") or isinstance(x, (list, tuple, int, float))
        self.tensor = _tensor(x).to(like) if typed else x

    def x(self, p: Any) -> Any:
        return _like(self.tensor, p) if isinstance(self.tensor, Tensor) else self.given

    def __call__(self, p: Any, *own: Tensor) -> Any:
        x = _like(own[0], p) if own else self.x(p)
        y = _values(self.f(x, *p), p)
        if y.ndim == 0 and isinstance(self.tensor, Tensor) and x.ndim == self.ndim:  # a constant
            y = y + _like(self.tensor.new_zeros(x.shape[-1:]), p)
        return y.reshape(-1)


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
) -> Fit:
    """Fit y = f(x, *p) to data: scipy.optimize.curve_fit with exact derivatives, and bands.

    >>> popt, pcov = curve_fit(lambda x, a, b: a * torch.exp(-b * x), x, y)
    >>> fit = curve_fit(f, x, y); fit.predict(x); fit.confidence_band(x)

    sigma: standard deviations (m,), or the covariance (m, m) of ydata; pcov is scaled by the residuals unless they are
    absolute. p0: ones, or the middle of finite bounds, by default. jac(x, *p) → (m, n), or as in least_squares.
    Arrays and plain numbers give arrays, without NumPy tensors; tensors give tensors. kwargs go to least_squares;
    maxfev is max_nfev.
    nan_policy: "raise", or "omit" to leave out the points with NaN; by default neither NaN nor infinities are taken.

    batched: ydata is (B, m), B data sets; p0 and each bound (B, n) or (n,), sigma (m,), (B, m) or (B, m, m). xdata is
    that of all sets, (m,) or (k, m), or has a leading dimension B, one for each set; where k = B it is read such that f
    returns m values. A fit that failed is found in result.success; of a single fit it is a RuntimeError.
    """
    if full_output:
        raise ValueError("full_output=True: curve_fit returns popt and pcov; the rest is in curve_fit(…).result")
    if nan_policy not in (None, "raise", "omit"):
        raise ValueError(f"nan_policy={nan_policy!r}: pass None, 'raise' or 'omit'")
    if "maxfev" in kwargs:
        if "max_nfev" in kwargs:
            raise TypeError("maxfev and max_nfev are one and the same: pass one of them")
        kwargs["max_nfev"] = kwargs.pop("maxfev") or None  # 0 is SciPy's default
    numpy = has_numpy() and not any(isinstance(a, Tensor) for a in (xdata, ydata, p0))
    y = _floating("ydata", ydata)
    device = next((a.device for a in (xdata, ydata, p0) if isinstance(a, Tensor) and a.device.type != "cpu"), y.device)
    y = y.to(device)
    curve = _Curve(f, xdata, y)
    if y.ndim == 0 and isinstance(curve.tensor, Tensor) and curve.tensor.ndim:  # one number for all points
        y = y.expand(curve.tensor.shape[-1])
    if y.ndim != 1 + batched or not y.numel():
        raise ValueError(
            f"ydata has shape {tuple(y.shape)}: it must be {'(data sets, points)' if batched else '(points,)'}; "
            "see batched" if y.ndim > 1 else f"ydata has shape {tuple(y.shape)}: it must be (points,)"
        )  # fmt: skip
    if check_finite or (check_finite is None and nan_policy is None):
        for name, data in (("xdata", curve.tensor), ("ydata", y)):
            if isinstance(data, Tensor) and not bool(data.isfinite().all()):
                raise ValueError(f"{name} contains NaN or infinities: leave those points out, or see nan_policy")
    elif nan_policy is not None:
        y, curve.tensor, sigma = _without_nan(y, curve.tensor, sigma, nan_policy, batched)
    p0 = _guess(f, p0, bounds, y, batched)
    own_x = batched and _own_x(f, curve.tensor, p0, y)
    whiten, roots = _whitening(sigma, y, batched)
    cut = [t for t in (y, curve.tensor if own_x else None, roots if batched else None) if t is not None]

    def split(p: Any, data: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        """x, y and the root of sigma that go with p."""
        rest = list(data)
        target = rest.pop(0)
        x = _like(rest.pop(0), p) if own_x else curve.x(p)
        return x, target, rest.pop(0) if rest else roots

    def residuals(p: Any, *data: Any) -> Any:
        x, target, root = split(p, data)
        model = _values(model_of(x, *p), p)
        if model.ndim and tuple(model.shape) != tuple(target.shape):
            raise ValueError(f"f returned shape {tuple(model.shape)} for ydata of shape {tuple(target.shape)}")
        r = model - _like(target, p)
        return r if whiten is None else whiten(torch.as_tensor(r), root)

    def slopes(p: Any, *data: Any) -> Any:
        x, _, root = split(p, data)
        J = _tensor(slopes_of(x, *p))
        return J if whiten is None else whiten(J, root)

    model_of, slopes_of = f, jac
    if callable(jac):
        model_of, slopes_of = (_fed(g, curve.tensor[0] if own_x else curve.tensor, p0, batched) for g in (f, jac))
    x0: Any = p0.numpy() if numpy else p0
    result = least_squares(
        residuals, x0, jac=slopes if callable(jac) else jac or "auto", bounds=bounds, method=method or "lm",
        args=tuple(cut) if batched else (y,), batched=batched, **kwargs,
    )  # fmt: skip
    if not batched and not result.success:
        raise RuntimeError(f"no fit: {result.message}")
    m, n = y.shape[-1], p0.shape[-1]
    J, cost = tensor(result.jac), tensor(result.cost)
    noise = torch.ones_like(cost) if absolute_sigma else (2 * cost / max(m - n, 1)).sqrt()
    cov = _covariance(J) * noise.to(J)[..., None, None] ** 2
    if m <= n and not absolute_sigma:
        cov = torch.full_like(cov, math.inf)
    if not bool(cov.isfinite().all()):
        warnings.warn("the covariance of the parameters could not be estimated; infinite", stacklevel=2)
    return Fit(
        result.x, cov.cpu().numpy() if numpy else cov, result, f, m - n, noise if batched else float(noise),
        absolute_sigma, sigma is not None, batched,
        curve.tensor.ndim - own_x if isinstance(curve.tensor, Tensor) else None,
    )  # fmt: skip


def _covariance(J: Tensor) -> Tensor:
    """(JᵀJ)⁻¹ by an SVD of J with columns of length 1; infinite where it does not exist."""
    length = J.norm(dim=-2)
    unit = torch.where(length > 0, length, 1)
    _, s, Vh = torch.linalg.svd(J / unit.unsqueeze(-2), full_matrices=False)
    V = Vh.mT / s.unsqueeze(-2) / unit.unsqueeze(-1)
    cov = V @ V.mT
    rank = (s > max(J.shape[-2:]) * torch.finfo(J.dtype).eps * s[..., :1]).sum(-1)
    full = rank == J.shape[-1]
    return torch.where(full[..., None, None], cov, math.inf)


def _whitening(sigma: Any, y: Tensor, batched: bool) -> tuple[Callable[[Tensor, Tensor], Tensor] | None, Tensor | None]:
    """How to divide by sigma, and its root: (m,), or L of LLᵀ (m, m); with the leading dimension of a batch."""
    if sigma is None:
        return None, None
    s = _floating("sigma", sigma).to(y)
    m = y.shape[-1]
    shapes = {0: (), 1: (m,), 2: tuple(y.shape) if batched else (m, m), 3: (len(y), m, m)}
    if s.ndim > 2 + batched or tuple(s.shape) != shapes[s.ndim]:
        raise ValueError(f"sigma has shape {tuple(s.shape)} for ydata of shape {tuple(y.shape)}")
    if s.ndim <= 1 + batched:
        if not bool(((s > 0) & s.isfinite()).all()):
            raise ValueError("sigma must be finite and positive")
        return (lambda r, root: r.to(root) / (root if r.ndim == 1 else root.unsqueeze(-1))), s.expand_as(y)
    L, info = torch.linalg.cholesky_ex(s)
    if bool(info.any()) or not torch.allclose(s, s.mT, rtol=1e-8):
        raise ValueError("sigma must be a symmetric and positive definite covariance matrix")

    def solve(r: Tensor, root: Tensor) -> Tensor:
        columns = r.to(root) if r.ndim == 2 else r.to(root).unsqueeze(-1)
        white = torch.linalg.solve_triangular(root, columns, upper=False)
        return white if r.ndim == 2 else white.squeeze(-1)  # type: ignore[no-any-return]

    return solve, L


def _guess(f: Callable[..., Any], p0: Any, bounds: Any, y: Tensor, batched: bool) -> Tensor:
    """The start, as given or from the bounds: (n,), or (B, n)."""
    names, most = _parameters(f)
    if p0 is not None:
        p = _floating("p0", p0).to(y.device)
        p = p.reshape(-1) if p.ndim == 0 else p
        if not sum(name.default is name.empty for name in names) <= p.shape[-1] <= most:
            takes = f"{len(names)} parameters after x ({', '.join(name.name for name in names)})"
            raise ValueError(f"p0 has length {p.shape[-1]}, f takes {takes}: pass a number for each of them")
        if batched and p.ndim == 2 and len(p) != len(y):
            raise ValueError(f"p0 has shape {tuple(p.shape)} for {len(y)} data sets: pass (n,), or a row for each set")
        return p.expand(len(y), -1).clone() if batched and p.ndim == 1 else p
    if not names:
        raise ValueError("p0 is needed: the signature of f does not say how many parameters there are")
    p = y.new_ones(len(y) if batched else 1, len(names))
    low, high = limits(bounds, p)
    p = torch.where(low.isfinite() & high.isfinite(), (low + high) / 2, p)
    p = torch.where(low.isfinite() & ~high.isfinite(), low + 1, p)
    p = torch.where(~low.isfinite() & high.isfinite(), high - 1, p)
    return p if batched else p[0]


def _parameters(f: Callable[..., Any]) -> tuple[list[inspect.Parameter], float]:
    """What f takes after x as far as it is named, and how many in all."""
    try:
        names = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):  # a function of another language
        return [], math.inf
    positional = [name for name in names if name.kind in (name.POSITIONAL_ONLY, name.POSITIONAL_OR_KEYWORD)]
    return positional[1:], math.inf if any(name.kind == name.VAR_POSITIONAL for name in names) else len(positional) - 1


def _own_x(f: Callable[..., Any], x: Any, p: Tensor, y: Tensor) -> bool:
    """Whether x has an entry for each data set: f returns a value for each point where it gets the x it is made for."""
    if not isinstance(x, Tensor) or x.ndim < 2 or len(x) != len(y):
        return False
    points = tuple(y.shape[1:])
    for_all, for_each = (_shape(f, z, p[0]) == points for z in (x, x[0]))
    if for_all and for_each:
        raise ValueError(
            f"xdata of shape {tuple(x.shape)} may be that of all {len(y)} data sets or hold one for each: f returns "
            f"{points} either way. Pass one for each, with the dimensions that f expects after the first"
        )
    return not for_all


def _shape(f: Callable[..., Any], x: Tensor, p: Tensor) -> tuple[int, ...] | None:
    for kind in (Tensor.detach, _array):
        try:
            q = kind(p)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return tuple(_values(f(_like(x, q), *q), q).shape)
        except Exception:  # a function of arrays may raise anything on a tensor, and the reverse
            continue
    return None


def _fed(g: Callable[..., Any], x: Any, p0: Tensor, batched: bool) -> Callable[..., Any]:
    """g; where it is a function of arrays alone, one that takes tensors too."""
    p = p0[0] if batched else p0

    def on_arrays(x: Any, *p: Any) -> Any:
        value = g(_array(x), *map(_array, p))
        return _tensor(value).to(p[0].device) if isinstance(p[0], Tensor) else value

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # NumPy's, for what it does with tensors
            g(x, *p)
    except Exception:  # a function of arrays may raise anything on a tensor
        try:
            on_arrays(x, *p)
        except Exception:  # it fails on both: the fit will tell
            return g
        return on_arrays
    return g


def _without_nan(y: Tensor, x: Any, sigma: Any, policy: str, batched: bool) -> tuple[Tensor, Any, Any]:
    if not any(isinstance(data, Tensor) and bool(data.isnan().any()) for data in (x, y)):
        return y, x, sigma
    if policy == "raise":
        raise ValueError("xdata or ydata contains NaN: leave those points out, nan_policy='omit'")
    if batched:
        raise ValueError("nan_policy='omit' would leave data sets of different length: fit them one by one")
    if not isinstance(x, Tensor) or x.shape[-1:] != y.shape:
        raise ValueError("nan_policy='omit' needs xdata as an array, with the points as its last dimension")
    keep = ~(y.isnan() | x.isnan().reshape(-1, len(y)).any(0))
    if sigma is not None:
        sigma = _tensor(sigma)
        sigma = sigma[keep] if sigma.ndim == 1 else sigma[keep][:, keep] if sigma.ndim == 2 else sigma
    return y[keep], x[..., keep], sigma


def _floating(name: str, data: Any) -> Tensor:
    t = _tensor(data)
    if t.is_complex():
        raise TypeError(f"{name} is complex: fit real and imaginary parts as one real vector")
    return t.to(torch.float64)


def _tensor(data: Any) -> Tensor:
    """Of arrays in the machine's byte order and with strides that torch takes, or of lists of such."""
    if isinstance(data, (list, tuple)) and any(getattr(part, "ndim", 0) for part in data):
        return torch.stack([_tensor(part) for part in data])
    if isinstance(data, Tensor) or not hasattr(data, "dtype"):
        return tensor(data)
    return tensor(data.__array__().astype(data.dtype.newbyteorder("="), order="C"))


def _values(model: Any, p: Any) -> Any:
    """What f returned, as a tensor where p is one and as an array where not."""
    if model is None:
        raise TypeError("f returned None: it must return the curve at x")
    if isinstance(model, (list, tuple)) and any(isinstance(value, Tensor) for value in model):
        return torch.stack([torch.as_tensor(value, dtype=p.dtype, device=p.device) for value in model])
    if isinstance(p, Tensor) and not isinstance(model, Tensor):
        raise TypeError(f"f returned {type(model).__name__} for tensors: it must return the curve at x, a tensor")
    return model if hasattr(model, "ndim") else _array(_tensor(model))


def _array(data: Any) -> Any:
    return data.detach().cpu().numpy() if isinstance(data, Tensor) else data


def _like(data: Tensor, p: Any) -> Any:
    return data if isinstance(p, Tensor) else _array(data)
