"""What a step may conclude: nothing from rounding, little from one strange batch, and never half of a step."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.metric import Diagonal, restored
from marquardt.parts.judging import ENOUGH, Outcome
from support.parts import flat
from support.steps import edit, state
from support.unchanged import same

CURVATURES = [mq.Dense(), mq.Gram(), mq.MatrixFree(), mq.Kronecker(), mq.Hessian(), mq.Auto(inertia=0.8)]
SCHEDULES = pytest.mark.parametrize(
    "schedule", [mq.GainRatio(), mq.TenFold(), mq.RelativeDecrease()], ids=lambda s: type(s).__name__
)


def name(part):
    return type(part).__name__


def noisy_line():
    x = torch.randn(64, 3)
    return x, x.sum(1, keepdim=True) + 0.1 * torch.randn(64, 1)


def least_squares_loss(x, y):
    X = torch.cat([x, torch.ones(len(x), 1)], 1).double()
    best = torch.linalg.lstsq(X, y.double()).solution
    return (X @ best - y.double()).square().mean().item()


def small_net(dtype=torch.float32):
    return nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 1)).to(dtype)


# λ and steps that rounding hides


@SCHEDULES
@pytest.mark.parametrize("curvature", CURVATURES, ids=name)
def test_a_converged_run_follows_when_the_data_move(curvature, schedule):
    """At a minimum all gains are rounding: λ must not climb to where θ + d = θ."""
    x, y = noisy_line()
    model = nn.Linear(3, 1)
    opt = mq.LM(model, "mse", curvature=curvature, schedule=schedule)
    for _ in range(60):
        opt.step(x, y)
    for _ in range(30):
        step = opt.step(x, y + 1)
    assert step.new_loss == pytest.approx(least_squares_loss(x, y + 1), rel=1e-2)


def test_batches_without_a_gradient_leave_lambda_alone():
    def batch(i):
        x = torch.randn(64, 5, generator=torch.Generator().manual_seed(i))
        return x, torch.sin(x.sum(1, keepdim=True))

    def after(dead):
        torch.manual_seed(0)
        model = small_net()
        opt = mq.LM(model, "mse")
        for i in range(20):
            opt.step(*batch(i))
        for _ in range(dead):
            opt.step(torch.zeros(64, 5), torch.zeros(64, 1))
        for i in range(100, 200):
            opt.step(*batch(i))
        x, y = batch(5000)
        return (model(x) - y).square().mean().item()

    assert after(dead=60) < 1.3 * after(dead=0)


@SCHEDULES
def test_lambda_after_steps_that_rounding_hides(schedule):
    """Down to λ₀ from above, on the same data a little further, and never up."""

    def after(lam, unjudged, same_data):
        return schedule.update(lam, Outcome(1.0, 1.0, math.nan, "rejected", same_data, True, unjudged))

    top, start = schedule.maximum, schedule.initial
    for same_data in (True, False):
        lam = top
        for k in range(200):
            smaller = after(lam, k + 1, same_data)
            assert start <= smaller < lam or lam == start
            lam = max(smaller, start)
        assert lam == pytest.approx(start)
    assert after(start, ENOUGH, same_data=True) < start
    assert after(start, ENOUGH + 1, same_data=True) == start
    assert after(start, 1, same_data=False) == start
    assert after(start / 100, 1, same_data=False) == start / 100
    assert start / 100 < after(start / 100, ENOUGH + 1, same_data=True) < start  # and back, in the end


def test_a_lambda_that_no_longer_matters_stays():
    good = {"loss": 1.0, "new_loss": 0.5, "gain": 1.0, "rule": "decrease", "same_data": True}
    schedule = mq.GainRatio()
    assert schedule.update(1e-9, Outcome(**good, share=1e-3)) < 1e-9
    assert schedule.update(1e-9, Outcome(**good, share=1e-7)) == 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("curvature", CURVATURES, ids=name)
def test_a_run_says_that_it_has_converged(curvature, dtype):
    x, y = (t.to(dtype) for t in noisy_line())
    opt = mq.LM(nn.Linear(3, 1).to(dtype), "mse", curvature=curvature)
    steps = [opt.step(x, y) for _ in range(80)]
    assert steps[-1].converged
    assert "converged" in steps[-1].note
    assert not any(s.converged for s in steps[:3])
    assert steps[-1].new_loss == pytest.approx(least_squares_loss(x, y), rel=1e-5)
    assert not math.isinf(steps[-1].gain)
    assert opt.lam >= 1e-12  # nor has λ wandered off meanwhile
    assert not opt.step(x, y + 1).converged
    assert min(opt.step(x, y + 1).new_loss for _ in range(20)) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_loss_of_zero_is_the_end(dtype):
    """Cross-entropy of classes that can be told apart rounds to 0, where the rows still have a gradient."""
    y = torch.arange(12) % 3
    x = 4 * torch.nn.functional.one_hot(y, 3).to(dtype) + 0.1 * torch.randn(12, 3, dtype=dtype)
    opt = mq.LM(nn.Linear(3, 3).to(dtype), "cross_entropy")
    steps = [opt.step(x, y) for _ in range(150)]
    assert steps[-1].new_loss < 1e-6
    assert steps[-1].converged
    assert 1e-3 < opt.lam <= opt.schedule.initial
    assert min(s.lam for s in steps[-50:]) > 1e-12


def test_a_model_in_bfloat16_converges():
    """What it computes with decides what its loss can tell apart, not what it returns."""

    class Coarse(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(3, 6), nn.Linear(6, 1)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.outer(self.inner(x).tanh()).float()

    x, y = noisy_line()
    opt = mq.LM(Coarse(), "mse")
    steps = [opt.step(x, y) for _ in range(200)]
    assert steps[-1].new_loss < 0.1 * steps[0].loss
    assert any(s.converged for s in steps)
    assert all(s.accepted or s.note for s in steps)


def test_nothing_converges_on_changing_batches():
    model = small_net()
    opt = mq.LM(model, "mse")
    for i in range(40):
        x = torch.randn(32, 5, generator=torch.Generator().manual_seed(i % 7))
        assert not opt.step(x, x[:, :1]).converged


@pytest.mark.parametrize("rows", [mq.Exact(), mq.Sampled(2)], ids=name)
@pytest.mark.parametrize("damping", [mq.Identity(), mq.MeanEigenvalue(), mq.LayerMeanEigenvalue(),
                                     mq.MaxDiagonal(), mq.FactoredMaxDiagonal()], ids=name)  # fmt: skip
@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), mq.Gram(chunk=3), mq.MatrixFree()], ids=str)
def test_slope_is_the_gradient_in_the_metric_of_the_damping(curvature, damping, rows):
    model = small_net(torch.float64)
    x, y = torch.randn(9, 5, dtype=torch.float64), torch.randn(9, 1, dtype=torch.float64)
    g = torch.autograd.grad((model(x) - y).square().mean(), list(model.parameters()))
    sizes = [p.numel() for p in model.parameters()]
    opt = mq.LM(model, "mse", curvature=curvature, damping=damping, rows=rows, schedule=mq.Constant(0.3))
    step = opt.step(x, y)
    assert step.accepted
    D = restored(state(opt)["D"]).positive().entries(sizes)
    g = torch.cat([t.flatten() for t in g])
    assert step.slope == pytest.approx((g.square() / D).sum().sqrt().item(), rel=1e-7)


@pytest.mark.parametrize("rows", [mq.Exact(), mq.Sampled(1)], ids=name)
@pytest.mark.parametrize("loss", [mq.losses.SquaredError(), mq.losses.Huber(), mq.losses.Poisson()], ids=name)
def test_rounding_of_a_loss(loss, rows):
    """Outputs that are right to their last digit give a loss that is right to a few roundings."""
    z = 3 * torch.randn(200, 2, dtype=torch.float64)
    y = (z + 0.01 * torch.randn_like(z)).abs()
    near = z * (1 + torch.finfo(torch.float32).eps * (2 * torch.rand_like(z) - 1))
    moved = (loss.value(near, y) - loss.value(z, y)).abs()
    drawn = rows.draw(loss, z.float(), y.float(), None, 0)
    sizes = loss.value(z.float(), y.float()).abs() + drawn.sensitivity(z.float())
    found = torch.finfo(torch.float32).eps * sizes.item()
    assert moved < found < 100 * moved + 1e-6 * loss.value(z, y).abs()


# Uphill moves on the same data


def test_the_loss_stays_with_the_best_after_convergence():
    x = torch.linspace(-2, 2, 40)[:, None]
    y = torch.sin(3 * x) + 0.1 * torch.randn(40, 1)
    opt = mq.LM(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)), "mse")
    losses = [opt.step(x, y).new_loss for _ in range(800)]
    assert max(losses[-100:]) < 1.02 * min(losses)
    assert losses[-1] < 1.01 * min(losses)


# Outliers


def batch(kind, seed, N=64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 5, generator=generator)
    z = torch.tanh(x @ torch.randn(5, 4, generator=torch.Generator().manual_seed(9)))
    if kind == "mse":
        return x, z[:, :2] + 0.1 * torch.randn(N, 2, generator=generator)
    return x, (z + 0.3 * torch.randn(N, 4, generator=generator)).argmax(1)


def run_with(kind, curvature, scale):
    """The test loss 50 good steps after a batch with one sample times `scale`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 2 if kind == "mse" else 4))
    opt = mq.LM(model, kind, curvature=curvature)
    for i in range(20):
        opt.step(*batch(kind, i))
    x, y = batch(kind, 50)
    x[3] *= scale
    bad = opt.step(x, y)
    for i in range(50):
        opt.step(*batch(kind, 100 + i))
    x, y = batch(kind, 777, 1000)
    loss = nn.functional.mse_loss if kind == "mse" else nn.functional.cross_entropy
    with torch.no_grad():
        return loss(model(x), y).item(), bad


