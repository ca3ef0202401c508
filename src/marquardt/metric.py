"""Diagonal matrices over all parameters, in as few numbers as describe them: the D of (G + λD)δ = −g."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Factors = tuple[Tensor, ...]


def known(t: Tensor, dim: int = 0) -> Tensor:
    """t, from eps times the largest along one dimension on; what is 0 stays so.

    The gradient of a parameter without influence, like the bias of the keys of attention, is rounding: eps times that
    of others, and its curvature eps². Their ratio would be a step of 1/eps; with a curvature of eps it is an ordinary
    one.
    """
    return torch.maximum(t, torch.finfo(t.dtype).eps * t.amax(dim, keepdim=True)).where(t > 0, 0)


def known_entries(t: Tensor, p: Tensor) -> Tensor:
    """The same for all entries of a parameter, flat: among its outputs, which are first. Its inputs may be of any size,
    for what they multiply has no part in that rounding."""
    return known(t.view(*p.shape[:1], -1)).flatten() if t.numel() else t


class Diagonal:
    """scale·I, or for every parameter scale times a product of factors that broadcast to it.

    all entries of a parameter        (D,)                          as many numbers as the parameter
    one number for a parameter        (c,)                          ()
    a weight of G groups, O × I each  (u, v), D_goi = u_go·v_gi     (G, O, 1) and (G, 1, I)
    """

    def __init__(self, scale: Tensor, factors: Sequence[Factors] | None = None) -> None:
        self.scale, self.factors = scale, None if factors is None else tuple(factors)

    @staticmethod
    def of(A: Diagonal | Tensor, sizes: Sequence[int]) -> Diagonal:
        """Also from one number () or one per parameter (n,)."""
        if isinstance(A, Diagonal):
            return A
        if A.ndim == 0:
            return Diagonal(A)
        return Diagonal(A.new_ones(()), [(part,) for part in A.split(list(sizes))])

    def __rmul__(self, c: float) -> Diagonal:
        return self.scaled(c)

    def scaled(self, c: float | Tensor) -> Diagonal:
        return Diagonal(c * self.scale, self.factors)

    def to(self, like: Tensor) -> Diagonal:
        """In the precision and on the device of another tensor."""
        if self.scale.dtype == like.dtype and self.scale.device == like.device:
            return self
        moved = None if self.factors is None else self._each(lambda f: f.to(like))
        return Diagonal(self.scale.to(like), moved)

    def _each(self, change: Callable[[Tensor], Tensor]) -> list[Factors]:
        """Every factor changed; one that a weight and its bias share stays shared."""
        assert self.factors is not None
        changed = {id(f): change(f) for part in self.factors for f in part}
        return [tuple(changed[id(f)] for f in part) for part in self.factors]

    def entries(self, sizes: Sequence[int]) -> Tensor:
        """(n,)"""
        if self.factors is None:
            return self.scale.expand(sum(sizes))
        return torch.cat([_product(part).expand(size) for part, size in zip(self.factors, sizes, strict=True)]).mul_(
            self.scale
        )

    def divide(self, x: Tensor, sizes: Sequence[int], scaled: bool = True) -> Tensor:
        """A⁻¹x: (n,) → (n,), in place; without its scale if that is done already"""
        if scaled:
            x.div_(self.scale)
        if self.factors is not None:
            for part, piece in zip(self.factors, x.split(list(sizes)), strict=True):
                shape = _shape(part)
                view = piece.view(shape) if math.prod(shape) == len(piece) else piece
                for factor in part:
                    view.div_(factor)
        return x

    def quadratic(self, v: Tensor, sizes: Sequence[int]) -> Tensor:
        """vᵀAv"""
        if self.factors is None:
            return v.square().sum() * self.scale
        return (self.entries(sizes) * v.square()).sum()

    def _check_like(self, other: Diagonal) -> None:
        shapes = [None if d.factors is None else [[f.shape for f in part] for part in d.factors] for d in (self, other)]
        if shapes[0] != shapes[1]:
            raise ValueError("D is that of another damping: load a state that was saved with the same one")

    def maximum(self, other: Diagonal) -> Diagonal:
        """At least both of them, factor by factor."""
        self._check_like(other)
        if self.factors is None or other.factors is None:
            return Diagonal(torch.maximum(self.scale, other.scale))
        pairs = zip(self.factors, other.factors, strict=True)
        return Diagonal(self.scale, [tuple(torch.maximum(a, b) for a, b in zip(p, q, strict=True)) for p, q in pairs])

    def recent(self, present: Diagonal, memory: float) -> Diagonal:
        """This, but at most `memory` times the present; nothing at present is no reason to forget."""
        self._check_like(present)

        def fade(past: Tensor, now: Tensor) -> Tensor:
            return torch.minimum(past, (memory * now).where(now > 0, math.inf))

        if self.factors is None or present.factors is None:
            return Diagonal(fade(self.scale, present.scale))
        pairs = zip(self.factors, present.factors, strict=True)
        return Diagonal(self.scale, [tuple(fade(a, b) for a, b in zip(p, q, strict=True)) for p, q in pairs])

    def known(self, params: Sequence[Tensor]) -> Diagonal:
        """Entry by entry, from the rounding of the largest on."""
        assert self.factors is not None
        pairs = zip(self.factors, params, strict=True)
        return Diagonal(self.scale, [(known_entries(part[0], p),) for part, p in pairs])

    def positive(self) -> Diagonal:
        """With 1 in the place of 0. A zero says that the curvature of a parameter has always been zero: its step is
        zero then, whatever its damping, or a gradient step if its rows were not picked."""
        if self.factors is None:
            return Diagonal(self.scale.where(self.scale > 0, 1))
        return Diagonal(self.scale, self._each(lambda f: f.where(f > 0, 1)))

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether it can be that of parameters of these sizes."""
        if self.factors is None:
            return True
        return len(self.factors) == len(sizes) and all(
            math.prod(_shape(part)) in (1, size) for part, size in zip(self.factors, sizes, strict=True)
        )

    def state(self) -> list[Any]:
        return [self.scale, None if self.factors is None else [list(part) for part in self.factors]]

    @staticmethod
    def restored(state: list[Any]) -> Diagonal:
        scale, factors = state
        return Diagonal(scale, None if factors is None else [tuple(part) for part in factors])


def _shape(part: Factors) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*(f.shape for f in part)))


def _product(part: Factors) -> Tensor:
    """The factors multiplied out: flat"""
    total = part[0]
    for factor in part[1:]:
        total = total * factor
    return total.flatten()
