"""Losses that outliers do not rule: absolute error, quantiles, Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import Elementwise, Fault, Target, check_number, check_positive

# Of the mean residual; between 1e-8 and 0.1 it makes no difference to a small regression, 1 is too much.
SHARE = 0.01


@dataclass(frozen=True, kw_only=True, eq=False)
class AbsoluteError(Elementwise):
    """With e = z − y:  ℓ = |e|,  ℓ′ = sign e,  s = 1/√max(|e|, ε):  `nn.L1Loss`.

    s² is the quadratic that touches ℓ at e and lies above it. Near e = 0 it would hold the residual there, whatever the
    others ask for: ε is a hundredth of the mean |e| of the outputs that are linearised together, and falls with it.

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

    s² is that of the quadratic that touches ½√(e² + h²) and lies above it. `smoothing`, h, is in the units of the
    targets; the quantile is off by about h. Several levels q are those of the outputs (N, …, k) along their last
    dimension, with targets of the same shape: y.expand_as(z).

    Args:
        q: the level, between 0 and 1, or one for each of the outputs.
        smoothing: h, the width over which the corner is rounded.

    >>> opt = mq.LM(model, mq.losses.Quantile(0.9))  # the median is "quantile"
    """

    majorises: ClassVar[bool] = True
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
        check_positive(self.smoothing, "smoothing")

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
        """Σ w h√(q(1 − q)): the least of each ℓ."""
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
    s = √((ν + 1)/(νσ² + e²)), the root of the quadratic that touches ℓ at e and lies above it.

    Args:
        dof: ν; the fewer, the less an outlier counts.
        sigma: σ, the size of an ordinary error.

    >>> opt = mq.LM(model, mq.losses.StudentT(dof=3, sigma=0.1))  # or "student_t"
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
