"""What a default step costs on models that people bring, in steps of Adam, and whether it trains them.

    python benchmarks/models.py                          # every model
    python benchmarks/models.py --only bert u-net --threads 2
    python benchmarks/models.py --json models.json
    python benchmarks/models.py --quick

A small BERT of transformers, graph networks of PyG, a U-Net with one task and with two, and a language model whose
embedding is its output too (brought.py), each given to LM as it is, without a wrapper. What needs a package that is
missing is named and left out.

Steps of LM and of Adam alternate, each on a new batch; the first step of LM, in which rules are proven, is listed
apart. Every task can be learnt. Adam trains at several rates, and its best loss on held-out data is the mark: told is
how many steps and seconds each takes to it, LM with its averaged weights. Evaluation is off the clock. A line is
printed as soon as a model is done.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

import marquardt as mq
import measure
from brought import CASES, Batch, Case
from measure import Verdict

RATES = (1e-3, 3e-3, 1e-2)  # of Adam
EVERY = 10  # steps between two evaluations
MOST = 20.0  # steps of Adam that one of LM may cost
QUICK = ("gcn, classes", "u-net, two tasks", "tied tokens")


def called(model: nn.Module, x: Any) -> Any:
    return model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)


def adam(model: nn.Module, case: Case, lr: float) -> Callable[[Batch], object]:
    opt = torch.optim.Adam(model.parameters(), lr=lr, fused=True)

    def step(batch: Batch) -> None:
        opt.zero_grad()
        case.value(called(model, batch[0]), batch[1]).backward()
        opt.step()

    return step


def built(case: Case, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return case.build()


# --- what a step costs ---


def cost(case: Case, rounds: int, seed: int) -> dict[str, Any]:
    device = torch.device("cpu")
    opt = mq.LM(built(case, seed), case.loss)
    step = adam(built(case, seed), case, RATES[0])
    first, _ = measure.timed(lambda batch=case.draw(): opt.step(*batch), device)
    batches = [case.draw() for _ in range(rounds + 5)]
    streams = iter(batches), iter(batches)
    contestants = {"Adam": lambda: step(next(streams[0])), "LM": lambda: opt.step(*next(streams[1])).accepted}
    timings = measure.interleave(contestants, rounds, device, warmup=5)
    paths = mq.linearize(built(case, seed), case.loss, *case.draw(), rows=mq.Sampled(1)).paths
    return {
        "parameters": sum(p.numel() for p in opt.params), "first": first, "plan": opt.plan,
        "Adam": timings["Adam"].median, "LM": timings["LM"].median,
        "ratio": timings["LM"].median / timings["Adam"].median,
        "predicted": opt._state.plan.work if opt._state.plan else math.nan, "accepted": timings["LM"].plain_share,
        "paths": dict(Counter(paths.values())),
    }  # fmt: skip


# --- whether it trains ---


@dataclass
class Run:
    """Losses on held-out data, with the steps and seconds until then."""

    losses: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        return min(self.losses)

    def reached(self, mark: float) -> tuple[float, float]:
        """Steps and seconds to the mark; ∞ if it was never there."""
        i = next((i for i, loss in enumerate(self.losses) if loss <= mark), None)
        return (math.inf, math.inf) if i is None else (self.steps[i], self.seconds[i])


def train(
    model: nn.Module, step: Callable[[Batch], object], case: Case, steps: int, seed: int, averaged: Callable[[], Any]
) -> Run:
    torch.manual_seed(seed + 1)
    held_out, run, seconds = [case.draw() for _ in range(16)], Run(), 0.0
    for k in range(1, steps + 1):
        batch = case.draw()
        began = time.perf_counter()
        step(batch)
        seconds += time.perf_counter() - began
        if k % EVERY == 0 or k == steps:
            run.losses.append(evaluated(model, case, held_out, averaged))
            run.steps.append(k)
            run.seconds.append(seconds)
    return run


def evaluated(model: nn.Module, case: Case, batches: Sequence[Batch], averaged: Callable[[], Any]) -> float:
    model.eval()
    with torch.no_grad(), averaged():
        values = [case.value(called(model, x), y).item() for x, y in batches]
    model.train()
    mean = sum(values) / len(values)
    return mean if math.isfinite(mean) else math.inf


def learnt(case: Case, steps: int, seed: int) -> dict[str, Any]:
    runs = []
    for rate in RATES:
        model = built(case, seed)
        runs.append(train(model, adam(model, case, rate), case, steps, seed, nullcontext))
    best = min(runs, key=lambda run: run.best)
    opt = mq.LM(built(case, seed), case.loss)
    run = train(opt.model, lambda batch: opt.step(*batch), case, steps, seed, opt.averaged)
    return {
        "rate": RATES[runs.index(best)], "Adam best": best.best, "LM best": run.best,
        "Adam steps": best.reached(best.best), "LM steps": run.reached(best.best),
        "Adam": vars(best), "LM": vars(run),
    }  # fmt: skip


# --- the run ---


def arguments() -> argparse.Namespace:
    parser = measure.parser(__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=list(CASES), default=list(CASES), help="these models")
    add("--rounds", type=measure.positive, default=20, help="steps timed for each (default 20)")
    add("--steps", type=measure.positive, default=300, help="steps of training (default 300)")
    add("--untrained", action="store_true", help="only what a step costs")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    described = measure.start(options)
    names = [name for name in options.only if not options.quick or name in QUICK]
    rounds, steps = (2, EVERY) if options.quick else (options.rounds, options.steps)
    missing = {p for name in names if (p := CASES[name].package) and find_spec(p) is None}
    notes = [f"{package} is not installed: its models are left out." for package in sorted(missing)]
    names = [name for name in names if CASES[name].package not in missing]

    results: dict[str, dict[str, Any]] = {}
    for name in names:
        results[name] = r = cost(CASES[name], rounds, options.seed)
        measure.note(f"{name}: {r['ratio']:.1f} steps of Adam, the first {r['first']:.2f} s; {r['plan']}")
        if not options.untrained:
            r["trained"] = t = learnt(CASES[name], steps, options.seed)
            measure.note(f"    best loss {t['LM best']:.4g}, of Adam {t['Adam best']:.4g}")

    head = ["model", "parameters", "Adam, ms", "LM, ms", "× Adam", "predicted", "first, ms", "paths", "plan"]
    rows = [
        [
            name, f"{r['parameters']:,}", measure.milliseconds(r["Adam"]), measure.milliseconds(r["LM"]),
            measure.number(r["ratio"]), measure.number(r["predicted"]), measure.milliseconds(r["first"]),
            ", ".join(f"{count} {path}" for path, count in r["paths"].items()), r["plan"],
        ]
        for name, r in results.items()
    ]  # fmt: skip
    print(measure.markdown(head, rows), end="\n\n")
    if not options.untrained:
        print(trained(results), end="\n\n")
    found = [Verdict(f"{name}: a step of LM in steps of Adam", r["ratio"], "≤", MOST) for name, r in results.items()]
    print(measure.verdicts(found), "\n".join(notes), sep="\n\n")
    measure.write(options, described, results=results, verdicts=found, notes=notes)


def trained(results: dict[str, dict[str, Any]]) -> str:
    head = [
        "model",
        "Adam's rate",
        "its best loss",
        "after steps",
        "seconds",
        "LM best",
        "to Adam's best: steps",
        "seconds",
    ]
    rows = []
    for name, r in results.items():
        t = r["trained"]
        figures = [t["Adam best"], *t["Adam steps"], t["LM best"], *t["LM steps"]]
        rows.append([name, f"{t['rate']:g}", *(measure.number(figure) for figure in figures)])
    return measure.markdown(head, rows)


if __name__ == "__main__":
    main()
