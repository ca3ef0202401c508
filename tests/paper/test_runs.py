"""Runs and their logs: what a log holds, how it gets its name, and how a run ends."""

import math
import os
import sys
from dataclasses import replace
from datetime import datetime
from importlib import machinery
from pathlib import Path

import pytest
import torch

from marquardt.paper import logs, problems, runs
from support.made_runs import Still, digits, lines_of, made, room_for, steps_of

# --- the log, line by line ---

STEP = {"kind", "step", "seconds", "train_loss"}
DIGIT_STEP = STEP | {"train_accuracy", "test_loss", "test_accuracy"}
HEAD = {
    *("kind", "format", "experiment", "problem", "method", "label", "column", "seed", "steps", "seconds", "batch"),
    *("hyper", "parameters", "noise_floor", "data", "device", "machine", "versions", "started"),
}


def check_frame(lines, summary, wanted_steps):
    """One head, one end, steps numbered from 0, a clock that never goes back."""
    head, *body, end = lines
    assert head["kind"] == "run"
    assert {line["kind"] for line in body} <= {"data", "step", "curve"}
    steps = [line for line in body if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(wanted_steps + 1))
    seconds = [line["seconds"] for line in steps]
    assert seconds[0] == 0.0
    assert seconds == sorted(seconds)
    assert 0 < seconds[-1] <= summary.seconds
    assert end == {"kind": "end", "status": "finished", "step": wanted_steps, "message": ""}
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
    summary = runs.execute(run, tmp_path, watch=seen.append)
    head, body, steps = check_frame(lines_of(run.log(tmp_path)), summary, 21)
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
    assert (summary.status, summary.step, summary.message) == ("finished", 21, "")
    assert summary.train_loss == steps[-1]["train_loss"] < steps[0]["train_loss"]
    assert (summary.test_accuracy, summary.steps_to_90) == (None, None)
    assert logs.read(run.log(tmp_path)).steps["train_loss"] == [line["train_loss"] for line in steps]


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
    summary = runs.execute(run, tmp_path, data, seen.append)
    head, body, steps = check_frame(lines_of(run.log(tmp_path)), summary, 3)
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
    assert (summary.train_loss, summary.test_accuracy) == (steps[-1]["train_loss"], steps[-1]["test_accuracy"])
    log = logs.read(run.log(tmp_path))
    assert (log.status, log.end, log.steps["test_loss"]) == ("finished", 3, [line["test_loss"] for line in steps])


def test_batches_of_600_and_a_sample_no_larger_than_the_data(tmp_path, trainers):
    run = made("fake", "mnist", steps=4, train_sample=10_000)
    runs.execute(run, tmp_path, digits(train=1300))
    assert [(len(x), len(y)) for x, y in trainers[-1].batches] == [(600, 600), (600, 600), (100, 100), (600, 600)]
    assert lines_of(run.log(tmp_path))[0]["batch"] == 600


def test_swapped_is_one_pass_over_the_test_set(tmp_path, trainers):
    data = digits(train=40, test=1300)
    run = made("fake", "swapped", steps=0, train_sample=1300)
    runs.execute(run, tmp_path, data)
    head, *_, end = lines_of(run.log(tmp_path))
    assert (head["steps"], end["step"], head["data"]["train"], head["data"]["test"]) == (3, 3, 1300, 40)
    seen = torch.cat([x for x, _ in trainers[-1].batches])
    assert torch.equal(seen.flatten(1).sum(1).sort()[0], data.test_images.flatten(1).sum(1).sort()[0])
    model = problems.digits_cnn(0)
    first = steps_of(run.log(tmp_path))[0]
    assert first["test_loss"] == pytest.approx(problems.evaluate(model, data.train_images, data.train_labels).loss)
    assert first["train_loss"] == pytest.approx(problems.evaluate(model, data.test_images, data.test_labels).loss)


def test_paper_swapped_has_17_steps():
    run = next(run for run in runs.plan(["swapped"], full=True))
    assert runs.length(run, {"train": 10_000}) == 17


def test_steps_to_90_percent(tmp_path, method, monkeypatch):
    method(Still)
    accuracies = iter([0.1, 0.5, 0.1, 0.89, 0.1, 0.9, 0.1, 0.95])  # train and test in turn
    monkeypatch.setattr(problems, "evaluate", lambda *_: problems.Evaluation(1.0, next(accuracies)))
    summary = runs.execute(made("fake", "mnist", steps=3), tmp_path, digits())
    assert (summary.steps_to_90, summary.test_accuracy) == (2, 0.95)


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
    assert logs.unfinished(tmp_path) == []


@pytest.mark.parametrize("key", ["sgd", "lm", "bfgs"])
@pytest.mark.parametrize("at", [0, 2])
def test_interrupted_run_leaves_nothing(tmp_path, key, at):
    if key == "bfgs":
        pytest.importorskip("scipy")

    def interrupt(line):
        if line["step"] == at:
            raise KeyboardInterrupt

    run = made(key, steps=5)
    with pytest.raises(KeyboardInterrupt):
        runs.execute(run, tmp_path, watch=interrupt)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert not runs.done(run, tmp_path)


def test_two_at_once_do_not_share_a_file(tmp_path):
    run = made("sgd")

    def another(line):
        if line["step"] == 1:
            runs.execute(run, tmp_path)  # as a process that knows of no lock

    runs.execute(run, tmp_path, watch=another)
    assert runs.done(run, tmp_path)
    assert [path.name for path in run.log(tmp_path).parent.iterdir()] == ["sgd.default.0.jsonl"]


# --- a disk that is full ---


