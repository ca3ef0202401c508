"""Sums over all data at θ, and the rows of other inputs, against plain autograd."""

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.curvature.cost import Shapes
from marquardt.losses import resolve
from marquardt.model.parameters import Parameters
from marquardt.sources import source
from marquardt.uncertainty import expansion
from marquardt.uncertainty.expansion import Expansion, fits, in_eval_mode
from support.laplaced import network, regression
from support.reference import jacobian, trainable


def made(model, loss, data):
    return Expansion(model, resolve(loss), Parameters(model, list(model.parameters())), source(data))


def test_sums():
    model, x, y = regression(outputs=2)
    w = torch.rand(len(x), dtype=torch.float64)
    at = made(model, "mse", (x, y, w))
    J, z = jacobian(model, trainable(model), x)
    r = z - y
    assert at.value == pytest.approx(float((w[:, None] * r**2).sum()))
    assert at.normaliser == pytest.approx(2 * float(w.sum()))
    torch.testing.assert_close(at.squares, (w[:, None] * r**2).sum(0))
    torch.testing.assert_close(at.gradient, 2 * J.T @ (w[:, None] * r).flatten())
    G = 2 * (J.T * w.repeat_interleave(2)) @ J
    torch.testing.assert_close(at.curvature(mq.Dense(), True).G, G)
    torch.testing.assert_close(torch.cat([rows.flatten(0, 1) for rows in at.by_row()]).square().sum(), G.trace())


def test_rows_of_other_inputs():
    model, x, y = regression(outputs=3)
    at = made(model, "mse", (x, y))
    grid = torch.randn(4, 2, dtype=torch.float64)
    part = at.functional(grid)
    J, z = jacobian(model, trainable(model), grid)
    torch.testing.assert_close(part.z, z)
    torch.testing.assert_close(part.mean, z[..., None])
    torch.testing.assert_close(part.rows[:, :, 0], J.view(4, 3, -1))


def test_a_model_with_two_outputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.log_variance = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x):
            return self.mean(x), self.log_variance(x)

    model = Two().double()
    x, y = torch.randn(9, 2, dtype=torch.float64), torch.randn(9, 1, dtype=torch.float64)
    at = made(model, "gaussian_nll", (x, y))
    part = at.functional(x)
    torch.testing.assert_close(part.mean[:, 0], torch.cat(model(x), 1).detach())
    assert part.rows.shape == (9, 1, 2, 6)
    assert bool((part.rows[:, 0, 0, 3:] == 0).all())
    assert bool((part.rows[:, 0, 1, :3] == 0).all())


def test_the_modes_come_back_after_an_error():
    model = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5))
    model[0].eval()
    device = model[0].weight.device

    def fails():
        with in_eval_mode(model, device):
            assert not any(m.training for m in model.modules())
            assert torch.is_grad_enabled()
            raise KeyError("inside")

    with torch.no_grad(), pytest.raises(KeyError, match="inside"):
        fails()
    assert [m.training for m in model.modules()] == [True, False, True]


def test_what_has_room_and_time(monkeypatch):
    cpu = torch.device("cpu")
    small = Shapes(n=100, N=50, R=1, layers=(), itemsize=8)
    wide = Shapes(n=10_000_000, N=50, R=1, layers=(), itemsize=8)
    long = Shapes(n=1_000_000, N=1_000_000, R=1, layers=(), itemsize=8)
    monkeypatch.setattr(expansion, "free", lambda device: 2**33)
    assert [fits(s, s.m < s.n, cpu) for s in (small, wide, long)] == [True, False, False]
    monkeypatch.setattr(expansion, "free", lambda device: 2**37)
    assert [fits(s, s.m < s.n, cpu) for s in (small, wide, long)] == [True, True, False]
    monkeypatch.setattr(expansion, "free", lambda device: None)
    assert [fits(s, s.m < s.n, cpu) for s in (small, long)] == [True, False]


def test_samples_that_depend_on_each_other_are_refused():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 1)

        def forward(self, x):
            return self.head(self.norm(x))

    with pytest.raises(ValueError, match="layer 'norm'"):
        made(Centred(), "mse", (torch.randn(9, 2), torch.randn(9, 1)))


def test_residuals_need_no_targets():
    model = network(2, 3, 1)
    x = torch.randn(12, 2, dtype=torch.float64)
    at = made(model, "residual", (x, None))
    assert at.value == pytest.approx(float(model(x).detach().square().sum()))
