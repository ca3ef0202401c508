"""Every representation of G against the dense reference, on every case; then float32."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import marquardt as mq
from support import reference
from support.cases import Problem, build, default_dtype, mlp
from support.linearized import EVERY_CASE, HARD_LABELS, expected
from support.reference import error

REPRESENTATIONS = {
    "dense": mq.Dense(small=0),
    "dense-small": mq.Dense(),
    "gram": mq.Gram(whole=0),
    "gram-whole": mq.Gram(),
    "dense-chunked": mq.Dense(chunk=2),
    "gram-chunked": mq.Gram(chunk=2),
}
EVERY_REPRESENTATION = pytest.mark.parametrize("representation", REPRESENTATIONS)


def linearize(p: Problem, representation: str = "dense", rows=mq.Exact(), chunk=None):
    chunk = chunk or REPRESENTATIONS[representation].chunk
    return mq.linearize(p.model, p.loss, p.x, p.y, p.weight, params=p.params, rows=rows, chunk=chunk)


@cache
def curvature(name: str, representation: str, rows=mq.Exact()):
    return REPRESENTATIONS[representation].represent(linearize(build(name), representation, rows))


def dampings(q: reference.Quadratic):
    """A = λ and A = λD by turns, D like a maximum over past diagonals."""
    D = q.diagonal().clamp(min=0.01) * (0.5 + torch.rand(len(q.g), dtype=torch.float64))
    one = torch.ones((), dtype=torch.float64)
    return one, 1e-3 * D, 1e-6 * one, 1e-8 * D


def solvable(q: reference.Quadratic, A: torch.Tensor) -> float:
    """What float64 can promise of (G + A)⁻¹g: the condition of the system times its rounding."""
    return 1e-10 + 1e-14 * (1 + torch.linalg.matrix_norm(q.G, 2) / A.min()).item()


def check(C: mq.Curvature, q: reference.Quadratic):
    """Gradient, products, diagonal and (G + A)⁻¹g."""
    assert not C.gradient.requires_grad
    assert C.gradient.dtype == torch.float64
    assert error(C.gradient, q.g) < 1e-10
    for v in torch.randn(3, len(q.g), dtype=torch.float64):
        assert error(C @ v, q.G @ v) < 1e-10
    assert error(C.diagonal(), q.diagonal()) < 1e-10
    for A in dampings(q):
        assert error(-C.newton(A), q.step(A)) < solvable(q, A), f"A = {A}"


@EVERY_CASE
@EVERY_REPRESENTATION
def test_every_case(name, representation):
    check(curvature(name, representation), expected(name))


@EVERY_CASE
def test_primal_is_dual(name):
    """(G + A)⁻¹g solved in the n parameters and in the m rows."""
    q = expected(name)
    size = torch.linalg.matrix_norm(q.G, 2)
    D = q.diagonal() / size + 0.01 * (1 + torch.rand(len(q.g), dtype=torch.float64))
    for A in (1e-6 * size, 1e-3 * size * D):  # never below 1e-6‖G‖: what float64 can solve to 1e-8
        primal, *others = (curvature(name, representation).newton(A) for representation in REPRESENTATIONS)
        for dual in others:
            assert error(dual, primal) < 1e-8


@pytest.mark.parametrize("name", HARD_LABELS)
@EVERY_REPRESENTATION
def test_empirical(name, representation):
    """G = (1/N) Σ ∇fᵢ∇fᵢᵀ."""
    check(curvature(name, representation, mq.Empirical()), expected(name, "empirical"))


@pytest.mark.parametrize(
    "name", ["mse_weighted", "ce", "bce_pos_weight", "huber", "poisson", "lstm", "pinn", "custom_scale"]
)
@EVERY_REPRESENTATION
def test_sampled(name, representation):
    """Rows at random, the gradient exact: it lies outside their range, and the step must be right all the same."""
    rows = mq.Sampled(2)
    C, J = curvature(name, representation, rows), linearize(build(name), representation, rows).rows()
    check(C, expected(name)._replace(G=J.T @ J))


SHAPES = {  # sizes of the network, samples
    ("mse", "tall"): ((3, 4, 2), 40),
    ("cross_entropy", "tall"): ((3, 5, 3), 40),
    ("mse", "wide"): ((3, 12, 2), 10),
    ("cross_entropy", "wide"): ((3, 12, 3), 8),
}


def single(loss: str, shape: str) -> Problem:
    """Seed and sizes are such that rounding the rows themselves moves the step by less than 3e-5, at every λ below."""
    sizes, N = SHAPES[loss, shape]
    with torch.random.fork_rng(devices=[]), default_dtype(torch.float32):
        torch.manual_seed(0)
        model, x = mlp(*sizes), torch.randn(N, sizes[0])
        y = torch.randn(N, sizes[-1]) if loss == "mse" else torch.randint(sizes[-1], (N,))
    return Problem(model, loss, x, y)


@pytest.mark.parametrize(("loss", "shape"), SHAPES)
@pytest.mark.parametrize("representation", [mq.Dense(), mq.Gram(), mq.Dense(chunk=5), mq.Gram(chunk=5)], ids=str)
def test_float32(loss, shape, representation):
    """(G + A)⁻¹g to 1e-4 down to λ = 1e-6, where a plain float32 solve has no digit left."""
    p, chunk = single(loss, shape), representation.chunk
    J = linearize(p, chunk=chunk).rows().double()  # (m, n)
    assert (J.shape[0] > J.shape[1]) == (shape == "tall")
    u = root_of_gradient(p, chunk)  # (m,)
    C = representation.represent(linearize(p, chunk=chunk))
    assert C.gradient.dtype == torch.float32
    assert error(C.gradient, J.T @ u) < 1e-5
    D = (J**2).sum(0).clamp(min=0.01)
    for lam in (1.0, 1e-3, 1e-6):
        for A in (torch.tensor(lam), (lam * D).float()):
            step = torch.linalg.solve(J.T @ J + A.double().expand(J.shape[1]).diag(), J.T @ u)
            found = C.newton(A)
            assert found.dtype == torch.float32
            assert error(found, step) < 1e-4, f"λ = {lam}, {'vector' if A.ndim else 'scalar'}"


def root_of_gradient(p: Problem, chunk: int | None) -> torch.Tensor:
    """u of g = J̃ᵀu, row r of sample n at r·N + n in each chunk: g in float64, of the outputs as float32 has them."""
    loss, parts = mq.losses.resolve(p.loss), []
    count = -(-len(p.x) // (chunk or len(p.x)))  # parts, as even as can be
    for x, y in zip(p.x.tensor_split(count), p.y.tensor_split(count), strict=True):
        with torch.no_grad():
            parts.append(loss.root(p.model(x), y).u.double().permute(1, 2, 0).reshape(-1))
    normaliser = reference.normaliser(p.loss, p.model(p.x).detach(), p.y, None).double()
    return torch.cat(parts) / normaliser.sqrt()


@pytest.mark.parametrize(
    "name", ["mlp_elu", "conv2d_strided", "embedding", "layer_norm", "lstm", "pinn", "ce_smooth", "bce"]
)
@EVERY_REPRESENTATION
def test_float32_is_near_float64(name, representation):
    """The same case in both precisions, at a λ where that is a fair demand; and nothing is promoted on the way."""
    p, q = build(name, torch.float32), expected(name)
    for t, exact in zip(p.model.state_dict().values(), build(name).model.state_dict().values(), strict=True):
        t.copy_(exact)
    double = build(name)
    x, y = (t.float() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in (double.x, double.y))
    C = REPRESENTATIONS[representation].represent(linearize(p._replace(x=x, y=y), representation))
    v = torch.randn(len(q.g), dtype=torch.float64)
    for found, exact in [
        (C.gradient, q.g),
        (C @ v.float(), q.G @ v),
        (C.diagonal(), q.diagonal()),
        (-C.newton(torch.tensor(0.1)), q.step(0.1)),
    ]:
        assert found.dtype == torch.float32
        assert error(found, exact) < 1e-4
