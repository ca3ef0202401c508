"""Losses that outliers do not rule: absolute error, quantiles, Student's t."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Target, check_positive
from .elementwise import Elementwise

# Of the mean residual; between 1e-8 and 0.1 it makes no difference to a small regression, 1 is too much.
SHARE = 0.01


@dataclass(frozen=True, kw_only=True, eq=False)
class AbsoluteError(Elementwise):
    """With e = z − y:  ℓ = |e|,  ℓ′ = sign e,  s = 1/√max(|e|, ε):  `nn.L1Loss`.

    s² is the quadratic that touches ℓ at e and lies above it. Near e = 0 it would hold the residual there, whatever the
    others ask for: ε is a hundredth of the mean |e| of the outputs that are linearised together, and falls with it.
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

    s² is that of the quadratic that touches ½√(e² + h²) and lies above it. `smoothing`, h, is in the units of the
    targets; the quantile is off by about h.
    """

    majorises: ClassVar[bool] = True
    q: float = 0.5
    smoothing: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.q < 1:
            raise ValueError(f"q must lie between 0 and 1, got {self.q!r}")
        check_positive(self.smoothing, "smoothing")

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return (self.q - 0.5) * (y - z) + 0.5 * self._root(z, y)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return 0.5 - self.q - 0.5 * (y - z) / self._root(z, y)

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return (2 * self._root(z, y)).rsqrt()

    def _root(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.hypot(y - z, z.new_full((), self.smoothing))

    def lower_bound(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        """Σ w h√(q(1 − q)): the least of each ℓ."""
        return self.smoothing * math.sqrt(self.q * (1 - self.q)) * self.normaliser(z, y, weight)


@dataclass(frozen=True, eq=False)
class StudentT(Elementwise):
    """Errors e = z − y with heavy tails, ν degrees of freedom, scale σ:  ℓ = ½(ν + 1) log(1 + e²/(νσ²)),  ℓ′ = s²e,
    s = √((ν + 1)/(νσ² + e²)), the root of the quadratic that touches ℓ at e and lies above it.
    """

    majorises: ClassVar[bool] = True
    dof: float = 4.0
    sigma: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.dof, "dof")
        check_positive(self.sigma, "sigma")

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (self.dof + 1) * ((z - y).square() / (self.dof * self.sigma**2)).log1p()

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return self.s(z, y).square() * (z - y)

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return ((self.dof + 1) / (self.dof * self.sigma**2 + (z - y).square())).sqrt()
