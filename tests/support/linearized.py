"""Every case linearised, and what is expected of it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import marquardt as mq
from support import reference
from support.cases import CASES, Problem, build

EVERY_CASE = pytest.mark.parametrize("name", CASES)
HARD_LABELS = ["ce", "ce_weighted", "ce_sum", "conv_batchnorm_classifier", "lstm", "embedding"]


def linearize(p: Problem, rows=mq.Exact(), chunk=None):
    return mq.linearize(p.model, p.loss, p.x, p.y, p.weight, params=p.params, rows=rows, chunk=chunk)


@cache
def expected(name: str, rows: str = "exact") -> reference.Quadratic:
    return reference.quadratic(*build(name), rows=rows)


REPRESENTATIONS = pytest.mark.parametrize(
    "curvature", [mq.Dense(), mq.Gram(), mq.Dense(chunk=2), mq.Gram(chunk=2)], ids=str
)


f64 = torch.float64
# To the end, from nothing, and what it finds is what it returns.
EXACT = mq.MatrixFree(tolerance=0.0, iterations=2000, warm=0.0, backtrack=False)


def represent(p: Problem, representation=EXACT, rows=mq.Exact(), chunk=None):
    return representation.represent(linearize(p, rows, chunk))


def scalar(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=f64)


def coupled() -> Problem:
    """BatchNorm in train mode: every output depends on every sample."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ELU(), nn.Linear(4, 3)).double()
    return Problem(model, "cross_entropy", torch.randn(6, 3, dtype=f64), torch.randint(3, (6,)))
