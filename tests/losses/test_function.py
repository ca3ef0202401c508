"""A function of one's own as a loss: its derivatives, what a scalar means, and which functions are refused."""

from __future__ import annotations

import copy
import functools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, hessian, vmap

import marquardt as mq
from marquardt.losses import Function
from support.cases import mlp
from support.losses import close, image, patterns
from support.steps import lm, problem, theta
from support.unchanged import changes, refused, world

pytestmark = pytest.mark.usefixtures("double")


def squared(z, y):
    return (z - y).square().flatten(1).mean(1)


def cauchy(z, y):
    return (z - y).square().log1p().flatten(1).sum(1)


def coupled_outputs(z, y):
    return ((z - y).flatten(1).sum(1).square() + (z - y).flatten(1).pow(4).sum(1)) / 2


def saddle(z, y):
    return (z[:, 0] * z[:, 1] - y[:, 0]).square() + z.cos().flatten(1).sum(1)


def tails(z, y):
    """No curvature beyond 1, as Huber."""
    return F.huber_loss(z, y, reduction="none").flatten(1).sum(1)


FUNCTIONS = [squared, cauchy, coupled_outputs, saddle, tails]
SHAPES = [(5, 3), (5, 3, 2)]
every_function = pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
every_weight = pytest.mark.parametrize(
    "weight", [None, torch.tensor([0.5, 2.0, 0.0, 1.7, 1.0], dtype=torch.float64)], ids=["plain", "weighted"]
)


def data(fn, shape):
    torch.manual_seed(0)
    z, y = 2 * torch.randn(shape), torch.randn(shape)
    if fn is saddle:
        z, y = z.flatten(1), y.flatten(1)
    return z, y


def absolute(H):
    L, V = torch.linalg.eigh(H)
    return V @ torch.diag_embed(L.abs()) @ V.mT


@every_function
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_weight
def test_derivatives(fn, shape, weight):
    z, y = data(fn, shape)
    loss, w = Function(fn), torch.ones(5) if weight is None else weight
    alone = lambda z, y: fn(z[None], y[None])[0]  # noqa: E731
    g = vmap(grad(alone))(z, y).flatten(1) * w[:, None]
    H = vmap(hessian(alone))(z, y).reshape(5, z[0].numel(), z[0].numel()) * w[:, None, None]
    root = loss.root(z, y, weight)
    close(loss.value(z, y, weight), (w * fn(z, y)).sum())
    close(loss.gradient(z, y, weight), g.reshape(z.shape))
    close(image(root)[:, 0], g, 1e-9)
    close((root.S @ root.S.mT)[:, 0], absolute(H), 1e-10)
    assert loss.count(z[:1], y[:1]) == root.S.shape[-1] * root.S.shape[1]
    rows = loss.mixed(z, y, weight, patterns)  # over all signs the mean of Sεεᵀ Sᵀ is SSᵀ
    close(torch.einsum("knpc,knpd->npcd", rows, rows) / len(rows), root.S @ root.S.mT, 1e-10)


def test_what_lies_outside_the_range_is_the_remainder():
    z, y = torch.tensor([[5.0, 0.5]]), torch.zeros(1, 2)
    S, u, v = Function(tails).root(z, y)
    assert torch.equal(v, torch.tensor([[[1.0, 0.0]]]))
    assert torch.equal((S @ u[..., None])[..., 0], torch.tensor([[[0.0, 0.5]]]))
    assert Function(tails).root(z / 10, y).v is None


def test_sampled_rows_of_many_coupled_outputs(monkeypatch):
    z, y = data(coupled_outputs, (4, 3))
    w = torch.tensor([0.5, 2.0, 0.0, 1.7])
    e = torch.randn(2, 4, 1, 3)
    loss = Function(coupled_outputs)
    monkeypatch.setattr("marquardt.losses.function.FORMED", 2)  # Lanczos
    S = loss.root(z, y, w).S
    true = absolute((S @ S.mT).double())
    L, V = torch.linalg.eigh(true)
    root = V @ torch.diag_embed(L.clamp(min=0).sqrt()) @ V.mT  # |H|^½, the symmetric root
    close(loss.mixed(z, y, w, lambda shape: e), (root @ e[..., None])[..., 0], 1e-7)


# what a scalar means


