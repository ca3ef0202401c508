"""What ranks share besides one batch: several of them, random layers, float32, wrapped models, BatchNorm, groups."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import marquardt as mq
from support.ranks import run, shard
from support.reference import error
from support.steps import theta

REPRESENTATIONS = {
    "dense": mq.Dense(),
    "gram": mq.Gram(),
    "kronecker": mq.Kronecker(),
    "ekfac": mq.EKFAC(),
    "hessian": mq.Hessian(),
    "matrix-free": mq.MatrixFree(),
    "auto": mq.Auto(),
}


def data(N: int = 24) -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    return torch.randn(N, 3), torch.randint(3, (N,))


def network(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(3, 6), *(middle or [nn.Tanh()]), nn.Linear(6, 3))


def mine(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(shard(t, dist.get_rank(), dist.get_world_size()) for t in tensors)


def trained(
    step: Callable[[mq.LM, int], mq.Step], model: nn.Module, curvature: Any = None
) -> tuple[Tensor, list[float]]:
    options = {} if curvature is None else {
        "curvature": curvature, "schedule": mq.Constant(30.0 if isinstance(curvature, mq.Hessian) else 1.0)
    }  # fmt: skip
    opt = mq.LM(model, "cross_entropy", group=dist.group.WORLD, **options)
    losses = [step(opt, number).loss for number in range(3)]
    return theta(model), losses


def in_float32() -> dict[str, Any]:
    x, y = mine(*data())
    every = {**REPRESENTATIONS, "default": None}
    return {
        name: trained(lambda opt, _: opt.step(x.float(), y), network().float(), curvature)
        for name, curvature in every.items()
    }


def over_batches() -> dict[str, Any]:
    """step_over, of which a rank may have more batches than another one."""
    x, y = data(30)
    weight = torch.linspace(0.5, 2, 30)
    batches = [(x[i : i + 7], y[i : i + 7], weight[i : i + 7]) for i in range(0, 30, 7)]  # the last one has 2
    own = batches[dist.get_rank() :: dist.get_world_size()]
    every = {**REPRESENTATIONS, "dense-chunked": mq.Dense(chunk=3)}
    del every["gram"]  # refuses several batches
    return {name: trained(lambda opt, _: opt.step_over(own), network(), curvature) for name, curvature in every.items()}


RANDOM = {"dropout": lambda: nn.Dropout(0.3), "rrelu": lambda: nn.RReLU()}
CHUNKED = {"dense": mq.Dense(chunk=12), "gram": mq.Gram(chunk=12), "kronecker": mq.Kronecker(chunk=12)}


def random_layers() -> dict[str, Any]:
    """Rank r begins with the random numbers that piece r of one process has."""
    batch, first = mine(*data()), data()[0][:12]

    def step(opt: mq.LM, number: int) -> mq.Step:
        torch.manual_seed(number)
        for _ in range(dist.get_rank()):
            opt.model(first)  # as if the piece before had been seen
        return opt.step(*batch)

    cases = itertools.product(RANDOM.items(), CHUNKED.items())
    return {f"{kind}-{name}": trained(step, network(layer()), curvature) for (kind, layer), (name, curvature) in cases}


@pytest.mark.parametrize(
    ("function", "several", "close"),
    [(in_float32, (2, 4), 1e-4), (over_batches, (2, 3), 1e-10), (random_layers, (2,), 1e-10)],
)
def test_steps_are_those_of_one_process(double, function, several, close):
    (expected,) = run(function, 1)
    for ranks in several:
        for found in run(function, ranks):
            for name, (end, losses) in found.items():
                iterative = name in ("matrix-free", "auto")  # which ends early, and rounding says when
                assert error(end, expected[name][0]) < (max(close, 1e-6) if iterative else close), name
                assert losses == pytest.approx(expected[name][1], rel=10 * close), name


def wrapped() -> tuple[Tensor, Tensor, str]:
    """DistributedDataParallel has its own copies of the weights of rank 0, and LM its process group."""
    torch.manual_seed(dist.get_rank())
    model, plain, other = (
        nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)) for _ in range(3)
    )  # of other weights on every rank
    opt = mq.LM(DistributedDataParallel(model), "cross_entropy")
    plain.load_state_dict(model.state_dict())
    alone = mq.LM(plain, "cross_entropy", group=False)
    for _ in range(3):
        opt.step(*mine(*data()))
        alone.step(*data())
    with pytest.raises(mq.RankError) as refused:
        mq.LM(other, "cross_entropy").step(*mine(*data()))
    return theta(model), theta(plain), str(refused.value)


def test_wrapped_models(double):
    for found, alone, words in run(wrapped, 2):
        assert error(found, alone) < 1e-10
        assert "parameter '0.weight' is not the same on all ranks" in words
        assert "DistributedDataParallel" in words


class ByHalves(nn.Module):
    """What BatchNorm does to a batch that two ranks share."""

    def __init__(self, layer: nn.BatchNorm1d) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        halves = [(h - h.mean(0)) / (h.var(0, correction=0) + 1e-5).sqrt() for h in x.chunk(2)]
        return torch.cat(halves) * self.layer.weight + self.layer.bias


def normalised() -> tuple[Tensor, Tensor, list[str]]:
    model, plain = network(nn.BatchNorm1d(6)), network(nn.BatchNorm1d(6))
    plain[1] = ByHalves(plain[1])
    options = {"curvature": mq.MatrixFree(tolerance=0.0), "schedule": mq.Constant(1.0), "damping": mq.Identity()}
    opt, alone = mq.LM(model, "cross_entropy", **options), mq.LM(plain, "cross_entropy", group=False, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            opt.step(*mine(*data()))
            alone.step(*data())
    buffers = torch.cat([b.double().flatten() for b in model.buffers()])
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(network(nn.BatchNorm1d(6)))
    with pytest.raises(ValueError, match=r"SyncBatchNorm.*GroupNorm"):
        mq.LM(synced, "cross_entropy", curvature=mq.MatrixFree()).step(*mine(*data()))
    mq.LM(synced.eval(), "cross_entropy").step(*mine(*data()))
    return torch.cat([theta(model), buffers]), theta(plain), [str(w.message) for w in said]


def test_batch_normalisation(double):
    first, second = run(normalised, 2)
    for found, alone, _ in (first, second):
        assert error(found[: len(alone)], alone) < 1e-6
    assert torch.equal(first[0], second[0])  # the running statistics too
    assert sum("samples of each rank alone" in words for words in first[2]) == 1
    assert not any("samples of each rank alone" in words for words in second[2])


def sub_groups() -> tuple[Tensor, Tensor]:
    """Two pairs of ranks, each with a run of its own; and one of a mesh."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = dist.get_rank() // 2
    x, y = data()
    x = x + pair  # other data
    model, alone = network(), network()
    opt = mq.LM(model, "cross_entropy", group=groups[pair])
    one = mq.LM(alone, "cross_entropy", group=False)
    half = slice(0, 12) if dist.get_rank() % 2 == 0 else slice(12, 24)
    for _ in range(3):
        opt.step(x[half], y[half])
        one.step(x, y)
    mesh = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    assert mq.LM(network(), "cross_entropy", group=mesh["dp"]).step(*mine(*data())).accepted
    with pytest.raises(ValueError, match="no member"):
        mq.LM(network(), "cross_entropy", group=groups[1 - pair])
    return theta(model), theta(alone)


