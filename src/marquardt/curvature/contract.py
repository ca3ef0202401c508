"""The contract of the curvature, and the one factorisation that the representations share."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..linearize import Linearization


class Curvature(Protocol):
    """G at one point."""

    gradient: Tensor  # g: (n,)
    rank: int  # of G at most: the smaller of parameters and rows, in the largest batch so far
    notes: list[str]  # escalations since the last step, in words

    def __matmul__(self, v: Tensor) -> Tensor:
        """Gv: (n,) → (n,)"""
        ...

    def quadratic(self, v: Tensor) -> Tensor:
        """vᵀGv, cheaper than the product in some representations"""
        ...

    def recall(self, past: Tensor | None, steps: int) -> Tensor | None:
        """Mixes in what earlier batches left, after so many steps; returns what to keep for later ones, or None."""
        ...

    def diagonal(self) -> Tensor:
        """diag G: (n,)"""
        ...

    def newton(self, damping: Tensor) -> Tensor:
        """(G + diag damping)⁻¹g; damping is one number () or one per parameter (n,)"""
        ...


class Representation(Protocol):
    """A way to represent G, chosen before there is one."""

    @property
    def chunk(self) -> int | None:
        """Samples that are linearised at once."""
        ...

    def represent(self, lin: Linearization) -> Curvature: ...


class FactorizationError(ArithmeticError):
    """G + λD is not positive definite in floating point: the step fails, and a larger λ is the way out."""


def norm(M: Tensor, s: Tensor) -> Tensor:
    """‖diag s · M · diag s‖ for positive semi-definite M, by a few power iterations: right to a factor of two."""
    v = s
    for _ in range(6):
        v = s * (M @ (s * v / torch.linalg.vector_norm(v)))
    length: Tensor = torch.linalg.vector_norm(v)
    return length


def spd_solve(H: Tensor, b: Tensor, notes: list[str]) -> Tensor:
    """H⁻¹b for symmetric positive definite H by Cholesky; on failure in float64, then with jitter."""
    # Unit diagonal first: positive definiteness then no longer depends on the units of the parameters.
    diagonal = H.diagonal().clone()
    s = torch.where(diagonal > 0, diagonal, torch.ones_like(diagonal)).rsqrt()
    M = H * s * s[:, None]
    for dtype in dict.fromkeys((H.dtype, torch.float64)):
        M = M.to(dtype)
        for jitter in (0.0, 1e2 * torch.finfo(torch.float64).eps) if dtype == torch.float64 else (0.0,):
            if jitter:
                M.diagonal().add_(jitter * len(M))
            L, info = torch.linalg.cholesky_ex(M)
            if not int(info):
                y = torch.linalg.solve_triangular(L, (s * b).to(dtype)[:, None], upper=False)
                x: Tensor = torch.linalg.solve_triangular(L.mT, y, upper=True)[:, 0].to(b.dtype) * s
                if bool(x.isfinite().all()):
                    if dtype != H.dtype:
                        notes.append("factored in float64")
                    if jitter:
                        notes.append("factored with jitter")
                    return x
    raise FactorizationError("the damped curvature could not be factored")
