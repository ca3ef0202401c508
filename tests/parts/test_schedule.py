"""Schedules of λ, case by case."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import marquardt as mq
from marquardt.parts.judging import Outcome
from support.parts import Never

NAN, INF = math.nan, math.inf


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
    part = mq.RelativeDecrease(1.0, 1e-5, 1e5)
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
    assert mq.RelativeDecrease(1.0).update(1.0, outcome(f, f_new, rule=rule)) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("lam", "rule", "expected"),
    [
        (1.0, "decrease", 0.1),
        (1.0, "uphill", 0.1),
        (1.0, "rejected", 10.0),
        (1.0, "search", 10.0),  # the full step failed
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


@pytest.mark.parametrize("rule", ["decrease", "search", "rejected"])
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


@pytest.mark.parametrize(
    "part", [mq.RelativeDecrease(1.0), mq.TenFold(1.0), GAIN, mq.Balanced()], ids=lambda p: type(p).__name__
)
@pytest.mark.parametrize("same_data", [False, True])
@pytest.mark.parametrize(("f_new", "gain"), [(NAN, NAN), (NAN, -INF), (INF, -INF), (-INF, -INF)])
def test_a_trial_that_is_not_finite_raises_lambda(part, f_new, gain, same_data):
    """Or else the same step would fail in the same way for ever."""
    assert part.update(1.0, outcome(1.0, f_new, gain, "rejected", same_data)) > 1


@dataclass(frozen=True)
class Halved:
    """A schedule of a user, to which every step is a success that was not rejected"""

    initial: float = 1.0

    def update(self, lam: float, outcome: Outcome) -> float:
        return 2 * lam if outcome.rule == "rejected" else lam / 2


@pytest.mark.parametrize(
    "schedule",
    [mq.TenFold(), mq.GainRatio(floor=1e-9), mq.RelativeDecrease(), mq.Balanced(), mq.Constant(1.0), Halved()],
    ids=lambda s: type(s).__name__,
)
@pytest.mark.parametrize("same_data", [True, False], ids=["same data", "batches"])
def test_lambda_does_not_fall_after_a_step_that_the_line_search_saved(schedule, same_data):
    """However good the gain ratio is: the full step was not accepted, and a smaller λ asks for a longer one."""
    torch.manual_seed(0)
    model, x = nn.Linear(2, 1, bias=False), torch.randn(20, 2)
    opt = mq.LM(model, "mse", schedule=schedule, acceptance=Never())
    for _ in range(5):
        x = x if same_data else torch.randn(20, 2)
        before = opt.lam
        assert opt.step(x, x.sum(1, keepdim=True)).rule == "search"
        assert opt.lam >= before


@pytest.mark.usefixtures("double")
def test_ten_fold_learns_with_a_line_search():
    """A smooth target: if λ falls or stays after a step that is too long, all others are too long as well."""
    x = torch.linspace(-3, 3, 100)[:, None]
    y, losses = torch.sin(2 * x), []
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))
        parts = {"damping": mq.MaxDiagonal(), "momentum": mq.AdaptiveMomentum(dP=0.6, cap=True)}
        opt = mq.presets.vanilla(model, "mse", line_search=mq.Grid(), **parts)
        losses.append(min(opt.step(x, y).new_loss for _ in range(40)))
    assert sorted(losses)[1] < 0.02  # 1e-7 here; 0.18 if λ falls


# ---- by the averaged weights

BALANCED = mq.Balanced(target=0.9, quickest=1.5, gain=GAIN)


def averaged(lag: float, gain: float = 0.5, rule: str = "decrease") -> Outcome:
    return outcome(gain=gain, rule=rule, same_data=False)._replace(lag=lag)


@pytest.mark.parametrize("gain", [0.25, 0.5, 50.0, INF])
@pytest.mark.parametrize(
    ("lag", "factor"),
    [
        (0.9, 1.0),
        (0.75, 1.2),  # the average is ahead: λ rises
        (0.6, 1.5),
        (0.59, 1.5),  # by 1.5 at most
        (1e-9, 1.5),
        (1.0, 0.9),  # it lags behind: λ falls
        (1.35, 1 / 1.5),
        (1.36, 1 / 1.5),
        (1e9, 1 / 1.5),
        (INF, 1 / 1.5),
    ],
)
def test_balanced(lag, factor, gain):
    """Below the floor of the gain ratio too: there is none."""
    for lam in (1.0, 60.0, 1e-6):
        assert BALANCED.update(lam, averaged(lag, gain)) == pytest.approx(factor * lam, rel=1e-14)


GOOD, BAD = outcome(gain=1.0), outcome(gain=-1.0)
CHANGING = GOOD._replace(same_data=False)
LIMITS = [
    (mq.Constant(0.3), 0.3, BAD, 0.3),
    *((GAIN, 10.0, BAD._replace(rule="uphill", same_data=same), 10.0) for same in (True, False)),
    # The floor is for changing batches, unless the curvature is averaged.
    (GAIN, 0.11, CHANGING, 0.1),
    (GAIN, 0.11, CHANGING._replace(averaged_curvature=True), 0.077),
    (GAIN, 1e-4, CHANGING, 0.1),
    (GAIN, 1e-4, CHANGING._replace(gain=0.5), 0.1),
    (GAIN, 0.11, GOOD, 0.044),
    (GAIN, 1e-4, GOOD, 4e-5),
    (GAIN, 1e-12, GOOD, 1e-12),
    (GAIN, 1e12, BAD, 1e12),
    (GAIN, 1e12, BAD._replace(same_data=False), 1e12),
    (mq.GainRatio(), 1e-9, CHANGING, 3.0),
    (mq.Balanced(), 1e-9, CHANGING, 0.7e-9),
    # The average raises λ to `most`; what is above that for another reason stays, and falls as always.
    *((BALANCED, 99.0, averaged(lag), 100.0) for lag in (0.75, 1e-9)),
    *((BALANCED, 1e6, averaged(lag), 1e6) for lag in (0.75, 1e-9)),
    *((BALANCED, 1e6, averaged(lag, -1.0), 1.5e6) for lag in (0.75, 1e-9)),
    (BALANCED, 1e6, averaged(1.0), 0.9e6),
    (BALANCED, 1.1e-12, averaged(1e9), 1e-12),
    (BALANCED, 9e11, averaged(0.1, -1.0), 1e12),
]


@pytest.mark.parametrize(("part", "lam", "this", "expected"), LIMITS)
def test_limits(part, lam, this, expected):
    assert part.update(lam, this) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("lag", [0.75, 0.9, 1e9])
@pytest.mark.parametrize("gain", [0.24, 0.0, -3.0, -INF, NAN])
def test_balanced_raises_lambda_if_the_model_of_the_loss_fails(gain, lag):
    """On top of a rise by the average, and whatever lags behind; after an uphill step the average alone counts."""
    kept = BALANCED.update(1.0, averaged(lag))
    for rule in ("decrease", "search", "rejected"):
        assert BALANCED.update(1.0, averaged(lag, gain, rule)) == pytest.approx(1.5 * max(kept, 1.0), rel=1e-14)
    assert BALANCED.update(1.0, averaged(lag, gain, "uphill")) == kept


@pytest.mark.parametrize("gain", [1.0, 0.5, -1.0])
@pytest.mark.parametrize(
    "change",
    [{"same_data": True}, {"lag": NAN}, {"unjudged": 3, "gain": NAN}, {"unjudged": 9, "gain": NAN}],
    ids=["same data", "no average", "unjudged", "unjudged for long"],
)
def test_balanced_goes_by_the_gain_ratio_otherwise(change, gain):
    this = averaged(0.5, gain)._replace(**change)
    for lam in (1e-3, 0.5, 10.0):
        assert BALANCED.update(lam, this) == GAIN.update(lam, this)
    assert BALANCED.update(10.0, this) != BALANCED.update(10.0, averaged(0.5, gain))


@pytest.mark.parametrize("lam", [1e-3, 0.06])
def test_balanced_goes_back_to_its_own_start(lam):
    """After steps in vain on the same data, whatever λ₀ its gain ratio would have."""
    idle = outcome(gain=NAN)._replace(unjudged=9)
    expected = mq.GainRatio(initial=0.1).update(lam, idle)
    assert lam < expected <= 0.1
    assert mq.Balanced(initial=0.1).update(lam, idle) == expected
    assert mq.Balanced(initial=0.1, gain=mq.GainRatio(initial=5.0)).update(0.5, idle) < 0.5


@pytest.mark.parametrize("gain", [2.0, None, mq.TenFold(), mq.GainRatio], ids=str)
def test_balanced_needs_a_gain_ratio(gain):
    with pytest.raises(TypeError, match=r"Balanced\(gain=.*mq\.GainRatio\(\)"):
        mq.Balanced(gain=gain)


outcomes = st.builds(
    Outcome,
    loss=st.floats(-1e3, 1e3),
    new_loss=st.floats(-1e3, 1e3) | st.sampled_from([NAN, INF]),
    gain=st.floats(allow_nan=True),
    rule=st.sampled_from(["decrease", "uphill", "search", "rejected"]),
    same_data=st.booleans(),
    lag=st.floats(0.0, 1e300, exclude_min=True) | st.sampled_from([NAN, INF]),
)
BEST = outcome(1.0, 0.0, 1.0)
WORST = outcome(1.0, 1.1, -1.0, "rejected")


@pytest.mark.parametrize(
    "part",
    [
        mq.Constant(0.3),
        mq.RelativeDecrease(1.0),
        mq.TenFold(1.0),
        GAIN,
        mq.GainRatio(1.0, down=0.1, up=10.0, slow_down=0.1, slow_up=10.0, floor=1e-12, minimum=1e-12),  # no floor
        BALANCED,
        mq.Balanced(quickest=1e9),
    ],
    ids=repr,
)
@given(st.lists(outcomes, min_size=1, max_size=5))
@example([BEST])
@example([BEST._replace(same_data=False)])
@example([WORST])
@example([BEST._replace(same_data=False, lag=1e-300)])
@example([BEST._replace(same_data=False, lag=1e300)])
def test_lambda_stays_positive_and_finite(part, history):
    lam = part.initial
    for o in itertools.islice(itertools.cycle(history), 2500):  # ⅔^2500 and 1.5^2500 are beyond float64
        lam = part.update(lam, o)
        assert 0 < lam < INF
