"""The parts of the optimizer: the identities the mathematics promises, the paper's rules case by case, bad values."""

from __future__ import annotations

import copy
import dataclasses
import io
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
from cases import build
from marquardt.curvature import Curvature
from marquardt.curvature.gram import GramCurvature
from marquardt.layers.bilinear import Bilinear
from marquardt.metric import Diagonal
from marquardt.parts.acceptance import Trial
from marquardt.parts.schedule import Outcome
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

    def __init__(self, H: Tensor, g: Tensor) -> None:
        self.H, self.G = H, SimpleNamespace(gradient=g)

    def quadratic(self, v: Tensor) -> Tensor:
        return v @ self.H @ v


class Values(Curvature):
    """G as damping sees it: a diagonal, of one layer."""

    def __init__(self, values: Tensor, rank: int = 1) -> None:
        lin = SimpleNamespace(
            theta=torch.zeros_like(values), sizes=[len(values)], n=len(values), most=rank, params=[values]
        )
        lin.traces = lambda: [([0], values.sum())]
        super().__init__(lin)
        self.values, self.rank = values, rank

    def __matmul__(self, v: Tensor) -> Tensor:
        raise NotImplementedError

    def newton(self, damping: Diagonal | Tensor) -> Tensor:
        raise NotImplementedError

    def diagonal(self) -> Tensor:
        return self.values


class Always:
    """Accepts what is finite."""

    looks_back = False

    def judge(self, trial: Trial) -> str | None:
        return "decrease" if math.isfinite(trial.new_loss) else None


class Never:
    """Leaves every step to the line search."""

    looks_back = False

    def judge(self, trial: Trial) -> str | None:
        return None


def spd(seed: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """A positive definite H with a condition of some hundred, a gradient and a previous step."""
    generator = torch.Generator().manual_seed(seed)
    A, g, previous = (torch.randn(shape, dtype=f64, generator=generator) for shape in ((n, n + 2), (n,), (n,)))
    return A @ A.T / n + 0.1 * torch.eye(n, dtype=f64), g, previous


def refine(part: mq.AdaptiveMomentum, H: Tensor, g: Tensor, previous: Tensor | None, same_data: bool = True) -> Tensor:
    return part.refine(-torch.linalg.solve(H, g), previous, Matrix(H, g), same_data)


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


def entries(opt: mq.LM) -> Tensor:
    """D as the optimizer keeps it: (n,)"""
    return Diagonal.restored(opt.state_dict()["marquardt"]["D"]).entries([p.numel() for p in opt.params])


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
    assert torch.equal(part.refine(-newton, previous, Matrix(H, g), True), -newton)  # I_GG < 0
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
        last = None if D is None else D.entries([n]).clone()
        new = part.update(D, Values(values.clone()))
        assert torch.equal(new.entries([n]), diagonals[: k + 1].amax(0).clamp(min=floor))
        assert last is None or torch.equal(D.entries([n]), last)  # a rejected step goes back to it
        assert torch.equal(values, diagonals[k])
        D = new


@given(seeds, st.integers(1, 8), st.integers(1, 6))
def test_mean_eigenvalue_is_one_number(seed, n, steps):
    torch.manual_seed(seed)
    diagonals = torch.rand(steps, n, dtype=f64)
    D = None
    for k, values in enumerate(diagonals):
        D = mq.MeanEigenvalue().update(D, Values(values, rank=3))
        assert D.factors is None
        assert D.scale.shape == ()
        assert D.scale.item() == pytest.approx(max(t.sum().item() / 3 for t in diagonals[: k + 1]), rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, f64])
@pytest.mark.parametrize("part", [mq.Identity(), mq.MaxDiagonal(0.01), mq.MeanEigenvalue(), mq.LayerMeanEigenvalue()])
def test_damping_keeps_the_dtype(part, dtype):
    G = Values(torch.rand(4, dtype=dtype))
    D = part.update(part.update(None, G), G)
    assert D.scale.dtype == dtype
    assert D.entries([4]).dtype == dtype
    assert D.entries([4]).shape == (4,)


def test_identity():
    G = Values(torch.tensor([3.0, 1e6]))
    for D in (None, Diagonal(torch.tensor(7.0))):
        assert torch.equal(mq.Identity().update(D, G).entries([2]), torch.ones(2))


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
    D = entries(opt)
    opt.acceptance = Never()
    assert not opt.step(10 * x, y).accepted
    assert torch.equal(entries(opt), D)
    opt.acceptance = Always()
    assert opt.step(10 * x, y).accepted
    assert not torch.equal(entries(opt), D)  # that batch would have changed it


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


