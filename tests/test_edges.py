"""The edges: process groups, losses of one's own, batches that are objects, averaged weights, loaded states, repr."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import marquardt as mq
from cases import default_dtype, mlp
from marquardt.losses import BinaryCrossEntropy, CrossEntropy, Elementwise, Fault, Huber, Residual
from test_bad_input import refused
from test_optimizer import changes, error, lm, one_thread, problem, same, stochastic, theta, trained, world  # noqa: F401


@pytest.fixture(autouse=True)
def double():
    with default_dtype(torch.float64):
        yield


# ---- process groups


RANKS = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, distribute_module
from torch.nn.parallel import DistributedDataParallel

import marquardt as mq

def says(make):
    try:
        make()
    except (TypeError, ValueError) as error:
        return str(error)
    return "nothing"

rank, file = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
x, y = torch.randn(8, 2), torch.randn(8, 3)
before = mq.LM(nn.Linear(2, 3), "mse")
before.step(x, y)
dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)
kept = [p.clone() for p in before.params]
assert f"rank {rank} of a process group of 2" in says(lambda: before.step(x, y))
assert all(torch.equal(p, q) for p, q in zip(before.params, kept)) and before._state.steps == 1
assert "group=False" in says(lambda: mq.LM(nn.Linear(2, 3), "mse"))
for group in (None, False):
    wrapped = says(lambda: mq.LM(DistributedDataParallel(nn.Linear(2, 3)), "mse", group=group))
    assert "DistributedDataParallel" in wrapped and "model.module" in wrapped, wrapped
shards = distribute_module(nn.Linear(2, 3), DeviceMesh("cpu", [0, 1]))
assert "'weight' is a DTensor" in says(lambda: mq.LM(shards, "mse", group=False))
model = nn.Linear(2, 3)
step = mq.LM(model, "mse", group=False).step(x[rank::2], y[rank::2])
assert step.accepted and step.new_loss < step.loss
dist.barrier()
dist.destroy_process_group()
assert before.step(x, y).accepted
print("rank", rank, "is through")
"""


def test_ranks_of_a_process_group(tmp_path):
    """Two processes: each is refused alike, before anything changes, unless the runs are independent."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(rank), str(tmp_path / "group")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    for rank, process in enumerate(ranks):
        said, _ = process.communicate(timeout=120)
        assert f"rank {rank} is through" in said, said


@pytest.fixture
def two_ranks(monkeypatch):
    """What torch says in a process group, without one."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)


def test_a_group_of_two_is_refused(two_ranks):
    model, x, y = problem()
    with refused("rank 1", "group of 2", "group=False"):
        lm(model)
    assert lm(model, group=False).step(x, y).accepted
    assert mq.presets.vanilla(model, "mse", group=False).step(x, y).accepted


def test_a_group_that_comes_later_is_refused(request):
    model, x, y = problem()
    opt = lm(model)
    opt.step(x, y)
    request.getfixturevalue("two_ranks")
    before = world(model, opt)
    for ask in (lambda: opt.step(x, y), lambda: opt.step_over([(x, y)])):
        with refused("rank 1", "group=False"):
            ask()
    assert changes(before, world(model, opt)) == []


def test_a_group_of_one_is_none(monkeypatch, two_ranks):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    model, x, y = problem()
    assert lm(model).step(x, y).accepted


@pytest.mark.parametrize("group", [True, 0, "gloo", object()])
def test_other_groups_are_refused(group):
    with refused("group=", "None", "False"):
        lm(mlp(2, 3), group=group)


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: nn.Sequential(nn.DataParallel(m))], ids=["it", "within"])
def test_data_parallel_is_refused(wrap):
    with refused("DataParallel", "model.module"):
        lm(wrap(mlp(2, 3)))


# ---- losses of one's own


@dataclass(frozen=True, kw_only=True, eq=False)
class LogCosh(Elementwise):
    a: float = 1.0  # 1 is right
    b: float = 1.0

    def ell(self, z, y):
        return (z - y).cosh().log()

    def slope(self, z, y):
        return self.a * (z - y).tanh()

    def s(self, z, y):
        return self.b / (z - y).cosh()


@dataclass(frozen=True, kw_only=True, eq=False)
class Cauchy(Elementwise):
    """Not convex: s is the root of ℓ′/e, which lies above ℓ″."""

    majorises = True
    b: float = 1.0

    def ell(self, z, y):
        return 0.5 * (z - y).square().log1p()

    def slope(self, z, y):
        return (z - y) / (1 + (z - y).square())

    def s(self, z, y):
        return self.b / (1 + (z - y).square()).sqrt()


