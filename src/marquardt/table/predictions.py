"""Predictions of a committee as a table, and those of a model in a folder for new rows."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
from torch import Tensor

from .. import files
from ..files import digest, digest_of, sealed, typed
from ..tabular import Committee
from ..values import cell, shortened
from .columns import CategoryColumn, Columns, DateColumn, NumberColumn, Target
from .findings import Predicted, measured, predicted, quantile, words
from .reading import BadTable, Sheet, counted, read
from .request import MODEL, PREPROCESSING, BadFolder

FORMAT = 2  # of model.pt and preprocessing.json; the first had no checksums
OLDEST = 1


def frame(target: Target, found: Predicted, level: float, true: Tensor | None = None) -> pd.DataFrame:
    """Columns predicted, std, lower, upper (of several targets with their names); or predicted and probabilities."""
    mean, std = found
    columns: dict[str, Any] = {}
    if std is None:
        classes = np.array(target.classes, dtype=object)
        columns = {} if true is None else {"true": classes[true.numpy()]}
        columns["predicted"] = classes[mean.argmax(1).numpy()]
        return pd.DataFrame(
            columns | {f"probability of {name}": p.numpy() for name, p in zip(classes, mean.T, strict=True)}
        )
    half = quantile(level) * std
    parts = {} if true is None else {"true": true}
    parts |= {"predicted": mean, "std": std, "lower": mean - half, "upper": mean + half}
    for k, name in enumerate(target.names):
        before = "" if len(target.names) == 1 else f"{name} "
        columns |= {before + part: values[:, k].numpy() for part, values in parts.items()}
    return pd.DataFrame(columns)


def to_csv(table: pd.DataFrame) -> str:
    """Text in it is no formula to a spreadsheet: see `texts.cell`."""
    texts = {
        name: column.map(lambda value: cell(value) if isinstance(value, str) else value)
        for name, column in table.select_dtypes(exclude="number").items()
    }
    shown = table.assign(**texts)
    shown.columns = [cell(str(name)) for name in table.columns]
    return str(shown.to_csv(index=False, float_format="%.10g", lineterminator="\n"))


# --- a model in a folder ---


@dataclass(frozen=True)
class Preprocessing:
    """The content of preprocessing.json, which belongs to one model."""

    format: int
    target: dict[str, Any]
    missing: tuple[str, ...]
    columns: tuple[NumberColumn | CategoryColumn | DateColumn, ...]
    inputs: tuple[str, ...]
    decimal_commas: bool = False  # whether the numbers that the model was trained with had them
    model: str | None = None  # the checksum of model.pt


class Model(NamedTuple):
    committee: Committee
    target: Target
    columns: Columns
    told: Preprocessing
    says: tuple[str, ...]  # what is to be told of its files


def weights(committee: Committee, scratch: Path) -> bytes:
    """The file model.pt; equal values give equal bytes, also if some of them were read from a checkpoint."""
    files.save(scratch, _own({"format": FORMAT, "committee": committee.state()}))
    return scratch.read_bytes()


def _own(value: Any) -> Any:
    """A copy in which nothing is shared but words, which always are: what pickle has met before it writes otherwise."""
    if isinstance(value, dict):
        return {_own(key): _own(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_own(item) for item in value]
    if isinstance(value, Tensor):
        return value.detach().clone()
    return sys.intern(value) if isinstance(value, str) else value


def preprocessing(columns: Columns, target: Target, missing: tuple[str, ...], commas: bool, model: bytes) -> bytes:
    """The file preprocessing.json of the model with these bytes."""
    named = {"task": target.task, **{name: value for name, value in asdict(target).items() if value}}
    told = Preprocessing(
        FORMAT, named, missing, columns.columns, tuple(columns.names), commas, digest(model),
    )  # fmt: skip
    return sealed(asdict(told), indent=1)


def load(folder: Path) -> Model:
    """The model that `marquardt fit` has left in a folder."""
    if not (folder / MODEL).is_file() or not (folder / PREPROCESSING).is_file():
        raise BadFolder(
            f"{folder} has no {MODEL} and {PREPROCESSING}: name the --out of a `marquardt fit` that has ended"
        )
    way = f"train it again, or bring back the files that marquardt fit has written in {folder}"
    try:
        return _loaded(folder)
    except BadFolder:
        raise
    except files.Damaged as error:
        raise BadFolder(f"{error}: {way}") from None
    except OSError as error:
        raise BadFolder(f"{error.filename or folder} cannot be read ({error.strerror or error})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BadFolder(f"the model in {folder} is damaged ({_reason(error)}): {way}") from None


def _loaded(folder: Path) -> Model:
    saved, is_sealed = files.load(folder / MODEL)
    found, is_sealed_too = files.read(folder / PREPROCESSING)
    formats = [content.get("format") if isinstance(content, dict) else None for content in (saved, found)]
    if newer := [found for found in formats if type(found) is int and found > FORMAT]:
        raise BadFolder(f"{folder} was written by a newer marquardt (format {newer[0]}): install that")
    if formats[0] != formats[1] or formats[0] not in range(OLDEST, FORMAT + 1):
        raise ValueError(f"{MODEL} and {PREPROCESSING} are not of one version")
    told = typed(found, Preprocessing)
    says: tuple[str, ...] = ()
    if told.format == OLDEST:
        says = (f"The model in {folder} is of an earlier version, without checksums: damage would not be noticed.",)
    elif not (is_sealed and is_sealed_too):
        raise files.Damaged(f"the model in {folder} is damaged: a checksum is missing")
    elif told.model != digest_of(folder / MODEL):
        raise files.Damaged(f"{MODEL} and {PREPROCESSING} in {folder} are of two models")
    task, target = told.target.pop("task", None), typed(told.target, Target, "target")
    columns, committee = Columns(told.columns), Committee.from_state(saved["committee"])
    outputs = len(committee.floor) if committee.frequencies is None else len(committee.frequencies)
    fits = outputs == len(target.classes or target.names) and len(committee.inputs.columns) == len(columns.names)
    if not fits or not committee.settings.task == target.task == task:
        raise ValueError(f"{MODEL} and {PREPROCESSING} do not belong together")
    return Model(committee, target, columns, told, says)


def _reason(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return f"there is no {error}" if isinstance(error, KeyError) else shortened(lines[0])


def predict(folder: Path, data: Path, level: float) -> tuple[pd.DataFrame, list[str]]:
    """Predictions for the rows of a file, and sentences on what had to be assumed."""
    model = load(folder)
    try:
        sheet = read(data, missing=model.told.missing, commas=model.told.decimal_commas)
        sheet.check(column.name for column in model.columns.columns if column.kind == "number")
        X, notes = model.columns.encode(sheet.frame)
    except BadTable as error:
        raise BadTable(error.sentence) from None  # the options are those of another command
    found = predicted(model.committee, X)
    table = frame(model.target, found, level)
    table.insert(0, "row", np.arange(1, len(table) + 1))
    return table, [*model.says, *sheet.says, *notes, *_quality(model.target, sheet, found, level)]


def _quality(target: Target, sheet: Sheet, found: Predicted, level: float) -> list[str]:
    """How good the predictions are, if the table has the target; unknown classes are not judged."""
    if not set(target.names) <= set(sheet.frame.columns):
        return []
    try:
        sheet.check(target.names)
        true = target.values(sheet.frame)
    except BadTable as error:
        return [f"The predictions are not judged: {error.sentence}."]
    known = (true >= 0) if true.ndim == 1 else true.isfinite().all(1)
    if not known.any():
        return []
    judged = words(measured(target, true[known], *found.of(known), level), level)
    return [f"Against the {counted(int(known.sum()), 'known value')}: {sentence}" for sentence in judged]
