"""MNIST, four networks: what is lost by taking `mq.LM(model, loss)` as it comes, for equal steps and by the clock.

    python benchmarks/regret.py --data ~/data                       # accuracy after 50, 100 and 300 steps
    python benchmarks/regret.py --data ~/data --clock               # time to what Adam has after 1,000 steps

Rivals: the same LM with a constant λ of 1, 3, 10 or 30, `presets.kfac` with an average, Adam and Muon (matrices by
Muon, the rest by AdamW) with a constant rate and LM's average. The rate of Adam and Muon is the best of four for each
number of steps, by the validation data of a seed that is not reported; every λ is reported, and the best of them is
taken by the test itself, in their favour. The clock runs while the optimizer is built and while it steps; Adam's step
is a CUDA graph. All accuracies are those of averaged weights, in percent, means over the seeds.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import marquardt as mq
import measure
from contest import contestants
from contest.contestants import Feed, Method, fed
from contest.tasks import TASKS, Problem, Setup
from marquardt.paper.data import data_directory

NETWORKS = {"mlp": "mnist-mlp", "wide": "mnist-wide", "groupnorm": "mnist-groupnorm", "cnn": "mnist-cnn"}
MARKS = (10, 25, 50, 100, 300)  # steps
COMPARED = (50, 100, 300)
SEEDS, TRIAL_SEED = (0, 1, 2), 1000
LAMBDAS = (1.0, 3.0, 10.0, 30.0)
RATES = {"Adam": (0.001, 0.003, 0.01, 0.03), "Muon": (0.003, 0.01, 0.03, 0.1)}
ADAM_STEPS = 1000  # whose accuracy is the aim by the clock
LOOK = 5  # LM's steps between two looks at the accuracy

Scores = dict[int, tuple[float, float]]  # by steps: accuracy on validation and on test data, in percent


def lm(problem: Problem, seed: int, **parts: Any) -> Method:
    opt = mq.LM(problem.model, problem.loss, **parts)
    return Method(fed(opt.step, Feed(problem, seed)), opt.averaged)


def kfac(problem: Problem, seed: int) -> Method:
    opt = mq.presets.kfac(problem.model, problem.loss, average=mq.EMA())
    return Method(fed(opt.step, Feed(problem, seed)), opt.averaged)


def first_order(name: str, rate: float, problem: Problem, seed: int) -> Method:
    """With a constant rate: the share of the budget that is over is always 0."""
    build = {"Adam": contestants.adam, "Muon": contestants.muon}[name]
    return build(problem, seed, rate)


BUILDS: dict[str, Callable[[Problem, int], Method]] = {
    "LM": lm,
    **{f"λ = {lam:g}": partial(lm, schedule=mq.Constant(lam)) for lam in LAMBDAS},
    "kfac": kfac,
}


def course(build: Callable[[Problem, int], Method], network: str, seed: int, options: argparse.Namespace) -> Scores:
    problem = TASKS[NETWORKS[network]].problem(seed, options.setup, options.device)
    method, found, done = build(problem, seed), {}, 0
    for mark in (m for m in MARKS if m <= options.steps):
        while done < mark:
            done += method.run(0.0, mark - done)
        found[mark] = accuracies(problem, method)
    return found


def accuracies(problem: Problem, method: Method) -> tuple[float, float]:
    with method.evaluated():
        score = problem.scores(problem.model)
    return 100 * (1 - score.validation), 100 * (1 - score.test)


def chosen(name: str, network: str, options: argparse.Namespace) -> dict[int, float]:
    """The best rate for every number of steps."""
    tried = {rate: course(partial(first_order, name, rate), network, TRIAL_SEED, options) for rate in RATES[name]}
    return {m: max(tried, key=lambda rate: tried[rate][m][0]) for m in MARKS if m <= options.steps}


def compared(network: str, options: argparse.Namespace) -> dict[str, Any]:
    """Test accuracy of every contestant by the number of steps, for every seed."""
    found: dict[str, dict[int, list[float]]] = {}
    rates: dict[str, dict[int, float]] = {}

    def add(name: str, marks: Iterable[int], build: Callable[[Problem, int], Method]) -> None:
        for seed in options.seeds:
            scores = course(build, network, seed, options)
            for m in marks:
                found.setdefault(name, {}).setdefault(m, []).append(scores[m][options.part])
        measure.note(f"{network} {name}: " + ", ".join(f"{m}: {mean(v):.2f}" for m, v in found[name].items()))

    marks = [m for m in MARKS if m <= options.steps]
    for name in options.contestants:
        if name in BUILDS:
            add(name, marks, BUILDS[name])
            continue
        rates[name] = chosen(name, network, options)
        for rate in dict.fromkeys(rates[name].values()):
            add(name, [m for m in marks if rates[name][m] == rate], partial(first_order, name, rate))
    return {"network": network, "accuracy": found, "rates": rates}


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def table(results: Sequence[dict[str, Any]]) -> str:
    """Contestants down, networks and steps across; the last row is what LM is behind the best of the others."""
    columns = [(r, m) for r in results for m in COMPARED if m in next(iter(r["accuracy"].values()))]
    names = list(dict.fromkeys(name for r in results for name in r["accuracy"]))
    rows = [[name, *(f"{mean(r['accuracy'][name][m]):.2f}" for r, m in columns)] for name in names]
    if "LM" in names and len(names) > 1:
        regret = [
            max(mean(a[m]) for name, a in r["accuracy"].items() if name != "LM") - mean(r["accuracy"]["LM"][m])
            for r, m in columns
        ]
        rows.append(["behind the best", *(f"{x:+.2f}" for x in regret)])
    return measure.markdown(["test accuracy, %", *(f"{r['network']}, {m}" for r, m in columns)], rows)


# --- by the clock ---


def clocked(network: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of LM to the accuracy that Adam has after ADAM_STEPS, against Adam's."""
    rate = max(RATES["Adam"], key=lambda rate: adam_run(network, rate, TRIAL_SEED, options)[1])
    runs = []
    for seed in options.seeds:
        seconds, *found = adam_run(network, rate, seed, options)
        aim = found[options.part]
        ours, steps, own = time_to(network, aim, seed, options)
        runs.append({"seed": seed, "Adam": seconds, "aim": aim, "LM": ours, "steps": steps, "ms a step": own})
        words = f"Adam {seconds:.3f} s to {aim:.2f} %, LM {ours:.3f} s in {steps} steps, {own:.2f} ms each"
        measure.note(f"{network}: {words}")
    return {"network": network, "rate": rate, "runs": runs, "ratio": mean([r["LM"] / r["Adam"] for r in runs])}


