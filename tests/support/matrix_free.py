"""MatrixFree to the end, and what it is compared with."""

from __future__ import annotations

import torch
from torch import nn

import marquardt as mq
from support.cases import Problem
from support.linearized import linearize

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
