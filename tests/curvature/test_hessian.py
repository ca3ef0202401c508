"""The full Hessian against torch.func.hessian, and Newton's method."""

from __future__ import annotations

import copy
import math
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian
from torch.nn.attention import SDPBackend, sdpa_kernel

import marquardt as mq
from marquardt.curvature import hessian as module
from marquardt.curvature.direct import FactorizationError
from support import reference
from support.cases import CASES, Problem, build, mlp
from support.reference import error

f64 = torch.float64
# torch's own second derivative of weight_norm is wrong: torch.autograd.gradgradcheck(torch._weight_norm) fails.
# And so is its forward mode of normalisation layers, which torch.func.hessian uses (BatchNorm: pytorch issue 196699),
# and that of embeddings with a padding row, which never learns. These are differentiated backwards twice, and the
# normalisation layers by differences too.
BACKWARDS_TWICE = [
    "embedding_negative_padding",
    "embedding_padding",
    "instance_norm",
    "layer_norm",
    "layer_norm_leading_dims",
    "layer_norm_many_dims",
    "transformer_encoder_layer",
    "transformer_masked",
]
EVERY_CASE = pytest.mark.parametrize("name", [name for name in CASES if name != "weight_norm"])


def represent(p: Problem, chunk=None):
    return mq.Hessian().represent(mq.linearize(p.model, p.loss, p.x, p.y, p.weight, params=p.params, chunk=chunk))


def expected(p: Problem, forwards: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """∇²f by forward mode over reverse mode, or twice backwards where torch.func cannot follow; and ∇f."""
    params = reference.trainable(p.model, p.params)
    sizes = [q.numel() for q in params.values()]

    def f(theta: torch.Tensor) -> torch.Tensor:
        parts = theta.split(sizes)
        at = {k: t.view_as(q) for (k, q), t in zip(params.items(), parts, strict=True)}
        with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
            z = functional_call(p.model, at, *reference.split(p.x))
        return reference.objective(p.loss, z, p.y, p.weight)

    theta = torch.cat([q.detach().reshape(-1) for q in params.values()])
    g = torch.autograd.functional.jacobian(f, theta)
    if forwards:
        try:
            return hessian(f)(theta), g
        except RuntimeError:
            pass
    return torch.autograd.functional.hessian(f, theta), g


@cache
def exact(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return expected(build(name), name not in BACKWARDS_TWICE)


@EVERY_CASE
def test_against_torch(name):
    H, g = exact(name)
    C = represent(build(name))
    assert C.G.dtype == f64
    assert error(C.G, H) < 1e-9
    assert error(C.gradient, g) < 1e-9
    assert error(C.diagonal(), H.diagonal()) < 1e-9
    v = torch.randn(len(g), dtype=f64)
    assert error(C @ v, H @ v) < 1e-9


@pytest.mark.parametrize(
    "name", ["mlp_elu", "ce_weighted", "ce_ignore", "conv2d", "pinn", "lstm", "multihead_attention"]
)
def test_chunks_add_up(name):
    H, g = exact(name)
    C = represent(build(name), chunk=2)
    assert error(C.G, H) < 1e-9
    assert error(C.gradient, g) < 1e-9


def test_batch_norm_in_train_mode():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Tanh(), nn.Linear(4, 2))
    p = Problem(model.double(), "mse", torch.randn(6, 3, dtype=f64), torch.randn(6, 2, dtype=f64))
    H, g = expected(p, forwards=False)
    C = represent(p)
    assert error(C.G, H) < 1e-9
    assert error(C.gradient, g) < 1e-9
    assert error(C.G, by_differences(p)) < 1e-7


def by_differences(p: Problem) -> torch.Tensor:
    """(∇f(θ + h·eᵢ) − ∇f(θ − h·eᵢ)) / 2h"""
    params = list(reference.trainable(p.model, p.params).values())

    def slope() -> torch.Tensor:
        f = reference.objective(p.loss, reference.call(p.model, p.x), p.y, p.weight)
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(f, params)])

    columns = []
    for entries in (q.data.view(-1) for q in params):
        for i, value in enumerate(entries.tolist()):
            entries[i] = value + 1e-5
            above = slope()
            entries[i] = value - 1e-5
            columns.append((above - slope()) / 2e-5)
            entries[i] = value
    return torch.stack(columns, 1)


