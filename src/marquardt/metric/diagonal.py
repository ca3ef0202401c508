"""A D that is a diagonal matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..plain import check_above
from ..weights import Weights
from .base import B, Dot, Metric, Part, Whitenable


class Diagonal(Metric):
    """scale·I, or for every parameter scale times its part, in as few numbers as describe it.

    all entries of a parameter        Part(entries)                 as many numbers as the parameter
    one number for a parameter        Part(entries)                 ()
    a weight of G groups, O × I each  Part(u=u, v=v), u_go·v_gi     (G, O, 1) and (G, 1, I)

    Args:
        scale: one number, ().
        parts: of every parameter; None for the identity.

    >>> D = mq.Diagonal.of(torch.ones(33), [p.numel() for p in model.parameters()])
    """

    def __init__(self, scale: Tensor, parts: Sequence[Part] | None = None) -> None:
        self.scale, self._parts = scale, None if parts is None else tuple(parts)

    @staticmethod
    def of(A: Metric | Tensor, sizes: Sequence[int]) -> Metric:
        """Also from one number () or one per parameter (n,)."""
        if A.__class__ is not Tensor and isinstance(A, Metric):
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
        return dot(v, v) * self.scale if self._parts is None else super().quadratic(v, sizes, dot)

    def whiten(self, block: Whitenable[B], members: Sequence[int]) -> B | None:
        return None if self._parts is None else block.whitened([self._parts[i] for i in members])

    @property
    def shape(self) -> object:
        return self._parts

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
        return Diagonal(self.scale.to(like), self._each(lambda f: f.to(like)))

    def positive(self) -> Diagonal:
        if self._parts is None:
            return Diagonal(self.scale.where(self.scale > 0, 1))
        return Diagonal(self.scale.where(self.scale > 0, 1), self._each(lambda f: f.where(f > 0, 1)))

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
        """Of u ⊗ v it is (√s·u + √w/ρ) ⊗ (√s·v + ρ√w·E), s the scale and ρ² the mean of v over that of u; w is the
        largest in the layer and E the share that the largest of every column has of it."""
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
        """`plus` of a weight and its bias; of a bias alone it is exact"""
        u, most, root = layer[0].u, w.most, self.scale.sqrt()
        assert u is not None
        if all(part.v is None for part in layer):
            return [Part(None, (self.scale * u.flatten() + w[i]).view_as(u)) for i in range(len(w))]
        vs = [torch.ones_like(u[:, :1]) if part.v is None else part.v for part in layer]
        rho = (vs[0].mean() / u.mean()).sqrt()
        left = root * u + most**0.5 / rho
        pairs = zip(vs, w.shares(*u.shape[:2]), strict=True)
        return [Part(None, left, root * v + rho * most**0.5 * share) for v, share in pairs]

    def _each(self, change: Callable[[Tensor], Tensor]) -> list[Part] | None:
        """Every factor changed; one that a weight and its bias share stays shared."""
        if self._parts is None:
            return None
        changed = {id(f): change(f) for part in self._parts for f in part.factors}
        return [part.each(lambda f: changed[id(f)]) for part in self._parts]

    def fits(self, sizes: Sequence[int]) -> bool:
        if self._parts is None:
            return True
        each = [part.sizes for part in self._parts]
        return len(each) == len(sizes) and all(size in known for known, size in zip(each, sizes, strict=True))

    def check(self, where: str) -> None:
        super().check(where)
        for factor in (f for part in self._parts or () for f in part.factors):
            check_above(factor, where)

    # From step to step: what dampings remember.

    def maximum(self, other: Diagonal) -> Diagonal:
        """At least both of them, factor by factor; if there are parts, both have the same scale."""
        if self._parts is None and other._parts is None:
            return Diagonal(torch.maximum(self.scale, other.scale))
        return self._with(other, torch.maximum)

    def recent(self, present: Diagonal, memory: float) -> Diagonal:
        """This, but at most `memory` times the present; nothing at present is no reason to forget."""
        if self._parts is None and present._parts is None:
            now = present.scale
            return Diagonal(torch.minimum(self.scale, (memory * now).where(now > 0, math.inf)))
        return self._with(present, lambda past, now: torch.minimum(past, (memory * now).where(now > 0, math.inf)))

    def like(self, other: Diagonal) -> bool:
        """Whether both have the same factors, of the same shapes"""
        if self._parts is None or other._parts is None:
            return self._parts is other._parts
        mine, theirs = ([[f.shape for f in part.factors] for part in d._parts or ()] for d in (self, other))
        return mine == theirs

    def _with(self, other: Diagonal, join: Callable[[Tensor, Tensor], Tensor]) -> Diagonal:
        if not self.like(other):
            raise ValueError("D is that of another damping: load a state that was saved with the same one")
        if self._parts is None or other._parts is None:
            return Diagonal(join(self.scale, other.scale))
        pairs = zip(self._parts, other._parts, strict=True)
        return Diagonal(self.scale, [p.each(_paired(p, q, join)) for p, q in pairs])


def _paired(part: Part, other: Part, join: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    partner = {id(f): g for f, g in zip(part.factors, other.factors, strict=True)}
    return lambda f: join(f, partner[id(f)])
