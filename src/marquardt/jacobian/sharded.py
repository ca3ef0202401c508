"""A piece whose parameters are sharded: rows of the samples of all ranks, columns of the parameters of this one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..layers import Block, Explicit, Nothing
from ..layers.blocks import Bilinear, Lookup
from ..model.parameters import Parameters
from ..model.shards import Shards
from .passes import Jacobian
from .piece import Piece, adjoint, blocks_of


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


class ShardedPiece(Piece):
    """What it adds up over samples is that of all ranks. Passes are those of its own samples, and all ranks make them
    together: the weights are gathered in them, layer by layer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # First of all, for another rank may have refused its data; after this come backward passes.
        ranks = self.objective.parameters.ranks
        self.m = sum(ranks.numbers(self.jacobian.m))
        own = self.cotangents.u
        self._u = None if own is None else ranks.gather(own.T).T
        self._h: Tensor | None = None

    @property
    def u(self) -> Tensor | None:
        """(R, N), N samples on all ranks"""
        return self._u

    @property
    def gradient(self) -> Tensor:
        if self._gradient is None:
            parts = [self.h, None if self.u is None else self.adjoint(self.u.flatten())]
            self._gradient = torch.stack([t for t in parts if t is not None]).sum(0)
        return self._gradient

    @property
    def h(self) -> Tensor | None:
        _ = self.blocks
        return self._h

    def _formed(self) -> tuple[list[Block], set[int] | None]:
        """The columns of this rank, by layer."""
        own, inert = blocks_of(self.jacobian)
        blocks = exchanged(own, self.objective.parameters)
        self._h = self._pulled(self.cotangents.v)
        return blocks, inert

    def _pulled(self, v: Tensor | None) -> Tensor | None:
        """Jᵀv as one more row of every sample: no rank holds all of a gradient. (N, *out) → (n,)"""
        if v is None:
            return None
        J = Jacobian(self.whole, v[None])
        blocks = exchanged(blocks_of(J)[0], self.objective.parameters)
        return adjoint(blocks, v.new_ones(blocks[0].m), self.objective.parameters)

    def random(self) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(0)
        shape = self.jacobian.R, self.m // self.jacobian.R
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(self.z)
