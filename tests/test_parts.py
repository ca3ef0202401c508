"""The parts of the optimizer: the identities the mathematics promises, the paper's rules case by case, bad values."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import pickle
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import marquardt as mq
import reference
from marquardt.acceptance import Trial
from marquardt.schedule import Outcome
from reference import error

f64 = torch.float64
NAN, INF = math.nan, math.inf

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(2, 10)
xis = st.floats(0.05, 0.95)


def decades(low: float, high: float):
    """Positive numbers, evenly spread over the orders of magnitude."""
    return st.floats(low, high).map(lambda e: 10.0**e)


# Stand-ins: what a part is given, and nothing else.


class Matrix:
    """H as momentum sees it."""

    def __init__(self, H: Tensor) -> None:
        self.H = H

    def quadratic(self, v: Tensor) -> Tensor:
        return v @ self.H @ v


def diagonal(values: Tensor, rank: int = 1) -> SimpleNamespace:
    """G as damping sees it."""
    return SimpleNamespace(gradient=torch.zeros_like(values), diagonal=lambda: values, rank=rank)


class Always:
    """Accepts what is finite."""

    def judge(self, trial: Trial) -> str | None:
        return "decrease" if math.isfinite(trial.new_loss) else None


class Never:
    """Leaves every step to the line search."""

    def judge(self, trial: Trial) -> str | None:
        return None


def spd(seed: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """A positive definite H with a condition of some hundred, a gradient and a previous step."""
    generator = torch.Generator().manual_seed(seed)
    A, g, previous = (torch.randn(shape, dtype=f64, generator=generator) for shape in ((n, n + 2), (n,), (n,)))
    return A @ A.T / n + 0.1 * torch.eye(n, dtype=f64), g, previous


def refine(part: mq.AdaptiveMomentum, H: Tensor, g: Tensor, previous: Tensor | None, same_data: bool = True) -> Tensor:
    return part.refine(-torch.linalg.solve(H, g), g, previous, Matrix(H), same_data)


def mlp(seed: int = 0, outputs: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def batch(seed: int = 0, N: int = 24, outputs: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 2, dtype=f64, generator=generator)
    return x, torch.sin(2 * x[:, :1] + torch.arange(outputs)) + x[:, 1:]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def lm(model: nn.Module, loss="mse", **parts) -> mq.LM:
    """Nothing but the plain step, unless told otherwise."""
    bare = {
        "curvature": mq.Dense(inertia=0.0),
        "rows": mq.Exact(),
        "damping": mq.Identity(),
        "schedule": mq.Constant(0.1),
        "momentum": None,
        "acceptance": Always(),
        "line_search": None,
        "average": None,
    }
    return mq.LM(model, loss, **{**bare, **parts})


def curvature(model: nn.Module, x: Tensor, y: Tensor, loss="mse"):
    return mq.Dense().represent(mq.linearize(model, loss, x, y))


# ---- adaptive momentum


@given(seeds, sizes, xis, decades(-3, 3))
def test_momentum_identities(seed, n, xi, dP):
    """gᵀd = −ξ·δP·√I_GG and dᵀHd = δP²."""
    H, g, previous = spd(seed, n)
    d = refine(mq.AdaptiveMomentum(xi, dP), H, g, previous)
    GG = (g @ torch.linalg.solve(H, g)).item()
    assert (g @ d).item() == pytest.approx(-xi * dP * math.sqrt(GG), rel=1e-9)
    assert (d @ H @ d).item() == pytest.approx(dP**2, rel=1e-9)
    assert error(d, reference.adaptive_momentum(H, g, previous, xi, dP)) < 1e-8


@given(seeds, sizes, xis, decades(-3, 3))
def test_momentum_cap(seed, n, xi, dP):
    """δP = min(δP, √I_GG), which for ξ ≥ ½ bounds the decrease of the model from below."""
    H, g, previous = spd(seed, n)
    root = math.sqrt((g @ torch.linalg.solve(H, g)).item())
    d = refine(mq.AdaptiveMomentum(xi, dP, cap=True), H, g, previous)
    length = min(dP, root)
    assert (d @ H @ d).item() == pytest.approx(length**2, rel=1e-9)
    assert (g @ d).item() == pytest.approx(-xi * length * root, rel=1e-9)
    decrease = -(g @ d + d @ H @ d / 2).item()
    assert decrease >= (xi - 0.5) * length**2 * (1 - 1e-9) - 1e-9 * length**2


@given(seeds, sizes, xis)
def test_momentum_without_a_length_of_its_own(seed, n, xi):
    """δP = ∞ with the cap: the length is √I_GG, and the step no longer depends on the units of the loss."""
    H, g, previous = spd(seed, n)
    d = refine(mq.AdaptiveMomentum(xi, INF, cap=True), H, g, previous)
    assert (d @ H @ d).item() == pytest.approx((g @ torch.linalg.solve(H, g)).item(), rel=1e-9)
    assert error(refine(mq.AdaptiveMomentum(xi, INF, cap=True), 1e3 * H, 1e3 * g, previous), d) < 1e-9


@given(seeds, st.integers(3, 10), xis, decades(-2, 2))
def test_momentum_maximises_conjugacy(seed, n, xi, dP):
    """No other step with gᵀd = −ξ·δP·√I_GG and dᵀHd = δP² has a larger dᵀH·previous."""
    H, g, previous = spd(seed, n)
    d = refine(mq.AdaptiveMomentum(xi, dP), H, g, previous)
    best = (d @ H @ previous).item()
    e1 = -torch.linalg.solve(H, g)
    e1 = e1 / (e1 @ H @ e1).sqrt()
    torch.manual_seed(seed)
    for e2 in torch.randn(50, n, dtype=f64):
        e2 = e2 - (e1 @ H @ e2) * e1
        e2 = e2 / (e2 @ H @ e2).sqrt()
        other = dP * (xi * e1 + math.sqrt(1 - xi**2) * e2)
        assert (g @ other).item() == pytest.approx((g @ d).item(), rel=1e-8)  # feasible
        assert (other @ H @ other).item() == pytest.approx(dP**2, rel=1e-8)
        assert (other @ H @ previous).item() <= best + 1e-9 * abs(best)


@given(seeds, sizes, xis, decades(-2, 2), decades(-6, 6))
def test_momentum_units(seed, n, xi, dP, c):
    """f → c·f with δP → √c·δP leaves the step as it is."""
    H, g, previous = spd(seed, n)
    d = refine(mq.AdaptiveMomentum(xi, dP), H, g, previous)
    assert error(refine(mq.AdaptiveMomentum(xi, math.sqrt(c) * dP), c * H, c * g, previous), d) < 1e-8


@given(seeds, sizes, xis, decades(-6, 6))
def test_momentum_depends_on_the_direction_of_the_previous_step_alone(seed, n, xi, c):
    H, g, previous = spd(seed, n)
    part = mq.AdaptiveMomentum(xi, 0.6)
    assert error(refine(part, H, g, c * previous), refine(part, H, g, previous)) < 1e-8


@pytest.mark.parametrize("cap", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, f64])
def test_plain_step_without_momentum(dtype, cap):
    H, g, previous = (t.to(dtype) for t in spd(0, 5))
    part, newton = mq.AdaptiveMomentum(0.9, 0.6, cap=cap), -torch.linalg.solve(H, g)
    zero = torch.zeros_like(g)
    assert torch.equal(refine(part, H, g, None), newton)  # no previous step
    assert torch.equal(refine(part, H, zero, previous), -torch.linalg.solve(H, zero))  # I_GG = 0
    assert torch.equal(part.refine(-newton, g, previous, Matrix(H), True), -newton)  # I_GG < 0
    assert torch.equal(refine(part, H, g, zero), newton)  # I_FF = 0
    assert torch.equal(refine(part, H, g, 3 * newton), newton)  # parallel
    assert torch.equal(refine(part, H, g, -3 * newton), newton)
    one = torch.ones(1, 1, dtype=dtype)
    assert torch.equal(refine(part, one, one[0], 2 * one[0]), -one[0])  # one parameter: always parallel


def test_momentum_on_changing_batches():
    """Everywhere, or with `same_data` only where the previous step belongs to the same loss."""
    H, g, previous = spd(0, 5)
    everywhere, careful = mq.AdaptiveMomentum(0.9, 0.6), mq.AdaptiveMomentum(0.9, 0.6, same_data=True)
    d = refine(everywhere, H, g, previous, same_data=True)
    assert torch.equal(refine(everywhere, H, g, previous, same_data=False), d)
    assert torch.equal(refine(careful, H, g, previous, same_data=True), d)
    assert torch.equal(refine(careful, H, g, previous, same_data=False), -torch.linalg.solve(H, g))


@pytest.mark.parametrize("dtype", [torch.float32, f64])
@pytest.mark.parametrize("sign", [1, -1])
def test_nearly_parallel(dtype, sign):
    """The plain step up to 1 − cos² = √eps; from there on the identities hold, as well as the precision allows."""
    limit = math.sqrt(torch.finfo(dtype).eps)
    H = torch.eye(3, dtype=dtype)
    g = torch.tensor([2.0, 0, 0], dtype=dtype)
    part = mq.AdaptiveMomentum(0.9, 0.6)
    for sine2 in (limit / 1e6, limit / 100, limit / 2):
        previous = torch.tensor([sign * math.sqrt(1 - sine2), math.sqrt(sine2), 0], dtype=dtype)
        assert torch.equal(refine(part, H, g, previous), -g)
    for sine2 in (2 * limit, 100 * limit, 0.5):
        previous = torch.tensor([sign * math.sqrt(1 - sine2), math.sqrt(sine2), 0], dtype=dtype)
        d = refine(part, H, g, previous).double()
        assert (d @ d).item() == pytest.approx(0.36, rel=30 * limit)  # eps / sin², with sin² of the order of √eps
        assert (d @ g.double()).item() == pytest.approx(-0.9 * 0.6 * 2, rel=30 * limit)


@pytest.mark.parametrize("representation", [mq.Dense(), mq.Gram()])
@pytest.mark.parametrize("cap", [False, True])
@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_momentum_identities_inside_the_step(loss, cap, representation):
    """H is the damped curvature that the step was solved with."""
    model = mlp(outputs=3)
    x, y = batch(outputs=3)
    y = y.argmax(1) if loss == "cross_entropy" else y
    xi, dP, lam = 0.8, 0.3, 0.5
    opt = lm(
        model, loss, curvature=representation, damping=mq.MaxDiagonal(0.01), schedule=mq.Constant(lam),
        momentum=mq.AdaptiveMomentum(xi, dP, cap=cap),
    )  # fmt: skip
    D = torch.full_like(flat(model), 0.01)
    for k in range(4):
        C, before = curvature(model, x, y, loss), flat(model)
        D = torch.maximum(D, C.diagonal())
        assert opt.step(x, y).accepted
        d, g, newton = flat(model) - before, C.gradient, C.newton(lam * D)
        if k == 0:
            assert error(d, -newton) < 1e-9
            continue
        root = math.sqrt((g @ newton).item())
        length = min(dP, root) if cap else dP
        assert (g @ d).item() == pytest.approx(-xi * length * root, rel=1e-8)
        assert (d @ (C @ d) + (lam * D * d * d).sum()).item() == pytest.approx(length**2, rel=1e-8)


# ---- damping


@given(seeds, st.integers(1, 8), st.integers(1, 6), st.sampled_from([0.0, 0.01, 0.7]))
def test_max_diagonal_is_a_running_maximum(seed, n, steps, floor):
    torch.manual_seed(seed)
    diagonals = torch.rand(steps, n, dtype=f64)
    part, D = mq.MaxDiagonal(floor), None
    for k, values in enumerate(diagonals):
        last = None if D is None else D.clone()
        new = part.update(D, diagonal(values))
        assert torch.equal(new, diagonals[: k + 1].amax(0).clamp(min=floor))
        assert last is None or torch.equal(D, last)  # a rejected step goes back to it
        assert torch.equal(values, diagonals[k])
        D = new


@given(seeds, st.integers(1, 8), st.integers(1, 6))
def test_mean_eigenvalue_is_one_number(seed, n, steps):
    torch.manual_seed(seed)
    diagonals = torch.rand(steps, n, dtype=f64)
    D = None
    for k, values in enumerate(diagonals):
        D = mq.MeanEigenvalue().update(D, diagonal(values, rank=3))
        assert D.shape == ()
        assert D.item() == pytest.approx(max(t.sum().item() / 3 for t in diagonals[: k + 1]), rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, f64])
@pytest.mark.parametrize("part", [mq.Identity(), mq.MaxDiagonal(0.01), mq.MeanEigenvalue()])
def test_damping_keeps_the_dtype(part, dtype):
    G = diagonal(torch.rand(4, dtype=dtype))
    D = part.update(part.update(None, G), G)
    assert D.dtype == dtype
    assert D.shape in ((), (4,))


def test_identity():
    G = diagonal(torch.tensor([3.0, 1e6]))
    assert mq.Identity().update(None, G) == mq.Identity().update(torch.tensor(7.0), G) == 1


class Scaled(nn.Module):
    """v·tanh(wx + b) + c with θ = (w, b, v, c) = scale·(what is stored)."""

    def __init__(self, theta: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.stored = nn.Parameter(theta / scale)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        w, b, v, c = (self.scale * self.stored).split([3, 3, 3, 1])
        return (torch.tanh(x * w + b) * v).sum(1, keepdim=True) + c


def after_three_steps(scale: Tensor, **parts) -> Tensor:
    """The function, as its values."""
    torch.manual_seed(1)
    model = Scaled(torch.randn(10, dtype=f64), scale)
    x = torch.linspace(-2, 2, 20, dtype=f64)[:, None]
    opt = lm(model, schedule=mq.Constant(1.0), acceptance=mq.Decrease(), **parts)
    for _ in range(3):
        assert opt.step(x, torch.sin(2 * x)).accepted
    return model(x).detach()


@pytest.mark.parametrize("momentum", [None, mq.AdaptiveMomentum(0.9, INF, cap=True)])
@given(st.integers(0, 9), decades(-3, 3))
@example(0, 1e-3)
@example(9, 1e3)
def test_max_diagonal_is_invariant_to_rescaling_a_parameter(momentum, which, s):
    scale = torch.ones(10, dtype=f64)
    expected = after_three_steps(scale, damping=mq.MaxDiagonal(0.0), momentum=momentum)
    scale[which] = s
    found = after_three_steps(scale, damping=mq.MaxDiagonal(0.0), momentum=momentum)
    assert error(found, expected) < 1e-6


@pytest.mark.parametrize("damping", [mq.Identity(), mq.MeanEigenvalue()])
@pytest.mark.parametrize("s", [1e-2, 1e2])
def test_one_number_for_all_parameters_is_not(damping, s):
    scale = torch.ones(10, dtype=f64)
    expected = after_three_steps(scale, damping=damping)
    scale[0] = s
    assert error(after_three_steps(scale, damping=damping), expected) > 1e-3


@pytest.mark.parametrize("damping", [mq.MaxDiagonal(0.0), mq.MeanEigenvalue()])
@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_damping_in_the_units_of_the_loss(damping, factor):
    x, y = batch()
    ends = []
    for c in (1.0, factor):
        model = mlp()
        opt = lm(model, mq.losses.SquaredError(factor=c), damping=damping)
        for _ in range(3):
            opt.step(x, y)
        ends.append(flat(model))
    assert error(ends[1], ends[0]) < 1e-8


def test_a_rejected_step_leaves_D_alone():
    model, (x, y) = mlp(), batch()
    opt = lm(model, damping=mq.MaxDiagonal(0.01))
    opt.step(x, y)
    D = opt.state_dict()["marquardt"]["D"]
    opt.acceptance = Never()
    assert not opt.step(10 * x, y).accepted
    assert torch.equal(opt.state_dict()["marquardt"]["D"], D)


@pytest.mark.parametrize("representation", [mq.Dense(), mq.Gram()])
def test_a_parameter_without_curvature_needs_no_floor(representation):
    """A dead unit: D is 0 there, and so is the gradient; the other parameters still move."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        model[0].bias[0] = -1e3
    x, y = batch()
    opt = lm(model, curvature=representation, damping=mq.MaxDiagonal(0.0), schedule=mq.Constant(1.0))
    step = opt.step(x, y)
    assert step.accepted, step.note
    assert model[0].bias[0] == -1e3


