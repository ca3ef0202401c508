"""Tables in CSV or Parquet files, read through pandas: every cell of a CSV file as the text that stands there.

What a column holds is decided by `columns` and not by the reader: a value that does not fit can be named with its row.
"""

from __future__ import annotations

import csv
import math
import re
import shlex
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
FIRST_ROWS = ": --rows N reads the first N rows"
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
                    f", or use {other_use(name)}",
                )


def read(path: Path, *, rows: int | None = None, missing: tuple[str, ...] = (), commas: bool = False) -> Sheet:
    """The table in a file; `rows`: only that many, from the top; `missing`: further words for no value; `commas`: its
    numbers have decimal commas if nothing in it speaks against that."""
    head = _head(path)
    try:
        parquet = head.startswith(b"PAR1")
        table = _read_parquet(path, rows, missing) if parquet else _read_csv(path, head, rows, missing, commas)
    except MemoryError:
        raise BadTable(f"{path} does not fit into memory", FIRST_ROWS) from None
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


def other_use(name: str) -> str:
    """The options for a column that is not to be used as numbers or dates"""
    return f"--categorical {shlex.quote(name)} if these are categories, or --ignore {shlex.quote(name)}"


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
    if head.startswith(b"PK\x03\x04"):
        raise BadTable(f"{path} is an Excel or zip file: save the table as CSV")
    return head


def check_memory(what: str, need: float, way: str) -> None:
    """Refuses what needs more memory than is free."""
    free = available_memory()
    if free is not None and need > free:
        raise BadTable(f"{what} about {need / 1e9:.2g} GB of memory, and {free / 1e9:.2g} GB are free", way)


def _check(path: Path, need: float, columns: int = 0) -> None:
    if columns > COLUMNS:
        raise BadTable(f"{path} has {columns:,} columns, more than the {COLUMNS:,} that can be read: leave some out")
    check_memory(f"{path} needs", need, FIRST_ROWS)


