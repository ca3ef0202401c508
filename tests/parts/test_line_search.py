"""Line searches: the rates they try, and the one they take."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import marquardt as mq
from support import reference
from support.parts import Never, batch, curvature, decades, flat, lm, mlp
from support.reference import error

f64 = torch.float64
NAN, INF = math.nan, math.inf


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
    assert mq.Grid(0.01, 2, 0.05, power=3).rates[1] == pytest.approx(0.06**3)


@given(decades(-6, 0), st.floats(0.05, 3), st.integers(1, 40), st.floats(0, 0.99))
@example(0.1, 0.1, 3, 0.0)  # (0.4 − 0.1)/0.1 is a little more than 3
@example(1.0, 0.1, 10, 0.0)
def test_grid_ends_before_its_stop(start, step, count, rest):
    stop = start + (count + rest) * step
    rates = mq.Grid(start, stop, step).rates
    assert max(rates) < stop
    assert abs(len(rates) - (count + rest)) <= 1


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
    calls: list[float] = []
    found = grid.search(recorded(lambda lr: losses[round(lr) - 1], calls), f)
    assert calls == grid.rates
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


def asked(losses, **options) -> list[float]:
    """The rates that a bracket asks for after the first ones"""
    part, calls = mq.Bracket(**options), []
    part.search(recorded(losses, calls), 1.0, 1.0, None)
    assert calls[: len(part.rates)] == list(part.rates)
    return calls[len(part.rates) :]


def test_a_bracket_goes_as_far_as_its_stop():
    assert asked(lambda lr: -lr)[:2] == [6, 9]
    assert max(asked(lambda lr: -lr)) == 9


def test_a_bracket_goes_to_the_vertex_of_a_parabola():
    assert asked(lambda lr: (lr - 0.6) ** 2)[0] == pytest.approx(0.6)


def test_a_bracket_divides_the_longer_interval_where_there_is_no_parabola():
    ends = lambda rate: lambda lr: INF if lr > rate else -lr  # noqa: E731
    assert asked(ends(0.25))[0] == pytest.approx(0.25 + 0.382 * 0.75)
    assert asked(ends(4.0), rates=(1.0, 4.0, 5.0))[0] == pytest.approx(4 - 0.382 * 3)


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
