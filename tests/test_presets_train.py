"""Presets on small problems: they train."""

from __future__ import annotations

import torch
from torch import nn

import marquardt as mq
from marquardt.paper import problems
from support.cases import mlp
from support.kronecker import fresh_batches

f64 = torch.float64


def test_hessian_free_on_a_regression():
    torch.manual_seed(0)
    x = torch.linspace(-3, 3, 100, dtype=f64)[:, None]
    model = mlp(1, 8, 1).double()
    opt = mq.presets.hessian_free(model, "mse")
    steps = [opt.step(x, x.sin()) for _ in range(60)]
    assert steps[-1].new_loss < 1e-2 * steps[0].loss
    assert all(s.new_loss <= s.loss for s in steps)
    assert opt.lam < 1.0


def test_hessian_free_on_batches():
    torch.manual_seed(0)
    centres = 2 * torch.randn(3, 4)
    y = torch.randint(3, (300,))
    x = centres[y] + torch.randn(300, 4)
    model = mlp(4, 10, 3)
    opt = mq.presets.hessian_free(model, "cross_entropy")
    with torch.no_grad():
        before = nn.functional.cross_entropy(model(x), y).item()
    for i in range(20):
        opt.step(x[i % 5 :: 5], y[i % 5 :: 5])
    with torch.no_grad():
        assert nn.functional.cross_entropy(model(x), y).item() < 0.3 * before


def test_preset_classifies():
    model = mlp(3, 16, 3).double()
    opt = mq.presets.kfac(model, "cross_entropy")
    batches = fresh_batches(40, N=100)
    x, y = fresh_batches(1, N=500)[0]

    def test_loss() -> float:
        with torch.no_grad():
            return nn.functional.cross_entropy(model(x), y).item()

    before = test_loss()
    for batch in batches:
        opt.step(*batch)
    assert test_loss() < 0.25 * before
    assert (model(x).argmax(1) == y).double().mean() > 0.93


def test_preset_fits_the_sine():
    """Full batch: far below the first loss, and never uphill."""
    x, y = problems.sine(0)
    opt = mq.presets.kfac(problems.sine_mlp(0), "mse")
    losses = [opt.step(x, y) for _ in range(100)]
    assert all(s.new_loss <= s.loss for s in losses)
    assert losses[-1].new_loss < 0.2 * losses[0].loss


def test_preset_takes_parts():
    opt = mq.presets.kfac(mlp(3, 4, 2), "mse", rows=mq.Exact(), curvature=mq.Kronecker(every=5))
    assert opt.rows == mq.Exact()
    assert opt.curvature == mq.Kronecker(every=5)


def test_newton_preset_on_a_regression():
    torch.manual_seed(0)
    x = torch.linspace(-3, 3, 60, dtype=f64)[:, None]
    opt = mq.presets.newton(mlp(1, 6, 1).double(), "mse")
    steps = [opt.step(x, x.sin()) for _ in range(60)]
    assert steps[-1].new_loss < 0.05 * steps[0].loss
