"""The paper's runs: which there are, what their logs hold and how they end, what is on the clock, and what is done."""

import itertools
import json
import math
import sys
from dataclasses import replace
from datetime import datetime
from importlib import machinery
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from marquardt.paper import problems, runs, vocabulary
from marquardt.paper.methods import METHODS, Method, Trainer, ablation
from marquardt.paper.vocabulary import EXPERIMENTS
from support.command_line import program
from support.made_logs import ABLATION
from support.made_runs import EVERY, LABELS, ON_DIGITS, Still, digits, lines_of, made, room_for, steps_of, train


@pytest.fixture
def method(monkeypatch):
    """Adds a method "fake" that is built so."""

    def add(build):
        monkeypatch.setitem(METHODS, "fake", Method(build, {}, {}, key="fake", label="Fake"))

    return add


@pytest.fixture
def trainers(method):
    """Every trainer that the method "fake" was built as, with its batches: one to warm up, one for the run."""
    found = []

    class See(Still):
        def __init__(self, model, loss, hyper):
            super().__init__(model, loss, hyper)
            self.start = parameters_to_vector(model.parameters()).detach().clone()
            self.batches = []
            found.append(self)

        def step(self, x, y):
            self.batches.append((x, y))
            torch.nn.init.zeros_(self.model[-1].bias)
            torch.rand(1)

    method(See)
    return found


# --- which runs there are ---


def keys(plan):
    return [(run.experiment, run.method, run.column, run.seed) for run in plan]


def expected(experiment, methods, columns, seeds):
    return set(itertools.product([experiment], methods, columns, range(1000, 1000 + seeds)))


def test_methods_are_those_of_the_tables():
    variants = ablation("sine") | ablation("mnist")
    assert [(key, method.label) for key, method in METHODS.items()] == [*LABELS.items()]
    assert {*METHODS, *variants} == set(vocabulary.METHODS)
    assert {key: method.label for key, method in variants.items()} == {k: name for k, (name, _) in ABLATION.items()}
    assert all(key == method.key for key, method in (METHODS | variants).items())
    assert set(ablation("sine")) ^ set(ablation("mnist")) == {"paper+uphill", "paper-uphill"}
    for problem in vocabulary.PROBLEMS:
        assert list(ablation(problem)) == [key for key in vocabulary.METHODS if key in ablation(problem)]
    assert {key for key, method in METHODS.items() if method.sine_only} == {"newton", "bfgs"}


@pytest.mark.parametrize(("full", "sine_seeds", "digit_seeds"), [(False, 3, 1), (True, 20, 10)])
def test_plan_of_every_experiment(tmp_path, full, sine_seeds, digit_seeds):
    tuned = {"sine": {"adam": {"lr": 0.5}}, "mnist": {"sgd": {"average": 0.9}, "newton": {"lr": 1.0}}}
    before = {key: (method.hyper("sine"), method.hyper("mnist")) for key, method in METHODS.items()}
    plan = runs.plan(EXPERIMENTS, full=full, tuned=tuned)
    wanted = expected("sine", LABELS, ["default"], sine_seeds) | expected("mnist", ON_DIGITS, ["default"], digit_seeds)
    wanted |= expected("ablation-sine", ablation("sine"), ["default"], sine_seeds)
    wanted |= expected("ablation-mnist", ablation("mnist"), ["default"], digit_seeds)
    wanted |= expected("swapped", ON_DIGITS, ["default"], digit_seeds)
    # There is a tuned column only where there are values.
    wanted |= expected("sine", ["adam"], ["tuned"], sine_seeds)
    wanted |= expected("mnist", ["sgd"], ["tuned"], digit_seeds) | expected("swapped", ["sgd"], ["tuned"], digit_seeds)
    assert sorted(keys(plan)) == sorted(wanted)
    assert len({run.log(tmp_path) for run in plan}) == len(plan)
    lengths = {
        "sine": (200, 2.0 if full else 1.0),
        "mnist": (100 if full else 40, 0.0),
        "ablation-sine": (200, 0.0),
        "ablation-mnist": (100 if full else 20, 0.0),
        "swapped": (0, 0.0),
    }
    for run in plan:
        changes = {} if run.column == "default" else tuned[run.problem][run.method]
        assert (run.label, run.hyper) == (run.spec().label, run.spec().hyper(run.problem) | changes)
        assert run.problem == ("sine" if run.experiment in ("sine", "ablation-sine") else "mnist")
        assert (run.steps, run.seconds) == lengths[run.experiment]
        assert run.limit == (math.inf if full else 8.0)
        assert run.train_sample > 0
    assert before == {key: (method.hyper("sine"), method.hyper("mnist")) for key, method in METHODS.items()}
    run = next(run for run in plan if run.experiment == "ablation-mnist" and run.method == "vanilla+search")
    assert run.log(tmp_path) == tmp_path / "logs" / "ablation-mnist" / "vanilla+search.default.1000.jsonl"
    swapped = next(run for run in plan if run.experiment == "swapped")
    assert runs.length(swapped, {"train": 10_000}) == 17


