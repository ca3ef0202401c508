"""How long one step takes on the paper's CNN: LM, Adam, and torch-levenberg-marquardt where it is installed.

    python benchmarks/step.py --data ~/data --device cuda
    python benchmarks/step.py --peers ~/wheels --json step.json     # a folder with the peer's wheel or sources
    python benchmarks/step.py --quick

2,202 parameters, batch 600, one training step on a new batch each time; fetching the batch is off the clock. Without
MNIST the images are noise around one pattern per class, which costs the same.

A step of LM or of the peer that fails tries again with another λ or another rate. "Plain" steps are those that took one
linearisation, one solve and one trial: ratios are of these, the same work on both sides (of all steps, where that is
the faster figure).

The peer maps its model over the samples with vmap, which refuses RReLU. It therefore gets a twin of the network with
LeakyReLU at RReLU's mean slope: no noise to draw, no noise to replay, so its step is if anything the cheaper for it.
--leaky gives the twin to everyone. The peer's Cholesky solver is chosen, its fastest; the rest are its defaults.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import marquardt as mq
import measure
from marquardt.paper import problems
from marquardt.paper.data import data_directory
from marquardt.paper.methods import deterministic
from measure import Batch, Peak, Step, Timing, Verdict

BATCH = 600  # the paper's
ADAM_RATE = 0.01  # the paper's
BATCHES = 100  # in memory: one pass over MNIST

EXACT, EMPIRICAL, SAMPLED = "LM, exact rows", "LM, empirical rows", "LM, one sampled row"
CAPTURED, ONE_ROW = "LM, exact rows, CUDA graph", "LM, empirical rows, CUDA graph"
SQUARED = "LM, squared error, exact rows"
ADAM, GRAPHED = "Adam, fused", "Adam, fused, CUDA graph"
PEER_MSE, PEER_ROOT = "peer, squared error, 10 rows", "peer, √cross-entropy, 1 row"


# --- contestants: how to build a step for a model ---


def lm(loss: str, rows: Any, capture: bool = False) -> Callable[[nn.Module, Batch], Step]:
    def build(model: nn.Module, _: Batch) -> Step:
        step = measure.lm(mq.LM(model, loss, rows=rows, capture=capture))
        if loss == "cross_entropy":
            return step
        return lambda x, y: step(x, F.one_hot(y, problems.MNIST_CLASSES).to(x))

    return build


def adam(model: nn.Module, _: Batch) -> Step:
    return measure.adam(model, F.cross_entropy, ADAM_RATE)


def graphed_adam(model: nn.Module, batch: Batch) -> Step:
    return measure.graphed_adam(model, F.cross_entropy, ADAM_RATE, *batch)


def peer(training: ModuleType, loss: Any, one_hot: bool) -> Callable[[nn.Module, Batch], Step]:
    def build(model: nn.Module, _: Batch) -> Step:
        module = training.LevenbergMarquardtModule(deterministic(model), loss, solve_method="cholesky")

        def step(x: Tensor, y: Tensor) -> bool:
            targets = F.one_hot(y, problems.MNIST_CLASSES).to(x) if one_hot else y
            _, _, _, logs = module.training_step(x, targets)
            return logs["attempts"] == 1

        return step

    return build


# --- data ---


def load(options: argparse.Namespace) -> tuple[list[Batch], str]:
    """Batches on the device, and where they come from."""
    if options.data is not None:
        data = measure.load_mnist(options.data, options.device)
        return list(islice(measure.mnist_batches(data, BATCH, options.seed), BATCHES)), "MNIST"
    generator = torch.Generator().manual_seed(options.seed)
    patterns = torch.randn(problems.MNIST_CLASSES, 1, 28, 28, generator=generator)
    batches = []
    for _ in range(BATCHES):
        y = torch.randint(problems.MNIST_CLASSES, (BATCH,), generator=generator)
        x = (patterns[y] / 4 + torch.randn(BATCH, 1, 28, 28, generator=generator)) / 1.03  # of variance 1
        batches.append((x.to(options.device), y.to(options.device)))
    return batches, "noise around one pattern per class"


# --- the run ---


def peak(build: Callable[[], Step], batches: list[Batch], device: torch.device) -> float:
    """Of one step on each of these batches, with nothing else on the device but the data."""
    with Peak(device) as found:
        step = build()
        for x, y in batches:
            step(x, y)
        del step
    return found.bytes


def compare(timings: dict[str, Timing], cuda: bool) -> list[Verdict]:
    """The ratios within this run."""

    def ratio(slow: str, fast: str) -> float:
        return timings[slow].typical / timings[fast].typical

    found = []
    if PEER_MSE in timings:
        found.append(Verdict(f"{PEER_MSE} / {EXACT}", ratio(PEER_MSE, EXACT), "" if cuda else "≥", 3.0))
        found.append(Verdict(f"{PEER_MSE} / {SQUARED}", ratio(PEER_MSE, SQUARED), ""))
        for ours in (EMPIRICAL, SAMPLED):
            found.append(Verdict(f"{PEER_ROOT} / {ours}", ratio(PEER_ROOT, ours), "" if cuda else "≥", 1.0))
    for ours in (EXACT, EMPIRICAL, SAMPLED):
        found.append(Verdict(f"{ours} / {ADAM}", ratio(ours, ADAM), ""))
    if cuda:
        found.append(Verdict(f"{EXACT}, ms", 1e3 * timings[EXACT].typical, ""))
        found.append(Verdict(f"{CAPTURED}, ms", 1e3 * timings[CAPTURED].typical, "≤", 4.0))
        if PEER_MSE in timings:
            found.append(Verdict(f"{PEER_MSE} / {CAPTURED}", ratio(PEER_MSE, CAPTURED), "≥", 2.5))
            found.append(Verdict(f"{PEER_ROOT} / {ONE_ROW}", ratio(PEER_ROOT, ONE_ROW), "≥", 2.0))
    return found


def arguments() -> argparse.Namespace:
    parser = measure.parser(__doc__)
    add = parser.add_argument
    add("--data", type=Path, default=data_directory(), help="MNIST's folder (default: MARQUARDT_DATA)")
    add("--peers", type=Path, metavar="PATH", help="where torch-levenberg-marquardt lies, if it is not installed")
    add("--rounds", type=measure.positive, help="steps timed for each (default 30; on CUDA 100)")
    add("--warmup", type=measure.positive, default=5)
    add("--block", type=measure.positive, default=1, help="steps between two waits for the device (default 1)")
    add("--leaky", action="store_true", help="LeakyReLU instead of RReLU for everyone")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    described = measure.start(options)
    device, cuda = options.device, options.device.type == "cuda"
    rounds = options.rounds or (3 if options.quick else 100 if cuda else 30)
    warmup = 1 if options.quick else options.warmup
    batches, source = load(options)

    contestants: dict[str, Callable[[nn.Module, Batch], Step]] = {
        EXACT: lm("cross_entropy", mq.Exact()),
        EMPIRICAL: lm("cross_entropy", mq.Empirical()),
        SAMPLED: lm("cross_entropy", mq.Sampled(1)),
        SQUARED: lm("mse", mq.Exact()),
        ADAM: adam,
    }
    if cuda:
        contestants[CAPTURED] = lm("cross_entropy", mq.Exact(), capture=True)
        contestants[ONE_ROW] = lm("cross_entropy", mq.Empirical(), capture=True)
        contestants[GRAPHED] = graphed_adam
    notes = [f"Data: {source}. Network: {'LeakyReLU' if options.leaky else 'RReLU'}, batch {BATCH}."]
    found = measure.find_peer(options.peers)
    if found is None:
        notes.append("torch-levenberg-marquardt is not installed: pip install it, or name its folder with --peers.")
    else:
        training, losses, version = found
        contestants[PEER_MSE] = peer(training, losses.MSELoss(), one_hot=True)
        contestants[PEER_ROOT] = peer(training, losses.CrossEntropyLoss(), one_hot=False)
        notes.append(f"peer: torch-levenberg-marquardt {version}, Cholesky, its defaults otherwise; LeakyReLU.")

    def build(name: str) -> Step:
        model = problems.mnist_cnn(options.seed, device=device)
        return contestants[name](deterministic(model) if options.leaky else model, batches[0])

    peaks = {}
    for name in contestants:
        measure.note(f"memory of {name}")
        peaks[name] = peak(lambda name=name: build(name), batches[: 1 if options.quick else 3], device)

    def runner(name: str) -> Callable[[], object]:
        step, stream = build(name), cycle(batches)
        return lambda: step(*next(stream))

    measure.note(f"{rounds} rounds")
    timings = measure.interleave({name: runner(name) for name in contestants}, rounds, device, warmup, options.block)

    head = ["one step", "median, ms", "quartiles, ms", "plain steps", "their median, ms", "× Adam", "peak, MiB"]
    rows = [
        [
            name,
            measure.milliseconds(t.median),
            measure.span(t),
            f"{100 * t.plain_share:.0f} %",
            measure.milliseconds(t.plain_median),
            measure.number(t.typical / timings[ADAM].typical),
            measure.mib(peaks[name]),
        ]
        for name, t in timings.items()
    ]
    ratios = compare(timings, cuda)
    print(measure.markdown(head, rows), measure.verdicts(ratios), "\n".join(notes), sep="\n\n")
    results = {name: t.record() | {"peak_bytes": peaks[name]} for name, t in timings.items()}
    measure.write(options, described, results=results, verdicts=ratios, notes=notes)


if __name__ == "__main__":
    main()
