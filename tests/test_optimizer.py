"""LM: the step against the algorithm written out, what it reports, what it leaves behind, and how it resumes."""

from __future__ import annotations

import copy
import itertools
import math
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

import marquardt as mq
import reference
from cases import Poisson1D, Recurrent, TwoTowers, default_dtype, mlp, sample_weights
from marquardt.curvature.contract import FactorizationError
from marquardt.curvature.dense import DenseCurvature
from marquardt.layers import Line
from reference import error

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
PLAIN: dict[str, Any] = {
    "curvature": mq.Dense(inertia=0.0),
    "damping": mq.Identity(),
    "schedule": mq.TenFold(0.1),
    "momentum": None,
    "acceptance": mq.Decrease(),
    "line_search": None,
    "average": None,
}
LOSSES = ["mse", "cross_entropy", "bce", "huber", "poisson"]
EVERY_LOSS = pytest.mark.parametrize("loss", LOSSES)
DENSE, GRAM = mq.Dense(inertia=0.0), mq.Gram()
CURVATURES = {
    "dense": DENSE,
    "gram": GRAM,
    "dense-chunked": mq.Dense(chunk=3, inertia=0.0),
    "gram-chunked": mq.Gram(chunk=3),
}
EVERY_CURVATURE = pytest.mark.parametrize("curvature", CURVATURES.values(), ids=CURVATURES)
DENSE_AND_GRAM = pytest.mark.parametrize("curvature", [DENSE, GRAM], ids=["dense", "gram"])


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """A second one costs more than it brings at this size, much more where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def double():
    with default_dtype(torch.float64):
        yield


def lm(model: nn.Module, loss: Any = "mse", **parts: Any) -> mq.LM:
    """LM with every part named, so that no default matters."""
    return mq.LM(model, loss, **{**PLAIN, **parts})


def targets(loss: Any, N: int, out: int) -> Tensor:
    match loss:
        case "cross_entropy":
            return torch.randint(out, (N,))
        case "bce":
            return torch.randint(2, (N, out)).to(torch.get_default_dtype())
        case "poisson":
            return torch.randint(5, (N, out)).to(torch.get_default_dtype())
    return torch.randn(N, out)


def problem(loss: Any = "mse", N: int = 8, sizes: tuple[int, ...] = (2, 4, 3)) -> tuple[nn.Module, Tensor, Tensor]:
    return mlp(*sizes), torch.randn(N, sizes[0]), targets(loss, N, sizes[-1])


def theta(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach().clone()  # (n,)


def objective(model: nn.Module, loss: Any, x: Any, y: Any, weight: Tensor | None = None) -> float:
    with torch.no_grad():
        return reference.objective(loss, reference.call(model, x), y, weight).item()


# ---- what must not change, and whether it did


def world(model: nn.Module, opt: mq.LM | None = None) -> dict[str, Any]:
    """Everything that belongs to the user, and the optimizer's state."""
    modules, params = list(model.modules()), list(model.parameters())
    kinds = ["_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"]
    return {
        "parameters": {k: p.detach().clone() for k, p in model.named_parameters()},
        "buffers": {k: b.detach().clone() for k, b in model.named_buffers()},
        "gradients": [None if p.grad is None else p.grad.clone() for p in params],
        "identity": [id(p) for p in params],
        "requires_grad": [p.requires_grad for p in params],
        "training": [m.training for m in modules],
        "hooks": [list(getattr(m, kind)) for m in modules for kind in kinds],
        "generator": torch.get_rng_state(),
        "grad mode": torch.is_grad_enabled(),
        "function modes": len(torch.overrides._get_current_function_mode_stack()),
        "optimizer": None if opt is None else copy.deepcopy(opt.state_dict()),
    }


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit, containers and all."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [k for k in before if not same(before[k], after[k])]


# ---- the algorithm, written out


@dataclass
class ByHand:
    """(G + λD)δ = −g with dense matrices: TenFold λ, acceptance of a decrease; the model holds θ."""

    model: nn.Module
    loss: Any
    params: list[nn.Parameter] | None = None
    lam: float = 0.1
    lr: float = 1.0
    max_diagonal: bool = False
    momentum: bool = False
    D: Any = None
    previous: Tensor | None = None

    def step(self, x: Any, y: Any, weight: Tensor | None = None) -> tuple[float, float, bool, float]:
        """f, f at the trial point, whether it was accepted, and the gain ratio."""
        params = list(self.model.parameters()) if self.params is None else self.params
        old = parameters_to_vector(params).detach().clone()
        q = reference.quadratic(self.model, self.loss, x, y, weight, params)
        D = torch.ones_like(q.g)
        if self.max_diagonal:
            D = q.diagonal().clamp(min=0.01) if self.D is None else torch.maximum(self.D, q.diagonal())
        d = q.step(self.lam * D)
        if self.momentum and self.previous is not None:
            d = reference.adaptive_momentum(q.damped(self.lam * D), q.g, self.previous, xi=0.9, dP=0.6)
        vector_to_parameters(old + self.lr * d, params)
        f, f_new = q.f.item(), objective(self.model, self.loss, x, y, weight)
        predicted = (-self.lr * q.g @ d - 0.5 * self.lr**2 * d @ q.G @ d).item()
        accepted = f_new < f
        if accepted:
            self.D, self.previous, self.lam = D, self.lr * d, self.lam / 10
        else:
            vector_to_parameters(old, params)
            self.lam *= 10
        return f, f_new, accepted, (f - f_new) / predicted if predicted > 0 else -math.inf


RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # parts, and the same by hand
    "plain": ({}, {}),
    "damped lr": ({"lr": 0.3}, {"lr": 0.3}),
    "max-diagonal": ({"damping": mq.MaxDiagonal()}, {"max_diagonal": True}),
    "momentum": ({"momentum": mq.AdaptiveMomentum()}, {"momentum": True}),
    "both": (
        {"damping": mq.MaxDiagonal(), "momentum": mq.AdaptiveMomentum()},
        {"max_diagonal": True, "momentum": True},
    ),
    "both, damped lr": (
        {"damping": mq.MaxDiagonal(), "momentum": mq.AdaptiveMomentum(), "lr": 0.3},
        {"max_diagonal": True, "momentum": True, "lr": 0.3},
    ),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("loss", ["mse", "cross_entropy", "huber"])
@EVERY_CURVATURE
def test_steps_equal_the_algorithm(recipe, loss, curvature):
    model, x, y = problem(loss)
    parts, options = RECIPES[recipe]
    hand = ByHand(copy.deepcopy(model), loss, **options)
    opt = lm(model, loss, curvature=curvature, **parts)
    accepted = []
    for _ in range(6):
        assert opt.lam == pytest.approx(hand.lam)
        lam = opt.lam
        step, (f, f_new, success, gain) = opt.step(x, y), hand.step(x, y)
        assert step.loss == pytest.approx(f, rel=1e-9)
        assert step.accepted == success
        assert step.new_loss == pytest.approx(f_new if success else f, rel=1e-8)
        assert (step.lam, step.lr) == (lam, hand.lr)
        assert step.gain == pytest.approx(gain, rel=1e-5)
        assert error(theta(model), theta(hand.model)) < 1e-8
        accepted.append(success)
    assert any(accepted)


@pytest.mark.parametrize("recipe", RECIPES)
def test_changing_batches_equal_the_algorithm(recipe):
    model, x, y = problem(N=18)
    parts, options = RECIPES[recipe]
    hand, opt = ByHand(copy.deepcopy(model), "mse", **options), lm(model, **parts)
    for i in range(0, 18, 6):
        weight = sample_weights(6)
        opt.step(x[i : i + 6], y[i : i + 6], weight)
        hand.step(x[i : i + 6], y[i : i + 6], weight)
        assert error(theta(model), theta(hand.model)) < 1e-9


# ---- what a step reports


@given(
    seed=st.integers(0, 2**20),
    log_lam=st.floats(-8, 3),
    lr=st.sampled_from([0.3, 1.0, 3.0]),
    loss=st.sampled_from(LOSSES),
    line_search=st.sampled_from([None, mq.Grid(), mq.Backtracking()]),
)
def test_accepted_means_lower(seed, log_lam, lr, loss, line_search):
    with default_dtype(torch.float64):
        torch.manual_seed(seed)
        model, x, y = problem(loss)
        before, f = theta(model), objective(model, loss, x, y)
        step = lm(model, loss, lr=lr, schedule=mq.Constant(10**log_lam), line_search=line_search).step(x, y)
        assert step.loss == pytest.approx(f, rel=1e-12)
        assert step.new_loss == pytest.approx(objective(model, loss, x, y), rel=1e-9)
        if step.accepted:
            assert step.new_loss < step.loss
            assert step.rule in ("decrease", "search")
        else:
            assert step.new_loss == step.loss
            assert step.rule == "rejected"
            assert torch.equal(theta(model), before)


def linear_problem() -> tuple[nn.Module, Tensor, Tensor]:
    """f(θ + lr·δ) = (1 − lr)²·f(θ) at λ → 0: the learning rate alone decides what a step does."""
    model, x = nn.Linear(2, 1, bias=False), torch.randn(6, 2)
    return model, x, x @ torch.tensor([[1.0], [-2.0]])


def overshooting(lr: float = 3.0, **parts: Any) -> tuple[nn.Module, mq.LM, Tensor, Tensor]:
    model, x, y = linear_problem()
    return model, lm(model, lr=lr, **{"schedule": mq.TenFold(1e-9), **parts}), x, y


def test_rule_decrease():
    _, opt, x, y = overshooting(lr=0.5)
    step = opt.step(x, y)
    assert (step.rule, step.accepted, step.note) == ("decrease", True, "")
    assert step.new_loss == pytest.approx(0.25 * step.loss)
    assert step.gain == pytest.approx(1.0)


