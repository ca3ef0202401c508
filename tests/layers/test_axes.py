"""Where the samples are in a graph, whatever the numbers in it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import parametrizations

from marquardt.layers.axes import Axis, all_at, keeps_apart, sample_axes
from marquardt.layers.capture import PLACES, Walk

N = 6


class Fn(nn.Module):
    def __init__(self, f, *parts: nn.Module) -> None:
        super().__init__()
        self.f, self.parts = f, nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x, *self.parts)


def walk(model: nn.Module, x: Tensor) -> Walk:
    return Walk(model(x), list(model.parameters()))


class Derivative(nn.Module):
    """∂u/∂x of a network u."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(self.u(x).sum(), x, create_graph=True)
        return slope[:, :1] * self.u(x)


def mixed_layouts(x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
    h = first(x.transpose(0, 1)).tanh()  # (T, N, E)
    return second(h.flatten(0, 1)).unflatten(0, (x.shape[1], N)).transpose(0, 1).mean(1)


def sliced(x: Tensor, f: nn.Module) -> Tensor:
    a, b = f(x).chunk(2, 1)
    return torch.cat([a * b.sigmoid(), a[:, :1]], 1).softmax(1).cumsum(1)


def joined(x: Tensor, f: nn.Module, g: nn.Module) -> Tensor:
    return torch.cat([f(x[:2]), g(x[2:])])


def one_by_one(x: Tensor, f: nn.Module) -> Tensor:
    return torch.stack([f(row) for row in x])


image, sequence, row = (torch.randn(N, *shape) for shape in [(2, 8, 8), (5, 8), (4,)])
KEPT = {
    "mlp": (nn.Sequential(nn.Linear(4, 3), nn.ELU(), nn.Dropout(0.2), nn.LayerNorm(3), nn.Linear(3, 2)), row),
    "cnn": (
        nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d(4).eval(), nn.MaxPool2d(2),
            nn.GroupNorm(2, 4), nn.GELU(), nn.ConvTranspose2d(4, 3, 2), nn.InstanceNorm2d(3, affine=True), nn.SiLU(),
            nn.Upsample(scale_factor=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2),
        ),
        image,
    ),
    "transformer": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), sequence),
    "attention, time first": (
        Fn(lambda x, f: f(x, x, x)[0].transpose(0, 1), nn.MultiheadAttention(8, 2)), sequence.transpose(0, 1),
    ),
    "scaled dot product": (Fn(lambda x, f: F.scaled_dot_product_attention(f(x), x, f(x)), nn.Linear(8, 8)), sequence),
    "cells": (Fn(lambda x, f: torch.stack([f(t) for t in x.unbind(1)], 1), nn.GRUCell(8, 3)), sequence),
    "layouts": (Fn(mixed_layouts, nn.Linear(8, 3), nn.Linear(3, 2)), sequence),
    "slices": (Fn(sliced, nn.Linear(4, 6)), row),
    "joined": (Fn(joined, nn.Linear(4, 2), nn.Linear(4, 2)), row),
    "one by one": (Fn(one_by_one, nn.Linear(4, 2)), row),
    "bilinear": (Fn(lambda x, f: f(x, x.tanh()), nn.Bilinear(4, 4, 2)), row),
    "weight norm": (parametrizations.weight_norm(nn.Linear(4, 3)), row),
    "derivative": (Derivative(), row[:, :2]),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_networks_that_keep_samples_apart(name):
    model, x = KEPT[name]
    assert keeps_apart(walk(model, x), N)


class Own(torch.autograd.Function):
    """Nobody knows what it does."""

    @staticmethod
    def forward(ctx, h):
        return h * 1

    @staticmethod
    def backward(ctx, grad):
        return grad


NUMBERS = {  # which leave the samples apart as they are here, and would not with others
    "times a matrix": lambda h: torch.eye(N) @ h,
    "picked": lambda h: h[torch.arange(N)],
    "selected": lambda h: h.index_select(0, torch.arange(N)),
    "gathered": lambda h: h.gather(0, torch.arange(N)[:, None].expand_as(h)),
    "added up": lambda h: torch.zeros_like(h).index_add(0, torch.arange(N), h),
    "centred by 0": lambda h: h - 0.0 * h.mean(0),
    "a weighted sum": lambda h: h + torch.zeros(N) @ h,
    "rolled by 0": lambda h: h.roll(0, 0),
    "a function of one's own": Own.apply,
    "written": lambda h: h.new_zeros(h.shape).index_put((torch.arange(N),), h),
    "attention among samples": lambda h: F.softmax(1e9 * torch.eye(N) + h @ h.T, 1) @ h,
    "sorted": lambda h: h.sort(0).values,
    "another view": lambda h: h.T.reshape(3, 2, -1).transpose(0, 1).reshape(N, -1),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_decide(name):
    f = nn.Linear(4, 3)
    assert keeps_apart(walk(Fn(lambda x, f: f(x).tanh(), f), row), N)
    assert not keeps_apart(walk(Fn(lambda x, f: NUMBERS[name](f(x)).tanh(), f), row), N)


LAYOUTS = {
    "first": (lambda x: x, lambda h: h, 15, PLACES[0]),
    "time": (lambda x: x.transpose(0, 1), lambda h: h.transpose(0, 1), 3, PLACES[1]),
    "flat": (lambda x: x.flatten(0, 1), lambda h: h.unflatten(0, (N, 5)), 15, PLACES[0]),
    "flat-time": (
        lambda x: x.transpose(0, 1).flatten(0, 1),
        lambda h: h.unflatten(0, (5, N)).transpose(0, 1),
        3,
        PLACES[2],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_axes_of_a_layer_in_each_layout(name):
    turn, back, stride, expected = LAYOUTS[name]
    f = nn.Linear(8, 3)
    h = f(turn(sequence))
    edge = get_gradient_edge(h)
    axis = sample_axes(Walk(back(h).tanh(), list(f.parameters())), N)[edge.node, edge.output_nr]
    assert axis == Axis(0, N, stride)
    assert [place for place in PLACES if all_at(place, axis, edge, N)] == [expected]


def test_outputs_that_are_a_parameter():
    p = nn.Parameter(torch.randn(N, 2))
    assert sample_axes(Walk(p, [p]), N) == {}


def test_structure_and_sizes():
    """The same network on other data has the same numbers; another one has not."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    here, there = walk(model, row), walk(model, row + 1)
    assert (here.structure, here.sizes) == (there.structure, there.sizes)
    other = walk(model, row[:4])
    assert here.structure == other.structure
    assert here.sizes != other.sizes
    changed = nn.Sequential(model[0], nn.Sigmoid(), model[2])
    assert walk(changed, row).structure != here.structure
    turned = Walk(model[2](model[0](row).softmax(1)), list(model.parameters()))
    coupled = Walk(model[2](model[0](row).softmax(0)), list(model.parameters()))
    assert (turned.structure, turned.sizes != coupled.sizes) == (coupled.structure, True)
