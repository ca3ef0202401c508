"""A few of the random fits and of the traps, and that a fit that is wrong is found out; the programs make as many as
one likes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fuzz import attacks, fitting, traps

least_squares, curve_fit = fitting.least_squares, fitting.curve_fit


@pytest.mark.parametrize(
    ("program", "seeds", "least"),
    [(fitting, range(30), {"solved": 24}), (fitting, range(50, 60), {"solved": 8}),
     (traps, range(40), {"solved": 15, "the same": 15})],
)  # fmt: skip
def test_random_fits(program: Any, seeds: range, least: dict[str, int]):
    count, found = attacks.run(program.one, seeds)
    assert not found, "\n".join(found)
    assert all(count[kind] >= number for kind, number in least.items())


def changed(result: Any, **fields: Any) -> Any:
    return SimpleNamespace(**{**vars(result), **fields})


@pytest.mark.parametrize("bounded", [False, True])
def test_a_start_that_is_called_a_solution_is_found_out(bounded: bool):
    wanted = {"name": "line", "loss": "linear", "batched": False, "dtype": torch.float64, "bounded": bounded}
    cases = map(fitting.make, range(1000))
    line = next(c for c in cases if all(getattr(c, name) == value for name, value in wanted.items()))
    assert fitting.judged(line, 0, fitting.fit(line))[0] == "solved"
    y = torch.tensor(line.y[0])
    start = least_squares(lambda p: line.model(torch.tensor(line.t), p, torch) - y, line.x0[0], max_nfev=1)
    assert fitting.judged(line, 0, changed(start, success=True))[0] == "false"
    outside = fitting.judged(line, 0, changed(start, success=True, x=line.x0[0] - 1e9))[0]
    assert outside == ("outside" if bounded else "false")


def slip(*_: Any, **__: Any) -> Any:
    raise IndexError("a slip")


def narrow(f: Any, x: Any, *given: Any, **options: Any) -> Any:
    fit = curve_fit(f, x, *given, **options)
    return changed(fit, pcov=fit.pcov * (len(x) - 2) / (len(x) - 1), confidence_band=fit.confidence_band)


PLANTED = {
    "IndexError: a slip": (fitting, "least_squares", slip),
    "false success": (traps, "least_squares", lambda f, x0, **o: least_squares(f, x0, **{**o, "restarts": False})),
    "moved": (traps, "least_squares", lambda *given, **o: changed(r := least_squares(*given, **o), x=r.x + 1e-9)),
    "pcov": (traps, "curve_fit", narrow),
}


@pytest.mark.parametrize("word", PLANTED)
def test_what_is_planted_is_found_out(word: str, monkeypatch: pytest.MonkeyPatch):
    program, name, wrong = PLANTED[word]
    monkeypatch.setattr(program, name, wrong)
    _, found = attacks.run(program.one, range(word != "pcov", 10, 2))
    assert any(word in fault for fault in found)
