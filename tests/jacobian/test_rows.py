"""Exact, sampled and empirical rows, and those of a part of the batch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import marquardt as mq
from support import reference
from support.cases import build
from support.linearized import linearize
from support.modules import SWAPPED, Fn, Messages
from support.reference import error
from support.steps import lm, problem, theta


@pytest.mark.usefixtures("double")
def test_sampled_rows_are_drawn_anew():
    """From step to step, rejected ones too: a bad draw is not repeated."""
    drawn = []

    class Recording(mq.Sampled):
        def draw(self, *args: Any) -> Any:
            rows = super().draw(*args)
            drawn.append(rows.S)
            return rows

    model, x, y = problem()
    opt = lm(model, rows=Recording(1), lr=1e3)
    assert [opt.step(x, y).rule for _ in range(3)] == ["rejected"] * 3
    assert len(drawn) == 3
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))


f64 = torch.float64


def test_sampled_rows_are_drawn_apart_from_the_global_generator():
    """By seed and step; right in the mean: ΣSSᵀ over k rows is ∂²ℓ/∂z², up to 1/√k"""
    assert mq.Sampled() == mq.Sampled(1, seed=0)
    loss = mq.losses.CrossEntropy()
    z, y = torch.randn(4, 3, dtype=f64), torch.tensor([0, 2, 1, 1])

    def drawn(k: int, seed: int = 1, step: int = 3) -> mq.Cotangents:
        return mq.Sampled(k, seed=seed).draw(loss, z, y, None, step)

    state, rows = torch.get_rng_state(), drawn(5)
    assert torch.equal(torch.get_rng_state(), state)
    assert (rows.S.shape, rows.u) == ((5, 4, 3), None)
    assert torch.equal(rows.S, drawn(5).S)
    for other in (drawn(5, step=4), drawn(5, seed=2)):
        assert not torch.equal(rows.S, other.S)
    found, expected = drawn(20_000).S, mq.Exact().draw(loss, z, y, None, 0).S
    assert error(*(torch.einsum("rnc,rnd->ncd", S, S) for S in (found, expected))) < 0.03


@pytest.mark.parametrize("name", ["ce", "ce_weighted", "ce_masked", "ce_sum", "conv_batchnorm_classifier", "lstm"])
@pytest.mark.parametrize("chunk", [None, 2])
def test_empirical(name, chunk):
    """One row per sample, G = (1/N) Σ ∇fᵢ∇fᵢᵀ for hard labels."""
    lin = linearize(build(name), rows=mq.Empirical(), chunk=chunk)
    q = reference.quadratic(*build(name), rows="empirical")
    J = lin.rows()
    assert J.shape[0] == q.z.shape[0]
    assert error(J.T @ J, q.G) < 1e-10


@pytest.mark.parametrize("name", ["ce", "mse_weighted"])
def test_sampled_is_unbiased(name):
    """The mean of J̃ᵀJ̃ over seeds tends to G; the gradient does not depend on the seed."""
    p, q, draws = build(name), reference.quadratic(*build(name)), 300
    Gs = []
    for seed in range(draws):
        lin = linearize(p, rows=mq.Sampled(2, seed=seed))
        J = lin.rows()
        assert J.shape[0] == 2 * q.z.shape[0]
        Gs.append(J.T @ J)
        if seed < 3:
            assert error(mq.Dense().represent(lin).gradient, q.g) < 1e-12
    G = torch.stack(Gs)  # (draws, n, n)
    standard_error = (G.var(0).sum() / draws).sqrt()  # of the mean, as ‖·‖²
    assert standard_error < 0.1 * q.G.norm()  # else the next line says nothing
    assert (G.mean(0) - q.G).norm() < 3 * standard_error
    each = (G.mean(0) - q.G).abs() / (G.std(0) / draws**0.5 + 1e-12)
    assert each.max() < 5


@pytest.mark.parametrize("name", ["ce", "mse_weighted", "conv_batchnorm_classifier", "transformer_encoder_layer"])
def test_fraction_is_unbiased(name):
    """Every draw has the whole gradient; the mean of G over the draws is G."""
    p, q, draws = build(name), reference.quadratic(*build(name)), 150
    total = torch.zeros_like(q.G)
    for seed in range(draws):
        lin = linearize(p, rows=mq.Fraction(0.5, seed=seed))
        C = mq.Dense().represent(lin)
        assert lin.m < len(reference.output_hessian(p.loss, q.z, p.y, p.weight))
        assert error(C.gradient, q.g) < 1e-10
        total += C.G / draws
    assert error(total, q.G) < 0.25


@pytest.mark.parametrize(
    "representation", [mq.Dense(), mq.Gram(), mq.Gram(whole=0), mq.MatrixFree(tolerance=1e-12)], ids=str
)
def test_fraction_solves_with_the_whole_gradient(representation):
    p = build("ce")
    rows = mq.Fraction(0.4, mq.Exact(), seed=3)
    J = linearize(p, rows=rows).rows()  # of some samples
    C, g = representation.represent(linearize(p, rows=rows)), reference.quadratic(*p).g
    expected = torch.linalg.solve(J.T @ J + 0.1 * torch.eye(len(g)), g)
    assert error(C.newton(torch.tensor(0.1).double()), expected) < 1e-6


def test_fraction_replays_the_slopes_of_its_samples():
    """RReLU draws once for the batch: the rows of the part belong to the same network as the losses."""
    model = nn.Sequential(nn.Linear(3, 8), nn.RReLU(), nn.Linear(8, 2)).double()
    x, y = torch.randn(10, 3).double(), torch.randn(10, 2).double()
    state = torch.get_rng_state()
    whole = mq.linearize(model, "mse", x, y).rows().view(2, 10, -1)
    torch.set_rng_state(state)
    part = mq.linearize(model, "mse", x, y, rows=mq.Fraction(0.3)).rows().view(2, 3, -1) / (10 / 3) ** 0.5
    index = mq.Fraction(0.3).pick(10, 0)
    assert error(part, whole[:, index]) < 1e-12


@pytest.mark.parametrize("bad", [0, 1.5, -1])
def test_fraction_refuses(bad):
    with pytest.raises(ValueError, match=repr(bad)):
        mq.Fraction(bad)
    with pytest.raises(TypeError, match=r"mq\.Exact\(\)"):
        mq.Fraction(0.5, mq.Exact)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("T", [4, 6])  # 6 samples: both dimensions look like theirs
def test_fraction_finds_the_slopes_of_its_samples_wherever_they_are(T):
    model = nn.Sequential(SWAPPED, nn.Linear(2, 3), nn.RReLU(), SWAPPED, nn.Flatten(), nn.Linear(3 * T, 1))
    x, y, rows = torch.randn(6, T, 2), torch.randn(6, 1), mq.Fraction(0.5)
    torch.manual_seed(1)
    whole = mq.linearize(model, "mse", x, y).rows()
    torch.manual_seed(1)
    part = mq.linearize(model, "mse", x, y, rows=rows).rows()
    assert error(part, whole[rows.pick(6, 0)] * 2**0.5) < 1e-12


@pytest.mark.usefixtures("double")
def test_fraction_refuses_slopes_that_belong_to_no_sample():
    mixed = Fn(lambda x, f: f(x.flatten(0, 1)).unflatten(0, x.shape[:2]).flatten(1), nn.RReLU())
    model = nn.Sequential(nn.Linear(2, 3), mixed, nn.Linear(12, 1))
    lm, before = mq.LM(model, "mse", rows=mq.Fraction(0.5)), theta(model)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"3 of 6 samples.*\(12, 3\) in the place of \(24, 3\).*mq\.Exact\(\)"):
        lm.step(torch.randn(6, 4, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(6, 1))
    assert torch.equal(theta(model), before)
    assert torch.equal(torch.get_rng_state(), state)


@dataclass(frozen=True)
class Own(mq.Rows):
    """Rows of one's own: those of Exact, changed."""

    change: Callable[[mq.Cotangents], Any]

    def draw(self, loss, z, y, weight, seed):
        return self.change(mq.Exact().draw(loss, z, y, weight, seed))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda c: None, r"Own.draw returned NoneType: it returns mq.Cotangents\(S, u, v\)"),
        (lambda c: tuple(c), "Own.draw returned tuple"),
        (lambda c: c._replace(S=c.S[0]), "Own.draw: S has the shape"),
        (lambda c: c._replace(u=c.u[:1]), "Own.draw: u has the shape"),
        (lambda c: c._replace(u=2 * c.u), r"Own.draw: Su \+ v differs"),
        (lambda c: mq.Cotangents(c.S, None, None), r"Own.draw: Su \+ v differs .* u = None and v = loss.gradient"),
    ],
)
def test_what_is_wrong_with_rows_of_ones_own(change, match):
    model = torch.nn.Linear(3, 2)
    opt, before = mq.LM(model, "mse", rows=Own(change)), theta(model)
    with pytest.raises((TypeError, ValueError), match=match):
        opt.step(torch.randn(5, 3), torch.randn(5, 2))
    assert torch.equal(theta(model), before)


