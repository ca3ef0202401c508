"""What counts as proof that the rows of a layer are right, and what is done where there is none."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import marquardt as mq
from marquardt.curvature.matrix_free import by_double_backward, by_forward_mode
from marquardt.jacobian import passes as jacobian
from marquardt.jacobian import piece as proof
from marquardt.jacobian.passes import Facts
from support import reference
from support.linearized import planned
from support.reference import error
from support.steps import lm, problem, theta

# ---- samples in another order


@pytest.mark.usefixtures("double")
def test_sampled_rows_are_watched_too():
    """A layer that sees the samples in another order for other data."""

    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            order = x[:, 0].argsort()
            return self.head(self.inner(x[order]).tanh()[order.argsort()])

    model, x, y = Sorted(), *problem()[1:]
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
    torch.manual_seed(0)
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
    torch.manual_seed(0)
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
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), Angle(1), nn.Conv2d(2, 2, 3), nn.Dropout(0.1), nn.Flatten(), nn.Linear(8, 3)
    )
    x, y = torch.randn(64, 1, 6, 6), torch.randint(0, 3, (64,))
    opt = mq.LM(model, "cross_entropy")
    losses = [opt.step(x, y).new_loss for _ in range(6)]
    assert losses[-1] < losses[0]
    assert opt._known.proof.general == {2: "rows"}  # not the loop


def test_one_sample_first():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 2)).double()
    x, y = torch.randn(8, 3, **DOUBLE), torch.randn(8, 2, **DOUBLE)
    known = Facts()
    for some in (slice(0, 1), slice(None), slice(2, 3), slice(0, 2)):
        J = planned(model, known, x[some], y[some]).rows()
        assert error(J.T @ J, reference.quadratic(model, "mse", x[some], y[some]).G) < 1e-10


@pytest.mark.parametrize("broken", ["rows_by_vmap", "rows_in_parts"])
def test_path_that_fails_later(broken, monkeypatch):
    """A proven path that fails on other data is no error: another one is proven."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), Angle(4), nn.Linear(4, 2)).double()
    x, y = torch.randn(8, 3, **DOUBLE), torch.randn(8, 2, **DOUBLE)
    known = Facts()
    if broken == "rows_in_parts":
        monkeypatch.setattr(jacobian, "rows_by_vmap", refuse)
    planned(model, known, x, y).rows()
    first = dict(known.proof.general)
    monkeypatch.setattr(jacobian, broken, refuse)
    J = planned(model, known, x, y).rows()
    assert known.proof.general != first
    assert error(J.T @ J, reference.quadratic(model, "mse", x, y).G) < 1e-10


def refuse(*_: object) -> Tensor:
    raise RuntimeError("vmap: it looks like you are calling .item() on a Tensor")


def test_product_that_fails_later(monkeypatch):
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2).double(), torch.randn(8, 3, **DOUBLE), torch.randn(8, 2, **DOUBLE)
    C = mq.MatrixFree().represent(mq.linearize(model, "mse", x, y))
    v, q = torch.randn(8, **DOUBLE), reference.quadratic(model, "mse", x, y)
    assert C._open is not None
    monkeypatch.setattr(C._open, "rows", refuse)
    assert error(C @ v, q.G @ v) < 1e-10
    assert C._way is by_forward_mode


def test_resumed_convolutions_take_the_same_way():
    """The first step of an optimizer goes the way of all others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Conv2d(2, 2, 2), nn.Flatten(), nn.Linear(8, 3))
    x, y = torch.randn(32, 1, 5, 5), torch.randint(0, 3, (32,))
    opt = mq.LM(model, "cross_entropy")
    opt.step(x, y)
    (only,) = opt._known.proofs
    opt.step(x, y)
    assert list(opt._known.proofs) == [only]


# ---- layouts


class Recurrent(nn.Module):
    """The same network on (N, T, E), with its layers fed in one of four layouts."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        N, T, _ = x.shape
        time = "time" in self.layout
        x = x.transpose(0, 1) if time else x
        x = x.flatten(0, 1) if "flat" in self.layout else x
        h = torch.tanh(self.inner(x))
        h = h.view(T, N, -1) if time else h.view(N, T, -1)
        return self.outer(h).mean(0 if time else 1)


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
    torch.manual_seed(0)
    model, known = Recurrent(layout).double(), Facts()
    for N, T in shapes * 2:
        x, y = torch.randn(N, T, 3, **DOUBLE), torch.randn(N, 2, **DOUBLE)
        J = planned(model, known, x, y).rows()
        assert error(J.T @ J, reference.quadratic(model, "mse", x, y).G) < 1e-10, (N, T)
        assert set(planned(model, known, x, y).paths.values()) == {"rule"}


def test_ragged_batches_are_proven_once(monkeypatch):
    torch.manual_seed(0)
    model, known, proofs = Recurrent("time").double(), Facts(), []
    prove = proof._prove
    monkeypatch.setattr(proof, "_prove", lambda J, signature: (proofs.append(J.N), prove(J, signature)))
    for N in (4, 1, 3) * 3:
        planned(model, known, torch.randn(N, 5, 3, **DOUBLE), torch.randn(N, 2, **DOUBLE)).rows()
    assert proofs == [4, 1]


# ---- a bias without influence


class Attention(nn.Module):
    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.embed, self.plain = nn.Embedding(12, 8), plain
        self.q, self.k, self.v, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        k = x @ self.k.weight.T + self.k.bias if self.plain else self.k(x)  # no rule for a product
        return self.head((x + F.scaled_dot_product_attention(self.q(x), k, self.v(x))).mean(1))


class TorchAttention(nn.Module):
    """Its in_proj_bias holds those of queries, keys and values in one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def before_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.InstanceNorm2d(3, affine=True), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)
    )


MUTE = {
    "norm": (before_norm, {"0.bias": "none"}),
    "attention": (Attention, {"k.bias": "none"}),
    "attention by products": (lambda: Attention(True), {"k.bias": "none", "k.weight": "graph"}),
    "nn.MultiheadAttention": (TorchAttention, {}),
}


def mute_case(name: str, dtype: torch.dtype, N: int = 32) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
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

    torch.manual_seed(0)
    model, known = Bias().double(), Facts()
    x, y = torch.randn(6, 5, 3, **DOUBLE), torch.randn(6, 2, **DOUBLE)
    assert planned(model, known, x, y).paths["inner.bias"] == "none"
    model.centred = False
    for _ in range(known.proof.apart):
        lin = planned(model, known, x, y)
        J = lin.rows()
    assert lin.paths["inner.bias"] == "rule"
    assert error(J.T @ J, reference.quadratic(model, "mse", x, y).G) < 1e-10
