"""LM on parameters that FSDP2 has sharded: the steps of the plain model on one process, in less memory per rank."""

from __future__ import annotations

import ctypes
import gc
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import outcomes, run, shard
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import marquardt as mq

STEPS = 3


# Models. Their layers have 5, 7 or 3 outputs, so that the shards of two ranks are unlike, and those of one are empty.


def mlp(act: Callable[[], nn.Module] = nn.Tanh, sizes: tuple[int, ...] = (4, 7, 5, 3), bias: bool = True) -> nn.Module:
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*[m for a, b in pairs for m in (nn.Linear(a, b, bias=bias), act())][:-1])


def one_output() -> nn.Module:
    return mlp(sizes=(4, 7, 5, 1))


class Words(nn.Module):
    """An embedding, a convolution, norms and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.norm = nn.Embedding(9, 6), nn.Conv1d(6, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.again, self.after, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.mix(self.table(tokens).mT)).mT  # (N, 5, 4)
        return self.head(self.after(torch.tanh(self.again(torch.tanh(self.again(x))))).mean(1))


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """As it is usual: every module with parameters by itself, then the rest"""
    for module in list(model.modules()):
        if module is not model and next(module.parameters(recurse=False), None) is not None:
            fully_shard(module, **options)
    return fully_shard(model, **options)


def as_one(model: nn.Module) -> nn.Module:
    return fully_shard(model)


def layers_alone(model: nn.Module) -> nn.Module:
    for module in model.children():
        if isinstance(module, nn.Linear):
            fully_shard(module)
    return model


# Data


def regression(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(13, 4, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.sin(x[:, :3] * 2).to(dtype)


def single(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, y = regression(dtype)
    return x, y[:, :1]


def classes(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, _ = regression(dtype)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def words(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 9, (13, 5), generator=generator), torch.randint(0, 3, (13,), generator=generator)


@dataclass
class Case:
    """A model, its data, and how it is trained."""

    model: Callable[[], nn.Module] = mlp
    data: Callable[[torch.dtype], tuple[Tensor, Tensor]] = regression
    loss: str = "mse"
    options: dict[str, Any] = field(default_factory=dict)
    weighted: bool = False
    shard: Callable[[nn.Module], nn.Module] = sharded
    dtype: torch.dtype = torch.float64
    sizes: tuple[int, int] = (9, 4)  # samples of each of two ranks


def gram(**options: Any) -> dict[str, Any]:
    return {"curvature": mq.Gram(), "damping": mq.MeanEigenvalue(), **options}


def relu() -> nn.Module:
    return mlp(nn.ReLU)


def without_biases() -> nn.Module:
    return mlp(bias=False)


CASES = {
    "defaults": Case(),
    "defaults, classes": Case(data=classes, loss="cross_entropy"),
    "gram, ReLU": Case(relu, options=gram(momentum=None, line_search=None, average=None)),
    "gram, identity": Case(options=gram(damping=mq.Identity(), schedule=mq.GainRatio())),
    "gram, one output": Case(one_output, single, options=gram()),
    "gram, without biases": Case(without_biases, options=gram()),
    "gram, weights": Case(data=classes, loss="cross_entropy", options=gram(), weighted=True),
    "gram, weight decay": Case(options=gram(weight_decay=mq.WeightDecay(0.01, exclude="bias", towards="start"))),
    "gram, momentum": Case(options=gram(momentum=mq.AdaptiveMomentum(dP=1e9, cap=True), acceptance=mq.Uphill())),
    "gram, quadratic momentum": Case(options=gram(momentum=mq.QuadraticMomentum(), radius=0.5)),
    "gram, max-diagonal": Case(one_output, single, options=gram(damping=mq.MaxDiagonal())),
    "gram, line search": Case(options=gram(damping=mq.Identity(), schedule=mq.Constant(1e-9), line_search=mq.Grid())),
    "gram, sampled": Case(data=classes, loss="cross_entropy", options=gram(rows=mq.Sampled(2))),
    "gram, a part of the samples": Case(options=gram(rows=mq.Fraction(0.5))),
    "gram, empirical": Case(data=classes, loss="cross_entropy", options=gram(rows=mq.Empirical())),
    "gram, Huber": Case(loss="huber", options=gram()),
    "gram, as one": Case(options=gram(), shard=as_one),
    "gram, layers alone": Case(options=gram(), shard=layers_alone),
    "gram, words": Case(Words, words, "cross_entropy", gram()),
    "matrix-free": Case(data=classes, loss="cross_entropy", options=gram(curvature=mq.MatrixFree())),
    "matrix-free, max-diagonal": Case(options=gram(curvature=mq.MatrixFree(), damping=mq.MaxDiagonal())),
    "float32": Case(data=classes, loss="cross_entropy", options=gram(), dtype=torch.float32),
}


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.model().to(case.dtype)


def trained(case: Case, model: nn.Module, rank: int, ranks: int) -> tuple[list[tuple[Any, ...]], mq.LM]:
    x, y = case.data(case.dtype)
    weight = torch.linspace(0.5, 2, len(x), dtype=case.dtype) if case.weighted else None
    sizes = case.sizes if ranks == 2 else (sum(case.sizes),)
    batch = [None if t is None else shard(t, rank, ranks, sizes) for t in (x, y, weight)]
    opt = mq.LM(model, case.loss, **case.options)
    steps = [opt.step(*batch) for _ in range(STEPS)]
    return [(s.loss, s.new_loss, s.accepted, s.rule, s.lam, s.lr) for s in steps], opt


def on_ranks(names: list[str]) -> dict[str, Any]:
    return {name: on_rank(CASES[name]) for name in names}


def on_rank(case: Case) -> tuple[list[tuple[Any, ...]], list[Tensor], list[Tensor]]:
    model = case.shard(model_of(case))
    steps, opt = trained(case, model, dist.get_rank(), dist.get_world_size())
    weights = [p.full_tensor().detach() for p in model.parameters()]
    averaged = weights
    if opt.average is not None:
        with opt.averaged():
            averaged = [p.full_tensor().detach() for p in model.parameters()]
    return steps, weights, averaged


@pytest.fixture(scope="module")
def both() -> list[dict[str, Any]]:
    """All cases on two ranks, in one process group."""
    return run(on_ranks, 2, list(CASES), timeout=120)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_plain_model(name: str, both: list[dict[str, Any]]) -> None:
    case = CASES[name]
    model = model_of(case)
    steps, opt = trained(case, model, 0, 1)
    weights = [p.detach() for p in model.parameters()]
    close = 1e-10 if case.dtype == torch.float64 else 1e-6
    for found in both:
        mine, parameters, averaged = found[name]
        for a, b in zip(mine, steps, strict=True):
            assert a[2:4] == b[2:4]
            assert [*a[:2], *a[4:]] == pytest.approx([*b[:2], *b[4:]], rel=10 * close)
        for p, q in zip(parameters, weights, strict=True):
            assert (p - q).abs().max() <= close * max(1, q.abs().max())
        if opt.average is not None:
            with opt.averaged():
                for p, q in zip(averaged, model.parameters(), strict=True):
                    assert (p - q).abs().max() <= close * max(1, q.abs().max())
