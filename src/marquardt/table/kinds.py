"""What a column of a table holds: numbers, dates or categories. A value that does not fit is named with its row."""

from __future__ import annotations

import warnings
from typing import Literal

import numpy as np
import pandas as pd  # type: ignore[import-untyped]

from ..values import quoted
from .reading import MOST, BadTable, counted

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


def kind(name: str, column: pd.Series) -> Kind:
    """What a column holds; `BadTable` if it mixes numbers or dates with text."""
    values = column.dropna()
    if not len(values):
        return "empty"
    if pd.api.types.is_datetime64_any_dtype(values):
        return "date"
    if pd.api.types.is_numeric_dtype(values):
        numbers(name, values)  # infinite ones are refused
        return "number"
    if pd.to_numeric(values, errors="coerce").notna().mean() > MOST:
        numbers(name, column)
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
        f", or use --missing WORD for a word that means no value, --categorical {_quoted(name)} if these are "
        f"categories, or --ignore {_quoted(name)}",
    )


def _quoted(name: str) -> str:
    return f"'{name}'" if set(' ;|&()$"') & set(name) else name
