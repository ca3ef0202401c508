"""What figures show, as numbers: medians and quartiles over the seeds, from logs; the drawing comes after."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .logs import Log, attempted, equal_seconds, horizon, or_worst, place, quantile, runs_of, select
from .problems import SINE_NOISE_FLOOR
from .vocabulary import MEASURES, TARGET

TIMES = 120  # points of a line over seconds
Values = list[float | None]  # None: not finite, which JSON has no word for


@dataclass(frozen=True)
class Group:
    """The seeds of a method, as one line."""

    method: str
    label: str
    runs: list[Log]


@dataclass(frozen=True)
class Line:
    """The median over the seeds and the quartiles at each x; None from where runs that broke off make it infinite."""

    method: str
    label: str
    x: list[float]
    low: Values
    median: Values
    high: Values


@dataclass(frozen=True)
class Chart:
    """Lines that share their axes; y is the logarithm of a loss, or of 1 − accuracy."""

    measure: str
    xlabel: str
    accuracy: bool
    seconds: bool  # along x, by logarithms; else steps
    xlim: tuple[float, float]
    ylim: tuple[float, float]
    level: float | None  # a dotted line
    lines: list[Line]


@dataclass(frozen=True)
class Fit:
    """The function that a network has learned on the sine, after some numbers of steps; x is the same for all."""

    method: str
    label: str
    x: list[float]
    y: dict[str, Values]  # by the number of steps: JSON's keys are text


def groups(logs: Sequence[Log], experiment: str, column: str) -> list[Group]:
    """By method, in the order of tables, those that made a step; empty if no run has this column."""
    if not attempted(select(logs, experiment, column=column)):
        return []
    methods = sorted({log.method for log in select(logs, experiment) if log.steps}, key=place)
    found = {method: runs for method in methods if (runs := runs_of(logs, experiment, method, column))}
    return [Group(method, runs[0].label + " †" * (runs[0].column != column), runs) for method, runs in found.items()]


def over_steps(groups: Sequence[Group], key: str) -> Chart:
    N = horizon(run for group in groups for run in group.runs)
    steps = [float(step) for step in range(N + 1)]
    lines = [
        _line(group, key, steps, [[run.at(t, key) for run in group.runs] for t in range(N + 1)]) for group in groups
    ]
    iterations = groups[0].runs[0].head["problem"] == "sine"
    return _chart(groups, key, lines, "iterations" if iterations else "steps", (0.0, float(max(N, 1))))


def loss_over_seconds(groups: Sequence[Group]) -> Chart:
    """Up to the time that all runs were given."""
    runs = [run for group in groups for run in group.runs]
    T = equal_seconds(runs)
    start = min((t for run in runs for t in run.steps.get("seconds", ()) if t > 0), default=T)
    times = _times(min(max(start, T / 1e4), T / 2), T)
    lines = [_over_seconds(group, "train_loss", times) for group in groups]
    return _chart(groups, "train_loss", lines, "seconds of training", (times[0], T), seconds=True)


def accuracy_over_seconds(groups: Sequence[Group]) -> Chart:
    """Every line up to the end of its fastest run."""
    start = min((t for group in groups for run in group.runs for t in run.steps.get("seconds", ()) if t > 0), default=1)
    lines = []
    for group in groups:
        ends = [run.final("seconds") for run in group.runs if run.status == "finished"]
        end = min(ends, default=max(run.final("seconds") for run in group.runs if run.steps))
        lines.append(_over_seconds(group, "test_accuracy", _times(start, max(start, end))))
    last = max(line.x[-1] for line in lines)
    ends_of_x = (start, last if last > start else 2 * start)
    return _chart(groups, "test_accuracy", lines, "seconds of training", ends_of_x, seconds=True)


def fits(groups: Sequence[Group], methods: Sequence[str]) -> list[Fit]:
    """Of the first seed that has curves, after at most four numbers of steps."""
    found = [
        (group, next(run for run in group.runs if any(run.curves)))  # after step 0
        for group in groups
        if group.method in methods and any(any(run.curves) for run in group.runs)
    ]
    steps = sorted({step for _, run in found for step in run.curves if step > 0})[:4]
    made = []
    for group, run in found:
        of = [step for step in steps if step in run.curves]
        if of:
            y = {str(step): [_short(value) for value in run.curves[step][1]] for step in of}
            made.append(Fit(group.method, group.label, run.curves[of[0]][0], y))
    return made


def _times(start: float, end: float) -> list[float]:
    return [float(f"{t:.5g}") for t in np.geomspace(start, end, TIMES)]


def _over_seconds(group: Group, key: str, times: list[float]) -> Line:
    return _line(group, key, times, [[run.at_seconds(t, key) for run in group.runs] for t in times])


def _line(group: Group, key: str, x: list[float], values: Iterable[Sequence[float]]) -> Line:
    """A run that broke off counts as the worst there is."""
    ranked = [[or_worst(value, key) for value in at_x] for at_x in values]
    low, median, high = ([_short(quantile(at_x, q)) for at_x in ranked] for q in (0.25, 0.5, 0.75))
    return Line(group.method, group.label, x, low, median, high)


def _chart(
    groups: Sequence[Group],
    key: str,
    lines: list[Line],
    xlabel: str,
    xlim: tuple[float, float],
    seconds: bool = False,
) -> Chart:
    sine = groups[0].runs[0].head["problem"] == "sine"
    measure = "mean squared error" if sine else MEASURES[key]
    accuracy = key.endswith("accuracy")
    ylim = _accuracy_range(groups, key) if accuracy else _loss_range(groups, key, lines)
    level = SINE_NOISE_FLOOR if sine else TARGET if accuracy else None
    return Chart(measure, xlabel, accuracy, seconds, xlim, ylim, level, lines)


def _loss_range(groups: Sequence[Group], key: str, lines: Sequence[Line]) -> tuple[float, float]:
    """From the lowest median to twice the highest start: what diverges leaves the panel at the top."""
    starts = [start for group in groups for run in group.runs if 0 < (start := run.at(0, key)) < math.inf]
    values = [value for line in lines for value in line.median if value is not None and value > 0]
    low, high = min(values + starts, default=0.1), max(starts or values, default=1.0)
    return 0.7 * low, 2 * high


def _accuracy_range(groups: Sequence[Group], key: str) -> tuple[float, float]:
    reached = [v for group in groups for run in group.runs for v in run.steps.get(key, ()) if math.isfinite(v)]
    best = max(reached, default=TARGET)
    return 0.0, max(best + 0.2 * (1.001 - best), 0.93)


def _short(value: float) -> float | None:
    """To four digits, which is finer than a pixel."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
