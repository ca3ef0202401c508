"""The linear algebra of a step, also within bounds: QR of the Jacobian once per point, small matrices for each λ."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..deferred import ask, recording

MARGIN = 0.1  # of Δ, on ‖Dp‖: Moré
ROUNDS = 30  # most values of λ for one step
RECORDED = 3  # and in a recording, which cannot stop early: most steps take one or two


def norm(a: Tensor, dim: int = -1) -> Tensor:
    """‖a‖₂ without overflow or underflow of the squares."""
    # torch's own takes thirty times as long where the numbers do not lie side by side.
    near = dim == -1 and a.stride(-1) == 1
    plain: Tensor = torch.linalg.vector_norm(a, dim=dim) if near else (a * a).sum(dim).sqrt()
    safe = (plain > 1e-140) & (plain < 1e140)
    if ask(safe if safe.ndim == 1 else safe.all(-1)):
        return plain
    largest = a.abs().amax(dim, keepdim=True)
    unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    length: Tensor = torch.linalg.vector_norm(a / unit, dim=dim)
    return length * unit.squeeze(dim)


class Subset:
    """Some of B problems: those where `mask` (B,) holds. In a recording, where no shape may depend on it, it is all of
    them, and the mask decides what is kept."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self.index = None if recording() else mask.nonzero().squeeze(-1)
        self.whole = self.index is None or len(self.index) == len(mask)
        self.empty = self.index is not None and not len(self.index)

    def of(self, t: Any, instead: Tensor | None = None) -> Any:
        """Their part of what is indexed like a tensor; `instead` is for the others of a recording."""
        if self.index is None and instead is not None:
            return self.into(instead, t)
        return t if self.whole else t[self.index]

    def into(self, old: Tensor, new: Tensor) -> Tensor:
        """A tensor of all problems, with theirs replaced."""
        if self.index is None:
            return torch.where(self.mask.view(-1, *(1,) * (old.ndim - 1)), new, old)
        return new if self.whole else old.index_copy(0, self.index, new)

    def narrowed(self, mask: Tensor) -> Subset:
        """Those of the part where another mask holds, which has an entry for each of the part."""
        return Subset(self.into(torch.zeros_like(self.mask), mask))


