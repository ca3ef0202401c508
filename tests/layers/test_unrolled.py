"""The backward pass of small convolutions by products, against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import marquardt.layers.shortcuts as module
from marquardt.layers.shortcuts import unrolled
from support.reference import error

pytestmark = pytest.mark.usefixtures("double")

# Kernel, options, and how many products there are with a band for each line.
CONVOLUTIONS = {
    "plain": (3, {}, 7),
    "oblong": ((2, 5), {}, 8),
    "stride": (3, {"stride": 2}, 4),
    "stride and padding": (3, {"stride": (2, 1), "padding": (1, 2)}, 5),
    "more padding than kernel": (2, {"padding": 3}, 14),
    "dilation": (2, {"dilation": (2, 3), "padding": 1}, 9),
    "groups": (3, {"groups": 2}, 7),
    "stride beyond the kernel": (1, {"stride": 3}, 3),
    "most lines are seen": ((7, 3), {}, 1),
}


@pytest.mark.parametrize("band", [1, 40, 1 << 10])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients(monkeypatch, name, band):
    monkeypatch.setattr(module, "BAND", band)
    kernel, options, _ = CONVOLUTIONS[name]
    torch.manual_seed(0)
    sides = (kernel, kernel) if isinstance(kernel, int) else kernel
    x = torch.randn(500, 2, 9, 8, requires_grad=True)
    weight = torch.randn(2, 2 // options.get("groups", 1), *sides, requires_grad=True)
    bias = torch.randn(2, requires_grad=True)
    y, expected = unrolled(x, weight, bias, **options), F.conv2d(x, weight, bias, **options)
    assert torch.equal(y, expected)
    delta = torch.randn_like(y)
    for found, true in zip(
        torch.autograd.grad(y, (x, weight, bias), delta), torch.autograd.grad(expected, (x, weight, bias), delta),
        strict=True,
    ):  # fmt: skip
        assert error(found, true) < 1e-12


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_bands(monkeypatch, name):
    """Lines of the outputs one after the other, with the inputs that they see; all at once if that is most of them."""
    kernel, options, products = CONVOLUTIONS[name]
    x, weight = torch.randn(1, 2, 9, 8), torch.randn(2, 2, *((kernel, kernel) if isinstance(kernel, int) else kernel))
    settings = [options.get(name, default) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))]
    height = F.conv2d(x, weight, None, *settings).shape[2]
    for band, count in ((1, products), (1 << 10, 1)):
        monkeypatch.setattr(module, "BAND", band)
        found = module._lines((1, 2, height, 8), 9, weight.shape[2], (*map(module._pair, settings), 1))
        assert len(found) == count
        assert [k for lines, _ in found for k in range(height)[lines]] == list(range(height))
