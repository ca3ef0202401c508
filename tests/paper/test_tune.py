"""The search for hyper-parameters: short trials on made-up digits and on the sine."""

import json
import math
import os
import re
import sys
from dataclasses import replace

import pytest
import torch

from marquardt.paper import runs, tune
from marquardt.paper.methods import METHODS, Method, OneOf, Trainer, Unavailable
from support.made_runs import digits, made

ON = {
    problem: [key for key, spec in METHODS.items() if problem == "sine" or not spec.sine_only] for problem in tune.SEEDS
}


def inside(value, space):
    return value in space.values if isinstance(space, OneOf) else space.low <= value <= space.high


def tuned(methods, problem="sine", trials=1, steps=1, **options):
    """What was found, and the trials."""
    pytest.importorskip("optuna")
    seen = []
    if problem == "mnist":
        options = {"data": digits(), **options}
    found = tune.tune(methods, problem, trials=trials, steps=steps, seconds=0.0, watch=seen.append, **options)
    return found, seen


# --- the values that come with the package ---


@pytest.mark.parametrize("problem", ON)
def test_shipped_values_are_for_every_method(problem):
    found = runs.winners(runs.WINNERS)
    assert set(found) == set(ON)
    assert list(found[problem]) == ON[problem]
    for key, hyper in found[problem].items():
        spec = METHODS[key]
        assert set(hyper) == set(spec.hyper(problem))
        for name, value in hyper.items():
            if name in spec.choices(problem):
                assert inside(value, spec.choices(problem)[name]), (key, name, value)
            else:
                assert value == spec.hyper(problem)[name]


# --- trials ---


@pytest.mark.parametrize("problem", ON)
def test_first_trial_is_the_default_setting(problem):
    found, trials = tuned(None, problem)
    assert ("newton" in found) == (problem == "sine")
    assert [trial.method for trial in trials] == list(found)
    assert set(ON[problem]) - set(found) <= {"bfgs", "psgd", "tlm"}  # where their packages are missing
    for trial in trials:
        default = METHODS[trial.method].hyper(problem)
        assert (trial.number, trial.hyper, found[trial.method]) == (0, default, default)
        assert [*map(type, trial.hyper.values())] == [*map(type, map(default.get, trial.hyper))]


@pytest.mark.parametrize("problem", ON)
def test_every_method_has_the_same_number_of_trials_within_its_space(problem):
    asked = ["adam", "sgd", "lbfgs", "lm"]
    found, trials = tuned(asked, problem, trials=4)
    assert set(found) == set(asked)
    for key in asked:
        own = [trial for trial in trials if trial.method == key]
        spec = METHODS[key]
        assert [trial.number for trial in own] == [0, 1, 2, 3]
        for trial in own:
            assert set(trial.hyper) == set(spec.hyper(problem))
            assert all(inside(trial.hyper[name], space) for name, space in spec.choices(problem).items())
            assert all(
                trial.hyper[name] == spec.hyper(problem)[name] for name in set(trial.hyper) - set(spec.choices(problem))
            )
        assert len({trial.hyper["lr"] for trial in own}) == 4
        assert found[key] == min(own, key=lambda trial: trial.score).hyper


def test_search_repeats():
    torch.rand(3)
    first = tuned(["adam", "kfac"], "mnist", trials=3, steps=2)
    torch.rand(5)
    assert first == tuned(["adam", "kfac"], "mnist", trials=3, steps=2)


def test_trials_are_runs_of_other_seeds(monkeypatch):
    asked = []
    execute = runs.execute
    monkeypatch.setattr(runs, "execute", lambda run, *rest: asked.append(run) or execute(run, *rest))
    tuned(["sgd"], "sine", trials=2, steps=3, limit=7.0)
    tuned(["sgd"], "mnist", trials=2, steps=3, limit=7.0)
    for problem in ON:
        own = [run for run in asked if run.problem == problem]
        reported = {run.seed for run in runs.plan([problem], full=True)}
        assert not {run.seed for run in own} & reported
        assert [run.seed for run in own] == list(tune.SEEDS[problem]) * 2
        assert {(run.experiment, run.method, run.steps, run.limit) for run in own} == {(problem, "sgd", 3, 7.0)}


