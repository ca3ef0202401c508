"""Buffers and the global generator advance as in one forward pass."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from support.modules import Counting, Scaling
from support.steps import DENSE_AND_GRAM, lm
from support.unchanged import same

pytestmark = pytest.mark.usefixtures("double")


class Rebinding(Counting):
    """The buffer is another tensor after every pass."""

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x


class Silent(Counting):
    """The buffer changes behind autograd's back, as codebooks are often updated."""

    def forward(self, x: Tensor) -> Tensor:
        self.count.data += 1
        return x


class Running(Counting):
    """A running mean of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return super().forward(x)


@pytest.mark.parametrize("layer", [Counting, Rebinding, Silent, Running])
@pytest.mark.parametrize("scaled", [False, True], ids=["by rule", "own parameter"])
@DENSE_AND_GRAM
@pytest.mark.parametrize("line_search", [None, mq.Grid()], ids=["no search", "grid"])
def test_buffers_advance_once_with_every_accepted_step(layer, scaled, curvature, line_search):
    model = nn.Sequential(nn.Linear(2, 4), layer(), Scaling() if scaled else nn.Tanh(), nn.Linear(4, 3))
    x, y = torch.randn(6, 2), torch.randn(6, 3)
    opt = lm(model, curvature=curvature, line_search=line_search, schedule=mq.Constant(1.0), attempts=2)
    once = copy.deepcopy(model)
    accepted = 0
    for lr in (1.0, 1e3, 1.0, 1e3, 0.5):
        opt.param_groups[0]["lr"] = lr
        once.load_state_dict(model.state_dict())
        step = opt.step(x, y)
        assert step.accepted == (lr <= 1 or line_search is not None)
        accepted += step.accepted
        assert model[1].count.item() == accepted
        if step.accepted:
            once(x)
        assert {k: b for k, b in model.named_buffers() if not same(b, once.get_buffer(k))} == {}


@pytest.mark.parametrize("layer", [nn.Dropout(0.4), nn.RReLU()], ids=["dropout", "rrelu"])
@pytest.mark.parametrize("rule", ["decrease", "search", "rejected"])
@DENSE_AND_GRAM
def test_generator_advances_as_one_forward(layer, rule, curvature):
    model = nn.Sequential(nn.Linear(2, 4), layer, nn.Linear(4, 3))
    x, y = torch.randn(6, 2), torch.randn(6, 3)
    search = mq.Grid() if rule == "search" else None
    opt = lm(model, curvature=curvature, lr=1.0 if rule == "decrease" else 1e3, line_search=search, attempts=2)
    for _ in range(2):  # with and without the proof of the rules
        torch.manual_seed(7)
        model(x)
        after = torch.get_rng_state()
        torch.manual_seed(7)
        assert opt.step(x, y).rule == rule
        assert torch.equal(torch.get_rng_state(), after)
