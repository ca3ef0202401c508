"""Losses that take what a model returns as it is: functions of several outputs, a mean beside its variance."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import marquardt as mq
from support.reference import error
from support.unchanged import changes, refused, world

pytestmark = pytest.mark.usefixtures("double")


@dataclass
class Found:
    mean: Tensor
    spread: Tensor
    steps: int = 3


FORMS = {
    "tuple": lambda m, s: (m, s),
    "dict": lambda m, s: {"mean": m, "spread": s, "steps": 3},
    "dataclass": Found,
    "turned": lambda m, s: {"spread": s, "mean": m},
}


class Two(nn.Module):
    def __init__(self, form="tuple", shape=(2,)):
        super().__init__()
        self.form, self.shape = FORMS[form], shape
        self.body, self.mean, self.spread = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x):
        h = self.body(x).tanh()
        return self.form(self.mean(h).view(-1, *self.shape), F.softplus(self.spread(h)).view(-1, *self.shape))


def likelihood(outputs, targets):
    mean, v = outputs if isinstance(outputs, tuple) else (outputs["mean"], outputs.spread)
    return (v.log() + (mean - targets).square() / v).flatten(1).sum(1)


@pytest.fixture
def data():
    torch.manual_seed(0)
    return torch.randn(7, 3), torch.randn(7, 2)


@pytest.mark.parametrize("form", FORMS)
def test_a_function_is_given_what_the_model_returns(form, data):
    """By key and by attribute; what is no tensor with a row per sample is left out."""
    x, y = data
    model = Two(form)
    plain = Two()
    plain.load_state_dict(model.state_dict())
    loss = likelihood(plain(x), y).mean()
    lin = mq.linearize(model, likelihood, x, y)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(plain.parameters()))])
    assert lin.loss == pytest.approx(loss.item(), rel=1e-12)
    assert error(lin.gradient, expected) < 1e-12
    opt = mq.LM(model, likelihood)
    losses = [opt.step(x, y).new_loss for _ in range(5)]
    assert losses[-1] < losses[0] < loss.item()


def test_an_output_that_is_not_there_is_named(data):
    x, y = data
    with pytest.raises(AttributeError, match="no output 'scale', only 'mean', 'spread'"):
        mq.LM(Two("dict"), lambda outputs, targets: (outputs.scale - targets).square()).step(x, y)


@pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 2)], ids=str)
def test_a_mean_and_its_variance_as_two_outputs(shape, data):
    """With targets of the shape of the mean, whatever that is."""
    x, y = data
    y = y.view(-1, *shape)
    model, torch_loss = Two(shape=shape), nn.GaussianNLLLoss()
    mean, v = model(x)
    loss = torch_loss(mean, y, v)
    lin = mq.linearize(model, torch_loss, x, y)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    assert lin.loss == pytest.approx(loss.item(), rel=1e-12)
    assert error(lin.gradient, expected) < 1e-12
    assert lin.loss_curvature == "fisher"


@pytest.mark.parametrize("form", ["dict", "dataclass", "turned"])
@pytest.mark.parametrize("loss", [nn.GaussianNLLLoss(), "gaussian_nll"], ids=str)
def test_names_have_no_order(form, loss, data):
    """A variance taken for a mean would train silently."""
    x, y = data
    model = Two(form)
    opt = mq.LM(model, loss)
    before = world(model, opt)
    with refused("'spread' (7, 2)", "order that their names do not tell", "loss={('mean', 'spread'): loss}"):
        opt.step(x, y)
    assert changes(before, world(model, opt)) == []
    plain = Two()
    plain.load_state_dict(model.state_dict())
    expected = mq.linearize(plain, loss, x, y)
    found = mq.linearize(model, {("mean", "spread"): loss}, x, y)
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    assert error(found.gradient, expected.gradient) < 1e-12


def test_targets_that_fit_neither_shape_are_refused(data):
    x, y = data
    with pytest.raises(ValueError, match=r"outputs have shape \(7, 2\), targets \(7, 1\)"):
        mq.LM(Two(), nn.GaussianNLLLoss()).step(x, y[:, :1])


def test_every_curvature_is_named(data):
    x, y = data
    model = Two("dict")
    squares = {"mean": "mse", "spread": "mse"}
    assert mq.linearize(model, squares, x, {"mean": y, "spread": y}).loss_curvature == "hessian"
    mixed = {"mean": "mse", "spread": "huber"}
    assert mq.linearize(model, mixed, x, {"mean": y, "spread": y}).loss_curvature == "mean: hessian, spread: majoriser"
