"""left ⊗ right in every layer: the algebra that a D and a G of Kronecker products share.

The parameters of a layer form one matrix X (G, O, I) of G groups, and the product maps X to left·X·right. A side is a
matrix (G, d, d) or its diagonal (G, d), with d = O on the left and d = I on the right; None stands for the identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..deferred import ask_here
from ..ranks import ALONE, Ranks, completed, owned
from ..weights import Weights

Pair = tuple[Tensor, Tensor | None]  # left and right

# In a running average the trace of the past counts at most as this multiple of the present trace.
MEMORY = 10.0

# A triangle of up to this many rows is inverted as a whole. On an H200 six sides of 1,024 take 8.8 ms in parts of 128
# rows, where the host launches many small kernels in sequence, and 3.9 ms as a whole.
WHOLE = {"cpu": 128, "cuda": 2048}


class InLayer(Protocol):
    """What knows its parameters, by index, and the G and O of their matrix X."""

    @property
    def members(self) -> Sequence[int]: ...

    @property
    def left(self) -> Tensor: ...


# --- Products.


def product(left: Tensor | None, right: Tensor | None, X: Tensor) -> Tensor:
    """left·X·right: (…, G, O, I)"""
    if left is not None:
        X = left @ X if left.ndim == 3 else left[:, :, None] * X
    if right is None:
        return X
    return X @ right if right.ndim == 3 else X * right[:, None]


def inverse_product(left: Tensor, right: Tensor | None, X: Tensor) -> Tensor:
    """leftᵀ·left·X·rightᵀ·right: with the inverse roots of both sides, the product with the inverse of D₀"""
    X = left.mT @ (left @ X) if left.ndim == 3 else left.square()[:, :, None] * X
    if right is None:
        return X
    return X @ right.mT @ right if right.ndim == 3 else X * right.square()[:, None]


def diagonal_of(side: Tensor) -> Tensor:
    """The diagonal (G, d) of a matrix (G, d, d), or of what is already a diagonal"""
    return side if side.ndim == 2 else side.diagonal(dim1=1, dim2=2)


def outer(left: Tensor, right: Tensor | None) -> Tensor:
    """The diagonal of left ⊗ right: (G, O, I)"""
    line = diagonal_of(left)[:, :, None]
    return line if right is None else line * diagonal_of(right)[:, None]


def transposed(side: Tensor | None) -> Tensor | None:
    return side if side is None or side.ndim == 2 else side.mT


def each(change: Callable[[Tensor], Tensor], pair: Pair) -> Pair:
    """Both sides, changed"""
    left, right = pair
    return change(left), None if right is None else change(right)


def added(side: Tensor, diagonal: Tensor) -> Tensor:
    """side + diagonal (G, d), in place"""
    diagonal_of(side).add_(diagonal)
    return side


def shifted(side: Tensor, share: Tensor, shift: Tensor) -> Tensor:
    """share·side + shift·I, with one share per group (G,)"""
    return added(side * share.view(-1, *[1] * (side.ndim - 1)), shift)


# --- The matrix X of a layer, from flat parameters and back.


def joined(parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """X from the flat parameters: (…, size) → (…, G, O, I)"""
    lead = parts[0].shape[:-1]
    if len(parts) == 1:
        return parts[0].view(*lead, *shape, -1)
    return torch.cat([part.view(*lead, *shape, -1) for part in parts], -1)


def spread(X: Tensor, out: Sequence[Tensor]) -> None:
    """out ← the parameters of X (…, G, O, I), each flat (…, size)"""
    start = 0
    for t in out:
        view = t.view(*X.shape[:-1], -1)
        end = start + view.shape[-1]
        view.copy_(X[..., start:end])
        start = end


def matrices(layers: Sequence[InLayer], x: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """X of every layer, from a vector of all parameters: (…, n)"""
    parts = x.split_with_sizes(sizes, -1)
    for layer in layers:
        yield joined([parts[i] for i in layer.members], layer.left.shape[:2])


def vector_of(layers: Sequence[InLayer], each: Iterable[Tensor], out: Tensor, sizes: Sequence[int]) -> Tensor:
    """The vector of all parameters, from the X of every layer: (…, n)"""
    parts = out.split_with_sizes(sizes, -1)
    for layer, X in zip(layers, each, strict=True):
        spread(X, [parts[i] for i in layer.members])
    return out


def by_layers(
    change: Callable[..., Tensor], layers: Sequence[InLayer], items: Iterable[Sequence[Any]], x: Tensor,
    sizes: Sequence[int], out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """X ← change(*item, X) in every layer, with an item for each, such as its sides: (…, n) → (…, n); `out` may be x"""
    out = torch.empty_like(x) if out is None else out
    here, there = x.split_with_sizes(sizes, -1), out.split_with_sizes(sizes, -1)
    for layer, item in zip(layers, items, strict=True):
        X = joined([here[i] for i in layer.members], layer.left.shape[:2])
        spread(change(*item, X), [there[i] for i in layer.members])
    return out


# --- Running averages.


def trusted(past: Tensor, present: Tensor) -> Tensor:
    """The share of its weight that the past keeps in a running average of matrices, from their diagonals (…, n). The
    past keeps all of it, unless it is far larger than the present: otherwise one outlier would dominate the average for
    a hundred batches."""
    return (MEMORY * (present.sum(-1) / past.sum(-1))).nan_to_num(1.0).clamp(max=1)


# --- Inverse roots.


def rooted(sides: Sequence[Pair], ranks: Ranks = ALONE) -> list[Pair]:
    """The inverse roots of every pair of sides"""
    roots = iter(inverse_roots([side for pair in sides for side in pair if side is not None], ranks))
    return [each(lambda _: next(roots), pair) for pair in sides]


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
    return added(found, 10 * torch.finfo(S.dtype).eps * diagonal_of(found).sum(1, keepdim=True))


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


def side_of(root: Tensor) -> Tensor:
    """S from W with WᵀW = S⁻¹"""
    if root.ndim == 2:
        return root.square().reciprocal()
    L = _inverted(root)
    return L @ L.mT


# --- The sides of D in one layer.


@dataclass(frozen=True)
class LayerSides:
    """The sides of D in one layer, whose parameters form one matrix X (G, O, I) of G groups.

    Its first parameter is X[..., :-1] and a second one X[..., -1]; a single parameter is all of X.
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
        same = right is its if right is None or its is None else right.shape == its.shape
        return same and self.members == other.members and self.left.shape == other.left.shape

    def damped(self, gamma: Tensor) -> Pair:
        """left/√t + √γ/π and right/√t + π√γ with π² = O/I, which is also the ratio of their mean eigenvalues"""
        if self.right is None:
            return self.left + gamma, None
        _, O, I = self.shape
        balance, t = math.sqrt(O / I), self.trace
        share = t.rsqrt().where(t > 0, 0)
        root = gamma.sqrt()
        return shifted(self.left, share, root / balance), shifted(self.right, share, root * balance)

    def raised(self, pair: Pair, scale: Tensor, w: Weights, sizes: Sequence[int]) -> Pair:
        """Sides of scale·D₀ + diag w, or of what lies above it, see Layered.plus; for a vector scale·left + w"""
        left, right = pair
        if right is None:
            return scale * left + w[0], None
        G, O, I = self.shape
        most, root, t, r = w.most, scale.sqrt(), diagonal_of(left).mean(1), diagonal_of(right).mean(1)  # (G,)
        pi = (r / t).sqrt()
        shares = right.new_empty(G, 1, I)
        widths = [I * size // sum(sizes) for size in sizes]
        for part, share in zip(shares.split(widths, 2), w.shares(G, O), strict=True):
            part[...] = share
        at_left = (most**0.5 / pi)[:, None].expand(diagonal_of(left).shape)
        return added(root * left, at_left), added(root * right, most**0.5 * pi[:, None] * shares[:, 0])

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
