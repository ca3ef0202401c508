"""Weight decay as a part of the objective: what a step minimises, reports, saves and judges."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.jacobian.objective import Level
from marquardt.policies.recent import Recent
from marquardt.recordings import RECORDERS
from marquardt.step import reweighted
from support.cases import mlp
from support.recorder import Repeated
from support.reference import error
from support.steps import lm, parts_of, problem, theta
from support.unchanged import changes, refused, same, world

pytestmark = pytest.mark.usefixtures("double")


W, BIAS = 0.3, 0.2
DIRECT = {"curvature": mq.Dense(), "damping": mq.Identity(), "schedule": mq.Constant(0.0)}


def by_hand(model: nn.Module, x: Tensor, y: Tensor, w: float = W) -> float:
    """Mean of squares + ½w‖θ‖²"""
    with torch.no_grad():
        return float(nn.functional.mse_loss(model(x), y) + 0.5 * w * sum(p.square().sum() for p in model.parameters()))


def linear() -> tuple[nn.Linear, Tensor, Tensor]:
    return nn.Linear(3, 2), torch.randn(20, 3), torch.randn(20, 2)


def table(model: nn.Linear) -> Tensor:
    """Its parameters, the bias as a last column: (outputs, inputs + 1)"""
    return torch.cat([model.weight, model.bias[:, None]], 1).detach()


def ridge(x: Tensor, y: Tensor, w: Tensor, towards: Tensor | None = None, factor: float = 2.0) -> Tensor:
    """The minimum of factor/2·Σ(xθᵀ − y)²/count + ½Σw(θ − θ₀)², like `table`; w as well, or what broadcasts to it"""
    X = torch.cat([x, torch.ones(len(x), 1)], 1)
    w = w.double().expand(y.shape[1], X.shape[1])
    H = torch.kron(torch.eye(y.shape[1]), factor / y.numel() * X.T @ X) + w.flatten().diag()
    g = factor / y.numel() * y.T @ X + (0 if towards is None else w * towards)
    return torch.linalg.solve(H, g.flatten()).view_as(w)


def columns(d: int = 3, least: float = 0.0) -> Tensor:
    return torch.linspace(least, 1.0, d)[None]  # (1, d)


def groups(model: nn.Linear, w: Any) -> list[dict[str, Any]]:
    return [{"params": [model.weight], "weight_decay": w}, {"params": [model.bias], "weight_decay": BIAS}]


def minimum(x: Tensor, y: Tensor, w: Any) -> Tensor:
    """That of these groups"""
    return ridge(x, y, torch.cat([torch.as_tensor(w).double().expand(2, 3), torch.full((2, 1), BIAS)], 1))


SHAPES: dict[str, Callable[[], Any]] = {
    "a number": lambda: W,
    "columns": lambda: columns(least=0.1),
    "a vector": lambda: columns(least=0.1)[0],
    "rows": lambda: torch.tensor([[0.1], [0.7]]),
    "elements": lambda: torch.rand(2, 3) + 0.1,
    "float32": lambda: torch.tensor([0.125, 0.5, 1.0], dtype=torch.float32),
    "integers": lambda: torch.tensor([1, 2, 3]),
    "all the same": lambda: torch.full((2, 3), 0.3),
    "with a gradient": lambda: columns(least=0.1).requires_grad_() * 2,
}


def decaying(model: nn.Linear, shape: str) -> tuple[dict[str, Any], Tensor]:
    """Options of LM, for the model as a whole or by groups, and the weights of all parameters: (2, 4)"""
    w = SHAPES[shape]()
    if isinstance(w, float):
        return {"weight_decay": w}, torch.full((2, 4), w)
    weights = torch.cat([w.detach().double().expand(2, 3), torch.full((2, 1), BIAS)], 1)
    return {"params": groups(model, w)}, weights


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), mq.Hessian(), mq.Auto()], ids=str)
def test_ridge_regression(curvature, shape):
    """One step without damping ends at the minimum in closed form, as its model has predicted."""
    model, x, y = linear()
    options, w = decaying(model, shape)

    def losses() -> tuple[float, float]:
        with torch.no_grad():
            data = float(nn.functional.mse_loss(model(x), y))
        return data, data + 0.5 * float((w * table(model).square()).sum())

    data_before, before = losses()
    opt = lm(model, **options, **{**DIRECT, "curvature": curvature})
    step = opt.step(x, y)
    data, loss = losses()
    assert error(table(model), ridge(x, y, w)) < 1e-10
    assert (step.data_loss, step.loss) == pytest.approx((data_before, before), rel=1e-12)
    assert (step.new_data_loss, step.new_loss) == pytest.approx((data, loss), rel=1e-12)
    assert step.gain == pytest.approx(1, abs=1e-10)
    saved = copy.deepcopy(opt.state_dict())["param_groups"][0]["weight_decay"]
    assert torch.equal(torch.as_tensor(saved).double().expand(2, 3), w[:, :3])


@pytest.mark.parametrize("preset", [mq.presets.vanilla, mq.presets.gauss_newton], ids=lambda p: p.__name__)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", ["a number", "columns"])
def test_it_is_in_the_units_of_the_loss_that_is_reported(preset, reduction, shape):
    """Presets minimise ½Σr², and report the loss as it was given."""
    model, x, y = linear()
    loss = nn.MSELoss(reduction=reduction)
    options, w = decaying(model, shape)

    def losses() -> tuple[float, float]:
        with torch.no_grad():
            data = float(loss(model(x), y))
        return data, data + 0.5 * float((w * table(model).square()).sum())

    _, before = losses()
    step = preset(model, loss, schedule=mq.Constant(0.0), **options).step(x, y)
    factor = 2.0 if reduction == "mean" else 2.0 * y.numel()
    assert error(table(model), ridge(x, y, w, factor=factor)) < 1e-10
    assert step.loss == pytest.approx(before, rel=1e-12)
    assert (step.new_data_loss, step.new_loss) == pytest.approx(losses(), rel=1e-12)


CONVERGING = [mq.Auto(), mq.Gram(), mq.Dense(), mq.MatrixFree(), mq.Kronecker()]


@pytest.mark.parametrize(("curvature", "w"), [(mq.Auto(), 0.02), *((c, [[0.01, 0.05]]) for c in CONVERGING)], ids=str)
def test_the_minimum_is_that_of_both_together(curvature, w):
    """A run converges to a point at which the gradient of loss + ½Σwθ² is zero."""
    model, x, y = problem(N=20)
    first, *others = model.parameters()
    w = w if isinstance(w, float) else torch.tensor(w)
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
    assert max(float(g.abs().max()) for g in slopes) < (1e-6 if isinstance(w, float) else 1e-5)
    assert step.loss == pytest.approx(float(total), rel=1e-12)


@pytest.mark.parametrize(
    ("search", "by_element"),
    [(mq.Grid(), False), (mq.Backtracking(), False), (mq.Bracket(), False), (mq.Grid(), True), (mq.Bracket(), True)],
    ids=str,
)
def test_line_searches_see_it(search, by_element):
    """Also all trial points at once: the loss that the search reports is that of its point."""
    model, x, y = problem()
    w, others = (columns(2), 0.0) if by_element else (W, W)
    first, *rest = model.parameters()
    params = [{"params": [first], "weight_decay": w}, {"params": rest, "weight_decay": others}]
    opt = lm(model, params=params, lr=40.0, schedule=mq.Constant(1e-3), line_search=search)
    step = opt.step(x, y)
    assert step.rule == "search"
    with torch.no_grad():
        penalty = 0.5 * ((w * first**2).sum() + others * sum(p.square().sum() for p in rest))
        expected = nn.functional.mse_loss(model(x), y) + penalty
    assert step.new_loss == pytest.approx(float(expected), rel=1e-10)
    together = [] if isinstance(search, mq.Backtracking) else [True]
    assert list(opt._known.batched_trials.values()) == together  # and not one by one, after a pass that was wrong


def as_without_a_recording(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, run: Callable[[nn.Module, bool], list[mq.Step]], close: float
) -> Repeated:
    """The steps of a run on a model and on its twin, with `capture` and without it"""
    twin, recorder = copy.deepcopy(model), Repeated(model)
    with monkeypatch.context() as patch:
        patch.setitem(RECORDERS, "cpu", recorder)
        found = run(model, True)
    for step, plain in zip(found, run(twin, False), strict=True):
        assert step.rule == plain.rule
        for key in ("loss", "new_loss", "data_loss", "new_data_loss", "gain", "lam"):
            assert getattr(step, key) == pytest.approx(getattr(plain, key), rel=1e-7, nan_ok=True), key
    assert error(theta(model), theta(twin)) < close
    return recorder


def batch_of(t: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(t)
    return torch.randn(40, 5, generator=generator), torch.randint(3, (40,), generator=generator)


RECORDED = pytest.mark.parametrize("curvature", [mq.Auto(), mq.Gram(whole=0), mq.Dense()], ids=str)


@RECORDED
def test_recorded_steps(curvature, monkeypatch):
    """The same steps as without a recording; another weight decay is another recording."""

    def run(model: nn.Module, capture: bool) -> list[mq.Step]:
        decay = mq.WeightDecay(0.01, exclude="bias", towards="start")
        parts = {"curvature": curvature, "weight_decay": decay, "radius": 0.5, "capture": capture}
        opt, steps = mq.LM(model, "cross_entropy", **parts), []
        for t in range(24):
            opt.param_groups[0]["weight_decay"] = 0.01 if t < 12 else 0.02
            steps.append(opt.step(*batch_of(t)))
        return steps

    assert as_without_a_recording(monkeypatch, mlp(5, 16, 3), run, 1e-8).replays > 8


@RECORDED
def test_recorded_steps_by_element(curvature, monkeypatch):
    """Other values in the tensor need no other recording."""

    def run(model: nn.Module, capture: bool) -> list[mq.Step]:
        w, (first, *rest) = torch.zeros(1, 5), model.parameters()
        params = [{"params": [first], "weight_decay": w}, {"params": rest, "weight_decay": 0.01}]
        opt, steps = mq.LM(model, "cross_entropy", params=params, curvature=curvature, capture=capture), []
        for t in range(24):
            w.copy_(0.05 * torch.rand(1, 5, generator=torch.Generator().manual_seed(t)) + 0.01)  # in place, and small
            steps.append(opt.step(*batch_of(t)))
        return steps

    recorder = as_without_a_recording(monkeypatch, mlp(5, 16, 3), run, 1e-8)
    assert recorder.replays > 8
    assert recorder.recordings <= 2


def test_recorded_steps_with_other_weights(monkeypatch):
    """The first step with other weights is none that is replayed."""
    model, x, y = sine()

    def run(model: nn.Module, capture: bool) -> list[mq.Step]:
        opt = mq.LM(model, "mse", capture=capture, curvature=mq.Dense(), weight_decay=0.1)
        steps = []
        for k in range(30):
            weigh(opt, 0.1 if k % 10 < 7 else 0.05)
            steps.append(opt.step(x, y))
            assert opt._state.same_data.repeats == k
        return steps

    assert as_without_a_recording(monkeypatch, model, run, 1e-6).replays > 4


def test_every_preset_takes_it():
    x, y = torch.randn(8, 2), torch.randn(8, 3)
    for preset in ("paper", "authors_code", "vanilla", "gauss_newton", "hessian_free", "newton", "kfac"):
        model = mlp(2, 4, 3)
        before = by_hand(model, x, y)
        step = getattr(mq.presets, preset)(model, "mse", weight_decay=W, radius=0.1).step(x, y)
        assert step.loss == pytest.approx(before, rel=1e-10), preset


@pytest.mark.parametrize(
    "curvature", [mq.Dense(), mq.MatrixFree(tolerance=0.0, backtrack=False)], ids=["dense", "free"]
)
def test_several_batches(curvature):
    model, x, y = problem(sizes=(2, 4, 3))
    twin = copy.deepcopy(model)
    one = lm(model, weight_decay=W, curvature=curvature).step(x, y)
    other = lm(twin, weight_decay=W, curvature=curvature).step_over(parts_of(x, y))
    assert one.loss == pytest.approx(other.loss, rel=1e-12)
    assert one.new_loss == pytest.approx(other.new_loss, rel=1e-10)
    assert error(theta(model), theta(twin)) < 1e-8


def test_the_averaged_loss_has_it():
    model, x, y = problem(N=24)
    opt = lm(model, weight_decay=W, average=mq.EMA(0.5), schedule=mq.Constant(0.3))
    for t in range(3):
        step = opt.step(x[6 * t : 6 * t + 6], y[6 * t : 6 * t + 6])
        if t == 1:
            with opt.averaged():
                expected = by_hand(model, x[12:18], y[12:18])
    assert step.averaged_loss == pytest.approx(expected, rel=1e-12)


def test_the_same_data_are_known_by_both_together():
    model, x, y = problem()
    opt = lm(model, weight_decay=W)
    for _ in range(3):
        opt.step(x, y)
    assert opt.state_dict()["marquardt"]["repeats"] == 2


class Idle(nn.Module):
    """A parameter that the outputs do not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.idle = nn.Linear(2, 3), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


