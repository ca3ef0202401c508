"""Losses of single outputs where float32 underflows."""

from __future__ import annotations

import pytest
import torch

from marquardt.losses import BinaryCrossEntropy, Poisson
from support.losses import close, image


@pytest.mark.parametrize("y", [0.0, 0.3, 1.0])
def test_extreme_binary_logits_in_float32(y):
    z = torch.tensor([-120.0, -30.0, 0.0, 30.0, 120.0])
    y = torch.full_like(z, y)
    loss = BinaryCrossEntropy(pos_weight=torch.tensor([2.5]))
    exact, root = loss.gradient(z.double(), y.double()), loss.root(z, y)
    H = loss.root(z.double(), y.double()).S.square()
    assert root.S.isfinite().all()
    assert root.u.isfinite().all()
    for g in (loss.gradient(z, y), image(root).flatten()):
        assert ((g.double() - exact).abs() <= 1e-6 * exact.abs() + 1e-37).all()
    close(root.S.square().double(), H, 1e-6)


def test_poisson_at_vanishing_rates_in_float32():
    z, y = torch.tensor([-120.0, -120.0, -200.0, 3.0]), torch.tensor([0.0, 3.0, 1e6, 2.0])
    root = Poisson().root(z, y)
    exact = Poisson().gradient(z.double(), y.double())
    assert root.S.isfinite().all()
    assert root.u.isfinite().all()
    assert ((image(root).flatten().double() - exact).abs() <= 1e-6 * exact.abs() + 1e-37).all()
    close(root.S.square().flatten().double(), z.double().exp(), 1e-6)
