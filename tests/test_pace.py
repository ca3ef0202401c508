"""Steps against the clock: predictions, their correction, and the warning of a long step; with a clock of our own."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import marquardt as mq
from marquardt import optimizer, pace
from marquardt.curvature.cost import Plan
from marquardt.pace import LONG, Pace
from marquardt.step import Step
from support.unchanged import changes, world

CPU = torch.device("cpu")
SLOW = Plan((), kind="Gram", name="Gram(chunk=None)", why="many rows", seconds=8.0, work=123.0, faster="try fewer rows")
QUICK = Plan((), kind="Gram", name="Gram(chunk=None)", why="few rows", seconds=0.5, proof=1.5)
STEP = Step(2.0, 1.0, True, "decrease", 1.0, 1.0, 1.0)


class Clock:
    """Stands still unless it is told to go on."""

    def __init__(self) -> None:
        self.now, self.tick = 100.0, 0.0

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    for module in (optimizer, pace):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=found.perf_counter))
    monkeypatch.setattr(pace, "probe", lambda: 2.0)
    monkeypatch.setattr(pace, "SLOWEST", math.inf)  # so that it is asked for
    return found


def timed(p: Pace, clock: Clock, plan: Plan | None, took: float, proven: bool = True) -> tuple[float, str]:
    p.expect(plan, CPU, proven)
    step = p.timed(STEP, took)
    return step.seconds, step.note


# ---- Pace by itself


@pytest.mark.parametrize(
    ("device", "seconds", "asked"), [("cpu", 0.01, False), ("cpu", 1.0, True), ("cuda", 1.0, False)]
)
def test_how_fast_the_machine_is_where_that_can_announce_something(monkeypatch, device, seconds, asked):
    """The probe, of a CPU, takes longer than the first step of a small model."""
    probed = []
    monkeypatch.setattr(pace, "probe", lambda: probed.append(True) or 2.0)
    p = Pace()
    p.expect(Plan((), kind="Dense", seconds=seconds), torch.device(device), True)
    assert bool(probed) == asked
    assert p.predicted == seconds * (2 if asked else 1)


def test_half_of_the_way(clock):
    """The first prediction is by the probe; then the geometric mean of what was thought and what was found."""
    p = Pace()
    assert p.words(QUICK) == "a step takes about 500 ms"
    assert timed(p, clock, QUICK, took=4.0) == (4.0, "took 4 s, predicted 1 s")
    assert p.predicted == 2.0 * 0.5
    assert p.speed == pytest.approx(math.sqrt(2.0 * 8.0))
    assert p.words(QUICK) == "a step takes about 2 s"
    for _ in range(40):
        timed(p, clock, QUICK, took=0.25)
    assert p.words(QUICK) == "a step takes about 250 ms"


def test_what_is_not_proven_takes_longer(clock):
    """And is no sign of a slow machine."""
    p = Pace()
    timed(p, clock, QUICK, took=2.0 * (0.5 + 1.5), proven=False)
    assert p.predicted == 2.0 * (0.5 + 1.5)
    assert p.speed == pytest.approx(2.0)


def test_warned_once_for_each_plan(clock):
    p = Pace()
    with pytest.warns(UserWarning, match=r"about 16 s: Gram.*many rows; about 123 gradients.*; try fewer rows$"):
        timed(p, clock, SLOW, took=16.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        timed(p, clock, SLOW, took=16.0)
        assert timed(Pace(), clock, QUICK, took=1.0) == (1.0, "")  # which is quick
        assert timed(p, clock, QUICK, took=LONG + 1)[1].startswith("took 4 s, predicted")  # nobody was told before
    with pytest.warns(UserWarning, match="other rows"):
        timed(p, clock, Plan((), name="Dense()", why="other rows", seconds=9.0), took=18.0)


def test_probe():
    assert 0.1 <= pace.probe() <= 10
    assert pace.probe() == pace.probe()


# ---- in a step


def problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(12, 3), torch.randint(2, (12,))


@pytest.fixture
def slow(monkeypatch):
    """A machine on which every plan takes long."""
    monkeypatch.setattr(pace, "probe", lambda: 1e6)
    monkeypatch.setattr(pace, "SLOWEST", 1e6)


@pytest.mark.parametrize(
    "curvature", [mq.Auto(), mq.Dense(), mq.Gram(), mq.MatrixFree()], ids=lambda c: type(c).__name__
)
def test_every_step_but_the_first_is_proven(clock, curvature):
    """MatrixFree forms no rows, and proves none: it is predicted all the same."""
    model, x, y = problem()
    opt = mq.LM(model, "cross_entropy", curvature=curvature)
    for t in range(3):
        before = opt._pace.speed
        clock.tick = 0.01
        step = opt.step(x + t, y)
        plan = opt._state.plan
        assert step.seconds == pytest.approx(0.01)
        assert "predicted" not in step.note
        assert step.predicted == pytest.approx((before or 2.0) * (plan.seconds + (plan.proof if t == 0 else 0)))


def test_no_prediction_no_number(clock):
    model, x, y = problem()
    step = mq.LM(model, "cross_entropy", curvature=mq.Kronecker()).step(x, y)
    assert math.isnan(step.predicted)
    assert step.seconds == 0


def test_a_long_step_is_announced(clock, slow):
    model, x, y = problem()
    opt = mq.LM(model, "cross_entropy", curvature=mq.Dense())
    clock.tick = 1e5
    before = world(model, opt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="a step will take about"):
            opt.step(x, y)
    assert changes(before, world(model, opt)) == []
    opt = mq.LM(model, "cross_entropy", curvature=mq.Dense())
    with pytest.warns(UserWarning, match=r"a step will take about .* s: Dense.*; curvature=mq\.Auto\(\)"):
        step = opt.step(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step(x, y)
    assert "took 100,000 s, predicted" in step.note


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("call", [lambda opt, x, y: opt.step(x, y), lambda opt, x, y: opt.step_over([(x, y)])])
def test_the_warning_points_at_the_call(slow, call, scheduled):
    """Whatever torch wraps `step` in."""
    model, x, y = problem()
    opt = mq.LM(model, "cross_entropy")
    if scheduled:
        StepLR(opt, 1)
    with pytest.warns(UserWarning, match="a step will take about") as seen:
        call(opt, x, y)
    assert (seen[0].filename, seen[0].lineno) == (__file__, call.__code__.co_firstlineno)


def test_predicted_before_the_work_begins(clock, monkeypatch):
    model, x, y = problem()
    opt = mq.LM(model, "cross_entropy")
    seen = []

    def boom(*_: object) -> None:
        seen.append(opt._pace.predicted)
        raise ArithmeticError("within the step")

    monkeypatch.setattr(optimizer, "take", boom)
    with pytest.raises(ArithmeticError):
        opt.step(x, y)
    assert seen[0] == opt._pace.predicted > 0


def test_times_never_enter_the_choice(monkeypatch):
    """Machines of very different speed go the same way."""
    runs = []
    for speed in (1e-6, 1.0, 0.99e3):
        monkeypatch.setattr(pace, "probe", lambda speed=speed: speed)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 60))
        opt = mq.LM(model, "cross_entropy")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(4):
                opt.step(torch.randn(32, 3), torch.randint(60, (32,)))
        plan = opt._state.plan
        runs.append((plan.kind, plan.rows, plan.work, [p.tolist() for p in model.parameters()]))
    assert runs[0] == runs[1] == runs[2]


def test_neither_saved_nor_compared(clock):
    model, x, y = problem()
    opt = mq.LM(model, "cross_entropy")
    step = opt.step(x, y)
    assert step == type(step)(**{**vars(step), "seconds": 7.0, "predicted": 8.0})
    other = mq.LM(model, "cross_entropy")
    other.load_state_dict(opt.state_dict())
    assert other._pace.speed is None
