"""What is on the clock of a run, on made-up methods that keep their own time; and which runs are done already."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from marquardt.paper import problems, runs
from marquardt.paper.methods import METHODS, Method, Trainer
from support.made_runs import EVERY, Still, digits, lines_of, made, steps_of, train

# --- the clock ---


class Time:
    """Stands still but for what is said to take time."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def taking(self, seconds, function):
        def slow(*arguments):
            self.now += seconds
            return function(*arguments)

        return slow


@pytest.fixture
def time(monkeypatch):
    """A step of "fake" takes a second; building, evaluating and fetching a batch a thousand each."""
    time = Time()
    batches, repeat = problems.batches, itertools.repeat

    def slowly(source):
        for batch in source:
            time.now += 1000
            yield batch

    monkeypatch.setattr(runs, "time", SimpleNamespace(perf_counter=time.perf_counter))
    monkeypatch.setattr(problems, "evaluate", time.taking(1000, problems.evaluate))
    monkeypatch.setattr(problems, "mean_squared_error", time.taking(1000, problems.mean_squared_error))
    monkeypatch.setattr(problems, "batches", lambda *arguments: slowly(batches(*arguments)))
    monkeypatch.setattr(runs, "itertools", SimpleNamespace(repeat=lambda value: slowly(repeat(value))))
    fake = Method("fake", "Fake", time.taking(1000, Still), {}, {})
    monkeypatch.setattr(Still, "step", time.taking(1.0, Still.step))
    monkeypatch.setitem(METHODS, "fake", fake)
    return time


@pytest.mark.parametrize("experiment", ["sine", "mnist"])
def test_only_training_is_on_the_clock(tmp_path, time, experiment):
    run = made("fake", experiment, steps=6)
    summary = runs.execute(run, tmp_path, digits(), time.taking(1000, lambda line: None))
    assert [line["seconds"] for line in steps_of(run.log(tmp_path))] == [0, 1, 2, 3, 4, 5, 6]
    assert summary.seconds == 6
    assert time.now > 13_000


@pytest.mark.parametrize(("experiment", "key"), [pair for pair in EVERY if "ablation" not in pair[0]])
def test_nothing_else_is_on_the_clock_of_any_method(tmp_path, time, experiment, key):
    steps = train(made(key, experiment, steps=2), tmp_path, digits())
    assert [line["seconds"] for line in steps] == [0, 0, 0]
    assert time.now >= 4000


def test_average_is_on_the_clock(tmp_path, time, monkeypatch):
    monkeypatch.setattr(Trainer, "update_average", time.taking(0.5, Trainer.update_average))
    assert [line["seconds"] for line in train(made("fake", steps=3), tmp_path)] == [0, 1.5, 3, 4.5]


def test_slow_run_is_cut_off(tmp_path, time):
    run = made("fake", steps=10, limit=2.5)
    summary = runs.execute(run, tmp_path)
    assert (summary.status, summary.step, summary.seconds) == ("finished", 3, 3)
    assert summary.message == "cut off at 2.5 s, after step 3 of 10"
    assert [line["step"] for line in steps_of(run.log(tmp_path))] == [0, 1, 2, 3]
    assert lines_of(run.log(tmp_path))[0]["limit"] == 2.5
    assert runs.done(run, tmp_path)


def test_limit_goes_before_seconds(tmp_path, time):
    summary = runs.execute(made("fake", steps=3, seconds=100, limit=7), tmp_path)
    assert (summary.status, summary.step) == ("finished", 7)


def test_run_goes_on_until_its_seconds_are_over(tmp_path, time):
    run = made("fake", steps=10, seconds=400)
    summary = runs.execute(run, tmp_path)
    assert (summary.status, summary.step, summary.seconds, summary.message) == ("finished", 400, 400, "")
    steps = [line["step"] for line in steps_of(run.log(tmp_path))]
    assert steps[:11] == list(range(11))
    assert steps[-1] == 400
    late = [step for step in steps[:-1] if step > 40]
    assert len(late) > 20
    assert all(1.05 * a <= b <= 1.08 * a for a, b in itertools.pairwise(late))


