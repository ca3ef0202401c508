"""The diagonal metric D."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.metric import Diagonal, Metric, Part
from support.reference import error

pytestmark = pytest.mark.usefixtures("double")

# A weight of 2 groups with 3 outputs and 4 inputs each, its bias, one number for 5 entries, and entries of their own.
SIZES = [24, 6, 5, 2]
U, V = torch.rand(2, 3, 1).double() + 0.1, torch.rand(2, 1, 4).double() + 0.1
NUMBER, ENTRIES = torch.tensor(0.3, dtype=torch.float64), torch.tensor([2.0, 7.0], dtype=torch.float64)


def mixed(scale: float = 2.0) -> Diagonal:
    return Diagonal(torch.tensor(scale), [Part(u=U, v=V), Part(u=U), Part(NUMBER), Part(ENTRIES)])


def by_hand(scale: float = 2.0) -> Tensor:
    weight = torch.stack([torch.outer(u.flatten(), v.flatten()) for u, v in zip(U, V, strict=True)])
    return scale * torch.cat([weight.flatten(), U.flatten(), torch.full((5,), 0.3), ENTRIES])


def test_what_a_weight_and_its_bias_share_stays_shared():
    """In another precision, and with its zeros filled: to ask for identity is free, equality waits for a GPU."""
    u, v = torch.rand(1, 3, 1), torch.zeros(1, 1, 4)
    D = mq.Diagonal(torch.ones(()), [Part(u=u, v=v), Part(u=u)])
    for moved in (D.to(torch.zeros((), dtype=torch.float32)), D.positive()):
        weight, bias = moved.parts
        assert weight.u is bias.u


def test_entries():
    assert error(mixed().entries(SIZES), by_hand()) < 1e-15
    assert torch.equal(Diagonal(torch.tensor(3.0)).entries(SIZES), torch.full((37,), 3.0))
    mixed().entries(SIZES).zero_()
    assert U.all()


def test_of():
    D = mixed()
    assert Diagonal.of(D, SIZES) is D
    assert Diagonal.of(torch.tensor(3.0), SIZES).parts is None
    assert torch.equal(Diagonal.of(by_hand(), SIZES).entries(SIZES), by_hand())
    with pytest.raises(ValueError, match=r"\(36,\): one for each of 37"):
        Diagonal.of(torch.ones(36), SIZES)


def test_solve():
    """In place, with the scale or without it."""
    for D, A in ((mixed(), by_hand()), (Diagonal(torch.tensor(2.0)), torch.full((37,), 2.0))):
        x = torch.randn(37)
        before = x.clone()
        assert D.solve(x, SIZES) is x
        assert error(x, before / A) < 1e-15
        assert error(D.solve(before.clone(), SIZES, scaled=False), before / (A / 2)) < 1e-15


def test_quadratic_by_a_dot_of_ones_own():
    v = torch.randn(37)
    asked = []

    def dot(a: Tensor, b: Tensor) -> Tensor:
        asked.append(b)
        return 3 * (a @ b)

    for D, A in ((mixed(), by_hand()), (Diagonal(torch.tensor(2.0)), torch.full((37,), 2.0))):
        assert error(D.quadratic(v, SIZES), v @ (A * v)) < 1e-14
        assert error(D.quadratic(v, SIZES, dot), 3 * (v @ (A * v))) < 1e-14
        assert asked.pop() is v


def test_another_scale():
    D = mixed()
    for scaled in (0.25 * D, torch.tensor(0.25) * D, D.with_scale(torch.tensor(0.5))):
        assert scaled.shape is D.shape  # what was formed with D₀ still holds
        assert error(scaled.entries(SIZES), by_hand(0.5)) < 1e-15
    assert (2.0 * Diagonal(torch.tensor(3.0))).scale == 6


def test_positive():
    zeros = Diagonal(torch.tensor(2.0), [Part(torch.tensor([0.0, 3.0])), Part(torch.tensor(0.0))])
    assert zeros.positive().entries([2, 2]).tolist() == [2, 6, 2, 2]
    assert zeros.entries([2, 2]).tolist() == [0, 6, 0, 0]
    assert Diagonal(torch.tensor(0.0)).positive().scale == 1
    assert Diagonal(torch.tensor(3.0)).positive().scale == 3


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [(SIZES, True), ([24, 6, 9, 2], True), ([24, 6, 5], False), ([24, 6, 5, 3], False), ([25, 6, 5, 2], False),
     ([24, 5, 5, 2], False), ([*SIZES, 1], False)],
)  # fmt: skip
def test_fits(sizes, fits):
    """One number fits any parameter."""
    assert mixed().fits(sizes) == fits
    assert Diagonal(torch.tensor(1.0)).fits(sizes)


@pytest.mark.parametrize("join", [Diagonal.maximum, lambda D, other: D.recent(other, 2.0)], ids=["maximum", "recent"])
def test_the_d_of_another_damping(join):
    for other in (Diagonal(torch.ones(())), Diagonal(torch.ones(()), [Part(torch.ones(3))])):
        with pytest.raises(ValueError, match="another damping"):
            join(mixed(), other)


class Whole(Metric):
    """No diagonal matrix."""

    scale = torch.ones(())
    shape = "whole"

    def with_scale(self, scale):
        return self

    def solve(self, x, sizes, *, scaled=True):
        return x

    def quadratic(self, v, sizes, dot=torch.dot):
        return dot(v, v)

    def whiten(self, block, members):
        return None

    def to(self, like):
        return self

    def positive(self):
        return self

    def fits(self, sizes):
        return True

    def state(self):
        return []


@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Dense(small=0), mq.Kronecker()], ids=str)
def test_a_metric_that_is_not_diagonal_is_refused_by_name(curvature):
    model = nn.Linear(2, 1)
    G = curvature.represent(mq.linearize(model, "mse", torch.randn(4, 2), torch.randn(4, 1)))
    with pytest.raises(ValueError, match=r"Whole is no diagonal matrix: use damping=mq\.MeanEigenvalue\(\)"):
        G.newton(Whole())


def test_gram_takes_any_metric():
    """This one leaves the rows as they are, as the identity does."""
    model, x, y = nn.Linear(2, 1), torch.randn(2, 2), torch.randn(2, 1)
    plain = mq.Gram().represent(mq.linearize(model, "mse", x, y)).newton(torch.tensor(1.0))
    assert error(mq.Gram().represent(mq.linearize(model, "mse", x, y)).newton(Whole()), plain) < 1e-12