def test_rule_rejected():
    model, opt, x, y = overshooting()
    before = theta(model)
    step = opt.step(x, y)
    assert (step.rule, step.accepted) == ("rejected", False)
    assert step.new_loss == step.loss
    assert torch.equal(theta(model), before)
    assert opt.lam == pytest.approx(10 * step.lam)
    assert "λ" in step.note


@pytest.mark.parametrize(
    ("line_search", "lr"),
    [(mq.Grid(), 1.0), (mq.Grid(along_step=True), 1.0), (mq.Backtracking(), 1.5), (mq.Backtracking(1 / 3), 1.0)],
    ids=str,
)
def test_rule_search(line_search, lr):
    """The minimum lies at lr = 1. The failed lr = 3 is not tried again."""
    model, opt, x, y = overshooting(line_search=line_search)
    step = opt.step(x, y)
    assert (step.rule, step.accepted) == ("search", True)
    assert step.lr == pytest.approx(lr)
    assert step.new_loss == pytest.approx((lr - 1) ** 2 * step.loss, rel=1e-6, abs=1e-6 * step.loss)
    assert objective(model, "mse", x, y) == pytest.approx(step.new_loss, rel=1e-9)
    assert opt.param_groups[0]["lr"] == 3.0  # reported, never written into the optimizer


def test_rule_uphill():
    """The previous step points the same way: a rise is allowed along it."""
    model, opt, x, y = overshooting(lr=0.5, acceptance=mq.Uphill())
    assert opt.step(x, y).rule == "decrease"
    opt.param_groups[0]["lr"] = 2.5
    step = opt.step(x, y)
    assert (step.rule, step.accepted) == ("uphill", True)
    assert step.new_loss == pytest.approx(2.25 * step.loss)
    assert objective(model, "mse", x, y) == pytest.approx(step.new_loss)


def test_uphill_needs_a_previous_step():
    _, opt, x, y = overshooting(acceptance=mq.Uphill())
    assert opt.step(x, y).rule == "rejected"


def test_uphill_against_the_best_loss():
    """The best loss is remembered while the loss rises."""
    _, opt, x, y = overshooting(lr=0.5, acceptance=mq.Uphill(against_best=True))
    best = opt.step(x, y).new_loss
    opt.param_groups[0]["lr"] = 2.5
    assert opt.step(x, y).rule == "uphill"
    assert opt.state_dict()["marquardt"]["best"] == best
    opt.param_groups[0]["lr"] = 0.1
    assert opt.step(x, y).new_loss > best
    assert opt.state_dict()["marquardt"]["best"] == best


PLAIN_TYPES = {"accepted": bool, "rule": str, "note": str, "converged": bool}  # the others are float


@pytest.mark.parametrize("lr", [1.0, 3.0, 1, torch.tensor(0.5)], ids=["one", "rejected", "integer", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_step_holds_plain_values(lr, dtype):
    model, x, y = linear_problem()
    step = lm(model.to(dtype), lr=lr).step(x.to(dtype), y.to(dtype))
    assert isinstance(step, mq.Step)
    found = {f.name: type(getattr(step, f.name)) for f in fields(step)}
    assert found.pop("lr") in (float, type(lr) if isinstance(lr, int) else float)
    assert found == {name: PLAIN_TYPES.get(name, float) for name in found}
    with pytest.raises((AttributeError, TypeError)):
        step.loss = 0.0  # a record, not a state


@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_attempts_raise_lambda_until_accepted(attempts):
    """Overshooting by lr = 3 stops where λ has shortened the step enough: three tenfold increases here."""
    model, x, y = linear_problem()
    q = reference.quadratic(model, "mse", x, y)
    start = torch.linalg.matrix_norm(q.G, 2).item() / 1e3
    lams = [start * 10**k for k in range(attempts)]
    expected = theta(model)
    for lam in lams:
        trial = theta(model) + 3.0 * q.step(lam)
        accepted = nn.functional.mse_loss(x @ trial[:, None], y) < q.f
        if accepted:
            expected = trial
            break
    opt = lm(model, lr=3.0, schedule=mq.TenFold(start), attempts=attempts)
    step = opt.step(x, y)
    assert step.accepted == bool(accepted) == (attempts == 5)
    assert step.lam == pytest.approx(lam)
    assert opt.lam == pytest.approx(lam / 10 if accepted else 10 * lam)
    assert step.note.count("rejected") == lams.index(lam) + (not accepted)
    assert error(theta(model), expected) < 1e-9


def test_attempts_linearise_once():
    model, opt, x, y = overshooting(attempts=5)
    opt.step(x, y)  # the proof of the rules takes passes of its own
    graphs = []
    model.register_forward_hook(lambda module, inputs, z: graphs.append(z.requires_grad))
    step = opt.step(x, y)
    trials = step.note.count("rejected") + step.accepted
    assert trials > 1
    assert graphs == [True] + [False] * trials


@pytest.mark.parametrize("damping", [mq.Identity(), mq.MaxDiagonal()], ids=["identity", "max-diagonal"])
@EVERY_CURVATURE
def test_attempts_solve_at_the_same_point(damping, curvature):
    """The second λ is tried at θ too, not at the trial point of the first."""
    model, x, y = problem()
    q = reference.quadratic(model, "mse", x, y)
    D = q.diagonal().clamp(min=0.01) if isinstance(damping, mq.MaxDiagonal) else torch.ones_like(q.g)
    at = theta(model)
    step = lm(model, lr=6.0, schedule=mq.TenFold(0.01), curvature=curvature, damping=damping, attempts=9).step(x, y)
    assert step.lam > 0.05  # several were tried
    assert error(theta(model), at + 6 * q.step(step.lam * D)) < 1e-9


def test_attempts_in_float32():
    """Enough parameters for G in float32, and a λ that asks for float64: the same λ are tried."""
    model, x, y = problem(sizes=(3, 50, 3))
    single = copy.deepcopy(model).float()
    parts = {"lr": 5.0, "schedule": mq.TenFold(1e-4), "attempts": 9}
    step, expected = lm(single, **parts).step(x.float(), y.float()), lm(model, **parts).step(x, y)
    assert (step.lam, step.accepted) == (expected.lam, expected.accepted)
    assert step.note.count("rejected") >= 1
    assert error(theta(single), theta(model)) < 1e-3


@pytest.mark.parametrize("preset", ["paper", "vanilla", "gauss_newton"])
@pytest.mark.parametrize("loss", ["mse", "cross_entropy", nn.MSELoss(reduction="sum")], ids=["mse", "ce", "sum"])
def test_presets_report_the_users_loss(preset, loss):
    """Whatever units they work in."""
    model, x, y = problem(loss if loss == "cross_entropy" else "mse", N=12)
    weight, opt = sample_weights(12), getattr(mq.presets, preset)(model, loss)
    for _ in range(3):
        before = objective(model, loss, x, y, weight)
        step = opt.step(x, y, weight)
        assert step.loss == pytest.approx(before, rel=1e-9)
        assert step.new_loss == pytest.approx(objective(model, loss, x, y, weight), rel=1e-9)


def test_knows_the_same_data_again():
    """The loss before a step is the loss after the last one, accepted or not, where the data are the same. Once may be
    chance."""
    told = []

    class Recording(mq.Constant):
        def update(self, lam: float, outcome: Any) -> float:
            told.append((outcome.rule, outcome.same_data))
            return super().update(lam, outcome)

    model, x, y = problem()
    opt = lm(model, schedule=Recording(1.0))
    for lr, shift in ((1e3, 0), (1.0, 0), (1.0, 0), (1e3, 1), (1.0, 1), (1.0, 1)):
        opt.param_groups[0]["lr"] = lr
        opt.step(x, y + shift)
    rules = ["rejected", "decrease", "decrease", "rejected", "decrease", "decrease"]
    assert told == list(zip(rules, [False, False, True, False, False, True], strict=True))
    assert opt.state_dict()["marquardt"]["steps"] == 6


def test_sampled_rows_are_drawn_anew():
    """From step to step, rejected ones too: a bad draw is not repeated."""
    drawn = []

    class Recording(mq.Sampled):
        def draw(self, *args: Any) -> Any:
            rows = super().draw(*args)
            drawn.append(rows.S)
            return rows

    model, x, y = problem()
    opt = lm(model, rows=Recording(1), lr=1e3)
    assert [opt.step(x, y).rule for _ in range(3)] == ["rejected"] * 3
    assert len(drawn) == 3
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))


# ---- failed steps


