"""Tables of the paper's experiments, computed from logs: mean ± standard deviation or quartiles over the seeds."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..values import visible
from .logs import Log, attempted, equal_seconds, groups, horizon, or_worst, place, quantile, select
from .problems import SINE_NOISE_FLOOR
from .vocabulary import PARTS, RULE, SINE_READINGS, TARGET, TARGET_LABEL, compared, problem_of

TAIL = 10  # last steps, whose mean accuracy is given too
EARLY = "†"
EARLY_CAPTION = f"{EARLY} A run among them ended early, by itself or cut off in time: its last value counts."

Measure = Callable[[Log], float]


class Published(NamedTuple):
    """A column of the paper's Table 1 (Pooladzandi and Zhou 2022, section 3.3)."""

    seconds: float  # on the authors' GPU
    steps: int  # the paper says epochs: batches of 600
    converged: str
    accuracy: float  # after 100 steps


PUBLISHED = {
    "lm-paper": Published(0.9, 4, "yes", 0.975),
    "kfac": Published(3, 26, "yes", 0.96),
    "hessian-free": Published(4.7, 11, "no", 0.94),
    "lbfgs": Published(5.6, 17, "yes", 0.91),
    "adam": Published(0.1, 13, "yes", 0.965),
    "sgd": Published(0.1, 26, "yes", 0.96),
}


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str

    def markdown(self) -> str:
        lines = [self.header, ("---",) * len(self.header), *self.rows]
        body = "\n".join("| " + " | ".join(_escaped(cell) for cell in line) + " |" for line in lines)
        return f"## {self.title}\n\n{body}\n\n{self.caption}\n"


def tables(logs: Sequence[Log]) -> list[Table]:
    """Every table that the logs have something for."""
    made = [
        sine(logs),
        table1(logs),
        variances(logs),
        ablation(logs, "ablation-sine"),
        ablation(logs, "ablation-mnist"),
        swapped(logs),
        hyperparameters(logs),
        endings(logs),
    ]
    return [table for table in made if table.rows]


def table1(logs: Sequence[Log]) -> Table:
    runs = select(logs, "mnist")
    N = horizon(runs)
    rows: list[tuple[str, ...]] = []
    for (method, column), seeds in groups(logs, "mnist").items():
        if method in PUBLISHED and (not rows or rows[-1][0] != seeds[0].label):
            paper = PUBLISHED[method]
            ending = f"{100 * paper.accuracy:g} %" if N == 100 else f"{100 * paper.accuracy:g} % after 100 steps"
            printed = (f"{paper.seconds:g}", f"{paper.steps}", paper.converged, ending)
            rows.append((seeds[0].label, "in the paper", *printed, "", "not stated"))
        *cells, count = _classification(seeds, N, _converged_cell(seeds))
        rows.append((seeds[0].label, column, *cells, _tail(seeds, N), count))
    return Table(
        "table1",
        f"Table 1: {_data_name(runs)}",
        (
            "method",
            "values",
            f"time to {TARGET_LABEL} (s)",
            f"steps to {TARGET_LABEL}",
            "converged",
            f"accuracy after {N} steps",
            f"mean over the last {TAIL} steps",
            "seeds",
        ),
        tuple(rows),
        "Mean ± standard deviation over the seeds; if only some seeds have a value, their number follows it. Steps "
        "are batches (the paper calls them epochs), accuracies those of the test set. Times in the paper are on its "
        "authors' GPU, the others on the machine below, evaluation off the clock. Converged: ended at "
        f"{TARGET_LABEL} or above and within one point of its own best; the paper does not define its word. "
        + EARLY_CAPTION,
    )


def variances(logs: Sequence[Log]) -> Table:
    runs = select(logs, "mnist")
    N = horizon(runs)
    rows = []
    for (_, column), seeds in groups(logs, "mnist").items():
        tried = attempted(seeds)
        measures: tuple[Measure, ...] = (Log.seconds_to, Log.steps_to, _error_after(N))
        cells = [_variance(tried, measure) for measure in measures]
        rows.append((seeds[0].label, column, *cells, str(len(tried))))
    return Table(
        "table1-variance",
        "Appendix to Table 1: variances over the seeds",
        (
            *("method", "values", f"time to {TARGET_LABEL} (s²)", f"steps to {TARGET_LABEL}"),
            *(f"accuracy after {N} steps (points²)", "seeds"),
        ),
        tuple(rows),
        "Unbiased variance over the seeds that have a value, with their number if not all have one. A dash: "
        "fewer than two.",
    )


