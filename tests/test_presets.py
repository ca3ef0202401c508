"""Presets: their constants, and the same steps by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from support.cases import sample_weights
from support.parts import batch, flat, lm, mlp
from support.reference import error
from support.steps import objective, problem


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("preset", ["paper", "authors_code", "vanilla", "gauss_newton"])
@pytest.mark.parametrize("loss", ["mse", "cross_entropy", nn.MSELoss(reduction="sum")], ids=["mse", "ce", "sum"])
def test_presets_report_the_users_loss(preset, loss):
    """Whatever units they work in."""
    model, x, y = problem(loss if loss == "cross_entropy" else "mse", N=12)
    weight, opt = sample_weights(12), getattr(mq.presets, preset)(model, loss)
    for _ in range(3):
        before = objective(model, loss, x, y, weight)
        step = opt.step(x, y, weight)
        assert step.loss == pytest.approx(before, rel=1e-9)
        assert step.new_loss == pytest.approx(objective(model, loss, x, y, weight), rel=1e-9)


LOSSES = [
    ("mse", False),
    ("residual", False),
    ("cross_entropy", True),
    ("bce", True),
    ("huber", True),
    ("poisson", True),
]


@pytest.mark.parametrize(("loss", "uphill"), LOSSES)
def test_paper(loss, uphill):
    """Sections 2.3 to 2.6 of the paper; three parts on sums of squares, four on all other losses."""
    opt = mq.presets.paper(mlp(outputs=3), loss)
    assert opt.curvature.inertia == 0  # G is that of the batch
    assert opt.rows == mq.Exact()
    assert opt.damping == mq.MaxDiagonal(floor=0.01)
    assert opt.schedule == mq.GainRatio(initial=1.0)
    assert opt.momentum == mq.AdaptiveMomentum(xi=0.9, dP=1.0 if uphill else 0.6, cap=True)
    assert opt.acceptance == (mq.Uphill(b=2.0, against_best=False) if uphill else mq.Decrease())
    assert opt.line_search == mq.Grid(1e-6, 9, 0.125, along_step=False, uphill=False)
    assert opt.average is None
    assert (opt.attempts, opt.param_groups[0]["lr"], opt.lam) == (1, 1, 1)


def test_authors_code():
    opt = mq.presets.authors_code(mlp(outputs=3), "cross_entropy")
    assert opt.curvature.inertia == 0
    assert opt.rows == mq.Empirical()
    assert opt.damping == mq.MaxDiagonal(floor=0.01)
    assert opt.schedule == mq.RelativeDecrease(initial=1.0, minimum=1e-5, maximum=1e5)
    assert opt.momentum == mq.AdaptiveMomentum(xi=0.9, dP=0.6, cap=False)
    assert opt.acceptance == mq.Uphill(b=2.0, against_best=False)
    assert opt.line_search == mq.Grid(0.01, 2.0, 0.05, power=3.0, along_step=True, uphill=True)
    assert opt.line_search.rates[1] == pytest.approx(0.06**3)
    assert opt.average is None
    assert (opt.attempts, opt.param_groups[0]["lr"], opt.lam) == (1, 1, 1)


PAPER = {
    "damping": mq.MaxDiagonal(0.01),
    "schedule": mq.GainRatio(1.0),
    "momentum": mq.AdaptiveMomentum(0.9, 0.6, cap=True),
    "acceptance": mq.Decrease(),
    "line_search": mq.Grid(1e-6, 9, 0.125),
}
CODE = {
    "damping": mq.MaxDiagonal(0.01),
    "schedule": mq.RelativeDecrease(1.0),
    "momentum": mq.AdaptiveMomentum(0.9, 0.6),
    "acceptance": mq.Uphill(2.0),
    "line_search": mq.Grid(0.01, 2, 0.05, power=3, along_step=True, uphill=True),
}
VANILLA = {"damping": mq.Identity(), "schedule": mq.TenFold(1.0, 10.0), "acceptance": mq.Decrease()}


@pytest.mark.parametrize(
    ("preset", "parts"), [(mq.presets.paper, PAPER), (mq.presets.authors_code, CODE), (mq.presets.vanilla, VANILLA)]
)
@pytest.mark.parametrize("loss", ["mse", nn.MSELoss(reduction="sum"), "residual"])
@pytest.mark.parametrize("changing", [False, True])
def test_presets_on_squared_error(preset, parts, loss, changing):
    """Exact rows, and the units of ½Σr², in which D₀, δP and Levenberg's λ are meant; reported as the user has it."""
    model, twin = mlp(outputs=2), mlp(outputs=2)
    opt, by_hand = preset(model, loss), lm(twin, mq.losses.SquaredError(reduction="sum", factor=0.5), **parts)
    assert opt.rows == mq.Exact()
    for k in range(4):
        x, y = batch(seed=k if changing else 0, N=12, outputs=2)
        y = torch.zeros_like(y) if loss == "residual" else y
        targets = None if loss == "residual" else y
        unit = 24 if isinstance(loss, nn.MSELoss) else 1
        before = nn.functional.mse_loss(model(x), y).item()
        step, same = opt.step(x, targets), by_hand.step(x, y)
        assert step.loss == pytest.approx(unit * before, rel=1e-9)
        assert step.new_loss == pytest.approx(unit * nn.functional.mse_loss(model(x), y).item(), rel=1e-9)
        assert (step.rule, step.lr, step.lam) == (same.rule, same.lr, same.lam)
        assert error(flat(model), flat(twin)) < 1e-6


