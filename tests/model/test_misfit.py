"""Batches that do not fit the model: the layer, the shapes and the way out; errors of the model's own stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from support.unchanged import changes, refused, world

pytestmark = pytest.mark.usefixtures("double")


def net(inputs: int = 3, outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs))


class Product(nn.Module):
    """Without a layer of torch.nn"""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.ones(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.W


class Column(Product):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] * self.W[0] + self.W[1]


def convolution(d: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        (nn.Conv1d, nn.Conv2d)[d - 1](channels, 2, 3), nn.Flatten(), nn.Linear(12 if d == 1 else 72, 1)
    )


def table() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(6, 1))


X, Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).double(), torch.ones(8, 1).double()
CASES = {
    "transposed": (net(), X.T, Y, ["Linear '0' takes (N, 3)", "(3, 8)", "x.T"]),
    "one-dimensional": (net(1), X[:, 0], Y, ["Linear '0' takes (N, 1)", "(8,)", "x.unsqueeze(-1)"]),
    "one-dimensional, for several": (net(), X[:, 0], Y, ["Linear '0' takes (N, 3)", "(8,)", "one row for each sample"]),
    "swapped": (net(), Y, X, ["Linear '0' takes (N, 3)", "(8, 1), the targets (8, 3)", "changed places"]),
    "other features": (net(4), X, Y, ["Linear '0' takes (N, 4)", "(8, 3)"]),
    "images": (net(16), torch.rand(8, 4, 4), Y, ["(N, 16)", "(8, 4, 4)", "nn.Flatten()"]),
    "a later layer": (nn.Sequential(net(3, 2), net(3)), X, Y, ["Linear '1.0' takes (N, 3)", "given the shape (8, 2)"]),
    "no channel": (convolution(2, 1), torch.rand(8, 8, 8), Y, ["(N, 1, H, W)", "(8, 8, 8)", "x.unsqueeze(1)"]),
    "channels last": (convolution(1, 3), torch.rand(8, 8, 3), Y, ["(N, 3, L)", "(8, 8, 3)", "x.movedim(-1, 1)"]),
    "numbers for indices": (table(), X, Y, ["Embedding '0'", "integers from 0 to 4", "torch.float64", "x.long()"]),
    "an index too large": (table(), torch.full((8, 3), 7), Y, ["integers from 0 to 4", "the entry 7"]),
    "an index below 0": (table(), torch.full((8, 3), -1), Y, ["integers from 0 to 4", "the entry -1"]),
    "integers for numbers": (net(), X.long(), Y, ["torch.int64", ".to(torch.float64)"]),
    "statistics": (nn.Sequential(nn.BatchNorm1d(2).eval(), net(2)), X, Y, ["BatchNorm1d '0'", "2 channels", "(8, 3)"]),
    "normalised": (nn.Sequential(nn.LayerNorm(2), net(2)), X, Y, ["LayerNorm '0'", "(2,)", "(8, 3)"]),
    "no layer, transposed": (Product(), X.T, Y, ["(3, 8), the targets (8, 1)", "x.T"]),
    "no layer, one-dimensional": (Column(), X[:, 0], Y, ["(8,)", "x.unsqueeze(-1)"]),
}  # fmt: skip


def train(model, x, y):
    mq.fit(model, (x, y), "mse", steps=1)


def step(model, x, y):
    mq.LM(model, "mse").step(x, y)


def posterior(model, x, y):
    mq.posterior(model, "mse", (x, y), weight_decay=0.1)


@pytest.mark.parametrize("call", [train, step, posterior])
@pytest.mark.parametrize("case", CASES)
def test_shapes_and_the_way_out_are_told(case, call):
    model, x, y, says = CASES[case]
    model, x = model.double(), x.double() if x.is_floating_point() else x
    if "transposed" in case and call is not step:  # before the model is called
        says = ["(3, 8)", "both need one row for each sample, as inputs.T has"]
    before = world(model)
    with refused(*says):
        call(model, x, y)
    assert changes(before, world(model)) == []


def test_other_ways_out():
    with pytest.raises(ValueError, match="cannot be multiplied") as told:  # the words of torch are in it
        step(net(), X.T, Y)
    assert isinstance(told.value.__cause__, RuntimeError)
    with refused("opt.step(inputs, targets)"):
        mq.LM(net(), "mse").step((X, Y))
    with refused("inputs in a dict go to the model as model(**inputs)"):
        mq.LM(net(), "mse").step({"x": X}, Y)
    model = net()
    found = mq.posterior(model, "mse", (X, model(X).detach()), weight_decay=1e-9, noise=1.0)
    with refused("takes (N, 3), and the inputs have the shape (3, 8)"):
        found.predict(X.T)


@pytest.mark.parametrize("exception", [RuntimeError, IndexError, ValueError, TypeError])
def test_errors_of_the_model_stay(exception):
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor) -> Tensor:
            self.inner(x)
            raise exception("the model's own trouble")

    with pytest.raises(exception, match=r"^the model's own trouble$"):
        step(Broken(), X, Y)
