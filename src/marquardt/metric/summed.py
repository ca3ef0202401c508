"""A D with a diagonal beside it, as it is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from ..weights import Weights
from .base import B, Metric, Whitenable

NO_SOLVE = "a sum of two metrics can be multiplied with, and not solved with: `above` can"


class Sum(Metric):
    """A + diag w for an A that is no diagonal matrix: by products, and in the coordinates of A. It is never saved."""

    def __init__(self, A: Metric, w: Weights, sizes: Sequence[int]) -> None:
        self.A, self.w, self.sizes, self.scale, self.turns = A, w, sizes, A.scale, A.turns
        self.beside = w.flat(sizes, A.scale)

    @cached_property
    def above(self) -> Metric:
        return self.A.plus(self.w, self.sizes)

    @property
    def shape(self) -> object:
        return self.A.shape

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
