"""G by products alone, and conjugate gradients: against the dense reference, and against Martens' rules."""

from __future__ import annotations

import copy
import math
import re
from functools import cache

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

import marquardt as mq
import reference
from cases import CASES, Problem, build, mlp
from marquardt.curvature import matrix_free
from marquardt.curvature.conjugate_gradients import conjugate_gradients
from marquardt.curvature.contract import FactorizationError
from marquardt.curvature.products import by_double_backward, by_forward_mode, by_rows
from reference import error

f64 = torch.float64
EVERY_CASE = pytest.mark.parametrize("name", CASES)
HARD_LABELS = ["ce", "ce_weighted", "ce_sum", "conv_batchnorm_classifier", "lstm", "embedding"]
# To the end, from nothing, and what it finds is what it returns.
EXACT = mq.MatrixFree(tolerance=0.0, iterations=2000, warm=0.0, backtrack=False)


def linearize(p: Problem, rows=mq.Exact(), chunk=None):
    return mq.linearize(p.model, p.loss, p.x, p.y, p.weight, params=p.params, rows=rows, chunk=chunk)


def represent(p: Problem, representation=EXACT, rows=mq.Exact(), chunk=None):
    return representation.represent(linearize(p, rows, chunk))


@cache
def expected(name: str, rows: str = "exact") -> reference.Quadratic:
    return reference.quadratic(*build(name), rows=rows)


def vectors(count: int, q: reference.Quadratic) -> torch.Tensor:
    return torch.randn(count, len(q.g), dtype=f64)


def scalar(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=f64)


# ---- products


@EVERY_CASE
@pytest.mark.parametrize("chunk", [None, 2])
def test_products(name, chunk):
    C, q = represent(build(name), chunk=chunk), expected(name)
    assert error(C.gradient, q.g) < 1e-10
    for v in vectors(3, q):
        assert error(C @ v, q.G @ v) < 1e-9
        assert C.quadratic(v).item() == pytest.approx((v @ q.G @ v).item(), rel=1e-9)
    assert C._way is not by_rows  # these can all be differentiated twice


@pytest.mark.parametrize("name", HARD_LABELS)
def test_products_of_empirical_rows(name):
    C, q = represent(build(name), rows=mq.Empirical()), expected(name, "empirical")
    for v in vectors(2, q):
        assert error(C @ v, q.G @ v) < 1e-9
    assert error(-C.newton(scalar(0.1)), q.step(0.1)) < 1e-6


@pytest.mark.parametrize("name", ["mse_weighted", "ce", "bce_pos_weight", "huber", "lstm", "pinn", "custom_scale"])
@pytest.mark.parametrize("chunk", [None, 2])
def test_products_of_sampled_rows(name, chunk):
    rows = mq.Sampled(2)
    J = linearize(build(name), rows, chunk).rows()
    C, q = represent(build(name), rows=rows, chunk=chunk), expected(name)._replace(G=J.T @ J)
    assert error(C.gradient, q.g) < 1e-10
    for v in vectors(2, q):
        assert error(C @ v, q.G @ v) < 1e-9
    assert error(-C.newton(scalar(0.1)), q.step(0.1)) < 1e-6


@EVERY_CASE
def test_diagonal_and_trace(name):
    """From the layer rules; and using them leaves the products alone."""
    C, q = represent(build(name)), expected(name)
    v = vectors(1, q)[0]
    assert error(C.diagonal(), q.diagonal()) < 1e-10
    assert C.trace().item() == pytest.approx(q.G.trace().item(), rel=1e-10)
    assert error(C @ v, q.G @ v) < 1e-9


@pytest.mark.parametrize("name", ["mlp_elu", "batch_norm_2d", "transformer_encoder_layer", "pinn", "lstm", "embedding"])
def test_products_after_a_trial(name):
    """The graph of a chunk is made again where the weights have been somewhere else in between."""
    C, q = represent(build(name)), expected(name)
    v = vectors(1, q)[0]
    C @ v
    C.lin.evaluate(v, 0.1)
    assert error(C @ v, q.G @ v) < 1e-9
    C.lin.move()
    assert error(C @ v, q.G @ v) < 1e-9