class Explosive(nn.Module):
    """e^θ, or e^2θ/(1 + e^θ): a long step overflows to ∞, or to ∞/∞."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.theta = kind, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        e = (self.theta * x).exp()
        return e if self.kind == "inf" else e * e / (1 + e)


RAISING = pytest.mark.parametrize("schedule", [mq.TenFold, mq.GainRatio, mq.PaperSchedule])


@pytest.mark.parametrize("kind", ["inf", "nan"])
@RAISING
@pytest.mark.parametrize("acceptance", [mq.Decrease(), mq.Uphill()], ids=str)
def test_non_finite_trial_is_a_failed_step(kind, schedule, acceptance):
    model, x, y = Explosive(kind), torch.ones(3, 1), torch.full((3, 1), 1e5)
    opt = lm(model, schedule=schedule(1e-6), acceptance=acceptance)
    before = theta(model)
    step = opt.step(x, y)
    assert (step.accepted, step.rule, step.new_loss) == (False, "rejected", step.loss)
    assert math.isfinite(step.loss)
    assert torch.equal(theta(model), before)
    assert kind in step.note
    assert opt.lam > step.lam


@pytest.mark.parametrize("kind", ["inf", "nan"])
@pytest.mark.parametrize("line_search", [mq.Grid(), mq.Backtracking(trials=20)], ids=str)
def test_search_rescues_a_non_finite_trial(kind, line_search):
    model, x, y = Explosive(kind), torch.ones(3, 1), torch.full((3, 1), 1e4)
    step = lm(model, schedule=mq.TenFold(1e-6), line_search=line_search).step(x, y)
    assert (step.accepted, step.rule) == (True, "search")
    assert step.new_loss < step.loss
    assert kind in step.note
    assert theta(model).isfinite().all()


def test_non_finite_trials_end_in_a_small_step():
    """Attempts with larger λ reach a finite loss."""
    model, x, y = Explosive("inf"), torch.ones(3, 1), torch.full((3, 1), 1e4)
    step = lm(model, schedule=mq.TenFold(1e-6), attempts=30).step(x, y)
    assert step.accepted
    assert step.new_loss < step.loss
    assert step.note.count("inf") >= 2


def fail_to_factor(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    from marquardt.curvature import dense, gram

    left, solve = [times], dense.spd_solve

    def spd_solve(H: Tensor, A: Tensor, b: Tensor, notes: list[str]) -> Tensor:
        if left[0]:
            left[0] -= 1
            raise FactorizationError("not today")
        return solve(H, A, b, notes)

    monkeypatch.setattr(dense, "spd_solve", spd_solve)
    monkeypatch.setattr(gram, "spd_solve", spd_solve)


@RAISING
@EVERY_CURVATURE
def test_failed_factorisation_is_a_failed_step(monkeypatch, schedule, curvature):
    model, x, y = problem()
    opt = lm(model, schedule=schedule(1.0), curvature=curvature)
    before = theta(model)
    fail_to_factor(monkeypatch, 1)
    step = opt.step(x, y)
    assert (step.accepted, step.rule, step.new_loss) == (False, "rejected", step.loss)
    assert torch.equal(theta(model), before)
    assert "not today" in step.note
    assert opt.lam > step.lam
    assert opt.step(x, y).accepted


def test_failed_factorisation_is_attempted_again(monkeypatch):
    model, x, y = problem()
    twin = copy.deepcopy(model)
    fail_to_factor(monkeypatch, 2)
    step = lm(model, schedule=mq.TenFold(1e-3), attempts=3).step(x, y)
    lm(twin, schedule=mq.TenFold(0.1)).step(x, y)
    assert step.accepted
    assert step.lam == pytest.approx(0.1)
    assert step.note.count("not today") == 2
    assert error(theta(model), theta(twin)) < 1e-9


# ---- resuming in a new process


class Counting(nn.Module):
    """Passes on its input, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x


def noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 5), nn.RReLU(), Counting(), nn.Linear(5, 4), nn.Dropout(0.3), nn.Linear(4, 3))


MAX_MOMENTUM = {"damping": mq.MaxDiagonal(), "momentum": mq.AdaptiveMomentum()}
SCENARIOS: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Any] | None, bool]] = {
    # model, loss, parts (None: the defaults), whether the batches change
    "plain": (lambda: mlp(2, 4, 3), "mse", {}, False),
    "rejected": (lambda: mlp(2, 4, 3), "mse", {}, False),
    "max-diagonal and momentum": (lambda: mlp(2, 4, 3), "cross_entropy", MAX_MOMENTUM, False),
    "max-diagonal and momentum, rejected": (lambda: mlp(2, 4, 3), "mse", MAX_MOMENTUM, True),
    "average, random layers": (noisy, "cross_entropy", {"average": mq.EMA(0.9), "schedule": mq.GainRatio()}, True),
    "average, random layers, rejected": (noisy, "mse", {"average": mq.Polyak(), "line_search": None}, True),
    "grid, uphill": (lambda: mlp(2, 4, 3), "mse", {"line_search": mq.Grid(), "acceptance": mq.Uphill()}, True),
    "sampled rows": (noisy, "cross_entropy", {"rows": mq.Sampled(1), "curvature": mq.Gram()}, True),
    "defaults": (noisy, "cross_entropy", None, True),
    "defaults, one batch": (lambda: mlp(2, 4, 3), "mse", None, False),
}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
RUNS = [(name, dtype) for name in SCENARIOS for dtype in DTYPES]


def begin(name: str, dtype: str) -> tuple[nn.Module, mq.LM]:
    build, loss, parts, _ = SCENARIOS[name]
    model = build().to(DTYPES[dtype])
    return model, mq.LM(model, loss) if parts is None else lm(model, loss, **parts)


def advance(name: str, dtype: str, opt: mq.LM, first: int, last: int) -> list[mq.Step]:
    _, loss, _, changing = SCENARIOS[name]
    steps = []
    for t in range(first, last):
        with torch.random.fork_rng(devices=[]), default_dtype(DTYPES[dtype]):
            torch.manual_seed(t if changing else 0)
            x, y = torch.randn(9, 2), targets(loss, 9, 3)
        steps.append(opt.step(x, y))
    return steps


def resume(folder: str, threads: str) -> None:
    """The new process: another model, another optimizer, and what was saved."""
    torch.set_num_threads(int(threads))
    torch.manual_seed(1)
    for i, (name, dtype) in enumerate(RUNS):
        saved = torch.load(Path(folder, f"{i}.before"), weights_only=True)
        with default_dtype(torch.float64):
            model, opt = begin(name, dtype)
            model.load_state_dict(saved["model"])
            opt.load_state_dict(saved["optimizer"])
            torch.set_rng_state(saved["generator"])
            advance(name, dtype, opt, 6, 11)
        torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, Path(folder, f"{i}.after"))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> dict[tuple[str, str], tuple[Any, Any]]:
    """What each run became here and in the new process, one process for all."""
    folder, here = tmp_path_factory.mktemp("resume"), {}
    with default_dtype(torch.float64):
        for i, (name, dtype) in enumerate(RUNS):
            torch.manual_seed(0)
            model, opt = begin(name, dtype)
            advance(name, dtype, opt, 0, 5)
            if "rejected" in name:
                opt.param_groups[0]["lr"] = 1e3
            (step,) = advance(name, dtype, opt, 5, 6)
            assert not ("rejected" in name and step.accepted)
            opt.param_groups[0]["lr"] = 1.0
            saved = {"model": model.state_dict(), "optimizer": opt.state_dict(), "generator": torch.get_rng_state()}
            torch.save(saved, folder / f"{i}.before")
            advance(name, dtype, opt, 6, 11)
            here[name, dtype] = copy.deepcopy({"model": model.state_dict(), "optimizer": opt.state_dict()})
    command = "import sys, test_optimizer; test_optimizer.resume(*sys.argv[1:])"
    subprocess.run(
        [sys.executable, "-c", command, str(folder), str(torch.get_num_threads())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        check=True,
    )
    there = [torch.load(folder / f"{i}.after", weights_only=True) for i in range(len(RUNS))]
    return {run: (here[run], there[i]) for i, run in enumerate(RUNS)}


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_resumes_bit_for_bit_in_a_new_process(resumed, name, dtype):
    here, there = resumed[name, dtype]
    assert {k: v for k, v in here["model"].items() if not same(v, there["model"][k])} == {}
    assert same(dict(here["optimizer"]["marquardt"]), dict(there["optimizer"]["marquardt"]))
    assert same(here["optimizer"], there["optimizer"])


def trained(sizes: tuple[int, ...] = (2, 4, 3), **parts: Any) -> tuple[nn.Module, mq.LM, Tensor, Tensor]:
    """A few steps done: every entry of the state is filled."""
    model, x, y = problem(sizes=sizes)
    opt = lm(model, **{**MAX_MOMENTUM, "average": mq.EMA(), **parts})
    for i in range(3):
        opt.step(x, y + 0.01 * i)
    return model, opt, x, y


def adam() -> dict[str, Any]:
    model = mlp(2, 4, 3)
    return torch.optim.Adam(model.parameters()).state_dict()


def with_broken(key: str) -> dict[str, Any]:
    state = trained()[1].state_dict()
    state["marquardt"] = {k: v for k, v in state["marquardt"].items() if k != key}
    state["marquardt"]["something"] = 1.0
    return state


@pytest.mark.parametrize(
    ("foreign", "says"),
    [
        (adam, ["marquardt"]),
        (lambda: {}, ["marquardt"]),
        (lambda: trained((2, 7, 3))[1].state_dict(), [str(2 * 7 + 7 + 3 * 7 + 3), str(2 * 4 + 4 + 3 * 4 + 3)]),
        (lambda: trained((2, 4, 4, 3))[1].state_dict(), ["parameter"]),
        (lambda: with_broken("lam"), ["something"]),
    ],
    ids=["adam", "empty", "wider", "deeper", "other entries"],
)
def test_foreign_state_is_refused(foreign, says):
    model, opt, x, y = trained()
    state = foreign()
    before = world(model, opt)
    with pytest.raises((ValueError, KeyError, TypeError)) as refusal:
        opt.load_state_dict(state)
    for fragment in says:
        assert fragment in str(refusal.value)
    assert changes(before, world(model, opt)) == []
    assert math.isfinite(opt.step(x, y).loss)


def test_state_dict_is_a_copy():
    _, opt, x, y = trained()
    saved = opt.state_dict()
    kept = copy.deepcopy(saved)
    opt.step(x, y)
    assert same(saved, kept)
    opt.load_state_dict(saved)
    opt.step(x, y)
    assert same(saved, kept)


def test_loading_brings_back_the_past():
    model, opt, x, y = trained()
    state, weights = opt.state_dict(), copy.deepcopy(model.state_dict())
    first = [opt.step(x, y) for _ in range(3)]
    model.load_state_dict(weights)
    opt.load_state_dict(state)
    assert [opt.step(x, y) for _ in range(3)] == first


def test_state_of_another_precision():
    """A float32 checkpoint continued in float64."""
    model, opt, x, y = trained()
    single = copy.deepcopy(model).float()
    other = lm(single, **MAX_MOMENTUM, average=mq.EMA())
    for i in range(3):
        other.step(x.float(), (y + i).float())
    model.load_state_dict(single.state_dict())
    opt.load_state_dict(other.state_dict())
    assert math.isfinite(opt.step(x, y).new_loss)
    with opt.averaged():
        assert all(p.dtype == torch.float64 for p in model.parameters())


def test_model_moved_to_another_precision():
    model, opt, x, y = trained()
    model.float()
    assert math.isfinite(opt.step(x.float(), y.float()).new_loss)


# ---- what torch.optim.Optimizer promises


def test_is_an_optimizer():
    model, _, _ = problem()
    opt = lm(model)
    assert isinstance(opt, torch.optim.Optimizer)
    assert len(opt.param_groups) == 1
    assert [id(p) for p in opt.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert "LM" in repr(opt)


def pickled(these: Any) -> Any:
    return pickle.loads(pickle.dumps(these))


COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, pickled])


