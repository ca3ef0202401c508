"""Conjugate gradients: when they stop, what they keep, and negative curvature."""

from __future__ import annotations

import math

import pytest
import torch

import marquardt as mq
from marquardt.curvature.matrix_free import conjugate_gradients
from support.cases import build
from support.linearized import represent, scalar
from support.reference import error

f64 = torch.float64


def spectrum(n: int, low: float) -> torch.Tensor:
    """A symmetric matrix with eigenvalues from 1 down to `low`."""
    Q, _ = torch.linalg.qr(torch.randn(n, n, dtype=f64))
    return Q @ torch.logspace(0, math.log10(low), n, dtype=f64).diag() @ Q.T


@pytest.mark.parametrize("tolerance", [5e-4, 5e-3, 1e-6])
@pytest.mark.parametrize("M", [False, True])
def test_stopping_rule(tolerance, M):
    """The first i > k with φᵢ < 0 and (φᵢ − φᵢ₋ₖ)/φᵢ < kε; φ written out, of every iterate."""
    n = 120
    H, g = spectrum(n, 1e-3), torch.randn(n, dtype=f64)
    D = (0.5 + torch.rand(n, dtype=f64)) if M else None

    def phi(i: int) -> float:
        (*_, last), _ = conjugate_gradients(lambda v: H @ v, g, D, None, i, 0.0)
        assert last.number == i
        return (0.5 * last.x @ H @ last.x - g @ last.x).item()

    (*_, last), curved = conjugate_gradients(lambda v: H @ v, g, D, None, 1000, tolerance)
    stopped = last.number
    assert not curved
    assert 10 < stopped < 200
    phis = [phi(i) for i in range(stopped + 1)]

    def stops(i: int) -> bool:
        k = max(10, math.ceil(0.1 * i))
        return i > k and phis[i] < 0 and (phis[i] - phis[i - k]) / phis[i] < k * tolerance

    assert stops(stopped)
    assert not any(stops(i) for i in range(1, stopped))


@pytest.mark.parametrize(("iterations", "words"), [(3, "3 CG iterations"), (1, "1 CG iteration")])
def test_iterations_are_a_limit(iterations, words):
    C = represent(build("conv2d"), mq.MatrixFree(tolerance=0.0, iterations=iterations, backtrack=False))
    C.newton(scalar(1e-6))
    assert C.notes == [words]


def test_conjugate_gradients_end_at_the_solution():
    H, g = spectrum(20, 1e-2), torch.randn(20, dtype=f64)
    (*_, last), curved = conjugate_gradients(lambda v: H @ v, g, None, None, 10_000, 0.0)
    assert not curved
    assert last.number < 60
    assert error(last.x, torch.linalg.solve(H, g)) < 1e-12
    assert last.gx == pytest.approx((g @ last.x).item())
    assert last.xHx == pytest.approx((last.x @ H @ last.x).item())
    (*_, nothing), _ = conjugate_gradients(lambda v: H @ v, 0 * g, None, None, 100, 0.0)
    assert (nothing.number, nothing.x.any().item()) == (0, False)


def test_iterates_are_kept_at_growing_distances():
    H, g = spectrum(200, 1e-6), torch.randn(200, dtype=f64)
    iterates, _ = conjugate_gradients(lambda v: H @ v, g, None, None, 30, 0.0)
    assert [it.number for it in iterates] == [1, 2, 3, 4, 5, 7, 9, 11, 14, 18, 24, 30]
    for it in iterates:
        (alone,), _ = conjugate_gradients(lambda v: H @ v, g, None, None, it.number, 0.0, keep=False)
        assert error(it.x, alone.x) < 1e-12
        assert it.xHx == pytest.approx((it.x @ H @ it.x).item())


def test_negative_curvature_at_first_gives_the_preconditioned_gradient():
    H, g = torch.tensor([-1.0, 2.0], dtype=f64).diag(), torch.tensor([3.0, 0.5], dtype=f64)
    M = torch.tensor([2.0, 1.0], dtype=f64)
    (only,), curved = conjugate_gradients(lambda v: H @ v, g, M, None, 10, 0.0)
    p = g / M
    assert curved
    assert error(only.x, (g @ p) / -(p @ H @ p) * p) < 1e-12
    assert only.xHx == pytest.approx((only.x @ H @ only.x).item())
    assert only.gx == pytest.approx((g @ only.x).item())


def test_negative_curvature_later_gives_the_last_iterate():
    H, g = torch.tensor([4.0, 3.0, -0.1], dtype=f64).diag(), torch.tensor([1.0, 1.0, 0.3], dtype=f64)
    (*_, last), curved = conjugate_gradients(lambda v: H @ v, g, None, None, 10, 0.0)
    (*_, alone), _ = conjugate_gradients(lambda v: H @ v, g, None, None, last.number, 0.0)
    assert curved
    assert last.number >= 1
    assert error(last.x, alone.x) < 1e-12
