"""A D that is a Kronecker product in every layer, and the sum of such a D and a diagonal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..deferred import ask_here
from ..ranks import ALONE, Ranks, completed, owned
from ..values import WAY_OUT, check_above, check_square, check_tensor, is_count, short
from ..weights import Weights
from .base import B, Diagonal, Metric, Part, Turn, Whitenable, between

NO_SOLVE = "a sum of two metrics can be multiplied with, and not solved with: `above` can"


# In a running average the trace of the past counts at most as this multiple of the present trace.
MEMORY = 10.0


def trusted(past: Tensor, present: Tensor) -> Tensor:
    """The share of its weight that the past keeps in a running average of matrices, from their diagonals (…, n). The
    past keeps all of it, unless it is far larger than the present: otherwise one outlier would dominate the average for
    a hundred batches."""
    return (MEMORY * (present.sum(-1) / past.sum(-1))).nan_to_num(1.0).clamp(max=1)


class Sum(Metric):
    """A + diag w for a non-diagonal A, in the form of products and in the coordinates of A. It is never saved."""

    def __init__(self, A: Metric, w: Weights, sizes: Sequence[int]) -> None:
        self.A, self.w, self.sizes, self.scale, self.turns = A, w, sizes, A.scale, A.turns
        self.beside, self.shape = w.flat(sizes, A.scale), A.shape

    @cached_property
    def above(self) -> Metric:
        return self.A.plus(self.w, self.sizes)

    def times(self, v: Tensor, sizes: Sequence[int]) -> Tensor:
        assert self.beside is not None
        return self.A.times(v, sizes).addcmul_(self.beside, v)

    def diagonal(self, sizes: Sequence[int]) -> Tensor:
        assert self.beside is not None
        return self.A.diagonal(sizes) + self.beside

    def turned(self, X: Tensor, sizes: Sequence[int]) -> Tensor:
        return self.A.turned(X, sizes)

    def turned_back(self, X: Tensor, sizes: Sequence[int]) -> Tensor:
        return self.A.turned_back(X, sizes)

    def damping(self, sizes: Sequence[int]) -> Tensor:
        return self.A.damping(sizes)

    def to(self, like: Tensor) -> Sum:
        return Sum(self.A.to(like), self.w, self.sizes)

    def with_scale(self, scale: Tensor) -> Sum:
        return Sum(self.A.with_scale(scale), self.w, self.sizes)

    def positive(self) -> Sum:
        return self

    def fits(self, sizes: Sequence[int]) -> bool:
        return self.A.fits(sizes)

    def solve(self, x: Tensor, sizes: Sequence[int], *, scaled: bool = True) -> Tensor:
        raise TypeError(NO_SOLVE)

    def whiten(self, block: Whitenable[B], members: Sequence[int]) -> B | None:
        raise TypeError(NO_SOLVE)

    def state(self) -> list[Any]:
        raise TypeError(NO_SOLVE)


# --- A D that is a Kronecker product in every layer.


# Each of the first steps forms new roots: the averages are over a few batches, at weights that change quickly.
EARLY = 10

# A triangle of up to this many rows is inverted as a whole. On an H200 six sides of 1,024 take 8.8 ms in parts of 128
# rows, where the host launches many small kernels in sequence, and 3.9 ms as a whole.
WHOLE = {"cpu": 128, "cuda": 2048}

Pair = tuple[Tensor, Tensor | None]  # left and right


@dataclass(frozen=True)
class LayerSides:
    """The sides of D in one layer, whose parameters form one matrix X (G, O, I) of G groups.

    Its first parameter is X[..., :-1] and a second one X[..., -1]; a single parameter is all of X. A side is a matrix
    (G, d, d) or its diagonal (G, d).
    """

    members: tuple[int, ...]  # indices of its parameters
    left: Tensor  # at the outputs, d = O; for a vector the diagonal of G itself, with G = I = 1
    right: Tensor | None  # at the inputs, d = I, with the same trace in every group; None for a vector

    @property
    def shape(self) -> tuple[int, int, int]:
        """G, O, I"""
        G, O = self.left.shape[:2]
        return G, O, 1 if self.right is None else self.right.shape[1]

    @property
    def trace(self) -> Tensor:
        """The trace of each group: (G,)"""
        return (self.left if self.left.ndim == 2 else self.left.diagonal(0, 1, 2)).sum(1)

    @property
    def form(self) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """The shapes of both sides"""
        return self.left.shape, None if self.right is None else self.right.shape

    def like(self, other: LayerSides) -> bool:
        """Whether both belong to the same parameters in the same form"""
        right, its = self.right, other.right
        return (
            self.members == other.members
            and self.left.shape == other.left.shape
            and (right is its if right is None or its is None else right.shape == its.shape)
        )

    def damped(self, gamma: Tensor) -> Pair:
        """left/√t + √γ/π and right/√t + π√γ with π² = O/I, which is also the ratio of their mean eigenvalues"""
        if self.right is None:
            return self.left + gamma, None
        _, O, I = self.shape
        balance, t = math.sqrt(O / I), self.trace
        share = t.rsqrt().where(t > 0, 0)
        root = gamma.sqrt()
        return shifted(self.left, share, root / balance), shifted(self.right, share, root * balance)

    def mixed(self, now: LayerSides, weight: Tensor) -> LayerSides:
        """The running average, in which these sides have the weight; less if they are far larger than the present
        ones."""
        if not self.like(now):
            return now
        trace = now.trace
        share = (weight * trusted(self.trace, trace)).where(trace.sum() > 0, 1)  # zeros contain no information
        right = None if now.right is None or self.right is None else torch.lerp(now.right, self.right, share)
        return LayerSides(now.members, torch.lerp(now.left, self.left, share), right)

    def each(self, change: Callable[..., Tensor], *others: LayerSides) -> LayerSides:
        """Changes both sides, each together with that of others of the same form"""
        left = change(self.left, *[other.left for other in others])
        right = None if self.right is None else change(self.right, *[other.right for other in others])
        return LayerSides(self.members, left, right)


class Layered(Metric):
    """scale·D₀ with D₀ = (right/√t + π√γ) ⊗ (left/√t + √γ/π) in every layer, t the trace of either side, π² = O/I. For
    a vector D₀ is the diagonal left + γ.

    `roots` are the inverses of the Cholesky factors of both sides: D₀⁻¹ = WᵀW, layer by layer. With `every` > 1 they
    are older than the sides, until `settled` forms them again. `rank` and `batches` are kept for the damping.
    """

    turns = True

    def __init__(
        self, scale: Tensor, layers: Sequence[LayerSides], gamma: Tensor, roots: Sequence[Pair],
        *, rank: int = 0, batches: Tensor, every: int = 1, early: bool = True, sizes: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.scale, self.layers, self.gamma, self.roots = scale, tuple(layers), gamma, tuple(roots)
        self.shape = self.roots
        self.rank = rank  # of G, the largest so far
        self.batches = batches  # in the running averages: ()
        self.every = every  # number of steps for which roots are kept
        self.early = early  # whether the next step forms new roots
        self._sizes = sizes  # the sizes that it is known to fit

    @staticmethod
    def of(
        layers: Sequence[LayerSides], gamma: Tensor, rank: int, batches: Tensor, every: int = 1, ranks: Ranks = ALONE
    ) -> Layered:
        """With new roots, each formed by one of the ranks. If γ is 0, nothing has any curvature, and γ is set to 1."""
        gamma = gamma.where(gamma > 0, 1)
        roots = rooted([layer.damped(gamma) for layer in layers], ranks)
        return Layered(torch.ones_like(gamma), layers, gamma, roots, rank=rank, batches=batches, every=every)

    def settled(self, steps: int, ranks: Ranks = ALONE) -> Layered:
        early, due = steps < EARLY, steps % self.every == 0
        if self.every == 1 or (early == self.early and (early or not due)):
            return self
        if not due or early:
            return self._with(self.scale, early)
        return Layered.of(self.layers, self.gamma, self.rank, self.batches, self.every, ranks)._with(self.scale, early)

    @property
    def later(self) -> Layered:
        """The same after the first steps"""
        return self._with(self.scale, False)

    def with_scale(self, scale: Tensor) -> Layered:
        return self._with(scale, self.early)

    def _with(self, scale: Tensor, early: bool) -> Layered:
        return Layered(
            scale, self.layers, self.gamma, self.roots, rank=self.rank, batches=self.batches, every=self.every,
            early=early, sizes=self._sizes,
        )  # fmt: skip

    def averaged(self, layers: Sequence[LayerSides], gamma: Tensor, rank: int, batches: Tensor, every: int) -> Layered:
        """The same roots with sides of the same forms, which are averages over one more batch"""
        return Layered(
            torch.ones_like(gamma), layers, gamma, self.roots, rank=rank, batches=batches, every=every, early=False,
            sizes=self._sizes,
        )  # fmt: skip

    @property
    def coupled(self) -> Sequence[Sequence[int]]:
        return [layer.members for layer in self.layers if len(layer.members) > 1]

    # Products.

    @cached_property
    def _damped(self) -> list[Pair]:
        if self.every == 1:
            return [layer.damped(self.gamma) for layer in self.layers]
        return [(side_of(left), None if right is None else side_of(right)) for left, right in self.roots]

    def solve(self, x: Tensor, sizes: Sequence[int], *, scaled: bool = True) -> Tensor:
        if scaled:
            x.div_(self.scale)
        pieces = x.split_with_sizes(sizes)
        for layer, (left, right) in zip(self.layers, self.roots, strict=True):  # D₀⁻¹ = WᵀW
            G, O = left.shape[:2]
            parts = [pieces[i].view(G, O, -1) for i in layer.members]
            X = parts[0] if len(parts) == 1 else torch.cat(parts, 2)  # (G, O, I)
            X = left.mT @ (left @ X) if left.ndim == 3 else left.square()[:, :, None] * X
            if right is not None:
                X = X @ right.mT @ right if right.ndim == 3 else X * right.square()[:, None]
            start = 0
            for part in parts:
                part.copy_(X[:, :, start : start + part.shape[2]])
                start += part.shape[2]
        return x

    def times(self, v: Tensor, sizes: Sequence[int]) -> Tensor:
        return self._by_layer(v, sizes, self._damped).mul_(self.scale)

    def turned(self, X: Tensor, sizes: Sequence[int]) -> Tensor:
        return self._by_layer(X, sizes, [(left, _transposed(right)) for left, right in self.roots])

    def turned_back(self, X: Tensor, sizes: Sequence[int]) -> Tensor:
        return self._by_layer(X, sizes, [(transposed(left), right) for left, right in self.roots])

    def damping(self, sizes: Sequence[int]) -> Tensor:
        return self.scale.expand(sum(sizes))

    def diagonal(self, sizes: Sequence[int]) -> Tensor:
        found = torch.empty(sum(sizes), dtype=self.scale.dtype, device=self.scale.device)
        pieces = found.split(list(sizes))
        for layer, (left, right) in zip(self.layers, self._damped, strict=True):
            D = diagonal_of(left)[:, :, None]
            D = D if right is None else D * diagonal_of(right)[:, None]
            _spread(D, [pieces[i] for i in layer.members])
        return found.mul_(self.scale)

    def _by_layer(self, x: Tensor, sizes: Sequence[int], sides: Iterable[Pair]) -> Tensor:
        """left·X·right in every layer: (…, n) → (…, n)"""
        found = torch.empty_like(x)
        there, here = found.split_with_sizes(sizes, -1), x.split_with_sizes(sizes, -1)
        for layer, (left, right) in zip(self.layers, sides, strict=True):
            X = Turn.joined([here[i] for i in layer.members], left.shape[:2])
            _spread(between(left, X, right), [there[i] for i in layer.members])
        return found

    def whiten(self, block: Whitenable[B], members: Sequence[int]) -> B | None:
        place = {i: k for k, i in enumerate(members)}
        turns = [
            Turn([place[i] for i in layer.members], left, right)
            for layer, (left, right) in zip(self.layers, self.roots, strict=True)
            if layer.members[0] in place
        ]
        return block.turned(turns)

    def to(self, like: Tensor) -> Layered:
        if self.scale.dtype == like.dtype and self.scale.device == like.device:
            return self
        layers = [layer.each(lambda t: t.to(like)) for layer in self.layers]
        roots = [(left.to(like), None if right is None else right.to(like)) for left, right in self.roots]
        return Layered(
            self.scale.to(like), layers, self.gamma.to(like), roots,
            rank=self.rank, batches=self.batches.to(like), every=self.every, early=self.early,
        )  # fmt: skip

    def positive(self) -> Layered:
        return self

    def sum(self, w: Weights, sizes: Sequence[int]) -> Sum:
        return Sum(self, w, sizes)

    def plus(self, w: Weights, sizes: Sequence[int]) -> Raised:
        """(√s·right + π√w·I) ⊗ (√s·left + √w/π·I) of D₀ = right ⊗ left in every layer, where s is the scale and π² the
        ratio of the mean traces of right and left. If w differs between a weight and its bias, or between elements, the
        largest w is used, and I on the right becomes a diagonal: the ratio of the largest w of each column to it."""
        each = zip(self.layers, self._damped, strict=True)
        sides = [
            raised(layer, left, right, self.scale, w.of(layer.members), [sizes[i] for i in layer.members])
            for layer, (left, right) in each
        ]
        return Raised(self, sides, rooted(sides))

    # The saved form.

    def fits(self, sizes: Sequence[int]) -> bool:
        if self._sizes is None and self._fits(sizes):
            self._sizes = list(sizes)
        return self._sizes is not None and (self._sizes is sizes or self._sizes == list(sizes))

    def _fits(self, sizes: Sequence[int]) -> bool:
        if sorted(i for layer in self.layers for i in layer.members) != list(range(len(sizes))):
            return False
        return all(
            sum(sizes[i] for i in layer.members) == math.prod(layer.shape)
            and all(sizes[i] % math.prod(layer.shape[:2]) == 0 for i in layer.members)
            for layer in self.layers
        )

    def check(self, where: str) -> None:
        check_above(self.scale, f"{where}, its scale,", strictly=True)
        check_above(self.gamma, f"{where}, its γ,")
        check_above(self.batches, f"{where}, the number of its batches,", 1)
        for name, count in (("rank", self.rank), ("every", self.every)):
            if not is_count(count) or count < 1:
                raise ValueError(f"{where}: {name} is {short(count)}, and an integer of at least 1 is needed")
        if not isinstance(self.early, bool):
            raise ValueError(f"{where}: early is {short(self.early)}, neither True nor False")
        for layer, pair in zip(self.layers, self.roots, strict=True):
            for side, root in zip((layer.left, layer.right), pair, strict=True):
                if side is not None:
                    (check_above if side.ndim == 2 else check_square)(side, where)
                if root is not None:
                    check_above(diagonal_of(root), f"{where}, a root of it,", strictly=True)

    def state(self) -> list[Any]:
        layers = [
            [list(layer.members), layer.left, layer.right, *pair]
            for layer, pair in zip(self.layers, self.roots, strict=True)
        ]
        rest = {"rank": self.rank, "batches": self.batches, "every": self.every, "early": self.early}
        return [self.scale, {"layers": layers, "gamma": self.gamma, **rest}]

    @staticmethod
    def restored(scale: Tensor, kept: dict[str, Any]) -> Layered:
        layers = [LayerSides(tuple(members), left, right) for members, left, right, *_ in kept["layers"]]
        roots = [(left, right) for *_, left, right in kept["layers"]]
        rest = {key: kept[key] for key in ("rank", "batches", "every", "early")}
        return Layered(scale, layers, kept["gamma"], roots, **rest)


class Raised(Layered):
    """A metric above the sum of a Layered and a diagonal, with the sides of D₀ given. It is used for one solve, never
    saved."""

    def __init__(
        self, origin: Layered, sides: Sequence[Pair], roots: Sequence[Pair], scale: Tensor | None = None
    ) -> None:
        scale = torch.ones_like(origin.scale) if scale is None else scale
        super().__init__(scale, origin.layers, origin.gamma, roots, batches=origin.batches)
        self.sides = sides

    @property
    def _damped(self) -> list[Pair]:
        return list(self.sides)

    def _with(self, scale: Tensor, early: bool) -> Raised:
        return Raised(self, self.sides, self.roots, scale)

    def to(self, like: Tensor) -> Raised:
        if self.scale.dtype == like.dtype and self.scale.device == like.device:
            return self
        sides, roots = (
            [(left.to(like), None if right is None else right.to(like)) for left, right in pairs]
            for pairs in (self.sides, self.roots)
        )
        return Raised(self, sides, roots, self.scale.to(like))


def raised(
    layer: LayerSides, left: Tensor, right: Tensor | None, scale: Tensor, w: Weights, sizes: Sequence[int]
) -> Pair:
    """The sides for Layered.plus; for a vector scale·left + w"""
    if right is None:
        return scale * left + w[0], None
    G, O, I = layer.shape
    widths = [I * size // sum(sizes) for size in sizes]
    most, root, t, r = w.most, scale.sqrt(), diagonal_of(left).mean(1), diagonal_of(right).mean(1)  # (G,)
    pi = (r / t).sqrt()
    shares = right.new_empty(G, 1, I)
    for part, share in zip(shares.split(widths, 2), w.shares(G, O), strict=True):
        part[...] = share
    at_left = (most**0.5 / pi)[:, None].expand(diagonal_of(left).shape)
    return added(root * left, at_left), added(root * right, most**0.5 * pi[:, None] * shares[:, 0])


def added(side: Tensor, diagonal: Tensor) -> Tensor:
    """side + diagonal (G, d), in place"""
    diagonal_of(side).add_(diagonal)
    return side


def rooted(sides: Sequence[Pair], ranks: Ranks = ALONE) -> list[Pair]:
    """The inverse roots of every pair of sides"""
    roots = iter(inverse_roots([side for pair in sides for side in pair if side is not None], ranks))
    return [(next(roots), None if right is None else next(roots)) for _, right in sides]


def diagonal_of(side: Tensor) -> Tensor:
    """The diagonal (G, d) of a matrix (G, d, d), or of what is already a diagonal"""
    return side if side.ndim == 2 else side.diagonal(dim1=1, dim2=2)


def shifted(side: Tensor, share: Tensor, shift: Tensor) -> Tensor:
    """share·side + shift·I, with one share per group (G,)"""
    if side.ndim == 2:
        return side * share[:, None] + shift
    found = side * share[:, None, None]
    diagonal_of(found).add_(shift)
    return found


def transposed(side: Tensor) -> Tensor:
    return side if side.ndim == 2 else side.mT


def _transposed(side: Tensor | None) -> Tensor | None:
    return None if side is None else transposed(side)


def _spread(X: Tensor, out: Sequence[Tensor]) -> None:
    """out ← the parameters of X (…, G, O, I), each flat (…, size)"""
    shape = X.shape[:-1]
    views = [t.view(*shape, -1) for t in out]
    if len(out) == 1:
        views[0].copy_(X)
        return
    start = 0
    for t in views:
        t.copy_(X[..., start : start + t.shape[-1]])
        start += t.shape[-1]


def side_of(root: Tensor) -> Tensor:
    """S from W with WᵀW = S⁻¹"""
    if root.ndim == 2:
        return root.square().reciprocal()
    L = _inverted(root)
    return L @ L.mT


def inverse_roots(sides: Sequence[Tensor], ranks: Ranks = ALONE) -> list[Tensor]:
    """W with WᵀW = S⁻¹ for each S, a matrix or a diagonal: the inverse of the Cholesky factor, formed by one of the
    ranks. If a matrix cannot be factored, all are factored in float64 with slightly larger diagonals, since only
    rounding can be the reason."""
    matrices = [S for S in sides if S.ndim == 3]
    own = owned(ranks, matrices)
    factors = [torch.linalg.cholesky_ex(S) for S in own]
    infos = [f.info.flatten() for f in factors]
    if not ranks.all(not infos or ask_here((torch.cat(infos) == 0).all())):
        factors = [torch.linalg.cholesky_ex(_raised(S)) for S in own]
    inverses = [[_inverted(f.L).to(S.dtype)] for S, f in zip(own, factors, strict=True)]
    roots = iter(completed(ranks, inverses, matrices, [[S] for S in matrices]))
    return [next(roots)[0] if S.ndim == 3 else S.rsqrt() for S in sides]


def _raised(S: Tensor) -> Tensor:
    """S in float64, with its diagonal enlarged by more than the rounding of the precision of S"""
    found = S.double().clone()
    diagonal_of(found).add_(10 * torch.finfo(S.dtype).eps * diagonal_of(found).sum(1, keepdim=True))
    return found


def _inverted(L: Tensor) -> Tensor:
    """L⁻¹ (G, d, d) of a lower triangle, by halves: products are faster than a triangular solve, and half as many
    are needed."""
    d = L.shape[1]
    if d <= WHOLE.get(L.device.type, WHOLE["cuda"]):
        one = torch.eye(d, dtype=L.dtype, device=L.device).expand_as(L)
        solved: Tensor = torch.linalg.solve_triangular(L, one, upper=False)
        return solved
    h = d // 2
    found = torch.zeros_like(L)
    found[:, :h, :h], found[:, h:, h:] = _inverted(L[:, :h, :h]), _inverted(L[:, h:, h:])
    found[:, h:, :h] = -found[:, h:, h:] @ (L[:, h:, :h] @ found[:, :h, :h])
    return found


KINDS = (Diagonal, Layered)


def restored(state: list[Any]) -> Metric:
    """The metric in a saved state, in one precision: the finest of its tensors"""
    precisions = {t.dtype for t in tree_leaves(state) if _real(t)}
    if len(precisions) > 1:
        finest = reduce(torch.promote_types, precisions)
        state = tree_map(lambda t: t.to(finest) if _real(t) else t, state)
    scale, parts = state
    if isinstance(parts, dict):
        return Layered.restored(scale, parts)
    return Diagonal(scale, None if parts is None else [Part.of(part) for part in parts])


def _real(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()


def check_saved(state: Any, sizes: Sequence[int], dtype: torch.dtype) -> Metric:
    """The metric in a saved state, checked for parameters of these sizes and for the precision of θ"""
    where = "the damping D in this state"
    if not isinstance(state, list) or len(state) != 2:
        raise ValueError(f"{where} is {short(state)}, not a scale and its parts: {WAY_OUT}")
    scale, parts = state
    check_tensor(scale, f"{where}, its scale,", ())
    if isinstance(parts, dict):
        _check_layered(parts, where)
    elif parts is not None:
        for part in _listed(parts, where):
            for factor in _listed(part, where, (1, 2)):
                check_tensor(factor, where)
    D = restored(state)
    for t in tree_leaves(state):
        if isinstance(t, Tensor):
            check_tensor(t, where, t.shape, dtype)
    if not D.fits(sizes):
        raise ValueError(f"{where} is that of another model: load the state of this one")
    D.check(where)
    return D


def _listed(item: Any, where: str, lengths: Sequence[int] | None = None) -> Sequence[Any]:
    if not isinstance(item, (list, tuple)) or (lengths is not None and len(item) not in lengths):
        raise ValueError(f"{where} holds {short(item)} where a list is due: {WAY_OUT}")
    return item


def _check_layered(parts: dict[Any, Any], where: str) -> None:
    """Checks the sides, (G, d, d) or (G, d), and the roots, which have the same shapes"""
    missing = {"layers", "gamma", "rank", "batches", "every", "early"} - set(parts)
    if missing:
        raise ValueError(f"{where} has no entry {min(missing)!r}: {WAY_OUT}")
    for name in ("gamma", "batches"):
        check_tensor(parts[name], f"{where} {name!r}", ())
    for layer in _listed(parts["layers"], where):
        members, left, right, *roots = _listed(layer, where, (5,))
        if not all(is_count(i) for i in _listed(members, where)):
            raise ValueError(f"{where} holds {short(members)} where the numbers of parameters are due: {WAY_OUT}")
        for side, root in zip((left, right), roots, strict=True):
            if side is None and root is None and side is right:
                continue
            check_tensor(side, where)
            d = side.shape[-1] if side.ndim else 0
            check_tensor(side, where, (None, d, d) if side.ndim == 3 else (None, d))
            check_tensor(root, f"{where}, a root of it,", side.shape)
        if right is not None and len(left) != len(right):
            raise ValueError(f"{where} has {len(left)} groups on one side and {len(right)} on the other: {WAY_OUT}")
        if right is None and (left.ndim != 2 or len(left) != 1):
            raise ValueError(f"{where} has one side of the shape {tuple(left.shape)} alone: {WAY_OUT}")
