"""Partial traces of every kind of block, and its columns in another basis, against rows written out."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import marquardt.layers.blocks as traces
from marquardt.layers.blocks import Bilinear, Block, Explicit, Lookup, Nothing, Traces
from marquardt.metric import Turn
from support.blocks import bilinear
from support.reference import error

pytestmark = pytest.mark.usefixtures("double")


BLOCKS = {
    "linear": partial(bilinear, (2, 4, 1, 1, 3, 4)),
    "no bias": partial(bilinear, (2, 4, 1, 1, 3, 4), "weight"),
    "positions": partial(bilinear, (2, 4, 5, 1, 3, 4)),
    "few positions": partial(bilinear, (2, 4, 2, 1, 9, 8)),
    "few positions, no bias": partial(bilinear, (2, 4, 2, 1, 9, 8), "weight"),
    "groups": partial(bilinear, (2, 4, 5, 2, 3, 4)),
    "groups, one position": partial(bilinear, (2, 4, 1, 2, 3, 4)),
    "depthwise": partial(bilinear, (2, 4, 5, 3, 1, 4)),
    "no positions": partial(bilinear, (2, 4, 0, 1, 3, 4)),
    "lookup": lambda: Lookup(torch.randint(6, (4, 3)), torch.randn(2, 4, 3, 5), torch.zeros(6, 5)),
    "explicit": lambda: Explicit([torch.zeros(3, 2, 2), torch.zeros(4)], torch.randn(8, 16), 4),
}
EVERY_BLOCK = pytest.mark.parametrize("make", BLOCKS.values(), ids=BLOCKS)


def matrices(block: Block, found: Traces) -> Tensor:
    """The rows of some parameters as matrices: (m, G, O, I)"""
    pieces = block.rows(torch.float64).split([p.numel() for p in block.params], 1)
    known, shape = {id(p): piece for p, piece in zip(block.params, pieces, strict=True)}, found.left.shape[:2]
    return torch.cat([known[id(p)].view(block.m, *shape, -1) for p in found.params], 3)


def check(block: Block, found: list[Traces], side: int = traces.SIDE) -> None:
    assert [id(p) for t in found for p in t.params] == [id(p) for p in block.params]
    for t in found:
        X = matrices(block, t)
        left, right = torch.einsum("mgoi,mgpi->gop", X, X), torch.einsum("mgoi,mgoj->gij", X, X)
        for one, expected in ((t.left, left), (t.right, right)):
            if one is None or one.ndim == 2:
                expected = expected.diagonal(dim1=1, dim2=2)
            else:
                assert one.shape[1] <= side
            assert one is None or error(one, expected) < 1e-13


@EVERY_BLOCK
def test_partial_traces(make):
    block = make()
    found = block.partial_traces()
    check(block, found)
    if not isinstance(block, Explicit):
        assert len(found) == 1
        assert found[0].right.ndim == 3
        assert found[0].left.ndim == (2 if isinstance(block, Lookup) else 3)


@EVERY_BLOCK
def test_partial_traces_of_every_parameter_by_itself(make):
    block = make()
    found = block.partial_traces_apart()
    check(block, found)
    for p, t in zip(block.params, found, strict=True):
        assert t.left.shape[:2] == (1, len(p))
        assert (t.right is None) == (p.ndim < 2)


def test_in_slabs(monkeypatch):
    """Two samples at a time, and some tokens."""
    monkeypatch.setattr("marquardt.layers.blocks.SLAB", 2 * 8 * 5)
    for make in (BLOCKS["positions"], BLOCKS["lookup"]):
        block = make()
        check(block, block.partial_traces())
    assert len(list(BLOCKS["positions"]().parts())) == 2


@EVERY_BLOCK
def test_of_long_sides_there_is_the_diagonal(make, monkeypatch):
    monkeypatch.setattr(traces, "SIDE", 3)
    block = make()
    found = block.partial_traces()
    check(block, found, side=3)
    assert any(t.right is not None and t.right.ndim == 2 for t in found)


@pytest.mark.parametrize("I", [1, 0])
def test_scales_and_lone_biases_have_a_diagonal(I):
    """A scale and a shift for each of three outputs, or shifts alone."""
    block = Bilinear(
        torch.randn(4, 5, 3, I), torch.randn(2, 4, 5, 3, 1), torch.zeros(3) if I else None, torch.zeros(3)
    )  # fmt: skip
    found = block.partial_traces()
    check(block, found)
    assert [t.right for t in found] == [None] * (1 + I)


def turns(block: Block, apart: bool) -> list[Turn]:
    """Some W for each of its layers."""
    found, made = block.partial_traces_apart() if apart else block.partial_traces(), []
    places = {id(p): i for i, p in enumerate(block.params)}
    for t in found:
        left, right = torch.randn_like(t.left), None if t.right is None else torch.randn_like(t.right)
        made.append(Turn([places[id(p)] for p in t.params], left, right))
    return made


def whole(side: Tensor | None) -> Tensor:
    if side is None:
        return torch.ones(1, 1, 1)
    return side if side.ndim == 3 else torch.diag_embed(side)


@pytest.mark.parametrize("apart", [False, True])
@EVERY_BLOCK
def test_turned_columns(make, apart):
    """J̃Wᵀ, layer by layer, by torch.kron"""
    block = make()
    layers = turns(block, apart)
    found = block.turned(layers).rows(torch.float64)
    rows, sizes = block.rows(torch.float64), [p.numel() for p in block.params]
    pieces = rows.split(sizes, 1)
    for layer in layers:
        G, O = layer.left.shape[:2]
        X = torch.cat([pieces[i].view(block.m, G, O, -1) for i in layer.places], 3)
        Ws = zip(whole(layer.left), whole(layer.right).expand(G, -1, -1), strict=True)
        turned = [X[:, g].flatten(1) @ torch.kron(*W).T for g, W in enumerate(Ws)]
        there = [found.split(sizes, 1)[i] for i in layer.places]
        assert error(torch.cat(there, 1), torch.cat(turned, 1)) < 1e-13
    assert [id(p) for p in block.turned(layers).params] == [id(p) for p in block.params]


def test_turned_blocks_keep_their_form():
    """Neither needs its rows: a Bilinear has no bias then."""
    block = BLOCKS["positions"]()
    turned = block.turned(turns(block, False))
    assert isinstance(turned, Bilinear)
    assert turned.bias is None
    K, other = torch.zeros(8, 8), turned.rows(torch.float64)
    turned.gram(K, turned)
    assert error(K, other @ other.T) < 1e-13
    table = BLOCKS["lookup"]()
    assert isinstance(table.turned(turns(table, False)), Lookup)
    nothing = Nothing([torch.zeros(2, 2)], 8, 4)
    assert nothing.turned([Turn([0], torch.ones(1, 2), torch.ones(1, 2))]) is nothing


def test_both_ways_with_several_positions():
    """From pairs of positions and from rows: each is the cheaper one of some layer here."""
    ways = {make()._positions_are_cheaper() for name, make in BLOCKS.items() if "positions" in name}
    assert ways == {False, True}
