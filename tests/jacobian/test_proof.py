"""What counts as proof that the rows of a layer are right, and what is done where there is none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import marquardt as mq
from marquardt.curvature.matrix_free import by_double_backward, by_forward_mode
from support import reference
from support.cases import Fn
from support.cases.models import sorted_by
from support.graph_models import Parts
from support.parts import Always
from support.reference import error
from support.steps import compared, lm, problem, theta

# ---- samples in another order


@pytest.mark.usefixtures("double")
def test_sampled_rows_are_watched_too():
    """A layer that sees the samples in another order for other data."""

    model, x, y = Fn(sorted_by, nn.Linear(2, 4), nn.Linear(4, 3)), *problem()[1:]
    x = x[x[:, 0].argsort()]
    opt = lm(model, rows=mq.Sampled(2), curvature=mq.Dense())
    opt.step(x, y)  # in order: the rule is proven
    twin = copy.deepcopy(model)
    fresh = lm(twin, rows=mq.Sampled(2), curvature=mq.Dense())
    fresh.load_state_dict(opt.state_dict())
    opt.step(x.flip(0), y)
    fresh.step(x.flip(0), y)
    assert error(theta(model), theta(twin)) < 1e-9


DOUBLE = {"dtype": torch.float64}
STEPS: dict[str, Any] = {"acceptance": Always(), "schedule": mq.Constant(1.0), "curvature": mq.Dense()}


# ---- a model that enters autocast


class Mixed(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers(x).float()


MIXED = {
    "mlp": lambda: Mixed(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)),
    "cnn": lambda: Mixed(
        nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 3, 2),
        nn.Flatten(), nn.Linear(12, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), mq.MatrixFree(iterations=15), mq.Kronecker()], ids=str)
def test_autocast_inside_forward(curvature, name):
    model, x = MIXED[name](), torch.randn(64, 8)
    y = torch.sin(x.sum(1, keepdim=True))
    opt = mq.LM(model, "mse", curvature=curvature)
    steps = [opt.step(x, y) for _ in range(25)]
    assert steps[-1].new_loss < 0.3 * steps[0].loss
    assert sum(step.accepted for step in steps) > 5
    lin = mq.linearize(model, "mse", x, y)
    assert set(lin.paths.values()) == {"rule"}
    assert lin.rows().dtype == curvature.represent(mq.linearize(model, "mse", x, y)).gradient.dtype == torch.float32


@pytest.mark.parametrize("way", [by_double_backward, by_forward_mode])
def test_products_under_autocast(way):
    """In the dtype of the parameters, and near those of the same model without autocast."""
    model, x, y = MIXED["mlp"](), torch.randn(32, 8), torch.randn(32, 1)
    v = torch.randn(sum(p.numel() for p in model.parameters()))
    products = []
    for m in (model, model.layers):
        C = mq.MatrixFree().represent(mq.linearize(m, "mse", x, y))
        C._ways, C._way, C._open = [way], None, None
        products.append(C @ v)
    assert products[0].dtype == torch.float32
    assert error(products[0], products[1]) < 0.1


# ---- what was proven is what is run


class Angle(nn.Module):
    """No rule knows its parameter."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.atan2(x, self.scale)


def test_convolution_behind_a_parameter_without_a_rule():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), Angle(1), nn.Conv2d(2, 2, 3), nn.Dropout(0.1), nn.Flatten(), nn.Linear(8, 3)
    )
    x, y = torch.randn(64, 1, 6, 6), torch.randint(0, 3, (64,))
    opt = mq.LM(model, "cross_entropy")
    losses = [opt.step(x, y).new_loss for _ in range(6)]
    assert losses[-1] < losses[0]


def test_one_sample_first():
    model = nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 2)).double()
    x, y = torch.randn(8, 3, **DOUBLE), torch.randn(8, 2, **DOUBLE)
    opt = lm(model, **STEPS)
    for some in (slice(0, 1), slice(None), slice(2, 3), slice(0, 2)):
        compared(opt, x[some], y[some])


