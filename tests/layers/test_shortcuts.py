"""Operations of layers in a faster form against torch's own: max-pools, points on a line."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import marquardt as mq
import marquardt.layers.shortcuts as shortcuts
from marquardt.layers import Line
from marquardt.layers.shortcuts import Largest, Pooled, largest
from support import reference
from support.blocks import agrees
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
    monkeypatch.setattr(shortcuts, "CACHED", cached)
    lin, J = linearized(name)
    blocks = lin.whole().blocks
    some = [b for b in blocks if isinstance(b, Pooled)]
    assert len(some) == MODELS[name][1]
    for block in some:
        agrees(block, rows_of(block, lin, J))
        for held in (block.a, block.delta, block.samples(torch.float64)):  # the images, not how they came about
            assert not held.requires_grad
    S = lin.whole().jacobian.S
    whole = torch.einsum("rno,noj->rnj", S, J).flatten(0, 1)
    assert error(lin.whole().dense(torch.float64), whole) < 1e-12


def test_products_in_the_precision_of_what_is_multiplied():
    """Rows in float32, their products in float64: the same as those of the rows."""
    model = MODELS["activation"][0]().float()
    lin = mq.linearize(model, "mse", torch.randn(N, 2, 8, 8).float(), torch.randn(N, 2).float())
    (block,) = [b for b in lin.whole().blocks if isinstance(b, Pooled)]
    w = torch.randn(block.m)
    assert error(block.pull(w), block.rows(torch.float64).T @ w) < 1e-12


def test_one_row_is_not_worth_it():
    model = MODELS["activation"][0]()
    lin = mq.linearize(model, "mse", torch.randn(N, 2, 8, 8), torch.randn(N, 2), rows=mq.Sampled(1))
    assert not any(isinstance(b, Pooled) for b in lin.whole().blocks)


# ---- max-pools by slices against torch's own, bit for bit


SAME = {
    "two": {"kernel_size": 2},
    "oblong": {"kernel_size": (2, 3)},
    "the rest is dropped": {"kernel_size": 4},
    "stride as well": {"kernel_size": (3, 2), "stride": [3, 2]},
    "only across": {"kernel_size": (1, 3)},
    "only down": {"kernel_size": (3, 1)},
    "one number in a list": {"kernel_size": [2], "stride": 2},
}
OTHER = {
    "overlapping": {"kernel_size": 3, "stride": 2},
    "gaps": {"kernel_size": 2, "stride": 3},
    "padding": {"kernel_size": 2, "padding": 1},
    "dilation": {"kernel_size": 2, "dilation": 2},
    "ceil": {"kernel_size": 4, "ceil_mode": True},
    "places": {"kernel_size": 2, "return_indices": True},
    "one": {"kernel_size": 1},
    "too large": {"kernel_size": 7},
}


@pytest.mark.parametrize("options", SAME.values(), ids=SAME)
@pytest.mark.parametrize("shape", [(2, 3, 6, 7), (3, 6, 7)])
def test_the_same(options, shape):
    x = torch.randn(shape)
    x[..., 0, 0] = torch.nan
    x[..., 5, 5] = -torch.inf
    with torch.no_grad():
        found = largest(x, **options)
    expected = F.max_pool2d(x, **options)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert found.isnan().any()
    assert found.stride() == expected.stride()
    assert found.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("options", OTHER.values(), ids=OTHER)
def test_others_are_left_to_torch(options):
    with torch.no_grad():
        assert largest(torch.randn(2, 3, 6, 7), **options) is None


def test_with_a_gradient_or_another_order_in_memory_it_is_torchs():
    x = torch.randn(2, 3, 6, 7)
    assert largest(x, 2) is None
    with torch.no_grad():
        assert largest(x.to(memory_format=torch.channels_last), 2) is None


def test_models_do_not_ask_torch(monkeypatch):
    """Where the places are asked for, they do."""
    x, pool = torch.randn(2, 1, 12, 12), nn.MaxPool2d(2, return_indices=True)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2))
    with torch.no_grad():
        expected, places = model(x), pool(model(x))
        with Largest():
            found = pool(model(x))
    assert all(torch.equal(a, b) for a, b in zip(found, places, strict=True))
    monkeypatch.setattr(torch, "max_pool2d", None)
    with torch.no_grad(), Largest():
        assert torch.equal(model(x), expected)


# ---- convolutions at all points of a line at once


class Convolutions(nn.Module):
    """Twice the same weights, several groups, no bias, a bias that does not train, another padding; weights that the
    model itself changes."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.changes = changes
        self.twice = nn.Conv2d(2, 2, 3, padding=1)
        self.groups = nn.Conv2d(2, 4, 3, groups=2)
        self.plain = nn.Conv1d(4, 3, 2, bias=False, padding=1, padding_mode="circular")
        self.frozen = nn.Conv1d(3, 2, 1)
        self.frozen.bias.requires_grad_(False)
        self.volume = nn.Conv3d(1, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.changes:
            with torch.no_grad():
                self.twice.weight.clamp_(-0.1, 0.1)
        x = self.groups(torch.tanh(self.twice(torch.tanh(self.twice(x))))).flatten(2)
        x = self.frozen(torch.tanh(self.plain(x)))
        return self.volume(torch.tanh(x).reshape(len(x), 1, 2, 5, 2)).flatten(1)[:, :3]


def on_a_line(model: nn.Module, x: torch.Tensor, d: dict[str, torch.Tensor], rates: torch.Tensor) -> torch.Tensor:
    """The outputs at all rates, as linearize has them on a GPU."""
    origin = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def at(lr: torch.Tensor) -> torch.Tensor:
        point = {name: p + lr * d[name] for name, p in origin.items()}
        with Line(origin, d, point, lr):
            return torch.func.functional_call(model, point, (x,))

    with torch.no_grad():
        return torch.func.vmap(at)(rates)


@pytest.mark.parametrize("changes", [False, True])
def test_convolutions_of_all_trials_at_once(changes):
    torch.manual_seed(0)
    model, x = Convolutions(changes).double(), torch.randn(4, 2, 5, 5).double()
    d = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    rates = torch.tensor([1e-6, 0.25, 1.0, 4.0]).double()
    together = on_a_line(model, x, d, rates)
    for lr, z in zip(rates, together, strict=True):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for name, p in other.named_parameters():
                p += lr * d[name] if p.requires_grad else 0
            torch.testing.assert_close(z, other(x), rtol=1e-10, atol=1e-12)
