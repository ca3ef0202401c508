"""A normal distribution whose mean and variance are both outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Fault, Loss, Target, check_positive


@dataclass(frozen=True, kw_only=True, eq=False)
class GaussianNLL(Loss):
    """Outputs z (N, 2k, …): means m = z[:, :k], then log v, v the variance; with e = m − y of each of the k targets:

        ℓ = ½(log v + e²/v),  ∂ℓ/∂m = e/v,  ∂ℓ/∂log v = ½(1 − e²/v),  S = diag(v^−½, 2^−½).

    SSᵀ is the mean of ∂²ℓ/∂z² over y of this distribution, for ℓ is not convex. With `variance` the second half is v
    itself, at least `eps`: `nn.GaussianNLLLoss`; then S = diag(v^−½, 2^−½/v). `full` adds ½ log 2π. ℓ has no lower
    bound: where e = 0 it falls with v. A model may return (mean, variance) as a tuple; of outputs that have names
    {("mean", "variance"): loss} says which is which.

    Args:
        variance: whether the model returns v, and not log v.
        eps: the least v.
        full: whether ½ log 2π is part of the loss.

    >>> opt = mq.LM(nn.Linear(2, 2), mq.losses.GaussianNLL())  # or "gaussian_nll"
    >>> step = opt.step(x, y)
    """

    fisher: ClassVar[bool] = True
    outputs_taken: ClassVar[int] = 2
    likelihood: ClassVar[str | None] = "normal with variance"
    variance: bool = False
    eps: float = 1e-6
    full: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.eps, "eps")

    def parts(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """e, v and ∂v/∂z of its output: (N, k, …) each"""
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
    """Of two outputs the mean has lost its shape, and the targets have not."""
    return y.reshape(mean.shape) if y.shape[:1] == mean.shape[:1] and y.numel() == mean.numel() else y
