"""Rows of all ranks, columns of one: what becomes of the blocks of a piece if the parameters are sharded.

Every rank has formed the rows of its own samples, with all columns. They are sent on so that each has all rows, with
the columns of the parameters that it holds:

    a (N, P, G, I)       all ranks get all of it: a row of outputs of a weight has all its inputs
    δ (R, N, P, G, O)    rank k gets the outputs that belong to its rows of the weight
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layers import Block, Explicit, Nothing
from ..layers.blocks import Bilinear
from ..layers.lookup import Lookup
from ..model.parameters import Parameters
from ..model.shards import Shards


def exchanged(blocks: list[Block], parameters: Parameters) -> list[Block]:
    """The blocks with the rows of all ranks and the columns of this one. Those that are given are taken from the list
    one after the other, so that their memory is free."""
    found: list[Block] = []
    N = sum(parameters.ranks.numbers(blocks[0].N))
    while blocks:
        found.append(_exchanged(blocks.pop(0).plain(), parameters, N))
    return found


def _exchanged(block: Block, parameters: Parameters, N: int) -> Block:
    """N samples on all ranks"""
    shards, members = parameters.shards, parameters.whole.members(block.params)
    assert shards is not None
    params = [parameters.tensors[i] for i in members]
    own = dict(zip(map(id, block.params), params, strict=True))
    m = block.m // block.N * N
    if block.empty:
        return Nothing(params, m, N)
    found: Block
    if isinstance(block, Lookup):
        found = _lookup(block, shards, own[id(block.table)])
    elif isinstance(block, Bilinear) and (cuts := _cuts(block, shards)) is not None:
        found = _bilinear(block, shards, cuts, own)
    else:
        found = _explicit(block, shards, params)
    return found if found.columns else Nothing(params, m, N)


def _cuts(block: Bilinear, shards: Shards) -> list[slice] | None:
    """The groups of every rank, or if there is one group its outputs; None if a group has outputs on several ranks"""
    rows = shards.rows(block.G * block.O)
    if block.G == 1:
        return rows
    whole = all(cut.start % block.O == 0 and cut.stop % block.O == 0 for cut in rows)
    return [slice(cut.start // block.O, cut.stop // block.O) for cut in rows] if whole else None


def _bilinear(block: Bilinear, shards: Shards, cuts: list[slice], own: dict[int, Tensor]) -> Block:
    a, delta = block.factors
    weight, bias = (None if p is None else own[id(p)] for p in (block.weight, block.bias))
    rows = delta.transpose(0, 1)  # (N, R, P, G, O)
    if block.G == 1:
        a, rows = shards.ranks.gather(a), shards.ranks.dealt([rows[..., cut] for cut in cuts])
    else:
        a = shards.ranks.dealt([a[:, :, cut] for cut in cuts])
        rows = shards.ranks.dealt([rows[:, :, :, cut] for cut in cuts])
    return Bilinear(a, rows.transpose(0, 1), weight, bias, block.one)


def _lookup(block: Lookup, shards: Shards, table: Tensor) -> Block:
    """Of a table a rank has some tokens: those of the others count for nothing here"""
    index, rows = shards.ranks.gather(block.index), shards.ranks.gather(block.delta.transpose(0, 1))  # (N, R, P, E)
    here = shards.rows(len(block.table))[shards.ranks.rank]
    inside = (index >= here.start) & (index < here.stop)
    index = (index - here.start).where(inside, 0)
    return Lookup(index, (rows * inside[:, None, :, None]).transpose(0, 1), table)


def _explicit(block: Block, shards: Shards, params: list[Tensor]) -> Block:
    """Rows that are written out, cut by parameter"""
    pieces = block.rows(block.dtype).split([p.numel() for p in block.params], 1)
    cut = [
        piece.view(-1, block.N, len(p), p.numel() // len(p)).transpose(0, 1)  # (N, R, rows of p, columns)
        for p, piece in zip(block.params, pieces, strict=True)
    ]
    each = [shards.rows(len(p)) for p in block.params]
    parts = [
        torch.cat([piece[:, :, some[rank]].flatten(2) for piece, some in zip(cut, each, strict=True)], 2)
        for rank in range(shards.ranks.size)
    ]
    rows = shards.ranks.dealt(parts)  # (N, R, columns)
    N, R, columns = rows.shape
    return Explicit(params, rows.transpose(0, 1).reshape(R * N, columns), N)