def test_length_of_a_trial_is_that_of_the_run_it_stands_for(monkeypatch):
    pytest.importorskip("optuna")
    asked = []
    monkeypatch.setattr(tune, "judge", lambda run, _: (asked.append((run.steps, run.seconds)), (0.0, ""))[1])
    tune.tune(["sgd"], "sine", trials=1)
    tune.tune(["sgd"], "mnist", trials=1, data=digits())
    assert asked == [(200, 2.0), (100, 0.0)]


# --- the test set stays unseen ---


@pytest.mark.parametrize("n", [60, 61, 6, 60_000])
def test_held_out_is_a_sixth_of_the_training_set(n):
    data = digits(n, side=1)
    judged = tune.held_out(data)
    assert len(judged.test_labels) == n // 6
    assert torch.equal(torch.cat([judged.train_images, judged.test_images]), data.train_images)
    assert torch.equal(torch.cat([judged.train_labels, judged.test_labels]), data.train_labels)
    assert (judged.name, judged.source) == (data.name, data.source)
    assert len(data.train_labels) == n


def test_no_trial_sees_the_test_set():
    data = digits()
    with_test = tuned(["sgd", "adam"], "mnist", trials=2, steps=2, data=data)
    without = replace(data, test_images=None, test_labels=None)
    assert tuned(["sgd", "adam"], "mnist", trials=2, steps=2, data=without) == with_test


# --- how a trial is judged ---


def test_score_is_the_last_loss_of_the_sine_and_the_mean_over_the_steps_of_digits():
    assert tune.score([{"train_loss": loss} for loss in [1.0, 0.5, 0.01]]) == pytest.approx(-2)
    accuracies = [0.1, 0.9, 0.99, 1.0]  # the first is before any step; 1.0 counts as one error in 10,000
    lines = [{"step": step, "train_loss": 1.0, "test_accuracy": a} for step, a in enumerate(accuracies)]
    assert tune.score(lines) == pytest.approx((-1 - 2 - 4) / 3)


def test_judge_takes_the_mean_of_the_seeds(tmp_path):
    judged = tune.judge(made("adam", steps=2))
    losses = [
        runs.execute(made("adam", steps=2, seed=seed), tmp_path).final("train_loss") for seed in tune.SEEDS["sine"]
    ]
    assert judged == (pytest.approx(sum(map(math.log10, losses)) / len(losses)), "")


@pytest.mark.parametrize("problem", ON)
def test_divergence_is_the_worst(problem):
    data = digits() if problem == "mnist" else None
    found, message = tune.judge(made("sgd", problem, steps=50, hyper={"lr": 1e6}), data)
    good, _ = tune.judge(made("sgd", problem, steps=2, hyper={"lr": 1e-3}), data)
    assert found == tune.WORST > good
    assert "the loss was" in message


class Fickle(Trainer):
    """Breaks where it has no average, as by default."""

    def __init__(self, model, loss, hyper):
        super().__init__(model)
        self.works = hyper["average"] is not None

    def step(self, x, y):
        if not self.works:
            raise ArithmeticError("it is broken")


def test_a_bad_trial_is_no_matter_unless_all_are(monkeypatch):
    monkeypatch.setitem(METHODS, "fake", Method(Fickle, {}, {}, key="fake", label="Fake"))
    found, trials = tuned(["fake"], trials=8)
    assert trials[0].score == tune.WORST
    assert found["fake"]["average"] is not None
    with pytest.raises(RuntimeError, match=r"no trial of Fake came to its end.*ArithmeticError: it is broken"):
        tuned(["fake"], trials=1)


