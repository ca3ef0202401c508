"""The Kronecker product by layers as D: every representation against the dense float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import marquardt as mq
from marquardt.curvature.contract import Curvature
from marquardt.jacobian.linearization import linearize
from marquardt.metric import Layered
from support import reference
from support.cases import CASES, Problem, build
from support.metrics import ByHand, Form
from support.reference import error

pytestmark = pytest.mark.usefixtures("double")

LAM = 0.3
KINDS = {
    "gram": mq.Gram(whole=0),
    "gram-whole": mq.Gram(),
    "dense": mq.Dense(),
    "matrix-free": mq.MatrixFree(backtrack=False, tolerance=0.0, warm=0.0, iterations=1000),
}


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


@pytest.mark.parametrize("kind", ["gram", "gram-whole", "dense"])
@pytest.mark.parametrize("name", CASES)
def test_step_and_products_of_every_case(name, kind):
    """Three points, so that the averages count."""
    p, D, hand = build(name), None, None
    for seed in range(3):
        G = represented(KINDS[kind], p)
        D = mq.KroneckerMetric(c=0.5, decay=0.6).update(D, G)
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
