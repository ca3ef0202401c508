"""A D that is a Kronecker product in every layer, alone or with a diagonal that is added to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..ranks import ALONE, Ranks
from ..values import WAY_OUT, check_above, check_square, check_tensor, is_count, short
from ..weights import Weights
from .base import B, Diagonal, Metric, Part, Turn, Whitenable
from .sides import (
    LayerSides,
    Pair,
    by_layers,
    diagonal_of,
    each,
    inverse_product,
    outer,
    product,
    rooted,
    side_of,
    transposed,
    vector_of,
)

NO_SOLVE = "a sum of two metrics can be multiplied with, and not solved with: `above` can"

# Each of the first steps forms new roots: the averages are over a few batches, at weights that change quickly.
EARLY = 10


@dataclass(eq=False, repr=False)
class Layered(Metric):
    """scale·D₀ with D₀ = (right/√t + π√γ) ⊗ (left/√t + √γ/π) in every layer, t the trace of either side, π² = O/I. For
    a vector D₀ is the diagonal left + γ.

    `roots` are the inverses of the Cholesky factors of both sides: D₀⁻¹ = WᵀW, layer by layer. With `every` > 1 they
    are older than the sides, until `settled` forms them again. `rank` and `batches` are kept for the damping. With
    `beside` it is a sum for products in the coordinates of D₀; that and one with the sides of D₀ given are for one
    step, and never saved.
    """

    scale: Tensor
    layers: Sequence[LayerSides]
    gamma: Tensor
    roots: Sequence[Pair]
    _: KW_ONLY
    batches: Tensor  # in the running averages: ()
    rank: int = 0  # of G, the largest so far
    every: int = 1  # number of steps for which roots are kept
    early: bool = True  # whether the next step forms new roots
    sides: Sequence[Pair] | None = None  # of D₀, if they are not those above
    beside: Tensor | None = None
    decay: tuple[Weights, Sequence[int]] | None = None  # what `beside` consists of, and the sizes
    known: Sequence[int] | None = None  # sizes that it fits

    turns = True

    def __post_init__(self) -> None:
        self.layers, self.roots = tuple(self.layers), tuple(self.roots)
        self.shape = self.roots

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
        found = self
        if due and not early:
            found = Layered.of(self.layers, self.gamma, self.rank, self.batches, self.every, ranks)
        return replace(found, scale=self.scale, early=early)

    @property
    def later(self) -> Layered:
        """The same after the first steps"""
        return replace(self, early=False)

    def with_scale(self, scale: Tensor) -> Layered:
        copy = object.__new__(Layered)  # every λ asks for one, and `replace` takes ten times as long
        copy.__dict__.update(self.__dict__, scale=scale)
        return copy

    def averaged(self, layers: Sequence[LayerSides], gamma: Tensor, rank: int, batches: Tensor, every: int) -> Layered:
        """The same roots with sides of the same forms, which are averages over one more batch"""
        return replace(
            self, scale=torch.ones_like(gamma), layers=layers, gamma=gamma, rank=rank, batches=batches, every=every,
            early=False,
        )  # fmt: skip

    @property
    def coupled(self) -> Sequence[Sequence[int]]:
        return [layer.members for layer in self.layers if len(layer.members) > 1]

    # Products.

    @cached_property
    def _damped(self) -> Sequence[Pair]:
        if self.sides is not None:
            return self.sides
        if self.every == 1:
            return [layer.damped(self.gamma) for layer in self.layers]
        return [each(side_of, pair) for pair in self.roots]

    def solve(self, x: Tensor, sizes: Sequence[int], *, scaled: bool = True) -> Tensor:
        self._check_alone()
        if scaled:
            x.div_(self.scale)
        return by_layers(inverse_product, self.layers, self.roots, x, sizes, out=x)

    def times(self, v: Tensor, sizes: Sequence[int]) -> Tensor:
        found = by_layers(product, self.layers, self._damped, v, sizes).mul_(self.scale)
        return found if self.beside is None else found.addcmul_(self.beside, v)

    def turned(self, X: Tensor, sizes: Sequence[int]) -> Tensor:
        sides = [(left, transposed(right)) for left, right in self.roots]
        return by_layers(product, self.layers, sides, X, sizes)

    def turned_back(self, X: Tensor, sizes: Sequence[int]) -> Tensor:
        sides = [(transposed(left), right) for left, right in self.roots]
        return by_layers(product, self.layers, sides, X, sizes)

    def damping(self, sizes: Sequence[int]) -> Tensor:
        return self.scale.expand(sum(sizes))

    def diagonal(self, sizes: Sequence[int]) -> Tensor:
        lines = (outer(*pair) for pair in self._damped)
        found = vector_of(self.layers, lines, self.scale.new_empty(sum(sizes)), sizes).mul_(self.scale)
        return found if self.beside is None else found.add_(self.beside)

    def whiten(self, block: Whitenable[B], members: Sequence[int]) -> B | None:
        self._check_alone()
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

        def moved(t: Tensor) -> Tensor:
            return t.to(like)

        return replace(
            self, scale=moved(self.scale), layers=[layer.each(moved) for layer in self.layers],
            gamma=moved(self.gamma), roots=[each(moved, pair) for pair in self.roots], batches=moved(self.batches),
            sides=None if self.sides is None else [each(moved, pair) for pair in self.sides],
            beside=None if self.beside is None else moved(self.beside),
        )  # fmt: skip

    def positive(self) -> Layered:
        return self

    # With weight decay.

    def sum(self, w: Weights, sizes: Sequence[int]) -> Layered:
        return replace(self, beside=w.flat(sizes, self.scale), decay=(w, sizes))

    @cached_property
    def above(self) -> Layered:
        return self if self.decay is None else self.plus(*self.decay)

    def plus(self, w: Weights, sizes: Sequence[int]) -> Layered:
        """(√s·right + π√w·I) ⊗ (√s·left + √w/π·I) of D₀ = right ⊗ left in every layer, where s is the scale and π² the
        ratio of the mean traces of right and left. If w differs between a weight and its bias, or between elements, the
        largest w is used, and I on the right becomes a diagonal: the ratio of the largest w of each column to it."""
        sides = [
            layer.raised(pair, self.scale, w.of(layer.members), [sizes[i] for i in layer.members])
            for layer, pair in zip(self.layers, self._damped, strict=True)
        ]
        one = torch.ones_like(self.scale)
        return replace(self, scale=one, roots=rooted(sides), sides=sides, beside=None, decay=None)

    def _check_alone(self) -> None:
        if self.beside is not None:
            raise TypeError(NO_SOLVE)

    # The saved form.

    def fits(self, sizes: Sequence[int]) -> bool:
        if self.known is None and self._fits(sizes):
            self.known = list(sizes)
        return self.known is not None and (self.known is sizes or self.known == list(sizes))

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
        self._check_alone()
        layers = [
            [list(layer.members), layer.left, layer.right, *pair]
            for layer, pair in zip(self.layers, self.roots, strict=True)
        ]
        return [self.scale, {"layers": layers, **{key: getattr(self, key) for key in SAVED}}]

    @staticmethod
    def restored(scale: Tensor, kept: dict[str, Any]) -> Layered:
        layers = [LayerSides(tuple(members), left, right) for members, left, right, *_ in kept["layers"]]
        roots = [(left, right) for *_, left, right in kept["layers"]]
        return Layered(scale, layers, roots=roots, **{key: kept[key] for key in SAVED})


SAVED = ("gamma", "rank", "batches", "every", "early")  # beside the layers with their roots


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
    missing = {"layers", *SAVED} - set(parts)
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
