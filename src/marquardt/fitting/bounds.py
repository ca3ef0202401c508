"""Bounds: the step within a box, by fixing the variables that meet it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..deferred import ask
from .factor import QRFactor, norm


@dataclass(frozen=True)
class Box:
    """lower ≤ x ≤ upper, (B, n) each."""

    lower: Tensor
    upper: Tensor

    def __getitem__(self, index: Tensor) -> Box:
        return Box(self.lower[index], self.upper[index])

    def side(self, x: Tensor) -> Tensor:
        """−1 where x is at its lower bound, 1 at the upper one, 0 between."""
        return (x >= self.upper).to(torch.int64) - (x <= self.lower).to(torch.int64)

    def held(self, x: Tensor, g: Tensor) -> Tensor:
        """Which variables are at a bound that the negative gradient points out of: (B, n)."""
        side = self.side(x)
        return ((side < 0) & (g > 0)) | ((side > 0) & (g < 0)) | (self.lower == self.upper)

    def free(self, factor: QRFactor, x: Tensor) -> QRFactor:
        """The problem in the variables that may move."""
        g = (factor.R.mT @ factor.c.unsqueeze(-1)).squeeze(-1)
        held = self.held(x, g)
        return factor if ask((~held).all(-1)) else factor.without(held, torch.zeros_like(x))

    def within(self, factor: QRFactor, x: Tensor, radius: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
        """A step with ‖Dp‖ ≤ Δ and x + p in the box, and whether the region holds it back.

        Variables that would leave the box go to their bound and stay there, and the model is minimised in the others,
        until none leaves. As Δ → 0 this is a step along the projected scaled gradient, which descends.
        """
        low, high = self.lower - x, self.upper - x
        fixed, p, rest, left = torch.zeros_like(x, dtype=torch.bool), torch.zeros_like(x), factor, radius
        for _ in range(x.shape[-1] + 1):
            q, held = rest.within(left, D)
            q = torch.where(fixed, p, q)
            leaves = ((q < low) | (q > high)) & ~fixed
            if ask((~leaves).all(-1)):
                return q, held
            fixed = fixed | leaves
            p = torch.where(fixed, q.clamp(low, high), 0)
            left = (1 - (norm(D * p) / radius) ** 2).clamp(min=0.01).sqrt() * radius
            rest = factor.without(fixed, p)
        return p, held

    def reach(self, x: Tensor, p: Tensor) -> Tensor:
        """x + p, with bounds met exactly."""
        y = torch.where(p <= self.lower - x, self.lower, x + p)
        return torch.where(p >= self.upper - x, self.upper, y)