def adam_run(network: str, rate: float, seed: int, options: argparse.Namespace) -> tuple[float, float, float]:
    """Seconds, accuracy on validation and on test data after all steps; kernels were loaded before."""
    task = TASKS[NETWORKS[network]]
    first_order("Adam", rate, task.problem(seed, options.setup, options.device), seed).run(0.0, 3)
    problem = task.problem(seed, options.setup, options.device)
    seconds, method = measure.timed(lambda: first_order("Adam", rate, problem, seed), options.device)
    took, _ = measure.timed(lambda: method.run(0.0, ADAM_STEPS), options.device)
    return seconds + took, *accuracies(problem, method)


def time_to(network: str, aim: float, seed: int, options: argparse.Namespace) -> tuple[float, int, float]:
    """Seconds and steps until the test accuracy is reached, ∞ if it is not; milliseconds of the last steps."""
    task = TASKS[NETWORKS[network]]
    lm(task.problem(seed, options.setup, options.device), seed).run(0.0, 25)  # loads the kernels
    problem = task.problem(seed, options.setup, options.device)
    seconds, method = measure.timed(lambda: lm(problem, seed), options.device)
    took = math.nan
    for done in range(LOOK, ADAM_STEPS + 1, LOOK):
        took, _ = measure.timed(lambda: method.run(0.0, LOOK), options.device)
        seconds += took
        if accuracies(problem, method)[options.part] >= aim:
            return seconds, done, 1e3 * took / LOOK
    return math.inf, ADAM_STEPS, 1e3 * took / LOOK


def main() -> None:
    parser = measure.parser(__doc__)
    add = parser.add_argument
    add("--data", type=Path, default=data_directory(), help="MNIST's folder (default: MARQUARDT_DATA)")
    add("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    add("--contestants", nargs="+", choices=[*BUILDS, *RATES], default=[*BUILDS, *RATES])
    add("--seeds", nargs="+", type=int, default=list(SEEDS))
    add("--steps", type=measure.positive, default=max(MARKS))
    add("--validation", action="store_true", help="accuracy on validation data, for choices")
    add("--clock", action="store_true", help="time to Adam's accuracy, in the place of equal steps")
    options = parser.parse_args()
    options.setup, options.part = Setup(options.data), 0 if options.validation else 1
    if options.quick:
        options.seeds, options.steps = options.seeds[:1], 50
    described = measure.start(options)
    if options.clock:
        results = [clocked(network, options) for network in options.networks]
        rows = [[r["network"], f"{r['rate']:g}", f"{r['ratio']:.2f}"] for r in results]
        print(measure.markdown(["network", "Adam's rate", "LM's time over Adam's"], rows))
    else:
        results = [compared(network, options) for network in options.networks]
        print(table(results))
    measure.write(options, described, results=results)


if __name__ == "__main__":
    main()