class Undeclared(Cauchy):
    majorises = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Tilted(CrossEntropy):
    """A coupled one, with something wrong."""

    of: str = ""
    by: float = 1.5

    def slope(self, z, y):
        return super().slope(z, y) * (self.by if self.of == "slope" else 1)

    def factors(self, z, y):
        S, u = super().factors(z, y)
        return S * (self.by if self.of in ("S", "both") else 1), u / (self.by if self.of == "both" else 1)

    def ungroup(self, t, z):
        t = super().ungroup(t, z)
        return t.flip(-1) if self.of == "ungroup" else t


class Mean(LogCosh):
    def ell(self, z, y):
        return super().ell(z, y).mean()


class Coupled(LogCosh):
    """Compares every sample with the first one."""

    def ell(self, z, y):
        return super().ell(z, y) * (1 + z[:1])


class SamplesLast(LogCosh):
    def ell(self, z, y):
        return super().ell(z, y).mT


class Steeper(Residual):
    """A subclass of one of ours is not one of ours."""

    def ell(self, z, y):
        return super().ell(z, y) * 2


WRONG: dict[str, tuple[Any, dict[str, Any], list[str]]] = {  # loss, parts, what the message must say
    "slope": (LogCosh(a=2.0), {}, ["LogCosh.slope", "differentiating ell", "Correct slope"]),
    "sign": (LogCosh(a=-1.0), {}, ["LogCosh.slope"]),
    "s too large": (LogCosh(b=2.0), {}, ["LogCosh.s:", "vᵀSSᵀv", "majorises = True"]),
    "s too small": (LogCosh(b=0.7), {}, ["LogCosh.s:", "vᵀSSᵀv"]),
    "not declared": (Undeclared(), {}, ["Undeclared.s:", "majorises = True"]),
    "majoriser too small": (Cauchy(b=0.5), {}, ["Cauchy.s:", "vᵀSSᵀv"]),
    "mean": (Mean(), {}, ["Mean.ell", "samples first", "one by one"]),
    "coupled": (Coupled(), {}, ["Coupled.ell", "couple no samples"]),
    "subclass": (Steeper(), {}, ["Steeper.slope"]),
    "coupled slope": (Tilted(of="slope"), {}, ["Tilted.slope"]),
    "Su": (Tilted(of="S"), {}, ["Tilted.factors", "Su"]),
    "SSᵀ": (Tilted(of="both"), {}, ["Tilted.factors", "vᵀSSᵀv"]),
    "ungroup": (Tilted(of="ungroup"), {}, ["Tilted.ungroup", "inverse of group"]),
    "empirical rows": (LogCosh(a=2.0), {"rows": mq.Empirical()}, ["LogCosh.slope"]),
    "sampled rows": (LogCosh(b=2.0), {"rows": mq.Sampled(1)}, ["LogCosh.s:"]),
    "part of the rows": (LogCosh(b=2.0), {"rows": mq.Fraction(0.5)}, ["LogCosh.s:"]),
    "gram": (LogCosh(b=2.0), {"curvature": mq.Gram()}, ["LogCosh.s:"]),
    "chunks": (LogCosh(b=2.0), {"curvature": mq.Dense(chunk=1)}, ["LogCosh.s:"]),
    "matrix-free": (LogCosh(b=2.0), {"curvature": mq.MatrixFree()}, ["LogCosh.s:"]),
}


