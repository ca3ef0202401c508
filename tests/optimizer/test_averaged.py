"""LM.averaged: the averaged weights for a while, and nothing else changes."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from support.reference import error
from support.steps import edit, lm, problem, state, stochastic, theta
from support.unchanged import changes, same, world

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("average", [mq.EMA(0.9), mq.Polyak()], ids=str)
def test_average_by_hand(average):
    model, x, y = problem(N=40)
    opt, mean, count = lm(model, average=average, schedule=mq.Constant(1.0)), None, 0
    for t in range(8):
        step = opt.step(x[5 * t : 5 * t + 5], y[5 * t : 5 * t + 5])
        if not step.accepted:
            continue
        if mean is None:
            mean = theta(model)
        elif isinstance(average, mq.Polyak):
            mean = (count * mean + theta(model)) / (count + 1)
        else:
            keep = min(0.9, (1 + count) / (10 + count))
            mean = keep * mean + (1 - keep) * theta(model)
        count += 1
    current = theta(model)
    assert count >= 5
    with opt.averaged():
        assert error(theta(model), mean) < 1e-12
    assert torch.equal(theta(model), current)


@pytest.mark.parametrize("exception", [None, ZeroDivisionError, KeyboardInterrupt])
def test_averaged_swaps_and_restores(exception):
    """One block within another too"""
    model, opt, _, _ = stochastic()
    before, mean = world(model, opt), state(opt)["mean"]
    with nullcontext() if exception is None else pytest.raises(exception), opt.averaged():
        assert changes(before, world(model, opt)) == ["parameters"]
        with opt.averaged():
            assert torch.equal(theta(model), mean)
        assert torch.equal(theta(model), mean)
        if exception is not None:
            raise exception
    assert changes(before, world(model, opt)) == []


def test_averaged_before_the_first_step():
    model, _, _ = problem()
    before = theta(model)
    with lm(model, average=mq.EMA()).averaged():
        assert torch.equal(theta(model), before)


@pytest.mark.parametrize("name", ["paper", "authors_code", "vanilla", "gauss_newton", "hessian_free", "newton", "kfac"])
def test_without_an_average_it_shows_the_weights_as_they_are(name):
    """So that another optimizer takes the place of the default without a change in what evaluates it."""
    model, x, y = problem()
    opt = getattr(mq.presets, name)(model, "mse")
    for _ in range(3):
        opt.step(x, y)
    before = world(model, opt)
    with opt.averaged():
        assert changes(before, world(model, opt)) == []
        with pytest.raises(RuntimeError, match="would be lost"):
            opt.step(x, y)
    assert changes(before, world(model, opt)) == []


@pytest.mark.parametrize(("lag", "behind"), [(None, False), (-0.1, False), (0.0, False), (1e-9, True), (2.0, True)])
def test_an_average_that_lags_behind_is_not_shown(lag, behind):
    """Then it is the last weights, and nothing changes at all."""
    model, opt, x, y = stochastic()
    edit(opt, lag=lag)
    before = world(model, opt)
    with opt.averaged():
        assert changes(before, world(model, opt)) == ([] if behind else ["parameters"])
        assert torch.equal(theta(model), state(opt)["mean"]) != behind
        with pytest.raises(RuntimeError, match="would be lost"):
            opt.step(x, y)
    assert changes(before, world(model, opt)) == []


def loss_at(model: nn.Module, theta: Tensor, x: Tensor, y: Tensor) -> float:
    """The sum of squares that the model would have with these weights"""
    other = copy.deepcopy(model)
    nn.utils.vector_to_parameters(theta, other.parameters())
    return float((other(x) - y).detach().square().sum())


@pytest.mark.parametrize(("noise", "lr"), [(0.0, 0.3), (3.0, 0.3), (3.0, 1.0)])
def test_the_averaged_loss_of_every_step_by_hand(noise, lr):
    """Before the step, in the units of the loss; without noise the average lags behind in the end, with noise it is
    ahead. λ is that of its schedule."""
    model, lags, ratios, schedule = nn.Linear(3, 2), None, [], mq.Balanced(initial=0.5)
    opt = mq.LM(model, nn.MSELoss(reduction="sum"), schedule=schedule, lr=lr, capture=False)
    for i in range(30):
        x = torch.randn(8, 3)
        y = x @ torch.tensor([[1.0, 2.0], [-1.0, 0.5], [3.0, -2.0]]) + noise * torch.randn(8, 2)
        mean, lam, here = state(opt)["mean"], opt.lam, theta(model)
        step = opt.step(x, y)
        if i == 0:
            assert math.isnan(step.averaged_loss)
            continue
        assert step.averaged_loss == pytest.approx(loss_at(model, mean, x, y), rel=1e-10)
        ratio = step.averaged_loss / loss_at(model, here, x, y)
        lags = math.log(ratio) if lags is None else 0.8 * lags + 0.2 * math.log(ratio)
        assert state(opt)["lag"] == pytest.approx(lags, abs=1e-9)
        expected = lam * min(max(0.95 / ratio, 1 / 1.5), 1.5) * (1 if step.gain >= 0.25 else 1.5)
        assert opt.lam == pytest.approx(expected, rel=1e-9)
        ratios.append(ratio)
    assert (lags > 0) == (noise == 0)
    assert any(ratio < 0.95 for ratio in ratios) == (noise > 0)
    current = theta(model)
    with opt.averaged():
        assert torch.equal(theta(model), current if noise == 0 else state(opt)["mean"])


def test_on_the_same_data_or_without_an_average_there_is_no_averaged_loss():
    model, x, y = problem(N=24)
    opt, other = mq.LM(model, "mse"), mq.LM(copy.deepcopy(model), "mse", average=None)
    steps = [opt.step(x, y) for _ in range(5)]
    assert all(math.isnan(step.averaged_loss) for step in steps[2:])
    assert state(opt)["lag"] is None
    assert math.isnan(opt.step(*problem()[1:]).averaged_loss)  # there was no average yet
    assert math.isfinite(opt.step(*problem()[1:]).averaged_loss)
    assert all(math.isnan(other.step(x[6 * t : 6 * t + 6], y[6 * t : 6 * t + 6]).averaged_loss) for t in range(4))
    assert state(other)["lag"] is None


def test_average_is_the_weights_on_one_batch():
    """On the same data every step is better than the last: nothing to average out."""
    model, x, y = problem()
    opt = lm(model, average=mq.EMA(), schedule=mq.Constant(1.0))
    for _ in range(4):
        assert opt.step(x, y).accepted
    current = theta(model)
    with opt.averaged():
        assert torch.equal(theta(model), current)


def test_a_step_within_averaged_is_refused():
    model, opt, x, y = stochastic()
    before = world(model, opt)
    with opt.averaged():
        for ask in (lambda: opt.step(x, y), lambda: opt.step_over([(x, y)])):
            with pytest.raises(RuntimeError, match=r"averaged.*would be lost"):
                ask()
        with opt.averaged():
            pass
        with pytest.raises(RuntimeError, match="would be lost"):  # the inner block ends, the outer one does not
            opt.step(x, y)
        opt.load_state_dict(opt.state_dict())
        with pytest.raises(RuntimeError, match="would be lost"):
            opt.step(x, y)
    assert changes(before, world(model, opt)) == []
    assert math.isfinite(opt.step(x, y).loss)


def test_a_step_after_an_averaged_block_that_failed():
    model, opt, x, y = stochastic()
    twin_model, twin = copy.deepcopy((model, opt))
    with pytest.raises(ZeroDivisionError), opt.averaged(), opt.averaged():
        raise ZeroDivisionError
    assert opt.step(x, y) == twin.step(x, y)
    assert same(theta(model), theta(twin_model))


def test_a_copy_made_within_averaged_is_free():
    model, opt, x, y = stochastic()
    with opt.averaged():
        other_model, other = copy.deepcopy((model, opt))
        mean = theta(model)
        assert math.isfinite(other.step(x, y).loss)
        assert same(theta(model), mean)
        assert not same(theta(other_model), mean)


# ---- running statistics


def normalised() -> nn.Sequential:
    """Two layers that keep statistics, and one that keeps none"""
    first = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.BatchNorm1d(6, track_running_stats=False))
    return nn.Sequential(*first, nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=None), nn.Tanh(), nn.Linear(5, 2))


def trained(model: nn.Module, opt: mq.LM, noise: float = 0.0, steps: int = 6) -> Tensor:
    """The last batch"""
    for _ in range(steps):
        x = torch.randn(40, 3)
        opt.step(x, x[:, :2].sin() + noise * torch.randn(40, 2))
    return x


def alike(model: nn.Sequential, x: Tensor) -> bool:
    """Whether every layer keeps mean and variance of what reaches it in train mode"""
    pairs, other = [], copy.deepcopy(model).train()
    with torch.no_grad():
        for layer, own in zip(other, model, strict=True):
            if getattr(layer, "running_mean", None) is not None:
                pairs += [(own.running_mean, x.mean(0)), (own.running_var, x.var(0))]
            x = layer(x)
    return all(error(mine, theirs) < 1e-10 for mine, theirs in pairs)


@pytest.mark.parametrize("evaluating", [False, True], ids=["train", "eval"])
@pytest.mark.parametrize("kind", ["averaged", "behind", "no average"])
def test_running_statistics_are_those_of_the_weights_that_are_shown(kind, evaluating):
    """Of the last batch: those that were gathered on the way belong to weights of the past. In eval mode too, in which
    evaluation begins; a step goes on from those that were there."""
    model = normalised()
    parts = {"average": None} if kind == "no average" else {}
    opt = mq.LM(model, "mse", lr=0.3 if kind == "behind" else 1.0, **parts)
    x = trained(model, opt, noise=3.0 if kind == "averaged" else 0.0, steps=15)
    model.train(not evaluating)
    before, here = world(model, opt), theta(model)
    assert not alike(model, x)
    with opt.averaged():
        assert torch.equal(theta(model), here) == (kind != "averaged")
        assert alike(model, x)
        assert all(m.training != evaluating for m in model)
        with opt.averaged():
            assert alike(model, x)
    assert changes(before, world(model, opt)) == []


def test_statistics_that_training_leaves_alone_stay():
    """Of a layer in eval mode, as one that fine-tuning has frozen."""
    model = normalised()
    opt = mq.LM(model, "mse")
    model[1].eval()
    x = trained(model, opt)
    with opt.averaged():
        assert torch.equal(model[1].running_mean, torch.zeros(6))
        assert not torch.equal(model[5].running_mean, torch.zeros(5))
    model.eval()
    opt.step(x, x[:, :2])
    before = world(model)
    with opt.averaged():
        assert same(before["buffers"], world(model)["buffers"])


def test_a_loaded_state_has_seen_no_batch():
    """Then the statistics cannot be found for averaged weights: a warning says so; one step is enough."""
    model = normalised()
    opt = mq.LM(model, "mse")
    x = trained(model, opt, noise=3.0)
    other = copy.deepcopy(model)
    again = mq.LM(other, "mse")
    again.load_state_dict(opt.state_dict())
    with pytest.warns(UserWarning, match="take a step first") as found, again.averaged():
        pass
    assert found[0].filename == __file__
    opt.load_state_dict(opt.state_dict())  # one that has seen a batch has not forgotten it
    with opt.averaged():
        assert alike(model, x)
    trained(other, again, steps=1)
    with again.averaged():
        pass
