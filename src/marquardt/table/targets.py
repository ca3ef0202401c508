"""What is predicted: numbers, or the class of a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import torch
from torch import Tensor

from ..files import typed
from ..values import quoted
from . import kinds
from .columns import as_text
from .reading import BadTable, listed, nameless

FEW = 10  # whole numbers of at most so many different values are taken for classes
CLASSES = 100  # more are refused


@dataclass(frozen=True)
class NumberTarget:
    names: tuple[str, ...]
    task: ClassVar[str] = "regression"

    def values(self, frame: pd.DataFrame) -> Tensor:
        """(N, targets) in float64."""
        return torch.from_numpy(np.stack([kinds.numbers(name, frame[name]) for name in self.names], axis=1))


@dataclass(frozen=True)
class ClassTarget:
    names: tuple[str, ...]  # one
    classes: tuple[str, ...]
    task: ClassVar[str] = "classification"

    def values(self, frame: pd.DataFrame) -> Tensor:
        """(N,) places in `classes`; −1 for a class that is not among them."""
        places = {name: place for place, name in enumerate(self.classes)}
        return torch.tensor([places.get(text, -1) for text in as_text(frame[self.names[0]])])


Target = NumberTarget | ClassTarget


def to_json(target: Target) -> dict[str, Any]:
    return {"task": target.task, **asdict(target)}


def from_json(found: Any) -> Target:
    """What `to_json` has made. Anything else is a ValueError."""
    entries = typed(found, dict[str, Any], "target")
    kinds_of: dict[Any, Any] = {kind.task: kind for kind in (NumberTarget, ClassTarget)}
    task = typed(entries.pop("task", None), str, "target.task")
    if task not in kinds_of:
        raise ValueError(f"target.task is {quoted(task)}, none of {', '.join(kinds_of)}")
    target: Target = typed(entries, kinds_of[task], "target")
    if not target.names or (isinstance(target, ClassTarget) and (len(target.names) > 1 or len(target.classes) < 2)):
        raise ValueError("target: there is no target, or one class only")
    return target


def check_names(frame: pd.DataFrame, names: Sequence[str], option: str) -> None:
    """Refuses names of columns that the table does not have."""
    absent = [name for name in names if name not in frame.columns]
    if not absent:
        return
    names = list(map(str, frame.columns))
    raise BadTable(f"{option}: there is no column {listed(absent)}; the table has {listed(names, 20)}{nameless(names)}")


@contextmanager
def own_options(names: Sequence[str]) -> Iterator[None]:
    """Errors about a target name the options for targets: --ignore and --categorical are for the other columns."""
    try:
        yield
    except BadTable as error:
        classes = ", or --classify if these are classes" if len(names) == 1 else ""
        raise BadTable(error.sentence, f", or use --missing WORD for a word that means no value{classes}") from None


def decide(frame: pd.DataFrame, names: tuple[str, ...], classify: bool | None) -> tuple[Target, list[str]]:
    """The target and what was assumed; `classify` None lets its values decide. No value is missing in `frame`."""
    if classify and len(names) > 1:
        raise BadTable("--classify takes one --target")
    with own_options(names):
        found = {name: "category" if classify else kinds.kind(name, frame[name]) for name in names}
    for name, kind in found.items():
        if kind == "date":
            raise BadTable(f"the target {name!r} is a date, which cannot be predicted: make a number of it")
        if kind == "category" and (classify is False or len(names) > 1):
            _refuse_disguised(name, frame[name])
            way = "leave --regress out" if len(names) == 1 else "predict it alone"
            raise BadTable(f"the target {name!r} is text ({listed(_levels(frame[name]), 3)}), and no number: {way}")
    if "category" in found.values():
        target, looks = _classes(frame, names[0]), kinds.disguised(frame[names[0]])
        hint = f" It looks like {looks} to predict it as numbers." if looks else ""
        return target, [] if classify else [f"{names[0]!r} is text: a class is predicted.{hint}"]
    if classify is None and len(names) == 1 and _few(frame[names[0]]):
        target = _classes(frame, names[0])
        few = ", ".join(target.classes)
        return target, [
            f"{names[0]!r} has only the values {few}: they are taken for classes; with --regress they are numbers."
        ]
    numbers = NumberTarget(names)
    check_varies(numbers, numbers.values(frame), "")
    return numbers, []


def check_varies(target: Target, Y: Tensor, where: str) -> None:
    """Refuses numbers that are all the same."""
    for name, values in zip(target.names, Y.T.numpy() if isinstance(target, NumberTarget) else (), strict=False):
        if kinds.constant(values):
            raise BadTable(f"every value of the target {name!r} is {values[0]:g}{where}: there is nothing to learn")


def _few(column: pd.Series) -> bool:
    values = np.unique(kinds.numbers(str(column.name), column))
    return len(values) <= min(FEW, len(column) // 5) and bool((values == np.round(values)).all())


def _classes(frame: pd.DataFrame, name: str) -> ClassTarget:
    classes = _levels(frame[name])
    if len(classes) == 1:
        raise BadTable(f"the target {name!r} has one class only, {quoted(classes[0])}: there is nothing to tell apart")
    if len(classes) > min(CLASSES, len(frame) / 2):
        _refuse_disguised(name, frame[name])
        raise BadTable(
            f"the target {name!r} has {len(classes):,} different values in {len(frame):,} rows, too many for classes: "
            "choose another --target, or use --regress if they are numbers"
        )
    return ClassTarget((name,), tuple(classes))


def _refuse_disguised(name: str, column: pd.Series) -> None:
    looks = kinds.disguised(column)
    if looks:
        shown = quoted(column.dropna().iloc[0])
        raise BadTable(f"the target {name!r} is text ({shown}), but looks like {looks} to predict numbers")


def _levels(column: pd.Series) -> list[str]:
    """In the order of numbers if all are numbers, or else in that of the alphabet."""
    levels = sorted(map(str, as_text(column).dropna().unique()))
    numbers = pd.to_numeric(pd.Series(levels, dtype="str"), errors="coerce")
    return levels if numbers.isna().any() else [levels[i] for i in np.argsort(numbers.to_numpy(), kind="stable")]
