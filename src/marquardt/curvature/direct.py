"""G as a matrix, in the n parameters or in the m rows, and solving with it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from ..deferred import ask, current, floats
from ..jacobian import statistics
from ..jacobian.linearization import Linearization, Needs
from ..jacobian.piece import Piece, adjoint, apply, dense, together
from ..jacobian.statistics import PartialTraces
from ..layers import Block, Explicit
from ..layers.blocks import Product, add_square
from ..metric import Diagonal, Metric, trusted
from ..model.parameters import Range
from ..ranks import ALONE, Ranks
from .contract import Curvature, Interchangeable, Past, check_chunk, check_inertia
from .cost import COLUMNS, Cost, Layer, Shapes, Work, deltas, factor, factors_together, gathered, half, reduced


class FactorizationError(ArithmeticError):
    """G + λD is not positive definite in floating point: the step fails, and a larger λ helps.

    `LM` catches it and raises λ; only code that calls `newton` itself sees it.

    >>> G = mq.Hessian().represent(mq.linearize(model, "mse", x, y, needs=mq.Hessian().needs))
    >>> try:
    ...     d = G.newton(torch.tensor(-1e6))
    ... except mq.FactorizationError as error:
    ...     print("a larger damping is needed")
    a larger damping is needed
    """


def norm(M: Tensor, s: Tensor | None = None) -> Tensor:
    """‖diag s · M · diag s‖ for positive semi-definite M, by a few power iterations: accurate to a factor of two."""
    v = M.diagonal().clone() if s is None else s
    for _ in range(6):
        v = v / torch.linalg.vector_norm(v)
        v = M @ v if s is None else s * (M @ (s * v))
    length: Tensor = torch.linalg.vector_norm(v)
    return length


def holds(condition: Callable[[Tensor], Tensor], M: Tensor, s: Tensor | None = None) -> bool:
    """Whether ‖diag s · M · diag s‖ satisfies a condition that every smaller norm satisfies too. The trace is an upper
    bound that usually suffices, while the iterations take thirty kernels. While a step is recorded no answer is known,
    and the closer estimate is used."""
    diagonal = M.diagonal()
    if current.tape is None and ask(condition(diagonal.sum() if s is None else torch.dot(diagonal, s * s))):
        return True
    return ask(condition(norm(M, s)))


def told(fine: Tensor) -> bool:
    """deferred.ask in one call, if nothing is recorded and no ranks have to agree: ()"""
    return bool(fine) if current.tape is None and current.agree is None else ask(fine)


def spd_solve(H: Tensor, A: Tensor, b: Tensor, notes: list[str], ranks: Ranks = ALONE) -> Tensor:
    """(H + diag A)⁻¹b for symmetric positive definite H + diag A by Cholesky; on failure in float64, then with jitter.

    A is added to H in place and removed again, because H may be large. All ranks have the same H, and factor it
    together if that takes less time.
    """
    diagonal = H.diagonal()
    kept = diagonal.clone()
    try:
        diagonal.add_(A)
        x = _cholesky(H, b, ranks)
        if x is not None:
            return x
        # Unit diagonal first: positive definiteness then no longer depends on the units of the parameters.
        s = torch.where(diagonal > 0, diagonal, torch.ones_like(diagonal)).rsqrt().double()
        M = H.double() * s * s[:, None]
    finally:
        diagonal.copy_(kept)
    for jitter in (0.0, 1e2 * torch.finfo(torch.float64).eps):
        M.diagonal().add_(jitter * len(M))
        x = _cholesky(M, s * b, ranks)
        if x is not None:
            if H.dtype != torch.float64:
                notes.append("factored in float64")
            if jitter:
                notes.append("factored with jitter")
            return (x * s).to(b.dtype)
    raise FactorizationError("the damped curvature could not be factored")


def refined(
    H: Callable[[Tensor], Tensor], M: Callable[[Tensor], Tensor], b: Tensor, tolerance: float, products: int
) -> Tensor | None:
    """H⁻¹b by conjugate gradients in the precision of b, preconditioned by M, which solves with nearly the same matrix
    in another precision. None if the error, in the metric of H and relative to the solution, is above the tolerance
    after this number of products. The square of the error is rᵀH⁻¹r, which is approximated by rᵀMr.
    """
    size = torch.linalg.vector_norm(b)
    if ask(size == 0):
        return torch.zeros_like(b)
    b = b / size
    x, r, z = torch.zeros_like(b), b.clone(), M(b)
    p, (rz,) = z, floats(b @ z)
    enough = tolerance**2 * rz
    for _ in range(products):
        Hp = H(p)
        (pHp,) = floats(p @ Hp)
        if not (rz > 0 and pHp > 0):  # also if they are NaN
            return None
        x.add_(p, alpha=rz / pHp)
        r.sub_(Hp, alpha=rz / pHp)
        before, z = z, M(r)
        # rᵀ(z − z') instead of rᵀz, since M is rounded and not a fixed matrix.
        changed, after = floats(r @ (z - before), r @ z)
        if after <= enough:
            r = b - H(x)
            return x.mul_(size) if ask(r @ M(r) <= enough) else None
        p = z.add(p, alpha=changed / rz)
        rz = after
    return None


def factored(H: Tensor, A: Tensor) -> Callable[[Tensor], Tensor] | None:
    """v ↦ (H + diag A)⁻¹v in the precision of H, for v in any precision; None if the matrix cannot be factored."""
    kept = H.diagonal().clone()
    H.diagonal().add_(A)
    L, failed = _factor(H)
    H.diagonal().copy_(kept)
    if not ask(failed == 0):
        return None

    def solve(v: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(v)  # to stay within the range of the lower precision
        return _solve(L, (v / size).to(H.dtype)).to(v.dtype).mul_(size)

    return solve


def _cholesky(H: Tensor, b: Tensor, ranks: Ranks) -> Tensor | None:
    together = ranks.several and factors_together(len(H), ranks.size, H.element_size(), H.is_cuda)
    L, failed = shared_factor(H, ranks) if together else _factor(H)
    x = _solve(L, b if b.dtype is H.dtype else b.to(H.dtype))
    length = torch.linalg.vector_norm(x, math.inf)
    if x.is_cpu and current.tape is None and current.agree is None:
        return x if failed.item() == 0 and math.isfinite(length.item()) else None
    return x if ask((failed == 0) & (length < math.inf)) else None


def shared_factor(H: Tensor, ranks: Ranks, width: int = COLUMNS) -> tuple[Tensor, Tensor]:
    """L with LLᵀ = H, and 0 if it exists: (). Block columns are dealt out to the ranks in turn: the owner of the
    next one factors it and sends it to the others, and every rank subtracts its product from the columns that it
    owns."""
    m = len(H)
    cuts = list(itertools.pairwise([*range(0, m, width), m]))
    L, rest = torch.zeros_like(H), H.clone()
    for k, (first, last) in enumerate(cuts):
        column = rest[first:, first:last].contiguous()  # (m − first, width)
        owner = k % ranks.size
        if owner == ranks.rank:
            head, info = torch.linalg.cholesky_ex(column[: last - first])
            below = torch.linalg.solve_triangular(head.mT, column[last - first :], upper=True, left=False)
            column = torch.cat([head, below]).mul_(torch.where(info == 0, 1.0, torch.nan))
        L[first:, first:last] = column = ranks.one(column, owner)
        for j, (start, end) in enumerate(cuts[k + 1 :], k + 1):
            if j % ranks.size == ranks.rank:
                rest[start:, start:end].addmm_(column[start - first :], column[start - first : end - first].T, alpha=-1)
    return L, (~L.diagonal().isfinite()).sum()


def _factor(H: Tensor) -> tuple[Tensor, Tensor]:
    """L with LLᵀ = H, and 0 if it exists: ()"""
    upper = not H.is_cuda  # whichever is faster: by a fifth on a CPU, and by half on a GPU
    F, info = torch.linalg.cholesky_ex(H, upper=upper)
    return F.mT if upper else F, info


def _solve(L: Tensor, b: Tensor) -> Tensor:
    """(LLᵀ)⁻¹b; on a CPU a fraction of the time of cholesky_solve"""
    y = torch.linalg.solve_triangular(L, b.unsqueeze(1), upper=False)
    x: Tensor = torch.linalg.solve_triangular(L.mT, y, upper=True).squeeze(1)
    return x


# --- G as an n×n matrix, summed over the chunks.


# Up to this many parameters products cost next to nothing, and are formed in float64 at once.
SMALL = 256

AGAIN = "curvature formed again in float64"

# From this many parameters on, G and its factor in float32 plus a few products in float64 take less time on a CPU than
# both in float64. This holds up to this eps‖A^-½GA^-½‖, with at most this many products: 3 to 5 were measured up to
# 1e-2, 8 at 0.1 and 15 at 1; at 10 there is no factor.
REFINED, ROUGH, PRODUCTS = 1024, 0.3, 12


@dataclass(frozen=True)
class Dense(Interchangeable):
    """G = J̃ᵀJ̃ itself. For up to some ten thousand parameters and any number of samples, in chunks of `chunk`.

    On changing batches G is a running average, Ḡ ← β·Ḡ + (1−β)·G with β = `inertia`. A step that divides the gradient
    of a batch by the curvature of the same batch fits the noise of the batch, and the gain ratio does not show it; with
    an averaged curvature both are unbiased. On the same data again, G is that of the data.

    Args:
        chunk: samples that are linearised at once; None for all. Samples must not depend on each other; neither
            backward hooks that mix them nor state in plain attributes of the model is detected.
        inertia: β, the weight of earlier batches, at least 0 and below 1.
        small: up to this many parameters G is one product, in float64 at once.
        double: whether G is in float64, whatever the dtype of the model.

    >>> opt = mq.LM(model, "mse", curvature=mq.Dense(chunk=1000))
    """

    adds_up = True

    chunk: int | None = None
    inertia: float = 0.0
    small: int = field(default=SMALL, repr=False)  # up to this many parameters G is one product, in float64 at once
    double: bool = field(default=False, repr=False)  # G in float64, whatever the dtype of the model

    def __post_init__(self) -> None:
        check_chunk(self.chunk)
        check_inertia(self.inertia)

    @cached_property
    def needs(self) -> Needs:
        return Needs(self.chunk)

    def form(self, lin: Linearization) -> DenseCurvature:
        return DenseCurvature(lin, self.inertia, self.small, self.double)

    def cost(self, s: Shapes) -> Cost:
        """G, G + A, its scaled copy and its factor, the average; the rows and their ingredients."""
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
    """For a large model in float64, G is formed in float32 and the step refined, as long as the damping is large enough
    for that. As long as it is, all other products are formed from the rows."""

    takes_sums = True

    def __init__(self, lin: Linearization, inertia: float = 0.0, small: int = 0, double: bool = False) -> None:
        super().__init__(lin)
        self.beta, self.small = inertia, small
        self._past: Tensor | None = None
        self._weight: Tensor | None = None  # the weight of the past in the average
        self._batches: Tensor | None = None  # how many batches are in the average
        self._keeps = inertia > 0
        self._by_rows = not self._keeps  # whether G has not been formed, and products come from the rows
        self._formed: Tensor | Callable[[], Tensor] | None = None  # J̃ᵀJ̃, or a function that awaits its sum over ranks
        self._G: Tensor | None = None
        self._g: Tensor | None = None
        self._rough: Tensor | None = None  # J̃ᵀJ̃ in float32
        self._turned: tuple[object, Tensor] | None = None  # D₀, and G in coordinates in which D₀ is a number
        # Products need rows that are kept. On a GPU each product would wait for the previous one.
        self._rows_serve = lin.in_one and self.parameters.device.type == "cpu"
        large = lin.n > small and lin.n >= REFINED
        if not (self._rows_serve and self.parameters.dtype == torch.float64 and large):
            self._form_in(torch.float64 if double or lin.n <= small else self.parameters.dtype)

    @property
    def G(self) -> Tensor:
        """J̃ᵀJ̃, or its running average: (n, n)"""
        if self._G is None:
            if self._formed is None:
                self._form_in(torch.float64)
            assert self._formed is not None
            formed = self._formed if isinstance(self._formed, Tensor) else self._formed()
            self._G = formed if self._past is None else self._mixed(formed)
        return self._G

    def _form_in(self, dtype: torch.dtype) -> None:
        self._rough = self._G = None
        self._formed, self._g = self._form(dtype)
        self._by_rows = False

    def _form(self, dtype: torch.dtype) -> tuple[Tensor | Callable[[], Tensor], Tensor]:
        """ΣJ̃ᵀJ̃ (n, n) and g = ΣJ̃ᵀu + h (n,) over the chunks and the ranks, in this precision, from the same rows.
        The matrix is summed over the ranks while this rank continues."""
        lin, device, n = self.lin, self.parameters.device, self.lin.n
        G: Tensor | None = None
        g: Tensor | None = None
        for piece in lin.pieces():
            u = piece.u  # (R, N)
            u = u if u is None or u.dtype is dtype else u.to(dtype)
            if G is None and u is not None and n <= self.small:  # one product: only the number of calls matters
                rows = piece.dense(dtype)  # (m, n)
                G, g = rows.T @ rows, rows.T @ u.flatten()
                continue
            if G is None or g is None:
                G, g = torch.zeros(n, n, dtype=dtype, device=device), torch.zeros(n, dtype=dtype, device=device)
            if n <= self.small:
                rows = piece.dense(dtype)
                G.addmm_(rows.T, rows)
                if u is not None:
                    g.addmv_(rows.T, u.flatten())
            else:
                self._add_blocks(G, g, piece.blocks, u)
        assert G is not None
        assert g is not None
        scale, h = lin.scale, lin.remainder
        G.mul_(scale)
        g.mul_(scale)
        whole: Tensor | Callable[[], Tensor] = G
        if lin.ranks.several:
            whole, g = lin.ranks.sum_later(G), lin.ranks.sum(g)
        return whole, g if h is None else g + h

    @property
    def gradient(self) -> Tensor:
        if self._g is None:
            self._g = self._slope()
        return self._g if self._g.dtype is self.parameters.dtype else self._g.to(self.parameters.dtype)

    def _slope(self) -> Tensor:
        """g = J̃ᵀu + h from rows that are kept, in float64: (n,)"""
        piece, h = self.lin.whole(), self.lin.remainder
        u = piece.z.new_zeros(piece.m) if piece.u is None else piece.u.flatten()
        g = self.lin.ranks.sum(piece.adjoint(u.double()).mul_(self.lin.scale))
        return g if h is None else g + h

    def _add_blocks(self, G: Tensor, g: Tensor, blocks: list[Block], u: Tensor | None) -> None:
        """G += J̃ᵀJ̃ and g += J̃ᵀu by pairs of layers: half of the pairs by symmetry, each in its cheapest form."""
        plain = sorted((b for b in blocks if not b.factored), key=self._first)  # adjacent in θ, adjacent here
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
        """g += the part that belongs to some blocks: (n,), (columns,)"""
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
            # The memory is short at first, so that the very first batch, at weights of no interest, is soon forgotten.
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

    def trace(self) -> Tensor:
        return super().trace() if self._by_rows else self.G.trace().to(self.parameters.dtype)

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
        """WGWᵀ with WD₀Wᵀ = 1, including what D has beside D₀; G itself if D is diagonal: (n, n)"""
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
        # The trace is an upper bound of the norm, and not far above it: one eigenvalue of a network is a large share of
        # it.
        if not ask(within & (limits.eps * (diagonal / A).sum() <= ROUGH)):
            return None
        if self._rough is None:
            rough = self._form(torch.float32)[0]
            self._rough = rough if isinstance(rough, Tensor) else rough()
        x = self._refined(self._rough, A, 1e-10)
        if x is None:
            self.notes.append(AGAIN)
        return x

    def _checked(self, A: Tensor, D: Metric) -> Tensor | None:
        """(G + A)⁻¹g if G in float32 alone is not accurate enough; None if it is, or if G has been formed in float64.

        JᵀJ is accurate to eps‖G‖, so in the metric of the damping A the step is accurate to eps‖A^-½ G A^-½‖. That is
        the worst case; on real networks the error of a step is a tenth of it (2e-5 to 5e-5 at 4e-4, 2e-4 at 4e-3).
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
        """(J̃ᵀJ̃ + A)⁻¹g in float64, with the factor in another precision"""
        M = factored(rough, A)
        if M is None:
            return None
        self._g = self._slope() if self._g is None or self._g.dtype != A.dtype else self._g
        return refined(lambda v: A * v + self._product(v), M, self._g, tolerance, PRODUCTS)


