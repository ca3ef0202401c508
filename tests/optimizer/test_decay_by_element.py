"""A weight decay for every element of a parameter: a tensor in a parameter group."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.recordings import RECORDERS
from support.cases import mlp
from support.recorder import Repeated
from support.reference import error
from support.steps import lm, problem, theta
from support.unchanged import changes, refused, same, world

pytestmark = pytest.mark.usefixtures("double")

DIRECT = {"curvature": mq.Dense(), "damping": mq.Identity(), "schedule": mq.Constant(0.0)}
BIAS = 0.2


def columns(d: int = 3, least: float = 0.0) -> Tensor:
    return torch.linspace(least, 1.0, d)[None]  # (1, d)


def linear() -> tuple[nn.Linear, Tensor, Tensor]:
    return nn.Linear(3, 2), torch.randn(20, 3), torch.randn(20, 2)


def groups(model: nn.Linear, w: Any) -> list[dict[str, Any]]:
    return [{"params": [model.weight], "weight_decay": w}, {"params": [model.bias], "weight_decay": BIAS}]


def minimum(x: Tensor, y: Tensor, w: Any) -> Tensor:
    """Of the mean of squares + ½Σwθ², by a system of all unknowns with the bias last: (2, 4)"""
    X = torch.cat([x, torch.ones(len(x), 1)], 1)
    H = torch.kron(torch.eye(2), 2 / y.numel() * X.T @ X)
    W = torch.cat([torch.as_tensor(w).double().expand(2, 3), torch.full((2, 1), BIAS)], 1)
    return torch.linalg.solve(H + W.flatten().diag(), (2 / y.numel() * y.T @ X).flatten()).view(2, 4)


def table(model: nn.Linear) -> Tensor:
    return torch.cat([model.weight, model.bias[:, None]], 1).detach()


SHAPES = {
    "columns": lambda: columns(least=0.1),
    "a vector": lambda: columns(least=0.1)[0],
    "rows": lambda: torch.tensor([[0.1], [0.7]]),
    "elements": lambda: torch.rand(2, 3) + 0.1,
    "float32": lambda: torch.tensor([0.125, 0.5, 1.0], dtype=torch.float32),
    "integers": lambda: torch.tensor([1, 2, 3]),
    "all the same": lambda: torch.full((2, 3), 0.3),
    "with a gradient": lambda: columns(least=0.1).requires_grad_() * 2,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), mq.Hessian(), mq.Auto()], ids=str)
def test_ridge_regression(curvature, shape):
    """One step without damping ends at the minimum in closed form."""
    model, x, y = linear()
    w = SHAPES[shape]()
    opt = lm(model, params=groups(model, w), **{**DIRECT, "curvature": curvature})
    step = opt.step(x, y)
    w = w.detach()
    assert error(table(model), minimum(x, y, w)) < 1e-10
    assert torch.equal(copy.deepcopy(opt.state_dict())["param_groups"][0]["weight_decay"], w)
    assert step.gain == pytest.approx(1, abs=1e-10)
    with torch.no_grad():
        data = float(nn.functional.mse_loss(model(x), y))
        penalty = 0.5 * float((w * model.weight**2).sum() + BIAS * (model.bias**2).sum())
    assert step.new_data_loss == pytest.approx(data, rel=1e-12)
    assert step.new_loss == pytest.approx(data + penalty, rel=1e-12)


def test_some_elements_need_not_decay():
    model, x, y = linear()
    lm(model, params=groups(model, columns()), **DIRECT).step(x, y)
    assert error(table(model), minimum(x, y, columns())) < 1e-10


@pytest.mark.parametrize("preset", [mq.presets.vanilla, mq.presets.gauss_newton], ids=lambda p: p.__name__)
def test_it_is_in_the_units_of_the_loss_that_is_reported(preset):
    model, x, y = linear()
    w = columns(least=0.1)
    preset(model, "mse", params=groups(model, w), schedule=mq.Constant(0.0)).step(x, y)
    assert error(table(model), minimum(x, y, w)) < 1e-10


@pytest.mark.parametrize("curvature", [mq.Auto(), mq.Gram(), mq.Dense(), mq.MatrixFree(), mq.Kronecker()], ids=str)
def test_the_minimum_is_that_of_both_together(curvature):
    """A run with the default D converges to a point at which the gradient of loss + ½Σwθ² is zero."""
    model, x, y = problem(N=20)
    w, first = torch.tensor([[0.01, 0.05]]), model[0].weight
    others = [p for p in model.parameters() if p is not first]
    params = [{"params": [first], "weight_decay": w}, {"params": others, "weight_decay": 0.02}]
    opt = mq.LM(model, "mse", params=params, curvature=curvature)
    for _ in range(600):
        step = opt.step(x, y)
        if step.converged:
            break
    assert step.converged
    penalty = (w * first**2).sum() + 0.02 * sum(p.square().sum() for p in others)
    total = nn.functional.mse_loss(model(x), y) + 0.5 * penalty
    slopes = torch.autograd.grad(total, list(model.parameters()))
    assert max(float(g.abs().max()) for g in slopes) < 1e-5
    assert step.loss == pytest.approx(float(total), rel=1e-12)


@pytest.mark.parametrize("search", [mq.Grid(), mq.Bracket()], ids=str)
def test_line_searches_see_it(search):
    """All trial points at once."""
    model, x, y = problem()
    w = columns(2)
    params = [{"params": [model[0].weight], "weight_decay": w}, {"params": [model[2].weight]}]
    opt = lm(model, params=params, lr=40.0, schedule=mq.Constant(1e-3), line_search=search)
    step = opt.step(x, y)
    assert step.rule == "search"
    with torch.no_grad():
        expected = nn.functional.mse_loss(model(x), y) + 0.5 * (w * model[0].weight ** 2).sum()
    assert step.new_loss == pytest.approx(float(expected), rel=1e-10)
    assert list(opt._known.batched_trials.values()) == [True]


def test_a_tensor_for_several_parameters():
    """That broadcasts to each of them; those that are excluded do not decay."""
    model, x, y = linear()
    w = torch.tensor([[0.3], [0.7]])
    wide = nn.Sequential(model, nn.Linear(2, 2, bias=False))
    params = [{"params": [model.weight, wide[1].weight], "weight_decay": w}]
    opt = lm(wide, params=params, weight_decay=mq.WeightDecay(0.0, exclude="1"))
    step = opt.step(x, y)
    expected = 0.5 * (w * model.weight**2).sum()
    assert step.new_loss - step.new_data_loss == pytest.approx(float(expected), rel=1e-10)


# Changed between steps.


def test_another_value_holds_from_the_next_step_on():
    model, x, y = linear()
    w = columns(least=0.1)
    opt = lm(model, params=groups(model, w), **DIRECT)
    opt.step(x, y)
    w.mul_(3).add_(0.2)  # in place
    opt.step(x, y)
    assert error(table(model), minimum(x, y, w)) < 1e-10
    for other in (torch.rand(2, 3), 0.4, columns()):
        opt.param_groups[0]["weight_decay"] = other
        opt.step(x, y)
        assert error(table(model), minimum(x, y, other)) < 1e-10


BAD = {
    "negative": (torch.tensor([0.1, -0.5, 0.0]), ["group 0", "(3,)", "-0.5", "at least 0"]),
    "NaN": (torch.tensor([[float("nan"), 0.1, 0.1]]), ["group 0", "(1, 3)", "nan"]),
    "infinite": (torch.tensor([0.1, 0.1, float("inf")]), ["group 0", "inf", "finite"]),
    "too large": (
        torch.tensor([1e300, 0.1, 0.1], dtype=torch.float64),
        ["group 0", "1e+300", "finite in torch.float32"],
    ),
    "of another shape": (torch.rand(2), ["group 0", "(2,)", "(2, 3)", "broadcast"]),
    "of more dimensions": (torch.rand(1, 2, 3), ["group 0", "(1, 2, 3)", "(2, 3)", "broadcast"]),
    "empty": (torch.rand(0), ["group 0", "(0,)", "(2, 3)", "broadcast"]),
    "flags": (torch.tensor([True, False, True]), ["group 0", "torch.bool", "real numbers"]),
    "complex": (torch.rand(3, dtype=torch.complex128), ["group 0", "torch.complex128", "real numbers"]),
    "sparse": (torch.rand(3).to_sparse(), ["group 0", "sparse", "dense"]),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_it_cannot_be(kind):
    """When LM is made, between steps, and in a state_dict: nothing has changed then."""
    model, x, y = (t.float() for t in linear())
    bad, words = BAD[kind]
    before = world(model)
    with refused(*words):
        lm(model, params=groups(model, bad))
    assert changes(before, world(model)) == []
    opt = lm(model, params=groups(model, columns()))
    opt.step(x, y)
    saved = opt.state_dict()
    saved["param_groups"][0]["weight_decay"] = bad
    before = world(model, opt)
    with refused(*words):
        opt.load_state_dict(saved)
    assert changes(before, world(model, opt)) == []
    opt.param_groups[0]["weight_decay"] = bad
    before = world(model)
    with refused(*words):
        opt.step(x, y)
    assert changes(before, world(model)) == []


def test_a_group_is_named():
    model, *_ = linear()
    params = [{"params": [model.bias]}, {"params": [model.weight], "weight_decay": torch.rand(2), "name": "inputs"}]
    with refused("group 'inputs'", "(2, 3)"):
        lm(model, params=params)


def test_a_model_has_no_tensor():
    model, *_ = linear()
    for make in (lambda w: mq.WeightDecay(w), lambda w: lm(model, weight_decay=w)):
        with refused("(1, 3)", 'params=[{"params": [weight]', "different shapes"):
            make(columns())


def test_what_is_nothing_in_the_precision_of_the_model():
    model, x, y = (t.float() for t in linear())
    opt = mq.LM(model, "mse", params=groups(model, torch.tensor([1e-60, 2e-60, 0.0])), curvature=mq.Gram())
    step = opt.step(x, y)
    assert step.accepted
    penalty = 0.5 * BIAS * float(model.bias.square().sum())
    assert step.new_loss - step.new_data_loss == pytest.approx(penalty, rel=1e-4)


# Saved, copied, moved.


@pytest.mark.parametrize("curvature", [mq.Auto(), mq.Gram(), mq.Kronecker()], ids=str)
def test_resumes_bit_for_bit(curvature):
    model, x, y = problem()

    def make(model: nn.Module, w: Any) -> mq.LM:
        rest = [model[0].bias, *model[2].parameters()]
        params = [{"params": [model[0].weight], "weight_decay": w}, {"params": rest, "weight_decay": 0.1}]
        return mq.LM(model, "mse", params=params, curvature=curvature)

    w = columns(2)
    opt = make(model, w)
    for t in range(3):
        opt.step(x, y + 0.1 * t)
    file = io.BytesIO()
    state = opt.state_dict()
    torch.save(state, file)
    file.seek(0)
    again = make(copy.deepcopy(model), 0.0)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(again.param_groups[0]["weight_decay"], w)
    w_saved = w.clone()
    twin, loaded = copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))
    for t in range(3):
        steps = [other.step(x, y - 0.1 * t) for other in (opt, again, twin, loaded)]
        assert all(step == steps[0] for step in steps)
    assert same(opt.state_dict(), again.state_dict())
    w.zero_()
    for copied in (state, twin.state_dict(), again.state_dict()):
        assert torch.equal(copied["param_groups"][0]["weight_decay"], w_saved)


def test_a_model_that_is_moved():
    """The tensor stays as it was given, and a step takes it as the parameters are now."""
    model, x, y = linear()
    w = columns(least=0.1)
    opt = lm(model.float(), params=groups(model, w.float()), **DIRECT)
    opt.step(x.float(), y.float())
    assert error(table(model).double(), minimum(x, y, w)) < 1e-5
    model.double()
    opt.step(x, y)
    assert error(table(model), minimum(x, y, w.float())) < 1e-10


def test_repr_is_brief():
    model = nn.Linear(1000, 2)
    opt = lm(model, params=groups(model, torch.linspace(0.25, 0.5, 1000)))
    assert "weight_decay=0.25 to 0.5 by element, 0.2, radius" in repr(opt)
    assert len(repr(opt)) < 1500


@pytest.mark.parametrize("curvature", [mq.Auto(), mq.Gram(whole=0), mq.Dense()], ids=str)
def test_recorded_steps(curvature, monkeypatch):
    """The same steps as without a recording; other values in the tensor need no other recording."""
    model = mlp(5, 16, 3)
    twin, recorder = copy.deepcopy(model), Repeated(model)

    def made(model: nn.Module, capture: bool) -> tuple[mq.LM, Tensor]:
        w = torch.zeros(1, 5)
        rest = [p for p in model.parameters() if p is not model[0].weight]
        params = [{"params": [model[0].weight], "weight_decay": w}, {"params": rest, "weight_decay": 0.01}]
        return mq.LM(model, "cross_entropy", params=params, curvature=curvature, capture=capture), w

    def steps(opt: mq.LM, w: Tensor) -> list[mq.Step]:
        found = []
        for t in range(24):
            generator = torch.Generator().manual_seed(t)
            w.copy_(0.05 * torch.rand(1, 5, generator=generator) + 0.01)  # in place, and small
            x, y = torch.randn(40, 5, generator=generator), torch.randint(3, (40,), generator=generator)
            found.append(opt.step(x, y))
        return found

    with monkeypatch.context() as patch:
        patch.setitem(RECORDERS, "cpu", recorder)
        found = steps(*made(model, True))
    for step, plain in zip(found, steps(*made(twin, False)), strict=True):
        for key in ("loss", "new_loss", "data_loss", "new_data_loss", "gain", "lam"):
            assert getattr(step, key) == pytest.approx(getattr(plain, key), rel=1e-7), key
    assert error(theta(model), theta(twin)) < 1e-8
    assert recorder.replays > 8
    assert recorder.recordings <= 2
