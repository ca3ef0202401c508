"""`marquardt paper`: runs the paper's experiments, tunes the optimizers, writes the report."""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import rich.console
import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.constrain import Constrain
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from .. import files
from ..paper import data, logs, runs
from ..paper import tune as tuning
from ..paper.methods import Unavailable
from ..paper.runs import Run
from ..paper.vocabulary import CONTENT, EXPERIMENTS, LOGS, OPTIMIZERS, OUT, TARGET_LABEL, TUNED
from .base import Console, Debug, complain, error_messages, make_folder, say

EXTRA = "paper"
REFRESH = 0.2  # seconds between two pictures of a run


class Experiment(str, Enum):
    sine = "sine"
    mnist = "mnist"
    ablation = "ablation"
    swapped = "swapped"
    all = "all"


class TuningProblem(str, Enum):
    sine = "sine"
    mnist = "mnist"


ImageSet = Literal["mnist", "mnist-5k", "digits"]


class PaperGroup(TyperGroup):
    """`marquardt paper sine --full` stands for `marquardt paper run sine --full`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


paper = typer.Typer(cls=PaperGroup)


def usable(device: str) -> str:
    try:
        torch.zeros(1, device=device).item()
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise typer.BadParameter(f"{device!r} cannot be used here ({reason}); --device cpu always can") from None
    return device


Optimizers = Annotated[
    list[str] | None,
    typer.Option("--optimizers", metavar="NAME,…", help="These only, for example lm,adam.", show_default="all"),
]
Device = Annotated[str, typer.Option("--device", callback=usable, help="cpu, cuda, cuda:1, …")]
Images = Annotated[ImageSet, typer.Option("--data", help="mnist-5k: 5,000 of MNIST. digits: scikit-learn's 8×8.")]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", exists=True, file_okay=False, help="Where MNIST is.", show_default="searched, then downloaded"
    ),
]
Out = Annotated[Path, typer.Option("--out", file_okay=False, help="Logs and report go here.")]


@paper.callback()
def paper_group() -> None:
    """Reproduce the paper: run its experiments, tune the optimizers, write the report.

    The word run can be left out: `marquardt paper`, `marquardt paper sine mnist --full`.
    `marquardt paper run --help` shows the options.
    """


@paper.command()
def run(
    experiments: Annotated[list[Experiment] | None, typer.Argument(help="What to run.", show_default="all")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Minutes on two cores; this is the default.")] = False,
    full: Annotated[bool, typer.Option("--full", help="10 seeds (sine 20) at full length.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds each method gets.")] = None,
    optimizers: Optimizers = None,
    device: Device = "cpu",
    images: Images = "mnist",
    data_dir: Data = None,
    out: Out = OUT,
    debug: Debug = False,
) -> None:
    """Run experiments and write the report.

    Stop at any time: the same command goes on where it was, and skips what is done.
    A folder is for one process at a time; a second one is told which process has it.
    Every method runs with its default settings and with tuned ones: those that come with the package, or what
    `marquardt paper tune` has left in the output folder.
    """
    if quick and full:
        raise typer.BadParameter("--quick and --full exclude each other: choose one", param_hint="--quick")
    with error_messages(debug, EXTRA):
        from ..paper import report  # it needs packages that the runs do not: they are missed now, not after an hour

        asked = [experiment.value for experiment in experiments or [Experiment.all]]
        names = list(EXPERIMENTS) if "all" in asked else list(dict.fromkeys(asked))
        tuned = runs.winners(out / TUNED if (out / TUNED).exists() else runs.WINNERS)
        options: dict[str, Any] = {"full": full, "seeds": seeds, "device": device, "tuned": tuned}
        methods = check_methods(optimizers, runs.plan(names, **options))
        plan = runs.plan(names, methods=methods, **options)
        digits = find_data(plan, out, images, data_dir)
        make_folder(out)
        with runs.held(out):
            failed = execute(plan, out, digits)
        say(Console(), f"Report: {report.write(out)}")
        if failed:
            complain(f"{failed} of {len(plan)} runs failed; the same command tries them again")
            raise typer.Exit(1)


def check_methods(optimizers: Sequence[str] | None, plan: Sequence[Run]) -> list[str] | None:
    """The names asked for, if all of them occur in the plan."""
    if not optimizers:
        return None
    asked = [name.strip() for several in optimizers for name in several.split(",")]
    planned = {run.method for run in plan}
    known = [name for name in OPTIMIZERS if name in planned]
    if not known:
        raise typer.BadParameter("the ablation has methods of its own: leave this out", param_hint="--optimizers")
    for name in asked:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint="--optimizers")
    return asked


def execute(plan: Sequence[Run], out: Path, digits: data.Digits | None) -> int:
    """Makes the runs that are not done yet, and returns how many of them failed."""
    todo = {run.name for run in plan if not runs.done(run, out, digits)}
    screen = Screen(Console(), plan, len(todo))
    if digits is not None:
        screen.say(f"Data: {digits.name}, {digits.source}")
    if len(todo) < len(plan):
        screen.say(f"{len(plan) - len(todo)} of {len(plan)} runs are done already.")
    failed = 0
    try:
        with screen.on():
            for run in plan:
                if run.name not in todo:
                    screen.add(run, logs.read(run.log(out)))
                    continue
                screen.start(run)
                log = runs.execute(run, out, digits, partial(screen.step, run))
                screen.end(run, log)
                failed += log.status == "failed"
    except KeyboardInterrupt:
        screen.print_unfinished()
        again = shlex.join(["marquardt", *sys.argv[1:]])
        draw = shlex.join(["marquardt", "paper", "report", *([] if out == OUT else ["--out", str(out)])])
        screen.say(
            f"Stopped: {len(plan) - len(todo) + screen.done} of {len(plan)} runs are done and kept in {out / LOGS}.\n"
            f"Go on: {again}\n"
            f"Report so far: {draw}"
        )
        raise typer.Exit(130) from None
    return failed


def find_data(plan: Sequence[Run], out: Path, name: str, directory: Path | None) -> data.Digits | None:
    """The images that runs of the plan need; the sine has none.

    If `out` holds runs on other images than those found now, this is refused: one report cannot compare them.
    """
    digits = data.find(name, directory) if any(run.problem != "sine" for run in plan) else None
    for log in logs.read_all(out):
        before = log.head["data"]["name"]
        if digits is not None and log.head["problem"] != "sine" and digits.name != before:
            raise typer.BadParameter(
                f"{str(out)!r} holds runs on {before}, but the data found now are {digits.name} ({digits.source}): "
                "choose another folder, or the data of before",
                param_hint="--out",
            )
    return digits


@paper.command()
def tune(
    problems: Annotated[
        list[TuningProblem] | None, typer.Argument(help="What to tune on.", show_default="both")
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="How many settings each optimizer may try.")] = tuning.TRIALS,
    limit: Annotated[
        float, typer.Option(min=0.1, help="Seconds of training at which a trial is cut off.", show_default="none")
    ] = math.inf,
    optimizers: Optimizers = None,
    device: Device = "cpu",
    data_dir: Data = None,
    out: Out = OUT,
    debug: Debug = False,
) -> None:
    """Tune every optimizer with the same number of trials.

    The next run uses the winners, beside the default settings. Each is kept as soon as it is found.
    """
    with error_messages(debug, EXTRA):
        chosen = [problem.value for problem in problems or TuningProblem]
        plan = runs.plan(chosen, seeds=1)
        asked = check_methods(optimizers, plan)
        jobs = [(run.problem, run.method) for run in plan if asked is None or run.method in asked]
        if (out / TUNED).exists():
            runs.winners(out / TUNED)  # a damaged file is better found now than when there is a winner to add
        images = data.find("mnist", data_dir) if "mnist" in chosen else None
        make_folder(out)
        console = Console()
        bars = Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console)
        failed = 0
        with files.held(out, "winners"), bars:
            bar = bars.add_task("", total=trials * len(jobs))
            for number, (problem, method) in enumerate(jobs, 1):
                bars.update(bar, description=f"{problem}, {OPTIMIZERS[method]}")
                try:
                    best = tuning.tune(
                        [method], problem, trials=trials, data=images if problem == "mnist" else None,
                        device=device, limit=limit, watch=lambda _: bars.advance(bar),
                    )  # fmt: skip
                except Unavailable:  # Optuna is missing; a method whose package is missing has no winner, and no error
                    raise
                except RuntimeError as error:
                    failed += 1
                    result = f"failed ({error})"
                else:
                    tuning.save(out / TUNED, problem, best)
                    result = json.dumps(best[method]) if best else "not available"
                say(console, f"{problem}/{method}: {result}")
                bars.update(bar, completed=number * trials)
        if failed:
            complain(f"{failed} of {len(jobs)} searches found nothing; more --trials may help")
            raise typer.Exit(1)
        say(console, f"Winners: {out / TUNED}")


@paper.command("report")
def write_report(out: Out = OUT, debug: Debug = False) -> None:
    """Draw figures, tables and the page again, from the logs alone, or from report.json if there are none."""
    with error_messages(debug, EXTRA):
        from ..paper import report

        if not logs.read_all(out) and not (out / CONTENT).exists():
            raise typer.BadParameter(
                f"{str(out / LOGS)!r} holds no run: marquardt paper makes them", param_hint="--out"
            )
        say(Console(), f"Report: {report.write(out)}")


# --- what is on the screen while it runs: a table that fills in and two bars, or a line for each run ---


def final(log: logs.Log, key: str) -> float:
    """A run that did not finish counts as worse than any: an infinite loss, an accuracy of −∞."""
    return logs.or_worst(log.final(key) if log.status == "finished" else math.nan, key)


Column = tuple[str, Callable[[logs.Log], float]]  # how a number is written, and which it is of a run
SECONDS: Column = ("{:.1f}", lambda log: log.final("seconds"))
RESULTS: dict[str, dict[str, Column]] = {
    "sine": {"MSE": ("{:.3g}", lambda log: final(log, "train_loss")), "seconds": SECONDS},
    "mnist": {
        f"{TARGET_LABEL} at": ("{:g}", logs.Log.steps_to),
        "accuracy": ("{:.2%}", lambda log: final(log, "test_accuracy")),
        "seconds": SECONDS,
    },
}


@dataclass
class Row:
    """One line of a table: the seeds of one method in one column."""

    label: str
    problem: str
    seeds: int = 0
    ended: list[logs.Log] = field(default_factory=list)
    running: bool = False

    def cells(self) -> list[Text | str]:
        tried = logs.attempted(self.ended)
        medians = [(form, median(map(of, tried)) if tried else math.nan) for form, of in RESULTS[self.problem].values()]
        shown = [form.format(value) if 0 < value < math.inf else "–" for form, value in medians]
        return [self.label, self.status(), f"{len(self.ended)}/{self.seeds}", *shown]

    def status(self) -> Text:
        if self.running:
            return Text("running", "cyan")
        if not self.ended:
            return Text("waiting", "dim")
        if bad := Counter(log.status for log in self.ended if log.status != "finished"):
            counts = [status if n == self.seeds else f"{n} {status}" for status, n in bad.items()]
            return Text(", ".join(counts), "red" if "failed" in bad else "yellow")
        return Text("done", "green") if len(self.ended) == self.seeds else Text("under way", "cyan")


class Screen:
    """The table of the experiment that runs, and two bars below it; in a pipe, a line for each run.

    Drawn between two steps and never by another thread, which would take time from the steps that are timed.
    """

    def __init__(self, console: rich.console.Console, plan: Sequence[Run], todo: int) -> None:
        self.console, self.todo, self.done = console, todo, 0
        self.tables: dict[str, dict[tuple[str, str], Row]] = {}
        for run in plan:
            label = run.label if run.column == "default" else f"{run.label}, {run.column}"
            table = self.tables.setdefault(run.experiment, {})
            table.setdefault((run.method, run.column), Row(label, run.problem)).seeds += 1
        self.experiment = ""
        self.drawn = -math.inf
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[count]}", justify="right"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            speed_estimate_period=600,  # runs are of very different length
            expand=True,
            auto_refresh=False,
        )
        self.overall = self.progress.add_task("all runs", total=todo, count=f"0/{todo}")
        self.current = self.progress.add_task("", total=1.0, count="")
        self.live = Live(
            get_renderable=self.picture, console=console, auto_refresh=False, transient=True, vertical_overflow="crop"
        )

    def on(self) -> AbstractContextManager[Any]:
        return self.live if self.console.is_terminal else nullcontext()

    def row(self, run: Run) -> Row:
        return self.tables[run.experiment][run.method, run.column]

    def start(self, run: Run) -> None:
        self.experiment = run.experiment
        self.row(run).running = True
        name = f"{self.row(run).label}, seed {run.seed}"
        self.progress.reset(self.current, description=name, total=1 if run.steps else None, completed=0, count="step 0")
        self.draw()

    def step(self, run: Run, line: Mapping[str, Any]) -> None:
        if time.monotonic() - self.drawn < REFRESH:
            return
        # A run goes on until its steps and its seconds are over, or to its limit; 0 steps are one pass over the data.
        part = min(line["step"] / run.steps, 1.0) if run.steps else 0.0
        if run.seconds:
            part = min(line["seconds"] / run.seconds, part)
        part = min(max(line["seconds"] / run.limit, part), 1.0)
        self.progress.update(self.current, completed=part, count=f"step {line['step']}")
        self.progress.update(self.overall, completed=self.done + part)
        self.draw()

    def end(self, run: Run, log: logs.Log) -> None:
        self.done += 1
        self.progress.update(self.overall, completed=self.done, count=f"{self.done}/{self.todo}")
        if not self.live.is_started:
            self.say(f"{self.done}/{self.todo}  {run.name}: {log.summary()}")
        self.add(run, log)

    def add(self, run: Run, log: logs.Log) -> None:
        """To its table; and the table itself to the screen, once it is complete."""
        row = self.row(run)
        row.running = False
        row.ended.append(log)
        if all(len(row.ended) == row.seeds for row in self.tables[run.experiment].values()):
            self.experiment = ""  # takes the picture from the screen: the table then stands in its place
            self.draw()
            self.print_table(run.experiment)

    def say(self, text: str, style: str = "") -> None:
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def draw(self) -> None:
        self.drawn = time.monotonic()
        if self.live.is_started:
            self.live.refresh()

    def picture(self) -> Group:
        bars = Constrain(self.progress, self.console.width - 2)  # the terminal writes ^C behind the cursor
        if not self.experiment:
            return Group(bars)
        # Beside its rows the table has title, head, three rules and caption; a blank, two bars, one line stays free.
        return Group(self.table(self.experiment, max(self.console.height - 10, 1)), "", bars)

    def table(self, experiment: str, height: int = sys.maxsize) -> Table:
        """`height`: at most that many rows, those around the one that runs."""
        rows = list(self.tables[experiment].values())
        table = Table(
            title=experiment, title_justify="left", title_style="bold", caption_justify="left", box=SIMPLE_HEAD
        )
        table.add_column("method")
        table.add_column("status", no_wrap=True)
        for name in ("seeds", *RESULTS[rows[0].problem]):
            table.add_column(name, justify="right", no_wrap=True)
        if len(rows) > height:
            table.caption = f"{height} of {len(rows)} methods"
            at = next((i for i, row in enumerate(rows) if row.running), 0)
            first = min(max(at - height // 2, 0), len(rows) - height)
            rows = rows[first : first + height]
        for row in rows:
            table.add_row(*row.cells(), style="bold" if row.running else "")
        return table

    def print_unfinished(self) -> None:
        for experiment, rows in self.tables.items():
            for row in rows.values():
                row.running = False
            if 0 < sum(len(row.ended) for row in rows.values()) < sum(row.seeds for row in rows.values()):
                self.print_table(experiment)

    def print_table(self, experiment: str) -> None:
        rows = self.tables[experiment].values()
        self.console.print(self.table(experiment))
        if any(row.seeds > 1 for row in rows):
            self.say("Medians over the seeds; one that did not finish counts as the worst.", "dim")
        for row in rows:
            first = {log.status: log for log in reversed(row.ended) if log.message}
            for status, log in first.items():
                self.say(f"{row.label}, seed {log.seed}, {status}: {log.message}")
        self.say("")
