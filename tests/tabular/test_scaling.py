"""Weighted scales, constant columns, equal rows and folds."""

from __future__ import annotations

import pytest
import torch

from marquardt.tabular.scaling import Inputs, Scale, distinct, folds


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_weights_count_as_equal_rows():
    x, weight = drawn(6, 2), torch.tensor([1.0, 0, 2, 3, 1, 1], dtype=torch.float64)
    repeated = x.repeat_interleave(weight.long(), 0)
    scale = Scale.of(x, weight)
    torch.testing.assert_close(scale.centre, repeated.mean(0))
    torch.testing.assert_close(scale.spread, repeated.std(0, unbiased=False))
    torch.testing.assert_close(scale.undo(scale.apply(x)), x)


@pytest.mark.parametrize("size", [1e-200, 1.0, 1e200])
def test_huge_and_tiny_columns(size):
    scaled = Scale.of(size * drawn(50, 1), torch.ones(50, dtype=torch.float64)).apply(size * drawn(50, 1))
    torch.testing.assert_close(scaled.square().mean(), torch.tensor(1.0, dtype=torch.float64))


def test_constant_columns_are_not_used():
    x = torch.stack((drawn(20), torch.full((20,), 0.1, dtype=torch.float64)), 1)
    inputs = Inputs.of(x, torch.ones(20, dtype=torch.float64), 10)
    assert inputs.columns.tolist() == [True, False]
    assert inputs.apply(x + torch.tensor([0.0, 7.0])).shape == (20, 1)


def test_inputs_end_half_a_range_beyond_those_that_were_seen():
    x = torch.linspace(0, 1, 11, dtype=torch.float64)[:, None]
    inputs = Inputs.of(x, torch.ones(11, dtype=torch.float64), 10)
    near, edge, far = (inputs.apply(torch.full((1, 1), v, dtype=torch.float64)) for v in (1.4, 1.5, 100.0))
    assert near < edge
    assert edge == far


def test_many_columns_leave_their_main_directions():
    x = drawn(50, 3) @ drawn(3, 20, seed=1) + 1e-6 * drawn(50, 20, seed=2)
    inputs = Inputs.of(x, torch.ones(50, dtype=torch.float64), 3)
    u = inputs.apply(x)
    assert u.shape == (50, 3)
    back = torch.linalg.lstsq(u, inputs.scale.apply(x)).residuals
    assert float(back.sum()) < 1e-8


def test_equal_rows_once_whatever_their_order():
    x = torch.tensor([[2.0, 1], [1, 5], [2, 1], [3, 3]], dtype=torch.float64)
    y = torch.tensor([0, 1, 0, 2])
    weight = torch.tensor([1.0, 2, 3, 0], dtype=torch.float64)
    first = distinct(x, y, weight)
    assert first[0].tolist() == [[1, 5], [2, 1]]
    assert first[1].tolist() == [1, 0]
    assert first[2].tolist() == [2, 4]
    order = torch.tensor([3, 2, 0, 1])
    for a, b in zip(first, distinct(x[order], y[order], weight[order]), strict=True):
        assert torch.equal(a, b)


def test_rows_with_equal_inputs_and_other_targets_stay_apart():
    x = torch.ones(3, 1, dtype=torch.float64)
    y = torch.tensor([[1.0], [2.0], [1.0]], dtype=torch.float64)
    _, targets, weight = distinct(x, y, torch.ones(3, dtype=torch.float64))
    assert targets.tolist() == [[1], [2]]
    assert weight.tolist() == [2, 1]


def test_classes_are_spread_over_the_folds():
    y = torch.tensor([0] * 50 + [1] * 10 + [2] * 5)
    fold = folds(y, 5, torch.Generator().manual_seed(0))
    for k in range(5):
        assert torch.bincount(y[fold == k], minlength=3).tolist() == [10, 2, 1]


def test_targets_are_spread_over_the_folds():
    y = drawn(100, 1)
    fold = folds(y, 5, torch.Generator().manual_seed(0))
    assert torch.bincount(fold).tolist() == [20] * 5
    low = y[:, 0] <= y[:, 0].sort().values[49]
    assert torch.bincount(fold[low]).tolist() == [10] * 5