@COPIES
@pytest.mark.parametrize("started", [False, True], ids=["fresh", "started"])
def test_copies_go_their_own_way(copied, started):
    model, opt, x, y = trained()
    if not started:
        opt = lm(model)
    other_model, other = copied((model, opt))
    assert other.model is other_model
    assert other.params[0] is next(other_model.parameters())
    before = world(model, opt)
    steps = [other.step(x, y) for _ in range(3)]
    assert changes(before, world(model, opt)) == []
    assert [opt.step(x, y) for _ in range(3)] == steps
    assert same(model.state_dict(), other_model.state_dict())


@COPIES
def test_copies_with_a_scheduler(copied):
    model, x, y = problem()
    opt = lm(model)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.5)
    opt.step(x, y)
    scheduler.step()
    runs = []
    for one, o, s in (copied((model, opt, scheduler)), (model, opt, scheduler)):
        steps = []
        for _ in range(4):
            steps.append(o.step(x, y))
            s.step()
        runs.append((steps, theta(one)))
    assert same(runs[0][1], runs[1][1])
    assert runs[0][0] == runs[1][0]
    assert [s.lr for s in runs[0][0]] == [1.0, 0.5, 0.5, 0.25]


def test_pickling_leaves_hooks_behind():
    """As torch's optimizers do: a hook is often a lambda, which cannot be pickled."""
    model, x, y = problem()
    opt = lm(model)
    opt.register_step_post_hook(lambda *_: None)
    other_model, other = pickled((model, opt))
    assert other.step(x, y) == opt.step(x, y)
    assert same(theta(other_model), theta(model))


def test_learning_rate_schedule_scales_the_step():
    model, x, y = problem()
    twin = copy.deepcopy(model)
    opt, fixed = lm(model), lm(twin, lr=0.25)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 0.25 if t == 0 else 0.0)
    assert opt.step(x, y) == fixed.step(x, y)
    assert same(theta(model), theta(twin))
    scheduler.step()
    before = theta(model)
    step = opt.step(x, y)  # lr = 0: the step stays where it is, and that is no decrease
    assert (step.lr, step.accepted) == (0.0, False)
    assert torch.equal(theta(model), before)


def test_hooks_around_a_step():
    model, x, y = problem()
    opt, seen = lm(model), []
    before = opt.register_step_pre_hook(lambda o, args, kwargs: seen.append(("pre", o, args[1:], kwargs, theta(model))))
    opt.register_step_post_hook(lambda o, args, kwargs: seen.append(("post", o, args[1:], kwargs, theta(model))))
    start = theta(model)
    opt.step(x, y, weight=None)
    assert [s[0] for s in seen] == ["pre", "post"]
    for name, o, args, kwargs, at in seen:
        assert o is opt
        assert same(args, (x, y))
        assert kwargs == {"weight": None}
        assert torch.equal(at, start if name == "pre" else theta(model))
    before.remove()
    opt.step(x, y)
    assert [s[0] for s in seen] == ["pre", "post", "post"]


def test_hooks_around_a_step_over():
    model, x, y = problem()
    opt, calls = lm(model), []
    opt.register_step_pre_hook(lambda *_: calls.append("pre"))
    opt.register_step_post_hook(lambda *_: calls.append("post"))
    opt.step_over([(x, y)])
    assert calls == ["pre", "post"]


def test_scheduler_counts_a_step_over():
    model, x, y = problem()
    opt = lm(model)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where a scheduler steps before its optimizer
        opt.step_over([(x, y)])
        scheduler.step()
    assert opt.step_over([(x, y)]).lr == pytest.approx(0.1)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_is_harmless(set_to_none):
    model, x, y = problem()
    twin = copy.deepcopy(model)
    opt, other = lm(model), lm(twin)
    for _ in range(2):
        opt.zero_grad(set_to_none=set_to_none)
        assert opt.step(x, y) == other.step(x, y)
    opt.zero_grad(set_to_none=set_to_none)
    assert same(theta(model), theta(twin))


def test_gradients_are_left_alone():
    model, x, y = problem()
    first, *others = model.parameters()
    first.grad = torch.randn_like(first)
    kept, value = first.grad, first.grad.clone()
    x.requires_grad_(True)
    lm(model, line_search=mq.Grid(), lr=30.0).step(x, y)
    assert first.grad is kept
    assert torch.equal(kept, value)
    assert [p.grad for p in others] == [None] * len(others)
    assert x.grad is None


def test_step_under_no_grad():
    model, x, y = problem()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        step = lm(model).step(x, y)
        assert not torch.is_grad_enabled()
    assert step == lm(twin).step(x, y)
    assert torch.is_grad_enabled()


# ---- some of the parameters


@pytest.mark.parametrize("recipe", RECIPES)
@DENSE_AND_GRAM
def test_chosen_parameters(recipe, curvature):
    model, x, y = problem()
    parts, options = RECIPES[recipe]
    chosen = [model[2].weight, model[0].bias]
    twin, start = copy.deepcopy(model), copy.deepcopy(model)
    hand = ByHand(twin, "mse", params=[twin[0].bias, twin[2].weight], **options)  # in the model's order
    opt = lm(model, params=iter(chosen), curvature=curvature, **parts)
    for _ in range(4):
        opt.step(x, y)
        hand.step(x, y)
    moved = [k for k, p in model.named_parameters() if not torch.equal(p, start.get_parameter(k))]
    assert moved == ["0.bias", "2.weight"]
    assert error(theta(model), theta(twin)) < 1e-8
    assert all(p.requires_grad for p in model.parameters())


def test_frozen_parameters():
    model, x, y = problem()
    model[0].requires_grad_(False)
    kept, twin = copy.deepcopy(model[0].state_dict()), copy.deepcopy(model)
    hand, opt = ByHand(twin, "mse", params=list(twin[2].parameters())), lm(model)
    for _ in range(4):
        assert opt.step(x, y).accepted
        hand.step(x, y)
    assert same(model[0].state_dict(), kept)
    assert error(theta(model), theta(twin)) < 1e-8
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]


# ---- several batches in a step


def parts_of(x: Any, y: Any, weight: Tensor | None = None, sizes: tuple[int, ...] = (1, 5, 2)) -> list[Any]:
    pieces = [t.split(sizes) for t in (x, y, weight) if t is not None]
    return list(zip(*pieces, strict=True))


STEP_OVER: dict[str, tuple[str, Any]] = {
    "mse": ("mse", nn.MSELoss()),
    "mse, sum": ("mse", nn.MSELoss(reduction="sum")),
    "cross-entropy, class weights": ("cross_entropy", nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1, 3]).double())),
    "cross-entropy, ignored": ("cross_entropy", nn.CrossEntropyLoss(ignore_index=1)),
    "poisson": ("poisson", nn.PoissonNLLLoss()),
}


@pytest.mark.parametrize("kind", STEP_OVER)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize(
    "curvature", [DENSE, mq.Dense(2, inertia=0.0), mq.Auto(inertia=0.0)], ids=["dense", "dense-chunked", "auto"]
)
def test_step_over_equals_one_batch(kind, weighted, curvature):
    name, loss = STEP_OVER[kind]
    model, x, y = problem(name)
    if kind.endswith("ignored"):
        y[:] = torch.tensor([0, 1, 2, 0, 1, 2, 1, 0])  # 2, 4 and 1 of a batch count
    weight = sample_weights(8) if weighted else None
    twin = copy.deepcopy(model)
    parts = {**MAX_MOMENTUM, "line_search": mq.Grid(1e-6, 2, 0.25)}
    opt, other = lm(model, loss, curvature=curvature, **parts), lm(twin, loss, **parts)
    for _ in range(4):
        step, expected = opt.step_over(parts_of(x, y, weight)), other.step(x, y, weight)
        assert step.loss == pytest.approx(expected.loss, rel=1e-9)
        assert step.new_loss == pytest.approx(expected.new_loss, rel=1e-9)
        assert step.gain == pytest.approx(expected.gain, rel=1e-5)
        assert (step.rule, step.lam, step.lr) == (expected.rule, expected.lam, expected.lr)
        assert error(theta(model), theta(twin)) < 1e-9


def test_step_over_takes_weights_batch_by_batch():
    """Some batches with, some without: None means 1."""
    model, x, y = problem()
    weight, twin = torch.cat([sample_weights(3), torch.ones(5)]), copy.deepcopy(model)
    step = lm(model).step_over([(x[:3], y[:3], weight[:3]), [x[3:], y[3:]]])
    expected = lm(twin).step(x, y, weight)
    assert step.loss == pytest.approx(expected.loss, rel=1e-12)
    assert error(theta(model), theta(twin)) < 1e-10


@pytest.mark.parametrize("own", [False, True], ids=["global generator", "own generator"])
def test_step_over_a_shuffling_loader(own):
    model, x, y = problem(N=10)
    generator = torch.Generator().manual_seed(3) if own else None
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True, generator=generator)
    twin = copy.deepcopy(model)
    opt, other = lm(model, attempts=3), lm(twin, attempts=3)
    for _ in range(3):
        assert opt.step_over(loader).loss == pytest.approx(other.step(x, y).loss, rel=1e-9)
        assert error(theta(model), theta(twin)) < 1e-9


