"""A fixed budget of models that change between the steps; `python tests/fuzz/changing.py` goes on from there."""

from __future__ import annotations

import pytest

from fuzz import attacks, changing
from marquardt.jacobian import passes
from marquardt.layers.capture import Walk

CHUNKS, CASES = 5, 52  # of which more than 200 are compared with brute force


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_steps_are_those_of_the_model_as_it_is(chunk):
    found, faults = attacks.run(changing.one, range(chunk * CASES, (chunk + 1) * CASES))
    assert faults == []
    # a program that refuses everything would pass too
    assert found["compared"] + found["compared and refused"] >= 40
    assert found["compared and refused"] + found["refused"] > 0.2 * CASES


def test_finds_a_graph_that_is_not_read(monkeypatch):
    def unread(self: Walk) -> None:
        read(self)
        self.structure = self.sizes = 0

    read = Walk._read
    monkeypatch.setattr(Walk, "_read", unread)
    _, faults = attacks.run(changing.one, [435, 464, 535, 649])  # where nothing else gives it away
    assert faults


def test_finds_parts_that_are_not_compared(monkeypatch):
    monkeypatch.setattr(passes.Cut, "check", lambda *_: None)
    _, faults = attacks.run(changing.one, range(30))
    assert any("parts of a batch" in fault for fault in faults)
