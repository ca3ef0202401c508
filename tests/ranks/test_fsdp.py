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
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import marquardt as mq
from support.ranks import run, shard

STEPS = 2


# Models. Their layers have 5, 7 or 3 outputs, so that the shards of two ranks are unlike, and those of one are empty.


def mlp(act: Callable[[], nn.Module] = nn.Tanh, sizes: tuple[int, ...] = (4, 7, 5, 3), bias: bool = True) -> nn.Module:
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*[m for a, b in pairs for m in (nn.Linear(a, b, bias=bias), act())][:-1])


def one_output() -> nn.Module:
    return mlp(sizes=(4, 7, 5, 1))


def groups() -> nn.Module:
    """Three groups of two outputs each, which two ranks cannot have whole, and a bias without influence"""
    layers = nn.Conv1d(4, 6, 1), nn.Tanh(), nn.Conv1d(6, 6, 1, groups=3), nn.GroupNorm(2, 6), nn.Flatten()
    return nn.Sequential(nn.Unflatten(1, (4, 1)), *layers, nn.Linear(6, 3))


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
    plain: dict[str, Any] = field(default_factory=dict)  # what the plain model has in the place of some of these
    close: float = 1e-10
    weighted: bool = False
    shard: Callable[[nn.Module], nn.Module] = sharded
    dtype: torch.dtype = torch.float64
    sizes: tuple[int, ...] = (4, 5, 3, 1)  # samples of four ranks: 9 and 4 are those of two


def gram(**options: Any) -> dict[str, Any]:
    return {"curvature": mq.Gram(), "damping": mq.MeanEigenvalue(), **options}


def relu() -> nn.Module:
    return mlp(nn.ReLU)


def without_biases() -> nn.Module:
    return mlp(bias=False)


CASES = {
    "defaults": Case(plain={"damping": mq.MeanEigenvalue()}),
    "defaults, classes": Case(data=classes, loss="cross_entropy", plain={"damping": mq.MeanEigenvalue()}),
    "gram, ReLU": Case(relu, options=gram(momentum=None, line_search=None, average=None)),
    "gram, identity": Case(options=gram(damping=mq.Identity(), schedule=mq.GainRatio())),
    "gram, one output": Case(one_output, single, options=gram()),
    "gram, without biases": Case(without_biases, options=gram()),
    "gram, weights": Case(data=classes, loss="cross_entropy", options=gram(), weighted=True),
    "gram, weight decay": Case(options=gram(weight_decay=mq.WeightDecay(0.01, exclude="bias", towards="start"))),
    "gram, momentum": Case(options=gram(momentum=mq.AdaptiveMomentum(dP=1e9, cap=True), acceptance=mq.Uphill())),
    "gram, quadratic momentum": Case(options=gram(momentum=mq.QuadraticMomentum(), radius=0.5)),
    "gram, layer by layer": Case(one_output, single, options=gram(damping=mq.LayerMeanEigenvalue())),
    "gram, max-diagonal": Case(one_output, single, options=gram(damping=mq.MaxDiagonal())),
    "gram, line search": Case(options=gram(damping=mq.Identity(), schedule=mq.Constant(1e-3), line_search=mq.Grid())),
    "gram, sampled": Case(data=classes, loss="cross_entropy", options=gram(rows=mq.Sampled(2))),
    "gram, a part of the samples": Case(options=gram(rows=mq.Fraction(0.5))),
    "gram, empirical": Case(data=classes, loss="cross_entropy", options=gram(rows=mq.Empirical())),
    "gram, Huber": Case(loss="huber", options=gram()),
    "gram, as one": Case(options=gram(), shard=as_one),
    "gram, layers alone": Case(options=gram(), shard=layers_alone),
    "gram, words": Case(Words, words, "cross_entropy", gram()),
    "gram, groups": Case(groups, options=gram()),
    "matrix-free": Case(data=classes, loss="cross_entropy", options=gram(curvature=mq.MatrixFree()), close=1e-7),
    "matrix-free, max-diagonal": Case(options=gram(curvature=mq.MatrixFree(), damping=mq.MaxDiagonal()), close=1e-7),
    "float32": Case(data=classes, loss="cross_entropy", options=gram(), dtype=torch.float32, close=1e-6),
}


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.model().to(case.dtype)


