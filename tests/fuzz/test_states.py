"""A fixed budget of states that were tampered with; `python tests/fuzz/states.py` goes on from there."""

from __future__ import annotations

import copy

import pytest

import marquardt as mq
from fuzz import attacks, states
from marquardt import protocol

CHUNKS, CASES = 4, 80


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_they_are_refused_or_go_on(chunk):
    count, faults = attacks.run(states.one, range(chunk * CASES, (chunk + 1) * CASES))
    assert not faults, "\n".join(faults)
    # a program that refuses everything would pass too
    assert count["loaded"] > 0.1 * CASES
    assert count["refused"] > 0.3 * CASES


@pytest.mark.parametrize("name", states.OPTIMIZERS)
@pytest.mark.parametrize("same", [False, True], ids=["changing data", "same data"])
def test_what_was_saved_is_loaded(name, same):
    assert states.loaded(name, same, states.saved(name, same), name, states.begun(name, not same)) == "loaded"


@pytest.mark.parametrize("name", states.OPTIMIZERS)
def test_a_tensor_in_another_precision(name):
    """Each in turn, while all others stay"""
    faults = []
    for path, dtype in states.precisions(states.saved(name, False)):
        state = copy.deepcopy(states.saved(name, False))
        *way, key = path
        states.at(state, way)[key] = states.at(state, path).to(dtype)
        try:
            states.loaded(name, False, state, f"{name}, {path} in {dtype}", states.begun(name, False))
        except attacks.Fault as fault:
            faults.append(str(fault))
    assert not faults, "\n".join(faults)


def test_what_is_not_checked_is_found_out(monkeypatch):
    monkeypatch.setattr(protocol, "check_state", lambda *_: None)
    assert any(attacks.run(states.one, [seed])[1] for seed in range(100))


def test_what_is_not_atomic_is_found_out(monkeypatch):
    def load(self: mq.LM, state: object) -> None:
        self.param_groups[0]["lr"] = 0.5
        raise ValueError("too late")

    monkeypatch.setattr(mq.LM, "load_state_dict", load)
    assert attacks.run(states.one, [0])[1]
