"""Batches that cannot be cut, and samples that depend on each other: what works by default, and what is refused."""

from __future__ import annotations

import copy
import itertools
import sys

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.losses import Residual
from support.cases import Fn
from support.steps import state, unharmed
from support.unchanged import changes, refused, world


def points(inner: int, edge: int):
    """Residuals inside and at the edge, joined."""
    u = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 1))
    model = Fn(lambda inner, edge, u: torch.cat([u(inner) - inner, u(edge)]), u)
    return model, Residual(), (torch.rand(inner, 1), torch.rand(edge, 1)), None


def listed():
    """Logits of all tokens in one list: (N·T, C)"""
    x = torch.randint(7, (6, 5))
    model = Fn(lambda x, table, head: head(table(x)).flatten(0, 1), nn.Embedding(7, 4), nn.Linear(4, 7))
    return model, "cross_entropy", x, x.flatten()


BATCHES = {"points": lambda: points(20, 12), "as many": lambda: points(16, 16), "listed": listed}
EVERY_BATCH = pytest.mark.parametrize("build", BATCHES.values(), ids=BATCHES)


@EVERY_BATCH
@pytest.mark.parametrize(
    "curvature", [mq.Auto(chunk=4), mq.Dense(chunk=4), mq.Gram(chunk=4), mq.MatrixFree(chunk=4)],
    ids=lambda c: type(c).__name__,
)  # fmt: skip
def test_chunks_are_refused(build, curvature):
    model, loss, x, y = build()
    opt = mq.LM(model, loss, curvature=curvature)
    with unharmed(model, opt, "chunk=4", "cannot be cut", "leave chunk out"):
        opt.step(x, y)


@EVERY_BATCH
@pytest.mark.parametrize("part", [0.5, 0.02])
def test_a_part_of_the_samples_is_refused(build, part):
    """Also if the samples that are drawn happen to be among the first of the inputs."""
    model, loss, x, y = build()
    opt = mq.LM(model, loss, rows=mq.Fraction(part))
    with unharmed(model, opt, "Fraction", "outputs", "mq.Sampled(1)"):
        opt.step(x, y)


@EVERY_BATCH
def test_whole_batches_train(build):
    model, loss, x, y = build()
    opt = mq.LM(model.eval(), loss)
    steps = [opt.step(x, y) for _ in range(6)]
    assert steps[-1].new_loss < 0.5 * steps[0].loss


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def test_batch_norm_trains():
    """By default, on changing batches; its running statistics are those of one forward pass a step."""
    model = normalised()
    opt = mq.LM(model, "cross_entropy")
    losses = []
    for _ in range(30):
        x = torch.randn(64, 3)
        losses.append(opt.step(x, (x[:, 0] > 0).long()).loss)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert model[1].num_batches_tracked == state(opt)["accepted"]
    assert opt.plan.startswith("MatrixFree(chunk=None")


def test_chunks_of_batch_norm_are_refused():
    for curvature in (mq.Auto(chunk=8), mq.MatrixFree(chunk=8), mq.MatrixFree(chunk=1)):
        with refused("BatchNorm1d", "eval()"):
            mq.LM(normalised(), "cross_entropy", curvature=curvature)


def squeezed() -> nn.Module:
    """Of a single sample the outputs lose its dimension."""
    return Fn(lambda x, net: net(x).squeeze(), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))


def standardised(x: Tensor, first: nn.Module, last: nn.Module) -> Tensor:
    """By a function, which is no layer that can be found; torch refuses a single sample."""
    return last(nn.functional.batch_norm(first(x), None, None, training=True)).squeeze(1)


CUT = pytest.mark.parametrize("curvature", [mq.Auto, mq.Dense, mq.Gram, mq.MatrixFree, mq.EKFAC])


@CUT
@pytest.mark.parametrize(("N", "chunk"), [(9, 4), (9, 8), (13, 4), (7, 3)])
def test_no_sample_is_left_by_itself(curvature, N, chunk):
    """Parts are as even as can be."""
    model = squeezed().double()
    x = torch.randn(N, 3, dtype=torch.float64)
    whole = mq.LM(copy.deepcopy(model), "mse", curvature=curvature()).step(x, x[:, 0])
    step = mq.LM(model, "mse", curvature=curvature(chunk=chunk)).step(x, x[:, 0])
    assert step.new_loss == pytest.approx(whole.new_loss, rel=1e-6)


@pytest.mark.parametrize("curvature", [mq.Auto, mq.Dense, mq.Gram, mq.MatrixFree])
def test_parts_that_depend_on_the_others_are_named_before_torch_fails(curvature):
    model = Fn(standardised, nn.Linear(3, 4), nn.Linear(4, 1))
    opt = mq.LM(model, "mse", curvature=curvature(chunk=4))
    x = torch.randn(9, 3)
    with unharmed(model, opt, "chunk=4", "depend on the other samples", "leave chunk out"):
        opt.step(x, x[:, 0])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors take no notes")
@CUT
@pytest.mark.parametrize(("N", "chunk"), [(9, 1), (3, 2)])
def test_a_sample_by_itself_that_the_model_cannot_take(curvature, N, chunk):
    """What the model raises stays what it is, and says where it comes from."""
    model = squeezed()
    opt = mq.LM(model, "mse", curvature=curvature(chunk=chunk))
    x = torch.randn(N, 3)
    before = world(model, opt)
    with pytest.raises((TypeError, ValueError)) as caught:
        opt.step(x, x[:, 0])
    assert f"chunk={chunk}: a sample went through the model by itself" in caught.value.__notes__[0]
    assert changes(before, world(model, opt)) == []


# ---- anything


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_batches_of_any_size(seed, dtype):
    """Random networks, and another number of samples in every step."""
    torch.manual_seed(seed)
    sizes = [4, *torch.randint(3, 40, (seed % 3,)).tolist(), [1, 3, 50][seed % 3]]
    layers = [[nn.Linear(a, b), nn.Tanh()] for a, b in itertools.pairwise(sizes)]
    model = nn.Sequential(*itertools.chain(*layers))[:-1].to(dtype)
    W = torch.randn(4, sizes[-1], dtype=dtype)
    opt = mq.LM(model, "mse" if seed % 2 else "huber", curvature=mq.Auto(inertia=0.8, work=[3.0, 30.0][seed // 3]))
    for N in torch.randint(1, 90, (8,)).tolist():
        x = torch.randn(N, 4, dtype=dtype)
        step = opt.step(x, (x @ W).sin())
        assert step.new_loss <= step.loss or step.rule == "uphill"
        plan = state(opt)["plan"]
        assert plan["shapes"]["N"] >= N
        assert opt.plan.startswith(plan["kind"])
        assert "gradient" in opt.plan
    x = torch.randn(64, 4, dtype=dtype)
    fixed = [opt.step(x, (x @ W).sin()) for _ in range(6)]
    assert min(step.new_loss for step in fixed) < fixed[0].loss
    plan = state(opt)["plan"]
    assert plan["sampled"] is None  # on the same data nothing is cut
    assert plan["fraction"] is None


def test_batch_norm_is_told_once():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    opt = mq.LM(model, "cross_entropy")
    notes = [opt.step(torch.randn(16, 3), torch.randint(2, (16,))).note for _ in range(3)]
    assert "BatchNorm" in notes[0]
    assert not any("BatchNorm" in note for note in notes[1:])
