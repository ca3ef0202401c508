"""benchmarks/arena.py on tiny tasks: cells, the rates that are chosen, the clock, tables, plots and the page."""

import json
import math
import os
import time

import pytest
import torch

import arena
import marquardt as mq
from contest import cells, contestants, pool, tables, tasks
from contest.cells import Budget, Cell
from contest.contestants import CONTESTANTS, Contestant, Method, NotApplicable


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """A task on all of its 40 rows, for choices, and one by batches of 16 rows, for the report."""
    for name, use, batch in (("whole", tasks.CHOICE, None), ("batches", tasks.REPORT, 16)):
        build = tasks.smooth(tasks.functions.FRANKE, 40, 4)
        monkeypatch.setitem(tasks.TASKS, name, tasks.Task(name, use, "tiny", build, batch=batch))


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Three steps on both tasks; what was printed, and the cells that were run."""
    before = torch.get_num_threads()

    def run(*given: str):
        ran = []
        whole = cells.run
        monkeypatch.setattr(cells, "run", lambda cell, *rest: ran.append(cell) or whole(cell, *rest))
        options = ["--tasks", "whole", "batches", "--steps", "3", "--jobs", "0", "--device", "cpu", "--threads", "1"]
        arena.run(arena.arguments([*options, "--out", str(tmp_path), *given]))
        monkeypatch.setattr(cells, "run", whole)
        return capsys.readouterr().out, ran

    yield run
    torch.set_num_threads(before)


def test_every_contestant_takes_the_steps_and_a_second_run_takes_none(run, tmp_path):
    printed, ran = run("--seeds", "0", "1")
    trials = sum(len(c.rates) for c in CONTESTANTS.values())
    assert len(ran) == 2 * (trials + 2 * len(CONTESTANTS))
    records = tables.load(tmp_path)
    assert len(records) == len(ran)
    for record in records:
        assert "error" not in record, record
        last = record["points"][-1]
        assert last[1] == 3
        assert all(math.isfinite(figure) for figure in last)
        assert [point[1] for point in record["points"]] == [1, 2, 3]  # of the marks in steps, each once
    again, ran = run("--seeds", "0", "1")
    assert ran == []
    assert again[again.index("###") :] == printed[printed.index("###") :]


def test_the_reported_rate_is_the_best_on_validation_data(run, tmp_path):
    run("--seeds", "0", "--contestants", "Adam", "--tasks", "whole")
    trials, reported = {}, {}
    for record in tables.load(tmp_path):
        assert record["seed"] == (arena.TRIAL_SEED if record["trial"] else 0)
        (trials if record["trial"] else reported)[record["rate"]] = record["points"][-1][3]
    assert sorted(trials) == list(contestants.ADAM_RATES)
    assert list(reported) == [min(trials, key=trials.get)]


def test_the_table_has_the_mean_of_the_seeds_and_marks_the_lowest(run, tmp_path):
    printed, _ = run("--contestants", "LM", "kfac")
    choice, report = printed.index("served for choices"), printed.index("The other tasks")
    assert choice < printed.index("| whole ") < report < printed.index("| batches ")
    for task in ("whole", "batches"):
        [row] = [line for line in printed.splitlines() if line.startswith(f"| {task} ")]
        found = {}
        for name in ("LM", "kfac"):
            courses = [
                json.loads((tmp_path / Cell(task, name, seed, "cpu", Budget(steps=3)).path).read_text())["points"]
                for seed in arena.SEEDS
            ]
            best = [min(points, key=lambda p: p[3])[4] for points in courses]  # by validation
            found[name] = sum(best) / len(best)
        lowest = min(found, key=found.get)
        shown = [f"**{tables.shown(v)}**" if name == lowest else tables.shown(v) for name, v in found.items()]
        assert [cell.strip() for cell in row.split("|")[4:6]] == shown


def test_what_fails_is_in_the_table_and_runs_again_if_asked(run, monkeypatch):
    def broken(problem, seed, rate):
        raise ArithmeticError("no such luck")

    def refused(problem, seed, rate):
        raise NotApplicable("not for such a model")

    monkeypatch.setitem(CONTESTANTS, "kfac", Contestant("kfac", broken))
    monkeypatch.setitem(CONTESTANTS, "torch-lm", Contestant("torch-lm", refused))
    chosen = ("--contestants", "LM", "torch-lm", "kfac", "--seeds", "0", "1")
    printed, _ = run(*chosen)
    for task in ("whole", "batches"):
        [row] = [line for line in printed.splitlines() if line.startswith(f"| {task} ")]
        first, *others = (cell.strip() for cell in row.split("|")[4:-1])
        assert first.startswith("**")
        assert others == ["–", "failed"]
    assert "- kfac failed (ArithmeticError: no such luck): whole, batches." in printed
    assert "- torch-lm does not apply (not for such a model): whole, batches." in printed
    assert run(*chosen)[1] == []
    assert {cell.contestant for cell in run(*chosen, "--again")[1]} == {"kfac"}


# --- the clock ---


@pytest.fixture
def clock(monkeypatch):
    """Stands until something is said to take time."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def takes(seconds: float) -> None:
        now[0] += seconds

    return takes


