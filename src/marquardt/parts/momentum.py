"""Momentum: how much of the previous step goes along with the plain one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ..curvature.contract import Damped
from ..deferred import at_hand


class Momentum(Protocol):
    @property
    def recordable(self) -> bool:
        """Whether `refine` works on tensors alone, so that a step can be recorded as a CUDA graph."""
        ...

    def refine(self, newton: Tensor, previous: Tensor | None, H: Damped, same_data: bool) -> Tensor:
        """The step dθ from the plain one −H⁻¹g and the previous accepted step. One that says `shares = True` has its
        products of two steps from H, and so works with sharded parameters."""
        ...


@dataclass(frozen=True)
class AdaptiveMomentum:
    """dθ = −α·H⁻¹g + β·dθₜ₋₁ with gᵀdθ = −ξ·δP·√I_GG and dθᵀH dθ = δP² (the paper, section 2.4).

    I_GG = gᵀH⁻¹g, I_GF = gᵀdθₜ₋₁, I_FF = dθₜ₋₁ᵀH dθₜ₋₁:
    β = √((1−ξ²)·I_GG·δP² / (I_FF·I_GG − I_GF²)),  α = (ξ·δP·√I_GG + β·I_GF)/I_GG.

    Args:
        xi: ξ, between 0 and 1: the cosine between dθ and the plain step, in the metric of H.
        dP: δP, the length of the step in the metric of H, in units of √loss; `math.inf` leaves it to `cap`.
        cap: whether δP is at most the length √I_GG of the plain step.
        same_data: whether there is momentum only on the same data, and none on changing batches.

    >>> opt = mq.LM(model, "mse", momentum=mq.AdaptiveMomentum(xi=0.9, dP=0.6, cap=True))
    """

    xi: float = 0.9  # the authors' code
    dP: float = 0.6  # the authors' code; in units of √loss
    cap: bool = (
        False  # δP ← min(δP, √I_GG): guarantees a decrease of the model, where a fixed δP stalls near the optimum
    )
    same_data: bool = False  # True: not on changing batches, where the previous step belongs to another loss
    shares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.xi < 1:
            raise ValueError(
                f"AdaptiveMomentum(xi={self.xi!r}): ξ must lie strictly between 0 and 1; the paper uses 0.9"
            )
        if not self.dP > 0:
            raise ValueError(f"AdaptiveMomentum(dP={self.dP!r}): δP must be positive; the paper uses 0.6")
        if math.isinf(self.dP) and not self.cap:
            raise ValueError(
                "AdaptiveMomentum(dP=inf) needs cap=True: the step length is then the Newton decrement alone"
            )

    @property
    def recordable(self) -> bool:
        return True

    def refine(self, newton: Tensor, previous: Tensor | None, H: Damped, same_data: bool) -> Tensor:
        if previous is None or (self.same_data and not same_data):
            return newton
        g = H.gradient
        GG, GF, FF = at_hand(-H.dot(g, newton), H.dot(g, previous), H.quadratic(previous))
        # 1 − cos² of the angle between the two directions in the metric H; the bare determinant loses it to rounding.
        sine2 = (GF * GF / (FF * GG)).neg_().add_(1)
        sound = (GG > 0) & (FF > 0) & FF.isfinite() & (sine2 > math.sqrt(torch.finfo(g.dtype).eps))
        dP = GG.sqrt().clamp(max=self.dP) if self.cap else self.dP
        beta = dP * ((FF * sine2).reciprocal() * (1 - self.xi**2)).sqrt()
        alpha = (self.xi * dP * GG.sqrt() + beta * GF) / GG
        return alpha.where(sound, 1) * newton + beta.where(sound, 0) * previous


@dataclass(frozen=True)
class QuadraticMomentum:
    """dθ = −α·H⁻¹g + β·dθₜ₋₁ with the least gᵀdθ + ½dθᵀ(G + λD)dθ (Martens & Grosse 2015, sections 6.4 and 7).

    G is that of the batch itself (`Curvature.products`), which knows what lies between layers even if H does not: α is
    then the length at which their steps do not overshoot together.

    >>> opt = mq.LM(model, "mse", momentum=mq.QuadraticMomentum())
    """

    shares: ClassVar[bool] = True

    @property
    def recordable(self) -> bool:
        return True

    def refine(self, newton: Tensor, previous: Tensor | None, H: Damped, same_data: bool) -> Tensor:
        if previous is None:
            previous = torch.zeros_like(newton)
        M = H.products(torch.stack([newton, previous]))  # (2, 2)
        g = H.gradient
        p, q, a, b, c = at_hand(-H.dot(g, newton), -H.dot(g, previous), M[0, 0], M[0, 1], M[1, 1])
        # As in AdaptiveMomentum: two directions that rounding cannot tell from one count as one.
        sine2 = 1 - b * b / (a * c)
        sound = (c > 0) & c.isfinite() & (sine2 > math.sqrt(torch.finfo(g.dtype).eps))
        alpha = ((p - q * b / c) / (a * sine2)).where(sound, p / a)
        beta = ((q - p * b / a) / (c * sine2)).where(sound, 0)
        return alpha.where(a > 0, 1) * newton + beta.where(a > 0, 0) * previous
