"""Seconds of training until the paper's CNN has 90 % of MNIST's test set right: LM against Adam at its best rate.

    python benchmarks/time_to_target.py --data ~/data --device cuda
    python benchmarks/time_to_target.py --data ~/data --quick

Batch 600, for each seed the same weights and the same batches for every method. First each method trains with an
evaluation after every step, which gives the number of steps it needs. Then it trains again, that many steps on batches
already on the device, and only this is timed, as a whole: neither evaluation nor waiting for the device between steps
is on the clock. What LM finds out about a model on its first step is; kernels are loaded before.

LM is evaluated with its averaged weights, as it is meant to be used (the average is on the clock); Adam both without
and with the same average. Adam's rate is the one of the grid with the least time, chosen on the very seeds that are
reported: that flatters Adam.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import marquardt as mq
import measure
from marquardt.paper import problems
from marquardt.paper.data import Digits, data_directory
from measure import Batch, Step, Verdict

BATCH = 600  # the paper's
TARGET = 0.90
STEPS = 100  # at most: one pass of MNIST
RATES = (0.003, 0.01, 0.02, 0.03, 0.05, 0.1)  # 0.01 is the paper's

LM, ADAM = "LM", "Adam"


class Method(NamedTuple):
    step: Step
    evaluated: Callable[[], AbstractContextManager[object]]  # the weights to be judged, while inside


class Entry(NamedTuple):
    family: str  # LM or ADAM
    build: Callable[[nn.Module, Batch], Method]


# --- methods ---


def lm(preset: Callable[..., mq.LM] = mq.LM, warm: bool = False, **parts: Any) -> Entry:
    """`warm`: what LM finds out about a model on its first steps, and the CUDA graph where there is one, is off the
    clock, as it is for Adam's CUDA graph; weights and state are then set back."""

    def build(model: nn.Module, batch: Batch) -> Method:
        opt = preset(model, "cross_entropy", **{"capture": False, **parts})
        if warm:
            before, start = [p.detach().clone() for p in model.parameters()], opt.state_dict()
            x, y = batch
            for k in range(6):
                opt.step(x * (1 + 0.01 * k), y)  # as many batches
            with torch.no_grad():
                torch._foreach_copy_(list(model.parameters()), before)
            opt.load_state_dict(start)
        return Method(measure.lm(opt), nullcontext if opt.average is None else opt.averaged)

    return Entry(LM, build)


def adam(rate: float, average: bool = False, graph: bool = False) -> Entry:
    def build(model: nn.Module, batch: Batch) -> Method:
        make = measure.graphed_adam if graph else measure.adam
        step = make(model, F.cross_entropy, rate, *(batch if graph else ()))
        return averaging(model, step) if average else Method(step, nullcontext)

    return Entry(ADAM, build)


def averaging(model: nn.Module, step: Step) -> Method:
    """The average that LM keeps by default, mq.EMA, beside another method."""
    decay, weights = mq.EMA().decay, [p.detach() for p in model.parameters()]
    means = [w.clone() for w in weights]
    count = 0

    def averaged_step(x: torch.Tensor, y: torch.Tensor) -> None:
        nonlocal count
        step(x, y)
        count += 1
        beta = 0.0 if count == 1 else min(decay, count / (9 + count))  # after t = count − 1 points: (1 + t)/(10 + t)
        torch._foreach_lerp_(means, weights, 1 - beta)

    @contextmanager
    def evaluated() -> Iterator[None]:
        kept = [w.clone() for w in weights]
        torch._foreach_copy_(weights, means)
        try:
            yield
        finally:
            torch._foreach_copy_(weights, kept)

    return Method(averaged_step, evaluated)


def entries(options: argparse.Namespace) -> dict[str, Entry]:
    found = {
        "LM, exact rows": lm(),
        "LM, empirical rows": lm(rows=mq.Empirical()),
        "LM, one sampled row": lm(rows=mq.Sampled(1)),
        "LM, exact rows, warm": lm(warm=True),
        "presets.paper": lm(mq.presets.paper),
        "presets.paper, warm": lm(mq.presets.paper, warm=True),
    }
    if options.device.type == "cuda":
        found["LM, exact rows, CUDA graph"] = lm(warm=True, capture=True)
        found["LM, empirical rows, CUDA graph"] = lm(warm=True, capture=True, rows=mq.Empirical())
    rates = options.rates or ((0.01, 0.03) if options.quick else RATES)
    for graph in (False, True) if options.device.type == "cuda" else (False,):
        for average in (False,) if options.quick else (False, True):
            for rate in rates:
                name = f"Adam {rate:g}{', average' if average else ''}{', CUDA graph' if graph else ''}"
                found[name] = adam(rate, average, graph)
    return found


# --- runs ---


@dataclass
class Run:
    """One method on one seed."""

    method: str
    seed: int
    steps: float  # to the target; ∞ where it is not reached
    accuracy: float  # where it stopped
    seconds: list[float] = field(default_factory=list)  # of that many steps, one figure for each repetition

    @property
    def time(self) -> float:
        return measure.median(self.seconds) if self.seconds else math.inf

    def record(self) -> dict[str, Any]:
        return vars(self) | {"time": self.time}


