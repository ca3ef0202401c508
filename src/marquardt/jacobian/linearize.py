"""The linearisation of one batch, to look at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ..losses import resolve
from ..model.batch import Batch
from ..model.checks import trainable
from ..model.decay import WeightDecay
from ..model.parameters import Parameters
from ..weights import Weights
from .linearization import Linearization, Needs
from .objective import Exact, Objective, Rows


def linearize(
    model: nn.Module,  # in the mode in which it is trained
    loss: Any,  # as `mq.LM` takes it
    x: Any,  # inputs, as `LM.step` takes them
    y: Any = None,  # targets
    weight: Tensor | None = None,  # of the samples
    *,
    rows: Rows | None = None,  # which are formed; None for all
    params: Iterable[Tensor] | None = None,  # None for all that train
    chunk: int | None = None,  # samples that are linearised at once; None for all
    needs: Needs | None = None,  # of a representation, in the place of `chunk`
    weight_decay: float | WeightDecay = 0.0,  # part of f and g; G is that of the data
) -> Linearization:
    """The linearisation of one batch, to look at: `mq.Dense().represent(linearize(...))` is its Gauss-Newton matrix.
    The model runs under the torch.autocast in which this is called; to look at what comes of it, leave that.

    Returns:
        f, g and the rows of G, while the model stays as it is.

    >>> paths = mq.linearize(model, "mse", x, y).paths
    """
    rule, chosen = WeightDecay.of(weight_decay), trainable(model, params)
    spared = rule.spared(model, parameters := Parameters(model, chosen))
    weights = Weights([0.0 if free else rule.w for free in spared])
    objective = Objective(model, resolve(loss), chosen, weights, rule.anchor(parameters, spared))
    batches, ranks = [Batch(x, y, weight)], objective.parameters.ranks
    return Linearization(objective, batches, rows or Exact(), needs or Needs(chunk), ranks=ranks)
