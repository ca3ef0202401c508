"""Losses of numbers: some are robust against outliers, some are for positive targets, and one is for a normal
distribution whose variance is an output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import COUNTS, POSITIVE, Domain, Elementwise, Fault, Loss, Target, check_number, weighted

# The share of the mean residual; values from 1e-8 to 0.1 make no difference to a small regression, 1 is too large.
SHARE = 0.01


@dataclass(frozen=True, kw_only=True, eq=False)
class AbsoluteError(Elementwise):
    """With e = z − y:  ℓ = |e|,  ℓ′ = sign e,  s = 1/√max(|e|, ε):  `nn.L1Loss`.

    s² is the curvature of the quadratic that touches ℓ at e and lies above it. Near e = 0 it would fix the residual
    there, whatever the other residuals need, so ε is a hundredth of the mean |e| of the outputs that are linearised
    together, and falls with it.

    >>> opt = mq.LM(model, mq.losses.AbsoluteError())  # or "l1"
    """

    majorises: ClassVar[bool] = True

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return (z - y).abs()

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return (z - y).sign()

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        e = (z - y).abs()
        least = SHARE * e.mean()
        return torch.maximum(e, least.where(least > 0, 1)).rsqrt()


@dataclass(frozen=True, eq=False)
class Quantile(Elementwise):
    """The q-quantile, with e = y − z and corners rounded over the width h:  ℓ = (q − ½)e + ½√(e² + h²),
    ℓ′ = ½ − q − ½e/√(e² + h²),  s = (4(e² + h²))^(−¼).

    s² is the curvature of the quadratic that touches ½√(e² + h²) and lies above it. `smoothing`, h, is in the units of
    the targets; the quantile is off by about h. Several levels q belong to the outputs (N, …, k) along their last
    dimension, with targets of the same shape: y.expand_as(z).

    Args:
        q: the level, between 0 and 1, or one level per output.
        smoothing: h, the width over which the corner is rounded.

    >>> opt = mq.LM(model, mq.losses.Quantile(0.9))  # the median is "quantile"
    """

    majorises: ClassVar[bool] = True
    positive_options: ClassVar[tuple[str, ...]] = ("smoothing",)
    q: float | Sequence[float] | Tensor = 0.5
    smoothing: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        levels = self.q.tolist() if hasattr(self.q, "tolist") else self.q
        object.__setattr__(self, "q", tuple(levels) if isinstance(levels, (list, tuple)) else levels)
        for q in self._levels:
            check_number(q, "q")
        if not self._levels or not all(0 < q < 1 for q in self._levels):
            raise ValueError(f"q must lie between 0 and 1, got {self.q!r}")

    @property
    def _levels(self) -> tuple[Any, ...]:
        return self.q if isinstance(self.q, tuple) else (self.q,)

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return (self._q(z) - 0.5) * (y - z) + 0.5 * self._root(z, y)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return 0.5 - self._q(z) - 0.5 * (y - z) / self._root(z, y)

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return (2 * self._root(z, y)).rsqrt()

    def _q(self, z: Tensor) -> Tensor:
        """(1,) or (k,), without a copy to the device"""
        return torch.cat([z.new_full((1,), q) for q in self._levels])

    def _root(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.hypot(y - z, z.new_full((), self.smoothing))

    def lower_bound(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        """Σ w h√(q(1 − q)): the minimum of each ℓ."""
        least = [self.smoothing * math.sqrt(q * (1 - q)) for q in self._levels]
        return sum(least) / len(least) * self.normaliser(z, y, weight)

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        if isinstance(self.q, tuple):
            k = len(self.q)
            if z.ndim < 2 or z.shape[-1] != k:
                raise ValueError(
                    f"outputs have shape {tuple(z.shape)}: Quantile of {k} levels needs one for each, (N, …, {k})"
                )
            if isinstance(y, Tensor) and y.shape != z.shape and y.numel() * k == z.numel():
                raise ValueError(
                    f"outputs have shape {tuple(z.shape)}, targets {tuple(y.shape)}: every level needs its target, "
                    f"targets.reshape({', '.join(map(str, (*z.shape[:-1], 1)))}).expand{tuple(z.shape)}"
                )
        return super().faults(z, y)


@dataclass(frozen=True, eq=False)
class StudentT(Elementwise):
    """Errors e = z − y with heavy tails, ν degrees of freedom, scale σ:  ℓ = ½(ν + 1) log(1 + e²/(νσ²)),  ℓ′ = s²e,
    s = √((ν + 1)/(νσ² + e²)), the root of the curvature of the quadratic that touches ℓ at e and lies above it.

    Args:
        dof: ν; the smaller it is, the less an outlier counts.
        sigma: σ, the size of a typical error.

    >>> opt = mq.LM(model, mq.losses.StudentT(dof=3, sigma=0.1))  # or "student_t"
    """

    majorises: ClassVar[bool] = True
    positive_options: ClassVar[tuple[str, ...]] = ("dof", "sigma")
    dof: float = 4.0
    sigma: float = 1.0

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (self.dof + 1) * ((z - y).square() / (self.dof * self.sigma**2)).log1p()

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return self.s(z, y).square() * (z - y)

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return ((self.dof + 1) / (self.dof * self.sigma**2 + (z - y).square())).sqrt()


@dataclass(frozen=True, eq=False)
class NegativeBinomial(Elementwise):
    """Counts y with mean μ = e^z and variance μ + aμ², a = `dispersion`, k = 1/a, σ = sigmoid(z + log a):

    ℓ = (y + k) log(1 + aμ) − y z,  ℓ′ = (y + k)σ − y,  s = √((y + k) σ(1 − σ)).

    Args:
        dispersion: a, above 0.

    >>> opt = mq.LM(model, mq.losses.NegativeBinomial(dispersion=0.5))  # or "negative_binomial"
    >>> step = opt.step(x, y.abs().round())
    """

    likelihood: ClassVar[str | None] = "negative binomial"
    positive_options: ClassVar[tuple[str, ...]] = ("dispersion",)
    target_domain: ClassVar[Domain | None] = COUNTS
    dispersion: float = 1.0

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return (y + 1 / self.dispersion) * F.softplus(self._logit(z)) - y * z

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        # (y + k)σ − y = kσ − y(1 − σ), without cancellation
        return self._logit(z).sigmoid() / self.dispersion - y * (-self._logit(z)).sigmoid()

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return ((y + 1 / self.dispersion) * self._logit(z).sigmoid() * (-self._logit(z)).sigmoid()).sqrt()

    def _logit(self, z: Tensor) -> Tensor:
        return z + math.log(self.dispersion)

    def lower_bound(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        """The saturated model, z = log y."""
        least = (y + 1 / self.dispersion) * (self.dispersion * y).log1p() - torch.xlogy(y, y)
        return weighted(least, weight).sum()


@dataclass(frozen=True, eq=False)
class Gamma(Elementwise):
    """Positive y with mean e^z and variance e^{2z}/a, a = `shape`:  ℓ = a(z + y e^−z),  ℓ′ = a(1 − y e^−z),
    s = √(a y e^−z).

    Args:
        shape: a, above 0.

    >>> opt = mq.LM(model, mq.losses.Gamma(shape=2.0))  # or "gamma"
    >>> step = opt.step(x, y.exp())
    """

    likelihood: ClassVar[str | None] = "gamma"
    positive_options: ClassVar[tuple[str, ...]] = ("shape",)
    target_domain: ClassVar[Domain | None] = POSITIVE
    shape: float = 1.0

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return self.shape * (z + y * (-z).exp())

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return -self.shape * (y.log() - z).expm1()

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return (self.shape * y * (-z).exp()).sqrt()

    def lower_bound(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        """Σ w a(1 + log y): the saturated model, z = log y."""
        return self.shape * weighted(1 + y.log(), weight).sum()


@dataclass(frozen=True, kw_only=True, eq=False)
class GaussianNLL(Loss):
    """Outputs z (N, 2k, …): means m = z[:, :k], then log v, v the variance; with e = m − y of each of the k targets:

        ℓ = ½(log v + e²/v),  ∂ℓ/∂m = e/v,  ∂ℓ/∂log v = ½(1 − e²/v),  S = diag(v^−½, 2^−½).

    SSᵀ is the mean of ∂²ℓ/∂z² over y of this distribution, because ℓ is not convex. With `variance` the second half of
    z is v itself, at least `eps`, as in `nn.GaussianNLLLoss`; then S = diag(v^−½, 2^−½/v). `full` adds ½ log 2π. ℓ has
    no lower bound: where e = 0 it falls with v. A model may return (mean, variance) as a tuple; if its outputs have
    names, {("mean", "variance"): loss} tells them apart.

    Args:
        variance: whether the model returns v instead of log v.
        eps: the least v.
        full: whether ½ log 2π is part of the loss.

    >>> opt = mq.LM(nn.Linear(2, 2), mq.losses.GaussianNLL())  # or "gaussian_nll"
    >>> step = opt.step(x, y)
    """

    fisher: ClassVar[bool] = True
    outputs_taken: ClassVar[int] = 2
    likelihood: ClassVar[str | None] = "normal with variance"
    positive_options: ClassVar[tuple[str, ...]] = ("eps",)
    variance: bool = False
    eps: float = 1e-6
    full: bool = False

    def parts(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """e, v and the derivative of v by its output: (N, k, …) each"""
        mean, spread = z.chunk(2, 1)
        v = spread.clamp(min=self.eps) if self.variance else spread.exp()
        return mean - _like(y, mean), v, torch.ones_like(v) if self.variance else v

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        e, v, _ = self.parts(z, y)
        spread = z.chunk(2, 1)[1]
        log_v = v.log().where(spread >= 0, math.inf) if self.variance else spread
        return 0.5 * (log_v + e.square() / v + self.full * math.log(2 * math.pi))

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        e, v, dv = self.parts(z, y)
        return torch.cat((e / v, 0.5 * (1 - e.square() / v) * dv / v), 1)

    def factors(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        e, v, dv = self.parts(z, y)
        s = self.group(torch.cat((v.rsqrt(), math.sqrt(0.5) * dv / v), 1))  # (N, P, 2)
        u = self.group(torch.cat((e * v.rsqrt(), math.sqrt(0.5) * (1 - e.square() / v)), 1))
        return torch.diag_embed(s), u

    def group(self, t: Tensor, z: Tensor | None = None) -> Tensor:
        z = t if z is None else z
        dim = t.ndim - z.ndim + 1
        pairs: Tensor = t.unflatten(dim, (2, z.shape[1] // 2)).movedim(dim, -1)
        return pairs.reshape(*t.shape[: dim - 1], z.shape[0], -1, 2)

    def ungroup(self, t: Tensor, z: Tensor) -> Tensor:
        lead = t.shape[:-3]
        pairs = t.reshape(*lead, z.shape[0], z.shape[1] // 2, *z.shape[2:], 2)
        found: Tensor = pairs.movedim(-1, len(lead) + 1).flatten(len(lead) + 1, len(lead) + 2)
        return found

    def lower_bound(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        return z.new_full((), -math.inf)

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        if z.ndim < 2 or z.shape[1] % 2:
            raise ValueError(
                f"outputs have shape {tuple(z.shape)}: GaussianNLL needs (N, 2k, …), k means and then "
                f"{'variances' if self.variance else 'logarithms of variances'}, torch.cat((mean, variance), 1)"
            )
        mean, spread = z.chunk(2, 1)
        faults = super().faults(mean, _like(y, mean) if isinstance(y, Tensor) else y)
        if self.variance:
            advice = "the model must return variances that are not negative, such as F.softplus of outputs"
            faults.append(Fault(spread < 0, spread, "variance", advice))
        return faults


def _like(y: Tensor, mean: Tensor) -> Tensor:
    """y in the shape of the mean: joining two outputs has flattened the mean, but not the targets."""
    return y.reshape(mean.shape) if y.shape[:1] == mean.shape[:1] and y.numel() == mean.numel() else y