def timed(monkeypatch, clock, budget: Budget, building: float, pace: float, scoring: float):
    def build(problem, seed, rate):
        clock(building)
        return Method(lambda share, count: clock(count * pace) or shares.append(share) or count)

    def scores(model):
        clock(scoring)
        return tasks.Score(1.0, 1.0, 1.0)

    shares = []
    monkeypatch.setitem(CONTESTANTS, "LM", Contestant("LM", build))
    cell = Cell("whole", "LM", 0, "cpu", budget)
    problem = tasks.TASKS["whole"].problem(0, tasks.Setup(), torch.device("cpu"))
    problem.scores = scores
    return list(cells.points(problem, cell, None, torch.device("cpu"))), shares


def test_the_clock_stands_while_weights_are_scored(monkeypatch, clock):
    points, shares = timed(monkeypatch, clock, Budget(10.0), building=1.0, pace=0.5, scoring=100.0)
    assert [p.seconds for p in points] == [1 + p.steps / 2 for p in points]
    assert (points[-1].seconds, points[-1].steps) == (10.0, 18)
    assert len(points) <= cells.MARKS
    assert shares[:2] == [0.1, 0.15]


def test_a_first_step_that_lasts_longer_than_the_budget_is_told(monkeypatch, clock):
    points, _ = timed(monkeypatch, clock, Budget(10.0), building=0.0, pace=30.0, scoring=0.0)
    record = {"budget": {"seconds": 10.0}, "points": [list(p) for p in points], "rate": None}
    assert tables.entry([record]).cell(False) == "1†"


def test_quick_steps_are_timed_in_blocks(monkeypatch, clock):
    points, shares = timed(monkeypatch, clock, Budget(10.0), building=0.0, pace=1e-3, scoring=0.0)
    assert points[-1].seconds == pytest.approx(10, abs=2e-3)
    assert len(shares) < points[-1].steps / 10


# --- contestants ---


def problem(name: str = "whole") -> tasks.Problem:
    return tasks.TASKS[name].problem(0, tasks.Setup(), torch.device("cpu"))


def test_lm_is_the_default():
    own, other = problem(), problem()
    method = CONTESTANTS["LM"].build(own, 0, math.nan)
    method.run(0.0, 5)
    opt = mq.LM(other.model, "mse")
    for _ in range(5):
        opt.step(*other.train)
    with method.evaluated(), opt.averaged():
        assert own.scores(own.model) == other.scores(other.model)


def test_all_see_the_same_batches_and_no_row_twice_in_a_pass():
    feeds = [contestants.Feed(problem("batches"), 3) for _ in range(2)]
    seen = []
    for _ in range(4):  # 40 rows: in a pass two batches of 16, eight rows are left out
        for feed in feeds:
            feed.advance()
        assert torch.equal(feeds[0].index, feeds[1].index)
        seen.append(feeds[0].index.tolist())
    assert len({*seen[0], *seen[1]}) == len({*seen[2], *seen[3]}) == 32
    assert seen[0] != seen[2]


