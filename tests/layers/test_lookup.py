"""Every product of a Lookup block against its own rows, written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import marquardt.layers.blocks as lookup
from marquardt.layers.blocks import Lookup, Product
from marquardt.metric import Part
from support.reference import error

pytestmark = pytest.mark.usefixtures("double")

R, N, V, E = 2, 3, 6, 2
POSITIONS = pytest.mark.parametrize("P", [1, 5])
WHITE = pytest.mark.parametrize("white", [False, True], ids=["plain", "whitened"])


def made(P: int, white: bool = False, samples: int = N, table: Tensor | None = None) -> Lookup:
    """Tokens below 4, so that some rows of the table are never used; five positions repeat some."""
    table = torch.randn(V, E) if table is None else table
    roots = torch.rand(V, E) + 0.1 if white else None
    return Lookup(torch.randint(4, (samples, P)), torch.randn(R, samples, P, E), table, roots)


def written(block: Lookup) -> Tensor:
    """Row r·N + n holds Σₚ δ[r, n, p] at the table's row index[n, p]: (m, V·E)"""
    rows = torch.zeros(block.R, block.N, V, E)
    for r in range(block.R):
        for n in range(block.N):
            for p in range(block.P):
                rows[r, n, block.index[n, p]] += block.delta[r, n, p]
    return (rows if block.roots is None else rows / block.roots).reshape(block.m, -1)


@POSITIONS
@WHITE
@pytest.mark.parametrize("slab", [1 << 26, 1], ids=["at once", "token by token"])
def test_products(monkeypatch, P, white, slab):
    monkeypatch.setattr(lookup, "SLAB", slab)
    block = made(P, white)
    J = written(block)
    v, w, X = torch.randn(V * E), torch.randn(len(J)), torch.randn(len(J), 4)
    by_sample = J.view(R, N, -1).transpose(0, 1).reshape(R * N, -1)
    assert len(list(block.slabs(torch.float64))) == (V if slab == 1 else 1)
    assert error(block.rows(torch.float64), J) < 1e-12
    assert error(block.apply([v]), J @ v) < 1e-12
    assert error(block.pull(w), J.T @ w) < 1e-12
    assert error(block.samples(torch.float64), by_sample) < 1e-12
    assert error(block.against(X), X.T @ by_sample) < 1e-12
    assert error(block.square(torch.float64), J.T @ J) < 1e-12
    assert error(block.diagonal(), J.square().sum(0)) < 1e-12
    assert error(block.trace(), J.square().sum()) < 1e-12


@POSITIONS
@WHITE
def test_gram(P, white):
    """Of one piece, with a product on the way, and of two pieces that share some tokens; K is added to."""
    block = made(P, white)
    other = made(P, samples=N + 2, table=block.table)
    other = Lookup(other.index + 2, other.delta, block.table, block.roots)
    J, L, v = written(block), written(other), torch.randn(V * E)
    before = torch.randn(len(J), len(J))
    K, Jv = before.clone(), torch.ones(len(J))
    block.gram(K, block, Product([v], Jv))
    assert error(K - before, J @ J.T) < 1e-12
    assert error(Jv - 1, J @ v) < 1e-12
    K = torch.zeros(len(J), len(L))
    block.gram(K, other)
    assert error(K, J @ L.T) < 1e-12


@POSITIONS
def test_whitened(P):
    block = made(P)
    entries, u, v = torch.rand(V * E) + 0.1, torch.rand(1, V, 1) + 0.1, torch.rand(1, 1, E) + 0.1
    for part, D in (
        (Part(entries), entries),
        (Part(torch.tensor(0.3)), torch.full((V * E,), 0.3)),
        (Part(u=u, v=v), torch.outer(u.flatten(), v.flatten()).flatten()),
    ):
        white = block.whitened([part])
        assert type(white) is Lookup
        assert error(white.rows(torch.float64), written(block) / D.sqrt()) < 1e-12


def test_beside_and_without():
    first = made(1)
    second, third = made(3, table=first.table), made(2, table=first.table)
    both = first.beside([second, third])
    assert error(both.rows(torch.float64), written(first) + written(second) + written(third)) < 1e-12
    assert first.without([first.table]) is None


@POSITIONS
@pytest.mark.parametrize("weighted", [False, True])
def test_sums(P, weighted):
    """A counts the tokens, and is the diagonal of a matrix."""
    block = made(P)
    each = torch.rand(N) if weighted else torch.ones(N)
    counts = torch.zeros(1, V)
    for n in range(N):
        for p in range(P):
            counts[0, block.index[n, p]] += each[n]
    found = block.sums(each if weighted else None)
    assert (found.bias, found.table) == (False, True)
    assert error(found.A, counts) < 1e-12
    assert error(found.B[0], sum(torch.outer(d, d) for d in block.delta.reshape(-1, E))) < 1e-12
    assert float(found.count) == pytest.approx(float(each.sum()) * P)


@POSITIONS
def test_second_moments(P):
    block, right = made(P), torch.randn(1, E, E)
    rows = written(block).view(-1, V, E)
    assert error(block.second_moments(None, None)[0], rows.square().sum(0)) < 1e-12
    assert error(block.second_moments(None, right)[0], (rows @ right[0]).square().sum(0)) < 1e-12
