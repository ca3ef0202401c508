"""LM.step against the algorithm written out, and what it reports."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import marquardt as mq
from support import reference
from support.by_hand import RECIPES, ByHand
from support.cases import default_dtype, mlp, sample_weights
from support.reference import error
from support.steps import (
    CUDA,
    DENSE_AND_GRAM,
    EVERY_CURVATURE,
    LOSSES,
    PLAIN_TYPES,
    linear_problem,
    lm,
    objective,
    overshooting,
    problem,
    theta,
)

pytestmark = pytest.mark.usefixtures("double")


# ---- the algorithm, written out


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("loss", ["mse", "cross_entropy", "huber"])
@EVERY_CURVATURE
def test_steps_equal_the_algorithm(recipe, loss, curvature):
    model, x, y = problem(loss)
    parts, options = RECIPES[recipe]
    hand = ByHand(copy.deepcopy(model), loss, **options)
    opt = lm(model, loss, curvature=curvature, **parts)
    accepted = []
    for _ in range(6):
        assert opt.lam == pytest.approx(hand.lam)
        lam = opt.lam
        step, (f, f_new, success, gain) = opt.step(x, y), hand.step(x, y)
        assert step.loss == pytest.approx(f, rel=1e-9)
        assert step.accepted == success
        assert step.new_loss == pytest.approx(f_new if success else f, rel=1e-8)
        assert (step.lam, step.lr) == (lam, hand.lr)
        assert step.gain == pytest.approx(gain, rel=1e-5)
        assert error(theta(model), theta(hand.model)) < 1e-8
        accepted.append(success)
    assert any(accepted)


@pytest.mark.parametrize("recipe", RECIPES)
def test_changing_batches_equal_the_algorithm(recipe):
    model, x, y = problem(N=18)
    parts, options = RECIPES[recipe]
    hand, opt = ByHand(copy.deepcopy(model), "mse", **options), lm(model, **parts)
    for i in range(0, 18, 6):
        weight = sample_weights(6)
        opt.step(x[i : i + 6], y[i : i + 6], weight)
        hand.step(x[i : i + 6], y[i : i + 6], weight)
        assert error(theta(model), theta(hand.model)) < 1e-9


# ---- what a step reports


@given(
    seed=st.integers(0, 2**20),
    log_lam=st.floats(-8, 3),
    lr=st.sampled_from([0.3, 1.0, 3.0]),
    loss=st.sampled_from(LOSSES),
    line_search=st.sampled_from([None, mq.Grid(), mq.Backtracking()]),
)
def test_accepted_means_lower(seed, log_lam, lr, loss, line_search):
    with default_dtype(torch.float64):
        torch.manual_seed(seed)
        model, x, y = problem(loss)
        before, f = theta(model), objective(model, loss, x, y)
        step = lm(model, loss, lr=lr, schedule=mq.Constant(10**log_lam), line_search=line_search).step(x, y)
        assert step.loss == pytest.approx(f, rel=1e-12)
        assert step.new_loss == pytest.approx(objective(model, loss, x, y), rel=1e-9)
        if step.accepted:
            assert step.new_loss < step.loss
            assert step.rule in ("decrease", "search")
        else:
            assert step.new_loss == step.loss
            assert step.rule == "rejected"
            assert torch.equal(theta(model), before)


def test_rule_decrease():
    _, opt, x, y = overshooting(lr=0.5)
    step = opt.step(x, y)
    assert (step.rule, step.accepted, step.note) == ("decrease", True, "")
    assert step.new_loss == pytest.approx(0.25 * step.loss)
    assert step.gain == pytest.approx(1.0)


def test_rule_rejected():
    model, opt, x, y = overshooting()
    before = theta(model)
    step = opt.step(x, y)
    assert (step.rule, step.accepted) == ("rejected", False)
    assert step.new_loss == step.loss
    assert torch.equal(theta(model), before)
    assert opt.lam == pytest.approx(10 * step.lam)
    assert "λ" in step.note


@pytest.mark.parametrize(
    ("line_search", "lr"),
    [(mq.Grid(), 1.0), (mq.Grid(along_step=True), 1.0), (mq.Backtracking(), 1.5), (mq.Backtracking(1 / 3), 1.0)],
    ids=str,
)
def test_rule_search(line_search, lr):
    """The minimum lies at lr = 1. The failed lr = 3 is not tried again."""
    model, opt, x, y = overshooting(line_search=line_search)
    step = opt.step(x, y)
    assert (step.rule, step.accepted) == ("search", True)
    assert step.lr == pytest.approx(lr)
    assert step.new_loss == pytest.approx((lr - 1) ** 2 * step.loss, rel=1e-6, abs=1e-6 * step.loss)
    assert objective(model, "mse", x, y) == pytest.approx(step.new_loss, rel=1e-9)
    assert opt.param_groups[0]["lr"] == 3.0  # reported, never written into the optimizer


def test_rule_uphill():
    """The previous step points the same way: a rise is allowed along it."""
    model, opt, x, y = overshooting(lr=0.5, acceptance=mq.Uphill())
    assert opt.step(x, y).rule == "decrease"
    opt.param_groups[0]["lr"] = 2.5
    step = opt.step(x, y)
    assert (step.rule, step.accepted) == ("uphill", True)
    assert step.new_loss == pytest.approx(2.25 * step.loss)
    assert objective(model, "mse", x, y) == pytest.approx(step.new_loss)


def test_uphill_needs_a_previous_step():
    _, opt, x, y = overshooting(acceptance=mq.Uphill())
    assert opt.step(x, y).rule == "rejected"


def test_uphill_against_the_best_loss():
    """The best loss is remembered while the loss rises."""
    _, opt, x, y = overshooting(lr=0.5, acceptance=mq.Uphill(against_best=True))
    best = opt.step(x, y).new_loss
    opt.param_groups[0]["lr"] = 2.5
    assert opt.step(x, y).rule == "uphill"
    assert opt.state_dict()["marquardt"]["best"] == best
    opt.param_groups[0]["lr"] = 0.1
    assert opt.step(x, y).new_loss > best
    assert opt.state_dict()["marquardt"]["best"] == best


@pytest.mark.parametrize("lr", [1.0, 3.0, 1, torch.tensor(0.5)], ids=["one", "rejected", "integer", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_step_holds_plain_values(lr, dtype):
    model, x, y = linear_problem()
    step = lm(model.to(dtype), lr=lr).step(x.to(dtype), y.to(dtype))
    assert isinstance(step, mq.Step)
    found = {f.name: type(getattr(step, f.name)) for f in fields(step)}
    assert found.pop("lr") in (float, type(lr) if isinstance(lr, int) else float)
    assert found == {name: PLAIN_TYPES.get(name, float) for name in found}
    with pytest.raises((AttributeError, TypeError)):
        step.loss = 0.0  # a record, not a state


@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_attempts_raise_lambda_until_accepted(attempts):
    """Overshooting by lr = 3 stops where λ has shortened the step enough: three tenfold increases here."""
    model, x, y = linear_problem()
    q = reference.quadratic(model, "mse", x, y)
    start = torch.linalg.matrix_norm(q.G, 2).item() / 1e3
    lams = [start * 10**k for k in range(attempts)]
    expected = theta(model)
    for lam in lams:
        trial = theta(model) + 3.0 * q.step(lam)
        accepted = nn.functional.mse_loss(x @ trial[:, None], y) < q.f
        if accepted:
            expected = trial
            break
    opt = lm(model, lr=3.0, schedule=mq.TenFold(start), attempts=attempts)
    step = opt.step(x, y)
    assert step.accepted == bool(accepted) == (attempts == 5)
    assert step.lam == pytest.approx(lam)
    assert opt.lam == pytest.approx(lam / 10 if accepted else 10 * lam)
    assert step.note.count("rejected") == lams.index(lam) + (not accepted)
    assert error(theta(model), expected) < 1e-9


def test_attempts_linearise_once():
    model, opt, x, y = overshooting(attempts=5)
    opt.step(x, y)  # the proof of the rules takes passes of its own
    graphs = []
    model.register_forward_hook(lambda module, inputs, z: graphs.append(z.requires_grad))
    step = opt.step(x, y)
    trials = step.note.count("rejected") + step.accepted
    assert trials > 1
    assert graphs == [True] + [False] * trials


@pytest.mark.parametrize("damping", [mq.Identity(), mq.MaxDiagonal()], ids=["identity", "max-diagonal"])
@EVERY_CURVATURE
def test_attempts_solve_at_the_same_point(damping, curvature):
    """The second λ is tried at θ too, not at the trial point of the first."""
    model, x, y = problem()
    q = reference.quadratic(model, "mse", x, y)
    D = q.diagonal().clamp(min=0.01) if isinstance(damping, mq.MaxDiagonal) else torch.ones_like(q.g)
    at = theta(model)
    step = lm(model, lr=6.0, schedule=mq.TenFold(0.01), curvature=curvature, damping=damping, attempts=9).step(x, y)
    assert step.lam > 0.05  # several were tried
    assert error(theta(model), at + 6 * q.step(step.lam * D)) < 1e-9


def test_attempts_in_float32():
    """Enough parameters for G in float32, and a λ that asks for float64: the same λ are tried."""
    model, x, y = problem(sizes=(3, 50, 3))
    single = copy.deepcopy(model).float()
    parts = {"lr": 5.0, "schedule": mq.TenFold(1e-4), "attempts": 9}
    step, expected = lm(single, **parts).step(x.float(), y.float()), lm(model, **parts).step(x, y)
    assert (step.lam, step.accepted) == (expected.lam, expected.accepted)
    assert step.note.count("rejected") >= 1
    assert error(theta(single), theta(model)) < 1e-3


def test_knows_the_same_data_again():
    """The loss before a step is the loss after the last one, accepted or not, where the data are the same. Once may be
    chance."""
    told = []

    class Recording(mq.Constant):
        def update(self, lam: float, outcome: Any) -> float:
            told.append((outcome.rule, outcome.same_data))
            return super().update(lam, outcome)

    model, x, y = problem()
    opt = lm(model, schedule=Recording(1.0))
    for lr, shift in ((1e3, 0), (1.0, 0), (1.0, 0), (1e3, 1), (1.0, 1), (1.0, 1)):
        opt.param_groups[0]["lr"] = lr
        opt.step(x, y + shift)
    rules = ["rejected", "decrease", "decrease", "rejected", "decrease", "decrease"]
    assert told == list(zip(rules, [False, False, True, False, False, True], strict=True))
    assert opt.state_dict()["marquardt"]["steps"] == 6


# ---- on the GPU


@CUDA
@pytest.mark.parametrize("recipe", RECIPES)
@DENSE_AND_GRAM
def test_cuda_steps_equal_the_algorithm(recipe, curvature):
    model, x, y = problem("cross_entropy")
    parts, options = RECIPES[recipe]
    hand = ByHand(copy.deepcopy(model), "cross_entropy", **options)
    opt = lm(model.cuda(), "cross_entropy", curvature=curvature, **parts)
    for _ in range(4):
        step, (f, _, accepted, _) = opt.step(x.cuda(), y.cuda()), hand.step(x, y)
        assert step.loss == pytest.approx(f, rel=1e-8)
        assert step.accepted == accepted
        assert error(theta(model).cpu(), theta(hand.model)) < 1e-7


# ---- what a long run must not do


def test_a_ragged_batch_changes_neither_damping_nor_representation():
    """The last batch of a pass is small: fewer rows than parameters for once."""
    torch.manual_seed(0)
    model = mlp(4, 8, 3)
    opt = mq.LM(model, "mse", curvature=mq.Auto(inertia=0.8), damping=mq.MeanEigenvalue())
    x, y = torch.randn(123, 4), torch.randn(123, 3)
    for part in (slice(0, 60), slice(60, 120), slice(120, 123), slice(0, 60)):
        before = opt.state_dict()["marquardt"]
        opt.step(x[part], y[part])
    assert before["past"] is not None  # the small batch kept the averaged curvature
    assert opt.state_dict()["marquardt"]["D"][0] < 3 * before["D"][0]
    assert opt.state_dict()["marquardt"]["most_rows"] == 180


def test_a_rate_of_zero_moves_nothing():
    model, x, y = problem()
    before = theta(model).clone()
    step = mq.LM(model, "mse", lr=0.0).step(x, y)
    assert not step.accepted
    assert torch.equal(theta(model), before)
