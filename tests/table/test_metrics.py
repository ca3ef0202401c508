"""Measures against formulas written out, and against scikit-learn."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch

from marquardt.table import metrics
from marquardt.table.targets import ClassTarget, NumberTarget


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
def test_the_quantile_is_that_of_the_normal_distribution(level):
    assert metrics.quantile(level) == pytest.approx(NormalDist().inv_cdf((1 + level) / 2), rel=1e-12)


def test_measures_of_numbers(double):
    true, mean, std = torch.tensor([1.0, 2.0, 3.0, 6.0]), torch.tensor([1.0, 3.0, 3.0, 2.0]), torch.full((4,), 0.5)
    found = metrics.regression(true, mean, std, 0.95)
    assert found["rmse"] == pytest.approx(math.sqrt(17 / 4))
    assert found["mae"] == pytest.approx(5 / 4)
    assert found["r2"] == pytest.approx(1 - 17 / 14)
    assert found["coverage"] == 0.5  # 1.96 · 0.5 < 1
    log_density = [NormalDist(m, 0.5).pdf(y) for m, y in zip(mean.tolist(), true.tolist(), strict=True)]
    assert found["nll"] == pytest.approx(-sum(map(math.log, log_density)) / 4)


def test_measures_of_classes_against_scikit_learn(double):
    import sklearn.metrics as judge

    p = torch.rand(50, 3).softmax(1)
    true = torch.arange(50) % 3
    found = metrics.classification(true, p)
    assert found["accuracy"] == pytest.approx(judge.accuracy_score(true, p.argmax(1)))
    assert found["log_loss"] == pytest.approx(judge.log_loss(true, p))
    assert metrics.confusion(true, p) == judge.confusion_matrix(true, p.argmax(1)).tolist()
    assert found["brier"] == pytest.approx(((p - torch.eye(3)[true]) ** 2).sum(1).mean().item())


def test_calibration_of_probabilities(double):
    p = torch.tensor([[0.9, 0.1]] * 10)
    right = torch.tensor([0] * 9 + [1])
    assert metrics.classification(right, p)["calibration_error"] == pytest.approx(0.0)
    wrong = 1 - right
    assert metrics.classification(wrong, p)["calibration_error"] == pytest.approx(0.8)
    assert metrics.reliability(wrong, p) == [(pytest.approx(0.9), pytest.approx(0.1), 10)]


def test_the_simplest_predictions_stand_beside(double):
    target = NumberTarget(("a", "b"))
    true, trained = torch.tensor([[1.0, 5.0], [3.0, 5.0]]), torch.tensor([[2.0, 4.0], [2.0, 6.0]])
    found = metrics.measured(target, true, true, torch.ones(2, 2), 0.95, trained)
    assert [found[name]["rmse_of_the_mean"] for name in "ab"] == [1.0, 0.0]
    assert math.isnan(found["b"]["r2"])
    classes = ClassTarget(("c",), ("x", "y"))
    found = metrics.measured(
        classes, torch.tensor([0, 1, 1]), torch.eye(2)[[0, 1, 1]], None, 0.95, torch.tensor([1, 1, 0])
    )
    assert found["c"]["accuracy_of_the_largest_class"] == pytest.approx(2 / 3)
    assert found["c"]["accuracy"] == 1.0


def test_words():
    number = {"y": {"rmse": 1.5, "r2": 0.8, "coverage": 0.94, "rmse_of_the_mean": 3.0}}
    said = "y: RMSE 1.5 (the mean alone: 3), R² 0.800; the 95 % interval holds 94.0 % of the values."
    assert metrics.words(number, 0.95) == [said]
    classes = {"y": {"accuracy": 0.9, "log_loss": 0.3, "calibration_error": 0.02}}
    assert metrics.words(classes, 0.95) == ["y: accuracy 90.0 %, log loss 0.3, calibration error 0.020."]
