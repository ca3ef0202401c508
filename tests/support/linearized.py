"""Every case linearised, and what is expected of it."""

from __future__ import annotations

from functools import cache

import pytest
from torch import Tensor, nn

import marquardt as mq
from marquardt.jacobian.linearization import Linearization
from marquardt.jacobian.objective import Objective
from marquardt.jacobian.passes import Facts
from marquardt.losses import resolve
from marquardt.model.batch import Batch
from support import reference
from support.cases import CASES, Problem, build

EVERY_CASE = pytest.mark.parametrize("name", CASES)
HARD_LABELS = ["ce", "ce_weighted", "ce_sum", "conv_batchnorm_classifier", "lstm", "embedding"]


def linearize(p: Problem, rows=mq.Exact(), chunk=None):
    return mq.linearize(p.model, p.loss, p.x, p.y, p.weight, params=p.params, rows=rows, chunk=chunk)


@cache
def expected(name: str, rows: str = "exact") -> reference.Quadratic:
    return reference.quadratic(*build(name), rows=rows)


def planned(model: nn.Module, known: Facts, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Linearization:
    """As an optimizer does it: what one step has found out is there for the next."""
    objective = Objective(model, resolve("mse"), list(model.parameters()))
    return Linearization(objective, [Batch(x, y, weight)], known=known)


REPRESENTATIONS = pytest.mark.parametrize(
    "curvature", [mq.Dense(), mq.Gram(), mq.Dense(chunk=2), mq.Gram(chunk=2)], ids=str
)
