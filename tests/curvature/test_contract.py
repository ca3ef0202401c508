"""Every representation of G against the dense reference, on every case; then float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import marquardt as mq
from marquardt.curvature.matrix_free import MatrixFreeCurvature, by_rows
from support import reference
from support.cases import Problem, build, default_dtype, mlp
from support.linearized import EVERY_CASE, EXACT, HARD_LABELS, expected, linearize
from support.reference import error

f64 = torch.float64

REPRESENTATIONS = {
    "dense": mq.Dense(small=0),
    "dense-small": mq.Dense(),
    "gram": mq.Gram(whole=0),
    "gram-whole": mq.Gram(),
    "dense-chunked": mq.Dense(chunk=2),
    "gram-chunked": mq.Gram(chunk=2),
    "products": EXACT,
    "products-chunked": replace(EXACT, chunk=2),
}
EVERY_REPRESENTATION = pytest.mark.parametrize("representation", REPRESENTATIONS)


def represent(p: Problem, representation: str, rows=mq.Exact()) -> mq.Curvature:
    kind = REPRESENTATIONS[representation]
    return kind.represent(linearize(p, rows, kind.chunk))


def check(C: mq.Curvature, q: reference.Quadratic):
    """Gradient, products, statistics and (G + A)⁻¹g, for A = λ and A = λD by turns, D like a maximum over diagonals."""
    n, size, products = len(q.g), torch.linalg.matrix_norm(q.G, 2), isinstance(C, MatrixFreeCurvature)
    assert not C.gradient.requires_grad
    assert C.gradient.dtype == f64
    assert error(C.gradient, q.g) < 1e-10
    for v in torch.randn(3, n, dtype=f64):
        assert error(C @ v, q.G @ v) < 1e-9
        assert C.quadratic(v).item() == pytest.approx((v @ q.G @ v).item(), rel=1e-9)
    assert error(C.diagonal(), q.diagonal()) < 1e-10
    assert C.trace().item() == pytest.approx(q.G.trace().item(), rel=1e-9)
    D, one = q.diagonal().clamp(min=0.01) * (0.5 + torch.rand(n, dtype=f64)), torch.ones((), dtype=f64)
    large = 1e-3 * size, 1e-3 * (q.diagonal() + 0.01 * size * (1 + torch.rand(n, dtype=f64)))
    for A in large if products else (one, 1e-3 * D, 1e-6 * one, 1e-8 * D):
        # What float64 can promise: the condition of the system times its rounding.
        most = 1e-6 if products else 1e-10 + 1e-14 * (1 + size / A.min()).item()
        assert error(-C.newton(A), q.step(A)) < most, f"A = {A}"


@EVERY_CASE
@EVERY_REPRESENTATION
def test_every_case(name, representation):
    C = represent(build(name), representation)
    check(C, expected(name))
    if representation == "products":
        assert C._way is not by_rows  # these can all be differentiated twice


@pytest.mark.parametrize("name", HARD_LABELS)
@EVERY_REPRESENTATION
def test_empirical(name, representation):
    """G = (1/N) Σ ∇fᵢ∇fᵢᵀ."""
    check(represent(build(name), representation, mq.Empirical()), expected(name, "empirical"))


@pytest.mark.parametrize(
    "name", ["mse_weighted", "ce", "bce_pos_weight", "huber", "poisson", "lstm", "pinn", "custom_scale"]
)
@EVERY_REPRESENTATION
def test_sampled(name, representation):
    """Rows at random, the gradient exact: it lies outside their range, and the step must be right all the same."""
    rows = mq.Sampled(2)
    J = linearize(build(name), rows, REPRESENTATIONS[representation].chunk).rows()
    check(represent(build(name), representation, rows), expected(name)._replace(G=J.T @ J))


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
    p, double, q = build(name, torch.float32), build(name), expected(name)
    for t, exact in zip(p.model.state_dict().values(), double.model.state_dict().values(), strict=True):
        t.copy_(exact)
    x, y = (t.float() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in (double.x, double.y))
    C, v = represent(p._replace(x=x, y=y), representation), torch.randn(len(q.g), dtype=f64)
    for found, exact in [
        (C.gradient, q.g),
        (C @ v.float(), q.G @ v),
        (C.diagonal(), q.diagonal()),
        (-C.newton(torch.tensor(0.1)), q.step(0.1)),
    ]:
        assert found.dtype == torch.float32
        assert error(found, exact) < 1e-4
