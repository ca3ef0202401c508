"""Embedding: a linear layer whose input is one-hot, so that a·a' is 1 where two tokens agree and 0 elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..metric import Factors
from .block import SLAB, Block, Product


class Lookup(Block):
    """J̃ of an embedding table (V, E): row (r, n) holds Σₚ δ[r, n, p] at the table's row index[n, p]."""

    def __init__(self, index: Tensor, delta: Tensor, table: Tensor) -> None:
        self.index, self.delta, self.table = index, delta, table  # (N, P), (R, N, P, E)
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
        return torch.einsum("rnpe,npt->rnte", self.delta.to(dtype), hot).reshape(self.m, -1)

    def apply(self, v: Sequence[Tensor]) -> Tensor:
        (table,) = v
        return torch.einsum("npe,rnpe->rn", table.view_as(self.table)[self.index], self.delta.to(table.dtype)).flatten()

    def adjoint(self, w: Tensor, out: Sequence[Tensor]) -> None:
        delta = torch.einsum("rn,rnpe->npe", w.view(self.R, self.N), self.delta.to(w.dtype))
        out[0].zero_().view_as(self.table).index_add_(0, self.index.flatten(), delta.flatten(0, 1))

    def diagonal(self) -> Tensor:
        total = torch.zeros_like(self.table)
        for tokens in self._tokens(self.index.unique()):  # the other rows of the table are zero
            total[tokens] = self._rows_of(tokens, self.delta.dtype).square().sum(0).view(-1, self.E)
        return total.flatten()

    def gram(self, K: Tensor, other: Block, D: Sequence[Factors] | None, product: Product | None = None) -> None:
        assert isinstance(other, Lookup)
        if product is not None:
            product.add(self)
        entries = None if D is None else self.entries(D).view_as(self.table)
        shared = self.index.unique()
        for tokens in self._tokens(shared[torch.isin(shared, other.index)]):
            left, right = self._rows_of(tokens, K.dtype), other._rows_of(tokens, K.dtype)
            K.addmm_(left if entries is None else left / entries[tokens].flatten(), right.T)

    def _tokens(self, tokens: Tensor) -> Iterator[Tensor]:
        yield from tokens.split(max(1, SLAB // (self.m * self.E)))
