"""What `marquardt paper` shows while it runs: a table that fills in and two bars, or a line for each run."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.constrain import Constrain
from rich.live import Live
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from . import logs
from .plans import Run
from .vocabulary import TARGET_LABEL

REFRESH = 0.2  # seconds between two pictures of a run


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
        results = [("{:.3g}", [final(log, "train_loss") for log in tried])]
        if self.problem != "sine":
            results = [
                ("{:g}", [log.steps_to() for log in tried]),
                ("{:.2%}", [final(log, "test_accuracy") for log in tried]),
            ]
        results.append(("{:.1f}", [log.final("seconds") for log in tried]))
        medians = [(form, median(values) if values else math.nan) for form, values in results]
        shown = [form.format(value) if 0 < value < math.inf else "–" for form, value in medians]
        return [self.label, self.status(), f"{len(self.ended)}/{self.seeds}", *shown]

    def status(self) -> Text:
        if self.running:
            return Text("running", "cyan")
        if not self.ended:
            return Text("waiting", "dim")
        bad = Counter(log.status for log in self.ended if log.status != "finished")
        if bad:
            counts = [status if n == self.seeds else f"{n} {status}" for status, n in bad.items()]
            return Text(", ".join(counts), "red" if "failed" in bad else "yellow")
        return Text("done", "green") if len(self.ended) == self.seeds else Text("under way", "cyan")


def final(log: logs.Log, key: str) -> float:
    """A run that did not finish counts as worse than any: an infinite loss, an accuracy of −∞."""
    if log.status == "finished":
        return log.final(key)
    return math.inf if key.endswith("loss") else -math.inf


class Screen:
    """The table of the experiment that runs, and two bars below it; in a pipe, a line for each run.

    Drawn between two steps and never by a thread of its own, which would take time from the steps that are timed.
    """

    def __init__(self, console: Console, plan: Sequence[Run], todo: int) -> None:
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

    @contextmanager
    def on(self) -> Iterator[None]:
        if not self.console.is_terminal:
            yield
            return
        with self.live:
            yield

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
            self.say(f"{self.done}/{self.todo}  {run.name}: {summary(log)}")
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
        return Group(self.table(self.experiment, self.console.height - 10), "", bars)

    def table(self, experiment: str, height: int | None = None) -> Table:
        """`height`: at most that many rows, those around the one that runs."""
        rows = list(self.tables[experiment].values())
        sine = rows[0].problem == "sine"
        table = Table(
            title=experiment, title_justify="left", title_style="bold", caption_justify="left", box=SIMPLE_HEAD
        )
        table.add_column("method")
        table.add_column("status", no_wrap=True)
        for name in ["seeds", *(["MSE"] if sine else [f"{TARGET_LABEL} at", "accuracy"]), "seconds"]:
            table.add_column(name, justify="right", no_wrap=True)
        shown = slice(None)
        if height is not None and len(rows) > height:
            height = max(height, 1)
            at = next((i for i, row in enumerate(rows) if row.running), 0)
            first = min(max(at - height // 2, 0), len(rows) - height)
            shown = slice(first, first + height)
            table.caption = f"{height} of {len(rows)} methods"
        for row in rows[shown]:
            table.add_row(*row.cells(), style="bold" if row.running else "")
        return table

    def print_unfinished(self) -> None:
        for experiment, rows in self.tables.items():
            for row in rows.values():
                row.running = False
            ended, seeds = (sum(n) for n in zip(*((len(row.ended), row.seeds) for row in rows.values()), strict=True))
            if 0 < ended < seeds:
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


def summary(log: logs.Log) -> str:
    """How a run went, in one line."""
    if log.status != "finished":
        return f"{log.status} at step {log.end}" + (f" ({log.message})" if log.message else "")
    if "test_accuracy" in log.steps:
        reached = log.steps_to()
        steps = f"after {reached:g} steps" if math.isfinite(reached) else "not reached"
        result = f"{TARGET_LABEL} {steps}"
        result += f", {log.final('test_accuracy'):.2%} after {log.end}"
    else:
        result = f"MSE {log.final('train_loss'):.3g} after {log.end} steps"
    return f"{result}, {log.final('seconds'):.1f} s"
