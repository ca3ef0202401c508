"""Losses at trial points θ + lr·d: on the same pieces, random numbers and buffers as in the linearisation."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves

from . import tolerances
from .deferred import agreed, floats
from .jacobian.linearization import Linearization
from .jacobian.objective import Objective
from .layers import Line
from .memory import out_of_memory
from .model.batch import Batch, modes
from .model.randomness import SameSlopes, Slopes
from .model.substituted import call_with

# Numbers in the inputs of all trial points of one forward pass: a CPU gains nothing from more.
TOGETHER = {"cuda": 1 << 26, "cpu": 1 << 18}

# Losses that differ by so many roundings may be the same.
SAME_ROUNDINGS = 4


class Trials:
    """Losses along directions from the point of a linearisation."""

    def __init__(self, lin: Linearization) -> None:
        self.lin, self.objective, self.known = lin, lin.objective, lin.known

    def loss(self, d: Tensor, lr: float) -> Tensor:
        """f(θ + lr·d): () in float64. The model stays there: the optimizer decides where it ends."""
        lin = self.lin
        lin.totals()  # trials repeat what the linearisation has done
        lin.position.move(d, lr)
        lin.start.restore()
        total: Any = 0.0
        checksum: Any = 0.0
        for i, batch in enumerate(lin.batches if lin.in_one else lin.cut()):
            objective, z = self._passed(i, batch)
            total = total + objective.value(z.detach(), batch)
            if not lin.single:
                checksum = checksum + batch.checksum()
        if not lin.single and not abs(float(checksum) - float(lin.checksum)) <= 1e-6 * abs(float(lin.checksum)):
            raise ValueError(
                "the batches are not the same every time they are gone through: use the same data in each pass"
            )
        total = total.double()
        found: Tensor = (lin.share.ranks.sum(total) if lin.share.ranks.several else total) * lin.scale
        return found if lin.decay is None else found + lin.decay.value(lin.parameters.tensors)

    def _passed(self, i: int, batch: Batch) -> tuple[Objective, Tensor]:
        """z, with the slopes of RReLU that were drawn; with a graph if the model differentiates itself"""
        lin, graph = self.lin, self.known.differentiates
        if not graph and not torch.is_grad_enabled() and lin.single and not lin.slopes[i] and not lin.chance.drawn:
            return self._outputs(i, batch)
        with torch.set_grad_enabled(graph), SameSlopes(lin.slopes[i]) if lin.single else nullcontext():
            return self._outputs(i, batch)

    def _outputs(self, i: int, batch: Batch) -> tuple[Objective, Tensor]:
        if not self.lin.single:
            return self.lin.objective.taken(self.lin.objective.called(batch.inputs), batch)
        objective = self.lin.objectives[i]
        return objective, objective.outputs(batch.inputs)

    def losses(self, d: Tensor, rates: Sequence[float]) -> list[float]:
        """f(θ + lr·d) for every lr: all in one batched forward pass, or one after the other if vmap refuses."""
        lin = self.lin
        lin.totals()
        size, proven = self._together(), self.known.batched_trials
        # Which random numbers a batched pass draws depends on the modes and the strides, and so on the sizes.
        sizes = tuple(batch.samples for batch in lin.batches) if lin.single and lin.chance.drawn else None
        key = modes(self.objective.model), sizes, self.objective.autocast, frozenset(lin.structures)
        batched = len(rates) > 1 and size > 1 and proven.get(key, True) and not self.known.differentiates
        batched = batched and lin.parameters.shards is None  # weights are gathered in ordinary passes alone
        if lin.ranks.all(batched):
            total = self._tried(key, d, rates, size)
            if lin.ranks.all(total is not None):
                assert total is not None
                losses = self._in_units(total, d, rates)
                if lin.ranks.all(key in proven):
                    return losses
                # A model may keep its weights where nothing replaces them, or draw other numbers in a batched pass. At
                # one point alone, far away, that may not show.
                true = floats(*(self.loss(d, lr) for lr in rates))
                pairs = zip(losses, true, strict=True)
                least = SAME_ROUNDINGS * lin.level.rounding
                proven[key] = all(abs(a - b) <= tolerances.of_trials(d.dtype) * abs(b) + least for a, b in pairs)
                # As in every later step: a run that is resumed goes on bit for bit.
                return losses if proven[key] else true
        return floats(*(self.loss(d, lr) for lr in rates))

    def _tried(self, key: object, d: Tensor, rates: Sequence[float], size: int) -> Tensor | None:
        """Σwℓ on this rank for every lr: (k,); None if vmap refuses, or has no memory for it"""
        try:
            self.lin.position.move()
            return self._batched(d, rates, size)
        except Exception as error:  # vmap refuses models in many ways
            if not out_of_memory(error):
                self.known.batched_trials[key] = False
            return None

    def _in_units(self, total: Tensor, d: Tensor, rates: Sequence[float]) -> list[float]:
        """f from Σwℓ of this rank, for every lr"""
        lin = self.lin
        losses = [float(f) for f in (lin.ranks.sum(total.double()) * lin.scale).tolist()]
        decays = [0.0] * len(losses) if lin.decay is None else lin.decay.along(lin.theta, d, rates)
        return agreed([f + decay for f, decay in zip(losses, decays, strict=True)])

    def _together(self) -> int:
        """How many trial points one forward pass may hold."""
        lin = self.lin
        inputs = sum(t.numel() for batch in lin.batches for t in tree_leaves(batch.inputs) if isinstance(t, Tensor))
        most = TOGETHER.get(lin.parameters.device.type, TOGETHER["cpu"])
        return most // max(1, inputs) if lin.single else 1

    def _batched(self, d: Tensor, rates: Sequence[float], size: int) -> Tensor:
        lin = self.lin
        ids = [id(p) for p in lin.parameters.tensors]
        dtypes = {id(p): p.dtype for p in lin.parameters.tensors}
        straight = d.is_cuda and not lin.parameters.coarse  # rounded points are on no line
        origin, direction = (dict(zip(ids, lin.parameters.shaped(v), strict=True)) for v in (lin.theta, d))
        lin.start.restore()
        total: Any = 0.0
        for batch, slopes, objective in zip(lin.cut(), lin.slopes, lin.objectives, strict=True):

            def value(
                lr: Tensor, batch: Batch = batch, slopes: list[Slopes] = slopes, objective: Objective = objective
            ) -> Tensor:
                at = {key: (p + lr * direction[key]).to(dtypes[key]) for key, p in origin.items()}
                with SameSlopes(slopes), Line(origin, direction, at, lr) if straight else nullcontext():
                    z = objective.outputs(batch.inputs, call_with(objective.model, at))
                return objective.value(z, batch)

            with torch.no_grad(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")
                lrs = torch.tensor(rates, dtype=d.dtype, device=d.device)
                total = total + vmap(value, randomness="same", chunk_size=size)(lrs)
        found: Tensor = total
        return found
