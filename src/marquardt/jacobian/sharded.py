"""A piece whose parameters are sharded: rows of the samples of all ranks, columns of the parameters of this one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..layers import Block
from .exchange import exchanged
from .passes import Jacobian
from .piece import Piece, adjoint, blocks_of


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

    @property
    def blocks(self) -> list[Block]:
        """The columns of this rank, by layer."""
        if self._blocks is None:
            parameters, forward = self.objective.parameters, self.jacobian.forward
            with torch.no_grad():
                own, self.inert = blocks_of(self.jacobian)
                self._blocks = exchanged(own, parameters)
                self._h = self._pulled(self.cotangents.v)
            if forward is not self.whole:  # of the samples that were not picked nothing is known
                self.inert = set()
            forward.release(graph=True)
            parameters.let_go()
            forward.after.restore()  # some ways to the rows call the model again
            if forward is not self.whole:
                self.whole.after.restore(gently=True)
        return self._blocks

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
