"""What a run starts from and what it finds: predictions, how good they are, and how much each column matters;
predictions as a table, and as a model in a folder that predicts for new rows."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import torch
from torch import Tensor

from .. import files
from ..files import digest, digest_of, sealed, typed
from ..tabular import Committee
from ..values import cell, shortened
from .columns import CategoryColumn, Columns, DateColumn, NumberColumn, Target
from .reading import BadTable, Sheet, counted, read
from .request import MODEL, PREPROCESSING, BadFolder, Request

LEVEL = 0.95  # of the intervals in predictions.csv and the report
BINS = 10  # of the reliability diagram
REPEATS = 5  # times that the values of a column are shuffled
ROWS = 1000  # that are looked at for this
FORMAT = 2  # of model.pt and preprocessing.json; the first had no checksums
OLDEST = 1


class Predicted(NamedTuple):
    """Numbers with standard deviations, or probabilities of classes."""

    mean: Tensor  # (N, targets) or (N, classes)
    std: Tensor | None  # (N, targets)

    def of(self, rows: Tensor) -> Predicted:
        return Predicted(self.mean[rows], None if self.std is None else self.std[rows])


def predicted(committee: Committee, X: Tensor) -> Predicted:
    if committee.settings.task == "regression":
        return Predicted(*committee.predict(X))
    return Predicted(committee.probabilities(X), None)


class Importance(NamedTuple):
    name: str
    rise: float  # of the error, in the mean of the repeats
    spread: float  # the standard deviation of the repeats


@dataclass(frozen=True)
class Prepared:
    """A table that can be trained on."""

    frame: pd.DataFrame
    columns: Columns
    target: Target
    X: Tensor  # (N, inputs)
    Y: Tensor  # (N, targets), or classes (N,)
    train: Tensor  # places of rows
    test: Tensor
    says: list[str]
    commas: bool  # whether numbers in the file have decimal commas

    @property
    def judged(self) -> Tensor:
        """The rows that the report is about: those of training only if no others were kept back."""
        return self.test if len(self.test) else self.train


@dataclass(frozen=True)
class Findings:
    """Everything that the report tells."""

    request: Request
    prepared: Prepared
    committee: Committee
    predicted: Predicted
    measured: dict[str, dict[str, dict[str, float]]]  # {"train" or "test": {target: {measure: value}}}
    importances: list[Importance]
    seconds: float

    @property
    def judged(self) -> dict[str, dict[str, float]]:
        """The measures of the rows that the report is about."""
        return self.measured["test" if "test" in self.measured else "train"]

    @property
    def chosen(self) -> list[str]:
        """What the committee says of itself, as sentences."""
        return [f"{words[:1].upper()}{words[1:]}." for words in self.committee.says]

    @property
    def told(self) -> list[str]:
        """How it went, in a sentence for each target."""
        return words(self.judged, LEVEL)


# --- how good predictions are: of numbers with their standard deviations, of classes with their probabilities ---


def quantile(level: float) -> float:
    """z with P(|N(0, 1)| < z) = level"""
    return math.sqrt(2) * float(torch.special.erfinv(torch.tensor(level, dtype=torch.float64)))


def measured(
    target: Target, true: Tensor, mean: Tensor, std: Tensor | None, level: float, trained: Tensor | None = None
) -> dict[str, dict[str, float]]:
    """{target: {measure: value}}; with the values that were `trained` on, also of the simplest prediction there is."""
    if std is not None:
        columns = zip(target.names, true.T, mean.T, std.T, strict=True)
        found = {name: regression(y, m, s, level) for name, y, m, s in columns}
        if trained is not None:
            for k, name in enumerate(target.names):
                found[name]["rmse_of_the_mean"] = float((true[:, k] - trained[:, k].mean()).square().mean().sqrt())
        return found
    measures = classification(true, mean)
    if trained is not None:
        measures["accuracy_of_the_largest_class"] = float((true == trained.mode().values).double().mean())
    return {target.names[0]: measures}


def words(found: dict[str, dict[str, float]], level: float) -> list[str]:
    """A sentence for each target."""
    return [f"{name}: {_of_numbers(m, level) if 'rmse' in m else _of_classes(m)}." for name, m in found.items()]


def _of_numbers(m: dict[str, float], level: float) -> str:
    mean = f" (the mean alone: {m['rmse_of_the_mean']:.4g})" if "rmse_of_the_mean" in m else ""
    r2 = "" if math.isnan(m["r2"]) else f", R² {m['r2']:.3f}"
    inside = f"the {100 * level:.4g} % interval holds {100 * m['coverage']:.1f} % of the values"
    return f"RMSE {m['rmse']:.4g}{mean}{r2}; {inside}"


def _of_classes(m: dict[str, float]) -> str:
    largest = m.get("accuracy_of_the_largest_class")
    alone = "" if largest is None else f" (the largest class alone: {100 * largest:.1f} %)"
    calibration = f"calibration error {m['calibration_error']:.3f}"
    return f"accuracy {100 * m['accuracy']:.1f} %{alone}, log loss {m['log_loss']:.3g}, {calibration}"


def regression(true: Tensor, mean: Tensor, std: Tensor, level: float) -> dict[str, float]:
    """Of one target."""
    r = mean - true
    nll = 0.5 * (r / std).square() + std.log() + 0.5 * math.log(2 * math.pi)
    spread = (true - true.mean()).square().sum()
    return {
        "rmse": float(r.square().mean().sqrt()),
        "mae": float(r.abs().mean()),
        "r2": float(1 - r.square().sum() / spread) if spread > 0 else math.nan,
        "nll": float(nll.mean()),
        "coverage": float((r.abs() <= quantile(level) * std).double().mean()),
    }


def classification(true: Tensor, p: Tensor) -> dict[str, float]:
    right = p[torch.arange(len(true)), true].clamp_min(torch.finfo(torch.float64).tiny)
    target = torch.nn.functional.one_hot(true, p.shape[1])
    gaps = [abs(b.confidence - b.accuracy) * b.rows for b in reliability(true, p)]
    return {
        "accuracy": float((p.argmax(1) == true).double().mean()),
        "log_loss": float(-right.log().mean()),
        "brier": float((p - target).square().sum(1).mean()),
        "calibration_error": sum(gaps) / len(true),
    }


class Bin(NamedTuple):
    """Predictions of about one confidence, and how many of them were right."""

    confidence: float
    accuracy: float
    rows: int


def reliability(true: Tensor, probabilities: Tensor) -> list[Bin]:
    """By the probability of the class that was predicted; bins without rows are left out."""
    confidence, predicted = probabilities.max(1)
    places, right = (confidence * BINS).long().clamp(max=BINS - 1), (predicted == true).double()
    inside = [places == k for k in places.unique()]
    return [Bin(float(confidence[some].mean()), float(right[some].mean()), int(some.sum())) for some in inside]


def confusion(true: Tensor, probabilities: Tensor) -> list[list[int]]:
    """Rows are true classes, columns predicted ones."""
    classes = probabilities.shape[1]
    counts = torch.bincount(true * classes + probabilities.argmax(1), minlength=classes * classes)
    found: list[list[int]] = counts.view(classes, classes).tolist()
    return found


# --- how much a column matters: by how much predictions get worse once its values are shuffled among the rows ---


def permutation(
    error: Callable[[Tensor, Tensor], float], X: Tensor, groups: Mapping[str, Sequence[int]], seed: int
) -> list[Importance]:
    """The largest first; `error(X, rows)` is that of the rows, with these inputs. A column's inputs stay together."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(X), generator=generator)[:ROWS]
    X = X[rows]
    base = error(X, rows)
    found = []
    for name, places in groups.items():
        rises = []
        for _ in range(REPEATS):
            shuffled, order = X.clone(), torch.randperm(len(X), generator=generator)
            shuffled[:, list(places)] = X[order][:, list(places)]
            rises.append(error(shuffled, rows) - base)
        values = torch.tensor(rises, dtype=torch.float64)
        found.append(Importance(name, float(values.mean()), float(values.std(correction=0))))
    return sorted(found, key=lambda importance: -importance.rise)


# --- predictions as a table ---


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
