"""Whether a function couples samples: in which precision that is told, on which batches, and from which parts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marquardt as mq
from support.cases import mlp
from support.steps import lm, problem
from support.unchanged import changes, refused, world

N = 60
GEN = torch.Generator().manual_seed(0)
P, W = torch.randn(3, 3, generator=GEN), torch.tensor([0.5, 2.0, 1.0])
SEEN = nn.Sequential(nn.Linear(3, 5), nn.Tanh()).float().requires_grad_(False)
ROUGH = nn.Linear(3, 3).bfloat16().requires_grad_(False)


def data(dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(N, 2, dtype=torch.float64).to(dtype)
    return mlp(2, 4, 3).to(dtype), x, torch.cat((x.sin(), x[:, :1] * x[:, 1:]), 1)


# what holds float32 numbers, or computes with them, and couples nothing
HOLDERS = {
    "matrix": lambda z, y: ((z - y) @ P).square().sum(1),
    "matrix, scalar": lambda z, y: ((z - y) @ P).square().mean(),
    "class weights": lambda z, y: F.cross_entropy(z, y.argmax(1), weight=W, reduction="none"),
    "network": lambda z, y: (SEEN(z) - SEEN(y)).square().sum(1),
    "matrix, for few": lambda z, y: (z - y).square().sum(1) if len(z) > 9 else ((z - y) @ torch.eye(3)).square().sum(1),
    "cancelling": lambda z, y: (((z - y).sum(1).square() + (z - y).pow(4).sum(1)) / 2 - 0.4).mean(),
    "bank": lambda z, y: torch.cdist(z, P).square().sum(1) / 9 + (z - y).square().sum(1),
}  # fmt: skip
CASTERS = {
    "float": lambda z, y: (z.float() - y.float()).square().sum(1),
    "float and back": lambda z, y: (z.float() - y.float()).square().sum(1).double(),
    "float, mean": lambda z, y: (z.float() - y.float()).square().mean(),
    "float, sum": lambda z, y: (z.float() @ P - y.float()).square().sum(),
    "bfloat16": lambda z, y: ROUGH((z - y).bfloat16()).to(z).square().sum(1),
}


@pytest.mark.parametrize(
    ("fn", "dtype"),
    [
        *((fn, torch.float32) for fn in (*HOLDERS.values(), *CASTERS.values())),
        *((fn, torch.float64) for fn in CASTERS.values()),
    ],
    ids=[*HOLDERS, *CASTERS, *(f"{name}, less than the outputs" for name in CASTERS)],
)
def test_a_function_may_compute_in_float32(fn, dtype):
    model, x, y = data(dtype)
    opt = mq.LM(model, fn)
    steps = [opt.step(x, y) for _ in range(4)]
    assert steps[-1].new_loss < steps[0].loss


def test_what_rounding_allows_goes_by_the_precision():
    """Kernels for one sample may round otherwise: by 6 %, bfloat16 may, float32 does not."""
    model, x, y = data()
    squares = lambda e: (1 + e.to(x).square().sum(1) / 100) * (1.06 if len(e) == 1 else 1)  # noqa: E731
    assert mq.LM(model, lambda z, y: squares((z - y).bfloat16())).step(x, y).accepted
    with refused("couples the samples"):
        mq.LM(model, lambda z, y: squares((z - y).float())).step(x, y)


COUPLED = {
    "holds float32": lambda z, y: F.cross_entropy(z, y.argmax(1), weight=W),
    "computes in float32": lambda z, y: (z.float() - y.float()).square().mean().sqrt(),
    "per sample": lambda z, y: ((z - y) @ P).square().sum(1) / z.abs().max(),
    "by little": lambda z, y: (z - y).square().mean() * (1 + 1e-4 * z.mean()),
}


@pytest.mark.parametrize("fn", COUPLED.values(), ids=COUPLED)
def test_samples_that_are_coupled_are_seen_all_the_same(fn):
    model, x, y = data()
    opt = mq.LM(model, fn)
    before = world(model, opt)
    with refused("couples the samples"):
        opt.step(x, y)
    assert changes(before, world(model, opt)) == []


def test_what_fails_in_the_own_precision_is_the_error():
    """Not what float64 says to a matrix in float32."""
    model, x, y = data()
    with refused("fails with 1 of them", "shape"):
        mq.LM(model, lambda z, y: ((z - y).reshape(N, 3) @ P).square().sum(1)).step(x, y)


# what does not go through the outputs


def test_a_penalty_on_parameters_is_refused():
    """Its gradient would be lost: silently, the optimum would be another one."""
    model, x, y = problem()
    width = torch.ones(3, requires_grad=True)
    penalised = lambda z, y: (z - y).square().mean() + 0.1 * sum(p.square().sum() for p in model.parameters())  # noqa: E731
    hidden = model[0](x)
    for fn, shape in [
        (penalised, "shape ("),
        (lambda z, y: ((z - y) * width).square().sum(1), "shape (3,)"),
        (lambda z, y: (z - y).square().sum(1) + hidden.square().sum(), "requires gradients"),
    ]:
        opt = lm(model, fn)
        before = world(model, opt)
        with refused(shape, "is not an output of the model", "weight_decay=", '"residual"'):
            opt.step(x, y)
        with refused("output 'output'", "weight_decay="):
            lm(model, {"output": fn}).step(x, y)
        assert changes(before, world(model, opt)) == []


def test_targets_and_frozen_tensors_are_constants():
    model, x, y = problem()
    assert lm(model, lambda z, y: (z - y).square().sum(1)).step(x, y.clone().requires_grad_()).accepted
    frozen = mlp(3, 4).to(x.dtype).requires_grad_(False)
    assert lm(model, lambda z, y: (frozen(z) - frozen(y)).square().sum(1)).step(x, y).accepted


# shapes


@pytest.mark.parametrize(
    "reduced", [lambda e: e, lambda e: e.mean(1), lambda e: e.mean(), lambda e: e.sum()], ids=["no", "1", "mean", "sum"]
)
def test_broadcasting_is_named_as_the_cause(reduced):
    x = torch.randn(8, 2)
    opt = mq.LM(mlp(2, 3, 1).to(x.dtype), lambda z, y: reduced((z - y).square()))
    with refused("outputs have shape (8, 1), targets (8,)", "broadcasting pairs", "targets.unsqueeze(-1)"):
        opt.step(x, x.sum(1))
    opt = mq.LM(nn.Sequential(mlp(2, 3, 1), nn.Flatten(0)).to(x.dtype), lambda z, y: reduced((z - y).square()[:, :8]))
    with refused("outputs have shape (8,), targets (8, 1)", "targets.squeeze(-1)"):
        opt.step(x, x.sum(1, keepdim=True))


# later batches


def masked(z, y):
    kept = (y < 10).to(z)
    return ((z - y).square() * kept).sum() / kept.sum()


@pytest.mark.parametrize("holds", [False, True], ids=["float64", "own"])
@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_scalar_that_couples_a_later_batch(place, holds):
    """The first mask is all ones."""
    model, x, y = data()
    fn = (lambda z, y: masked(z @ torch.eye(3), y)) if holds else masked
    opt = mq.LM(model, fn)
    opt.step(x[:8], y[:8])
    later = y[8:16].clone()
    later[place, :2] = 20.0
    before = world(model, opt)
    with refused("couples the samples", "of two parts"):
        opt.step(x[8:16], later)
    assert changes(before, world(model, opt)) == []
    expected = masked(model(x[8:16]), y[8:16]).item()
    assert opt.step(x[8:16], y[8:16]).loss == pytest.approx(expected, rel=1e-5)


def test_what_is_told_of_a_batch():
    """A mask that leaves nothing, numbers that are not finite, and a sum that becomes a mean"""
    model, x, y = data()
    with refused("of two parts nan and", "mean over a mask is not finite if nothing of it is left"):
        mq.LM(model, masked).step(x, y.index_fill(0, torch.tensor(0), 20.0))
    kind = ["sum"]
    opt = mq.LM(model, lambda z, y: getattr((z - y).square(), kind[-1])())
    opt.step(x, y)
    with refused("the loss is nan"):
        opt.step(x, y * torch.nan)
    kind.append("mean")
    with refused("couples the samples"):
        opt.step(x, y)