CORRUPTED = [*CURVATURES[:4], CURVATURES[-1]]
BY_TURNS = [(curvature, ("mse", "cross_entropy")[i % 2]) for i, curvature in enumerate(CORRUPTED)]


@pytest.mark.parametrize(("curvature", "kind"), BY_TURNS, ids=[name(curvature) for curvature in CORRUPTED])
def test_one_corrupt_batch_does_not_end_the_run(curvature, kind):
    clean, _ = run_with(kind, curvature, 1.0)
    spoilt, bad = run_with(kind, curvature, 1e6)
    assert spoilt < 1.2 * clean
    assert bad.loss < 10 or "times those of late" in bad.note or not bad.accepted


def test_lambda_is_larger_in_doubt_of_a_batch():
    """As many times as its loss is unheard-of, and for this step alone."""
    opt = mq.LM(small_net(), "mse")
    for i in range(10):
        x, y = batch("mse", i)
        before = opt.step(x, y[:, :1])
    lam, unit = opt.lam, before.new_loss / state(opt)["expected"]
    x, y = batch("mse", 50)
    bad = opt.step(x, y[:, :1] + 1000)
    assert bad.lam == pytest.approx(lam * bad.loss / (10 * state(opt)["height"] * unit))
    assert bad.lam > 1000 * lam
    assert opt.lam == lam