# ---- acceptance


def uphill_by_hand(t: Trial, b: float, against_best: bool) -> tuple[str | None, float]:
    """The rule, and how far the inequality is from changing its mind."""
    if math.isfinite(t.new_loss) and t.new_loss < t.loss:
        return "decrease", INF
    if t.cosine is None or not math.isfinite(t.new_loss):
        return None, INF
    beta = sorted((-1.0, t.cosine, 1.0))[1]
    allowed = (t.best if against_best else t.loss) - t.lower_bound
    asked = math.pow(min(1, 1 - beta), b) * (t.new_loss - t.lower_bound)
    return ("uphill" if asked <= allowed else None), abs(asked - allowed)


@settings(max_examples=200)
@given(
    low=st.floats(-10, 10),
    above=st.tuples(decades(-3, 3), decades(-3, 3)),  # best over its lower bound, f over the best
    ratio=decades(-1, -0.01) | decades(0.01, 1),  # f_new over the lower bound, in units of the most that is allowed
    cosine=st.none() | st.floats(-1.001, 1.001),  # rounding goes beyond ±1
    b=st.floats(0.1, 10),
    against_best=st.booleans(),
)
@example(0.0, (1.0, 0.0), 1.1, -0.5, 2.0, False)
@example(-7.0, (1.0, 1.0), 0.9, 0.2, 1.0, False)
@example(-7.0, (1.0, 1.0), 1.1, 0.2, 1.0, True)
@example(7.0, (1.0, 1.0), 1.1, 0.9, 2.0, False)
@example(0.0, (1.0, 1.0), 2.0, 1.001, 1.0, True)
def test_uphill_is_its_formula(low, above, ratio, cosine, b, against_best):
    best, f = low + above[0], low + above[0] + above[1]
    factor = 1 if cosine is None else min(1, max(1 - cosine, 0.01)) ** b
    trial = Trial(f, low + ratio * ((best if against_best else f) - low) / factor, low, best, cosine)
    rule, margin = uphill_by_hand(trial, b, against_best)
    assume(margin > 1e-9 * (1 + f - low))
    assert mq.Uphill(b, against_best).judge(trial) == rule


