"""Losses of the residuals: cost = ½Σ C²ρ((f/C)²), and the correction that makes it a least-squares problem again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .factor import norm

Rho = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]  # z → ρ, ρ', ρ''


def huber(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    inside, z = z <= 1, z.clamp(min=torch.finfo(z.dtype).tiny)
    return (
        torch.where(inside, z, 2 * z.sqrt() - 1),
        torch.where(inside, 1, z.rsqrt()),
        torch.where(inside, 0, -0.5 * z**-1.5),
    )


def soft_l1(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    t = 1 + z
    return 2 * z / (t.sqrt() + 1), t.rsqrt(), -0.5 * t**-1.5


def cauchy(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return z.log1p(), 1 / (1 + z), -1 / (1 + z) ** 2


def arctan(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    t = 1 + z**2
    return z.atan(), 1 / t, -2 * z / t**2


LOSSES: dict[str, Rho] = {"huber": huber, "soft_l1": soft_l1, "cauchy": cauchy, "arctan": arctan}


@dataclass(frozen=True)
class RobustLoss:
    """ρ and its scale C; ρ = None is the plain sum of squares."""

    rho: Rho | None = None
    C: float = 1.0

    def scale(self, f: Tensor) -> Tensor:
        """√(2·cost): (B,)"""
        if self.rho is None:
            return norm(f)
        return self.C * self.rho((f / self.C) ** 2)[0].sum(-1).clamp(min=0).sqrt()

    def decrease(self, f: Tensor, new: Tensor, scale: Tensor) -> Tensor:
        """1 − cost(new)/cost(f), residual by residual: the sums of squares alone would lose half of the digits."""
        unit = scale.unsqueeze(-1)
        if self.rho is None:
            return ((f - new) / unit * ((f + new) / unit)).sum(-1)
        before, after = (self.rho((r / self.C) ** 2)[0] for r in (f, new))
        return ((before - after) * (self.C / unit) ** 2).sum(-1)

    def pull(self, f: Tensor) -> Tensor:
        """ρ'f: ∇cost = Jᵀρ'f."""
        return f if self.rho is None else f * self.rho((f / self.C) ** 2)[1]

    def corrected(self, f: Tensor, J: Tensor) -> tuple[Tensor, Tensor]:
        """f̃, J̃ with J̃ᵀf̃ = ∇cost and J̃ᵀJ̃ ≈ ∇²cost (Triggs et al. 2000), the curvature ρ' + 2zρ'' kept positive."""
        if self.rho is None:
            return f, J
        z = (f / self.C) ** 2
        _, d1, d2 = self.rho(z)
        root = (d1 + 2 * z * d2).clamp(min=torch.finfo(f.dtype).eps).sqrt()
        return f * d1 / root, J * root.unsqueeze(-1)


def checked(rho: Callable[[Any], Any]) -> Rho:
    """The user's ρ of a vector z: three rows like z, as a sequence or stacked, tensors or arrays."""

    def called(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = z.reshape(-1)
        try:
            rows = rho(flat)
        except TypeError:  # written for NumPy, as SciPy's users do
            rows = rho(flat.cpu().numpy())
        if rows is None or len(rows) != 3:
            raise ValueError(f"loss: {rho!r} must return ρ, ρ' and ρ'' of z, three tensors like z")
        rows = [torch.as_tensor(row).to(z, copy=True) for row in rows]  # it may use its own again
        if any(row.shape != flat.shape for row in rows):
            shapes = [tuple(row.shape) for row in rows]
            raise ValueError(f"loss: {rho!r} returned shapes {shapes} for z of shape {tuple(flat.shape)}")
        return rows[0].view_as(z), rows[1].view_as(z), rows[2].view_as(z)

    return called
