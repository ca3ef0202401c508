"""MatrixFree: the solve, its warm start, Martens' backtracking, and what damping asks for."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.curvature import matrix_free
from marquardt.curvature.direct import FactorizationError
from marquardt.curvature.matrix_free import conjugate_gradients
from marquardt.jacobian.linearization import Trials
from support import reference
from support.cases import Problem, build, mlp
from support.linearized import EXACT, coupled, expected, linearize, represent, scalar
from support.reference import error
from support.unchanged import refused

f64 = torch.float64


# ---- the solve


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


def reference_theta(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_model_of_the_step_costs_no_product(monkeypatch):
    q = expected("mlp_elu")
    C = represent(build("mlp_elu"), mq.MatrixFree())
    d = C.newton(scalar(1e-3)).neg_()
    monkeypatch.setattr(C, "_each", None)  # any product fails now
    gd, dGd = C.model(d)
    assert gd.item() == pytest.approx((q.g @ d).item(), rel=1e-9)
    assert dGd.item() == pytest.approx((d @ q.G @ d).item(), rel=1e-7)
    monkeypatch.undo()
    for other in (-d, 0.5 * d):
        gd, dGd = C.model(other)
        assert gd.item() == pytest.approx((q.g @ other).item(), rel=1e-9)
        assert dGd.item() == pytest.approx((other @ q.G @ other).item(), rel=1e-9)


# ---- warm start


def test_warm_start_from_the_solution_is_the_end():
    q, A = expected("ce_weighted"), scalar(0.1)
    C = represent(build("ce_weighted"), mq.MatrixFree(warm=1.0))
    C.recall({"x": -q.step(A)}, False)
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
    C.recall({"x": x}, False)
    H, r = q.damped(A), q.g - 0.5 * q.damped(A) @ x
    assert error(C.newton(A), 0.5 * x + (r @ r) / (r @ H @ r) * r) < 1e-10
    assert error(C.keep()["x"], 0.5 * x + (r @ r) / (r @ H @ r) * r) < 1e-10


def test_a_start_that_is_worse_than_none_is_dropped():
    A = scalar(0.1)
    for start in (q_start := -10 * expected("ce_weighted").g, q_start * math.nan):
        C = represent(build("ce_weighted"))
        warm = represent(build("ce_weighted"), mq.MatrixFree(tolerance=0.0, iterations=2000, warm=1.0, backtrack=False))
        warm.recall({"x": start}, False)
        assert error(warm.newton(A), C.newton(A)) < 1e-12


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
    monkeypatch.setattr(Trials, "loss", lambda self, d, lr: scalar(next(losses)))
    C.newton(scalar(1e-3))
    numbers = [int(n) for n in re.findall(r"\d+", C.notes[0])]
    assert "back to iteration" in C.notes[0]
    kept = [k for k in (1, 2, 3, 4, 5, 7, 9, 11, 14, 18, 24, 31) if k < numbers[0]]
    assert numbers[1] == kept[-3]


# ---- negative curvature


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
    assert all(trace > 0 for _, trace, _ in C.traces())


def test_trace_of_a_hessian_is_never_negative():
    p = indefinite()
    C = represent(p, mq.MatrixFree(hessian=True))
    H = mq.Hessian().represent(linearize(p)).G
    exact = max(H.trace().abs().item(), H.norm().item())
    assert exact / 2 < C.trace().item() < 2 * exact
    assert all(trace >= 0 for _, trace, _ in C.traces())


@pytest.mark.parametrize("damping", [mq.MaxDiagonal(), mq.FactoredMaxDiagonal()])
@pytest.mark.parametrize("hessian", [False, True], ids=["coupled samples", "hessian"])
def test_no_diagonal(hessian, damping):
    """An error that names what can be done, and nothing has changed."""
    p = build("ce") if hessian else coupled()
    before = reference_theta(p.model)
    opt = mq.presets.hessian_free(p.model, p.loss, damping=damping, curvature=mq.MatrixFree(hessian=hessian))
    with refused("mq.Identity()", "mq.MeanEigenvalue()", *(["mq.Hessian()"] if hessian else ["couples", "eval()"])):
        opt.step(p.x, p.y)
    assert torch.equal(reference_theta(p.model), before)


# ---- errors


def test_what_is_not_finite_is_a_failed_factorisation():
    C = represent(build("mlp_elu"), mq.MatrixFree())
    with pytest.raises(FactorizationError):
        C.newton(scalar(math.nan))
    C._g = C._g * math.inf
    with pytest.raises(FactorizationError, match="gradient"):
        C.newton(scalar(1.0))
