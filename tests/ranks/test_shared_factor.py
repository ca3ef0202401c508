"""A Cholesky decomposition that the ranks do together."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

import marquardt as mq
from marquardt.curvature import direct as solve
from marquardt.curvature.cost import factors_together
from marquardt.curvature.direct import shared_factor, spd_solve
from marquardt.ranks import of
from support.ranks import run
from support.reference import error
from support.steps import theta


def factors(m: int, width: int) -> tuple[torch.Tensor, bool, bool]:
    torch.manual_seed(0)
    X = torch.randn(m, m + 5)
    ranks = of(dist.group.WORLD)
    L, failed = shared_factor(X @ X.T, ranks, width)
    _, spoilt = shared_factor(X @ X.T - 20 * torch.eye(m), ranks, width)
    return L, bool(failed), bool(spoilt)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("m", "width"), [(37, 5), (16, 8), (7, 9)])
def test_the_factor(double, ranks, m, width):
    torch.manual_seed(0)
    X = torch.randn(m, m + 5)
    for L, failed, spoilt in run(factors, ranks, m, width):
        assert not failed
        assert spoilt
        assert error(L, torch.linalg.cholesky(X @ X.T)) < 1e-12


def solved(curvature) -> torch.Tensor:
    """Three steps in which every factorisation is one of all ranks."""
    solve.factors_together = lambda *_: True
    solve.shared_factor = functools.partial(shared_factor, width=7)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    x, y = torch.randn(12, 3), torch.randn(12, 2)
    opt = mq.LM(model, "mse", curvature=curvature, group=dist.group.WORLD)
    part = slice(dist.get_rank() * 12 // dist.get_world_size(), (dist.get_rank() + 1) * 12 // dist.get_world_size())
    for _ in range(3):
        assert opt.step(x[part], y[part]).accepted
    H = torch.eye(9) * -1.0
    with pytest.raises(solve.FactorizationError):
        spd_solve(H, torch.zeros(9), torch.ones(9), [], of(dist.group.WORLD))
    return theta(model)


@pytest.mark.parametrize("curvature", [mq.Gram(), mq.Dense()], ids=["gram", "dense"])
def test_steps_with_it(double, curvature):
    (alone,) = run(solved, 1, curvature)
    for found in run(solved, 2, curvature):
        assert error(found, alone) < 1e-11


def test_when_it_pays():
    assert not factors_together(10**6, 1, 4, cuda=False)
    assert not factors_together(500, 4, 4, cuda=False)
    assert factors_together(20_000, 4, 4, cuda=False)
