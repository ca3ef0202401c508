"""Which runs there are."""

import itertools
import math

import pytest

from marquardt.paper import runs, vocabulary
from marquardt.paper.methods import METHODS, ablation
from marquardt.paper.vocabulary import EXPERIMENTS
from support.made_runs import LABELS, ON_DIGITS

PARTS = {
    "max-diagonal": "max-diagonal damping",
    "momentum": "momentum",
    "search": "line search",
    "uphill": "uphill acceptance",
    "gain": "gain ratio",
}
ABLATION_LABELS = {f"paper-{key}": f"without {name}" for key, name in PARTS.items()}
ABLATION_LABELS |= {"paper": "LM (paper)", "paper+uphill": "with uphill acceptance", "vanilla": "vanilla"}
ABLATION_LABELS |= {f"vanilla+{key}": f"vanilla + {name}" for key, name in PARTS.items()}


def keys(plan):
    return [(run.experiment, run.method, run.column, run.seed) for run in plan]


def expected(experiment, methods, columns, seeds):
    return set(itertools.product([experiment], methods, columns, range(1000, 1000 + seeds)))


def test_methods_are_those_of_the_tables():
    assert {key: method.label for key, method in METHODS.items()} == LABELS
    assert list(METHODS) == list(LABELS)
    variants = ablation("sine") | ablation("mnist")
    assert {*METHODS, *variants} == set(vocabulary.METHODS)
    assert {key: method.label for key, method in variants.items()} == ABLATION_LABELS
    assert all(key == method.key for key, method in (METHODS | variants).items())
    assert set(ablation("sine")) ^ set(ablation("mnist")) == {"paper+uphill", "paper-uphill"}
    for problem in vocabulary.PROBLEMS:
        assert list(ablation(problem)) == [key for key in vocabulary.METHODS if key in ablation(problem)]
    assert {key for key, method in METHODS.items() if method.sine_only} == {"newton", "bfgs"}


@pytest.mark.parametrize(("full", "sine_seeds", "digit_seeds"), [(False, 3, 1), (True, 20, 10)])
def test_plan_of_every_experiment(full, sine_seeds, digit_seeds):
    plan = runs.plan(EXPERIMENTS, full=full)
    wanted = expected("sine", LABELS, ["default"], sine_seeds) | expected("mnist", ON_DIGITS, ["default"], digit_seeds)
    wanted |= expected("ablation-sine", ablation("sine"), ["default"], sine_seeds)
    wanted |= expected("ablation-mnist", ablation("mnist"), ["default"], digit_seeds)
    wanted |= expected("swapped", ON_DIGITS, ["default"], digit_seeds)
    assert sorted(keys(plan)) == sorted(wanted)
    for run in plan:
        assert run.label == run.spec().label
        assert run.hyper == run.spec().hyper(run.problem)
        assert run.problem == ("sine" if run.experiment in ("sine", "ablation-sine") else "mnist")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_plan_has_nothing_but_what_was_asked_for(experiment):
    found = {run.experiment for run in runs.plan([experiment])}
    assert found == ({"ablation-sine", "ablation-mnist"} if experiment == "ablation" else {experiment})
    assert runs.plan([]) == []


def test_length_of_the_runs():
    quick, full = runs.plan(EXPERIMENTS), runs.plan(EXPERIMENTS, full=True)
    lengths = {run.experiment: (run.steps, run.seconds, run.limit) for run in full}
    assert lengths == {
        "sine": (200, 2.0, math.inf),
        "mnist": (100, 0.0, math.inf),
        "ablation-sine": (200, 0.0, math.inf),
        "ablation-mnist": (100, 0.0, math.inf),
        "swapped": (0, 0.0, math.inf),
    }
    for run in quick:
        assert run.steps <= lengths[run.experiment][0]
        assert run.seconds <= run.limit < math.inf
        assert run.steps == (200 if run.problem == "sine" else 0 if run.experiment == "swapped" else run.steps)
    for run in quick + full:
        assert run.train_sample > 0 or run.problem == "sine"


