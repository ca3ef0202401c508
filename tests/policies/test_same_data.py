"""Whether the data are the same in every step."""

from __future__ import annotations

import math

import pytest
import torch

from marquardt.policies.same_data import SameData
from support.parts import ending, start


def test_repeated():
    """The loss after the last step is that before this one, to the rounding of the precision; 0 is 0."""
    same = SameData(4, -2.0)
    assert same.repeated(-2.0 * (1 + 1e-10), torch.float64) == 5
    assert same.repeated(-2.0 * (1 + 1e-8), torch.float64) == 0
    assert same.repeated(-2.0 * (1 + 1e-8), torch.float32) == 5
    assert SameData(4).repeated(0.0, torch.float64) == 0
    assert SameData(0, 0.0).repeated(0.0, torch.float64) == 1
    assert same.repeated(math.nan, torch.float64) == 0


def test_a_loss_without_a_bound_passes_through_0():
    """The same data are still the same there, as heights go."""
    same = SameData(0, 1e-7)
    assert same.repeated(-1e-7, torch.float32, -math.inf, 1.0) == 1
    assert same.repeated(-1e-7, torch.float32, height=1.0) == 0
    assert same.repeated(1e-4, torch.float32, -math.inf, 1.0) == 0


def test_what_a_step_leaves():
    assert SameData(1, 10.0).after(start(repeats=2), ending(loss=8.0)) == SameData(2, 8.0)
    assert SameData(7, 4.0).after(start(), ending("rejected", 10.0)) == SameData(0, 10.0)


@pytest.mark.parametrize(("repeats", "steps", "steady"), [(0, 1, None), (0, 2, False), (1, 1, True), (3, 9, True)])
def test_steady(repeats, steps, steady):
    assert SameData(repeats).steady(steps) is steady


def test_raised():
    assert SameData(3, 2.0).raised(0.5, 0.0) == SameData(3, 2.5)
    assert SameData().raised(0.5, 0.0) == SameData()
