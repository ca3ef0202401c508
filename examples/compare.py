"""What the examples share: LM and Adam on the same model for the same time, a table, and the courses of both.

LM takes a number of steps. After each of them Adam trains the same model, from the same start, for as long as that
step took, with each of three rates, which fall to 0 as a cosine. A run keeps the weights of its least validation loss,
and of the rates the one with the least of them counts. The clock stands while the validation loss is looked at.
"""

import copy
import math
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch
from matplotlib.figure import Figure

LOOKS = 25  # at the validation loss, spread evenly over a run
COLOURS = {"LM": "C0", "Adam": "C1"}


@dataclass
class Run:
    name: str
    model: torch.nn.Module
    steps: int = 0
    seconds: float = 0.0  # of training alone
    course: list[tuple[float, float]] = field(default_factory=list)  # seconds, validation loss
    best: float = math.inf  # validation loss once training has begun
    weights: dict | None = None

    def look(self, loss: float):
        self.course.append((self.seconds, loss))
        if loss < self.best or not self.steps:
            self.weights = copy.deepcopy(self.model.state_dict())
        if self.steps:
            self.best = min(self.best, loss)


def arguments(name: str, doc: str):
    """The path of the picture, and whether the run is a quick one."""
    parser = ArgumentParser(prog=f"{name}.py", description=doc.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "pictures", help="folder of the picture")
    parser.add_argument("--quick", action="store_true", help="a few steps, a few seconds")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    return chosen.out / f"{name}.png", chosen.quick


def pick(data, index):
    """The samples of `index` of tensors in tuples and dicts."""
    if isinstance(data, dict):
        return {key: pick(value, index) for key, value in data.items()}
    return tuple(pick(part, index) for part in data) if isinstance(data, tuple) else data[index]


def shuffled(inputs, targets, samples: int, size: int) -> Iterator:
    """Batches without end, in a new order in every pass over the samples."""
    generator = torch.Generator().manual_seed(0)
    while True:
        for index in torch.randperm(samples, generator=generator)[: samples // size * size].split(size):
            yield pick((inputs, targets), index)


class ByLM:
    """`opt.step` on batch after batch."""

    def __init__(self, name: str, model, opt, batches: Iterator):
        self.run, self.opt, self.batches, self.averaged = Run(name, model), opt, batches, opt.averaged

    def step(self, share: float):
        self.opt.step(*next(self.batches))


class ByAdam:
    """The gradient of loss(model, inputs, targets); the rate falls with the share of the run that is over."""

    averaged = staticmethod(nullcontext)

    def __init__(self, name: str, model, loss: Callable, rate: float, batches: Iterator):
        self.run, self.loss, self.rate, self.batches = Run(name, model), loss, rate, batches
        self.opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], fused=True)

    def step(self, share: float):
        self.opt.param_groups[0]["lr"] = self.rate * (1 + math.cos(math.pi * share)) / 2
        self.opt.zero_grad()
        self.loss(self.run.model, *next(self.batches)).backward()
        self.opt.step()


def race(contestants: list, validate: Callable, steps: int):
    """`steps` of the first, and of the others after each of them as many as take the same time.

    In turn, so that whatever else the machine does slows all of them.
    """
    looks = {round(steps * k / LOOKS) for k in range(LOOKS + 1)}
    first = contestants[0].run
    for n in range(steps + 1):
        for one in contestants:
            run = one.run
            while run.steps < n if run is first else run.seconds < first.seconds:
                began = perf_counter()
                one.step((n - 1) / steps)
                run.seconds += perf_counter() - began
                run.steps += 1
            if n in looks:
                with one.averaged():
                    run.look(validate(run.model))
    for one in contestants:
        one.run.model.load_state_dict(one.run.weights)


def compare(build, make, loss, batches, validate, steps, rates=(3e-3, 1e-2, 3e-2), suffix="") -> list[Run]:
    """LM for `steps`, and Adam for the same time with the best of the rates.

    build()                      a new model, the same each time
    make(model)                  LM for it
    loss(model, inputs, targets) what Adam minimises, the same as LM's
    batches()                    (inputs, targets) without end
    validate(model)              the loss on validation data
    """
    model = build()
    lm = ByLM(f"LM{suffix}", model, make(model), batches())
    adams = [ByAdam(f"Adam{suffix}, rate {rate:g}", build(), loss, rate, batches()) for rate in rates]
    race([lm, *adams], validate, steps)
    return [lm.run, min((adam.run for adam in adams), key=lambda run: run.best)]


def report(runs: list[Run], *figures: tuple[str, Callable, Callable]) -> list[list[float]]:
    """The table and who is best; a figure on test data has a name, measure(model), and min or max for the best."""
    width = max(len(run.name) for run in runs) + 2
    names = "".join(f"{name:>{len(name) + 3}}" for name, *_ in figures)
    print(f"{'':{width}}{'steps':>7}{'seconds':>9}{'loss before':>13}{'loss after':>12}{names}")
    found = [[measure(run.model) for run in runs] for _, measure, _ in figures]
    for n, run in enumerate(runs):
        row = f"{run.name:{width}}{run.steps:>7}{run.seconds:>9.1f}{run.course[0][1]:>13.3g}{run.best:>12.3g}"
        print(row + "".join(f"{of[n]:>{len(name) + 3}.3g}" for (name, *_), of in zip(figures, found, strict=True)))
    for (name, _, best), of in zip(figures, found, strict=True):
        first = [run.name for run, value in zip(runs, of, strict=True) if f"{value:.3g}" == f"{best(of):.3g}"]
        print(f"best {name}: {' and '.join(first)}")
    return found


def draw(axes, runs: list[Run], ylabel="validation loss"):
    """The validation loss of each run over the seconds of training."""
    for run in runs:
        seconds, losses = zip(*run.course, strict=True)
        axes.plot(seconds, losses, color=COLOURS[run.name.partition(",")[0]], label=run.name)
    wide = max(run.course[0][1] / run.best for run in runs) > 10
    axes.set(xlabel="seconds of training", ylabel=ylabel, yscale="log" if wide else "linear")
    axes.legend(fontsize="small")


def panels(*widths: float, height=3.2):
    """A figure with panels side by side."""
    figure = Figure(figsize=(10, height), layout="constrained", dpi=100)
    return figure, figure.subplots(1, len(widths), width_ratios=widths)