def available_memory() -> int | None:
    """Bytes that are free, if the system tells: of the machine, and of the group of processes that this one is in."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:  # not Linux
        found = None
    known = [int(found[1]) * 1024 if found else None, _free_in_group()]
    return min((free for free in known if free is not None), default=None)


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
    lines, size = _lines(path, wide), path.stat().st_size if rows is None else 0
    _check(path, PER_BYTE * size)
    for encoding in encodings:
        separator = _separator(head.decode(encoding, errors="ignore"))
        # What is named as if it were packed would be unpacked by pandas, whatever size that has.
        text = {"encoding": encoding, "sep": separator, "compression": None, "dtype": str, "keep_default_na": False}
        try:
            names = _first_line(path, text)
            _check(path, PER_CELL * len(names) * min(lines, rows or lines) + PER_BYTE * size)
            with _no_table(path, len(names)), warnings.catch_warnings():
                warnings.simplefilter("error", pd.errors.ParserWarning)  # cells that no column has a name for
                frame = pd.read_csv(path, nrows=rows, index_col=False, **text)
        except UnicodeDecodeError:
            continue
        frame.columns = names
        sheet = Sheet(path, _blanked(frame, missing))
        if encoding != encodings[0]:
            sheet.says.append(f"{path.name} is not UTF-8; it was read as {encoding}.")
        if separator == ",":
            return sheet
        sheet.says.append(f"{path.name} has {SEPARATORS[separator]} between its columns.")
        return _with_points(sheet, commas)
    raise BadTable(f"{path} is text in no encoding that is known here: save it as UTF-8")


def _lines(path: Path, wide: bool) -> int:
    """How many there are at most: a short one has a cell for every name, too."""
    ends, at = 0, 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            ends += max(block.count(b"\n"), block.count(b"\r"))
            if b"\0" in block and not wide:
                reason = f"it has a zero at byte {at + block.index(0) + 1:,}"
                raise BadTable(
                    f"{path} is not text ({reason}), and so no CSV file: unpack it, or save the table as CSV or Parquet"
                )
            at += len(block)
    return ends + 1


def _separator(text: str) -> str:
    """The one that gives most columns, the same number in nearly every line of the head."""
    lines = text.splitlines()[:100]
    lines = lines[:-1] if len(lines) > 2 else lines  # the last may be cut off
    widths = {",": 1}
    for separator in SEPARATORS:
        try:
            found = [len(cells) for cells in csv.reader(lines, delimiter=separator) if cells]
        except csv.Error:  # a cell that is longer than all others, such as one whose quotes do not end
            continue
        if found and found[0] > 1 and found.count(found[0]) >= 0.9 * len(found):
            widths[separator] = found[0]
    return max(widths, key=lambda separator: widths[separator])


def _names(path: Path, cells: Iterable[str]) -> list[str]:
    """A column without a name is called by its place; two of one name are refused."""
    names = [cell.strip() or f"column {place}" for place, cell in enumerate(cells, 1)]
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
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


def _first_line(path: Path, text: dict[str, Any]) -> list[str]:
    with path.open("rb") as file:
        line = b"\n"
        while line and not line.strip():
            line = file.readline(NAMES)
    if len(line) == NAMES:
        raise BadTable(f"the first line of {path} has more than {NAMES:,} bytes: it must have the names of the columns")
    _check(path, 0, line.count(text["sep"].encode()) + 1)
    with _no_table(path):
        return _names(path, pd.read_csv(path, header=None, nrows=1, **text).iloc[0])


@contextmanager
def _no_table(path: Path, names: int = 0) -> Iterator[None]:
    """What pandas says of text that is no table, in a sentence"""
    try:
        yield
    except pd.errors.ParserWarning:
        reason = f"its rows have more cells than the {names} names in the first line"
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        reason = shortened(" ".join(str(error).split()).removeprefix("Error tokenizing data. C error: "))
    else:
        return
    raise BadTable(f"{path} is no table ({reason}): correct that line")


def _with_points(sheet: Sheet, commas: bool) -> Sheet:
    """Numbers with decimal commas get points; a dot in such a file separates thousands, and goes. `commas`: so it is if
    nothing in the file tells."""
    texts = {name: column for name, column in sheet.frame.items() if _are(column.dropna(), NUMBER).mean() > MOST}
    dots = {name: column[_are(column, DOTS)] for name, column in texts.items()}
    has_commas = _decimal_commas([*texts.values()])
    if has_commas is None and not commas:
        shown = ", ".join(f"{name!r} ({column.iloc[0]})" for name, column in dots.items() if len(column))
        point = f"A dot in its numbers is read as a decimal point: {shown}; remove it if it separates thousands."
        return replace(sheet, says=sheet.says + [point] * bool(shown))
    if has_commas is False:
        return sheet
    columns, mixed, separated, decimal = dict(sheet.frame.items()), {}, [], []
    for name, column in sheet.frame.items():
        if name in texts:
            points = column[_are(column, DECIMAL_POINT) & ~_are(column, DOTS)]
            if len(points):
                mixed[name] = f"{quoted(points.iloc[0])} in row {points.index[0] + 1}"
                continue
            dotted = _are(column, rf"{DOTS}(?:,\d+)?")
            separated += [f"{name!r} ({column[dotted].iloc[0]})"] if dotted.any() else []
            column = column.where(~dotted, column.str.replace(".", "", regex=False))
        commas_here = _are(column, DECIMAL_COMMA)
        decimal += [name] if commas_here.any() else []
        columns[name] = column.where(~commas_here, column.str.replace(",", ".", regex=False))
    says = [f"Its numbers have decimal commas (columns {listed(decimal)})."] if decimal else []
    says += [f"A dot in its numbers separates thousands: {', '.join(separated)}."] if separated else []
    return Sheet(sheet.path, pd.DataFrame(columns), sheet.says + says, True, mixed)


def _decimal_commas(texts: list[pd.Series]) -> bool | None:
    """Whether numbers have them, None if nothing tells; commas that may separate thousands do so beside numbers with
    decimal points."""
    points = any((_are(column, DECIMAL_POINT) & ~_are(column, DOTS)).any() for column in texts)
    commas = [column[_are(column, WITH_COMMA)] for column in texts]
    if not any(map(len, commas)):
        return False if points else None
    if not all(_are(column, COMMAS).all() for column in commas):
        return True
    return not points and not any((column.str.count(",") > 1).any() for column in commas)


def _are(column: pd.Series, form: str) -> pd.Series:
    return column.str.fullmatch(form, na=False)


def _blanked(frame: pd.DataFrame, missing: tuple[str, ...]) -> pd.DataFrame:
    """Text without the blanks around it; what stands for no value becomes NA."""
    words = {*MISSING, *(word.strip().lower() for word in missing)}
    texts = {name: column.str.strip() for name, column in frame.items() if isinstance(column.dtype, pd.StringDtype)}
    blanked = {name: text.mask(text.str.lower().isin(words)) for name, text in texts.items()}
    return pd.DataFrame({**dict(frame.items()), **blanked})


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
        _check(path, 0, file.metadata.num_columns)
        nested = [field.name for field in file.schema_arrow if pyarrow.types.is_nested(field.type)]
        flat = [name for name in file.schema_arrow.names if name not in nested]
        names = _names(path, flat)
        if not names:
            raise BadTable(f"{path} has no column of single values: its columns are lists or objects")
        leaves = [column for column in map(file.schema.column, range(len(file.schema))) if column.path in flat]
        _check(path, _parquet_bytes(file.metadata, leaves, rows))
        # Texts are read as the different ones and which of them stands where: a short file may have a long one a
        # million times, and how long they all are is known before they are written out.
        texts = [name for name, column in zip(flat, leaves, strict=True) if column.physical_type == "BYTE_ARRAY"]
        file = pyarrow.parquet.ParquetFile(raw, read_dictionary=texts, page_checksum_verification=True)
        found = file.read(flat) if rows is None else _first(file, flat, rows)
        _check(path, sum(map(_text_bytes, found.columns)) + PER_NUMBER * found.num_rows * len(names))
        frame = found.to_pandas(ignore_metadata=True)
        plain = pd.DataFrame({name: _plain(frame[column]) for name, column in zip(names, flat, strict=True)})
    says = [f"Columns {listed(nested)} of {path.name} hold lists or objects: they are left out."] if nested else []
    return Sheet(path, _blanked(plain, missing), says)


def _parquet_bytes(meta: Any, leaves: list[Any], rows: int | None) -> float:
    """Of all that is decoded to read so many rows. A value that is written down once for many rows counts in each; the
    letters of texts are counted apart.

    The bytes are those of all columns of a group: asked for one of them whose metadata are damaged, pyarrow ends the
    process."""
    width = 0
    for column in leaves:
        each = ESCAPED * PER_LETTER * column.length if column.physical_type == "FIXED_LEN_BYTE_ARRAY" else 0
        objects = each or column.logical_type.type in ("DECIMAL", "TIME", "DATE")
        width += each + (PER_OBJECT if objects else PER_NUMBER)
    need, left = 0.0, math.inf if rows is None else rows
    for group in map(meta.row_group, range(meta.num_row_groups)):
        if group.num_rows < 0:
            raise ValueError("a number of rows is negative")
        need += (2 * max(group.total_byte_size, 0) if left else 0) + min(left, group.num_rows) * width
        left -= min(left, group.num_rows)
    return need


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
        return column if column.dt.tz is None else column.dt.tz_convert("UTC").dt.tz_localize(None)
    if kinds.is_numeric_dtype(column) and not kinds.is_bool_dtype(column):
        return column.astype("float64")
    return column.map(str, na_action="ignore").astype("str")
