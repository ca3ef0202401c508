"""Blocks of layers that see none of the samples."""

from __future__ import annotations

import copy

import pytest
import torch

import marquardt as mq
from support.found import PLAIN, routed
from support.reference import error
from support.steps import theta

pytestmark = pytest.mark.usefixtures("double")


def test_an_expert_without_samples_has_empty_rows():
    model, x, y = routed(4), torch.randn(6, 3), torch.randn(6, 2)
    other = copy.deepcopy(model)
    mq.LM(model, "mse", curvature=mq.Dense(small=0), damping=mq.Identity(), **PLAIN).step(x, y)
    mq.LM(other, "mse", curvature=mq.Gram(), damping=mq.Identity(), **PLAIN).step(x, y)
    assert error(theta(model), theta(other)) < 1e-10