def sine(logs: Sequence[Log]) -> Table:
    runs = select(logs, "sine")
    T = equal_seconds(runs)
    found = groups(logs, "sine")
    at_time = loss_after_seconds(T)
    medians = {key: quantile([at_time(log) for log in attempted(s)], 0.5) for key, s in found.items() if attempted(s)}
    rows = []
    for (method, column), seeds in found.items():
        tried = attempted(seeds)
        measures = [*(loss_after(step) for step in SINE_READINGS), at_time]
        marks = [*(_early(tried, step) for step in SINE_READINGS), ""]
        cells = [_spread([*map(measure, tried)]) + mark for measure, mark in zip(measures, marks, strict=True)]
        rank = ""
        if tried:
            rivals = [median for (_, other), median in medians.items() if other == column]
            rank = f"{1 + sum(median < medians[method, column] for median in rivals)} of {len(rivals)}"
        rows.append((seeds[0].label, column, *cells, rank, str(len(tried))))
    return Table(
        "sine",
        "Sine regression: mean squared error",
        (
            *("method", "values"),
            *(f"after {step} iterations" for step in SINE_READINGS),
            *(f"after {T:g} s", f"rank after {T:g} s", "seeds"),
        ),
        tuple(rows),
        f"Median over the seeds (quartiles; worst). The noise alone has a variance of {SINE_NOISE_FLOOR:.4f}: a fit "
        "far below that would be of the noise. A run that diverged or failed counts as ∞. Ranks are among methods with "
        "the same kind of hyper-parameters. " + EARLY_CAPTION,
    )


def swapped(logs: Sequence[Log]) -> Table:
    runs = select(logs, "swapped")
    N = horizon(runs)
    rows = []
    for (_, column), seeds in groups(logs, "swapped").items():
        seconds, steps, accuracy, count = _classification(seeds, N)
        rows.append((seeds[0].label, column, seconds, steps, accuracy, count))
    return Table(
        "swapped",
        f"Train and test sets swapped: {_data_name(runs)}",
        (
            *("method", "values", f"time to {TARGET_LABEL} (s)", f"steps to {TARGET_LABEL}"),
            *(f"accuracy after {N} steps", "seeds"),
        ),
        tuple(rows),
        "Trained on the smaller set, one pass. Mean ± standard deviation over the seeds, test accuracy. "
        + EARLY_CAPTION,
    )


class Effect(NamedTuple):
    """What a part gains on each seed, positive if it helps; ±∞ if only one of the two runs has a value."""

    gains: list[float]

    def __str__(self) -> str:
        finite = [gain for gain in self.gains if math.isfinite(gain)]
        if not self.gains:
            return "–"
        text = _mean(finite, "+.2f") if finite else ""
        marks = [self.short]
        if len(finite) < len(self.gains):
            marks.insert(0, f"mean of {len(finite)}" if finite else "no pair with two values")
        return f"{text} ({', '.join(marks)})".strip()

    @property
    def short(self) -> str:
        return f"better on {self.wins} of {len(self.gains)} seeds"

    @property
    def wins(self) -> int:
        return sum(gain > 0 for gain in self.gains)

    @property
    def clear(self) -> bool | None:
        """Whether it is better on at least three quarters of the seeds; None where there is no pair of runs."""
        return 4 * self.wins >= 3 * len(self.gains) if self.gains else None


def effect(logs: Sequence[Log], experiment: str, better: str, worse: str, cost: Measure) -> Effect:
    """cost(worse) − cost(better), paired by seed; a pair in which neither has a value is left out."""
    seeds = {log.seed: log for log in attempted(select(logs, experiment, worse))}
    pairs = [(cost(seeds[b.seed]), cost(b)) for b in attempted(select(logs, experiment, better)) if b.seed in seeds]
    return Effect([round(w - b, 2) for w, b in pairs if not (math.isinf(w) and math.isinf(b))])


