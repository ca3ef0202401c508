"""What is minimised: the loss of the model's outputs, as a function of θ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layers.largest import Largest
from ..losses import Loss
from ..model.batch import Batch, forward, tensors
from ..model.decay import Penalty
from ..model.kernels import uncompiled
from ..model.parameters import Parameters
from ..model.precision import Autocast, full
from ..weights import Weights


class Totals(NamedTuple):
    """What is added up over the pieces of a batch, in Σ-units."""

    value: float  # Σwℓ
    normaliser: float  # Σ of the weights that the mean divides by
    lower_bound: float
    rounding: float  # of the value


class Level(NamedTuple):
    """The loss at the point where a step begins."""

    f: float
    low: float  # f never falls below it; −∞ if nothing is known
    rounding: float  # by how much f is uncertain
    normaliser: float
    decay: float = 0.0  # what weight decay has of f


class Objective:
    """f(θ) = scale · Σ wℓ(model(x; θ), y) + penalty: the model, the loss, the parameters that train, and weight decay.

    The model runs under the autocast that was on when this was made. `loss` is the user's, or what it is for outputs of
    the form that the model has returned, see `taken`; `given` is always the user's. The penalty is given in the units
    in which the loss is reported, and `decay` has it in those of f.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, params: Sequence[Tensor], weights: Weights = Weights(),
        towards: Tensor | None = None, master: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.model, self.loss, self.parameters = model, loss, Parameters(model, params, master)
        self.penalty = Penalty(self.parameters, weights, towards) if weights.any else None
        self.autocast = Autocast.of_caller(self.parameters.device)
        self.given = loss
        self.eager = False  # whether compiled code is called as it was before, see model.kernels.uncompiled
        self.pools = True  # whether there may be max-pools
        self.sums: Tensor | None = None  # what the loss must know of all data, see Loss.sums

    def called(self, inputs: Any, model: Callable[..., Any] | None = None) -> Any:
        """What the model returns, or one that was made of it, in float32 at least."""
        return full(self.raw(inputs, model))

    def raw(self, inputs: Any, model: Callable[..., Any] | None = None) -> Any:
        """What the model returns, as it is"""
        if self.parameters.shards is not None:
            self._gather(inputs)
        slow = self.pools and self.parameters.device.type == "cpu" and not torch.is_grad_enabled() and model is None
        called = self.model if model is None else model
        if self.eager and not (slow or self.autocast.enabled or torch.is_autocast_enabled(self.autocast.device)):
            return forward(called, inputs)
        with Largest() if slow else nullcontext(), self.autocast(), nullcontext() if self.eager else uncompiled():
            return forward(called, inputs)

    def _gather(self, inputs: Any) -> None:
        """All ranks are about to pass through the modules whose parameters are sharded: there none can be waited for in
        vain, so that what could fail on one of them alone is looked at here."""
        if (ranks := self.parameters.ranks).several:
            shapes = [(tuple(t.shape[1:]), t.dtype) for t in tensors(inputs)]
            ranks.same(f"a forward pass of inputs of the shapes and dtypes {shapes}, but for the samples")

    def taken(self, raw: Any, batch: Batch) -> tuple[Objective, Tensor]:
        """The objective of outputs of the form that the model has returned, and z: (N, *out)"""
        loss = self.given.bound(raw, batch.targets, batch.weight, self.sums)
        bound = self if loss is self.loss else copy(self)
        bound.loss = loss
        return bound, loss.joined(raw)

    def knowing(self, sums: Tensor) -> Objective:
        """The same, for parts of the data that these sums are over."""
        found = copy(self)
        found.sums = sums
        return found

    def outputs(self, inputs: Any, model: Callable[..., Any] | None = None) -> Tensor:
        """z, also of a model with other parameters: (N, *out)"""
        return self.loss.joined(self.called(inputs, model))

    def of(self, model: Callable[..., Any], inputs: Any) -> Tensor:
        return self.outputs(inputs, model)

    def value(self, z: Tensor, batch: Batch) -> Tensor:
        """Σwℓ: ()"""
        return self.loss.value(z, batch.targets, batch.weight)

    def slope(self, z: Tensor, batch: Batch) -> Tensor:
        """∂value/∂z: (N, *out)"""
        return self.loss.gradient(z, batch.targets, batch.weight)

    def totals(self, z: Tensor, batch: Batch, value: Tensor, rounding: Tensor) -> Tensor:
        """The numbers of Totals for one piece: (4,)"""
        y, w = batch.targets, batch.weight
        return torch.stack([value, self.loss.normaliser(z, y, w), self.loss.lower_bound(z, y, w), rounding])

    def decay(self, normaliser: float) -> Penalty | None:
        """Weight decay in the units of f; None if there is none"""
        return None if self.penalty is None else self.penalty.scaled(1 / self.loss.report(1.0, normaliser))

    def level(self, totals: Totals, decay: float = 0.0) -> Level:
        """`decay` is the value of the penalty in the units of f"""
        scale = self.loss.scale(totals.normaliser)
        value, low, rounding = totals.value * scale, totals.lower_bound * scale, totals.rounding * scale
        rounding += torch.finfo(self.parameters.dtype).eps * decay
        return Level(value + decay, low, rounding, totals.normaliser, decay)