# --- G by its dual: J̃J̃ᵀ is m×m (m rows), however many parameters there are.


# The relative error that rounding may leave in a float32 step. The estimate is a bound: actual errors are a tenth of
# it. Where it is exceeded, K is formed and factored in float64, and after that the products with the rows as well.
ROUNDING = 1e-3


@dataclass(frozen=True)
class Gram(Interchangeable):
    """K = J̃D⁻¹J̃ᵀ, layer by layer: J̃ is never formed where a layer has a rule.

    For more parameters than rows. With `chunk` the rows of two chunks at a time are in memory; they are computed again
    for every pair. Each of several ranks forms some of the blocks of K, from inputs and gradients of the layers that
    another rank has sent; with sharded parameters it forms the share of its own columns in all blocks.

    Args:
        chunk: samples whose rows are in memory at once, twice as many in all; None for all. Samples must not depend on
            each other; neither backward hooks that mix them nor state in plain attributes of the model is detected.
        whole: a J̃ of up to this many numbers is formed, for fewer and larger products.

    >>> opt = mq.LM(model, "mse", curvature=mq.Gram())
    """

    adds_up = shares = True

    chunk: int | None = None
    whole: int = field(default=1 << 22, repr=False)  # a J̃ of up to this many numbers is formed: fewer, larger products

    def __post_init__(self) -> None:
        check_chunk(self.chunk)

    @cached_property
    def needs(self) -> Needs:
        return Needs(self.chunk, together=True)

    def form(self, lin: Linearization) -> GramCurvature:
        return GramCurvature(lin, self.whole)

    def cost(self, s: Shapes) -> Cost:
        """K, its copies and its factor; θ, the step and a few more vectors; inputs and gradients of the layers."""
        samples = s.at_once(self.chunk)
        held = 2 * samples if self.chunk else samples
        rows = held * (s.inputs + 3 * s.R * s.outputs / s.shards + 2 * s.R * s.others + s.R * s.out)
        pieces = s.pieces(self.chunk)
        again = 1 if pieces == 1 else (pieces + 1) / 2  # every pair of chunks is linearised
        work = (
            again * deltas(s, pieces) + self._products(s) + Work(factor=s.m**3 / 3, numbers=12.0 * s.m**2 + 8.0 * s.n)
        )
        return Cost(int(s.itemsize * (5 * s.m**2 + 4 * s.n / s.shards + rows)), work)

    def sent(self, s: Shapes) -> float:
        """Inputs and gradients of all layers, for every pair of chunks; u, half of K, its factor, J̃ᵀw, and the step"""
        rows = s.N * (s.inputs + s.R * s.outputs + s.R * s.others)
        return gathered(s, s.pieces(self.chunk) * rows + s.m + s.n) + reduced(s, half(s.m) + s.n) + factor(s, s.m)

    def _products(self, s: Shapes) -> Work:
        """J̃J̃ᵀ layer by layer, in the cheaper of the two forms of Bilinear.gram."""
        explicit = Work(products=2.0 * s.m**2 * s.others, numbers=2.0 * s.m * s.others)
        if s.m * s.n <= self.whole:
            outer = s.m * sum(b.flops for b in s.layers)
            return Work(products=2.0 * s.m**2 * s.n + outer, numbers=4.0 * s.m * s.n)
        return sum((self._pairs(s, b) for b in s.layers), explicit)

    @staticmethod
    def _pairs(s: Shapes, b: Layer) -> Work:
        pairwise = Work(products=2 * (s.m * b.P) ** 2 * (b.O + b.I / s.R**2), numbers=3 * (s.m * b.P) ** 2)
        weights = b.G * b.O * b.I
        rows = Work(products=2.0 * s.m**2 * weights + s.m * b.flops, numbers=2.0 * s.m * weights)
        return min(rows, pairwise, key=lambda w: w.seconds(s)) if b.G == 1 and not b.lookup else rows


