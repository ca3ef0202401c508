"""Products with the rows of one piece, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..layers import Block, Explicit, Nothing
from ..model.parameters import Parameters


def apply(blocks: Iterable[Block], v: Tensor, parameters: Parameters) -> Tensor:
    """J̃v: (n,) → (m,)"""
    parts = parameters.split(v)
    total: Tensor | None = None
    for block in blocks:
        found = block.apply([parts[i] for i in parameters.of(block)])
        total = found if total is None else total.add_(found)
    assert total is not None
    return total if parameters.shards is None else parameters.total(total)


def adjoint(blocks: Iterable[Block], w: Tensor, parameters: Parameters) -> Tensor:
    """J̃ᵀw: (m,) → (n,)"""
    total = torch.empty(parameters.n, dtype=w.dtype, device=w.device)
    parts = parameters.split(total)
    for block in blocks:
        block.adjoint(w, [parts[i] for i in parameters.of(block)])
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
    if [i for block in blocks for i in parameters.of(block)] == [*range(len(parameters.sizes))]:  # in that order
        return torch.cat([piece for block in blocks for _, piece in block.slabs(dtype)], 1)
    columns: list[Tensor] = [torch.empty(0)] * len(parameters)
    for block in blocks:
        pieces = block.rows(dtype).split([p.numel() for p in block.params], 1)
        for i, piece in zip(parameters.of(block), pieces, strict=True):
            columns[i] = piece
    return torch.cat(columns, 1)


def together(
    blocks: Sequence[Block], groups: Sequence[Sequence[int]], dtype: torch.dtype, parameters: Parameters
) -> list[Block]:
    """The blocks, with those that share a group of parameters written out as one"""
    found = list(blocks)
    own = {tuple(parameters.of(b)) for b in blocks}
    for group in (group for group in groups if tuple(group) not in own):
        some = [b for b in found if not set(group).isdisjoint(parameters.of(b))]
        if len(some) > 1 and not all(b.empty for b in some):
            one = _as_one(some, [parameters.tensors[i] for i in group], dtype)
            found = [b for b in found if all(b is not c for c in some)] + one
    return found


def _as_one(blocks: Sequence[Block], members: Sequence[Tensor], dtype: torch.dtype) -> list[Block]:
    """One block for these parameters and all that stand beside them, and what is left of blocks that are zero"""
    full = [b for b in blocks if not b.empty]
    missing = [p for p in members if all(p is not q for b in full for q in b.params)]
    full += [Nothing(missing, full[0].m, full[0].N)] if missing else []
    rows = torch.cat([b.rows(dtype) for b in full], 1)
    rest = (b.without(members) for b in blocks if b.empty)
    return [Explicit([p for b in full for p in b.params], rows, full[0].N), *(b for b in rest if b is not None)]
