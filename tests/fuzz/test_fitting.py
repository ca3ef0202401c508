"""A few of the random fits; `python tests/fuzz/fitting.py` makes as many as one likes."""

from types import SimpleNamespace

import pytest
import torch

from fuzz import attacks, fitting, traps


@pytest.mark.parametrize("first", [0, 10, 20, 50])
def test_random_fits(first: int):
    count, found = attacks.run(fitting.one, range(first, first + 10))
    assert not found, "\n".join(found)
    assert count["solved"] >= 8


def case(**wanted: object) -> fitting.Case:
    made = map(fitting.make, range(1000))
    return next(c for c in made if all(getattr(c, name) == value for name, value in wanted.items()))


@pytest.mark.parametrize("bounded", [False, True])
def test_a_start_that_is_called_a_solution_is_found_out(bounded: bool):
    line = case(name="line", loss="linear", batched=False, dtype=torch.float64, bounded=bounded)
    assert fitting.judged(line, 0, fitting.fit(line))[0] == "solved"
    start = fitting.least_squares(
        lambda p: line.model(torch.tensor(line.t), p, torch) - torch.tensor(line.y[0]), line.x0[0], max_nfev=1
    )
    claimed = SimpleNamespace(**{**{k: start[k] for k in start}, "success": True})
    assert fitting.judged(line, 0, claimed)[0] == "false"
    if bounded:
        assert fitting.judged(line, 0, SimpleNamespace(**{**vars(claimed), "x": line.x0[0] - 1e9}))[0] == "outside"


def test_an_error_of_our_own_is_found_out(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object, **__: object) -> None:
        raise IndexError("a slip")

    monkeypatch.setattr(fitting, "least_squares", broken)
    assert [kind for kind, _ in fitting.faults(case(curve=False))] == ["crash"]


def test_traps():
    count, found = attacks.run(traps.one, range(40))
    assert not found, "\n".join(found)
    assert count["solved"] >= 15
    assert count["the same"] >= 15


@pytest.mark.parametrize("planted", ["a saddle", "a dead parameter", "the points"])
def test_a_trap_that_catches_is_found_out(planted: str, monkeypatch: pytest.MonkeyPatch):
    def at_rest(f: object, x0: object, **options: object) -> object:
        return fitting.least_squares(f, x0, **{**options, "restarts": False})

    def moved(*given: object, **options: object) -> object:
        result = fitting.least_squares(*given, **options)
        return SimpleNamespace(**{**{k: result[k] for k in result}, "x": result.x + 1e-9})

    def counted(f: object, x: object, y: object, *p0: object, **options: object) -> object:
        result = fitting.curve_fit(f, x, y, *p0, **options)
        wide = result.pcov * (len(x) - 2) / (len(x) - 1)
        return SimpleNamespace(**{**vars(result), "pcov": wide, "confidence_band": result.confidence_band})

    if planted == "the points":
        monkeypatch.setattr(traps, "curve_fit", counted)
    else:
        monkeypatch.setattr(traps, "least_squares", at_rest if planted == "a saddle" else moved)
    _, found = attacks.run(traps.one, range(0 if planted == "the points" else 1, 10, 2))
    assert found
    word = {"a saddle": "false success", "a dead parameter": "moved", "the points": "pcov"}[planted]
    assert any(word in fault for fault in found)
