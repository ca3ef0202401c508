"""How good predictions are: of numbers with their standard deviations, of classes with their probabilities."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .targets import NumberTarget, Target

BINS = 10  # of the reliability diagram


def quantile(level: float) -> float:
    """z with P(|N(0, 1)| < z) = level"""
    return math.sqrt(2) * float(torch.special.erfinv(torch.tensor(level, dtype=torch.float64)))


def measured(
    target: Target, true: Tensor, mean: Tensor, std: Tensor | None, level: float, trained: Tensor | None = None
) -> dict[str, dict[str, float]]:
    """{target: {measure: value}}; with the values that were `trained` on, also of the simplest prediction there is."""
    if isinstance(target, NumberTarget):
        assert std is not None
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
    sentences = []
    for name, m in found.items():
        if "rmse" in m:
            r2 = "" if math.isnan(m["r2"]) else f", R² {m['r2']:.3f}"
            mean = f" (the mean alone: {m['rmse_of_the_mean']:.4g})" if "rmse_of_the_mean" in m else ""
            sentences.append(
                f"{name}: RMSE {m['rmse']:.4g}{mean}{r2}; "
                f"the {100 * level:.4g} % interval holds {100 * m['coverage']:.1f} % of the values."
            )
        else:
            largest = m.get("accuracy_of_the_largest_class")
            alone = "" if largest is None else f" (the largest class alone: {100 * largest:.1f} %)"
            sentences.append(
                f"{name}: accuracy {100 * m['accuracy']:.1f} %{alone}, log loss {m['log_loss']:.3g}, "
                f"calibration error {m['calibration_error']:.3f}."
            )
    return sentences


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
    place = (confidence * BINS).long().clamp(max=BINS - 1)
    bins = []
    for k in range(BINS):
        inside = place == k
        if inside.any():
            right = (predicted == true)[inside].double().mean()
            bins.append(Bin(float(confidence[inside].mean()), float(right), int(inside.sum())))
    return bins


def confusion(true: Tensor, probabilities: Tensor) -> list[list[int]]:
    """Rows are true classes, columns predicted ones."""
    classes = probabilities.shape[1]
    counts = torch.bincount(true * classes + probabilities.argmax(1), minlength=classes * classes)
    return [list(map(int, row)) for row in counts.view(classes, classes).tolist()]
