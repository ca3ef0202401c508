"""G as an n×n matrix, added up chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..layers import Block
from ..linearize import Linearization
from .contract import norm, spd_solve

# Below this many parameters the products cost nothing, and G is formed in float64 at once.
SMALL = 256


@dataclass(frozen=True)
class Dense:
    """G = J̃ᵀJ̃ itself. For up to some ten thousand parameters; any number of samples, `chunk` of them at a time.

    On changing batches G is a running average, Ḡ ← β·Ḡ + (1−β)·G with β = `inertia`. A step that divides the gradient
    of a batch by the curvature of the same batch fits its noise, and its gain ratio does not notice; with an averaged
    curvature both are honest. On the same data again, G is that of the data.
    """

    chunk: int | None = None
    inertia: float = 0.0

    def __post_init__(self) -> None:
        check_chunk(self.chunk)
        check_inertia(self.inertia)

    def represent(self, lin: Linearization) -> DenseCurvature:
        return DenseCurvature(lin, self.inertia)


class DenseCurvature:
    def __init__(self, lin: Linearization, inertia: float = 0.0) -> None:
        self.lin, self.beta = lin, inertia
        self.notes: list[str] = []
        self._past: Tensor | None = None
        self._weight = 0.0  # of the past in the average
        self.G, self._g = self._form(torch.float64 if lin.n <= SMALL else lin.params[0].dtype)
        self.gradient = lin.gradient
        self.rank = min(lin.n, lin.most)

    def _form(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """G = ΣJ̃ᵀJ̃ (n, n) and g = ΣJ̃ᵀu + h (n,) over the chunks, in that precision from the same rows."""
        lin = self.lin
        G = torch.zeros(lin.n, lin.n, dtype=dtype, device=lin.device)
        g = torch.zeros(lin.n, dtype=dtype, device=lin.device)
        for chunk, blocks in lin.chunks():
            if lin.n <= SMALL:  # one product: there is nothing to save but calls
                rows = lin.dense(blocks, dtype)  # (m, n)
                G.addmm_(rows.T, rows)
            else:
                self._add_blocks(G, blocks)
            if chunk.rows.u is not None and dtype == torch.float64:  # otherwise autograd's is as good
                g += lin.scatter((block, block.adjoint(chunk.rows.u.flatten().to(dtype))) for block in blocks)
        G, g = self._mixed(G.mul_(lin.scale)), g.mul_(lin.scale)
        if dtype != torch.float64:
            return G, lin.gradient
        return G, g if lin.remainder is None else g + lin.remainder

    def _add_blocks(self, G: Tensor, blocks: list[Block]) -> None:
        """G += J̃ᵀJ̃ by pairs of layers: half of them by symmetry, each in the cheapest form its layer knows."""
        plain = [b for b in blocks if not b.factored]
        groups = [*([plain] if plain else []), *([b] for b in blocks if b.factored)]
        for i, left in enumerate(groups):
            rows = torch.cat([b.rows(G.dtype) for b in left], 1)  # (m, columns)
            for right in groups[i:]:
                product = right[0].against(rows) if right[0].factored else rows.T @ rows
                for p, across in self.lin.columns(left):
                    for q, along in self.lin.columns(right):
                        G[p, q] += product[across, along]
                        if left is not right:
                            G[q, p] += product[across, along].T

    def _mixed(self, G: Tensor) -> Tensor:
        return G if self._past is None else G.lerp_(self._past.to(G.dtype), self._weight)

    def recall(self, past: Tensor | None, steps: int) -> Tensor | None:
        if past is not None and self.beta > 0:
            # Short memory at first, so that the very first batch, at weights of no interest, does not linger.
            self._past, self._weight = past, min(self.beta, steps / (steps + 2))
            self.G = self._mixed(self.G)
        return self.G if self.beta > 0 else None

    def __matmul__(self, v: Tensor) -> Tensor:
        return (self.G @ v.to(self.G.dtype)).to(v.dtype)

    def quadratic(self, v: Tensor) -> Tensor:
        return v @ (self @ v)

    def diagonal(self) -> Tensor:
        return self.G.diagonal().to(self.gradient.dtype)

    def newton(self, damping: Tensor) -> Tensor:
        A = damping.expand(self.lin.n)
        if self.G.dtype != torch.float64:
            # JᵀJ is good to eps‖G‖, so in the metric of the damping A the step is good to eps‖A^-½ G A^-½‖. That is the
            # worst case; on real networks the error of a step is a tenth of it (2e-5 to 5e-5 at 4e-4, 2e-4 at 4e-3).
            error = torch.finfo(self.G.dtype).eps * norm(self.G, A.rsqrt())
            if not bool(error <= 1e-3):
                self.notes.append("curvature formed again in float64")
                self.G, self._g = self._form(torch.float64)
        H = self.G.clone()
        H.diagonal().add_(A)
        return spd_solve(H, self._g, self.notes).to(self.gradient.dtype)


def check_inertia(inertia: float) -> None:
    if not 0 <= inertia < 1:
        raise ValueError(f"inertia={inertia!r}: the weight of earlier batches, at least 0 (none) and below 1")


def check_chunk(chunk: int | None) -> None:
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"chunk={chunk!r}: a number of samples of at least 1, or None for all at once")
