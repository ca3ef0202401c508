"""Models whose parameters are bfloat16 or float16: θ is kept in float32, and they are its rounding."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from support.coarse import COARSE
from support.parts import Always
from support.reference import error
from support.steps import edit, state, theta
from support.unchanged import changes, same, world

EVERY_NETWORK = pytest.mark.parametrize("name", COARSE)
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
SMALL = {"schedule": mq.Constant(3000.0), "momentum": None, "average": None}  # steps of a thousandth of the spacing


def rounded(name: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module, Tensor, Tensor, Tensor]:
    """A coarse model, one in float32 with the same weights, inputs for each, targets."""
    model, x, y = COARSE[name].build()
    coarse = model.to(dtype)
    return coarse, copy.deepcopy(coarse).float(), x.to(dtype) if x.is_floating_point() else x, x, y


# Parameters without a layer have no Kronecker factors; of second derivatives one network is enough.
CURVATURES = [(name, c) for name in COARSE for c in (mq.Gram(), mq.MatrixFree(iterations=30))]
CURVATURES += [(name, mq.Kronecker()) for name in COARSE if name != "bare"]
CURVATURES += [("bare", mq.Hessian()), ("mlp", mq.Dense())]


@EVERY_DTYPE
@pytest.mark.parametrize(("name", "curvature"), CURVATURES, ids=str)
def test_the_step_is_near_that_in_float32(name, dtype, curvature):
    model, twin, small, x, y = rounded(name, dtype)
    lam = 100.0 if isinstance(curvature, mq.Hessian) else 1.0  # which is not positive definite by itself
    parts = {"curvature": curvature, "schedule": mq.Constant(lam), "momentum": None, "acceptance": mq.Decrease()}
    before = theta(twin)
    opt, exact = mq.LM(model, COARSE[name].loss, **parts), mq.LM(twin, COARSE[name].loss, **parts)
    assert opt.step(small, y).rule == exact.step(x, y).rule == "decrease"
    master = state(opt)["master"]
    assert master.dtype == torch.float32
    assert 0 < error(master - before, theta(twin) - before) < 20 * torch.finfo(torch.bfloat16).eps
    assert torch.equal(theta(model), master.to(dtype))


@EVERY_DTYPE
@EVERY_NETWORK
def test_rules_hold(name, dtype):
    model, twin, small, x, y = rounded(name, dtype)
    lin, exact = (mq.linearize(m, COARSE[name].loss, a, y) for m, a in ((model, small), (twin, x)))
    assert set(lin.paths.values()) <= {"rule", "graph"}  # none is taken for one without influence
    assert lin.rows().dtype == lin.theta.dtype == lin.gradient.dtype == torch.float32
    assert 0 < error(lin.rows(), exact.rows()) < 20 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize(
    ("name", "dtype"), [("mlp", torch.float16), *((name, torch.bfloat16) for name in COARSE)], ids=str
)
def test_a_coarse_model_is_trained_as_far_as_its_rounding(name, dtype):
    model, _, x, _, y = rounded(name, dtype)
    opt = mq.LM(model, COARSE[name].loss)
    steps = [opt.step(x, y) for _ in range(55)]
    assert min(s.new_loss for s in steps) < 1e-3 * steps[0].loss
    assert any(s.converged for s in steps)
    assert 0 < opt.lam < 100
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_steps_below_the_spacing_of_the_parameters_add_up():
    """Many of them lead where they lead in float32, though some are rejected, for the rounding of the loss hides what
    they gain. Without what the optimizer keeps the model hardly moves."""
    model, twin, small, x, y = rounded("mlp", torch.bfloat16)
    forgetful, start = copy.deepcopy(model), theta(model)
    opt, exact, other = (mq.LM(m, "mse", **SMALL) for m in (model, twin, forgetful))
    first = opt.step(small, y)
    exact.step(x, y)
    assert first.accepted
    stayed = (theta(model) == start)[start.abs() > 0.05]
    assert len(stayed) > 100
    assert stayed.float().mean() > 0.95  # hardly a weight has changed
    for _ in range(80):
        opt.step(small, y)
        exact.step(x, y)
        other.step(small, y)
        edit(other, master=None)
    moved, true, lost = (theta(m).float() - start.float() for m in (model, twin, forgetful))
    assert torch.cosine_similarity(moved, true, dim=0) > 0.9
    assert 0.5 < moved.norm() / true.norm() < 1.25
    assert lost.norm() < 0.5 * moved.norm()


def test_weights_that_are_rounded_to_what_they_were_go_on():
    """As θ does, of which they are the rounding: in time they follow."""
    model, _, small, _, y = rounded("mlp", torch.bfloat16)
    opt, before = mq.LM(model, "mse", radius=1e-6, line_search=None, acceptance=mq.Decrease()), theta(model)
    step = opt.step(small, y)
    assert (step.rule, step.new_loss) == ("decrease", step.loss)
    assert bool((theta(model) == before)[before != 0].all())
    assert 0 < (state(opt)["master"] - before.float()).norm() < 2e-6


class TwoPrecisions(nn.Module):
    """As a network in bfloat16 whose head is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 16, dtype=torch.bfloat16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x.bfloat16()).tanh().float())


