"""What logs of the paper's experiments come to: tables, mean ± standard deviation or quartiles over the seeds, and
verdicts on the paper's claims, each with its evidence.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from ..values import visible
from .logs import Log, attempted, data_name, equal_seconds, groups, horizon, or_worst, place, quantile, runs_of, select
from .problems import SINE_NOISE_FLOOR
from .vocabulary import OPTIMIZERS, PARTS, RULE, SINE_READINGS, TARGET, TARGET_LABEL, compared, in_paper, problem_of

TAIL = 10  # last steps, whose mean accuracy is given too
TO_TARGET = ("method", "values", f"time to {TARGET_LABEL} (s)", f"steps to {TARGET_LABEL}")  # of headers
EARLY = "†"
EARLY_CAPTION = f"{EARLY} A run among them ended early, by itself or cut off in time: its last value counts."

Measure = Callable[[Log], float]


PUBLISHED = {  # by the paper's Table 1 (Pooladzandi and Zhou 2022, section 3.3)
    # seconds on the authors' GPU, steps (the paper says epochs: batches of 600), converged, accuracy after 100 steps
    "lm-paper": ("0.9", "4", "yes", "97.5 %"),
    "kfac": ("3", "26", "yes", "96 %"),
    "hessian-free": ("4.7", "11", "no", "94 %"),
    "lbfgs": ("5.6", "17", "yes", "91 %"),
    "adam": ("0.1", "13", "yes", "96.5 %"),
    "sgd": ("0.1", "26", "yes", "96 %"),
}


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str

    def markdown(self) -> str:
        def escaped(cell: str) -> str:  # a sign of HTML is none there
            return visible(" ".join(cell.replace("|", "\\|").replace("<", "&lt;").split()))

        lines = [self.header, ("---",) * len(self.header), *self.rows]
        body = "\n".join("| " + " | ".join(map(escaped, line)) + " |" for line in lines)
        return f"## {self.title}\n\n{body}\n\n{self.caption}\n"


def tables(logs: Sequence[Log]) -> list[Table]:
    """Every table that the logs have something for."""
    ablations = [ablation(logs, experiment) for experiment in ("ablation-sine", "ablation-mnist")]
    made = [sine(logs), table1(logs), variances(logs), *ablations, swapped(logs), hyperparameters(logs), endings(logs)]
    return [table for table in made if table.rows]


def table1(logs: Sequence[Log]) -> Table:
    runs = select(logs, "mnist")
    N = horizon(runs)
    rows: list[tuple[str, ...]] = []
    for (method, column), seeds in groups(logs, "mnist").items():
        label = seeds[0].label
        if method in PUBLISHED and (not rows or rows[-1][0] != label):
            *printed, accuracy = PUBLISHED[method]
            ending = accuracy + " after 100 steps" * (N != 100)
            rows.append((label, "in the paper", *printed, ending, "", "not stated"))
        ended = [converged(log) for log in attempted(seeds)]
        words = "yes" if all(ended) else f"{sum(ended)} of {len(ended)} seeds" if any(ended) else "no"
        *cells, count = _classification(seeds, N, words)
        rows.append((label, column, *cells, _tail(seeds, N), count))
    return Table(
        "table1",
        f"Table 1: {data_name(runs)}",
        (*TO_TARGET, "converged", f"accuracy after {N} steps", f"mean over the last {TAIL} steps", "seeds"),
        tuple(rows),
        "Mean ± standard deviation over the seeds; if only some seeds have a value, their number follows it. Steps "
        "are batches (the paper calls them epochs), accuracies those of the test set. Times in the paper are on its "
        "authors' GPU, the others on the machine below, evaluation off the clock. Converged: ended at "
        f"{TARGET_LABEL} or above and within one point of its own best; the paper does not define its word. "
        + EARLY_CAPTION,
    )


def variances(logs: Sequence[Log]) -> Table:
    N = horizon(select(logs, "mnist"))
    rows = []
    for (_, column), seeds in groups(logs, "mnist").items():
        tried = attempted(seeds)
        cells = [_variance([*map(measure, tried)]) for measure in (Log.seconds_to, Log.steps_to, _error_after(N))]
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
    by_method = groups(logs, "sine")
    measures = [*map(loss_after, SINE_READINGS), loss_after(T, "seconds")]
    values = {key: [[*map(measure, attempted(seeds))] for measure in measures] for key, seeds in by_method.items()}
    medians = {key: quantile(reached[-1], 0.5) for key, reached in values.items() if reached[-1]}
    rows = []
    for (method, column), seeds in by_method.items():
        tried = attempted(seeds)
        marks = [*(_early(tried, step) for step in SINE_READINGS), ""]
        cells = [_spread(reached) + mark for reached, mark in zip(values[method, column], marks, strict=True)]
        rivals = [median for (_, other), median in medians.items() if other == column]
        rank = sum(median < medians[method, column] for median in rivals) if tried else 0
        rows.append((seeds[0].label, column, *cells, f"{1 + rank} of {len(rivals)}" * bool(tried), str(len(tried))))
    return Table(
        "sine",
        "Sine regression: mean squared error",
        (
            "method",
            "values",
            *(f"after {step} iterations" for step in SINE_READINGS),
            f"after {T:g} s",
            f"rank after {T:g} s",
            "seeds",
        ),
        tuple(rows),
        f"Median over the seeds (quartiles; worst). The noise alone has a variance of {SINE_NOISE_FLOOR:.4f}: a fit "
        "far below that would be of the noise. A run that diverged or failed counts as ∞. Ranks are among methods with "
        "the same kind of hyper-parameters. " + EARLY_CAPTION,
    )


def swapped(logs: Sequence[Log]) -> Table:
    runs = select(logs, "swapped")
    N = horizon(runs)
    by_method = groups(logs, "swapped").items()
    rows = [(seeds[0].label, column, *_classification(seeds, N)) for (_, column), seeds in by_method]
    return Table(
        "swapped",
        f"Train and test sets swapped: {data_name(runs)}",
        (*TO_TARGET, f"accuracy after {N} steps", "seeds"),
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
    pairs = (compared(part, problem_of(experiment)), (f"vanilla+{part}", "vanilla"))
    in_paper_method, added = (effect(logs, experiment, *pair, cost) for pair in pairs)
    return in_paper_method, added


def ablation_costs(logs: Sequence[Log], experiment: str) -> dict[str, Measure]:
    """What an ablation counts, by name: lower is better."""
    N = horizon(select(logs, experiment))
    if experiment == "ablation-sine":
        mse = loss_after(N)
        return {f"log₁₀ MSE after {N} iterations": lambda log: math.log10(mse(log)) if mse(log) > 0 else -math.inf}
    return {f"accuracy after {N} steps (points)": _error_after(N), f"steps to {TARGET_LABEL}": Log.steps_to}


def ablation(logs: Sequence[Log], experiment: str) -> Table:
    runs = select(logs, experiment)
    costs = ablation_costs(logs, experiment)
    rows = []
    for part, label in {**PARTS, RULE: "λ by the gain ratio (ours)"}.items():
        effects = [part_effects(logs, experiment, part, cost) for cost in costs.values()]
        rows.append((label, *(str(one) for places in zip(*effects, strict=True) for one in places)))
    whole = [str(effect(logs, experiment, "paper", "vanilla", cost)) for cost in costs.values()]
    rows.append(("LM (paper) against vanilla", *whole, *("",) * len(costs)))
    places = ("in the paper's method", "added to vanilla")
    return Table(
        experiment,
        f"What each part gains: {data_name(runs)}",
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
    experiments: dict[tuple[str, str, str], dict[str, None]] = {}
    for log in sorted(logs, key=lambda log: (place(log.method), place(log.column))):
        values = ", ".join(f"{key} = {_plain(value)}" for key, value in log.head["hyper"].items()) or "none"
        experiments.setdefault((log.label, log.column, values), {})[log.experiment] = None
    rows = [(label, column, ", ".join(names), values) for (label, column, values), names in experiments.items()]
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


def loss_after(time: float, clock: str = "step") -> Measure:
    """Training loss; ∞ for a run that broke off."""
    return lambda log: or_worst(log.at(time, "train_loss", clock), "train_loss")


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


def over_seeds(values: Sequence[float], form: str, unit: str = "", none: str = "never") -> str:
    """Mean ± standard deviation; never a mean over the lucky seeds unmarked."""
    finite, count = _finite(values)
    return f"{_mean(finite, form)}{unit}{count}" if finite else f"{none}{count}"


def _finite(values: Sequence[float]) -> tuple[list[float], str]:
    """Those that are finite, and how many they are if not all."""
    finite = [value for value in values if math.isfinite(value)]
    return finite, f" ({len(finite)} of {len(values)} seeds)" if len(finite) < len(values) else ""


def _mean(values: Sequence[float], form: str) -> str:
    mean = f"{statistics.fmean(values):{form}}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):{form.lstrip('+')}}"


def _variance(values: Sequence[float]) -> str:
    finite, count = _finite(values)
    return (f"{statistics.variance(finite):.3g}" if len(finite) > 1 else "–") + count


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "unavailable"
    median = number(quantile(values, 0.5))
    low, high, worst = (number(quantile(values, q), ".2g") for q in (0.25, 0.75, 1))
    return median if len(values) == 1 else f"{median} ({low} to {high}; {worst})"


def number(value: float, form: str = ".3g") -> str:
    return "∞" if math.isinf(value) else "–" if math.isnan(value) else f"{value:{form}}"


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{float(f'{value:.3g}')!r}"
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# --- what became of the paper's claims ---

HELD, FELL, UNKNOWN = "held", "did not hold", "not measured"
LM = "lm-paper"  # the claims are the paper's; ours stands beside it in the evidence
RIVALS = ("kfac", "hessian-free", "lbfgs", "adam", "sgd")  # of the paper
FACTOR = 2  # "about": within a factor of two
LM_ITSELF, THE_OTHERS = "LM itself", "the other methods"  # what a claim is about


@dataclass(frozen=True)
class Verdict:
    claim: str
    source: str  # where the paper makes it
    outcome: str  # HELD, FELL or UNKNOWN
    finding: str  # what decided it, in a few words
    evidence: str  # all numbers
    experiment: str
    about: str = LM_ITSELF


@dataclass(frozen=True)
class Scores:
    """The median over the seeds of one measure, by method, rounded to the digits shown: a tie in them is a tie."""

    experiment: str
    what: str
    values: dict[str, float]
    quartiles: dict[str, tuple[float, float]]
    labels: dict[str, str]
    seeds: str
    higher: bool  # is better: accuracies, in per cent

    @staticmethod
    def of_runs(
        logs: Sequence[Log], experiment: str, column: str, what: str, measure: Measure, higher: bool = False
    ) -> Scores:
        methods = dict.fromkeys(log.method for log in select(logs, experiment))
        runs = {method: seeds for method in methods if (seeds := runs_of(logs, experiment, method, column))}
        form = ".4g" if higher else ".3g"
        quartiles = {
            method: [float(f"{quantile([*map(measure, seeds)], q):{form}}") for q in (0.25, 0.5, 0.75)]
            for method, seeds in runs.items()
        }
        counts = sorted({len(seeds) for seeds in runs.values()}) or [0]
        return Scores(
            experiment,
            what,
            {method: median for method, (_, median, _) in quartiles.items()},
            {method: (low, high) for method, (low, _, high) in quartiles.items()},
            {method: seeds[0].label for method, seeds in runs.items()},
            f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else f"{counts[0]} seed{'s' * (counts[0] != 1)}",
            higher,
        )

    def __str__(self) -> str:
        return self.of(LM, "lm", *RIVALS) + self.missing(RIVALS)

    def missing(self, methods: Iterable[str]) -> str:
        names = [OPTIMIZERS[method] for method in methods if method not in self.values]
        return f" Not run: {', '.join(names)}." if names else ""

    def of(self, *methods: str) -> str:
        wide = {
            method: f" ({self._text(low)} to {self._text(high)})"
            for method, (low, high) in self.quartiles.items()
            if method in methods and low < high
        }
        return f"{self.what}, median of {self.seeds}{' (quartiles)' * bool(wide)}: {self.brief(*methods, behind=wide)}."

    def brief(self, *methods: str, behind: Mapping[str, str] | None = None) -> str:
        """Medians alone, or with what stands `behind` each."""
        present = [method for method in methods if method in self.values]
        return ", ".join(f"{self.labels[m]} {self.level(m)}{(behind or {}).get(m, '')}" for m in present)

    def level(self, method: str) -> str:
        return self._text(self.values[method]) if method in self.values else ""

    def _text(self, value: float) -> str:
        return "broke off" if value == -math.inf else number(value, ".4g") + " %" * self.higher

    def best(self, method: str, rivals: Iterable[str]) -> tuple[bool | None, str]:
        """Whether `method` beats all rivals that were measured, None where it or they were not; and LM, which it is,
        beside the best rival."""
        sign = -1 if self.higher else 1
        others = [rival for rival in rivals if rival in self.values and rival != method]
        if method not in self.values or not others:
            return None, ""
        first = min(others, key=lambda rival: sign * self.values[rival])
        won = sign * self.values[method] < sign * self.values[first]
        return won, f"LM {self.level(method)}, {self.labels[first]} {self.level(first)}"

    def reaches(self, holds: Callable[[float], bool]) -> bool | None:
        """Whether LM does, None where it was not measured."""
        return holds(self.values[LM]) if LM in self.values else None

    def first(self, claim: str, source: str, rivals: Sequence[str] = RIVALS) -> Verdict:
        """On the claim that LM is the best in this."""
        evidence = str(self) if rivals is RIVALS else self.of(LM, "lm", *rivals)
        return _verdict(self.experiment, LM_ITSELF, claim, source, *self.best(LM, rivals), evidence)


def verdicts(logs: Sequence[Log], column: str = "default") -> list[Verdict]:
    """What became of the paper's claims; a method that was not tuned enters with its default hyper-parameters."""
    judged = {"sine": _sine_verdicts, "mnist": _mnist_verdicts, "swapped": _swapped_verdicts}
    if column != "default":
        judged = {experiment: judge for experiment, judge in judged.items() if select(logs, experiment, column=column)}
    of_methods = [verdict for judge in judged.values() for verdict in judge(logs, column)]
    return of_methods + (_part_verdicts(logs) if column == "default" else [])


