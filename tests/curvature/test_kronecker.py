"""Kronecker factors: against curvlinops, against the exact curvature where they are exact, and against torch.kron."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.parts.direction import factored_maximum
from support import reference
from support.cases import mlp
from support.kronecker import EVERY_NETWORK, build, damped, fresh_batches, represent
from support.modules import PLAIN, SWAPPED, Fn, routed
from support.oracle import kfac_dense
from support.reference import error
from support.steps import theta

ROWS = {"type-2": mq.Exact(), "empirical": mq.Empirical()}


def dense(K) -> Tensor:
    """G by its products: (n, n)"""
    return torch.stack([K @ e for e in torch.eye(K.lin.n, dtype=K.lin.theta.dtype)])


# ---- the factors


@EVERY_NETWORK
@pytest.mark.parametrize("fisher", ROWS)
def test_products_are_those_of_curvlinops(name, fisher):
    pytest.importorskip("curvlinops")
    problem = build(name)
    K, expected = represent(*problem, rows=ROWS[fisher]), kfac_dense(*problem, fisher)
    assert error(dense(K), expected) < 1e-12
    assert error(K.diagonal(), expected.diagonal()) < 1e-12
    assert error(K.trace(), expected.trace()) < 1e-12
    d = torch.randn(K.lin.n, dtype=torch.float64)
    assert error(K.quadratic(d), d @ expected @ d) < 1e-10


@EVERY_NETWORK
@pytest.mark.parametrize("chunk", [None, 2])
def test_the_model_of_the_loss_is_that_of_the_rows(name, chunk):
    """It knows what lies between layers, and of earlier batches nothing."""
    problem = build(name)
    K, q = represent(*problem, chunk=chunk), reference.quadratic(*problem)
    model, loss, x, y = problem
    K.recall(represent(model, loss, 3 * x, y).keep(), same_data=False)
    V = torch.randn(2, K.lin.n, dtype=torch.float64)
    gd, dGd = K.model(V[0])
    assert error(gd, q.g @ V[0]) < 1e-10
    assert error(dGd, V[0] @ q.G @ V[0]) < 1e-10
    assert error(K.products(V), V @ q.G @ V.T) < 1e-10
    assert abs(K.quadratic(V[0]) / dGd - 1) > 1e-3  # as the factors have it


@pytest.mark.parametrize("name", ["linear ce", "conv ce"])
def test_sample_weights_are_repeated_samples(name):
    model, loss, x, y = build(name)
    weight = torch.tensor([1, 3, 0, 2, 1][: len(x)])
    K = represent(model, loss, x, y, weight.double())
    L = represent(model, loss, x.repeat_interleave(weight, 0), y.repeat_interleave(weight, 0))
    assert error(dense(K), dense(L)) < 1e-12


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_exact_for_one_layer_of_squared_error(bias, weighted):
    model, x, y = nn.Linear(3, 2, bias=bias).double(), torch.randn(6, 3).double(), torch.randn(6, 2).double()
    weight = torch.rand(6).double() if weighted else None
    q = reference.quadratic(model, "mse", x, y, weight)
    K = represent(model, "mse", x, y, weight)
    assert error(dense(K), q.G) < 1e-12
    assert error(K.gradient, q.g) < 1e-12


def test_small_blocks_are_exact():
    """Scales of normalisation layers and depthwise convolutions: the block of every output as it is."""
    model = nn.Sequential(
        nn.Conv2d(2, 2, 2, groups=2), nn.GroupNorm(1, 2), nn.Tanh(), nn.Flatten(), nn.LayerNorm(8)
    ).double()  # fmt: skip
    x, y = torch.randn(4, 2, 3, 3).double(), torch.randint(8, (4,))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    q, K = reference.quadratic(model, "cross_entropy", x, y), represent(model, "cross_entropy", x, y)
    assert error(K.diagonal(), q.diagonal()) < 1e-12
    mask = dense(K) != 0
    assert error(dense(K), q.G * mask) < 1e-12
    # Every output: the weights it has and its bias. Two of 4 + 1, two of 1 + 1, eight of 1 + 1.
    assert mask.sum() == 2 * 5**2 + 2 * 2**2 + 8 * 2**2
    D = torch.rand(len(q.g)).double()  # any diagonal can be used here
    assert error(K.newton(D), torch.linalg.solve(q.G * mask + D.diag(), q.g)) < 1e-10


def test_groups_are_layers_of_their_own():
    """A convolution with two groups is two convolutions side by side."""
    both = nn.Conv1d(4, 6, 2, groups=2).double()
    ones = [nn.Conv1d(2, 3, 2).double() for _ in range(2)]
    for k, one in enumerate(ones):
        one.load_state_dict({name: p[3 * k : 3 * k + 3] for name, p in both.state_dict().items()})

    class Side(nn.Module):
        def __init__(self, *parts: nn.Module) -> None:
            super().__init__()
            self.parts = nn.ModuleList(parts)

        def forward(self, x: Tensor) -> Tensor:
            pieces = x.chunk(len(self.parts), 1)
            return torch.cat([part(piece) for part, piece in zip(self.parts, pieces, strict=True)], 1).tanh().mean(2)

    x, y = torch.randn(5, 4, 6).double(), torch.randint(6, (5,))
    K, L = (represent(model, "cross_entropy", x, y) for model in (Side(both), Side(*ones)))

    def moved(v: Tensor) -> Tensor:
        """The parameters of the two in the order of the one."""
        w1, b1, w2, b2 = v.split([12, 3, 12, 3])
        return torch.cat([w1, w2, b1, b2])

    assert error(K.diagonal(), moved(L.diagonal())) < 1e-12
    for damping in (mq.Identity(), mq.FactoredMaxDiagonal()):
        found, expected = (C.newton(0.1 * damping.update(None, C)) for C in (K, L))
        assert error(found, moved(expected)) < 1e-12


def test_embedding():
    """An embedding is a linear layer on one-hot inputs."""
    table = nn.Embedding(7, 3).double()
    tail = nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(12, 4)).double()
    line = nn.Linear(7, 3, bias=False).double()
    line.weight.data = table.weight.data.T.clone()
    tokens, y = torch.randint(5, (6, 4)), torch.randint(4, (6,))  # two tokens never occur
    hot = nn.functional.one_hot(tokens, 7).double()
    K = represent(nn.Sequential(table, tail), "cross_entropy", tokens, y)
    L = represent(nn.Sequential(line, tail), "cross_entropy", hot, y)

    def moved(v: Tensor) -> Tensor:
        return torch.cat([v[:21].view(3, 7).T.flatten(), v[21:]])

    v = torch.randn(K.lin.n).double()
    assert error(K @ moved(v), moved(L @ v)) < 1e-12
    assert error(K.diagonal(), moved(L.diagonal())) < 1e-12
    for A in (mq.Diagonal(torch.tensor(0.1).double()), 0.1 * factored_maximum(None, K, 0.0).positive()):
        assert (K.newton(A)[:21].view(7, 3)[5:] == 0).all()
        assert error(K.gradient @ K.newton(A), K.damped_quadratic(K.newton(A), A)) < 1e-12
    lam = torch.tensor(0.1).double()
    assert error(K.newton(lam), moved(L.newton(lam))) < 1e-12


def test_parameters_that_do_nothing_stay():
    model = nn.Sequential(nn.Linear(3, 2)).double()
    model.spare = nn.Parameter(torch.ones(4).double())
    model.forward = lambda x: model[0](x)
    K = represent(model, "mse", torch.randn(5, 3).double(), torch.randn(5, 2).double())
    i = K.lin.parameters.names.index("spare")
    for A in (torch.tensor(0.1).double(), torch.tensor(0.0).double()):
        assert (K.newton(A).split(K.lin.parameters.sizes)[i] == 0).all()
    D = factored_maximum(None, K, 0.0).positive()
    assert K.newton(D).isfinite().all()


@pytest.mark.parametrize("only", ["weight", "bias"])
def test_frozen_half_of_a_layer(only):
    model = mlp(3, 4, 2).double()
    x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    params = [p for name, p in model.named_parameters() if name.endswith(only)]
    whole, K = represent(model, "mse", x, y), represent(model, "mse", x, y, params=params)
    chosen = torch.cat(
        [torch.full((p.numel(),), name.endswith(only)) for name, p in model.named_parameters()]
    )  # fmt: skip
    assert error(dense(K), dense(whole)[chosen][:, chosen]) < 1e-12
    A = 0.3 * mq.FactoredMaxDiagonal().update(None, K)
    assert error(K.gradient @ K.newton(A), K.damped_quadratic(K.newton(A), A)) < 1e-12


@pytest.mark.parametrize("name", ["linear ce", "conv mse", "tokens ce"])
@pytest.mark.parametrize("rows", [mq.Exact(), mq.Empirical()])
def test_chunks_add_up(name, rows):
    problem = build(name)
    K, L = represent(*problem, rows=rows), represent(*problem, rows=rows, chunk=2)
    lam = torch.tensor(0.01).double()
    assert error(dense(L), dense(K)) < 1e-12
    assert error(L.newton(lam), K.newton(lam)) < 1e-10


@pytest.mark.parametrize("weighted", [True, False])
def test_rows_of_a_part_of_the_batch(weighted):
    """The factors of that part alone, with its own sample weights; the gradient of all."""
    model, loss, x, y = build("linear ce")
    rows = mq.Fraction(0.6)
    index = rows.pick(len(x), 0)
    assert len(index) == 3
    weight = torch.rand(len(x)).double() if weighted else None
    K = represent(model, loss, x, y, weight, rows=rows)
    L = represent(model, loss, x[index], y[index], None if weight is None else weight[index])
    units = 1.0 if weight is None else weight[index].mean() / weight.mean()
    for whole, part in zip(K.layers, L.layers, strict=True):
        assert error(whole.right, part.right) < 1e-12
        assert error(whole.left, part.left * units) < 1e-12
    assert error(K.gradient, reference.quadratic(model, loss, x, y, weight).g) < 1e-12


# ---- from step to step


def optimizer(model=None, **parts) -> mq.LM:
    ours = {
        "curvature": mq.Kronecker(), "damping": mq.Identity(), "momentum": None, "average": None,
        "acceptance": mq.Uphill(), "schedule": mq.GainRatio(),
    }  # fmt: skip
    return mq.LM(model or mlp(3, 5, 3).double(), "cross_entropy", **{**ours, **parts})


def test_running_average():
    """Ā ← β·Ā + (1−β)·A with β = min(1 − 1/k, decay): a plain mean at first."""
    opt = optimizer(curvature=mq.Kronecker(decay=0.6))
    mean = None
    for k, (x, y) in enumerate(fresh_batches(5), start=1):
        found = [(layer.left, layer.right) for layer in represent(opt.model, "cross_entropy", x, y).layers]
        beta = min(1 - 1 / k, 0.6)
        mean = found if mean is None else [
            tuple(beta * old + (1 - beta) * new for old, new in zip(m, f, strict=True))
            for m, f in zip(mean, found, strict=True)
        ]  # fmt: skip
        assert opt.step(x, y).accepted
        kept = opt._state.past
        for name, (B, A) in zip(("0.weight,0.bias", "2.weight,2.bias"), mean, strict=True):
            assert error(kept[f"left of {name}"], B) < 1e-12
            assert error(kept[f"right of {name}"], A) < 1e-12
        assert kept["count"] == k


def test_no_average_on_the_same_data():
    opt = optimizer()
    ((x, y),) = fresh_batches(1)
    for _ in range(6):
        opt.step(x, y)
    here = represent(opt.model, "cross_entropy", x, y)
    assert opt.step(x, y).accepted
    assert opt._state.same_data.repeats > 1
    assert error(opt._state.past["right of 2.weight,2.bias"], here.layers[1].right) < 1e-12


def test_the_gain_ratio_is_that_of_the_batch():
    """On changing batches it praises what fits their noise, though the factors are averaged: λ stops at the floor."""
    opt = optimizer(schedule=mq.GainRatio(floor=0.5), momentum=mq.QuadraticMomentum(), damping=mq.MeanEigenvalue())
    lams = []
    for x, y in fresh_batches(12):
        opt.step(x, y)
        lams.append(opt.lam)
    assert min(lams) == 0.5
    for _ in range(8):
        opt.step(x, y)
    assert opt.lam < 0.5  # on the same data it is exact


def test_every():
    """Decomposed in one step of three; in between the old factors, but always the λ of the step."""
    opt = optimizer(curvature=mq.Kronecker(every=3), schedule=mq.TenFold(factor=1.5), line_search=None)
    solved = []  # the factors of the last decomposition
    for k, (x, y) in enumerate(fresh_batches(7)):
        K = represent(opt.model, "cross_entropy", x, y, every=3)
        K.recall(opt._state.past, same_data=False)
        lam, theta = opt.lam, torch.cat([p.detach().flatten() for p in opt.params])
        if k % 3 == 0:
            solved = [(layer.left, layer.right) for layer in K.layers]
        assert opt.step(x, y).accepted
        d = torch.cat([p.detach().flatten() for p in opt.params]) - theta
        for layer, (left, right) in zip(K.layers, solved, strict=True):
            layer.left, layer.right = left, right
        H = damped(K, lam)
        assert error(-d, torch.linalg.solve(H, K.gradient)) < 1e-9
        assert opt._state.past["age"] == k % 3


def test_every_keeps_momentum_consistent():
    """The H of the momentum is the one that solved, also where it is an old one."""
    opt = optimizer(curvature=mq.Kronecker(every=4), damping=mq.FactoredMaxDiagonal())
    for x, y in fresh_batches(3):
        opt.step(x, y)
    ((x, y),) = fresh_batches(1)
    K = represent(opt.model, "cross_entropy", x, y, every=4)
    K.recall(opt._state.past, same_data=False)
    A = 0.2 * factored_maximum(opt._state.D, K, 0.0)
    d = K.newton(A)
    assert error(K.gradient @ d, K.damped_quadratic(d, A)) < 1e-10
    fresh = represent(opt.model, "cross_entropy", x, y)
    assert error(d, fresh.newton(A)) > 1e-3


# ---- what cannot be


def test_parameters_without_factors_are_named():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).tanh() * self.scale

    x, y = torch.randn(4, 3), torch.randn(4, 2)
    with pytest.raises(ValueError, match=r"'scale'.*mq\.MatrixFree\(\), mq\.Dense\(\) or mq\.Gram\(\)"):
        represent(Own(), "mse", x, y)
    with pytest.raises(ValueError, match="weight_ih_l0"):
        represent(Recurrent(), "mse", torch.randn(4, 5, 3), y)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0][:, -1]


def test_coupled_samples_are_refused():
    with pytest.raises(ValueError, match="BatchNorm"):
        mq.presets.kfac(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), "mse")


# ---- layers without samples, and gradients in another order


@pytest.mark.usefixtures("double")
def test_an_expert_without_samples_has_kronecker_factors():
    model, x, y = routed(4), torch.randn(6, 3), torch.randn(6, 2)
    expert = copy.deepcopy(model[0].parts[0])
    step = mq.LM(model, "mse", curvature=mq.Kronecker(), **PLAIN).step(x, y)
    assert (step.rule, step.note) == ("decrease", "")
    assert torch.equal(theta(model[0].parts[0]), theta(expert))


@pytest.mark.usefixtures("double")
def test_kronecker_takes_the_gradients_of_an_embedding_in_any_order():
    head = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    table, last = nn.Embedding(5, 3), nn.Linear(3, 1)
    plain = nn.Sequential(table, head, Fn(lambda x: x.mean(1)), last)
    swapped = copy.deepcopy(nn.Sequential(table, SWAPPED, head, SWAPPED, Fn(lambda x: x.mean(1)), last))
    x, y = torch.randint(5, (6, 4)), torch.randn(6, 1)
    for model in (plain, swapped):
        mq.LM(model, "mse", curvature=mq.Kronecker(), damping=mq.Identity(), **PLAIN).step(x, y)
    assert error(theta(swapped), theta(plain)) < 1e-10