# ---- damping by layers


class Tokens(nn.Module):
    """Embedding, attention, norms: (N, 4) tokens → (N, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=5, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.table(x)).mean(1))


class Twice(nn.Module):
    """A layer that is called twice, and one without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.inner(x).tanh()).tanh())


NETS = {
    "mlp": lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)),
    "one output": lambda: nn.Sequential(nn.Linear(3, 1), nn.Tanh(), nn.Linear(1, 3)),
    "norms": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3)),
    "conv": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 3, 2), nn.Flatten(),
        nn.Linear(3, 3),
    ),
    "grouped conv": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), nn.Conv2d(4, 4, 2, groups=4, bias=False), nn.Flatten(),
        nn.Linear(4, 3),
    ),
    "tokens": Tokens,
    "twice": Twice,
}  # fmt: skip
EVERY_NET = pytest.mark.parametrize("name", NETS)
FACTORED, BY_LAYER = mq.FactoredMaxDiagonal(), mq.LayerMeanEigenvalue(memory=float("inf"))


def net(name: str) -> nn.Module:
    torch.manual_seed(3)
    return NETS[name]().double()


def samples(name: str, seed: int, N: int = 7) -> tuple[Tensor, Tensor]:
    """Other seeds are other data of other sizes, larger and smaller."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (N,), generator=generator)
    if name == "tokens":
        return torch.randint(7, (N, 4), generator=generator), y
    shape = {"conv": (N, 2, 4, 4), "grouped conv": (N, 2, 3, 3)}.get(name, (N, 3))
    return [1.0, 3.0, 0.3, 1.5][seed % 4] * torch.randn(shape, dtype=f64, generator=generator), y


def represented(name: str, model: nn.Module, seed: int, chunk: int | None = None, representation=mq.Gram):
    return representation(chunk=chunk).represent(
        mq.linearize(model, "cross_entropy", *samples(name, seed), chunk=chunk)
    )


def disturb(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn_like(p)


def factors_by_hand(model: nn.Module, x: Tensor, diagonals: dict[str, Tensor], old: dict[str, tuple[Tensor, Tensor]]):
    """(u, v) of every linear, convolutional and layer-norm layer: v ← max(v, mean a²), u ← max(u, max diag/v)."""
    layers = {k: m for k, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d, nn.LayerNorm))}

    def squares(layer: nn.Module, a: Tensor) -> Tensor:
        """a² by positions: (…, G, 1, I)"""
        if isinstance(layer, nn.Linear):
            return a.square()[..., None, None, :]
        if isinstance(layer, nn.LayerNorm):
            return nn.functional.layer_norm(a, layer.normalized_shape, eps=layer.eps).square()[..., None, None]
        patches = nn.functional.unfold(a, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # (N, CK, P)
        return patches.square().transpose(1, 2).unflatten(2, (layer.groups, 1, -1))

    seen: dict[str, list[Tensor]] = {k: [] for k in layers}
    handles = [
        m.register_forward_pre_hook(lambda m, args, k=k: seen[k].append(squares(m, args[0]).detach().flatten(0, -4)))
        for k, m in layers.items()
    ]
    model(x)
    for handle in handles:
        handle.remove()
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for k, calls in seen.items():
        if not calls:  # reached by another way than its module
            continue
        v = torch.cat(calls).mean(0)  # (G, 1, I)
        v = torch.maximum(old[k][1], v) if k in old else v
        diagonal = diagonals[f"{k}.weight"].view(len(v), -1, v.shape[2])  # (G, O, I)
        u = (diagonal / v.where(v > 0, INF)).amax(2, keepdim=True)  # (G, O, 1); an input that was never there has none
        if f"{k}.bias" in diagonals:
            u = torch.maximum(u, diagonals[f"{k}.bias"].view_as(u))
        found[k] = (torch.maximum(old[k][0], u) if k in old else u, v)
    return found


@EVERY_NET
@pytest.mark.parametrize("chunk", [None, 3])
def test_factored_max_diagonal_bounds_every_diagonal(name, chunk):
    """Over several steps on other data at other weights; u and v are running maxima, no larger than they must be."""
    model, D, hand = net(name), None, {}
    names = [k for k, _ in model.named_parameters()]
    sizes = [p.numel() for p in model.parameters()]
    largest = torch.zeros(sum(sizes), dtype=f64)
    for seed in range(5):
        x, y = samples(name, seed)
        G = represented(name, model, seed, chunk)
        diagonal = reference.quadratic(model, "cross_entropy", x, y).diagonal()
        largest = torch.maximum(largest, diagonal)
        old, last = D, None if D is None else D.entries(sizes).clone()
        D = FACTORED.update(D, G)
        assert last is None or torch.equal(old.entries(sizes), last)  # a rejected step goes back to it
        assert (D.entries(sizes) >= largest * (1 - 1e-12)).all()
        assert last is None or (D.entries(sizes) >= last).all()
        hand = factors_by_hand(model, x, dict(zip(names, diagonal.split(sizes), strict=True)), hand)
        assert hand
        assert D.scale.item() == pytest.approx(sum(sizes) / G.rank, rel=1e-12)  # columns over rank
        for k, (u, v) in hand.items():
            found = D.factors[names.index(f"{k}.weight")]
            assert error(found[0], u) < 1e-10, k
            assert error(found[1], v) < 1e-10, k
            if f"{k}.bias" in names:
                (bias,) = D.factors[names.index(f"{k}.bias")]
                assert error(bias, u) < 1e-10, k
        for k, part, size in zip(names, D.factors, sizes, strict=True):
            if "table" in k:  # no factors: element by element
                assert part[0].numel() == size
        disturb(model, seed)


def test_factored_max_diagonal_of_an_embedding():
    """A table has no input to speak of: there it is the plain maximum."""
    model, D, expected = net("tokens"), None, None
    sizes = [p.numel() for p in model.parameters()]
    for seed in range(3):
        G = represented("tokens", model, seed)
        D = FACTORED.update(D, G)
        diagonal = reference.quadratic(model, "cross_entropy", *samples("tokens", seed)).diagonal()[: sizes[0]]
        expected = diagonal if expected is None else torch.maximum(expected, diagonal)
        assert error(D.entries(sizes)[: sizes[0]], sum(sizes) / G.rank * expected) < 1e-10
        disturb(model, seed)


@pytest.mark.parametrize("part", [FACTORED, BY_LAYER], ids=lambda p: type(p).__name__)
@EVERY_NET
def test_damping_of_chunks_is_that_of_the_whole(name, part):
    model = net(name)
    sizes = [p.numel() for p in model.parameters()]
    whole, *others = (represented(name, model, 0, chunk) for chunk in (None, 3, 1))
    D = part.update(None, whole)
    assert (D.entries(sizes) > 0).any()
    for G in [*others, represented(name, model, 0, 2, mq.Dense), represented(name, model, 0, None, mq.Dense)]:
        found = part.update(None, G)
        for factors, expected in zip(found.factors, D.factors, strict=True):
            for f, e in zip(factors, expected, strict=True):
                assert error(f, e) < 1e-10


@pytest.mark.parametrize("part", [FACTORED, BY_LAYER], ids=lambda p: type(p).__name__)
@EVERY_NET
@pytest.mark.parametrize("chunk", [None, 3])
def test_dual_step_with_damping_by_layers(name, part, chunk):
    """Gram with D in factors is Dense with D written out."""
    model = net(name)
    D = part.update(None, represented(name, model, 1))
    disturb(model, 0)
    dual, primal = represented(name, model, 0, chunk), represented(name, model, 0, chunk, mq.Dense)
    A = part.update(D, dual).positive()
    full = A.entries(dual.lin.sizes)
    assert full.unique().numel() > 1
    for lam in (1e-3, 1.0):
        expected = primal.newton(lam * full)
        assert error(dual.newton(lam * A), expected) < 1e-9
        assert error(dual.newton(lam * full), expected) < 1e-9
        assert error(primal.newton(lam * A), expected) < 1e-9


def test_steps_with_factored_damping_equal_the_algorithm():
    """θ − (G + λD)⁻¹g with D by hand, over several steps on changing data."""
    model, hand, lam = net("mlp"), {}, 3.0
    names, sizes = zip(*((k, p.numel()) for k, p in model.named_parameters()), strict=True)
    opt = lm(model, "cross_entropy", curvature=mq.Gram(), damping=FACTORED, schedule=mq.Constant(lam))
    for seed in range(4):
        x, y = samples("mlp", seed)
        q, before = reference.quadratic(model, "cross_entropy", x, y), flat(model)
        hand = factors_by_hand(model, x, dict(zip(names, q.diagonal().split(sizes), strict=True)), hand)
        parts = [(k.rpartition(".")[0], k.endswith("weight")) for k in names]
        D = torch.cat([(hand[k][0] * hand[k][1] if weight else hand[k][0]).flatten() for k, weight in parts])
        D = D.where(D > 0, 1)  # where there is no curvature, there is no gradient
        D = len(q.g) / represented("mlp", model, seed).rank * D  # columns over rank
        assert opt.step(x, y).accepted
        assert error(flat(model) - before, q.step(lam * D)) < 1e-9


# A hidden unit or channel: (layer in, layer out, of how many inputs of the latter each unit is).
RELU_NETS = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)),
        [(0, 2, 1), (2, 4, 1)],
    ),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 2, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)
        ),
        [(0, 2, 1), (2, 5, 16)],
    ),
}  # fmt: skip


def rescale(model: nn.Module, into: int, out: int, width: int, unit: int, c: float) -> None:
    """Unit times c, what follows it divided by c: the same function."""
    with torch.no_grad():
        model[into].weight[unit] *= c
        model[into].bias[unit] *= c
        model[out].weight[:, unit * width : (unit + 1) * width] /= c


def rescaled_apart(name: str, which: int, unit: int, c: float, **parts) -> float:
    """How far training of the rescaled network is from the rescaled trained network, relative to the way gone."""
    make, places = RELU_NETS[name]
    torch.manual_seed(5)
    model = make().double()
    other = copy.deepcopy(model)
    rescale(other, *places[which], unit, c)
    ways = []
    for one in (model, other):
        start = flat(one)
        opt = lm(one, "cross_entropy", schedule=mq.Constant(3.0), **parts)
        for seed in range(2):
            assert opt.step(*samples(name, seed, N=9)).accepted
        ways.append(flat(one) - start)
    nn.utils.vector_to_parameters(ways[0], model.parameters())
    rescale(model, *places[which], unit, c)
    found = ways[1].split([p.numel() for p in other.parameters()])
    return max(error(d, p.detach().flatten()) for d, p in zip(found, model.parameters(), strict=True))


@pytest.mark.parametrize("representation", [mq.Gram(), mq.Gram(chunk=4), mq.Dense()], ids=str)
@pytest.mark.parametrize("name", RELU_NETS)
@pytest.mark.parametrize("which", [0, 1])
@settings(max_examples=5)
@given(unit=st.integers(0, 2), c=decades(-2, 2))
def test_factored_max_diagonal_is_covariant_to_rescaling_a_unit(representation, name, which, unit, c):
    assert rescaled_apart(name, which, unit, c, damping=FACTORED, curvature=representation) < 1e-8


@pytest.mark.parametrize("name", RELU_NETS)
def test_one_number_for_a_layer_is_not(name):
    for damping in (BY_LAYER, mq.Identity()):
        assert rescaled_apart(name, 0, 0, 10.0, damping=damping, curvature=mq.Gram()) > 1e-2


@pytest.mark.parametrize(
    "part", [FACTORED, BY_LAYER, mq.Identity(), mq.MeanEigenvalue()], ids=lambda p: type(p).__name__
)
@pytest.mark.parametrize("chunk", [None, 3])
def test_damping_by_layers_never_builds_J(monkeypatch, part, chunk):
    original = Bilinear.slabs

    def slabs(self: Bilinear, dtype: torch.dtype):
        assert not self.P == self.G == 1, "rows were built"
        return original(self, dtype)

    monkeypatch.setattr(Bilinear, "slabs", slabs)
    x, y = samples("mlp", 0)
    opt = lm(net("mlp"), "cross_entropy", curvature=mq.Gram(chunk, whole=0), damping=part)
    for _ in range(2):
        assert opt.step(x, y).accepted
    with pytest.raises(AssertionError, match="rows were built"):  # where one number for every weight asks for them
        lm(net("mlp"), "cross_entropy", curvature=mq.Gram(chunk, whole=0), damping=mq.MaxDiagonal()).step(x, y)


@EVERY_NET
@pytest.mark.parametrize("chunk", [None, 3])
def test_layer_mean_eigenvalue(name, chunk):
    """τ = tr G / rank G of a layer, the largest so far."""
    model, D, hand = net(name), None, {}
    for seed in range(4):
        G = represented(name, model, seed, chunk)
        D = BY_LAYER.update(D, G)
        q = reference.quadratic(model, "cross_entropy", *samples(name, seed))
        params = list(model.named_parameters())
        diagonals = dict(zip([k for k, _ in params], q.diagonal().split(G.lin.sizes), strict=True))
        for (k, _), (tau,) in zip(params, D.factors, strict=True):
            if "attn" in k:
                continue
            layer = [v for name, v in diagonals.items() if name.rpartition(".")[0] == k.rpartition(".")[0]]
            mean = sum(v.sum().item() for v in layer) / min(sum(map(len, layer)), G.lin.m)
            hand[k] = max(hand.get(k, 0.0), mean)
            assert tau.shape == ()
            assert (D.scale * tau).item() == pytest.approx(hand[k], rel=1e-9), k
        disturb(model, seed)


@pytest.mark.parametrize("part", [FACTORED, BY_LAYER], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("representation", [mq.Gram(), mq.Gram(chunk=3), mq.Dense()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, f64], ids=str)
def test_dead_units_with_damping_by_layers(part, representation, dtype):
    """An input that is always 0 and a unit that is never active: nothing there moves, everything else does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).to(dtype)
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([0.5, -1e3, 0.5, 0.5]))
    dead = torch.cat([m.flatten() for m in dead_parts()])
    opt = lm(model, "cross_entropy", curvature=representation, damping=part, schedule=mq.Constant(30.0))
    for seed in range(3):
        x, y = samples("mlp", seed, N=20)
        x[:, 2] = 0
        before = flat(model)
        step = opt.step(x.to(dtype), y)
        assert step.accepted, step.note
        moved = flat(model) != before
        assert flat(model).isfinite().all()
        assert not moved[dead].any()
        assert moved[~dead].all()
        if part is FACTORED:
            assert entries(opt).isfinite().all()
    x, y = samples("mlp", 3, N=20)  # the input comes to life, and its damping with it
    before = flat(model)
    assert opt.step(x.to(dtype), y).accepted
    moved = flat(model) != before
    assert moved[[2, 8, 11]].all()
    assert not moved[3:6].any()
    diagonal = reference.quadratic(restored(model, before), "cross_entropy", x.to(dtype), y).diagonal()
    assert part is not FACTORED or (entries(opt) >= diagonal * (1 - 1e-5)).all()


