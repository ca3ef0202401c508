"""Two classes −1 and 1, by the side on which an output lies: squared hinge, soft margin."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from .base import Elementwise, Fault, Target, check_positive


@dataclass(frozen=True, eq=False)
class Hinge(Elementwise):
    """The squared hinge, y = ±1, e = max(0, margin − yz):  ℓ = e²,  ℓ′ = −2ye,  s = √2 if e > 0 else 0.

    Args:
        margin: beyond which an output costs nothing.

    >>> opt = mq.LM(model, mq.losses.Hinge())  # or "hinge"
    >>> step = opt.step(x, y.sign())
    """

    margin: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.margin, "margin")

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return (self.margin - y * z).relu().square()

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return -2 * y * (self.margin - y * z).relu()

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return math.sqrt(2) * (y * z < self.margin).to(z)

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        return [*super().faults(z, y), signs(y, "Hinge")]


@dataclass(frozen=True, kw_only=True, eq=False)
class SoftMargin(Elementwise):
    """y = ±1:  ℓ = log(1 + e^−yz),  ℓ′ = −yσ(−yz),  s = √(σ(yz)σ(−yz)):  `nn.SoftMarginLoss`.

    >>> opt = mq.LM(model, mq.losses.SoftMargin())  # or "soft_margin"
    >>> step = opt.step(x, y.sign())
    """

    likelihood: ClassVar[str | None] = "bernoulli"

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return F.softplus(-y * z)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return -y * (-y * z).sigmoid()

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return (z.sigmoid() * (-z).sigmoid()).sqrt()

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        return [*super().faults(z, y), signs(y, "SoftMargin")]


def signs(y: Tensor, name: str) -> Fault:
    return Fault(y.abs() != 1, y, "targets", f"{name} needs targets −1 and 1: 2y − 1 of 0 and 1")
