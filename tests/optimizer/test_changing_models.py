"""A model that does something else with its samples from one step on: the step is that of the model as it is."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import marquardt as mq
from support import reference
from support.coupling import COUPLING, Bent, Replaced, everywhere, hooked, hooked_before
from support.parts import Always
from support.reference import error
from support.steps import compared, lm, theta, unharmed
from support.unchanged import refused

pytestmark = pytest.mark.usefixtures("double")

N, BEFORE, AFTER = 8, 3, 2  # samples, and steps


class Net(nn.Module):
    """`between` is what happens between two layers."""

    def __init__(self, between: Bent = lambda h, on: h) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(3, 6), nn.Linear(6, 5), nn.Linear(5, 2)
        self.between, self.on = between, False

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.between(self.first(x).tanh(), self.on)).tanh())


def attending(h: Tensor, on: bool) -> Tensor:
    return (h @ h.T - 1e9 * (1 - torch.eye(len(h)).roll(int(on), 0))).softmax(1) @ h


BETWEEN = {
    **{name: of for name, of in COUPLING.items() if name != "mixed up"},
    "means of samples": lambda h, on: h - h.mean(0 if on else 1, keepdim=True),
    "attention among samples": attending,
    "a branch by the data": lambda h, on: h.flip(0) if h.sum() > 1e3 or (on and h.isfinite().all()) else h,
}


def forward_hook(net: Net, stack: ExitStack) -> None:
    stack.callback(net.first.register_forward_hook(hooked(COUPLING["rolled"])).remove)


def pre_hook(net: Net, stack: ExitStack) -> None:
    stack.callback(net.inner.register_forward_pre_hook(hooked_before(COUPLING["centred"])).remove)


def global_hook(net: Net, stack: ExitStack) -> None:
    net.first.marked = True
    stack.callback(nn.modules.module.register_module_forward_hook(everywhere(COUPLING["rolled"])).remove)


def method(net: Net, _: ExitStack) -> None:
    net.inner.forward = types.MethodType(Replaced("rolled"), net.inner)


def layer(net: Net, _: ExitStack) -> None:
    class Centred(nn.Linear):
        def forward(self, h: Tensor) -> Tensor:
            return super().forward(h - h.mean(0))

    new = Centred(6, 5)
    new.weight, new.bias = net.inner.weight, net.inner.bias
    net.inner = new


HOOKS = {f.__name__: f for f in (forward_hook, pre_hook, global_hook, method, layer)}
CHANGES = [*BETWEEN, *HOOKS]


def changing(name: str) -> tuple[Net, Callable[[Net, ExitStack], Any]]:
    """A network, and what happens to it"""
    torch.manual_seed(0)
    return Net(BETWEEN.get(name, lambda h, on: h)), HOOKS.get(name, lambda net, _: setattr(net, "on", True))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def batch(k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(k)
    return torch.randn(N, 3, generator=generator), torch.randn(N, 2, generator=generator)


EXACT = {"tolerance": 0.0, "warm": 0.0, "backtrack": False, "iterations": 500}
WAYS = {"dense": mq.Dense(), "gram": mq.Gram(), "products": mq.MatrixFree(**EXACT)}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("way", WAYS)
def test_the_first_step_after_a_change(way, name, stack):
    model, change = changing(name)
    opt = lm(model, curvature=WAYS[way], schedule=mq.Constant(1.0), acceptance=Always())
    for k in range(BEFORE):
        opt.step(*batch(k))
    change(model, stack)
    for k in range(BEFORE, BEFORE + AFTER):
        compared(opt, *batch(k), within=1e-6)


def test_models_that_take_turns():
    """Two ways of calling a model, as in an adversarial game: each keeps its proof."""
    model, _ = changing("rolled")
    opt = lm(model, curvature=mq.Dense(), schedule=mq.Constant(1.0), acceptance=Always())
    for k in range(8):
        model.on = k % 2 == 1
        compared(opt, *batch(k), within=1e-6)


# ---- parts of a batch

CURVATURES = {
    "dense": mq.Dense, "gram": mq.Gram, "products": mq.MatrixFree, "auto": mq.Auto, "factors": mq.Kronecker,
}  # fmt: skip


class First(nn.Module):
    """Something happens to the inputs, of which no graph tells."""

    def __init__(self, at_first: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.at_first, self.net = at_first, Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.at_first(x))


def switched(name: str) -> Net:
    model, _ = changing(name)
    model.on = True
    return model


SEEING_OTHERS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda name=name: switched(name) for name in ("rolled", "centred", "summed up", "softmax")},
    "inputs rolled": lambda: First(lambda x: x.roll(1, 0)),
    "inputs centred": lambda: First(lambda x: x - x.mean(0)),
    "inputs centred, with Dropout": lambda: First(lambda x: F.dropout(x - x.mean(0), 0.3)),
    "by the number of samples": lambda: First(lambda x: x / len(x)),
    "mixed up at random": lambda: Net(lambda h, on: COUPLING["mixed up"](h, True)),
}


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("name", SEEING_OTHERS)
def test_parts_of_a_batch_whose_samples_see_each_other(name, curvature, chunk):
    torch.manual_seed(0)
    model = SEEING_OTHERS[name]()
    opt = mq.LM(model, "mse", curvature=CURVATURES[curvature](chunk=chunk))
    # Kronecker meets layers that have no factors, which is true as well.
    with unharmed(model, opt, "" if curvature == "factors" else f"chunk={chunk}"):
        opt.step(*batch(0))


@pytest.mark.parametrize("curvature", [mq.Dense(chunk=3), mq.MatrixFree(chunk=3), mq.Dense(chunk=1)], ids=str)
@pytest.mark.parametrize("name", CHANGES)
def test_parts_of_a_batch_after_a_change(name, curvature, stack):
    """Refused in the very step, with the way out; and without chunk the step is right."""
    model, change = changing(name)
    opt = lm(model, curvature=curvature, schedule=mq.Constant(1.0), acceptance=Always())
    for k in range(BEFORE):
        opt.step(*batch(k))
    change(model, stack)
    with unharmed(model, opt, "leave chunk out"):
        opt.step(*batch(BEFORE))
    whole = lm(model, curvature=mq.Dense(), schedule=mq.Constant(1.0), acceptance=Always())
    compared(whole, *batch(BEFORE), within=1e-6)


NORMALISED = {"parametrized": parametrizations.spectral_norm, "hooked": nn.utils.spectral_norm}


def normalised(norm: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(20, 100, dtype=torch.float32)
    first, head = nn.Linear(100, 48, dtype=torch.float32), nn.Linear(48, 1, dtype=torch.float32)
    return nn.Sequential(NORMALISED[norm](first), nn.Tanh(), head).to(dtype), x.to(dtype), x[:, :1].sin().to(dtype)


def cautious(model: nn.Module, **options: Any) -> mq.LM:
    return mq.LM(
        model, "mse", damping=mq.Identity(), momentum=None, average=None, schedule=mq.Constant(1e-3),
        acceptance=mq.Decrease(), **options,
    )  # fmt: skip


PARTS = [("gram", torch.float32, 1), ("gram", torch.float32, 10), ("gram", torch.float32, 19)]
PARTS += [("gram", torch.float64, 7), *((name, torch.float32, 7) for name in CURVATURES)]


@pytest.mark.parametrize(("curvature", "dtype", "chunk"), PARTS, ids=str)
@pytest.mark.parametrize("norm", NORMALISED)
def test_weights_that_every_pass_changes(norm, curvature, dtype, chunk):
    """Less than what kernels of other batch sizes differ by, and the steps are others: refused in every one."""
    model, x, y = normalised(norm, dtype)
    opt, whole = cautious(model, curvature=CURVATURES[curvature](chunk=chunk)), cautious(model, curvature=mq.Gram())
    for _ in range(6):
        # Kronecker meets layers that have no factors, which is true as well.
        with unharmed(model, opt, *([] if curvature == "factors" else [f"chunk={chunk}", "_u", "leave chunk out"])):
            opt.step(x, y)
        whole.step(x, y)
    model.eval()
    if curvature != "factors":
        opt.step(x, y)


@pytest.mark.parametrize("norm", NORMALISED)
def test_such_weights_and_rows_of_some_samples(norm):
    model, x, y = normalised(norm, torch.float32)
    with refused("Fraction", "_u", "rows=mq.Sampled(1)"):
        cautious(model, rows=mq.Fraction(0.5)).step(x, y)


@pytest.mark.parametrize("norm", NORMALISED)
def test_such_weights_and_chunks_that_were_chosen(norm):
    """Where memory would have the batch cut, it goes through the model whole."""
    model, x, y = normalised(norm, torch.float32)
    x, y = x.repeat(8, 1) + 0.1 * torch.randn(160, 100).to(x), y.repeat(8, 1)
    opt = cautious(model.eval(), curvature=mq.Auto(memory="2MB"))
    opt.step(x, y)
    assert "chunk=None" not in opt.plan
    opt = cautious(model.train(), curvature=mq.Auto(memory="2MB"))
    opt.step(x, y)
    assert "chunk=None" in opt.plan


class Counting(nn.Module):
    """Buffers that each pass changes: the calls, the mean of the inputs, and a tensor in the place of another"""

    def __init__(self, depends: bool = False, every: int = 1) -> None:
        super().__init__()
        self.net, self.depends, self.every = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)), depends, every
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("last", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        z = self.net(x)
        if self.depends:
            z = z * (1 + 1e-6 * (self.calls // self.every))
        with torch.no_grad():
            self.calls += 1
            self.mean.lerp_(x.mean(0), 0.1)
            self.last = z[-1].detach().clone()
        return z


@pytest.mark.parametrize("chunk", [1, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("curvature", CURVATURES)
def test_buffers_that_only_count(curvature, dtype, chunk):
    """The step in parts is that of the whole batch."""
    found = []
    for size in (None, chunk):
        torch.manual_seed(0)
        model = Counting().to(dtype)
        opt = mq.LM(model, "mse", curvature=CURVATURES[curvature](chunk=size))
        losses = [opt.step(*(t.to(dtype) for t in batch(k))).new_loss for k in range(3)]
        found.append(torch.tensor(losses))
        assert model.calls > 0
    assert torch.allclose(*found, rtol=1e-2 if curvature == "products" else 1e-4)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_buffers_that_count_and_matter(dtype, every):
    """Also where the first part leaves the second one as it was"""
    torch.manual_seed(0)
    model = Counting(depends=True, every=every).to(dtype)
    opt = mq.LM(model, "mse", curvature=mq.Gram(chunk=3))
    with refused("chunk=3", "calls", "leave chunk out"):
        opt.step(*(t.to(dtype) for t in batch(0)))


HARMLESS: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "Dropout": lambda: First(lambda x: F.dropout(x, 0.3)),
    "RReLU": lambda: nn.Sequential(nn.Linear(3, 5), nn.RReLU(), nn.Dropout(0.2), nn.Linear(5, 2)),
    "running statistics": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(),
        nn.Linear(4, 2),
    ),
    "single samples": lambda: First(lambda x: x.view(1, 3) * 2),
}  # fmt: skip


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("name", HARMLESS)
def test_parts_that_are_the_same_function(name, curvature):
    torch.manual_seed(0)
    opt = mq.LM(HARMLESS[name](), "mse", curvature=CURVATURES[curvature](chunk=1 if name == "single samples" else 3))
    for k in range(3):
        opt.step(*batch(k))


@pytest.mark.parametrize("rows", [mq.Fraction(0.5), mq.Fraction(0.5, mq.Sampled(1))], ids=str)
@pytest.mark.parametrize("name", SEEING_OTHERS)
def test_rows_of_some_samples_that_see_the_others(name, rows):
    torch.manual_seed(0)
    model = SEEING_OTHERS[name]()
    opt = mq.LM(model, "mse", curvature=mq.Dense(), rows=rows)
    with unharmed(model, opt, "Fraction", "rows=mq.Sampled(1)"):
        opt.step(*batch(0))


def test_chunks_that_were_chosen():
    """Where memory would have the batch cut, and its samples see each other, it goes through the model whole."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 3), torch.randn(64, 2)
    plain, coupled = Net(), First(lambda x: x.roll(1, 0))
    options = {"schedule": mq.Constant(1.0), "curvature": mq.Auto(memory="200KB")}
    opt = lm(plain, **options)
    opt.step(x, y)
    assert "chunk=16" in opt.plan
    opt = lm(coupled, **options)
    q, before = reference.quadratic(coupled, "mse", x, y), theta(coupled)
    step = opt.step(x, y)
    assert "MatrixFree(chunk=None" in opt.plan
    assert step.loss == pytest.approx(float(q.f), rel=1e-10)
    assert error(theta(coupled) - before, q.step(1.0)) < 0.1  # to the tolerance of the iteration


def test_linearize_in_parts():
    model = switched("centred")
    assert mq.linearize(model, "mse", *batch(0)).loss > 0
    with refused("chunk=2", "leave chunk out"):
        _ = mq.linearize(model, "mse", *batch(0), chunk=2).loss


@pytest.mark.parametrize("many", [N, 2000])
def test_a_posterior_of_samples_that_see_each_other(many):
    torch.manual_seed(0)
    x, y = torch.randn(many, 3), torch.randn(many, 2)
    with refused("depend on the other samples", "single samples"):
        mq.posterior(switched("centred"), "mse", [(x, y)])
