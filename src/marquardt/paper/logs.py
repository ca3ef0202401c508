"""Logs of runs: one JSONL file each, all that figures, tables and the report are made from."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import reprlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import files
from ..values import cell
from .vocabulary import COLUMNS, LOGS, MEASURES, METHODS, SINE_READINGS, TARGET, TARGET_LABEL

FORMAT, OLDEST = 2, 1  # of the logs; the first had no checksum
TEXT, WHOLE, NUMBER, LIST, OBJECT = "text", "a whole number", "a number or null", "a list", "an object"
TYPES: dict[str, tuple[type, ...]] = {  # of JSON's values; null stands for NaN, for infinity and for none
    TEXT: (str,), WHOLE: (int,), NUMBER: (int, float, type(None)), LIST: (list,), OBJECT: (dict,),
}  # fmt: skip
HEAD = {
    **dict.fromkeys(("experiment", "problem", "method", "label", "column", "device", "started"), TEXT),
    **dict.fromkeys(("seed", "steps", "batch", "parameters"), WHOLE),
    **dict.fromkeys(("data", "hyper", "machine", "versions"), OBJECT),
    "seconds": NUMBER,
}
DATA = {"name": TEXT, "train": WHOLE, "test": WHOLE, "source": TEXT}  # of the head
STEP = {"step": WHOLE, "seconds": NUMBER, "train_loss": NUMBER}  # any other key has a number too
POINTS = {"x": LIST, "y": LIST}
END = {"status": TEXT, "step": WHOLE, "message": TEXT}
STATUSES = ("finished", "diverged", "failed", "unavailable")
WAY_OUT = "move the file away, and `marquardt paper` runs it again"

PART = re.compile(r"[^.]+\.[^.]+\.\d+\.[0-9a-f]{8}\.part")  # what `files.whole` makes of the name of a log
HEADED = b'{"kind": "run"'

Curve = tuple[list[float], list[float]]  # x, y


@dataclass(frozen=True)
class Log:
    """One run: its head, a list of values per key of its steps, and how it ended."""

    path: Path
    head: dict[str, Any]
    steps: dict[str, list[float]]  # "step", "seconds", "train_loss", …; NaN where the log has null
    curves: dict[int, Curve]  # the fitted curve by step (sine)
    status: str
    end: int  # the step at which the run ended
    message: str

    @property
    def experiment(self) -> str:
        return str(self.head["experiment"])

    @property
    def method(self) -> str:
        return str(self.head["method"])

    @property
    def label(self) -> str:
        return str(self.head["label"])

    @property
    def column(self) -> str:
        return str(self.head["column"])

    @property
    def seed(self) -> int:
        return int(self.head["seed"])

    def at(self, time: float, key: str, clock: str = "step") -> float:
        """The last value at or before this step, or this time by the clock "seconds"; NaN after the end of a run that
        broke off, and at the step where it diverged."""
        if self.status != "finished" and time > (self.end if clock == "step" else self.final("seconds")):
            return math.nan
        if self.status == "diverged" and clock == "step" and time >= self.end:
            return math.nan
        values = self.steps.get(key)
        index = bisect_right(self.steps.get(clock, []), time) - 1
        return values[index] if values and index >= 0 else math.nan

    def final(self, key: str) -> float:
        """The last value; NaN where there is none."""
        values = self.steps.get(key)
        return values[-1] if values else math.nan

    def steps_to(self, level: float = TARGET, key: str = "test_accuracy", clock: str = "step") -> float:
        """The first step at which an accuracy reaches `level`, or a loss falls to it; ∞ where none does."""
        sign = -1 if key.endswith("loss") else 1
        pairs = zip(self.steps.get(clock, []), self.steps.get(key, []), strict=False)
        return next((time for time, value in pairs if sign * value >= sign * level), math.inf)

    def seconds_to(self, level: float = TARGET, key: str = "test_accuracy") -> float:
        """The same in seconds of training."""
        return self.steps_to(level, key, "seconds")

    def summary(self) -> str:
        """How a run went, in one line."""
        if self.status != "finished":
            return f"{self.status} at step {self.end}" + (f" ({self.message})" if self.message else "")
        if "test_accuracy" in self.steps:
            reached = self.steps_to()
            steps = f"after {reached:g} steps" if math.isfinite(reached) else "not reached"
            result = f"{TARGET_LABEL} {steps}"
            result += f", {self.final('test_accuracy'):.2%} after {self.end}"
        else:
            result = f"MSE {self.final('train_loss'):.3g} after {self.end} steps"
        return f"{result}, {self.final('seconds'):.1f} s"


def read(path: Path) -> Log:
    """The log of one run that has ended."""
    head: dict[str, Any] | None = None
    end: dict[str, Any] | None = None
    records: list[dict[str, float]] = []
    curves: dict[int, Curve] = {}
    number = 0
    content = files.content_of(path)
    for number, text in enumerate(io.BytesIO(content), 1):
        try:
            line = _parsed(text)
            kind = line["kind"]
            if end is not None:
                raise ValueError("a line after the end of the run")
            if (head is None) != (kind == "run"):
                raise ValueError("the head of the run stands in the first line, and there alone")
            if kind == "run":
                head = _checked_head(line)
            elif kind == "step":
                records.append(_checked_step(line, records))
            elif kind == "curve":
                curves[_checked(line, {"step": WHOLE})["step"]] = _points(line)
            elif kind == "data":
                _points(line)  # the noisy samples of the sine: nothing is drawn from them
            elif kind == "end":
                line.pop("sha256", None)
                end = _checked(line, END)
                if len(end) > 1 + len(END):
                    raise ValueError("the end of the run has more entries than are known here")
                if end["status"] not in STATUSES:
                    raise ValueError(f"the status {end['status']!r} is none of {', '.join(STATUSES)}")
            else:
                raise ValueError(f"unknown kind {kind!r}")
        except (ValueError, KeyError, OverflowError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path}, line {number}: {what}; {WAY_OUT}") from error
    if head is None or end is None:
        raise ValueError(f"{path}, line {number}: the log breaks off; {WAY_OUT}")
    try:
        is_sealed = files.check_text(path, content)
    except files.Damaged as error:
        raise files.Damaged(f"{error}; {WAY_OUT}") from None
    if not is_sealed and head["format"] != OLDEST:
        raise files.Damaged(f"{path} is damaged: it has lost its checksum; {WAY_OUT}")
    steps = {key: [record.get(key, math.nan) for record in records] for key in (records[0] if records else ())}
    return Log(path, head, steps, curves, end["status"], end["step"], end["message"])


def read_all(out: Path) -> list[Log]:
    """Every run under `out`/logs that has ended, in the order of tables; those in progress (.part) are left out."""
    runs = [read(path) for path in sorted(Path(out, LOGS).glob("*/*.jsonl"))]
    first: dict[str, Log] = {}
    for log in runs:
        other = first.setdefault(log.experiment, log)
        if _same_data(log) != _same_data(other):
            raise ValueError(
                f"{log.path} ran on {log.head['data']}, but {other.path} on {other.head['data']}: "
                "runs on different data cannot be compared, keep them in separate folders"
            )
    return sorted(runs, key=lambda log: (log.experiment, place(log.method), place(log.column), log.seed))


def unfinished(out: Path) -> list[Path]:
    """Logs of runs that have not ended: they are named so, and have a head or nothing yet."""
    named = [path for path in Path(out, LOGS).glob("*/*.part") if PART.fullmatch(path.name)]
    own = [path for path in named if path.is_file() and not path.is_symlink()]
    return sorted(path for path in own if not (begun := _first_bytes(path)) or begun == HEADED)


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(HEADED))


def place(key: str) -> tuple[int, str]:
    """Of a method or a column in tables."""
    order = METHODS + COLUMNS
    return (order.index(key) if key in order else len(order), key)


def select(logs: Iterable[Log], experiment: str, method: str | None = None, column: str | None = None) -> list[Log]:
    return [
        log
        for log in logs
        if log.experiment == experiment and method in (None, log.method) and column in (None, log.column)
    ]


def groups(logs: Iterable[Log], experiment: str) -> dict[tuple[str, str], list[Log]]:
    """The seeds of each (method, column), in the order of tables."""
    by_method: dict[tuple[str, str], list[Log]] = {}
    for log in select(logs, experiment):
        by_method.setdefault((log.method, log.column), []).append(log)
    return by_method


def attempted(runs: Iterable[Log]) -> list[Log]:
    """All but those whose package is missing."""
    return [log for log in runs if log.status != "unavailable"]


def runs_of(logs: Sequence[Log], experiment: str, method: str, column: str) -> list[Log]:
    """A method's runs with tuned hyper-parameters, or with its default ones if it was not tuned."""
    return attempted(select(logs, experiment, method, column) or select(logs, experiment, method, "default"))