@pytest.mark.parametrize("name", ["mlp_elu", "conv_batchnorm_classifier", "pinn", "residual_block_in_place", "ce"])
def test_float32(name):
    p, double, q = build(name, torch.float32), build(name), expected(name)
    for t, exact in zip(p.model.state_dict().values(), double.model.state_dict().values(), strict=True):
        t.copy_(exact)
    x, y, w = (t.float() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in double[2:5])
    C = represent(p._replace(x=x, y=y, weight=w), mq.MatrixFree(tolerance=0.0, backtrack=False))
    v = vectors(1, q)[0]
    for found, exact in [(C @ v.float(), q.G @ v), (-C.newton(torch.tensor(0.1)), q.step(0.1))]:
        assert found.dtype == torch.float32
        assert error(found, exact) < 1e-4


# ---- models


def coupled() -> Problem:
    """BatchNorm in train mode: every output depends on every sample."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ELU(), nn.Linear(4, 3)).double()
    return Problem(model, "cross_entropy", torch.randn(6, 3, dtype=f64), torch.randint(3, (6,)))


def test_batch_norm_in_train_mode():
    p = coupled()
    q = reference.quadratic(*p)
    assert (q.J.view(6, 3, -1)[0] - reference.quadratic(*p._replace(x=p.x[:2], y=p.y[:2])).J.view(2, 3, -1)[0]).any()
    C = represent(p)
    for v in vectors(3, q):
        assert error(C @ v, q.G @ v) < 1e-9
    assert error(-C.newton(scalar(1e-2)), q.step(1e-2)) < 1e-6


def test_batch_norm_buffers_advance_once_per_accepted_step():
    p = coupled()
    once = copy.deepcopy(p.model)
    once(p.x)
    opt = mq.presets.hessian_free(p.model, p.loss)
    step = opt.step(p.x, p.y)
    assert step.accepted
    assert error(p.model[1].running_var, once[1].running_var) < 1e-12
    assert p.model[1].num_batches_tracked == 1
    losses = [opt.step(p.x, p.y).new_loss for _ in range(20)]
    assert losses[-1] < 0.5 * step.loss


def test_dropout_sees_the_same_units():
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2)).double()
    p = Problem(model, "mse", torch.randn(5, 3, dtype=f64), torch.randn(5, 2, dtype=f64))
    state = torch.get_rng_state()
    q = reference.quadratic(*p)
    torch.set_rng_state(state)
    C = represent(p)
    v = vectors(1, q)[0]
    assert error(C @ v, q.G @ v) < 1e-9
    C.lin.evaluate(v, 0.1)
    assert error(C @ v, q.G @ v) < 1e-9


def test_random_slopes():
    model = nn.Sequential(nn.Linear(3, 8), nn.RReLU(), nn.Linear(8, 2)).double()
    p = Problem(model, "mse", torch.randn(5, 3, dtype=f64), torch.randn(5, 2, dtype=f64))
    state = torch.get_rng_state()
    dense = mq.Dense().represent(linearize(p)).G
    torch.set_rng_state(state)
    C = represent(p)
    v = torch.randn(len(dense), dtype=f64)
    assert error(C @ v, dense @ v) < 1e-9
    C.lin.evaluate(v, 0.1)
    assert error(C @ v, dense @ v) < 1e-9


class OnceOnly(torch.autograd.Function):
    """x³, differentiable once; with a rule for forward mode."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g

    @staticmethod
    def jvp(ctx, t):
        return 3 * ctx.saved_tensors[0] ** 2 * t


class Detached(torch.autograd.Function):
    """x³ with a backward pass that autograd takes for a constant, and no rule for forward mode."""

    @staticmethod
    def forward(ctx, x):
        ctx.slope = 3 * x.detach() ** 2
        return x**3

    @staticmethod
    def backward(ctx, g):
        return (ctx.slope * g.detach()).detach()