def trained(case: Case, model: nn.Module, rank: int, ranks: int) -> tuple[list[tuple[Any, ...]], mq.LM]:
    x, y = case.data(case.dtype)
    weight = torch.linspace(0.5, 2, len(x), dtype=case.dtype) if case.weighted else None
    batch = [None if t is None else shard(t, rank, ranks, case.sizes) for t in (x, y, weight)]
    opt = mq.LM(model, case.loss, **(case.options | case.plain if ranks == 1 else case.options))
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
    return run(on_ranks, 2, list(CASES), timeout=240)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_plain_model(name: str, both: list[dict[str, Any]]) -> None:
    case = CASES[name]
    model = model_of(case)
    steps, opt = trained(case, model, 0, 1)
    weights = [p.detach() for p in model.parameters()]
    for found in both:
        mine, parameters, averaged = found[name]
        for a, b in zip(mine, steps, strict=True):
            assert a[2:4] == b[2:4]
            assert [*a[:2], *a[4:]] == pytest.approx([*b[:2], *b[4:]], rel=10 * case.close)
        for p, q in zip(parameters, weights, strict=True):
            assert (p - q).abs().max() <= case.close * max(1, q.abs().max())
        if opt.average is not None:
            with opt.averaged():
                for p, q in zip(averaged, model.parameters(), strict=True):
                    assert (p - q).abs().max() <= case.close * max(1, q.abs().max())


@pytest.mark.parametrize("ranks", [1, 4])
def test_other_numbers_of_ranks(ranks: int, both: list[dict[str, Any]]) -> None:
    names = ["gram, one output", "gram, words", "gram, groups"]
    for found in run(on_ranks, ranks, names, timeout=240):
        for name in names:
            for p, q in zip(found[name][1], both[0][name][1], strict=True):
                assert (p - q).abs().max() <= CASES[name].close


# From step to step


def resumed() -> None:
    case, weights = CASES["gram, momentum"], []
    x, y = (shard(t, dist.get_rank(), 2) for t in case.data(case.dtype))
    for resume in (False, True):
        model = case.shard(model_of(case))
        opt = mq.LM(model, case.loss, **case.options)
        for _ in range(2):
            opt.step(x, y)
            if resume:
                state, values = opt.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
                model = case.shard(model_of(case))
                model.load_state_dict(values)
                opt = mq.LM(model, case.loss, **case.options)
                opt.load_state_dict(state)
        weights.append([p.full_tensor().detach() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*weights, strict=True))
    state["marquardt"]["shard"] = [1 - dist.get_rank(), 2]
    check_refusals({"every rank loads the state that it saved": lambda: opt.load_state_dict(state)})


def test_every_rank_resumes_from_its_own_state() -> None:
    run(resumed, 2, timeout=240)


def evaluated_between() -> list[Tensor]:
    """The caller's own passes leave parameters gathered, which the step must not take for the present ones."""
    case = CASES["gram, as one"]
    model = case.shard(model_of(case))
    x, y = (shard(t, dist.get_rank(), 2, case.sizes) for t in case.data(case.dtype))
    for number in range(STEPS + 1):
        with torch.no_grad():
            model(x)
        if number == 0:
            opt = mq.LM(model, case.loss, **case.options)
        else:
            opt.step(x, y)
    return [p.full_tensor().detach() for p in model.parameters()]


def test_passes_of_the_caller_between_steps(both: list[dict[str, Any]]) -> None:
    for weights in run(evaluated_between, 2, timeout=240):
        assert all(torch.equal(p, q) for p, q in zip(weights, both[0]["gram, as one"][1], strict=True))


# Memory

WIDTH, LAYERS, SAMPLES = 768, 8, 8


def wide() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4))


def wide_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, WIDTH, generator=generator), torch.randn(SAMPLES, 4, generator=generator)