@pytest.mark.parametrize("name", ["Adam", "Muon"])
def test_the_rate_falls_to_nothing(name):
    own = problem()
    method = CONTESTANTS[name].build(own, 0, 0.01)
    start = [p.detach().clone() for p in own.model.parameters()]

    def moved(share: float) -> float:
        before = [p.detach().clone() for p in own.model.parameters()]
        method.run(share, 1)
        return max(float((p - b).detach().abs().max()) for p, b in zip(own.model.parameters(), before, strict=True))

    first, half, last = moved(0.0), moved(0.5), moved(1.0)
    assert first > half > 0
    assert last < 1e-8
    assert any(not torch.equal(p, s) for p, s in zip(own.model.parameters(), start, strict=True))


def test_a_share_of_a_step_of_muon_is_a_step_at_that_rate():
    """What stands in a CUDA graph."""
    torch.manual_seed(0)
    plain = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    shared = torch.nn.Parameter(plain.detach().clone())
    lr = torch.tensor(0.02)
    by_rate = torch.optim.Muon([plain], lr=0.02, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    whole = torch.optim.Muon([shared], lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    step = contestants.scaled(whole.step, [shared], lr)
    for _ in range(3):
        gradient = torch.randn(4, 3, dtype=torch.float64)
        plain.grad, shared.grad = gradient.clone(), gradient.clone()
        by_rate.step()
        step()
    torch.testing.assert_close(shared, plain, rtol=1e-6, atol=1e-8)


# --- processes ---


class Deadly:
    def __reduce__(self):
        return os._exit, (3,)


def test_a_process_that_dies_costs_its_cell_alone(tmp_path):
    jobs = [(Cell("franke", "LM", seed, "cpu", Budget(steps=1)), rate) for seed, rate in ((0, None), (1, Deadly()))]
    told = []
    pool.run(jobs, tmp_path, 1, 1, tasks.Setup(), {"cpu": "this"}, lambda cell, record: told.append(record))
    assert told[0]["points"][-1][1] == 1
    assert told[1]["error"] == "its process died (exit code 3)"
    assert [r.get("error") for r in tables.load(tmp_path)] == [None, told[1]["error"]]


# --- what reads the cells ---


def test_plots_have_a_panel_for_each_task(run, tmp_path):
    pytest.importorskip("matplotlib")
    run("--seeds", "0", "--contestants", "LM", "L-BFGS")
    arena.draw(arena.arguments(["plots", "--out", str(tmp_path)]))
    text = (tmp_path / "arena.html").read_text("utf-8")
    assert text.count("<svg ") == 1
    for name in ("whole", "batches", "L-BFGS"):
        assert f"<!-- {name} -->" in text


def test_the_page_is_filled_between_its_marks(run, tmp_path):
    printed, _ = run("--seeds", "0", "--contestants", "LM", "L-BFGS")
    page = tmp_path / "when.md"
    page.write_text(arena.PAGE.read_text("utf-8"), "utf-8")
    for _ in range(2):  # the second time in place of the first
        arena.page(arena.arguments(["page", "--out", str(tmp_path), "--page", str(page)]))
        text = page.read_text("utf-8")
        assert text.count(tables.page(tables.load(tmp_path))) == 1
        assert text.count(tables.listed()) == 1
    assert tables.page(tables.load(tmp_path)) in printed


def test_a_summary_counts_no_failures_and_no_ties_of_nothing():
    def entry(*found: float) -> tables.Entry:
        return tables.Entry(found, (), None, 1.0, False, None, 1)

    rows = {
        "borehole": {"LM": entry(0.01), "Adam": entry(0.2), "L-BFGS": entry(0.1)},
        "digits": {"LM": entry(0.0), "Adam": entry(0.0), "L-BFGS": entry(0.5)},
        "poisson": {"LM": entry(math.nan), "Adam": entry(math.nan), "L-BFGS": entry(math.nan)},
        "circuit": {"LM": entry(1.05), "Adam": entry(1.0), "L-BFGS": entry(2.0)},
    }
    assert tables.summary(rows) == (
        "LM has the lowest figure in 2 of 4 tasks, and one within 1.1 × of the lowest in 3; "
        "it is at least 10 × more accurate than the better of Adam and L-BFGS in 1."
    )