def of(loss: Any, N: int = 6) -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(mlp(2, 4, 3), nn.Dropout(0.2))
    return model, torch.randn(N, 2), torch.randint(3, (N,)) if isinstance(loss, CrossEntropy) else torch.randn(N, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", WRONG)
def test_wrong_loss_is_refused(case, dtype):
    loss, parts, says = WRONG[case]
    model, x, y = of(loss)
    model, x, y = model.to(dtype), x.to(dtype), y.to(dtype) if y.is_floating_point() else y
    opt = lm(model, loss, **parts)
    before = world(model, opt)
    for _ in range(2):  # a refusal proves nothing
        with refused(*says):
            opt.step(x, y)
    assert changes(before, world(model, opt)) == []


def test_the_message_has_both_numbers():
    model, x, y = of(LogCosh())
    with pytest.raises(ValueError, match=r"LogCosh\.slope") as refusal:
        lm(model, LogCosh(a=2.0)).step(x, y)
    found, expected = (
        float(part.split()[0].rstrip(",")) for part in str(refusal.value).split(" is ")[1].split(" but ")
    )
    assert found == pytest.approx(2 * expected, rel=1e-5)


def test_samples_last_is_refused():
    """With as many outputs as samples the weights would fit the wrong ones."""
    model, x, y = of(LogCosh(), N=3)
    model.eval()
    with refused("SamplesLast.ell", "samples first"):
        lm(model, SamplesLast()).step(x, y, torch.tensor([1.0, 2.0, 3.0]))


def test_the_proof_is_of_the_first_step_alone(monkeypatch):
    calls = []
    monkeypatch.setattr(LogCosh, "s", lambda self, z, y, s=LogCosh.s: (calls.append(z.dtype), s(self, z, y))[1])
    model, x, y = problem()
    opt = lm(model.float(), LogCosh())
    for _ in range(3):
        opt.step(x.float(), y.float())
    looks = calls.count(torch.float64)
    assert 0 < looks < 4
    opt.step(x.float(), y.float())
    assert calls.count(torch.float64) == looks
    opt.loss = LogCosh(b=2.0)  # another loss has to be looked at again
    with refused("LogCosh.s:"):
        opt.step(x.float(), y.float())


def test_a_wrong_loss_behind_samples_without_weight():
    """The samples that count are looked at."""
    model, x, y = of(LogCosh(), N=8)
    weight = torch.zeros(8)
    weight[6] = 2.0
    with refused("LogCosh.s:"):
        lm(model, LogCosh(b=2.0)).step(x, y, weight)
    with refused("Mean.ell"):
        lm(model, Mean()).step(x[:1], y[:1])


class Own(Residual):
    """Losses that are right, but hard to look at."""


class OnlySingle(LogCosh):
    """Refuses float64, as some devices do."""

    def ell(self, z, y):
        if z.dtype == torch.float64:
            raise TypeError("no float64 here")
        return super().ell(z, y)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, e):
        ctx.save_for_backward(e)
        return e.cosh().log()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].tanh()


class OnceDifferentiable(LogCosh):
    def ell(self, z, y):
        return Once.apply(z - y)


class NoGraph(LogCosh):
    @torch.no_grad()
    def ell(self, z, y):
        return super().ell(z, y)


class Corner(Huber):
    """With its corner on the outputs, and another choice of the slope there than autograd's."""

    def ell(self, z, y):
        return super().ell(z, y) + (z - y).abs()

    def slope(self, z, y):
        return super().slope(z, y) + torch.where(z >= y, 1.0, -1.0)


class Hinge(Elementwise):
    """Straight pieces: no curvature anywhere."""

    def ell(self, z, y):
        return (1 - z * y).clamp(min=0)

    def slope(self, z, y):
        return -y * (z * y < 1)

    def s(self, z, y):
        return torch.zeros_like(z)


class Positive(Elementwise):
    """Of a positive output only: ℓ = y/z + log z, the likelihood of an exponential."""

    majorises = True

    def ell(self, z, y):
        return y / z + z.log()

    def slope(self, z, y):
        return 1 / z - y / z.square()

    def s(self, z, y):
        return (2 * y / z**3 - 1 / z.square()).clamp(min=0).sqrt()


class TwoTargets(LogCosh):
    """A value and its scale, in a dict."""

    def ell(self, z, y):
        return super().ell(z / y["scale"], y["value"])

    def slope(self, z, y):
        return super().slope(z / y["scale"], y["value"]) / y["scale"]

    def s(self, z, y):
        return super().s(z / y["scale"], y["value"]) / y["scale"]

    def faults(self, z, y) -> list[Fault]:
        return []


RIGHT = [OnlySingle(), OnceDifferentiable(), NoGraph(), LogCosh(), Cauchy(), Hinge()]


@pytest.mark.parametrize(
    ("loss", "dtype"),
    [(loss, torch.float32) for loss in RIGHT] + [(loss, torch.float64) for loss in RIGHT[1:]],
    ids=lambda v: str(v) if isinstance(v, torch.dtype) else type(v).__name__,
)
def test_right_losses_pass(loss, dtype):
    model, x, y = (t.to(dtype) for t in of(loss))
    assert math.isfinite(lm(model, loss).step(x, y).loss)