@pytest.mark.parametrize("name", ["mlp_elu", "ce_weighted", "layer_norm", "layer_norm_many_dims", "instance_norm"])
def test_against_differences(name):
    assert error(represent(build(name)).G, by_differences(build(name))) < 1e-7


def test_one_by_one_where_vmap_refuses(monkeypatch):
    """The same rows from a loop."""
    tried, rows_of = [], module.rows_of

    def refusing(slope, p, params, batched):
        tried.append(batched)
        if batched:
            raise RuntimeError("no batches, please")
        return rows_of(slope, p, params, batched)

    monkeypatch.setattr(module, "rows_of", refusing)
    p = build("mlp_elu")
    assert error(represent(p).G, exact("mlp_elu")[0]) < 1e-9
    assert tried == [True, False, False, False, False]


class Lopsided(torch.autograd.Function):
    """a·b, of which one derivative cannot be differentiated again."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * b.detach(), g * a


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * b, g * a


class Product(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.function = nn.Linear(2, 3).double(), nn.Linear(2, 3).double(), function

    def forward(self, x):
        return self.function.apply(self.a(x), self.b(x))


@pytest.mark.parametrize("curvature", [mq.Hessian(), mq.MatrixFree(hessian=True)], ids=["dense", "products"])
@pytest.mark.parametrize(("function", "words"), [(Lopsided, "not symmetric"), (Once, "cannot be differentiated twice")])
def test_second_derivatives_that_are_none_are_refused(function, words, curvature):
    model = Product(function)
    before = copy.deepcopy(model.state_dict())
    opt = mq.presets.newton(model, "mse", curvature=curvature)
    with pytest.raises(ValueError, match=rf"{words}.*mq.Dense\(\)"):
        opt.step(torch.randn(5, 2, dtype=f64), torch.randn(5, 3, dtype=f64))
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())


# ---- Newton's step


@pytest.mark.parametrize("name", ["mlp_elu", "ce_weighted", "conv2d", "layer_norm", "poisson", "custom_scale"])
def test_newton(name):
    H, g = exact(name)
    lowest = torch.linalg.eigvalsh(H)[0].item()
    C = represent(build(name))
    D = 0.5 + torch.rand(len(g), dtype=f64)
    for A in (torch.tensor(0.1 + max(0.0, -lowest), dtype=f64), (0.1 + max(0.0, -2 * lowest)) * D):
        assert error(C.newton(A), torch.linalg.solve(H + A.expand(len(g)).diag(), g)) < 1e-8
    assert C.notes == []


def saddle() -> Problem:
    """All weights small: the Hessian is indefinite there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.05)
    x = torch.randn(30, 2, dtype=f64)
    return Problem(model, "mse", x, x[:, :1] * x[:, 1:] * 3)


@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e12])
def test_an_indefinite_hessian_does_not_pass(unit):
    """In any units of the loss: jitter that is small beside 1 would be large beside 1e-12."""
    p = saddle()
    p = p._replace(loss=mq.losses.SquaredError(factor=unit))
    C = represent(p)
    lowest = torch.linalg.eigvalsh(C.G)[0].item()
    assert lowest < -1e-3 * unit
    for share in (0.0, 0.5, 1 - 1e-9):
        with pytest.raises(FactorizationError, match="positive definite"):
            C.newton(torch.tensor(-share * lowest, dtype=f64))
    A = -1.01 * lowest
    x = C.newton(torch.tensor(A, dtype=f64))
    assert C.gradient @ x > 0
    assert error((C @ x) + A * x, C.gradient) < 1e-8


@pytest.mark.parametrize("entries", [(1.0, -1e-14), (1e-16, -1e-16), (1.0, 0.0), (1.0, math.nan)])
def test_a_pivot_without_a_sign_does_not_pass(entries):
    C = represent(Problem(mlp(1, 1).double(), "mse", torch.randn(3, 1, dtype=f64), torch.randn(3, 1, dtype=f64)))
    C.G = torch.tensor(entries, dtype=f64).diag()
    with pytest.raises(FactorizationError):
        C.newton(torch.tensor(0.0, dtype=f64))
    C.G = torch.tensor([[1.0, 1.0], [1.0, 1.0]], dtype=f64)  # singular
    with pytest.raises(FactorizationError):
        C.newton(torch.tensor(0.0, dtype=f64))


