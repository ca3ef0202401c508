"""What became of the paper's claims: each is judged by the logs, with its evidence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from . import tables
from .logs import Log, equal_seconds, horizon, quantile, runs_of, select
from .problems import SINE_NOISE_FLOOR
from .tables import Measure, number
from .vocabulary import OPTIMIZERS, PARTS, TARGET_LABEL, in_paper, problem_of

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

    what: str
    values: dict[str, float]
    quartiles: dict[str, tuple[float, float]]
    labels: dict[str, str]
    seeds: str
    higher: bool  # is better: accuracies, in per cent

    def __str__(self) -> str:
        return self.of(LM, "lm", *RIVALS) + self.missing(RIVALS)

    def missing(self, methods: Iterable[str]) -> str:
        names = [OPTIMIZERS[method] for method in methods if method not in self.values]
        return f" Not run: {', '.join(names)}." if names else ""

    def of(self, *methods: str) -> str:
        found = [method for method in methods if method in self.values]
        spread = " (quartiles)" if any(low < high for low, high in map(self.quartiles.__getitem__, found)) else ""
        shown = ", ".join(f"{self.labels[method]} {self._shown(method)}" for method in found)
        return f"{self.what}, median of {self.seeds}{spread}: {shown}."

    def _shown(self, method: str) -> str:
        median, (low, high) = self.values[method], self.quartiles[method]
        return self._text(median) + (f" ({self._text(low)} to {self._text(high)})" if low < high else "")

    def _text(self, value: float) -> str:
        return "broke off" if value == -math.inf else number(value, ".4g") + " %" * self.higher

    def brief(self, *methods: str) -> str:
        """Medians alone."""
        return ", ".join(f"{self.labels[m]} {self._text(self.values[m])}" for m in methods if m in self.values)

    def level(self, method: str) -> str:
        return self._text(self.values[method]) if method in self.values else ""

    def against(self, method: str, rivals: Iterable[str]) -> str:
        """The median of this method, which is LM's, and that of the best rival."""
        others = [rival for rival in rivals if rival in self.values and rival != method]
        if method not in self.values or not others:
            return ""
        sign = -1 if self.higher else 1
        first = min(others, key=lambda rival: sign * self.values[rival])
        return f"LM {self.level(method)}, {self.labels[first]} {self.level(first)}"

    def best(self, method: str, rivals: Iterable[str]) -> bool | None:
        """Whether `method` beats all rivals that were measured; None where it or they were not."""
        sign = -1 if self.higher else 1
        others = [self.values[rival] for rival in rivals if rival in self.values and rival != method]
        return all(sign * self.values[method] < sign * o for o in others) if method in self.values and others else None

    def about(self, method: str, level: float) -> bool:
        return level / FACTOR <= self.values[method] <= level * FACTOR


def verdicts(found: Sequence[Log], column: str = "default") -> list[Verdict]:
    """What became of the paper's claims; a method that was not tuned enters with its default hyper-parameters."""
    judged = {"sine": _sine_verdicts, "mnist": _mnist_verdicts, "swapped": _swapped_verdicts}
    if column != "default":
        judged = {experiment: judge for experiment, judge in judged.items() if select(found, experiment, column=column)}
    compared = [verdict for judge in judged.values() for verdict in judge(found, column)]
    return compared + (_part_verdicts(found) if column == "default" else [])