def _sine_verdicts(logs: Sequence[Log], column: str) -> list[Verdict]:
    runs = select(logs, "sine")
    N, T = horizon(runs), equal_seconds(runs)
    scores = partial(Scores.of_runs, logs, "sine", column)
    end, first = scores(f"MSE after {N} iterations", loss_after(N)), scores("MSE after 1 iteration", loss_after(1))
    time = scores(f"MSE after {T:.3g} s of training", loss_after(T, "seconds"))
    stuck = {"sgd": 0.5, "adam": 0.5, "kfac": 0.5, "lbfgs": 0.25, "hessian-free": 0.25}
    near = [_about(end.values[method], level) for method, level in stuck.items() if method in end.values]
    floor = f"The noise floor is {SINE_NOISE_FLOOR:.4f}."
    return [
        end.first("The modified LM fits the sine better than vanilla LM.", "Figure 1a", ["lm-vanilla"]),
        end.first("LM fits the sine better than all other methods.", "Figure 1b"),
        time.first("LM fits the sine better than all other methods at equal wall-clock time.", "section 3.2"),
        _verdict(
            *("sine", LM_ITSELF, "LM fits the sine to a loss of 0.001.", "section 3.2"),
            end.reaches(lambda mse: mse < 0.0015),  # to the digit that the paper gives
            f"LM {end.level(LM)}, the noise alone {SINE_NOISE_FLOOR:.4f}",
            f"{end.of(LM, 'lm')} {floor}",
        ),
        _verdict(
            *("sine", THE_OTHERS),
            "SGD, Adam and KFAC stay at about 0.5 on the sine, L-BFGS and Hessian-free at about 0.25.",
            "section 3.2",
            all(near) if near else None,
            end.brief(*stuck),
            f"{end.of(*stuck)} About: within a factor of {FACTOR}.{end.missing(stuck)}",
        ),
        _verdict(
            *("sine", LM_ITSELF, "LM learns the sine in a single iteration.", "appendix C"),
            first.reaches(lambda mse: mse <= 2 * SINE_NOISE_FLOOR),
            f"LM {first.level(LM)}, learned would be {2 * SINE_NOISE_FLOOR:.4f}",
            f"{first.of(LM, 'lm', 'kfac', 'adam')} {floor} Learned: at most twice that.",
        ),
    ]


