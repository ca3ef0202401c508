"""Uphill moves on the same data."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from marquardt.policies.loans import PATIENCE, Loans
from support.policies import ending, start

HERE = torch.arange(2.0)
AWAY = Loans(HERE, 5.0, 3)


def after(
    old: Loans, f: float, loss: float, low: float, theta: Tensor, same_data: bool = True, best: float = math.inf
) -> Loans:
    return old.after(start(f, low, repeats=2 * same_data, best=best, theta=theta), ending(loss=loss))


@pytest.mark.parametrize(
    ("change", "loss", "same_data", "overdue"),
    [
        ({"away": PATIENCE}, 5.0, True, True),
        ({"away": PATIENCE}, 6.0, True, True),
        ({"away": PATIENCE}, 4.9, True, False),  # they have paid
        ({"away": PATIENCE - 1}, 6.0, True, False),
        ({"away": PATIENCE}, 6.0, False, False),
        ({"away": PATIENCE, "haven": None}, math.inf, True, False),
    ],
)
def test_overdue(change, loss, same_data, overdue):
    assert replace(AWAY, **change).overdue(loss, same_data) == overdue


def where(loans: Loans) -> tuple[bool, float, int]:
    return loans.haven is None, loans.haven_loss, loans.away


AT_HOME = (True, math.inf, 0)


def test_an_uphill_move_keeps_the_point_before_it():
    theta = torch.ones(2)
    found = after(Loans(), 5.0, 6.0, 0.0, theta)
    assert found.haven is theta
    assert where(found) == (False, 5.0, 1)
    assert where(after(Loans(), 5.0, 5.0, 0.0, theta)) == AT_HOME
    assert where(after(Loans(), 5.0, 6.0, 0.0, theta, False)) == AT_HOME
    further = after(found, 6.0, 5.5, 0.0, torch.zeros(2))  # still above
    assert further.haven is theta
    assert where(further) == (False, 5.0, 2)


def test_uphill_moves_that_pay_go_on():
    theta = torch.zeros(1)
    up = after(Loans(), 2.0, 5.0, 0.0, theta)
    assert up.haven is theta
    assert up.haven_loss == 2.0
    assert after(up, 5.0, 4.0, 0.0, theta + 1).haven is theta
    assert after(up, 5.0, 1.9, 0.0, theta + 1).haven is None
    assert after(up, 5.0, 4.0, 0.0, theta + 1, False).haven is None


def test_uphill_moves_that_paid_are_over():
    found = after(AWAY, 6.0, 4.0, 0.0, HERE)
    assert where(found) == AT_HOME
    assert found.ceiling == math.inf


def test_back_in_the_haven_there_is_a_ceiling():
    """Others rise by a hundredth of the height at most, until the loss has fallen by a hundredth."""
    found = after(AWAY, 6.0, 5.0, 1.0, HERE)
    assert where(found) == AT_HOME
    assert found.ceiling == pytest.approx(1 + 1.01 * 4)
    assert found.uphill(start(), found.ceiling)
    assert not found.uphill(start(), 1.001 * found.ceiling)
    assert after(found, 5.0, 1 + 0.991 * 4, 1.0, HERE).ceiling == found.ceiling
    assert after(found, 5.0, 1 + 0.989 * 4, 1.0, HERE).ceiling == math.inf
    assert after(found, 5.0, 5.0, 1.0, HERE, False).ceiling == math.inf


def test_the_loss_of_late_falls_towards_the_best():
    first = after(Loans(), 5.0, 4.0, 0.0, HERE)
    assert first.late == pytest.approx(4 + 0.95 * 1)
    assert after(first, 4.0, 4.9, 0.0, HERE, best=4.0).late == pytest.approx(4 + 0.95**2)
    assert after(first, 4.0, 3.0, 0.0, HERE, False).late == math.inf  # other data


def test_on_changing_batches_nothing_is_lent():
    assert where(after(AWAY, 6.0, 7.0, 0.0, HERE, False)) == AT_HOME


def test_what_weight_decay_has_of_the_haven():
    found = Loans(haven_decay=7.0).after(start(5.0, repeats=2, decay=0.5), ending("uphill", 6.0))
    assert found.haven_decay == 0.5
    assert found.after(start(6.0, repeats=3, decay=0.7), ending("uphill", 6.5)).haven_decay == 0.5


def test_raised():
    """The haven is where the loss was least."""
    assert replace(AWAY, ceiling=6.0, late=7.0, haven_decay=1.0).raised(9.0, 0.5) == replace(
        AWAY, haven_loss=5.5, ceiling=6.5, late=7.5, haven_decay=1.5
    )
    assert Loans(ceiling=6.0, late=7.0).raised(9.0, 0.5) == Loans(ceiling=6.5, late=7.5)
