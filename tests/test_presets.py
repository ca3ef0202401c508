"""Presets: their constants, the same steps by hand, and that they train."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from support import cases
from support.cases import sample_weights
from support.kronecker import fresh_batches
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


PAPER = {
    "damping": mq.MaxDiagonal(0.01),
    "schedule": mq.GainRatio(1.0),
    "momentum": mq.AdaptiveMomentum(0.9, 0.6, cap=True),
    "acceptance": mq.Decrease(),
    "line_search": mq.Grid(1e-6, 9, 0.125),
}
# Sections 2.3 to 2.6 of the paper; three parts on sums of squares, four on all other losses.
PAPER_UPHILL = {**PAPER, "momentum": mq.AdaptiveMomentum(0.9, 1.0, cap=True), "acceptance": mq.Uphill(2.0)}
CODE = {
    "damping": mq.MaxDiagonal(0.01),
    "schedule": mq.RelativeDecrease(1.0, 1e-5, 1e5),
    "momentum": mq.AdaptiveMomentum(0.9, 0.6),
    "acceptance": mq.Uphill(2.0),
    "line_search": mq.Grid(0.01, 2, 0.05, power=3, along_step=True, uphill=True),
}
VANILLA = {"damping": mq.Identity(), "schedule": mq.TenFold(1.0, 10.0), "acceptance": mq.Decrease()}
GAUSS_NEWTON = {**VANILLA, "schedule": mq.Constant(0.0), "line_search": mq.Grid(1e-6, 9, 0.125)}


@pytest.mark.parametrize(
    ("preset", "loss", "parts"),
    [
        *(("paper", loss, PAPER) for loss in ("mse", "residual")),
        *(("paper", loss, PAPER_UPHILL) for loss in ("cross_entropy", "bce", "huber", "poisson")),
        ("authors_code", "cross_entropy", {**CODE, "rows": mq.Empirical()}),
        ("authors_code", "mse", CODE),
        ("vanilla", "mse", VANILLA),
        ("gauss_newton", "mse", GAUSS_NEWTON),
    ],
)
def test_the_parts_of_a_preset(preset, loss, parts):
    opt = getattr(mq.presets, preset)(mlp(outputs=3), loss)
    for name, part in {"rows": mq.Exact(), "momentum": None, "line_search": None, "average": None, **parts}.items():
        assert getattr(opt, name) == part, name
    assert opt.curvature.inertia == 0  # G is that of the batch
    assert (opt.attempts, opt.param_groups[0]["lr"], opt.lam) == (1, 1, parts["schedule"].initial)


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


@pytest.mark.parametrize("preset", [mq.presets.paper, mq.presets.vanilla, mq.presets.gauss_newton, mq.presets.kfac])
def test_presets_take_other_parts(preset):
    opt = preset(mlp(), "mse", momentum=None, schedule=mq.Constant(3.0), average=mq.Polyak(), lr=0.5, attempts=2)
    assert (opt.momentum, opt.schedule, opt.average, opt.attempts) == (None, mq.Constant(3.0), mq.Polyak(), 2)
    assert (opt.lam, opt.param_groups[0]["lr"]) == (3, 0.5)


f64 = torch.float64


@pytest.mark.parametrize(("preset", "factor"), [("hessian_free", 0.01), ("newton", 0.05), ("kfac", 0.2)])
def test_presets_fit_a_sine(preset, factor):
    """All data in each step: far below the first loss, and never uphill."""
    torch.manual_seed(0)
    x = torch.linspace(-3, 3, 100, dtype=f64)[:, None]
    opt = getattr(mq.presets, preset)(cases.mlp(1, 8, 1).double(), "mse")
    steps = [opt.step(x, x.sin()) for _ in range(60)]
    assert steps[-1].new_loss < factor * steps[0].loss
    assert all(s.new_loss <= s.loss for s in steps)


def test_hessian_free_on_batches():
    torch.manual_seed(0)
    centres = 2 * torch.randn(3, 4)
    y = torch.randint(3, (300,))
    x = centres[y] + torch.randn(300, 4)
    model = cases.mlp(4, 10, 3)
    opt = mq.presets.hessian_free(model, "cross_entropy")
    with torch.no_grad():
        before = nn.functional.cross_entropy(model(x), y).item()
    for i in range(20):
        opt.step(x[i % 5 :: 5], y[i % 5 :: 5])
    with torch.no_grad():
        assert nn.functional.cross_entropy(model(x), y).item() < 0.3 * before


def test_kfac_classifies():
    model = cases.mlp(3, 16, 3).double()
    opt = mq.presets.kfac(model, "cross_entropy")
    batches = fresh_batches(40, N=100)
    x, y = fresh_batches(1, N=500)[0]

    def test_loss() -> float:
        with torch.no_grad():
            return nn.functional.cross_entropy(model(x), y).item()

    before = test_loss()
    for each in batches:
        opt.step(*each)
    assert test_loss() < 0.25 * before
    assert (model(x).argmax(1) == y).double().mean() > 0.93
