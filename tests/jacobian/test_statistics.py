"""Diagonal, traces and moments of G = J̃ᵀJ̃, at once and in chunks, against J̃ written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.jacobian import statistics
from marquardt.jacobian.linearization import Linearization
from support import reference
from support.cases import Fn, mlp
from support.modules import routed
from support.reference import error

pytestmark = pytest.mark.usefixtures("double")

CHUNKS = pytest.mark.parametrize("chunk", [None, 3], ids=["at once", "in chunks"])


def made(chunk: int | None) -> tuple[Linearization, reference.Quadratic, Tensor]:
    model, x, y = mlp(3, 4, 2), torch.randn(7, 3), torch.randn(7, 2)
    return mq.linearize(model, "mse", x, y, chunk=chunk), reference.quadratic(model, "mse", x, y), x


def check(lin: Linearization, G: Tensor) -> list[Any]:
    """Diagonal, traces and moments of G; no parameter is in two layers. The moments"""
    diagonals, layers = G.diagonal().split(lin.parameters.sizes), list(statistics.moments(lin))
    assert error(statistics.diagonal(lin), G.diagonal()) < 1e-12
    for which in (
        [i for members, _ in statistics.traces(lin) for i in members],
        [i for x in layers for i in x.members],
    ):
        assert len(which) == len(set(which))
    for members, trace in statistics.traces(lin):
        assert error(trace, sum(diagonals[i].sum() for i in members)) < 1e-12
    for layer in layers:
        for i, diagonal in zip(layer.members, layer.diagonals, strict=True):
            assert error(diagonal, diagonals[i]) < 1e-12
    return layers


@CHUNKS
def test_of_every_layer(chunk):
    """One trace for a weight and its bias, in the order of the layers; inputs too"""
    lin, expected, x = made(chunk)
    layers = check(lin, expected.G)
    inputs = {(0, 1): x, (2, 3): lin.objective.model[:2](x).detach()}
    assert sorted(members for members, _ in statistics.traces(lin)) == [[0, 1], [2, 3]]
    assert sorted(tuple(layer.members) for layer in layers) == [*inputs]
    for layer in layers:
        assert error(layer.inputs, inputs[tuple(layer.members)].square().mean(0).view(1, 1, -1)) < 1e-12


@CHUNKS
def test_of_a_layer_that_some_samples_do_not_reach(chunk):
    """Chunks that take other ways through the model: one trace for a layer, and no diagonal twice."""
    model, x, y = routed(2), torch.randn(8, 3), torch.randn(8, 2)
    x[4, 0] = 200.0  # to the first expert, in the second chunk alone
    with torch.no_grad():
        next(model.parameters()).mul_(0.01)  # whose tanh is not flat there
    lin, expected = mq.linearize(model, "mse", x, y, chunk=chunk), reference.quadratic(model, "mse", x, y)
    layers = check(lin, expected.G)
    assert [i for layer in layers if layer.inputs is not None for i in layer.members] == [4, 5]  # which all reach


@pytest.mark.parametrize("number", ["scale", "loss", "m", "gradient"])
def test_what_is_not_known_within_the_first_loop(number):
    """Pieces add up to it: it can be asked before the loop, or after it."""
    lin, *_ = made(3)
    next(lin.pieces())
    with pytest.raises(RuntimeError, match=r"cannot be asked within the first loop over lin\.pieces\(\)"):
        getattr(lin, number)
    first, *_ = made(3)
    getattr(first, number)
    within = [getattr(first, number) for _ in first.pieces()]
    assert len(within) == 3
    assert all(torch.equal(torch.as_tensor(x), torch.as_tensor(getattr(first, number))) for x in within)


def test_unused_parameters_have_no_trace():
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(2, 1)})
    model.forward = model["used"].forward
    lin = mq.linearize(model, "mse", torch.randn(4, 3), torch.randn(4, 2))
    assert [members for members, _ in statistics.traces(lin)] == [[0, 1]]
    assert [list(layer.members) for layer in statistics.moments(lin)] == [[0, 1]]
    assert not statistics.diagonal(lin)[8:].any()


def partial(lin: Linearization, G: Tensor) -> None:
    """Those of the blocks of G, in the forms that were found"""
    starts = lin.parameters.starts
    for layer in statistics.partial_traces(lin).layers:
        groups, outputs, inputs = layer.shape
        spans = [torch.arange(starts[i], starts[i] + lin.parameters.sizes[i]) for i in layer.members]
        index = torch.cat([span.view(groups, outputs, -1) for span in spans], 2)
        for g, which in enumerate(index.flatten(1)):
            block = G[which[:, None], which]
            if layer.right is None:
                assert error(layer.left[g], block.diagonal()) < 1e-12
                continue
            block = block.view(outputs, inputs, outputs, inputs)
            assert error(layer.left[g], torch.einsum("oipi->op", block)) < 1e-12
            assert error(layer.right[g], torch.einsum("oioj->ij", block)) < 1e-12


@CHUNKS
def test_partial_traces(chunk):
    lin, expected, _ = made(chunk)
    partial(lin, expected.G)
    found = statistics.partial_traces(lin)
    assert sorted(layer.members for layer in found.layers) == [(0, 1), (2, 3)]
    assert [layer.shape for layer in sorted(found.layers, key=lambda x: x.members)] == [(1, 4, 4), (1, 2, 5)]
    assert found.rows == lin.m == 14


@pytest.mark.parametrize(("rows", "count"), [(mq.Sampled(1), 14), (mq.Fraction(0.5), 14), (mq.Empirical(), 7)], ids=str)
def test_rows_of_partial_traces_are_all_exact_ones(rows, count):
    model, x, y = mlp(3, 4, 3), torch.randn(7, 3), torch.randint(3, (7,))
    lin = mq.linearize(model, "cross_entropy", x, y, rows=rows)
    assert statistics.partial_traces(lin).rows == count
    J = lin.rows()
    partial(lin, J.T @ J)


def by_ways(x: Tensor, layer: nn.Linear, head: nn.Module) -> Tensor:
    """Chunks with a large first input use the weight without its layer: the same function."""
    large = bool((x[:, 0] > 100).any())
    return head((x @ layer.weight.T + layer.bias if large else layer(x)).tanh())


def test_parameters_that_chunks_reach_in_different_ways_are_by_themselves():
    model, x, y = Fn(by_ways, nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(6, 3), torch.randn(6, 2)
    x[3:, 0] += 200
    lin = mq.linearize(model, "mse", x, y, chunk=3)
    J = lin.rows()
    partial(lin, J.T @ J)
    assert sorted(layer.members for layer in statistics.partial_traces(lin).layers) == [(0,), (1,), (2, 3)]
    G = mq.Gram(chunk=3).represent(lin)
    D = mq.KroneckerMetric().update(None, G)
    dense = torch.stack([D.times(e, lin.parameters.sizes) for e in torch.eye(lin.n)])
    expected = -torch.linalg.solve(J.T @ J + 0.3 * dense, lin.gradient)
    assert error(G.step(0.3 * D), expected) < 1e-9


@CHUNKS
def test_partial_traces_leave_out_what_no_sample_reaches(chunk):
    lin = mq.linearize(routed(4), "mse", torch.randn(7, 3), torch.randn(7, 2), chunk=chunk)
    J = lin.rows()
    partial(lin, J.T @ J)
    reached = {i for x in statistics.partial_traces(lin).layers if bool(x.trace.sum() > 0) for i in x.members}
    assert reached == {2, 3, 4, 5}
