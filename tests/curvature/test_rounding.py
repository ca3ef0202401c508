"""Curvature that is nothing but rounding moves nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.jacobian import statistics
from support.modules import PLAIN, Attention, Fn
from support.reference import error
from support.steps import theta

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), mq.MatrixFree()], ids=lambda c: type(c).__name__)
def test_the_bias_of_the_keys_stays_where_it_is(curvature):
    """It has no influence on the outputs; those of queries and values, in the same parameter, have."""
    model, x, y = Attention(), torch.randn(12, 5, 4), torch.randint(3, (12,))
    lm = mq.LM(model, "cross_entropy", curvature=curvature, damping=mq.MaxDiagonal(floor=0.0))
    for _ in range(6):
        lm.step(x, y)
    assert model.attention.in_proj_bias[4:8].abs().max() < 1e3


@pytest.mark.parametrize("damping", [mq.MaxDiagonal(floor=0.0), mq.FactoredMaxDiagonal()], ids=["entries", "factors"])
@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), mq.Kronecker()], ids=lambda c: type(c).__name__)
def test_a_saturated_unit_stays_where_it_is(curvature, damping):
    """Of tanh′ = 1 − tanh² nothing but rounding is left."""
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].bias[0] = 18.4
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    assert 0 < statistics.diagonal(mq.linearize(model, "mse", x, y))[8] < 1e-28
    mq.LM(model, "mse", curvature=curvature, damping=damping, **PLAIN).step(x, y)
    assert model[0].weight[0].norm() < 1e3
    assert (model[0].bias[0] - 18.4).abs() < 1e3


def test_a_layer_without_influence_stays_where_it_is():
    faint, plain = nn.Linear(2, 1), nn.Linear(2, 1)
    model = Fn(lambda x, f, g: g(x) + 1e-20 * f(x), faint, plain)
    mq.LM(model, "mse", damping=mq.LayerMeanEigenvalue(), **PLAIN).step(torch.randn(8, 2), torch.randn(8, 1))
    assert theta(faint).norm() < 1e3


def test_inputs_of_any_size_keep_their_own_curvature():
    """What is small because of its input is no rounding: diag G is right to its last digit."""
    model, x, y = nn.Linear(2, 3), torch.randn(8, 2) * torch.tensor([1.0, 1e-12]), torch.randn(8, 3)
    lin = mq.linearize(model, "mse", x, y)
    D = mq.MaxDiagonal(floor=0.0).update(None, mq.Dense().represent(lin))
    assert error(D.entries(lin.parameters.sizes)[1:6:2], statistics.diagonal(lin)[1:6:2]) < 1e-12


@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), mq.MatrixFree()], ids=lambda c: type(c).__name__)
def test_a_gradient_without_any_curvature_is_a_gradient_step(curvature):
    """The samples that Fraction picks have no weight."""
    model, x, y, rows = nn.Linear(2, 1), torch.randn(6, 2), torch.randn(6, 1), mq.Fraction(0.5)
    weight = torch.ones(6)
    weight[rows.pick(6, 0)] = 0
    g, before = mq.linearize(model, "mse", x, y, weight).gradient, theta(model)
    parts = {**PLAIN, "schedule": mq.Constant(4.0), "damping": mq.MeanEigenvalue()}
    mq.LM(model, "mse", curvature=curvature, rows=rows, **parts).step(x, y, weight)
    assert error(theta(model) - before, -g / 4) < 1e-10