class Cubed(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.head, self.function = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), function

    def forward(self, x):
        return self.head(self.function.apply(self.first(x)) if self.function else self.first(x) ** 3)


@pytest.mark.parametrize(("function", "way"), [(OnceOnly, by_forward_mode), (Detached, by_rows)])
@pytest.mark.parametrize("chunk", [None, 2])
def test_operations_that_are_differentiable_once(function, way, chunk):
    model = Cubed(function)
    x, y = torch.randn(5, 3, dtype=f64), torch.randn(5, 2, dtype=f64)
    C = represent(Problem(model, "mse", x, y), chunk=chunk)
    model.function = None
    q = reference.quadratic(model, "mse", x, y)
    model.function = function
    v = vectors(1, q)[0]
    assert error(C @ v, q.G @ v) < 1e-9
    assert C._way is way
    assert error(-C.newton(scalar(0.1)), q.step(0.1)) < 1e-6
    opt = mq.presets.hessian_free(model, "mse")
    assert opt.step(x, y).accepted


@pytest.mark.parametrize(
    "name", ["mlp_elu", "batch_norm_1d", "conv2d", "embedding", "pinn", "custom_scale", "tied_linears"]
)
def test_every_way_gives_the_same(name):
    p, q = build(name), expected(name)
    v = vectors(1, q)[0]
    for way in (by_double_backward, by_forward_mode, by_rows):
        C = represent(p)
        C._way, C._open = way, None
        C.lin.chunk = len(q.z)  # so that it is linearised again
        assert error(C @ v, q.G @ v) < 1e-9, way.__name__


def test_a_coupled_operation_that_is_differentiable_once_is_refused():
    model = nn.Sequential(Cubed(Detached), nn.BatchNorm1d(2).double())
    with pytest.raises(ValueError, match=r"no product Gv.*by forward mode:.*by rows: .*couples the samples"):
        represent(Problem(model, "mse", torch.randn(5, 3, dtype=f64), torch.randn(5, 2, dtype=f64)))


class NeedsGrad(nn.Module):
    """A residual u' that is computed without asking for gradients to be on."""

    def __init__(self):
        super().__init__()
        self.u = mlp(1, 6, 1).double()

    def forward(self, x):
        x = x.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(self.u(x).sum(), x, create_graph=True)
        return slope - x.detach().cos()


@pytest.mark.parametrize("precondition", [0.75, None])
def test_trials_of_a_model_that_differentiates_itself(precondition):
    opt = mq.presets.hessian_free(NeedsGrad(), "residual", curvature=mq.MatrixFree(precondition=precondition))
    x = torch.linspace(-2, 2, 20, dtype=f64)[:, None]
    steps = [opt.step(x) for _ in range(30)]
    assert steps[-1].new_loss < 0.2 * steps[0].loss


# ---- the solve


@EVERY_CASE
def test_newton(name):
    C, q = represent(build(name)), expected(name)
    size = torch.linalg.matrix_norm(q.G, 2)
    D = q.diagonal() + 0.01 * size * (1 + torch.rand(len(q.g), dtype=f64))
    for lam in (1.0, 1e-3):
        for A in (lam * size, lam * D):
            assert error(-C.newton(A), q.step(A)) < 1e-6


@pytest.mark.parametrize("name", ["mlp_elu", "conv2d_strided", "ce_weighted", "lstm"])
@pytest.mark.parametrize("precondition", [None, 0.5, 1.0])
def test_preconditioners_change_the_way_not_the_end(name, precondition):
    q = expected(name)
    options = mq.MatrixFree(tolerance=0.0, iterations=2000, backtrack=False, precondition=precondition)
    assert error(-represent(build(name), options).newton(scalar(1e-2)), q.step(1e-2)) < 1e-6
    few = mq.MatrixFree(tolerance=0.0, iterations=3, backtrack=False, precondition=precondition)
    default = mq.MatrixFree(tolerance=0.0, iterations=3, backtrack=False)
    assert error(*(represent(build(name), o).newton(scalar(1e-2)) for o in (few, default))) > 1e-3


