"""Solving with a positive definite matrix, and the ways out when rounding spoils it."""

from __future__ import annotations

import pytest
import torch

from marquardt.curvature import direct as solve
from marquardt.curvature.direct import FactorizationError, factored, holds, norm, refined, spd_solve
from marquardt.deferred import Tape, recorded
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
    monkeypatch.setattr(solve, "_cholesky", lambda H, *rest: None if H.dtype == torch.float32 else cholesky(H, *rest))
    X = torch.randn(6, 4)
    H, A, b, notes = (X.T @ X).float(), torch.rand(4).float(), torch.randn(4).float(), []
    before = H.clone()
    x = spd_solve(H, A, b, notes)
    assert notes == ["factored in float64"]
    assert x.dtype == torch.float32
    assert error(x, torch.linalg.solve(H.double() + A.double().diag(), b.double())) < 1e-5
    assert torch.equal(H, before)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (2.0**-20, 2.0**20)], ids=["one unit", "other units"])
def test_jitter_where_float64_gives_up_too(scales):
    """Of the unit diagonal: it is relative to each parameter."""
    b, notes = torch.tensor(scales), []  # roots and products of these are exact
    singular = b[:, None] * b
    before = singular.clone()
    x = spd_solve(singular, torch.zeros(2), b, notes)
    assert notes == ["factored with jitter"]
    assert error(x * b, torch.tensor([0.5, 0.5])) < 1e-10
    assert torch.equal(singular, before)


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


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """H with eigenvalues from 1 to 1e4, a diagonal A, b."""
    Q, _ = torch.linalg.qr(torch.randn(12, 12))
    return (Q * torch.logspace(0, 4, 12)) @ Q.T, torch.rand(12), torch.randn(12)


def test_refined():
    """Right in float64 by a factor in float32, whatever the units of b."""
    H, A, b = problem()
    rough = H.float()
    M = factored(rough, A)
    assert torch.equal(rough, H.float())  # A is taken off again
    assert 1e-10 < error(M(b), torch.linalg.solve(H + A.diag(), b)) < 1e-2
    for c in (1.0, 1e-60, 1e60):
        x = refined(lambda v: H @ v + A * v, M, c * b, 1e-10, 12)
        assert error(x, torch.linalg.solve(H + A.diag(), c * b)) < 1e-9
    assert refined(lambda v: H @ v + A * v, M, b, 1e-10, 1) is None


def test_what_cannot_be_refined():
    H, A, b = problem()
    assert factored(-H.float(), A) is None
    assert factored(torch.full((2, 2), float("nan")), torch.ones(2)) is None
    M = factored(H.float(), A)
    for wrong in (-H, 1e3 * torch.diag(torch.arange(12.0)), torch.full_like(H, float("nan"))):
        assert refined(lambda v, W=wrong: W @ v, M, b, 1e-10, 5) is None
    assert refined(lambda v: H @ v, M, b * float("inf"), 1e-10, 5) is None
    assert refined(lambda v: H @ v + A * v, M, 0 * b, 1e-10, 12).tolist() == [0.0] * 12


def test_the_residual_is_that_of_the_solution():
    """The last product is that with the solution itself: if it is another one, the recurrence does not notice."""
    H, _, b = problem()
    M, calls = factored(H.float(), torch.zeros(12)), []

    def product(v, wrong=0):
        calls.append(v)
        return H @ v * (1.001 if len(calls) == wrong else 1.0)

    assert refined(product, M, b, 1e-6, 12) is not None
    last = len(calls)
    calls.clear()
    assert refined(lambda v: product(v, last), M, b, 1e-6, 12) is None
    assert len(calls) == last


def test_a_condition_on_the_norm():
    """The trace of I is 8 and its norm 1: between them only the norm can say yes."""
    I, s = torch.eye(8), torch.full((8,), 2.0)
    for limit, expected in ((9.0, True), (4.0, True), (0.9, False)):
        assert holds(lambda size, limit=limit: size <= limit, I) == expected
        assert holds(lambda size, limit=limit: size <= 4 * limit, I, s) == expected
    asked: list[float] = []
    assert holds(lambda size: asked.append(size.item()) or size <= 9, I)
    assert asked == [8.0]
    tape = Tape([])
    with recorded(tape):
        assert holds(lambda size: size <= 4, I)
    assert tape.asked == [True]
