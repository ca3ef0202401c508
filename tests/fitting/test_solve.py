"""The linear algebra of a step, and how a fit ends: in success at a minimum, and nowhere else."""

import math

import pytest
import torch
from torch import Tensor, exp

import marquardt as mq
from marquardt import least_squares
from marquardt.fitting.factor import QRFactor, norm
from marquardt.fitting.problems import build
from marquardt.fitting.solve import Options, is_stationary, linearised
from support.decay.residuals import decay

D = torch.float64


STEEP = {
    "offset": (lambda p: torch.exp(p - 1e10) - 2.5, 1e10),  # the root is 0.92 above 1e10, a relative change of 1e-10
    "stiff": (lambda p: torch.exp(1e9 * (p - 1)) - 2.5, 1.0),
    "mixed": (lambda p: torch.cat([torch.exp(p - 1e12) - 1.5, p - 1e12]), 1e12 + 1),
}


@pytest.mark.parametrize(("fun", "x0"), STEEP.values(), ids=STEEP)
def test_a_small_relative_step_is_no_minimum(fun, x0):
    result = mq.least_squares(fun, torch.tensor([x0], dtype=D))
    # what one rounding of x changes the residuals by
    wobble = torch.finfo(D).eps * result.jac.abs().amax() * result.x.abs().amax()
    assert result.success
    assert result.grad.abs().amax() <= 10 * wobble * result.jac.abs().amax()


def test_a_column_that_was_longer_is_no_column_of_nothing():
    """The cosine of the only column is 0.6; that D is 1e10 times its length says nothing about the point."""
    f, J = torch.tensor([[3.0, 4.0]], dtype=D), torch.tensor([[[1.0], [0.0]]], dtype=D)
    x, options = torch.tensor([[2.0]], dtype=D), Options()
    far = torch.full_like(x, math.inf)
    line, _ = build(lambda p: torch.cat([p + 1, 0 * p + 4]), x, "auto", (), {}, False, (-far, far), False)
    assert not is_stationary(linearised(line, x, f, J, torch.full_like(x, 1e10), options), options)
    # One that changes nothing even if its parameter is doubled is another matter.
    assert is_stationary(linearised(line, x, f, 1e-10 * J, torch.ones_like(x), options), options)


@pytest.mark.parametrize("loss", ["linear", "huber"])
def test_residuals_of_pure_rounding_are_a_success(loss):
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        m, n = (1 + seed % 5, 1 + seed % 5) if seed % 2 else (30, 4)
        A, c = (torch.randn(*shape, generator=generator, dtype=D) for shape in ((m, n), (n,)))
        result = mq.least_squares(lambda q, A=A, b=A @ c: A @ q - b, torch.zeros(n, dtype=D), loss=loss)
        assert result.success, (seed, result.message)
        assert result.fun.norm() <= 1e-13 * (A.norm() * c.norm())


def test_float32_reaches_its_minimum():
    x = torch.linspace(0, 4, 40)
    for seed in range(20):
        y = 2.5 * torch.exp(-1.3 * x) + 0.5 + 0.05 * torch.randn(40, generator=torch.Generator().manual_seed(seed))

        def residuals(p, y=y):
            return p[0] * torch.exp(-p[1] * x.to(p)) + p[2] - y.to(p)

        result = mq.least_squares(residuals, torch.ones(3), dtype=torch.float32)
        assert result.success, (seed, result.message)
        torch.testing.assert_close(
            result.x.double(), mq.least_squares(residuals, torch.ones(3)).x, rtol=1e-3, atol=1e-4
        )


def test_no_success_without_a_minimum():
    """exp falls for ever; a function evaluation limit is no success either."""
    fit = least_squares(lambda x: torch.stack([exp(-x[0]) + 1, exp(-x[0]) - 1]), [0.0], max_nfev=7)
    assert not fit.success
    assert fit.status == 0
    assert fit.nfev <= 7