@pytest.mark.parametrize(
    "name", ["mlp_elu", "ce_weighted", "conv2d", "batch_norm_2d", "ce_ignore", "multihead_attention"]
)
def test_chunks_are_the_whole(name):
    # Without a preconditioner, which draws other signs in every chunk, also where CG stops early; without backtracking,
    # whose comparison of two converged iterates is a matter of rounding.
    for options in (EXACT, mq.MatrixFree(precondition=None, backtrack=False)):
        whole, chunked = (represent(build(name), options, chunk=chunk).newton(scalar(0.1)) for chunk in (None, 2))
        assert error(chunked, whole) < 1e-6


def test_step_over_is_the_step_on_everything():
    p = build("ce")
    twin = copy.deepcopy(p.model)
    curvature = mq.MatrixFree(tolerance=0.0, iterations=500, backtrack=False)
    whole = mq.presets.hessian_free(p.model, p.loss, curvature=curvature).step(p.x, p.y)
    over = mq.presets.hessian_free(twin, p.loss, curvature=curvature).step_over(
        [(p.x[:2], p.y[:2]), (p.x[2:], p.y[2:])]
    )
    assert over.accepted
    assert over.new_loss == pytest.approx(whole.new_loss, rel=1e-9)
    assert error(reference_theta(twin), reference_theta(p.model)) < 1e-8