def test_vanilla():
    opt = mq.presets.vanilla(mlp(), "mse")
    assert opt.curvature.inertia == 0
    assert opt.rows == mq.Exact()
    assert opt.damping == mq.Identity()
    assert opt.schedule == mq.TenFold(initial=1.0, factor=10.0)
    assert opt.acceptance == mq.Decrease()
    assert (opt.momentum, opt.line_search, opt.average) == (None, None, None)
    assert opt.lam == 1


def test_gauss_newton():
    opt = mq.presets.gauss_newton(mlp(), "mse")
    assert opt.schedule == mq.Constant(0.0)
    assert opt.acceptance == mq.Decrease()
    assert opt.line_search == mq.Grid(1e-6, 9, 0.125)
    assert (opt.momentum, opt.average) == (None, None)
    assert opt.lam == 0


def test_gauss_newton_solves_a_linear_problem_at_once():
    x, y = batch()
    model = nn.Linear(2, 1).double()
    step = mq.presets.gauss_newton(model, "mse").step(x, y)
    assert step.rule == "decrease"
    assert error(model(x).detach(), linear_fit(x, y)) < 1e-9


@pytest.mark.parametrize("representation", [mq.Auto(), mq.Dense()])
def test_gauss_newton_with_more_parameters_than_rows(representation):
    """There λ = 0 leaves (G + λD) singular, but not the step of least length: the data are met exactly."""
    x, y = batch(N=4)
    model = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 1)).double()
    opt = mq.presets.gauss_newton(model, "mse", curvature=representation)
    for _ in range(6):
        step = opt.step(x, y)
    assert step.new_loss < 1e-6, step.note


def linear_fit(x: Tensor, y: Tensor) -> Tensor:
    X = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    return X @ torch.linalg.lstsq(X, y).solution


@pytest.mark.parametrize("preset", [mq.presets.paper, mq.presets.vanilla, mq.presets.gauss_newton])
def test_presets_take_other_parts(preset):
    opt = preset(mlp(), "mse", momentum=None, schedule=mq.Constant(3.0), average=mq.Polyak(), lr=0.5, attempts=2)
    assert (opt.momentum, opt.schedule, opt.average, opt.attempts) == (None, mq.Constant(3.0), mq.Polyak(), 2)
    assert (opt.lam, opt.param_groups[0]["lr"]) == (3, 0.5)