def test_groups_of_some_ranks(double):
    for found, alone in run(sub_groups, 4):
        assert error(found, alone) < 1e-10


def destroyed() -> tuple[bool, str]:
    """What is left of the group while an optimizer lives that had it, and what the optimizer says."""
    group, opt = weakref.ref(dist.group.WORLD), mq.LM(network(), "cross_entropy")
    opt.step(*mine(*data()))
    ranks = opt._ranks
    dist.destroy_process_group()
    gc.collect()
    with pytest.raises(mq.RankError) as refused:
        ranks.same("anything")
    return group() is None, str(refused.value)


def test_a_group_that_is_destroyed_is_gone(double):
    """One that lives until the interpreter ends may abort the process (pytorch#190489)."""
    for gone, words in run(destroyed, 2):
        assert gone
        assert "has been destroyed: make another optimizer" in words


def with_a_control_group() -> tuple[Tensor, bool]:
    """A group that is not gloo's has one beside it for the meetings, which torch alone keeps alive."""
    true, dist.get_backend_config = dist.get_backend_config, lambda group: "cuda:nccl"
    model = network()
    opt = mq.LM(model, "cross_entropy")
    for _ in range(3):
        opt.step(*mine(*data()))
        gc.collect()
    dist.get_backend_config = true
    return theta(model), dist.get_world_size() > 1 and opt._ranks._control is not opt._ranks.group


def test_a_control_group_lives_as_long_as_the_group(double):
    (expected,) = run(with_a_control_group, 1)
    for end, another in run(with_a_control_group, 2):
        assert another
        assert error(end, expected[0]) < 1e-10