@pytest.mark.parametrize(
    ("wrong", "dtype"),
    [(OnlySingle(b=2.0), torch.float32), (OnceDifferentiable(b=2.0), torch.float64), (NoGraph(a=2.0), torch.float64)],
    ids=["single", "once", "no graph"],
)
def test_they_are_looked_at_all_the_same(wrong, dtype):
    model, x, y = (t.to(dtype) for t in of(wrong))
    with refused(type(wrong).__name__):
        lm(model, wrong).step(x, y)


def test_a_corner_on_the_outputs():
    model = nn.Linear(2, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    assert lm(model, Corner()).step(torch.randn(6, 2), torch.zeros(6, 3)).rule  # z = y everywhere


def test_a_loss_of_positive_outputs():
    model = nn.Sequential(mlp(2, 4, 3), nn.Softplus())
    assert lm(model, Positive()).step(torch.randn(6, 2), torch.rand(6, 3)).rule


def test_targets_in_a_dict():
    model, x, y = of(TwoTargets())
    assert lm(model, TwoTargets()).step(x, {"value": y, "scale": 0.5 + torch.rand(6, 3)}).rule


class Labels(CrossEntropy):
    pass


class Bits(BinaryCrossEntropy):
    pass


@pytest.mark.parametrize("size", [1e-8, 1.0, 30.0, 200.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("loss", [Labels(), Labels(label_smoothing=0.1), Bits()], ids=["labels", "smooth", "bits"])
def test_extreme_logits(loss, dtype, size):
    """Where curvatures underflow, or are the difference of nearly equal numbers."""
    model, x = nn.Linear(2, 3, dtype=dtype), torch.randn(6, 2, dtype=dtype)
    with torch.no_grad():
        model.weight.mul_(size)
        z = model(x)
    for right in (True, False):
        top = (z if right else -z).argmax(1)
        y = top if isinstance(loss, CrossEntropy) else F.one_hot(top, 3).to(dtype)
        assert lm(copy.deepcopy(model), loss, schedule=mq.Constant(1.0)).step(x, y).rule


@pytest.mark.parametrize(
    "loss",
    [Own(), Labels(ignore_index=1), LogCosh(reduction="sum", factor=0.5)],
    ids=lambda loss: type(loss).__name__,
)
def test_weights_and_ignored_samples(loss):
    model, x, y = of(loss)
    if isinstance(loss, Labels):
        y = torch.tensor([1, 1, 1, 1, 1, 0])
    assert lm(model, loss).step(x, y).rule
    assert lm(model, loss).step(x, y, torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5, 2.0])).rule
    assert lm(model, loss, curvature=mq.Dense(chunk=2)).step(x, y, torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5, 2.0])).rule


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_units_of_a_loss(scale):
    """Neither a loss in small units nor one in large units goes unseen, and neither is refused for them."""

    class Scaled(LogCosh):
        def ell(self, z, y):
            return scale * super().ell(z, y)

        def slope(self, z, y):
            return scale * super().slope(z, y)

        def s(self, z, y):
            return scale**0.5 * super().s(z, y)

    model, x, y = of(LogCosh())
    assert lm(model, Scaled()).step(x, y).rule
    with refused("Scaled.s"):
        lm(model, Scaled(b=1.1)).step(x, y)
    with refused("Scaled.slope"):
        lm(model, Scaled(a=1.1)).step(x, y)


# ---- averaged weights


def test_a_step_within_averaged_is_refused():
    model, opt, x, y = stochastic()
    before = world(model, opt)
    with opt.averaged():
        for ask in (lambda: opt.step(x, y), lambda: opt.step_over([(x, y)])):
            with pytest.raises(RuntimeError, match=r"averaged.*would be lost"):
                ask()
        with opt.averaged():
            pass
        with pytest.raises(RuntimeError, match="would be lost"):  # the inner block ends, the outer one does not
            opt.step(x, y)
        opt.load_state_dict(opt.state_dict())
        with pytest.raises(RuntimeError, match="would be lost"):
            opt.step(x, y)
    assert changes(before, world(model, opt)) == []
    assert math.isfinite(opt.step(x, y).loss)


def test_a_step_after_an_averaged_block_that_failed():
    model, opt, x, y = stochastic()
    twin_model, twin = copy.deepcopy((model, opt))
    with pytest.raises(ZeroDivisionError), opt.averaged(), opt.averaged():
        raise ZeroDivisionError
    assert opt.step(x, y) == twin.step(x, y)
    assert same(theta(model), theta(twin_model))