def test_what_is_asked_for_is_planned():
    tuned = {"sine": {"adam": {"lr": 0.5}}}
    assert runs.plan([]) == runs.plan(["sine", "mnist"], columns=["tuned"]) == []
    for name in EXPERIMENTS:
        found = {run.experiment for run in runs.plan([name])}
        assert found == ({"ablation-sine", "ablation-mnist"} if name == "ablation" else {name})
    assert {run.column for run in runs.plan(["sine"], columns=["default"], tuned=tuned)} == {"default"}
    assert keys(runs.plan(["sine"], columns=["tuned"], seeds=1, tuned=tuned)) == [("sine", "adam", "tuned", 1000)]
    assert {run.column for run in runs.plan(["ablation"], columns=["tuned"], tuned=tuned)} == {"default"}
    plan = runs.plan(["sine", "mnist", "swapped"], methods=["adam", "newton", "lm"], seeds=2)
    wanted = expected("sine", ["lm", "newton", "adam"], ["default"], 2)
    wanted |= expected("mnist", ["lm", "adam"], ["default"], 2) | expected("swapped", ["lm", "adam"], ["default"], 2)
    assert sorted(keys(plan)) == sorted(wanted)
    assert {run.seed for run in runs.plan(["ablation"], seeds=4)} == {1000, 1001, 1002, 1003}
    devices = {(run.problem, run.device) for run in runs.plan(EXPERIMENTS, device="cuda")}
    assert devices == {("sine", "cpu"), ("mnist", "cuda")}


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (["sine", "cosine"], {}, "no experiment 'cosine': choose from sine, mnist, ablation, swapped"),
        (["sine"], {"methods": ["lm", "sdg"]}, "no optimizer 'sdg': choose from lm, lm-paper"),
        (["sine"], {"columns": ["best"]}, "no column 'best': choose from default, tuned"),
        (["sine"], {"seeds": 0}, "seeds=0: how many seeds to run, at least 1"),
    ],
)
def test_plan_refuses_what_it_does_not_know(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        runs.plan(arguments, **options)


# --- the log, line by line ---

STEP = {"kind", "step", "seconds", "train_loss"}
DIGIT_STEP = STEP | {"train_accuracy", "test_loss", "test_accuracy"}
HEAD = {
    *("kind", "format", "experiment", "problem", "method", "label", "column", "seed", "steps", "seconds", "batch"),
    *("hyper", "parameters", "noise_floor", "data", "device", "machine", "versions", "started"),
}


def check_frame(lines, log, wanted_steps):
    """One head, one end, steps numbered from 0, a clock that never goes back."""
    head, *body, end = lines
    assert head["kind"] == "run"
    assert {line["kind"] for line in body} <= {"data", "step", "curve"}
    steps = [line for line in body if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(wanted_steps + 1))
    seconds = [line["seconds"] for line in steps]
    assert seconds[0] == 0.0
    assert seconds == sorted(seconds)
    assert 0 < seconds[-1] <= log.final("seconds")
    assert end == {"kind": "end", "status": "finished", "step": wanted_steps, "message": ""}
    assert (log.status, log.end, log.message) == ("finished", wanted_steps, "")
    assert {key: log.steps[key] for key in log.steps} == {key: [line[key] for line in steps] for key in log.steps}
    assert set(head) >= HEAD
    assert datetime.fromisoformat(head["started"]).tzinfo is not None
    assert {"cpu", "cores", "gpu", "system"} <= set(head["machine"])
    assert head["machine"]["gpu"] is None
    assert head["versions"]["torch"] == torch.__version__
    assert head["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "marquardt" in head["versions"]
    return head, body, steps


def test_log_of_the_sine(tmp_path):
    run = made("adam", steps=21, seed=2, seconds=0.001, hyper={"average": 0.9})
    seen = []
    log = runs.execute(run, tmp_path, watch=seen.append)
    head, body, steps = check_frame(lines_of(run.log(tmp_path)), log, 21)
    said = {
        "format": 2, "experiment": "sine", "problem": "sine", "method": "adam", "label": "Adam", "column": "default",
        "seed": 2, "steps": 21, "seconds": 0.001, "batch": 1000, "parameters": 31, "device": "cpu",
        "hyper": {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "average": 0.9},
    }  # fmt: skip
    assert {key: head[key] for key in said} == said
    assert head["noise_floor"] == pytest.approx(0.2**2 / 12)
    assert (head["data"]["train"], head["data"]["test"]) == (1000, 0)
    assert all(set(line) == STEP for line in steps)
    assert seen == steps

    samples, *others = [line for line in body if line["kind"] == "data"]
    assert not others
    x, y = problems.sine(2)
    assert samples["x"] == pytest.approx(x.flatten().tolist(), abs=1e-6)
    assert samples["y"] == pytest.approx(y.flatten().tolist(), abs=1e-6)
    assert steps[0]["train_loss"] == problems.mean_squared_error(problems.sine_mlp(2), x, y, 1000)
    assert log.final("train_loss") < steps[0]["train_loss"]


def test_fitted_curves_of_the_sine(tmp_path, method):
    class Shift(Still):
        def step(self, x, y):
            with torch.no_grad():
                self.model[2].bias += 0.01

    method(Shift)
    run = made("fake", steps=21, seed=1)
    runs.execute(run, tmp_path)
    curves = [line for line in lines_of(run.log(tmp_path)) if line["kind"] == "curve"]
    assert [line["step"] for line in curves] == [5, 20]
    for line in curves:
        assert line["x"] == sorted(line["x"])
        assert (line["x"][0], line["x"][-1]) == (-10, 10)
        x = torch.tensor(line["x"], dtype=torch.float64).unsqueeze(1)
        y = problems.predict(problems.sine_mlp(1), x) + 0.01 * line["step"]
        assert line["y"] == pytest.approx(y.flatten().tolist(), abs=1e-5)


@pytest.mark.parametrize("side", [8, 28])
def test_log_of_digits(tmp_path, side):
    data = digits(side=side)
    run = made("sgd", "mnist", steps=3, seed=1)
    seen = []
    log = runs.execute(run, tmp_path, data, seen.append)
    head, body, steps = check_frame(lines_of(run.log(tmp_path)), log, 3)
    said = {
        "experiment": "mnist", "problem": "mnist", "method": "sgd", "label": "SGD", "seed": 1, "steps": 3, "batch": 60,
        "parameters": {8: 506, 28: 2202}[side], "noise_floor": None, "device": "cpu",
        "hyper": {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4, "average": None},
        "data": {"name": "digits", "train": 60, "test": 30, "source": "made up for a test"},
    }  # fmt: skip
    assert {key: head[key] for key in said} == said
    assert not head["seconds"]
    assert body == steps == seen
    assert all(set(line) == DIGIT_STEP for line in steps)
    model = problems.cnn_for(data)(1)
    train = problems.evaluate(model, data.train_images[:20], data.train_labels[:20])
    test = problems.evaluate(model, data.test_images, data.test_labels)
    assert (steps[0]["train_loss"], steps[0]["train_accuracy"]) == pytest.approx(train)
    assert (steps[0]["test_loss"], steps[0]["test_accuracy"]) == pytest.approx(test)


def test_swapped_is_one_pass_over_the_test_set(tmp_path, trainers):
    data = digits(train=40, test=1300)
    run = made("fake", "swapped", steps=0, train_sample=10_000)
    runs.execute(run, tmp_path, data)
    head, *_, end = lines_of(run.log(tmp_path))
    assert (head["steps"], end["step"], head["data"]["train"], head["data"]["test"]) == (3, 3, 1300, 40)
    assert (head["batch"], [len(x) for x, _ in trainers[-1].batches]) == (600, [600, 600, 100])
    seen = torch.cat([x for x, _ in trainers[-1].batches])
    assert torch.equal(seen.flatten(1).sum(1).sort()[0], data.test_images.flatten(1).sum(1).sort()[0])
    model = problems.digits_cnn(0)
    first = steps_of(run.log(tmp_path))[0]
    assert first["test_loss"] == pytest.approx(problems.evaluate(model, data.train_images, data.train_labels).loss)
    assert first["train_loss"] == pytest.approx(problems.evaluate(model, data.test_images, data.test_labels).loss)


# --- the name of a log ---


def test_log_gets_its_name_when_the_run_has_ended(tmp_path):
    run = made("sgd")
    folder = run.log(tmp_path).parent
    seen = []
    runs.execute(run, tmp_path, watch=lambda line: seen.append([path.name for path in folder.iterdir()]))
    (part,) = seen[0]
    assert part.startswith("sgd.default.0.")
    assert part.endswith(".part")
    assert seen == [[part]] * 4
    assert [path.name for path in folder.iterdir()] == ["sgd.default.0.jsonl"]


@pytest.mark.parametrize(("key", "at"), [("sgd", 0), ("lm", 2), ("bfgs", 2)])
def test_interrupted_run_leaves_nothing(tmp_path, key, at):
    def interrupt(line):
        if line["step"] == at:
            raise KeyboardInterrupt

    run = made(key, steps=5)
    with pytest.raises(KeyboardInterrupt):
        runs.execute(run, tmp_path, watch=interrupt)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert not runs.done(run, tmp_path)


# --- a disk that is full ---


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_log_that_cannot_be_written_is_named_and_replaces_none(tmp_path, part):
    run, out = made("sgd"), tmp_path / "out"
    runs.execute(run, tmp_path / "measured")
    size = int(part * run.log(tmp_path / "measured").stat().st_size)
    runs.execute(replace(run, steps=1), out)  # a log of other length has the name already
    before = run.log(out).read_bytes()
    with room_for(size), pytest.raises(OSError, match="sgd") as error:
        runs.execute(run, out)
    assert str(run.log(out)) in str(error.value)
    assert "File too large" in str(error.value)
    assert "free some space or choose another folder" in str(error.value)
    assert [path.name for path in run.log(out).parent.iterdir()] == [run.log(out).name]
    assert run.log(out).read_bytes() == before
    assert not runs.done(run, out)
    assert runs.execute(run, out).status == "finished"


def test_log_that_cannot_be_read_is_not_run_again(tmp_path, monkeypatch):
    run = made("sgd")
    runs.execute(run, tmp_path)

    def refuse(path, *arguments, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PermissionError, match="sgd"):
        runs.done(run, tmp_path)


def test_digits_are_needed(tmp_path):
    with pytest.raises(ValueError, match=r"mnist/sgd\.default\.0 needs the digits: pass data="):
        runs.execute(made("sgd", "mnist"), tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


# --- how a run ends ---


class Fails(Still):
    def step(self, x, y):
        self.count += 1
        if self.count == 3:
            raise FloatingPointError("the matrix is not positive definite")


def test_error_of_a_method_is_in_its_log(tmp_path, method):
    method(Fails)
    run = made("fake", steps=5)
    log = runs.execute(run, tmp_path)
    message = "FloatingPointError: the matrix is not positive definite"
    assert (log.status, log.end, log.message) == ("failed", 2, message)
    assert lines_of(run.log(tmp_path))[-1] == {"kind": "end", "status": "failed", "step": 2, "message": message}
    assert [line["step"] for line in steps_of(run.log(tmp_path))] == [0, 1, 2]
    assert not runs.done(run, tmp_path)
    unbuilt = made("sgd", hyper={"lr": -1.0})
    log = runs.execute(unbuilt, tmp_path)
    assert (log.status, log.end) == ("failed", 0)
    assert "ValueError: Invalid learning rate: -1.0" in log.message
    assert math.isnan(log.final("train_loss"))
    assert [line["kind"] for line in lines_of(unbuilt.log(tmp_path))] == ["run", "data", "end"]


@pytest.mark.parametrize("experiment", ["sine", "mnist"])
def test_divergence_ends_a_run(tmp_path, experiment):
    run = made("sgd", experiment, steps=50, hyper={"lr": 1e6})
    data = digits()
    log = runs.execute(run, tmp_path, data)
    assert log.status == "diverged"
    assert 1 <= log.end < 50
    *_, last, end = lines_of(run.log(tmp_path))
    assert (end["status"], end["step"], last["step"]) == ("diverged", log.end, log.end)
    assert f"after step {log.end}, " in end["message"]
    assert runs.done(run, tmp_path, data)


def test_ten_times_the_start_is_divergence(tmp_path, method, monkeypatch):
    method(Still)
    losses = iter([1.0, 9.9, 0.5, 10.1, 0.1])
    monkeypatch.setattr(problems, "mean_squared_error", lambda *_: next(losses))
    run = made("fake", steps=4)
    log = runs.execute(run, tmp_path)
    assert (log.status, log.end, log.final("train_loss")) == ("diverged", 3, 10.1)
    assert log.message == "the loss was 10.1 after step 3, 1 at the start"


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("experiment", ["sine", "mnist"])
def test_numbers_that_are_not_finite(tmp_path, method, monkeypatch, experiment, value):
    class Break(Still):
        def step(self, x, y):
            for p in self.model.parameters():
                torch.nn.init.constant_(p, value)

    method(Break)
    run = made("fake", experiment, steps=8, hyper={"average": value})  # it is in the head too
    log = runs.execute(run, tmp_path, digits())
    head, *_, end = lines_of(run.log(tmp_path))
    assert head["hyper"] == {"average": None}
    assert (end["status"], end["step"], log.status) == ("diverged", 1, "diverged")
    assert steps_of(run.log(tmp_path))[-1]["train_loss"] is None
    assert math.isnan(log.final("train_loss"))
    if experiment == "sine":  # a curve
        monkeypatch.setattr(problems, "mean_squared_error", lambda *_: 1.0)
        assert runs.execute(run, tmp_path).status == "finished"
        curve = next(line for line in lines_of(run.log(tmp_path)) if line["kind"] == "curve")
        assert set(curve["y"]) == {None}


@pytest.mark.parametrize(
    ("key", "module", "package"),
    [
        ("psgd", "psgd_torch", "psgd-torch"),
        ("bfgs", "scipy.optimize", "scipy"),
        ("tlm", None, "torch-levenberg-marquardt"),
    ],
)
def test_missing_package(tmp_path, monkeypatch, key, module, package):
    if module is not None:
        monkeypatch.setitem(sys.modules, module, None)
    for name in [name for name in sys.modules if name.split(".")[0] == "torch_levenberg_marquardt"]:
        monkeypatch.delitem(sys.modules, name)
    find = machinery.PathFinder.find_spec
    absent = lambda name, *rest: None if name.startswith("torch_levenberg") else find(name, *rest)  # noqa: E731
    monkeypatch.setattr(machinery.PathFinder, "find_spec", absent)
    run = made(key)
    log = runs.execute(run, tmp_path)
    assert (log.status, log.end) == ("unavailable", 0)
    assert f"needs the package {package}: pip install" in log.message
    end = lines_of(run.log(tmp_path))[-1]
    assert end == {"kind": "end", "status": "unavailable", "step": 0, "message": log.message}
    assert not runs.done(run, tmp_path)
    assert "torch_levenberg_marquardt" not in sys.modules


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
    fake = Method(time.taking(1000, Still), {}, {}, key="fake", label="Fake")
    monkeypatch.setattr(Still, "step", time.taking(1.0, Still.step))
    monkeypatch.setitem(METHODS, "fake", fake)
    return time


@pytest.mark.parametrize("experiment", ["sine", "mnist"])
def test_only_training_is_on_the_clock(tmp_path, time, experiment):
    run = made("fake", experiment, steps=6)
    log = runs.execute(run, tmp_path, digits(), time.taking(1000, lambda line: None))
    assert [line["seconds"] for line in steps_of(run.log(tmp_path))] == [0, 1, 2, 3, 4, 5, 6]
    assert log.final("seconds") == 6
    assert time.now > 13_000


def test_average_is_on_the_clock(tmp_path, time, monkeypatch):
    monkeypatch.setattr(Trainer, "update_average", time.taking(0.5, Trainer.update_average))
    assert [line["seconds"] for line in train(made("fake", steps=3), tmp_path)] == [0, 1.5, 3, 4.5]


def test_slow_run_is_cut_off(tmp_path, time):
    run = made("fake", steps=10, limit=2.5)
    log = runs.execute(run, tmp_path)
    assert (log.status, log.end, log.final("seconds")) == ("finished", 3, 3)
    assert log.message == "cut off at 2.5 s, after step 3 of 10"
    assert [line["step"] for line in steps_of(run.log(tmp_path))] == [0, 1, 2, 3]
    assert lines_of(run.log(tmp_path))[0]["limit"] == 2.5
    assert runs.done(run, tmp_path)
    log = runs.execute(made("fake", steps=3, seconds=100, limit=7), tmp_path)
    assert (log.status, log.end) == ("finished", 7)  # the limit goes before the seconds


def test_run_goes_on_until_its_steps_and_its_seconds_are_over(tmp_path, time):
    run = made("fake", steps=10, seconds=400)
    log = runs.execute(run, tmp_path)
    assert (log.status, log.end, log.final("seconds"), log.message) == ("finished", 400, 400, "")
    steps = [line["step"] for line in steps_of(run.log(tmp_path))]
    assert steps[:11] == list(range(11))
    assert steps[-1] == 400
    late = [step for step in steps[:-1] if step > 40]
    assert len(late) > 20
    assert all(1.05 * a <= b <= 1.08 * a for a, b in itertools.pairwise(late))
    run = made("fake", steps=10, seconds=4)
    assert runs.execute(run, tmp_path).end == 10
    assert [line["step"] for line in steps_of(run.log(tmp_path))] == list(range(11))


def test_method_that_stops_by_itself(tmp_path, method):
    class Stops(Still):
        def run(self, batches, after):
            super().run(itertools.islice(batches, 2), after)

    method(Stops)
    run = made("fake", steps=5)
    log = runs.execute(run, tmp_path)
    assert (log.status, log.end) == ("finished", 2)
    assert log.message == "it stopped by itself, after step 2 of 5"


# --- what is done already ---


def test_done(tmp_path):
    run, data = made("adam", "mnist", steps=2, limit=60.0), digits()
    assert not runs.done(run, tmp_path, data)
    runs.execute(run, tmp_path, data)
    assert runs.done(run, tmp_path, data)
    assert runs.done(replace(run, hyper=dict(reversed(run.hyper.items()))), tmp_path, data)
    assert runs.done(run, tmp_path, replace(data, source="elsewhere"))
    for other in (replace(data, name="MNIST"), digits(train=61), digits(test=31), data.swapped()):
        assert not runs.done(run, tmp_path, other)
    for change in (
        *({"hyper": {**run.hyper, **hyper}} for hyper in ({"lr": 0.06}, {"average": 0.9})),
        {"hyper": {key: value for key, value in run.hyper.items() if key != "average"}},
        *({"steps": 3}, {"seconds": 1.0}, {"limit": math.inf}, {"train_sample": 30}, {"device": "cuda"}, {"seed": 1}),
        *({"column": "tuned"}, {"experiment": "swapped"}),
    ):
        assert not runs.done(replace(run, **change), tmp_path, data), change
    sine = made("sgd", seconds=0.01)
    runs.execute(sine, tmp_path)
    assert runs.done(sine, tmp_path)
    assert runs.done(sine, tmp_path, data)

    # What is no log of a run that has come to its end is not done.
    content = run.log(tmp_path).read_bytes()
    lines = content.splitlines(keepends=True)
    cuts = [*itertools.accumulate(map(len, lines[:-1])), 0, 1, len(lines[0]) - 2, len(content) - 3]
    for damaged in (
        *(content[:cut] for cut in cuts),
        content.replace(b'"finished"', b'"failed"'),
        content.replace(b'"train_loss": ', b'"train_loss": "low", "was": ', 1),
        *(b"\n", b"{}\n{}\n", b"[]\n[]\n", b"null\n1\n", b"\xff\xfe\n\xff\n"),
    ):
        run.log(tmp_path).write_bytes(damaged)
        assert not runs.done(run, tmp_path, data), damaged[-80:]
    run.log(tmp_path).write_bytes(content)
    assert runs.done(run, tmp_path, data)


# --- a few steps of every method ---


def test_same_weights_and_batches_within_a_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(problems, "BATCH", 20)  # of 60 digits: three in a pass
    found = {}

    def spied(key, build):
        def spy(model, loss, hyper):
            start = parameters_to_vector(model.parameters()).detach().clone()
            trainer = build(model, loss, hyper)
            run, seen = trainer.run, found.setdefault((experiment, seed), {}).setdefault(key, [start])
            seen[1:] = []  # those of the copy that warms up

            def record(source):
                for x, y in source:
                    seen.extend((x.clone(), y.clone()))
                    yield x, y

            trainer.run = lambda source, after: run(record(source), after)
            return trainer

        return spy

    for key, spec in METHODS.items():
        monkeypatch.setitem(METHODS, key, replace(spec, build=spied(key, spec.build)))
    for (experiment, key), seed in itertools.product([pair for pair in EVERY if "ablation" not in pair[0]], (0, 1)):
        runs.execute(made(key, experiment, steps=4 if experiment == "mnist" else 1, seed=seed), tmp_path, digits())
    for experiment, seed in itertools.product(("sine", "mnist"), (0, 1)):
        base, other = found[experiment, seed]["sgd"], found[experiment, 1 - seed]["sgd"]
        for seen in found[experiment, seed].values():
            assert len(seen) == len(base) > 2
            assert all(torch.equal(got, wanted) for got, wanted in zip(seen, base, strict=True))
        assert not torch.equal(base[0], other[0])
        assert not torch.equal(base[2], other[2])


@pytest.mark.parametrize("experiment", ["sine", "mnist"])
def test_warming_up_leaves_no_trace(tmp_path, trainers, monkeypatch, experiment):
    monkeypatch.setattr(problems, "BATCH", 20)
    steps = train(made("fake", experiment, seed=3), tmp_path, digits())
    first, second = trainers
    assert (len(first.batches), len(second.batches), len(steps)) == (1, 3, 4)
    assert first.model is not second.model
    assert torch.equal(first.start, second.start)
    for warm, real in zip(first.batches[0], second.batches[0], strict=True):
        assert torch.equal(warm, real)


@pytest.mark.parametrize(("experiment", "key"), EVERY)
def test_runs_repeat(tmp_path, experiment, key):
    run, data = made(key, experiment, steps=3 if experiment.endswith("sine") else 2), digits()
    first = train(run, tmp_path / "first", data)
    torch.rand(7)
    again = train(run, tmp_path / "again", data)
    assert [{**line, "seconds": 0} for line in first] == [{**line, "seconds": 0} for line in again]
    assert len(first) > 1
    other = train(replace(run, seed=1), tmp_path / "other", data)
    assert first[0]["train_loss"] != other[0]["train_loss"]


@pytest.mark.parametrize("key", ["lm", "kfac", "psgd", "sgd"])
def test_evaluation_does_not_disturb_the_training(tmp_path, key):
    few, many = (train(made(key, "mnist", steps=3, train_sample=n), tmp_path / str(n), digits()) for n in (5, 60))
    assert [line["test_loss"] for line in few] == [line["test_loss"] for line in many]


@pytest.mark.parametrize("column", ["default", "tuned"])
@pytest.mark.parametrize("key", LABELS)
def test_every_method_lowers_the_loss_of_the_sine(tmp_path, key, column):
    hyper = runs.winners(runs.WINNERS)["sine"][key] if column == "tuned" else {}
    losses = [line["train_loss"] for line in train(made(key, steps=15, hyper=hyper), tmp_path)]
    assert losses[-1] < losses[0]
    assert math.isfinite(losses[-1])


def test_weights_that_are_evaluated_are_those_of_the_trainer(tmp_path, method):
    class Zero(Still):
        def evaluated(self):
            vector_to_parameters(torch.zeros(31, dtype=torch.float64), self.model.parameters())
            return super().evaluated()

    method(Zero)
    _, y = problems.sine(0)
    losses = [line["train_loss"] for line in train(made("fake", steps=1), tmp_path)]
    assert losses == pytest.approx([y.square().mean().item()] * 2)


# --- `python -m marquardt.paper.runs`: the runs without the command line, where torch is all there is ---

FORBIDDEN = {"jinja2", "matplotlib", "mlxtend", "optuna", "psgd_torch", "rich", "scipy", "sklearn", "typer"}


def test_torch_is_all_that_runs_need():
    # What torch itself loads does not count, numpy among it.
    code = "import sys, torch, numpy, torch.distributed.nn.functional; before = set(sys.modules); "
    code += "import marquardt.paper.runs; print(*sys.modules); "
    done = program("-c", code + "print(*set(sys.modules) - before)")
    assert done.returncode == 0, done.stderr
    everything, new = ({name.split(".")[0] for name in line.split()} for line in done.stdout.splitlines())
    assert "marquardt" in new
    assert not everything & FORBIDDEN
    assert new - sys.stdlib_module_names <= {"marquardt", "torch", "numpy"}
    done = program("-m", "marquardt.paper.runs", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for word in ["python -m marquardt.paper.runs", "--full", "--optimizers", "--tuned", *LABELS]:
        assert word in done.stdout


@pytest.fixture
def main(tmp_path, monkeypatch):
    """The module's own command, on runs of two steps."""
    monkeypatch.setattr(runs, "SINE_STEPS", 2)
    small = runs.QUICK._replace(sine_seeds=1, sine_seconds=0.0, mnist_steps=2, ablation_steps=1, train_sample=20)
    monkeypatch.setattr(runs, "QUICK", small)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["runs", *map(str, arguments), "--out", str(tmp_path / "out")])
        runs.main()
        return {str(path.relative_to(tmp_path / "out" / "logs")) for path in (tmp_path / "out").rglob("*.jsonl")}

    return call


def test_main_goes_on_after_a_failure_and_skips_what_is_done(main, monkeypatch, capsys):
    def broken(model, loss, hyper):
        raise ValueError("it is broken")

    monkeypatch.setitem(METHODS, "adam", replace(METHODS["adam"], build=broken))
    logs = main("sine", "--optimizers", "adam", "sgd", "--columns", "default")
    assert logs == {"sine/adam.default.1000.jsonl", "sine/sgd.default.1000.jsonl"}
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == ["sine/sgd.default.1000", "sine/adam.default.1000"]
    assert ": MSE " in said[0]
    assert "after 2 steps" in said[0]
    assert said[1].endswith("(ValueError: it is broken)")
    main("sine", "--optimizers", "adam", "sgd", "--columns", "default")
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["sine/adam.default.1000"]


def test_main_on_digits_with_tuned_values(main, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(runs, "find", lambda name, folder: digits(name=f"{name} in {folder}"))
    tuned = tmp_path / "tuned.json"
    tuned.write_text(json.dumps({"mnist": {"sgd": {"lr": 0.5}}}))
    options = ["--optimizers", "sgd", "--tuned", tuned, "--data", "mnist-5k", "--data-dir", "here"]
    assert main("mnist", "swapped", *options) == {
        f"{experiment}/sgd.{column}.1000.jsonl"
        for experiment in ("mnist", "swapped")
        for column in ("default", "tuned")
    }
    head = lines_of(tmp_path / "out" / "logs" / "mnist" / "sgd.tuned.1000.jsonl")[0]
    assert head["hyper"]["lr"] == 0.5
    assert head["data"]["name"] == "mnist-5k in here"
    assert "90 % " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cosine"], "no experiment 'cosine'"),
        (["sine", "--seeds", "0"], "seeds=0"),
        (["mnist", "--data", "cifar"], "cifar"),
        (["mnist", "--data", "mnist", "--data-dir", "nowhere"], "nowhere"),
        (["sine", "--tuned", "broken.json"], "broken.json"),
        (["mnist", "--data", "digits"], "scikit-learn"),
    ],
)
def test_main_refuses_bad_input(main, monkeypatch, tmp_path, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)  # not installed
    with pytest.raises(SystemExit) as stop:
        main(*arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
