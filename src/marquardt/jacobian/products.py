"""Products with the rows of one piece, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..layers import Block
from ..model.parameters import Parameters


def apply(blocks: Iterable[Block], v: Tensor, parameters: Parameters) -> Tensor:
    """J̃v: (n,) → (m,)"""
    parts = parameters.split(v)
    total: Tensor | None = None
    for block in blocks:
        found = block.apply([parts[i] for i in parameters.members(block.params)])
        total = found if total is None else total.add_(found)
    assert total is not None
    return total


def adjoint(blocks: Iterable[Block], w: Tensor, parameters: Parameters) -> Tensor:
    """J̃ᵀw: (m,) → (n,)"""
    total = torch.empty(parameters.n, dtype=w.dtype, device=w.device)
    parts = parameters.split(total)
    for block in blocks:
        block.adjoint(w, [parts[i] for i in parameters.members(block.params)])
    return total


def scattered(columns: Iterable[tuple[Block, Tensor]], parameters: Parameters) -> Tensor:
    """One vector from the parts of all blocks: (n,)"""
    total: Tensor | None = None
    for block, v in columns:
        if total is None:
            total = torch.empty(parameters.n, dtype=v.dtype, device=v.device)
        for here, there in parameters.ranges(block.params):
            total[here] = v[there]
    assert total is not None
    return total


def dense(blocks: Sequence[Block], dtype: torch.dtype, parameters: Parameters) -> Tensor:
    """J̃ itself, with the columns in the order of the parameters: (m, n)"""
    columns: list[Tensor] = [torch.empty(0)] * len(parameters)
    for block in blocks:
        pieces = block.rows(dtype).split([p.numel() for p in block.params], 1)
        for i, piece in zip(parameters.members(block.params), pieces, strict=True):
            columns[i] = piece
    return torch.cat(columns, 1)
