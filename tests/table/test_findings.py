"""Measures against formulas and against scikit-learn; columns that matter are told from those that do not."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch

from marquardt.table import findings
from marquardt.table.columns import ClassTarget, NumberTarget
from marquardt.table.findings import ROWS, permutation


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
def test_the_quantile_is_that_of_the_normal_distribution(level):
    assert findings.quantile(level) == pytest.approx(NormalDist().inv_cdf((1 + level) / 2), rel=1e-12)


def test_measures_of_numbers(double):
    true, mean, std = torch.tensor([1.0, 2.0, 3.0, 6.0]), torch.tensor([1.0, 3.0, 3.0, 2.0]), torch.full((4,), 0.5)
    found = findings.regression(true, mean, std, 0.95)
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
    found = findings.classification(true, p)
    assert found["accuracy"] == pytest.approx(judge.accuracy_score(true, p.argmax(1)))
    assert found["log_loss"] == pytest.approx(judge.log_loss(true, p))
    assert findings.confusion(true, p) == judge.confusion_matrix(true, p.argmax(1)).tolist()
    assert found["brier"] == pytest.approx(((p - torch.eye(3)[true]) ** 2).sum(1).mean().item())


def test_calibration_of_probabilities(double):
    p = torch.tensor([[0.9, 0.1]] * 10)
    right = torch.tensor([0] * 9 + [1])
    assert findings.classification(right, p)["calibration_error"] == pytest.approx(0.0)
    wrong = 1 - right
    assert findings.classification(wrong, p)["calibration_error"] == pytest.approx(0.8)
    assert findings.reliability(wrong, p) == [(pytest.approx(0.9), pytest.approx(0.1), 10)]


def test_the_simplest_predictions_stand_beside(double):
    target = NumberTarget(("a", "b"))
    true, trained = torch.tensor([[1.0, 5.0], [3.0, 5.0]]), torch.tensor([[2.0, 4.0], [2.0, 6.0]])
    found = findings.measured(target, true, true, torch.ones(2, 2), 0.95, trained)
    assert [found[name]["rmse_of_the_mean"] for name in "ab"] == [1.0, 0.0]
    assert math.isnan(found["b"]["r2"])
    classes = ClassTarget(("c",), ("x", "y"))
    found = findings.measured(
        classes, torch.tensor([0, 1, 1]), torch.eye(2)[[0, 1, 1]], None, 0.95, torch.tensor([1, 1, 0])
    )
    assert found["c"]["accuracy_of_the_largest_class"] == pytest.approx(2 / 3)
    assert found["c"]["accuracy"] == 1.0


def test_words():
    number = {"y": {"rmse": 1.5, "r2": 0.8, "coverage": 0.94, "rmse_of_the_mean": 3.0}}
    said = "y: RMSE 1.5 (the mean alone: 3), R² 0.800; the 95 % interval holds 94.0 % of the values."
    assert findings.words(number, 0.95) == [said]
    classes = {"y": {"accuracy": 0.9, "log_loss": 0.3, "calibration_error": 0.02}}
    assert findings.words(classes, 0.95) == ["y: accuracy 90.0 %, log loss 0.3, calibration error 0.020."]


def test_only_what_is_used_matters_and_inputs_of_a_column_stay_together(double):
    X = torch.randn(200, 4)
    X[:, 2] = X[:, 1]  # of one column: their difference is always 0

    def error(inputs, rows):
        assert torch.equal(inputs.sort(0).values, X.sort(0).values)  # a column keeps its values
        return float((inputs[:, 0] - y[rows]).square().mean() + (inputs[:, 1] - inputs[:, 2]).abs().sum())

    y = X[:, 0].clone()
    found = permutation(error, X, {"used": [0], "pair": [1, 2], "idle": [3]}, seed=0)
    assert found[0].name == "used"
    assert found[0].rise == pytest.approx(2 * y.var(correction=0).item(), rel=0.2)  # E(a − b)² of independent a and b
    assert {f.name: f.rise for f in found[1:]} == {"pair": 0.0, "idle": 0.0}


def test_it_repeats_and_looks_at_some_rows_only(double):
    X, seen = torch.randn(ROWS + 50, 1), set()

    def error(X, rows):
        seen.add(len(rows))
        return float(X[::2].sum())

    assert permutation(error, X, {"a": [0]}, seed=3) == permutation(error, X, {"a": [0]}, seed=3)
    assert seen == {ROWS}
    assert X.shape == (ROWS + 50, 1)