def data_name(runs: Sequence[Log]) -> str:
    return str(runs[0].head["data"]["name"]) if runs else ""


def horizon(runs: Iterable[Log]) -> int:
    """The number of steps that all runs were asked for."""
    return min((int(log.head["steps"]) for log in attempted(runs)), default=0)


def equal_seconds(runs: Iterable[Log]) -> float:
    """The training time that all runs were given: what the heads say, or the shortest run that finished; else 0."""
    runs = attempted(runs)
    given = [float(log.head["seconds"]) for log in runs if log.head["seconds"]]
    return min(given or [log.final("seconds") for log in runs if log.status == "finished"], default=0.0)


def or_worst(value: float, key: str) -> float:
    """A run that broke off counts as the worst there is: ∞ as a loss, −∞ as an accuracy."""
    return value if math.isfinite(value) else math.inf if key.endswith("loss") else -math.inf


def quantile(values: Sequence[float], q: float) -> float:
    """Linear between order statistics, as NumPy's, but at home with ±∞."""
    ranked = sorted(values)
    rank = q * (len(ranked) - 1)
    low, high = ranked[math.floor(rank)], ranked[math.ceil(rank)]
    return low if low in (high, -math.inf) else low + (rank - math.floor(rank)) * (high - low)


def as_csv(logs: Iterable[Log]) -> str:
    """One line per run."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_FIELDS, lineterminator="\n")
    writer.writeheader()
    for log in logs:
        writer.writerow({key: cell(v) if isinstance(v, str) else v for key, v in _csv_row(log).items()})
    return text.getvalue()


CSV_FIELDS = (
    *("experiment", "method", "label", "column", "seed", "status", "end", "message", "steps", "batch", "parameters"),
    *("seconds", *MEASURES, "steps_to_90", "seconds_to_90", *(f"train_loss_{step}" for step in SINE_READINGS)),
    *("data", "device", "hyper", "started"),
)


def _csv_row(log: Log) -> dict[str, Any]:
    numbers = {key: log.final(key) for key in ("seconds", *MEASURES)}
    numbers |= {"steps_to_90": log.steps_to(), "seconds_to_90": log.seconds_to()}
    numbers |= {f"train_loss_{step}": log.at(step, "train_loss") for step in SINE_READINGS}
    head = log.head
    return {
        **{key: head[key] for key in CSV_FIELDS if key in head and key not in ("seconds", "data")},
        **{key: value if math.isfinite(value) else "" for key, value in numbers.items()},
        **{"status": log.status, "end": log.end, "message": log.message},
        **{"data": head["data"]["name"], "hyper": json.dumps(head["hyper"])},
    }


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        return files.loads(text)
    except ValueError as error:
        broken = str(error) == "not JSON" and not text.endswith(b"\n")
        where = " of the line" if str(error).startswith("not UTF-8") else ""
        raise ValueError("the line breaks off" if broken else f"{error}{where}") from error


def _checked_head(line: dict[str, Any]) -> dict[str, Any]:
    if type(line["format"]) is not int or not OLDEST <= line["format"] <= FORMAT:
        raise ValueError(f"format {reprlib.repr(line['format'])} where this version reads {OLDEST} to {FORMAT}")
    missing = [key for key in HEAD if key not in line]
    if missing:
        raise ValueError(f"the head has no {', '.join(missing)}")
    _checked({"train_sample": 0, **line}, {**HEAD, "train_sample": WHOLE})  # the one that may be missing
    _checked(line["data"], DATA)
    return line


def _checked_step(line: dict[str, Any], before: Sequence[Mapping[str, float]]) -> dict[str, float]:
    _checked(line, STEP)
    if before and line["step"] <= before[-1]["step"]:
        raise ValueError(f"step {line['step']} after step {before[-1]['step']:g}")
    return {key: _number(value) for key, value in line.items() if key != "kind"}


def _points(line: dict[str, Any]) -> Curve:
    x, y = ([_number(value) for value in _checked(line, POINTS)[axis]] for axis in POINTS)
    if len(x) != len(y):
        raise ValueError(f"{len(x)} values of x and {len(y)} of y")
    return x, y


def _checked(line: dict[str, Any], wanted: Mapping[str, str]) -> dict[str, Any]:
    for key, kind in wanted.items():
        if type(line[key]) not in TYPES[kind]:  # not isinstance: true is no number
            raise ValueError(f"{key!r} is {reprlib.repr(line[key])}, not {kind}")
    return line


def _number(value: Any) -> float:
    if type(value) not in TYPES[NUMBER]:
        raise ValueError(f"{reprlib.repr(value)} is not {NUMBER}")
    return math.nan if value is None else float(value)


def _same_data(log: Log) -> tuple[Any, ...]:
    return tuple(log.head["data"].get(key) for key in ("name", "train", "test"))
