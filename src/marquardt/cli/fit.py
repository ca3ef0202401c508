"""`marquardt fit` trains a network for a table, `marquardt predict` uses it for new rows."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .. import files
from .base import Console, Debug, error_messages, say

EXTRA = "table"
REFRESH = 0.2  # seconds between two pictures

Names = list[str] | None


def fit(
    data: Annotated[Path, typer.Argument(help="A CSV or Parquet file; names of columns in the first line.")],
    target: Annotated[
        list[str], typer.Option("--target", metavar="COLUMN", help="What to predict; again for further numbers.")
    ],
    hidden: Annotated[
        str | None, typer.Option(metavar="N,…", help="Units in each hidden layer.", show_default="chosen")
    ] = None,
    classify: Annotated[
        bool | None, typer.Option("--classify/--regress", help="Classes or numbers.", show_default="by the target")
    ] = None,
    test_fraction: Annotated[float, typer.Option(min=0.0, max=0.9, help="Part of the rows kept back to test.")] = 0.2,
    out: Annotated[Path | None, typer.Option(help="The folder for what is written.", show_default="DATA-model")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the split and of the training.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="At most so many for a network.", show_default="chosen")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Read only so many.", show_default="all")] = None,
    ignore: Annotated[Names, typer.Option("--ignore", metavar="COLUMN", help="Leave a column out.")] = None,
    categorical: Annotated[
        Names, typer.Option("--categorical", metavar="COLUMN", help="Numbers that stand for categories.")
    ] = None,
    missing: Annotated[
        Names, typer.Option("--missing", metavar="WORD", help="A further word for no value, like -999.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Train a network for a table and write model, predictions, metrics and a report.

    Numbers, categories, dates and missing values are taken as they are found, and what was done to each column is said.
    The run can be stopped at any time: with --resume the same command goes on, to the same model.
    """
    sizes = None
    if hidden is not None and hidden.strip() != "auto":
        if not re.fullmatch(r"\s*0*[1-9]\d*\s*(,\s*0*[1-9]\d*\s*)*", hidden):
            wrong = f"{hidden!r} is no list of whole numbers from 1 on, such as 32,32"
            raise typer.BadParameter(wrong, param_hint="--hidden")
        sizes = tuple(map(int, hidden.split(",")))
    folder = data.with_name(f"{data.stem}-model") if out is None else out
    with error_messages(debug, EXTRA):
        from ..table import request, run

        asked = request.Request(
            data, tuple(dict.fromkeys(target)), classify, sizes, test_fraction, seed, steps, rows,
            tuple(ignore or ()), tuple(categorical or ()), tuple(missing or ()),
        )  # fmt: skip
        screen = FitScreen(Console())
        try:
            findings = run.fit(asked, folder, resume=resume, say=screen.say, watch=screen.see)
        except KeyboardInterrupt:
            screen.end()
            words = [word for word in sys.argv[1:] if word != "--resume"]
            screen.say(f"Stopped. Go on: {shlex.join(['marquardt', *words, '--resume'])}", whole=True)
            raise typer.Exit(130) from None
        finally:
            screen.end()
        if findings is None:
            screen.say(f"{folder} holds this run, finished: there is nothing to do.")
        else:
            for sentence in findings.told:
                screen.say(sentence, "bold")
        screen.say(f"Report: {folder / request.REPORT}", whole=True)


class FitScreen:
    """What was assumed, then a bar; in a pipe, a line for each kind of network. Drawn between steps, by no thread."""

    def __init__(self, console: Console) -> None:
        self.console, self.drawn = console, -math.inf
        self.last: Mapping[str, Any] = {}
        self.names: set[str] = set()  # of networks that have a line: once more, they are trained on all rows
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(), TimeRemainingColumn(),
            console=console, expand=True, auto_refresh=False, transient=True,
        )  # fmt: skip
        self.bar = self.progress.add_task("", total=1.0, loss="")

    def say(self, sentence: str, style: str = "", *, whole: bool = False) -> None:
        """In lines of the terminal's width, broken between words; `whole` leaves a path or a command in one piece."""
        say(self.console, sentence, style, whole=whole or not self.console.is_terminal)

    def see(self, event: Mapping[str, Any]) -> None:
        """A step of networks of one kind, which are trained together."""
        if self.last and self.last["member"] != event["member"]:
            self._tell()
        self.last = event
        if not self.console.is_terminal or time.monotonic() - self.drawn < REFRESH:
            return
        self.drawn = time.monotonic()
        self.progress.start()
        self.progress.update(
            self.bar, completed=(event["member"] - 1 + event["step"] / event["steps"]) / event["members"],
            description=f"{event['member']}/{event['members']}, step {event['step']}", loss=_loss(event),
        )  # fmt: skip
        self.progress.refresh()

    def end(self) -> None:
        if self.last:
            self._tell()
        if self.progress.live.is_started:
            self.progress.stop()

    def _tell(self) -> None:
        """The line of networks that are trained"""
        event, self.last = self.last, {}
        name, steps = event["configuration"], event["step"]
        again = ", on all rows to train on" if name in self.names else ""
        self.names.add(name)
        counted = f"{steps} step" + "s" * (steps != 1)
        self.say(f"{event['member']}/{event['members']}  {name}{again}: {counted}, {_loss(event)}")


def _loss(event: Mapping[str, Any]) -> str:
    """That of networks which have none yet is infinite."""
    return f"loss {event['loss']:.4g}" if math.isfinite(event["loss"]) else "loss –"


def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="The folder that marquardt fit has written.")],
    data: Annotated[Path, typer.Argument(help="A CSV or Parquet file with the same columns.")],
    interval: Annotated[float, typer.Option(help="Part of the values between lower and upper.")] = 0.95,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="A CSV file for the predictions.", show_default="printed")
    ] = None,
    debug: Debug = False,
) -> None:
    """Predict the target for new rows: with intervals if it is a number, with probabilities if it is a class."""
    if not 0 < interval < 1:
        raise typer.BadParameter(f"{interval:g} is not between 0 and 1", param_hint="--interval")
    check_new(out)
    with error_messages(debug, EXTRA):
        from ..table import predictions
        from ..table.reading import counted

        table, notes = predictions.predict(model, data, interval)
        errors = Console(stderr=True)
        for note in notes:
            say(errors, note)
        if out is None:
            sys.stdout.write(predictions.to_csv(table))
            sys.stdout.flush()  # a disk that is full is noticed here
            return
        check_new(out)  # it may have come meanwhile
        with files.whole(out) as write:
            write(predictions.to_csv(table))
        say(errors, f"Predictions of {counted(len(table), 'row')}: {out}")


def check_new(out: Path | None) -> None:
    if out is not None and os.path.lexists(out):
        raise typer.BadParameter(f"{str(out)!r} is there already: choose another file", param_hint="--out")
