"""Acceptance: the rules against their formulas."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import marquardt as mq
from marquardt.parts.judging import Trial
from support.parts import decades

NAN, INF = math.nan, math.inf


def uphill_by_hand(t: Trial, b: float, against_best: bool) -> tuple[str | None, float]:
    """The rule, and how far the inequality is from changing its mind."""
    if math.isfinite(t.new_loss) and t.new_loss < t.loss:
        return "decrease", INF
    if t.cosine is None or not math.isfinite(t.new_loss):
        return None, INF
    beta = sorted((-1.0, t.cosine, 1.0))[1]
    allowed = (t.best if against_best else t.loss) - t.lower_bound
    asked = math.pow(min(1, 1 - beta), b) * (t.new_loss - t.lower_bound)
    return ("uphill" if asked <= allowed else None), abs(asked - allowed)


@settings(max_examples=200)
@given(
    low=st.floats(-10, 10),
    above=st.tuples(decades(-3, 3), decades(-3, 3)),  # best over its lower bound, f over the best
    ratio=decades(-1, -0.01) | decades(0.01, 1),  # f_new over the lower bound, in units of the most that is allowed
    cosine=st.none() | st.floats(-1.001, 1.001),  # rounding goes beyond ±1
    b=st.floats(0.1, 10),
    against_best=st.booleans(),
)
@example(0.0, (1.0, 0.0), 1.1, -0.5, 2.0, False)
@example(0.0, (1.0, 0.0), 0.999, 0.5, 2.0, False)  # ¼·f_new up to f
@example(0.0, (1.0, 0.0), 1.001, 0.5, 2.0, False)
@example(0.0, (1.0, 0.0), 1.5, None, 2.0, False)  # no previous step: decrease only
@example(0.0, (1.0, 0.0), 1.01, 0.0, 2.0, False)  # across and back: no rise at all
@example(-7.0, (1.0, 1.0), 0.9, 0.2, 1.0, False)
@example(-7.0, (1.0, 1.0), 1.1, 0.2, 1.0, True)
@example(7.0, (1.0, 1.0), 1.1, 0.9, 2.0, False)
@example(0.0, (1.0, 1.0), 2.0, 1.001, 1.0, True)
def test_uphill_is_its_formula(low, above, ratio, cosine, b, against_best):
    best, f = low + above[0], low + above[0] + above[1]
    factor = 1 if cosine is None else min(1, max(1 - cosine, 0.01)) ** b
    trial = Trial(f, low + ratio * ((best if against_best else f) - low) / factor, low, best, cosine)
    rule, margin = uphill_by_hand(trial, b, against_best)
    assume(margin > 1e-9 * (1 + f - low))
    assert mq.Uphill(b, against_best).judge(trial) == rule


def test_uphill_as_far_as_the_loss_of_late():
    trial = Trial(loss=1.0, new_loss=1.5, lower_bound=0.0, best=1.0, cosine=1.0, late=1.5)
    assert mq.Uphill(1.0, of_late=True).judge(trial) == "uphill"
    assert mq.Uphill(1.0, of_late=True).judge(trial._replace(late=1.4)) is None
    assert mq.Uphill(1.0).judge(trial._replace(late=1.4)) == "uphill"
    assert mq.Uphill(1.0, of_late=True).judge(trial._replace(new_loss=0.9, late=0.5)) == "decrease"


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.none() | st.floats(-1, 1))
def test_decrease(f, f_new, cosine):
    assert mq.Decrease().judge(Trial(f, f_new, 0.0, f, cosine)) == ("decrease" if f_new < f else None)


@pytest.mark.parametrize("part", [mq.Decrease(), mq.Uphill(2.0), mq.Uphill(2.0, against_best=True)])
@pytest.mark.parametrize("f_new", [NAN, INF, -INF])
def test_what_is_not_finite_is_never_accepted(part, f_new):
    for cosine in (None, -1.0, 0.0, 1.0):
        assert part.judge(Trial(1.0, f_new, 0.0, 1.0, cosine)) is None
