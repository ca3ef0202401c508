"""One forward pass of a piece of the batch, and backward passes through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from .. import tolerances
from ..layers.graph import Walk
from ..layers.unrolled import Refused
from ..layers.watch import Watch
from ..memory import unless_interrupted
from ..model.batch import Batch
from ..model.kernels import open_cells
from ..model.misfit import FAILURES, explained
from ..model.precision import full
from ..model.randomness import Chance, Draws, Moment, SameSlopes, Slopes
from ..model.substituted import call_with
from .known import Known
from .objective import Objective

UNRELATED = "the outputs do not depend on the trainable parameters: nothing to optimise"
REENTRANT = (
    "the model calls torch.utils.checkpoint with use_reentrant=True, which hides its layers and allows no gradients "
    "but those of .backward(): pass use_reentrant=False"
)


class Pass:
    """z = model(x) with its graph, what was called on the way, and the state of the model before and after."""

    def __init__(
        self, objective: Objective, batch: Batch, known: Known, chance: Chance, *, once: bool = False,
        slopes: Sequence[Slopes] | None = None, joined: bool = False, before: Moment | None = None,
    ) -> None:  # fmt: skip
        self.objective, self.batch, self.known, self.chance = objective, batch, known, chance
        self.joined = joined  # whether all samples are one in the graph
        self.form = form = known.look(objective.model) if before is None else before.form
        self.before = self.moment() if before is None else before
        batch.check()
        versions = batch.versions()
        try:
            z, self.watch = self._forward(slopes, once)
        except FAILURES as error:
            reason = explained(error, objective.model, batch, objective.parameters.whole.tensors[0])
            if reason is None:
                raise
            raise reason from error
        if batch.versions() != versions:
            raise ValueError(
                "the model changes its inputs in place, so it cannot be called on them again: clone them first"
            )
        if not z.requires_grad:
            raise ValueError(UNRELATED)
        objective.pools = self.objective.pools = self.watch.pools
        # RReLU draws for negative inputs only: there may be some at a trial point though there are none here.
        chance.drawn = chance.drawn or bool(self.watch.slopes)
        self.form = form = known.look(objective.model)  # which a pass may change
        self.forward_hooks, self.hooks = form.forward_hooks, (*form.backward_hooks, *self.watch.hooks)
        # Where nothing was drawn and there are no buffers, all is as before.
        self.after = self.moment() if chance.drawn or form.buffered or self.before.buffers else self.before
        self.slopes = self.watch.slopes if slopes is None else slopes
        self.z, self.N = z.detach(), z.shape[0]
        self.coarsest = self.watch.coarsest  # of all dtypes that the model computes with
        self._graph: Tensor | None = self._together(z) if joined else z
        self.walk = self._walked()

    def sums(self) -> Tensor:
        """See Loss.sums: (k,)"""
        return self.objective.loss.sums(self.z, self.batch.targets, self.batch.weight)

    def moment(self) -> Moment:
        return Moment(self.objective.model, self.objective.parameters.device, self.chance, self.form)

    def _forward(self, slopes: Sequence[Slopes] | None, once: bool) -> tuple[Tensor, Watch]:
        """`once`: for several rows of a sample, which are differentiated once only"""
        self.chance.untold = not self.chance.drawn
        try:
            with torch.enable_grad():
                with Watch(self.objective.parameters.whole.index, slopes, once) as watch:
                    raw = self._raw()
                self.objective, z = self.objective.taken(full(raw), self.batch)
        except Refused:
            self.known.unrolls = False
            self._notice_chance()
            self.before.restore()
            return self._forward(slopes, False)
        self._notice_chance()  # after a pass that failed there is nothing to look for: what it drew is taken back
        return z, watch

    def _raw(self) -> Any:
        if not self.form.has_lstm:
            return self.objective.raw(self.batch.inputs)
        with open_cells(self.objective.model):
            return self.objective.raw(self.batch.inputs)

    def again(self, once: bool) -> None:
        """The graph in the other form."""
        self._graph = None
        self.before.restore(gently=True)  # the graph of a whole batch may hold them
        z, self.watch = self._forward(self.slopes, once)
        self._graph = self._together(z)
        self.walk = self._walked()

    def _together(self, z: Tensor) -> Tensor:
        if not self.joined:
            return z
        with torch.enable_grad():
            return z[None]

    def _notice_chance(self) -> None:
        """Whether it was the model that drew random numbers. The state of a generator does not tell, for other threads
        draw from the same: if it has changed, the model is called again and its operations are asked."""
        ranks = self.objective.parameters.ranks
        alike = ranks.all  # ranks that share the weights make the same passes
        drew = not self.chance.drawn and self.before.drew_since()
        if not self.chance.drawn and (drew or (ranks.several and not alike(not drew))):
            here, modes = self.moment(), self.form.modes
            self.chance.drawn = modes in self.known.random or not alike(not self._draws())
            if self.chance.drawn:
                self.known.random.add(modes)
                here.restore(buffers=False)
        self.chance.untold = False

    def _draws(self) -> bool:
        """Whether a forward pass draws random numbers; it is made on copies of the buffers, which a graph may hold."""
        model = self.objective.model
        with torch.enable_grad(), Draws() as draws:  # type: ignore[no-untyped-call]
            try:
                self.objective.called(self.batch.inputs, call_with(model, {id(b): b.clone() for b in model.buffers()}))
            except Exception as error:  # the model fails, or cannot be watched
                unless_interrupted(error)
                return True
        return bool(draws.drew)

    @property
    def graph(self) -> Tensor:
        """z with its graph: (N, *out), or (1, N, *out) if all samples are one"""
        assert self._graph is not None
        return self._graph

    def _walked(self) -> Walk:
        """The nodes of that graph."""
        whole = self.objective.parameters.whole
        return Walk(self.graph, whole.tensors, self.form.tensors, whole.index)

    @property
    def seen(self) -> int:
        """A number for what shows of this pass beside the structure of its graph: sizes, functions, hooks."""
        return hash((self.N, self.walk.sizes, *self.watch.functions, *self.forward_hooks, *self.hooks))

    def nodes(self) -> int:
        """Operations that the graph holds, those within functions and within gradients among them."""
        return len(self.walk.nodes)

    def release(self, graph: bool) -> None:
        """Lets go of what the rows were made of, and of the graph."""
        del self.watch, self.walk
        if graph:
            self._graph = None

    def pull(self, w: Tensor, params: Sequence[Tensor]) -> list[Tensor | None]:
        """Jᵀw by parameter, None for those that the outputs do not depend on: (N, *out) → like the parameters"""
        if (ranks := self.objective.parameters.ranks).several:
            ranks.same("a backward pass")
        try:
            grads = gradients(self.graph, params, w.view_as(self.graph))
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            raise ValueError(REENTRANT) from error
        return [g.to_dense() if g is not None and g.is_sparse else g for g in grads]

    def vjp(self, w: Tensor) -> Tensor:
        """Jᵀw: (N, *out) → (n,)"""
        parameters = self.objective.parameters
        return parameters.joined(self.pull(w, parameters.tensors))

    def repeated(self, replaced: dict[int, Tensor]) -> Tensor:
        """The forward pass once more, with other tensors in the place of some parameters.

        On copies of the buffers: restoring them in place would spoil the graph.
        """
        self.before.restore(buffers=False)
        try:
            return again(self.objective, self.batch.inputs, self.before, self.slopes, replaced)
        finally:
            self.after.restore(buffers=False)

    def same_without_grad(self) -> bool:
        """Whether the model gives the same outputs under no_grad: a network that differentiates itself does not."""
        try:
            with torch.no_grad():
                return tolerances.same_outputs(self.repeated({}), self.z)
        except Exception as error:  # whatever the model says to a forward pass without gradients
            unless_interrupted(error)
            return False


def gradients(z: Tensor, inputs: Sequence[Any], w: Tensor) -> tuple[Tensor | None, ...]:
    """∂(z·w), None where z does not depend on an input: torch.autograd.grad but for its checks, which cost as much as
    the backward pass of a small network; the graph stays."""
    found: tuple[Tensor | None, ...] = _engine_run_backward(
        (z,), (w,), True, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return found


def again(
    objective: Objective,
    inputs: Any,
    moment: Moment,
    slopes: Sequence[Slopes],
    replaced: dict[int, Tensor] | None = None,
) -> Tensor:
    """Another forward pass, on copies of the buffers of a moment and with slopes that were drawn: (N, *out)"""
    model = objective.model
    others = {
        id(now): value.clone()
        for module, saved in moment.buffers
        for name, (_, value) in saved.items()
        if value is not None and (now := module._buffers.get(name)) is not None
    } | (replaced or {})
    with SameSlopes(slopes):
        return objective.outputs(inputs, call_with(model, others) if others else model)
