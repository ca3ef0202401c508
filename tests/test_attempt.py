"""One λ of a step: what a search along the line may try, and what is an error instead of a failed step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.attempt import attempt, blame_gradient
from marquardt.iteration import Parts, begin, damped
from marquardt.jacobian.linearization import Linearization
from marquardt.state import State
from support.parts import Never
from support.steps import PLAIN, problem

pytestmark = pytest.mark.usefixtures("double")


class Recorded:
    """A line search that asks for some rates and takes the largest that has a loss."""

    along_step = False

    def __init__(self, *rates: float) -> None:
        self.rates = rates

    def search(self, along, loss, lr, tried):
        self.tried, self.losses = tried, along(self.rates)
        found = [(rate, f) for rate, f in zip(self.rates, self.losses, strict=True) if math.isfinite(f)]
        return max(found) if found else None


def attempted(search: Recorded, radius: float | None, lr: float = 1.0):
    model, x, y = problem()
    parts = Parts(**{**PLAIN, "rows": mq.Exact(), "acceptance": Never(), "line_search": search, "radius": radius})
    lin: Linearization = mq.linearize(model, "mse", x, y)
    G = mq.Dense().represent(lin)
    start = begin(State(1.0), lin.level, lin.theta.dtype)
    with torch.no_grad():
        return attempt(parts, lin, damped(parts, G, start.old, False), start, 0.1, lr, [])


@pytest.mark.parametrize("lr", [1.0, 0.5])
def test_a_search_sees_no_point_beyond_the_radius(lr):
    search = Recorded(0.1 * lr, lr, 1.1 * lr, 4 * lr)
    end = attempted(search, 1e-2, lr)
    assert end.rule == "search"
    assert [math.isfinite(f) for f in search.losses] == [True, True, False, False]
    assert end.lr == lr
    assert end.lr * end.length == pytest.approx(1e-2, rel=1e-10)


def test_without_a_radius_it_sees_all():
    search = Recorded(0.1, 1.0, 1.1, 4.0)
    assert attempted(search, None).lr == 4.0
    assert all(math.isfinite(f) for f in search.losses)


def test_the_point_that_failed_is_told():
    """Without momentum the plain step is the step, cut back or not."""
    for radius in (None, 1e-2):
        search = Recorded(0.5)
        end = attempted(search, radius)
        assert search.tried == (1.0, end.found.new_loss)


def test_a_gradient_that_is_not_finite_is_blamed_on_its_parameter():
    model = nn.Linear(2, 1)
    parameters = mq.linearize(model, "mse", torch.randn(3, 2), torch.randn(3, 1)).parameters
    blame_gradient(parameters, torch.ones(3))
    with pytest.raises(ValueError, match="'bias'"):
        blame_gradient(parameters, torch.tensor([1.0, 2.0, math.inf]))
