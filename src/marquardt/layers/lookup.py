"""Embedding: a linear layer whose input is one-hot, so that a·a' is 1 where two tokens agree and 0 elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from ..metric import Part, Turn
from .blocks import SLAB, Block, Product, Sums, Traces, square


class Lookup(Block):
    """J̃ of an embedding table (V, E): row (r, n) holds Σₚ δ[r, n, p] at the table's row index[n, p]."""

    def __init__(self, index: Tensor, delta: Tensor, table: Tensor, roots: Tensor | None = None) -> None:
        self.index, self.delta, self.table = index, delta, table  # (N, P), (R, N, P, E)
        self.roots = roots  # that the columns are divided by, like the table
        self.params = [table]
        self.R, self.N, self.P, self.E = delta.shape
        self.m = self.R * self.N

    def slabs(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        tokens = max(1, SLAB // (self.m * self.E))
        for first in range(0, len(self.table), tokens):
            last = min(first + tokens, len(self.table))
            yield (
                slice(first * self.E, last * self.E),
                self._rows_of(torch.arange(first, last, device=self.index.device), dtype),
            )

    def _rows_of(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        hot = (self.index[:, :, None] == tokens).to(dtype)  # (N, P, tokens)
        rows = torch.einsum("rnpe,npt->rnte", self.delta.to(dtype), hot)
        return (rows if self.roots is None else rows / self.roots[tokens].to(dtype)).reshape(self.m, -1)

    def apply(self, v: Sequence[Tensor]) -> Tensor:
        table = v[0].view_as(self.table)
        table = table if self.roots is None else table / self.roots.to(table)
        return torch.einsum("npe,rnpe->rn", table[self.index], self.delta.to(table.dtype)).flatten()

    def adjoint(self, w: Tensor, out: Sequence[Tensor]) -> None:
        delta = torch.einsum("rn,rnpe->npe", w.view(self.R, self.N), self.delta.to(w.dtype))
        found = out[0].zero_().view_as(self.table).index_add_(0, self.index.flatten(), delta.flatten(0, 1))
        if self.roots is not None:
            found /= self.roots

    def diagonal(self) -> Tensor:
        total = torch.zeros_like(self.table, dtype=self.delta.dtype)
        for tokens in self._tokens(self.index.unique()):  # the other rows of the table are zero
            total[tokens] = self._rows_of(tokens, self.delta.dtype).square().sum(0).view(-1, self.E)
        return total.flatten()

    def gram(self, K: Tensor, other: Block, product: Product | None = None) -> None:
        other = cast(Lookup, other)
        if product is not None:
            product.add(self)
        shared = self.index.unique()
        for tokens in self._tokens(shared[torch.isin(shared, other.index)]):
            left = self._rows_of(tokens, K.dtype)
            K.addmm_(left, (left if other is self else other._rows_of(tokens, K.dtype)).T)

    def whitened(self, D: Sequence[Part]) -> Block:
        """Whatever D is, only the tokens that occur are looked at"""
        (part,) = D
        roots = part.flat(self.table.numel()).view_as(self.table).sqrt()
        return Lookup(self.index, self.delta, self.table, roots if self.roots is None else roots * self.roots)

    def turned(self, layers: Sequence[Turn]) -> Block:
        """With a number for every token it is of the same form: δ·rightᵀ, and its roots"""
        (layer,) = layers
        if layer.left.ndim == 3 or layer.right is None:
            return super().turned(layers)
        right, roots = layer.right[0], 1 / layer.left[0][:, None]  # (V, 1)
        delta = self.delta.to(right)
        return Lookup(self.index, delta * right if right.ndim == 1 else delta @ right.mT, self.table, roots)

    def partial_traces(self) -> list[Traces]:
        """The diagonal of the one over the tokens: those that do not occur have zeros"""
        left, right = self.delta.new_zeros(1, len(self.table)), square(self.delta.new_zeros(1, 0, self.E))
        for tokens in self._tokens(self.index.unique()):
            rows = self._rows_of(tokens, self.delta.dtype).view(self.m, -1, self.E)
            left[0, tokens] = rows.square().sum((0, 2))
            right = right + square(rows.view(1, -1, self.E))
        return [Traces(self.params, left, right)]

    def beside(self, others: Sequence[Lookup]) -> Lookup:
        blocks = [self, *others]
        return Lookup(
            torch.cat([b.index for b in blocks], 1), torch.cat([b.delta for b in blocks], 2), self.table, self.roots
        )

    def sums(self, weight: Tensor | None) -> Sums:
        each = torch.ones_like(self.delta[0, :, :, 0])  # (N, P)
        each = each if weight is None else each * weight.to(each)[:, None]
        A = each.new_zeros(1, len(self.table)).index_add_(1, self.index.flatten(), each.reshape(1, -1))
        delta = self.delta.reshape(1, -1, self.E)
        return Sums(A, delta.mT @ delta, each.sum(), bias=False, table=True)

    def second_moments(self, left: Tensor | None, right: Tensor | None) -> Tensor:
        """δ → δ·right: (1, V, E)"""
        delta = self.delta if right is None else self.delta @ right[0]
        return Lookup(self.index, delta, self.table).diagonal().view(1, *self.table.shape)

    def _tokens(self, tokens: Tensor) -> Iterator[Tensor]:
        yield from tokens.split(max(1, SLAB // (self.m * self.E)))
