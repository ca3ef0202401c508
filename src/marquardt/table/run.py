"""A run: a table is read and split, a committee trained and judged on the rows it has not seen, all of it written."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import files, tabular
from ..surroundings import out_of_memory
from . import columns, predictions, reading, report, request
from .columns import Columns, Target
from .predictions import LEVEL, Findings, Prepared
from .reading import FIRST_ROWS, BadTable, counted
from .request import Request

LEAST = 10  # rows
EVERY_INPUT = 8 * 4  # bytes of memory for one input of a row: itself, standardised, and two copies in between

Say = Callable[[str], None]


def fit(asked: Request, out: Path, *, resume: bool = False, say: Say, watch: Callable[[Any], None]) -> Findings | None:
    """Trains and writes; None if the run in the folder is finished already."""
    announced = reading.announce(asked.data)
    if announced:
        say(announced)
    prepared = prepare(asked)
    request.check(out, asked, resume=resume)
    for sentence in prepared.says:
        say(sentence)
    with files.held(out, "run"):
        for sentence in request.begin(out, asked, resume=resume):
            say(sentence)
        if request.finished(out):
            request.clear(out)  # what a process was killed before
            return None
        began = time.monotonic()
        committee = train(asked, prepared, out / request.CHECKPOINT, watch)
        found = judge(asked, prepared, committee, time.monotonic() - began)
        write(found, out)
        request.end(out)
    return found


# --- before the training ---


def prepare(asked: Request) -> Prepared:
    """The table as inputs and targets; whatever cannot be trained on is refused here."""
    sheet = reading.read(asked.data, rows=asked.rows, missing=asked.missing)
    for option in ("targets", "ignore", "categorical"):
        columns.check_names(sheet.frame, getattr(asked, option), "--" + option.removesuffix("s"))
    if both := set(asked.targets) & {*asked.ignore, *asked.categorical}:
        raise BadTable(f"{sorted(both)[0]!r} is the target: --ignore and --categorical are for the other columns")
    names = list(asked.targets)
    sheet.check(name for name in sheet.frame.columns if name not in {*asked.ignore, *asked.categorical, *names})
    if not asked.classify:
        with columns.own_options(names):
            sheet.check(names)
    frame = sheet.frame[sheet.frame[names].notna().all(axis=1)]
    if len(frame) < LEAST:
        raise BadTable(
            f"{asked.data} has {counted(len(frame), 'row')} with a value of {names[0]!r}: at least {LEAST} are needed"
        )
    says = list(sheet.says)
    if len(frame) < len(sheet.frame):
        says.append(f"Left out, without a target: {counted(len(sheet.frame) - len(frame), 'row')}.")
    target, assumed = columns.decide_target(frame, asked.targets, asked.classify)
    Y = target.values(frame)
    train, test = split(Y, asked.test_fraction, asked.seed)
    columns.check_varies(target, Y[train], " in the rows to train on (another --seed draws others)")
    inputs = columns.learn(frame.drop(columns=names), train.numpy(), ignore=asked.ignore, categorical=asked.categorical)
    count = len(inputs.names)
    need = f"{len(frame):,} rows of {count:,} inputs need"
    reading.check_memory(need, len(frame) * count * EVERY_INPUT, f"{FIRST_ROWS}, --ignore leaves a column out")
    X, _ = inputs.encode(frame)
    says += [*assumed, *_sizes(target, Y, train, test, inputs), *_alike(X, inputs)]
    return Prepared(frame, inputs, target, X, Y, train, test, says, sheet.commas)


def split(Y: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Places of rows to train on and to test with; of each class the same part, and at least one row to train on."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.zeros(len(Y), dtype=torch.long) if Y.ndim == 2 else Y
    train, test = [], []
    for k in range(int(classes.max()) + 1):
        rows = classes.eq(k).nonzero().flatten()
        rows = rows[torch.randperm(len(rows), generator=generator)]
        count = min(round(fraction * len(rows)), len(rows) - 1)
        test.append(rows[:count])
        train.append(rows[count:])
    return torch.cat(train).sort().values, torch.cat(test).sort().values


def _sizes(target: Target, Y: Tensor, train: Tensor, test: Tensor, inputs: Columns) -> list[str]:
    rest = f"{len(test):,} to test with" if len(test) else "none to test with: the report is about rows it has seen"
    sizes = f"{counted(len(inputs.columns), 'column')} as {counted(len(inputs.names), 'input')}"
    says = [f"{counted(len(train), 'row')} to train on, {rest}; {sizes}."]
    if target.classes:
        counts = torch.bincount(Y[train], minlength=len(target.classes)).tolist()
        rare = [name for name, count in zip(target.classes, counts, strict=True) if count < columns.RARE]
        says += [f"Classes with fewer than {columns.RARE} rows to train on: {reading.listed(rare)}."] if rare else []
    left_out = [f"{told.name!r} ({told.done.partition(': ')[2]})" for told in inputs.told if "left out:" in told.done]
    says += [f"Left out: {', '.join(left_out)}."] if left_out else []
    return [*says, *inputs.notices]


def _alike(X: Tensor, inputs: Columns) -> list[str]:
    """Sentences on columns that have become the same inputs."""
    found: dict[bytes, list[str]] = {}
    for name, places in inputs.groups.items():
        found.setdefault(hashlib.sha256(X[:, places].numpy().tobytes()).digest(), []).append(name)
    same = [names for names in found.values() if len(names) > 1]
    return [f"Columns {reading.listed(names)} are alike in every row: --ignore leaves one out." for names in same]


# --- training, and what comes after ---


def train(asked: Request, prepared: Prepared, checkpoint: Path, watch: Callable[[Any], None]) -> tabular.Committee:
    rows, target = prepared.train, prepared.target
    hidden = "auto" if asked.hidden is None else asked.hidden
    settings = tabular.Settings(target.task, hidden, steps=asked.steps, seed=asked.seed)
    classes = len(target.classes) or None
    try:
        return tabular.train(
            prepared.X[rows], prepared.Y[rows], settings, checkpoint=checkpoint, watch=watch, classes=classes
        )
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not out_of_memory(error):
            raise
        way = "--rows N reads the first N rows, and fewer units in --hidden need less"
        raise BadTable(f"memory ran out in the training with {len(rows):,} rows: {way}") from error


def judge(asked: Request, prepared: Prepared, committee: tabular.Committee, seconds: float) -> Findings:
    found = predictions.predicted(committee, prepared.X)
    trained = prepared.Y[prepared.train]
    measured = {
        name: predictions.measured(prepared.target, prepared.Y[rows], *found.of(rows), LEVEL, trained)
        for name, rows in (("train", prepared.train), ("test", prepared.test))
        if len(rows)
    }
    X, error = prepared.X[prepared.judged], _error(prepared, committee)
    importances = predictions.permutation(error, X, prepared.columns.groups, asked.seed)
    return Findings(asked, prepared, committee, found, measured, importances, seconds)


def _error(prepared: Prepared, committee: tabular.Committee) -> Callable[[Tensor, Tensor], float]:
    """RMSE in units of the target's standard deviation, in the mean of several targets; or the log loss."""
    Y, scale = prepared.Y[prepared.judged], prepared.Y[prepared.train].double().std(0)
    sure = replace(committee, factor=torch.zeros_like(committee.factor))  # of these probabilities no variance is needed

    def error(X: Tensor, rows: Tensor) -> float:
        if prepared.target.classes:
            return predictions.classification(Y[rows], sure.probabilities(X))["log_loss"]
        return float((((committee.mean(X) - Y[rows]) / scale).square().mean(0).sqrt()).mean())

    return error