def test_parameters_of_two_precisions():
    _, x, y = COARSE["mlp"].build()
    model = TwoPrecisions()
    twin = nn.Sequential(copy.deepcopy(model.inner).float(), nn.Tanh(), copy.deepcopy(model.head))
    before = theta(twin)
    opt, exact = mq.LM(model, "mse"), mq.LM(twin, "mse")
    opt.step(x, y)
    exact.step(x, y)
    assert error(state(opt)["master"] - before, theta(twin) - before) < 0.1
    assert torch.equal(model.head.weight.flatten(), state(opt)["master"][-17:-1])  # which is not rounded
    steps = [opt.step(x, y) for _ in range(25)]
    assert steps[-1].new_loss < 1e-2 * steps[0].loss


def test_a_run_is_resumed_bit_for_bit():
    model, _, x, _, y = rounded("mlp", torch.bfloat16)
    opt = mq.LM(model, "mse")
    for i in range(4):
        opt.step(x + i / 8, y)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, *_ = rounded("mlp", torch.bfloat16)
    other.load_state_dict(saved["model"])
    resumed = mq.LM(other, "mse")
    resumed.load_state_dict(saved["opt"])
    for i in range(4):
        assert resumed.step(x - i / 8, y) == opt.step(x - i / 8, y)
        assert torch.equal(state(resumed)["master"], state(opt)["master"])
    assert torch.equal(theta(other), theta(model))


def test_a_saved_state_of_other_weights_is_refused():
    model, _, x, _, y = rounded("mlp", torch.bfloat16)
    opt = mq.LM(model, "mse")
    opt.step(x, y)
    with pytest.raises(ValueError, match=r"'master' has the shape \(3,\), and \(193,\) is needed"):
        edit(opt, master=torch.zeros(3))


def test_weights_that_somebody_else_changed():
    """They count from there on; those that nobody changed keep their digits, to which a tiny step adds."""
    model, _, x, _, y = rounded("mlp", torch.bfloat16)
    opt = mq.LM(model, "mse")
    for _ in range(3):
        opt.step(x, y)
    kept, n = state(opt)["master"], model[0].weight.numel()
    with torch.no_grad():
        model[0].weight.copy_(torch.randn_like(model[0].weight))
    now, fresh = theta(model).float(), copy.deepcopy(model)
    with torch.no_grad():
        loss = nn.functional.mse_loss(fresh(x).float(), y).item()
    opt.radius, opt.acceptance = 1e-6, Always()
    step = opt.step(x, y)
    assert step.loss == pytest.approx(loss, rel=1e-4)
    assert 0 < (state(opt)["master"] - torch.cat([now[:n], kept[n:]])).norm() < 2e-6
    model.load_state_dict(fresh.state_dict())
    assert opt.step(x, y).loss == pytest.approx(loss, rel=1e-4)


def test_a_failed_step_leaves_everything():
    class Fragile(mq.Decrease):
        def judge(self, trial: object) -> str:
            raise ValueError("not today")

    model, _, x, _, y = rounded("mlp", torch.bfloat16)
    opt = mq.LM(model, "mse")
    opt.step(x, y)
    before, opt.acceptance = world(model, opt), Fragile()
    with pytest.raises(ValueError, match="not today"):
        opt.step(x + 1, y)
    assert changes(before, world(model, opt)) == []


def test_averaged_weights_are_rounded_and_leave_no_trace():
    model, _, x, _, y = rounded("mlp", torch.bfloat16)
    opt = mq.LM(model, "mse")
    for i in range(6):
        opt.step(x + i / 8, y)
    before, kept = theta(model), state(opt)
    with opt.averaged():
        inside = theta(model)
    assert torch.equal(inside, kept["master" if kept["lag"] > 0 else "mean"].bfloat16())
    assert torch.equal(theta(model), before)
    assert same(state(opt), kept)


def test_a_model_that_is_made_float32_goes_on():
    model, _, x, _, y = rounded("mlp", torch.bfloat16)
    opt = mq.LM(model, "mse")
    opt.step(x, y)
    model.float()
    assert opt.step(x.float(), y).accepted
    assert state(opt)["master"] is None


def test_gradients_beyond_the_range_of_float16():
    """Not a step into nowhere: the way out is told, and nothing has changed."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).half()
    with torch.no_grad():
        model[2].weight.fill_(6e4)
        model[0].weight.mul_(1e-7)
        model[0].bias.zero_()
        model[2].bias.zero_()
    x, y = torch.randn(16, 4).half() * 2e-2, torch.full((16, 1), 1e5)
    opt = mq.LM(model, "mse")
    before = world(model, opt)
    with pytest.raises(ValueError, match=r"is not finite.*bfloat16"):
        opt.step(x, y)
    assert changes(before, world(model, opt)) == []
