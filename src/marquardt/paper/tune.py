"""Hyper-parameters for every optimizer, found with the same number of trials each (Optuna's TPE).

On the digits a trial trains on five sixths of the training set and is judged on the last sixth: the test set stays
unseen. It is judged by the mean of log10(error rate) over the steps, which rewards a fast start and a good end alike.
On the sine, by log10 of the mean squared error after the last iteration; the run goes on for as many seconds as those
that are reported, so that a setting that diverges later counts as diverged. A score is the mean over seeds, none of
which is reported, and the first trial of a method is its default setting.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from .. import files
from . import runs
from .data import Digits
from .methods import OneOf, needed
from .vocabulary import PROBLEMS

TRIALS = 20
SEEDS = {"sine": (0, 1, 2, 3), "mnist": (0, 1)}  # below runs.FIRST_SEED: those from there on are reported
HELD_OUT = 6  # a sixth of the training set: 10,000 of MNIST's
WORST = 3.0  # log10: of a trial that diverged; above ten times any start, which is where a run counts as diverged


class TuningTrial(NamedTuple):
    """One trial of a search."""

    method: str
    number: int
    score: float  # less is better
    hyper: Mapping[str, Any]


def tune(
    methods: Sequence[str] | None = None,
    problem: str = "mnist",
    *,
    trials: int = TRIALS,
    data: Digits | None = None,
    steps: int | None = None,
    seconds: float | None = None,
    device: str = "cpu",
    limit: float = math.inf,
    watch: Callable[[TuningTrial], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """{method: hyper-parameters} of the best trial of each. A method whose package is missing has no entry.

    Each run of a trial goes on until both `steps` and `seconds` are used up; they default to those of the runs it
    stands for. After `limit` seconds of training it is cut off, and judged by what it has reached.
    """
    runs.check_names("problem", [problem], PROBLEMS)
    if trials < 1:
        raise ValueError(f"trials={trials}: at least 1")
    if problem == "mnist" and data is None:
        raise ValueError("tuning on MNIST needs the digits: pass data=, from marquardt.paper.data.find()")
    optuna = needed("optuna", "optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    plan = runs.plan([problem], full=True, seeds=1, methods=methods, columns=["default"])
    judged = None if data is None else held_out(data)
    best: dict[str, dict[str, Any]] = {}
    for reported in plan:
        run = replace(
            reported,
            steps=steps or reported.steps,
            seconds=reported.seconds if seconds is None else seconds,
            limit=limit,
            train_sample=runs.QUICK.train_sample,
            device=device,
        )
        method, default = run.spec(), run.hyper
        choices = method.choices(problem)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
        study.enqueue_trial({name: default[name] for name in choices}, skip_if_exists=True)
        for number in range(trials):
            trial = study.ask()
            hyper = {
                **default,
                **{
                    name: trial.suggest_categorical(name, space.values)
                    if isinstance(space, OneOf)
                    else trial.suggest_float(name, space.low, space.high, log=space.log)
                    for name, space in choices.items()
                },
            }
            score, message = judge(replace(run, hyper=hyper), judged)
            if score is None:
                break
            study.tell(trial, score)
            if watch is not None:
                watch(TuningTrial(method.key, number, score, hyper))
        else:
            if study.best_value == WORST:
                raise RuntimeError(f"no trial of {method.label} came to its end; the last one: {message}")
            best[method.key] = {**default, **study.best_params}
    return best


def held_out(data: Digits) -> Digits:
    """The training set alone, its last sixth in place of the test set."""
    first = len(data.train_labels) - len(data.train_labels) // HELD_OUT
    (x, x_test), (y, y_test) = (t.tensor_split([first]) for t in (data.train_images, data.train_labels))
    return Digits(x, y, x_test, y_test, data.name, data.source)


def judge(run: runs.Run, data: Digits | None = None) -> tuple[float | None, str]:
    """The mean score over the seeds, and the last message; None where the method's package is missing."""
    scores = []
    for seed in SEEDS[run.problem]:
        lines: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory() as scratch:
            log = runs.execute(replace(run, column="tuned", seed=seed), Path(scratch), data, lines.append)
        if log.status == "unavailable":
            return None, log.message
        scores.append(score(lines[: run.steps + 1]) if log.status == "finished" else WORST)
    return sum(scores) / len(scores), log.message


def score(lines: Sequence[Mapping[str, Any]]) -> float:
    if "test_accuracy" not in lines[-1]:
        return math.log10(lines[-1]["train_loss"])
    # One error of the held-out digits at least: log10(0) would make one lucky step decide.
    errors = [max(1 - line["test_accuracy"], 1e-4) for line in lines[1:]]
    return sum(map(math.log10, errors)) / len(errors)


def save(path: Path, problem: str, best: Mapping[str, dict[str, Any]]) -> None:
    """Add these to the file; what it has of other problems and methods stays. One process at a time."""
    if path.is_symlink():
        raise files.Foreign(f"{path} is a link, which would be replaced: choose another --out")
    known = runs.winners(path) if path.exists() else {}
    known[problem] = {**known.get(problem, {}), **best}
    with files.whole(path) as write:
        write(json.dumps(known, indent=1) + "\n")