def test_lam_rises_until_the_hessian_is_positive_definite():
    p = saddle()
    opt = mq.presets.newton(p.model, p.loss, schedule=mq.TenFold(initial=1e-6))
    step = opt.step(p.x, p.y)
    assert step.accepted
    assert "not positive definite" in step.note
    assert "rejected at λ = 1e-06" in step.note
    assert step.lam > 1e-6


def test_newton_converges_quadratically():
    """Logistic regression is convex: the full Hessian is the Gauss-Newton matrix, and the end is Newton's."""
    torch.manual_seed(0)
    x = torch.randn(80, 3, dtype=f64)
    y = torch.randint(3, (80,))
    model = nn.Linear(3, 3).double()
    opt = mq.presets.newton(model, "cross_entropy", schedule=mq.Constant(1e-9))
    norms = []
    for _ in range(8):
        norms.append(represent(Problem(model, "cross_entropy", x, y)).gradient.norm().item())
        opt.step(x, y)
    assert norms[-1] < 1e-8
    gauss_newton = mq.Dense().represent(mq.linearize(model, "cross_entropy", x, y)).G
    assert error(represent(Problem(model, "cross_entropy", x, y)).G, gauss_newton) < 1e-9
    assert any(b < 10 * a**2 < 1e-4 for a, b in pairwise(norms))


@pytest.mark.parametrize("dtype", [torch.float32, f64])
@pytest.mark.parametrize("width", [6, 120])  # below and above what is kept in float64
def test_precision(dtype, width):
    torch.manual_seed(0)
    model = mlp(1, width, 1).to(dtype)
    x = torch.linspace(-2, 2, 40, dtype=dtype)[:, None]
    C = represent(Problem(model, "mse", x, x.sin()))
    assert C.G.dtype == (f64 if width == 6 else dtype)
    A = torch.tensor(1.0, dtype=dtype) + C.diagonal().abs().max()
    found = C.newton(A)
    assert found.dtype == dtype
    H, g = expected(Problem(model.double(), "mse", x.double(), x.double().sin()))
    assert error(found, torch.linalg.solve(H + A.double() * torch.eye(len(g), dtype=f64), g)) < (
        1e-10 if dtype == f64 else 1e-4
    )


# ---- what damping asks for


@pytest.mark.parametrize(
    "damping",
    [mq.Identity(), mq.MeanEigenvalue(), mq.LayerMeanEigenvalue(), mq.MaxDiagonal(), mq.MaxDiagonal(0.0),
     mq.FactoredMaxDiagonal()],
    ids=str,
)  # fmt: skip
def test_damping_is_positive_and_never_falls(damping):
    p = saddle()
    opt = mq.presets.newton(p.model, p.loss, damping=damping)
    D, previous = None, torch.zeros(17, dtype=f64)
    for _ in range(5):
        C = represent(p)
        assert (C.diagonal() < 0).any() or D is not None
        D = damping.update(D, C)
        entries = D.positive().entries(C.lin.parameters.sizes)
        assert (entries > 0).all()
        assert (D.entries(C.lin.parameters.sizes) >= previous).all()
        previous = D.entries(C.lin.parameters.sizes)
        if isinstance(damping, (mq.MaxDiagonal, mq.FactoredMaxDiagonal)):
            assert (previous >= C.diagonal().abs()).all()
        assert opt.step(p.x, p.y).new_loss < math.inf
    assert C.trace() > 0


def test_the_trace_has_no_signs():
    C = represent(saddle())
    assert (C.diagonal() < 0).any()
    assert error(C.trace(), C.diagonal().abs().sum()) < 1e-12


@pytest.mark.parametrize("words", ["CUDA out of memory", "DefaultCPUAllocator: can't allocate memory: 64 bytes"])
def test_memory_that_runs_out_is_not_told_as_a_model_without_second_derivatives(monkeypatch, words):
    def grad(*args, **kwargs):
        raise RuntimeError(words)

    slope = torch.ones(2, requires_grad=True)
    monkeypatch.setattr(torch.autograd, "grad", grad)
    with pytest.raises(RuntimeError, match="memory"):
        module.again(slope, [slope], torch.ones(2))
    with pytest.raises(RuntimeError, match="memory"):
        module.hessian_of([slope], [slope], slope.dtype)
