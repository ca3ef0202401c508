"""Columns that matter are told from those that do not."""

from __future__ import annotations

import pytest
import torch

from marquardt.table.importance import ROWS, permutation


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
