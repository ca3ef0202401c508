"""Tables in CSV or Parquet files, read through pandas: every cell of a CSV file as the text that stands there.

What a column holds is decided by `columns` and not by the reader: a value that does not fit can be named with its row.
"""

from __future__ import annotations

import csv
import math
import os
import re
import shlex
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]

from ..values import quoted, shortened

MISSING = ("", "na", "n/a", "#n/a", "nan", "null", "none", "?")  # in lower case: what stands for no value in a cell
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
HEAD = 1 << 16  # bytes that are looked at before a file is read
PER_BYTE, PER_CELL = 4, 20  # bytes of memory for a byte and a cell of CSV, as text and as numbers (measured: at most)
PER_NUMBER, PER_OBJECT = 24, 250  # for a value in Parquet, and for one that is neither a number nor text (measured)
PER_TEXT, PER_LETTER = 650, 5  # for a text of Parquet, which may stand in many rows, and for a byte of it in each row
ESCAPED = 4  # letters for a byte that is no text
COLUMNS = 20_000  # more are refused: each takes a moment
NAMES = 1 << 26  # bytes of the first line at most
LARGE = 100e6  # bytes: what is larger is announced
DECIMAL_COMMA = r"[+-]?\d*,\d+(?:[eE][+-]?\d+)?"
DECIMAL_POINT = DECIMAL_COMMA.replace(",", r"\.")
DOTS = r"[+-]?[1-9]\d{0,2}(?:\.\d{3})+"  # between thousands
COMMAS = r"[+-]?[1-9]\d{0,2}(?:,\d{3})+"
WITH_COMMA = rf"{DECIMAL_COMMA}|{COMMAS}|{DOTS},\d+"
NUMBER = rf"{WITH_COMMA}|{DECIMAL_POINT}|{DOTS}(?:,\d+)?|[+-]?\d+"
MOST = 0.5  # if more of a column than this is numbers (or dates), the rest is taken for mistakes


class BadTable(ValueError):
    """A table that cannot be used, in one `sentence`; `options` adds those of `marquardt fit` that are a way out."""

    def __init__(self, sentence: str, options: str = "") -> None:
        super().__init__(sentence + options)
        self.sentence = sentence


@dataclass(frozen=True)
class Sheet:
    """`frame` has text in the columns of a CSV file, and numbers, dates or text in those of a Parquet file."""

    path: Path
    frame: pd.DataFrame
    says: list[str] = field(default_factory=list)  # what was assumed in reading it
    commas: bool = False  # whether its numbers have decimal commas
    mixed: dict[str, str] = field(default_factory=dict)  # columns that then have a decimal point too, and where

    def check(self, names: Iterable[str]) -> None:
        """Refuses columns whose numbers have a point, in a file of decimal commas."""
        for name in names:
            if name in self.mixed:
                raise BadTable(
                    f"the numbers of {self.path} have decimal commas, but the column {name!r} has a dot that separates "
                    f"no thousands: {self.mixed[name]}; write all numbers in one way",
                    f", or use --categorical {shlex.quote(name)} if these are categories, or "
                    f"--ignore {shlex.quote(name)}",
                )


def read(path: Path, *, rows: int | None = None, missing: tuple[str, ...] = (), commas: bool = False) -> Sheet:
    """The table in a file; `rows`: only that many, from the top; `missing`: further words for no value; `commas`: its
    numbers have decimal commas if nothing in it speaks against that."""
    head = _head(path)
    parquet = head.startswith(b"PAR1")
    if not parquet:
        _check_text(path, head)
    try:
        table = _read_parquet(path, rows, missing) if parquet else _read_csv(path, head, rows, missing, commas)
    except MemoryError:
        raise BadTable(f"{path} does not fit into memory", ": --rows N reads the first N rows") from None
    if not len(table.frame):
        raise BadTable(f"{path} has names of columns, but no row below them")
    return table


def announce(path: Path) -> str | None:
    """A sentence on a file that takes long to read."""
    size = path.stat().st_size if path.is_file() else 0
    return f"{path} has {size / 1e9:.2g} GB: reading it takes a while." if size > LARGE else None