class Layout:
    """The places of the rows of every piece of every rank among the m rows."""

    def __init__(self, sizes: Sequence[Sequence[int]], rank: int) -> None:
        self.sizes, self.rank = sizes, rank  # sizes: the rows of the pieces of each rank
        self.own_sizes = list(sizes[rank])
        self.most = max(map(len, sizes))  # the most pieces of any rank
        self.own = slice(self.place(rank, 0).start, self.place(rank, len(self.own_sizes) - 1).stop)

    def place(self, rank: int, piece: int) -> slice:
        first = sum(map(sum, self.sizes[:rank])) + sum(self.sizes[rank][:piece])
        return slice(first, first + self.sizes[rank][piece])

    def order(self, i: int) -> list[tuple[int, int]]:
        """The pieces, as (rank, number), that piece i of a rank is multiplied with, or that other ranks wait for"""
        return [
            (rank, j)
            for rank, sizes in enumerate(self.sizes)
            for j in range(len(sizes))
            if len(self.sizes) > 1 or j >= i
        ]

    def forms(self, i: int, rank: int, j: int) -> bool:
        """Whether this rank forms the block of its piece i and piece j of another rank: one of two ranks does, so that
        every rank forms blocks with half of the others."""
        ahead = (rank - self.rank) % len(self.sizes)
        behind = len(self.sizes) - ahead
        return j >= i if ahead == 0 else ahead < behind or (ahead == behind and self.rank < rank)


