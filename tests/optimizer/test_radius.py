"""The radius: how far a step may go, and what follows from a step that was cut back."""

from __future__ import annotations

import pytest
import torch

import marquardt as mq
from support import reference
from support.reference import error
from support.steps import lm, overshooting, problem, theta
from support.unchanged import changes, refused, world

pytestmark = pytest.mark.usefixtures("double")

R = 0.05


@pytest.mark.parametrize("lr", [1.0, 0.5])
def test_the_step_has_the_direction_and_this_length(lr):
    model, x, y = problem()
    exact, before = reference.quadratic(model, "mse", x, y), theta(model)
    step = lm(model, lr=lr, radius=R, schedule=mq.Constant(0.1)).step(x, y)
    moved = theta(model) - before
    expected = exact.step(0.1)
    assert error(moved, R * expected / expected.norm()) < 1e-10
    predicted = -exact.g @ moved - 0.5 * moved @ exact.G @ moved
    assert step.gain == pytest.approx((step.loss - step.new_loss) / float(predicted), rel=1e-8)


def test_a_step_within_is_left_alone():
    model, x, y = problem()
    twin, _, _ = problem()
    twin.load_state_dict(model.state_dict())
    assert lm(model, radius=1e3).step(x, y) == lm(twin).step(x, y)
    assert torch.equal(theta(model), theta(twin))


def test_momentum_is_cut_too():
    model, x, y = problem()
    opt = lm(model, radius=R, momentum=mq.AdaptiveMomentum(dP=10.0), schedule=mq.Constant(0.1))
    for _ in range(3):
        before = theta(model)
        assert opt.step(x, y).accepted
        assert (theta(model) - before).norm() <= R * (1 + 1e-10)


@pytest.mark.parametrize("search", [mq.Grid(), mq.Backtracking(), mq.Bracket(), mq.Grid(along_step=True)], ids=str)
def test_line_searches_stay_within(search):
    """Their rates reach to 9 times the step, and the loss falls all along the line: the end of the radius is best."""
    model, opt, x, y = overshooting(lr=1.0, radius=1e-3, acceptance=Refuses(), line_search=search)
    before = theta(model)
    step = opt.step(x, y)
    assert step.rule == "search"
    assert 0 < (theta(model) - before).norm() <= 1e-3 * (1 + 1e-10)


class Refuses:
    """Leaves every step to the line search."""

    looks_back = False

    def judge(self, trial):
        return None


SCHEDULES = [mq.Balanced(), mq.GainRatio(floor=1e-20), mq.TenFold(), mq.RelativeDecrease()]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
def test_lambda_stays_while_steps_are_cut(schedule):
    """A good step that was cut says nothing for a smaller λ, whose step would be longer, nor against this one."""
    model, x, y = problem()
    opt = lm(model, radius=1e-3, schedule=schedule)
    lams = [opt.step(x, y).lam for _ in range(6)]
    assert lams == [schedule.initial] * 6
    freed = lm(model, radius=1e3, schedule=schedule)
    assert freed.step(x, y).accepted
    if not isinstance(schedule, mq.RelativeDecrease):
        assert freed.lam < schedule.initial


def test_lambda_stays_on_changing_batches():
    model, x, y = problem(N=48)
    opt = mq.LM(model, "mse", radius=1e-3)
    for t in range(6):
        step = opt.step(x[8 * t : 8 * t + 8], y[8 * t : 8 * t + 8])
        assert step.accepted
        assert opt.lam >= step.lam


def test_short_steps_are_no_convergence():
    """Each of them gains less than rounding."""
    model, x, y = problem()
    opt = lm(model, radius=1e-15, schedule=mq.Constant(1.0))
    assert not any(opt.step(x, y).converged for _ in range(20))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), "1", True])
def test_a_bad_radius_between_steps(bad):
    model, x, y = problem()
    opt = lm(model, radius=R)
    opt.step(x, y)
    opt.radius = bad
    before = world(model, opt)
    with refused(f"radius={bad!r}", "above 0"):
        opt.step(x, y)
    assert changes(before, world(model, opt)) == []
