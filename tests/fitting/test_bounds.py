"""Bounds: met exactly, and no hindrance to what they leave free."""

import pytest
import torch

import marquardt as mq
from marquardt import least_squares
from support.decay.residuals import decay

D = torch.float64


def test_a_bound_that_holds_is_met_exactly():
    fit = least_squares(decay, [1.0, 1.0, 1.0], bounds=([0, 0, 0.6], [3, 1.0, 9]))
    assert fit.active_mask.tolist() == [0, 1, 1] or fit.x[1] == 1.0
    assert fit.optimality < 1e-10


def test_starts_on_a_bound_and_fixed_parameters():
    fit = least_squares(decay, [0.0, 0.0, 0.5], bounds=([0, 0, 0.5], [9, 9, 0.5]))
    assert fit.success
    assert fit.x[2] == 0.5
    free = least_squares(lambda p: decay([p[0], p[1], 0.5]), [1.0, 1.0])
    assert fit.x[:2] == pytest.approx(free.x, rel=1e-8)


def test_a_parameter_at_its_bound_is_not_measured_by_another_ones_column():
    """Columns 1e8 and 1e-8 long: their products with parameters of 1e-8 and 1e8 are those of an ordinary problem."""

    def residuals(p):
        return torch.stack([1e8 * p[0] + 1e-8 * p[1] - 3, 1e8 * p[0] - 1e-8 * p[1] - 1])

    result = mq.least_squares(residuals, torch.tensor([1e-9, 5e7], dtype=D), bounds=(0, torch.tensor([1.0, 5e7])))
    assert result.success
    torch.testing.assert_close(result.x, torch.tensor([2e-8, 5e7], dtype=D), rtol=1e-9, atol=0)
