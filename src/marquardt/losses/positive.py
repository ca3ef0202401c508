"""Counts and other quantities that are not negative, by the log of their mean: negative binomial, gamma."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Elementwise, Fault, Target, check_positive, weighted


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
    dispersion: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.dispersion, "dispersion")

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

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        advice = "NegativeBinomial needs targets that are not negative"
        return [*super().faults(z, y), Fault(y < 0, y, "targets", advice)]


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
    shape: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.shape, "shape")

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return self.shape * (z + y * (-z).exp())

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return -self.shape * (y.log() - z).expm1()

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return (self.shape * y * (-z).exp()).sqrt()

    def lower_bound(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        """Σ w a(1 + log y): the saturated model, z = log y."""
        return self.shape * weighted(1 + y.log(), weight).sum()

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        return [*super().faults(z, y), Fault(~(y > 0), y, "targets", "Gamma needs positive targets")]
