"""How far the averaged weights lag behind."""

from __future__ import annotations

import math

import pytest

from marquardt.policies.lag import Lag, ratio, smoothed
from marquardt.step import FAILED, ROUNDINGS
from support.parts import ending, start

LEAST = ROUNDINGS * 1e-3


@pytest.mark.parametrize(
    ("f", "mean_loss", "expected"),
    [
        (10.0, 5.5, 0.5),  # heights above the bound 1
        (10.0, 19.0, 2.0),
        (1 + 2 * LEAST, 1 + 6 * LEAST, 3.0),
        (1 + 0.9 * LEAST, 10.0, math.nan),  # that one of them is above the bound may be rounding
        (10.0, 1 + 0.9 * LEAST, math.nan),
        (10.0, 0.9, math.nan),
        (10.0, math.nan, math.nan),
        (10.0, math.inf, math.inf),
    ],
)
def test_ratio(f, mean_loss, expected):
    assert ratio(f, 1.0, LEAST, mean_loss) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("past", "now", "expected"),
    [
        (None, 2.0, math.log(2)),
        (0.5, 2.0, 0.8 * 0.5 + 0.2 * math.log(2)),
        (-0.5, 1.0, -0.4),
        *((past, now, past) for past in (None, 0.5) for now in (math.nan, math.inf, 0.0, -1.0)),
    ],
)
def test_smoothed(past, now, expected):
    assert smoothed(past, now) == (None if expected is None else pytest.approx(expected))


def test_the_lag_of_late():
    """On the same data there is none: the average starts anew."""
    assert Lag().after(start(), ending()).lag == pytest.approx(math.log(0.9))
    assert Lag(1.0).after(start(), ending()).lag == pytest.approx(0.8 + 0.2 * math.log(0.9))
    assert Lag(1.0).after(start(repeats=1), ending()).lag == pytest.approx(0.8 + 0.2 * math.log(0.9))
    assert Lag(1.0).after(start(repeats=2), ending()).lag is None
    assert Lag(1.0).after(start(), ending("rejected", 10.0, judgement=FAILED, trial=None)).lag == 1.0


@pytest.mark.parametrize(("lag", "behind"), [(None, False), (-0.5, False), (0.0, False), (1e-12, True), (1.0, True)])
def test_the_average_is_behind(lag, behind):
    assert Lag(lag).behind == behind