@pytest.mark.parametrize("part", [mq.MeanEigenvalue(), mq.LayerMeanEigenvalue()], ids=name)
def test_what_a_damping_remembers(part):
    old = Diagonal(torch.tensor(1e12))
    now, nothing = Diagonal(torch.tensor(2.0)), Diagonal(torch.tensor(0.0))
    assert old.recent(now, part.memory).maximum(now).scale == 2 * part.memory
    assert old.recent(nothing, part.memory).scale == 1e12
    with pytest.raises(ValueError, match="memory"):
        type(part)(memory=0.5)


def test_an_outlier_leaves_the_running_average():
    """It used to decay by a fifth in each step: 10¹² in a hundred and more."""
    model = nn.Linear(3, 1)
    x, y = noisy_line()
    opt = mq.LM(model, "mse", curvature=mq.Dense(inertia=0.8), line_search=None)
    for _ in range(3):
        opt.step(x, y + torch.randn_like(y))
    past = state(opt)["past"]
    edit(opt, past={**past, "G": 1e12 * past["G"]})
    opt.step(x, y + torch.randn_like(y))
    assert state(opt)["past"]["G"].trace() < 20 * past["G"].trace()


# Steps that are interrupted


class Interrupt:
    """Raises KeyboardInterrupt at the k-th line that runs in the modules of a step."""

    def __init__(self, k):
        self.k = k

    def __call__(self, frame, event, arg):
        if frame.f_globals.get("__name__") not in ("marquardt.optimizer", "marquardt.step"):
            return None
        if event == "line":
            self.k -= 1
            if self.k == 0:
                raise KeyboardInterrupt
        return self


def test_an_interrupt_leaves_theta_and_state_together():
    x, y = noisy_line()
    torch.manual_seed(1)
    start = nn.Linear(3, 1).state_dict()

    def after(k):
        """Whether it was interrupted, and whether θ and the state are those of before"""
        model = nn.Linear(3, 1)
        model.load_state_dict(start)
        opt = mq.LM(model, "mse")
        opt.step(x, y)
        theta, before = flat(model), state(opt)
        previous = sys.gettrace()
        sys.settrace(Interrupt(k))
        try:
            opt.step(x, y)
            interrupted = False
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(previous)
        return interrupted, torch.equal(flat(model), theta), same(state(opt), before)

    k, interrupted, ends = 0, True, set()
    while interrupted:
        k += 1
        interrupted, same_theta, same_state = after(k)
        assert same_theta == same_state, f"interrupted at line {k}"
        ends.add(same_theta)
    assert ends == {True, False}
    assert k > 50