class Asking(torch.autograd.Function):
    """Its backward pass asks for a number, which vmap refuses, once it is told to."""

    generate_vmap_rule, asks = True, False

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        return torch.atan2(x, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if Asking.asks:
            g.sum().item()
        x, scale = ctx.saved_tensors
        share = g / (x**2 + scale**2)
        return share * scale, -(share * x).sum(0)


class Own(Angle):
    def forward(self, x: Tensor) -> Tensor:
        return Asking.apply(x, self.scale)


@pytest.mark.parametrize("random", [False, True], ids=["parts", "loop"])
@pytest.mark.parametrize("asks", [(True, True), (False, True)], ids=["always", "later"])
def test_a_backward_pass_that_vmap_refuses(asks, random, monkeypatch):
    """Nor is it an error if it does so after the way to the rows was proven: another one is."""
    model = nn.Sequential(nn.Linear(3, 4), Own(4), nn.Dropout(0.3 if random else 0.0), nn.Linear(4, 2)).double()
    x, y = torch.randn(8, 3, **DOUBLE), torch.randn(8, 2, **DOUBLE)
    opt = lm(model, **STEPS)
    for now in asks:
        monkeypatch.setattr(Asking, "asks", now)
        compared(opt, x, y)


@pytest.mark.parametrize("asks", [(True, True), (False, True)], ids=["always", "later"])
def test_products_that_vmap_refuses(asks, monkeypatch):
    model = nn.Sequential(nn.Linear(3, 4), Own(4), nn.Linear(4, 2)).double()
    x, y = torch.randn(8, 3, **DOUBLE), torch.randn(8, 2, **DOUBLE)
    exact = mq.MatrixFree(tolerance=0.0, warm=0.0, backtrack=False)
    opt = lm(model, **{**STEPS, "curvature": exact})
    for now in asks:
        monkeypatch.setattr(Asking, "asks", now)
        compared(opt, x, y)


# ---- layouts


def recurrent(layout: str) -> nn.Module:
    """The same network on (N, T, E), with its layers fed in one of four layouts."""

    def f(x: Tensor, inner: nn.Module, outer: nn.Module) -> Tensor:
        N, T, _ = x.shape
        x = x.transpose(0, 1) if "time" in layout else x
        h = torch.tanh(inner(x.flatten(0, 1) if "flat" in layout else x))
        return outer(h.view(T, N, -1)).mean(0) if "time" in layout else outer(h.view(N, T, -1)).mean(1)

    return Fn(f, nn.Linear(3, 4), nn.Linear(4, 2))


@pytest.mark.parametrize("layout", ["first", "time", "flat", "flat-time"])
@pytest.mark.parametrize(
    "shapes",
    [
        [(1, 3), (2, 3), (5, 3), (1, 3), (5, 3)],
        [(1, 1), (4, 4), (4, 1), (4, 4), (1, 4), (4, 1), (2, 4)],
        [(5, 1), (5, 3), (3, 3), (3, 5), (6, 2), (2, 6), (1, 6), (6, 1)],
        [(2, 2), (4, 2), (2, 4), (4, 4), (3, 2)],
    ],
    ids=str,
)
def test_layouts(layout, shapes):
    """A proof on one shape never spoils the rows of another; in a batch of one sample all layouts are right."""
    model = recurrent(layout).double()
    opt = lm(model, **STEPS)
    for N, T in shapes * 2:
        x, y = torch.randn(N, T, 3, **DOUBLE), torch.randn(N, 2, **DOUBLE)
        assert set(mq.linearize(model, "mse", x, y).paths.values()) == {"rule"}
        compared(opt, x, y)


@pytest.mark.parametrize("ragged", [True, False], ids=["ragged", "graph"])
def test_what_is_proven_is_not_proven_again(ragged):
    """One batch of one sample and one of several prove all others."""
    model = (recurrent("time") if ragged else Parts()).double()
    opt = lm(model, "mse" if ragged else "residual", **STEPS)

    def work(N: int) -> int:
        x: Any = torch.randn(N, 5, 3, **DOUBLE)
        x = x if ragged else (torch.randn(7, 2, **DOUBLE), torch.randn(4, 2, **DOUBLE))
        with torch.profiler.profile() as found:
            opt.step(x, torch.randn(N, 2, **DOUBLE) if ragged else None)
        return sum(event.count for event in found.key_averages() if "Backward" in event.key)

    first, again = ([work(N) for N in (4, 1, 3)] for _ in range(2))
    assert all(a <= b for a, b in zip(again, first, strict=True))
    assert again[0] < first[0]


# ---- a bias without influence


def attending(plain: bool) -> nn.Module:
    def f(tokens: Tensor, embed: Any, q: Any, k: Any, v: Any, head: Any) -> Tensor:
        x = embed(tokens)
        keys = x @ k.weight.T + k.bias if plain else k(x)  # no rule for a product
        return head((x + F.scaled_dot_product_attention(q(x), keys, v(x))).mean(1))

    return Fn(f, nn.Embedding(12, 8), *(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 3))


def by_torch(tokens: Tensor, embed: Any, attention: Any, head: Any) -> Tensor:
    """Its in_proj_bias holds those of queries, keys and values in one."""
    x = embed(tokens)
    return head(attention(x, x, x, need_weights=False)[0].mean(1))


def before_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.InstanceNorm2d(3, affine=True), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)
    )