def _about(value: float, level: float) -> bool:
    return level / FACTOR <= value <= level * FACTOR


def _mnist_verdicts(logs: Sequence[Log], column: str) -> list[Verdict]:
    runs = select(logs, "mnist")
    N, where = horizon(runs), f" on {data_name(runs)}" * bool(runs)
    scores = partial(Scores.of_runs, logs, "mnist", column)
    steps = scores(f"Steps to {TARGET_LABEL}{where}", Log.steps_to)
    seconds = scores(f"Seconds to {TARGET_LABEL}{where}", Log.seconds_to)
    loss = scores(f"Training loss{where} after {N} steps", loss_after(N))
    accuracy = scores(f"Test accuracy{where} after {N} steps", percent_after(N), True)
    both = {LM, "adam"} <= set(seconds.values)
    ratio = seconds.values[LM] / seconds.values["adam"] if both and seconds.values["adam"] < math.inf else math.nan
    first_order, second_order = ("sgd", "adam"), (LM, "kfac", "hessian-free", "lbfgs")
    faster = [won for method in first_order if (won := seconds.best(method, second_order)[0]) is not None]
    free = [converged(log) for log in runs_of(logs, "mnist", "hessian-free", column)]
    return [
        steps.first("LM needs the fewest steps to 90 % test accuracy.", "Table 1"),
        loss.first("LM reaches the lowest training loss.", "Figure 2"),
        accuracy.first("LM reaches the highest test accuracy.", "Table 1"),
        _verdict(
            *("mnist", LM_ITSELF, "LM reaches 97.5 % after 100 steps.", "Table 1"),
            accuracy.reaches(lambda percent: percent >= 97.25) if N >= 100 else None,  # to the half point given
            f"LM {accuracy.level(LM)}",
            f"{accuracy.of(LM, 'lm')} Judged to the half point that the paper gives: from 97.25 %.",
        ),
        _verdict(
            *("mnist", LM_ITSELF, "LM takes about nine times as long as Adam to 90 %.", "Table 1"),
            _about(ratio, 9) if both else None,
            f"{number(ratio)} times" if math.isfinite(ratio) else seconds.brief(LM, "adam"),
            f"{seconds.of(LM, 'lm', 'adam')} The ratio is {number(ratio)}. About: within a factor of {FACTOR}.",
        ),
        _verdict(
            *("mnist", THE_OTHERS, "First-order methods take less time to 90 %.", "section 3.3"),
            all(faster) if faster else None,
            f"seconds: {seconds.brief(*first_order, *second_order)}",
            str(seconds),
        ),
        _verdict(
            *("mnist", THE_OTHERS, "L-BFGS ends with the lowest accuracy.", "Table 1"),
            replace(accuracy, higher=False).best("lbfgs", (LM, *RIVALS))[0],
            accuracy.brief("lbfgs", LM, *RIVALS[:2], *RIVALS[3:]),
            str(accuracy),
        ),
        _verdict(
            *("mnist", THE_OTHERS, "Hessian-free does not converge.", "Table 1"),
            2 * sum(free) < len(free) if free else None,
            f"{sum(free)} of {len(free)} seeds converged",
            f"It converged on {sum(free)} of {len(free)} seeds. {accuracy.of('hessian-free')}",
        ),
    ]