class QRFactor:
    """[J f] = Q [R c; 0 ρ] of B problems, with J and f in units of ‖f‖.

    The undamped step solves Rp = −c, a damped one the least-squares problem [R; √λD]p = −[c; 0]. Neither forms RᵀR, and
    no scaling of the columns disturbs them.
    """

    def __init__(self, Rc: Tensor) -> None:
        self.Rc = Rc  # (B, n, n + 1)
        self.R, self.c = Rc[..., :-1], Rc[..., -1]  # (B, n, n), (B, n)

    @staticmethod
    def of(J: Tensor, f: Tensor, unit: Tensor | None = None) -> QRFactor:
        n = J.shape[-1]
        columns = torch.cat([J.mT, f.unsqueeze(-2)], -2)  # (B, n + 1, m)
        if columns.shape[-1] < n:
            columns = torch.nn.functional.pad(columns, (0, n - columns.shape[-1]))
        Jf = columns.mT  # as LAPACK has it: factored in place, without a copy
        torch.geqrf(Jf, out=(Jf, Jf.new_empty(len(Jf), min(Jf.shape[1:]))))
        R = Jf[:, :n].triu()  # (B, n, n + 1)
        return QRFactor(R if unit is None else R / unit[:, None, None])

    def without(self, fixed: Tensor, p: Tensor) -> QRFactor:
        """The problem in the other variables, those in `fixed` (B, n) moved by p and then held.

        Their columns keep their lengths: what rounding of x does to the residuals is measured by them.
        """
        R = torch.where(fixed.unsqueeze(-2), 0, self.R)
        hold = torch.diag_embed(torch.where(fixed, self.length.clamp(min=1e-30), 0))
        c = self.c + self.product(torch.where(fixed, p, 0))
        return QRFactor.of(torch.cat([R, hold], 1), torch.cat([c, torch.zeros_like(c)], 1))

    @cached_property
    def length(self) -> Tensor:
        """Of the columns of J: (B, n)."""
        return norm(self.R, 1)

    @property
    def unit(self) -> Tensor:
        """R with columns of length 1, or 0: (B, n, n)."""
        return self.R / torch.where(self.length > 0, self.length, 1).unsqueeze(-2)

    @property
    def decrement(self) -> Tensor:
        """‖Qᵀf‖/‖f‖: the cosine of the angle between the residuals and the tangent space, 0 at a stationary point."""
        eps = torch.finfo(self.R.dtype).eps
        finite = self.R.isfinite().all(-1).all(-1)
        cosine = torch.where(finite, norm(self.c), torch.nan)
        short = finite & (self.R.diagonal(dim1=-2, dim2=-1).abs() <= eps * self.length).any(-1)
        if not ask(~short):  # Q spans more than J does
            deficient = Subset(short)
            U, s, _ = torch.linalg.svd(deficient.of(self.unit))
            b = (U.mT @ deficient.of(self.c).unsqueeze(-1)).squeeze(-1)
            inside = s > s.shape[-1] * eps * s.amax(-1, keepdim=True)
            cosine = deficient.into(cosine, norm(torch.where(inside, b, 0)))
        return cosine

    @cached_property
    def gradient(self) -> Tensor:
        """Jᵀf/‖f‖²: (B, n)."""
        return (self.R.mT @ self.c.unsqueeze(-1)).squeeze(-1)

    @cached_property
    def cosines(self) -> Tensor:
        """Of the angles between the residuals and the columns of J: (B, n)."""
        return (self.gradient / torch.where(self.length > 0, self.length, 1)).abs()

    @cached_property
    def slope(self) -> Tensor:
        """The largest of these cosines: (B,)."""
        return self.cosines.amax(-1)

    @property
    def condition(self) -> Tensor:
        """The condition number of J with columns of one length, or a bound where that is small: (B,)."""
        n = self.R.shape[-1]
        # Where no column lies near the span of those before it, the condition is at most √n·2ⁿ over that distance.
        near = self.R.diagonal(dim1=-2, dim2=-1).abs() <= 1e-3 * self.length
        some = Subset(near.any(-1) | (n > 12))
        condition = torch.full_like(self.c[:, 0], 1e3 * 2**n)
        if some.empty:
            return condition
        s: Tensor = torch.linalg.svdvals(some.of(self.unit).nan_to_num(0.0, 0.0, 0.0))
        zeros = (some.of(self.length) == 0).sum(-1, keepdim=True)
        least = s.gather(-1, (n - 1 - zeros).clamp(min=0)).squeeze(-1)
        return some.into(condition, s[:, 0] / least.clamp(min=torch.finfo(s.dtype).tiny))

    def product(self, p: Tensor) -> Tensor:
        """Rp, which is Jp turned by Qᵀ: (B, n)."""
        return (self.R @ p.unsqueeze(-1)).squeeze(-1)

    def predicted(self, p: Tensor) -> Tensor:
        """1 − ‖f + Jp‖²/‖f‖², what the linear model promises of a step: (B,)."""
        Rp = self.product(p)
        return -(2 * self.c + Rp).mul(Rp).sum(-1)

    def undamped(self) -> Tensor:
        """The Gauss-Newton step; infinite or not a number where J has not full rank."""
        p: Tensor = torch.linalg.solve_triangular(self.R, -self.c.unsqueeze(-1), upper=True)
        return p.squeeze(-1)  # (B, n)

    def within(self, radius: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
        """The step that minimises the model within ‖Dp‖ ≤ Δ, to 10 % of Δ, and whether the region holds it back."""
        p = self.undamped()
        # Written so that a NaN is outside.
        outside = Subset(~(norm(D * p) <= (1 + MARGIN) * radius))
        if not outside.empty:
            Rc, *rest = (outside.of(t) for t in (self.Rc, radius, D, p, outside.mask))
            p = outside.into(p, QRFactor(Rc).damped(*rest))
        return p, norm(D * p) >= (1 - MARGIN) * radius

    def damped(self, radius: Tensor, D: Tensor, p: Tensor, going: Tensor) -> Tensor:
        """p(λ) = −(RᵀR + λD²)⁻¹Rᵀc with ‖Dp‖ = Δ, from p(0), for the problems `going`: Moré's iteration.

        Newton's on 1/‖Dp‖ − 1/Δ, kept between bounds. Each λ takes a QR of [R; √λD], which loses no digits where
        RᵀR would, however different the columns.
        """
        n = self.R.shape[-1]
        upper = norm(self.gradient / D) / radius
        first = _newton(self.R, p, D, radius)[1]
        lower = first.nan_to_num(0.0, 0.0, 0.0)  # full rank: the root lies above the first iterate
        lam = torch.where(lower > 0, lower, 1e-3 * upper).clamp(max=upper)
        negligible = torch.finfo(p.dtype).eps ** 2 * upper  # p(λ) is the shortest step then, J being rank deficient
        p = torch.zeros_like(p)
        part = Subset(going)
        for _ in range(RECORDED if recording() else ROUNDS):
            R, c, d, delta, mu, low, high, least = (
                part.of(t) for t in (self.R, self.c, D, radius, lam, lower, upper, negligible)
            )
            damping = torch.diag_embed(mu.sqrt().unsqueeze(-1) * d)
            F = QRFactor.of(torch.cat([R, damping], 1), torch.nn.functional.pad(c, (0, n)))
            q = F.undamped().nan_to_num(0.0, 0.0, 0.0)
            excess, newton = _newton(F.R, q, d, delta)
            low = torch.where(excess > 0, torch.maximum(low, mu), low)
            high = torch.where(excess < 0, torch.minimum(high, mu), high)
            following = torch.maximum(mu + newton.nan_to_num(0.0, 0.0, 0.0), low)
            following = torch.minimum(torch.where(following > 0, following, 1e-3 * high), high)
            p, lam = part.into(p, q), part.into(lam, following)
            lower, upper = part.into(lower, low), part.into(upper, high)
            interior = (low == 0) & (excess < 0) & (mu <= least)
            part = part.narrowed((excess.abs() > MARGIN) & ~interior)
            if part.empty:
                break
        if recording():
            ask(~part.mask)
        return p


def _newton(R: Tensor, p: Tensor, D: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """‖Dp‖/Δ − 1, and Newton's correction of λ for p = p(λ), R that of [R; √λD]."""
    length = norm(D * p)
    excess = length / radius - 1
    w = torch.linalg.solve_triangular(R.mT, (D * (D * p / length.unsqueeze(-1))).unsqueeze(-1), upper=False)
    slope = norm(w.squeeze(-1))
    return excess, excess / slope / slope  # in this order: the square may overflow


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
        held = self.held(x, factor.gradient)
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