def listed(names: list[str], most: int = 8) -> str:
    """'a', 'b' and 3 more"""
    shown = ", ".join(map(quoted, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def counted(n: int, thing: str) -> str:
    """1 row, 2 rows"""
    return f"{n:,} {thing}" + "s" * (n != 1)


# --- before anything is read ---


def _head(path: Path) -> bytes:
    if path.is_dir():
        raise BadTable(f"{path} is a folder: name the CSV or Parquet file in it")
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError as error:
        raise BadTable(f"{path} cannot be read ({error.strerror or error})") from None
    if not head.strip():
        raise BadTable(f"{path} is empty")
    return head


def _check_text(path: Path, head: bytes) -> None:
    if head.startswith(b"PK\x03\x04"):
        raise BadTable(f"{path} is an Excel or zip file: save the table as CSV")
    if b"\0" in head and not head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise BadTable(f"{path} is not text, and so no CSV file: unpack it, or save the table as CSV or Parquet")


def _check_memory(path: Path, need: float) -> None:
    free = available_memory()
    if free is not None and need > free:
        raise BadTable(
            f"{path} needs about {need / 1e9:.2g} GB of memory, and {free / 1e9:.2g} GB are free",
            ": --rows N reads the first N rows",
        )


def _check_columns(path: Path, count: int) -> None:
    if count > COLUMNS:
        raise BadTable(f"{path} has {count:,} columns, more than the {COLUMNS:,} that can be read: leave some out")


def available_memory() -> int | None:
    """Bytes that are free, if the system tells: of the machine, and of the group of processes that this one is in."""
    known = [found for found in (_free_here(), _free_in_group()) if found is not None]
    return min(known, default=None)


def _free_here() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        names = getattr(os, "sysconf_names", {})
        known = "SC_AVPHYS_PAGES" in names and "SC_PAGE_SIZE" in names
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else None
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else None


def _free_in_group(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Of a container; what its files have in the cache is given back when it is needed."""
    try:
        most, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        cached = re.search(r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):  # no such group, or one without a limit
        return None
    return max(most - used + (int(cached[1]) if cached else 0), 0)


# --- CSV ---


def _read_csv(path: Path, head: bytes, rows: int | None, missing: tuple[str, ...], commas: bool) -> Sheet:
    wide = head.startswith((b"\xff\xfe", b"\xfe\xff"))
    encodings = ["utf-16"] if wide else ["utf-8-sig", "cp1252", "latin-1"]
    lines, size = _counted_lines(path, wide), path.stat().st_size if rows is None else 0
    _check_memory(path, PER_BYTE * size)
    says = []
    for encoding in encodings:
        try:
            separator = _separator(head.decode(encoding, errors="ignore"))
            names = _first_line(path, encoding, separator)
            cells = len(names) * (lines if rows is None else min(rows, lines))
            _check_memory(path, PER_CELL * cells + PER_BYTE * size)
            frame = _blanked(_parsed(path, encoding, separator, rows, names), missing)
        except UnicodeDecodeError:
            continue
        if encoding != encodings[0]:
            says.append(f"{path.name} is not UTF-8; it was read as {encoding}.")
        if separator != ",":
            says.append(f"{path.name} has {SEPARATORS[separator]} between its columns.")
            return _with_points(Sheet(path, frame, says, commas))
        return Sheet(path, frame, says)
    raise BadTable(f"{path} is text in no encoding that is known here: save it as UTF-8")


def _counted_lines(path: Path, wide: bool) -> int:
    """How many there are at most: a short one has a cell for every name, too."""
    ends, nul, at = 0, -1, 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            ends += max(block.count(b"\n"), block.count(b"\r"))
            nul = block.find(b"\0")
            if nul >= 0 and not wide:
                raise BadTable(f"{path} is not text: it has a zero at byte {at + nul + 1:,}; save it as CSV again")
            at += len(block)
    return ends + 1


def _separator(text: str) -> str:
    """The one that gives most columns, the same number in nearly every line of the head."""
    lines = text.splitlines()[:100]
    lines = lines[:-1] if len(lines) > 2 else lines  # the last may be cut off
    widths = {}
    for separator in SEPARATORS:
        try:
            found = [len(cells) for cells in csv.reader(lines, delimiter=separator) if cells]
        except csv.Error:  # a cell that is longer than all others, such as one whose quotes do not end
            continue
        if found and found[0] > 1 and found.count(found[0]) >= 0.9 * len(found):
            widths[separator] = found[0]
    return max(widths, key=lambda separator: widths[separator]) if widths else ","


def _names(path: Path, cells: Iterable[str]) -> list[str]:
    """A column without a name is called by its place; two of one name are refused."""
    names = [cell.strip() or f"column {place}" for place, cell in enumerate(cells, 1)]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        places = ", ".join(str(place) for place, name in enumerate(names, 1) if name == twice[0])
        raise BadTable(
            f"{path} has two columns of one name, {listed(twice)} ({twice[0]!r}: columns {places}): "
            f"rename or delete one of them{nameless(names)}"
        )
    return names


def nameless(names: list[str]) -> str:
    """A hint for tables that begin with data"""
    numbers = all(re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", name) for name in names)
    return "; the first line must have the names of the columns" if numbers else ""


def _first_line(path: Path, encoding: str, separator: str) -> list[str]:
    with path.open("rb") as file:
        line = b"\n"
        while line and not line.strip():
            line = file.readline(NAMES)
    if len(line) == NAMES:
        raise BadTable(f"the first line of {path} has more than {NAMES:,} bytes: it must have the names of the columns")
    _check_columns(path, line.count(separator.encode()) + 1)
    with _no_table(path):
        return _names(path, pd.read_csv(path, header=None, nrows=1, **_options(encoding, separator)).iloc[0])


def _options(encoding: str, separator: str) -> dict[str, Any]:
    """`compression`: pandas would unpack what is named as if it were packed, whatever size that has."""
    text = {"dtype": str, "keep_default_na": False}
    return {"encoding": encoding, "sep": separator, "compression": None, **text}


def _parsed(path: Path, encoding: str, separator: str, rows: int | None, names: list[str]) -> pd.DataFrame:
    with _no_table(path, names), warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)  # cells that no column has a name for
        frame = pd.read_csv(path, nrows=rows, index_col=False, **_options(encoding, separator))
    frame.columns = names
    return frame


@contextmanager
def _no_table(path: Path, names: Iterable[str] = ()) -> Iterator[None]:
    """What pandas says of text that is no table, in a sentence"""
    try:
        yield
    except (pd.errors.ParserError, pd.errors.ParserWarning, pd.errors.EmptyDataError) as error:
        reason = " ".join(str(error).split()).removeprefix("Error tokenizing data. C error: ")
        if isinstance(error, pd.errors.ParserWarning):
            reason = f"its rows have more cells than the {len([*names])} names in the first line"
        raise BadTable(f"{path} is no table ({shortened(reason)}): correct that line") from None


def _with_points(sheet: Sheet) -> Sheet:
    """Numbers with decimal commas get points; a dot in such a file separates thousands, and goes."""
    found = _decimal_commas(sheet)
    if not found:
        return Sheet(sheet.path, sheet.frame, sheet.says + (_perhaps_thousands(sheet.frame) if found is None else []))
    columns, commas, dots, mixed = dict(sheet.frame.items()), [], [], {}
    for name, column in sheet.frame.items():
        dotted = _are(column, rf"{DECIMAL_POINT}|{DOTS}(?:,\d+)?")
        if dotted.any() and _numeric(column):
            others = dotted & ~_are(column, rf"{DOTS}(?:,\d+)?")
            if others.any():
                mixed[str(name)] = f"{quoted(column[others].iloc[0])} in row {column.index[others][0] + 1}"
                continue
            dots.append(f"{name!r} ({column[dotted].iloc[0]})")
            column = column.where(~dotted, column.str.replace(".", "", regex=False))
        points = _are(column, DECIMAL_COMMA)
        commas += [str(name)] if points.any() else []
        columns[name] = column.where(~points, column.str.replace(",", ".", regex=False))
    says = [*sheet.says, *([f"Its numbers have decimal commas (columns {listed(commas)})."] if commas else [])]
    says += [f"A dot in its numbers separates thousands: {', '.join(dots)}."] if dots else []
    return Sheet(sheet.path, pd.DataFrame(columns), says, True, mixed)


def _perhaps_thousands(frame: pd.DataFrame) -> list[str]:
    """A sentence on numbers whose dots may be either."""
    dotted = {name: column[_are(column, DOTS)] for name, column in frame.items() if _numeric(column)}
    shown = ", ".join(f"{name!r} ({column.iloc[0]})" for name, column in dotted.items() if len(column))
    return [f"A dot in its numbers is read as a decimal point: {shown}; remove it if it separates thousands."] * bool(
        shown
    )


def _decimal_commas(sheet: Sheet) -> bool | None:
    """Whether numbers have them, None if nothing in the file tells; commas that may separate thousands do so beside
    numbers with decimal points."""
    numeric = [column.dropna() for _, column in sheet.frame.items() if _numeric(column)]
    points = any((_are(column, DECIMAL_POINT) & ~_are(column, DOTS)).any() for column in numeric)
    commas = [column[_are(column, WITH_COMMA)] for column in numeric]
    if not any(map(len, commas)):
        return False if points else sheet.commas or None
    if not all(_are(column, COMMAS).all() for column in commas):
        return True
    return not points and not any((column.str.count(",") > 1).any() for column in commas)


def _are(column: pd.Series, form: str) -> pd.Series:
    return column.str.fullmatch(form, na=False)


def _numeric(column: pd.Series) -> bool:
    return bool(column.dropna().str.fullmatch(NUMBER).mean() > MOST)


def _blanked(frame: pd.DataFrame, missing: tuple[str, ...]) -> pd.DataFrame:
    """Text without the blanks around it; what stands for no value becomes NA."""
    words = {*MISSING, *(word.strip().lower() for word in missing)}

    def blanked(column: pd.Series) -> pd.Series:
        if not isinstance(column.dtype, pd.StringDtype):
            return column
        column = column.str.strip()
        return column.mask(column.str.lower().isin(words))

    return pd.DataFrame({name: blanked(column) for name, column in frame.items()})


# --- Parquet ---


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    """What pyarrow says of a file that is not as it was written, in a sentence; it has many kinds of errors."""
    try:
        yield
    except (BadTable, MemoryError):
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise BadTable(f"{path} is a damaged Parquet file ({shortened(reason)}): write it again") from None


def _read_parquet(path: Path, rows: int | None, missing: tuple[str, ...]) -> Sheet:
    import pyarrow.parquet  # type: ignore[import-untyped]

    with path.open("rb") as raw, _damaged(path):  # pyarrow cannot open names that are no UTF-8
        file = pyarrow.parquet.ParquetFile(raw)
        _check_columns(path, file.metadata.num_columns)
        nested = [field.name for field in file.schema_arrow if pyarrow.types.is_nested(field.type)]
        flat = [name for name in file.schema_arrow.names if name not in nested]
        names = _names(path, flat)
        if not names:
            raise BadTable(f"{path} has no column of single values: its columns are lists or objects")
        leaves = [j for j in range(len(file.schema)) if file.schema.column(j).path in flat]
        _check_memory(path, _parquet_bytes(file, leaves, rows))
        # Texts are read as the different ones and which of them stands where: a short file may have a long one a
        # million times, and how long they all are is known before they are written out.
        texts = [flat[k] for k, j in enumerate(leaves) if file.schema.column(j).physical_type == "BYTE_ARRAY"]
        file = pyarrow.parquet.ParquetFile(raw, read_dictionary=texts, page_checksum_verification=True)
        found = file.read(flat) if rows is None else _first(file, flat, rows)
        _check_memory(path, sum(map(_text_bytes, found.columns)) + PER_NUMBER * found.num_rows * len(names))
        frame = found.to_pandas(ignore_metadata=True)
        frame.columns = names
        plain = pd.DataFrame({name: _plain(frame[name]) for name in names})
    says = [f"Columns {listed(nested)} of {path.name} hold lists or objects: they are left out."] if nested else []
    return Sheet(path, _blanked(plain, missing), says)


def _text_bytes(column: Any) -> int:
    """Of the texts in a column, if each of them is written out where it stands"""
    import pyarrow
    import pyarrow.compute  # type: ignore[import-untyped]

    need = 0
    for part in column.chunks if pyarrow.types.is_dictionary(column.type) else ():
        lengths = pyarrow.compute.binary_length(part.dictionary).cast("int64")
        letters = pyarrow.compute.sum(lengths.take(part.indices)).as_py() or 0
        each = PER_LETTER * (ESCAPED if pyarrow.types.is_binary(part.dictionary.type) else 1)
        need += PER_TEXT * len(lengths) + each * letters
    return need


def _parquet_bytes(file: Any, leaves: list[int], rows: int | None) -> int:
    """Of all that is decoded to read so many rows. A value that is written down once for many rows counts in each.

    The bytes are those of all columns of a group: asked for one of them whose metadata are damaged, pyarrow ends the
    process."""
    meta, need, left = file.metadata, 0.0, math.inf if rows is None else rows
    for i in range(meta.num_row_groups):
        group = meta.row_group(i)
        if group.num_rows < 0:
            raise ValueError("a number of rows is negative")
        taken = min(left, group.num_rows)
        need += 2 * max(group.total_byte_size, 0) * (taken > 0)
        need += sum(taken * _width(file.schema.column(j)) for j in leaves)
        left -= taken
    return int(need)


def _width(column: Any) -> int:
    """Bytes of one value; the letters of texts are counted apart"""
    if column.physical_type == "FIXED_LEN_BYTE_ARRAY":
        return int(PER_OBJECT + ESCAPED * PER_LETTER * column.length)
    return PER_OBJECT if column.logical_type.type in ("DECIMAL", "TIME", "DATE") else PER_NUMBER


def _first(file: Any, names: list[str], rows: int) -> Any:
    """The others are not read."""
    import pyarrow

    batches = []
    for batch in file.iter_batches(batch_size=min(rows, 1 << 16), columns=names):
        batches.append(batch.slice(0, rows))
        rows -= len(batches[-1])
        if rows == 0:
            break
    return pyarrow.Table.from_batches(batches) if batches else file.schema_arrow.empty_table().select(names)


def _plain(column: pd.Series) -> pd.Series:
    """Numbers as float64, dates as dates in UTC without its name, anything else as text."""
    kinds = pd.api.types
    if kinds.is_datetime64_any_dtype(column):
        aware = column.dt.tz is not None
        return column.dt.tz_convert("UTC").dt.tz_localize(None) if aware else column
    if kinds.is_numeric_dtype(column) and not kinds.is_bool_dtype(column):
        return column.astype("float64")
    return column.map(str, na_action="ignore").astype("str")
