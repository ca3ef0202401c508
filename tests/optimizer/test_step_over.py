"""LM.step_over: several batches in one step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import marquardt as mq
from support.cases import sample_weights
from support.modules import noisy
from support.reference import error
from support.steps import DENSE, MAX_MOMENTUM, lm, objective, overshooting, parts_of, problem, theta
from support.unchanged import changes, world

pytestmark = pytest.mark.usefixtures("double")

STEP_OVER: dict[str, tuple[str, Any]] = {
    "mse": ("mse", nn.MSELoss()),
    "mse, sum": ("mse", nn.MSELoss(reduction="sum")),
    "cross-entropy, class weights": ("cross_entropy", nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1, 3]).double())),
    "cross-entropy, ignored": ("cross_entropy", nn.CrossEntropyLoss(ignore_index=1)),
    "poisson": ("poisson", nn.PoissonNLLLoss()),
}


@pytest.mark.parametrize("kind", STEP_OVER)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize(
    "curvature", [DENSE, mq.Dense(2, inertia=0.0), mq.Auto(inertia=0.0)], ids=["dense", "dense-chunked", "auto"]
)
def test_step_over_equals_one_batch(kind, weighted, curvature):
    name, loss = STEP_OVER[kind]
    model, x, y = problem(name)
    if kind.endswith("ignored"):
        y[:] = torch.tensor([0, 1, 2, 0, 1, 2, 1, 0])  # 2, 4 and 1 of a batch count
    weight = sample_weights(8) if weighted else None
    twin = copy.deepcopy(model)
    parts = {**MAX_MOMENTUM, "line_search": mq.Grid(1e-6, 2, 0.25)}
    opt, other = lm(model, loss, curvature=curvature, **parts), lm(twin, loss, **parts)
    for _ in range(4):
        step, expected = opt.step_over(parts_of(x, y, weight)), other.step(x, y, weight)
        assert step.loss == pytest.approx(expected.loss, rel=1e-9)
        assert step.new_loss == pytest.approx(expected.new_loss, rel=1e-9)
        assert step.gain == pytest.approx(expected.gain, rel=1e-5)
        assert (step.rule, step.lam, step.lr) == (expected.rule, expected.lam, expected.lr)
        assert error(theta(model), theta(twin)) < 1e-9


def test_step_over_takes_weights_batch_by_batch():
    """Some batches with, some without: None means 1."""
    model, x, y = problem()
    weight, twin = torch.cat([sample_weights(3), torch.ones(5)]), copy.deepcopy(model)
    step = lm(model).step_over([(x[:3], y[:3], weight[:3]), [x[3:], y[3:]]])
    expected = lm(twin).step(x, y, weight)
    assert step.loss == pytest.approx(expected.loss, rel=1e-12)
    assert error(theta(model), theta(twin)) < 1e-10


@pytest.mark.parametrize("own", [False, True], ids=["global generator", "own generator"])
def test_step_over_a_shuffling_loader(own):
    model, x, y = problem(N=10)
    generator = torch.Generator().manual_seed(3) if own else None
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True, generator=generator)
    twin = copy.deepcopy(model)
    opt, other = lm(model, attempts=3), lm(twin, attempts=3)
    for _ in range(3):
        assert opt.step_over(loader).loss == pytest.approx(other.step(x, y).loss, rel=1e-9)
        assert error(theta(model), theta(twin)) < 1e-9


def test_step_over_draws_from_the_generator_once():
    """One shuffle, and one forward pass over the shuffled batches."""
    model, x, y = noisy(), torch.randn(10, 2), torch.randn(10, 3)
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    opt = lm(model, line_search=mq.Grid(), lr=30.0)
    for rule in ("search", "rejected"):
        torch.manual_seed(5)
        for xs, _ in loader:
            model(xs)
        once = torch.get_rng_state()
        torch.manual_seed(5)
        assert opt.step_over(loader).rule == rule
        assert torch.equal(torch.get_rng_state(), once)
        opt.line_search = None


def test_step_over_repeats_random_layers_batch_by_batch():
    model, x, y = noisy(), torch.randn(8, 2), torch.randn(8, 3)
    opt = lm(model, lr=1e-9)  # next to θ the loss may change by 1e-9 alone, if the same masks are drawn
    step = opt.step_over(DataLoader(TensorDataset(x, y), batch_size=3, shuffle=True))
    assert step.accepted
    assert step.new_loss == pytest.approx(step.loss, rel=1e-6)


def test_step_over_judges_the_total_loss():
    """The first batch gets worse, the sum better: one verdict on all of it."""
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    x, y = torch.randn(8, 1), torch.tensor([0.0, 0, 1, 1, 1, 1, 1, 1])[:, None]
    batches = [(x[:2], y[:2]), (x[2:], y[2:])]
    f, first = objective(model, "mse", x, y), objective(model, "mse", *batches[0])
    step = lm(model).step_over(batches)
    assert step.loss == pytest.approx(f)
    assert (step.rule, step.accepted) == ("decrease", True)
    assert step.new_loss == pytest.approx(objective(model, "mse", x, y))
    assert objective(model, "mse", *batches[0]) > first


def test_step_over_rejects_as_a_whole():
    model, opt, x, y = overshooting()
    before = theta(model)
    step = opt.step_over(parts_of(x, y, sizes=(2, 4)))
    assert (step.rule, step.new_loss) == ("rejected", step.loss)
    assert torch.equal(theta(model), before)


USED_UP = {"generator": lambda b: (one for one in b), "iterator": iter, "zip": lambda b: zip(b, strict=True)}


@pytest.mark.parametrize("batches", USED_UP.values(), ids=USED_UP)
def test_step_over_refuses_what_is_used_up(batches):
    model, x, y = problem()
    opt = lm(model)
    before = world(model, opt)
    with pytest.raises(TypeError, match="list or a DataLoader"):
        opt.step_over(batches(parts_of(x, y)))
    assert changes(before, world(model, opt)) == []


def test_step_over_refuses_gram():
    model, x, y = problem()
    opt = lm(model, curvature=mq.Gram())
    before = world(model, opt)
    with pytest.raises(ValueError, match=r"Dense"):
        opt.step_over(parts_of(x, y))
    assert changes(before, world(model, opt)) == []
    assert opt.step(x, y).accepted


def test_other_data_in_another_pass_are_refused():
    class Loader:
        def __iter__(self) -> Any:
            yield x, y + torch.rand((), generator=own)

    model, x, y = problem()
    own = torch.Generator().manual_seed(0)
    with pytest.raises(ValueError, match="batches are not the same"):
        lm(model).step_over(Loader())
