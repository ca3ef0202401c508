"""A few of the random fits; `python tests/fuzz/fitting.py` makes as many as one likes."""

from types import SimpleNamespace

import pytest
import torch

from fuzz import fitting


@pytest.mark.parametrize("first", [0, 10, 20, 50])
def test_random_fits(first: int):
    count, found = fitting.run(range(first, first + 10))
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