@pytest.mark.parametrize(
    ("f", "f_new", "cosine", "b", "rule"),
    [
        (1.0, 0.5, -1.0, 2.0, "decrease"),
        (1.0, 0.5, None, 2.0, "decrease"),
        (1.0, 1.0, None, 2.0, None),
        (1.0, 1.5, None, 2.0, None),  # no previous step: decrease only
        (1.0, 4.0, 0.5, 2.0, "uphill"),  # ¼·4 ≤ 1
        (1.0, 4.01, 0.5, 2.0, None),
        (1.0, 2.0, 0.5, 1.0, "uphill"),  # ½·2 ≤ 1
        (1.0, 2.01, 0.5, 1.0, None),
        (1.0, 1e30, 1.0, 2.0, "uphill"),  # straight on: any height
        (1.0, 1e30, 1.0 + 1e-7, 2.0, "uphill"),
        (1.0, 1.01, 0.0, 2.0, None),  # across and back: no rise at all
        (1.0, 1.01, -1.0, 2.0, None),
    ],
)
def test_uphill_table(f, f_new, cosine, b, rule):
    assert mq.Uphill(b).judge(Trial(f, f_new, 0.0, f, cosine)) == rule


def test_uphill_against_the_best():
    trial = Trial(loss=2.0, new_loss=3.0, lower_bound=0.0, best=0.5, cosine=0.5)
    assert mq.Uphill(2.0).judge(trial) == "uphill"  # ¼·3 ≤ 2
    assert mq.Uphill(2.0, against_best=True).judge(trial) is None  # ¼·3 > ½
    assert mq.Uphill(2.0, against_best=True).judge(trial._replace(new_loss=1.9)) == "decrease"


