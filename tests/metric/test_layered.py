"""The Kronecker product by layers as D: every representation against the dense float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import marquardt as mq
from marquardt.curvature.contract import Curvature
from marquardt.jacobian.linearization import linearize
from marquardt.metric import Layered, restored
from marquardt.metric.sides import WHOLE, _inverted, inverse_roots
from support import reference
from support.cases import CASES, Problem, build
from support.metrics import ByHand, Form
from support.reference import error

pytestmark = pytest.mark.usefixtures("double")

LAM = 0.3
KINDS = {"gram": mq.Gram(whole=0), "gram-whole": mq.Gram(), "dense": mq.Dense()}


def represented(kind: Any, p: Problem) -> Curvature:
    return kind.represent(linearize(p.model, p.loss, p.x, p.y, p.weight, params=p.params, needs=kind.needs))


def forms(D: Layered) -> list[Form]:
    return [
        Form(x.members, *x.shape[:2], 0) if x.right is None
        else Form(x.members, *x.shape, (x.left.ndim == 2, x.right.ndim == 2))
        for x in D.layers
    ]  # fmt: skip


def moved(p: Problem, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for t in p.model.parameters():
            t += 0.3 * torch.randn(t.shape, generator=generator, dtype=t.dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_step_and_products_of_every_case(name, kind):
    """Two points, so that the averages count."""
    p, D, hand = build(name), None, None
    for seed in range(2):
        G = represented(KINDS[kind], p)
        D = mq.KroneckerMetric(c=0.5, decay=0.6, every=1).update(D, G)
        assert isinstance(D, Layered)
        sizes = G.parameters.sizes
        hand = hand or ByHand(forms(D), sizes, c=0.5, decay=0.6)
        assert forms(D) == hand.forms
        exact = reference.quadratic(p.model, p.loss, p.x, p.y, p.weight, p.params)
        by_hand = hand.after(exact.G, G.lin.m)
        expected = -torch.linalg.solve(exact.G + LAM * by_hand, exact.g)
        check(D, by_hand, sizes)
        assert error(G.step(LAM * D), expected) < 1e-8
        assert error(G.slope(D), exact.g @ torch.linalg.solve(by_hand, exact.g)) < 1e-7
        moved(p, seed)


def check(D: Layered, by_hand: Tensor, sizes: list[int]) -> None:
    """D as an operator is the matrix."""
    assert D.fits(sizes)
    v = torch.randn(len(by_hand))
    A = LAM * D
    assert error(A.times(v, sizes), LAM * by_hand @ v) < 1e-9
    assert error(A.quadratic(v, sizes), LAM * v @ by_hand @ v) < 1e-9
    assert error(A.diagonal(sizes), LAM * by_hand.diagonal()) < 1e-9
    assert error(A.solve(v.clone(), sizes), torch.linalg.solve(LAM * by_hand, v)) < 1e-7
    W = A.turned(torch.eye(len(v)), sizes).T
    assert error(W @ by_hand @ W.T, torch.eye(len(v))) < 1e-9
    assert error(A.turned_back(v, sizes), W.T @ v) < 1e-9
    assert torch.equal(A.damping(sizes), torch.full((len(v),), LAM))


FORMS = {
    "mlp_elu": [Form((0, 1), 1, 5, 3), Form((2, 3), 1, 3, 6)],
    "linear_no_bias": [Form((0,), 1, 4, 3), Form((1,), 1, 2, 4)],
    "unused_parameter": [Form((0,), 1, 2, 0), Form((1, 2), 1, 2, 4), Form((3,), 1, 6, 0), Form((4,), 1, 2, 0)],
    "weight_used_transposed": [Form((0,), 1, 4, 0), Form((1,), 1, 2, 4), Form((2,), 1, 2, 0)],
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    """A weight and its bias are one matrix; what no layer has to itself is a matrix, or a vector, by itself."""
    assert sorted(forms(mq.KroneckerMetric(every=1).update(None, represented(mq.Gram(), build(name))))) == FORMS[name]


def test_a_stale_form_serves_all_blocks():
    """D has a weight and its bias in one block, the rows have them apart: with the bias trained by itself, or zero."""
    p = build("mlp_elu")
    D = mq.KroneckerMetric(every=1).update(None, represented(mq.Gram(), p))
    for kind in KINDS.values():
        G = represented(kind, p)
        piece = G.lin.whole()
        first, *others = piece.blocks
        weight, bias = first.without([first.params[1]]), first.without([first.params[0]])
        assert weight is not None
        assert bias is not None
        piece._blocks = [bias, *others, weight]
        exact = reference.quadratic(p.model, p.loss, p.x, p.y)
        dense = torch.stack([D.times(e, G.parameters.sizes) for e in torch.eye(len(exact.g))])
        assert error(G.step(LAM * D), -torch.linalg.solve(exact.G + LAM * dense, exact.g)) < 1e-9


def test_a_side_that_float32_cannot_factor():
    """By rounding it is not positive definite: W is that of a side with a little more on its diagonal."""
    v = torch.randn(50, 3).float()
    side = (v @ v.T)[None]
    side.diagonal(dim1=1, dim2=2).sub_(1e-6)
    W, plain = inverse_roots([side, torch.tensor([[4.0]])])
    assert torch.equal(plain, torch.tensor([[0.5]]))
    assert W.dtype == torch.float32
    D = torch.linalg.inv((W.mT.double() @ W.double())[0])
    assert torch.linalg.eigvalsh(D)[0] > 0
    assert error(D, side[0]) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("d", [1, 5, *(WHOLE["cpu"] * k + r for k, r in ((1, 0), (1, 1), (2, 3)))])
def test_the_inverse_of_a_triangle_by_halves(d, dtype):
    """Of several groups; what is above the diagonal is not looked at, and is zero in the inverse."""
    L = torch.randn(2, d, d).tril_(-1) / d**0.5
    L.diagonal(dim1=1, dim2=2).copy_(1 + torch.rand(2, d))
    given = (L + torch.randn(2, d, d).triu(1)).to(dtype)
    kept = given.clone()
    found = _inverted(given)
    assert found.dtype == dtype
    assert error(found.double(), torch.linalg.inv(given.double().tril())) < 1000 * torch.finfo(dtype).eps
    assert torch.equal(found, found.tril())
    assert torch.equal(given, kept)


def test_another_precision_and_back():
    p = build("conv2d_grouped")
    G = represented(mq.Gram(), p)
    D = 2.0 * mq.KroneckerMetric(every=1).update(None, G)
    assert D.to(torch.zeros(())) is D
    low = D.to(torch.zeros((), dtype=torch.float32))
    v = torch.randn(G.parameters.n)
    assert low.times(v.float(), G.parameters.sizes).dtype == torch.float32
    assert error(low.times(v.float(), G.parameters.sizes), D.times(v, G.parameters.sizes)) < 1e-5
    again = restored(low.state())
    assert torch.equal(again.times(v.float(), G.parameters.sizes), low.times(v.float(), G.parameters.sizes))


def test_what_it_does_not_fit():
    G = represented(mq.Gram(), build("mlp_elu"))
    D = mq.KroneckerMetric(every=1).update(None, G)
    sizes = G.parameters.sizes
    assert D.fits(sizes)
    for other in (sizes[:-1], [*sizes, 1], [sizes[0] + 1, *sizes[1:]], [sizes[0] - 5, sizes[1] + 5, *sizes[2:]][::-1]):
        assert not D.fits(other)


def test_float32_is_as_exact_as_its_digits():
    """At the scale of the curvature and far below it."""
    p, q = build("mlp_elu"), build("mlp_elu", torch.float32)
    q.model.load_state_dict(p.model.state_dict())
    exact = reference.quadratic(p.model, p.loss, p.x, p.y)
    for kind in KINDS.values():
        G, low = represented(kind, p), represented(kind, q._replace(x=p.x.float(), y=p.y.float()))
        D, rough = (mq.KroneckerMetric(every=1).update(None, each) for each in (G, low))
        dense = torch.stack([D.times(e, G.parameters.sizes) for e in torch.eye(len(exact.g))])
        for lam in (1.0, 1e-4):
            expected = -torch.linalg.solve(exact.G + lam * dense, exact.g)
            assert error(low.step(lam * rough), expected) < 1e-3
