"""Columns of a table as inputs of a network, and what was done to each, in words.

| a column of | becomes |
| --- | --- |
| numbers | one input; a missing value is the median, and a further input says where values were missing |
| categories | one input for each level that is in at least `RARE` rows, at most `LEVELS`; one for all the others |
| dates | days, and the parts of the year, the week and the day that are over, each as sin and cos |

Levels, medians and what is constant come from the rows that are trained on. Columns that are constant, empty, or text
that is different in nearly every row are left out.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import torch
from torch import Tensor

from ..files import typed
from ..values import quoted
from . import kinds
from .reading import BadTable, counted, listed

RARE = 3  # rows that a level must be in to have an input
LEVELS = 50  # inputs of a column of categories, beside the one for the others
UNIQUE = 0.5  # text with more different values than this part of the rows names rows rather than describing them
EPOCH = pd.Timestamp("2000-01-01")
CYCLES = ("days", *(f"{turn}, {wave}" for turn in ("year", "week", "time") for wave in ("sin", "cos")))


class Encoded(NamedTuple):
    """Inputs made of one column, and what is to be told of it."""

    inputs: np.ndarray  # (N, k)
    notes: list[str]


class Told(NamedTuple):
    """A line of the report."""

    name: str
    read: str
    done: str


@dataclass(frozen=True)
class NumberColumn:
    """x, and 1 where x is missing (if it was so in training)."""

    name: str
    median: float
    varies: bool
    indicator: bool
    kind: ClassVar[str] = "number"

    @classmethod
    def of(cls, name: str, column: pd.Series) -> NumberColumn:
        values = kinds.numbers(name, column)
        known = values[~np.isnan(values)]
        return cls(name, float(np.median(known)), not kinds.constant(known), len(known) < len(values))

    @property
    def names(self) -> list[str]:
        return [self.name] * self.varies + [f"{self.name} is missing"] * self.indicator

    def encode(self, column: pd.Series) -> Encoded:
        values = kinds.numbers(self.name, column)
        absent = np.isnan(values)
        parts = [np.where(absent, self.median, values)] * self.varies + [absent.astype(float)] * self.indicator
        return Encoded(np.stack(parts, axis=1), _absent(self, absent, f"the median {self.median:.4g}"))

    @property
    def done(self) -> str:
        if not self.indicator:
            return "used as it is"
        if not self.varies:
            return f"always {self.median:.4g} or missing: one input says which"
        return f"missing values are the median {self.median:.4g}, and a further input says where"


@dataclass(frozen=True)
class CategoryColumn:
    """1 in the input of its level, or in that of the others for a level that was rare or not there in training."""

    name: str
    levels: tuple[str, ...]
    others: bool  # whether some level was rare in training
    indicator: bool
    kind: ClassVar[str] = "category"

    @classmethod
    def of(cls, name: str, column: pd.Series) -> CategoryColumn:
        counts = column.dropna().value_counts().to_dict()
        common = sorted((level for level in counts if counts[level] >= RARE), key=lambda level: (-counts[level], level))
        levels = tuple(sorted(map(str, common[:LEVELS])))
        return cls(name, levels, len(levels) < len(counts), bool(column.isna().any()))

    @property
    def names(self) -> list[str]:
        levels = [f"{self.name} = {level}" for level in self.levels]
        return levels + [f"{self.name} is another"] * self.others + [f"{self.name} is missing"] * self.indicator

    def encode(self, column: pd.Series) -> Encoded:
        text = as_text(column)
        places = text.map({level: place for place, level in enumerate(self.levels)})
        absent = text.isna().to_numpy()
        other = places.isna().to_numpy() & ~absent
        parts = [(places == place).to_numpy().astype(float) for place in range(len(self.levels))]
        parts += [other.astype(float)] * self.others + [absent.astype(float)] * self.indicator
        notes = _absent(self, absent, "no level at all")
        if other.any():
            n = int(other.sum())
            have, they = ("has", "it has") if n == 1 else ("have", "they have")
            instead = "one input stands for all such levels" if self.others else f"{they} no level at all"
            notes.append(
                f"{self.name!r}: {counted(n, 'row')} {have} a level that was rare or not there in training "
                f"({listed(sorted(set(text[other])), 4)}); {instead}."
            )
        return Encoded(np.stack(parts, axis=1), notes)

    @property
    def done(self) -> str:
        shown = ", ".join(self.levels[:6]) + ", …" * (len(self.levels) > 6)
        told = f"{counted(len(self.levels), 'level')}, an input for each ({shown})"
        told += f"; one more for the levels in fewer than {RARE} rows or beyond the first {LEVELS}" * self.others
        return told + "; one more for missing values" * self.indicator


def _cycles(dates: pd.Series) -> dict[str, np.ndarray]:
    """Each part of a date as an input; the turn is the part of the year, week or day that is over."""
    days = ((dates - EPOCH) / pd.Timedelta(days=1)).to_numpy()
    turns = {
        "year": (dates.dt.day_of_year.to_numpy() - 1) / 365.25,
        "week": dates.dt.day_of_week.to_numpy() / 7,
        "time": days % 1.0,
    }
    waves = {"sin": np.sin, "cos": np.cos}
    cycles = {f"{turn}, {wave}": f(2 * math.pi * part) for turn, part in turns.items() for wave, f in waves.items()}
    return {"days": days, **cycles}


@dataclass(frozen=True)
class DateColumn:
    """Days since 2000, and sin and cos of the parts of year, week and day that are over."""

    name: str
    form: str
    middle: str  # what a missing date becomes
    parts: tuple[str, ...]  # those that are not constant
    indicator: bool
    kind: ClassVar[str] = "date"

    def __post_init__(self) -> None:
        """A file may have been made by anybody."""
        middle = pd.Timestamp(self.middle)
        if self.form not in kinds.FORMATS or not set(self.parts) <= set(CYCLES) or middle.tz or pd.isna(middle):
            raise ValueError(f"no dates have the form {self.form!r}, the middle {self.middle!r} and such parts")

    @classmethod
    def of(cls, name: str, column: pd.Series, form: str) -> DateColumn:
        dates = kinds.dates(name, column, form)
        known = dates.dropna().sort_values()
        parts = tuple(part for part, values in _cycles(known).items() if np.ptp(values) > 1e-9)
        middle = known.iloc[(len(known) - 1) // 2]
        return cls(name, form, middle.isoformat(), parts, len(known) < len(dates))

    @property
    def names(self) -> list[str]:
        return [f"{self.name} ({part})" for part in self.parts] + [f"{self.name} is missing"] * self.indicator

    def encode(self, column: pd.Series) -> Encoded:
        dates = kinds.dates(self.name, column, self.form)
        absent = dates.isna().to_numpy()
        cycles = _cycles(dates.fillna(pd.Timestamp(self.middle)))
        inputs = [cycles[part] for part in self.parts] + [absent.astype(float)] * self.indicator
        return Encoded(np.stack(inputs, axis=1), _absent(self, absent, f"the date in the middle, {self.middle[:10]}"))

    @property
    def done(self) -> str:
        told = f"read as {kinds.FORMATS[self.form]}; inputs: {'; '.join(self.parts)}"
        return told + f"; missing ones are {self.middle[:10]}, and a further input says where" * self.indicator


Column = NumberColumn | CategoryColumn | DateColumn


def _absent(column: Column, absent: np.ndarray, instead: str) -> list[str]:
    """A note if values are missing that never were in training."""
    if column.indicator or not absent.any():
        return []
    n = int(absent.sum())
    are, they = ("is", "it is") if n == 1 else ("are", "they are")
    return [f"{column.name!r}: {counted(n, 'value')} {are} missing, as none was in training; {they} {instead}."]


def as_text(column: pd.Series) -> pd.Series:
    """Numbers as people write them, 3 and not 3.0."""
    if isinstance(column.dtype, pd.StringDtype):
        return column
    shown = "{:.12g}".format if pd.api.types.is_numeric_dtype(column) else str
    return column.map(shown, na_action="ignore").astype("str")


@dataclass(frozen=True)
class Columns:
    """The columns that are inputs, in the order of the table, and why the others are not."""

    columns: tuple[Column, ...]
    told: tuple[Told, ...] = ()
    notices: tuple[str, ...] = ()  # sentences on what may not be as it was meant

    @property
    def names(self) -> list[str]:
        return [name for column in self.columns for name in column.names]

    @property
    def groups(self) -> dict[str, list[int]]:
        """The inputs that each column has become."""
        places, start = {}, 0
        for column in self.columns:
            places[column.name] = list(range(start, start := start + len(column.names)))
        return places

    def encode(self, frame: pd.DataFrame) -> tuple[Tensor, list[str]]:
        """(N, inputs) in float64, and sentences on what had to be assumed."""
        absent = [column.name for column in self.columns if column.name not in frame.columns]
        if absent:
            raise BadTable(f"there is no column {listed(absent)}, which the model was trained with")
        encoded = [column.encode(frame[column.name]) for column in self.columns]
        inputs = torch.from_numpy(np.concatenate([inputs for inputs, _ in encoded], axis=1))
        return inputs, [note for _, notes in encoded for note in notes]

    def to_json(self) -> list[dict[str, Any]]:
        return [{"kind": column.kind, **asdict(column)} for column in self.columns]

    @classmethod
    def from_json(cls, found: Any) -> Columns:
        """What `to_json` has made. Anything else is a ValueError."""
        columns = tuple(
            _restored(column, f"columns[{i}]") for i, column in enumerate(typed(found, list[Any], "columns"))
        )
        if not columns or len({column.name for column in columns}) < len(columns):
            raise ValueError("columns: there are none, or two of one name")
        return cls(columns)


def _restored(saved: Any, place: str) -> Column:
    known: dict[Any, Any] = {column.kind: column for column in (NumberColumn, CategoryColumn, DateColumn)}
    entries = typed(saved, dict[str, Any], place)
    kind = typed(entries.pop("kind", None), str, f"{place}.kind")
    if kind not in known:
        raise ValueError(f"{place}.kind is {quoted(kind)}, none of {', '.join(known)}")
    found: Column = typed(entries, known[kind], place)
    if not found.names:
        raise ValueError(f"{place} has no inputs")
    return found


def learn(
    frame: pd.DataFrame, train: np.ndarray, *, ignore: Collection[str] = (), categorical: Collection[str] = ()
) -> Columns:
    """What becomes of every column; `train` are the rows whose values may be looked at for more than their kind."""
    columns: list[Column] = []
    told, notices = [], []
    for name in map(str, frame.columns):
        if name in ignore:
            told.append(Told(name, "–", "left out, as was asked for"))
            continue
        found = "category" if name in categorical else kinds.kind(name, frame[name])
        if found == "category" and name not in categorical and (looks := kinds.disguised(frame[name])):
            notices.append(f"Column {name!r} looks like {looks} to use it as numbers.")
        column, why = _learnt(name, frame[name], train, found)
        if column is None:
            told.append(Told(name, found, f"left out: {why}"))
        else:
            columns.append(column)
            told.append(Told(name, found, column.done + why))
            notices += [f"{name!r}: {column.done}{why}."] if why else []
    if not columns:
        why = "; ".join(f"{name!r} was {done}" for name, _, done in told) or "there are only targets"
        raise BadTable(f"no column is left to learn from: {'. '.join([why, *notices]).removesuffix('.')}")
    return Columns(tuple(columns), tuple(told), tuple(notices))


def _learnt(name: str, column: pd.Series, train: np.ndarray, kind: str) -> tuple[Column | None, str]:
    """The column and a remark, or None and why not."""
    rows = column.iloc[train]
    if kind == "empty" or rows.isna().all():
        return None, "it has no values"
    if kind == "number":
        number = NumberColumn.of(name, rows)
        return (number, _counter(rows)) if number.names else (None, f"it is always {number.median:.4g}")
    if kind == "date":
        date = DateColumn.of(name, rows, kinds.date_format(column))
        return (date, _ambiguous(column, date.form)) if date.names else (None, "it is always the same date")
    text = as_text(rows)
    different = text.nunique()
    if different > UNIQUE * text.notna().sum() and different > RARE:
        return None, f"it has {different:,} different texts in {text.notna().sum():,} rows, too many for categories"
    category = CategoryColumn.of(name, text)
    if len(category.names) < 2:
        return None, f"it is always {quoted(text.dropna().iloc[0])}" if different == 1 else "every level is rare"
    return category, ""


def _counter(rows: pd.Series) -> str:
    """A remark on whole numbers that are all different and without a gap: perhaps they only count the rows."""
    values = np.sort(kinds.numbers("", rows.dropna()))
    whole = len(values) >= 20 and bool((values == np.round(values)).all()) and bool((np.diff(values) > 0).all())
    counts = whole and values[-1] - values[0] < 2 * len(values)  # the rows of the test are missing here
    return "; its whole numbers are all different, as those that count rows: --ignore leaves it out" if counts else ""


def _ambiguous(column: pd.Series, form: str) -> str:
    if form != "%m/%d/%Y" or kinds.read_as(column.dropna(), "%d/%m/%Y").isna().any():
        return ""
    return "; day/month/year would be possible too: if it is that, write the dates as year-month-day"