class GramCurvature(Curvature):
    """Here J̃ and u include the normaliser: J̃ = √scale·SᵀJ, so that G = J̃ᵀJ̃ and g = J̃ᵀu + h."""

    def __init__(self, lin: Linearization, whole: int = 0) -> None:
        super().__init__(lin)
        self.whole = whole if self.parameters.shards is None else 0
        us, sizes = [], []
        for piece in lin.pieces():
            us.append(piece.z.new_zeros(piece.m) if piece.u is None else piece.u.flatten())
            sizes.append(piece.m)
        several = lin.ranks.several
        self.layout = Layout(lin.ranks.every(sizes) if several else [sizes], lin.ranks.rank)
        self.root = lin.scale**0.5
        u = us[0] if len(us) == 1 else torch.cat(us)
        self.u = (lin.ranks.gather(u) if several else u) * self.root  # (m,)
        self._h: Tensor | None = None
        self._only: list[Block] | None = None  # the blocks of the only piece
        self._K: dict[torch.dtype, tuple[object, Tensor]] = {}  # K by dtype, with its D₀
        self._whole: list[Block] | None = None
        self._Jh: Tensor | None = None
        self._image: tuple[Tensor, int, Tensor] | None = None  # a step, its version, and J̃ times the step
        self._steep: tuple[object, Tensor] | None = None  # D₀ of the last solve, and gᵀD₀⁻¹g

    @property
    def gradient(self) -> Tensor:
        g, h = self.adjoint(self.u), self.h
        return g if h is None else g.add_(h)

    @property
    def h(self) -> Tensor | None:
        if self._h is not None:
            return self._h
        h = self.lin.remainder
        if self.lin.told:
            self._h = h
        return h

    def apply(self, v: Tensor) -> Tensor:
        """J̃v: (n,) → (m,)"""
        if self._image is not None and v is self._image[0] and v._version == self._image[1]:
            return self._image[2]
        parts = [apply(blocks, v, self.parameters) for blocks in self._each()]
        found = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (self.lin.ranks.gather(found) if self.lin.ranks.several else found).mul_(self.root)

    def _each(self) -> Iterable[list[Block]]:
        """The blocks of every piece; if there is only one piece, its blocks are kept."""
        if not self.lin.in_one:
            return (self._blocks(piece) for piece in self.lin.pieces())
        if self._only is None:
            self._only = self._blocks(self.lin.whole())
        return [self._only]

    def _blocks(self, piece: Piece) -> list[Block]:
        """The blocks of a piece; if J̃ is small, it is one block."""
        if self.whole == 0 or self.lin.m * self.lin.n > self.whole or not self.lin.in_one:
            return piece.blocks
        if self._whole is None:
            self._whole = [Explicit(self.parameters.tensors, piece.dense(self.u.dtype), piece.N)]
        return self._whole

    def adjoint(self, w: Tensor) -> Tensor:
        """J̃ᵀw: (m,) → (n,)"""
        total, own = None, (w[self.layout.own] * self.root).split_with_sizes(self.layout.own_sizes)
        for blocks, part in zip(self._each(), own, strict=True):
            found = adjoint(blocks, part, self.parameters)
            total = found if total is None else total.add_(found)
        assert total is not None
        return self.lin.ranks.sum(total) if self.lin.ranks.several else total

    def __matmul__(self, v: Tensor) -> Tensor:
        return self.adjoint(self.apply(v))

    def quadratic(self, v: Tensor) -> Tensor:
        Jv = self.apply(v)
        return Jv @ Jv

    def model(self, d: Tensor) -> tuple[Tensor, Tensor]:
        """gᵀd = uᵀJ̃d + hᵀd and dᵀGd = ‖J̃d‖²: no gradient is needed"""
        Jd, h = self.apply(d), self.h
        return (self.u @ Jd if h is None else self.u @ Jd + self.parameters.dot(h, d)), Jd @ Jd

    def slope(self, D: Metric) -> Tensor:
        """gᵀD⁻¹g = uᵀKu + 2uᵀJ̃D⁻¹h + hᵀD⁻¹h, known from the last solve if that had the same D₀"""
        if self._steep is None or self._steep[0] is not D.shape:
            return super().slope(D)
        return (self._steep[1] / D.scale).to(self.u.dtype)

    def trace(self) -> Tensor:
        """tr J̃ᵀJ̃ = tr J̃J̃ᵀ"""
        return self._gram(None, self.u.dtype).diagonal().sum()

    def partial_traces(self) -> PartialTraces | None:
        """None if the parameters are sharded, since every rank has only part of a layer"""
        return statistics.partial_traces(self.lin) if self.parameters.shards is None else None

    def gram(self, D: Metric | None, dtype: torch.dtype) -> Tensor:
        """J̃D₀⁻¹J̃ᵀ: (m, m); D = None is the identity"""
        if D is not None and D.turns:
            self.whole, self._only = 0, None  # turning a and δ takes less time than turning rows
        m = self.u.shape[0]
        K = torch.zeros(m, m, dtype=dtype, device=self.u.device)
        # J̃h is needed with K, and is formed at the same time if K is in one piece and D is only a number.
        plain = D is None or D.shape is None
        whole = self.layout.own_sizes == [m]
        together = self.h is not None and plain and whole and dtype == self.u.dtype
        Jh = torch.zeros_like(self.u) if together else None
        for rows, columns, left, right in self._pairs(D):
            part = K if whole else torch.zeros_like(K[rows, columns])
            self._add_pairs(part, left, right, Jh)
            if not whole:
                K[rows, columns] = part
                if left is not right:
                    K[columns, rows] = part.T
        if Jh is not None:
            self._Jh = self.parameters.total(Jh.mul_(self.root))
        for ranks in (self.lin.ranks, self.parameters.ranks):  # ranks that have other rows, or other columns
            if ranks.several:
                K = ranks.sum_later(K)()
        return K.mul_(self.lin.scale)

    def _pairs(self, D: Metric | None) -> Iterator[tuple[slice, slice, list[Block], list[Block]]]:
        """The blocks of K that this rank forms: their rows and columns, and the two blocks of J̃D₀^-½ whose product
        each of them is. All ranks iterate over all pieces in the same order, and each piece is sent by the rank that
        owns it."""
        ranks, layout = self.lin.ranks, self.layout
        if layout.own_sizes == [self.u.shape[0]] and not ranks.several:
            all_of_them, blocks = slice(0, self.u.shape[0]), self._piece(0, D)
            yield all_of_them, all_of_them, blocks, blocks
            return
        turned = D is not None and D.turns  # turned before it is sent, as that is much work; other metrics come after
        for i in range(layout.most):
            left = self._piece(i, D if turned else None) if i < len(layout.own_sizes) else None
            here = None if left is None or turned else self._whitened(left, D)
            here = left if here is None else here
            for source, j in layout.order(i):
                own = None if source != ranks.rank else left if i == j else self._piece(j, D if turned else None)
                right = ranks.shown(own, source, self.parameters.tensors)
                if here is not None and layout.forms(i, source, j):
                    there = here if right is left else right if turned else self._whitened(right, D)
                    yield layout.place(ranks.rank, i), layout.place(source, j), here, there

    def _piece(self, i: int, D: Metric | None) -> list[Block]:
        (blocks,) = self._each() if self.lin.in_one else (self._blocks(self.lin.piece_at(i)),)
        return self._whitened([b.plain() for b in blocks] if self.lin.ranks.several else blocks, D)

    def _whitened(self, blocks: list[Block], D: Metric | None) -> list[Block]:
        """J̃D₀^-½"""
        if D is None:
            return blocks
        blocks = together(blocks, D.coupled, D.scale.dtype, self.parameters)
        return [D.whiten(b, b.members or self.parameters.of(b)) or b for b in blocks]

    def _add_pairs(self, K: Tensor, left: list[Block], right: list[Block], Jh: Tensor | None) -> None:
        """K += J̃J̃'ᵀ of two pieces, and also J̃h if needed"""
        if all([b.empty for b in left]) or all([b.empty for b in right]):
            return  # the product is zero, as with weights that are all zero
        alike = left is right or len(left) == len(right)
        if left is right or (alike and all([a.pairs_with(b) for a, b in zip(left, right, strict=True)])):
            h = None if Jh is None or self.h is None else self.parameters.split(self.h)
            for a, b in zip(left, right, strict=True):
                v = None if h is None else [h[i] for i in self.parameters.of(a)]
                a.gram(K, b, None if v is None or Jh is None else Product(v, Jh))
        else:  # samples for which the model takes different branches
            K.addmm_(dense(left, K.dtype, self.parameters), dense(right, K.dtype, self.parameters).T)

    def with_decay(self, A: Metric) -> Metric:
        """At λ = 0 parameters that do not decay get nearly the limit λ → 0: a smaller λ loses digits next to W, and a
        larger one has an effect, by its root if D is not diagonal."""
        decay = self.lin.decay
        if decay is not None and not decay.weights.everywhere and not ask(A.scale > 0):
            A = A.with_scale((1e-12 if A.turns else 1e-8) * self._gram(A, self.u.dtype).diagonal().max())
        return super().with_decay(A)

    def newton(self, damping: Metric | Tensor) -> Tensor:
        return -self.step(Diagonal.of(damping, self.parameters.sizes))

    def step(self, A: Metric) -> Tensor:
        """−A⁻¹[h + J̃ᵀ(I + J̃A⁻¹J̃ᵀ)⁻¹(u − J̃A⁻¹h)]: solve in the m rows, not the n parameters.

        Plain Woodbury, A⁻¹g − A⁻¹J̃ᵀ(…)⁻¹J̃A⁻¹g, loses all digits of float32 at small λ; this form does not.
        """
        own, m = self.u.dtype, self.u.shape[0]
        # With more rows than parameters, u always has a part outside the range of J̃, see below.
        for inner in dict.fromkeys((own, torch.float64)) if m <= self.lin.n else ():
            d = self._solve(A, inner, own)
            if d is not None:
                return d
        if own != torch.float64:
            self.notes.append("solved in float64")
        d = self._solve(A, torch.float64, torch.float64)
        assert d is not None
        return d

    def _solve(self, A: Metric, inner: torch.dtype, outer: torch.dtype) -> Tensor | None:
        """The formula with K in one precision and the products with J̃ in another; None if rounding spoils the
        result."""
        sizes, shape = self.parameters.sizes, A.shape
        K = self._gram(A, inner)
        like = self.u if self.u.dtype is outer else self.u.to(outer)
        A = A if A.scale.dtype is outer and A.scale.device == like.device else A.to(like)
        # λ = 0 means the limit λ → 0, the shortest of the Gauss-Newton steps.
        A = A.with_scale(A.scale.where(A.scale > 0, 1e-12 * K.diagonal().max().to(outer)))
        K = K / A.scale.to(inner)
        h = self.h
        h = h if h is None or h.dtype is outer else h.to(outer)
        plain = None if h is None else A.solve(-h, sizes)  # −A⁻¹h
        if plain is None:
            moved = None
        elif self._Jh is not None and A.shape is None and outer == self.u.dtype:
            moved = (-self._Jh / A.scale).to(inner)  # (m,)
        else:
            moved = self.apply(plain).to(inner)
        u = self.u.to(inner)
        steep = (u @ (K @ u)).to(outer)  # gᵀA⁻¹g
        if h is not None and plain is not None and moved is not None:
            steep = steep - 2 * (u @ moved).to(outer) - self.parameters.dot(h, plain)
        self._steep = shape, steep * A.scale
        right = -u if moved is None else -u - moved
        w = spd_solve(K, torch.ones_like(K[0]), right, self.notes, self.lin.share.ranks)
        Kw = K @ w
        pulled = self.adjoint(w.to(outer))
        d = A.solve(pulled / A.scale, sizes, scaled=False)
        length = (w @ Kw).clamp(min=0).sqrt().to(outer)  # of d in the metric A
        if h is not None and plain is not None and moved is not None:
            d += plain
            Kw += moved
            length = self.parameters.dot(pulled.sub_(h), d).clamp(min=0).sqrt()  # J̃ᵀw − h = Ad
        if outer != torch.float64:
            error = partial(self._error, w=w, h=h, plain=plain, inner=inner, outer=outer)
            if not holds(lambda size: error(size) <= ROUNDING * length, K):
                return None
        d = d.to(self.u.dtype)
        # At small λ, w has a large part outside the range of J̃, and Kw consists only of the rounding of the product.
        length_of = torch.linalg.vector_norm
        lost = torch.finfo(inner).eps * K.diagonal().sum() * length_of(w)
        sound = outer != torch.float64 or (len(self.u) <= self.lin.n and told(lost <= 1e-6 * length_of(Kw)))
        self._image = (d, d._version, Kw.to(self.u.dtype)) if sound else None
        return d

    def _error(
        self, norm: Tensor, w: Tensor, h: Tensor | None, plain: Tensor | None, inner: torch.dtype, outer: torch.dtype
    ) -> Tensor:
        """A bound on what rounding leaves in d, in the metric A, from the norm of K.

        Of the errors in K and in J̃A⁻¹h at most half pass through the solve, σ/(1 + σ²) ≤ ½. The part of w outside the
        range of J̃ is only cancelled in J̃ᵀw, and A⁻¹h only by J̃ᵀw.
        """
        large, size = norm.to(outer), torch.linalg.vector_norm(w).to(outer)
        error: Tensor = 0.5 * torch.finfo(inner).eps * large * size + torch.finfo(outer).eps * large.sqrt() * size
        if h is not None and plain is not None:
            error = error + torch.finfo(outer).eps * (-self.parameters.dot(h, plain)).sqrt() * (1 + 0.5 * large.sqrt())
        return error

    def _gram(self, A: Metric | None, dtype: torch.dtype) -> Tensor:
        """K for the shape of A, whatever its scale: with another λ only the factorisation is repeated."""
        shape = None if A is None else A.shape
        if dtype not in self._K or self._K[dtype][0] is not shape:
            if A is not None and A.scale.dtype is not dtype:
                A = A.to(self.u.to(dtype))
            self._K[dtype] = (shape, self.gram(A, dtype))
        return self._K[dtype][1]
