"""When a run on the same data has converged."""

from __future__ import annotations

import math

import pytest

from marquardt.policies import Judgement
from marquardt.policies.convergence import FAINT, IDLE, Convergence
from support.parts import ending, start

FEW = 0.9 * FAINT * 1e-3  # what such a step predicts
LITTLE = 10.0 - 0.5 * FAINT * 1e-3


def quiet(loss: float = LITTLE, predicted: float = FEW, **others):
    return ending("decrease", loss, judgement=Judgement("decrease", False, math.nan, predicted, 1.0), **others)


@pytest.mark.parametrize(
    ("change", "idle"),
    [
        ({}, 4),
        ({"repeats": 1}, 0),  # on changing batches nothing converges
        ({"predicted": 1.1 * FAINT * 1e-3}, 0),
        ({"loss": 10.0 - 1.1 * FAINT * 1e-3}, 0),
        ({"idle_from": 10.0 + 0.6 * FAINT * 1e-3}, 0),  # all in all they have found something
        ({"predicted": math.inf, "low": 10.0 - 0.9 * FAINT * 1e-3}, 4),  # there is nothing left to find
        ({"cut": True}, 0),  # the radius may be why
    ],
)
def test_idle_steps(change, idle):
    here = start(low=change.get("low", 1.0), repeats=change.get("repeats", 2))
    end = quiet(change.get("loss", LITTLE), change.get("predicted", FEW), cut=change.get("cut", False))
    assert Convergence(3, change.get("idle_from", 10.0)).after(here, end).idle == idle


def test_the_first_idle_step_says_where_they_began():
    found = Convergence(0, 99.0).after(start(repeats=2), quiet())
    assert (found.idle, found.idle_from) == (1, 10.0)


def test_convergence_after_idle_steps():
    """With a λ above λ₀ that may be why they predict so little."""
    here = start(repeats=9)
    assert Convergence(IDLE - 1, 10.0).after(here, quiet()).reached(1.0, 1.0)
    assert not Convergence(IDLE - 2, 10.0).after(here, quiet()).reached(1.0, 1.0)
    assert not Convergence(IDLE - 1, 10.0).after(here, quiet()).reached(1.1, 1.0)


def test_unjudged_steps_are_counted_by_the_step():
    assert Convergence(unjudged=2).after(start(), ending(unjudged=3)).unjudged == 3


def test_raised():
    assert Convergence(3, 2.0, 1).raised(0.5, 0.0) == Convergence(3, 2.5, 1)
