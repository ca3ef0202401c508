"""Losses of one's own: what is wrong is refused with both numbers, what is right passes."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import marquardt as mq
from marquardt.losses import BinaryCrossEntropy, CrossEntropy, Elementwise, Fault, Huber, Residual
from support.cases import mlp
from support.steps import lm, problem
from support.unchanged import changes, refused, world

pytestmark = pytest.mark.usefixtures("double")


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
