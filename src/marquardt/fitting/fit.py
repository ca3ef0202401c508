"""What curve_fit returns: parameters, their covariance, and bands around the curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from .arrays import gathered, like, readable, refuse, tensor
from .curve import independent, values
from .problems import build
from .result import MESSAGES, Result


def beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function, by Lentz's method (DLMF 8.17.22)."""
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    value = d
    for m in range(1, 10_000):
        for term in (m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
                     -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))):  # fmt: skip
            d, c = 1 / (1 + term * d or tiny), (1 + term / c) or tiny
            value *= c * d
        if abs(c * d - 1) < 1e-16:
            break
    return value


def tail(t: float, nu: float) -> float:
    """P(T > t) for t ≥ 0: half of the regularised incomplete beta function I_x(ν/2, ½) at x = ν/(ν + t²)."""
    a, b, y = nu / 2, 0.5, t * t / (nu + t * t)
    x = nu / (nu + t * t)
    if x <= 0 or y <= 0:
        return 0.0 if x <= 0 else 0.5
    log = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * -math.log1p(t * t / nu) + b * math.log(y)
    if x < (a + 1) / (a + b + 2):
        return 0.5 * math.exp(log) * beta_fraction(a, b, x) / a
    return 0.5 - 0.5 * math.exp(log) * beta_fraction(b, a, y) / b


def quantile(p: float, nu: float) -> float:
    """t with P(T ≤ t) = p, for ν degrees of freedom; of the normal distribution for ν = ∞."""
    if p < 0.5:
        return -quantile(1 - p, nu)
    if p == 0.5:
        return 0.0
    if math.isinf(nu):
        return NormalDist().inv_cdf(p)
    low, high = 0.0, 1.0
    while tail(high, nu) > 1 - p:
        low, high = high, 2 * high
    while high - low > 4e-16 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if tail(middle, nu) > 1 - p else (low, middle)
    return (low + high) / 2


LIGHT = 1e-5  # of the largest 1/σ: what has less may be there to fill up an array
NOTHING = 1e-8  # part of the cost, and of what determines one parameter, that such a point has at most
SHARE = 1e-3  # of a direction that the data leave free: parameters with less have no part in it


@dataclass(frozen=True)
class Covariance:
    """Of B fits with n parameters each; infinite where the data do not determine it."""

    matrix: Tensor  # (B, n, n), zero for fixed parameters
    points: Tensor  # (B,), those with weight
    dof: Tensor  # (B,), points less free parameters
    noise: Tensor  # (B,), standard deviation of a point with sigma = 1
    still: Tensor  # (B, n), free parameters without influence
    alike: Tensor  # (B, n), those that only count together with others

    @property
    def unknown(self) -> Tensor:
        return ~self.matrix.isfinite().flatten(1).all(-1)

    def reason(self, i: int, names: list[str], known: bool) -> str:
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
        if m == n and not known:
            return (
                f"as many points as parameters, {n}, leave nothing to estimate the noise from. Take more points, or "
                "pass sigma and absolute_sigma=True"
            )
        return "the Jacobian there is not finite or too large"


def covariance(J: Tensor, cost: Tensor, own: Tensor, weight: Tensor, fixed: Tensor, known: bool) -> Covariance:
    """noise²(JᵀJ)⁻¹ by an SVD of J with columns of length 1, for the parameters that are not fixed.

    J (B, m, n) is weighted, as the residuals `own` (B, m) are; `weight` (B, m) is that of these, 1/σ, and `fixed`
    (B, n) says which bounds are equal. `known`: whether σ is, so that the noise is 1.
    """
    J = torch.where(fixed.unsqueeze(-2), 0, J)
    length = J.norm(dim=-2)
    unit = torch.where(length > 0, length, 1)
    U, s, Vh = torch.linalg.svd((J / unit.unsqueeze(-2)).nan_to_num(0.0, 0.0, 0.0), full_matrices=False)
    inside = s > max(J.shape[-2:]) * torch.finfo(J.dtype).eps * s[..., :1]

    # A point without weight is no observation, and one of almost none neither if nothing shows that it is there. One of
    # little weight may matter: where the curve varies by decades, or one point is nearly exact.
    leverage = (U * inside.unsqueeze(-2)).square().sum(-1)
    unseen = (leverage <= NOTHING) & (own.square() <= 2 * NOTHING * cost.unsqueeze(-1))
    counts = ~((weight == 0) | ((weight <= LIGHT * weight.amax(-1, keepdim=True)) & unseen))
    points, free = counts.sum(-1), (~fixed).sum(-1)
    dof = points - free
    noise = torch.ones_like(cost) if known else (2 * cost / dof.clamp(min=1)).sqrt()

    V = Vh.mT * (inside / torch.where(inside, s, 1)).unsqueeze(-2) / unit.unsqueeze(-1)
    matrix = V @ V.mT * noise.to(J)[..., None, None] ** 2
    some = (inside.sum(-1) == free) & (known | (dof > 0)) & J.isfinite().flatten(1).all(-1)
    matrix = torch.where(some[..., None, None], matrix, math.inf)
    matrix = torch.where(fixed.unsqueeze(-1) | fixed.unsqueeze(-2), 0, matrix)

    still = (length == 0) & ~fixed
    # What of each parameter is in no direction that the data determine: 1 less the part in those that they do.
    lost = 1 - (Vh * inside.unsqueeze(-1)).square().sum(-2)
    return Covariance(matrix, points, dof, noise, still, (lost > SHARE**2) & ~still & ~fixed)


def _listed(names: list[str]) -> str:
    if len(names) > 6:
        names = [*names[:5], f"{len(names) - 5} others"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


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
        half = self._factor((1 + level) / 2, dof) * variance.sqrt()
        return like(y - half, self.popt), like(y + half, self.popt)

    def _factor(self, p: float, dof: Tensor) -> Tensor:
        """The quantile that a band is standard deviations wide: a number, or (B, 1). Where there is no dof its variance
        is infinite."""
        of = {nu: quantile(p, math.inf if self.known else max(nu, 1)) for nu in set(dof.flatten().tolist())}
        return dof.new_tensor([of[nu] for nu in dof.flatten().tolist()]).reshape(*dof.shape, -1)

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

        def curve(p: Any, *own: Tensor) -> Any:
            z = like(own[0] if own else at, p)
            y = values(self.f(z, *p), p)
            if y.ndim == 0 and isinstance(at, Tensor) and z.ndim == self.x_ndim:  # a constant
                y = y + like(at.new_zeros(z.shape[-1:]), p)
            return y.reshape(-1)

        far = torch.full_like(p, math.inf)
        numpy = not isinstance(self.popt, Tensor)
        with torch.no_grad():
            problems, _ = build(curve, p, "auto", own, {}, self.batched, -far, far, numpy)
            if numpy:
                readable(p)  # as the curve must be
            y, J = problems.raw(p), problems.jacobian(p)
        unknown = ~cov.isfinite().flatten(1).all(-1, keepdim=True)
        variance = torch.where(unknown, math.inf, ((J @ cov) * J).sum(-1).clamp(min=0))
        return (y, variance) if self.batched else (y[0], variance[0])
