"""The loss on data that do not train: against torch's own, over several batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.losses import resolve
from marquardt.sources import source
from marquardt.training.run import evaluated
from support.fits import net

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (nn.MSELoss(), lambda: torch.randn(20, 3)),
        (nn.MSELoss(reduction="sum"), lambda: torch.randn(20, 3)),
        (nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=1), lambda: torch.randint(3, (20,))),
        (nn.BCEWithLogitsLoss(), lambda: torch.rand(20, 3).round()),
        (nn.HuberLoss(), lambda: torch.randn(20, 3)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_it_is_torchs(loss, targets):
    x, y, model = torch.randn(20, 2), targets(), net(2, 5, 3)
    for size in (20, 7):
        found = evaluated(model, resolve(loss), source((x, y)).batches(size))
        assert found == pytest.approx(loss(model(x), y).item(), rel=1e-12)


def test_weights_of_samples():
    x, y, w, model = torch.randn(20, 2), torch.randn(20, 1), torch.rand(20), net(2, 5, 1)
    found = evaluated(model, resolve("mse"), source((x, y, w)).batches(6))
    want = (w[:, None] * (model(x) - y).square()).sum() / w.sum()
    assert found == pytest.approx(want.item(), rel=1e-12)


def test_a_model_that_differentiates_itself():
    class Slope(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net(1, 5, 1)

        def forward(self, x):
            x = x.requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(x).sum(), x, create_graph=True)
            return slope - x

    model, x = Slope(), torch.randn(9, 1)
    found = evaluated(model, resolve(mq.losses.Residual()), source((x, None)).batches(4))
    assert found == pytest.approx(model(x).square().mean().item(), rel=1e-12)


def test_modes_and_random_numbers_stay():
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[2].eval()
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    modes, state = [m.training for m in model.modules()], torch.get_rng_state()
    stats = model[2].running_mean.clone()
    first = evaluated(model, resolve("mse"), source((x, y)).batches())
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model[2].running_mean, stats)
    assert evaluated(model, resolve("mse"), source((x, y)).batches()) == first

    def fails(*_):
        raise ZeroDivisionError

    model[3].register_forward_hook(fails)
    with pytest.raises(ZeroDivisionError):
        evaluated(model, resolve("mse"), source((x, y)).batches())
    assert [m.training for m in model.modules()] == modes


def test_nothing_to_weigh():
    loss = resolve(nn.CrossEntropyLoss(ignore_index=0))
    data = source((torch.randn(4, 2), torch.zeros(4, dtype=torch.long))).batches()
    with pytest.raises(ValueError, match="the total weight of the validation set is 0"):
        evaluated(net(2, 3, 3), loss, data)