def _sine_verdicts(found: Sequence[Log], column: str) -> list[Verdict]:
    runs = select(found, "sine")
    N, T = horizon(runs), equal_seconds(runs)
    end = _scores(found, "sine", column, f"MSE after {N} iterations", tables.loss_after(N))
    first = _scores(found, "sine", column, "MSE after 1 iteration", tables.loss_after(1))
    time = _scores(found, "sine", column, f"MSE after {T:.3g} s of training", tables.loss_after_seconds(T))
    stuck = {"sgd": 0.5, "adam": 0.5, "kfac": 0.5, "lbfgs": 0.25, "hessian-free": 0.25}
    seen = [method for method in stuck if method in end.values]
    floor = f"The noise floor is {SINE_NOISE_FLOOR:.4f}."
    verdict = partial(_verdict, "sine")
    return [
        verdict(
            "The modified LM fits the sine better than vanilla LM.",
            "Figure 1a",
            end.best(LM, ["lm-vanilla"]),
            end.against(LM, ["lm-vanilla"]),
            end.of(LM, "lm", "lm-vanilla"),
        ),
        verdict(
            "LM fits the sine better than all other methods.",
            "Figure 1b",
            end.best(LM, RIVALS),
            end.against(LM, RIVALS),
            str(end),
        ),
        verdict(
            "LM fits the sine better than all other methods at equal wall-clock time.",
            "section 3.2",
            time.best(LM, RIVALS),
            time.against(LM, RIVALS),
            str(time),
        ),
        verdict(
            "LM fits the sine to a loss of 0.001.",
            "section 3.2",
            end.values[LM] < 0.0015 if LM in end.values else None,  # to the digit that the paper gives
            f"LM {end.level(LM)}, the noise alone {SINE_NOISE_FLOOR:.4f}",
            f"{end.of(LM, 'lm')} {floor}",
        ),
        verdict(
            "SGD, Adam and KFAC stay at about 0.5 on the sine, L-BFGS and Hessian-free at about 0.25.",
            "section 3.2",
            all(end.about(method, stuck[method]) for method in seen) if seen else None,
            end.brief(*stuck),
            f"{end.of(*stuck)} About: within a factor of {FACTOR}.{end.missing(stuck)}",
            THE_OTHERS,
        ),
        verdict(
            "LM learns the sine in a single iteration.",
            "appendix C",
            first.values[LM] <= 2 * SINE_NOISE_FLOOR if LM in first.values else None,
            f"LM {first.level(LM)}, learned would be {2 * SINE_NOISE_FLOOR:.4f}",
            f"{first.of(LM, 'lm', 'kfac', 'adam')} {floor} Learned: at most twice that.",
        ),
    ]


def _mnist_verdicts(found: Sequence[Log], column: str) -> list[Verdict]:
    runs = select(found, "mnist")
    N, where = horizon(runs), f" on {runs[0].head['data']['name']}" if runs else ""
    steps = _scores(found, "mnist", column, f"Steps to {TARGET_LABEL}{where}", Log.steps_to)
    seconds = _scores(found, "mnist", column, f"Seconds to {TARGET_LABEL}{where}", Log.seconds_to)
    loss = _scores(found, "mnist", column, f"Training loss{where} after {N} steps", tables.loss_after(N))
    accuracy = _scores(found, "mnist", column, f"Test accuracy{where} after {N} steps", tables.percent_after(N), True)
    both = {LM, "adam"} <= set(seconds.values)
    ratio = seconds.values[LM] / seconds.values["adam"] if both and seconds.values["adam"] < math.inf else math.nan
    free = [tables.converged(log) for log in runs_of(found, "mnist", "hessian-free", column)]
    verdict = partial(_verdict, "mnist")
    return [
        verdict(
            "LM needs the fewest steps to 90 % test accuracy.",
            "Table 1",
            steps.best(LM, RIVALS),
            steps.against(LM, RIVALS),
            str(steps),
        ),
        verdict(
            "LM reaches the lowest training loss.",
            "Figure 2",
            loss.best(LM, RIVALS),
            loss.against(LM, RIVALS),
            str(loss),
        ),
        verdict(
            "LM reaches the highest test accuracy.",
            "Table 1",
            accuracy.best(LM, RIVALS),
            accuracy.against(LM, RIVALS),
            str(accuracy),
        ),
        verdict(
            "LM reaches 97.5 % after 100 steps.",
            "Table 1",
            accuracy.values[LM] >= 97.25 if LM in accuracy.values and N >= 100 else None,  # to the half point given
            f"LM {accuracy.level(LM)}",
            f"{accuracy.of(LM, 'lm')} Judged to the half point that the paper gives: from 97.25 %.",
        ),
        verdict(
            "LM takes about nine times as long as Adam to 90 %.",
            "Table 1",
            9 / FACTOR <= ratio <= 9 * FACTOR if both else None,
            f"{number(ratio)} times" if math.isfinite(ratio) else seconds.brief(LM, "adam"),
            f"{seconds.of(LM, 'lm', 'adam')} The ratio is {number(ratio)}. About: within a factor of {FACTOR}.",
        ),
        verdict("First-order methods take less time to 90 %.", "section 3.3", *_first_order(seconds), THE_OTHERS),
        verdict(
            "L-BFGS ends with the lowest accuracy.",
            "Table 1",
            replace(accuracy, higher=False).best("lbfgs", (LM, *RIVALS)),
            accuracy.brief("lbfgs", LM, *RIVALS[:2], *RIVALS[3:]),
            str(accuracy),
            THE_OTHERS,
        ),
        verdict(
            "Hessian-free does not converge.",
            "Table 1",
            2 * sum(free) < len(free) if free else None,
            f"{sum(free)} of {len(free)} seeds converged",
            f"It converged on {sum(free)} of {len(free)} seeds. {accuracy.of('hessian-free')}",
            THE_OTHERS,
        ),
    ]