def write(found: Findings, out: Path) -> None:
    prepared = found.prepared
    model = predictions.weights(found.committee, out / request.CHECKPOINT / request.MODEL)
    told = predictions.preprocessing(prepared.columns, prepared.target, found.request.missing, prepared.commas, model)
    table = predictions.frame(prepared.target, found.predicted, LEVEL, prepared.Y)
    sets = np.full(len(table), "train", dtype=object)
    sets[prepared.test.numpy()] = "test"
    table.insert(0, "set", sets)
    table.insert(0, "row", prepared.frame.index.to_numpy() + 1)
    request.put(
        out,
        {
            request.MODEL: model,
            request.PREPROCESSING: told,
            request.PREDICTIONS: predictions.to_csv(table).encode(),
            request.METRICS: (files.dumps(_metrics(found), indent=1) + "\n").encode(),
            request.REPORT: report.page(found).encode(),
        },
    )


def _metrics(found: Findings) -> dict[str, Any]:
    prepared = found.prepared
    return {
        "task": prepared.target.task,
        "targets": list(prepared.target.names),
        "rows": {"train": len(prepared.train), "test": len(prepared.test)},
        "interval": LEVEL,
        **_without_nan(found.measured),
        "importance": [importance._asdict() for importance in found.importances],
        "says": [*prepared.says, *found.chosen],
    }


def _without_nan(found: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(found, dict):
        return {key: _without_nan(value) for key, value in found.items()}
    return None if isinstance(found, float) and not math.isfinite(found) else found
