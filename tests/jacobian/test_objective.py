"""What is minimised, in Σ-units and as a mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from marquardt.jacobian.objective import Level, Objective, Totals
from marquardt.losses import resolve
from marquardt.model.batch import Batch
from marquardt.weights import Weights
from support.reference import error

pytestmark = pytest.mark.usefixtures("double")


def made(loss: object = "mse") -> tuple[Objective, Batch]:
    model = nn.Linear(3, 2)
    batch = Batch(torch.randn(5, 3), torch.randn(5, 2), torch.rand(5))
    return Objective(model, resolve(loss), list(model.parameters())), batch


def test_value_and_slope():
    """With weights f is the weighted mean of the squares, each of the two outputs counting."""
    objective, batch = made()
    z = objective.outputs(batch.inputs).detach().requires_grad_()
    loss, data = objective.loss, (z, batch.targets, batch.weight)
    found = loss.value(*data), loss.normaliser(*data), loss.lower_bound(*data)
    f = objective.level(Totals(*(t.item() for t in found), rounding=0.25)).f
    squares = (z - batch.targets).square() * batch.weight[:, None]
    assert f == pytest.approx((squares.sum() / (2 * batch.weight.sum())).item(), rel=1e-12)
    (slope,) = torch.autograd.grad(objective.value(z, batch), z)
    assert error(objective.slope(z.detach(), batch), slope) < 1e-12


def test_level_is_the_totals_in_the_units_of_f():
    objective, _ = made()
    scale = objective.loss.scale(4.0)
    assert objective.level(Totals(8.0, 4.0, 2.0, 0.1)) == Level(8 * scale, 2 * scale, 0.1 * scale, 4.0)
    assert scale != 1
    summed, _ = made(nn.MSELoss(reduction="sum"))
    assert summed.level(Totals(8.0, 4.0, 2.0, 0.1)).f == 8 * summed.loss.scale(1.0)


def test_weight_decay_is_in_the_units_of_what_is_reported():
    """f is ½Σr² here, reported as the mean of r²: w in the units of the mean is w·(½Σ)/(1/N·Σ) in those of f."""
    model = nn.Linear(3, 2)
    loss = replace(resolve("mse"), reduction="sum", factor=0.5, reported=resolve("mse"))
    objective = Objective(model, loss, list(model.parameters()), Weights([0.3, 0.0]))
    decay = objective.decay(10.0)
    assert decay is not None
    assert decay.weights.numbers == pytest.approx((0.3 * 0.5 * 10, 0.0))
    level = objective.level(Totals(8.0, 10.0, 2.0, 0.1), 3.0)
    assert (level.f, level.low, level.decay) == (7.0, 1.0, 3.0)
    assert level.rounding > 0.05
    assert Objective(model, loss, list(model.parameters()), Weights([0.0, 0.0])).decay(10.0) is None
