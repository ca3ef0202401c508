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
from support.ranks import run, shard
from support.reference import error
from support.steps import theta


def factors(m: int, width: int) -> tuple[torch.Tensor, bool, bool]:
    K, ranks = matrix(m), of(dist.group.WORLD)
    L, failed = shared_factor(K, ranks, width)
    return L, bool(failed), bool(shared_factor(matrix(m) - 20 * torch.eye(m), ranks, width)[1])


def matrix(m: int) -> torch.Tensor:
    X = torch.randn(m, m + 5, generator=torch.Generator().manual_seed(0))
    return X @ X.T


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("m", "width"), [(37, 5), (16, 8), (7, 9)])
def test_the_factor(double, ranks, m, width):
    for L, failed, spoilt in run(factors, ranks, m, width):
        assert not failed
        assert spoilt
        assert error(L, torch.linalg.cholesky(matrix(m))) < 1e-12


def solved(curvature) -> torch.Tensor:
    """Three steps in which every factorisation is one of all ranks."""
    solve.factors_together = lambda *_: True
    solve.shared_factor = functools.partial(shared_factor, width=7)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    x, y = torch.randn(12, 3), torch.randn(12, 2)
    opt = mq.LM(model, "mse", curvature=curvature, group=dist.group.WORLD)
    x, y = (shard(t, dist.get_rank(), dist.get_world_size()) for t in (x, y))
    for _ in range(3):
        assert opt.step(x, y).accepted
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