def test_uphill_above_a_negative_lower_bound():
    trial = Trial(loss=-9.0, new_loss=-6.0, lower_bound=-10.0, best=-9.0, cosine=0.5)
    assert mq.Uphill(2.0).judge(trial) == "uphill"  # ¼·4 ≤ 1
    assert mq.Uphill(2.0).judge(trial._replace(new_loss=-5.9)) is None


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.none() | st.floats(-1, 1))
def test_decrease(f, f_new, cosine):
    assert mq.Decrease().judge(Trial(f, f_new, 0.0, f, cosine)) == ("decrease" if f_new < f else None)


@pytest.mark.parametrize("part", [mq.Decrease(), mq.Uphill(2.0), mq.Uphill(2.0, against_best=True)])
@pytest.mark.parametrize("f_new", [NAN, INF, -INF])
def test_what_is_not_finite_is_never_accepted(part, f_new):
    for cosine in (None, -1.0, 0.0, 1.0):
        assert part.judge(Trial(1.0, f_new, 0.0, 1.0, cosine)) is None


# ---- schedules


def outcome(f=1.0, f_new=0.5, gain=0.5, rule="decrease", same_data=True) -> Outcome:
    return Outcome(f, f_new, gain, rule, same_data)


@pytest.mark.parametrize(
    ("lam", "f_new", "rule", "expected"),
    [
        (1.0, 0.2, "decrease", 2 / 3),  # relative decrease 0.8
        (1.0, 0.24, "decrease", 2 / 3),
        (1.0, 0.26, "decrease", 1.0),
        (1.0, 0.9, "decrease", 1.0),
        (1.0, 1.1, "uphill", 1.0),
        (1.0, 5.0, "uphill", 1.0),
        (1.0, 1.1, "search", 1.0),  # saved by the search: neither
        (1.0, 9.0, "search", 1.0),
        (1.0, 1.2, "rejected", 1.5),  # relative increase 0.2
        (1.0, 1.24, "rejected", 1.5),
        (1.0, 1.26, "rejected", 1.0),
        (1.0, 1e6, "rejected", 1.0),
        (1.0, NAN, "rejected", 1.5),
        (2e-5, 0.1, "decrease", 4e-5 / 3),  # while λ ≥ 1e-5
        (1e-5, 0.1, "decrease", 2e-5 / 3),
        (9e-6, 0.1, "decrease", 9e-6),
        (9e4, 1.1, "rejected", 13.5e4),  # while λ ≤ 1e5
        (1e5, 1.1, "rejected", 1.5e5),
        (1.1e5, 1.1, "rejected", 1.1e5),
    ],
)
def test_paper_schedule(lam, f_new, rule, expected):
    part = mq.PaperSchedule(1.0, 1e-5, 1e5)
    assert part.update(lam, outcome(1.0, f_new, rule=rule)) == pytest.approx(expected, rel=1e-14)
    # The decrease is relative.
    assert part.update(lam, outcome(1e3, 1e3 * f_new, rule=rule)) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("f", "f_new", "rule", "expected"),
    [
        (0.0, 0.0, "rejected", 1.5),
        (0.0, -1.0, "decrease", 1.0),
        (-1.0, -1.8, "decrease", 2 / 3),  # a loss below 0 that falls
        (-1.0, -0.9, "rejected", 1.5),
        (-1.0, -0.5, "rejected", 1.0),
    ],
)
def test_paper_schedule_where_the_loss_is_not_positive(f, f_new, rule, expected):
    assert mq.PaperSchedule(1.0).update(1.0, outcome(f, f_new, rule=rule)) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("lam", "rule", "expected"),
    [
        (1.0, "decrease", 0.1),
        (1.0, "uphill", 0.1),
        (1.0, "rejected", 10.0),
        (5e-10, "decrease", 1e-10),
        (1e-10, "decrease", 1e-10),
        (5e9, "rejected", 1e10),
        (1e10, "rejected", 1e10),
    ],
)
def test_ten_fold(lam, rule, expected):
    part = mq.TenFold(1.0, 10.0, minimum=1e-10, maximum=1e10)
    assert part.update(lam, outcome(rule=rule)) == pytest.approx(expected, rel=1e-14)


