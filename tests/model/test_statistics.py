"""Running statistics of BatchNorm: found anew for other weights, and put back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.model.statistics import counting, estimated
from support.reference import error
from support.unchanged import changes, world

pytestmark = pytest.mark.usefixtures("double")


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Tanh(), nn.Linear(5, 2))


def test_layers_that_count():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False), nn.GroupNorm(1, 3))
    assert counting(model) == [model[0]]
    assert counting(model.eval()) == []


def test_statistics_of_these_batches_and_back():
    model, batches = network(), [torch.randn(7, 3) for _ in range(3)]
    model(batches[0])
    before, norm = world(model), model[1]
    means = torch.stack([model[0](x).mean(0) for x in batches])
    variances = torch.stack([model[0](x).var(0) for x in batches])
    with estimated(model, batches):
        assert error(norm.running_mean, means.mean(0)) < 1e-12
        assert error(norm.running_var, variances.mean(0)) < 1e-12
        assert changes(before, world(model)) == ["buffers"]
        assert norm.momentum == 0.1
    assert changes(before, world(model)) == []


def test_back_after_a_failure():
    class Failing(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    model, x = nn.Sequential(nn.BatchNorm1d(3), Failing()), torch.randn(4, 3)
    before = world(model)
    with pytest.raises(ZeroDivisionError), estimated(model, [x]):
        pass
    assert changes(before, world(model)) == []
    assert model[0].momentum == 0.1


def test_nothing_to_see():
    model = network()
    before = world(model)
    with estimated(model, []):
        assert changes(before, world(model)) == []


def test_averaged_weights_have_their_own():
    """Those of the last batch at the averaged weights; a step goes on from those of its own."""
    model = network()
    opt = mq.LM(model, "cross_entropy")
    for _ in range(4):
        x = torch.randn(16, 3)
        opt.step(x, torch.randint(2, (16,)))
    before = world(model, opt)
    with opt.averaged():
        assert error(model[1].running_mean, model[0](x).mean(0)) < 1e-12
    assert changes(before, world(model, opt)) == []
