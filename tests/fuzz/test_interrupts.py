"""A fixed budget of interrupts; `python tests/fuzz/interrupts.py` goes on from there."""

from __future__ import annotations

import pytest

from fuzz import attacks, interrupts
from marquardt import surroundings
from marquardt.jacobian.linearization import Moment

CHUNKS, CASES, STEPS = 4, 115, 300


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_nothing_has_happened_or_all_of_it(chunk):
    count, faults = attacks.run(interrupts.one, range(chunk * CASES, (chunk + 1) * CASES))
    assert not faults, "\n".join(faults)
    # a program that interrupts nothing would pass too
    assert count["step interrupted"] + count["step done"] >= STEPS / CHUNKS, count


@pytest.mark.parametrize(
    ("owner", "name"),
    [(surroundings.Surroundings, "restore"), (Moment, "restore"), (surroundings, "surely")],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_what_is_not_undone_is_found_out(monkeypatch, owner, name):
    here, restore = surroundings.Surroundings(), surroundings.Surroundings.restore
    monkeypatch.setattr(owner, name, lambda *_, **__: None)
    try:
        assert any(attacks.run(interrupts.one, [seed])[1] for seed in range(100))
    finally:
        restore(here)
