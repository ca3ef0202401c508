"""Each stop by itself, with its sentence."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.training.history import Entry, Seen, Stops
from support.fits import mse, net, noisy_sine

X, Y = noisy_sine()
NONE = Stops(None, None, None, None, None, None)
ENTRY = Entry(10, 9, 0.5, 0.6, 0.7, 1.0, 0.1, "decrease", 1.0, 1.0, 3.0)
SEEN = Seen(loss=0.5, steepest=10.0, lam=2.0, least=0.4, best_step=3, fails=7)


@pytest.mark.parametrize(
    ("stop", "entry", "seen", "words"),
    [
        ({"steps": 10}, {}, {}, "10 steps are done"),
        ({"steps": 11}, {}, {}, None),
        ({"seconds": 3.0}, {}, {}, "3 s are over"),
        ({"seconds": 3.1}, {}, {}, None),
        ({"goal": 0.5}, {}, {}, "the goal is reached: the loss is 0.5, at most 0.5"),
        ({"goal": 0.49}, {}, {}, None),
        ({"goal": 0.45}, {"loss": 0.1}, {}, None),  # of one mini-batch
        ({"min_gradient": 0.01}, {}, {}, "the gradient is 0.1, at most 0.01 of the largest"),
        ({"min_gradient": 0.009}, {}, {}, None),
        ({"min_gradient": 1.0}, {"gradient": math.nan}, {}, None),
        ({"min_gradient": 0.01}, {}, {"settled": False}, None),  # one minimum follows another
        ({"max_lam": 1.9}, {}, {}, "λ is 2, above 1.9: no step lowers the loss"),
        ({"max_lam": 2.0}, {}, {}, None),
        ({"patience": 7}, {}, {}, "validation: 7 in a row without a loss below 0.4"),
        ({"patience": 8}, {}, {}, None),
        ({"patience": 0}, {}, {}, None),
        (
            {"patience": 5},
            {},
            {"fails": 0, "idle": 5, "highest": -12.5},
            "the log evidence was -12.5, and lower in 5 estimates since",
        ),
        ({"patience": 6}, {}, {"fails": 0, "idle": 5}, None),
        ({}, {"converged": True}, {}, "converged: no decrease is left"),
        ({}, {"converged": True}, {"settled": False}, None),
        ({}, {}, {"settled": True}, "settled: neither the effective parameters nor the noise"),
        ({}, {}, {}, None),
    ],
)
def test_reasons(stop, entry, seen, words):
    stops = Stops(**{**vars(NONE), **stop})
    found = stops.reason(ENTRY._replace(**entry), Seen(**{**vars(SEEN), **seen}))
    assert found == words or (words and found.startswith(words))


def test_before_the_first_step():
    assert NONE.reason(None, Seen()) is None
    assert Stops(steps=0).reason(None, Seen()) == "no steps were asked for"


def test_the_highest_evidence_so_far():
    """The last one of those that are alike."""
    seen = Seen()
    assert [seen.judged(value, k) for k, value in enumerate([-9.0, -3.0, -3.9, -4.1, math.nan, -3.5, -5.0])] == [
        True, True, True, False, False, True, False,
    ]  # fmt: skip
    assert (seen.highest, seen.best_step, seen.idle) == (-3.0, 5, 1)
    seen.begin_anew()
    assert [seen.judged(value, k) for k, value in enumerate([-9.0, -4.0, -3.0, -2.0, -2.5], 10)] == [
        False, False, False, True, True,
    ]  # fmt: skip
    assert (seen.highest, seen.best_step, seen.idle) == (-2.0, 14, 0)


def test_the_best_so_far():
    seen = Seen()
    assert [seen.found(loss, k) for k, loss in enumerate([3.0, 4.0, 3.0, 2.0, math.nan, 5.0])] == [
        True, False, False, True, False, False,
    ]  # fmt: skip
    assert (seen.least, seen.best_step, seen.fails) == (2.0, 3, 2)


# In whole fits.


def test_goal():
    result = mq.fit(net(), (X, Y), "mse", goal=0.1)
    assert result.reason.startswith("the goal is reached")
    losses = result.history["loss"]
    assert losses[-1] <= 0.1 < min(losses[:-1])


def test_the_units_of_the_loss_do_not_matter():
    """A straight line: the same number of steps if targets and weights are in other units."""
    ends = []
    for units in (2.0**-20, 1.0, 2.0**20):
        torch.manual_seed(0)
        model = nn.Linear(1, 1).double()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(units)
        result = mq.fit(model, (X, units * (X * 3 + 1)), "mse", min_gradient=1e-5)
        assert result.loss < 1e-8 * units**2
        ends.append((result.reason.partition(" is ")[0], len(result.history)))
    assert ends == [("the gradient", ends[0][1])] * 3


def test_converged():
    result = mq.fit(net(), (X, Y), "mse", weight_decay=0.1, min_gradient=None)
    assert result.reason.startswith("converged: no decrease is left")
    assert result.history[-1].converged


def test_patience():
    result = mq.fit(net(hidden=30), (X[:20], Y[:20]), "mse", validation=noisy_sine(20, seed=5), patience=4)
    assert result.reason.startswith("validation: 4 in a row")
    seen = [e for e in result.history if e.accepted]
    assert len(seen) == seen.index(result.history[result.best_step - 1]) + 5


def test_seconds(monkeypatch):
    ticks = itertools.count(step=0.25)
    monkeypatch.setattr("marquardt.training.run.time.perf_counter", lambda: next(ticks))
    result = mq.fit(net(), (X, Y), "mse", seconds=2.0)
    assert result.reason == "2 s are over"
    assert result.history[-1].seconds >= 2 > result.history[-2].seconds


def test_max_lam():
    """Where nothing is left to gain λ rises."""
    model = net()
    before = mse(model, X, Y)
    result = mq.fit(model, (X, Y), "mse", schedule=mq.TenFold(1.0), max_lam=10.0, acceptance=Never(), line_search=None)
    assert result.reason.startswith("λ is 1e+02, above 10")
    assert (result.best_step, result.loss) == (0, pytest.approx(before, rel=1e-12))
    assert mse(model, X, Y) == before


class Never:
    looks_back = False

    def judge(self, trial):
        return None


def test_no_steps():
    model = net()
    result = mq.fit(model, (X, Y), "mse", steps=0)
    assert (len(result.history), result.best_step, result.reason) == (0, 0, "no steps were asked for")
