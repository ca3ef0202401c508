"""One piece of the batch, linearised: its loss, its gradient, and its rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..deferred import read, recording, ungraded
from ..layers import Block
from ..layers.watch import grouped
from ..losses.proof import prove
from ..memory import out_of_memory
from ..model.batch import Batch, tensors
from ..model.checks import check_coupling
from ..model.parameters import named_parameters
from ..model.randomness import Chance, Moment
from ..model.shards import own_part
from .cut import check_picked
from .jacobian import Jacobian
from .known import Known
from .linearity import check_backward
from .objective import Objective, Totals
from .passes import Pass
from .products import adjoint, apply, dense
from .proof import blocks_of
from .rows import Cotangents, Rows, Seed, check_gradient, drawn


class Piece:
    """Value, gradient and J̃ = SᵀJ of one piece, in Σ-units, without the normaliser.

    `keep_graph`: products by automatic differentiation come after the rows.
    """

    def __init__(
        self, objective: Objective, batch: Batch, rows: Rows, known: Known, chance: Chance, seed: Seed,
        keep_graph: bool, before: Moment | None = None,
    ) -> None:  # fmt: skip
        self.objective, self.batch, self.known, self.keep_graph = objective, batch, known, keep_graph
        once = self._unrolls(known.rows_per_sample)
        self.whole = Pass(objective, batch, known, chance, once=once, joined=rows.joined, before=before)
        self.objective = objective = self.whole.objective
        check_backward(self.whole)
        self.z, self.N = self.whole.z, self.whole.N
        objective.loss.check(self.z, batch.targets, batch.weight, part=True)
        seed = seed if batch.samples == self.N else seed.apart()
        index = rows.pick(self.N, seed)
        with ungraded():
            if index is None:
                self.cotangents = drawn(rows, objective.loss, self.z, batch, seed)
            else:
                # The rows are those of the samples picked: S of all of them is never formed, z only has its shape.
                self.cotangents = Cotangents(self.z[None], None, objective.slope(self.z, batch))
            self.totals = self._totals(rows)
        if index is not None:
            self.jacobian = self._picked(rows, index, seed)
        else:
            self.jacobian = Jacobian(self.whole, self.cotangents.S[:, None] if rows.joined else self.cotangents.S)
        self.m = self.jacobian.m
        self.telling = 0 if index is not None and len(index) == 0 else self.m  # its own rows that are not zero
        self.inert: set[int] | None = None  # parameters without influence; None before the rows can tell
        known.rows_per_sample = self.jacobian.R
        self._blocks: list[Block] | None = None
        self._gradient: Tensor | None = None
        self._outside: Tensor | None = None  # h
        watch = self.jacobian.forward.watch
        if watch.convolves and not watch.once and self._unrolls(self.jacobian.R):
            self.jacobian.forward.again(True)  # the first time: so the first step goes the way of all others
        if index is not None:
            self.whole.after.restore(gently=True)  # the samples that were picked had forward passes of their own

    def _unrolls(self, rows: int) -> bool:
        """Several rows of a sample pay for a backward pass of our own."""
        parameters = self.objective.parameters
        fit = parameters.device.type == "cpu" and parameters.shards is None
        return self.known.unrolls and rows > 1 and not self.keep_graph and fit

    def _totals(self, rows: Rows) -> Totals:
        objective, batch, loss = self.objective, self.batch, self.objective.loss
        value = objective.value(self.z, batch)
        rounding = self.cotangents.rounding(value, self.z, self.whole.coarsest)
        totals = Totals(*read(objective.totals(self.z, batch, value, rounding)))
        if not math.isfinite(totals.value):
            raise ValueError(f"the loss is {totals.value} at the current parameters: {self._blame()}")
        if self.known.loss is not objective.given and not recording():
            proven = prove(loss, rows.empirical, self.z, batch.targets, batch.weight)
            if rows.spans:
                check_gradient(rows, self.cotangents, objective.slope(self.z, batch))
            self.known.loss = objective.given if proven else None
        return totals

    def _picked(self, rows: Rows, index: Tensor, seed: Seed) -> Jacobian:
        """J̃ of some of the samples, in the units of the whole"""
        check_coupling(self.objective.model)
        if not self.batch.opaque and not self.divisible:  # `take` tells what cannot be taken apart
            raise ValueError(
                f"{type(rows).__name__}: the model returned {self.N} outputs, and the inputs have no row for each, "
                "so that a part of them cannot be taken: take the rows of all samples, such as rows=mq.Sampled(1)"
            )
        none = len(index) == 0  # other pieces have all that were picked: a row that counts for nothing
        index = index.new_zeros(1) if none else index
        slopes = [s.take(index, self.N) for s in self.whole.slopes]
        batch, chance = self.batch.take(index), self.whole.chance
        once = self._unrolls(self.known.rows_per_sample)
        part = Pass(self.objective, batch, self.known, chance, once=once, slopes=slopes)
        if not none or self.objective.parameters.ranks.several:
            check_picked(self.whole, part, index, self.known, int(seed), type(rows).__name__)
        with torch.no_grad():
            S = drawn(rows, self.objective.loss, part.z, batch, seed.picked(index)).S
        return Jacobian(part, S * (0.0 if none else rows.stands_for(part.N, self.N, seed)) ** 0.5)

    def _blame(self) -> str:
        """Where a loss that is not finite comes from; the loss itself has checked the targets and weights."""
        for t in tensors(self.batch.inputs):
            if t.is_floating_point() and not bool(t.isfinite().all()):
                return "the inputs hold NaN or infinite values, clean the data"
        for name, p in named_parameters(self.objective.model):
            if not bool(own_part(p).isfinite().all()):
                return f"the model's parameter {name!r} holds NaN or infinite values, load an earlier checkpoint"
        if not bool(self.z.isfinite().all()):
            return "inputs, targets and parameters are finite, so it is the model that overflows; look at its outputs"
        data = {"output": self.z, "target": self.batch.targets, "weight": self.batch.weight}
        largest = {name: max((float(t.abs().max()) for t in tensors(item)), default=0.0) for name, item in data.items()}
        found = ", ".join(f"the largest {name} is {size:.3g}" for name, size in largest.items() if size)
        way_out = "scale the data" + (", or use float64" if self.z.dtype == torch.float32 else "")
        name = self.objective.loss.display_name
        return f"outputs, targets and parameters are finite, but {name} of them is not; {found}: {way_out}"

    @property
    def u(self) -> Tensor | None:
        """J̃ᵀu + h is the gradient: (R, N); None if no part of it lies in the range of the rows"""
        return self.cotangents.u

    @property
    def gradient(self) -> Tensor:
        """∂value/∂θ: (n,), from the rows if they are there and span it, otherwise by a backward pass"""
        if self._gradient is None:
            if self._blocks is not None and self.u is not None and self.cotangents.v is None:
                self._gradient = self.adjoint(self.u.flatten())
            else:
                self._gradient = self.whole.vjp(self.objective.slope(self.z, self.batch))
        return self._gradient

    @property
    def h(self) -> Tensor | None:
        """Jᵀv, the part of the gradient outside the range of the rows: (n,), None means 0"""
        if self.cotangents.v is None:
            return None
        if self._outside is None:
            self._outside = self.gradient if self.u is None else self.whole.vjp(self.cotangents.v)
        return self._outside

    def others(self) -> int:
        """Parameters whose rows are written out: those without a rule, and weights that different layers share."""
        calls = self.whole.watch.calls
        groups = [[calls[i] for i in members] for members in grouped(calls)]
        alike = [group for group in groups if len({call.kind for call in group}) == 1]
        ruled = {id(p) for group in alike for call in group for p in call.params}
        return sum(p.numel() for p in self.objective.parameters.whole.tensors if id(p) not in ruled)

    @property
    def divisible(self) -> bool:
        """Whether a part of the samples can go through the model."""
        return self.batch.divisible(self.N)

    def exact_rows(self) -> int:
        """Rows that one sample has in all, whichever are formed."""
        y, loss = self.batch.targets, self.objective.loss
        shapes = self.z.shape[1:], (y.shape[1:], y.dtype) if isinstance(y, Tensor) else None
        last = self.known.exact_rows
        if last is not None and last[0] is loss and last[1] == shapes and shapes[1] is not None:
            return last[2]
        first = self.batch.head(self.N)
        count = loss.count(self.z[:1], first.targets, first.weight)
        self.known.exact_rows = loss, shapes, count
        return count

    @property
    def blocks(self) -> list[Block]:
        """The columns of J̃, by layer; once they are there, the graph of the forward pass is released."""
        if self._blocks is None:
            _ = self.h  # while there is a graph
            forward = self.jacobian.forward
            if torch.is_grad_enabled():
                with torch.no_grad():
                    return self.blocks
            try:
                self._blocks, self.inert = blocks_of(self.jacobian)
            except Exception as error:
                if not forward.watch.unrolled or out_of_memory(error):
                    raise
                self.known.unrolls = False  # for good: this model needs a graph of torch's own
                forward.again(False)
                self._blocks, self.inert = blocks_of(self.jacobian)
            if forward is not self.whole:  # of the samples that were not picked nothing is known
                self.inert = set()
            forward.release(graph=not self.keep_graph)
            forward.after.restore()  # some ways to the rows call the model again
            if forward is not self.whole:
                self.whole.after.restore(gently=True)  # where the forward pass of the whole ended
        return self._blocks

    def random(self) -> Tensor:
        """One number for every row, the same every time: (R, N)"""
        return self.jacobian.random()

    def apply(self, v: Tensor) -> Tensor:
        """J̃v: (n,) → (m,)"""
        return apply(self.blocks, v, self.objective.parameters)

    def adjoint(self, w: Tensor) -> Tensor:
        """J̃ᵀw: (m,) → (n,)"""
        return adjoint(self.blocks, w, self.objective.parameters)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """J̃ itself, with the columns in the order of the parameters: (m, n)"""
        return dense(self.blocks, dtype, self.objective.parameters)