def dead_parts() -> list[Tensor]:
    """Of a network 3-4-3: the last input, and hidden unit 1."""
    first, bias, second, last = (torch.zeros(s, dtype=torch.bool) for s in ((4, 3), (4,), (3, 4), (3,)))
    first[:, 2] = first[1] = bias[1] = second[:, 1] = True
    return [first, bias, second, last]


def restored(model: nn.Module, theta: Tensor) -> nn.Module:
    trial = copy.deepcopy(model)
    nn.utils.vector_to_parameters(theta, trial.parameters())
    return trial


@pytest.mark.parametrize("part", [FACTORED, BY_LAYER], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("name", ["mlp", "conv", "grouped conv", "tokens"])
def test_damping_by_layers_resumes(name, part):
    """Through a file of nothing but tensors and numbers, to the last bit."""
    model, other = net(name), net(name)
    parts = {"curvature": mq.Gram(), "damping": part, "schedule": mq.Constant(30.0)}
    opt, fresh = (lm(m, "cross_entropy", **parts) for m in (model, other))
    for seed in range(2):
        opt.step(*samples(name, seed))
    file = io.BytesIO()
    torch.save([model.state_dict(), opt.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other.load_state_dict(weights)
    fresh.load_state_dict(state)
    assert torch.equal(entries(fresh), entries(opt))
    for seed in range(2, 5):
        assert fresh.step(*samples(name, seed)) == opt.step(*samples(name, seed))
        assert torch.equal(flat(other), flat(model))
        assert torch.equal(entries(fresh), entries(opt))


EVERY_DAMPING = [mq.Identity(), mq.MeanEigenvalue(), BY_LAYER, FACTORED, mq.MaxDiagonal()]


@pytest.mark.parametrize("part", EVERY_DAMPING, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize(
    ("dtype", "N", "lam"),
    [(f64, 7, 1e-3), (f64, 40, 1e-3), (torch.float32, 7, 1.0), (torch.float32, 7, 1e-9), (torch.float32, 40, 1.0)],
    ids=["float64", "float64, tall", "float32", "float32, small λ", "float32, tall"],
)
def test_another_lambda_needs_no_other_gram_matrix(monkeypatch, part, dtype, N, lam):
    """K is formed once for every precision that is needed, not for every λ."""
    formed: list[torch.dtype] = []
    original = GramCurvature.gram

    def gram(self: GramCurvature, factors, precision: torch.dtype) -> Tensor:
        formed.append(precision)
        return original(self, factors, precision)

    monkeypatch.setattr(GramCurvature, "gram", gram)
    x, y = samples("mlp", 0, N)
    opt = lm(
        net("mlp").to(dtype), "cross_entropy", curvature=mq.Gram(), damping=part, schedule=mq.TenFold(lam, 1.5),
        acceptance=Never(), attempts=5,
    )  # fmt: skip
    step = opt.step(x.to(dtype), y)
    assert step.note.count("rejected") == 5
    assert len(formed) == len(set(formed)), formed


@pytest.mark.parametrize("part", [FACTORED, BY_LAYER], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("representation", [mq.Gram(), mq.Gram(chunk=3), mq.Dense(), mq.Dense(chunk=3)], ids=str)
def test_layers_that_some_batches_do_not_reach(part, representation):
    """What a layer has seen stays, and the bound holds again when it is reached again."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plus, self.minus, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.plus(x) if x[0, 0] > 0 else self.minus(x)
            return self.head(h.tanh())

    torch.manual_seed(0)
    model = Branches().double()
    opt = lm(model, "cross_entropy", curvature=representation, damping=part)
    largest = 0 * flat(model)
    for k, sign in enumerate((1, -1, -1, 1, 1, -1)):
        x, y = samples("mlp", k)
        x[:, 0] = sign * x[:, 0].abs()
        diagonal = reference.quadratic(model, "cross_entropy", x, y).diagonal()
        last = None if k == 0 else entries(opt)
        largest = torch.maximum(largest, diagonal)
        assert opt.step(x, y).accepted
        assert last is None or (entries(opt) >= last * (1 - 1e-12)).all()
        if part is FACTORED:
            assert (entries(opt) >= largest * (1 - 1e-12)).all()
            _, factors = opt.state_dict()["marquardt"]["D"]
            assert [len(f) for f in factors[::2]] == [2, 2 if k > 0 else 1, 2]  # never written out
            assert sum(t.numel() for f in factors for t in f) < 2 * len(largest)


@pytest.mark.parametrize("part", [FACTORED, BY_LAYER], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("name", ["routed_experts", "sorted_samples"])
@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_damping_where_a_layer_sees_some_of_the_samples(name, part, chunk):
    """Also none of them: an expert that a chunk does not ask."""
    p = build(name)
    q = reference.quadratic(*p)
    lin = mq.linearize(p.model, p.loss, p.x, p.y, p.weight, chunk=chunk)
    D = part.update(None, mq.Gram(chunk).represent(lin))
    assert D.entries(lin.sizes).isfinite().all()
    if part is FACTORED:
        assert (D.entries(lin.sizes) >= q.diagonal() * (1 - 1e-12)).all()
    A = D.positive()
    assert error(-mq.Gram(chunk).represent(lin).newton(A), q.step(A.entries(lin.sizes))) < 1e-9


@pytest.mark.parametrize("factor", [1e-3, 1e3])
@pytest.mark.parametrize("part", [FACTORED, BY_LAYER], ids=lambda p: type(p).__name__)
def test_damping_by_layers_in_the_units_of_the_loss(part, factor):
    x, y = batch()
    ends = []
    for c in (1.0, factor):
        model = mlp()
        opt = lm(model, mq.losses.SquaredError(factor=c), damping=part, curvature=mq.Gram())
        for _ in range(3):
            opt.step(x, y)
        ends.append(flat(model))
    assert error(ends[1], ends[0]) < 1e-8


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
@pytest.mark.parametrize("tried", [None, (2.0, 7.0)])
def test_backtracking_takes_the_first_decrease(tried, losses, f):
    """The point that failed on the same line is not tried again."""
    calls: list[float] = []
    rates = [2 * 0.3**k for k in (range(6) if tried is None else range(1, 7))]
    table = iter(losses)
    found = mq.Backtracking(0.3, trials=6).search(recorded(lambda lr: next(table), calls), f, 2.0, tried)
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
    mq.Identity(), mq.MaxDiagonal(0.01), mq.MeanEigenvalue(), mq.LayerMeanEigenvalue(), mq.FactoredMaxDiagonal(),
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


def test_what_a_weight_and_its_bias_share_stays_shared():
    """In another precision, and with its zeros filled: to ask for identity is free, equality waits for a GPU."""
    u, v = torch.rand(1, 3, 1), torch.zeros(1, 1, 4)
    D = mq.Diagonal(torch.ones(()), [(u, v), (u,)])
    for moved in (D.to(torch.zeros((), dtype=torch.float64)), D.positive()):
        (weight, _), (bias,) = moved.factors
        assert weight is bias