def test_rows_of_ones_own():
    x, y, model = torch.randn(9, 3), torch.randn(9, 2), torch.nn.Linear(3, 2)
    twin = copy.deepcopy(model)
    mq.LM(model, "mse", rows=Own(lambda c: c)).step(x, y)
    mq.LM(twin, "mse").step(x, y)
    assert torch.equal(model.weight, twin.weight)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("coupled", [True, False])
def test_rows_of_all_samples_together(coupled):
    """Each is the sum of all rows with signs: E·J̃ with E = ±1/√k, J̃ from the dense reference."""
    model = Messages(5) if coupled else nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(5, 3), torch.randn(5, 2)
    expected = reference.quadratic(model, "mse", x, y)
    lin = mq.linearize(model, "mse", x, y, rows=mq.Sampled(4, together=True))
    assert lin.m == 4
    assert set(lin.paths.values()) == {"rule"}
    found = lin.rows()  # (4, n)
    E = found @ torch.linalg.pinv(expected.J * (2 / y.numel()) ** 0.5)  # (4, 10)
    assert error(E.abs(), torch.full_like(E, 0.5)) < 1e-8
    assert len({tuple(row.sign().tolist()) for row in E}) > 1
    assert error(lin.gradient, expected.g) < 1e-12
    whole = mq.linearize(model, "mse", x, y, rows=mq.Sampled(4))  # the same signs
    assert error(found, whole.rows().view(4, 5, -1).sum(1)) < 1e-12


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), mq.MatrixFree(tolerance=1e-12), mq.Kronecker()])
def test_steps_with_rows_together(curvature):
    model, x, y = Messages(6), torch.randn(6, 3), torch.randint(0, 2, (6,))
    rows = mq.Sampled(3, together=True)
    G = curvature.represent(mq.linearize(model, "cross_entropy", x, y, rows=rows, needs=curvature.needs))
    assert error(G.gradient, reference.quadratic(model, "cross_entropy", x, y).g) < 1e-10
    if not isinstance(curvature, mq.Kronecker):
        J, v = mq.linearize(model, "cross_entropy", x, y, rows=rows).rows(), torch.randn(G.parameters.n)
        assert error(G @ v, J.T @ (J @ v)) < 1e-10
    step = mq.LM(model, "cross_entropy", curvature=curvature, rows=rows).step(x, y)
    assert step.accepted


def test_rows_together_that_cannot_be():
    with pytest.raises(ValueError, match=r"together=True.*leave Fraction out"):
        mq.Fraction(0.5, mq.Sampled(2, together=True))
    model, x, y = Messages(6), torch.randn(6, 3), torch.randint(0, 2, (6,))
    opt = mq.LM(model, "cross_entropy", curvature=mq.Kronecker(), rows=mq.Sampled(2, together=True))
    before = theta(model)
    with pytest.raises(ValueError, match=r"weight per sample.*mq\.Gram"):
        opt.step(x, y, weight=torch.rand(6))
    assert torch.equal(theta(model), before)