def whole_length(out):
    runs.execute(made("sgd"), out)
    return made("sgd").log(out).stat().st_size


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.99])
def test_log_that_cannot_be_written_is_named_and_replaces_none(tmp_path, part):
    size = int(part * whole_length(tmp_path / "measured"))
    run, out = made("sgd"), tmp_path / "out"
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


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
def test_no_space_left(tmp_path, monkeypatch):
    opened = Path.open

    def full(path, mode="r", **options):
        return opened(Path("/dev/full") if path.suffix == ".part" else path, mode.replace("x", "w"), **options)

    monkeypatch.setattr(Path, "open", full)
    run = made("sgd")
    with pytest.raises(OSError, match=f"{run.log(tmp_path)} could not be written .No space left on device.: free"):
        runs.execute(run, tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_disk_that_is_full_when_the_log_is_whole(tmp_path, monkeypatch):
    def full(file):
        raise OSError(28, "No space left on device")  # network file systems say so here

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"sgd\.default\.0\.jsonl could not be written"):
        runs.execute(made("sgd"), tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


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
    summary = runs.execute(run, tmp_path)
    message = "FloatingPointError: the matrix is not positive definite"
    assert (summary.status, summary.step, summary.message) == ("failed", 2, message)
    assert lines_of(run.log(tmp_path))[-1] == {"kind": "end", "status": "failed", "step": 2, "message": message}
    assert [line["step"] for line in steps_of(run.log(tmp_path))] == [0, 1, 2]
    assert not runs.done(run, tmp_path)


def test_error_while_a_method_is_built(tmp_path):
    run = made("sgd", hyper={"lr": -1.0})
    summary = runs.execute(run, tmp_path)
    assert (summary.status, summary.step) == ("failed", 0)
    assert "ValueError: Invalid learning rate: -1.0" in summary.message
    assert math.isnan(summary.train_loss)
    assert [line["kind"] for line in lines_of(run.log(tmp_path))] == ["run", "data", "end"]


@pytest.mark.parametrize("experiment", ["sine", "mnist"])
def test_divergence_ends_a_run(tmp_path, experiment):
    run = made("sgd", experiment, steps=50, hyper={"lr": 1e6})
    data = digits()
    summary = runs.execute(run, tmp_path, data)
    assert summary.status == "diverged"
    assert 1 <= summary.step < 50
    *_, last, end = lines_of(run.log(tmp_path))
    assert (end["status"], end["step"], last["step"]) == ("diverged", summary.step, summary.step)
    assert f"after step {summary.step}, " in end["message"]
    assert runs.done(run, tmp_path, data)


def test_ten_times_the_start_is_divergence(tmp_path, method, monkeypatch):
    method(Still)
    losses = iter([1.0, 9.9, 0.5, 10.1, 0.1])
    monkeypatch.setattr(problems, "mean_squared_error", lambda *_: next(losses))
    run = made("fake", steps=4)
    summary = runs.execute(run, tmp_path)
    assert (summary.status, summary.step, summary.train_loss) == ("diverged", 3, 10.1)
    assert summary.message == "the loss was 10.1 after step 3, 1 at the start"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("experiment", ["sine", "mnist"])
def test_numbers_that_are_not_finite(tmp_path, method, experiment, value):
    class Break(Still):
        def step(self, x, y):
            for p in self.model.parameters():
                torch.nn.init.constant_(p, value)

    method(Break)
    run = made("fake", experiment, steps=8, hyper={"average": value})  # it is in the head too
    summary = runs.execute(run, tmp_path, digits())
    head, *_, end = lines_of(run.log(tmp_path))
    assert head["hyper"] == {"average": None}
    assert (end["status"], end["step"]) == ("diverged", 1)
    assert steps_of(run.log(tmp_path))[-1]["train_loss"] is None
    assert summary.status == "diverged"
    assert math.isnan(logs.read(run.log(tmp_path)).final("train_loss"))


def test_curve_that_is_not_finite(tmp_path, method, monkeypatch):
    class Break(Still):
        def step(self, x, y):
            torch.nn.init.constant_(self.model[2].bias, math.nan)

    method(Break)
    monkeypatch.setattr(problems, "mean_squared_error", lambda *_: 1.0)
    run = made("fake", steps=5)
    assert runs.execute(run, tmp_path).status == "finished"
    curve = next(line for line in lines_of(run.log(tmp_path)) if line["kind"] == "curve")
    assert set(curve["y"]) == {None}


@pytest.mark.parametrize(
    ("key", "module", "package"), [("psgd", "psgd_torch", "psgd-torch"), ("bfgs", "scipy.optimize", "scipy")]
)
def test_missing_package(tmp_path, monkeypatch, key, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    check_unavailable(made(key), tmp_path, package)


def test_missing_peer(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "torch_levenberg_marquardt"]:
        monkeypatch.delitem(sys.modules, name)
    find = machinery.PathFinder.find_spec
    monkeypatch.setattr(
        machinery.PathFinder,
        "find_spec",
        lambda name, *rest: None if name.startswith("torch_levenberg") else find(name, *rest),
    )
    check_unavailable(made("tlm"), tmp_path, "torch-levenberg-marquardt")


def check_unavailable(run, out, package):
    summary = runs.execute(run, out)
    assert (summary.status, summary.step) == ("unavailable", 0)
    assert f"needs the package {package}: pip install" in summary.message
    end = lines_of(run.log(out))[-1]
    assert end == {"kind": "end", "status": "unavailable", "step": 0, "message": summary.message}
    assert logs.read(run.log(out)).status == "unavailable"
    assert not runs.done(run, out)
    assert runs.execute(made("sgd"), out).status == "finished"