def resident(key: str) -> int:
    return 1024 * int(re.search(rf"{key}:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def peaks(in_shards: bool) -> tuple[list[int], list[Tensor]]:
    """Bytes that each step has above those before it, at most, and the weights in the end"""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back at once
    model = sharded(wide()) if in_shards else wide()
    opt = mq.LM(model, "mse", curvature=mq.Gram(), damping=mq.MeanEigenvalue())
    x, y = (shard(t, dist.get_rank(), dist.get_world_size()) for t in wide_data())
    found = []
    for _ in range(2):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = resident("VmRSS")
        opt.step(x, y)
        found.append(resident("VmHWM") - before)
    return found, [p.full_tensor().detach() if in_shards else p.detach() for p in model.parameters()]


def test_a_step_takes_little_more_than_half_of_the_memory() -> None:
    ((whole, weights),) = run(peaks, 1, False, timeout=240)
    size = 4 * sum(p.numel() for p in weights)
    assert min(whole) > 3 * size  # it is the parameters that take it
    for parts, found in run(peaks, 2, True, timeout=240):
        assert max(a / b for a, b in zip(parts, whole, strict=True)) < 0.65
        assert all((p - q).abs().max() < 1e-6 for p, q in zip(found, weights, strict=True))


# What is refused, before anything changes


def check_refusals(calls: dict[str, Callable[[], Any]]) -> None:
    """By words of the message, each of them"""
    for words, call in calls.items():
        with pytest.raises((TypeError, ValueError, mq.RankError), match=re.escape(words)):
            call()


class Own:
    """A damping that adds up over n by itself"""

    def update(self, D: Any, G: Any) -> Any:
        return mq.Diagonal(G.diagonal().sum())


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.scale.square())


def refused_when_made() -> None:
    mesh = init_device_mesh("cpu", (2,))
    square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("rows", "shards"))
    part = mlp()
    fully_shard(part[0])
    other = mlp(sizes=(4, 6, 4, 2), bias=False)
    for module in other:
        if isinstance(module, nn.Linear):
            fully_shard(module, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    normed = sharded(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)))
    half = sharded(mlp(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model = sharded(mlp())
    parallel = parallelize_module(mlp(), mesh, {"0": ColwiseParallel()})
    decay = [{"params": list(model.parameters()), "weight_decay": torch.tensor(0.1)}]
    batch = regression(torch.float64)

    def made(model: nn.Module = model, **options: Any) -> Callable[[], Any]:
        return lambda: mq.LM(model, "mse", **options)

    check_refusals({
        "parameter '2.weight' is not sharded, and parameter '0.weight' is": made(part),
        "sharded in their first dimension": made(other),
        "over a mesh of one dimension": made(sharded(mlp(), mesh=square)),
        "is a DTensor that nothing gathers": made(parallel, params=parallel[0].parameters()),
        "leave mp_policy= and offload_policy= out": made(half),
        "couples the samples": made(normed, curvature=mq.MatrixFree()),
        "curvature=Dense() needs all parameters on one rank": made(curvature=mq.Dense()),
        "curvature=Hessian() needs all parameters on one rank": made(curvature=mq.Hessian()),
        "curvature=Kronecker() needs all parameters on one rank": made(curvature=mq.Kronecker()),
        "curvature=EKFAC() needs all parameters on one rank": made(curvature=mq.EKFAC()),
        "needs all parameters on one rank": made(curvature=mq.MatrixFree(hessian=True)),
        "leave chunk out": made(curvature=mq.Gram(chunk=4)),
        "damping=FactoredMaxDiagonal() is not known to work with sharded": made(damping=mq.FactoredMaxDiagonal()),
        "is not known to work with sharded parameters": made(damping=Own()),
        "are not formed with sharded parameters": made(rows=mq.Sampled(1, together=True)),
        "weight_decay is a tensor": made(params=decay),
        "towards= takes": made(weight_decay=mq.WeightDecay(0.1, towards={})),
        "leave group=False out": made(group=False),
        "mq.fit takes no model whose parameters are sharded": lambda: mq.fit(model, batch, "mse"),
        "mq.posterior takes no model whose parameters are sharded": lambda: mq.posterior(model, "mse", batch),
        "mq.load_checkpoint take no model whose parameters are sharded":
            lambda: mq.save_checkpoint("run", model, made()()),
    })  # fmt: skip


def refused_in_a_step() -> None:
    rank = dist.get_rank()
    x, y = (shard(t, rank, 2) for t in regression(torch.float64))
    model = sharded(mlp().double())
    before = [p.to_local().clone() for p in model.parameters()]
    opt, later = (mq.LM(model, "mse", **gram()) for _ in range(2))
    bad = x.clone()
    bad[0, 0] = torch.nan if rank else 0.0
    later.curvature = mq.Dense()
    unruled = mq.LM(sharded(Squared().double()), "mse", **gram())
    check_refusals({
        "step_over does not take a model whose parameters are sharded": lambda: opt.step_over([(x, y)]),
        "the inputs hold NaN or infinite values": lambda: opt.step(bad, y),
        "the ranks do not agree on what comes next": lambda: opt.step(x[:, : 4 - rank], y),
        "the inputs are torch.float32, the parameters torch.float64": lambda: opt.step(x.float(), y),
        "curvature=Dense() needs all parameters on one rank": lambda: later.step(x, y),
        "the rows of parameter 'scale' cannot be found by a rule of its layer": lambda: unruled.step(x, y),
    })  # fmt: skip
    assert all(torch.equal(p.to_local(), q) for p, q in zip(model.parameters(), before, strict=True))
    assert opt.step(x, y).accepted


@pytest.mark.parametrize("function", [refused_when_made, refused_in_a_step])
def test_refusals(function: Callable[[], None]) -> None:
    run(function, 2, timeout=240)
