"""Steps under bfloat16 autocast beside steps in float32: what they take, and what they reach.

    python benchmarks/precision.py --data ~/data --device cuda
    python benchmarks/precision.py --parts transformer --device cuda
    python benchmarks/precision.py --quick

transformer  the one of scale.py, 85 M parameters, one output: an exact LM step over a fused Adam step, both in float32
             and both under autocast. On CUDA both are recorded as CUDA graphs, and without a graph too.
cnn          the paper's CNN on MNIST, 100 steps of LM on batches of 600, in float32 and under autocast from the same
             weights on the same batches: test accuracy of the averaged weights, evaluated as they were trained, and
             time. Without --data images are made, noise around one pattern per class: that shows times alone.

Under autocast the weights, the loss and the solve stay in float32.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import marquardt as mq
import measure
import scale
from marquardt.paper import problems
from marquardt.paper.data import Digits, data_directory
from measure import Step, Verdict
from scale import BARE, GRAPH, Contestant, Pooled, Result, Shape

BATCH = 600  # the paper's
STEPS = 100  # one pass of MNIST
RATIO = 2.5  # LM's step over Adam's under autocast, at most
POINTS = 0.1  # of accuracy that autocast may cost
PRECISIONS = {"float32": False, "bfloat16 autocast": True}


def autocast(enabled: bool, device: torch.device) -> AbstractContextManager[object]:
    """Without its cache: a CUDA graph would hold weights that were converted before it was recorded."""
    return torch.autocast(device.type, torch.bfloat16, enabled, cache_enabled=False)


# --- the transformer ---


def under(contestant: Contestant, enabled: bool, device: torch.device) -> Contestant:
    """The same, built and run under autocast."""

    def build() -> tuple[nn.Module, Step]:
        with autocast(enabled, device):
            model, step = contestant.build()

        def within(x: torch.Tensor, y: torch.Tensor) -> object:
            with autocast(enabled, device):
                return step(x, y)

        return model, within

    return contestant._replace(build=build)


def contestants(shape: Shape, device: torch.device, seed: int) -> list[Contestant]:
    """Adam and LM in pairs."""

    def make() -> nn.Module:
        torch.manual_seed(seed)
        with device:
            return Pooled(shape, 1)

    parts: dict[str, Any] = {"curvature": mq.Gram(), "damping": mq.MeanEigenvalue(), "rows": mq.Exact(), **BARE}
    found = [scale.adam(make, F.mse_loss), scale.lm("LM", make, "mse", shape.batch, **parts)]
    if device.type == "cuda":
        shown = scale.batches((shape.batch, shape.sequence, shape.d_model), 1, device, seed, 1)[0]
        found += [
            scale.adam(make, F.mse_loss, shown),
            scale.lm("LM" + GRAPH, make, "mse", shape.batch, capture=True, **parts),
        ]
    return found


def transformer(options: argparse.Namespace) -> tuple[str, list[Verdict], dict[str, list[Result]]]:
    device, held = options.device, options.device.type == "cuda" and not options.quick
    shape = scale.shape_of(options)
    data = scale.batches((shape.batch, shape.sequence, shape.d_model), 1, device, options.seed)
    rows, judged, results = [], [], {}
    for name, enabled in PRECISIONS.items():
        own = [under(c, enabled, device) for c in contestants(shape, device, options.seed)]
        found = results[name] = scale.measure_all(own, data, options, name)
        rows += scale.lines(name, found)
        for adam, lm in zip(found[::2], found[1::2], strict=True):
            bound = held and enabled and GRAPH in lm.name
            value = scale.ratio(lm, adam)
            judged.append(Verdict(f"{name}: {lm.name} / {adam.name}, time", value, "≤" if bound else "", RATIO))
    for plain, coarse in zip(*results.values(), strict=True):
        judged.append(Verdict(f"{plain.name}: autocast / float32, time", scale.ratio(coarse, plain), ""))
    return measure.markdown(scale.HEAD, rows), judged, results


# --- the paper's CNN ---


@dataclass
class Run:
    """One seed in one precision."""

    precision: str
    seed: int
    accuracy: float  # in percent, of the test set
    loss: float  # of the last batch, after the step
    seconds: list[float]  # of every step
    rejected: int
    replayed: bool  # whether steps were recorded

    def record(self) -> dict[str, Any]:
        return vars(self)


def made_images(seed: int, device: torch.device, count: int) -> Digits:
    """Noise around one pattern per class."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(problems.MNIST_CLASSES, 1, 28, 28, generator=generator)

    def some(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.randint(problems.MNIST_CLASSES, (count,), generator=generator)
        return (patterns[y] / 4 + torch.randn(count, 1, 28, 28, generator=generator)) / 1.03, y  # of variance 1

    train, test = some(count), some(count // 4)
    return Digits(*train, *test, "made", "noise around one pattern per class").to(device)


def train(data: Digits, name: str, enabled: bool, seed: int, options: argparse.Namespace) -> Run:
    device = options.device
    torch.manual_seed(seed)
    model = problems.mnist_cnn(seed, device=device)
    opt = mq.LM(model, "cross_entropy", capture=True if device.type == "cuda" else None)
    seconds, rejected, step = [], 0, None
    size = min(BATCH, len(data.train_labels))
    with autocast(enabled, device):
        for x, y in islice(measure.mnist_batches(data, size, seed), options.train):
            took, step = measure.timed(lambda x=x, y=y: opt.step(x, y), device)
            seconds.append(took)
            rejected += not step.accepted
        with opt.averaged():
            accuracy = 100 * problems.accuracy(model, data.test_images, data.test_labels)
    return Run(name, seed, accuracy, step.new_loss, seconds, rejected, opt._recordings.made is not None)


def cnn(options: argparse.Namespace) -> tuple[str, list[Verdict], list[Run]]:
    device, mnist = options.device, options.data is not None
    count = 64 if options.quick else 100 * BATCH
    data = measure.load_mnist(options.data, device) if mnist else made_images(options.seed, device, count)
    runs: list[Run] = []
    for seed in range(options.seed, options.seed + options.seeds):
        for name, enabled in PRECISIONS.items():
            measure.note(f"CNN, seed {seed}: {name}")
            runs.append(train(data, name, enabled, seed, options))
    head = ["CNN", "accuracy, %", "min – max", "last loss", "whole run, s", "ms a step", "rejected", "recorded"]
    grouped = {name: [run for run in runs if run.precision == name] for name in PRECISIONS}
    rows = [line(name, own) for name, own in grouped.items()]
    plain, coarse = grouped.values()
    lost = mean(plain, lambda r: r.accuracy) - mean(coarse, lambda r: r.accuracy)
    bound = "≤" if mnist and not options.quick else ""
    faster = mean(coarse, typical) / mean(plain, typical)
    judged = [
        Verdict("CNN: points of accuracy that autocast costs, mean over seeds", lost, bound, POINTS),
        Verdict("CNN: autocast / float32, time of a step", faster, ""),
    ]
    return measure.markdown(head, rows), judged, runs


def mean(runs: list[Run], of: Callable[[Run], float]) -> float:
    return statistics.fmean(of(run) for run in runs)


def typical(run: Run) -> float:
    """Seconds of a step in the second half, when all is found out and recorded."""
    return measure.median(run.seconds[len(run.seconds) // 2 :])


def line(name: str, runs: list[Run]) -> list[str]:
    accuracies = [run.accuracy for run in runs]
    return [
        name,
        f"{mean(runs, lambda r: r.accuracy):.2f}",
        f"{min(accuracies):.2f} – {max(accuracies):.2f}",
        measure.number(mean(runs, lambda r: r.loss)),
        measure.number(mean(runs, lambda r: sum(r.seconds))),
        measure.milliseconds(mean(runs, typical)),
        f"{mean(runs, lambda r: r.rejected):g}",
        f"{sum(run.replayed for run in runs)} of {len(runs)}",
    ]


# --- the command line ---


def arguments() -> argparse.Namespace:
    parser = measure.parser(__doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=["transformer", "cnn"], default=["transformer", "cnn"])
    add("--data", type=Path, default=data_directory(), help="MNIST's folder (default: MARQUARDT_DATA)")
    add("--seeds", type=measure.positive, help="of the CNN (default 5)")
    add("--train", type=measure.positive, help=f"steps of the CNN (default {STEPS})")
    add("--steps", type=measure.positive, help="of the transformer, timed in every pass (default 20)")
    add("--warmup", type=measure.positive, help="steps before (default 5)")
    add("--passes", type=measure.positive, help="over all contestants (default 2)")
    scale.add_shape(parser)
    options = parser.parse_args()
    options.seeds = options.seeds or (1 if options.quick else 5)
    options.train = options.train or (2 if options.quick else STEPS)
    options.steps = options.steps or (2 if options.quick else 20)
    options.warmup = options.warmup or (1 if options.quick else 5)
    options.passes = options.passes or (1 if options.quick else 2)
    if options.quick:
        options.data = None
    return options


def main() -> None:
    options = arguments()
    described = measure.start(options)
    judged: list[Verdict] = []
    found: dict[str, Any] = {}
    for name, part in {"transformer": transformer, "cnn": cnn}.items():
        if name in options.parts:
            table, more, found[name] = part(options)
            judged += more
            print(table, end="\n\n", flush=True)
    notes = [
        f"{scale.shape_of(options).words()}. CNN: {options.train} steps on batches of {BATCH}, "
        f"{options.seeds} seeds, " + ("images that were made." if options.data is None else "MNIST."),
        "Targets are for CUDA, for steps that are recorded.",
    ]
    if options.quick:
        notes.append("Quick: small models, few steps. Not a result.")
    print(measure.verdicts(judged), "\n".join(notes), sep="\n\n")
    measure.write(options, described, results=found, verdicts=judged, notes=notes)


if __name__ == "__main__":
    main()