def _swapped_verdicts(logs: Sequence[Log], column: str) -> list[Verdict]:
    N = horizon(select(logs, "swapped"))
    scores = partial(Scores.of_runs, logs, "swapped", column)
    steps = scores(f"Steps to {TARGET_LABEL}", Log.steps_to)
    accuracy = scores(f"Test accuracy after {N} steps", percent_after(N), True)
    swapped = "With train and test sets swapped, LM"
    return [
        steps.first(f"{swapped} needs the fewest steps to 90 %.", "appendix C"),
        accuracy.first(f"{swapped} is the most accurate.", "appendix C"),
    ]


def _part_verdicts(logs: Sequence[Log]) -> list[Verdict]:
    """A part helps if the method is better with it than without on at least three quarters of the seeds."""
    judged = []
    for experiment, where, count in (
        ("ablation-sine", "on the sine", "three"),
        ("ablation-mnist", "in classification", "four"),
    ):
        judge = partial(_verdict, experiment, LM_ITSELF)
        name, cost = next(iter(ablation_costs(logs, experiment).items()))
        for part, label in PARTS.items():
            if in_paper(part, problem_of(experiment)):
                full, added = part_effects(logs, experiment, part, cost)
                evidence = f"Gain in the paper's method, {name}: {full}. Added to vanilla LM: {added}."
                claim = f"{label.capitalize()} helps {where}."
                judged.append(judge(claim, "section 3", full.clear, full.short, evidence))
        whole = effect(logs, experiment, "paper", "vanilla", cost)
        claim = f"The {count} parts together improve on vanilla LM {where}."
        judged.append(judge(claim, "section 3", whole.clear, whole.short, f"Gain, {name}: {whole}."))
    return judged


def _verdict(
    experiment: str, about: str, claim: str, source: str, held: bool | None, finding: str, evidence: str
) -> Verdict:
    if held is None:
        return Verdict(claim, source, UNKNOWN, "", "No runs that could tell.", experiment, about)
    return Verdict(claim, source, HELD if held else FELL, finding, evidence, experiment, about)
