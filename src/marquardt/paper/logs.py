"""Logs of runs: one JSONL file each, all that figures, tables and the report are made from."""

from __future__ import annotations

import csv
import io
import json
import math
import reprlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .. import files
from ..values import cell
from .vocabulary import COLUMNS, LOGS, MEASURES, METHODS, SINE_READINGS, TARGET, TARGET_LABEL

FORMAT, OLDEST = 2, 1  # of the logs; the first had no checksum
NUMBER: Any = float | None  # null stands for NaN, for infinity and for none
HEAD = {
    **dict.fromkeys(("experiment", "problem", "method", "label", "column", "device", "started"), str),
    **dict.fromkeys(("seed", "steps", "batch", "parameters"), int),
    **dict.fromkeys(("data", "hyper", "machine", "versions"), dict[str, Any]),
    "seconds": NUMBER,
}
DATA = {"name": str, "train": int, "test": int, "source": str}  # of the head
POINTS = {"x": list[Any], "y": list[Any]}
LINES: dict[str, dict[str, Any]] = {  # the entries that a line of this kind has
    "run": HEAD,
    "data": POINTS,  # the noisy samples of the sine: nothing is drawn from them
    "curve": {"step": int, **POINTS},
    "step": {"step": int, "seconds": Any, "train_loss": Any},  # any other has a number too
    "end": {"status": Literal["finished", "diverged", "failed", "unavailable"], "step": int, "message": str},
}
WAY_OUT = "move the file away, and `marquardt paper` runs it again"

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
    experiment: str
    method: str
    label: str
    column: str
    seed: int

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

    def steps_to(self, clock: str = "step") -> float:
        """The first step at which the test accuracy reaches the paper's target; ∞ where it never does."""
        pairs = zip(self.steps.get(clock, []), self.steps.get("test_accuracy", []), strict=False)
        return next((time for time, value in pairs if value >= TARGET), math.inf)

    def seconds_to(self) -> float:
        """The same in seconds of training."""
        return self.steps_to("seconds")

    def summary(self) -> str:
        """How a run went, in one line."""
        if self.status != "finished":
            return f"{self.status} at step {self.end}" + (f" ({self.message})" if self.message else "")
        if "test_accuracy" in self.steps:
            reached = self.steps_to()
            steps = f"after {reached:g} steps" if math.isfinite(reached) else "not reached"
            result = f"{TARGET_LABEL} {steps}, {self.final('test_accuracy'):.2%} after {self.end}"
        else:
            result = f"MSE {self.final('train_loss'):.3g} after {self.end} steps"
        return f"{result}, {self.final('seconds'):.1f} s"


def read(path: Path) -> Log:
    """The log of one run that has ended."""
    lines: dict[str, list[dict[str, Any]]] = {kind: [] for kind in LINES}
    number = 0
    content = files.content_of(path)
    for number, text in enumerate(io.BytesIO(content), 1):
        try:
            line = files.loads(text)
            kind = line["kind"]
            if lines["end"]:
                raise ValueError("a line after the end of the run")
            if (kind == "run") != (number == 1):
                raise ValueError("the head of the run stands in the first line, and there alone")
            if kind not in tuple(LINES):  # it may be a list, which has no hash
                raise ValueError(f"unknown kind {kind!r}")
            lines[kind].append(_checked(line, lines["step"]))
        except (ValueError, KeyError, OverflowError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path}, line {number}: {what}; {WAY_OUT}") from error
    if not lines["end"]:
        raise ValueError(f"{path}, line {number}: the log breaks off; {WAY_OUT}")
    try:
        is_sealed = files.check_text(path, content)
    except files.Damaged as error:
        raise files.Damaged(f"{error}; {WAY_OUT}") from None
    (head,), (end,), records = lines["run"], lines["end"], lines["step"]
    if not is_sealed and head["format"] != OLDEST:
        raise files.Damaged(f"{path} is damaged: it has lost its checksum; {WAY_OUT}")
    steps = {key: [record.get(key, math.nan) for record in records] for key in (records[0] if records else ())}
    curves = {line["step"]: (line["x"], line["y"]) for line in lines["curve"]}
    run = {key: head[key] for key in ("experiment", "method", "label", "column", "seed")}
    return Log(path, head, steps, curves, end["status"], end["step"], end["message"], **run)