@pytest.mark.parametrize(
    ("tolerances", "status", "word"),
    [
        ({"gtol": 1e-3}, 1, "gtol"),
        ({"ftol": 1e-4}, 2, "ftol"),
        ({"xtol": 1e-4}, 3, "xtol"),
        ({"xtol": 1e-2, "ftol": 0.1}, 4, "Both"),
        ({}, 2, "precision of the arithmetic"),
    ],
)
def test_the_tolerance_that_has_ended_a_fit_is_named(tolerances, status, word):
    t = torch.linspace(0, 4, 30, dtype=torch.float64)
    y = 2 * torch.exp(-t) + 0.1 * torch.cos(7 * t)
    options = {"gtol": None, "xtol": None, "ftol": None, **tolerances}
    fit = mq.least_squares(lambda p: p[0] * torch.exp(-p[1] * t) - y, torch.tensor([1.0, 0.5]), **options)
    assert fit.success
    assert fit.status == status
    assert word in fit.message


def test_a_wrong_jacobian_is_not_called_success():
    fit = least_squares(decay, torch.ones(3), jac=lambda p: -torch.func.jacfwd(decay)(p))
    assert not fit.success
    assert fit.status == -3
    assert torch.allclose(fit.x, torch.ones(3, dtype=torch.float64))


def test_geodesic_acceleration_takes_fewer_jacobians_in_a_curved_valley():
    def f(x: Tensor) -> Tensor:
        return torch.stack([10 * (x[1] - x[0] ** 2), 1 - x[0]])

    plain, bent = (least_squares(f, [-1.2, 1.0], geodesic=g) for g in (False, True))
    assert bent.x == pytest.approx([1, 1])
    assert bent.njev < plain.njev


@pytest.mark.parametrize("deficient", [False, True])
def test_the_damped_step_is_the_minimiser_within_the_region(deficient: bool):
    torch.manual_seed(0)
    J, f = torch.randn(50, 7, 4, dtype=torch.float64), torch.randn(50, 7, dtype=torch.float64)
    J[..., 3] = J[..., 2] if deficient else J[..., 3]
    D = 10 ** (4 * torch.rand(50, 4, dtype=torch.float64) - 2)
    factor = QRFactor.of(J, f)
    radius = 0.3 * torch.rand(50, dtype=torch.float64) + 1e-3
    p, held = factor.within(radius, D)
    assert (norm(D * p) <= 1.1001 * radius).all()
    # Kuhn and Tucker: Jᵀ(f + Jp) = −λD²p for one λ ≥ 0, zero where the region does not hold the step.
    g = (J.mT @ (f + (J @ p.unsqueeze(-1)).squeeze(-1)).unsqueeze(-1)).squeeze(-1) / D
    lam = -(g * D * p).sum(-1) / (D * p).norm(dim=-1) ** 2
    assert (
        (g + lam.unsqueeze(-1) * D * p).norm(dim=-1) <= 1e-9 * (J.mT @ f.unsqueeze(-1)).squeeze(-1).div(D).norm(dim=-1)
    ).all()
    assert (lam >= -1e-9).all()
    assert (lam[~held].abs() < 1e-9).all()
    assert (lam > 1e-3).any()


def test_columns_of_any_scale():
    """R is solved, not RᵀR: the step survives columns 1e±120 long and a condition of 1e12."""
    torch.manual_seed(0)
    J, p = torch.randn(5, 9, 3, dtype=torch.float64), torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    J[..., 2] = J[..., 1] + 1e-10 * J[..., 2]
    size = torch.tensor([1e120, 1.0, 1e-120], dtype=torch.float64)
    f = -(J @ p)
    assert torch.allclose(QRFactor.of(J * size, f).undamped() * size, p.expand(5, 3), rtol=1e-4)


def test_jacobians_with_nans_and_lost_rank_at_once_are_survived():
    """√x at a trial point of 0 has an infinite slope, beside a column of zeros."""
    fit = least_squares(lambda p: torch.stack([torch.sqrt(p[0]) - 0.1, 0 * p[1], p[0] + 0 * p[1]]), [1.0, 1.0])
    assert fit.x[0] > 0
    assert math.isfinite(fit.cost)
    R = torch.tensor([[[math.nan, 1.0], [0.0, 0.0]], [[1.0, 1.0], [0.0, 0.0]]], dtype=torch.float64)
    Rc = torch.cat([R, torch.ones(2, 2, 1, dtype=torch.float64)], -1)
    assert QRFactor(Rc).decrement.isnan().tolist() == [True, False]