def test_a_copy_made_within_averaged_is_free():
    model, opt, x, y = stochastic()
    with opt.averaged():
        other_model, other = copy.deepcopy((model, opt))
        mean = theta(model)
        assert math.isfinite(other.step(x, y).loss)
        assert same(theta(model), mean)
        assert not same(theta(other_model), mean)


# ---- batches that are objects


@dataclass
class Graphs:
    """Several graphs as one: features of the nodes, edges, and the graph that each node belongs to."""

    x: Tensor  # (nodes, F)
    edges: Tensor  # (2, edges)
    graph: Tensor  # (nodes,)
    N: int

    def __call__(self) -> None:  # as a graph of PyG is
        raise AssertionError("a batch is not a closure")


@dataclass
class Slotted:
    __slots__ = ("inner",)
    inner: Graphs


class Plain(nn.Module):
    """A graph network on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 4), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(4))  # a parameter without a rule

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor, N: int) -> Tensor:
        h = self.first(x)
        h = (h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])).tanh() * self.scale
        return self.second(h.new_zeros(N, 4).index_add(0, graph, h))


class Whole(Plain):
    """The same on an object."""

    def forward(self, data: Any) -> Tensor:
        data = data.inner if isinstance(data, Slotted) else data
        return super().forward(data.x, data.edges, data.graph, data.N)


def graphs(sizes: list[int]) -> tuple[Graphs, Tensor]:
    graph = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    starts = torch.tensor([0, *sizes]).cumsum(0)[:-1]
    ring = [torch.stack([torch.arange(n), (torch.arange(n) + 1) % n]) + s for n, s in zip(sizes, starts, strict=True)]
    return Graphs(torch.randn(len(graph), 2), torch.cat(ring, 1), graph, len(sizes)), torch.randn(len(sizes), 3)


EVERY = pytest.mark.parametrize(
    "curvature",
    [mq.Dense(), mq.Gram(), mq.MatrixFree(tolerance=0.0), mq.Hessian(), mq.Auto(inertia=0.8)],
    ids=lambda c: type(c).__name__,
)


@EVERY
def test_an_object_goes_to_the_model_whole(curvature):
    """Step by step what the same model does on plain tensors, for graphs that change in number and size."""
    whole = Whole()
    plain = Plain()
    plain.load_state_dict(whole.state_dict())
    ours, theirs = lm(whole, curvature=curvature), lm(plain, curvature=curvature)
    # A single graph first, which proves little; then 12 nodes in 4 graphs of 3, and 12 nodes in 4 other graphs.
    for sizes in ([3], [3, 3, 3, 3], [2, 5, 1, 4], [4, 2, 6], [3]):
        data, y = graphs(sizes)
        one, other = ours.step(data, y), theirs.step((data.x, data.edges, data.graph, data.N), y)
        assert one.loss == pytest.approx(other.loss, rel=1e-9)
        assert one.new_loss == pytest.approx(other.new_loss, rel=1e-7)
        assert error(theta(whole), theta(plain)) < 1e-6


def test_the_rows_of_an_object_are_right():
    data, y = graphs([2, 5, 1, 4])
    model = Whole()
    lin = mq.linearize(model, "mse", data, y)
    G = mq.Dense().represent(lin) @ (v := torch.randn(lin.n))
    z = model(data)
    pull = functools.partial(torch.autograd.grad, inputs=list(model.parameters()), retain_graph=True)
    J = torch.stack([torch.cat([g.flatten() for g in pull(o)]) for o in z.flatten()])
    assert error(G, 2 / z.numel() * J.T @ (J @ v)) < 1e-10
    assert set(lin.paths.values()) <= {"rule", "rows", "loop"}


def test_tensors_first_and_then_an_object():
    """What was proven on tensors, that the samples can be taken one by one, does not hold for an object."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, data: Any) -> Tensor:
            return (data if isinstance(data, Tensor) else data.x) * self.scale

    model = Either()
    opt, other = lm(model), lm(copy.deepcopy(model))
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    data = Graphs(x.flip(0), x, x, 0)
    for o in (opt, other):
        o.step(x, y)
    assert set(opt._plan.proof.general.values()) == {"vmap"}
    assert opt.step(data, y).new_loss == pytest.approx(other.step(x.flip(0), y).new_loss, rel=1e-12)
    assert error(theta(model), theta(other.model)) < 1e-12


