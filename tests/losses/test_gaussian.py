"""A normal distribution whose mean and variance are both outputs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.func import hessian

from marquardt.losses import GaussianNLL
from support.losses import close, conforms, f64, is_torchs, normal
from support.unchanged import refused

SHAPES = [(4, 2), (4, 6), (4, 4, 3)]


def data(shape, variance):
    torch.manual_seed(0)
    z = normal(shape)
    mean, spread = z.chunk(2, 1)
    return torch.cat((mean, spread.exp() if variance else spread), 1), normal(mean.shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variance", [False, True], ids=["log", "variance"])
def test_conforms(shape, variance):
    conforms(GaussianNLL(variance=variance), *data(shape, variance))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"full": True}, {"eps": 0.5}], ids=str)
def test_it_is_torchs(shape, options):
    z, y = data(shape, True)
    mean, v = z.chunk(2, 1)
    is_torchs(nn.GaussianNLLLoss(**options), GaussianNLL(variance=True, **options), z, y, mean, y, v)


@pytest.mark.parametrize("variance", [False, True], ids=["log", "variance"])
def test_the_curvature_is_the_mean_hessian_of_predicted_targets(variance):
    """By Gauss-Hermite quadrature, which is exact for the polynomials in y that the Hessian holds."""
    z, _ = data((4, 2), variance)
    loss = GaussianNLL(variance=variance)
    nodes = torch.tensor([-math.sqrt(3), 0.0, math.sqrt(3)], dtype=f64)
    chances = torch.tensor([1, 4, 1], dtype=f64) / 6
    S = loss.root(z, z[:, :1]).S
    for row, SSt in zip(z, (S @ S.mT)[:, 0], strict=True):
        v = row[1] if variance else row[1].exp()
        at = [hessian(lambda t, y=y: loss.value(t[None], y.reshape(1, 1)))(row) for y in row[0] + v.sqrt() * nodes]
        close(SSt, sum(c * H for c, H in zip(chances, at, strict=True)))


def test_a_variance_that_vanishes():
    """Below eps it counts as eps; a negative one is no trial point, and refused at the start."""
    loss, y = GaussianNLL(variance=True, eps=0.1), torch.zeros(1, 1)
    assert loss.ell(torch.tensor([[0.0, 0.0]]), y) == loss.ell(torch.tensor([[0.0, 0.1]]), y)
    assert loss.root(torch.tensor([[0.0, 0.0]]), y).S.isfinite().all()
    bad = torch.tensor([[0.0, -0.1]])
    assert loss.ell(bad, y) == math.inf
    with refused("variance[0, 0] is -0.1", "F.softplus"):
        loss.check(bad, y)


def test_what_is_refused():
    with refused("outputs have shape (4, 3)", "k means and then logarithms of variances"):
        GaussianNLL().check(torch.zeros(4, 3), torch.zeros(4, 1))
    with refused("outputs have shape (4, 1), targets (4, 2)"):
        GaussianNLL().check(torch.zeros(4, 2), torch.zeros(4, 2))
    with refused("eps must be positive and finite, got 0.0"):
        GaussianNLL(eps=0.0)
