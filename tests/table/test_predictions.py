"""Measures against formulas and against scikit-learn; columns that matter are told from those that do not."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import sklearn.metrics as judge
import torch

from marquardt.table import predictions
from marquardt.table.columns import Target
from marquardt.table.predictions import ROWS, permutation


def test_measures_of_numbers(double):
    """Also of a target that never changes, with the simplest prediction beside them"""
    true, mean, trained = (torch.tensor(t) for t in ([1.0, 2.0, 3.0, 6.0], [1.0, 3.0, 3.0, 2.0], [[1.0, 4], [5.0, 6]]))
    true, mean, std = (torch.stack((t, torch.full((4,), 5.0)), 1) for t in (true, mean, torch.full((4,), 0.5)))
    found = predictions.measured(Target(("a", "b")), true, mean, std, 0.95, trained)
    log_density = [NormalDist(m, 0.5).pdf(y) for m, y in zip(mean[:, 0].tolist(), true[:, 0].tolist(), strict=True)]
    assert found["a"] == {
        "rmse": pytest.approx(math.sqrt(17 / 4)), "mae": pytest.approx(5 / 4), "r2": pytest.approx(1 - 17 / 14),
        "coverage": 0.5,  # 1.96 · 0.5 < 1
        "nll": pytest.approx(-sum(map(math.log, log_density)) / 4), "rmse_of_the_mean": math.sqrt(14 / 4),
    }  # fmt: skip
    assert (found["b"]["rmse"], found["b"]["rmse_of_the_mean"]) == (0.0, 0.0)
    assert math.isnan(found["b"]["r2"])
    for level in (0.5, 0.9, 0.95, 0.999):
        assert predictions.quantile(level) == pytest.approx(NormalDist().inv_cdf((1 + level) / 2), rel=1e-12)


def test_measures_of_classes_against_scikit_learn(double):
    p, true = torch.rand(50, 3).softmax(1), torch.arange(50) % 3
    found = predictions.measured(Target(("c",), ("x", "y", "z")), true, p, None, 0.95, torch.tensor([1, 1, 0]))["c"]
    assert found["accuracy"] == pytest.approx(judge.accuracy_score(true, p.argmax(1)))
    assert found["log_loss"] == pytest.approx(judge.log_loss(true, p))
    assert predictions.confusion(true, p) == judge.confusion_matrix(true, p.argmax(1)).tolist()
    assert found["brier"] == pytest.approx(((p - torch.eye(3)[true]) ** 2).sum(1).mean().item())
    assert found["accuracy_of_the_largest_class"] == pytest.approx(17 / 50)


def test_calibration_of_probabilities(double):
    p = torch.tensor([[0.9, 0.1]] * 10)
    right = torch.tensor([0] * 9 + [1])
    assert predictions.classification(right, p)["calibration_error"] == pytest.approx(0.0)
    wrong = 1 - right
    assert predictions.classification(wrong, p)["calibration_error"] == pytest.approx(0.8)
    assert predictions.reliability(wrong, p) == [(pytest.approx(0.9), pytest.approx(0.1), 10)]


def test_words():
    number = {"y": {"rmse": 1.5, "r2": 0.8, "coverage": 0.94, "rmse_of_the_mean": 3.0}}
    said = "y: RMSE 1.5 (the mean alone: 3), R² 0.800; the 95 % interval holds 94.0 % of the values."
    assert predictions.words(number, 0.95) == [said]
    classes = {"y": {"accuracy": 0.9, "log_loss": 0.3, "calibration_error": 0.02}}
    assert predictions.words(classes, 0.95) == ["y: accuracy 90.0 %, log loss 0.3, calibration error 0.020."]


def test_only_what_is_used_matters_and_inputs_of_a_column_stay_together(double):
    X, seen = torch.randn(ROWS + 50, 4), set()
    X[:, 2] = X[:, 1]  # of one column: their difference is always 0
    y = X[:, 0].clone()

    def error(inputs, rows):
        seen.add(len(rows))
        assert torch.equal(inputs.sort(0).values, X[rows].sort(0).values)  # a column keeps its values
        return float((inputs[:, 0] - y[rows]).square().mean() + (inputs[:, 1] - inputs[:, 2]).abs().sum())

    groups = {"used": [0], "pair": [1, 2], "idle": [3]}
    found = permutation(error, X, groups, seed=3)
    assert found[0].name == "used"
    assert found[0].rise == pytest.approx(2 * y.var(correction=0).item(), rel=0.2)  # E(a − b)² of independent a and b
    assert {f.name: f.rise for f in found[1:]} == {"pair": 0.0, "idle": 0.0}
    assert permutation(error, X, groups, seed=3) == found
    assert seen == {ROWS}
