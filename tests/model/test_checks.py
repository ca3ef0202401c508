"""Models that cannot be linearised are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import marquardt as mq
from support.unchanged import everything


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), nn.SyncBatchNorm(4)], ids=["affine", "plain", "sync"]
)
def test_batch_norm_in_train_mode_is_refused(norm):
    model = nn.Sequential()
    model.add_module("inner", nn.Linear(3, 4))
    model.add_module("normaliser", norm)
    before = everything(model)
    with pytest.raises((ValueError, RuntimeError), match="normaliser") as refusal:
        mq.Dense().represent(mq.linearize(model, "mse", torch.randn(5, 3), torch.randn(5, 4)))
    assert "eval()" in str(refusal.value)
    assert everything(model) == before


def test_batch_norm_without_running_statistics_is_refused():
    """eval() does not help there: the batch's own statistics are used in either mode."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval()
    with pytest.raises((ValueError, RuntimeError), match="BatchNorm1d"):
        mq.Dense().represent(mq.linearize(model, "mse", torch.randn(5, 3), torch.randn(5, 4)))


def test_nothing_to_train_is_refused():
    model = nn.Linear(3, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="requires_grad"):
        mq.Dense().represent(mq.linearize(model, "mse", torch.randn(5, 3), torch.randn(5, 2)))
