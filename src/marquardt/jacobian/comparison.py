"""What plain autograd says of J̃ᵀw, for the rows that rules have found to be compared with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from .. import tolerances
from ..layers import Block
from ..model.parameters import flat
from .jacobian import Jacobian

Key = TypeVar("Key")


class Comparison:
    """Jᵀ(Sw) from plain autograd for a random w: what J̃ᵀw from the rows must equal.

    Equality for one random w proves J̃ itself, column by column: each column of a wrong J̃ would have to be orthogonal to
    w. It is equality up to rounding, and rounding may be all there is: a bias before InstanceNorm, or that of the keys
    of attention, has no influence on the outputs. How much it is shows in multiples of w, which round in other ways.
    """

    def __init__(self, J: Jacobian, thorough: bool = False) -> None:
        self.J, self.params, self.index = J, J.parameters.tensors, J.parameters.index
        self.thorough = thorough  # whether rounding is measured in any case
        self.w = J.random()
        self.tolerance = tolerances.of_rules(J.forward.coarsest)
        # Multiples differ by about as much as rounding leaves, and a true gradient is 1/eps times that: measured 130
        # times in bfloat16, and some 1000 times may be expected of TF32. But only 8 times for the bias of a LayerNorm
        # of bfloat16 on a CPU, which adds up in it; without influence it is once.
        self.bound = min(50.0, 0.02 / torch.finfo(J.forward.coarsest).eps)
        self.true: dict[int, Tensor] = {}  # by parameter, those that are looked at: (size,)
        self.noise: dict[int, Tensor] | None = None  # what rounding may leave in them: ()
        self.inert: dict[int, float] = {}  # parameters whose gradient is no more than that
        self.unused: set[int] = set()  # parameters that the outputs do not depend on
        self.zeros = False  # whether the gradient of another one is zero
        if not J.ranks.several:
            self._see(range(len(self.params)))

    def look(self, some: Sequence[int]) -> None:
        """At these parameters from here on: at sharded ones a part at a time, for no rank holds all their gradients."""
        if self.J.ranks.several and some:
            self.end()
            self._see(some)

    def end(self) -> None:
        """What is left to find out about the parameters that are looked at"""
        if self.thorough and self.true:
            self.measure_rounding()

    def _see(self, some: Sequence[int]) -> None:
        self.noise, self.true = None, {}
        pulled = self.J.forward.pull(self.J.cotangent(self.w), [self.params[i] for i in some])
        for i, g in zip(some, pulled, strict=True):
            self.true[i] = flat(g, self.params[i])
            if g is None:
                self.unused.add(i)
            elif not bool(g.any()):
                self.zeros = True

    def first(self, blocks: Mapping[Key, Block | None]) -> Key | None:
        """The first that agrees, on every rank that shares the weights; rounding is asked only if none does."""
        for key, block in blocks.items():
            if self._agrees(block):
                return key
        if not self.J.ranks.all(all(block is None for block in blocks.values())):
            self.measure_rounding()
        for key, block in blocks.items():
            if self._agrees(block):
                return key
        return None

    def _agrees(self, block: Block | None) -> bool:
        return self.J.ranks.all(block is not None and self._agrees_here(block))

    def _agrees_here(self, block: Block) -> bool:
        found = block.pull(self.w.flatten()).split([p.numel() for p in block.params])
        smallest = torch.finfo(self.w.dtype).tiny
        for p, f in zip(block.params, found, strict=True):
            i = self.index[id(p)]
            noise = smallest if self.noise is None else smallest + self.noise[i]
            if not bool((f - self.true[i]).norm() <= self.tolerance * self.true[i].norm() + noise):
                return False
        return True

    def measure_rounding(self) -> None:
        """How much rounding leaves, and which gradients are no more: with another w too, for one of them may be small
        by chance."""
        if self.noise is not None:
            return
        squares = {i: t.new_zeros(()) for i, t in self.true.items()}
        for c in (3, 5, 7):
            for i, other in self._pull(c * self.w).items():
                squares[i] += (other / c - self.true[i]).square().sum() / 3
        self.noise = {i: self.bound * square.sqrt() for i, square in squares.items()}
        if not self.J.ranks.several and self.noise:  # a hook may round too, or draw: more than that is no rounding
            share, all_of_them = tolerances.of_noise(self.J.forward.coarsest), list(self.true.values())
            most = share * torch.stack([t.norm() for t in all_of_them]).norm()
            self.noise = {i: noise.minimum(most) for i, noise in self.noise.items()}
        again = self._pull(self.J.random(1))
        for i, noise in self.noise.items():
            small = bool((noise > 0) & (self.true[i].norm() <= noise) & (again[i].norm() <= noise))
            if self.J.ranks.all(small):
                self.inert[i] = float(noise)

    def _pull(self, w: Tensor) -> dict[int, Tensor]:
        pulled = self.J.forward.pull(self.J.cotangent(w), [self.params[i] for i in self.true])
        return {i: flat(g, self.params[i]) for i, g in zip(self.true, pulled, strict=True)}
