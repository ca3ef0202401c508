"""What a fit did, step by step: a table that prints itself, goes to CSV and pandas, and plots itself."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from os import PathLike
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints, overload

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


def restored(kind: Callable[..., Record], values: dict[str, Any]) -> Record:
    """A record from plain values that were saved, if these are of its types."""
    types = hints(kind)
    for name, value in values.items():
        wanted = types.get(name, ())
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            raise ValueError(f"it is damaged: {name} is {value!r}")
        if wanted == (int,):
            check_count(name, value)
        if isinstance(value, dict) and not all(type(k) is str and type(v) is float for k, v in value.items()):
            raise ValueError(f"it is damaged: {name} holds other things than numbers")
    return kind(**values)


def check_count(name: str, value: Any, below: int | None = None) -> None:
    if type(value) is not int or value < 0 or (below is not None and value >= below):
        raise ValueError(f"it is damaged: {name} is {value!r}")


@cache
def hints(kind: Any) -> dict[str, tuple[type, ...]]:
    """Types by the names of its fields; whole numbers may stand for others."""
    found = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(kind).items()}
    found = {name: (dict,) if get_origin(get_type_hints(kind)[name]) is dict else each for name, each in found.items()}
    return {name: (*each, int) if float in each else each for name, each in found.items()}


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
        rows = zip(*(columns[name] for name in Entry._fields), strict=True)
        return History([restored(Entry, dict(zip(Entry._fields, row, strict=True))) for row in rows])

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
        """All but times, which notes may tell too"""
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
        """The columns that say something, the first and the last rows"""
        shown = [name for name in SHOWN if name in ("step", "rule") or not all(map(_empty, self[name]))]
        head, tail = self.entries, []
        if len(self) > ROWS:
            head, tail = self.entries[: ROWS // 4], self.entries[-(ROWS - ROWS // 4) :]
        rows = [[_words(getattr(entry, name)) for name in shown] for entry in head]
        if tail:
            rows += [["…"] * len(shown), *([_words(getattr(entry, name)) for name in shown] for entry in tail)]
        widths = [max(len(row[i]) for row in [shown, *rows]) for i in range(len(shown))]
        lines = ("  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in [shown, *rows])
        return "\n".join(lines)

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
        for name, style, some in (
            ("accepted", "C0.", [e for e in self if e.accepted]),
            ("rejected", "C3x", [e for e in self if not e.accepted]),
        ):
            if some:
                bottom.plot([e.step for e in some], [e.lam for e in some], style, label=name)
        for axes, words in ((top, "loss"), (bottom, "λ")):
            values = self["loss"] if axes is top else self["lam"]
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
