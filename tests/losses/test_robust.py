"""Losses that outliers do not rule."""

from __future__ import annotations

import math

import pytest
import torch

from marquardt.losses import AbsoluteError, Quantile, StudentT
from support.losses import MATRIX, close, conforms, f64, majorises, normal

LOSSES = [
    AbsoluteError(),
    Quantile(),
    Quantile(0.9, 0.2),
    Quantile(q=0.1, smoothing=1e-3),
    StudentT(),
    StudentT(1.5, sigma=0.3),
]


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_conforms(loss):
    torch.manual_seed(0)
    conforms(loss, 2 * normal(MATRIX), normal(MATRIX))


@pytest.mark.parametrize("loss", LOSSES[1:], ids=repr)
def test_the_quadratic_lies_above(loss):
    majorises(loss)


def test_the_quadratic_of_the_absolute_error_lies_above():
    """Outside ε, where it touches |e|."""
    majorises(AbsoluteError(), 0.2, 5.0)


def test_small_residuals_do_not_hold_the_others():
    """s² is at most 100 over the mean |e|, in any units; a perfect fit has a finite one."""
    z = torch.tensor([[1e-9, 1.0, 2.0]], dtype=f64)
    for units in (1.0, 1e6):
        s = AbsoluteError().s(units * z, 0 * z)
        close(s.square() * units, torch.tensor([[100.0, 1.0, 0.5]], dtype=f64), 1e-8)
    assert AbsoluteError().s(z, z).isfinite().all()


@pytest.mark.parametrize("q", [0.1, 0.5, 0.75])
def test_the_least_loss_is_at_the_quantile(q):
    y = torch.linspace(0, 1, 1001, dtype=f64)
    z = torch.linspace(0, 1, 201, dtype=f64)
    f = Quantile(q, 0.001).ell(z[:, None].expand(-1, 1001), y.expand(201, -1)).sum(1)
    assert float(z[f.argmin()]) == pytest.approx(q, abs=0.006)


@pytest.mark.parametrize("q", [0.1, 0.5])
def test_the_bound_of_a_quantile_is_reached(q):
    z = torch.linspace(-2, 2, 40001, dtype=f64)[:, None]
    loss = Quantile(q, 0.3)
    close(loss.ell(z, 0 * z).min(), loss.lower_bound(z[:1], z[:1]), 1e-8)


def test_student_t_is_the_density():
    e = torch.linspace(-4, 4, 9, dtype=f64)[:, None]
    t = torch.distributions.StudentT(torch.tensor(3.0, dtype=f64), 0.0, 0.7)
    close(StudentT(3.0, 0.7).ell(e, 0 * e), t.log_prob(torch.zeros((), dtype=f64)) - t.log_prob(e))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Quantile(0.0), "q must lie between 0 and 1, got 0.0"),
        (lambda: Quantile(math.nan), "got nan"),
        (lambda: Quantile(0.5, 0.0), "smoothing must be positive and finite, got 0.0"),
        (lambda: StudentT(0.0), "dof must be positive"),
        (lambda: StudentT(1.0, math.inf), "sigma must be positive and finite, got inf"),
    ],
)
def test_invalid_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()