def test_step_over_draws_from_the_generator_once():
    """One shuffle, and one forward pass over the shuffled batches."""
    model, x, y = noisy(), torch.randn(10, 2), torch.randn(10, 3)
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    opt = lm(model, line_search=mq.Grid(), lr=30.0)
    for rule in ("search", "rejected"):
        torch.manual_seed(5)
        for xs, _ in loader:
            model(xs)
        once = torch.get_rng_state()
        torch.manual_seed(5)
        assert opt.step_over(loader).rule == rule
        assert torch.equal(torch.get_rng_state(), once)
        opt.line_search = None


def test_step_over_repeats_random_layers_batch_by_batch():
    model, x, y = noisy(), torch.randn(8, 2), torch.randn(8, 3)
    opt = lm(model, lr=1e-9)  # next to θ the loss may change by 1e-9 alone, if the same masks are drawn
    step = opt.step_over(DataLoader(TensorDataset(x, y), batch_size=3, shuffle=True))
    assert step.accepted
    assert step.new_loss == pytest.approx(step.loss, rel=1e-6)


def test_step_over_judges_the_total_loss():
    """The first batch gets worse, the sum better: one verdict on all of it."""
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    x, y = torch.randn(8, 1), torch.tensor([0.0, 0, 1, 1, 1, 1, 1, 1])[:, None]
    batches = [(x[:2], y[:2]), (x[2:], y[2:])]
    f, first = objective(model, "mse", x, y), objective(model, "mse", *batches[0])
    step = lm(model).step_over(batches)
    assert step.loss == pytest.approx(f)
    assert (step.rule, step.accepted) == ("decrease", True)
    assert step.new_loss == pytest.approx(objective(model, "mse", x, y))
    assert objective(model, "mse", *batches[0]) > first


def test_step_over_rejects_as_a_whole():
    model, opt, x, y = overshooting()
    before = theta(model)
    step = opt.step_over(parts_of(x, y, sizes=(2, 4)))
    assert (step.rule, step.new_loss) == ("rejected", step.loss)
    assert torch.equal(theta(model), before)


USED_UP = {"generator": lambda b: (one for one in b), "iterator": iter, "zip": lambda b: zip(b, strict=True)}


@pytest.mark.parametrize("batches", USED_UP.values(), ids=USED_UP)
def test_step_over_refuses_what_is_used_up(batches):
    model, x, y = problem()
    opt = lm(model)
    before = world(model, opt)
    with pytest.raises(TypeError, match="list or a DataLoader"):
        opt.step_over(batches(parts_of(x, y)))
    assert changes(before, world(model, opt)) == []


def test_step_over_refuses_gram():
    model, x, y = problem()
    opt = lm(model, curvature=mq.Gram())
    before = world(model, opt)
    with pytest.raises(ValueError, match=r"Dense"):
        opt.step_over(parts_of(x, y))
    assert changes(before, world(model, opt)) == []
    assert opt.step(x, y).accepted


# ---- units: the batch's size, its chunks and its weights


@EVERY_CURVATURE
@pytest.mark.parametrize("recipe", ["plain", "both"])
def test_chunks_change_nothing(curvature, recipe):
    model, x, y = problem("cross_entropy")
    twin, weight = copy.deepcopy(model), sample_weights(8)
    parts = {**RECIPES[recipe][0], "line_search": mq.Grid(1e-6, 2, 0.25)}
    opt, other = lm(model, "cross_entropy", curvature=curvature, **parts), lm(twin, "cross_entropy", **parts)
    for lr in (1.0, 1.0, 40.0, 1.0):
        opt.param_groups[0]["lr"] = other.param_groups[0]["lr"] = lr
        step, expected = opt.step(x, y, weight), other.step(x, y, weight)
        assert (step.rule, step.lr) == (expected.rule, expected.lr)
        assert step.new_loss == pytest.approx(expected.new_loss, rel=1e-9)
    assert error(theta(model), theta(twin)) < 1e-8


@pytest.mark.parametrize("curvature", [CURVATURES["dense-chunked"], CURVATURES["gram-chunked"]], ids=["dense", "gram"])
@pytest.mark.parametrize("how", ["ignored", "weight"])
def test_chunks_in_which_nothing_counts(curvature, how):
    """The batch has some weight; that one of its chunks has none is no reason to refuse it."""
    model, x, y = problem("cross_entropy")
    twin, weight = copy.deepcopy(model), None
    if how == "ignored":
        y[:3] = -100
    else:
        weight = torch.tensor([0.0, 0, 0, 1, 1, 1, 1, 1])
    step = lm(model, "cross_entropy", curvature=curvature).step(x, y, weight)
    expected = lm(twin, "cross_entropy").step(x, y, weight)
    assert step.loss == pytest.approx(expected.loss, rel=1e-12)
    assert error(theta(model), theta(twin)) < 1e-9


@EVERY_LOSS
@pytest.mark.parametrize("recipe", RECIPES)
def test_duplicated_samples_change_nothing(loss, recipe):
    """λ does not depend on the size of the batch."""
    model, x, y = problem(loss)
    twin, parts = copy.deepcopy(model), RECIPES[recipe][0]
    opt, other = lm(model, loss, **parts), lm(twin, loss, **parts)
    for _ in range(4):
        step, expected = opt.step(x, y), other.step(x.repeat(3, 1), y.repeat(3, *[1] * (y.ndim - 1)))
        assert (step.rule, step.lam) == (expected.rule, expected.lam)
        assert step.loss == pytest.approx(expected.loss, rel=1e-9)
        assert error(theta(model), theta(twin)) < 1e-8


@EVERY_LOSS
@EVERY_CURVATURE
def test_integer_weights_are_repeated_samples(loss, curvature):
    model, x, y = problem(loss)
    counts, twin = torch.tensor([1, 2, 0, 1, 3, 1, 0, 2]), copy.deepcopy(model)
    opt, other = lm(model, loss, curvature=curvature, **MAX_MOMENTUM), lm(twin, loss, **MAX_MOMENTUM)
    for _ in range(3):
        step = opt.step(x, y, counts.double())
        expected = other.step(x.repeat_interleave(counts, 0), y.repeat_interleave(counts, 0))
        assert step.rule == expected.rule
        assert step.loss == pytest.approx(expected.loss, rel=1e-9)
        assert error(theta(model), theta(twin)) < 1e-8


@EVERY_LOSS
def test_scale_of_the_weights_is_irrelevant(loss):
    model, x, y = problem(loss)
    twin, weight = copy.deepcopy(model), sample_weights(8)
    opt, other = lm(model, loss, **MAX_MOMENTUM), lm(twin, loss, **MAX_MOMENTUM)
    for scale in (1e-3, 1.0, 1e4):
        step, expected = opt.step(x, y, scale * weight), other.step(x, y, weight)
        assert step.loss == pytest.approx(expected.loss, rel=1e-9)
        assert error(theta(model), theta(twin)) < 1e-8


# The default recipe has no units.

FACTORS = pytest.mark.parametrize("factor", [1e-3, 1e3])


def default_run(loss: mq.losses.Loss, mini: bool) -> tuple[Tensor, list[mq.Step]]:
    torch.manual_seed(0)
    labels = isinstance(loss, mq.losses.CrossEntropy)
    model, x, y = problem("cross_entropy" if labels else "mse", N=60, sizes=(2, 5, 3))
    opt, path, steps = mq.LM(model, loss), [], []
    for t in range(10):
        some = slice(t * 6, t * 6 + 6) if mini else slice(None)
        steps.append(opt.step(x[some], y[some]))
        path.append(theta(model))
    return torch.stack(path), steps


@FACTORS
@pytest.mark.parametrize("loss", [mq.losses.SquaredError(), mq.losses.CrossEntropy()], ids=["mse", "cross_entropy"])
@pytest.mark.parametrize("mini", [False, True], ids=["full batch", "mini-batches"])
def test_default_recipe_ignores_the_scale_of_the_loss(factor, loss, mini):
    path, steps = default_run(loss, mini)
    scaled_path, scaled_steps = default_run(replace(loss, factor=factor), mini)
    assert [s.rule for s in scaled_steps] == [s.rule for s in steps]
    assert [s.lam for s in scaled_steps] == pytest.approx([s.lam for s in steps], rel=1e-6)
    assert [s.loss for s in scaled_steps] == pytest.approx([factor * s.loss for s in steps], rel=1e-6)
    assert error(scaled_path, path) < 1e-6


# ---- buffers and random numbers


class Rebinding(Counting):
    """The buffer is another tensor after every pass."""

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x


class Silent(Counting):
    """The buffer changes behind autograd's back, as codebooks are often updated."""

    def forward(self, x: Tensor) -> Tensor:
        self.count.data += 1
        return x


class Scaling(nn.Module):
    """A parameter of its own, which no rule of a layer covers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.exp()


class Running(Counting):
    """A running mean of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return super().forward(x)


@pytest.mark.parametrize("layer", [Counting, Rebinding, Silent, Running])
@pytest.mark.parametrize("scaled", [False, True], ids=["by rule", "own parameter"])
@DENSE_AND_GRAM
@pytest.mark.parametrize("line_search", [None, mq.Grid()], ids=["no search", "grid"])
def test_buffers_advance_once_with_every_accepted_step(layer, scaled, curvature, line_search):
    model = nn.Sequential(nn.Linear(2, 4), layer(), Scaling() if scaled else nn.Tanh(), nn.Linear(4, 3))
    x, y = torch.randn(6, 2), torch.randn(6, 3)
    opt = lm(model, curvature=curvature, line_search=line_search, schedule=mq.Constant(1.0), attempts=2)
    once = copy.deepcopy(model)
    accepted = 0
    for lr in (1.0, 1e3, 1.0, 1e3, 0.5):
        opt.param_groups[0]["lr"] = lr
        once.load_state_dict(model.state_dict())
        step = opt.step(x, y)
        assert step.accepted == (lr <= 1 or line_search is not None)
        accepted += step.accepted
        assert model[1].count.item() == accepted
        if step.accepted:
            once(x)
        assert {k: b for k, b in model.named_buffers() if not same(b, once.get_buffer(k))} == {}


