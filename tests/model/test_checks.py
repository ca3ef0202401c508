"""Models that cannot be linearised are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import marquardt as mq
from support.unchanged import everything

STATISTICS = nn.BatchNorm1d(4, track_running_stats=False).eval()  # of the batch itself in either mode
REFUSED = {
    "affine": (nn.BatchNorm1d(4), ["normaliser", "eval()"]),
    "plain": (nn.BatchNorm1d(4, affine=False), ["normaliser", "eval()"]),
    "sync": (nn.SyncBatchNorm(4), ["normaliser", "eval()"]),
    "without statistics": (STATISTICS, ["BatchNorm1d"]),
    "nothing to train": (nn.Linear(4, 4).requires_grad_(False), ["requires_grad"]),
}


@pytest.mark.parametrize(("layer", "says"), REFUSED.values(), ids=REFUSED)
def test_models_that_are_refused(layer, says):
    model = nn.Sequential()
    model.add_module("inner", nn.Linear(3, 4).requires_grad_(not isinstance(layer, nn.Linear)))
    model.add_module("normaliser", layer)
    before = everything(model)
    with pytest.raises((ValueError, RuntimeError)) as refusal:
        mq.Dense().represent(mq.linearize(model, "mse", torch.randn(5, 3), torch.randn(5, 4)))
    assert all(word in str(refusal.value) for word in says)
    assert everything(model) == before
