"""Rows that are written out if they are fewer numbers than a and δ: the same as those of the block that they are of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.layers.blocks import Bilinear, Product, Written, written
from marquardt.metric import Part
from support.reference import error

pytestmark = pytest.mark.usefixtures("double")


def made(R: int, P: int, G: int = 1, O: int = 3, I: int = 2, bias: bool = True, N: int = 4) -> Bilinear:
    shape = (O * G, I) if O * I > 1 else (G,)
    return Bilinear(
        torch.randn(N, P, G, I), torch.randn(R, N, P, G, O), torch.randn(shape), torch.randn(G * O) if bias else None
    )


SHAPES = {
    "plain": (2, 9),
    "one row": (1, 9),
    "groups": (2, 9, 2),
    "scale": (3, 9, 4, 1, 1),
    "no bias": (2, 9, 1, 3, 2, False),
}


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_products(shape, there):
    """Before the rows are there, and after."""
    block = made(*shape)
    found, rows = written(block), block.rows(torch.float64)
    assert isinstance(found, Written)
    if there:
        found.partial_traces()
        assert found._there(torch.float64)
    v, w = torch.randn(block.columns), torch.randn(block.m)
    sizes = [p.numel() for p in block.params]
    assert error(found.apply(v.split(sizes)), rows @ v) < 1e-13
    assert error(found.pull(w), rows.T @ w) < 1e-13
    assert error(found.diagonal(), rows.square().sum(0)) < 1e-13
    assert error(found.samples(torch.float64), block.samples(torch.float64)) < 1e-13
    K, image = torch.zeros(block.m, block.m), torch.zeros(block.m)
    found.gram(K, found, Product(v.split(sizes), image))
    assert error(K, rows @ rows.T) < 1e-13
    assert error(image, rows @ v) < 1e-13
    D = [Part(torch.rand(size) + 0.5) for size in sizes]
    assert error(found.whitened(D).rows(torch.float64), block.whitened(D).rows(torch.float64)) < 1e-13
    assert error(found.rows(torch.float64), rows) < 1e-13


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_traces(shape):
    block = made(*shape)
    for here, there in zip(written(block).partial_traces(), block.partial_traces(), strict=True):
        assert [id(p) for p in here.params] == [id(p) for p in there.params]
        assert error(here.left, there.left) < 1e-13
        assert (here.right is None) == (there.right is None)
        assert here.right is None or error(here.right, there.right) < 1e-13


def test_another_precision():
    """Rows of float32 are not taken for those of float64."""
    block = made(2, 9)
    block.factors = block.a.float(), block.delta.float()
    block.weight, block.bias = block.weight.float(), block.bias.float()
    block.params = [block.weight, block.bias]
    found = written(block)
    found.partial_traces()
    w = torch.randn(block.m)
    assert found.pull(w).dtype == torch.float64
    assert error(found.pull(w), block.rows(torch.float64).T @ w) < 1e-13


@pytest.mark.parametrize("shape", [(2, 1), (9, 2, 1, 8, 8)], ids=["one position", "more rows than positions"])
def test_left_alone(shape):
    block = made(*shape)
    assert written(block) is block


@pytest.mark.parametrize("rows", [mq.Exact(), mq.Sampled(3)])
def test_convolution_with_a_kronecker_metric(rows):
    """Steps with written rows agree with those of a matrix: many positions, up and down."""
    x, y = torch.randn(6, 2, 6, 6), torch.randint(0, 3, (6, 3, 3))
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.AvgPool2d(2),
        nn.ConvTranspose2d(4, 3, 2, 2), nn.Tanh(), nn.Conv2d(3, 3, 2, 2),
    )  # fmt: skip
    loss = nn.CrossEntropyLoss()
    blocks = mq.linearize(net, loss, x, y, rows=rows).whole().blocks
    assert sum(isinstance(block, Written) for block in blocks) >= 3
    found = []
    for curvature in (mq.Gram(), mq.Dense()):
        model = nn.Sequential(*net)
        start = [p.detach().clone() for p in model.parameters()]
        opt = mq.LM(model, loss, curvature=curvature, rows=rows, schedule=mq.Constant(0.1))
        for shift in range(3):
            opt.step(x + shift, y)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        with torch.no_grad():
            for p, old in zip(model.parameters(), start, strict=True):
                p.copy_(old)
    assert error(found[0], found[1]) < 1e-8
