"""G through its dual: J̃J̃ᵀ is m×m (m rows), however many parameters there are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..linearize import Linearization
from .contract import norm, spd_solve
from .dense import check_chunk

# The relative error that rounding may leave in a float32 step; where it would leave more, the work is done in float64.
ROUNDING = 2e-6


@dataclass(frozen=True)
class Gram:
    """K = J̃A⁻¹J̃ᵀ, layer by layer: J̃ is never built where a layer has a rule.

    For more parameters than rows. With `chunk` the rows of two chunks at a time are in memory; they are computed again
    for every pair.
    """

    chunk: int | None = None

    def __post_init__(self) -> None:
        check_chunk(self.chunk)

    def represent(self, lin: Linearization) -> GramCurvature:
        if not lin.single:
            raise ValueError("Gram needs all rows of a step at once: use curvature=mq.Dense() with step_over")
        return GramCurvature(lin)


class GramCurvature:
    """In what follows J̃ and u carry the normaliser: J̃ = √scale·SᵀJ, so that G = J̃ᵀJ̃ and g = J̃ᵀu + h."""

    def __init__(self, lin: Linearization) -> None:
        self.lin = lin
        if lin.chunk is None:
            lin.open()
        us, sizes = [], []
        for chunk, _ in lin.chunks():
            R, N = chunk.rows.S.shape[:2]
            u = chunk.rows.u
            us.append(chunk.z.new_zeros(R * N) if u is None else u.flatten())
            sizes.append(R * N)
        self.sizes = sizes
        self.root = lin.scale.sqrt()
        self.u = torch.cat(us) * self.root  # (m,)
        self.h = lin.remainder
        self.gradient = lin.gradient
        self.rank = min(lin.n, lin.most)
        self.notes: list[str] = []
        self._K: Tensor | None = None

    def apply(self, v: Tensor) -> Tensor:
        """J̃v: (n,) → (m,)"""
        parts = [
            torch.stack([block.apply(self.lin.gather(v, block)) for block in blocks]).sum(0)
            for _, blocks in self.lin.chunks()
        ]
        return torch.cat(parts) * self.root

    def adjoint(self, w: Tensor) -> Tensor:
        """J̃ᵀw: (m,) → (n,)"""
        total = torch.zeros_like(self.gradient, dtype=w.dtype)
        for (_, blocks), part in zip(self.lin.chunks(), w.split(self.sizes), strict=True):
            total += self.lin.scatter((block, block.adjoint(part)) for block in blocks)
        return total * self.root

    def __matmul__(self, v: Tensor) -> Tensor:
        return self.adjoint(self.apply(v))

    def recall(self, past: Tensor | None, steps: int) -> Tensor | None:
        return None  # the rows of earlier batches would have to be kept

    def quadratic(self, v: Tensor) -> Tensor:
        return self.apply(v).square().sum()

    def diagonal(self) -> Tensor:
        total = torch.zeros_like(self.gradient)
        for _, blocks in self.lin.chunks():
            total += self.lin.scatter((block, block.diagonal()) for block in blocks)
        return total * self.lin.scale

    def gram(self, inverse: Tensor | None, dtype: torch.dtype) -> Tensor:
        """J̃A⁻¹J̃ᵀ: (m, m); `inverse` is the diagonal of A⁻¹ (n,), None the identity"""
        K = torch.zeros(len(self.u), len(self.u), dtype=dtype, device=self.u.device)
        starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        for i, rows in enumerate(self.sizes):
            _, left = self.lin.chunk_at(i)
            for j in range(i, len(self.sizes)):
                _, right = (None, left) if i == j else self.lin.chunk_at(j)
                part = torch.zeros(rows, self.sizes[j], dtype=dtype, device=self.u.device)
                if [[id(p) for p in b.params] for b in left] == [[id(p) for p in b.params] for b in right]:
                    for a, b in zip(left, right, strict=True):
                        a.gram(part, b, None if inverse is None else self.lin.gather(inverse, a))
                else:  # samples that take different ways through the model
                    J = self.lin.dense(left, dtype)
                    part = (J if inverse is None else J * inverse) @ self.lin.dense(right, dtype).T
                K[starts[i] : starts[i] + rows, starts[j] : starts[j] + self.sizes[j]] = part
                if i != j:
                    K[starts[j] : starts[j] + self.sizes[j], starts[i] : starts[i] + rows] = part.T
        return K.mul_(self.lin.scale)

    def newton(self, damping: Tensor) -> Tensor:
        """A⁻¹[h + J̃ᵀ(I + J̃A⁻¹J̃ᵀ)⁻¹(u − J̃A⁻¹h)]: solve in the m rows, not the n parameters.

        Plain Woodbury, A⁻¹g − A⁻¹J̃ᵀ(…)⁻¹J̃A⁻¹g, loses all digits of float32 at small λ; this form keeps them.
        """
        if not bool((damping > 0).all()):  # λ = 0: the limit λ → 0, which is the shortest of the Gauss-Newton steps
            damping = damping.clamp(min=1e-12 * float(self.diagonal().max()))
        # With more rows than parameters u always has a part outside the range of J̃, see below.
        # Nor is a remainder h in that range.
        x = self._solve(damping, self.u.dtype) if len(self.u) <= self.lin.n and self.h is None else None
        if x is None:
            if self.u.dtype != torch.float64:
                self.notes.append("solved in float64")
            x = self._solve(damping, torch.float64)
            assert x is not None
        return x.to(self.gradient.dtype)

    def _solve(self, A: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The formula in that precision, or None where rounding would spoil it."""
        A, u = A.to(dtype), self.u.to(dtype)
        h = None if self.h is None else self.h.to(dtype)
        K = self._gram(A, dtype)
        b = u if h is None else u - self.apply(h / A)
        H = K.clone()
        H.diagonal().add_(1)
        w = spd_solve(H, b, self.notes)
        if dtype != torch.float64:
            # The part of u outside the range of J̃ stays in w and cancels only in J̃ᵀw: ‖J̃ᵀw‖² = wᵀKw in the metric A⁻¹.
            error = torch.finfo(dtype).eps * w.norm() * (norm(K, torch.ones_like(w)) / (w @ (K @ w))).sqrt()
            if not bool(error <= ROUNDING):
                return None
        x = self.adjoint(w)
        return (x if h is None else x + h) / A

    def _gram(self, A: Tensor, dtype: torch.dtype) -> Tensor:
        if A.ndim:
            return self.gram(1 / A, dtype)
        if self._K is None or self._K.dtype != dtype:  # does not depend on λ: another λ costs only the factorisation
            self._K = self.gram(None, dtype)
        return self._K / A