@every_weight
@pytest.mark.parametrize(
    ("fn", "alike"),
    [
        (lambda z, y: (z - y).square().mean(), "mse"),
        (lambda z, y: (z - y).square().sum(), mq.losses.SquaredError(reduction="sum")),
        (lambda z, y: (z - y).square(), "mse"),
        (lambda z, y: (z - y).square().mean(1), "mse"),
        (functools.partial(F.smooth_l1_loss, beta=100.0), nn.SmoothL1Loss(beta=100.0)),
    ],
    ids=["mean", "sum", "entries", "samples", "partial"],
)
def test_a_step_is_that_of_the_same_loss(fn, alike, weight):
    """f is what the function returns, and so the run is that of the loss by formulas."""
    model, x, y = problem(N=5)
    other = copy.deepcopy(model)
    first, second = lm(model, Function(fn)), lm(other, alike)
    for _ in range(3):
        one, two = first.step(x, y, weight=weight), second.step(x, y, weight=weight)
        assert one.loss == pytest.approx(two.loss, rel=1e-10)
    close(theta(model), theta(other), 1e-8)


@pytest.mark.parametrize("total", [torch.mean, torch.sum], ids=["mean", "sum"])
def test_a_first_batch_of_one_sample(total):
    """Its sample twice tells the mean from the sum."""
    model, x, y = problem(N=6)
    fn = lambda z, y: total((z - y).square())  # noqa: E731
    opt = lm(model, fn)
    for k in (1, 6):
        expected = fn(model(x[:k]), y[:k]).item()
        assert opt.step(x[:k], y[:k]).loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("curvature", [mq.Dense(chunk=2, inertia=0.0), mq.Gram(chunk=2), mq.MatrixFree(tolerance=0)])
def test_every_representation(curvature):
    model, x, y = problem(N=6)
    expected = lm(copy.deepcopy(model), cauchy).step(x, y).new_loss
    assert lm(model, cauchy, curvature=curvature).step(x, y).new_loss == pytest.approx(expected, rel=1e-6)


def test_a_constant_changes_nothing():
    """There is no lower bound that anything could be measured from."""
    runs = []
    for c in (0.0, -5.0):
        torch.manual_seed(0)
        model, x, y = mlp(2, 6, 1), torch.randn(40, 2), None
        y = x.sum(1, keepdim=True).sin()
        opt = mq.LM(model, lambda z, y, c=c: cauchy(z, y) + c)
        runs.append([opt.step(x[k % 4 :: 4], y[k % 4 :: 4]).loss - c for k in range(24)])
        runs[-1] += [opt.step(x, y).loss - c for _ in range(12)]
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)
    assert runs[0][-1] < 0.8 * runs[0][24]


def test_a_corrupt_batch_is_doubted():
    """Also without a bound: its loss is far above those of late, in a loss that is negative throughout."""
    model, x = mlp(2, 6, 1), torch.randn(96, 2)
    y = x.sum(1, keepdim=True).sin() + 0.1 * torch.randn(96, 1)
    opt = mq.LM(model, lambda z, y: squared(z, y) - 1e5)
    for k in range(12):
        step = opt.step(x[8 * k :][:8], y[8 * k :][:8])
        assert "times those of late" not in step.note
    assert "times those of late" in opt.step(x[:8], y[:8] + 100).note


def test_what_a_linearisation_says_of_its_curvature():
    model, x, y = problem()
    for loss, says in [("mse", "hessian"), ("huber", "majoriser"), (squared, "projected hessian")]:
        assert mq.linearize(model, loss, x, y).loss_curvature == says


def test_a_module_and_targets_in_a_dict():
    model, x, y = problem(N=6)
    frozen = Learned().requires_grad_(False)
    expected = frozen(model(x), y).item()
    assert mq.LM(copy.deepcopy(model), frozen).step(x, y).loss == pytest.approx(expected)
    opt = mq.LM(model, lambda z, t: t["scale"] * (z - t["y"]).square().sum(1))
    targets = {"y": y, "scale": torch.rand(6)}
    expected = (targets["scale"] * (model(x) - y).square().sum(1)).mean().item()
    assert opt.step(x, targets).loss == pytest.approx(expected)


def test_equality_and_copies():
    a = Function(squared)
    assert a == Function(squared) != Function(cauchy)
    a.found["sum"] = True
    assert a == Function(squared)
    for other in (copy.deepcopy(a), pickle.loads(pickle.dumps(a))):
        assert other == a
        assert other.found == {"sum": True}


