"""Preconditioned conjugate gradients with the stopping rule of Hessian-free optimisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..deferred import floats
from .direct import FactorizationError

# Iterates number ⌈1.3ʲ⌉ are kept for backtracking: Martens, section 4.6.
SPACING = 1.3


class Iterate(NamedTuple):
    x: Tensor  # (n,)
    number: int
    gx: float  # gᵀx
    xHx: float  # xᵀ(G + A)x


def conjugate_gradients(
    H: Callable[[Tensor], Tensor],
    g: Tensor,
    M: Tensor | Callable[[Tensor], Tensor] | None,
    start: Tensor | None,
    iterations: int,
    tolerance: float,
    *,
    keep: bool = True,
    dot: Callable[[Tensor, Tensor], Tensor] = torch.dot,
) -> tuple[list[Iterate], bool]:
    """Minimises φ(x) = ½xᵀHx − gᵀx, preconditioned by a diagonal M or by r ↦ M⁻¹r: some of the iterates, the last
    one always, and whether negative curvature ended it.

    Stops at i > k, φᵢ < 0, (φᵢ − φᵢ₋ₖ)/φᵢ < kε with k = max(10, ⌈0.1·i⌉) (Martens, section 4.4).
    """

    def divided(r: Tensor) -> Tensor:
        if M is None:
            return r.clone()
        return r / M if isinstance(M, Tensor) else M(r)

    x, r, phi, gx, xr = torch.zeros_like(g), g.clone(), 0.0, 0.0, 0.0
    if start is not None:
        residual = g - H(start)
        sx, sr = floats(dot(g, start), dot(residual, start))
        if sx > sr and sx + sr > 0:  # positive curvature, and better than 0: φ = −½(gᵀx + rᵀx)
            x, r, gx, xr, phi = start, residual, sx, sr, -0.5 * (sx + sr)
    z = divided(r)
    p = z.clone()
    rz, scale = floats(dot(r, z), dot(g, divided(g)))
    phis, iterates, curved = [phi], [], False
    marks = {math.ceil(SPACING**j) for j in range(100)} if keep else set()
    i = 0
    while i < iterations and rz > torch.finfo(g.dtype).eps ** 2 * scale:
        Hp = H(p)
        (pHp,) = floats(dot(p, Hp))
        if not math.isfinite(pHp):
            raise FactorizationError("conjugate gradients overflowed")
        if pHp <= 0:
            curved = True
            if i == 0 and gx == 0:  # the preconditioned gradient, as long as if the curvature had the other sign
                x = p.mul_(rz / -pHp if pHp < 0 else 1.0)
                (gx,) = floats(dot(g, x))
                xr = gx - pHp * (rz / pHp) ** 2 if pHp < 0 else gx
            break
        if i in marks:
            iterates.append(Iterate(x.clone(), i, gx, gx - xr))
        x.add_(p, alpha=rz / pHp)
        r.sub_(Hp, alpha=rz / pHp)
        z = divided(r)
        old = rz
        rz, gx, xr = floats(dot(r, z), dot(g, x), dot(r, x))
        i += 1
        phis.append(-0.5 * (gx + xr))
        if not math.isfinite(phis[i] + rz):
            raise FactorizationError("conjugate gradients overflowed")
        k = max(10, math.ceil(0.1 * i))
        if i > k and phis[i] < 0 and (phis[i] - phis[i - k]) / phis[i] < k * tolerance:
            break
        p.mul_(rz / old).add_(z)
    return [*iterates, Iterate(x, i, gx, gx - xr)], curved