def test_missing_packages(monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.setitem(sys.modules, "psgd_torch", None)
    found, trials = tuned(["psgd", "sgd"], trials=2)
    assert set(found) == {trial.method for trial in trials} == {"sgd"}
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(Unavailable, match="needs the package optuna: pip install optuna"):
        tune.tune(["sgd"], "sine", trials=1)


@pytest.mark.parametrize(
    ("methods", "problem", "options", "message"),
    [
        (["sgd"], "cosine", {}, "no problem 'cosine': choose from sine, mnist"),
        (["sgd"], "sine", {"trials": 0}, "trials=0: at least 1"),
        (["sgd", "sdg"], "sine", {}, "no optimizer 'sdg': choose from lm, "),
        (["sgd"], "mnist", {}, "needs the digits: pass data="),
    ],
)
def test_bad_input(methods, problem, options, message):
    with pytest.raises(ValueError, match=message):
        tune.tune(methods, problem, **options)


# --- files ---


def test_save_and_load(tmp_path):
    path = tmp_path / "tuned.json"
    sgd, adam = {"lr": 0.5, "average": None}, {"lr": 0.25, "beta1": 0.9}
    tune.save(path, "sine", {"sgd": sgd})
    assert runs.winners(path) == {"sine": {"sgd": sgd}}
    tune.save(path, "mnist", {"sgd": sgd})
    tune.save(path, "sine", {"adam": adam})
    assert runs.winners(path) == {"sine": {"sgd": sgd, "adam": adam}, "mnist": {"sgd": sgd}}
    tune.save(path, "sine", {"sgd": {"lr": 1.0}})
    tune.save(path, "sine", {})
    assert runs.winners(path) == {"sine": {"sgd": {"lr": 1.0}, "adam": adam}, "mnist": {"sgd": sgd}}
    assert [file.name for file in tmp_path.iterdir()] == ["tuned.json"]
    path.unlink()
    found, _ = tuned(["lbfgs", "sgd"], "mnist", trials=3)
    tune.save(path, "mnist", found)
    plan = runs.plan(["mnist"], columns=["tuned"], seeds=1, tuned=runs.winners(path))
    assert {run.method: run.hyper for run in plan} == found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "",
            "not JSON; expected {problem: {optimizer: hyper-parameters}} in JSON, as `marquardt paper tune` writes it",
        ),
        ("[]", "not a JSON object"),
        ('{"sine": {"sgd": 3}}', "['sine']['sgd'] is 3, not an object"),
        ('{"sine": {"sdg": {}}}', "no optimizer 'sdg': choose from"),
        ('{"cosine": {"sgd": {"lr": 0.1}}}', "no problem 'cosine'"),
        ('{"sine": {"sgd": {"rate": 0.1}}}', "no hyper-parameter of sgd 'rate': choose from"),
        ('{"sine": {"sgd": {"lr": [0.1]}}}', "['sine']['sgd']['lr'] is [0.1]"),
        ('{"sine": {"sgd": {"lr": NaN}}}', "not JSON"),
    ],
)
def test_file_that_is_no_search(tmp_path, content, message):
    path = tmp_path / "tuned.json"
    path.write_text(content)
    for call in (lambda: runs.winners(path), lambda: tune.save(path, "sine", {"adam": {"lr": 0.1}})):
        with pytest.raises(ValueError, match=re.escape(f"{path}: ") + ".*" + re.escape(message)):
            call()
    assert path.read_text() == content


def test_a_full_disk_is_no_bad_trial_and_leaves_the_winners_before(tmp_path, monkeypatch):
    path = tmp_path / "tuned.json"
    tune.save(path, "sine", {"sgd": {"average": None, "lr": 0.5}})
    assert json.loads(path.read_text()) == {"sine": {"sgd": {"average": None, "lr": 0.5}}}
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"tuned\.json could not be written .No space left on device"):
        tune.save(path, "sine", {"adam": {"lr": 0.1}})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["tuned.json"]
    with pytest.raises(OSError, match=r"sgd\.tuned\.0\.jsonl could not be written"):
        tuned(["sgd"], "sine", trials=1)
