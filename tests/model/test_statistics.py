"""Running statistics of BatchNorm: found anew for other weights, and put back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from marquardt.model.statistics import NOTHING, Seen, counting, estimated, tracking
from support.reference import error
from support.unchanged import changes, world

pytestmark = pytest.mark.usefixtures("double")


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Tanh(), nn.Linear(5, 2))


def test_layers_that_count():
    tracks = nn.InstanceNorm1d(3, track_running_stats=True)
    others = nn.BatchNorm1d(3, track_running_stats=False), nn.InstanceNorm1d(3), nn.GroupNorm(1, 3)
    model = nn.Sequential(nn.BatchNorm1d(3), tracks, *others)
    assert counting(model) == tracking(model) == [model[0], tracks]
    assert counting(model.eval()) == []
    assert tracking(model) == [model[0], tracks]


def seen(model: nn.Module, *inputs: Tensor) -> Seen:
    return Seen(inputs, tuple(m for m in model.modules() if m.training))


def test_statistics_of_these_batches_and_back():
    model, batches = network(), [torch.randn(7, 3) for _ in range(3)]
    model(batches[0])
    before, norm = world(model), model[1]
    means = torch.stack([model[0](x).mean(0) for x in batches])
    variances = torch.stack([model[0](x).var(0) for x in batches])
    with estimated(model, seen(model, *batches)):
        assert error(norm.running_mean, means.mean(0)) < 1e-12
        assert error(norm.running_var, variances.mean(0)) < 1e-12
        assert changes(before, world(model)) == ["buffers"]
        assert norm.momentum == 0.1
    assert changes(before, world(model)) == []


def test_instance_norm_has_the_mean_of_all_batches_too():
    """Which takes a momentum of None for 0."""
    model = nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True, momentum=0.3), nn.Flatten(), nn.Linear(10, 1))
    batches = [torch.randn(4, 2, 5) for _ in range(3)]
    before = world(model)
    with estimated(model, seen(model, *batches)):
        assert error(model[0].running_mean, torch.cat(batches).mean((0, 2))) < 1e-12
        assert model[0].momentum == 0.3
    assert changes(before, world(model)) == []


def test_back_after_a_failure():
    """Other buffers too, as of a model that counts and fails in its second batch."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner = nn.BatchNorm1d(3), nn.Linear(3, 1)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.inner(self.norm(x))

    model, x, wrong = Counted(), torch.randn(4, 3), torch.randn(4, 5)
    before = world(model)
    with pytest.raises(RuntimeError), estimated(model, seen(model, x, wrong)):
        pass
    assert changes(before, world(model)) == []
    assert model.norm.momentum == 0.1


def test_what_is_changed_within_is_taken_back():
    """Nothing is without inputs, but as by torch.optim.swa_utils.update_bn."""
    model = network()
    before = world(model)
    with estimated(model, NOTHING):
        assert changes(before, world(model)) == []
        torch.optim.swa_utils.update_bn([torch.randn(9, 3)], model)
        assert changes(before, world(model))[0] == "buffers"
    assert "buffers" not in changes(before, world(model))
