"""Weight decay as a part of the objective: what a step minimises, reports, saves and judges."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.recordings import RECORDERS
from support.cases import Fn, mlp
from support.recorder import Repeated
from support.reference import error
from support.steps import Spy, edit, lm, parts_of, problem, state, theta, unharmed
from support.unchanged import refused, same

pytestmark = pytest.mark.usefixtures("double")


W, BIAS = 0.3, 0.2
DIRECT = {"curvature": mq.Dense(), "damping": mq.Identity(), "schedule": mq.Constant(0.0)}
EXACT = mq.MatrixFree(tolerance=0.0, backtrack=False)


def linear() -> tuple[nn.Linear, Tensor, Tensor]:
    return nn.Linear(3, 2), torch.randn(20, 3), torch.randn(20, 2)


def sine() -> tuple[nn.Module, Tensor, Tensor]:
    x = torch.linspace(-1, 1, 40)[:, None]
    return mlp(2, 10, 1), torch.cat((x, x.cos()), 1), (3 * x).sin() + 0.1 * torch.randn(40, 1)


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


def groups(model: nn.Module, w: Any, bias: Any = BIAS) -> list[dict[str, Any]]:
    """The first parameter decays by w"""
    first, *rest = model.parameters()
    return [{"params": [first], "weight_decay": w}, {"params": rest, "weight_decay": bias}]


def of_all(w: Any, bias: Any = BIAS) -> Tensor:
    """w of the weights of `linear`, and that of its bias: (2, 4)"""
    return torch.cat([torch.as_tensor(w).detach().double().expand(2, 3), torch.full((2, 1), bias)], 1)


def weighed(model: nn.Module, w: Any, bias: Any) -> float:
    """½Σwθ² with the weights of `groups`"""
    first, *rest = model.parameters()
    return float(0.5 * ((w * first.detach() ** 2).sum() + bias * sum(p.detach().square().sum() for p in rest)))


def losses(model: nn.Module, x: Tensor, y: Tensor, w: Any, bias: Any, loss: Any = nn.functional.mse_loss) -> Any:
    """That of the data, and with weight decay"""
    with torch.no_grad():
        data = float(loss(model(x), y))
    return data, data + weighed(model, w, bias)


WEIGHTS: dict[str, Callable[[], Any]] = {
    "columns": lambda: columns(least=0.1),
    "a vector": lambda: columns(least=0.1)[0],
    "rows": lambda: torch.tensor([[0.1], [0.7]]),
    "elements": lambda: torch.rand(2, 3) + 0.1,
    "float32": lambda: torch.tensor([0.125, 0.5, 1.0], dtype=torch.float32),
    "integers": lambda: torch.tensor([1, 2, 3]),
    "all the same": lambda: torch.full((2, 3), 0.3),
    "with a gradient": lambda: columns(least=0.1).requires_grad_() * 2,
}


@pytest.mark.parametrize("shape", ["a number", *WEIGHTS])
@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), mq.Hessian(), mq.Auto()], ids=str)
def test_ridge_regression(curvature, shape):
    """One step without damping ends at the minimum in closed form, as its model has predicted."""
    model, x, y = linear()
    w, bias = (W, W) if shape == "a number" else (WEIGHTS[shape](), BIAS)
    options = {"weight_decay": W} if shape == "a number" else {"params": groups(model, w)}
    before = losses(model, x, y, w, bias)
    opt = lm(model, **options, **{**DIRECT, "curvature": curvature})
    step = opt.step(x, y)
    assert error(table(model), ridge(x, y, of_all(w, bias))) < 1e-10
    assert (step.data_loss, step.loss) == pytest.approx(before, rel=1e-12)
    assert (step.new_data_loss, step.new_loss) == pytest.approx(losses(model, x, y, w, bias), rel=1e-12)
    assert step.gain == pytest.approx(1, abs=1e-10)
    saved = copy.deepcopy(opt.state_dict())["param_groups"][0]["weight_decay"]
    assert torch.equal(torch.as_tensor(saved).double().expand(2, 3), of_all(w)[:, :3])


def moved(model: nn.Linear) -> nn.Linear:
    there = copy.deepcopy(model)
    nn.init.normal_(there.weight)
    return there


@pytest.mark.parametrize("kind", ["exclude", "start", "names", "tensors"])
def test_which_parameters_decay_and_towards_what(kind):
    model, x, y = linear()
    there, bias = (model if kind == "start" else moved(model)), 0.0 if kind == "exclude" else W
    towards = {"exclude": None, "start": "start", "names": there.state_dict(), "tensors": list(there.parameters())}
    decay = mq.WeightDecay(W, exclude="bias" if kind == "exclude" else (), towards=towards[kind])
    at = None if kind == "exclude" else table(there)
    opt = lm(model, weight_decay=decay, **DIRECT)
    step = opt.step(x, y)
    assert kind != "start" or step.loss == step.data_loss  # there is nothing to pay at the start
    assert error(table(model), ridge(x, y, of_all(W, bias), at)) < 1e-10
    opt.step(x, -y)
    assert error(table(model), ridge(x, -y, of_all(W, bias), at)) < 1e-10  # it stays where it was


@pytest.mark.parametrize("preset", [mq.presets.vanilla, mq.presets.gauss_newton], ids=lambda p: p.__name__)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("by_element", [False, True])
def test_it_is_in_the_units_of_the_loss_that_is_reported(preset, reduction, by_element):
    """Presets minimise ½Σr², and report the loss as it was given."""
    model, x, y = linear()
    loss, (w, bias) = nn.MSELoss(reduction=reduction), (columns(least=0.1), BIAS) if by_element else (W, W)
    options = {"params": groups(model, w)} if by_element else {"weight_decay": W}
    _, before = losses(model, x, y, w, bias, loss)
    step = preset(model, loss, schedule=mq.Constant(0.0), **options).step(x, y)
    factor = 2.0 if reduction == "mean" else 2.0 * y.numel()
    assert error(table(model), ridge(x, y, of_all(w, bias), factor=factor)) < 1e-10
    assert step.loss == pytest.approx(before, rel=1e-12)
    assert (step.new_data_loss, step.new_loss) == pytest.approx(losses(model, x, y, w, bias, loss), rel=1e-12)


CONVERGING = [mq.Auto(), mq.Gram(), mq.Dense(), mq.MatrixFree(), mq.Kronecker()]


@pytest.mark.parametrize(("curvature", "w"), [(mq.Auto(), 0.02), *((c, [[0.01, 0.05]]) for c in CONVERGING)], ids=str)
def test_the_minimum_is_that_of_both_together(curvature, w):
    """A run converges to a point at which the gradient of loss + ½Σwθ² is zero."""
    model, x, y = problem(N=20)
    first, *others = model.parameters()
    w = w if isinstance(w, float) else torch.tensor(w)
    opt = mq.LM(model, "mse", params=groups(model, w, 0.02), curvature=curvature)
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


SEARCHES = [(search, False) for search in (mq.Grid(), mq.Backtracking(), mq.Bracket())]


@pytest.mark.parametrize(("search", "elements"), [*SEARCHES, (mq.Grid(), True), (mq.Bracket(), True)], ids=str)
def test_line_searches_see_it(search, elements):
    """Also all trial points at once: the loss that the search reports is that of its point."""
    (model, x, y), (w, bias) = problem(), (columns(2), 0.0) if elements else (W, W)
    opt = lm(model, params=groups(model, w, bias), lr=40.0, schedule=mq.Constant(1e-3), line_search=search)
    step = opt.step(x, y)
    assert step.rule == "search"
    assert step.new_loss == pytest.approx(losses(model, x, y, w, bias)[1], rel=1e-10)


def batch_of(t: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(t)
    return torch.randn(40, 5, generator=generator), torch.randint(3, (40,), generator=generator)


def by_number(model: nn.Module, t: int, **parts: Any) -> mq.LM:
    return mq.LM(model, "cross_entropy", weight_decay=mq.WeightDecay(0.01, "bias", "start"), radius=0.5, **parts)


def by_element(model: nn.Module, t: int, **parts: Any) -> mq.LM:
    return mq.LM(model, "cross_entropy", params=groups(model, torch.zeros(1, 5), 0.01), **parts)


def weigh(opt: mq.LM, w: Any) -> None:
    """In place, where it is a tensor"""
    now = opt.param_groups[0]["weight_decay"]
    opt.param_groups[0]["weight_decay"] = now.copy_(w) if isinstance(now, Tensor) else w


RECORDED: dict[str, Any] = {  # the optimizer, its batches, and its weights; curvatures; least replays
    "another weight decay": (by_number, batch_of, lambda t: 0.01 if t < 12 else 0.02, 8),
    "other values in a tensor": (
        by_element, batch_of, lambda t: 0.05 * torch.rand(1, 5, generator=torch.Generator().manual_seed(t)) + 0.01, 8,
    ),
    "other weights on the same data": (by_number, lambda t: batch_of(0), lambda t: 0.1 if t % 10 < 7 else 0.05, 4),
}  # fmt: skip


@pytest.mark.parametrize("curvature", [mq.Auto(), mq.Gram(whole=0), mq.Dense()], ids=str)
@pytest.mark.parametrize("kind", RECORDED)
def test_recorded_steps(kind, curvature, monkeypatch):
    """The same steps as without a recording. Another weight decay is another recording, but not other values in a
    tensor; the first step with other weights on the same data is none that is replayed."""
    make, batch, weight, least = RECORDED[kind]
    model = mlp(5, 16, 3)
    twin, recorder = copy.deepcopy(model), Repeated(model)
    opts = [make(m, 0, curvature=curvature, capture=m is model) for m in (model, twin)]
    for t in range(24):
        found = []
        for opt, device in zip(opts, ("cpu", "none"), strict=True):
            weigh(opt, weight(t))
            with monkeypatch.context() as patch:
                patch.setitem(RECORDERS, device, recorder)
                found.append(opt.step(*batch(t)))
        step, plain = found
        assert step.rule == plain.rule
        for key in ("loss", "new_loss", "data_loss", "new_data_loss", "gain", "lam"):
            assert getattr(step, key) == pytest.approx(getattr(plain, key), rel=1e-7, nan_ok=True), key
        assert state(opts[0])["repeats"] == (t if "same" in kind else 0)
    assert error(theta(model), theta(twin)) < 1e-6
    assert recorder.replays > least
    assert recorder.recordings <= 2 or "tensor" not in kind


@pytest.mark.parametrize(
    "preset", ["paper", "authors_code", "vanilla", "gauss_newton", "hessian_free", "newton", "kfac"]
)
def test_every_preset_takes_it(preset):
    model, x, y = problem()
    _, before = losses(model, x, y, W, W)
    step = getattr(mq.presets, preset)(model, "mse", weight_decay=W, radius=0.1).step(x, y)
    assert step.loss == pytest.approx(before, rel=1e-10)


@pytest.mark.parametrize("curvature", [mq.Dense(), EXACT], ids=["dense", "free"])
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
                _, expected = losses(model, x[12:18], y[12:18], W, W)
    assert step.averaged_loss == pytest.approx(expected, rel=1e-12)


def idle(norm: bool) -> nn.Module:
    """A parameter that the outputs do not depend on; with a norm it is added, and taken out again, up to rounding."""

    def f(x: Tensor, inner: nn.Module, idle: Tensor) -> Tensor:
        return nn.functional.layer_norm(inner(x) + idle[:1], (3,)) if norm else inner(x)

    return Fn(f, nn.Linear(2, 3), nn.Parameter(torch.ones(4)))


INERT = [mq.Dense(), mq.Gram(), EXACT, mq.Hessian(), mq.Kronecker(), mq.EKFAC(), mq.Auto()]


@pytest.mark.parametrize(
    ("curvature", "norm"), [*((c, False) for c in INERT), *((c, True) for c in INERT[:3])], ids=str
)
def test_parameters_without_influence_decay(curvature, norm):
    """d = −wθ/(w + λ), whatever the data say."""
    model = idle(norm)
    opt = lm(model, weight_decay=W, curvature=curvature, schedule=mq.Constant(0.1))
    opt.step(torch.randn(6, 2), torch.randn(6, 3))
    assert error(model.idle, torch.full((4,), 0.1 / (W + 0.1))) < 1e-6


# ---- parameter groups


def test_groups_may_change_between_steps():
    """As torch.optim has them: the value that is there holds from the next step on."""
    model, x, y = linear()
    w = columns(least=0.1)
    opt = lm(model, params=[groups(model, w)[0], {"params": model.bias}], weight_decay=W, **DIRECT)
    assert [group["weight_decay"] for group in opt.param_groups] == [w, W]
    assert [id(p) for p in opt.params] == [id(model.weight), id(model.bias)]
    opt.step(x, y)
    w.mul_(3).add_(0.2)  # in place
    for other, bias in ((w, W), (torch.rand(2, 3), 0), (0.4, 0.5), (columns(), 0.5)):
        opt.param_groups[0]["weight_decay"], opt.param_groups[1]["weight_decay"] = other, bias
        opt.step(x, y)
        assert error(table(model), ridge(x, y, of_all(other, bias))) < 1e-10


def test_a_tensor_for_several_parameters():
    """That broadcasts to each of them; those that are excluded do not decay."""
    model, x, y = linear()
    w = torch.tensor([[0.3], [0.7]])
    wide = nn.Sequential(model, nn.Linear(2, 2, bias=False))
    params = [{"params": [model.weight, wide[1].weight], "weight_decay": w}]
    opt = lm(wide, params=params, weight_decay=mq.WeightDecay(0.0, exclude="1"))
    step = opt.step(x, y)
    assert step.new_loss - step.new_data_loss == pytest.approx(weighed(model, w, 0.0), rel=1e-10)


def test_a_scheduler_of_lr_and_groups():
    model, x, y = problem()
    params = [{"params": model[0].parameters(), "weight_decay": 0.1}, {"params": model[2].parameters()}]
    opt = lm(model, params=params)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    assert opt.step(x, y).lr == 1
    scheduler.step()
    assert opt.step(x, y).lr == 0.5
    opt.param_groups[1]["lr"] = 0.1
    with unharmed(model, opt, "[0.5, 0.1]", "same"):
        opt.step(x, y)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), "0.1", None])
def test_a_bad_weight_decay_between_steps(bad):
    model, x, y = problem()
    opt = lm(model, weight_decay=W)
    opt.step(x, y)
    opt.param_groups[0]["weight_decay"] = bad
    with unharmed(model, None, f"weight_decay={bad!r}"):
        opt.step(x, y)


BAD = {
    "negative": (torch.tensor([0.1, -0.5, 0.0]), ["(3,)", "-0.5", "at least 0"]),
    "NaN": (torch.tensor([[float("nan"), 0.1, 0.1]]), ["(1, 3)", "nan"]),
    "infinite": (torch.tensor([0.1, 0.1, float("inf")]), ["inf", "finite"]),
    "too large": (torch.tensor([1e300, 0.1, 0.1], dtype=torch.float64), ["1e+300", "finite in torch.float32"]),
    "of another shape": (torch.rand(2), ["(2,)", "(2, 3)", "broadcast"]),
    "of more dimensions": (torch.rand(1, 2, 3), ["(1, 2, 3)", "(2, 3)", "broadcast"]),
    "empty": (torch.rand(0), ["(0,)", "(2, 3)", "broadcast"]),
    "flags": (torch.tensor([True, False, True]), ["torch.bool", "real numbers"]),
    "complex": (torch.rand(3, dtype=torch.complex128), ["torch.complex128", "real numbers"]),
    "sparse": (torch.rand(3).to_sparse(), ["sparse", "dense"]),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_it_cannot_be(kind):
    """When LM is made, between steps, and in a state_dict: nothing has changed then."""
    model, x, y = (t.float() for t in linear())
    bad, words = BAD[kind]
    with unharmed(model, None, "group 0", *words):
        lm(model, params=groups(model, bad))
    opt = lm(model, params=groups(model, columns()))
    opt.step(x, y)
    saved = opt.state_dict()
    saved["param_groups"][0]["weight_decay"] = bad
    with unharmed(model, opt, "group 0", *words):
        opt.load_state_dict(saved)
    opt.param_groups[0]["weight_decay"] = bad
    with unharmed(model, None, "group 0", *words):
        opt.step(x, y)


def test_what_is_refused_says_where():
    model, *_ = linear()
    named = [{"params": [model.bias]}, {"params": [model.weight], "weight_decay": torch.rand(2), "name": "inputs"}]
    with refused("group 'inputs'", "(2, 3)"):
        lm(model, params=named)
    for make in (mq.WeightDecay, lambda w: lm(model, weight_decay=w)):  # a model has no tensor
        with refused("(1, 3)", 'params=[{"params": [weight]', "different shapes"):
            make(columns())


def test_what_is_nothing_in_the_precision_of_the_model():
    model, x, y = (t.float() for t in linear())
    opt = mq.LM(model, "mse", params=groups(model, torch.tensor([1e-60, 2e-60, 0.0])), curvature=mq.Gram())
    step = opt.step(x, y)
    assert step.accepted
    assert step.new_loss - step.new_data_loss == pytest.approx(weighed(model, 0.0, BIAS), rel=1e-4)


def test_a_model_that_is_moved():
    """The tensor stays as it was given, and a step takes it as the parameters are now."""
    model, x, y = linear()
    w = columns(least=0.1)
    opt = lm(model.float(), params=groups(model, w.float()), **DIRECT)
    opt.step(x.float(), y.float())
    assert error(table(model).double(), ridge(x, y, of_all(w))) < 1e-5
    model.double()
    opt.step(x, y)
    assert error(table(model), ridge(x, y, of_all(w.float()))) < 1e-10


def test_repr_is_brief():
    model = nn.Linear(1000, 2)
    opt = lm(model, params=groups(model, torch.linspace(0.25, 0.5, 1000)))
    assert "weight_decay=0.25 to 0.5 by element, 0.2, radius" in repr(opt)
    assert len(repr(opt)) < 1500


# ---- saved


@pytest.mark.parametrize("curvature", [mq.Auto(), mq.Gram(), mq.Kronecker()], ids=str)
@pytest.mark.parametrize("kind", ["number", "elements"])
def test_resumes_bit_for_bit(curvature, kind):
    """From a file, a copy or a pickle, and with other weights from then on."""
    model, x, y = problem()
    decay = mq.WeightDecay(W, exclude="bias", towards="start")

    def make(model: nn.Module, w: Any) -> mq.LM:
        given = {"weight_decay": decay} if kind == "number" else {"params": groups(model, w, 0.1)}
        return mq.LM(model, "mse", curvature=curvature, **given)

    w = columns(2)
    opt = make(model, w)
    for t in range(3):
        opt.step(x, y + 0.1 * t)
    if kind == "number":
        opt.param_groups[0]["weight_decay"] = 0.1
    file, saved = io.BytesIO(), opt.state_dict()
    torch.save(saved, file)
    file.seek(0)
    again = make(copy.deepcopy(model), 0.0)  # from another start, as it seems
    again.load_state_dict(torch.load(file, weights_only=True))
    kept = 0.1 if kind == "number" else w.clone()
    assert same(again.param_groups[0]["weight_decay"], kept)
    opts = [opt, again, copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))]
    for t in range(3):
        steps = [other.step(x, y - 0.1 * t) for other in opts]
        assert all(step == steps[0] for step in steps)
    assert same(opt.state_dict(), again.state_dict())
    w.zero_()
    for copied in (saved, opts[2].state_dict(), again.state_dict()):
        assert same(copied["param_groups"][0]["weight_decay"], kept)
    for other in opts[:3]:
        other.param_groups[0]["weight_decay"] = 0.01 if kind == "number" else torch.tensor([[0.3, 0.0]])
    for _ in range(2):
        steps = [other.step(x, y - 0.2) for other in opts[:3]]
        assert steps[0] == steps[1] == steps[2]
    assert [state(other)["repeats"] for other in opts[:3]] == [2] * 3
    assert torch.equal(theta(model), theta(again.model))


def test_a_state_of_other_anchors_is_refused():
    model, *_ = problem()
    anchored = lm(model, weight_decay=mq.WeightDecay(W, towards="start"))
    free = lm(model, weight_decay=W)
    for opt, other, made in ((anchored, free, "w"), (free, anchored, 'mq.WeightDecay(w, towards="start")')):
        with unharmed(model, opt, "decay towards", f"mq.LM(model, loss, weight_decay={made})"):
            opt.load_state_dict(other.state_dict())


def test_a_state_from_before_there_was_weight_decay():
    model, x, y = problem()
    opt = lm(model, weight_decay=W)
    saved = opt.state_dict()
    del saved["param_groups"][0]["weight_decay"], saved["marquardt"]["towards"]
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["weight_decay"] == W
    assert opt.step(x, y).accepted


def test_a_state_of_an_earlier_version_goes_on():
    """It does not tell what weight decay had of its loss: the same weights are assumed."""
    model, x, y = sine()
    opt = mq.LM(model, "mse", weight_decay=0.1)
    for k in range(5):
        edit(opt, decay=None if k == 4 else state(opt)["decay"])
        opt.step(x, y)
    assert state(opt)["repeats"] == 4


# ---- weights that change from step to step: the data stay the same, as do the levels of earlier steps


@pytest.mark.parametrize("w", [1e-3, 0.1])
@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_small_changes_change_little(w, loss):
    """Steps go as with constant weights: the data are told to be the same, and λ, momentum and uphill moves follow."""
    model, x, y = sine()
    if loss == "cross_entropy":
        model, y = mlp(2, 10, 2), (y[:, 0] > 0).long()
    twin = copy.deepcopy(model)
    one, other = (mq.LM(m, loss, weight_decay=w) for m in (model, twin))
    for k in range(12):
        weigh(other, w * (1 + 1e-6 * (k % 3)))
        a, b = one.step(x, y), other.step(x, y)
        assert state(one)["repeats"] == state(other)["repeats"] == k
        assert (a.rule, a.lam) == (b.rule, pytest.approx(b.lam))
        assert b.new_loss == pytest.approx(a.new_loss, rel=1e-3)
    assert error(theta(model), theta(twin)) < 1e-2


CHANGING: dict[str, Callable[[int], tuple[Any, Any]]] = {
    "powers": lambda k: (0.3 * 10.0 ** (-k % 3), 0.3 * 10.0 ** (-k % 3)),
    "groups": lambda k: (0.1 * 2**k, 0.1 / 3**k),
    "from none to some and back": lambda k: (0.1 * (k % 2), 0.1 * (k % 2)),
    "elements": lambda k: (torch.tensor([[0.1, 0.2 * 2 ** (k // 2)]]), 0.1),
}


@pytest.mark.parametrize("kind", CHANGING)
def test_the_loss_that_is_expected_is_that_by_hand(kind):
    """And other data are still told."""
    model, x, y = sine()
    opt = mq.LM(model, "mse", params=groups(model, *CHANGING[kind](0)))
    for k in range(7):
        w, bias = CHANGING[kind](k)
        weigh(opt, w)
        opt.param_groups[1]["weight_decay"] = bias
        data, whole = losses(model, x, y, w, bias)
        step = opt.step(x, y)
        assert (step.data_loss, step.loss) == pytest.approx((data, whole), rel=1e-12)
        assert state(opt)["repeats"] == k
        assert state(opt)["decay"] == pytest.approx(weighed(model, w, bias), rel=1e-12)
    opt.step(x, y + 0.01)
    assert state(opt)["repeats"] == 0


@pytest.mark.parametrize("towards", [None, "start"])
def test_the_levels_are_those_of_the_new_weights(towards):
    """The best loss, that of late and the height of outliers: all rise by as much as f."""
    model, x, y = sine()
    opt = mq.LM(model, "mse", weight_decay=mq.WeightDecay(0.1, towards=towards))
    start = theta(model) if towards else 0
    for _ in range(6):
        opt.step(x, y)
    edit(opt, best=-1.0, late=1.5, height=2.0)
    opt.acceptance = spy = Spy(opt.acceptance, "judge")
    weigh(opt, 0.02)
    by = (0.02 - 0.1) * float(0.5 * (theta(model) - start).square().sum())
    opt.step(x, y)
    trial = spy.calls[0][0]
    assert (trial.best, trial.late) == pytest.approx((by - 1, by + 1.5), rel=1e-12)
    assert state(opt)["height"] == pytest.approx(0.9 * (2 + by), rel=1e-12)


@pytest.mark.parametrize("w", [1e-3, 10.0])
def test_a_corrupt_batch_stands_out_as_much_if_there_is_no_bound(w):
    """What is doubted of such a loss are differences of losses, which weight decay leaves as they are."""
    truth = torch.tensor([[3.0], [-2.0], [1.0], [2.0]])

    def corrupt(w: float) -> mq.Step:
        torch.manual_seed(0)
        opt = mq.LM(nn.Linear(4, 1), lambda z, y: (z - y).square().mean() - 3.0, weight_decay=0.1)
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
    assert any(opt.step(x, y).converged for _ in range(100))
    weigh(opt, w)
    assert not opt.step(x, y).converged
    assert all(any(o.step(x, y).converged for _ in range(100)) for o in (opt, other))
    assert error(theta(model), theta(twin)) < 1e-6
