"""Classes in an order: the cumulative logit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Fault, Loss, Target, same_device


@dataclass(frozen=True, kw_only=True, eq=False)
class Ordinal(Loss):
    """K classes in an order, y in 0, …, K − 1 (N,), outputs z (N, K − 1) with P(y ≤ k) = σ(zₖ), z₀ < z₁ < …:
    with b = z_y, a = z_{y−1} and d = b − a (at the ends σ(b) = 1, σ(a) = 0),

        ℓ = −log(σ(b) − σ(a)) = log(1 + e^−b) + log(1 + e^a) − log(1 − e^−d),
        S = columns √(σ(b)σ(−b)) e_b,  √(σ(a)σ(−a)) e_a,  (e_b − e_a)/(2 sinh ½d).

    The thresholds live in the model: it returns zₖ = tₖ − m, m the place of a sample and tₖ increasing, such as the
    cumulative sums of F.softplus of parameters.

    >>> class Ordered(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.place, self.gaps = nn.Linear(2, 1), nn.Parameter(torch.zeros(2))
    ...
    ...     def forward(self, x):
    ...         return nn.functional.softplus(self.gaps).cumsum(0) - self.place(x)
    >>> opt = mq.LM(Ordered(), mq.losses.Ordinal())  # or "ordinal"
    >>> step = opt.step(x, labels)
    """

    likelihood: ClassVar[str | None] = "ordered"

    def ends(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """b, a and the masks of the samples that have them: (N,)"""
        last = z.shape[1] - 1
        b, a = (z.gather(1, k.clamp(0, last)[:, None])[:, 0] for k in (y.long(), y.long() - 1))
        return b, a, y <= last, y >= 1

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        b, a, has_b, has_a = self.ends(z, y)
        d = (b - a).where(has_b & has_a, 1)
        between = (-d).exp().neg().log1p().neg()  # −log(1 − e^−d), NaN if d < 0
        return F.softplus(-b) * has_b + F.softplus(a) * has_a + between * (has_b & has_a)

    def slopes(self, z: Tensor, y: Tensor) -> Tensor:
        """∂ℓ/∂b, ∂ℓ/∂a and ∂ℓ/∂d of the three terms, 0 if a sample has no such: (3, N)"""
        b, a, has_b, has_a = self.ends(z, y)
        d = (b - a).where(has_b & has_a, 1)
        return torch.stack((-(-b).sigmoid() * has_b, a.sigmoid() * has_a, -1 / d.expm1() * (has_b & has_a)))

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.einsum("rn,rnc->nc", self.slopes(z, y), self.directions(z, y))

    def directions(self, z: Tensor, y: Tensor) -> Tensor:
        """e_b, e_a and e_b − e_a, without the units that a sample does not have: (3, N, K − 1)"""
        places = torch.arange(z.shape[1], device=z.device)
        e_b, e_a = ((places == k[:, None]).to(z) for k in (y.long(), y.long() - 1))
        return torch.stack((e_b, e_a, e_b - e_a))

    def factors(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        b, a, _, _ = self.ends(z, y)
        s = torch.stack(((b.sigmoid() * (-b).sigmoid()).sqrt(), (a.sigmoid() * (-a).sigmoid()).sqrt(), (b - a) / 2))
        s[2] = 0.5 / s[2].sinh().abs()
        # as for elementwise losses: Su is the gradient for any s > 0, also where s² underflows
        s = s.clamp(torch.finfo(z.dtype).eps, 1 / torch.finfo(z.dtype).eps)
        slopes = self.slopes(z, y)
        S = s[..., None] * self.directions(z, y) * (slopes != 0)[..., None]  # (3, N, K − 1)
        return S.permute(1, 2, 0)[:, None], (slopes / s).mT[:, None]

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        if not isinstance(y, Tensor) or y.is_floating_point() or y.dtype == torch.bool or y.is_complex():
            got = y.dtype if isinstance(y, Tensor) else type(y).__name__
            raise TypeError(f"Ordinal needs a tensor of class indices as targets, got {got}: use targets.long()")
        same_device(y, z, "targets")
        if z.ndim != 2 or y.shape != z.shape[:1]:
            raise ValueError(
                f"outputs have shape {tuple(z.shape)}, targets {tuple(y.shape)}: Ordinal needs (N, K − 1) for K "
                "classes, and class indices (N,)"
            )
        K = z.shape[1] + 1
        advice = f"{K - 1} outputs tell {K} classes apart, so indices run from 0 to {K - 1}"
        steps = z.diff(dim=1)
        rising = "the outputs of a sample must increase, see Ordinal: return F.softplus(gaps).cumsum(0) - place"
        return [Fault((y < 0) | (y >= K), y, "targets", advice), Fault(steps <= 0, steps, "a step of outputs", rising)]
