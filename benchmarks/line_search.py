"""The line search after a failed step: what the paper's 72-point grid costs, and how close other searches come to it.

    python benchmarks/line_search.py --data ~/data --device cuda
    python benchmarks/line_search.py --data ~/data --searches Bracket "Backtracking(factor=0.3, trials=12)" Grid
    python benchmarks/line_search.py --data ~/data --quick

mq.presets.paper trains the paper's CNN on batches of 600, from several λ₀: at the paper's λ₀ = 1 steps fail seldom or
never, the smaller λ₀ the more of them do. On every step whose full step fails, the losses on the grid are recorded;
then every search runs on the same line through the same model, with the same random numbers, and its evaluations are
counted. Training goes on with the grid's choice, so all searches meet the same cases.

A search comes within 1 % where the loss it ends with (the loss before the step, where it finds nothing) is at most 1.01
times the least of the grid (or the loss before, where the whole grid is higher). "None" ends where it began: what the
criterion gives away for nothing.
"""

from __future__ import annotations

import argparse
import ast
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import marquardt as mq
import measure
from marquardt.jacobian.linearization import Trials
from marquardt.paper import problems
from marquardt.paper.data import Digits, data_directory
from measure import Verdict

BATCH = 600  # the paper's
LAMS = (1.0, 1e-2, 1e-3, 1e-4)  # λ₀; the paper's is 1
DEFAULT = ("Grid", "Backtracking", "Bracket")
NEAR = 0.01
EVALUATIONS, SHARE = 12, 95.0  # what a bracketing search must do: this many at most, on this many percent of the cases
FORWARDS = 10.0  # what the grid may cost on a GPU, in forward passes

Along = Callable[[Sequence[float]], list[float]]


# --- searches, by name ---


def find_search(text: str) -> Any:
    """`Backtracking` or `Backtracking(factor=0.3)`: the object of that name in marquardt, or a LookupError."""
    try:
        tree = ast.parse(text, mode="eval").body
        call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
        name = call.func.id
        keywords = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, AttributeError, ValueError) as error:
        raise LookupError(f"{text!r} is no line search: write Name or Name(option=value)") from error
    kind = getattr(mq, name, None)
    if kind is None or not hasattr(kind, "search"):
        known = sorted(n for n in mq.__all__ if hasattr(getattr(mq, n), "search"))
        raise LookupError(f"marquardt has no line search {name} (yet): it has {', '.join(known)}")
    return kind(**keywords)


# --- recording ---


@dataclass
class Outcome:
    """One search on one case."""

    rate: float | None  # None: nothing found
    loss: float  # where it ends
    evaluations: int
    calls: int  # of the model, batched or not

    def record(self) -> dict[str, Any]:
        return vars(self)


@dataclass
class Case:
    """One step whose full step failed."""

    lam: float  # λ₀ of its run
    seed: int
    step: int
    loss: float  # before
    losses: list[float]  # on the grid
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def best(self) -> float:
        """Where the paper's rule ends: the least of the grid, or where it began."""
        return min([self.loss, *(f for f in self.losses if math.isfinite(f))])

    def near(self, name: str) -> bool:
        return self.outcomes[name].loss <= (1 + NEAR) * self.best

    def record(self) -> dict[str, Any]:
        return vars(self) | {"best": self.best}


class Recorder:
    """A line search that takes the grid's choice, and lets others try on the same line before."""

    def __init__(self, searches: dict[str, Any]) -> None:
        self.grid, self.searches = mq.Grid(), searches
        self.along_step = self.grid.along_step
        self.cases: list[Case] = []
        self.run = (math.nan, 0)  # λ₀ and seed
        self.step = 0

    def search(self, along: Along, loss: float, *arguments: Any, **options: Any) -> tuple[float, float] | None:
        case = Case(*self.run, self.step, loss, along(self.grid.rates))
        for name, search in self.searches.items():
            asked: list[int] = []

            def counted(rates: Sequence[float], asked: list[int] = asked) -> list[float]:
                asked.append(len(rates))
                return along(rates)

            found = search.search(counted, loss, *arguments, **options)
            rate, end = (None, loss) if found is None else found
            case.outcomes[name] = Outcome(rate, end, sum(asked), len(asked))
        case.outcomes["None"] = Outcome(None, loss, 0, 0)
        self.cases.append(case)
        return self.grid.search(lambda _: case.losses, loss)


def record(data: Digits, searches: dict[str, Any], options: argparse.Namespace) -> tuple[list[Case], Counter]:
    """Failed steps, as many from each λ₀ where there are enough, and the number of steps taken from each λ₀."""
    recorder, taken = Recorder(searches), Counter[float]()
    share = math.ceil(options.cases / len(options.lams))
    for lam in options.lams:
        enough = len(recorder.cases) + share
        for seed in range(options.seed, options.seed + options.seeds):
            model = problems.mnist_cnn(seed, device=options.device)
            torch.manual_seed(seed)  # RReLU's noise
            schedule = mq.RelativeDecrease(initial=lam)
            opt = mq.presets.paper(model, "cross_entropy", schedule=schedule, line_search=recorder)
            recorder.run = (lam, seed)
            for k, (x, y) in enumerate(measure.mnist_batches(data, BATCH, seed)):
                if k == options.steps or len(recorder.cases) == enough:
                    break
                recorder.step = k
                opt.step(x, y)
                taken[lam] += 1
            measure.note(f"λ₀ = {lam:g}, seed {seed}: {len(recorder.cases)} failed steps so far")
    return recorder.cases, taken


