"""Classes in an order."""

from __future__ import annotations

import math

import pytest
import torch

from marquardt.losses import Ordinal
from support.losses import close, conforms, f64, image, normal
from support.unchanged import refused


def data(K=4):
    torch.manual_seed(0)
    return (0.1 + normal((4, K - 1)).abs()).cumsum(1) - 1.5, torch.arange(4) % K


@pytest.mark.parametrize("K", [2, 3, 4, 6])
def test_conforms(K):
    z, y = data(K)
    close(Ordinal().ell(z, y), torch.stack([probabilities(z)[i, k] for i, k in enumerate(y)]).log().neg())
    conforms(Ordinal(), z, y)


def probabilities(z):
    """P(y = k), k = 0, …, K − 1: they add up to 1."""
    below = torch.cat((torch.zeros(4, 1, dtype=f64), z.sigmoid(), torch.ones(4, 1, dtype=f64)), 1)
    return below.diff(dim=1)


def test_extreme_outputs_in_float32():
    """The gradient stays exact where the curvature underflows."""
    z = torch.tensor([[-200.0, -150.0], [150.0, 200.0], [-100.0, 100.0], [-1e-3, 1e-3]])
    for y in (torch.tensor([0, 2, 1, 1]), torch.tensor([1, 1, 0, 2])):
        root, exact = Ordinal().root(z, y), Ordinal().gradient(z.double(), y)
        assert root.S.isfinite().all()
        assert root.u.isfinite().all()
        for g in (Ordinal().gradient(z, y), image(root)[:, 0]):
            assert ((g.double() - exact).abs() <= 1e-5 * exact.abs() + 1e-37).all()


def test_outputs_that_cross_are_no_trial_point():
    y = torch.tensor([1])
    assert not Ordinal().ell(torch.tensor([[1.0, 0.0]]), y).isfinite().any()
    assert Ordinal().ell(torch.tensor([[0.0, 0.0]]), y) == math.inf
    with refused("a step of outputs[0, 0] is -1", "must increase"):
        Ordinal().check(torch.tensor([[1.0, 0.0]]), y)


def test_what_is_refused():
    z = torch.tensor([[0.0, 1.0]])
    with refused("targets[0] is 3", "2 outputs tell 3 classes apart"):
        Ordinal().check(z, torch.tensor([3]))
    with refused("got torch.float32", "targets.long()"):
        Ordinal().check(z, torch.zeros(1))
    with refused("outputs have shape (1, 2), targets (1, 2)"):
        Ordinal().check(z, torch.tensor([[0, 1]]))
