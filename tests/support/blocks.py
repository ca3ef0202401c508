"""Blocks of columns with random numbers, their rows written out by hand, and all products of a block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from marquardt.layers.blocks import Bilinear, Block, CachedRows, Lookup, Product
from support.reference import error

V, E = 6, 2


def bilinear(shape, halves: str = "weight and bias", more: int = 0, like: Block | None = None) -> Bilinear:
    """A random block; with `like` one of the same parameters, of more samples."""
    R, N, P, G, O, I = (shape[0], shape[1] + more, *shape[2:])
    weight = torch.randn((G * O, I) if O * I > 1 else (G,)) if "weight" in halves else None
    bias = torch.randn(G * O) if "bias" in halves else None
    one = torch.tensor(0.7) if "one" in halves else None
    if like is not None:
        weight, bias = like.weight, like.bias
    a = torch.randn(N, P, G, 0 if weight is None else I)
    return Bilinear(a, torch.randn(R, N, P, G, O), weight, bias, one)


def lookup(P: int, white: bool = False, more: int = 0, like: Block | None = None) -> Lookup:
    """Tokens below 4, so that some rows of the table are never used; five positions repeat some. With `like` the tokens
    of both are some."""
    table, roots = torch.randn(V, E), torch.rand(V, E) + 0.1 if white else None
    index = torch.randint(4, (3 + more, P))
    if like is not None:
        index, table, roots = index + 2, like.table, like.roots
    return Lookup(index, torch.randn(2, 3 + more, P, E), table, roots)


def by_hand(block: Block) -> Tensor:
    """Row r·N + n is Σₚ δ[r, n, p] ⊗ a[n, p] for a weight, and Σₚ δ[r, n, p] times what the bias multiplies; of a table
    it holds Σₚ δ[r, n, p] at its row index[n, p]."""
    if isinstance(block, CachedRows):
        return by_hand(block.block)
    if isinstance(block, Lookup):
        table = torch.einsum("rnpe,npv->rnve", block.delta, F.one_hot(block.index, V).to(block.delta))
        return (table if block.roots is None else table / block.roots).flatten(2).flatten(0, 1)
    outer = torch.einsum("rnpgo,npgi->rngoi", block.delta, block.a).flatten(2)
    rows = [outer] if block.weight is not None else []
    if block.bias is not None:
        rows.append((1.0 if block.one is None else block.one) * block.delta.sum(2).flatten(2))
    return torch.cat(rows, 2).flatten(0, 1)


def agrees(block: Block, J: Tensor, N: int | None = None) -> None:
    """All products of a block of N samples are those with J̃; K is added to."""
    v, w, X = torch.randn(J.shape[1]), torch.randn(len(J)), torch.randn(len(J), 5)
    sizes = [p.numel() for p in block.params]
    by_sample = J.view(-1, N or block.N, J.shape[1]).transpose(0, 1).flatten(0, 1)  # from row r·N + n to row n·R + r
    assert block.columns == J.shape[1]
    assert error(block.apply(v.split(sizes)), J @ v) < 1e-12
    assert error(block.pull(w), J.T @ w) < 1e-12
    assert error(block.diagonal(), J.square().sum(0)) < 1e-12
    assert error(block.trace(), J.square().sum()) < 1e-12
    before = torch.randn(len(J), len(J))
    K, Jv = before.clone(), torch.ones(len(J))
    block.gram(K, block, Product(v.split(sizes), Jv))
    assert error(K - before, J @ J.T) < 1e-12
    assert error(Jv - 1, J @ v) < 1e-12
    assert error(block.samples(torch.float64), by_sample) < 1e-12
    assert error(block.against(X), X.T @ by_sample) < 1e-12
    assert error(block.square(torch.float64), J.T @ J) < 1e-12
    assert error(block.rows(torch.float64), J) < 1e-12