GAIN = mq.GainRatio(
    1.0, down=0.4, up=3.0, slow_down=0.7, slow_up=1.5, floor=0.1, minimum=1e-12, maximum=1e12
)  # fmt: skip


@pytest.mark.parametrize("rule", ["decrease", "uphill", "search", "rejected"])
@pytest.mark.parametrize(
    ("gain", "fast", "slow"),
    [
        *((gain, 0.4, 0.7) for gain in (0.76, 1.0, 50.0, INF)),
        *((gain, 1.0, 1.0) for gain in (0.75, 0.5, 0.25)),
        *((gain, 3.0, 1.5) for gain in (0.24, 0.0, -3.0, -INF, NAN)),
    ],
)
def test_gain_ratio(gain, fast, slow, rule):
    for lam in (1.0, 1e3):
        assert GAIN.update(lam, outcome(gain=gain, rule=rule)) == pytest.approx(fast * lam, rel=1e-14)
        changing = outcome(gain=gain, rule=rule, same_data=False)
        assert GAIN.update(lam, changing) == pytest.approx(slow * lam, rel=1e-14)


def test_the_floor_is_for_changing_batches():
    good, bad = outcome(gain=1.0), outcome(gain=-1.0)
    assert GAIN.update(0.11, good._replace(same_data=False)) == 0.1
    assert GAIN.update(0.11, good._replace(same_data=False, averaged_curvature=True)) == pytest.approx(0.077)
    assert GAIN.update(1e-4, good._replace(same_data=False)) == 0.1
    assert GAIN.update(1e-4, outcome(gain=0.5, same_data=False)) == 0.1
    assert GAIN.update(0.11, good) == pytest.approx(0.044)
    assert GAIN.update(1e-4, good) == pytest.approx(4e-5)
    assert GAIN.update(1e-12, good) == 1e-12
    assert GAIN.update(1e12, bad) == 1e12
    assert GAIN.update(1e12, bad._replace(same_data=False)) == 1e12


