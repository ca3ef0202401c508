"""What a step leaves for the next one, as it is held and as it is saved; its policies are in tests/policies."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import dataclass, make_dataclass, replace

import pytest
import torch

import marquardt as mq
from marquardt import step as states
from marquardt.policies import POLICIES, Policy
from marquardt.policies.recent import Recent
from marquardt.policies.same_data import SameData
from marquardt.step import ENTRIES, RETIRED, VECTORS, State, changed, entries, like, nested


def test_changed():
    state = State(1.0, steps=3, recent=Recent(1.5))
    assert changed(state, lam=2.0) == replace(state, lam=2.0)
    assert state.lam == 1.0


def test_the_flat_form_and_back():
    state = State(2.0, steps=5, same_data=SameData(3, 0.5), recent=Recent(1.5))
    flat = state.flat()
    assert flat.keys() == ENTRIES.keys()
    assert (flat["repeats"], flat["expected"], flat["late"]) == (3, 0.5, 1.5)
    assert not POLICIES.keys() & flat.keys() - {"lag"}  # a number of the policy of this name
    assert State(**nested(flat)) == state
    assert State(**nested({"lam": 2.0, "repeats": 3})) == State(2.0, same_data=SameData(3))


def test_vectors():
    assert sorted(VECTORS) == ["master", "mean", "previous", "towards"]


@pytest.mark.parametrize(
    ("name", "field", "says"),
    [
        ("other", "late", "'late' of Other has the name of a field of Recent"),
        ("other", "best", "'best' of Other has the name of a field of State"),
        ("other", "recent", "'recent' of Other has the name of a policy"),
        ("other", "haven", "'haven' of Other has the name of an entry of older files"),
        ("best", "invented", "the policy 'best' has the name of a field of State"),
    ],
)
def test_two_of_the_same_name_are_refused(name, field, says):
    """One would be saved in the place of the other."""
    other = make_dataclass("Other", [(field, int, 0)], bases=(Policy,), frozen=True)()
    with pytest.raises(TypeError, match=says):
        entries({**POLICIES, name: other})
    assert entries({**POLICIES, "invented": Three()}).keys() == {*ENTRIES, "in_a_row"}


def test_they_are_refused_at_import():
    program = """
import importlib
from dataclasses import make_dataclass
from marquardt import policies, step
policies.POLICIES["other"] = make_dataclass("Other", [("late", int, 0)], bases=(policies.Policy,), frozen=True)()
importlib.reload(step)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert "TypeError: the field 'late' of Other" in done.stderr


def test_copies_and_pickles():
    """One that was pickled while the state was flat goes on too, without what no policy asks for any more."""
    state = State(2.0, same_data=SameData(3, 0.5), recent=Recent(1.5))
    assert copy.deepcopy(state) == state
    assert pickle.loads(pickle.dumps(state)) == state
    old = object.__new__(State)
    old.__setstate__(state.flat() | dict.fromkeys(RETIRED))
    assert old == state


@dataclass(frozen=True)
class Three(Policy):
    """No more than three uphill moves in a row on the same data."""

    in_a_row: int = 0

    def uphill(self, start, loss):
        return not start.same_data or self.in_a_row < 3

    def after(self, start, end):
        return Three(self.in_a_row + 1 if start.same_data and end.rule == "uphill" else 0)


def test_a_policy_that_was_left_out_of_a_file_begins(monkeypatch):
    """As a new one does that an old file knows nothing of."""
    monkeypatch.setitem(states.POLICIES, "three", Three())
    assert nested({"lam": 1.0})["three"] == Three()
    assert nested({"lam": 1.0, "in_a_row": 2})["three"] == Three(2)


def test_like():
    """Vectors follow θ; what the curvature keeps stays in the precision that it chose; numbers and None stay."""
    theta = torch.zeros(2, dtype=torch.float64)
    state = State(
        2.0, steps=3, D=mq.Diagonal(torch.ones((), dtype=torch.float64)), previous=theta + 1, mean=None,
        past={"G": torch.ones(2, 2, dtype=torch.float64)},
    )  # fmt: skip
    moved = like(state, torch.zeros(2, dtype=torch.float32))
    assert {moved.D.scale.dtype, moved.previous.dtype} == {torch.float32}
    assert moved.past["G"].dtype == torch.float64
    assert (moved.lam, moved.steps, moved.mean) == (2.0, 3, None)
    assert state.previous.dtype == torch.float64
    elsewhere = like(state, torch.zeros(2, device="meta"))
    assert {elsewhere.D.scale.device.type, elsewhere.past["G"].device.type} == {"meta"}
    assert like(replace(state, past=None), theta).past is None
    assert like(state, theta) is state
