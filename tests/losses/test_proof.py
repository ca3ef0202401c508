"""Losses of one's own: what is wrong is refused with both numbers, what is right passes."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import marquardt as mq
from marquardt.losses import BinaryCrossEntropy, CrossEntropy, Elementwise, Huber, Residual
from support.cases import mlp
from support.steps import lm, problem
from support.unchanged import changes, refused, world

pytestmark = pytest.mark.usefixtures("double")


def log_cosh(z, y):
    return (z - y).cosh().log()


def own(name: str = "LogCosh", majorises: bool = False, **formulas: Any) -> Any:
    """A loss of these formulas; what is not given is that of log cosh."""
    given = {"ell": log_cosh, "slope": lambda z, y: (z - y).tanh(), "s": lambda z, y: 1 / (z - y).cosh(), **formulas}
    methods = {k: lambda self, z, y, f=f: f(z, y) for k, f in given.items()}
    return type(name, (Elementwise,), {**methods, "majorises": majorises})()


CAUCHY: dict[str, Any] = {  # not convex: s is the root of ℓ′/e, which lies above ℓ″
    "ell": lambda z, y: 0.5 * (z - y).square().log1p(),
    "slope": lambda z, y: (z - y) / (1 + (z - y).square()),
    "s": lambda z, y: (1 + (z - y).square()).rsqrt(),
}
STEEP, CURVED, FLAT = (
    {"slope": lambda z, y: 2 * (z - y).tanh()},
    {"s": lambda z, y: 2 / (z - y).cosh()},
    {"s": lambda z, y: 0.7 / (z - y).cosh()},
)


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


class Steeper(Residual):
    """A subclass of one of ours is not one of ours."""

    def ell(self, z, y):
        return super().ell(z, y) * 2


WRONG: dict[str, tuple[Any, dict[str, Any], list[str]]] = {  # loss, parts, what the message must say
    "slope": (own(**STEEP), {}, ["LogCosh.slope", "differentiating ell", "Correct slope"]),
    "sign": (own(slope=lambda z, y: (y - z).tanh()), {}, ["LogCosh.slope"]),
    "s too large": (own(**CURVED), {}, ["LogCosh.s:", "vᵀSSᵀv", "majorises = True"]),
    "s too small": (own(**FLAT), {}, ["LogCosh.s:", "vᵀSSᵀv"]),
    "not declared": (own("Cauchy", **CAUCHY), {}, ["Cauchy.s:", "majorises = True"]),
    "majoriser too small": (
        own("Cauchy", True, **{**CAUCHY, "s": lambda z, y: CAUCHY["s"](z, y) / 2}), {}, ["Cauchy.s:", "vᵀSSᵀv"],
    ),
    "mean": (own("Mean", ell=lambda z, y: log_cosh(z, y).mean()), {}, ["Mean.ell", "samples first", "one by one"]),
    "coupled": (own(ell=lambda z, y: log_cosh(z, y) * (1 + z[:1])), {}, ["LogCosh.ell", "couple no samples"]),
    "subclass": (Steeper(), {}, ["Steeper.slope"]),
    "coupled slope": (Tilted(of="slope"), {}, ["Tilted.slope"]),
    "Su": (Tilted(of="S"), {}, ["Tilted.factors", "Su"]),
    "SSᵀ": (Tilted(of="both"), {}, ["Tilted.factors", "vᵀSSᵀv"]),
    "ungroup": (Tilted(of="ungroup"), {}, ["Tilted.ungroup", "inverse of group"]),
    "empirical rows": (own(**STEEP), {"rows": mq.Empirical()}, ["LogCosh.slope"]),
    **{
        name: (own(**CURVED), parts, ["LogCosh.s:"])
        for name, parts in {
            "sampled rows": {"rows": mq.Sampled(1)},
            "part of the rows": {"rows": mq.Fraction(0.5)},
            "gram": {"curvature": mq.Gram()},
            "chunks": {"curvature": mq.Dense(chunk=1)},
            "matrix-free": {"curvature": mq.MatrixFree()},
        }.items()
    },
}  # fmt: skip


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
    model, x, y = of(None)
    with pytest.raises(ValueError, match=r"LogCosh\.slope") as refusal:
        lm(model, own(**STEEP)).step(x, y)
    found, expected = (
        float(part.split()[0].rstrip(",")) for part in str(refusal.value).split(" is ")[1].split(" but ")
    )
    assert found == pytest.approx(2 * expected, rel=1e-5)


def test_samples_last_is_refused():
    """With as many outputs as samples the weights would fit the wrong ones."""
    model, x, y = of(None, N=3)
    model.eval()
    with refused("LogCosh.ell", "samples first"):
        lm(model, own(ell=lambda z, y: log_cosh(z, y).mT)).step(x, y, torch.tensor([1.0, 2.0, 3.0]))


def test_the_proof_is_of_the_first_step_alone():
    calls = []
    loss = own(s=lambda z, y: (calls.append(z.dtype), 1 / (z - y).cosh())[1])
    model, x, y = problem()
    opt = lm(model.float(), loss)
    for _ in range(3):
        opt.step(x.float(), y.float())
    looks = calls.count(torch.float64)
    assert 0 < looks < 4
    opt.step(x.float(), y.float())
    assert calls.count(torch.float64) == looks
    opt.loss = own(**CURVED)  # another loss has to be looked at again
    with refused("LogCosh.s:"):
        opt.step(x.float(), y.float())


def test_a_wrong_loss_behind_samples_without_weight():
    """The samples that count are looked at."""
    model, x, y = of(None, N=8)
    weight = torch.zeros(8)
    weight[6] = 2.0
    with refused("LogCosh.s:"):
        lm(model, own(**CURVED)).step(x, y, weight)
    with refused("Mean.ell"):
        lm(model, WRONG["mean"][0]).step(x[:1], y[:1])


# Losses that are right, but hard to look at.


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, e):
        ctx.save_for_backward(e)
        return e.cosh().log()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].tanh()


def refusing_float64(z, y):
    """As some devices do."""
    if z.dtype == torch.float64:
        raise TypeError("no float64 here")
    return log_cosh(z, y)


HARD: dict[str, dict[str, Any]] = {
    "single": {"ell": refusing_float64},
    "once": {"ell": lambda z, y: Once.apply(z - y)},
    "no graph": {"ell": torch.no_grad()(log_cosh)},
}
STRAIGHT: dict[str, Any] = {  # no curvature anywhere
    "ell": lambda z, y: (1 - z * y).clamp(min=0),
    "slope": lambda z, y: -y * (z * y < 1),
    "s": lambda z, y: torch.zeros_like(z),
}
RIGHT = {**HARD, "plain": {}, "straight": STRAIGHT, "cauchy": {**CAUCHY, "majorises": True}}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("single", torch.float32), *((k, d) for k in list(RIGHT)[1:] for d in (torch.float32, torch.float64))],
    ids=str,
)
def test_right_losses_pass(name, dtype):
    model, x, y = (t.to(dtype) for t in of(None))
    assert math.isfinite(lm(model, own(**RIGHT[name])).step(x, y).loss)


@pytest.mark.parametrize(
    ("name", "fault", "dtype"),
    [("single", CURVED, torch.float32), ("once", CURVED, torch.float64), ("no graph", STEEP, torch.float64)],
)
def test_they_are_looked_at_all_the_same(name, fault, dtype):
    model, x, y = (t.to(dtype) for t in of(None))
    with refused("LogCosh."):
        lm(model, own(**HARD[name], **fault)).step(x, y)


def test_a_corner_on_the_outputs():
    """With another choice of the slope there than autograd's."""
    model, plain = nn.Linear(2, 3), Huber()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    corner = own(
        majorises=True,
        ell=lambda z, y: plain.ell(z, y) + (z - y).abs(),
        slope=lambda z, y: plain.slope(z, y) + torch.where(z >= y, 1.0, -1.0),
        s=plain.s,
    )
    assert lm(model, corner).step(torch.randn(6, 2), torch.zeros(6, 3)).rule  # z = y everywhere


