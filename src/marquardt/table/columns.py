"""What the columns of a table hold, and what they become: inputs of a network, and its target.

| a column of | becomes |
| --- | --- |
| numbers | one input; a missing value is the median, and a further input says where values were missing |
| categories | one input for each level that is in at least `RARE` rows, at most `LEVELS`; one for all the others |
| dates | days, and the parts of the year, the week and the day that are over, each as sin and cos |

Levels, medians and what is constant come from the rows that are trained on. Columns that are constant, empty, or text
that is different in nearly every row are left out. A value that does not fit is named with its row.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import torch
from torch import Tensor

from ..values import quoted
from .reading import MOST, BadTable, counted, listed, nameless, other_use

Kind = Literal["empty", "number", "date", "category"]
# Tried in this order; a date that is both month/day and day/month in every row is read as the former.
FORMATS = {
    "ISO8601": "year-month-day",  # also with strokes
    "%d.%m.%Y": "day.month.year",
    "%m/%d/%Y": "month/day/year",
    "%d/%m/%Y": "day/month/year",
}
DATE = r"\d{4}-\d{1,2}-\d{1,2}.*|\d{4}/\d{1,2}/\d{1,2}|\d{1,2}[./]\d{1,2}[./]\d{4}"
THOUSANDS = r"[+-]?[1-9]\d{0,2}(?:[,'’\s]\d{3})+(?:\.\d+)?"
BEFORE = r"(?:[A-Z]{2})?[$€£¥₹]|USD|EUR|GBP|CHF|JPY|Fr\.?|kr\.?|Rs\.?"  # a currency; other words may be names
AFTER = r"(?:[^\W\d_]|[%‰°$€£¥₹\"'′″]).{0,18}"
FIGURE = rf"^(?P<before>{BEFORE})?\s*(?P<number>{THOUSANDS}|[+-]?\d+(?:[.,]\d+)?)\s*(?P<after>{AFTER})?$"
SHOWN = 5  # rows named in an error
LARGEST = 1e150  # the square of what is larger is no float64
ROUNDING = 1e-10  # numbers whose standard deviation is less than this part of their size are the same
RARE = 3  # rows that a level must be in to have an input
LEVELS = 50  # inputs of a column of categories, beside the one for the others
UNIQUE = 0.5  # text with more different values than this part of the rows names rows rather than describing them
EPOCH = pd.Timestamp("2000-01-01")
CYCLES = ("days", *(f"{turn}, {wave}" for turn in ("year", "week", "time") for wave in ("sin", "cos")))
FEW = 10  # whole numbers of at most this number of different values are taken for classes
CLASSES = 100  # more are refused


# --- what a column holds ---


def kind_of(name: str, column: pd.Series) -> Kind:
    """What a column holds; `BadTable` if it mixes numbers or dates with text."""
    values = column.dropna()
    if not len(values):
        return "empty"
    if pd.api.types.is_datetime64_any_dtype(values):
        return "date"
    if pd.to_numeric(values, errors="coerce").notna().mean() > MOST:
        numbers(name, column)  # text and infinite ones are refused
        return "number"
    if values.str.fullmatch(DATE).mean() > MOST:
        dates(name, column, date_format(column))
        return "date"
    return "category"


def numbers(name: str, column: pd.Series) -> np.ndarray:
    """float64, NaN for no value; text and infinite numbers are refused."""
    found = pd.to_numeric(column, errors="coerce").astype("float64")
    _refuse(name, column, column.notna() & found.isna(), "holds numbers, but also text")
    _refuse(name, column, np.isinf(found), "holds numbers that are not finite")
    _refuse(name, column, found.abs() > LARGEST, "holds numbers that are too large to compute with")
    return np.asarray(found)


def disguised(column: pd.Series) -> str | None:
    """What text looks like if it is numbers with a unit, a currency or marks between thousands, and what to do."""
    if not isinstance(column.dtype, pd.StringDtype):
        return None
    values = column.dropna()
    parts = values.str.extract(FIGURE).fillna("")
    sides = parts[parts["number"] != ""].value_counts(["before", "after"])
    if not len(sides) or sides.iloc[0] <= MOST * len(values):
        return None
    units = [side for side in sides.index[0] if side]
    number = parts["number"]
    thousands = number.str.fullmatch(THOUSANDS)
    decimal = (number.str.contains(",") & ~thousands).any()
    marks = [mark for mark in (",", "'", "’", " ") if number[thousands].str.contains(mark, regex=False).any()]
    marks = units + [mark for mark in marks if not (decimal and mark == ",")]
    if marks:
        return f"numbers with {' and '.join(map(repr, marks))}: remove that"
    return "numbers with decimal commas: write points" if decimal else None


def constant(values: np.ndarray) -> bool:
    """Whether numbers are the same up to rounding."""
    return bool(values.std() <= ROUNDING * np.abs(values).max())


def date_format(column: pd.Series) -> str:
    """The first of `FORMATS` that reads every date, or else the one that reads most of them."""
    if not isinstance(column.dtype, pd.StringDtype):
        return "ISO8601"
    values = column.dropna()
    read = {form: read_as(values, form).notna().mean() for form in FORMATS}
    return max(read, key=lambda form: read[form])


def dates(name: str, column: pd.Series, form: str) -> pd.Series:
    """Dates in UTC without its name, NaT for no value; anything else is refused."""
    found = read_as(column, form)
    _refuse(name, column, column.notna() & found.isna(), f"holds dates ({FORMATS[form]}), but also others")
    return found


def read_as(column: pd.Series, form: str) -> pd.Series:
    """NaT for what is no such date."""
    if not isinstance(column.dtype, pd.StringDtype):
        return column
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return pd.to_datetime(column, format=form, errors="coerce", utc=True).dt.tz_localize(None)


def _refuse(name: str, column: pd.Series, bad: pd.Series, what: str) -> None:
    if not bad.any():
        return
    places = np.flatnonzero(bad.to_numpy())
    shown = ", ".join(f"{quoted(column.iloc[i])} in row {column.index[i] + 1}" for i in places[:SHOWN])
    more = f" and in {counted(len(places) - SHOWN, 'more row')}" if len(places) > SHOWN else ""
    raise BadTable(
        f"the column {name!r} {what}: {shown}{more}; correct them",
        f", or use --missing WORD for a word that means no value, {other_use(name)}",
    )


def as_text(column: pd.Series) -> pd.Series:
    """Numbers as people write them, 3 and not 3.0."""
    if isinstance(column.dtype, pd.StringDtype):
        return column
    shown = "{:.12g}".format if pd.api.types.is_numeric_dtype(column) else str
    return column.map(shown, na_action="ignore").astype("str")


# --- what a column becomes ---


# Inputs for values that are there, where values are missing, (N,) each, and what is to be told of it
Inputs: TypeAlias = tuple[list[np.ndarray], np.ndarray, list[str]]


class Told(NamedTuple):
    """A line of the report."""

    name: str
    read: str
    done: str


@dataclass(frozen=True)
class Column(ABC):
    """Inputs made of a column; the last is 1 where a value is missing, if some were in training."""

    name: str
    indicator: bool

    @property
    @abstractmethod
    def known(self) -> list[str]:
        """The names of the inputs for values that are there"""

    @property
    @abstractmethod
    def instead(self) -> str:
        """What a missing value is read as"""

    @property
    @abstractmethod
    def done(self) -> str:
        """What becomes of the column, for the report"""

    @abstractmethod
    def inputs(self, column: pd.Series) -> Inputs:
        """Of a table with this column"""

    @property
    def names(self) -> list[str]:
        return self.known + [f"{self.name} is missing"] * self.indicator

    def encode(self, column: pd.Series) -> tuple[np.ndarray, list[str]]:
        """Inputs (N, k), and what is to be told of it"""
        parts, absent, notes = self.inputs(column)
        if absent.any() and not self.indicator:
            lacking = f"{self.name!r}: {counted(int(absent.sum()), 'missing value')}, and none in training"
            notes = [f"{lacking}: read as {self.instead}.", *notes]
        return np.stack(parts + [absent] * self.indicator, axis=1).astype(float), notes


@dataclass(frozen=True)
class NumberColumn(Column):
    """x, the median if it is missing."""

    median: float
    varies: bool
    kind: Literal["number"] = "number"

    @classmethod
    def of(cls, name: str, column: pd.Series) -> NumberColumn:
        values = numbers(name, column)
        known = values[~np.isnan(values)]
        return cls(name, len(known) < len(values), float(np.median(known)), not constant(known))

    @property
    def known(self) -> list[str]:
        return [self.name] * self.varies

    @property
    def instead(self) -> str:
        return f"the median {self.median:.4g}"

    def inputs(self, column: pd.Series) -> Inputs:
        values = numbers(self.name, column)
        absent = np.isnan(values)
        return [np.where(absent, self.median, values)] * self.varies, absent, []

    @property
    def done(self) -> str:
        if not self.indicator:
            return "used as it is"
        if not self.varies:
            return f"always {self.median:.4g} or missing: one input says which"
        return f"missing values are {self.instead}, and a further input says where"


@dataclass(frozen=True)
class CategoryColumn(Column):
    """1 in the input of its level, or in that of the others for a level that was rare or not there in training."""

    levels: tuple[str, ...]
    others: bool  # whether some level was rare in training
    kind: Literal["category"] = "category"

    @classmethod
    def of(cls, name: str, column: pd.Series) -> CategoryColumn:
        counts = column.dropna().value_counts().to_dict()
        common = sorted((level for level in counts if counts[level] >= RARE), key=lambda level: (-counts[level], level))
        levels = tuple(sorted(map(str, common[:LEVELS])))
        return cls(name, bool(column.isna().any()), levels, len(levels) < len(counts))

    @property
    def instead(self) -> str:
        return "no level at all"

    @property
    def known(self) -> list[str]:
        return [f"{self.name} = {level}" for level in self.levels] + [f"{self.name} is another"] * self.others

    def inputs(self, column: pd.Series) -> Inputs:
        text = as_text(column)
        absent, notes = text.isna().to_numpy(), list[str]()
        other = ~text.isin(self.levels).to_numpy() & ~absent
        if other.any():
            rows, shown = counted(int(other.sum()), "row"), listed(sorted(set(text[other])), 4)
            read = "another level" if self.others else self.instead
            notes = [
                f"{self.name!r}: {rows} with a level that was rare or not there in training ({shown}), read as {read}."
            ]
        return [(text == level).to_numpy() for level in self.levels] + [other] * self.others, absent, notes

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
class DateColumn(Column):
    """Days since 2000, and sin and cos of the parts of year, week and day that are over."""

    form: str
    middle: str  # what a missing date becomes
    parts: tuple[str, ...]  # those that are not constant
    kind: Literal["date"] = "date"

    def __post_init__(self) -> None:
        """A file may have been made by anybody."""
        middle = pd.Timestamp(self.middle)
        if self.form not in FORMATS or not set(self.parts) <= set(CYCLES) or middle.tz or pd.isna(middle):
            raise ValueError(f"no dates have the form {self.form!r}, the middle {self.middle!r} and such parts")

    @classmethod
    def of(cls, name: str, column: pd.Series, form: str) -> DateColumn:
        found = dates(name, column, form)
        known = found.dropna().sort_values()
        parts = tuple(part for part, values in _cycles(known).items() if np.ptp(values) > 1e-9)
        return cls(name, len(known) < len(found), form, known.iloc[(len(known) - 1) // 2].isoformat(), parts)

    @property
    def known(self) -> list[str]:
        return [f"{self.name} ({part})" for part in self.parts]

    @property
    def instead(self) -> str:
        return f"the date in the middle, {self.middle[:10]}"

    def inputs(self, column: pd.Series) -> Inputs:
        found = dates(self.name, column, self.form)
        cycles = _cycles(found.fillna(pd.Timestamp(self.middle)))
        return [cycles[part] for part in self.parts], found.isna().to_numpy(), []

    @property
    def done(self) -> str:
        told = f"read as {FORMATS[self.form]}; inputs: {'; '.join(self.parts)}"
        return told + f"; missing ones are {self.middle[:10]}, and a further input says where" * self.indicator


@dataclass(frozen=True)
class Columns:
    """The columns that are inputs, in the order of the table, and why the others are not."""

    columns: tuple[NumberColumn | CategoryColumn | DateColumn, ...]
    told: tuple[Told, ...] = ()
    notices: tuple[str, ...] = ()  # sentences on what may not be as it was meant

    def __post_init__(self) -> None:
        """A file may have been made by anybody."""
        names = {column.name for column in self.columns if column.names}
        if not names or len(names) < len(self.columns):
            raise ValueError("columns: there are none, two of one name, or one without inputs")

    @property
    def names(self) -> list[str]:
        return [name for column in self.columns for name in column.names]

    @property
    def groups(self) -> dict[str, list[int]]:
        """The inputs that each column has become."""
        places = iter(range(len(self.names)))
        return {column.name: [next(places) for _ in column.names] for column in self.columns}

    def encode(self, frame: pd.DataFrame) -> tuple[Tensor, list[str]]:
        """(N, inputs) in float64, and sentences on what had to be assumed."""
        absent = [column.name for column in self.columns if column.name not in frame.columns]
        if absent:
            raise BadTable(f"there is no column {listed(absent)}, which the model was trained with")
        encoded = [column.encode(frame[column.name]) for column in self.columns]
        inputs = torch.from_numpy(np.concatenate([inputs for inputs, _ in encoded], axis=1))
        return inputs, [note for _, notes in encoded for note in notes]


def learn(
    frame: pd.DataFrame, train: np.ndarray, *, ignore: Collection[str] = (), categorical: Collection[str] = ()
) -> Columns:
    """Decides what becomes of every column. Its kind is told from all rows, everything else from the rows `train`."""
    columns, told, notices = [], [], []
    for name in map(str, frame.columns):
        if name in ignore:
            told.append(Told(name, "–", "left out, as was asked for"))
            continue
        found = "category" if name in categorical else kind_of(name, frame[name])
        if found == "category" and name not in categorical and (looks := disguised(frame[name])):
            notices.append(f"Column {name!r} looks like {looks} to use it as numbers.")
        column, why = _column_of(name, frame[name], train, found)
        told.append(Told(name, found, f"left out: {why}" if column is None else column.done + why))
        if column is not None:
            columns.append(column)
            notices += [f"{name!r}: {column.done}{why}."] if why else []
    if not columns:
        why = "; ".join(f"{name!r} was {done}" for name, _, done in told) or "there are only targets"
        raise BadTable(f"no column is left to learn from: {'. '.join([why, *notices]).removesuffix('.')}")
    return Columns(tuple(columns), tuple(told), tuple(notices))


def _column_of(name: str, column: pd.Series, train: np.ndarray, kind: str) -> tuple[Any, str]:
    """The column and a remark, or None and why not."""
    rows = column.iloc[train]
    if kind == "empty" or rows.isna().all():
        return None, "it has no values"
    if kind == "number":
        number = NumberColumn.of(name, rows)
        return (number, _counter(rows)) if number.names else (None, f"it is always {number.median:.4g}")
    if kind == "date":
        date = DateColumn.of(name, rows, date_format(column))
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
    values = np.sort(numbers("", rows.dropna()))
    whole = len(values) >= 20 and bool((values == np.round(values)).all()) and bool((np.diff(values) > 0).all())
    counts = whole and values[-1] - values[0] < 2 * len(values)  # the rows of the test are missing here
    return "; its whole numbers are all different, as those that count rows: --ignore leaves it out" if counts else ""


def _ambiguous(column: pd.Series, form: str) -> str:
    if form != "%m/%d/%Y" or read_as(column.dropna(), "%d/%m/%Y").isna().any():
        return ""
    return "; day/month/year would be possible too: if it is that, write the dates as year-month-day"


# --- the target ---


@dataclass(frozen=True)
class Target:
    """Numbers, or one column of classes."""

    names: tuple[str, ...]
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """A file may have been made by anybody."""
        if not self.names or (self.classes and (len(self.names) > 1 or len(self.classes) < 2)):
            raise ValueError("target: there is no target, or one class only")

    @property
    def task(self) -> str:
        return "classification" if self.classes else "regression"

    def values(self, frame: pd.DataFrame) -> Tensor:
        """(N, targets) in float64; or (N,) places in `classes`, −1 for a class that is not among them."""
        if not self.classes:
            return torch.from_numpy(np.stack([numbers(name, frame[name]) for name in self.names], axis=1))
        places = {name: place for place, name in enumerate(self.classes)}
        return torch.tensor([places.get(text, -1) for text in as_text(frame[self.names[0]])])


def check_names(frame: pd.DataFrame, names: Sequence[str], option: str) -> None:
    """Refuses names of columns that the table does not have."""
    if absent := [name for name in names if name not in frame.columns]:
        there = list(map(str, frame.columns))
        has = f"the table has {listed(there, 20)}{nameless(there)}"
        raise BadTable(f"{option}: there is no column {listed(absent)}; {has}")


@contextmanager
def own_options(names: Sequence[str]) -> Iterator[None]:
    """Errors about a target name the options for targets: --ignore and --categorical are for the other columns."""
    try:
        yield
    except BadTable as error:
        classes = ", or --classify if these are classes" if len(names) == 1 else ""
        raise BadTable(error.sentence, f", or use --missing WORD for a word that means no value{classes}") from None


def decide_target(frame: pd.DataFrame, names: tuple[str, ...], classify: bool | None) -> tuple[Target, list[str]]:
    """The target and what was assumed; `classify` None lets its values decide. No value is missing in `frame`."""
    if classify and len(names) > 1:
        raise BadTable("--classify takes one --target")
    with own_options(names):
        found = {name: "category" if classify else kind_of(name, frame[name]) for name in names}
    for name, kind in found.items():
        if kind == "date":
            raise BadTable(f"the target {name!r} is a date, which cannot be predicted: make a number of it")
        if kind == "category" and (classify is False or len(names) > 1):
            _refuse_disguised(name, frame[name])
            way = "leave --regress out" if len(names) == 1 else "predict it alone"
            raise BadTable(f"the target {name!r} is text ({listed(_levels(frame[name]), 3)}), and no number: {way}")
    name, column = names[0], frame[names[0]]
    if "category" in found.values():
        classes, looks = _classes(frame, name), disguised(column)
        hint = f" It looks like {looks} to predict it as numbers." if looks else ""
        return classes, [] if classify else [f"{name!r} is text: a class is predicted.{hint}"]
    if classify is None and len(names) == 1 and _few(column):
        classes = _classes(frame, name)
        few = ", ".join(classes.classes)
        return classes, [
            f"{name!r} has only the values {few}: they are taken for classes; with --regress they are numbers."
        ]
    target = Target(names)
    check_varies(target, target.values(frame), "")
    return target, []


def check_varies(target: Target, Y: Tensor, where: str) -> None:
    """Refuses numbers that are all the same."""
    for name, values in zip(target.names, () if target.classes else Y.T.numpy(), strict=False):
        if constant(values):
            raise BadTable(f"every value of the target {name!r} is {values[0]:g}{where}: there is nothing to learn")


def _few(column: pd.Series) -> bool:
    values = np.unique(numbers(str(column.name), column))
    return len(values) <= min(FEW, len(column) // 5) and bool((values == np.round(values)).all())


def _classes(frame: pd.DataFrame, name: str) -> Target:
    classes = _levels(frame[name])
    if len(classes) == 1:
        raise BadTable(f"the target {name!r} has one class only, {quoted(classes[0])}: there is nothing to tell apart")
    if len(classes) > min(CLASSES, len(frame) / 2):
        _refuse_disguised(name, frame[name])
        raise BadTable(
            f"the target {name!r} has {len(classes):,} different values in {len(frame):,} rows, too many for classes: "
            "choose another --target, or use --regress if they are numbers"
        )
    return Target((name,), tuple(classes))


def _refuse_disguised(name: str, column: pd.Series) -> None:
    looks = disguised(column)
    if looks:
        shown = quoted(column.dropna().iloc[0])
        raise BadTable(f"the target {name!r} is text ({shown}), but looks like {looks} to predict numbers")


def _levels(column: pd.Series) -> list[str]:
    """In the order of numbers if all are numbers, or else in that of the alphabet."""
    levels = sorted(map(str, as_text(column).dropna().unique()))
    numbers = pd.to_numeric(pd.Series(levels, dtype="str"), errors="coerce")
    return levels if numbers.isna().any() else [levels[i] for i in np.argsort(numbers.to_numpy(), kind="stable")]
