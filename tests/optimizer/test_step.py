"""LM.step against the algorithm written out, and what it reports."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import marquardt as mq
from support import reference
from support.cases import default_dtype, mlp, sample_weights
from support.modules import Scaling, noisy
from support.parts import Never
from support.reference import error
from support.steps import (
    CUDA,
    CURVATURES,
    DENSE,
    DENSE_AND_GRAM,
    EVERY_CURVATURE,
    EVERY_LOSS,
    LOSSES,
    MAX_MOMENTUM,
    PLAIN_TYPES,
    RECIPES,
    ByHand,
    Spy,
    linear_problem,
    lm,
    objective,
    overshooting,
    parts_of,
    problem,
    state,
    theta,
    unharmed,
)  # fmt: skip
from support.unchanged import same

pytestmark = pytest.mark.usefixtures("double")


# ---- the algorithm, written out


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


RULES = {  # lr, the rule, the rate that it ends with, f after it over f before
    "decrease": ({"lr": 0.5}, "decrease", 0.5, 0.25),
    "rejected": ({}, "rejected", 3.0, 1.0),
    "grid": ({"line_search": mq.Grid()}, "search", 1.0, 0.0),
    "grid along the step": ({"line_search": mq.Grid(along_step=True)}, "search", 1.0, 0.0),
    "halves": ({"line_search": mq.Backtracking()}, "search", 1.5, 0.25),
    "thirds": ({"line_search": mq.Backtracking(1 / 3)}, "search", 1.0, 0.0),
}


@pytest.mark.parametrize("case", RULES)
def test_rules(case):
    """The minimum lies at lr = 1. The failed lr = 3 is not tried again."""
    parts, rule, lr, factor = RULES[case]
    model, opt, x, y = overshooting(**parts)
    before = theta(model)
    step = opt.step(x, y)
    assert (step.rule, step.accepted, step.lr) == (rule, rule != "rejected", pytest.approx(lr))
    assert step.new_loss == pytest.approx(factor * step.loss, rel=1e-6, abs=1e-6 * step.loss)
    assert objective(model, "mse", x, y) == pytest.approx(step.new_loss, rel=1e-9)
    assert opt.param_groups[0]["lr"] == parts.get("lr", 3.0)  # reported, never written into the optimizer
    if rule == "decrease":
        assert (step.gain, step.note) == (pytest.approx(1.0), "")
    if rule == "rejected":
        assert step.new_loss == step.loss
        assert torch.equal(theta(model), before)
        assert opt.lam == pytest.approx(10 * step.lam)
        assert "λ" in step.note


def test_uphill_against_the_best_loss():
    """A rise is allowed along the previous step. The best loss is remembered meanwhile."""
    model, opt, x, y = overshooting(lr=0.5, acceptance=mq.Uphill(against_best=True))
    best = opt.step(x, y).new_loss
    opt.param_groups[0]["lr"] = 2.5
    step = opt.step(x, y)
    assert (step.rule, step.accepted, step.new_loss) == ("uphill", True, pytest.approx(2.25 * best))
    assert objective(model, "mse", x, y) == pytest.approx(step.new_loss)
    assert state(opt)["best"] == best
    opt.param_groups[0]["lr"] = 0.1
    assert opt.step(x, y).new_loss > best
    assert state(opt)["best"] == best


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
    lams = [torch.linalg.matrix_norm(q.G, 2).item() * 10 ** (k - 3) for k in range(attempts)]
    trials = [theta(model) + 3.0 * q.step(lam) for lam in lams]
    lower = [bool(nn.functional.mse_loss(x @ trial[:, None], y) < q.f) for trial in trials]
    k, expected = (lower.index(True), trials[lower.index(True)]) if any(lower) else (attempts - 1, theta(model))
    opt = lm(model, lr=3.0, schedule=mq.TenFold(lams[0]), attempts=attempts)
    step = opt.step(x, y)
    assert step.accepted == any(lower) == (attempts == 5)
    assert step.lam == pytest.approx(lams[k])
    assert opt.lam == pytest.approx(step.lam / 10 if step.accepted else 10 * step.lam)
    assert step.note.count("rejected") == k + (not step.accepted)
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


def test_knows_the_same_data_again():
    """The loss before a step is the loss after the last one, accepted or not, where the data are the same. Once may be
    chance."""
    (model, x, y), spy = problem(), Spy(mq.Constant(1.0))
    opt = lm(model, schedule=spy)
    for lr, shift in ((1e3, 0), (1.0, 0), (1.0, 0), (1e3, 1), (1.0, 1), (1.0, 1)):
        opt.param_groups[0]["lr"] = lr
        opt.step(x, y + shift)
    rules = ["rejected", "decrease", "decrease", "rejected", "decrease", "decrease"]
    told = [(outcome.rule, outcome.same_data) for _, outcome, _ in spy.calls]
    assert told == list(zip(rules, [False, False, True, False, False, True], strict=True))
    assert state(opt)["steps"] == 6


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


# ---- what a long run must not do


def test_a_ragged_batch_changes_neither_damping_nor_representation():
    """The last batch of a pass is small: fewer rows than parameters for once."""
    torch.manual_seed(0)
    model = mlp(4, 8, 3)
    opt = mq.LM(model, "mse", curvature=mq.Auto(inertia=0.8), damping=mq.MeanEigenvalue())
    x, y = torch.randn(123, 4), torch.randn(123, 3)
    for part in (slice(0, 60), slice(60, 120), slice(120, 123), slice(0, 60)):
        before = state(opt)
        opt.step(x[part], y[part])
    assert before["past"] is not None  # the small batch kept the averaged curvature
    assert state(opt)["D"][0] < 3 * before["D"][0]
    assert state(opt)["most_rows"] == 180


def test_a_rate_of_zero_moves_nothing():
    model, x, y = problem()
    before = theta(model).clone()
    step = mq.LM(model, "mse", lr=0.0).step(x, y)
    assert not step.accepted
    assert torch.equal(theta(model), before)


# ---- LM.step_over: several batches in one step.


STEP_OVER: dict[str, tuple[str, Any]] = {
    "mse": ("mse", nn.MSELoss()),
    "mse, sum": ("mse", nn.MSELoss(reduction="sum")),
    "cross-entropy, class weights": ("cross_entropy", nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1, 3]).double())),
    "cross-entropy, ignored": ("cross_entropy", nn.CrossEntropyLoss(ignore_index=1)),
    "poisson": ("poisson", nn.PoissonNLLLoss()),
}


@pytest.mark.parametrize("kind", STEP_OVER)
@pytest.mark.parametrize("weighted", ["no", "all", "some"])
@pytest.mark.parametrize(
    "curvature", [DENSE, mq.Dense(2, inertia=0.0), mq.Auto(inertia=0.0)], ids=["dense", "dense-chunked", "auto"]
)
def test_step_over_equals_one_batch(kind, weighted, curvature):
    name, loss = STEP_OVER[kind]
    model, x, y = problem(name)
    if kind.endswith("ignored"):
        y[:] = torch.tensor([0, 1, 2, 0, 1, 2, 1, 0])  # 2, 4 and 1 of a batch count
    weight, twin = None if weighted == "no" else sample_weights(8), copy.deepcopy(model)
    batches = parts_of(x, y, weight)
    if weighted == "some":  # None means 1
        weight[:1], batches[0] = 1, list(batches[0][:2])
    parts = {**MAX_MOMENTUM, "line_search": mq.Grid(1e-6, 2, 0.25)}
    opt, other = lm(model, loss, curvature=curvature, **parts), lm(twin, loss, **parts)
    for lr in (1.0, 1.0, 40.0, 1.0):
        opt.param_groups[0]["lr"] = other.param_groups[0]["lr"] = lr
        step, expected = opt.step_over(batches), other.step(x, y, weight)
        assert step.loss == pytest.approx(expected.loss, rel=1e-9)
        assert step.new_loss == pytest.approx(expected.new_loss, rel=1e-9)
        assert step.gain == pytest.approx(expected.gain, rel=1e-5)
        assert (step.rule, step.lam, step.lr) == (expected.rule, expected.lam, expected.lr)
        assert error(theta(model), theta(twin)) < 1e-9


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


USED_UP = {"generator": lambda b: (one for one in b), "iterator": iter, "zip": lambda b: zip(b, strict=True)}


@pytest.mark.parametrize("batches", USED_UP.values(), ids=USED_UP)
def test_step_over_refuses_what_is_used_up(batches):
    model, x, y = problem()
    opt = lm(model)
    with unharmed(model, opt, "list or a DataLoader"):
        opt.step_over(batches(parts_of(x, y)))


def test_step_over_refuses_gram():
    model, x, y = problem()
    opt = lm(model, curvature=mq.Gram())
    with unharmed(model, opt, "Dense"):
        opt.step_over(parts_of(x, y))
    assert opt.step(x, y).accepted


def test_other_data_in_another_pass_are_refused():
    class Loader:
        def __iter__(self) -> Any:
            yield x, y + torch.rand((), generator=own)

    model, x, y = problem()
    own = torch.Generator().manual_seed(0)
    with pytest.raises(ValueError, match="batches are not the same"):
        lm(model).step_over(Loader())


# ---- The step does not depend on units: the batch's size, its chunks, its weights, the scale of the loss.


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


COUNTS = torch.tensor([1, 2, 0, 1, 3, 1, 0, 2])
UNITS: dict[str, Any] = {  # two batches that are the same
    "three times": lambda x, y, w: ((x, y), (x.repeat(3, 1), y.repeat(3, *[1] * (y.ndim - 1)))),
    "integer weights": lambda x, y, w: (
        (x, y, COUNTS.double()), (x.repeat_interleave(COUNTS, 0), y.repeat_interleave(COUNTS, 0)),
    ),
    "small weights": lambda x, y, w: ((x, y, 1e-3 * w), (x, y, w)),
    "large weights": lambda x, y, w: ((x, y, 1e4 * w), (x, y, w)),
}  # fmt: skip


@EVERY_LOSS
@EVERY_CURVATURE
@pytest.mark.parametrize("kind", UNITS)
def test_units_of_the_batch_change_nothing(kind, loss, curvature):
    """λ depends neither on its size nor on the scale of its weights."""
    model, x, y = problem(loss)
    ours, theirs = UNITS[kind](x, y, sample_weights(8))
    for parts in (MAX_MOMENTUM, RECIPES["damped lr"][0]):
        twin = copy.deepcopy(model)
        opt, other = lm(model, loss, curvature=curvature, **parts), lm(twin, loss, **parts)
        for _ in range(3):
            step, expected = opt.step(*ours), other.step(*theirs)
            assert (step.rule, step.lam) == (expected.rule, expected.lam)
            assert step.loss == pytest.approx(expected.loss, rel=1e-9)
            assert error(theta(model), theta(twin)) < 1e-8


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


# ---- The radius: how far a step may go, and what follows from a step that was cut back.


R = 0.05


@pytest.mark.parametrize("lr", [1.0, 0.5])
def test_the_step_has_the_direction_and_this_length(lr):
    model, x, y = problem()
    exact, before = reference.quadratic(model, "mse", x, y), theta(model)
    step = lm(model, lr=lr, radius=R, schedule=mq.Constant(0.1)).step(x, y)
    moved = theta(model) - before
    expected = exact.step(0.1)
    assert error(moved, R * expected / expected.norm()) < 1e-10
    predicted = -exact.g @ moved - 0.5 * moved @ exact.G @ moved
    assert step.gain == pytest.approx((step.loss - step.new_loss) / float(predicted), rel=1e-8)


def test_a_step_within_is_left_alone():
    model, x, y = problem()
    twin = copy.deepcopy(model)
    assert lm(model, radius=1e3).step(x, y) == lm(twin).step(x, y)
    assert torch.equal(theta(model), theta(twin))


SEARCHES = [mq.Grid(), mq.Backtracking(), mq.Bracket(), mq.Grid(along_step=True)]


@pytest.mark.parametrize(
    "parts",
    [
        {"momentum": mq.AdaptiveMomentum(dP=10.0)},
        *({"acceptance": Never(), "line_search": search, "schedule": mq.TenFold(1e-9)} for search in SEARCHES),
    ],
    ids=lambda p: str(p.get("line_search", "momentum")),
)
def test_momentum_and_line_searches_stay_within(parts):
    """Rates reach to 9 times the step, and the loss falls all along the line: the end of the radius is best."""
    model, opt, x, y = overshooting(lr=1.0, radius=1e-3, **parts)
    for _ in range(3):
        before = theta(model)
        assert opt.step(x, y).rule == ("search" if "line_search" in parts else "decrease")
        assert 0 < (theta(model) - before).norm() <= 1e-3 * (1 + 1e-10)


SCHEDULES = [mq.Balanced(), mq.GainRatio(floor=1e-20), mq.TenFold(), mq.RelativeDecrease()]


@pytest.mark.parametrize("changing", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
def test_lambda_stays_while_steps_are_cut(schedule, changing):
    """A good step that was cut says nothing for a smaller λ, whose step would be longer, nor against this one."""
    model, x, y = problem(N=48)
    opt, batches = lm(model, radius=1e-3, schedule=schedule), zip(x.split(8), y.split(8), strict=True)
    steps = [opt.step(*batch) for batch in (batches if changing else [(x, y)] * 6)]
    assert all(step.accepted for step in steps)
    assert [step.lam for step in steps] == [schedule.initial] * 6
    freed = lm(model, radius=1e3, schedule=schedule)
    assert freed.step(x, y).accepted
    assert freed.lam < schedule.initial or isinstance(schedule, mq.RelativeDecrease)


def test_short_steps_are_no_convergence():
    """Each of them gains less than rounding."""
    model, x, y = problem()
    opt = lm(model, radius=1e-15, schedule=mq.Constant(1.0))
    assert not any(opt.step(x, y).converged for _ in range(20))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), "1", True])
def test_a_bad_radius_between_steps(bad):
    model, x, y = problem()
    opt = lm(model, radius=R)
    opt.step(x, y)
    opt.radius = bad
    with unharmed(model, opt, f"radius={bad!r}", "above 0"):
        opt.step(x, y)


# ---- Buffers and the global generator advance as in one forward pass.


def rebound(layer: Any, x: Tensor) -> None:
    """Another tensor after every pass"""
    layer.count = layer.count + 1


def silent(layer: Any, x: Tensor) -> None:
    """Behind autograd's back, as codebooks are often updated"""
    layer.count.data += 1


def running(layer: Any, x: Tensor) -> None:
    """And a mean of what it sees"""
    layer.count += 1
    layer.mean.lerp_(x.mean(0), 0.1)


class Keeping(nn.Module):
    def __init__(self, change: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.change(self, x)
        return x


@pytest.mark.parametrize("change", [rebound, silent, running])
@pytest.mark.parametrize("scaled", [False, True], ids=["by rule", "own parameter"])
@DENSE_AND_GRAM
@pytest.mark.parametrize("line_search", [None, mq.Grid()], ids=["no search", "grid"])
def test_buffers_advance_once_with_every_accepted_step(change, scaled, curvature, line_search):
    model = nn.Sequential(nn.Linear(2, 4), Keeping(change), Scaling() if scaled else nn.Tanh(), nn.Linear(4, 3))
    x, y = torch.randn(6, 2), torch.randn(6, 3)
    opt = lm(model, curvature=curvature, line_search=line_search, schedule=mq.Constant(1.0), attempts=2)
    once, accepted = copy.deepcopy(model), 0
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
