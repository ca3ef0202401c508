"""Blocks of layers that see none of the samples, and sums of products."""

from __future__ import annotations

import copy

import pytest
import torch

import marquardt as mq
from marquardt.layers.blocks import HALF, add_product, add_square
from support.modules import PLAIN, routed
from support.reference import error
from support.steps import theta

pytestmark = pytest.mark.usefixtures("double")


def test_an_expert_without_samples_has_empty_rows():
    model, x, y = routed(4), torch.randn(6, 3), torch.randn(6, 2)
    other = copy.deepcopy(model)
    mq.LM(model, "mse", curvature=mq.Dense(small=0), damping=mq.Identity(), **PLAIN).step(x, y)
    mq.LM(other, "mse", curvature=mq.Gram(), damping=mq.Identity(), **PLAIN).step(x, y)
    assert error(theta(model), theta(other)) < 1e-10


@pytest.mark.parametrize("m", [5, HALF, HALF + 1])
def test_half_of_a_symmetric_product(m):
    """Added to what is there, also in a part of a larger matrix."""
    X, whole = torch.randn(m, 6), torch.ones(m + 2, m + 2)
    add_square(whole[1:-1, 1:-1], X)
    add_product(whole[1:-1, 1:-1], X, X)
    expected = torch.ones(m + 2, m + 2)
    expected[1:-1, 1:-1] += 2 * X @ X.T
    assert error(whole, expected) < 1e-13