@pytest.mark.parametrize("layer", [nn.Dropout(0.4), nn.RReLU()], ids=["dropout", "rrelu"])
@pytest.mark.parametrize("rule", ["decrease", "search", "rejected"])
@DENSE_AND_GRAM
def test_generator_advances_as_one_forward(layer, rule, curvature):
    model = nn.Sequential(nn.Linear(2, 4), layer, nn.Linear(4, 3))
    x, y = torch.randn(6, 2), torch.randn(6, 3)
    search = mq.Grid() if rule == "search" else None
    opt = lm(model, curvature=curvature, lr=1.0 if rule == "decrease" else 1e3, line_search=search, attempts=2)
    for _ in range(2):  # with and without the proof of the rules
        torch.manual_seed(7)
        model(x)
        after = torch.get_rng_state()
        torch.manual_seed(7)
        assert opt.step(x, y).rule == rule
        assert torch.equal(torch.get_rng_state(), after)


RANDOM: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(2, 6), nn.Dropout(0.4), nn.Linear(6, 3)),
    "input dropout": lambda: nn.Sequential(nn.Dropout(0.4), nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)),
    "two dropouts": lambda: nn.Sequential(
        nn.Linear(2, 6), nn.Dropout(0.2), nn.Linear(6, 5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 3)
    ),
    "feature dropout": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 1, 1)), nn.Conv2d(2, 6, 1), nn.Dropout2d(0.4), nn.Conv2d(6, 3, 1), nn.Flatten(1)
    ),
    "rrelu": lambda: nn.Sequential(nn.Linear(2, 6), nn.RReLU(), nn.Linear(6, 3)),
    "rrelu in place": lambda: nn.Sequential(nn.Linear(2, 6), nn.RReLU(0.1, 0.9, inplace=True), nn.Linear(6, 3)),
    "both": noisy,
}
LSTM: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(2, 4, 3),
    "lstm": lambda: nn.Sequential(nn.Unflatten(1, (2, 1)), Recurrent(nn.LSTM(1, 4, batch_first=True), 3)),
    "lstm with dropout": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 1)), Recurrent(nn.LSTM(1, 4, 2, batch_first=True, dropout=0.4), 3)
    ),
}


def linearised(build: Callable[[], nn.Module], chunk: int | None) -> tuple[mq.Linearization, Tensor, Tensor]:
    model, x, y = build(), torch.randn(7, 2), torch.randn(7, 3)
    lin = mq.linearize(model, "mse", x, y, sample_weights(7), chunk=chunk)
    C = mq.Dense(chunk).represent(lin)
    return lin, theta(model), -C.newton(torch.tensor(1e-2))


@pytest.mark.parametrize("name", [*RANDOM, *LSTM])
@pytest.mark.parametrize("chunk", [None, 3])
def test_trial_losses_see_the_same_random_numbers(name, chunk):
    lin, at, d = linearised({**RANDOM, **LSTM}[name], chunk)
    for _ in range(2):
        assert lin.evaluate(d, 0.0).item() == pytest.approx(lin.loss, rel=1e-12)
        assert torch.equal(theta(lin.model), at)
    f = lin.evaluate(d, 1.0)
    assert f.dtype == torch.float64
    assert torch.equal(theta(lin.model), at + d)
    lin.evaluate(d, -1.0)
    assert torch.equal(lin.evaluate(d, 1.0), f)
    assert torch.equal(lin.evaluate(d.clone(), 1.0), f)
    assert lin.evaluate(2 * d, 0.5).item() == pytest.approx(f.item(), rel=1e-12)


@pytest.mark.parametrize("name", [*RANDOM, *LSTM])
@pytest.mark.parametrize("chunk", [None, 3])
def test_all_trials_at_once(name, chunk):
    """The losses of a grid in one batched pass are those of one pass after the other."""
    lin, _, d = linearised({**RANDOM, **LSTM}[name], chunk)
    rates = [0.0, 1e-6, 0.25, 1.0, 4.0]
    together = lin.evaluate_along(d, rates)
    assert all(isinstance(f, float) for f in together)
    assert together == pytest.approx([lin.evaluate(d, lr).item() for lr in rates], rel=1e-10)
    assert together[0] == pytest.approx(lin.loss, rel=1e-12)


def test_batched_trials_keep_the_model():
    lin, at, d = linearised(lambda: mlp(2, 4, 3), None)
    lin.evaluate(d, 1.0)
    first = lin.evaluate_along(d, [0.5, 1.0])  # compared with a plain pass, which moves the model
    assert list(lin.plan.batched_trials.values()) == [True]  # a plain network needs no loop
    lin.move()
    assert torch.equal(theta(lin.model), at)
    assert lin.evaluate_along(d, [0.5, 1.0]) == first
    assert torch.equal(theta(lin.model), at)


class Convolutions(nn.Module):
    """Twice the same weights, several groups, no bias, a bias that does not train, another padding; weights that the
    model itself changes."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.changes = changes
        self.twice = nn.Conv2d(2, 2, 3, padding=1)
        self.groups = nn.Conv2d(2, 4, 3, groups=2)
        self.plain = nn.Conv1d(4, 3, 2, bias=False, padding=1, padding_mode="circular")
        self.frozen = nn.Conv1d(3, 2, 1)
        self.frozen.bias.requires_grad_(False)
        self.volume = nn.Conv3d(1, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.changes:
            with torch.no_grad():
                self.twice.weight.clamp_(-0.1, 0.1)
        x = self.groups(torch.tanh(self.twice(torch.tanh(self.twice(x))))).flatten(2)
        x = self.frozen(torch.tanh(self.plain(x)))
        return self.volume(torch.tanh(x).reshape(len(x), 1, 2, 5, 2)).flatten(1)[:, :3]


def on_a_line(model: nn.Module, x: torch.Tensor, d: dict[str, torch.Tensor], rates: torch.Tensor) -> torch.Tensor:
    """The outputs at all rates, as linearize has them on a GPU."""
    origin = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def at(lr: torch.Tensor) -> torch.Tensor:
        point = {name: p + lr * d[name] for name, p in origin.items()}
        with Line(origin, d, point, lr):
            return torch.func.functional_call(model, point, (x,))

    with torch.no_grad():
        return torch.func.vmap(at)(rates)


@pytest.mark.parametrize("changes", [False, True])
def test_convolutions_of_all_trials_at_once(changes):
    torch.manual_seed(0)
    model, x = Convolutions(changes).double(), torch.randn(4, 2, 5, 5).double()
    d = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    rates = torch.tensor([1e-6, 0.25, 1.0, 4.0]).double()
    together = on_a_line(model, x, d, rates)
    for lr, z in zip(rates, together, strict=True):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for name, p in other.named_parameters():
                p += lr * d[name] if p.requires_grad else 0
            torch.testing.assert_close(z, other(x), rtol=1e-10, atol=1e-12)


# ---- averaged weights


@pytest.mark.parametrize("average", [mq.EMA(0.9), mq.Polyak()], ids=str)
def test_average_by_hand(average):
    model, x, y = problem(N=40)
    opt, mean, count = lm(model, average=average, schedule=mq.Constant(1.0)), None, 0
    for t in range(8):
        step = opt.step(x[5 * t : 5 * t + 5], y[5 * t : 5 * t + 5])
        if not step.accepted:
            continue
        if mean is None:
            mean = theta(model)
        elif isinstance(average, mq.Polyak):
            mean = (count * mean + theta(model)) / (count + 1)
        else:
            keep = min(0.9, (1 + count) / (10 + count))
            mean = keep * mean + (1 - keep) * theta(model)
        count += 1
    current = theta(model)
    assert count >= 5
    with opt.averaged():
        assert error(theta(model), mean) < 1e-12
    assert torch.equal(theta(model), current)


def stochastic() -> tuple[nn.Module, mq.LM, Tensor, Tensor]:
    """A run whose average differs from its weights."""
    model, x, y = problem(N=24)
    opt = lm(model, average=mq.EMA(0.9), schedule=mq.Constant(0.3))
    for t in range(4):
        opt.step(x[6 * t : 6 * t + 6], y[6 * t : 6 * t + 6])
    return model, opt, x, y


def test_averaged_swaps_and_restores():
    model, opt, _, _ = stochastic()
    before, ids = world(model, opt), [id(p) for p in model.parameters()]
    with opt.averaged():
        assert changes(before, world(model, opt)) == ["parameters"]
        assert [id(p) for p in model.parameters()] == ids
    assert changes(before, world(model, opt)) == []


@pytest.mark.parametrize("exception", [ZeroDivisionError, KeyboardInterrupt])
def test_averaged_restores_after_an_exception(exception):
    model, opt, _, _ = stochastic()
    before = world(model, opt)
    with pytest.raises(exception), opt.averaged():
        raise exception
    assert changes(before, world(model, opt)) == []


def test_averaged_within_averaged():
    model, opt, _, _ = stochastic()
    before = theta(model)
    with opt.averaged():
        mean = theta(model)
        with opt.averaged():
            assert torch.equal(theta(model), mean)
        assert torch.equal(theta(model), mean)
    assert torch.equal(theta(model), before)


def test_averaged_before_the_first_step():
    model, _, _ = problem()
    before = theta(model)
    with lm(model, average=mq.EMA()).averaged():
        assert torch.equal(theta(model), before)


def test_averaged_without_average():
    opt = lm(problem()[0])
    with pytest.raises(ValueError, match=r"average=mq\.EMA"), opt.averaged():
        pass


def test_average_after_loading():
    model, opt, x, y = stochastic()
    twin = copy.deepcopy(model)
    other = lm(twin, average=mq.EMA(0.9), schedule=mq.Constant(0.3))
    other.load_state_dict(opt.state_dict())
    for t in (1, 2):
        opt.step(x[t : t + 6], y[t : t + 6])
        other.step(x[t : t + 6], y[t : t + 6])
    with opt.averaged(), other.averaged():
        assert torch.equal(theta(model), theta(twin))


def test_average_is_the_weights_on_one_batch():
    """On the same data every step is better than the last: nothing to average out."""
    model, x, y = problem()
    opt = lm(model, average=mq.EMA(), schedule=mq.Constant(1.0))
    for _ in range(4):
        assert opt.step(x, y).accepted
    current = theta(model)
    with opt.averaged():
        assert torch.equal(theta(model), current)


# ---- an exception anywhere


class Boom(Exception):
    pass


EXCEPTIONS = pytest.mark.parametrize("exception", [Boom, KeyboardInterrupt, RuntimeError], ids=lambda e: e.__name__)


class Fragile(nn.Module):
    """Fails at the k-th pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.passes, self.fail_at, self.exception = inner, 0, 0, Boom

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        z = self.inner(x)
        if self.passes == self.fail_at:
            raise self.exception("in the middle of forward")
        return z


