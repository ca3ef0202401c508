"""What a batch may be: also an object that goes to the model whole."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import marquardt as mq
from marquardt.losses import Residual
from support.cases import mlp
from support.reference import error
from support.steps import lm, theta
from support.unchanged import changes, refused, world

pytestmark = pytest.mark.usefixtures("double")


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
            return torch.atan2(data if isinstance(data, Tensor) else data.x, self.scale)  # no rule knows it

    model = Either()
    opt, other = lm(model), lm(copy.deepcopy(model))
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    data = Graphs(x.flip(0), x, x, 0)
    for o in (opt, other):
        o.step(x, y)
    assert set(opt._known.proof.general.values()) == {"vmap"}
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


def test_auto_does_not_cut_an_object():
    """Where memory is short it takes a way that needs no chunks."""
    data, y = graphs([3] * 8)
    model = Whole()
    needed = mq.LM(model, "mse", curvature=mq.Auto())
    needed.step(data, y)
    tight = mq.LM(model, "mse", curvature=mq.Auto(memory=needed._state.plan.bytes - 1))
    tight.step(data, y)
    assert "chunk=None" in tight.plan
    assert tight.plan != needed.plan


@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), mq.MatrixFree()], ids=lambda c: type(c).__name__)
def test_an_object_without_targets(curvature):
    data, _ = graphs([2, 5, 1, 4])
    assert lm(Whole(), Residual(), curvature=curvature).step(data).accepted


def test_an_object_of_few_samples_needs_no_cut():
    data, y = graphs([2, 5])
    assert lm(Whole(), curvature=mq.Dense(chunk=2)).step(data, y).rule


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


class Shifting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        return super().forward(x)


class Writing(Whole):
    """Puts what it computes in the place of its inputs."""

    def forward(self, data: Any) -> Tensor:
        z = super().forward(data)
        data.x = data.x * 2
        return z


@pytest.mark.parametrize("model", [Shifting(2, 3), Writing()], ids=lambda m: type(m).__name__)
def test_a_model_that_changes_its_inputs(model):
    data, y = graphs([2, 5])
    model = model.to(y.dtype)
    opt = lm(model)
    before = world(model, opt)
    with refused("changes its inputs in place"):
        opt.step(data if isinstance(model, Writing) else data.x[:2], y)
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
    ours, theirs = mq.LM(model, "mse", capture=True), mq.LM(twin, "mse", capture=False)
    for _ in range(6):
        data, y = graphs([2, 5, 1, 4])
        data = Graphs(data.x.cuda(), data.edges.cuda(), data.graph.cuda(), data.N)
        assert ours.step(data, y.cuda()).new_loss == pytest.approx(theirs.step(data, y.cuda()).new_loss, rel=1e-6)
    assert ours._recordings.made is None


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
