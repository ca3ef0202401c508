"""What the best loss on the same data was of late."""

from __future__ import annotations

import math

import pytest

from marquardt.policies.recent import Recent
from support.parts import ending, start


def after(old: Recent, f: float, loss: float, same_data: bool = True) -> Recent:
    return old.after(start(f, 0.0, repeats=2 * same_data, best=0.5), ending(loss=loss))  # the best of other data


def test_the_loss_of_late_falls_towards_the_best():
    first = after(Recent(), 5.0, 4.0)
    assert first.late == pytest.approx(4 + 0.95 * 1)
    assert first.least == 4.0
    assert after(first, 4.0, 4.9).late == pytest.approx(4 + 0.95**2)
    assert after(first, 4.0, 3.0, False).late == math.inf  # other data


def test_raised():
    assert Recent(7.0, 6.0).raised(0.5, 0.0) == Recent(7.5, 6.5)
    assert Recent().raised(-0.5, 0.0) == Recent()
