"""The linear algebra of a step."""

import math

import pytest
import torch

from marquardt import least_squares
from marquardt.fitting.factor import QRFactor, norm


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
