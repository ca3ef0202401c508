"""The covariance of fitted parameters: which points and parameters count for it, and why there may be none."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LIGHT = 1e-5  # of the largest 1/σ: what has less may be there to fill up an array
NOTHING = 1e-8  # part of the cost, and of what determines one parameter, that such a point has at most
SHARE = 1e-3  # of a direction that the data leave free: parameters with less have no part in it


@dataclass(frozen=True)
class Covariance:
    """Of B fits with n parameters each; infinite where the data do not determine it."""

    matrix: Tensor  # (B, n, n), zero for fixed parameters
    points: Tensor  # (B,), those with weight
    dof: Tensor  # (B,), points less free parameters
    noise: Tensor  # (B,), standard deviation of a point with sigma = 1
    still: Tensor  # (B, n), free parameters without influence
    alike: Tensor  # (B, n), those that only count together with others

    @property
    def unknown(self) -> Tensor:
        return ~self.matrix.isfinite().flatten(1).all(-1)

    def reason(self, i: int, names: list[str], known: bool) -> str:
        """Why that of fit i is infinite, and the way out."""
        m, n = int(self.points[i]), int(self.points[i] - self.dof[i])
        still, alike = ([names[j] for j in which[i].nonzero().flatten().tolist()] for which in (self.still, self.alike))
        if m < n:
            return f"{m} points do not determine {n} parameters. Take more points, or fix parameters by equal bounds"
        if still:
            return (
                f"the curve does not depend on {_listed(still)} there. Start elsewhere (p0), or fix what has no "
                "influence by equal bounds"
            )
        if alike:
            return f"the points do not tell {_listed(alike)} apart. Leave one out, or fix it by equal bounds"
        if m == n and not known:
            return (
                f"as many points as parameters, {n}, leave nothing to estimate the noise from. Take more points, or "
                "pass sigma and absolute_sigma=True"
            )
        return "the Jacobian there is not finite or too large"


def covariance(J: Tensor, cost: Tensor, own: Tensor, weight: Tensor, fixed: Tensor, known: bool) -> Covariance:
    """noise²(JᵀJ)⁻¹ by an SVD of J with columns of length 1, for the parameters that are not fixed.

    J (B, m, n) is weighted, as the residuals `own` (B, m) are; `weight` (B, m) is that of these, 1/σ, and `fixed`
    (B, n) says which bounds are equal. `known`: whether σ is, so that the noise is 1.
    """
    J = torch.where(fixed.unsqueeze(-2), 0, J)
    length = J.norm(dim=-2)
    unit = torch.where(length > 0, length, 1)
    U, s, Vh = torch.linalg.svd((J / unit.unsqueeze(-2)).nan_to_num(0.0, 0.0, 0.0), full_matrices=False)
    inside = s > max(J.shape[-2:]) * torch.finfo(J.dtype).eps * s[..., :1]

    # A point without weight is no observation, and one of almost none neither if nothing shows that it is there. One of
    # little weight may matter: where the curve varies by decades, or one point is nearly exact.
    leverage = (U * inside.unsqueeze(-2)).square().sum(-1)
    unseen = (leverage <= NOTHING) & (own.square() <= 2 * NOTHING * cost.unsqueeze(-1))
    counts = ~((weight == 0) | ((weight <= LIGHT * weight.amax(-1, keepdim=True)) & unseen))
    points, free = counts.sum(-1), (~fixed).sum(-1)
    dof = points - free
    noise = torch.ones_like(cost) if known else (2 * cost / dof.clamp(min=1)).sqrt()

    V = Vh.mT * (inside / torch.where(inside, s, 1)).unsqueeze(-2) / unit.unsqueeze(-1)
    matrix = V @ V.mT * noise.to(J)[..., None, None] ** 2
    some = (inside.sum(-1) == free) & (known | (dof > 0)) & J.isfinite().flatten(1).all(-1)
    matrix = torch.where(some[..., None, None], matrix, math.inf)
    matrix = torch.where(fixed.unsqueeze(-1) | fixed.unsqueeze(-2), 0, matrix)

    still = (length == 0) & ~fixed
    # What of each parameter is in no direction that the data determine: 1 less the part in those that they do.
    lost = 1 - (Vh * inside.unsqueeze(-1)).square().sum(-2)
    return Covariance(matrix, points, dof, noise, still, (lost > SHARE**2) & ~still & ~fixed)


def _listed(names: list[str]) -> str:
    if len(names) > 6:
        names = [*names[:5], f"{len(names) - 5} others"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
