"""Each example trains, draws its picture, and is on the page with it; the comparison they share is for equal time."""

import re
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = EXAMPLES.parent / "docs" / "models-examples.md"
NAMES = sorted({path.stem for path in EXAMPLES.glob("*.py")} - {"compare", "curve_fit", "distributed_mnist"})


@pytest.fixture
def run(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("MPLBACKEND", "Agg")

    def run(name, *arguments, run_name="__main__"):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=run_name)

    return run


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000


@pytest.mark.parametrize("name", NAMES)
def test_an_example_lowers_its_loss_and_draws(name, run, tmp_path, capsys):
    run(name, "--quick", "--out", tmp_path)
    rows = [re.split(" {2,}", line) for line in capsys.readouterr().out.splitlines() if line.startswith("LM")]
    assert rows
    for _, _, _, before, after, *_ in rows:
        assert float(after) < float(before)
    assert is_picture(tmp_path / f"{name}.png")


def test_the_curve_is_fitted_and_drawn(run, tmp_path, capsys):
    run("curve_fit", tmp_path / "fit.png")
    found = re.findall(r"= (\S+) ± (\S+)", capsys.readouterr().out)
    assert len(found) == 3
    for (value, error), true in zip(found, (2.5, 1.3, 0.5), strict=True):
        assert abs(float(value) - true) < 4 * float(error)
    assert is_picture(tmp_path / "fit.png")


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_each_example_with_its_picture(name):
    page, picture = PAGE.read_text(encoding="utf-8"), EXAMPLES / "pictures" / f"{name}.png"
    assert f"(../examples/{name}.py)" in page
    assert f"(../examples/pictures/{name}.png)" in page
    assert is_picture(picture)
    assert picture.stat().st_size < 120_000


def test_all_have_the_time_of_the_first_and_keep_their_best_weights(run, monkeypatch):
    """By a clock that only steps move. The loss falls to its least at the fourth look and rises again."""
    shared, clock = run("compare", run_name="compare"), SimpleNamespace(now=0.0)
    race = shared["race"]
    monkeypatch.setitem(race.__globals__, "perf_counter", lambda: clock.now)

    class Contestant:
        averaged = staticmethod(nullcontext)

        def __init__(self, cost):
            self.run, self.cost, self.shares = shared["Run"]("", torch.nn.Linear(1, 1, bias=False)), cost, []
            torch.nn.init.zeros_(self.run.model.weight)

        def step(self, share):
            clock.now += self.cost
            self.shares.append(share)
            with torch.no_grad():
                self.run.model.weight += self.cost

    first, other = Contestant(1.0), Contestant(0.25)
    race([first, other], lambda model: abs(model.weight.item() - 4), 8)
    assert (first.run.steps, first.run.seconds) == (8, 8)
    assert (other.run.steps, other.run.seconds) == (32, 8)
    assert first.shares == [n / 8 for n in range(8)]
    assert other.shares == [n // 4 / 8 for n in range(32)]
    for one in (first, other):
        assert one.run.course == [(n, abs(n - 4)) for n in range(9)]
        assert (one.run.best, one.run.model.weight.item()) == (0, 4)
