"""A line that shows how a fit gets on: by Rich, on a terminal."""

from __future__ import annotations

import math
import sys
from typing import Any, Protocol

from .history import Entry
from .stops import Stops


class Shown(Protocol):
    """What a fit tells of."""

    def begin(self, plan: str) -> None: ...
    def update(self, entry: Entry) -> None: ...
    def end(self, reason: str) -> None: ...


class Silent:
    """Nothing is shown."""

    def begin(self, plan: str) -> None:
        """How the fit goes about it, before its first step."""

    def update(self, entry: Entry) -> None:
        """After every step."""

    def end(self, reason: str) -> None:
        """Why it ended."""


def shown(progress: bool | None, stops: Stops, here: bool = True) -> Shown:
    """A bar if there is a terminal (None), always (True), or never (False), in the one process that shows it."""
    if progress not in (True, False, None):
        raise ValueError(f"progress={progress!r}: True, False, or None to show a bar on a terminal")
    if progress is False or not here or (progress is None and not sys.stderr.isatty()):
        return Silent()
    try:
        return Bar(stops)
    except ImportError:
        if progress is None:
            return Silent()
        raise ImportError("progress=True needs Rich: pip install rich, or leave progress out") from None


class Bar:
    """Loss, validation, λ, gradient, and the time that is left until the last step."""

    def __init__(self, stops: Stops) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self.stops = stops
        columns = TextColumn("{task.description}"), BarColumn(bar_width=10), TextColumn("{task.fields[words]}")
        self.bar: Any = Progress(*columns, console=Console(stderr=True), transient=True)
        self.task: Any = None
        self.first: Entry | None = None

    def begin(self, plan: str) -> None:
        self.bar.console.print(plan, markup=False, highlight=False, soft_wrap=True)
        self.task = self.bar.add_task("fit", total=1.0, words="")
        self.bar.start()

    def update(self, entry: Entry) -> None:
        self.first = self.first or entry
        done, left = remaining(self.stops, entry, self.first)
        self.bar.update(self.task, completed=done, description=f"step {entry.step}", words=words(entry, left))

    def end(self, reason: str) -> None:
        self.bar.stop()
        self.bar.console.print(reason, markup=False, highlight=False, soft_wrap=True)


def remaining(stops: Stops, entry: Entry, first: Entry) -> tuple[float, float]:
    """How much of the longest possible fit is done, and the seconds that are left of it at most."""
    limits = []
    if stops.steps is not None:
        pace = (entry.seconds - first.seconds) / max(1, entry.step - first.step)
        limits.append((entry.step / max(1, stops.steps), pace * (stops.steps - entry.step)))
    if stops.seconds is not None:
        limits.append((min(1.0, entry.seconds / max(stops.seconds, 1e-9)), max(0.0, stops.seconds - entry.seconds)))
    return min(limits, key=lambda limit: limit[1], default=(0.0, math.inf))


def words(entry: Entry, left: float) -> str:
    validation = "" if math.isnan(entry.validation) else f"  validation {entry.validation:.4g}"
    gamma = "" if math.isnan(entry.gamma) else f"  γ {entry.gamma:.3g}"
    time = "" if math.isinf(left) else f"  {int(left) // 60}:{int(left) % 60:02d} left"
    return f"loss {entry.loss:.4g}{validation}  λ {entry.lam:.2g}  gradient {entry.gradient:.2g}{gamma}{time}"
