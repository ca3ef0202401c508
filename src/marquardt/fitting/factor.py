"""The linear algebra of a step: QR of the Jacobian once per point, then of small matrices for each λ."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

MARGIN = 0.1  # of Δ, on ‖Dp‖: Moré


def norm(a: Tensor, dim: int = -1) -> Tensor:
    """‖a‖₂ without overflow or underflow of the squares."""
    # torch's own takes thirty times as long along any dimension but the last.
    plain: Tensor = torch.linalg.vector_norm(a, dim=dim) if dim == -1 else (a * a).sum(dim).sqrt()
    if bool(((plain > 1e-140) & (plain < 1e140)).all()):
        return plain
    largest = a.abs().amax(dim, keepdim=True)
    safe = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    length: Tensor = torch.linalg.vector_norm(a / safe, dim=dim)
    return length * safe.squeeze(dim)


class Factor:
    """[J f] = Q [R c; 0 ρ] of B problems, with J and f in units of ‖f‖.

    The undamped step solves Rp = −c, a damped one the least-squares problem [R; √λD]p = −[c; 0]. Neither forms RᵀR, and
    no scaling of the columns disturbs them.
    """

    def __init__(self, R: Tensor, c: Tensor) -> None:
        self.R, self.c = R, c  # (B, n, n), (B, n)

    @staticmethod
    def of(J: Tensor, f: Tensor, unit: Tensor | None = None) -> Factor:
        n = J.shape[-1]
        Jf = torch.cat([J, f.unsqueeze(-1)], -1)  # (B, m, n + 1)
        if Jf.shape[1] < n:
            Jf = torch.nn.functional.pad(Jf, (0, 0, 0, n - Jf.shape[1]))
        R = torch.linalg.qr(Jf, mode="r").R[:, :n]  # (B, n, n + 1)
        R = R if unit is None else R / unit[:, None, None]
        return Factor(R[..., :n], R[..., n])

    @staticmethod
    def cat(parts: list[Factor]) -> Factor:
        return Factor(torch.cat([part.R for part in parts]), torch.cat([part.c for part in parts]))

    def __getitem__(self, index: Tensor) -> Factor:
        return Factor(self.R[index], self.c[index])

    def merge(self, index: Tensor, other: Factor) -> Factor:
        """This one, with the problems `index` replaced by those of the other."""
        return Factor(self.R.index_copy(0, index, other.R), self.c.index_copy(0, index, other.c))

    def without(self, fixed: Tensor, p: Tensor) -> Factor:
        """The problem in the other variables, those in `fixed` (B, n) moved by p and then held."""
        R = torch.where(fixed.unsqueeze(-2), 0, self.R)
        hold = torch.diag_embed(fixed.to(R)) * R.abs().amax((-2, -1), keepdim=True).clamp(min=1e-30)
        c = self.c + self.product(torch.where(fixed, p, 0))
        return Factor.of(torch.cat([R, hold], 1), torch.cat([c, torch.zeros_like(c)], 1))

    @cached_property
    def length(self) -> Tensor:
        """Of the columns of J: (B, n)."""
        return norm(self.R, 1)

    @property
    def decrement(self) -> Tensor:
        """‖Qᵀf‖/‖f‖: the cosine of the angle between the residuals and the tangent space, 0 at a stationary point."""
        eps = torch.finfo(self.R.dtype).eps
        finite = self.R.isfinite().all(-1).all(-1)
        length = self.length
        cosine = torch.where(finite, norm(self.c), torch.nan)
        short = (self.R.diagonal(dim1=-2, dim2=-1).abs() <= eps * length).any(-1)
        deficient = (finite & short).nonzero().squeeze(-1)
        if len(deficient):  # Q spans more than J does
            length = torch.where(length > 0, length, 1)[deficient]
            U, s, _ = torch.linalg.svd(self.R[deficient] / length.unsqueeze(-2))
            b = (U.mT @ self.c[deficient].unsqueeze(-1)).squeeze(-1)
            inside = s > s.shape[-1] * eps * s.amax(-1, keepdim=True)
            cosine = cosine.index_copy(0, deficient, norm(torch.where(inside, b, 0)))
        return cosine

    @cached_property
    def slope(self) -> Tensor:
        """The largest cosine of the angle between the residuals and a column of J: (B,)"""
        length = self.length
        return ((self.R.mT @ self.c.unsqueeze(-1)).squeeze(-1) / torch.where(length > 0, length, 1)).abs().amax(-1)

    @property
    def condition(self) -> Tensor:
        """The condition number of J with columns of one length, or a bound where that is small: (B,)."""
        n = self.R.shape[-1]
        # Where no column lies near the span of those before it, the condition is at most √n·2ⁿ over that distance.
        near = self.R.diagonal(dim1=-2, dim2=-1).abs() <= 1e-3 * self.length
        index = (near.any(-1) | (n > 12)).nonzero().squeeze(-1)
        found = torch.full_like(self.c[:, 0], 1e3 * 2**n)
        if len(index):
            length = self.length[index]
            unit = self.R[index] / torch.where(length > 0, length, 1).unsqueeze(-2)
            s: Tensor = torch.linalg.svdvals(torch.where(unit.isfinite(), unit, 0))
            zeros = (length == 0).sum(-1, keepdim=True)
            least = s.gather(-1, (n - 1 - zeros).clamp(min=0)).squeeze(-1)
            found = found.index_copy(0, index, s[:, 0] / least.clamp(min=torch.finfo(s.dtype).tiny))
        return found

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
        outside = (~(norm(D * p) <= (1 + MARGIN) * radius)).nonzero().squeeze(-1)
        if len(outside):
            q = self[outside].damped(radius[outside], D[outside], p[outside])
            p = p.index_copy(0, outside, q)
        return p, norm(D * p) >= (1 - MARGIN) * radius

    def damped(self, radius: Tensor, D: Tensor, p: Tensor) -> Tensor:
        """p(λ) = −(RᵀR + λD²)⁻¹Rᵀc with ‖Dp‖ = Δ, from p(0): Moré's iteration.

        Newton's on 1/‖Dp‖ − 1/Δ, kept between bounds. Each λ takes a QR of [R; √λD], which loses no digits where
        RᵀR would, however different the columns.
        """
        R, c = self.R, self.c
        n = R.shape[-1]
        upper = norm((R.mT @ c.unsqueeze(-1)).squeeze(-1) / D) / radius
        lower = _newton(R, p, D, radius)[1].nan_to_num(
            0.0, 0.0, 0.0
        )  # full rank: the root lies above the first iterate
        lam = torch.where(lower > 0, lower, 1e-3 * upper).clamp(max=upper)
        negligible = torch.finfo(p.dtype).eps ** 2 * upper  # p(λ) is the shortest step then, J being rank deficient
        p = torch.zeros_like(p)
        going = torch.arange(len(p), device=p.device)
        for _ in range(30):
            damping = torch.diag_embed(lam[going].sqrt().unsqueeze(-1) * D[going])
            rhs = torch.nn.functional.pad(c[going], (0, n))
            F = Factor.of(torch.cat([R[going], damping], 1), rhs)
            q = F.undamped().nan_to_num(0.0, 0.0, 0.0)
            excess, newton = _newton(F.R, q, D[going], radius[going])
            p[going] = q
            mu, low, high = lam[going], lower[going], upper[going]
            low, high = (
                torch.where(excess > 0, torch.maximum(low, mu), low),
                torch.where(excess < 0, torch.minimum(high, mu), high),
            )
            lower[going], upper[going] = low, high
            following = torch.maximum(mu + newton.nan_to_num(0.0, 0.0, 0.0), low)
            following = torch.where(following > 0, following, 1e-3 * high)
            lam[going] = torch.minimum(following, high)
            interior = (low == 0) & (excess < 0) & (mu <= negligible[going])
            going = going[(excess.abs() > MARGIN) & ~interior]
            if not len(going):
                break
        return p


def _newton(R: Tensor, p: Tensor, D: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """‖Dp‖/Δ − 1, and Newton's correction of λ for p = p(λ), R that of [R; √λD]."""
    length = norm(D * p)
    excess = length / radius - 1
    w = torch.linalg.solve_triangular(R.mT, (D * (D * p / length.unsqueeze(-1))).unsqueeze(-1), upper=False)
    slope = norm(w.squeeze(-1))
    return excess, excess / slope / slope  # in this order: the square may overflow