def _first_order(seconds: Scores) -> tuple[bool | None, str, str]:
    first, second = ("sgd", "adam"), (LM, "kfac", "hessian-free", "lbfgs")
    judged = [faster for method in first if (faster := seconds.best(method, second)) is not None]
    return all(judged) if judged else None, f"seconds: {seconds.brief(*first, *second)}", str(seconds)


def _swapped_verdicts(found: Sequence[Log], column: str) -> list[Verdict]:
    N = horizon(select(found, "swapped"))
    steps = _scores(found, "swapped", column, f"Steps to {TARGET_LABEL}", Log.steps_to)
    accuracy = _scores(found, "swapped", column, f"Test accuracy after {N} steps", tables.percent_after(N), True)
    swapped = "With train and test sets swapped, LM"
    verdict = partial(_verdict, "swapped")
    return [
        verdict(
            f"{swapped} needs the fewest steps to 90 %.",
            "appendix C",
            steps.best(LM, RIVALS),
            steps.against(LM, RIVALS),
            str(steps),
        ),
        verdict(
            f"{swapped} is the most accurate.",
            "appendix C",
            accuracy.best(LM, RIVALS),
            accuracy.against(LM, RIVALS),
            str(accuracy),
        ),
    ]


def _part_verdicts(found: Sequence[Log]) -> list[Verdict]:
    """A part helps if the method is better with it than without on at least three quarters of the seeds."""
    judged = []
    for experiment, place, count in (
        ("ablation-sine", "on the sine", "three"),
        ("ablation-mnist", "in classification", "four"),
    ):
        name, cost = next(iter(tables.ablation_costs(found, experiment).items()))
        for part, label in PARTS.items():
            if not in_paper(part, problem_of(experiment)):
                continue
            full, added = tables.part_effects(found, experiment, part, cost)
            claim = f"{label.capitalize()} helps {place}."
            evidence = f"Gain in the paper's method, {name}: {full}. Added to vanilla LM: {added}."
            judged.append(_verdict(experiment, claim, "section 3", full.clear, full.short, evidence))
        whole = tables.effect(found, experiment, "paper", "vanilla", cost)
        claim = f"The {count} parts together improve on vanilla LM {place}."
        judged.append(_verdict(experiment, claim, "section 3", whole.clear, whole.short, f"Gain, {name}: {whole}."))
    return judged


def _scores(
    found: Sequence[Log], experiment: str, column: str, what: str, measure: Measure, higher: bool = False
) -> Scores:
    methods = dict.fromkeys(log.method for log in select(found, experiment))
    runs = {method: seeds for method in methods if (seeds := runs_of(found, experiment, method, column))}
    form = ".4g" if higher else ".3g"
    levels = {method: [*map(measure, seeds)] for method, seeds in runs.items()}
    low, values, high = (
        {method: float(f"{quantile(found, q):{form}}") for method, found in levels.items()} for q in (0.25, 0.5, 0.75)
    )
    labels = {method: seeds[0].label for method, seeds in runs.items()}
    counts = sorted({len(seeds) for seeds in runs.values()}) or [0]
    words = f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else f"{counts[0]} seed{'s' * (counts[0] != 1)}"
    return Scores(what, values, {method: (low[method], high[method]) for method in runs}, labels, words, higher)


def _verdict(
    experiment: str, claim: str, source: str, held: bool | None, finding: str, evidence: str, about: str = LM_ITSELF
) -> Verdict:
    if held is None:
        return Verdict(claim, source, UNKNOWN, "", "No runs that could tell.", experiment, about)
    return Verdict(claim, source, HELD if held else FELL, finding, evidence, experiment, about)
