"""A curvature of one's own and weight decay: right if it knows the contract alone, refused if it leaves W out."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import marquardt as mq
from support import reference
from support.reference import error
from support.steps import lm, problem, theta
from support.unchanged import changes, refused, world

pytestmark = pytest.mark.usefixtures("double")

W, LAM = 0.3, 0.1


class Plain(mq.Curvature):
    """Gv and (G + A)⁻¹g, and nothing else."""

    def __init__(self, lin):
        super().__init__(lin)
        rows = lin.rows()
        self.G = rows.T @ rows

    def __matmul__(self, v):
        return self.G @ v

    def newton(self, damping):
        sizes = self.parameters.sizes
        A = mq.Diagonal.of(damping, sizes).entries(sizes)
        return torch.linalg.solve(self.G + A.diag(), self.slope_of_the_data())

    def slope_of_the_data(self):
        return self.gradient


class GradientOfTheData(Plain):
    """g from the pieces, without W(θ − θ₀)"""

    def slope_of_the_data(self):
        return sum(piece.gradient for piece in self.lin.pieces()) * self.lin.scale


class GradientOfItsOwn(GradientOfTheData):
    """for the model of the loss too"""

    @property
    def gradient(self):
        return self.slope_of_the_data()


class OnlyTheModel(Plain):
    """The step is right, what it is said to gain is not."""

    @property
    def gradient(self):
        return self.lin.slope

    def slope_of_the_data(self):
        return self.lin.gradient


class DampingAlone(Plain):
    """λ in the place of λ + w"""

    def newton(self, damping):
        return super().newton(mq.Diagonal.of(damping, self.parameters.sizes).scale - W)


def representation(kind):
    @dataclass(frozen=True)
    class Own(mq.Representation):
        def form(self, lin):
            return kind(lin)

    return Own()


def test_one_that_knows_nothing_of_it_is_right():
    model, x, y = problem()
    exact, before = reference.quadratic(model, "mse", x, y), theta(model)
    opt = lm(model, curvature=representation(Plain), weight_decay=W, schedule=mq.Constant(LAM))
    step = opt.step(x, y)
    g = exact.g + W * before
    assert error(theta(model) - before, -torch.linalg.solve(exact.damped(LAM + W), g)) < 1e-10
    d = theta(model) - before
    assert step.gain == pytest.approx((step.loss - step.new_loss) / float(-g @ d - 0.5 * d @ exact.damped(W) @ d))


class WithoutElements(Plain):
    """Entries of A with one number in the place of each parameter's"""

    def newton(self, damping):
        sizes = self.parameters.sizes
        A = mq.Diagonal.of(damping, sizes).entries(sizes)
        return super().newton(torch.full_like(A, LAM))


WRONG = [(kind, False) for kind in (GradientOfTheData, GradientOfItsOwn, OnlyTheModel, DampingAlone)]
WRONG += [(kind, True) for kind in (GradientOfTheData, GradientOfItsOwn, OnlyTheModel, WithoutElements)]


@pytest.mark.parametrize(("kind", "by_element"), WRONG)
def test_one_that_leaves_it_out_is_refused(kind, by_element):
    model, x, y = problem()
    elements = [{"params": [p], "weight_decay": W + torch.rand(p.shape)} for p in model.parameters()]
    parts = {"params": elements} if by_element else {"weight_decay": W}
    opt = lm(model, curvature=representation(kind), schedule=mq.Constant(LAM), **parts)
    before = world(model, opt)
    with refused(kind.__name__, "weight decay", "lin.gradient", "weight_decay=0"):
        opt.step(x, y)
    assert changes(before, world(model, opt)) == []
    assert lm(model, curvature=representation(Plain), schedule=mq.Constant(LAM), **parts).step(x, y).accepted


@pytest.mark.parametrize("kind", [GradientOfTheData, GradientOfItsOwn])
def test_without_weight_decay_nothing_is_asked(kind):
    model, x, y = problem()
    assert lm(model, curvature=representation(kind)).step(x, y).accepted


def test_a_fault_that_shows_later_is_refused_later():
    """At θ = 0 nothing decays, and nothing can be told."""
    model, x, y = problem()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    opt = lm(model, curvature=representation(GradientOfTheData), weight_decay=W, schedule=mq.Constant(LAM))
    assert opt.step(x, y).accepted
    with refused("GradientOfTheData", "weight decay"):
        opt.step(x, y)
