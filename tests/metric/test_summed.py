"""Sums of D and a diagonal, but for what curvature/test_regularised.py says of them in steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.metric import Diagonal, Layered, Part
from marquardt.weights import Weights
from support.reference import error

pytestmark = pytest.mark.usefixtures("double")

SIZES = [12, 4]  # a weight of two groups, 2 × 3 each, and its bias
U, V, S = torch.rand(2, 2, 1).double() + 0.5, torch.rand(2, 1, 3).double() + 0.5, torch.tensor(0.7).double()
ELEMENTS = torch.rand(12).double().sub(0.2).clamp(min=0)
W = {
    "uniform": Weights([0.3, 0.3]),
    "only the bias": Weights([0.0, 0.3]),
    "elements": Weights([2.0, 0.3], {0: ELEMENTS}, gaps=True),
    "none": Weights([0.0, 0.0]),
}


@pytest.mark.parametrize("w", W.values(), ids=W)
def test_a_product_stays_one(w):
    """(√s·u + √w/ρ) ⊗ (√s·v + ρ·E/√w), w the largest and E the largest of every column, group by group."""
    D = Diagonal(S, [Part(None, U, V), Part(None, U)])
    raised, exact = D.plus(w, SIZES), D.sum(w, SIZES).entries(SIZES)
    columns, last = (torch.zeros(12) + w[0]).view(2, 2, 3).amax(1, keepdim=True), torch.as_tensor(w[1]).double()
    rho, most = (V.mean() / U.mean()).sqrt(), torch.maximum(columns.max(), last)
    root = most.sqrt().clamp(min=1e-300)
    left = S.sqrt() * U + most.sqrt() / rho
    weight, bias = left * (S.sqrt() * V + rho * columns / root), left * (S.sqrt() + rho * last / root)
    assert error(raised.entries(SIZES), torch.cat([weight.flatten(), bias.flatten()])) < 1e-14
    assert bool((raised.entries(SIZES) >= exact * (1 - 1e-14)).all())
    assert torch.equal(raised.parts[0].u, raised.parts[1].u)
    alone = D.with_scale(torch.zeros(())).plus(w, SIZES).entries(SIZES)
    above = w.by_columns([0, 1], 2, 2)
    assert error(alone, torch.cat([torch.zeros(size) + above[i] for i, size in enumerate(SIZES)])) < 1e-14


def test_one_number_stays_one():
    D = Diagonal(S)
    assert D.sum(Weights([0.3] * 2), SIZES).shape is None
    assert D.sum(Weights([0.3, 0.0]), SIZES).shape is not None
    assert D.sum(Weights([1.0, 1.0], {0: ELEMENTS}), SIZES).shape is not None


def test_a_sum_cannot_be_solved_with():
    lin = mq.linearize(nn.Linear(3, 2), "mse", torch.randn(5, 3), torch.randn(5, 2))
    D, sizes = mq.KroneckerMetric(every=1).update(None, mq.Dense().represent(lin)), lin.parameters.sizes
    total, v = D.sum(Weights([0.3] * 2), sizes), torch.randn(8)
    with pytest.raises(TypeError, match="above"):
        total.solve(torch.ones(8), sizes)
    assert isinstance(total.above, Layered)
    assert error(total.diagonal(sizes), D.diagonal(sizes) + 0.3) < 1e-14
    assert error(total.to(v.float()).times(v.float(), sizes), D.times(v, sizes) + 0.3 * v) < 1e-5
    assert error(D.plus(Weights([0.0] * 2), sizes).times(v, sizes), D.times(v, sizes)) < 1e-10
    assert D.above is D