def test_many_outputs_are_no_burden():
    """Auto picks something that works by itself, on changing batches and on the same data."""
    model, x = mlp(3, 4, 80), torch.randn(24, 3)
    y = torch.randn(24, 80)

    def fn(z, y):
        return (z - y).square().mean(1) + 0.1 * (z - y).mean(1).square()

    opt = mq.LM(model, fn)
    steps = [opt.step(x[k % 2 :: 2], y[k % 2 :: 2]) for k in range(6)]
    assert steps[-1].new_loss < steps[0].loss
    assert mq.LM(model, fn, rows=mq.Sampled(1)).step(x, y).accepted


# what is refused, with nothing changed


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.width = nn.Parameter(torch.ones(()))

    def forward(self, z, y):
        return ((z - y) / self.width).square().mean()


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]


def partly_detached(z, y):
    return (z - y).square().sum(1) * (z - y).square().sum(1).detach()


BAD = {
    "couples by the maximum": (lambda z, y: (z - y).square().sum(1) / z.abs().max(), "couples the samples", "per sam"),
    "a scalar that couples": (lambda z, y: (z - y).square().mean().sqrt(), "couples the samples", "of two parts"),
    "a masked mean": (
        lambda z, y: ((z - y).square() * (y > 0)).sum() / (y > 0).sum(),
        "whose mean is",
        "return one value per sample",
    ),
    "shape": (lambda z, y: (z - y).square().sum(0), "returned the shape (3,)", "here (8,)"),
    "no tensor": (lambda z, y: 1.0, "returned float", "one value per sample"),
    "integers": (lambda z, y: (z > y).sum(1), "returned torch.int64"),
    "detached": (lambda z, y: (z - y).square().sum(1).detach(), "without a gradient", ".item()"),
    "targets alone": (lambda z, y: y.square().sum(1), "without a gradient"),
    "partly detached": (partly_detached, "partly_detached", "by differences of its values", ".detach()"),
    "linear": (lambda z, y: (z - y).abs().sum(1), "no curvature", "mq.Empirical()"),
    "random": (lambda z, y: (z - y).square().sum(1) * torch.rand(()), "for the same outputs", "must not be random"),
    "NaN": (lambda z, y: (z - y).square().sum(1) * math.nan, "the loss is nan", "outputs, targets and parameters are"),
    "once": (lambda z, y: Once.apply(z - y).sum(1), "differentiates only once", "mq.Empirical()"),
    "once, squared": (lambda z, y: Once.apply(z - y).square().sum(1), "cannot be differentiated tw", "mq.Empirical()"),
    "once, in part": (lambda z, y: (Once.apply(z - y) + z.square()).sum(1), "by differentiating ell twice"),
    "an endless second derivative": (
        lambda z, y: (z - y).square().sum(1) + (z - z.detach()).abs().pow(1.5).sum(1),
        "second derivative that is not finite, at sample 0",
    ),
    "a fixed size": (lambda z, y: (z - y).square().reshape(8, 3).sum(1), "fails with 1 of them", "any size"),
    "a wrong bound": (Function(squared, low=10.0), "lower_bound", "but 40"),
}


@pytest.mark.parametrize(("fn", "says"), [(v[0], v[1:]) for v in BAD.values()], ids=BAD)
@pytest.mark.parametrize("started", [False, True], ids=["first", "later"])
def test_a_bad_function_is_refused(fn, says, started):
    model, x, y = problem()
    opt = lm(model, squared if started else fn)
    if started:
        opt.step(x, y)
        opt.loss = mq.losses.resolve(fn)
    before = world(model, opt)
    with refused(*says):
        opt.step(x, y)
    assert changes(before, world(model, opt)) == []


def test_a_parameter_of_the_loss_would_not_train():
    with refused("'width'", "would not train", "move it into the model"):
        mq.LM(mlp(2, 3), Learned())


def test_gradients_alone():
    """What has no curvature, or can be differentiated once, still has empirical rows."""
    for fn in (BAD["linear"][0], BAD["once"][0]):
        model, x, y = problem()
        assert lm(model, fn, rows=mq.Empirical()).step(x, y).accepted


def test_a_kink_is_no_contradiction():
    model, x, _ = problem()
    step = lm(model, lambda z, y: (z - y).relu().square().sum(1) + (z - y).square().sum(1)).step(x, model(x).detach())
    assert step.loss == 0