@dataclass
class Pooled:
    """Graphs again, without an index: the graphs as sums over nodes."""

    x: Tensor  # (nodes, F)
    pool: Tensor  # (N, nodes)


class Pooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(2, 3), nn.Parameter(torch.ones(3))

    def forward(self, data: Pooled) -> Tensor:
        return data.pool @ (self.first(data.x).tanh() * self.scale)


def test_an_object_is_always_watched():
    """A batch of one graph proves every path; the next one has others, and no operation that tells of it."""
    model = Pooling()
    parts = {"schedule": mq.Constant(10.0), "damping": mq.Identity()}
    opt = lm(model, **parts)
    for sizes in ([3], [3], [3], [2, 5, 1, 4]):
        data, y = graphs(sizes)
        data = Pooled(data.x, F.one_hot(data.graph).T.to(data.x))
        twin = copy.deepcopy(model)
        assert opt.step(data, y).accepted
        assert lm(twin, **parts).step(data, y).accepted
        assert error(theta(model), theta(twin)) < 1e-9, sizes


@pytest.mark.parametrize("loss", ["mse", Residual()], ids=["targets", "no targets"])
@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"curvature": mq.Dense(chunk=2)}, ["leave chunk out"]),
        ({"curvature": mq.Gram(chunk=2)}, ["leave chunk out"]),
        ({"curvature": mq.MatrixFree(chunk=2)}, ["leave chunk out"]),
        ({"curvature": mq.Auto(chunk=2)}, ["leave chunk out"]),
        ({"rows": mq.Fraction(0.5)}, ["rows=mq.Exact()"]),
    ],
    ids=["dense", "gram", "matrix-free", "auto", "fraction"],
)
def test_an_object_is_not_cut(parts, says, loss):
    data, y = graphs([2, 5, 1, 4])
    model = Whole()
    opt = lm(model, loss, **parts)
    before = world(model, opt)
    for inputs, name in ((data, "Graphs"), ((Slotted(data),), "Slotted")):
        with refused(name, "tuple or dict", *says):
            opt.step(inputs, y if loss == "mse" else None)
    assert changes(before, world(model, opt)) == []


def test_an_object_of_few_samples_needs_no_cut():
    data, y = graphs([2, 5])
    assert lm(Whole(), curvature=mq.Dense(chunk=2)).step(data, y).rule


def test_auto_does_not_cut_an_object():
    """Where memory is short it takes a way that needs no chunks."""
    data, y = graphs([3] * 8)
    model = Whole()
    needed = mq.LM(model, "mse", curvature=mq.Auto())
    needed.step(data, y)
    tight = mq.LM(model, "mse", curvature=mq.Auto(memory=needed._plan.choice.bytes - 1))
    tight.step(data, y)
    assert "chunk=None" in tight.plan
    assert tight.plan != needed.plan


@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), mq.MatrixFree()], ids=lambda c: type(c).__name__)
def test_an_object_without_targets(curvature):
    data, _ = graphs([2, 5, 1, 4])
    step = lm(Whole(), Residual(), curvature=curvature).step(data)
    assert step.accepted


def test_objects_in_step_over():
    model = Whole()
    twin = copy.deepcopy(model)
    first, second = graphs([2, 5, 1]), graphs([4, 3])
    together = Graphs(
        torch.cat([first[0].x, second[0].x]),
        torch.cat([first[0].edges, second[0].edges + 8], 1),
        torch.cat([first[0].graph, second[0].graph + 3]),
        5,
    )
    step = lm(model).step_over([first, second])
    assert step.new_loss == pytest.approx(lm(twin).step(together, torch.cat([first[1], second[1]])).new_loss, rel=1e-9)
    assert error(theta(model), theta(twin)) < 1e-9


def test_objects_that_differ_from_pass_to_pass():
    """Without targets the tensors in the object tell."""

    passes = itertools.count()

    class Fresh(list):
        def __iter__(self):
            data, _ = graphs([2, 3])
            yield replace(data, x=data.x + next(passes)), None

    with refused("not the same every time"):
        lm(Whole(), Residual()).step_over(Fresh())


class Writing(Whole):
    """Puts what it computes in the place of its inputs."""

    def forward(self, data: Any) -> Tensor:
        z = super().forward(data)
        data.x = data.x * 2
        return z


