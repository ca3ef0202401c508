"""The contract of a block of columns of J̃, and the block that simply holds its rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

# A slab of explicit rows is at most this many numbers: 256 MiB in float32.
SLAB = 1 << 26


class Block(ABC):
    """The columns of J̃ (m rows, m = R·N, row r·N + n) that belong to a few parameters.

    The columns are those of `params`, each flattened, one after the other. Products are formed in the dtype of what
    the rows are multiplied with.
    """

    params: list[Tensor]
    m: int

    @abstractmethod
    def slabs(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Rows in pieces: (columns of this block, their part of every row (m, columns)), each of bounded size."""

    @abstractmethod
    def apply(self, v: Tensor) -> Tensor:
        """J̃v: (columns,) → (m,)"""

    @abstractmethod
    def adjoint(self, w: Tensor) -> Tensor:
        """J̃ᵀw: (m,) → (columns,)"""

    @property
    def columns(self) -> int:
        return sum(p.numel() for p in self.params)

    def rows(self, dtype: torch.dtype) -> Tensor:
        """J̃ itself: (m, columns)"""
        return torch.cat([piece for _, piece in self.slabs(dtype)], 1)

    @property
    def factored(self) -> bool:
        """Whether `against` knows a cheaper way than the product with the rows."""
        return False

    def against(self, rows: Tensor) -> Tensor:
        """Xᵀ J̃ for rows X of any columns: (m, q) → (q, columns)"""
        return rows.T @ self.rows(rows.dtype)

    def diagonal(self) -> Tensor:
        """diag J̃ᵀJ̃: (columns,)"""
        return torch.cat([piece.square().sum(0) for _, piece in self.slabs(self.params[0].dtype)])

    def gram(self, K: Tensor, other: Block, inverse: Tensor | None) -> None:
        """K += J̃ A⁻¹ J̃'ᵀ with this block's J̃ and the other's J̃' (the same layer, other samples); `inverse` holds the
        diagonal of A⁻¹, None means the identity."""
        for (columns, left), (_, right) in zip(self.slabs(K.dtype), other.slabs(K.dtype), strict=True):
            K.addmm_(left if inverse is None else left * inverse[columns], right.T)


class Nothing(Block):
    """Parameters that the outputs do not depend on."""

    def __init__(self, params: list[Tensor], m: int) -> None:
        self.params, self.m = params, m

    def slabs(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        size = max(1, SLAB // self.m)
        for first in range(0, self.columns, size):
            last = min(first + size, self.columns)
            yield slice(first, last), self.params[0].new_zeros(self.m, last - first, dtype=dtype)

    def apply(self, v: Tensor) -> Tensor:
        return v.new_zeros(self.m)

    def adjoint(self, w: Tensor) -> Tensor:
        return w.new_zeros(self.columns)

    def diagonal(self) -> Tensor:
        return self.params[0].new_zeros(self.columns)

    def gram(self, K: Tensor, other: Block, inverse: Tensor | None) -> None:
        pass


class Explicit(Block):
    """Rows that are simply there."""

    def __init__(self, params: list[Tensor], rows: Tensor) -> None:
        self.params, self._rows, self.m = params, rows, rows.shape[0]  # (m, columns)

    def slabs(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        yield slice(0, self._rows.shape[1]), self._rows.to(dtype)

    def apply(self, v: Tensor) -> Tensor:
        return self._rows.to(v.dtype) @ v

    def adjoint(self, w: Tensor) -> Tensor:
        return self._rows.T.to(w.dtype) @ w
