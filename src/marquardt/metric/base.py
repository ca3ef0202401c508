"""The D of (G + λD)δ = −g: the metric in which the length of a step is measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..plain import check_above
from ..ranks import ALONE, Ranks
from ..weights import Weights

WAY_OUT = "use damping=mq.MeanEigenvalue(), or what every metric has, `times` and `solve`"

Dot = Callable[[Tensor, Tensor], Tensor]

B_co = TypeVar("B_co", covariant=True)
B = TypeVar("B")


class Part(NamedTuple):
    """The entries of D for one parameter: written out, or a product."""

    entries: Tensor | None = None  # one for every entry of the parameter, flat; or one for all of them: ()
    u: Tensor | None = None  # by output: (G, O, 1)
    v: Tensor | None = None  # by input: (G, 1, I); None means 1, as for a bias

    def flat(self, size: int) -> Tensor:
        """All of them: (size,)"""
        if self.entries is not None:
            return self.entries.expand(size)
        assert self.u is not None
        return (self.u if self.v is None else self.u * self.v).reshape(size)

    @property
    def factors(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self if t is not None)

    def each(self, change: Callable[[Tensor], Tensor]) -> Part:
        return Part(*(None if t is None else change(t) for t in self))

    @property
    def sizes(self) -> Sequence[int] | range:
        """The sizes of parameters that it can be of"""
        if self.entries is not None:
            numbers = self.entries.numel()
            return range(1 << 62) if numbers == 1 else [numbers] * (self.entries.ndim == 1)
        u, v = self.u, self.v
        if u is None or u.ndim != 3 or u.shape[2] != 1:
            return []
        if v is None:
            return [u.numel()]
        return [u.numel() * v.shape[2]] if v.ndim == 3 and v.shape[:2] == (u.shape[0], 1) else []

    @staticmethod
    def of(factors: Sequence[Tensor]) -> Part:
        """From the tensors alone, as a saved state has them."""
        if len(factors) == 1 and factors[0].ndim < 3:
            return Part(factors[0])
        return Part(None, *factors)


class Whitenable(Protocol[B_co]):
    """Columns of J̃, see layers.Block."""

    def whitened(self, D: Sequence[Part]) -> B_co: ...

    def turned(self, layers: Sequence[Turn]) -> B_co: ...


class Turn(NamedTuple):
    """W with WᵀW = D⁻¹ in a layer, whose parameters are one matrix X (G, O, I): WX is left·X·rightᵀ."""

    places: Sequence[int]  # of its parameters among those of a block
    left: Tensor  # (G, O, O), or the diagonal of it (G, O)
    right: Tensor | None  # (G, I, I), or the diagonal of it (G, I); None: 1

    @staticmethod
    def joined(parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """X from the parameters, each flat: (…, size) → (…, G, O, I)"""
        pieces = [part.view(*part.shape[:-1], *shape, -1) for part in parts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)

    def __call__(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """WX, flattened as a whole and cut into pieces of the sizes of the parameters: (…, size)"""
        X = self.joined(parts, self.left.shape[:2])
        right = self.right if self.right is None or self.right.ndim == 2 else self.right.mT
        pieces: Sequence[Tensor] = between(self.left, X, right).flatten(-3).split([t.shape[-1] for t in parts], -1)
        return pieces


def between(left: Tensor, X: Tensor, right: Tensor | None) -> Tensor:
    """left·X·right, each of them a matrix or its diagonal: (…, G, O, I)"""
    X = left @ X if left.ndim == 3 else left[:, :, None] * X
    if right is None:
        return X
    return X @ right if right.ndim == 3 else X * right[:, None]


class Metric(ABC):
    """scale·D₀ with a D₀ that stays the same while λ changes: what a damping returns and the solvers work with.

    `sizes` are the numbers of entries of the parameters, in the order of θ.

    >>> G = mq.Dense().represent(mq.linearize(model, "mse", x, y))
    >>> D = mq.MeanEigenvalue().update(None, G)
    >>> isinstance(D, mq.Metric), D.solve(G.gradient.clone(), G.parameters.sizes).shape
    (True, torch.Size([33]))
    """

    scale: Tensor  # ()

    @abstractmethod
    def with_scale(self, scale: Tensor) -> Metric:
        """The same D₀ with another scale."""

    @abstractmethod
    def solve(self, x: Tensor, sizes: Sequence[int], *, scaled: bool = True) -> Tensor:
        """A⁻¹x: (n,) → (n,), in place; D₀⁻¹x if the scale is done already"""

    def times(self, v: Tensor, sizes: Sequence[int]) -> Tensor:
        """Av: (n,) → (n,)"""
        return self.entries(sizes) * v

    def quadratic(self, v: Tensor, sizes: Sequence[int], dot: Dot = torch.dot) -> Tensor:
        """vᵀAv: (), by the dot product of the parameters"""
        return dot(self.times(v, sizes), v)

    def diagonal(self, sizes: Sequence[int]) -> Tensor:
        """diag A: (n,)"""
        return self.entries(sizes)

    @abstractmethod
    def whiten(self, block: Whitenable[B], members: Sequence[int]) -> B | None:
        """The columns J̃D₀^-½ of some parameters, by number; None if D₀ = I leaves them as they are. The scale stays
        out: J̃D₀⁻¹J̃ᵀ is formed once for all λ."""

    @property
    @abstractmethod
    def shape(self) -> object:
        """D₀ itself: while this is the same object, what was formed with D₀ still holds."""

    @abstractmethod
    def to(self, like: Tensor) -> Metric:
        """In the precision and on the device of another tensor."""

    @abstractmethod
    def positive(self) -> Metric:
        """With 1 in the place of 0. A zero says that the curvature of a parameter has always been zero: its step is
        zero then, whatever its damping, or a gradient step if its rows were not picked."""

    @abstractmethod
    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether it can be that of parameters of these sizes."""

    def check(self, where: str) -> None:
        """Raises ValueError if its numbers, all of which are finite, can be those of no D: one that was saved."""
        check_above(self.scale, f"{where}, its scale,")

    @abstractmethod
    def state(self) -> list[Any]:
        """What makes it again: tensors, and lists of them. A new kind of metric extends `restored`."""

    def plus(self, w: Weights, sizes: Sequence[int]) -> Metric:
        """A + diag w in the form of A. If that form has no such sum, what lies above it: A itself if w = 0, and diag w
        in the limit of A = 0; of a w by element the largest in every column."""
        raise ValueError(f"{type(self).__name__} has no sum with weight decay: {WAY_OUT}")

    def sum(self, w: Weights, sizes: Sequence[int]) -> Metric:
        """A + diag w, for products: its form may be none that can be solved with."""
        return self.plus(w, sizes)

    # D₀⁻¹ = WᵀW, if D₀ is no diagonal matrix: in the coordinates y = W⁻ᵀx the solvers see the number that is left of A.

    turns = False  # whether W is anything but 1

    @property
    def above(self) -> Metric:
        """What can be solved with: A itself, or a metric that lies above it"""
        return self

    beside: Tensor | None = None  # a diagonal that is added to A and is none in these coordinates: (n,)

    @property
    def coupled(self) -> Sequence[Sequence[int]]:
        """Parameters that D₀ has in one block, by number; those that have blocks of their own need not be named"""
        return ()

    def turned(self, X: Tensor, sizes: Sequence[int]) -> Tensor:
        """WX, along the last dimension: (…, n) → (…, n)"""
        return X

    def turned_back(self, X: Tensor, sizes: Sequence[int]) -> Tensor:
        """WᵀX"""
        return X

    def damping(self, sizes: Sequence[int]) -> Tensor:
        """The diagonal of WAWᵀ, which is all of it: (n,)"""
        return self.entries(sizes)

    def entries(self, sizes: Sequence[int]) -> Tensor:
        """The diagonal, if that is all of it: (n,)"""
        raise ValueError(f"{type(self).__name__} is no diagonal matrix: {WAY_OUT}")

    @property
    def parts(self) -> Sequence[Part] | None:
        """D₀ by parameters, if it is diagonal; None if it is the identity"""
        raise ValueError(f"{type(self).__name__} is no diagonal matrix: {WAY_OUT}")

    def settled(self, steps: int, ranks: Ranks = ALONE) -> Metric:
        """What the next step takes up, after so many of them. This is never part of a recorded step."""
        return self

    def __rmul__(self, c: float | Tensor) -> Metric:
        return self.with_scale(c * self.scale)
