"""G as an n×n matrix, added up chunk by chunk."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..deferred import ask
from ..jacobian.linearization import Linearization, Needs
from ..layers import Block
from ..metric import Diagonal, Metric
from ..model.parameters import Range
from .contract import Curvature, Interchangeable, Past, check_chunk, check_inertia, trusted
from .cost import Cost, Shapes, Work, deltas
from .solve import norm, spd_solve

# Up to this many parameters products cost nothing, and are formed in float64 at once.
SMALL = 256

# From this many columns on, half a product pays for its extra calls.
PAYS = 256


@dataclass(frozen=True)
class Dense(Interchangeable):
    """G = J̃ᵀJ̃ itself. For up to some ten thousand parameters; any number of samples, `chunk` of them at a time.

    On changing batches G is a running average, Ḡ ← β·Ḡ + (1−β)·G with β = `inertia`. A step that divides the gradient
    of a batch by the curvature of the same batch fits its noise, and its gain ratio does not notice; with an averaged
    curvature both are honest. On the same data again, G is that of the data.
    """

    chunk: int | None = None
    inertia: float = 0.0
    small: int = field(default=SMALL, repr=False)  # up to so many parameters G is one product, in float64 at once

    def __post_init__(self) -> None:
        check_chunk(self.chunk)
        check_inertia(self.inertia)

    @property
    def needs(self) -> Needs:
        return Needs(self.chunk)

    def form(self, lin: Linearization) -> DenseCurvature:
        return DenseCurvature(lin, self.inertia, self.small)

    def cost(self, s: Shapes) -> Cost:
        """G, G + A, its scaled copy and its factor, the average; the rows and what they are made of."""
        samples = s.at_once(self.chunk)
        matrices = (4 + (self.inertia > 0)) * s.n**2
        rows = s.R * samples * (s.n + s.out) + samples * (s.inputs + 3 * s.R * s.outputs)
        work = deltas(s, s.pieces(self.chunk)) + self._products(s) + Work(factor=s.n**3 / 3, numbers=12.0 * s.n**2)
        return Cost(int(s.itemsize * (matrices + rows + 6 * s.n)), work)

    def _products(self, s: Shapes) -> Work:
        """J̃ᵀJ̃ as `_add_blocks` forms it: layers with one position contract the R rows of a sample first."""
        factored = [b for b in s.layers if b.P == b.G == 1 < s.R and not b.lookup and s.n > self.small]
        plain = max(0, s.n - sum(b.columns for b in factored))  # columns
        flops = 2.0 * s.m * plain**2 * (1.0 if s.cuda or plain < PAYS else 2 / 3)
        rest = plain
        for b in factored:
            flops += s.N * b.O * (b.O + 1) * (b.I + 1) ** 2 + 2 * s.N * rest * b.O * (s.R + b.I + 1)
            rest += b.columns
        outer = s.m * sum(b.flops for b in s.layers if b not in factored)
        return Work(products=flops + outer, numbers=2.0 * s.m * plain)


class DenseCurvature(Curvature):
    def __init__(self, lin: Linearization, inertia: float = 0.0, small: int = 0) -> None:
        super().__init__(lin)
        self.beta, self.small = inertia, small
        self._past: Tensor | None = None
        self._weight = torch.zeros(())  # of the past in the average
        self._keeps = inertia > 0
        self.G, self._g = self._form(torch.float64 if lin.n <= small else self.parameters.dtype)

    def _form(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """G = ΣJ̃ᵀJ̃ (n, n) and g = ΣJ̃ᵀu + h (n,) over the chunks, in that precision from the same rows."""
        lin, device = self.lin, self.parameters.device
        G = torch.zeros(lin.n, lin.n, dtype=dtype, device=device)
        g = torch.zeros(lin.n, dtype=dtype, device=device)
        for piece in lin.pieces():
            u = None if piece.u is None else piece.u.to(dtype)  # (R, N)
            if lin.n <= self.small:  # one product: there is nothing to save but calls
                rows = piece.dense(dtype)  # (m, n)
                G.addmm_(rows.T, rows)
                if u is not None:
                    g.addmv_(rows.T, u.flatten())
            else:
                self._add_blocks(G, g, piece.blocks, u)
        G, g = self._mixed(G.mul_(lin.scale)), g.mul_(lin.scale)
        return G, g if lin.remainder is None else g + lin.remainder

    @property
    def gradient(self) -> Tensor:
        return self._g.to(self.parameters.dtype)

    def _add_blocks(self, G: Tensor, g: Tensor, blocks: list[Block], u: Tensor | None) -> None:
        """G += J̃ᵀJ̃ and g += J̃ᵀu by pairs of layers: half of them by symmetry, each in its cheapest form."""
        plain = [b for b in blocks if not b.factored]
        factored = [b for b in blocks if b.factored]
        for k, left in enumerate(factored):
            self._place(G, [left], [left], left.square(G.dtype))
            for right in factored[k + 1 :]:
                self._place(G, [left], [right], right.against(left.samples(G.dtype)))
            if u is not None:
                self._add(g, [left], left.pull(u.flatten()))
        if plain:
            rows = torch.empty(plain[0].m, sum(b.columns for b in plain), dtype=G.dtype, device=G.device)
            start = 0
            for b in plain:
                b.samples(G.dtype, rows[:, start : start + b.columns])
                start += b.columns
            self._place(G, plain, plain, symmetric(rows))
            for right in factored:
                self._place(G, plain, [right], right.against(rows))
            if u is not None:
                self._add(g, plain, rows.T @ u.T.flatten())

    def _ranges(self, blocks: list[Block]) -> list[Range]:
        return self.parameters.ranges(p for block in blocks for p in block.params)

    def _add(self, g: Tensor, blocks: list[Block], part: Tensor) -> None:
        """g += a part that belongs to some blocks: (n,), (columns,)"""
        for here, there in self._ranges(blocks):
            g[here] += part[there]

    def _place(self, G: Tensor, left: list[Block], right: list[Block], product: Tensor) -> None:
        """G += the product of two groups of columns, and its transpose"""
        for p, across in self._ranges(left):
            for q, along in self._ranges(right):
                G[p, q] += product[across, along]
                if left[0] is not right[0]:
                    G[q, p] += product[across, along].T

    def _mixed(self, G: Tensor) -> Tensor:
        return G if self._past is None else G.lerp_(self._past.to(G.dtype), self._weight.to(G))

    def recall(self, past: Past | None, same_data: bool) -> None:
        self._keeps = self.beta > 0 and not same_data
        self._batches = torch.ones((), dtype=torch.float64, device=self.G.device)
        if self._keeps and past is not None and "G" in past:
            # Short memory at first, so that the very first batch, at weights of no interest, does not linger.
            self._past, k = past["G"], past["batches"]
            self._weight = (k / (k + 2)).clamp(max=self.beta) * trusted(self._past.diagonal(), self.G.diagonal())
            self._batches = k + 1
            self.G = self._mixed(self.G)
        self.averaged = self._keeps

    def keep(self) -> Past | None:
        return {"G": self.G, "batches": self._batches} if self._keeps else None

    def __matmul__(self, v: Tensor) -> Tensor:
        return (self.G @ v.to(self.G.dtype)).to(v.dtype)

    def diagonal(self) -> Tensor:
        return self.G.diagonal().to(self.parameters.dtype)

    def newton(self, damping: Metric | Tensor) -> Tensor:
        sizes = self.parameters.sizes
        A = Diagonal.of(damping, sizes).entries(sizes).to(self.parameters.dtype)
        if self.G.dtype != torch.float64:
            # JᵀJ is good to eps‖G‖, so in the metric of the damping A the step is good to eps‖A^-½ G A^-½‖. That is the
            # worst case; on real networks the error of a step is a tenth of it (2e-5 to 5e-5 at 4e-4, 2e-4 at 4e-3).
            error = torch.finfo(self.G.dtype).eps * norm(self.G, A.rsqrt())
            if not ask(error <= 1e-3):
                self.notes.append("curvature formed again in float64")
                self.G, self._g = self._form(torch.float64)
        return spd_solve(self.G, A, self._g, self.notes).to(self.parameters.dtype)


def symmetric(rows: Tensor) -> Tensor:
    """XᵀX, the upper half of it computed on a CPU, where the product is what takes the time: (m, q) → (q, q)"""
    q = rows.shape[1]
    if rows.is_cuda or q < PAYS:
        return rows.T @ rows
    product = rows.new_empty(q, q)
    cuts = [q * k // 3 for k in range(4)]  # three block rows: more of them are slower again
    for first, last in itertools.pairwise(cuts):
        torch.mm(rows[:, first:last].T, rows[:, first:], out=product[first:last, first:])
        product[last:, first:last] = product[first:last, last:].T
    return product
