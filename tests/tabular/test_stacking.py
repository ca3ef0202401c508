"""Weights of configurations and widths of intervals against plain searches."""

from __future__ import annotations

import pytest
import torch

from marquardt.tabular.stacking import calibrated, mixed, stacked


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def simplex(steps: int) -> torch.Tensor:
    return (
        torch.tensor([(i, j, steps - i - j) for i in range(steps + 1) for j in range(steps + 1 - i)]).double() / steps
    )


@pytest.mark.parametrize("seed", range(5))
def test_no_other_weights_have_a_smaller_error(seed):
    y, weight = drawn(60, 2, seed=seed), torch.rand(60, generator=torch.Generator().manual_seed(seed)).double() + 0.1
    scales = torch.tensor([0.2, 0.3, 1.0], dtype=torch.float64)[:, None, None]
    p = y + scales * drawn(3, 60, 2, seed=seed + 10)

    def error(w):
        return float((weight[:, None] * (y - torch.einsum("c,cno->no", w, p)).square()).sum())

    w = stacked(p, y, weight)
    assert float(w.sum()) == pytest.approx(1)
    assert bool((w >= 0).all())
    assert all(error(w) <= error(other) * (1 + 1e-8) for other in simplex(40))


def test_equal_configurations_are_no_trouble():
    y = drawn(30, 1)
    p = (y + 0.1 * drawn(30, 1, seed=1)).expand(3, -1, -1)
    w = stacked(p, y, torch.ones(30, dtype=torch.float64))
    assert float(w.sum()) == pytest.approx(1)
    assert bool(w.isfinite().all())


def test_a_mixture_has_the_largest_likelihood():
    p = torch.rand(3, 80, generator=torch.Generator().manual_seed(3)).double().clamp(min=0.01)
    weight = torch.ones(80, dtype=torch.float64)
    w = mixed(p, weight, rounds=2000)
    best = max(float((other @ p).log().sum()) for other in simplex(40))
    assert float((w @ p).log().sum()) >= best - 1e-3


@pytest.mark.parametrize(("floor", "factor"), [(0.5, 0.0), (0.01, 2.0), (0.3, 1.0)])
def test_floor_and_factor_are_found(floor, factor):
    variance = torch.rand(6_000, generator=torch.Generator().manual_seed(1)).double() ** 2
    squares = (floor + factor * variance) * drawn(6_000).square()
    s2, c = calibrated(squares, variance, torch.ones(6_000, dtype=torch.float64))
    expected, found = floor + factor * variance, s2 + c * variance
    assert float((found / expected).log().abs().mean()) < 0.15


def test_no_residuals_and_no_variance():
    zero, one = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    assert calibrated(zero, one, one) == (0.0, 0.0)
    assert calibrated(2 * one, zero, one) == (2.0, 0.0)