def test_a_loss_of_positive_outputs():
    """ℓ = y/z + log z, the likelihood of an exponential."""
    model = nn.Sequential(mlp(2, 4, 3), nn.Softplus())
    loss = own(
        majorises=True,
        ell=lambda z, y: y / z + z.log(),
        slope=lambda z, y: 1 / z - y / z.square(),
        s=lambda z, y: (2 * y / z**3 - 1 / z.square()).clamp(min=0).sqrt(),
    )
    assert lm(model, loss).step(torch.randn(6, 2), torch.rand(6, 3)).rule


def test_targets_in_a_dict():
    """A value and its scale."""
    model, x, y = of(None)
    loss = own(
        ell=lambda z, y: log_cosh(z / y["scale"], y["value"]),
        slope=lambda z, y: (z / y["scale"] - y["value"]).tanh() / y["scale"],
        s=lambda z, y: 1 / (z / y["scale"] - y["value"]).cosh() / y["scale"],
        faults=lambda z, y: [],
    )
    assert lm(model, loss).step(x, {"value": y, "scale": 0.5 + torch.rand(6, 3)}).rule


class Labels(CrossEntropy):
    pass


class Bits(BinaryCrossEntropy):
    pass


class Own(Residual):
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
    [Own(), Labels(ignore_index=1), replace(own(), reduction="sum", factor=0.5)],
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

    def scaled(slope: float = 1.0, s: float = 1.0) -> Any:
        return own(
            ell=lambda z, y: scale * log_cosh(z, y),
            slope=lambda z, y: slope * scale * (z - y).tanh(),
            s=lambda z, y: s * scale**0.5 / (z - y).cosh(),
        )

    model, x, y = of(None)
    assert lm(model, scaled()).step(x, y).rule
    with refused("LogCosh.s:"):
        lm(model, scaled(s=1.1)).step(x, y)
    with refused("LogCosh.slope"):
        lm(model, scaled(slope=1.1)).step(x, y)