def part_effects(logs: Sequence[Log], experiment: str, part: str, cost: Measure) -> tuple[Effect, Effect]:
    """Of a part in the paper's method, and of a part added to vanilla LM."""
    return (
        effect(logs, experiment, *compared(part, problem_of(experiment)), cost),
        effect(logs, experiment, f"vanilla+{part}", "vanilla", cost),
    )


def ablation_costs(logs: Sequence[Log], experiment: str) -> dict[str, Measure]:
    """What an ablation counts, by name: lower is better."""
    N = horizon(select(logs, experiment))
    if experiment == "ablation-sine":
        return {f"log₁₀ MSE after {N} iterations": log_mse_after(N)}
    return {f"accuracy after {N} steps (points)": _error_after(N), f"steps to {TARGET_LABEL}": Log.steps_to}


def ablation(logs: Sequence[Log], experiment: str) -> Table:
    runs = select(logs, experiment)
    costs = ablation_costs(logs, experiment)
    rows = []
    for part, label in {**PARTS, RULE: "λ by the gain ratio (ours)"}.items():
        effects = [part_effects(logs, experiment, part, cost) for cost in costs.values()]
        cells = [str(one[place]) for place in (0, 1) for one in effects]
        rows.append((label, *cells))
    whole = [str(effect(logs, experiment, "paper", "vanilla", cost)) for cost in costs.values()]
    rows.append(("LM (paper) against vanilla", *whole, *("",) * len(costs)))
    places = ("in the paper's method", "added to vanilla")
    return Table(
        experiment,
        f"What each part gains: {_data_name(runs)}",
        ("part", *(f"{place}: {name}" for place in places for name in costs)),
        tuple(rows) if runs else (),
        "A positive number: the part helps (a lower loss, a higher accuracy, fewer steps). In the paper's method: with "
        "the part against without it (uphill acceptance is no part of it on the sine, and is added there; the paper "
        "prints no rule for λ, without the gain ratio it is λ/10 and 10λ). Added to vanilla: vanilla LM with the part "
        "against vanilla LM. Mean ± standard deviation of the differences, run against run of the same seed, to two "
        "decimals: what is equal in them is not better. Pairs of which only one run has a value count as better or "
        "worse and are not in the mean, pairs of which neither has are left out.",
    )


def hyperparameters(logs: Sequence[Log]) -> Table:
    found: dict[tuple[str, str, str], list[str]] = {}
    for log in sorted(logs, key=lambda log: (place(log.method), place(log.column))):
        values = ", ".join(f"{key} = {_plain(value)}" for key, value in log.head["hyper"].items()) or "none"
        experiments = found.setdefault((log.label, log.column, values), [])
        if log.experiment not in experiments:
            experiments.append(log.experiment)
    rows = [(label, column, ", ".join(names), values) for (label, column, values), names in found.items()]
    return Table(
        "hyperparameters",
        "Hyper-parameters",
        ("method", "values", "experiments", "hyper-parameters"),
        tuple(rows),
        "Default: the paper's values; what it does not print has the defaults of this or the method's own library. "
        "Tuned: the best of as many trials for every method, on seeds and digits that are not reported. Numbers have "
        "three digits here and all of them in results.csv.",
    )


def endings(logs: Sequence[Log]) -> Table:
    return Table(
        "endings",
        "Runs that diverged, failed, ended early or could not start",
        ("experiment", "method", "values", "seed", "ended", "at step", "message"),
        tuple(
            (log.experiment, log.label, log.column, str(log.seed), log.status, str(log.end), log.message)
            for log in logs
            if log.status != "finished" or log.message
        ),
        "Diverged: a loss that is not finite, or above ten times its start.",
    )


def loss_after(step: int) -> Measure:
    """Training loss; ∞ for a run that broke off."""
    return lambda log: or_worst(log.at(step, "train_loss"), "train_loss")


