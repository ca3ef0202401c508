"""Solving with a positive definite matrix, and the ways out when rounding spoils it."""

from __future__ import annotations

import pytest
import torch

from marquardt.curvature import solve
from marquardt.curvature.solve import FactorizationError, norm, spd_solve
from support.reference import error

pytestmark = pytest.mark.usefixtures("double")


def test_solution():
    X = torch.randn(6, 4)
    H, A, b, notes = X.T @ X, torch.rand(4) + 0.1, torch.randn(4), []
    before = H.clone()
    assert error(spd_solve(H, A, b, notes), torch.linalg.solve(H + A.diag(), b)) < 1e-10
    assert torch.equal(H, before)  # A is taken off again
    assert notes == []


def test_float64_where_float32_gives_up(monkeypatch):
    """The same matrix, in another precision; what comes back has the precision of what was given."""
    cholesky = solve._cholesky
    monkeypatch.setattr(solve, "_cholesky", lambda H, b: None if H.dtype == torch.float32 else cholesky(H, b))
    X = torch.randn(6, 4)
    H, A, b, notes = (X.T @ X).float(), torch.rand(4).float(), torch.randn(4).float(), []
    before = H.clone()
    x = spd_solve(H, A, b, notes)
    assert notes == ["factored in float64"]
    assert x.dtype == torch.float32
    assert error(x, torch.linalg.solve(H.double() + A.double().diag(), b.double())) < 1e-5
    assert torch.equal(H, before)


def test_jitter_where_float64_gives_up_too():
    singular, b, notes = torch.ones(2, 2), torch.ones(2), []
    x = spd_solve(singular, torch.zeros(2), b, notes)
    assert notes == ["factored with jitter"]
    assert error(singular @ x, b) < 1e-10
    assert torch.equal(singular, torch.ones(2, 2))


def test_units_do_not_decide_whether_it_is_positive_definite():
    """The unit diagonal first: jitter is relative to each parameter."""
    scales, notes = torch.tensor([2.0**-20, 2.0**20]), []  # whose roots and products are exact
    H = scales[:, None] * torch.ones(2, 2) * scales
    b = scales.clone()
    x = spd_solve(H, torch.zeros(2), b, notes)
    assert notes == ["factored with jitter"]
    assert error(x * scales, torch.tensor([0.5, 0.5])) < 1e-10


def test_indefinite():
    H, notes = torch.tensor([[1.0, 2.0], [2.0, 1.0]]), []
    with pytest.raises(FactorizationError):
        spd_solve(H, torch.zeros(2), torch.ones(2), notes)
    assert H.tolist() == [[1, 2], [2, 1]]
    assert notes == []
    with pytest.raises(FactorizationError):
        spd_solve(torch.full((2, 2), float("nan")), torch.ones(2), torch.ones(2), notes)


def test_norm():
    """Right to a factor of two, of M and of diag s · M · diag s."""
    X, s = torch.randn(30, 8), torch.logspace(-1, 1, 8)
    M = X.T @ X
    for found, whole in ((norm(M), M), (norm(M, s), s[:, None] * M * s)):
        exact = torch.linalg.matrix_norm(whole, 2)
        assert 0.5 * exact <= found <= exact * (1 + 1e-12)
