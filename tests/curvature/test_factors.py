"""Kronecker factors against torch.kron."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from marquardt.curvature.kronecker import (
    Layer,
    layer_of,
    merged,
)
from marquardt.layers.blocks import Sums
from marquardt.metric import Part
from marquardt.metric.sides import joined
from support.reference import error

pytestmark = pytest.mark.usefixtures("double")

K, L, I = 2, 3, 4
SIZES = [K * L * I, K * L]
BOTH = pytest.mark.parametrize(("left", "right"), [(3, 3), (2, 3), (3, 2), (2, 2)], ids=str)


def spd(d: int) -> Tensor:
    X = torch.randn(K, d, d + 2)
    return X @ X.mT


def side(d: int, ndim: int) -> Tensor:
    """A matrix, or the diagonal of one"""
    return spd(d) if ndim == 3 else torch.rand(K, d) + 0.1


def full(M: Tensor) -> Tensor:
    return M if M.ndim == 3 else torch.diag_embed(M)


def linear(left: int = 3, right: int = 3) -> Layer:
    return Layer([0, 1], SIZES, side(L, left), side(I + 1, right), bias=True, small=False)


@BOTH
def test_layer(left, right):
    """A weight beside its bias: X[:, :, :-1] and X[:, :, -1]."""
    layer = linear(left, right)
    weight, bias = torch.randn(SIZES[0]), torch.randn(SIZES[1])
    X = joined([weight, bias], (K, L))
    assert torch.equal(X[:, :, :-1], weight.view(K, L, I))
    assert torch.equal(X[:, :, -1], bias.view(K, L))
    assert [torch.equal(a, b) for a, b in zip(layer.split(X), (weight, bias), strict=True)] == [True, True]
    whole = [torch.kron(A, B) for A, B in zip(full(layer.left), full(layer.right), strict=True)]
    expected = torch.stack([M @ x.flatten() for M, x in zip(whole, X, strict=True)]).view_as(X)
    assert error(layer.times(X), expected) < 1e-12
    assert error(layer.diagonal(), torch.stack([M.diagonal() for M in whole]).view_as(X)) < 1e-12
    assert error(layer.trace(), sum(M.trace() for M in whole)) < 1e-12


# ---- D = u ⊗ v

U, V = torch.rand(K, L, 1).double() + 0.1, torch.rand(K, 1, I).double() + 0.1
NUMBER = torch.tensor(0.3, dtype=torch.float64)
ENTRIES = torch.rand(K * L).double() + 0.1
ONE, ONES = torch.ones(K, L).double(), torch.ones(K, 1).double()
SCALES = {
    "identity": (None, ONE, torch.ones(K, I + 1).double()),
    "u ⊗ v, u": ([Part(u=U, v=V), Part(u=U)], U[:, :, 0], torch.cat([V[:, 0], ONES], 1)),
    "a number each": ([Part(NUMBER), Part(2 * NUMBER)], ONE, torch.cat([NUMBER.expand(K, I), 2 * NUMBER * ONES], 1)),
    "a number, entries of 1": ([Part(NUMBER), Part(ONE.flatten())], ONE, torch.cat([NUMBER.expand(K, I), ONES], 1)),
    "u ⊗ v, entries like u": ([Part(u=U, v=V), Part(U.flatten())], U[:, :, 0], torch.cat([V[:, 0], ONES], 1)),
}


@pytest.mark.parametrize("kind", SCALES)
def test_scales(kind):
    D, u, v = SCALES[kind]
    found = linear().scales(D)
    assert error(found[0], u) < 1e-12
    assert error(found[1], v) < 1e-12
    if D is not None:  # u ⊗ v is D itself
        product = linear().split(found[0][:, :, None] * found[1][:, None])
        for part, d, size in zip(product, D, SIZES, strict=True):
            assert error(part, d.flat(size)) < 1e-12


@pytest.mark.parametrize(
    "D",
    [
        [Part(torch.rand(SIZES[0])), Part(NUMBER)],  # entries of a weight
        [Part(u=U, v=V), Part(u=U + 1)],
        [Part(u=U, v=V), Part(NUMBER)],
        [Part(NUMBER), Part(ENTRIES)],
    ],
)
def test_no_scales(D):
    assert linear().scales(D) is None


def test_scales_of_a_small_layer():
    """Every D is of that form: the block is its own."""
    layer = Layer([0, 1], [K * I, K], torch.ones(K, 1), spd(I + 1), bias=True, small=True)
    weight, bias = torch.rand(K * I), torch.rand(K)
    u, v = layer.scales([Part(weight), Part(bias)])
    assert torch.equal(u, torch.ones(K, 1))
    assert torch.equal(v, torch.cat([weight.view(K, I), bias.view(K, 1)], 1))


# ---- sums


def sums(A: Tensor, bias: bool, count: float = 2.0, table: bool = False) -> Sums:
    return Sums(A, spd(L), count, bias, table)


def test_joined_sums_of_a_layer_that_lacks_a_half():
    """A weight or a bias that one piece lacks has the input 0 there, whichever comes first."""
    whole, weight, bias = sums(spd(I + 1), True), sums(spd(I), False), sums(spd(1), True)
    for more, key, where in ((weight, (0,), slice(0, I)), (bias, (1,), slice(I, I + 1))):
        expected = whole.A.clone()
        expected[:, where, where] += more.A
        for pair in (((0, 1), whole, key, more), (key, more, (0, 1), whole)):
            found, total = merged(*pair)
            assert found == (0, 1)
            assert total.bias
            assert error(total.A, expected) < 1e-14
            assert error(total.B, whole.B + more.B) < 1e-14
            assert total.count == 4


def test_layer_of():
    """A is a mean over samples and positions, B a sum in the units of the loss; a table has its counts on the left."""
    found = sums(spd(I + 1), True, count=5.0)
    layer = layer_of([0, 1], found, SIZES, 0.5)
    assert error(layer.right, found.A / 5) < 1e-14
    assert error(layer.left, found.B / 2) < 1e-14
    table = sums(torch.rand(K, 7), False, count=5.0, table=True)
    layer = layer_of([0], table, [K * 7 * L], 0.5)
    assert error(layer.left, table.A / 5) < 1e-14
    assert error(layer.right, table.B / 2) < 1e-14
    small = layer_of([0], Sums(spd(I), None, 1.0, False), [K * I], 0.5)
    assert small.small
    assert torch.equal(small.left, torch.ones(K, 1))


def test_no_samples_are_no_division_by_zero():
    nothing = Sums(torch.zeros(K, I, I), torch.zeros(K, L, L), torch.zeros(()), False)
    assert not layer_of([0], nothing, [K * L * I], 1.0).right.any()


# ---- damped factors