EXACT = mq.MatrixFree(tolerance=0.0, backtrack=False)
INERT = [
    mq.Dense(),
    mq.Gram(),
    EXACT,
    mq.Hessian(),
    mq.Kronecker(),
    mq.EKFAC(),
    mq.Auto(),
]


@pytest.mark.parametrize("curvature", INERT, ids=lambda c: type(c).__name__)
def test_parameters_without_influence_decay(curvature):
    """d = −wθ/(w + λ), whatever the data say."""
    model = Idle()
    opt = lm(model, weight_decay=W, curvature=curvature, schedule=mq.Constant(0.1))
    opt.step(torch.randn(6, 2), torch.randn(6, 3))
    assert error(model.idle, torch.full((4,), 0.1 / (W + 0.1))) < 1e-6


class Shifted(Idle):
    """The shift is taken out again, up to rounding."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(self.inner(x) + self.idle[:1], (3,))


@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), EXACT], ids=lambda c: type(c).__name__)
def test_parameters_whose_gradient_is_rounding_decay(curvature):
    model = Shifted()
    opt = lm(model, weight_decay=W, curvature=curvature, schedule=mq.Constant(0.1))
    opt.step(torch.randn(6, 2), torch.randn(6, 3))
    assert error(model.idle, torch.full((4,), 0.1 / (W + 0.1))) < 1e-6


# Which parameters decay, and towards what.


def test_exclusion():
    model, x, y = linear()
    lm(model, weight_decay=mq.WeightDecay(W, exclude="bias"), **DIRECT).step(x, y)
    assert error(table(model), ridge(x, y, torch.tensor([W, W, W, 0.0]))) < 1e-10


def test_towards_the_start():
    model, x, y = linear()
    start, w = table(model), torch.full((4,), W)
    opt = lm(model, weight_decay=mq.WeightDecay(W, towards="start"), **DIRECT)
    step = opt.step(x, y)
    assert step.loss == step.data_loss  # there is nothing to pay at the start
    assert error(table(model), ridge(x, y, w, start)) < 1e-10
    opt.step(x, torch.zeros_like(y))
    assert error(table(model), ridge(x, torch.zeros_like(y), w, start)) < 1e-10  # it stays where it was


@pytest.mark.parametrize("by_name", [True, False])
def test_towards_tensors(by_name):
    model, x, y = linear()
    there = copy.deepcopy(model)
    nn.init.normal_(there.weight)
    tensors = there.state_dict() if by_name else list(there.parameters())
    lm(model, weight_decay=mq.WeightDecay(W, towards=tensors), **DIRECT).step(x, y)
    assert error(table(model), ridge(x, y, torch.full((4,), W), table(there))) < 1e-10


def test_groups():
    """As torch.optim has them: each its weight decay, which may change between steps."""
    model, x, y = linear()
    groups = [{"params": model.bias, "weight_decay": 0}, {"params": [model.weight]}]
    opt = lm(model, params=groups, weight_decay=W, **DIRECT)
    assert [group["weight_decay"] for group in opt.param_groups] == [0, W]
    assert [id(p) for p in opt.params] == [id(model.bias), id(model.weight)]
    opt.step(x, y)
    assert error(table(model), ridge(x, y, torch.tensor([W, W, W, 0.0]))) < 1e-10
    opt.param_groups[0]["weight_decay"] = 0.5
    opt.step(x, y)
    assert error(table(model), ridge(x, y, torch.tensor([W, W, W, 0.5]))) < 1e-10


def test_a_scheduler_of_lr_and_groups():
    model, x, y = problem()
    params = [{"params": model[0].parameters(), "weight_decay": 0.1}, {"params": model[2].parameters()}]
    opt = lm(model, params=params)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    assert opt.step(x, y).lr == 1
    scheduler.step()
    assert opt.step(x, y).lr == 0.5
    opt.param_groups[1]["lr"] = 0.1
    before = world(model, opt)
    with refused("[0.5, 0.1]", "same"):
        opt.step(x, y)
    assert changes(before, world(model, opt)) == []


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), "0.1", None])
def test_a_bad_weight_decay_between_steps(bad):
    model, x, y = problem()
    opt = lm(model, weight_decay=W)
    opt.step(x, y)
    opt.param_groups[0]["weight_decay"] = bad
    before = world(model)
    with refused(f"weight_decay={bad!r}"):
        opt.step(x, y)
    assert changes(before, world(model)) == []


# Saved and recorded.


@pytest.mark.parametrize("curvature", [mq.Auto(), mq.Gram(), mq.Kronecker()], ids=str)
def test_resumes_bit_for_bit(curvature):
    model, x, y = problem()
    decay = mq.WeightDecay(W, exclude="bias", towards="start")
    opt = mq.LM(model, "mse", curvature=curvature, weight_decay=decay)
    for t in range(3):
        opt.step(x, y + 0.1 * t)
    opt.param_groups[0]["weight_decay"] = 0.1
    twin, saved = copy.deepcopy(model), copy.deepcopy(opt.state_dict())
    again = mq.LM(twin, "mse", curvature=curvature, weight_decay=decay)  # from another start, as it seems
    again.load_state_dict(saved)
    assert again.param_groups[0]["weight_decay"] == 0.1
    for t in range(3):
        assert opt.step(x, y - 0.1 * t) == again.step(x, y - 0.1 * t)
    assert torch.equal(theta(model), theta(twin))
    assert same(opt.state_dict(), again.state_dict())


def test_a_state_of_other_anchors_is_refused():
    model, *_ = problem()
    anchored = lm(model, weight_decay=mq.WeightDecay(W, towards="start"))
    free = lm(model, weight_decay=W)
    for opt, other, made in ((anchored, free, "w"), (free, anchored, 'mq.WeightDecay(w, towards="start")')):
        before = world(model, opt)
        with refused("decay towards", f"mq.LM(model, loss, weight_decay={made})"):
            opt.load_state_dict(other.state_dict())
        assert changes(before, world(model, opt)) == []


def test_a_state_from_before_there_was_weight_decay():
    model, x, y = problem()
    opt = lm(model, weight_decay=W)
    saved = opt.state_dict()
    del saved["param_groups"][0]["weight_decay"], saved["marquardt"]["towards"]
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["weight_decay"] == W
    assert opt.step(x, y).accepted


# ---- A weight decay for every element of a parameter: a tensor in a parameter group.


def test_some_elements_need_not_decay():
    model, x, y = linear()
    lm(model, params=groups(model, columns()), **DIRECT).step(x, y)
    assert error(table(model), minimum(x, y, columns())) < 1e-10


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
def test_weights_by_element_resume_bit_for_bit(curvature):
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


# ---- Weight decay whose weights change from step to step: the data stay the same, as do the levels of earlier steps.


def sine(hidden: int = 10) -> tuple[nn.Module, Tensor, Tensor]:
    x = torch.linspace(-1, 1, 40)[:, None]
    return mlp(1, hidden, 1), x, (3 * x).sin() + 0.1 * torch.randn(40, 1)


def weigh(opt: mq.LM, w: float) -> None:
    opt.param_groups[0]["weight_decay"] = w


@pytest.mark.parametrize("w", [1e-3, 0.1])
@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_small_changes_change_little(w, loss):
    """Steps go as with constant weights: the data are told to be the same, and λ, momentum and uphill moves follow."""
    model, x, y = sine()
    if loss == "cross_entropy":
        model, y = mlp(1, 10, 2), (y[:, 0] > 0).long()
    twin = copy.deepcopy(model)
    one, other = (mq.LM(m, loss, weight_decay=w) for m in (model, twin))
    for k in range(12):
        weigh(other, w * (1 + 1e-6 * (k % 3)))
        a, b = one.step(x, y), other.step(x, y)
        assert one._state.same_data.repeats == other._state.same_data.repeats == k
        assert (a.rule, a.lam) == (b.rule, pytest.approx(b.lam))
        assert b.new_loss == pytest.approx(a.new_loss, rel=1e-3)
    assert error(theta(model), theta(twin)) < 1e-2


@pytest.mark.parametrize("towards", [None, "start"])
def test_the_levels_are_those_of_the_new_weights(towards):
    """By hand, where the model is."""
    model, x, y = sine()
    opt = mq.LM(model, "mse", weight_decay=mq.WeightDecay(0.1, towards=towards))
    start = theta(model)

    def penalty(w: float, there: Tensor) -> float:
        return float(0.5 * w * (there - (start if towards else 0)).square().sum())

    for _ in range(6):
        opt.step(x, y)
    data = opt._state.same_data.expected - opt._state.decay
    outliers = replace(opt._state.outliers, height=2.0)
    before = opt._state = replace(opt._state, best=4.5, recent=Recent(7.0), outliers=outliers)

    weigh(opt, 0.02)
    level = Level(1.0, 0.0, 0.0, float(len(x)), penalty(0.02, theta(model)))
    found = reweighted(before, level)
    assert found.same_data.expected == pytest.approx(data + penalty(0.02, theta(model)), rel=1e-12)
    assert found.recent.late - found.best == pytest.approx(2.5)
    step = opt.step(x, y)
    assert opt._state.same_data.repeats == before.same_data.repeats + 1
    assert step.loss == pytest.approx(found.same_data.expected, rel=1e-9)
    assert opt._state.decay == pytest.approx(penalty(0.02, theta(model)), rel=1e-12)


def test_a_state_of_an_earlier_version_goes_on():
    """It does not tell what weight decay had of its loss: the same weights are assumed."""
    model, x, y = sine()
    opt = mq.LM(model, "mse", weight_decay=0.1)
    for _ in range(4):
        opt.step(x, y)
    opt._state = replace(opt._state, decay=None)
    opt.step(x, y)
    assert opt._state.same_data.repeats == 4


def test_the_loss_that_is_expected_is_that_by_hand():
    model, x, y = sine()
    opt = mq.LM(model, "mse", weight_decay=0.3)
    for k in range(8):
        weigh(opt, 0.3 * 10.0 ** (-k % 3))
        want = by_hand(model, x, y, 0.3 * 10.0 ** (-k % 3))
        assert opt.step(x, y).loss == pytest.approx(want, rel=1e-12)
        assert opt._state.same_data.repeats == k


def test_groups_have_weights_of_their_own():
    model, x, y = sine()
    halves = list(model.parameters())[:2], list(model.parameters())[2:]
    opt = mq.LM(model, "mse", params=[{"params": some, "weight_decay": 0.1} for some in halves])
    for k in range(6):
        opt.param_groups[0]["weight_decay"], opt.param_groups[1]["weight_decay"] = 0.1 * 2**k, 0.1 / 3**k
        opt.step(x, y)
        assert opt._state.same_data.repeats == k


def test_from_none_to_some_and_back():
    model, x, y = sine()
    opt = mq.LM(model, "mse")
    for k in range(6):
        weigh(opt, 0.1 * (k % 2))
        opt.step(x, y)
        assert opt._state.same_data.repeats == k


def test_other_data_are_still_told():
    model, x, y = sine()
    opt = mq.LM(model, "mse", weight_decay=0.1)
    for k in range(5):
        weigh(opt, 0.1 / (k + 1))
        opt.step(x, y)
    weigh(opt, 0.05)
    opt.step(x, y + 0.01)
    assert opt._state.same_data.repeats == 0


@pytest.mark.parametrize("w", [1e-3, 10.0])
def test_a_corrupt_batch_stands_out_as_much_if_there_is_no_bound(w):
    """What is doubted of such a loss are differences of losses, which weight decay leaves as they are."""
    truth = torch.tensor([[3.0], [-2.0], [1.0], [2.0]])

    def corrupt(w: float) -> mq.Step:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        opt = mq.LM(model, lambda z, y: (z - y).square().mean() - 3.0, weight_decay=0.1)
        for _ in range(20):
            x = torch.randn(16, 4)
            opt.step(x, x @ truth + torch.randn(16, 1))
        weigh(opt, w)
        return opt.step(x, x @ truth + 1e3)

    usual, step = corrupt(0.1), corrupt(w)
    assert "times those of late" in step.note
    assert step.lam == pytest.approx(usual.lam, rel=1e-6)  # which is multiplied by the doubt


@pytest.mark.parametrize("w", [0.03, 0.0])
def test_it_converges_to_the_new_minimum(w):
    """From where a run with other weights has converged, and as one that had the new weights all along."""
    torch.manual_seed(1)
    x, y = torch.randn(30, 3), torch.randn(30, 2)
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    opt, other = mq.LM(model, "mse", weight_decay=0.5), mq.LM(twin, "mse", weight_decay=w)
    for _ in range(100):
        if opt.step(x, y).converged:
            break
    weigh(opt, w)
    first = opt.step(x, y)
    assert not first.converged
    assert all(any(o.step(x, y).converged for _ in range(100)) for o in (opt, other))
    assert error(theta(model), theta(twin)) < 1e-6


def test_a_saved_run_goes_on_with_other_weights():
    model, x, y = sine()
    opt = mq.LM(model, "mse", weight_decay=0.1)
    for _ in range(5):
        opt.step(x, y)
    file, twin = io.BytesIO(), copy.deepcopy(model)
    torch.save(opt.state_dict(), file)
    file.seek(0)
    other = mq.LM(twin, "mse", weight_decay=0.1)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other._state.decay == opt._state.decay
    for o in (opt, other):
        weigh(o, 0.01)
    assert opt.step(x, y) == other.step(x, y)
    assert other._state.same_data.repeats == 5
    assert torch.equal(theta(model), theta(twin))


def test_weights_by_element_may_change_too():
    """Also in place, and in a run that goes on from a saved state."""
    model, x, y = sine()
    model = mlp(2, 10, 1)
    x = torch.cat((x, torch.randn_like(x)), 1)
    column = torch.tensor([[0.1, 0.2]])
    groups = [
        {"params": [model[0].weight], "weight_decay": column},
        {"params": [model[0].bias, *model[2].parameters()], "weight_decay": 0.1},
    ]
    opt = mq.LM(model, "mse", params=groups)
    for k in range(6):
        column[0, 1] *= 1 + k % 2
        opt.step(x, y)
        assert opt._state.same_data.repeats == k
    file, twin = io.BytesIO(), copy.deepcopy(model)
    torch.save(opt.state_dict(), file)
    file.seek(0)
    parameters = list(twin.parameters())
    other = mq.LM(twin, "mse", params=[{"params": parameters[:1], "weight_decay": 0.1}, {"params": parameters[1:]}])
    other.load_state_dict(torch.load(file, weights_only=True))
    for o in (opt, other):
        o.param_groups[0]["weight_decay"] = torch.tensor([[0.3, 0.0]])
    assert opt.step(x, y) == other.step(x, y)
    assert other._state.same_data.repeats == 6
    assert torch.equal(theta(model), theta(twin))
