"""The picture of the README: the paper's noisy sine, fitted by LM, L-BFGS, Adam and torch-levenberg-marquardt.

    python benchmarks/sine.py                # runs, writes docs/figures/sine.json and draws: five minutes on one core
    python benchmarks/sine.py draw           # the pictures alone, from what was written; needs matplotlib
    python benchmarks/sine.py --quick --out /tmp/sine

The contestants are those of benchmarks/arena.py, among them `mq.LM(model, "mse")` without any setting. The rates of
Adam and of torch-levenberg-marquardt are the best of a grid, in the median of seeds that are not shown, once for the
seconds and once for the 200 steps; Adam's falls to 0 as a cosine over either. All start from the same weights. Within a
seed they take turns, a block of steps each, so that all see the same state of the machine. The clock of each runs while
it is built and while it steps, and stands while it is evaluated; it counts the time that this process has a core, since
other programs may want it too. The error is the mean squared error on the data, of which the noise alone has 0.0033.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import measure
from contest.contestants import CONTESTANTS, Contestant, Feed, Method, fed
from contest.tasks import Problem, Rows, Score
from marquardt.paper import problems
from marquardt.paper.methods import Peer

SHOWN = range(1000, 1009)  # seeds
TRIED = range(3)  # those on which rates are chosen
SECONDS = 4.0
LOOKS = (5, 20, 50, 200)  # steps after which the fit is shown
MARKS = 10  # evaluations in each tenfold of seconds
FIRST = 0.01  # seconds
BLOCK = 5  # steps in a turn; L-BFGS takes 20, a call
EVERY = 10  # of the points are drawn
FOLDER = Path(__file__).parents[1] / "docs" / "figures"

ADAM_RATES = (0.015, 0.06, 0.2, 0.6)
PEER_RATES = (0.1, 0.3, 1.0)  # 1 is its default


def peer(problem: Problem, seed: int, rate: float) -> Method:
    """Its defaults but for the rate, with its fastest solver."""
    trainer = Peer(problem.model, problem.loss, {"lr": rate, "lam": 1e-3, "attempts": 10, "average": None})
    return Method(fed(trainer.step, Feed(problem, seed)))


LM, ADAM, PEER = "LM", "Adam", "torch-levenberg-marquardt"
TAKE_PART = {
    LM: CONTESTANTS["LM"],
    PEER: Contestant(PEER, peer, PEER_RATES),
    "L-BFGS": CONTESTANTS["L-BFGS"],
    ADAM: Contestant(ADAM, CONTESTANTS["Adam"].build, ADAM_RATES),
}


# --- runs ---


class Entry(NamedTuple):
    name: str
    rate: float


def problem(seed: int) -> Problem:
    x, y = problems.sine(seed)
    return Problem(problems.sine_mlp(seed), Rows(x, y), lambda model: Score(error(model, x, y), *2 * (float("nan"),)))


def error(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    return problems.mean_squared_error(model, x, y)


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = run()
    return time.process_time() - started, result


def by_seconds(entry: Entry, seed: int, budget: float) -> Iterator[list[tuple[float, int, float]]]:
    """The (seconds, steps, error) so far, after every turn."""
    posed, found = problem(seed), []
    seconds, method = timed(lambda: TAKE_PART[entry.name].build(posed, seed, entry.rate))
    steps, mark = 0, FIRST
    while not steps or seconds < budget:
        share, count = seconds / budget, max(method.least, BLOCK) if steps else 1
        took, taken = timed(lambda share=share, count=count: method.run(share, count))
        seconds, steps = seconds + took, steps + taken
        if seconds >= min(mark, budget):
            with method.evaluated():
                found.append((round(seconds, 4), steps, rounded(posed.scores(posed.model).loss)))
            while mark <= seconds:
                mark *= 10 ** (1 / MARKS)
        yield found


def by_steps(entry: Entry, seed: int, looks: Sequence[int]) -> list[tuple[float, list[float]]]:
    """The error and the fit after so many steps each, as part of one run."""
    posed, found, steps = problem(seed), [], 0
    method = TAKE_PART[entry.name].build(posed, seed, entry.rate)
    for look in looks:
        while steps < look:
            steps += method.run(steps / looks[-1], 1)
        with method.evaluated():
            z = problems.predict(posed.model, posed.train.x).flatten()
            found.append((rounded(posed.scores(posed.model).loss), [round(v, 3) for v in z[::EVERY].tolist()]))
    return found


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def in_turns(entries: Sequence[Entry], seed: int, budget: float) -> dict[Entry, list[tuple[float, int, float]]]:
    running = {entry: by_seconds(entry, seed, budget) for entry in entries}
    found: dict[Entry, list[tuple[float, int, float]]] = {}
    while running:
        for entry in list(running):
            turn = next(running[entry], None)
            if turn is None:
                del running[entry]
            else:
                found[entry] = turn
    return found


def best(rates: Sequence[float], errors: Callable[[float], Sequence[float]]) -> float:
    return min(rates, key=lambda rate: statistics.median(errors(rate)))


def chosen(budget: float, seeds: Sequence[int]) -> dict[str, dict[str, float]]:
    """A rate for each that has some, for the seconds and for the steps; nan for the others."""
    tried = [Entry(name, rate) for name, taking in TAKE_PART.items() for rate in taking.rates]
    runs = [in_turns(tried, seed, budget) for seed in seeds]

    def after_seconds(name: str) -> Callable[[float], list[float]]:
        return lambda rate: [run[Entry(name, rate)][-1][2] for run in runs]

    def after_steps(name: str) -> Callable[[float], list[float]]:
        return lambda rate: [by_steps(Entry(name, rate), seed, LOOKS)[-1][0] for seed in seeds]

    return {
        kind: {name: best(taking.rates, of(name)) for name, taking in TAKE_PART.items() if taking.rates}
        for kind, of in (("seconds", after_seconds), ("steps", after_steps))
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    described = measure.start(options)
    budget, tried, shown = options.seconds, list(options.tried), list(options.shown)
    for name, taking in TAKE_PART.items():  # imports and kernels are not part of anybody's time
        by_steps(Entry(name, taking.rates[0] if taking.rates else float("nan")), 0, [2])
    rates = chosen(budget, tried)
    measure.note(f"rates: {rates}")

    entries = [Entry(name, rates["seconds"].get(name, float("nan"))) for name in TAKE_PART]
    courses: dict[str, dict[int, Any]] = {name: {} for name in TAKE_PART}
    for k, seed in enumerate(shown):
        turned = entries[k % len(entries) :] + entries[: k % len(entries)]
        for entry, course in in_turns(turned, seed, budget).items():
            courses[entry.name][seed] = course
            measure.note(f"{entry.name}, seed {seed}: {course[-1]}")

    fits = {
        name: {seed: by_steps(Entry(name, rates["steps"].get(name, float("nan"))), seed, LOOKS) for seed in shown}
        for name in (LM, ADAM)
    }
    middle = sorted(shown, key=lambda seed: fits[LM][seed][-1][0])[len(shown) // 2]
    x, y = (values.flatten()[::EVERY].tolist() for values in problems.sine(middle))
    return {
        "machine": described, "noise": problems.SINE_NOISE_FLOOR, "budget": budget, "tried": tried, "rates": rates,
        "courses": courses,  # of each contestant and seed: seconds, steps, error
        "errors": {name: {seed: [e for e, _ in looks] for seed, looks in runs.items()} for name, runs in fits.items()},
        "fits": {
            "seed": middle, "looks": LOOKS, "x": [round(v, 2) for v in x], "y": [round(v, 3) for v in y],
            **{name: [z for _, z in runs[middle]] for name, runs in fits.items()},
        },
    }  # fmt: skip


# --- the picture ---


class Theme(NamedTuple):
    ink: str
    quiet: str
    points: str
    colours: dict[str, str]


THEMES = {
    "light": Theme(
        "#1c2126", "#59636e", "#98a1ab", {LM: "#c8490a", ADAM: "#0b6bb0", "L-BFGS": "#59636e", PEER: "#8b4d9e"}
    ),
    "dark": Theme(
        "#e4e8ec", "#9aa5b1", "#737e89", {LM: "#ff8f50", ADAM: "#62b8f2", "L-BFGS": "#aab4be", PEER: "#cf9be0"}
    ),
}


def draw(log: dict[str, Any], folder: Path) -> list[Path]:
    import matplotlib
    from matplotlib.figure import Figure

    written = []
    for theme, look in THEMES.items():
        with matplotlib.rc_context(style(look)):
            figure = Figure((10, 3.7))
            cells = figure.add_gridspec(2, 4, left=0.045, right=0.555, top=0.84, bottom=0.03, wspace=0.06, hspace=0.08)
            fits(figure, cells, log, look)
            (cell,) = figure.add_gridspec(1, 1, left=0.63, right=0.985, top=0.84, bottom=0.135)
            over_seconds(figure.add_subplot(cell), log, look)
            drawn = io.StringIO()
            figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
            written.append(folder / f"sine-{theme}.svg")
            written[-1].write_text(short(drawn.getvalue()), "utf-8")
    return written


def short(svg: str) -> str:
    """With two decimals in places, a hundredth of a pixel, in the stead of six; factors stay."""
    places = re.compile(r'(?<= )(?:d|x|y)="[^"]*"')
    return places.sub(lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), svg)


def style(look: Theme) -> dict[str, Any]:
    inks = ("axes.labelcolor", "axes.titlecolor", "text.color", "xtick.color", "ytick.color")
    return {
        "axes.edgecolor": look.quiet, "axes.spines.right": False, "axes.spines.top": False, "font.size": 10,
        "axes.titlesize": 11, "axes.linewidth": 0.6, "svg.hashsalt": "marquardt", **dict.fromkeys(inks, look.ink),
    }  # fmt: skip


def fits(figure: Any, cells: Any, log: dict[str, Any], look: Theme) -> None:
    shown = log["fits"]
    errors = {name: log["errors"][name][str(shown["seed"])] for name in (LM, ADAM)}
    for row, name in enumerate((LM, ADAM)):
        for column, steps in enumerate(shown["looks"]):
            axes = figure.add_subplot(cells[row, column], xticks=[], yticks=[], ylim=(-2.1, 1.75))
            axes.plot(shown["x"], shown["y"], ".", color=look.points, markersize=2.6, markeredgewidth=0)
            axes.plot(shown["x"], shown[name][column], color=look.colours[name], linewidth=1.5)
            for spine in axes.spines.values():
                spine.set_visible(False)
            axes.text(0.5, 0.03, f"{errors[name][column]:.2g}", transform=axes.transAxes, ha="center", color=look.quiet)
            if row == 0:
                axes.set_title(f"{steps} steps", pad=5, fontsize=10)
            if column == 0:
                axes.set_ylabel(name, color=look.colours[name], fontsize=12, fontweight="bold")
    figure.text(0.012, 0.95, "A noisy sine, after equal steps", fontsize=12, fontweight="bold")


def over_seconds(axes: Any, log: dict[str, Any], look: Theme) -> None:
    """The median of the seeds, of each the last error that was known at that time."""
    axes.set(xscale="log", yscale="log", xlim=(0.02, log["budget"]), ylim=(0.0024, 1.4))
    decades = math.log10(log["budget"] / FIRST)
    times = [FIRST * 10 ** (k / MARKS) for k in range(math.ceil(decades * MARKS - 0.5))] + [log["budget"]]
    for name, runs in log["courses"].items():
        middle = [(t, statistics.median(known)) for t in times if (known := at(t, runs.values()))]
        axes.plot(*zip(*middle, strict=True), color=look.colours[name], linewidth=2.4 if name == LM else 1.4)
        axes.text(
            *LABELS[name], name.replace("-m", "-\nm"), color=look.colours[name], ha="left", va="center",
            fontweight="bold" if name == LM else None,
        )  # fmt: skip
    axes.axhline(log["noise"], color=look.quiet, linewidth=0.7, linestyle=(0, (4, 3)))
    axes.text(0.021, log["noise"] * 0.96, "the noise alone", color=look.quiet, va="top", fontsize=9)
    axes.set_xlabel("seconds, one core")
    axes.set_xticks([0.1, 1], ["0.1", "1"])
    axes.set_yticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])
    axes.figure.text(0.582, 0.95, "Mean squared error over seconds", fontsize=12, fontweight="bold")


LABELS = {LM: (0.21, 0.012), PEER: (0.024, 0.11), "L-BFGS": (1.5, 0.035), ADAM: (1.3, 0.16)}  # where their names stand


def at(moment: float, courses: Any) -> list[float]:
    """The errors known then; none until every run has one."""
    known = [[e for seconds, _, e in course if seconds <= moment] for course in courses]
    return [errors[-1] for errors in known] if all(known) else []


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = measure.parser(__doc__)
    parser.add_argument("command", nargs="?", choices=["run", "draw"], default="run")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of log and pictures (default docs/figures)")
    options = parser.parse_args(given)
    options.threads = options.threads or 1
    options.seconds, options.tried, options.shown = SECONDS, TRIED, SHOWN
    if options.quick:
        options.seconds, options.tried, options.shown = 0.3, TRIED[:1], SHOWN[:1]
    return options


def main() -> None:
    options = arguments()
    log = options.out / "sine.json"
    if options.command == "run":
        options.out.mkdir(parents=True, exist_ok=True)
        warnings.simplefilter("ignore")
        text = json.dumps(measure.plain(run(options)), ensure_ascii=False, allow_nan=False)
        log.write_text(text + "\n", "utf-8")
    for path in draw(json.loads(log.read_text("utf-8")), options.out):
        print(path)


if __name__ == "__main__":
    main()
