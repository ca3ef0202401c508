"""Two classes −1 and 1."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from marquardt.losses import Hinge, SoftMargin
from support.losses import MATRIX, conforms, f64, is_torchs, normal
from support.unchanged import refused


def data():
    torch.manual_seed(0)
    return 2 * normal(MATRIX), 2 * torch.randint(2, MATRIX).to(f64) - 1


@pytest.mark.parametrize("loss", [Hinge(), Hinge(0.3), SoftMargin()], ids=repr)
def test_conforms(loss):
    z, y = data()
    conforms(loss, z, y)
    with refused("targets[0, 0] is 0", "2y − 1"):
        loss.check(z, torch.zeros_like(y))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_soft_margin_is_torchs(reduction):
    is_torchs(nn.SoftMarginLoss(reduction=reduction), SoftMargin(reduction=reduction), *data())


def test_squared_hinge_is_torchs():
    """Of two classes, by torch's own with several of them."""
    z = torch.linspace(-3, 3, 12, dtype=f64)
    found = [nn.MultiMarginLoss(p=2, margin=0.7)(torch.stack((0 * t, t))[None], torch.tensor([1])) for t in z]
    torch.testing.assert_close(Hinge(0.7).ell(z, torch.ones_like(z)), 2 * torch.stack(found))


def test_a_margin_is_positive():
    with refused("margin must be positive and finite, got 0.0"):
        Hinge(0.0)
