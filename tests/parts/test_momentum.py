"""Momentum: the identities the mathematics promises."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import marquardt as mq
from support import reference
from support.parts import batch, curvature, decades, flat, lm, mlp, seeds, sizes
from support.reference import error

f64 = torch.float64
NAN, INF = math.nan, math.inf
xis = st.floats(0.05, 0.95)


# Stand-ins: what a part is given, and nothing else.


class Matrix:
    """H as momentum sees it."""

    def __init__(self, H: Tensor, g: Tensor) -> None:
        self.H, self.gradient, self.dot = H, g, torch.dot

    def quadratic(self, v: Tensor) -> Tensor:
        return v @ self.H @ v

    def products(self, V: Tensor) -> Tensor:
        return V @ self.H @ V.T


def spd(seed: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """A positive definite H with a condition of some hundred, a gradient and a previous step."""
    generator = torch.Generator().manual_seed(seed)
    A, g, previous = (torch.randn(shape, dtype=f64, generator=generator) for shape in ((n, n + 2), (n,), (n,)))
    return A @ A.T / n + 0.1 * torch.eye(n, dtype=f64), g, previous


def refine(part: mq.AdaptiveMomentum, H: Tensor, g: Tensor, previous: Tensor | None, same_data: bool = True) -> Tensor:
    return part.refine(-torch.linalg.solve(H, g), previous, Matrix(H, g), same_data)


# ---- adaptive momentum


@given(seeds, sizes, xis, decades(-3, 3))
def test_momentum_identities(seed, n, xi, dP):
    """gᵀd = −ξ·δP·√I_GG and dᵀHd = δP²."""
    H, g, previous = spd(seed, n)
    d = refine(mq.AdaptiveMomentum(xi, dP), H, g, previous)
    GG = (g @ torch.linalg.solve(H, g)).item()
    assert (g @ d).item() == pytest.approx(-xi * dP * math.sqrt(GG), rel=1e-9)
    assert (d @ H @ d).item() == pytest.approx(dP**2, rel=1e-9)
    assert error(d, reference.adaptive_momentum(H, g, previous, xi, dP)) < 1e-8


@given(seeds, sizes, xis, decades(-3, 3) | st.just(INF))
def test_momentum_cap(seed, n, xi, dP):
    """δP = min(δP, √I_GG), which for ξ ≥ ½ bounds the decrease of the model from below; for δP = ∞ it is √I_GG."""
    H, g, previous = spd(seed, n)
    root = math.sqrt((g @ torch.linalg.solve(H, g)).item())
    d = refine(mq.AdaptiveMomentum(xi, dP, cap=True), H, g, previous)
    length = min(dP, root)
    assert (d @ H @ d).item() == pytest.approx(length**2, rel=1e-9)
    assert (g @ d).item() == pytest.approx(-xi * length * root, rel=1e-9)
    decrease = -(g @ d + d @ H @ d / 2).item()
    assert decrease >= (xi - 0.5) * length**2 * (1 - 1e-9) - 1e-9 * length**2


@given(seeds, sizes, xis, decades(-2, 2), decades(-6, 6))
def test_momentum_units(seed, n, xi, dP, c):
    """f → c·f with δP → √c·δP leaves the step as it is, and so does a longer or shorter previous step."""
    H, g, previous = spd(seed, n)
    d = refine(mq.AdaptiveMomentum(xi, dP), H, g, previous)
    assert error(refine(mq.AdaptiveMomentum(xi, math.sqrt(c) * dP), c * H, c * g, previous), d) < 1e-8
    assert error(refine(mq.AdaptiveMomentum(xi, dP), H, g, c * previous), d) < 1e-8


@pytest.mark.parametrize("cap", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, f64])
def test_plain_step_without_momentum(dtype, cap):
    H, g, previous = (t.to(dtype) for t in spd(0, 5))
    part, newton = mq.AdaptiveMomentum(0.9, 0.6, cap=cap), -torch.linalg.solve(H, g)
    zero = torch.zeros_like(g)
    assert torch.equal(refine(part, H, g, None), newton)  # no previous step
    assert torch.equal(refine(part, H, zero, previous), -torch.linalg.solve(H, zero))  # I_GG = 0
    assert torch.equal(part.refine(-newton, previous, Matrix(H, g), True), -newton)  # I_GG < 0
    assert torch.equal(refine(part, H, g, zero), newton)  # I_FF = 0
    assert torch.equal(refine(part, H, g, 3 * newton), newton)  # parallel
    assert torch.equal(refine(part, H, g, -3 * newton), newton)
    one = torch.ones(1, 1, dtype=dtype)
    assert torch.equal(refine(part, one, one[0], 2 * one[0]), -one[0])  # one parameter: always parallel


def test_momentum_on_changing_batches():
    """Everywhere, or with `same_data` only where the previous step belongs to the same loss."""
    H, g, previous = spd(0, 5)
    everywhere, careful = mq.AdaptiveMomentum(0.9, 0.6), mq.AdaptiveMomentum(0.9, 0.6, same_data=True)
    d = refine(everywhere, H, g, previous, same_data=True)
    assert torch.equal(refine(everywhere, H, g, previous, same_data=False), d)
    assert torch.equal(refine(careful, H, g, previous, same_data=True), d)
    assert torch.equal(refine(careful, H, g, previous, same_data=False), -torch.linalg.solve(H, g))


@pytest.mark.parametrize("dtype", [torch.float32, f64])
@pytest.mark.parametrize("sign", [1, -1])
def test_nearly_parallel(dtype, sign):
    """The plain step up to 1 − cos² = √eps; from there on the identities hold, as well as the precision allows."""
    limit = math.sqrt(torch.finfo(dtype).eps)
    H = torch.eye(3, dtype=dtype)
    g = torch.tensor([2.0, 0, 0], dtype=dtype)
    part = mq.AdaptiveMomentum(0.9, 0.6)
    for sine2 in (limit / 1e6, limit / 100, limit / 2):
        previous = torch.tensor([sign * math.sqrt(1 - sine2), math.sqrt(sine2), 0], dtype=dtype)
        assert torch.equal(refine(part, H, g, previous), -g)
    for sine2 in (2 * limit, 100 * limit, 0.5):
        previous = torch.tensor([sign * math.sqrt(1 - sine2), math.sqrt(sine2), 0], dtype=dtype)
        d = refine(part, H, g, previous).double()
        assert (d @ d).item() == pytest.approx(0.36, rel=30 * limit)  # eps / sin², with sin² of the order of √eps
        assert (d @ g.double()).item() == pytest.approx(-0.9 * 0.6 * 2, rel=30 * limit)


# ---- quadratic momentum


def least(M: Tensor, g: Tensor, V: Tensor) -> Tensor:
    """The least gᵀd + ½dᵀMd among the d in the span of the rows of V: (n,)"""
    return -V.T @ torch.linalg.solve(V @ M @ V.T, V @ g)


@given(seeds, st.integers(3, 10), decades(-6, 6))
def test_quadratic_momentum_is_the_minimum_in_the_plane(seed, n, c):
    """Also if the plain step comes from another matrix, and whatever the length of the previous one."""
    M, g, previous = spd(seed, n)
    newton = -torch.linalg.solve(spd(seed + 1, n)[0], g)
    expected = least(M, g, torch.stack([newton, previous]))
    assert error(mq.QuadraticMomentum().refine(newton, c * previous, Matrix(M, g), False), expected) < 1e-8
    alone = least(M, g, newton[None])
    assert error(mq.QuadraticMomentum().refine(newton, None, Matrix(M, g), False), alone) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, f64])
def test_quadratic_momentum_without_a_plane(dtype):
    """One direction is a line, on which the minimum still is found; no curvature at all leaves the step as it is."""
    M, g, previous = (t.to(dtype) for t in spd(0, 5))
    newton, zero = -3 * torch.linalg.solve(M, g), torch.zeros_like(g)
    part, H = mq.QuadraticMomentum(), Matrix(M, g)
    for other in (None, zero, 3 * newton, -newton):
        assert error(part.refine(newton, other, H, True), newton / 3) < 1e-5
    assert torch.equal(part.refine(zero, zero, H, True), zero)
    assert torch.equal(part.refine(newton, previous, Matrix(0 * M, g), True), newton)


@pytest.mark.parametrize("representation", [mq.Dense(), mq.Gram(), mq.Kronecker(0.0), mq.EKFAC(0.0)], ids=str)
def test_quadratic_momentum_inside_the_step(representation):
    """G is the Gauss-Newton matrix of the batch, D that of the damping, whatever the step was solved with."""
    model, (x, y), lam = mlp(outputs=3), batch(outputs=3), 0.5
    opt = lm(
        model, curvature=representation, damping=mq.Identity(), schedule=mq.Constant(lam),
        momentum=mq.QuadraticMomentum(), acceptance=mq.Uphill(),
    )  # fmt: skip
    previous: list[Tensor] = []
    for _ in range(3):
        C, before = curvature(model, x, y), flat(model)
        M = torch.stack([C @ e for e in torch.eye(len(before), dtype=f64)]) + lam * torch.eye(len(before), dtype=f64)
        newton = representation.represent(mq.linearize(model, "mse", x, y)).newton(torch.tensor(lam, dtype=f64))
        assert opt.step(x, y).accepted
        d = flat(model) - before
        assert error(d, least(M, C.gradient, torch.stack([newton, *previous]))) < 1e-7
        previous = [d]
