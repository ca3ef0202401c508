"""Max-pools by slices against torch's own, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from marquardt.layers.shortcuts import Largest, largest

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


def test_a_model():
    model, x = (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.MaxPool2d(2, return_indices=True)),
        torch.randn(2, 1, 12, 12),
    )
    with torch.no_grad():
        expected = model(x)
        with Largest():
            found = model(x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_torch_does_not_pool_without_a_gradient(monkeypatch):
    model, x = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2)), torch.randn(2, 1, 12, 12)
    with torch.no_grad():
        expected = model(x)
    monkeypatch.setattr(torch, "max_pool2d", None)
    with torch.no_grad(), Largest():
        assert torch.equal(model(x), expected)
