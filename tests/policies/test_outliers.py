"""Batches whose loss is unheard-of. Whole runs with them are in optimizer/test_judgement.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from marquardt.policies.outliers import HEARD, UNHEARD, Outliers
from support.parts import ending, start


def after(old: Outliers, f: float, loss: float, low: float, best: float = math.inf, excess: float = 1.0) -> Outliers:
    return old.after(start(f, low, best=best, excess=excess), ending(loss=loss))


def test_doubt():
    """In proportion to the loss above its bound; two such batches in a row are no accident."""
    heard = after(Outliers(), 3.0, 2.0, 1.0)  # a height of 2
    assert heard.excess(1.0 + 2 * UNHEARD, 1.0, HEARD, False) == pytest.approx(1)
    assert heard.excess(1.0 + 50 * UNHEARD, 1.0, HEARD, False) == pytest.approx(25)
    assert heard.excess(1.0 + 50 * UNHEARD, 1.0, HEARD, True) == 1
    doubted = after(heard, 1e6, 1e6, 1.0, excess=25.0)
    assert doubted.height == heard.height
    assert doubted.excess(1e6, 1.0, HEARD, False) == 1
    assert after(doubted, 1e6, 1e6, 0.0).height == 1e6
    assert Outliers().excess(1e30, 0.0, 0, False) == 1
    assert heard.excess(1e30, 0.0, 1, False) == 1  # of one batch there is no "of late"
    assert after(heard, 1.0, 1.0, 1.0).height == pytest.approx(1.8)  # the largest, fading


def test_doubt_begins_after_enough_batches():
    heard = Outliers(1.0)
    assert heard.excess(3 * UNHEARD, 0.0, HEARD, False) == pytest.approx(3)
    assert heard.excess(3 * UNHEARD, 0.0, HEARD - 1, False) == 1
    assert Outliers(0.0).excess(3 * UNHEARD, 0.0, HEARD, False) == 1
    assert replace(heard, doubted=True).excess(3 * UNHEARD, 0.0, HEARD, False) == 1
    assert heard.excess(0.5 * UNHEARD, 0.0, HEARD, False) == 1


def test_what_a_step_leaves():
    old = Outliers(5.0, 0.3, True)
    found = after(old, 4.0, 1.5, 1.0)
    assert not found.doubted
    assert found.height == pytest.approx(4.5)  # 0.9 of the last one exceeds 4 − 1
    assert found.stride == 2
    assert after(old, 9.0, 8.0, 1.0).height == 8
    assert old.after(start(4.0), ending("rejected", 4.0)).stride == 0.3
    assert old.after(start(4.0), ending(lr=0.25)).stride == 0.5
    assert after(replace(old, doubted=False), 4.0, 1.5, 1.0, excess=1.1) == old


def test_in_doubt_there_is_no_uphill():
    assert Outliers().uphill(start(), 11.0)
    assert not Outliers().uphill(start(excess=1.1), 11.0)


def test_without_a_lower_bound_heights_are_measured_from_the_best_loss():
    """A constant in the loss changes nothing: the floor moves with it, and what is doubted does not."""
    for c in (0.0, -100.0):
        old = Outliers(0.5)
        found = after(old, 4.0 + c, 1.5 + c, -math.inf, best=2.0 + c)
        assert found.height == pytest.approx(2.5)  # 4 above the best, which is 1.5 now
        assert after(found, 1.6 + c, 1.5 + c, -math.inf, best=1.5 + c).height == pytest.approx(0.9 * 2.5)
        floor = old.floor(2.0 + c, -math.inf)
        assert floor == pytest.approx(1.95 + c)
        assert old.floor(1.0 + c, -math.inf) == pytest.approx(0.95 + c)
        assert old.floor(2.0 + c, -7.0) == -7.0
        assert old.excess(1.95 + c + 3 * UNHEARD * 0.5, floor, HEARD, False) == pytest.approx(3)
        assert old.excess(1.95 + c + 0.9 * UNHEARD * 0.5, floor, HEARD, False) == 1


def test_raised():
    """Heights above a bound are raised, and those above the best loss are not, which is raised itself."""
    assert Outliers(2.0, 0.3, True).raised(0.5, 0.0) == Outliers(2.5, 0.3, True)
    assert Outliers(2.0).raised(-3.0, 0.0).height == 0
    for by in (0.5, -3.0):
        assert Outliers(2.0, 0.3, True).raised(by, -math.inf) == Outliers(2.0, 0.3, True)
