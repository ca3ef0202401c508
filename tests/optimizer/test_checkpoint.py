"""Activation checkpointing in the model, and a GradScaler around the optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import marquardt as mq
from support.steps import theta
from support.unchanged import changes, world


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.3), nn.LayerNorm(16), nn.Linear(16, 16))
        self.reentrant: bool | None = None  # None: no checkpoint

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.head(x.tanh())


CURVATURES = pytest.mark.parametrize(
    "curvature", [mq.Auto(), mq.Dense(), mq.Gram(chunk=16), mq.MatrixFree(iterations=20), mq.Kronecker()], ids=str
)


@pytest.mark.parametrize("coarse", [False, True], ids=["float32", "autocast"])
@CURVATURES
def test_a_checkpoint_changes_nothing(curvature, coarse):
    """What it computes again has the same random numbers and the same autocast, and the rules hold."""
    plain, x, y = Checkpointed(), torch.randn(32, 8), torch.randint(3, (32,))
    model = copy.deepcopy(plain)
    model.reentrant = False
    opts = [mq.LM(m, "cross_entropy", curvature=curvature) for m in (plain, model)]
    for i in range(3):
        steps = []
        for opt in opts:
            torch.manual_seed(i)
            with torch.autocast("cpu", torch.bfloat16, enabled=coarse):
                steps.append(opt.step(x, y))
        assert steps[1].new_loss == pytest.approx(steps[0].new_loss, rel=1e-5)
        assert steps[1].rule == steps[0].rule
    assert torch.allclose(theta(model), theta(plain), atol=1e-5)
    assert set(mq.linearize(model, "cross_entropy", x, y).paths.values()) == {"rule"}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@CURVATURES
def test_a_reentrant_checkpoint_is_refused(curvature):
    model, x, y = Checkpointed(), torch.randn(32, 8), torch.randint(3, (32,))
    opt = mq.LM(model, "cross_entropy", curvature=curvature)
    opt.step(x, y)
    model.reentrant = True
    before = world(model, opt)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        opt.step(x, y)
    assert changes(before, world(model, opt)) == []


def test_a_grad_scaler_is_refused():
    """One that is switched off lets the step through."""
    model, x, y = nn.Linear(3, 2), torch.randn(8, 3), torch.randn(8, 2)
    opt = mq.LM(model, "mse")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
    before = world(model, opt)
    with pytest.raises(TypeError, match="LM takes no GradScaler"):
        scaler.step(opt, x, y)
    assert changes(before, world(model, opt)) == []
    scaler.unscale_(opt)  # which changes p.grad
    with pytest.raises(TypeError, match="LM takes no GradScaler"):
        scaler.step(opt, x, y)
    assert [name for name in changes(before, world(model, opt)) if name != "gradients"] == []
    assert torch.amp.GradScaler("cpu", enabled=False).step(opt, x, y).accepted
