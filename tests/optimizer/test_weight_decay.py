"""Weight decay as a part of the objective: what a step minimises, reports, saves and judges."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.recordings import RECORDERS
from support.cases import mlp
from support.recorder import Repeated
from support.reference import error
from support.steps import lm, parts_of, problem, theta
from support.unchanged import changes, refused, same, world

pytestmark = pytest.mark.usefixtures("double")

W = 0.3
DIRECT = {"curvature": mq.Dense(), "damping": mq.Identity(), "schedule": mq.Constant(0.0)}


def by_hand(model: nn.Module, x: Tensor, y: Tensor, w: float = W, loss=nn.functional.mse_loss) -> float:
    """torch's loss + ½w‖θ‖²"""
    with torch.no_grad():
        return float(loss(model(x), y) + 0.5 * w * sum(p.square().sum() for p in model.parameters()))


def ridge(x: Tensor, y: Tensor, w: Tensor, towards: Tensor | None = None, factor: float = 2.0) -> Tensor:
    """The minimum of factor/2·Σ(xθᵀ − y)²/count + ½Σw(θ − θ₀)², the bias as a last column: (outputs, inputs + 1)"""
    X = torch.cat([x, torch.ones(len(x), 1)], 1)
    start = torch.zeros(y.shape[1], X.shape[1]) if towards is None else towards
    H = factor / y.numel() * X.T @ X + w.diag()
    return torch.linalg.solve(H, factor / y.numel() * X.T @ y + w[:, None] * start.T).T


def table(model: nn.Linear) -> Tensor:
    return torch.cat([model.weight, model.bias[:, None]], 1).detach()


def linear() -> tuple[nn.Linear, Tensor, Tensor]:
    return nn.Linear(3, 2), torch.randn(20, 3), torch.randn(20, 2)


@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), mq.Hessian(), mq.Auto()], ids=str)
def test_ridge_regression(curvature):
    """One step without damping ends at the minimum in closed form, as its model has predicted."""
    model, x, y = linear()
    before = by_hand(model, x, y)
    step = lm(model, weight_decay=W, **{**DIRECT, "curvature": curvature}).step(x, y)
    assert error(table(model), ridge(x, y, torch.full((4,), W))) < 1e-10
    assert step.loss == pytest.approx(before, rel=1e-13)
    assert step.new_loss == pytest.approx(by_hand(model, x, y), rel=1e-13)
    assert step.new_data_loss == pytest.approx(by_hand(model, x, y, 0.0), rel=1e-13)
    assert step.data_loss < step.loss
    assert step.gain == pytest.approx(1, abs=1e-10)


@pytest.mark.parametrize("preset", [mq.presets.vanilla, mq.presets.gauss_newton], ids=lambda p: p.__name__)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_it_is_in_the_units_of_the_loss_that_is_reported(preset, reduction):
    """Presets minimise ½Σr², and report the loss as it was given."""
    model, x, y = linear()
    loss = nn.MSELoss(reduction=reduction)
    before = by_hand(model, x, y, loss=loss)
    opt = preset(model, loss, weight_decay=W, schedule=mq.Constant(0.0))
    step = opt.step(x, y)
    factor = 2.0 if reduction == "mean" else 2.0 * y.numel()
    assert error(table(model), ridge(x, y, torch.full((4,), W), factor=factor)) < 1e-10
    assert step.loss == pytest.approx(before, rel=1e-12)
    assert step.new_loss == pytest.approx(by_hand(model, x, y, loss=loss), rel=1e-12)
    assert step.new_data_loss == pytest.approx(by_hand(model, x, y, 0.0, loss), rel=1e-12)


def test_every_preset_takes_it():
    x, y = torch.randn(8, 2), torch.randn(8, 3)
    for preset in ("paper", "authors_code", "vanilla", "gauss_newton", "hessian_free", "newton", "kfac"):
        model = mlp(2, 4, 3)
        before = by_hand(model, x, y)
        step = getattr(mq.presets, preset)(model, "mse", weight_decay=W, radius=0.1).step(x, y)
        assert step.loss == pytest.approx(before, rel=1e-10), preset


def test_the_minimum_is_that_of_both_together():
    """A run converges to a point at which the gradient of loss + ½w‖θ‖² is zero."""
    model, x, y = problem(N=20)
    opt = mq.LM(model, "mse", weight_decay=0.02)
    for _ in range(200):
        step = opt.step(x, y)
        if step.converged:
            break
    assert step.converged
    total = nn.functional.mse_loss(model(x), y) + 0.01 * sum(p.square().sum() for p in model.parameters())
    slopes = torch.autograd.grad(total, list(model.parameters()))
    assert max(float(g.abs().max()) for g in slopes) < 1e-6
    assert step.loss == pytest.approx(float(total), rel=1e-12)


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


@pytest.mark.parametrize("search", [mq.Grid(), mq.Backtracking(), mq.Bracket()], ids=str)
def test_line_searches_see_it(search):
    """Also all trial points at once: the loss that the search reports is that of its point."""
    model, x, y = problem()
    opt = lm(model, weight_decay=W, lr=40.0, schedule=mq.Constant(1e-3), line_search=search)
    step = opt.step(x, y)
    assert step.rule == "search"
    assert step.new_loss == pytest.approx(by_hand(model, x, y), rel=1e-10)
    together = [] if isinstance(search, mq.Backtracking) else [True]
    assert list(opt._known.batched_trials.values()) == together  # and not one by one, after a pass that was wrong


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


@pytest.mark.parametrize("curvature", [mq.Auto(), mq.Gram(whole=0), mq.Dense()], ids=str)
def test_recorded_steps(curvature, monkeypatch):
    """The same steps as without a recording; another weight decay is another recording."""
    model = mlp(5, 16, 3)
    twin, recorder = copy.deepcopy(model), Repeated(model)
    decay = mq.WeightDecay(0.01, exclude="bias", towards="start")
    parts = {"curvature": curvature, "weight_decay": decay, "radius": 0.5}
    with monkeypatch.context() as patch:
        patch.setitem(RECORDERS, "cpu", recorder)
        one = mq.LM(model, "cross_entropy", capture=True, **parts)
        found = []
        for t in range(24):
            one.param_groups[0]["weight_decay"] = 0.01 if t < 12 else 0.02
            generator = torch.Generator().manual_seed(t)
            x, y = torch.randn(40, 5, generator=generator), torch.randint(3, (40,), generator=generator)
            found.append((x, y, one.step(x, y)))
    other = mq.LM(twin, "cross_entropy", capture=False, **parts)
    for t, (x, y, step) in enumerate(found):
        other.param_groups[0]["weight_decay"] = 0.01 if t < 12 else 0.02
        plain = other.step(x, y)
        for key in ("loss", "new_loss", "data_loss", "new_data_loss", "gain", "lam"):
            assert getattr(step, key) == pytest.approx(getattr(plain, key), rel=1e-7), key
    assert error(theta(model), theta(twin)) < 1e-8
    assert recorder.replays > 8
