"""Losses that outliers do not rule."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt import losses
from marquardt.losses import AbsoluteError, Quantile, StudentT
from support.losses import MATRIX, close, conforms, f64, majorises, normal
from support.unchanged import refused

LOSSES = [
    AbsoluteError(),
    Quantile(),
    Quantile(0.9, 0.2),
    Quantile(q=0.1, smoothing=1e-3),
    StudentT(),
    StudentT(1.5, sigma=0.3),
]


@pytest.mark.parametrize("loss", [*LOSSES, Quantile([0.1, 0.5, 0.8], 0.2)], ids=repr)
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


def test_several_levels_are_those_of_the_columns():
    torch.manual_seed(0)
    z, y = normal((6, 2, 3)), normal((6, 2, 3))
    levels = (0.1, 0.5, 0.9)
    for q in (list(levels), levels, torch.tensor(levels, dtype=f64), torch.tensor(levels, dtype=f64).numpy()):
        assert Quantile(q) == Quantile(levels) != Quantile(levels[::-1])
    loss, singles = Quantile(levels), [Quantile(q) for q in levels]
    columns = [(one, z[..., k], y[..., k]) for k, one in enumerate(singles)]
    for name in ("value", "normaliser", "lower_bound"):
        close(getattr(loss, name)(z, y), sum(getattr(one, name)(a, b) for one, a, b in columns))
    for name in ("ell", "slope", "s"):
        close(getattr(loss, name)(z, y), torch.stack([getattr(one, name)(a, b) for one, a, b in columns], -1))


def test_levels_find_their_quantiles():
    torch.manual_seed(0)
    x, noise = torch.rand(600, 1), torch.rand(600, 1)
    model = nn.Linear(1, 3)
    opt = mq.LM(model, Quantile([0.1, 0.5, 0.9]))
    for _ in range(30):
        opt.step(x, (x + noise).expand(-1, 3))
    below = (x + noise <= model(x)).float().mean(0)
    assert (below - torch.tensor([0.1, 0.5, 0.9])).abs().max() < 0.03


def test_levels_that_do_not_fit_are_refused():
    loss, z = Quantile([0.1, 0.5, 0.9]), torch.zeros(4, 3)
    for bad in (torch.zeros(4, 2), torch.zeros(3)):
        with refused(f"outputs have shape {tuple(bad.shape)}", "needs one for each, (N, …, 3)"):
            loss.check(bad, bad)
    for y in (torch.zeros(4), torch.zeros(4, 1)):
        with refused(f"targets {tuple(y.shape)}", "targets.reshape(4, 1).expand(4, 3)"):
            loss.check(z, y)
    with refused("targets (4, 2)", "shape of the outputs"):
        loss.check(z, torch.zeros(4, 2))


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: Quantile("a"), "q must be a number, got 'a'"),
        (lambda: Quantile([0.5, None]), "q must be a number, got None"),
        (lambda: Quantile(0.5, None), "smoothing"),
        (lambda: StudentT(None), "dof must be a number, got None"),
        (lambda: StudentT(sigma="a"), "sigma"),
        (lambda: losses.Huber("a"), "delta must be a number, got 'a'"),
        (lambda: losses.Hinge([1.0]), "margin"),
        (lambda: losses.Gamma(torch.ones(2)), "shape"),
        (lambda: losses.NegativeBinomial({}), "dispersion"),
        (lambda: losses.GaussianNLL(eps=None), "eps"),
        (lambda: losses.CrossEntropy(label_smoothing="a"), "label_smoothing"),
        (lambda: losses.SquaredError(factor="a"), "factor"),
        (lambda: losses.Function(torch.mul, low=None), "low"),
    ],
)
def test_options_that_are_no_numbers(make, option):
    with refused(option, "must be a number, got"):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Quantile(0.0), "q must lie between 0 and 1, got 0.0"),
        (lambda: Quantile(math.nan), "got nan"),
        (lambda: Quantile([0.5, 1.0]), r"q must lie between 0 and 1, got \(0.5, 1.0\)"),
        (lambda: Quantile([]), "q must lie between 0 and 1"),
        (lambda: Quantile(0.5, 0.0), "smoothing must be positive and finite, got 0.0"),
        (lambda: StudentT(0.0), "dof must be positive"),
        (lambda: StudentT(1.0, math.inf), "sigma must be positive and finite, got inf"),
    ],
)
def test_invalid_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()