class Slope(nn.Module):
    """∂u/∂x and u of a network u(x). Unlike a careful module, it does not switch gradients on by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), Counting(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        u = self.u(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return torch.cat([slope, u], 1)  # (N, 3)


FRAGILE: dict[str, Callable[[], nn.Module]] = {
    "random": noisy,
    "own parameter": lambda: nn.Sequential(nn.Linear(2, 4), Scaling(), nn.Tanh(), nn.Linear(4, 3)),
    "own parameter and buffer": lambda: nn.Sequential(nn.Linear(2, 4), Scaling(), Counting(), nn.Linear(4, 3)),
    "pinn": Slope,
}


def fragile(name: str, started: bool) -> tuple[Fragile, mq.LM, Tensor, Tensor]:
    """The next step fails at lr = 1000, searches on a grid, and does so with two λ: it passes through every line."""
    torch.manual_seed(0)
    model, x, y = Fragile(FRAGILE[name]()), torch.randn(6, 2), torch.randn(6, 3)
    parts = {**MAX_MOMENTUM, "average": mq.EMA(), "acceptance": mq.Uphill()}
    opt = lm(model, line_search=mq.Backtracking(0.1, trials=6), attempts=2, **parts)
    if started:
        opt.step(x, y)
        opt.step(x + 0.1, y)
    opt.param_groups[0]["lr"] = 1e3
    model.passes = 0
    return model, opt, x, y


@EXCEPTIONS
@pytest.mark.parametrize("name", FRAGILE)
@pytest.mark.parametrize("started", [False, True], ids=["first step", "third step"])
def test_exception_in_forward(exception, name, started):
    """Whichever pass fails, nothing has happened; or the library knew another way, and the step is the same."""
    model, opt, x, y = fragile(name, started)
    expected = opt.step(x, y)
    passes, end = model.passes, theta(model)
    assert passes >= 3
    raised = 0
    for k in range(1, passes + 1):
        model, opt, x, y = fragile(name, started)
        before = world(model, opt)
        model.fail_at, model.exception = k, exception
        try:
            step = opt.step(x, y)
        except exception:
            assert changes(before, world(model, opt)) == [], f"pass {k}"
            model.fail_at, raised = 0, raised + 1
            step = opt.step(x, y)
        assert step.rule == expected.rule
        assert error(theta(model), end) < 1e-7
        assert all(b.item() == 2 * started + 1 for b in model.buffers())
    assert raised >= passes // 2


class Failing:
    """A part that does its work, then raises."""

    def __init__(self, part: Any, exception: type[BaseException]) -> None:
        self.part, self.exception = part, exception

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.part, name)
        if not callable(found):
            return found

        def fail(*args: Any, **kwargs: Any) -> Any:
            found(*args, **kwargs)
            raise self.exception("in a part")

        return fail


@EXCEPTIONS
@pytest.mark.parametrize(
    "part", ["curvature", "rows", "damping", "schedule", "momentum", "acceptance", "line_search", "average"]
)
def test_exception_in_a_part(exception, part):
    model, opt, x, y = fragile("random", started=True)
    expected, end = opt.step(x, y), theta(model)
    model, opt, x, y = fragile("random", started=True)
    before, whole = world(model, opt), getattr(opt, part)
    setattr(opt, part, Failing(whole, exception))
    with pytest.raises(exception, match="in a part"):
        opt.step(x, y)
    assert changes(before, world(model, opt)) == []
    setattr(opt, part, whole)
    assert opt.step(x, y) == expected
    assert torch.equal(theta(model), end)


@EXCEPTIONS
@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (mq.losses.SquaredError, "ell"),
        (mq.losses.SquaredError, "slope"),
        (mq.losses.SquaredError, "s"),
        (DenseCurvature, "newton"),
        (DenseCurvature, "quadratic"),
        (DenseCurvature, "diagonal"),
    ],
    ids=lambda o: o if isinstance(o, str) else o.__name__,
)
def test_exception_in_the_mathematics(monkeypatch, exception, owner, method):
    """At the first, second, … call of a method."""
    model, opt, x, y = fragile("random", started=True)
    expected, end = opt.step(x, y), theta(model)
    original = getattr(owner, method)
    for k in range(1, 20):
        calls = [0]

        def failing(self: Any, *args: Any, calls: list[int] = calls, k: int = k) -> Any:
            calls[0] += 1
            if calls[0] == k:
                raise exception("in the mathematics")
            return original(self, *args)

        model, opt, x, y = fragile("random", started=True)
        before = world(model, opt)
        with monkeypatch.context() as patched:
            patched.setattr(owner, method, failing)
            try:
                opt.step(x, y)
                break
            except exception:
                pass
        assert changes(before, world(model, opt)) == [], f"call {k}"
        assert opt.step(x, y) == expected
        assert torch.equal(theta(model), end)
    assert 2 <= k < 19  # it was called, and then no longer


def test_exception_while_rules_are_proven_again():
    """Another mode of the model is another proof; if that fails, the old one must still hold."""
    model, x, y = Fragile(nn.Sequential(nn.Linear(2, 4), Scaling(), nn.Linear(4, 3))), *problem()[1:]
    twin = copy.deepcopy(model)
    opt, hand = lm(model.eval()), ByHand(twin, "mse")
    opt.step(x, y)
    hand.step(x, y)
    for k in (1, 2, 3, 4):
        model.train()
        model.passes, model.fail_at, model.exception = 0, k, KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt):
            opt.step(x, y)
        model.eval()
        model.fail_at = 0
        opt.step(x, y)
        hand.step(x, y)
        assert error(theta(model), theta(twin)) < 1e-8, f"pass {k}"


def test_exception_in_step_over():
    """While the batches are read, in the second round."""

    class Source:
        def __init__(self, batches: list[Any]) -> None:
            self.batches, self.rounds = batches, 0

        def __iter__(self) -> Any:
            self.rounds += 1
            yield self.batches[0]
            torch.rand(3)
            if self.rounds == 2:
                raise Boom
            yield from self.batches[1:]

    model, x, y = noisy(), torch.randn(8, 2), torch.randn(8, 3)
    opt = lm(model)
    before = world(model, opt)
    source = Source(parts_of(x, y))
    with pytest.raises(Boom):
        opt.step_over(source)
    assert changes(before, world(model, opt)) == []
    assert opt.step_over(source).accepted


# ---- all kinds of models train


def test_tuple_and_dict_inputs():
    model, y = TwoTowers(), torch.randn(6, 2)
    left, right = torch.randn(6, 2), torch.randn(6, 3)
    runs = []
    for inputs in ((left, right), [left, right], {"right": right, "left": left}):
        twin = copy.deepcopy(model)
        hand_twin = copy.deepcopy(model)
        opt, hand = lm(twin), ByHand(hand_twin, "mse")
        for _ in range(3):
            opt.step(inputs, y)
            hand.step(inputs, y)
        assert error(theta(twin), theta(hand_twin)) < 1e-9
        runs.append(theta(twin))
    assert same(runs[0], runs[1])
    assert error(runs[2], runs[0]) < 1e-12


@EVERY_CURVATURE
def test_dict_inputs_with_an_option(curvature):
    """Not every argument of a model is a tensor."""

    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, negate: bool, x: Tensor) -> Tensor:
            return -self.inner(x) if negate else self.inner(x)

    model, x, y = Switch(), torch.randn(5, 2), torch.randn(5, 2)
    twin = copy.deepcopy(model)
    assert lm(model, curvature=curvature).step({"negate": True, "x": x}, y).accepted
    ByHand(twin, "mse").step({"negate": True, "x": x}, y)
    assert error(theta(model), theta(twin)) < 1e-10


@DENSE_AND_GRAM
def test_residuals_without_inputs(curvature):
    """A model that knows its own data takes no inputs and no targets."""

    class Fit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.tensor([1.0, 1.0]))

        def forward(self) -> Tensor:
            t = torch.linspace(0, 1, 5)
            return self.p[0] * (self.p[1] * t).exp() - 2 * (0.5 * t).exp()

    model = Fit()
    opt = lm(model, "residual", curvature=curvature)
    for _ in range(8):
        step = opt.step(())
    assert step.new_loss < 1e-20
    assert error(theta(model), torch.tensor([2.0, 0.5])) < 1e-8


@pytest.mark.parametrize("loss", ["residual", mq.losses.Residual()], ids=["name", "object"])
def test_residuals_without_targets(loss):
    class Rosenbrock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.tensor([-1.2, 1.0]))

        def forward(self, scale: Tensor) -> Tensor:
            a, b = self.p
            return torch.stack([scale[0] * (b - a**2), 1 - a])

    model = Rosenbrock()
    opt = lm(model, loss, schedule=mq.TenFold(1e-2), attempts=20)
    for _ in range(40):
        step = opt.step(torch.tensor([10.0, 1.0]))
    assert step.loss < 1e-20
    assert error(theta(model), torch.ones(2)) < 1e-8


def loss_after(opt: mq.LM, x: Any, y: Any, steps: int) -> tuple[float, float]:
    """f at the start and at the end."""
    done = [opt.step(x, y) for _ in range(steps)]
    assert all(math.isfinite(s.new_loss) for s in done)
    return done[0].loss, done[-1].new_loss


@pytest.mark.parametrize("recipe", ["default", "explicit", "paper"])
def test_trains_a_physics_informed_network(recipe):
    model, x = Poisson1D(), torch.linspace(-math.pi, math.pi, 20)[:, None]
    makers = {"default": mq.LM, "explicit": lm, "paper": mq.presets.paper}
    first, last = loss_after(makers[recipe](model, "residual"), x, None, 25)
    assert last < first / 10


@pytest.mark.parametrize("recipe", ["explicit", "search"])
@EVERY_CURVATURE
def test_trial_losses_of_a_model_that_differentiates_itself(recipe, curvature):
    """They need gradients where other models are evaluated without."""
    model, x = Slope(), torch.randn(6, 2)
    y = torch.cat([x.cos(), x.sin().sum(1, keepdim=True)], 1)
    opt = lm(model, curvature=curvature, line_search=mq.Grid(1e-6, 2, 0.25) if recipe == "search" else None)
    for lr in (1.0, 100.0, 1.0):
        opt.param_groups[0]["lr"] = lr
        step = opt.step(x, y)
        found = reference.objective("mse", model(x), y, None).item()
        assert step.new_loss == pytest.approx(found, rel=1e-9)
        assert step.rule == {"explicit": "rejected", "search": "search"}[recipe] or lr == 1.0


@pytest.mark.parametrize("recipe", ["default", "explicit"])
def test_trains_an_lstm(recipe):
    model, x = Recurrent(nn.LSTM(1, 4, batch_first=True), 2), torch.randn(12, 5, 1)
    y = (x.sum((1, 2)) > 0).long()
    opt = mq.LM(model, "cross_entropy") if recipe == "default" else lm(model, "cross_entropy")
    first, last = loss_after(opt, x, y, 15)
    assert last < first / 5


@pytest.mark.parametrize("recipe", ["default", "explicit"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_trains_a_transformer(recipe, dropout):
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout, batch_first=True)
    model, x = nn.Sequential(layer, nn.Flatten(1), nn.Linear(12, 2)), torch.randn(10, 3, 4)
    y = (x[:, 0, 0] > 0).long()
    opt = mq.LM(model, "cross_entropy") if recipe == "default" else lm(model, "cross_entropy")
    loss_after(opt, x, y, 12)
    assert objective(model.eval(), "cross_entropy", x, y) < 0.1


def sine(device: str = "cpu") -> tuple[nn.Module, Tensor, Tensor]:
    """The paper's network in float32, on fewer points."""
    with default_dtype(torch.float32):
        model, x = mlp(1, 10, 1), torch.linspace(-4, 4, 100)[:, None]
    return model.to(device), x.to(device), x.sin().to(device)


