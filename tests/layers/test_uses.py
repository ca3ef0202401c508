"""Blocks of a parameter from its uses by parts of the samples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marquardt.layers import Block
from marquardt.layers.blocks import Bilinear, Explicit, Lookup, Nothing
from marquardt.layers.capture import Place, Walk
from marquardt.layers.graph import Glimpse, Use, block_of, uses_in
from support.reference import error

pytestmark = pytest.mark.usefixtures("double")

N = 5


def both(z: Tensor, p: Tensor, R: int, order: tuple[int, int]) -> tuple[Block, Tensor]:
    """The block of a parameter that is used by the first two samples and by the others, and its rows one by one"""
    found: list[Use] = sorted(uses_in(Walk(z, [p]), set()), key=lambda use: use.shape[0])
    S = torch.randn(R, *z.shape)
    glimpses = []
    for use, place in zip(found, (Place(0, 0, 2), Place(0, 2, 3)), strict=True):
        delta = torch.stack([torch.autograd.grad(z, [use.edge], s, retain_graph=True)[0] for s in S])
        glimpses.append(Glimpse(use, place, delta))
    rows = [
        torch.autograd.grad(z[n], p, S[r, n], retain_graph=True)[0].to_dense().flatten()
        for r in range(R)
        for n in range(N)
    ]
    return block_of(p, [glimpses[i] for i in order], R, N), torch.stack(rows)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("R", [1, 3])
@pytest.mark.parametrize("kind", ["weight", "other way round", "table", "bias"])
def test_parts_share_positions(kind, R, order):
    x, tokens = torch.randn(N, 4), torch.randint(0, 6, (N, 2))
    p = nn.Parameter(torch.randn({"bias": (3,), "table": (6, 4), "weight": (3, 4)}.get(kind, (4, 3))))
    made = {
        "weight": lambda i: F.linear(x[i], p),
        "other way round": lambda i: x[i] @ p,
        "table": lambda i: F.embedding(tokens[i], p).tanh().sum(1),
        "bias": lambda i: F.linear(x[i], torch.ones(3, 4), p),
    }[kind]
    block, rows = both(torch.cat([made(slice(0, 2)), made(slice(2, N))]).tanh(), p, R, order)
    assert isinstance(block, {"table": Lookup, "bias": Explicit}.get(kind, Bilinear))
    assert getattr(block, "P", None) == {"bias": None, "table": 2}.get(kind, 1)
    assert error(block.rows(p.dtype), rows) < 1e-12
    by_sample = rows.view(R, N, -1).transpose(0, 1).flatten(0, 1)
    assert error(block.samples(p.dtype), by_sample) < 1e-12
    assert error(block.square(p.dtype), rows.T @ rows) < 1e-12
    K = torch.zeros(R * N, R * N)
    block.gram(K, block)
    assert error(K, rows @ rows.T) < 1e-12
    v, w = torch.randn(p.numel()), torch.randn(R * N)
    assert error(block.apply([v]), rows @ v) < 1e-12
    assert error(block.pull(w), rows.T @ w) < 1e-12
    assert error(block.diagonal(), rows.square().sum(0)) < 1e-12
    assert block.inputs() is None
    assert block.sums(None) is None


def test_without_uses():
    p = nn.Parameter(torch.randn(3))
    assert isinstance(block_of(p, [], 2, N), Nothing)
