"""The D of (G + λD)d = −g, the metric in which the length of a step is measured, and diagonal D."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..ranks import ALONE, Ranks
from ..values import check_above
from ..weights import Weights
from .sides import joined, product, transposed

WAY_OUT = "use damping=mq.MeanEigenvalue(), or what every metric has, `times` and `solve`"

Dot = Callable[[Tensor, Tensor], Tensor]

B_co = TypeVar("B_co", covariant=True)
B = TypeVar("B")


class Part(NamedTuple):
    """The entries of D for one parameter, given one by one or as a product."""

    entries: Tensor | None = None  # one per entry of the parameter, flat; or one for all entries: ()
    u: Tensor | None = None  # one per output: (G, O, 1)
    v: Tensor | None = None  # one per input: (G, 1, I); None means 1, as for a bias

    def flat(self, size: int) -> Tensor:
        """All entries: (size,)"""
        if self.entries is not None:
            return self.entries.expand(size)
        assert self.u is not None
        return (self.u if self.v is None else self.u * self.v).reshape(size)

    @property
    def factors(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self if t is not None)

    def each(self, change: Callable[[Tensor], Tensor]) -> Part:
        return Part(*(None if t is None else change(t) for t in self))

    def fits(self, size: int) -> bool:
        """Whether it can belong to a parameter of this size"""
        u, v = self.u, self.v
        if self.entries is not None:
            return self.entries.numel() == 1 or self.entries.shape == (size,)
        if u is None or u.ndim != 3 or u.shape[2] != 1:
            return False
        if v is None:
            return u.numel() == size
        return v.ndim == 3 and v.shape[:2] == (u.shape[0], 1) and u.numel() * v.shape[2] == size

    @staticmethod
    def of(factors: Sequence[Tensor]) -> Part:
        """A part from its tensors alone, as they are saved."""
        if len(factors) == 1 and factors[0].ndim < 3:
            return Part(factors[0])
        return Part(None, *factors)


class Whitenable(Protocol[B_co]):
    """Columns of J̃, see layers.Block."""

    def whitened(self, D: Sequence[Part]) -> B_co: ...

    def turned(self, layers: Sequence[Turn]) -> B_co: ...


class Turn(NamedTuple):
    """W with WᵀW = D⁻¹ in a layer whose parameters form one matrix X (G, O, I): WX is left·X·rightᵀ."""

    places: Sequence[int]  # indices of its parameters among those of a block
    left: Tensor  # (G, O, O), or its diagonal (G, O)
    right: Tensor | None  # (G, I, I), or its diagonal (G, I); None: 1

    def __call__(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """WX, flattened as a whole and split into pieces of the sizes of the parameters: (…, size)"""
        X = product(self.left, transposed(self.right), joined(parts, self.left.shape[:2]))
        return X.flatten(-3).split_with_sizes([t.shape[-1] for t in parts], -1)


class Metric(ABC):
    """scale·D₀ with a D₀ that does not change with λ. A damping returns it and the solvers work with it.

    `sizes` are the numbers of entries of the parameters, in the order of θ.

    >>> G = mq.Dense().represent(mq.linearize(model, "mse", x, y))
    >>> D = mq.MeanEigenvalue().update(None, G)
    >>> isinstance(D, mq.Metric), D.solve(G.gradient.clone(), G.parameters.sizes).shape
    (True, torch.Size([33]))
    """

    scale: Tensor  # ()
    shape: object = None  # identity of D₀: as long as it is the same object, results formed with D₀ are valid
    early: bool = False  # whether D₀ is formed anew in every step, as one of the first ones may be

    @property
    def later(self) -> Metric:
        """The same after the first steps"""
        return self

    @abstractmethod
    def with_scale(self, scale: Tensor) -> Metric:
        """The same D₀ with another scale."""

    @abstractmethod
    def solve(self, x: Tensor, sizes: Sequence[int], *, scaled: bool = True) -> Tensor:
        """A⁻¹x: (n,) → (n,), in place; D₀⁻¹x if `scaled` is False"""

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
        """The columns J̃D₀^-½ of some parameters, given by index; None if D₀ = I, which leaves them unchanged. The
        scale is not included, so that J̃D₀⁻¹J̃ᵀ is formed once for all λ."""

    @abstractmethod
    def to(self, like: Tensor) -> Metric:
        """The metric in the precision and on the device of another tensor."""

    @abstractmethod
    def positive(self) -> Metric:
        """The metric with every 0 replaced by 1. A zero means that the curvature of a parameter has always been zero:
        its step is then zero, whatever its damping, or a gradient step if its rows were not drawn."""

    @abstractmethod
    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether this metric can belong to parameters of these sizes."""

    def check(self, where: str) -> None:
        """Raises ValueError if a saved metric, whose numbers are all finite, cannot be a D."""
        check_above(self.scale, f"{where}, its scale,")

    @abstractmethod
    def state(self) -> list[Any]:
        """The data from which the metric is restored: tensors, and lists of tensors. A new kind of metric extends
        `restored`."""

    def plus(self, w: Weights, sizes: Sequence[int]) -> Metric:
        """A + diag w in the form of A. If that form has no such sum, a metric above the sum that is A itself if w = 0,
        and diag w in the limit of A = 0; if w differs by element, the largest w of each column counts."""
        raise ValueError(f"{type(self).__name__} has no sum with weight decay: {WAY_OUT}")

    def sum(self, w: Weights, sizes: Sequence[int]) -> Metric:
        """A + diag w for products: it may have a form that cannot be solved with."""
        return self.plus(w, sizes)

    # If D₀ is not diagonal, D₀⁻¹ = WᵀW: in the coordinates y = W⁻ᵀx the solvers see A as the number that remains.

    turns = False  # whether W differs from 1

    @property
    def above(self) -> Metric:
        """A metric that can be solved with: A itself, or one that lies above it"""
        return self

    beside: Tensor | None = None  # a diagonal that is added to A and is not diagonal in these coordinates: (n,)

    @property
    def coupled(self) -> Sequence[Sequence[int]]:
        """Indices of parameters that share a block of D₀; parameters with separate blocks need not be listed"""
        return ()

    def turned(self, X: Tensor, sizes: Sequence[int]) -> Tensor:
        """WX along the last dimension: (…, n) → (…, n)"""
        return X

    def turned_back(self, X: Tensor, sizes: Sequence[int]) -> Tensor:
        """WᵀX"""
        return X

    def damping(self, sizes: Sequence[int]) -> Tensor:
        """The diagonal of WAWᵀ, which is a diagonal matrix: (n,)"""
        return self.entries(sizes)

    def entries(self, sizes: Sequence[int]) -> Tensor:
        """The diagonal of A, if A is diagonal: (n,)"""
        raise ValueError(f"{type(self).__name__} is no diagonal matrix: {WAY_OUT}")

    @property
    def parts(self) -> Sequence[Part] | None:
        """D₀ by parameters, if it is diagonal; None if it is the identity"""
        raise ValueError(f"{type(self).__name__} is no diagonal matrix: {WAY_OUT}")

    def settled(self, steps: int, ranks: Ranks = ALONE) -> Metric:
        """The metric that the next step starts from, after `steps` steps. This is never part of a recorded step."""
        return self

    def __rmul__(self, c: float | Tensor) -> Metric:
        return self.with_scale(c * self.scale)


