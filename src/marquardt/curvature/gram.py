"""G through its dual: J̃J̃ᵀ is m×m (m rows), however many parameters there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from ..deferred import ask
from ..jacobian import statistics
from ..jacobian.linearization import Linearization, Needs
from ..jacobian.piece import Piece
from ..jacobian.products import adjoint, apply, dense, together
from ..jacobian.statistics import PartialTraces
from ..layers import Block, Explicit
from ..layers.block import Product
from ..metric import Diagonal, Metric
from .contract import Curvature, Interchangeable, check_chunk
from .cost import Cost, Layer, Shapes, Work, deltas, factor, gathered, half, reduced
from .solve import holds, spd_solve

# The relative error that rounding may leave in a float32 step, as a bound that is seldom reached: errors are a tenth of
# it. Where it would be more, K is formed and factored in float64, and then the products with the rows as well.
ROUNDING = 1e-3


@dataclass(frozen=True)
class Gram(Interchangeable):
    """K = J̃D⁻¹J̃ᵀ, layer by layer: J̃ is never built where a layer has a rule.

    For more parameters than rows. With `chunk` the rows of two chunks at a time are in memory; they are computed again
    for every pair. Of several ranks each forms some of the blocks of K, from inputs and gradients of the layers that
    another one has sent; if the parameters are sharded, the part of all of them that its own columns have.

    Args:
        chunk: samples whose rows are in memory at once, twice as many in all; None for all.
        whole: J̃ of up to so many numbers is built, for fewer and larger products.

    >>> opt = mq.LM(model, "mse", curvature=mq.Gram())
    """

    adds_up = shares = True

    chunk: int | None = None
    whole: int = field(default=1 << 22, repr=False)  # J̃ of up to so many numbers is built: fewer, larger products

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
        """J̃J̃ᵀ layer by layer, in the cheaper of the two forms that Bilinear.gram has."""
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
    """Where the rows of every piece of every rank are among the m rows."""

    def __init__(self, sizes: Sequence[Sequence[int]], rank: int) -> None:
        self.sizes, self.rank = sizes, rank  # rows of the pieces of each rank
        self.own_sizes = list(sizes[rank])
        self.most = max(map(len, sizes))  # pieces that a rank has
        self.own = slice(self.place(rank, 0).start, self.place(rank, len(self.own_sizes) - 1).stop)

    def place(self, rank: int, piece: int) -> slice:
        first = sum(map(sum, self.sizes[:rank])) + sum(self.sizes[rank][:piece])
        return slice(first, first + self.sizes[rank][piece])

    def order(self, i: int) -> list[tuple[int, int]]:
        """The pieces that piece i of a rank is multiplied with, or that other ranks wait for: rank and number"""
        return [
            (rank, j)
            for rank, sizes in enumerate(self.sizes)
            for j in range(len(sizes))
            if len(self.sizes) > 1 or j >= i
        ]

    def forms(self, i: int, rank: int, j: int) -> bool:
        """Whether this rank forms the block of its piece i and piece j of another: of two ranks one does, and every
        rank with half of the others."""
        ahead = (rank - self.rank) % len(self.sizes)
        behind = len(self.sizes) - ahead
        return j >= i if ahead == 0 else ahead < behind or (ahead == behind and self.rank < rank)


class GramCurvature(Curvature):
    """In what follows J̃ and u carry the normaliser: J̃ = √scale·SᵀJ, so that G = J̃ᵀJ̃ and g = J̃ᵀu + h."""

    def __init__(self, lin: Linearization, whole: int = 0) -> None:
        super().__init__(lin)
        self.whole = whole if self.parameters.shards is None else 0
        us, sizes = [], []
        for piece in lin.pieces():
            us.append(piece.z.new_zeros(piece.m) if piece.u is None else piece.u.flatten())
            sizes.append(piece.m)
        self.layout = Layout(lin.ranks.every(sizes), lin.ranks.rank)
        self.root = lin.scale**0.5
        self.u = lin.ranks.gather(torch.cat(us)) * self.root  # (m,)
        self._K: dict[torch.dtype, tuple[object, Tensor]] = {}  # and the D₀ that it was formed with
        self._whole: list[Block] | None = None
        self._Jh: Tensor | None = None
        self._image: tuple[Tensor, int, Tensor] | None = None  # a step, its version, J̃ times it
        self._steep: tuple[object, Tensor] | None = None  # D₀ of the last solve, and gᵀD₀⁻¹g

    @property
    def gradient(self) -> Tensor:
        g, h = self.adjoint(self.u), self.h
        return g if h is None else g.add_(h)

    @property
    def h(self) -> Tensor | None:
        return self.lin.remainder

    def apply(self, v: Tensor) -> Tensor:
        """J̃v: (n,) → (m,)"""
        if self._image is not None and v is self._image[0] and v._version == self._image[1]:
            return self._image[2]
        parts = [apply(self._blocks(piece), v, self.parameters) for piece in self.lin.pieces()]
        found = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (self.lin.ranks.gather(found) if self.lin.ranks.several else found).mul_(self.root)

    def _blocks(self, piece: Piece) -> list[Block]:
        """The blocks of a piece; where J̃ is small, as one."""
        if self.whole == 0 or self.lin.m * self.lin.n > self.whole or not self.lin.in_one:
            return piece.blocks
        if self._whole is None:
            self._whole = [Explicit(self.parameters.tensors, piece.dense(self.u.dtype), piece.N)]
        return self._whole

    def adjoint(self, w: Tensor) -> Tensor:
        """J̃ᵀw: (m,) → (n,)"""
        total, own = None, (w[self.layout.own] * self.root).split_with_sizes(self.layout.own_sizes)
        for piece, part in zip(self.lin.pieces(), own, strict=True):
            found = adjoint(self._blocks(piece), part, self.parameters)
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
        """gᵀD⁻¹g = uᵀKu + 2uᵀJ̃D⁻¹h + hᵀD⁻¹h, found by the last solve if it had the same D₀"""
        if self._steep is None or self._steep[0] is not D.shape:
            return super().slope(D)
        return (self._steep[1] / D.scale).to(self.u.dtype)

    def trace(self) -> Tensor:
        """tr J̃ᵀJ̃ = tr J̃J̃ᵀ"""
        return self._gram(None, self.u.dtype).diagonal().sum()

    def partial_traces(self) -> PartialTraces | None:
        """None if every rank has a part of a layer"""
        return statistics.partial_traces(self.lin) if self.parameters.shards is None else None

    def gram(self, D: Metric | None, dtype: torch.dtype) -> Tensor:
        """J̃D₀⁻¹J̃ᵀ: (m, m); None is the identity"""
        if D is not None and D.turns:
            self.whole = 0  # to turn a and δ takes less time than to turn rows
        m = self.u.shape[0]
        K = torch.zeros(m, m, dtype=dtype, device=self.u.device)
        # J̃h is wanted with K, and comes along where K is in one piece and D is no more than a number.
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
        for ranks in (self.lin.ranks, self.parameters.ranks):  # that have other rows, or other columns
            if ranks.several:
                K = ranks.sum_later(K)()
        return K.mul_(self.lin.scale)

    def _pairs(self, D: Metric | None) -> Iterator[tuple[slice, slice, list[Block], list[Block]]]:
        """The blocks of K that this rank forms: their rows and columns, and the blocks of J̃D₀^-½ that they are products
        of. All ranks go through all pieces in the same order, and each is sent by the rank that has it."""
        ranks, layout = self.lin.ranks, self.layout
        if layout.own_sizes == [self.u.shape[0]] and not ranks.several:
            all_of_them, blocks = slice(0, self.u.shape[0]), self._piece(0, D)
            yield all_of_them, all_of_them, blocks, blocks
            return
        turned = D is not None and D.turns  # before it is sent, for that is much work; other metrics are applied after
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
        blocks = self._blocks(self.lin.piece_at(i))
        return self._whitened([b.plain() for b in blocks] if self.lin.ranks.several else blocks, D)

    def _whitened(self, blocks: list[Block], D: Metric | None) -> list[Block]:
        """J̃D₀^-½"""
        if D is None:
            return blocks
        blocks = together(blocks, D.coupled, D.scale.dtype, self.parameters)
        return [D.whiten(b, self.parameters.of(b)) or b for b in blocks]

    def _add_pairs(self, K: Tensor, left: list[Block], right: list[Block], Jh: Tensor | None) -> None:
        """K += J̃J̃'ᵀ of two pieces, and J̃h if it is asked for"""
        if all([b.empty for b in left]) or all([b.empty for b in right]):
            return  # zero, as with weights that are all zero
        alike = left is right or len(left) == len(right)
        if left is right or (alike and all([a.pairs_with(b) for a, b in zip(left, right, strict=True)])):
            h = None if Jh is None or self.h is None else self.parameters.split(self.h)
            for a, b in zip(left, right, strict=True):
                v = None if h is None else [h[i] for i in self.parameters.of(a)]
                a.gram(K, b, None if v is None or Jh is None else Product(v, Jh))
        else:  # samples that take different ways through the model
            K.addmm_(dense(left, K.dtype, self.parameters), dense(right, K.dtype, self.parameters).T)

    def with_decay(self, A: Metric) -> Metric:
        """At λ = 0 parameters that do not decay have nearly the limit λ → 0: a smaller λ costs digits beside W, and a
        larger one matters by its root if D is no diagonal matrix."""
        decay = self.lin.decay
        if decay is not None and not decay.weights.everywhere and not ask(A.scale > 0):
            A = A.with_scale((1e-12 if A.turns else 1e-8) * self._gram(A, self.u.dtype).diagonal().max())
        return super().with_decay(A)

    def newton(self, damping: Metric | Tensor) -> Tensor:
        return -self.step(Diagonal.of(damping, self.parameters.sizes))

    def step(self, A: Metric) -> Tensor:
        """−A⁻¹[h + J̃ᵀ(I + J̃A⁻¹J̃ᵀ)⁻¹(u − J̃A⁻¹h)]: solve in the m rows, not the n parameters.

        Plain Woodbury, A⁻¹g − A⁻¹J̃ᵀ(…)⁻¹J̃A⁻¹g, loses all digits of float32 at small λ; this form keeps them.
        """
        own, m = self.u.dtype, self.u.shape[0]
        # With more rows than parameters, u always has a part outside the range of J̃: see below.
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
        """The formula with K in one precision and the products with J̃ in another, or None where rounding spoils it."""
        sizes, shape = self.parameters.sizes, A.shape
        K = self._gram(A, inner)
        A = A.to(self.u.to(outer))
        # λ = 0 is the limit λ → 0, which is the shortest of the Gauss-Newton steps.
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
        # At small λ, w has a large part outside the range of J̃, and Kw only the rounding of its product with K.
        length_of = torch.linalg.vector_norm
        lost = torch.finfo(inner).eps * K.diagonal().sum() * length_of(w)
        sound = outer != torch.float64 or (len(self.u) <= self.lin.n and ask(lost <= 1e-6 * length_of(Kw)))
        self._image = (d, d._version, Kw.to(self.u.dtype)) if sound else None
        return d

    def _error(
        self, norm: Tensor, w: Tensor, h: Tensor | None, plain: Tensor | None, inner: torch.dtype, outer: torch.dtype
    ) -> Tensor:
        """What rounding leaves in d, in the metric A, with the norm of K.

        Of the errors in K and in J̃A⁻¹h at most half get through the solve, σ/(1 + σ²) ≤ ½. The part of w outside the
        range of J̃ cancels only in J̃ᵀw, and A⁻¹h only against it.
        """
        large, size = norm.to(outer), torch.linalg.vector_norm(w).to(outer)
        error: Tensor = 0.5 * torch.finfo(inner).eps * large * size + torch.finfo(outer).eps * large.sqrt() * size
        if h is not None and plain is not None:
            error = error + torch.finfo(outer).eps * (-self.parameters.dot(h, plain)).sqrt() * (1 + 0.5 * large.sqrt())
        return error

    def _gram(self, A: Metric | None, dtype: torch.dtype) -> Tensor:
        """Does not depend on the scale of A: another λ costs only the factorisation."""
        shape = None if A is None else A.shape
        if dtype not in self._K or self._K[dtype][0] is not shape:
            self._K[dtype] = (shape, self.gram(None if A is None else A.to(self.u.to(dtype)), dtype))
        return self._K[dtype][1]