def test_a_model_that_writes_into_the_object():
    data, y = graphs([2, 5])
    model = Writing()
    opt = lm(model)
    before = world(model, opt)
    with refused("changes its inputs in place"):
        opt.step(data, y)
    assert changes(before, world(model, opt)) == []


def test_nan_in_an_object():
    data, y = graphs([2, 5])
    data.x[3] = math.nan
    for inputs in (data, Slotted(data)):
        with refused("the inputs hold NaN"):
            lm(Whole()).step(inputs, y)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_an_object_goes_on_without_a_recording():
    model = Whole().cuda()
    twin = copy.deepcopy(model)
    ours, theirs = mq.LM(model, "mse", capture=True), mq.LM(twin, "mse")
    for _ in range(6):
        data, y = graphs([2, 5, 1, 4])
        data = Graphs(data.x.cuda(), data.edges.cuda(), data.graph.cuda(), data.N)
        assert ours.step(data, y.cuda()).new_loss == pytest.approx(theirs.step(data, y.cuda()).new_loss, rel=1e-6)
    assert ours._recorded is None


def test_an_object_is_not_recorded():
    """A recording copies tensors into its own memory, and cannot look into objects."""
    for inputs in (graphs([2])[0], (torch.ones(2), graphs([2])[0])):
        assert mq.optimizer.Batch(inputs).opaque
    for inputs in (
        torch.ones(2),
        (torch.ones(2), 3, None, "mean", torch.float64),
        {"x": torch.ones(2), "f": torch.sin},
    ):
        assert not mq.optimizer.Batch(inputs).opaque


class Closure:
    def method(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    "closure", [lambda: 0.0, Closure().method, functools.partial(max, 1), torch.rand, functools.cache(max), Closure]
)
def test_closures_are_explained(closure):
    opt = lm(mlp(2, 3))
    for ask in (lambda: opt.step(closure), lambda: opt.step(closure=closure)):
        with refused("step(inputs, targets)", "closure"):
            ask()


@pytest.mark.parametrize(
    "inputs",
    [3, 2.5, "text", b"bytes", {1, 2}, iter([1]), range(3), [1.0, 2.0], ("a", 3), {"x": 1}, nn.Linear(2, 3)],
    ids=lambda i: type(i).__name__,
)
def test_inputs_that_are_no_batch(inputs):
    with refused("the inputs are", "torch.as_tensor()"):
        lm(mlp(2, 3)).step(inputs, torch.randn(3, 3))


# ---- loaded states


def spoil(t: Tensor) -> Tensor:
    t = t.clone()
    t.view(-1)[0] = math.nan
    return t


def edited(**entries: Any) -> Any:
    def edit(state: dict[str, Any]) -> None:
        state["marquardt"].update(entries)

    return edit


def nan_in(key: str) -> Any:
    def edit(state: dict[str, Any]) -> None:
        value = state["marquardt"][key]
        assert value is not None
        leaves, spec = torch.utils._pytree.tree_flatten(value)
        bad = [spoil(t) if isinstance(t, Tensor) else t for t in leaves]
        state["marquardt"][key] = torch.utils._pytree.tree_unflatten(bad, spec)

    return edit


def without(key: str) -> Any:
    return lambda state: state["marquardt"].pop(key)


STATES: dict[str, tuple[Any, list[str]]] = {
    "λ NaN": (edited(lam=math.nan), ["'lam'", "nan"]),
    "λ infinite": (edited(lam=math.inf), ["λ = inf"]),
    "λ negative": (edited(lam=-1.0), ["λ = -1.0"]),
    "λ zero": (edited(lam=0.0), ["λ = 0.0", "TenFold", "positive"]),
    "λ a string": (edited(lam="1"), ["λ = '1'"]),
    "λ missing": (without("lam"), ["'lam'"]),
    "an unknown entry": (edited(temperature=1.0), ["'temperature'", "newer"]),
    "steps negative": (edited(steps=-1), ["'steps'", "-1"]),
    "accepted negative": (edited(accepted=-2), ["'accepted'", "-2"]),
    "steps half": (edited(steps=2.5), ["'steps'", "2.5", "integer"]),
    "best NaN": (edited(best=math.nan), ["'best'", "nan"]),
    "expected NaN": (edited(expected=math.nan), ["'expected'", "nan"]),
    "NaN in D": (nan_in("D"), ["'D'", "NaN"]),
    "NaN in previous": (nan_in("previous"), ["'previous'", "NaN"]),
    "NaN in mean": (nan_in("mean"), ["'mean'", "NaN"]),
    "NaN in past": (nan_in("past"), ["'past'", "NaN"]),
    "mean a list": (edited(mean=[1.0]), ["'mean'", "list"]),
    "past a list": (edited(past=[1.0]), ["'past'", "list"]),
    "D a number": (edited(D=1.0), ["D"]),
    "no dict": (lambda state: state.update(marquardt=[1.0]), ["'marquardt'", "list"]),
    "no groups": (lambda state: state.pop("param_groups"), ["'param_groups'"]),
    "no state": (lambda state: state.pop("state"), ["'state'"]),
    "no lr": (lambda state: state["param_groups"][0].pop("lr"), ["'lr'"]),
    "lr NaN": (lambda state: state["param_groups"][0].update(lr=math.nan), ["lr=nan"]),
}