def log_mse_after(step: int) -> Measure:
    def measure(log: Log) -> float:
        mse = loss_after(step)(log)
        return math.log10(mse) if mse > 0 else -math.inf

    return measure


def loss_after_seconds(seconds: float) -> Measure:
    return lambda log: or_worst(log.at_seconds(seconds, "train_loss"), "train_loss")


def percent_after(step: int) -> Measure:
    """Test accuracy; −∞ for a run that broke off."""
    return lambda log: 100 * or_worst(log.at(step, "test_accuracy"), "test_accuracy")


def converged(log: Log) -> bool:
    """Ended at the target or above and within one point of its own best."""
    best = max(log.steps.get("test_accuracy", []), default=0.0)
    return log.status == "finished" and log.final("test_accuracy") >= max(TARGET, best - 0.01)


def _error_after(step: int) -> Measure:
    """In per cent; ∞ for a run that broke off."""
    return lambda log: 100 - percent_after(step)(log)


def _classification(seeds: Sequence[Log], N: int, *more: str) -> tuple[str, ...]:
    tried = attempted(seeds)
    if not tried:
        return ("unavailable",) * (3 + len(more)) + ("0",)
    seconds = over_seeds([log.seconds_to() for log in tried], ".3g")
    steps = over_seeds([log.steps_to() for log in tried], ".1f")
    accuracy = over_seeds([100 * log.at(N, "test_accuracy") for log in tried], ".2f", " %", none="no run got so far")
    accuracy += _early(tried, N)
    return (seconds, steps, *more, accuracy, str(len(tried)))


def _tail(seeds: Sequence[Log], N: int) -> str:
    """Mean test accuracy of the last steps: that of one step swings with its batch."""
    means = [
        100 * statistics.fmean(log.at(step, "test_accuracy") for step in range(max(N - TAIL, 0) + 1, N + 1))
        for log in attempted(seeds)
    ]
    return over_seeds(means, ".2f", " %", none="no run got so far") if means else "unavailable"


def _early(runs: Sequence[Log], step: int) -> str:
    return f" {EARLY}" if any(log.status == "finished" and log.end < step for log in runs) else ""


def _converged_cell(seeds: Sequence[Log]) -> str:
    tried = attempted(seeds)
    count = sum(map(converged, tried))
    return "yes" if count == len(tried) else "no" if count == 0 else f"{count} of {len(tried)} seeds"


def over_seeds(values: Sequence[float], form: str, unit: str = "", none: str = "never") -> str:
    """Mean ± standard deviation; never a mean over the lucky seeds unmarked."""
    finite = [value for value in values if math.isfinite(value)]
    count = f" ({len(finite)} of {len(values)} seeds)" if len(finite) < len(values) else ""
    return f"{_mean(finite, form)}{unit}{count}" if finite else f"{none}{count}"


def _mean(values: Sequence[float], form: str) -> str:
    mean = f"{statistics.fmean(values):{form}}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):{form.lstrip('+')}}"


def _variance(runs: Sequence[Log], measure: Measure) -> str:
    finite = [value for value in map(measure, runs) if math.isfinite(value)]
    count = f" ({len(finite)} of {len(runs)} seeds)" if len(finite) < len(runs) else ""
    return f"{statistics.variance(finite):.3g}{count}" if len(finite) > 1 else f"–{count}"


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "unavailable"
    median = number(quantile(values, 0.5))
    low, high, worst = (number(value, ".2g") for value in (quantile(values, 0.25), quantile(values, 0.75), max(values)))
    return median if len(values) == 1 else f"{median} ({low} to {high}; {worst})"


def number(value: float, form: str = ".3g") -> str:
    return "∞" if math.isinf(value) else "–" if math.isnan(value) else f"{value:{form}}"


def _data_name(runs: Sequence[Log]) -> str:
    return str(runs[0].head["data"]["name"]) if runs else ""


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{float(f'{value:.3g}')!r}"
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _escaped(cell: str) -> str:
    """Text in a cell of Markdown, where a sign of HTML is none"""
    return visible(" ".join(cell.replace("|", "\\|").replace("<", "&lt;").split()))