@pytest.mark.parametrize("part", [mq.PaperSchedule(1.0), mq.TenFold(1.0), GAIN], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("same_data", [False, True])
@pytest.mark.parametrize(("f_new", "gain"), [(NAN, NAN), (NAN, -INF), (INF, -INF), (-INF, -INF)])
def test_a_trial_that_is_not_finite_raises_lambda(part, f_new, gain, same_data):
    """Or else the same step would fail in the same way for ever."""
    assert part.update(1.0, outcome(1.0, f_new, gain, "rejected", same_data)) > 1


outcomes = st.builds(
    Outcome,
    loss=st.floats(-1e3, 1e3),
    new_loss=st.floats(-1e3, 1e3) | st.sampled_from([NAN, INF]),
    gain=st.floats(allow_nan=True),
    rule=st.sampled_from(["decrease", "uphill", "search", "rejected"]),
    same_data=st.booleans(),
)
BEST = outcome(1.0, 0.0, 1.0)
WORST = outcome(1.0, 1.1, -1.0, "rejected")


@pytest.mark.parametrize(
    "part",
    [
        mq.Constant(0.3),
        mq.PaperSchedule(1.0),
        mq.TenFold(1.0),
        GAIN,
        mq.GainRatio(1.0, down=0.1, up=10.0, slow_down=0.1, slow_up=10.0, floor=1e-12, minimum=1e-12),  # no floor
    ],
    ids=repr,
)
@given(st.lists(outcomes, min_size=1, max_size=5))
@example([BEST])
@example([BEST._replace(same_data=False)])
@example([WORST])
def test_lambda_stays_positive_and_finite(part, history):
    lam = part.initial
    for o in itertools.islice(itertools.cycle(history), 2500):  # ⅔^2500 and 1.5^2500 are beyond float64
        lam = part.update(lam, o)
        assert 0 < lam < INF


@given(decades(-10, 10) | st.just(0.0), outcomes)
def test_constant(lam, o):
    assert mq.Constant(lam).initial == lam
    assert mq.Constant(lam).update(lam, o) == lam


# ---- line search


def recorded(losses, calls: list[float]):
    """The losses along a direction, from a function of lr; writes down every lr it is asked for."""

    def along(rates):
        calls.extend(rates)
        return [losses(lr) for lr in rates]

    return along


def test_grid_rates():
    rates = mq.Grid(1e-6, 9, 0.125).rates
    assert len(rates) == 72
    assert rates[0] == 1e-6
    assert rates[-1] == pytest.approx(8.875001, rel=1e-12)
    assert rates[-1] < 9
    assert all(b - a == pytest.approx(0.125, rel=1e-9) for a, b in itertools.pairwise(rates))


@given(decades(-6, 0), st.floats(0.05, 3), st.integers(1, 40), st.floats(0, 0.99))
@example(0.1, 0.1, 3, 0.0)  # (0.4 − 0.1)/0.1 is a little more than 3
@example(1.0, 0.1, 10, 0.0)
def test_grid_ends_before_its_stop(start, step, count, rest):
    stop = start + (count + rest) * step
    rates = mq.Grid(start, stop, step).rates
    assert max(rates) < stop
    assert abs(len(rates) - (count + rest)) <= 1


def test_grid_takes_the_least_loss():
    calls: list[float] = []
    grid = mq.Grid(1e-6, 9, 0.125)
    lr, f = grid.search(recorded(lambda lr: (lr - 2.3) ** 2, calls), 5.0)
    assert calls == grid.rates
    assert lr == pytest.approx(2.25, abs=1e-5)
    assert f == (lr - 2.3) ** 2


@given(
    st.lists(st.floats(-10, 10) | st.sampled_from([NAN, INF, -INF]), min_size=8, max_size=8),
    st.floats(-10, 10),
    st.booleans(),
)
@example([NAN] * 8, 1.0, True)
@example([INF] * 8, 1.0, True)
@example([2.0] * 8, 1.0, True)
@example([2.0] * 8, 2.0, False)  # not lower is no decrease
@example([NAN, 3.0, 0.5, -INF, 0.5, 2.0, NAN, INF], 1.0, False)
def test_grid_is_its_argmin(losses, f, uphill):
    grid = mq.Grid(1.0, 9.0, 1.0, uphill=uphill)
    found = grid.search(lambda rates: losses, f)
    finite = [l for l in losses if math.isfinite(l)]
    if finite and (uphill or min(finite) < f):
        assert found == (1.0 + losses.index(min(finite)), min(finite))
    else:
        assert found is None


@given(st.lists(st.floats(-10, 10) | st.sampled_from([NAN, INF]), min_size=6, max_size=6), st.floats(-10, 10))
@example([2.0, NAN, 0.5, 0.1, 0.1, 0.1], 1.0)
@example([1.0] * 6, 1.0)
def test_backtracking_takes_the_first_decrease(losses, f):
    calls: list[float] = []
    rates = [2 * 0.3**k for k in range(6)]
    table = iter(losses)
    found = mq.Backtracking(0.3, trials=6).search(recorded(lambda lr: next(table), calls), f, 2.0, False)
    lower = [k for k, l in enumerate(losses) if l < f]
    assert calls == pytest.approx(rates[: lower[0] + 1] if lower else rates, rel=1e-12)  # and none after it
    assert found == ((calls[-1], losses[lower[0]]) if lower else None)


def test_backtracking_wants_finite_losses():
    assert mq.Backtracking(0.5, trials=2).search(lambda rates: [-INF for _ in rates], 1.0) is None


def test_search_goes_along_the_plain_direction():
    model, (x, y) = mlp(), batch()
    grid = mq.Grid(1e-6, 9, 0.125)
    opt = lm(model, acceptance=Never(), line_search=grid, momentum=mq.AdaptiveMomentum(0.9, 0.6), lr=0.7)
    for _ in range(3):
        C, before = curvature(model, x, y), flat(model)
        plain = -C.newton(torch.tensor(0.1, dtype=f64))
        losses = [mse_at(model, before + lr * plain, x, y) for lr in grid.rates]
        step = opt.step(x, y)
        assert (step.rule, step.accepted) == ("search", True)
        assert step.lr == grid.rates[losses.index(min(losses))]
        assert step.new_loss == pytest.approx(min(losses), rel=1e-10)
        assert error(flat(model) - before, step.lr * plain) < 1e-9
        assert opt.param_groups[0]["lr"] == 0.7  # reported, never written


def test_search_along_the_step_that_failed():
    model, (x, y) = mlp(), batch()
    search = mq.Grid(1e-6, 9, 0.125, along_step=True, uphill=True)
    opt = lm(model, acceptance=Never(), line_search=search, momentum=mq.AdaptiveMomentum(0.9, 0.6))
    opt.step(x, y)
    start = flat(mlp())
    previous, C, before = flat(model) - start, curvature(model, x, y), flat(model)
    H = C.G + 0.1 * torch.eye(len(before), dtype=f64)
    step = opt.step(x, y)
    expected = step.lr * reference.adaptive_momentum(H, C.gradient, previous, 0.9, 0.6)
    assert error(flat(model) - before, expected) < 1e-8


def test_a_search_that_finds_nothing_leaves_the_weights():
    model, (x, y) = mlp(), batch()
    before = flat(model)
    opt = lm(model, acceptance=Never(), line_search=mq.Grid(1e3, 1e3 + 1, 0.25))
    step = opt.step(x, y)
    assert (step.rule, step.accepted, step.new_loss) == ("rejected", False, step.loss)
    assert torch.equal(flat(model), before)


def mse_at(model: nn.Module, theta: Tensor, x: Tensor, y: Tensor) -> float:
    trial = copy.deepcopy(model)
    nn.utils.vector_to_parameters(theta, trial.parameters())
    return nn.functional.mse_loss(trial(x), y).item()


# ---- averages


@given(seeds, st.integers(1, 30))
def test_polyak_is_the_arithmetic_mean(seed, steps):
    torch.manual_seed(seed)
    thetas = torch.randn(steps, 3, dtype=f64)
    mean = thetas[0]
    for t in range(1, steps):
        mean = mq.Polyak().update(mean, thetas[t], t)
    assert torch.allclose(mean, thetas.mean(0), rtol=0, atol=1e-13)


@given(seeds, st.integers(0, 500), st.floats(0, 0.999))
@example(0, 0, 0.95)
@example(0, 170, 0.95)  # the warm-up reaches 0.95 here: 171/180
@example(0, 171, 0.95)
def test_ema(seed, t, decay):
    torch.manual_seed(seed)
    mean, theta = torch.randn(2, 3, dtype=f64)
    kept = mean.clone()
    beta = min(decay, (1 + t) / (10 + t))
    assert torch.allclose(mq.EMA(decay).update(mean, theta, t), beta * mean + (1 - beta) * theta, rtol=0, atol=1e-13)
    assert torch.equal(mean, kept)


@pytest.mark.parametrize("part", [mq.Polyak(), mq.EMA(0.95), mq.EMA(0.1)])
def test_average_of_the_weights(part):
    """On changing batches: over the weights after every accepted step, the first of them included."""
    model = mlp()
    opt = lm(model, average=part)
    thetas = []
    for k in range(6):
        x, y = batch(seed=k, N=5 + k)
        assert opt.step(x, (k + 1) * y).accepted  # losses that nobody takes for the same
        thetas.append(flat(model))
    if isinstance(part, mq.Polyak):
        expected = torch.stack(thetas).mean(0)
    else:
        expected = thetas[0]
        for t, theta in enumerate(thetas[1:], start=1):
            beta = min(part.decay, (1 + t) / (10 + t))
            expected = beta * expected + (1 - beta) * theta
    with opt.averaged():
        assert error(flat(model), expected) < 1e-12
    assert torch.equal(flat(model), thetas[-1])


# ---- rows


def test_rows():
    assert mq.Sampled() == mq.Sampled(1, seed=0)
    assert (mq.Sampled(3, seed=7).k, mq.Sampled(3, seed=7).seed) == (3, 7)
    assert mq.Exact() == mq.Exact() != mq.Empirical()


def test_sampled_rows_are_drawn_apart_from_the_global_generator():
    loss = mq.losses.CrossEntropy()
    z, y = torch.randn(4, 3, dtype=f64), torch.tensor([0, 2, 1, 1])
    state = torch.get_rng_state()
    rows = mq.Sampled(5, seed=1).draw(loss, z, y, None, 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert rows.S.shape == (5, 4, 3)
    assert rows.u is None
    assert torch.equal(rows.S, mq.Sampled(5, seed=1).draw(loss, z, y, None, 3).S)
    assert not torch.equal(rows.S, mq.Sampled(5, seed=1).draw(loss, z, y, None, 4).S)
    assert not torch.equal(rows.S, mq.Sampled(5, seed=2).draw(loss, z, y, None, 3).S)


def test_sampled_rows_are_right_in_the_mean():
    """ΣSSᵀ over k rows is ∂²ℓ/∂z², up to 1/√k."""
    loss = mq.losses.CrossEntropy()
    z, y = torch.randn(4, 3, dtype=f64), torch.tensor([0, 2, 1, 1])
    many, exact = mq.Sampled(20_000).draw(loss, z, y, None, 0).S, mq.Exact().draw(loss, z, y, None, 0).S
    found, expected = (torch.einsum("rnc,rnd->ncd", S, S) for S in (many, exact))
    assert error(found, expected) < 0.03


# ---- what all parts promise

PARTS = [
    mq.Exact(), mq.Sampled(2), mq.Empirical(), mq.Dense(), mq.Gram(chunk=3), mq.Auto(),
    mq.Identity(), mq.MaxDiagonal(0.01), mq.MeanEigenvalue(),
    mq.Constant(1.0), mq.TenFold(1.0), mq.PaperSchedule(1.0), mq.GainRatio(1.0),
    mq.AdaptiveMomentum(0.9, 0.6), mq.Decrease(), mq.Uphill(2.0), mq.Grid(1e-6, 9, 0.125), mq.Backtracking(0.5),
    mq.EMA(0.95), mq.Polyak(),
]  # fmt: skip


@pytest.mark.parametrize("part", PARTS, ids=lambda p: type(p).__name__)
def test_parts_are_values(part):
    assert dataclasses.is_dataclass(part)
    assert part == dataclasses.replace(part) == copy.deepcopy(part) == pickle.loads(pickle.dumps(part))
    assert hash(part) == hash(dataclasses.replace(part))
    for field in dataclasses.fields(part):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, field.name, getattr(part, field.name))


LINEAR = nn.Linear(1, 1)
BAD = [
    *((mq.Constant, {"initial": v}) for v in (-1.0, NAN, INF)),
    *((s, {"initial": v}) for s in (mq.TenFold, mq.PaperSchedule, mq.GainRatio) for v in (-1.0, 0.0, NAN, INF)),
    *((mq.TenFold, {"factor": v}) for v in (1.0, 0.5, -10.0, NAN, INF)),
    *((mq.GainRatio, {k: v}) for k in ("down", "slow_down") for v in (0.0, -0.5, 1.5, NAN)),
    *((mq.GainRatio, {k: v}) for k in ("up", "slow_up") for v in (0.5, -1.0, NAN, INF)),
    *((mq.GainRatio, {"floor": v}) for v in (-1.0, NAN, INF)),
    *((s, {"minimum": v}) for s in (mq.TenFold, mq.PaperSchedule, mq.GainRatio) for v in (-1.0, 0.0, NAN)),
    *((s, {"maximum": v}) for s in (mq.TenFold, mq.PaperSchedule, mq.GainRatio) for v in (-1.0, NAN, INF)),
    *((s, {"minimum": 3.0, "maximum": 2.0}) for s in (mq.TenFold, mq.PaperSchedule, mq.GainRatio)),
    *((mq.AdaptiveMomentum, {"xi": v}) for v in (0.0, 1.0, -0.5, 1.5, NAN)),
    *((mq.AdaptiveMomentum, {"dP": v}) for v in (0.0, -0.6, NAN, INF)),
    *((mq.AdaptiveMomentum, {"dP": v, "cap": True}) for v in (0.0, -0.6, NAN)),
    *((mq.MaxDiagonal, {"floor": v}) for v in (-0.01, NAN, INF)),
    *((mq.Uphill, {"b": v}) for v in (0.0, -2.0, NAN, INF)),
    *((mq.EMA, {"decay": v}) for v in (-0.1, 1.0, 1.5, NAN)),
    (mq.Grid, {"start": 2.0, "stop": 1.0}),
    (mq.Grid, {"start": 2.0, "stop": 2.0}),
    *((mq.Grid, {"start": v}) for v in (0.0, -1.0, NAN)),
    *((mq.Grid, {"stop": v}) for v in (NAN, INF)),
    *((mq.Grid, {"step": v}) for v in (0.0, -0.125, NAN, INF)),
    *((mq.Backtracking, {"factor": v}) for v in (0.0, 1.0, -0.5, NAN)),
    *((mq.Backtracking, {"trials": v}) for v in (0, -1, 2.5)),
    *((mq.Sampled, {"k": v}) for v in (0, -1, 1.5)),
    *((r, {"chunk": v}) for r in (mq.Dense, mq.Gram, mq.Auto) for v in (0, -1, 2.5)),
    *((r, {"inertia": v}) for r in (mq.Dense, mq.Auto) for v in (-0.1, 1.0, NAN)),
]
BAD_FOR_LM = [
    *(("lr", v) for v in (-1.0, NAN, INF)),
    *(("attempts", v) for v in (0, -1, 1.5)),
]


def spelled(part, arguments) -> str:
    return f"{part.__name__}({', '.join(f'{k}={v}' for k, v in arguments.items())})"


@pytest.mark.parametrize(("part", "arguments"), BAD, ids=[spelled(*b) for b in BAD])
def test_bad_values_are_refused_by_name(part, arguments):
    name, value = next(iter(arguments.items()))
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
        part(**arguments)


@pytest.mark.parametrize(("name", "value"), BAD_FOR_LM)
def test_bad_values_of_the_optimizer(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
        mq.LM(LINEAR, "mse", **{name: value})


@pytest.mark.parametrize(
    "make",
    [
        lambda: mq.Constant(0.0),  # Gauss-Newton
        lambda: mq.MaxDiagonal(0.0),
        lambda: mq.EMA(0.0),
        lambda: mq.AdaptiveMomentum(0.9, INF, cap=True),
        lambda: mq.GainRatio(1.0, down=1.0, up=1.0),
        lambda: mq.GainRatio(1.0, floor=1e-12, minimum=1e-12),  # no floor
        lambda: mq.Dense(inertia=0.0),
        lambda: mq.Backtracking(0.5, trials=1),
        lambda: mq.LM(LINEAR, "mse", lr=0.0),
    ],
)
def test_values_at_the_edge_are_fine(make):
    make()


# ---- presets


def test_paper():
    """Sections 2.3 to 2.6 of the paper and the constants of the authors' code."""
    opt = mq.presets.paper(mlp(outputs=3), "cross_entropy")
    assert opt.curvature.inertia == 0  # G is that of the batch
    assert opt.rows == mq.Empirical()
    assert opt.damping == mq.MaxDiagonal(floor=0.01)
    assert opt.schedule == mq.PaperSchedule(initial=1.0, minimum=1e-5, maximum=1e5)
    assert opt.momentum == mq.AdaptiveMomentum(xi=0.9, dP=0.6, cap=False)
    assert opt.acceptance == mq.Uphill(b=2.0, against_best=False)
    assert opt.line_search == mq.Grid(1e-6, 9, 0.125, along_step=False, uphill=False)
    assert opt.average is None
    assert opt.attempts == 1
    assert opt.param_groups[0]["lr"] == 1
    assert opt.lam == 1


PAPER = {
    "damping": mq.MaxDiagonal(0.01),
    "schedule": mq.PaperSchedule(1.0),
    "momentum": mq.AdaptiveMomentum(0.9, 0.6),
    "acceptance": mq.Uphill(2.0),
    "line_search": mq.Grid(1e-6, 9, 0.125),
}
VANILLA = {"damping": mq.Identity(), "schedule": mq.TenFold(1.0, 10.0), "acceptance": mq.Decrease()}


@pytest.mark.parametrize(("preset", "parts"), [(mq.presets.paper, PAPER), (mq.presets.vanilla, VANILLA)])
@pytest.mark.parametrize("loss", ["mse", nn.MSELoss(reduction="sum"), "residual"])
@pytest.mark.parametrize("changing", [False, True])
def test_presets_on_squared_error(preset, parts, loss, changing):
    """Exact rows, and the units of ½Σr², in which D₀, δP and Levenberg's λ are meant; reported as the user has it."""
    model, twin = mlp(outputs=2), mlp(outputs=2)
    opt, by_hand = preset(model, loss), lm(twin, mq.losses.SquaredError(reduction="sum", factor=0.5), **parts)
    assert opt.rows == mq.Exact()
    for k in range(4):
        x, y = batch(seed=k if changing else 0, N=12, outputs=2)
        y = torch.zeros_like(y) if loss == "residual" else y
        targets = None if loss == "residual" else y
        unit = 24 if isinstance(loss, nn.MSELoss) else 1
        before = nn.functional.mse_loss(model(x), y).item()
        step, same = opt.step(x, targets), by_hand.step(x, y)
        assert step.loss == pytest.approx(unit * before, rel=1e-9)
        assert step.new_loss == pytest.approx(unit * nn.functional.mse_loss(model(x), y).item(), rel=1e-9)
        assert (step.rule, step.lr, step.lam) == (same.rule, same.lr, same.lam)
        assert error(flat(model), flat(twin)) < 1e-6


def test_vanilla():
    opt = mq.presets.vanilla(mlp(), "mse")
    assert opt.curvature.inertia == 0
    assert opt.rows == mq.Exact()
    assert opt.damping == mq.Identity()
    assert opt.schedule == mq.TenFold(initial=1.0, factor=10.0)
    assert opt.acceptance == mq.Decrease()
    assert (opt.momentum, opt.line_search, opt.average) == (None, None, None)
    assert opt.lam == 1


def test_gauss_newton():
    opt = mq.presets.gauss_newton(mlp(), "mse")
    assert opt.schedule == mq.Constant(0.0)
    assert opt.acceptance == mq.Decrease()
    assert opt.line_search == mq.Grid(1e-6, 9, 0.125)
    assert (opt.momentum, opt.average) == (None, None)
    assert opt.lam == 0


def test_gauss_newton_solves_a_linear_problem_at_once():
    x, y = batch()
    model = nn.Linear(2, 1).double()
    step = mq.presets.gauss_newton(model, "mse").step(x, y)
    assert step.rule == "decrease"
    assert error(model(x).detach(), linear_fit(x, y)) < 1e-9


@pytest.mark.parametrize("representation", [mq.Auto(), mq.Dense()])
def test_gauss_newton_with_more_parameters_than_rows(representation):
    """There λ = 0 leaves (G + λD) singular, but not the step of least length: the data are met exactly."""
    x, y = batch(N=4)
    model = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 1)).double()
    opt = mq.presets.gauss_newton(model, "mse", curvature=representation)
    for _ in range(6):
        step = opt.step(x, y)
    assert step.new_loss < 1e-6, step.note


def linear_fit(x: Tensor, y: Tensor) -> Tensor:
    X = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    return X @ torch.linalg.lstsq(X, y).solution


@pytest.mark.parametrize("preset", [mq.presets.paper, mq.presets.vanilla, mq.presets.gauss_newton])
def test_presets_take_other_parts(preset):
    opt = preset(mlp(), "mse", momentum=None, schedule=mq.Constant(3.0), average=mq.Polyak(), lr=0.5, attempts=2)
    assert (opt.momentum, opt.schedule, opt.average, opt.attempts) == (None, mq.Constant(3.0), mq.Polyak(), 2)
    assert (opt.lam, opt.param_groups[0]["lr"]) == (3, 0.5)