@pytest.mark.parametrize("case", STATES)
def test_state_that_is_refused(case):
    edit, says = STATES[case]
    model, opt, x, y = trained(curvature=mq.Dense(inertia=0.5))
    state = opt.state_dict()
    edit(state)
    before = world(model, opt)
    with refused(*says):
        opt.load_state_dict(state)
    assert changes(before, world(model, opt)) == []
    assert math.isfinite(opt.step(x, y).loss)


def test_entries_with_a_default_may_be_missing():
    """A state of an earlier version."""
    _, opt, x, y = trained()
    state = opt.state_dict()
    for key in ("repeats", "best", "expected", "rows", "past"):
        del state["marquardt"][key]
    opt.load_state_dict(state)
    assert opt._state == replace(opt._state, repeats=0, best=math.inf, expected=None, rows=0, past=None)
    assert math.isfinite(opt.step(x, y).loss)


def test_lambda_zero_where_the_schedule_has_it():
    model, x, y = problem()
    opt = lm(model, schedule=mq.Constant(0.0))
    opt.step(x, y)
    lm(model, schedule=mq.Constant(1.0)).load_state_dict(opt.state_dict())


# ---- a loss that is not finite


@pytest.mark.parametrize(
    ("outputs", "targets", "says"),
    [
        (1.0, 1e30, ["largest target is 1e+30", "scale the data", "float64"]),
        (1e30, 1.0, ["largest output is 1e+30", "scale the data", "float64"]),
        (1e39, 1.0, ["it is the model that overflows"]),
    ],
    ids=["targets", "outputs", "model"],
)
def test_what_overflows(outputs, targets, says):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.w * outputs

    x = torch.ones(4, 1)
    with refused("the loss is inf", *says):
        lm(Scaled().float(), "mse").step(x.float(), (targets * x).float())
    if outputs < 1e38:
        with refused("the loss is inf", "scale the data"):
            lm(Scaled().double(), "mse").step(x * 1e200, targets * x * 1e200)


# ---- what is printed


def test_repr():
    model, x, _ = problem()
    opt = mq.LM(model, CrossEntropy(label_smoothing=0.1), momentum=None, curvature=mq.Auto(memory="1GiB"))
    assert repr(opt) == (
        "LM of Sequential, 27 parameters, CrossEntropy(label_smoothing=0.1)\n"
        "    curvature   Auto(memory='1GiB')\n"
        "    rows        Exact()\n"
        "    damping     MeanEigenvalue()\n"
        "    schedule    GainRatio()\n"
        "    momentum    None\n"
        "    acceptance  Uphill(b=1.0)\n"
        "    line_search Backtracking()\n"
        "    average     EMA()\n"
        "    lr=1.0, attempts=1, capture=False, group=None\n"
        "    λ = 1, steps: 0, accepted: 0"
    )
    opt.step(x, torch.arange(8) % 3)
    last = repr(opt).splitlines()[-2:]
    assert last[0].endswith("steps: 1, accepted: 1")
    assert last[1] == f"    plan: {opt.plan}"


def test_repr_of_tensors_and_parts_of_ones_own():
    class Schedule:
        initial = 1.0

        def update(self, lam, outcome):
            return lam

        def __repr__(self):
            return "mine"

    opt = lm(mlp(2, 3), CrossEntropy(class_weight=torch.tensor([1.0, 2.0, 3.0])), schedule=Schedule())
    assert "class_weight=tensor([1., 2., 3.]" in repr(opt)
    assert "schedule    mine" in repr(opt)