def _checked(line: dict[str, Any], before: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The line, with NaN for null among its numbers; `before` are the steps."""
    kind = line["kind"]
    if kind == "run":
        if type(line["format"]) is not int or not OLDEST <= line["format"] <= FORMAT:
            raise ValueError(f"format {reprlib.repr(line['format'])} where this version reads {OLDEST} to {FORMAT}")
        if missing := [key for key in HEAD if key not in line]:
            raise ValueError(f"the head has no {', '.join(missing)}")
        _check({"train_sample": 0, **line}, {"train_sample": int})  # the one that may be missing
        _check(line["data"], DATA)
    _check(line, LINES[kind])
    if kind == "step":
        if before and line["step"] <= before[-1]["step"]:
            raise ValueError(f"step {line['step']} after step {before[-1]['step']:g}")
        return {key: _number(value) for key, value in line.items() if key != "kind"}
    if "x" in LINES[kind]:
        line |= {axis: [*map(_number, line[axis])] for axis in POINTS}
        if len(line["x"]) != len(line["y"]):
            raise ValueError(f"{len(line['x'])} values of x and {len(line['y'])} of y")
    return line


def _check(line: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key, kind in wanted.items():
        files.typed(line[key], kind, repr(key))


def _number(value: Any) -> float:
    if type(value) not in (int, float, type(None)):  # not isinstance: true is no number
        raise ValueError(f"{reprlib.repr(value)} is not a number or null")
    return math.nan if value is None else float(value)


def read_all(out: Path) -> list[Log]:
    """Every run under `out`/logs that has ended, in the order of tables; those in progress (.part) are left out."""
    runs = [read(path) for path in sorted(Path(out, LOGS).glob("*/*.jsonl"))]
    first: dict[str, Log] = {}
    for log in runs:
        data, other = log.head["data"], first.setdefault(log.experiment, log)
        if any(data[key] != other.head["data"][key] for key in ("name", "train", "test")):
            raise ValueError(
                f"{log.path} ran on {data}, but {other.path} on {other.head['data']}: "
                "runs on different data cannot be compared, keep them in separate folders"
            )
    return sorted(runs, key=lambda log: (log.experiment, place(log.method), place(log.column), log.seed))


def unfinished(out: Path) -> list[Path]:
    """Logs of runs that have not ended."""
    folders = sorted(Path(out, LOGS).glob("*"))
    return [part for folder in folders for part in files.left_over(folder, r"[^.]+\.[^.]+\.\d+")]


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
    """The training time that all runs were given, as the heads of the logs say; otherwise that of the shortest run that
    finished, otherwise 0."""
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


CSV_FIELDS = (
    *("experiment", "method", "label", "column", "seed", "status", "end", "message", "steps", "batch", "parameters"),
    *("seconds", *MEASURES, "steps_to_90", "seconds_to_90", *(f"train_loss_{step}" for step in SINE_READINGS)),
    *("data", "device", "hyper", "started"),
)


def as_csv(logs: Iterable[Log]) -> str:
    """One line per run."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_FIELDS, extrasaction="ignore", lineterminator="\n")  # heads have more
    writer.writeheader()
    for log in logs:
        numbers = {key: log.final(key) for key in ("seconds", *MEASURES)}
        numbers |= {"steps_to_90": log.steps_to(), "seconds_to_90": log.seconds_to()}
        numbers |= {f"train_loss_{step}": log.at(step, "train_loss") for step in SINE_READINGS}
        row = {
            **log.head,
            **{key: value if math.isfinite(value) else "" for key, value in numbers.items()},
            **{"status": log.status, "end": log.end, "message": log.message},
            **{"data": log.head["data"]["name"], "hyper": json.dumps(log.head["hyper"])},
        }
        writer.writerow({key: cell(value) if isinstance(value, str) else value for key, value in row.items()})
    return text.getvalue()
