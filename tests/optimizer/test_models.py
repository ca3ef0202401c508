"""All kinds of models train."""

from __future__ import annotations

import copy
import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import marquardt as mq
from support.by_hand import ByHand
from support.cases import Poisson1D, Recurrent, TwoTowers, default_dtype, mlp
from support.reference import error
from support.steps import CUDA, DENSE_AND_GRAM, EVERY_CURVATURE, PLAIN_TYPES, lm, objective, theta
from support.unchanged import same

pytestmark = pytest.mark.usefixtures("double")


def test_tuple_and_dict_inputs():
    model, y = TwoTowers(), torch.randn(6, 2)
    left, right = torch.randn(6, 2), torch.randn(6, 3)
    runs = []
    for inputs in ((left, right), [left, right], {"right": right, "left": left}):
        twin = copy.deepcopy(model)
        hand_twin = copy.deepcopy(model)
        opt, hand = lm(twin), ByHand(hand_twin, "mse")
        for _ in range(3):
            opt.step(inputs, y)
            hand.step(inputs, y)
        assert error(theta(twin), theta(hand_twin)) < 1e-9
        runs.append(theta(twin))
    assert same(runs[0], runs[1])
    assert error(runs[2], runs[0]) < 1e-12


@EVERY_CURVATURE
def test_dict_inputs_with_an_option(curvature):
    """Not every argument of a model is a tensor."""

    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, negate: bool, x: Tensor) -> Tensor:
            return -self.inner(x) if negate else self.inner(x)

    model, x, y = Switch(), torch.randn(5, 2), torch.randn(5, 2)
    twin = copy.deepcopy(model)
    assert lm(model, curvature=curvature).step({"negate": True, "x": x}, y).accepted
    ByHand(twin, "mse").step({"negate": True, "x": x}, y)
    assert error(theta(model), theta(twin)) < 1e-10


@DENSE_AND_GRAM
def test_residuals_without_inputs(curvature):
    """A model that knows its own data takes no inputs and no targets."""

    class Fit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.tensor([1.0, 1.0]))

        def forward(self) -> Tensor:
            t = torch.linspace(0, 1, 5)
            return self.p[0] * (self.p[1] * t).exp() - 2 * (0.5 * t).exp()

    model = Fit()
    opt = lm(model, "residual", curvature=curvature)
    for _ in range(8):
        step = opt.step(())
    assert step.new_loss < 1e-20
    assert error(theta(model), torch.tensor([2.0, 0.5])) < 1e-8


@pytest.mark.parametrize("loss", ["residual", mq.losses.Residual()], ids=["name", "object"])
def test_residuals_without_targets(loss):
    class Rosenbrock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.tensor([-1.2, 1.0]))

        def forward(self, scale: Tensor) -> Tensor:
            a, b = self.p
            return torch.stack([scale[0] * (b - a**2), 1 - a])

    model = Rosenbrock()
    opt = lm(model, loss, schedule=mq.TenFold(1e-2), attempts=20)
    for _ in range(40):
        step = opt.step(torch.tensor([10.0, 1.0]))
    assert step.loss < 1e-20
    assert error(theta(model), torch.ones(2)) < 1e-8


def loss_after(opt: mq.LM, x: Any, y: Any, steps: int) -> tuple[float, float]:
    """f at the start and at the end."""
    done = [opt.step(x, y) for _ in range(steps)]
    assert all(math.isfinite(s.new_loss) for s in done)
    return done[0].loss, done[-1].new_loss


@pytest.mark.parametrize("recipe", ["default", "explicit", "paper"])
def test_trains_a_physics_informed_network(recipe):
    model, x = Poisson1D(), torch.linspace(-math.pi, math.pi, 20)[:, None]
    makers = {"default": mq.LM, "explicit": lm, "paper": mq.presets.paper}
    first, last = loss_after(makers[recipe](model, "residual"), x, None, 25)
    assert last < first / 10


@pytest.mark.parametrize("recipe", ["default", "explicit"])
def test_trains_an_lstm(recipe):
    model, x = Recurrent(nn.LSTM(1, 4, batch_first=True), 2), torch.randn(12, 5, 1)
    y = (x.sum((1, 2)) > 0).long()
    opt = mq.LM(model, "cross_entropy") if recipe == "default" else lm(model, "cross_entropy")
    first, last = loss_after(opt, x, y, 15)
    assert last < first / 5


@pytest.mark.parametrize("recipe", ["default", "explicit"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_trains_a_transformer(recipe, dropout):
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout, batch_first=True)
    model, x = nn.Sequential(layer, nn.Flatten(1), nn.Linear(12, 2)), torch.randn(10, 3, 4)
    y = (x[:, 0, 0] > 0).long()
    opt = mq.LM(model, "cross_entropy") if recipe == "default" else lm(model, "cross_entropy")
    loss_after(opt, x, y, 12)
    assert objective(model.eval(), "cross_entropy", x, y) < 0.1


def sine(device: str = "cpu") -> tuple[nn.Module, Tensor, Tensor]:
    """The paper's network in float32, on fewer points."""
    with default_dtype(torch.float32):
        model, x = mlp(1, 10, 1), torch.linspace(-4, 4, 100)[:, None]
    return model.to(device), x.to(device), x.sin().to(device)


@pytest.mark.parametrize("recipe", ["default", "vanilla", "paper"])
def test_trains_in_float32(recipe):
    model, x, y = sine()
    makers = {"default": mq.LM, "vanilla": mq.presets.vanilla, "paper": mq.presets.paper}
    opt = makers[recipe](model, "mse")
    first, last = loss_after(opt, x, y, 40)
    assert last < first / 10
    state = opt.state_dict()["marquardt"]
    assert (state["previous"] is None) == (recipe == "vanilla")  # where nothing looks back, nothing is kept
    vectors = [t for t in tree_leaves([state["D"], state["previous"], state["mean"]]) if t is not None]
    assert all(p.dtype == torch.float32 for p in [*model.parameters(), *vectors])


@CUDA
def test_cuda_resumes_and_trains():
    model, x, y = sine("cuda")
    opt = mq.LM(model, "mse")
    first, last = loss_after(opt, x, y, 20)
    twin = copy.deepcopy(model)
    other = mq.LM(twin, "mse")
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert loss_after(opt, x, y, 3) == pytest.approx(loss_after(other, x, y, 3), rel=1e-4)
    assert last < first / 5
    assert all(type(getattr(opt.step(x, y), f.name)) is PLAIN_TYPES.get(f.name, float) for f in fields(mq.Step))
