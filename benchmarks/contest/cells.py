"""One cell: a task, a contestant, a seed, a device and a budget; how it is run, and where its record lies."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

import measure

from .contestants import CONTESTANTS, Method, NotApplicable
from .tasks import TASKS, Problem, Setup

MARKS = 13  # evaluations, from a hundredth of the budget to its end
BLOCK_SECONDS, LONGEST_BLOCK = 0.02, 200  # steps between two looks at the clock take about as long, and are as many
WARM_STEPS = {"cpu": 1, "cuda": 12}  # these load the kernels, those of LM's CUDA graph too


class Budget(NamedTuple):
    """Equal time, or equal steps."""

    seconds: float = math.inf
    steps: float = math.inf

    def __str__(self) -> str:
        return f"{self.seconds:g}s" if math.isfinite(self.seconds) else f"{self.steps:g}steps"

    def share(self, seconds: float, steps: int) -> float:
        return max(seconds / self.seconds, steps / self.steps)


@dataclass(frozen=True)
class Cell:
    task: str
    contestant: str
    seed: int
    device: str
    budget: Budget
    rate: float | None = None  # to be tried; None: the one that was chosen, or there is none

    @property
    def path(self) -> Path:
        trial = "" if self.rate is None else f"@{self.rate:g}"
        return Path(f"{self.device}-{self.budget}") / self.task / f"{self.contestant}{trial}-{self.seed}.json"

    def __str__(self) -> str:
        return str(self.path.with_suffix(""))


class Point(NamedTuple):
    """What is known at one moment; the seconds are those of training alone."""

    seconds: float
    steps: int
    loss: float
    validation: float
    test: float


# --- the record ---


def read(folder: Path, cell: Cell) -> dict[str, Any] | None:
    path = folder / cell.path
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def write(folder: Path, cell: Cell, record: dict[str, Any]) -> None:
    """Whole or not at all: whoever ends the run in the midst of it leaves no half of a cell."""
    path = folder / cell.path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(measure.plain(record), ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
    os.replace(part, path)


def described(cell: Cell) -> dict[str, Any]:
    task = TASKS[cell.task]
    budget = {k: v for k, v in cell.budget._asdict().items() if math.isfinite(v)}
    return {
        "task": cell.task, "use": task.use, "metric": task.metric, "contestant": cell.contestant, "seed": cell.seed,
        "device": cell.device, "budget": budget, "trial": cell.rate is not None, "rate": cell.rate,
    }  # fmt: skip


def failed(cell: Cell, error: str) -> dict[str, Any]:
    return described(cell) | {"error": error}


# --- a run ---


def run(cell: Cell, rate: float | None, setup: Setup) -> dict[str, Any]:
    """The record of a cell. What a contestant raises is part of it."""
    warnings.simplefilter("ignore")
    record = described(cell) | {"rate": rate, "eager": setup.eager}
    device = torch.device(cell.device)
    try:
        warm(cell, rate, setup, device)
        problem = TASKS[cell.task].problem(cell.seed, setup, device)
        record |= {"n": problem.n, "source": problem.source}
        record["points"] = []
        for point in points(problem, cell, rate, device):  # one by one: they stay if a later step fails
            record["points"].append(list(point))
    except NotApplicable as error:
        record["not applicable"] = str(error)
    except Exception as error:  # whatever a contestant does not take: the others go on
        record["error"] = f"{type(error).__name__}: {error}"
    finally:
        if device.type == "cuda":
            measure.release(device)
    return record


def begun(problem: Problem, cell: Cell, rate: float | None) -> Method:
    return CONTESTANTS[cell.contestant].build(problem, cell.seed, math.nan if rate is None else rate)


def warm(cell: Cell, rate: float | None, setup: Setup, device: torch.device) -> None:
    method = begun(TASKS[cell.task].problem(cell.seed, setup, device), cell, rate)
    for _ in range(WARM_STEPS[device.type]):
        method.run(0.0, 1)


def points(problem: Problem, cell: Cell, rate: float | None, device: torch.device) -> Iterator[Point]:
    """The clock runs while the contestant is built and while it steps, and stands while its weights are scored."""
    budget, ahead, paces, steps, last = cell.budget, marks(), [0.0], 0, 0
    seconds, method = measure.timed(lambda: begun(problem, cell, rate), device)
    while count := affordable(budget, ahead[0], seconds, steps, min(paces[-2:]), method.least):
        share = budget.share(seconds, steps)
        took, taken = measure.timed(lambda share=share, count=count: method.run(share, count), device)
        seconds, steps = seconds + took, steps + taken
        paces.append(took / taken)
        if budget.share(seconds, steps) >= ahead[0]:
            yield scored(problem, method, seconds, steps)
            ahead, last = [mark for mark in ahead if mark > budget.share(seconds, steps)] or [1.0], steps
    if last < steps or steps == 0:
        yield scored(problem, method, seconds, steps)


def scored(problem: Problem, method: Method, seconds: float, steps: int) -> Point:
    with method.evaluated():
        return Point(seconds, steps, *problem.scores(problem.model))


def affordable(budget: Budget, mark: float, seconds: float, steps: int, pace: float, least: int) -> int:
    """Steps until the next look at the clock: none if another would not end in time, one if no pace is known yet."""
    if budget.share(seconds, steps) >= 1:
        return 0
    if pace == 0:
        return 1
    block = max(least, min(LONGEST_BLOCK, BLOCK_SECONDS / pace), 1)
    to_mark = math.ceil(mark * budget.steps) - steps if math.isfinite(budget.steps) else math.inf
    return int(min(block, (budget.seconds - seconds) / pace, to_mark))


def marks() -> list[float]:
    """Shares of the budget."""
    return [10 ** (2 * k / (MARKS - 1) - 2) for k in range(MARKS)]
