"""What a fit did, step by step: a table that prints itself, goes to CSV and pandas, and plots itself; when it ends, and
the line that shows how it gets on."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from os import PathLike
from typing import Any, NamedTuple, TypeVar, get_type_hints, overload

from ..curvature.cost import duration

Record = TypeVar("Record")


class Entry(NamedTuple):
    """One step."""

    step: int  # from 1 on
    epoch: int  # how often the data were gone through before it
    loss: float  # of the data: of all of them after the step, of a mini-batch before it
    objective: float  # the same with weight decay
    validation: float  # loss of the validation set, or NaN
    lam: float
    gradient: float  # its length √(gᵀD⁻¹g) before the step
    rule: str  # "decrease" | "uphill" | "search" | "rejected"; "return" in files of earlier versions
    lr: float
    gain: float  # actual over predicted decrease
    seconds: float  # since the fit began
    gamma: float = math.nan  # effective number of parameters, if weight decay is found from the data
    converged: bool = False
    note: str = ""

    @property
    def accepted(self) -> bool:
        return self.rule not in ("rejected", "return")


# What a value that was saved may be, by the type of its field.
SAVED: dict[Any, Callable[[Any], bool]] = {
    int: lambda value: type(value) is int and value >= 0,
    float: lambda value: type(value) in (float, int),
    str: lambda value: type(value) is str,
    bool: lambda value: type(value) is bool,
    bool | None: lambda value: value is None or type(value) is bool,
    dict[str, float]: lambda value: type(value) is dict and all(type(x) is float for x in value.values()),
}


def valid(name: str, value: Any, kind: Any) -> Any:
    """The value that was saved, if it is of this kind."""
    if not SAVED[kind](value):
        raise ValueError(f"it is damaged: {name} is {value!r}")
    return value


def restored(kind: Callable[..., Record], values: Mapping[str, Any]) -> Record:
    """A record from plain values that were saved, if these are of its types."""
    types = get_type_hints(kind)
    return kind(**{name: valid(name, value, types[name]) for name, value in values.items()})


SHOWN = ("step", "loss", "validation", "lam", "gradient", "rule", "gamma", "seconds")
ROWS = 20  # that are printed


class History:
    """The steps of a fit: `history[-1].loss`, `history["loss"]` for all of them.

    Args:
        entries: of the steps, in their order.

    >>> history = mq.fit(model, (x, y), "mse", steps=5).history
    >>> len(history["loss"]) == len(history)
    True
    """

    def __init__(self, entries: list[Entry] | None = None) -> None:
        self.entries = entries or []

    @staticmethod
    def restored(columns: dict[str, list[Any]]) -> History:
        found = [columns.get(name) for name in Entry._fields]
        if not all(isinstance(column, list) and len(column) == len(found[0] or []) for column in found):
            raise ValueError("it is damaged: the history is none")
        types = get_type_hints(Entry)
        rows = zip(
            *([valid(name, value, types[name]) for value in columns[name]] for name in Entry._fields), strict=True
        )
        return History([Entry(*row) for row in rows])

    def columns(self) -> dict[str, list[Any]]:
        """Plain lists by name"""
        return {name: self[name] for name in Entry._fields}

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    @overload
    def __getitem__(self, key: int) -> Entry: ...
    @overload
    def __getitem__(self, key: slice) -> History: ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    def __getitem__(self, key: int | slice | str) -> Any:
        if isinstance(key, str):
            if key not in Entry._fields:
                raise KeyError(f"{key!r}: the columns are {', '.join(Entry._fields)}")
            return [getattr(entry, key) for entry in self.entries]
        return History(self.entries[key]) if isinstance(key, slice) else self.entries[key]

    def __eq__(self, other: object) -> bool:
        """All but times, which may be in the notes too"""
        if not isinstance(other, History):
            return NotImplemented
        return [_untimed(e) for e in self] == [_untimed(e) for e in other]

    __hash__ = None  # type: ignore[assignment]

    # As a table.

    def to_csv(self, path: str | PathLike[str]) -> None:
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(Entry._fields)
            writer.writerows(self.entries)

    def to_pandas(self) -> Any:
        try:
            pandas: Any = import_module("pandas")
        except ImportError:
            raise ImportError("History.to_pandas needs pandas: pip install pandas, or take history.to_csv") from None
        return pandas.DataFrame(self.columns())

    def __repr__(self) -> str:
        if not self:
            return "History of no steps"
        last = self[-1]
        validation = "" if math.isnan(last.validation) else f", validation {last.validation:.4g}"
        return f"History of {len(self)} steps, loss {self[0].loss:.4g} → {last.loss:.4g}{validation}"

    def __str__(self) -> str:
        """The columns that are not empty, the first and the last rows"""
        shown = [name for name in SHOWN if name in ("step", "rule") or not all(map(_empty, self[name]))]
        rows = [shown, *([_words(getattr(entry, name)) for name in shown] for entry in self)]
        if len(self) > ROWS:
            rows[1 + ROWS // 4 : ROWS // 4 - ROWS] = [["…"] * len(shown)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)

    def plot(self) -> Any:
        """A figure of matplotlib: the losses, λ, and which steps were accepted"""
        try:
            import matplotlib.pyplot as plt
        except ImportError:
            raise ImportError("History.plot needs matplotlib: pip install matplotlib") from None
        figure, (top, bottom) = plt.subplots(2, 1, sharex=True, height_ratios=(2, 1), layout="constrained")
        steps = self["step"]
        top.plot(steps, self["loss"], label="loss")
        seen = [(e.step, e.validation) for e in self if not math.isnan(e.validation)]
        if seen:
            top.plot(*zip(*seen, strict=True), label="validation")
            best = min(seen, key=lambda pair: pair[1])
            top.plot(*best, "o", label=f"best, step {best[0]}")
        bottom.plot(steps, self["lam"], color="0.5")
        for name, style in (("accepted", "C0."), ("rejected", "C3x")):
            some = [(e.step, e.lam) for e in self if e.accepted == (name == "accepted")]
            if some:
                bottom.plot(*zip(*some, strict=True), style, label=name)
        for axes, words, values in ((top, "loss", self["loss"]), (bottom, "λ", self["lam"])):
            axes.set(ylabel=words, yscale="log" if values and min(values) > 0 else "linear")
            axes.legend()
        bottom.set_xlabel("step")
        return figure


def _untimed(entry: Entry) -> tuple[Any, ...]:
    """NaN is not equal to itself"""
    return tuple(None if _empty(v) else v for v in entry._replace(seconds=0.0, note=""))


def _empty(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _words(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4g}"
    return str(value)


# When a fit ends, and the sentence that gives the reason.

INTERRUPTED = "interrupted"
CALLBACK = "a callback asked for it"

# Of two log evidences that differ by less than this the higher one is not worth a mention (Kass and Raftery, 1995).
ALIKE = 1.0


@dataclass(frozen=True)
class Stops:
    """The stops of MATLAB's trainlm; None leaves one out.

    `patience` counts validations without a new best, or estimates of the evidence. The gradient is √(gᵀD⁻¹g), the
    length that a step reports, and is compared with the largest so far: the units of the loss do not matter.
    """

    steps: int | None = 1000
    seconds: float | None = None
    goal: float | None = None  # of the loss of the data
    min_gradient: float | None = 1e-7  # over the largest
    max_lam: float | None = 1e10
    patience: int | None = 20

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            whole = name in ("steps", "patience")
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                words = "an integer" if whole else "a number"
                raise TypeError(f"{name}={value!r}: {words}, or None to leave this stop out")
            if math.isnan(value) or (value < 0 and name != "goal"):
                raise ValueError(f"{name}={value!r}: at least 0, or None to leave this stop out")

    def reason(self, entry: Entry | None, seen: Seen) -> str | None:
        """Why the fit ends after this step; None if it goes on."""
        if entry is None:
            return None if self.steps != 0 else "no steps were asked for"
        if self.goal is not None and seen.loss <= self.goal:
            return f"the goal is reached: the loss is {seen.loss:.4g}, at most {self.goal:g}"
        if seen.settled:
            return "settled: neither the effective parameters nor the noise, nor the loss, change any more"
        alone = seen.settled is None  # otherwise one minimum follows another
        if alone and entry.converged:
            return "converged: no decrease is left that could be told from the rounding of the loss"
        if alone and self.min_gradient is not None and entry.gradient <= self.min_gradient * seen.steepest:
            return f"the gradient is {entry.gradient:.2g}, at most {self.min_gradient:g} of the largest"
        if self.max_lam is not None and seen.lam > self.max_lam:
            return f"λ is {seen.lam:.2g}, above {self.max_lam:g}: no step lowers the loss"
        if self.patience is not None and seen.fails >= self.patience > 0:
            return f"validation: {seen.fails} in a row without a loss below {seen.least:.4g}"
        if self.impatient(seen):
            return f"the log evidence was {seen.highest:.4g}, and lower in {seen.idle} estimates since"
        if self.steps is not None and entry.step >= self.steps:
            return f"{self.steps} steps are done"
        if self.seconds is not None and entry.seconds >= self.seconds:
            return f"{duration(self.seconds)} are over"
        return None

    def impatient(self, seen: Seen) -> bool:
        """Whether the evidence has been lower for too long."""
        return self.patience is not None and seen.idle >= self.patience > 0


@dataclass
class Seen:
    """What the stops depend on, of all steps so far. Plain numbers: they are saved."""

    loss: float = math.inf  # of the data; on mini-batches the mean of some of the last
    steepest: float = 0.0  # the largest gradient
    lam: float = 0.0  # of the next step
    least: float = math.inf  # the best loss so far, of the validation set if there is one
    best_step: int = 0
    fails: int = 0  # validations since
    settled: bool | None = None  # weight decay that is found from the data; None if it is not
    highest: float = -math.inf  # log evidence in this descent, if that decides which weights are the best,
    idle: int = 0  # estimates since that were lower,
    before: float = -math.inf  # and the highest one in earlier descents

    def found(self, loss: float, step: int) -> bool:
        """Whether this loss is the least so far."""
        better = loss < self.least
        if better:
            self.least, self.best_step = loss, step
        self.fails = 0 if better else self.fails + 1
        return better

    def judged(self, log_evidence: float, step: int) -> bool:
        """Whether it is as good as the highest of this descent, and better than earlier ones."""
        good = log_evidence > self.highest - ALIKE
        self.highest, self.idle = (max(self.highest, log_evidence), 0) if good else (self.highest, self.idle + 1)
        best = good and log_evidence > self.before
        if best:
            self.best_step = step
        return best

    def begin_anew(self) -> None:
        """Another descent."""
        self.before, self.highest, self.idle = max(self.before, self.highest), -math.inf, 0
        self.settled, self.fails = False, 0


# The line that shows how a fit gets on: by Rich, on a terminal.


def bar_of(progress: bool | None, stops: Stops, here: bool = True) -> Bar | None:
    """A bar if there is a terminal (None), always (True), or never (False), in the one process that shows it."""
    if progress not in (True, False, None):
        raise ValueError(f"progress={progress!r}: True, False, or None to show a bar on a terminal")
    if not here or not (sys.stderr.isatty() if progress is None else progress):
        return None
    try:
        return Bar(stops)
    except ImportError:
        if progress is None:
            return None
        raise ImportError("progress=True needs Rich: pip install rich, or leave progress out") from None


class Bar:
    """Loss, validation, λ, gradient, and the time that is left until the last step."""

    def __init__(self, stops: Stops) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self.stops = stops
        columns = TextColumn("{task.description}"), BarColumn(bar_width=10), TextColumn("{task.fields[words]}")
        self.bar: Any = Progress(*columns, console=Console(stderr=True), transient=True)
        self.task = self.bar.add_task("fit", total=1.0, words="")
        self.first: Entry | None = None

    def print(self, words: str) -> None:
        self.bar.console.print(words, markup=False, highlight=False, soft_wrap=True)

    def begin(self, plan: str) -> None:
        self.print(plan)
        self.bar.start()

    def update(self, entry: Entry) -> None:
        self.first = self.first or entry
        done, left = remaining(self.stops, entry, self.first)
        self.bar.update(self.task, completed=done, description=f"step {entry.step}", words=words(entry, left))

    def end(self, reason: str) -> None:
        self.bar.stop()
        self.print(reason)


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
