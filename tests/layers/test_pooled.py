"""Layers before a max-pool: rows and products against J̃ written out, and when δ is taken behind the pool."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
import marquardt.layers.shortcuts as pooled
from marquardt.layers.shortcuts import Pooled
from support import reference
from support.reference import error

pytestmark = pytest.mark.usefixtures("double")

N = 5


class Twice(nn.Module):
    """The output of the convolution goes past the pool as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Conv2d(2, 3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.out(nn.functional.max_pool2d(y.relu(), 2).mean((2, 3)) + y.mean((2, 3)))


class Masked(nn.Module):
    """An activation and a product with something else in between."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.layer, self.out, self.wide = nn.Conv2d(2, 1, 3), nn.Linear(4 if wide else 1, 2), wide

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.linspace(0.5, 1.5, 4 if self.wide else 1)[:, None, None]
        return self.out(nn.functional.max_pool2d(self.layer(x).tanh() * mask, 2).mean((2, 3)))


def behind(*layers: nn.Module, features: int = 3, dims: int = 2) -> nn.Sequential:
    """Two outputs from the mean of every channel, through a layer that keeps the positions apart"""
    last = nn.Conv2d(features, 2, 1) if dims == 2 else nn.Conv3d(features, 2, 1)
    return nn.Sequential(*layers, last, nn.Tanh(), nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten())


MODELS = {
    "activation": (lambda: behind(nn.Conv2d(2, 3, 3), nn.LeakyReLU(0.3), nn.MaxPool2d(2)), 1),
    "nothing between": (lambda: behind(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2), nn.ELU()), 1),
    "in place": (lambda: behind(nn.Conv2d(2, 3, 3), nn.ELU(inplace=True), nn.MaxPool2d(2)), 1),
    "two activations": (lambda: behind(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.SiLU(), nn.MaxPool2d(2)), 1),
    "overlapping windows": (lambda: behind(nn.Conv2d(2, 3, 3), nn.GELU(), nn.MaxPool2d(3, 2, padding=1)), 1),
    "groups, no bias": (lambda: behind(nn.Conv2d(2, 4, 3, groups=2, bias=False), nn.MaxPool2d(2), features=4), 1),
    "padding and stride": (lambda: behind(nn.Conv2d(2, 3, 3, 2, padding=2), nn.Softplus(), nn.MaxPool2d(2)), 1),
    "three dimensions": (lambda: behind(nn.Conv3d(1, 3, 2), nn.Sigmoid(), nn.MaxPool3d(2), dims=3), 1),
    "two layers": (
        lambda: behind(nn.Conv2d(2, 3, 2), nn.ELU(), nn.MaxPool2d(2), nn.Conv2d(3, 3, 2), nn.ELU(), nn.MaxPool2d(2)), 2,
    ),
    "normalised": (lambda: behind(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.ELU(), nn.MaxPool2d(2)), 0),
    "frozen weight": (lambda: behind(nn.Conv2d(2, 3, 3).requires_grad_(False), nn.ELU(), nn.MaxPool2d(2)), 0),
    "mask": (lambda: Masked(False), 1),
    "broadcast": (lambda: Masked(True), 0),
    "used twice": (Twice, 0),
    "hardly smaller": (lambda: behind(nn.Conv2d(2, 3, 3), nn.ELU(), nn.MaxPool2d(2, 1)), 0),
}  # fmt: skip


def linearized(name: str):
    torch.manual_seed(0)
    model = MODELS[name][0]()
    x = torch.randn(N, 1, 6, 6, 6) if name == "three dimensions" else torch.randn(N, 2, 8, 8)
    y = torch.randn(N, 2)
    J, _ = reference.jacobian(model, reference.trainable(model), x)
    lin = mq.linearize(model, "mse", x, y)
    return lin, J.view(N, 2, -1)


def rows_of(block: Pooled, lin, J: Tensor) -> Tensor:
    """The columns of its parameters, row r·N + n"""
    piece = lin.whole()
    columns = torch.cat([torch.arange(lin.n)[here] for here, _ in lin.parameters.ranges(block.params)])
    return torch.einsum("rno,noj->rnj", piece.jacobian.S, J)[:, :, columns].flatten(0, 1)


@pytest.mark.parametrize("cached", [1, 1 << 20])
@pytest.mark.parametrize("name", MODELS)
def test_rows(monkeypatch, name, cached):
    monkeypatch.setattr(pooled, "CACHED", cached)
    lin, J = linearized(name)
    blocks = lin.whole().blocks
    some = [b for b in blocks if isinstance(b, Pooled)]
    assert len(some) == MODELS[name][1]
    for block in some:
        rows, w = rows_of(block, lin, J), torch.randn(block.m)
        samples = rows.unflatten(0, (-1, N)).transpose(0, 1).flatten(0, 1)
        assert error(block.samples(torch.float64), samples) < 1e-12
        assert error(block.pull(w), rows.T @ w) < 1e-12
        assert error(block.rows(torch.float64), rows) < 1e-12
        assert error(block.diagonal(), rows.square().sum(0)) < 1e-12
        K = torch.zeros(block.m, block.m)
        block.gram(K, block)
        assert error(K, rows @ rows.T) < 1e-12
    S = lin.whole().jacobian.S
    whole = torch.einsum("rno,noj->rnj", S, J).flatten(0, 1)
    assert error(lin.whole().dense(torch.float64), whole) < 1e-12


def test_products_in_the_precision_of_what_is_multiplied():
    """Rows in float32, their products in float64: the same as those of the rows."""
    torch.manual_seed(0)
    model = MODELS["activation"][0]().float()
    lin = mq.linearize(model, "mse", torch.randn(N, 2, 8, 8).float(), torch.randn(N, 2).float())
    (block,) = [b for b in lin.whole().blocks if isinstance(b, Pooled)]
    w = torch.randn(block.m)
    assert error(block.pull(w), block.rows(torch.float64).T @ w) < 1e-12


def test_nothing_of_the_graph_is_held():
    """The images that a layer sees, not how they came about."""
    torch.manual_seed(0)
    lin, _ = linearized("two layers")
    for block in lin.whole().blocks:
        if isinstance(block, Pooled):
            assert not block.a.requires_grad
            assert not block.delta.requires_grad
            assert not block.samples(torch.float64).requires_grad


def test_one_row_is_not_worth_it():
    torch.manual_seed(0)
    model = MODELS["activation"][0]()
    lin = mq.linearize(model, "mse", torch.randn(N, 2, 8, 8), torch.randn(N, 2), rows=mq.Sampled(1))
    assert not any(isinstance(b, Pooled) for b in lin.whole().blocks)