# --- the cost of the grid ---


def cost(data: Digits, options: argparse.Namespace, rounds: int) -> dict[str, measure.Timing]:
    """72 points on one line beside one forward pass of the batch, without gradients."""
    model = problems.mnist_cnn(options.seed, device=options.device)
    x, y = next(measure.mnist_batches(data, BATCH, options.seed))
    lin = mq.linearize(model, "cross_entropy", x, y, rows=mq.Empirical())
    direction = -lin.gradient
    rates = mq.Grid().rates

    def forward() -> None:
        with torch.no_grad():
            model(x)

    def grid() -> None:
        Trials(lin).losses(direction, rates)

    contestants = {"one forward pass": forward, f"grid of {len(rates)}": grid}
    timings = measure.interleave(contestants, rounds, options.device, warmup=1 if options.quick else 3)
    lin.close()
    return timings


# --- figures ---


def summary(name: str, cases: list[Case]) -> list[str]:
    own = [case.outcomes[name] for case in cases]
    evaluations = [o.evaluations for o in own]
    shares = [  # of the decrease that the grid finds
        (c.loss - c.outcomes[name].loss) / (c.loss - c.best) for c in cases if c.best < c.loss
    ]
    return [
        name,
        f"{100 * near(name, cases):.1f} %",
        f"{measure.median(evaluations):g}",
        f"{max(evaluations)}",
        f"{measure.median([o.calls for o in own]):g}",
        f"{100 * both(name, cases):.1f} %",
        f"{100 * measure.median(shares):.1f} %" if shares else "–",
    ]


def near(name: str, cases: list[Case]) -> float:
    return sum(case.near(name) for case in cases) / len(cases)


def both(name: str, cases: list[Case]) -> float:
    """The share of the cases that end within 1 % after at most 12 evaluations."""
    return sum(case.near(name) and case.outcomes[name].evaluations <= EVALUATIONS for case in cases) / len(cases)


def arguments() -> argparse.Namespace:
    parser = measure.parser(__doc__)
    add = parser.add_argument
    add("--data", type=Path, default=data_directory(), help="MNIST's folder (default: MARQUARDT_DATA)")
    add("--searches", nargs="+", metavar="NAME", help=f"line searches of marquardt (default {' '.join(DEFAULT)})")
    add("--cases", type=measure.positive, help="failed steps to record (default 100)")
    add("--lams", type=float, nargs="+", help=f"λ₀ of the runs (default {' '.join(f'{lam:g}' for lam in LAMS)})")
    add("--seeds", type=measure.positive, help="at most this many runs of each λ₀ (default 3)")
    add("--steps", type=measure.positive, help="of each run at most (default 100)")
    add("--rounds", type=measure.positive, help="timings of the grid (default 20)")
    options = parser.parse_args()
    options.cases = options.cases or (3 if options.quick else 100)
    options.lams = options.lams or ([1e-3] if options.quick else list(LAMS))
    options.seeds = options.seeds or (1 if options.quick else 3)
    options.steps = options.steps or (12 if options.quick else 100)
    return options


def main() -> None:
    options = arguments()
    described = measure.start(options)
    searches, notes = {}, []
    for text in options.searches or DEFAULT:
        try:
            searches[text] = find_search(text)
        except LookupError as error:
            notes.append(str(error))
            measure.note(str(error))
    data = measure.load_mnist(options.data, options.device)

    timings = cost(data, options, options.rounds or (2 if options.quick else 20))
    (_, forward), (grid_name, grid) = timings.items()
    forwards = grid.median / forward.median
    cuda = options.device.type == "cuda"
    judged = [Verdict(f"{grid_name}, in forward passes", forwards, "≤" if cuda else "", FORWARDS)]
    head = ["time", "median, ms", "quartiles, ms", "forward passes"]
    rows = [
        [name, measure.milliseconds(t.median), measure.span(t), measure.number(t.median / forward.median)]
        for name, t in timings.items()
    ]
    print(measure.markdown(head, rows), end="\n\n", flush=True)

    cases, taken = record(data, searches, options)
    if not cases:
        notes.append(f"None of {taken.total()} steps failed: nothing to search. Smaller --lams bring some.")
    else:
        head = [
            "search", "within 1 %", "evaluations", "at most", "calls",
            f"within 1 % in ≤ {EVALUATIONS}", "of the grid's decrease",
        ]  # fmt: skip
        print(measure.markdown(head, [summary(name, cases) for name in [*searches, "None"]]), end="\n\n")
        for name in searches:
            value, target = 100 * both(name, cases), "≥" if name.startswith("Bracket") else ""
            judged.append(Verdict(f"{name}: within 1 % in ≤ {EVALUATIONS} evaluations, %", value, target, SHARE))
        useful = sum(case.best < case.loss for case in cases)
        notes.append(f"{len(cases)} failed steps; on {useful} of them the grid finds a lower loss.")
        for lam, steps in taken.items():
            notes.append(f"λ₀ = {lam:g}: {sum(case.lam == lam for case in cases)} failed of {steps} steps.")
    print(measure.verdicts(judged), "\n".join(notes), sep="\n\n")
    measure.write(
        options, described, rates=mq.Grid().rates, cost=timings, cases=cases, steps=taken, verdicts=judged, notes=notes
    )


if __name__ == "__main__":
    main()