MUTE = {
    "norm": (before_norm, {"0.bias": "none"}),
    "attention": (lambda: attending(False), {"k.bias": "none"}),
    "attention by products": (lambda: attending(True), {"k.bias": "none", "k.weight": "graph"}),
    "nn.MultiheadAttention": (
        lambda: Fn(by_torch, nn.Embedding(12, 8), nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)), {},
    ),
}  # fmt: skip


def mute_case(name: str, dtype: torch.dtype, N: int = 32) -> tuple[nn.Module, Tensor, Tensor]:
    x = torch.randn(N, 1, 6, 6, dtype=dtype) if name == "norm" else torch.randint(0, 12, (N, 5))
    return MUTE[name][0]().to(dtype), x, torch.randint(0, 3, (N,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MUTE)
def test_paths_beside_a_bias_without_influence(name, dtype):
    model, x, y = mute_case(name, dtype)
    lin = mq.linearize(model, "cross_entropy", x, y)
    assert {k: path for k, path in lin.paths.items() if path != "rule"} == MUTE[name][1]
    q = reference.quadratic(model.double(), "cross_entropy", x if name != "norm" else x.double(), y)
    J = lin.rows().double()
    assert error(J.T @ J, q.G) < 1e-4
    for k, columns in zip(lin.parameters.names, J.split(lin.parameters.sizes, 1), strict=True):
        if MUTE[name][1].get(k) == "none":
            assert not columns.any()


@pytest.mark.parametrize("rows", [mq.Exact(), mq.Sampled(2)], ids=str)
@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), mq.Gram(chunk=8), mq.MatrixFree()], ids=str)
@pytest.mark.parametrize("name", ["norm", "attention"])
def test_gradient_of_a_bias_without_influence(name, curvature, rows):
    """Exactly zero, once there are rows, and so is its part of the remainder and of the step."""
    model, x, y = mute_case(name, torch.float32)
    lin = mq.linearize(model, "cross_entropy", x, y, rows=rows, chunk=curvature.chunk)
    C = curvature.represent(lin)
    assert C.trace() > 0
    d = C.newton(torch.tensor(1e-6))
    start = lin.parameters.starts[lin.parameters.names.index(next(iter(MUTE[name][1])))]
    for v in (C.gradient, C.lin.gradient, d):
        assert not v[start : start + 3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), mq.MatrixFree(iterations=30)], ids=str)
@pytest.mark.parametrize(
    "damping", [mq.MaxDiagonal(floor=0.0), mq.FactoredMaxDiagonal(), mq.MeanEigenvalue(), mq.LayerMeanEigenvalue()],
    ids=str,
)  # fmt: skip
def test_bias_without_influence_stays(damping, curvature, dtype):
    model, x, y = mute_case("norm", dtype, 16)
    opt = mq.LM(model, "cross_entropy", curvature=curvature, damping=damping)
    bias = model[0].bias.detach().clone()
    for _ in range(30 if isinstance(curvature, mq.Dense) else 10):
        opt.step(x, y)
    assert (model[0].bias - bias).norm() < 0.1


def test_bias_that_gains_influence():
    """A look at later data finds it."""

    class Bias(nn.Module):
        """Without influence while its mean over the sequence is taken off."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer, self.centred = nn.Linear(3, 4), nn.Linear(4, 2), True

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            return self.outer(torch.tanh(h - h.mean(1, keepdim=True) if self.centred else h).square().mean(1))

    model = Bias().double()
    x, y = torch.randn(6, 5, 3, **DOUBLE), torch.randn(6, 2, **DOUBLE)
    assert mq.linearize(model, "mse", x, y).paths["inner.bias"] == "none"
    opt = lm(model, **STEPS)
    for model.centred in (True, False):
        compared(opt, x, y)
