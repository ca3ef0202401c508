"""Losses at trial points: the same random numbers, one by one or all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from support import reference
from support.cases import Fn, Recurrent, mlp, sample_weights
from support.modules import SWAPPED, Slope, noisy
from support.parts import Never
from support.steps import CUDA, EVERY_CURVATURE, lm, problem, theta

pytestmark = pytest.mark.usefixtures("double")


class Search:
    """A line search that asks for the losses at some rates, together and one after the other, and takes none."""

    along_step = True

    def __init__(self, *rates: float) -> None:
        self.rates = rates

    def search(self, along: Any, loss: float, lr: float, tried: Any) -> None:
        self.losses, self.tried = along(self.rates), tried
        self.each = {rate: along([rate])[0] for rate in self.rates}.__getitem__


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(2, 6), nn.Dropout(0.4), nn.Linear(6, 3)),
    "input dropout": lambda: nn.Sequential(nn.Dropout(0.4), nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)),
    "two dropouts": lambda: nn.Sequential(
        nn.Linear(2, 6), nn.Dropout(0.2), nn.Linear(6, 5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 3)
    ),
    "feature dropout": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 1, 1)), nn.Conv2d(2, 6, 1), nn.Dropout2d(0.4), nn.Conv2d(6, 3, 1), nn.Flatten(1)
    ),
    "rrelu": lambda: nn.Sequential(nn.Linear(2, 6), nn.RReLU(), nn.Linear(6, 3)),
    "rrelu in place": lambda: nn.Sequential(nn.Linear(2, 6), nn.RReLU(0.1, 0.9, inplace=True), nn.Linear(6, 3)),
    "rrelu above 1": lambda: nn.Sequential(nn.Linear(2, 6), nn.RReLU(0.5, 1.5), nn.Linear(6, 3)),
    "both": noisy,
    "mlp": lambda: mlp(2, 4, 3),
    "lstm": lambda: nn.Sequential(nn.Unflatten(1, (2, 1)), Recurrent(nn.LSTM(1, 4, batch_first=True), 3)),
    "lstm with dropout": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 1)), Recurrent(nn.LSTM(1, 4, 2, batch_first=True, dropout=0.4), 3)
    ),
}


def searched(
    model: nn.Module, x: Tensor, y: Tensor, rates: tuple[float, ...], chunk: int | None = None, **parts: Any
) -> tuple[mq.Step, Search]:
    """The losses at these rates, as a line search is told them, of a step that nobody accepts; the model stays."""
    search = Search(*rates)
    opt = lm(model, curvature=mq.Dense(chunk), acceptance=Never(), line_search=search, **parts)
    return opt.step(x, y, sample_weights(len(x)).to(x)), search


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [None, 3])
def test_trial_losses_see_the_same_random_numbers(name, chunk):
    """One by one, or the losses of a grid in one batched pass; at θ they are the loss of the linearisation."""
    model, x, y = MODELS[name](), torch.randn(7, 2), torch.randn(7, 3)
    before, rates = theta(model), (0.0, 1e-6, 0.25, 1.0, 4.0)
    step, search = searched(model, x, y, rates, chunk)
    assert all(isinstance(f, float) for f in search.losses)
    assert search.losses == pytest.approx([search.each(rate) for rate in rates], rel=1e-10)
    assert search.losses[0] == pytest.approx(step.loss, rel=1e-12)
    assert search.losses[3] == pytest.approx(search.tried[1], rel=1e-10)  # that of the full step
    assert torch.equal(theta(model), before)


@pytest.mark.parametrize("recipe", ["explicit", "search"])
@EVERY_CURVATURE
def test_trial_losses_of_a_model_that_differentiates_itself(recipe, curvature):
    """They need gradients where other models are evaluated without."""
    model, x = Slope(), torch.randn(6, 2)
    y = torch.cat([x.cos(), x.sin().sum(1, keepdim=True)], 1)
    opt = lm(model, curvature=curvature, line_search=mq.Grid(1e-6, 2, 0.25) if recipe == "search" else None)
    for lr in (1.0, 100.0, 1.0):
        opt.param_groups[0]["lr"] = lr
        step = opt.step(x, y)
        found = reference.objective("mse", model(x), y, None).item()
        assert step.new_loss == pytest.approx(found, rel=1e-9)
        assert step.rule == {"explicit": "rejected", "search": "search"}[recipe] or lr == 1.0


@CUDA
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [None, 3])
def test_cuda_trials_see_the_same_random_numbers(name, chunk):
    model, x, y = MODELS[name]().cuda(), torch.randn(7, 2).cuda(), torch.randn(7, 3).cuda()
    start = torch.cuda.get_rng_state()
    for part in x.split(chunk or 7):
        model(part)
    after = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(start)
    rates = (0.0, 0.25, 1.0, 4.0)
    step, search = searched(model, x, y, rates, chunk)
    assert torch.equal(torch.cuda.get_rng_state(), after)
    assert search.losses == pytest.approx([search.each(rate) for rate in rates], rel=1e-9)
    assert search.losses[0] == pytest.approx(step.loss, rel=1e-9)


def test_weights_that_functional_call_does_not_see():
    """The batched grid is used only where it agrees with a plain evaluation."""

    inner = nn.Linear(2, 3)
    pair = [inner.weight, inner.bias]
    model, x, y = Fn(lambda x, inner: nn.functional.linear(x, *pair).tanh(), inner), *problem()[1:]
    _, search = searched(model, x, y, (0.5, 1.0, 2.0))
    assert search.losses == [search.each(rate) for rate in (0.5, 1.0, 2.0)]


class Far(nn.Module):
    """Dropout on an input that is not contiguous has other masks in a batched pass; they do not show if the bias is
    large."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.layers = nn.Sequential(SWAPPED, nn.Linear(4, 4), SWAPPED, nn.Dropout())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean(1) + self.bias


@pytest.mark.parametrize(("trains", "samples"), [(True, 6), (False, 6), (True, 1)], ids=["same", "eval", "one sample"])
def test_trial_points_have_the_random_numbers_of_the_linearisation(trains, samples):
    """Also if the way to their losses was proven in eval mode, or on one sample, for which strides do not count."""
    model, x, y = Far(), torch.randn(6, 5, 4), torch.randn(6, 4)
    search = Search(0.0, 0.5, 1.0)
    opt = lm(model, acceptance=Never(), line_search=search, momentum=Leaps())
    for mode, N in ((trains, samples), (True, 6)):
        model.train(mode)
        step = opt.step(x[:N], y[:N])
        assert search.losses[0] == pytest.approx(step.loss, rel=1e-12)
        assert search.losses == pytest.approx([search.each(rate) for rate in search.rates], rel=1e-12)


class Leaps:
    """Moves the bias far, and nothing else"""

    recordable = True

    def refine(self, newton: Tensor, previous: Tensor | None, H: object, same_data: bool) -> Tensor:
        d = torch.zeros_like(newton)
        d[:1] = 1e3
        return d