def reference_theta(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_model_of_the_step_costs_no_product(monkeypatch):
    q = expected("mlp_elu")
    C = represent(build("mlp_elu"), mq.MatrixFree())
    d = C.newton(scalar(1e-3)).neg_()
    monkeypatch.setattr(C, "_parts", None)  # any product fails now
    gd, dGd = C.model(d)
    assert gd.item() == pytest.approx((q.g @ d).item(), rel=1e-9)
    assert dGd.item() == pytest.approx((d @ q.G @ d).item(), rel=1e-7)
    monkeypatch.undo()
    for other in (-d, 0.5 * d):
        gd, dGd = C.model(other)
        assert gd.item() == pytest.approx((q.g @ other).item(), rel=1e-9)
        assert dGd.item() == pytest.approx((other @ q.G @ other).item(), rel=1e-9)


def spectrum(n: int, low: float) -> torch.Tensor:
    """A symmetric matrix with eigenvalues from 1 down to `low`."""
    Q, _ = torch.linalg.qr(torch.randn(n, n, dtype=f64))
    return Q @ torch.logspace(0, math.log10(low), n, dtype=f64).diag() @ Q.T


@pytest.mark.parametrize("tolerance", [5e-4, 5e-3, 1e-6])
@pytest.mark.parametrize("M", [False, True])
def test_stopping_rule(tolerance, M):
    """The first i > k with φᵢ < 0 and (φᵢ − φᵢ₋ₖ)/φᵢ < kε; φ written out, of every iterate."""
    n = 120
    H, g = spectrum(n, 1e-3), torch.randn(n, dtype=f64)
    D = (0.5 + torch.rand(n, dtype=f64)) if M else None

    def phi(i: int) -> float:
        (*_, last), _ = conjugate_gradients(lambda v: H @ v, g, D, None, i, 0.0)
        assert last.number == i
        return (0.5 * last.x @ H @ last.x - g @ last.x).item()

    (*_, last), curved = conjugate_gradients(lambda v: H @ v, g, D, None, 1000, tolerance)
    stopped = last.number
    assert not curved
    assert 10 < stopped < 200
    phis = [phi(i) for i in range(stopped + 1)]

    def stops(i: int) -> bool:
        k = max(10, math.ceil(0.1 * i))
        return i > k and phis[i] < 0 and (phis[i] - phis[i - k]) / phis[i] < k * tolerance

    assert stops(stopped)
    assert not any(stops(i) for i in range(1, stopped))


def test_iterations_are_a_limit():
    C = represent(build("conv2d"), mq.MatrixFree(tolerance=0.0, iterations=3, backtrack=False))
    C.newton(scalar(1e-6))
    assert C.notes == ["3 CG iterations"]
    C = represent(build("conv2d"), mq.MatrixFree(iterations=1))
    C.newton(scalar(1e-6))
    assert C.notes == ["1 CG iteration"]


def test_conjugate_gradients_end_at_the_solution():
    H, g = spectrum(20, 1e-2), torch.randn(20, dtype=f64)
    (*_, last), curved = conjugate_gradients(lambda v: H @ v, g, None, None, 10_000, 0.0)
    assert not curved
    assert last.number < 60
    assert error(last.x, torch.linalg.solve(H, g)) < 1e-12
    assert last.gx == pytest.approx((g @ last.x).item())
    assert last.xHx == pytest.approx((last.x @ H @ last.x).item())
    (*_, nothing), _ = conjugate_gradients(lambda v: H @ v, 0 * g, None, None, 100, 0.0)
    assert (nothing.number, nothing.x.any().item()) == (0, False)


def test_iterates_are_kept_at_growing_distances():
    H, g = spectrum(200, 1e-6), torch.randn(200, dtype=f64)
    iterates, _ = conjugate_gradients(lambda v: H @ v, g, None, None, 30, 0.0)
    assert [it.number for it in iterates] == [1, 2, 3, 4, 5, 7, 9, 11, 14, 18, 24, 30]
    for it in iterates:
        (alone,), _ = conjugate_gradients(lambda v: H @ v, g, None, None, it.number, 0.0, keep=False)
        assert error(it.x, alone.x) < 1e-12
        assert it.xHx == pytest.approx((it.x @ H @ it.x).item())


# ---- warm start


def test_warm_start_from_the_solution_is_the_end():
    q, A = expected("ce_weighted"), scalar(0.1)
    C = represent(build("ce_weighted"), mq.MatrixFree(warm=1.0))
    C.recall({"x": -q.step(A)}, 1, False)
    assert error(-C.newton(A), q.step(A)) < 1e-12
    assert int(C.notes[0].split()[0]) <= 2  # all rounding
    cold = represent(build("ce_weighted"), mq.MatrixFree(warm=1.0))
    cold.newton(A)
    assert int(cold.notes[0].split()[0]) > 10


def test_warm_start_is_a_share_of_the_last_solution():
    A, options = scalar(0.1), mq.MatrixFree(warm=0.5, tolerance=0.0, iterations=1, precondition=None)
    q = expected("ce_weighted")
    x = -q.step(A)
    C = represent(build("ce_weighted"), options)
    C.recall({"x": x}, 1, False)
    H, r = q.damped(A), q.g - 0.5 * q.damped(A) @ x
    assert error(C.newton(A), 0.5 * x + (r @ r) / (r @ H @ r) * r) < 1e-10
    assert error(C.keep()["x"], 0.5 * x + (r @ r) / (r @ H @ r) * r) < 1e-10


def test_a_start_that_is_worse_than_none_is_dropped():
    A = scalar(0.1)
    for start in (q_start := -10 * expected("ce_weighted").g, q_start * math.nan):
        C = represent(build("ce_weighted"))
        warm = represent(build("ce_weighted"), mq.MatrixFree(tolerance=0.0, iterations=2000, warm=1.0, backtrack=False))
        warm.recall({"x": start}, 1, False)
        assert error(warm.newton(A), C.newton(A)) < 1e-12


def test_the_next_step_starts_where_the_last_one_ended():
    p = build("ce_weighted")
    opt = mq.presets.hessian_free(p.model, p.loss)
    assert opt.step(p.x, p.y, p.weight).accepted
    assert opt._state.past["x"].any()
    assert opt._state.past["x"].shape == (sum(q.numel() for q in p.model.parameters()),)


@pytest.mark.parametrize("dtype", [torch.float32, f64])
def test_state_dict_resumes_bit_for_bit(dtype, tmp_path):
    torch.manual_seed(1)
    model = mlp(2, 6, 3).to(dtype)
    x, y = torch.randn(30, 2, dtype=dtype), torch.randint(3, (30,))
    opt = mq.presets.hessian_free(model, "cross_entropy")
    for i in range(4):
        opt.step(x[i::4], y[i::4])
    torch.save([model.state_dict(), opt.state_dict()], tmp_path / "state.pt")
    twin = mlp(2, 6, 3).to(dtype)
    resumed = mq.presets.hessian_free(twin, "cross_entropy")
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    twin.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert torch.equal(resumed._state.past["x"], opt._state.past["x"])
    for i in range(4):
        assert opt.step(x[i::4], y[i::4]) == resumed.step(x[i::4], y[i::4])
    assert torch.equal(reference_theta(model), reference_theta(twin))


# ---- backtracking


def steep() -> Problem:
    """A network of which the quadratic model promises too much: full steps overshoot."""
    torch.manual_seed(3)
    model = mlp(2, 8, 8, 1).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.5)
    x = torch.randn(40, 2, dtype=f64)
    return Problem(model, "mse", x, (3 * x[:, :1]).sin() * 4)


