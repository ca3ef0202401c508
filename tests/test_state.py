"""What a step leaves for the next one; its doubt of a batch is in optimizer/test_judgement.py, with whole runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import marquardt as mq
from marquardt.state import HEARD, PATIENCE, UNHEARD, State

pytestmark = pytest.mark.usefixtures("double")


def test_doubt_begins_after_enough_batches():
    state = State(1.0, steps=HEARD, height=1.0)
    assert state.doubt(3 * UNHEARD, 0.0, False) == pytest.approx(3)
    assert replace(state, steps=HEARD - 1).doubt(3 * UNHEARD, 0.0, False) == 1
    assert replace(state, height=0.0).doubt(3 * UNHEARD, 0.0, False) == 1
    assert replace(state, doubted=True).doubt(3 * UNHEARD, 0.0, False) == 1
    assert state.doubt(0.5 * UNHEARD, 0.0, False) == 1


def test_starts_with():
    """The loss after the last step is that before this one, to the rounding of the precision; 0 is 0."""
    state = State(1.0, repeats=4, expected=-2.0)
    assert state.starts_with(-2.0 * (1 + 1e-10), torch.float64) == 5
    assert state.starts_with(-2.0 * (1 + 1e-8), torch.float64) == 0
    assert state.starts_with(-2.0 * (1 + 1e-8), torch.float32) == 5
    assert State(1.0, repeats=4).starts_with(0.0, torch.float64) == 0
    assert State(1.0, expected=0.0).starts_with(0.0, torch.float64) == 1
    assert state.starts_with(math.nan, torch.float64) == 0


def test_a_loss_without_a_bound_passes_through_0():
    """The same data are still the same there, as heights go."""
    state = State(1.0, expected=1e-7, height=1.0)
    assert state.starts_with(-1e-7, torch.float32, -math.inf) == 1
    assert state.starts_with(-1e-7, torch.float32) == 0
    assert state.starts_with(1e-4, torch.float32, -math.inf) == 0


def test_after():
    state = State(3.0, steps=4, best=2.0, height=5.0, doubted=True, repeats=7)
    found = state.after(4.0, 1.5, 1.0, 0.5)
    assert (found.lam, found.steps, found.best, found.expected, found.doubted) == (0.5, 5, 1.5, 1.5, False)
    assert found.height == pytest.approx(4.5)  # 0.9 of the last one exceeds 4 − 1
    assert state.after(9.0, 8.0, 1.0, 0.5).height == 8
    assert state.after(4.0, 6.0, 1.0, 0.5).best == 2
    assert state.after(1.0, 6.0, 1.0, 0.5).best == 1
    doubted = replace(state, doubted=False).after(4.0, 1.5, 1.0, 0.5, doubt=1.1)
    assert (doubted.height, doubted.doubted, doubted.steps, doubted.best) == (5.0, True, 5, 1.5)


def test_without_a_lower_bound_heights_are_measured_from_the_best_loss():
    """A constant in the loss changes nothing: the floor moves with it, and what is doubted does not."""
    for c in (0.0, -100.0):
        state = State(1.0, steps=HEARD, best=2.0 + c, height=0.5)
        found = state.after(4.0 + c, 1.5 + c, -math.inf, 0.5)
        assert found.height == pytest.approx(2.5)  # 4 above the best, which is 1.5 now
        assert found.after(1.6 + c, 1.5 + c, -math.inf, 0.5).height == pytest.approx(0.9 * 2.5)
        assert state.floor(3.0 + c, -math.inf) == pytest.approx(1.95 + c)
        assert state.floor(1.0 + c, -math.inf) == pytest.approx(0.95 + c)
        assert state.floor(3.0 + c, -7.0) == -7.0
        assert state.doubt(1.95 + c + 3 * UNHEARD * 0.5, -math.inf, False) == pytest.approx(3)
        assert state.doubt(1.95 + c + 0.9 * UNHEARD * 0.5, -math.inf, False) == 1


@pytest.mark.parametrize(("lag", "behind"), [(None, False), (-0.5, False), (0.0, False), (1e-12, True), (1.0, True)])
def test_the_average_is_behind(lag, behind):
    assert State(1.0, lag=lag).behind == behind


# ---- uphill moves on the same data

HERE = torch.arange(2.0)
AWAY = State(1.0, haven=HERE, haven_loss=5.0, away=3)


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


def where(state: State) -> tuple[bool, float, int]:
    return state.haven is None, state.haven_loss, state.away


AT_HOME = (True, math.inf, 0)


def test_an_uphill_move_keeps_the_point_before_it():
    theta = torch.ones(2)
    found = State(1.0).settled(5.0, 6.0, 0.0, theta, True)
    assert found.haven is theta
    assert where(found) == (False, 5.0, 1)
    assert where(State(1.0).settled(5.0, 5.0, 0.0, theta, True)) == AT_HOME
    assert where(State(1.0).settled(5.0, 6.0, 0.0, theta, False)) == AT_HOME
    further = found.settled(6.0, 5.5, 0.0, torch.zeros(2), True)  # still above
    assert further.haven is theta
    assert where(further) == (False, 5.0, 2)


def test_uphill_moves_that_paid_are_over():
    found = AWAY.settled(6.0, 4.0, 0.0, HERE, True)
    assert where(found) == AT_HOME
    assert found.ceiling == math.inf


def test_back_in_the_haven_there_is_a_ceiling():
    """Others rise by a hundredth of the height at most, until the loss has fallen by a hundredth."""
    found = AWAY.settled(6.0, 5.0, 1.0, HERE, True)
    assert where(found) == AT_HOME
    assert found.ceiling == pytest.approx(1 + 1.01 * 4)
    assert found.settled(5.0, 1 + 0.991 * 4, 1.0, HERE, True).ceiling == found.ceiling
    assert found.settled(5.0, 1 + 0.989 * 4, 1.0, HERE, True).ceiling == math.inf
    assert found.settled(5.0, 5.0, 1.0, HERE, False).ceiling == math.inf


def test_the_loss_of_late_falls_towards_the_best():
    first = State(1.0).settled(5.0, 4.0, 0.0, HERE, True)
    assert first.late == pytest.approx(4 + 0.95 * 1)
    assert replace(first, best=4.0).settled(4.0, 4.9, 0.0, HERE, True).late == pytest.approx(4 + 0.95**2)
    assert first.settled(4.0, 3.0, 0.0, HERE, False).late == math.inf  # other data


def test_on_changing_batches_nothing_is_lent():
    assert where(AWAY.settled(6.0, 7.0, 0.0, HERE, False)) == AT_HOME


def test_like():
    """Vectors follow θ; what the curvature keeps stays in the precision that it chose; numbers and None stay."""
    state = State(
        2.0, steps=3, D=mq.Diagonal(torch.ones(())), previous=torch.ones(2), mean=None, haven=torch.ones(2),
        past={"G": torch.ones(2, 2)},
    )  # fmt: skip
    moved = state.like(torch.zeros(2, dtype=torch.float32))
    assert {moved.D.scale.dtype, moved.previous.dtype, moved.haven.dtype} == {torch.float32}
    assert moved.past["G"].dtype == torch.float64
    assert (moved.lam, moved.steps, moved.mean) == (2.0, 3, None)
    assert state.previous.dtype == torch.float64
    elsewhere = state.like(torch.zeros(2, device="meta"))
    assert {elsewhere.D.scale.device.type, elsewhere.haven.device.type, elsewhere.past["G"].device.type} == {"meta"}
    assert replace(state, past=None).like(torch.zeros(2)).past is None