# --- A D that is a diagonal matrix.


class Diagonal(Metric):
    """scale·I, or scale times a part for every parameter, in as few numbers as possible.

    all entries of a parameter        Part(entries)                 as many numbers as the parameter
    one number for a parameter        Part(entries)                 ()
    a weight of G groups, O × I each  Part(u=u, v=v), u_go·v_gi     (G, O, 1) and (G, 1, I)

    Args:
        scale: one number, ().
        parts: one for every parameter; None for the identity.

    >>> D = mq.Diagonal.of(torch.ones(33), [p.numel() for p in model.parameters()])
    """

    def __init__(self, scale: Tensor, parts: Sequence[Part] | None = None) -> None:
        self.scale, self._parts = scale, None if parts is None else tuple(parts)
        self.shape = self._parts

    @staticmethod
    def of(A: Metric | Tensor, sizes: Sequence[int]) -> Metric:
        """Also accepts one number () or one per parameter (n,)."""
        if A.__class__ is Diagonal or (A.__class__ is not Tensor and isinstance(A, Metric)):
            return A
        if A.ndim == 0:
            return Diagonal(A)
        if A.shape != (sum(sizes),):
            raise ValueError(f"entries of the shape {tuple(A.shape)}: one for each of {sum(sizes)} parameters, or ()")
        return Diagonal(A.new_ones(()), [Part(part) for part in A.split(list(sizes))])

    def state(self) -> list[Any]:
        return [self.scale, None if self._parts is None else [list(part.factors) for part in self._parts]]

    def with_scale(self, scale: Tensor) -> Diagonal:
        return Diagonal(scale, self._parts)

    def solve(self, x: Tensor, sizes: Sequence[int], *, scaled: bool = True) -> Tensor:
        if scaled:
            x.div_(self.scale)
        if self._parts is not None:
            for part, piece in zip(self._parts, x.split(list(sizes)), strict=True):
                shape = torch.broadcast_shapes(*(f.shape for f in part.factors))
                view = piece.view(shape) if math.prod(shape) == len(piece) else piece
                for factor in part.factors:
                    view.div_(factor)
        return x

    def quadratic(self, v: Tensor, sizes: Sequence[int], dot: Dot = torch.dot) -> Tensor:
        return dot(v, v).mul_(self.scale) if self._parts is None else super().quadratic(v, sizes, dot)

    def whiten(self, block: Whitenable[B], members: Sequence[int]) -> B | None:
        return None if self._parts is None else block.whitened([self._parts[i] for i in members])

    @property
    def parts(self) -> Sequence[Part] | None:
        return self._parts

    def entries(self, sizes: Sequence[int]) -> Tensor:
        if self._parts is None:
            return self.scale.expand(sum(sizes))
        return torch.cat([part.flat(size) for part, size in zip(self._parts, sizes, strict=True)]).mul_(self.scale)

    def to(self, like: Tensor) -> Diagonal:
        if self.scale.dtype == like.dtype and self.scale.device == like.device:
            return self
        return self._each(self.scale.to(like), lambda f: f.to(like))

    def positive(self) -> Diagonal:
        if self._parts is None and self.scale.is_cpu and self.scale.item() > 0:
            return self  # on a CPU numbers are compared without a kernel
        return self._each(self.scale.where(self.scale > 0, 1), lambda f: f.where(f > 0, 1))

    def sum(self, w: Weights, sizes: Sequence[int]) -> Diagonal:
        if self._parts is None and w.number is not None:
            return Diagonal(self.scale + w.number)
        one = torch.ones_like(self.scale)
        entries = [one] * len(w)
        if self._parts is not None:
            entries = [
                p.flat(size) if p.entries is None else p.entries for p, size in zip(self._parts, sizes, strict=True)
            ]
        return Diagonal(one, [Part(self.scale * e + w[i]) for i, e in enumerate(entries)])

    def plus(self, w: Weights, sizes: Sequence[int]) -> Diagonal:
        """For u ⊗ v it is (√s·u + √w/ρ) ⊗ (√s·v + ρ√w·E), where s is the scale and ρ² the mean of v over that of u; w
        is the largest in the layer and E the ratio of the largest w of each column to it."""
        exact = self.sum(w, sizes)
        if self._parts is None or exact.parts is None:
            return exact
        found = list(exact.parts)
        layers: dict[int, list[int]] = {}  # a weight and its bias have the same u
        for i, part in enumerate(self._parts):
            if part.u is not None:
                layers.setdefault(id(part.u), []).append(i)
        for members in layers.values():
            raised = self._raised([self._parts[i] for i in members], w.of(members))
            for i, part in zip(members, raised, strict=True):
                found[i] = part
        return Diagonal(exact.scale, found)

    def _raised(self, layer: Sequence[Part], w: Weights) -> list[Part]:
        """`plus` for a weight and its bias; for a bias alone it is exact"""
        u, most, root = layer[0].u, w.most, self.scale.sqrt()
        assert u is not None
        if all(part.v is None for part in layer):
            return [Part(None, (self.scale * u.flatten() + w[i]).view_as(u)) for i in range(len(w))]
        vs = [torch.ones_like(u[:, :1]) if part.v is None else part.v for part in layer]
        rho = (vs[0].mean() / u.mean()).sqrt()
        left = root * u + most**0.5 / rho
        pairs = zip(vs, w.shares(*u.shape[:2]), strict=True)
        return [Part(None, left, root * v + rho * most**0.5 * share) for v, share in pairs]

    def _each(self, scale: Tensor, change: Callable[..., Tensor], *others: Diagonal) -> Diagonal:
        """With this scale and every factor changed, together with those of others; a factor that a weight and its bias
        share stays shared."""
        if self._parts is None:
            return Diagonal(scale)
        each = [[f for part in D.parts or () for f in part.factors] for D in (self, *others)]
        changed = {id(factors[0]): change(*factors) for factors in zip(*each, strict=True)}
        return Diagonal(scale, [part.each(lambda f: changed[id(f)]) for part in self._parts])

    def fits(self, sizes: Sequence[int]) -> bool:
        if self._parts is None:
            return True
        return len(self._parts) == len(sizes) and all(map(Part.fits, self._parts, sizes))

    def check(self, where: str) -> None:
        super().check(where)
        for factor in (f for part in self._parts or () for f in part.factors):
            check_above(factor, where)

    # Memory from step to step, for dampings.

    def maximum(self, other: Diagonal) -> Diagonal:
        """The larger of both, factor by factor; if there are parts, both have the same scale."""
        if self.scale.is_cpu and self._parts is None and other._parts is None:
            return self if self.scale.item() > other.scale.item() else other
        return self._with(other, torch.maximum)

    def recent(self, present: Diagonal, memory: float) -> Diagonal:
        """This, but at most `memory` times the present; zeros at present are no reason to forget."""
        now = present.scale
        numbers = now.is_cpu and self._parts is None and present._parts is None
        if numbers and (not now.item() > 0 or self.scale.item() <= memory * now.item()):
            return self
        return self._with(present, lambda past, now: torch.minimum(past, (memory * now).where(now > 0, math.inf)))

    def like(self, other: Diagonal) -> bool:
        """Whether both have the same factors, with the same shapes"""
        if self._parts is None or other._parts is None:
            return self._parts is other._parts
        mine, theirs = ([[f.shape for f in part.factors] for part in d._parts or ()] for d in (self, other))
        return mine == theirs

    def _with(self, other: Diagonal, join: Callable[[Tensor, Tensor], Tensor]) -> Diagonal:
        if not self.like(other):
            raise ValueError("D is that of another damping: load a state that was saved with the same one")
        return self._each(join(self.scale, other.scale) if self._parts is None else self.scale, join, other)