def test_backtracking_takes_the_best_on_the_way_back(monkeypatch):
    p, A = steep(), scalar(1e-6)
    seen = []

    def recorded(*args, **kwargs):
        seen.append(conjugate_gradients(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(matrix_free, "conjugate_gradients", recorded)
    C = represent(p, mq.MatrixFree(tolerance=1e-6))
    theta = reference_theta(p.model)
    x = C.newton(A)
    assert torch.equal(reference_theta(p.model), theta)  # the model is back where it was

    def loss(x):
        nn.utils.vector_to_parameters(theta - x, p.model.parameters())
        f = nn.functional.mse_loss(p.model(p.x), p.y).item()
        nn.utils.vector_to_parameters(theta, p.model.parameters())
        return f

    iterates = seen[0][0]
    losses = [loss(it.x) for it in iterates]
    best = len(losses) - 1
    while best > 0 and losses[best - 1] < losses[best]:
        best -= 1
    assert losses[best] < losses[-1]  # the last one is worse: there is something to find
    assert torch.equal(x, iterates[best].x)
    assert C.notes == [f"{iterates[-1].number} CG iterations, back to iteration {iterates[best].number}"]
    assert torch.equal(C.keep()["x"], iterates[-1].x)  # the next one starts from where this one ended
    gd, dGd = C.model(-x)
    assert gd.item() == pytest.approx(-(C.gradient @ x).item(), rel=1e-9)
    assert dGd.item() == pytest.approx(C.quadratic(x).item(), rel=1e-6)
    full = represent(p, mq.MatrixFree(tolerance=1e-6, backtrack=False))
    assert loss(full.newton(A)) > loss(x)


def test_backtracking_leaves_what_overflows(monkeypatch):
    C = represent(build("conv2d"), mq.MatrixFree(tolerance=0.0, precondition=None))
    losses = iter([math.nan, math.inf, 2.0, 1.0, 3.0])
    monkeypatch.setattr(C.lin, "evaluate", lambda d, lr: scalar(next(losses)))
    C.newton(scalar(1e-3))
    numbers = [int(n) for n in re.findall(r"\d+", C.notes[0])]
    assert "back to iteration" in C.notes[0]
    kept = [k for k in (1, 2, 3, 4, 5, 7, 9, 11, 14, 18, 24, 31) if k < numbers[0]]
    assert numbers[1] == kept[-3]


# ---- negative curvature


def test_negative_curvature_at_first_gives_the_preconditioned_gradient():
    H, g = torch.tensor([-1.0, 2.0], dtype=f64).diag(), torch.tensor([3.0, 0.5], dtype=f64)
    M = torch.tensor([2.0, 1.0], dtype=f64)
    (only,), curved = conjugate_gradients(lambda v: H @ v, g, M, None, 10, 0.0)
    p = g / M
    assert curved
    assert error(only.x, (g @ p) / -(p @ H @ p) * p) < 1e-12
    assert only.xHx == pytest.approx((only.x @ H @ only.x).item())
    assert only.gx == pytest.approx((g @ only.x).item())


def test_negative_curvature_later_gives_the_last_iterate():
    H = torch.tensor([4.0, 3.0, -0.1], dtype=f64).diag()
    g = torch.tensor([1.0, 1.0, 0.3], dtype=f64)
    iterates, curved = conjugate_gradients(lambda v: H @ v, g, None, None, 10, 0.0)
    alone, _ = conjugate_gradients(lambda v: H @ v, g, None, None, iterates[-1].number, 0.0)
    assert curved
    assert iterates[-1].number >= 1
    assert error(iterates[-1].x, alone[-1].x) < 1e-12


def indefinite() -> Problem:
    """Near a saddle point: the Hessian has negative eigenvalues, the Gauss-Newton matrix has none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.05)
    x = torch.randn(30, 2, dtype=f64)
    return Problem(model, "mse", x, x[:, :1] * x[:, 1:] * 3)


def test_hessian_products_meet_negative_curvature():
    p = indefinite()
    C = represent(p, mq.MatrixFree(hessian=True))
    H = mq.Hessian().represent(linearize(p)).G
    lowest = torch.linalg.eigvalsh(H)[0].item()
    assert lowest < -1e-3
    x = C.newton(scalar(1e-6))
    assert "negative curvature" in C.notes[0]
    assert C.gradient @ x > 0  # downhill all the same
    assert error(C @ x, H @ x) < 1e-9
    x = C.newton(scalar(2 - lowest))
    assert "negative" not in C.notes[1]


@pytest.mark.parametrize("chunk", [None, 7])
def test_hessian_products_leave_the_saddle(chunk):
    p = indefinite()
    opt = mq.presets.hessian_free(p.model, p.loss, curvature=mq.MatrixFree(hessian=True, chunk=chunk))
    steps = [opt.step(p.x, p.y) for _ in range(60)]
    assert any("negative curvature" in s.note for s in steps)
    assert steps[-1].new_loss < 0.2 * steps[0].loss


# ---- what damping asks for


def test_trace_is_estimated_where_samples_are_coupled():
    p = coupled()
    q = reference.quadratic(*p)
    C = represent(p)
    assert C.trace().item() == pytest.approx(q.G.trace().item(), rel=0.8)
    assert C.trace() == represent(p).trace()
    parts = C.traces().entries(C.lin.sizes)
    assert (parts > 0).all()


def test_trace_of_a_hessian_is_never_negative():
    p = indefinite()
    C = represent(p, mq.MatrixFree(hessian=True))
    H = mq.Hessian().represent(linearize(p)).G
    exact = max(H.trace().abs().item(), H.norm().item())
    assert exact / 2 < C.trace().item() < 2 * exact
    assert (C.traces().entries(C.lin.sizes) >= 0).all()


@pytest.mark.parametrize("damping", [mq.MaxDiagonal(), mq.FactoredMaxDiagonal()])
def test_no_diagonal_where_samples_are_coupled(damping):
    p = coupled()
    opt = mq.presets.hessian_free(p.model, p.loss, damping=damping)
    with pytest.raises(ValueError, match=r"couples the samples.*eval\(\).*mq.Identity\(\)"):
        opt.step(p.x, p.y)


@pytest.mark.parametrize("damping", [mq.MaxDiagonal(), mq.FactoredMaxDiagonal()])
def test_no_diagonal_of_a_hessian(damping):
    p = build("ce")
    opt = mq.presets.hessian_free(p.model, p.loss, damping=damping, curvature=mq.MatrixFree(hessian=True))
    with pytest.raises(ValueError, match=r"mq.Identity\(\).*mq.Hessian\(\)"):
        opt.step(p.x, p.y)


@pytest.mark.parametrize(
    "damping",
    [mq.Identity(), mq.MeanEigenvalue(), mq.LayerMeanEigenvalue(), mq.MaxDiagonal(), mq.FactoredMaxDiagonal()],
    ids=lambda d: type(d).__name__,
)
@pytest.mark.parametrize("momentum", [None, mq.AdaptiveMomentum(dP=math.inf, cap=True)], ids=["plain", "momentum"])
@pytest.mark.parametrize(
    "rows", [mq.Exact(), mq.Sampled(1), mq.Empirical(), mq.Fraction(0.6)], ids=lambda r: type(r).__name__
)
def test_parts(damping, momentum, rows):
    """Every damping and the momentum take the steps that they take with the dense matrix."""
    p = build("ce")
    twin = copy.deepcopy(p.model)
    parts = {"damping": damping, "momentum": momentum, "rows": rows, "attempts": 3, "schedule": mq.TenFold()}
    dense = mq.LM(twin, p.loss, curvature=mq.Dense(), **parts)
    free = mq.LM(p.model, p.loss, curvature=EXACT, **parts)
    for _ in range(3):
        ours, theirs = free.step(p.x, p.y), dense.step(p.x, p.y)
        assert ours.new_loss == pytest.approx(theirs.new_loss, rel=1e-6)
        assert ours.rule == theirs.rule
        assert "CG iteration" in ours.note


# ---- the preset, and errors


def test_hessian_free_on_a_regression():
    torch.manual_seed(0)
    x = torch.linspace(-3, 3, 100, dtype=f64)[:, None]
    model = mlp(1, 8, 1).double()
    opt = mq.presets.hessian_free(model, "mse")
    steps = [opt.step(x, x.sin()) for _ in range(60)]
    assert steps[-1].new_loss < 1e-2 * steps[0].loss
    assert all(s.new_loss <= s.loss for s in steps)
    assert opt.lam < 1.0


def test_hessian_free_on_batches():
    torch.manual_seed(0)
    centres = 2 * torch.randn(3, 4)
    y = torch.randint(3, (300,))
    x = centres[y] + torch.randn(300, 4)
    model = mlp(4, 10, 3)
    opt = mq.presets.hessian_free(model, "cross_entropy")
    with torch.no_grad():
        before = nn.functional.cross_entropy(model(x), y).item()
    for i in range(20):
        opt.step(x[i % 5 :: 5], y[i % 5 :: 5])
    with torch.no_grad():
        assert nn.functional.cross_entropy(model(x), y).item() < 0.3 * before


def test_what_is_not_finite_is_a_failed_factorisation():
    C = represent(build("mlp_elu"), mq.MatrixFree())
    with pytest.raises(FactorizationError):
        C.newton(scalar(math.nan))
    C._g = C._g * math.inf
    with pytest.raises(FactorizationError, match="gradient"):
        C.newton(scalar(1.0))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"chunk": 0}, "chunk=0"),
        ({"iterations": 0}, "iterations=0.*at least 1"),
        ({"iterations": 2.5}, "iterations=2.5"),
        ({"tolerance": -1e-3}, "tolerance=-0.001.*5e-4"),
        ({"tolerance": 1.0}, "tolerance=1.0"),
        ({"tolerance": math.nan}, "tolerance=nan"),
        ({"warm": 1.5}, "warm=1.5.*between 0"),
        ({"precondition": 0.0}, "precondition=0.0.*0.75.*None"),
        ({"precondition": 2.0}, "precondition=2.0"),
    ],
)
def test_bad_options(options, says):
    with pytest.raises(ValueError, match=says):
        mq.MatrixFree(**options)


def test_options_are_a_value():
    assert mq.MatrixFree() == mq.MatrixFree(chunk=None)
    assert not mq.MatrixFree().by_sample
