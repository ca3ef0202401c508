"""Pieces: products of blocks that hold the parameters in another order, and what chunks prove for each other."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import marquardt as mq
from marquardt.jacobian.piece import adjoint, apply, dense, scattered, together
from marquardt.layers.blocks import Block, Explicit, Nothing
from marquardt.model.parameters import Parameters
from support import reference
from support.modules import PLAIN, Attention
from support.reference import error
from support.steps import theta

pytestmark = pytest.mark.usefixtures("double")


def made() -> tuple[list[Block], Tensor, Parameters]:
    """Four parameters; one block holds the last and the first of them, one has no influence."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    parameters = Parameters(model, list(model.parameters()))
    a, b, c, d = parameters.tensors
    rows = torch.randn(4, 13)
    rows[:, 6:9] = 0
    blocks = [
        Explicit([d, a], torch.cat([rows[:, 12:], rows[:, :6]], 1), 4),
        Nothing([b], 4, 4),
        Explicit([c], rows[:, 9:12], 4),
    ]
    return blocks, rows, parameters


def test_products():
    blocks, J, parameters = made()
    v, w = torch.randn(13), torch.randn(4)
    assert torch.equal(dense(blocks, torch.float64, parameters), J)
    assert error(apply(blocks, v, parameters), J @ v) < 1e-14
    assert error(adjoint(blocks, w, parameters), J.T @ w) < 1e-14
    blocks[1].adjoint(w, [filled := torch.ones(3)])
    assert not filled.any()
    diagonals = ((block, block.diagonal()) for block in blocks)
    assert error(scattered(diagonals, parameters), J.square().sum(0)) < 1e-14


def test_precision():
    blocks, J, parameters = made()
    assert dense(blocks, torch.float32, parameters).dtype == torch.float32
    assert adjoint(blocks, torch.ones(4, dtype=torch.float32), parameters).dtype == torch.float32
    assert error(apply(blocks, torch.ones(13, dtype=torch.float32), parameters), J.sum(1)) < 1e-5


def test_blocks_that_share_a_group_of_parameters_are_one():
    """A parameter without influence has zeros in it, and leaves its block."""
    blocks, J, parameters = made()
    a, b, c, d = parameters.tensors
    one, rest = together([*blocks[:1], Nothing([b, c], 4, 4)], [(0, 1)], torch.float64, parameters)
    assert [id(p) for p in one.params] == [id(d), id(a), id(b)]
    assert torch.equal(one.rows(torch.float64), torch.cat([J[:, 12:], J[:, :9]], 1))
    assert rest.empty
    assert [id(p) for p in rest.params] == [id(c)]
    found = together(blocks, [(0, 2)], torch.float64, parameters)
    assert len(found) == 2
    assert torch.equal(dense(found, torch.float64, parameters), J)


def test_blocks_that_share_no_group_stay():
    blocks, _, parameters = made()
    for groups in ([], [(3, 0)], [(1,)]):
        assert together(blocks, groups, torch.float64, parameters) == blocks
    nothing = [Nothing([p], 4, 4) for p in parameters.tensors]
    assert together(nothing, [(0, 1)], torch.float64, parameters) == nothing


# ---- chunks: what one of them proves does not spoil the others


DOUBLE = {"dtype": torch.float64}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight, self.bias)), self.weight.t())


@pytest.mark.parametrize("damping", [mq.Identity(), mq.FactoredMaxDiagonal()], ids=str)
@pytest.mark.parametrize("chunk", [1, 2, 4])
@pytest.mark.parametrize("zeros", [[0], [3], [0, 1], [2, 3], [4, 5]], ids=str)
def test_zero_weights_in_chunks(zeros, chunk, damping):
    """A chunk without any weight proves nothing, and does not spoil what the others have proven."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), Tied()).double()
    x, y, weight = torch.randn(6, 3, **DOUBLE), torch.randn(6, 2, **DOUBLE), torch.ones(6, **DOUBLE)
    weight[zeros] = 0
    q = reference.quadratic(model, "mse", x, y, weight)
    lin = mq.linearize(model, "mse", x, y, weight, chunk=chunk)
    C = mq.Gram(chunk).represent(lin)
    A = damping.update(None, C).positive()
    d = C.step(0.1 * A)
    assert error(d, q.step(0.1 * A.entries(lin.parameters.sizes))) < 1e-9


class Silent(nn.Module):
    """A bias before InstanceNorm, which has an influence only on samples with both signs between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(1, 2, 1), nn.LeakyReLU(0.3), nn.InstanceNorm1d(2), nn.Flatten())
        self.head = nn.Linear(10, 1)
        with torch.no_grad():
            self.layers[0].weight.fill_(1.0)
            self.layers[0].bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).square())


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("rows", [mq.Exact(), mq.Sampled(1)], ids=["exact", "sampled"])
@pytest.mark.parametrize("order", [[0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]], ids=str)
def test_a_bias_is_heard_in_the_chunks_where_it_has_an_influence(order, rows):
    model, x, y = Silent(), torch.randn(8, 1, 5), torch.randn(8, 1)
    both = torch.tensor(order).repeat_interleave(2).bool()[:, None, None]
    x = torch.where(both, x, x.abs())
    wanted = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
    lin = mq.linearize(model, "mse", x, y, chunk=2, rows=rows)
    G = mq.Dense(small=0).represent(lin)
    assert error(G.gradient, torch.cat([g.flatten() for g in wanted])) < 1e-10
    assert error(lin.gradient, torch.cat([g.flatten() for g in wanted])) < 1e-10
    assert G.diagonal()[2:4].min() > 1e-6  # the bias


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("batch_first", [True, False])
def test_what_is_proven_on_one_sample_holds_for_no_other_batch(batch_first):
    model, x, y = Attention(batch_first), torch.randn(8, 8, 4), torch.randint(3, (8,))
    parts = {"curvature": mq.Gram(chunk=2), "damping": mq.Identity(), **PLAIN}
    lm = mq.LM(model, "cross_entropy", **parts)
    lm.step(x[:1], y[:1])
    other = copy.deepcopy(model)
    if not batch_first:  # the first dimension is time: parts of it are another function
        with pytest.raises(ValueError, match="chunk=2: the outputs of a sample depend on the other samples"):
            lm.step(x, y)
        return
    lm.step(x, y)
    mq.LM(other, "cross_entropy", **parts).step(x, y)
    assert error(theta(model), theta(other)) < 1e-10