class Bench:
    def __init__(self, data: Digits, options: argparse.Namespace, most: int) -> None:
        self.data, self.device, self.target, self.most = data, options.device, options.target, most

    def batches(self, seed: int, count: int) -> list[Batch]:
        return list(islice(measure.mnist_batches(self.data, BATCH, seed), count))

    def build(self, entry: Entry, seed: int, batch: Batch) -> tuple[nn.Module, Method]:
        model = problems.mnist_cnn(seed, device=self.device)
        torch.manual_seed(seed)  # RReLU's noise
        return model, entry.build(model, batch)

    def steps_needed(self, name: str, entry: Entry, seed: int, batches: list[Batch]) -> Run:
        model, method = self.build(entry, seed, batches[0])
        accuracy = 0.0
        for taken, (x, y) in enumerate(batches, 1):
            method.step(x, y)
            with method.evaluated():
                accuracy = problems.accuracy(model, self.data.test_images, self.data.test_labels)
            if accuracy >= self.target:
                return Run(name, seed, taken, accuracy)
        return Run(name, seed, math.inf, accuracy)

    def seconds(self, entry: Entry, seed: int, batches: list[Batch]) -> float:
        _, method = self.build(entry, seed, batches[0])

        def train() -> None:
            for x, y in batches:
                method.step(x, y)

        return measure.timed(train, self.device)[0]

    def run(self, entries: dict[str, Entry], seed: int, repeats: int) -> list[Run]:
        """All methods on one seed; the repetitions go round and round, so that all see the same machine."""
        batches = self.batches(seed, self.most)
        runs = [self.steps_needed(name, entry, seed, batches) for name, entry in entries.items()]
        for run in runs:
            measure.note(f"seed {seed}  {run.method}: {run.steps:g} steps, {100 * run.accuracy:.2f} %")
        reached = [run for run in runs if math.isfinite(run.steps)]
        for repeat in range(repeats):
            turn = repeat % max(1, len(reached))
            for run in reached[turn:] + reached[:turn]:
                run.seconds.append(self.seconds(entries[run.method], seed, batches[: int(run.steps)]))
        return runs


# --- figures: read the runs, never the models ---


def best(times: dict[str, float], entries: dict[str, Entry], family: str, graph: bool) -> str | None:
    """The fastest of a family, None where none of it gets there."""
    own = [n for n in times if entries[n].family == family and ("graph" in n) == graph and math.isfinite(times[n])]
    return min(own, key=lambda n: times[n], default=None)


def compare(times: dict[str, float], entries: dict[str, Entry], cuda: bool) -> list[Verdict]:
    found = []
    reference = best(times, entries, ADAM, graph=False)
    if reference is not None:
        bound = 1.0 if cuda else 1.5
        for name in (n for n in times if entries[n].family == LM):
            found.append(Verdict(f"{name} / {reference}", times[name] / times[reference], ""))
        winner = best(times, entries, LM, graph=False)
        if winner is not None:
            found.append(Verdict("best LM / best Adam, both eager", times[winner] / times[reference], "≤", bound))
        graphed = best(times, entries, ADAM, graph=True)
        ours = best(times, entries, LM, graph=True)
        if ours is not None and graphed is not None:
            found.append(Verdict("best LM / best Adam, both as CUDA graphs", times[ours] / times[graphed], "≤", bound))
    return found


def count(steps: float) -> str:
    return f"{steps:g}" if math.isfinite(steps) else "never"


def arguments() -> argparse.Namespace:
    parser = measure.parser(__doc__)
    add = parser.add_argument
    add("--data", type=Path, default=data_directory(), help="MNIST's folder (default: MARQUARDT_DATA)")
    add("--target", type=float, default=TARGET, help=f"test accuracy (default {TARGET:g})")
    add("--seeds", type=measure.positive, help="how many (default 5)")
    add("--steps", type=measure.positive, help=f"at most (default {STEPS})")
    add("--repeats", type=measure.positive, help="timed repetitions of every run (default 5)")
    add("--rates", type=float, nargs="+", help=f"Adam's learning rates (default {' '.join(map(str, RATES))})")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    described = measure.start(options)
    seeds = options.seeds or (1 if options.quick else 5)
    repeats = options.repeats or (1 if options.quick else 5)
    data = measure.load_mnist(options.data, options.device)
    if options.quick:  # the evaluation would take longest: enough of it to show that everything runs
        data = replace(data, test_images=data.test_images[:2000], test_labels=data.test_labels[:2000])
    methods = entries(options)
    bench = Bench(data, options, options.steps or (25 if options.quick else STEPS))

    first = range(options.seed, options.seed + seeds)
    for entry in methods.values():  # loads the kernels
        bench.seconds(entry, options.seed, bench.batches(options.seed, 2))
    runs = [run for seed in first for run in bench.run(methods, seed, repeats)]

    grouped = {name: [run for run in runs if run.method == name] for name in methods}
    times = {name: measure.median([run.time for run in own]) for name, own in grouped.items()}
    head = [
        f"to {100 * options.target:g} %", "seeds there", "steps, median", "min – max",
        "seconds, median", "min – max", "ms a step",
    ]  # fmt: skip
    rows = []
    for name, own in grouped.items():
        steps, seconds = [run.steps for run in own], [run.time for run in own]
        there = [run for run in own if math.isfinite(run.steps)]
        rows.append(
            [
                name,
                f"{len(there)} of {len(own)}",
                count(measure.median(steps)),
                f"{count(min(steps))} – {count(max(steps))}",
                measure.number(times[name]),
                f"{measure.number(min(seconds))} – {measure.number(max(seconds))}",
                measure.milliseconds(measure.median([run.time / run.steps for run in there])),
            ]
        )
    ratios = compare(times, methods, options.device.type == "cuda")
    notes = ["Medians over seeds; a seed on which a method does not get there counts as never."]
    if options.quick:
        notes.append("Quick: a fifth of the test set, few seeds, few rates. Not a result.")
    print(measure.markdown(head, rows), measure.verdicts(ratios), "\n".join(notes), sep="\n\n")
    measure.write(options, described, runs=[run.record() for run in runs], times=times, verdicts=ratios, notes=notes)


if __name__ == "__main__":
    main()
