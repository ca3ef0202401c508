"""G as an n×n matrix, added up chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..deferred import ask
from ..jacobian import statistics
from ..jacobian.linearization import Linearization, Needs
from ..jacobian.statistics import PartialTraces
from ..layers import Block
from ..layers.block import add_square
from ..metric import Diagonal, Metric
from ..model.parameters import Range
from .contract import Curvature, Interchangeable, Past, check_chunk, check_inertia, trusted
from .cost import Cost, Shapes, Work, deltas, factor, gathered, half, reduced
from .solve import factored, holds, refined, spd_solve

# Up to this many parameters products cost nothing, and are formed in float64 at once.
SMALL = 256

AGAIN = "curvature formed again in float64"

# From this many parameters on, G and its factor in float32 and a few products in float64 take less time on a CPU than
# both in float64: up to this eps‖A^-½GA^-½‖, with at most so many products. Measured are 3 to 5 up to 1e-2, 8 at 0.1
# and 15 at 1; at 10 there is no factor.
REFINED, ROUGH, PRODUCTS = 1024, 0.3, 12


@dataclass(frozen=True)
class Dense(Interchangeable):
    """G = J̃ᵀJ̃ itself. For up to some ten thousand parameters; any number of samples, `chunk` of them at a time.

    On changing batches G is a running average, Ḡ ← β·Ḡ + (1−β)·G with β = `inertia`. A step that divides the gradient
    of a batch by the curvature of the same batch fits its noise, and its gain ratio does not notice; with an averaged
    curvature both are honest. On the same data again, G is that of the data.

    Args:
        chunk: samples that are linearised at once; None for all.
        inertia: β, the weight of earlier batches, at least 0 and below 1.
        small: up to so many parameters G is one product, in float64 at once.
        double: whether G is in float64, whatever the model is.

    >>> opt = mq.LM(model, "mse", curvature=mq.Dense(chunk=1000))
    """

    adds_up = True

    chunk: int | None = None
    inertia: float = 0.0
    small: int = field(default=SMALL, repr=False)  # up to so many parameters G is one product, in float64 at once
    double: bool = field(default=False, repr=False)  # G in float64, whatever the model is

    def __post_init__(self) -> None:
        check_chunk(self.chunk)
        check_inertia(self.inertia)

    @cached_property
    def needs(self) -> Needs:
        return Needs(self.chunk)

    def form(self, lin: Linearization) -> DenseCurvature:
        return DenseCurvature(lin, self.inertia, self.small, self.double)

    def cost(self, s: Shapes) -> Cost:
        """G, G + A, its scaled copy and its factor, the average; the rows and what they are made of."""
        samples = s.at_once(self.chunk)
        matrices = (4 + (self.inertia > 0)) * s.n**2
        rows = s.R * samples * (s.n + s.out) + samples * (s.inputs + 3 * s.R * s.outputs)
        work = deltas(s, s.pieces(self.chunk)) + self._products(s) + Work(factor=s.n**3 / 3, numbers=12.0 * s.n**2)
        return Cost(int(s.itemsize * (matrices + rows + 6 * s.n)), work)

    def sent(self, s: Shapes) -> float:
        """Half of G, the gradient, the factor, and the step"""
        return reduced(s, half(s.n) + s.n) + factor(s, s.n) + gathered(s, s.n)

    def _products(self, s: Shapes) -> Work:
        """J̃ᵀJ̃ as `_add_blocks` forms it: layers with one position contract the R rows of a sample first."""
        shared = [b for b in s.layers if b.P == b.G == 1 < s.R and not b.lookup and s.n > self.small]
        plain = max(0, s.n - sum(b.columns for b in shared))  # columns
        flops = 2.0 * s.m * plain**2 * 0.6
        rest = plain
        for b in shared:
            flops += s.N * b.O * (b.O + 1) * (b.I + 1) ** 2 + 2 * s.N * rest * b.O * (s.R + b.I + 1)
            rest += b.columns
        outer = s.m * sum(b.flops for b in s.layers if b not in shared)
        return Work(products=flops + outer, numbers=2.0 * s.m * plain)


class DenseCurvature(Curvature):
    """Of a large model in float64, G is formed in float32 and the step refined as long as the damping is large enough.
    Until it is not, the rows make all other products."""

    takes_sums = True

    def __init__(self, lin: Linearization, inertia: float = 0.0, small: int = 0, double: bool = False) -> None:
        super().__init__(lin)
        self.beta, self.small = inertia, small
        self._past: Tensor | None = None
        self._weight: Tensor | None = None  # of the past in the average
        self._batches: Tensor | None = None  # that it is of
        self._keeps = inertia > 0
        self._by_rows = not self._keeps  # whether G has not been formed, and is what the rows say
        self._formed: Callable[[], Tensor] | None = None  # waits for J̃ᵀJ̃ of all ranks
        self._G: Tensor | None = None
        self._g: Tensor | None = None
        self._rough: Tensor | None = None  # J̃ᵀJ̃ in float32
        self._turned: tuple[object, Tensor] | None = None  # D₀, and G in the coordinates in which it is a number
        # Products need rows that stay. On a GPU, each of them would wait for the one before.
        self._rows_serve = lin.in_one and self.parameters.device.type == "cpu"
        if not (self._rows_serve and self.parameters.dtype == torch.float64 and lin.n >= max(REFINED, small + 1)):
            self._form_in(torch.float64 if double or lin.n <= small else self.parameters.dtype)

    @property
    def G(self) -> Tensor:
        """J̃ᵀJ̃, or its running average: (n, n)"""
        if self._G is None:
            if self._formed is None:
                self._form_in(torch.float64)
            assert self._formed is not None
            self._G = self._mixed(self._formed())
        return self._G

    def _form_in(self, dtype: torch.dtype) -> None:
        self._rough = self._G = None
        self._formed, self._g = self._form(dtype)
        self._by_rows = False

    def _form(self, dtype: torch.dtype) -> tuple[Callable[[], Tensor], Tensor]:
        """ΣJ̃ᵀJ̃ (n, n) and g = ΣJ̃ᵀu + h (n,) over the chunks and the ranks, in that precision from the same rows. The
        matrix is on its way while this rank goes on."""
        lin, device, n = self.lin, self.parameters.device, self.lin.n
        G = torch.zeros(n, n, dtype=dtype, device=device)
        g = torch.zeros(n, dtype=dtype, device=device)
        for piece in lin.pieces():
            u = None if piece.u is None else piece.u.to(dtype)  # (R, N)
            if n <= self.small:  # one product: there is nothing to save but calls
                rows = piece.dense(dtype)  # (m, n)
                G.addmm_(rows.T, rows)
                if u is not None:
                    g.addmv_(rows.T, u.flatten())
            else:
                self._add_blocks(G, g, piece.blocks, u)
        scale, h = lin.scale, lin.remainder
        whole, g = lin.ranks.sum_later(G.mul_(scale)), g.mul_(scale)
        if lin.ranks.several:
            g = lin.ranks.sum(g)
        return whole, g if h is None else g + h

    @property
    def gradient(self) -> Tensor:
        if self._g is None:
            self._g = self._slope()
        return self._g if self._g.dtype is self.parameters.dtype else self._g.to(self.parameters.dtype)

    def _slope(self) -> Tensor:
        """g = J̃ᵀu + h from rows that stay, in float64: (n,)"""
        piece, h = self.lin.whole(), self.lin.remainder
        u = piece.z.new_zeros(piece.m) if piece.u is None else piece.u.flatten()
        g = self.lin.ranks.sum(piece.adjoint(u.double()).mul_(self.lin.scale))
        return g if h is None else g + h

    def _add_blocks(self, G: Tensor, g: Tensor, blocks: list[Block], u: Tensor | None) -> None:
        """G += J̃ᵀJ̃ and g += J̃ᵀu by pairs of layers: half of them by symmetry, each in its cheapest form."""
        plain = sorted((b for b in blocks if not b.factored), key=self._first)  # neighbours in θ side by side
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
            ranges = self._ranges(plain)
            if len(ranges) == 1:
                add_square(G[ranges[0][0], ranges[0][0]], rows.T)
            else:
                square = torch.zeros(rows.shape[1], rows.shape[1], dtype=G.dtype, device=G.device)
                add_square(square, rows.T)
                self._place(G, plain, plain, square)
            for right in factored:
                self._place(G, plain, [right], right.against(rows))
            if u is not None:
                self._add(g, plain, rows.T @ u.T.flatten())

    def _add(self, g: Tensor, blocks: list[Block], part: Tensor) -> None:
        """g += a part that belongs to some blocks: (n,), (columns,)"""
        for here, there in self._ranges(blocks):
            g[here] += part[there]

    def _first(self, block: Block) -> int:
        return min(self.parameters.of(block))

    def _ranges(self, blocks: list[Block]) -> list[Range]:
        return self.parameters.ranges(p for block in blocks for p in block.params)

    def _place(self, G: Tensor, left: list[Block], right: list[Block], product: Tensor) -> None:
        """G += the product of two groups of columns, and its transpose"""
        for p, across in self._ranges(left):
            for q, along in self._ranges(right):
                G[p, q] += product[across, along]
                if left[0] is not right[0]:
                    G[q, p] += product[across, along].T

    def _mixed(self, G: Tensor) -> Tensor:
        if self._past is None or self._weight is None:
            return G
        return G.lerp_(self._past.to(G.dtype), self._weight.to(G))

    def recall(self, past: Past | None, same_data: bool) -> None:
        self._keeps = self.beta > 0 and not same_data
        self._by_rows = self._formed is None and not self._keeps
        if self._keeps:
            self._batches = torch.ones((), dtype=torch.float64, device=self.parameters.device)
        if self._keeps and past is not None and "G" in past:
            # Short memory at first, so that the very first batch, at weights of no interest, does not linger.
            G, k = self.G, past["batches"]
            self._weight = (k / (k + 2)).clamp(max=self.beta) * trusted(past["G"].diagonal(), G.diagonal())
            self._past, self._batches = past["G"], k + 1
            self._G = self._mixed(G)
        self.averaged = self._keeps

    def keep(self) -> Past | None:
        return {"G": self.G, "batches": self._batches} if self._keeps and self._batches is not None else None

    def __matmul__(self, v: Tensor) -> Tensor:
        if self._by_rows:
            return self._product(v)
        G = self.G
        return G @ v if G.dtype is v.dtype else (G @ v.to(G.dtype)).to(v.dtype)

    def _product(self, v: Tensor) -> Tensor:
        """J̃ᵀJ̃v from the rows, in the precision of v: (n,) → (n,)"""
        piece = self.lin.whole()
        return self.lin.ranks.sum(piece.adjoint(piece.apply(v)).mul_(self.lin.scale))

    def quadratic(self, v: Tensor) -> Tensor:
        if not self._by_rows:
            return self.parameters.dot(v, self @ v)
        return self.lin.ranks.sum(self.lin.whole().apply(v).square().sum() * self.lin.scale)

    def diagonal(self) -> Tensor:
        if self._by_rows:
            return super().diagonal()
        found = self.G.diagonal()
        return found if found.dtype is self.parameters.dtype else found.to(self.parameters.dtype)

    def partial_traces(self) -> PartialTraces:
        return statistics.partial_traces(self.lin)

    def newton(self, damping: Metric | Tensor) -> Tensor:
        sizes = self.parameters.sizes
        D = Diagonal.of(damping, sizes)
        A = D.damping(sizes)
        A = A if A.dtype is self.parameters.dtype else A.to(self.parameters.dtype)
        x = self._by_float32(A) if self._by_rows and not D.turns else None
        G = self.G if x is None else None
        if G is not None and G.dtype != torch.float64:
            x = self._checked(A, D)
        if x is None:
            g = self._g
            assert g is not None
            if D.turns:
                G, D = self._in_coordinates(D), D.to(g)
                x = spd_solve(G, A, D.turned(g, sizes), self.notes, self.lin.ranks)
                x = D.turned_back(x, sizes)
            else:
                x = spd_solve(self.G, A, g, self.notes, self.lin.ranks)
        return x if x.dtype is self.parameters.dtype else x.to(self.parameters.dtype)

    def _in_coordinates(self, D: Metric) -> Tensor:
        """WGWᵀ with WD₀Wᵀ = 1, and what D has beside D₀; G itself if D is diagonal: (n, n)"""
        if not D.turns:
            return self.G
        if self._turned is None or self._turned[0] is not D.shape or self._turned[1].dtype != self.G.dtype:
            same, sizes = D.to(self.G), self.parameters.sizes
            G = self.G
            if same.beside is not None:
                G = G.clone()
                G.diagonal().add_(same.beside)
            self._turned = (D.shape, same.turned(same.turned(G, sizes).T, sizes))
        return self._turned[1]

    def _by_float32(self, A: Tensor) -> Tensor | None:
        """(G + A)⁻¹g in float64 by a factor in float32; None if A is too small for that."""
        diagonal, limits = self.diagonal(), torch.finfo(torch.float32)
        size = diagonal + A
        within = (size.min() > limits.tiny / limits.eps) & (size.max() < limits.max * limits.eps)
        # The trace is an upper bound of the norm, and not far from it: one eigenvalue of a network is a large part.
        if not ask(within & (limits.eps * (diagonal / A).sum() <= ROUGH)):
            return None
        if self._rough is None:
            self._rough = self._form(torch.float32)[0]()
        x = self._refined(self._rough, A, 1e-10)
        if x is None:
            self.notes.append(AGAIN)
        return x

    def _checked(self, A: Tensor, D: Metric) -> Tensor | None:
        """(G + A)⁻¹g if G in float32 alone is not enough; None if it is, or if G is in float64 now.

        JᵀJ is good to eps‖G‖, so in the metric of the damping A the step is good to eps‖A^-½ G A^-½‖. That is the worst
        case; on real networks the error of a step is a tenth of it (2e-5 to 5e-5 at 4e-4, 2e-4 at 4e-3).
        """
        eps, s = torch.finfo(self.G.dtype).eps, A.rsqrt()
        if holds(lambda size: eps * size <= 1e-3, self._in_coordinates(D), s):
            return None
        if self._rows_serve and not self._keeps and not D.turns and holds(lambda size: eps * size <= ROUGH, self.G, s):
            x = self._refined(self.G, A.double(), 1e-5)
            if x is not None:
                return x
        self.notes.append(AGAIN)
        self._form_in(torch.float64)
        return None

    def _refined(self, rough: Tensor, A: Tensor, tolerance: float) -> Tensor | None:
        """(J̃ᵀJ̃ + A)⁻¹g in float64, by the factor of another precision"""
        M = factored(rough, A)
        if M is None:
            return None
        self._g = self._slope() if self._g is None or self._g.dtype != A.dtype else self._g
        return refined(lambda v: A * v + self._product(v), M, self._g, tolerance, PRODUCTS)
