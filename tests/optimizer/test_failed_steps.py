"""Steps that fail: trials that are not finite, factorisations that break down, losses that overflow."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.curvature.direct import FactorizationError
from support.reference import error
from support.steps import EVERY_CURVATURE, lm, problem, theta
from support.unchanged import refused

pytestmark = pytest.mark.usefixtures("double")


class Explosive(nn.Module):
    """e^θ, or e^2θ/(1 + e^θ): a long step overflows to ∞, or to ∞/∞."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.theta = kind, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        e = (self.theta * x).exp()
        return e if self.kind == "inf" else e * e / (1 + e)


RAISING = pytest.mark.parametrize("schedule", [mq.TenFold, mq.GainRatio, mq.RelativeDecrease])


@pytest.mark.parametrize("kind", ["inf", "nan"])
@RAISING
@pytest.mark.parametrize("acceptance", [mq.Decrease(), mq.Uphill()], ids=str)
def test_non_finite_trial_is_a_failed_step(kind, schedule, acceptance):
    model, x, y = Explosive(kind), torch.ones(3, 1), torch.full((3, 1), 1e5)
    opt = lm(model, schedule=schedule(1e-6), acceptance=acceptance)
    before = theta(model)
    step = opt.step(x, y)
    assert (step.accepted, step.rule, step.new_loss) == (False, "rejected", step.loss)
    assert math.isfinite(step.loss)
    assert torch.equal(theta(model), before)
    assert kind in step.note
    assert opt.lam > step.lam


@pytest.mark.parametrize("kind", ["inf", "nan"])
@pytest.mark.parametrize("line_search", [mq.Grid(), mq.Backtracking(trials=20)], ids=str)
def test_search_rescues_a_non_finite_trial(kind, line_search):
    model, x, y = Explosive(kind), torch.ones(3, 1), torch.full((3, 1), 1e4)
    step = lm(model, schedule=mq.TenFold(1e-6), line_search=line_search).step(x, y)
    assert (step.accepted, step.rule) == (True, "search")
    assert step.new_loss < step.loss
    assert kind in step.note
    assert theta(model).isfinite().all()


def test_non_finite_trials_end_in_a_small_step():
    """Attempts with larger λ reach a finite loss."""
    model, x, y = Explosive("inf"), torch.ones(3, 1), torch.full((3, 1), 1e4)
    step = lm(model, schedule=mq.TenFold(1e-6), attempts=30).step(x, y)
    assert step.accepted
    assert step.new_loss < step.loss
    assert step.note.count("inf") >= 2


def fail_to_factor(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    from marquardt.curvature import direct as dense
    from marquardt.curvature import direct as gram

    left, solve = [times], dense.spd_solve

    def spd_solve(H: Tensor, A: Tensor, b: Tensor, *rest: Any) -> Tensor:
        if left[0]:
            left[0] -= 1
            raise FactorizationError("not today")
        return solve(H, A, b, *rest)

    monkeypatch.setattr(dense, "spd_solve", spd_solve)
    monkeypatch.setattr(gram, "spd_solve", spd_solve)


@RAISING
@EVERY_CURVATURE
def test_failed_factorisation_is_a_failed_step(monkeypatch, schedule, curvature):
    model, x, y = problem()
    opt = lm(model, schedule=schedule(1.0), curvature=curvature)
    before = theta(model)
    fail_to_factor(monkeypatch, 1)
    step = opt.step(x, y)
    assert (step.accepted, step.rule, step.new_loss) == (False, "rejected", step.loss)
    assert torch.equal(theta(model), before)
    assert "not today" in step.note
    assert opt.lam > step.lam
    assert opt.step(x, y).accepted


def test_failed_factorisation_is_attempted_again(monkeypatch):
    model, x, y = problem()
    twin = copy.deepcopy(model)
    fail_to_factor(monkeypatch, 2)
    step = lm(model, schedule=mq.TenFold(1e-3), attempts=3).step(x, y)
    lm(twin, schedule=mq.TenFold(0.1)).step(x, y)
    assert step.accepted
    assert step.lam == pytest.approx(0.1)
    assert step.note.count("not today") == 2
    assert error(theta(model), theta(twin)) < 1e-9


def test_a_gradient_that_is_not_finite_is_named():
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.w.sqrt() + 0 * x[:, :1]

    _, x, y = problem()
    with pytest.raises(ValueError, match="gradient of parameter 'w'"):
        lm(Root()).step(x, y)


@pytest.mark.parametrize(
    ("outputs", "targets", "says"),
    [
        (1.0, 1e30, ["largest target is 1e+30", "scale the data", "float64"]),
        (1e30, 1.0, ["largest output is 1e+30", "scale the data", "float64"]),
        (1e39, 1.0, ["it is the model that overflows"]),
    ],
    ids=["targets", "outputs", "model"],
)
def test_what_overflows(outputs, targets, says):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.w * outputs

    x = torch.ones(4, 1)
    with refused("the loss is inf", *says):
        lm(Scaled().float(), "mse").step(x.float(), (targets * x).float())
    if outputs < 1e38:
        with refused("the loss is inf", "scale the data"):
            lm(Scaled().double(), "mse").step(x * 1e200, targets * x * 1e200)
