"""torch.autocast around a step, and within the model: it reaches the forward passes and nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.recordings import RECORDERS
from support.coarse import COARSE, Inside
from support.recorder import Repeated
from support.reference import error
from support.steps import CUDA, state, theta

EVERY_NETWORK = pytest.mark.parametrize("name", COARSE)
BF16 = torch.finfo(torch.bfloat16).eps


def bfloat16(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled)


def moved(model: nn.Module, loss: str, x: Tensor, y: Tensor, **parts: object) -> Tensor:
    """The step from where the model is: (n,)"""
    before = theta(model)
    assert mq.LM(model, loss, **parts).step(x, y).accepted
    return theta(model) - before


# Parameters without a layer have no Kronecker factors.
CURVATURES = [(name, c) for name in COARSE for c in (mq.Gram(), mq.MatrixFree(iterations=30))]
CURVATURES += [(name, mq.Kronecker()) for name in COARSE if name != "bare"] + [("mlp", mq.Dense())]


@pytest.mark.parametrize(("name", "curvature"), CURVATURES, ids=str)
def test_a_step_under_autocast_is_near_that_in_float32(name, curvature):
    loss, (model, x, y) = COARSE[name].loss, COARSE[name].build()
    exact = moved(copy.deepcopy(model), loss, x, y, curvature=curvature)
    with bfloat16():
        coarse = moved(model, loss, x, y, curvature=curvature)
    assert 0 < error(coarse, exact) < 20 * BF16
    assert torch.cosine_similarity(coarse, exact, dim=0) > 0.99


@EVERY_NETWORK
def test_rules_hold_under_autocast(name):
    model, x, y = COARSE[name].build()
    with bfloat16():
        lin = mq.linearize(model, COARSE[name].loss, x, y)
    assert set(lin.paths.values()) <= {"rule", "graph"}
    assert lin.rows().dtype == torch.float32
    exact = mq.linearize(model, COARSE[name].loss, x, y).rows()
    assert 0 < error(lin.rows(), exact) < 20 * BF16


@EVERY_NETWORK
def test_autocast_around_a_step_is_autocast_inside_the_model(name):
    """And what comes out of the model need not be made float32."""
    model, x, y = COARSE[name].build()
    inside = Inside(copy.deepcopy(model))
    around, within = mq.LM(model, COARSE[name].loss), mq.LM(inside, COARSE[name].loss)
    for _ in range(3):
        with bfloat16():
            here = around.step(x, y)
        assert here == within.step(x, y)
    assert torch.equal(theta(model), theta(inside))


def test_only_the_model_sees_autocast():
    """Neither the loss nor the solve; after the step it is as it was, and no converted weight is left."""

    class Asking(mq.losses.SquaredError):
        def ell(self, z: Tensor, y: Tensor) -> Tensor:
            seen.append(("loss", torch.is_autocast_enabled("cpu"), z.dtype))
            return super().ell(z, y)

    class Network(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(("model", torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            return super().forward(x)

    seen: list[tuple[object, ...]] = []
    model, x, y = Network(3, 2), torch.randn(8, 3), torch.randn(8, 2)
    opt = mq.LM(model, Asking())
    for dtype in (torch.bfloat16, torch.float16):
        seen.clear()
        with torch.autocast("cpu", dtype):
            opt.step(x, y)
            assert torch.is_autocast_enabled("cpu")
            z = model(x)
            assert z.requires_grad
            assert torch.equal(z, nn.functional.linear(x.to(dtype), model.weight.to(dtype), model.bias.to(dtype)))
        losses = {s[1:] for s in seen if s[0] == "loss"}
        assert (False, torch.float32) in losses
        assert losses <= {(False, torch.float32), (False, torch.float64)}  # on the first step it is proven in float64
        assert {s[1:] for s in seen if s[0] == "model"} == {(True, dtype)}
        assert all(state(opt)[name].dtype == torch.float32 for name in ("previous", "mean"))


def test_targets_of_the_outputs_dtype():
    """As a model under autocast is used to: they are taken in float32."""
    model, x, y = COARSE["mlp"].build()
    y = y.bfloat16()
    twin = copy.deepcopy(model)
    with bfloat16():
        assert mq.LM(model, "mse").step(x, y, y[:, 0].abs()) == mq.LM(twin, "mse").step(
            x, y.float(), y[:, 0].abs().float()
        )
    assert torch.equal(theta(model), theta(twin))


@EVERY_NETWORK
def test_a_run_under_autocast_goes_as_far_as_its_rounding(name):
    """Until the loss cannot be told from it, and λ does not run away from there."""
    loss, (model, x, y) = COARSE[name].loss, COARSE[name].build()
    opt = mq.LM(model, loss)
    with bfloat16():
        steps = [opt.step(x, y) for _ in range(60)]
    last = next(i for i, s in enumerate(steps) if s.converged)
    assert last > 10
    assert steps[last].new_loss < 1e-3 * steps[0].loss
    assert 0 < opt.lam < 100
    assert all(s.accepted or s.note for s in steps)


@pytest.mark.parametrize("search", [mq.Grid(), mq.Backtracking()], ids=str)
def test_trials_of_a_line_search_under_autocast(search):
    """All at once or one after the other: the losses are those of the model under autocast."""
    loss, (model, x, y) = COARSE["mlp"].loss, COARSE["mlp"].build()
    opt = mq.LM(model, loss, lr=40.0, line_search=search, acceptance=mq.Decrease())
    with bfloat16():
        steps = [opt.step(x, y) for _ in range(5)]
        found = nn.functional.mse_loss(model(x).float(), y)
    assert "search" in {s.rule for s in steps}
    assert steps[-1].new_loss == pytest.approx(found.item(), rel=1e-5)


def test_a_recording_belongs_to_one_autocast(monkeypatch):
    """A step under another is another kind of step, and a replay is what the plain step is."""
    model, x, y = COARSE["mlp"].build()
    recorder = Repeated(model)
    opt = mq.LM(model, "mse", capture=True)
    twin = copy.deepcopy(model)
    plain = mq.LM(twin, "mse", capture=False)
    counts = []
    for on in (False, True, False):
        for i in range(6):
            monkeypatch.setitem(RECORDERS, "cpu", recorder)
            with bfloat16(on):
                here = opt.step(x + i, y)
            monkeypatch.delitem(RECORDERS, "cpu")
            with bfloat16(on):
                there = plain.step(x + i, y)
            assert here.new_loss == pytest.approx(there.new_loss, rel=1e-3)
            assert here.loss == pytest.approx(there.loss, rel=1e-3)
        counts.append((recorder.recordings, recorder.replays))
    assert error(theta(model), theta(twin)) < 1e-3
    assert counts[0][0] < counts[1][0] < counts[2][0]
    assert counts[0][1] < counts[1][1] < counts[2][1]


@CUDA
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@EVERY_NETWORK
def test_autocast_on_a_gpu(name, dtype):
    """Recorded or not, it is the step of float32 to rounding."""
    loss, (model, x, y) = COARSE[name].loss, COARSE[name].build()
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    exact = moved(copy.deepcopy(model), loss, x, y)
    with torch.autocast("cuda", dtype):
        lin = mq.linearize(model, loss, x, y)
    assert set(lin.paths.values()) <= {"rule", "graph"}
    with torch.autocast("cuda", dtype):
        assert 0 < error(moved(copy.deepcopy(model), loss, x, y), exact) < 20 * BF16
        twin = copy.deepcopy(model)
        opt, plain = mq.LM(model, loss, capture=True), mq.LM(twin, loss, capture=False)
        for _ in range(8):  # from the same point: in a few steps rounding alone leads two plain runs apart
            twin.load_state_dict(model.state_dict())
            plain.load_state_dict(opt.state_dict())
            here, there = opt.step(x, y), plain.step(x, y)
            assert here.loss == pytest.approx(there.loss, rel=0.01)
            assert here.new_loss == pytest.approx(there.new_loss, abs=0.3 * abs(there.loss - there.new_loss))
    assert "steps are recorded" in repr(opt)