@pytest.mark.parametrize("recipe", ["default", "vanilla", "paper"])
def test_trains_in_float32(recipe):
    model, x, y = sine()
    makers = {"default": mq.LM, "vanilla": mq.presets.vanilla, "paper": mq.presets.paper}
    opt = makers[recipe](model, "mse")
    first, last = loss_after(opt, x, y, 40)
    assert last < first / 10
    state = opt.state_dict()["marquardt"]
    assert (state["previous"] is None) == (recipe == "vanilla")  # where nothing looks back, nothing is kept
    vectors = [t for t in tree_leaves([state["D"], state["previous"], state["mean"]]) if t is not None]
    assert all(p.dtype == torch.float32 for p in [*model.parameters(), *vectors])


# ---- on the GPU


@CUDA
@pytest.mark.parametrize("recipe", RECIPES)
@DENSE_AND_GRAM
def test_cuda_steps_equal_the_algorithm(recipe, curvature):
    model, x, y = problem("cross_entropy")
    parts, options = RECIPES[recipe]
    hand = ByHand(copy.deepcopy(model), "cross_entropy", **options)
    opt = lm(model.cuda(), "cross_entropy", curvature=curvature, **parts)
    for _ in range(4):
        step, (f, _, accepted, _) = opt.step(x.cuda(), y.cuda()), hand.step(x, y)
        assert step.loss == pytest.approx(f, rel=1e-8)
        assert step.accepted == accepted
        assert error(theta(model).cpu(), theta(hand.model)) < 1e-7


@CUDA
@pytest.mark.parametrize("name", [*RANDOM, "mlp", "lstm"])
@pytest.mark.parametrize("chunk", [None, 3])
def test_cuda_trials_see_the_same_random_numbers(name, chunk):
    model, x, y = {**RANDOM, **LSTM}[name]().cuda(), torch.randn(7, 2).cuda(), torch.randn(7, 3).cuda()
    start = torch.cuda.get_rng_state()
    for part in x.split(chunk or 7):
        model(part)
    after = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(start)
    lin = mq.linearize(model, "mse", x, y, chunk=chunk)
    d = -mq.Dense(chunk).represent(lin).newton(torch.tensor(1e-2).cuda())
    assert torch.equal(torch.cuda.get_rng_state(), after)
    rates = [0.0, 0.25, 1.0, 4.0]
    together = lin.evaluate_along(d, rates)
    assert together == pytest.approx([lin.evaluate(d, lr).item() for lr in rates], rel=1e-9)
    assert together[0] == pytest.approx(lin.loss, rel=1e-9)


@CUDA
def test_cuda_resumes_and_trains():
    model, x, y = sine("cuda")
    opt = mq.LM(model, "mse")
    first, last = loss_after(opt, x, y, 20)
    twin = copy.deepcopy(model)
    other = mq.LM(twin, "mse")
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert loss_after(opt, x, y, 3) == pytest.approx(loss_after(other, x, y, 3), rel=1e-4)
    assert last < first / 5
    assert all(type(getattr(opt.step(x, y), f.name)) is PLAIN_TYPES.get(f.name, float) for f in fields(mq.Step))


# ---- what a long run must not do


def test_a_ragged_batch_changes_neither_damping_nor_representation():
    """The last batch of a pass is small: fewer rows than parameters for once."""
    torch.manual_seed(0)
    model = mlp(4, 8, 3)
    opt = mq.LM(model, "mse")
    x, y = torch.randn(123, 4), torch.randn(123, 3)
    for part in (slice(0, 60), slice(60, 120), slice(120, 123), slice(0, 60)):
        before = opt.state_dict()["marquardt"]
        opt.step(x[part], y[part])
    assert before["past"] is not None  # the small batch kept the averaged curvature
    assert opt.state_dict()["marquardt"]["D"][0] < 3 * before["D"][0]
    assert opt.state_dict()["marquardt"]["rows"] == 180


def test_a_step_lets_go_of_its_rows():
    """At once, not when Python's collector comes round: on a GPU that is too late."""
    import gc
    import weakref

    from marquardt.jacobian.linearization import Linearization

    model, x, y = problem()
    opt, seen = lm(model, curvature=mq.Gram()), []
    original = Linearization.close

    def close(self: Linearization) -> None:
        seen.extend(weakref.ref(part) for chunk in self._open for part in (chunk, *chunk.blocks))
        original(self)

    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Linearization, "close", close)
            opt.step(x, y)
        assert seen
        assert all(ref() is None for ref in seen)
    finally:
        gc.enable()


def test_weights_that_functional_call_does_not_see():
    """The batched grid is used only where it agrees with a plain evaluation."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 3)
            self.pair = [self.inner.weight, self.inner.bias]

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, *self.pair).tanh()

    model, x, y = Hidden(), *problem()[1:]
    lin = mq.linearize(model, "mse", x, y)
    d = torch.randn(lin.n)
    lin.totals()
    rates = [0.5, 1.0, 2.0]
    assert lin.evaluate_along(d, rates) == [lin.evaluate(d, lr).item() for lr in rates]


def test_inputs_changed_in_place_are_refused():
    class Shifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            x -= 0.5
            return self.inner(x)

    model, x, y = Shifting(), *problem()[1:]
    with pytest.raises(ValueError, match="changes its inputs in place"):
        lm(model).step(x, y)


def test_a_rate_of_zero_moves_nothing():
    model, x, y = problem()
    before = theta(model).clone()
    step = mq.LM(model, "mse", lr=0.0).step(x, y)
    assert not step.accepted
    assert torch.equal(theta(model), before)


def test_other_data_in_another_pass_are_refused():
    class Loader:
        def __iter__(self) -> Any:
            yield x, y + torch.rand((), generator=own)

    model, x, y = problem()
    own = torch.Generator().manual_seed(0)
    with pytest.raises(ValueError, match="batches are not the same"):
        lm(model).step_over(Loader())


def test_sampled_rows_are_watched_too():
    """A layer that sees the samples in another order for other data."""

    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            order = x[:, 0].argsort()
            return self.head(self.inner(x[order]).tanh()[order.argsort()])

    model, x, y = Sorted(), *problem()[1:]
    x = x[x[:, 0].argsort()]
    opt = lm(model, rows=mq.Sampled(2), curvature=mq.Dense())
    opt.step(x, y)  # in order: the rule is proven
    twin = copy.deepcopy(model)
    fresh = lm(twin, rows=mq.Sampled(2), curvature=mq.Dense())
    fresh.load_state_dict(opt.state_dict())
    opt.step(x.flip(0), y)
    fresh.step(x.flip(0), y)
    assert error(theta(model), theta(twin)) < 1e-9


def test_a_gradient_that_is_not_finite_is_named():
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.w.sqrt() + 0 * x[:, :1]

    _, x, y = problem()
    with pytest.raises(ValueError, match="gradient of parameter 'w'"):
        lm(Root()).step(x, y)
