"""Rows of a layer with many positions, written out: they are fewer numbers than its inputs and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from ..metric import Part, Turn
from .bilinear import Bilinear
from .block import SLAB, Block, Product, Sums, add_product
from .traces import Traces, of_rows, of_vectors


def written(block: Bilinear) -> Block:
    """The block, with its rows kept once they are there if R·O·I numbers of them take the place of P·(I + R·O)."""
    rows, numbers = block.R * block.O * block.I, block.P * (block.I + block.R * block.O)
    if block.weight is None or block.P == 1 or rows > numbers or block.m * block.columns > SLAB:
        return block
    return Written(block)


class Written(Block):
    """The same rows, formed once. Products that come before them, or that have another precision, are left to a and δ,
    and so are statistics of a and δ."""

    def __init__(self, block: Bilinear) -> None:
        self.block, self.params, self.m, self.N = block, block.params, block.m, block.N

    @cached_property
    def _rows(self) -> Tensor:
        return self.block.rows(self.block.delta.dtype)  # (m, columns)

    def _there(self, dtype: torch.dtype) -> bool:
        return "_rows" in vars(self) and dtype == self.block.delta.dtype

    def slabs(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        if dtype == self.block.delta.dtype:
            yield slice(0, self.columns), self._rows
        else:
            yield from self.block.slabs(dtype)

    def apply(self, v: Sequence[Tensor]) -> Tensor:
        return self._rows @ torch.cat(list(v)) if self._there(v[0].dtype) else self.block.apply(v)

    def adjoint(self, w: Tensor, out: Sequence[Tensor]) -> None:
        if not self._there(w.dtype):
            return self.block.adjoint(w, out)
        for part, piece in zip(out, (w @ self._rows).split([len(part) for part in out]), strict=True):
            part.copy_(piece)

    def without(self, some: Sequence[Tensor]) -> Block | None:
        return self.block.without(some)

    def plain(self) -> Block:
        return self.block.plain()

    def gram(self, K: Tensor, other: Block, product: Product | None = None) -> None:
        other = cast(Written, other)
        if not (self._there(K.dtype) and other._there(K.dtype)):
            return self.block.gram(K, other.block, product)
        if product is not None:
            product.add(self)
        add_product(K, self._rows, other._rows)

    def whitened(self, D: Sequence[Part]) -> Block:
        return super().whitened(D) if self._there(self.block.delta.dtype) else self.block.whitened(D)

    def partial_traces(self) -> list[Traces]:
        if self.block.by_units:
            return of_vectors(self.params, self._rows.square().sum(0))
        pieces = self._rows.split([p.numel() for p in self.params], 1)
        return [Traces(self.params, *of_rows(Turn.joined(pieces, (self.block.G, self.block.O))))]

    def samples(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        return self.block.samples(dtype, out)

    def diagonal(self) -> Tensor:
        return self._rows.square().sum(0) if self._there(self.block.delta.dtype) else self.block.diagonal()

    def inputs(self) -> Tensor | None:
        return self.block.inputs()

    def sums(self, weight: Tensor | None) -> Sums | None:
        return self.block.sums(weight)

    def second_moments(self, left: Tensor | None, right: Tensor | None) -> Tensor:
        return self.block.second_moments(left, right)