def test_tuned_column_only_where_there_are_values():
    tuned = {"sine": {"adam": {"lr": 0.5}}, "mnist": {"sgd": {"average": 0.9}, "newton": {"lr": 1.0}}}
    before = {key: (method.hyper("sine"), method.hyper("mnist")) for key, method in METHODS.items()}
    plan = runs.plan(EXPERIMENTS, seeds=2, tuned=tuned)
    found = [run for run in plan if run.column == "tuned"]
    wanted = expected("sine", ["adam"], ["tuned"], 2)
    wanted |= expected("mnist", ["sgd"], ["tuned"], 2) | expected("swapped", ["sgd"], ["tuned"], 2)
    assert sorted(keys(found)) == sorted(wanted)
    for run in found:
        if run.method == "adam":
            assert run.hyper == {"average": None, "lr": 0.5, "beta1": 0.9, "beta2": 0.999}
        else:
            assert run.hyper == {"average": 0.9, "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
    assert len(plan) - len(found) == len(runs.plan(EXPERIMENTS, seeds=2))
    assert before == {key: (method.hyper("sine"), method.hyper("mnist")) for key, method in METHODS.items()}


def test_columns():
    tuned = {"sine": {"adam": {"lr": 0.5}}}
    assert {run.column for run in runs.plan(["sine"], columns=["default"], tuned=tuned)} == {"default"}
    assert keys(runs.plan(["sine"], columns=["tuned"], seeds=1, tuned=tuned)) == [("sine", "adam", "tuned", 1000)]
    assert runs.plan(["sine", "mnist"], columns=["tuned"]) == []
    assert {run.column for run in runs.plan(["ablation"], columns=["tuned"], tuned=tuned)} == {"default"}


def test_seeds_and_methods_can_be_chosen():
    plan = runs.plan(["sine", "mnist", "swapped"], methods=["adam", "newton", "lm"], seeds=2)
    wanted = expected("sine", ["lm", "newton", "adam"], ["default"], 2)
    wanted |= expected("mnist", ["lm", "adam"], ["default"], 2) | expected("swapped", ["lm", "adam"], ["default"], 2)
    assert sorted(keys(plan)) == sorted(wanted)
    assert {run.seed for run in runs.plan(["ablation"], seeds=4)} == {1000, 1001, 1002, 1003}


def test_only_digits_go_to_another_device():
    devices = {(run.problem, run.device) for run in runs.plan(EXPERIMENTS, device="cuda")}
    assert devices == {("sine", "cpu"), ("mnist", "cuda")}


def test_every_run_has_its_own_log(tmp_path):
    plan = runs.plan(EXPERIMENTS, full=True, tuned=runs.winners(runs.WINNERS))
    paths = [run.log(tmp_path) for run in plan]
    assert len(set(paths)) == len(paths)
    run = next(run for run in plan if run.experiment == "ablation-mnist" and run.method == "vanilla+search")
    assert run.log(tmp_path) == tmp_path / "logs" / "ablation-mnist" / "vanilla+search.default.1000.jsonl"


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (["sine", "cosine"], {}, "no experiment 'cosine': choose from sine, mnist, ablation, swapped"),
        (["sine"], {"methods": ["lm", "sdg"]}, "no optimizer 'sdg': choose from lm, lm-paper"),
        (["sine"], {"methods": ["vanilla+search"]}, "no optimizer 'vanilla\\+search'"),
        (["sine"], {"columns": ["best"]}, "no column 'best': choose from default, tuned"),
        (["sine"], {"seeds": 0}, "seeds=0: how many seeds to run, at least 1"),
        (["sine"], {"seeds": -3}, "seeds=-3"),
    ],
)
def test_plan_refuses_what_it_does_not_know(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        runs.plan(arguments, **options)