def test_steps_are_done_though_the_seconds_are_over(tmp_path, time):
    run = made("fake", steps=10, seconds=4)
    assert runs.execute(run, tmp_path).step == 10
    assert [line["step"] for line in steps_of(run.log(tmp_path))] == list(range(11))


def test_method_that_stops_by_itself(tmp_path, method):
    class Stops(Still):
        def run(self, batches, after):
            super().run(itertools.islice(batches, 2), after)

    method(Stops)
    run = made("fake", steps=5)
    summary = runs.execute(run, tmp_path)
    assert (summary.status, summary.step) == ("finished", 2)
    assert summary.message == "it stopped by itself, after step 2 of 5"


# --- what is done already ---


@pytest.fixture
def finished(tmp_path):
    """A run that has ended, its folder and its data."""
    run, data = made("adam", "mnist", steps=2, limit=60.0), digits()
    assert not runs.done(run, tmp_path, data)
    runs.execute(run, tmp_path, data)
    return run, tmp_path, data


def test_done(finished):
    run, out, data = finished
    assert runs.done(run, out, data)
    assert runs.done(replace(run, hyper=dict(reversed(run.hyper.items()))), out, data)
    assert runs.done(run, out, replace(data, source="elsewhere"))
    sine = made("sgd", seconds=0.01)
    runs.execute(sine, out)
    assert runs.done(sine, out)
    assert runs.done(sine, out, data)


@pytest.mark.parametrize(
    "change",
    [
        {"hyper": {"lr": 0.06, "beta1": 0.9, "beta2": 0.999, "average": None}},
        {"hyper": {"lr": 0.05, "beta1": 0.9, "beta2": 0.999, "average": 0.9}},
        {"hyper": {"lr": 0.05, "beta1": 0.9, "beta2": 0.999}},
        {"steps": 3},
        {"seconds": 1.0},
        {"limit": math.inf},
        {"train_sample": 30},
        {"device": "cuda"},
        {"seed": 1},
        {"column": "tuned"},
        {"experiment": "swapped"},
    ],
)
def test_another_run_is_not_done(finished, change):
    run, out, data = finished
    assert not runs.done(replace(run, **change), out, data)


def test_run_on_other_data_is_not_done(finished):
    run, out, data = finished
    assert not runs.done(run, out, replace(data, name="MNIST"))
    assert not runs.done(run, out, digits(train=61))
    assert not runs.done(run, out, digits(test=31))
    assert not runs.done(run, out, data.swapped())


def test_truncated_log_is_not_done(finished):
    run, out, data = finished
    content = run.log(out).read_bytes()
    lines = content.splitlines(keepends=True)
    cuts = [*itertools.accumulate(map(len, lines[:-1])), 0, 1, len(lines[0]) - 2, len(content) - 3]
    for cut in cuts:
        run.log(out).write_bytes(content[:cut])
        assert not runs.done(run, out, data), content[:cut][-80:]
    run.log(out).write_bytes(content)
    assert runs.done(run, out, data)


@pytest.mark.parametrize("status", ["failed", "unavailable"])
def test_failed_run_is_not_done(finished, status):
    run, out, data = finished
    path = run.log(out)
    path.write_text(path.read_text(encoding="utf-8").replace('"finished"', f'"{status}"'), encoding="utf-8")
    assert not runs.done(run, out, data)


def test_log_with_a_damaged_line_is_not_done(finished):
    run, out, data = finished
    path = run.log(out)
    path.write_text(path.read_text(encoding="utf-8").replace('"train_loss": ', '"train_loss": "low", "was": ', 1))
    assert not runs.done(run, out, data)


@pytest.mark.parametrize("content", [b"", b"\n", b"{}\n{}\n", b"[]\n[]\n", b"null\n1\n", b"\xff\xfe\n\xff\n"])
def test_what_is_no_log_is_not_done(finished, content):
    run, out, data = finished
    run.log(out).write_bytes(content)
    assert not runs.done(run, out, data)
