"""What a run starts from and what it finds: predictions, how good they are, and how much each column matters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd  # type: ignore[import-untyped]
import torch
from torch import Tensor

from ..tabular import Committee
from .columns import Columns, Target
from .request import Request

LEVEL = 0.95  # of the intervals in predictions.csv and the report
BINS = 10  # of the reliability diagram
REPEATS = 5  # times that the values of a column are shuffled
ROWS = 1000  # that are looked at for this


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
