"""Chunks: what one of them proves does not spoil the others."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import marquardt as mq
from support import reference
from support.cases import Fn
from support.modules import PLAIN, Attention
from support.reference import error
from support.steps import theta

pytestmark = pytest.mark.usefixtures("double")


def tied(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(torch.tanh(F.linear(x, weight, bias)), weight.t())


@pytest.mark.parametrize("damping", [mq.Identity(), mq.FactoredMaxDiagonal()], ids=str)
@pytest.mark.parametrize("chunk", [1, 2, 4])
@pytest.mark.parametrize("zeros", [[0], [3], [0, 1], [2, 3], [4, 5]], ids=str)
def test_zero_weights_in_chunks(zeros, chunk, damping):
    """A chunk without any weight proves nothing, and does not spoil what the others have proven."""
    model = nn.Sequential(nn.Linear(3, 2), Fn(tied, nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.zeros(2))))
    x, y, weight = torch.randn(6, 3), torch.randn(6, 2), torch.ones(6)
    weight[zeros] = 0
    q = reference.quadratic(model, "mse", x, y, weight)
    lin = mq.linearize(model, "mse", x, y, weight, chunk=chunk)
    C = mq.Gram(chunk).represent(lin)
    A = damping.update(None, C).positive()
    d = C.step(0.1 * A)
    assert error(d, q.step(0.1 * A.entries(lin.parameters.sizes))) < 1e-9


def silent() -> nn.Module:
    """A bias before InstanceNorm, which has an influence only on samples with both signs between the two."""
    first, norm = nn.Conv1d(1, 2, 1), nn.InstanceNorm1d(2)
    nn.init.ones_(first.weight)
    nn.init.zeros_(first.bias)
    square = Fn(lambda h, head: head(h.square()), nn.Linear(10, 1))
    return nn.Sequential(first, nn.LeakyReLU(0.3), norm, nn.Flatten(), square)


@pytest.mark.parametrize("rows", [mq.Exact(), mq.Sampled(1)], ids=["exact", "sampled"])
@pytest.mark.parametrize("order", [[0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]], ids=str)
def test_a_bias_is_heard_in_the_chunks_where_it_has_an_influence(order, rows):
    model, x, y = silent(), torch.randn(8, 1, 5), torch.randn(8, 1)
    both = torch.tensor(order).repeat_interleave(2).bool()[:, None, None]
    x = torch.where(both, x, x.abs())
    wanted = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
    lin = mq.linearize(model, "mse", x, y, chunk=2, rows=rows)
    G = mq.Dense(small=0).represent(lin)
    assert error(G.gradient, torch.cat([g.flatten() for g in wanted])) < 1e-10
    assert error(lin.gradient, torch.cat([g.flatten() for g in wanted])) < 1e-10
    assert G.diagonal()[2:4].min() > 1e-6  # the bias


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
