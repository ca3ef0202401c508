"""Test error over seconds of training, one panel for each task: a page that reads the records alone."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

from .contestants import CONTESTANTS
from .tables import Record, setting
from .tasks import TASKS

COLUMNS = 3
PANEL = 4.2, 3.0  # inches


def write(records: Sequence[Record], path: Path) -> Path:
    """Every seed is a line; the means are in the tables."""
    own = [r for r in records if not r["trial"] and r.get("points")]
    figures = [f"<h2>{where}</h2>\n{drawn([r for r in own if setting(r) == where])}" for where in settings(own)]
    head = '<!doctype html>\n<meta charset="utf-8">\n<title>Error over seconds</title>\n<h1>Error over seconds</h1>\n'
    path.write_text(head + "\n".join(figures) + "\n", "utf-8")
    return path


def settings(records: Sequence[Record]) -> list[str]:
    return sorted({setting(r) for r in records})


def drawn(records: Sequence[Record]) -> str:
    """One SVG."""
    from matplotlib.figure import Figure

    tasks = [t for t in TASKS.values() if any(r["task"] == t.name for r in records)]
    rows = math.ceil(len(tasks) / COLUMNS)
    figure = Figure((COLUMNS * PANEL[0], rows * PANEL[1]), layout="constrained")
    colours = {name: f"C{k}" for k, name in enumerate(CONTESTANTS)}
    for place, task in enumerate(tasks, 1):
        axes = figure.add_subplot(rows, COLUMNS, place, xscale="log", title=task.name, xlabel="s", ylabel=task.metric)
        axes.set_yscale("log", nonpositive="clip")  # no error at all is a figure too
        for r in (r for r in records if r["task"] == task.name):
            points = [(p[0], p[-1]) for p in r["points"] if p[-1] is not None]
            seconds, errors = ([p[k] for p in points] for k in range(2))
            axes.plot(seconds, errors, color=colours[r["contestant"]], linewidth=1)
    names = [name for name in CONTESTANTS if any(r["contestant"] == name for r in records)]
    lines = [axes.plot([], color=colours[name])[0] for name in names]
    figure.legend(lines, names, loc="outside upper center", ncols=len(names))
    found = io.StringIO()
    figure.savefig(found, format="svg")
    return found.getvalue()[found.getvalue().index("<svg") :]
