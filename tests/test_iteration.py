"""The pieces of a step: what is proposed as a function of tensors, what is judged as a function of numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.iteration import (
    FAILED,
    FAINT,
    IDLE,
    ROUNDINGS,
    Ending,
    Found,
    Judgement,
    Matrices,
    Parts,
    Proposal,
    Readings,
    Start,
    begin,
    check_metric,
    concluded,
    damped,
    gain_ratio,
    judge,
    kept,
    lag,
    next_lam,
    propose,
    remembered,
    smoothed,
    with_mean,
)
from marquardt.jacobian.linearization import Linearization
from marquardt.jacobian.objective import Level
from marquardt.losses import resolve
from marquardt.parts.schedule import Outcome
from marquardt.ranks import ALONE, Ranks
from marquardt.report import report
from marquardt.state import HEARD, State
from support import reference
from support.parts import flat
from support.reference import error
from support.steps import problem

pytestmark = pytest.mark.usefixtures("double")

EPS = torch.finfo(torch.float64).eps
BARE: dict[str, Any] = {
    "curvature": mq.Dense(),
    "rows": mq.Exact(),
    "damping": mq.Identity(),
    "schedule": mq.Constant(1.0),
    "momentum": None,
    "acceptance": mq.Decrease(),
    "line_search": None,
    "average": None,
}


def parts(**others: Any) -> Parts:
    return Parts(**{**BARE, **others})


# ---- judge: f = 10 with the bound 1 and a rounding of 1e-3; gᵀd = −4 and dᵀGd = 2


def start(rounding: float = 1e-3, repeats: int = 0, doubt: float = 1.0, **old: Any) -> Start:
    return Start(State(1.0, **old), Level(10.0, 1.0, rounding, 1.0), repeats, doubt)


def found(new_loss: float, **others: Any) -> Found:
    lengths, absent = {"length": 1.0, "theta": 1.0}, {"dDd": None, "cosine": None, "mean_loss": None}
    return Found(new_loss, **{"gd": -4.0, "dGd": 2.0, "gDg": 9.0, **lengths, **absent, **others})


def judged(now: Start, of: Found, lam: float = 1.0, lr: float = 1.0, **others: Any) -> Judgement:
    return judge(parts(**others), now, of, lam, lr, EPS)


@pytest.mark.parametrize("lr", [1.0, 0.5])
def test_a_decrease(lr):
    predicted = 4 * lr - lr**2  # −lr·gᵀd − ½lr²·dᵀGd
    rule, was_judged, *numbers = judged(start(), found(8.0, mean_loss=7.0), lr=lr)
    assert (rule, was_judged) == ("decrease", True)
    assert numbers == pytest.approx([2 / predicted, predicted, 1.0, 6 / 9])


def test_an_increase():
    rule, was_judged, gain, predicted, *_ = judged(start(), found(11.5))
    assert (rule, was_judged, gain, predicted) == (None, True, pytest.approx(-0.5), 3.0)


@pytest.mark.parametrize(
    ("f_new", "cosine", "old", "doubt", "rule"),
    [
        (11.0, 0.5, {}, 1.0, "uphill"),  # (1 − ½)²·(11 − 1) ≤ 10 − 1
        (11.0, 0.0, {}, 1.0, None),
        (11.0, None, {}, 1.0, None),
        (11.0, 0.5, {"ceiling": 11.0}, 1.0, "uphill"),
        (11.0, 0.5, {"ceiling": 10.9}, 1.0, None),  # earlier uphill moves have not paid
        (11.0, 0.5, {}, 2.0, None),  # in doubt of the batch only a decrease counts
        (9.0, 0.5, {"ceiling": 1.0}, 2.0, "decrease"),
        (math.nan, 0.5, {}, 1.0, None),
        (math.inf, 0.5, {}, 1.0, None),
    ],
)
def test_uphill_and_what_bars_it(f_new, cosine, old, doubt, rule):
    here = start(doubt=doubt, **old)
    assert judged(here, found(f_new, cosine=cosine), acceptance=mq.Uphill()).rule == rule


def test_uphill_against_the_best_so_far():
    """f counts too: the best may be infinite, before the first step is over."""
    uphill = mq.Uphill(against_best=True)
    near = found(11.0, cosine=0.5)  # a quarter of 10
    assert judged(start(), near, acceptance=uphill).rule == "uphill"
    assert judged(start(best=3.6), near, acceptance=uphill).rule == "uphill"
    assert judged(start(best=3.4), near, acceptance=uphill).rule is None
    assert judged(start(), found(50.0, cosine=0.5), acceptance=uphill).rule is None


LEAST = ROUNDINGS * 1e-3


@pytest.mark.parametrize(
    ("decrease", "predicted", "length", "expected"),
    [
        (0.9 * LEAST, 0.9 * LEAST, 1.0, False),  # both hidden by rounding
        (-0.9 * LEAST, 0.9 * LEAST, 1.0, False),
        (1.1 * LEAST, 0.9 * LEAST, 1.0, True),
        (0.9 * LEAST, 1.1 * LEAST, 1.0, True),
        (0.9 * LEAST, -1.1 * LEAST, 1.0, True),  # an increase is predicted
        (1.1 * LEAST, 0.9 * LEAST, 1e-9, False),  # half of the digits of θ stay: what is found is rounding
        (1.1 * LEAST, 1.1 * LEAST, 1e-9, True),
        (0.0, 3.0, 1.0, False),  # f is the same to the last digit
    ],
)
def test_what_rounding_hides(decrease, predicted, length, expected):
    step = found(10.0 - decrease, gd=-predicted, dGd=0.0, length=length)
    judgement = judged(start(), step)
    assert judgement.judged == expected
    assert math.isnan(judgement.gain) != expected
    assert judgement.predicted == pytest.approx(abs(predicted))
    # A decrease is taken all the same; an uphill move is none that could be told from rounding.
    assert judgement.rule == ("decrease" if decrease > 0 else None)
    along = judged(start(), step._replace(cosine=1.0), acceptance=mq.Uphill()).rule
    assert along == ("decrease" if decrease > 0 else "uphill" if expected else None)


def test_hardly_moving_counts_the_learning_rate():
    """‖lr·d‖ against √ε‖θ‖"""
    step = found(10 - 1.1 * LEAST, gd=-1e-5, dGd=0.0, length=1.0, theta=0.5 / math.sqrt(EPS))
    assert judged(start(), step).judged
    assert not judged(start(), step, lr=0.4).judged


def test_a_trial_that_is_not_a_number_has_failed():
    judgement = judged(start(), found(math.nan))
    assert judgement[:3] == (None, True, -math.inf)


@pytest.mark.parametrize(
    ("decrease", "predicted", "expected"),
    [(1.0, 2.0, 0.5), (-1.0, 2.0, -0.5), (1.0, 0.0, -math.inf), (1.0, -1.0, -math.inf), (math.nan, 1.0, -math.inf)],
)
def test_gain_ratio(decrease, predicted, expected):
    assert gain_ratio(decrease, predicted) == expected


def test_share_of_damping():
    """½λ·lr²·dᵀDd over the predicted decrease, known on the same data alone."""
    step = found(8.0, dDd=0.6)
    assert judged(start(), step, lam=5.0, lr=0.5).share == pytest.approx(0.5 * 5 * 0.25 * 0.6 / 1.75)
    assert judged(start(), step._replace(dDd=None), lam=5.0).share == 1
    assert judged(start(), step._replace(gd=4.0), lam=5.0).share == 1  # an increase is predicted
    assert judged(start(), step._replace(new_loss=10.0), lam=5.0).share == 1  # not judged


# ---- the averaged weights


@pytest.mark.parametrize(
    ("f", "mean_loss", "expected"),
    [
        (10.0, 5.5, 0.5),  # heights above the bound 1
        (10.0, 19.0, 2.0),
        (1 + 2 * LEAST, 1 + 6 * LEAST, 3.0),
        (1 + 0.9 * LEAST, 10.0, math.nan),  # that one of them is above the bound may be rounding
        (10.0, 1 + 0.9 * LEAST, math.nan),
        (10.0, 0.9, math.nan),
        (10.0, None, math.nan),
        (10.0, math.nan, math.nan),
        (10.0, math.inf, math.inf),
    ],
)
def test_lag(f, mean_loss, expected):
    assert lag(Level(f, 1.0, 1e-3, 1.0), mean_loss) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("past", "now", "expected"),
    [
        (None, 2.0, math.log(2)),
        (0.5, 2.0, 0.8 * 0.5 + 0.2 * math.log(2)),
        (-0.5, 1.0, -0.4),
        *((past, now, past) for past in (None, 0.5) for now in (math.nan, math.inf, 0.0, -1.0)),
    ],
)
def test_smoothed(past, now, expected):
    assert smoothed(past, now) == (None if expected is None else pytest.approx(expected))


# ---- next_lam


class Asked:
    """A schedule that tells what it was asked."""

    initial = 1.0

    def update(self, lam: float, outcome: Outcome) -> float:
        self.outcome = outcome
        return 7 * lam


def ending(rule: str = "decrease", loss: float = 8.0, d: Tensor | None = None, **others: Any) -> Ending:
    d = torch.ones(2) if d is None and rule != "rejected" else d
    judgement = Judgement("decrease", True, 0.7, 3.0, 0.2, 0.9)
    known = {"lr": 1.0, "found": found(loss), "judgement": judgement, "length": 2.0}
    return Ending(rule, d=d, loss=loss, **{**known, **others})


def test_next_lam():
    asked = Asked()
    # After a search the loss is another one: the schedule is told that of the full step.
    assert (
        next_lam(parts(schedule=asked), start(repeats=2), 3.0, ending("search", 6.0, found=found(8.0)), True, 4) == 21
    )
    assert asked.outcome == Outcome(10.0, 8.0, 0.7, "search", True, True, 4, 0.2, 0.9)
    next_lam(parts(schedule=asked), start(repeats=1), 3.0, ending(), False, 0)
    assert not asked.outcome.same_data  # once may be chance
    failed = Ending("rejected", 1.0, None, 10.0, None, FAILED)
    next_lam(parts(schedule=asked), start(), 3.0, failed, False, 0)
    assert math.isnan(asked.outcome.new_loss)
    assert asked.outcome[2:4] == (-math.inf, "rejected")
    assert math.isnan(asked.outcome.lag)


def test_lambda_stays_in_doubt_of_the_batch():
    assert next_lam(parts(schedule=Asked()), start(doubt=1.5), 3.0, ending(), False, 0) == 3


# ---- begin, concluded, report


def test_begin():
    """The same loss twice in a row is the same data; an unheard-of one is doubted, if the data change."""
    old = State(1.0, steps=HEARD, height=2.0, expected=10.0)
    level = Level(10.0 * (1 + 1e-10), 0.0, 1e-3, 1.0)
    first = begin(old, level, torch.float64)
    assert (first.repeats, first.same_data, first.doubt) == (1, False, 1.0)
    again = begin(replace(old, repeats=1), level, torch.float64)
    assert (again.repeats, again.same_data) == (2, True)
    other = begin(replace(old, repeats=5), level._replace(f=10.0 * (1 + 1e-8)), torch.float64)
    assert other.repeats == 0
    assert begin(replace(old, repeats=5), level._replace(f=10.0 * (1 + 1e-8)), torch.float32).repeats == 6
    assert begin(old, level._replace(f=40.0), torch.float64).doubt == pytest.approx(2)
    assert begin(replace(old, repeats=5, expected=40.0), level._replace(f=40.0), torch.float64).doubt == 1


def conclude(now: Start, end: Ending, lam: float = 0.5, used: float = 1.0) -> tuple[State, bool]:
    return concluded(parts(), now, end, lam, used, torch.zeros(2), 3)


def test_concluded():
    old = start(repeats=4, steps=6, accepted=5, best=9.0, stride=0.3, height=2.0)
    state, converged = conclude(old, ending(lr=0.25))
    assert not converged
    assert (state.lam, state.steps, state.accepted, state.repeats, state.unjudged) == (0.5, 7, 6, 4, 3)
    assert (state.best, state.expected, state.stride) == (8.0, 8.0, 0.5)
    assert (state.height, state.doubted) == (9.0, False)
    rejected, _ = conclude(old, ending("rejected", 10.0))
    assert (rejected.accepted, rejected.stride, rejected.best) == (5, 0.3, 9.0)
    doubted, _ = conclude(old._replace(doubt=2.0), ending())
    assert (doubted.accepted, doubted.stride, doubted.height, doubted.doubted) == (6, 0.3, 2.0, True)


def test_concluded_with_the_lag_of_late():
    """On the same data there is none: the average starts anew."""
    assert conclude(start(), ending())[0].lag == pytest.approx(math.log(0.9))
    assert conclude(start(lag=1.0), ending())[0].lag == pytest.approx(0.8 + 0.2 * math.log(0.9))
    assert conclude(start(lag=1.0, repeats=1), ending())[0].lag == pytest.approx(0.8 + 0.2 * math.log(0.9))
    assert conclude(start(lag=1.0, repeats=2), ending())[0].lag is None
    failed = Ending("rejected", 1.0, None, 10.0, None, FAILED)
    assert conclude(start(lag=1.0), failed)[0].lag == 1.0


def test_an_uphill_move_is_a_loan():
    now = start(repeats=2)
    state, _ = concluded(parts(), now, ending("uphill", 11.0), 1.0, 1.0, torch.arange(2.0), 0)
    assert torch.equal(state.haven, torch.arange(2.0))
    assert (state.haven_loss, state.away) == (10.0, 1)
    assert concluded(parts(), now._replace(repeats=1), ending("uphill", 11.0), 1.0, 1.0, torch.ones(2), 0)[0].away == 0


QUIET = {"judgement": Judgement("decrease", False, math.nan, 0.9 * FAINT * 1e-3, 1.0), "length": 1.0}
LITTLE = 10.0 - 0.5 * FAINT * 1e-3


@pytest.mark.parametrize(
    ("change", "idle"),
    [
        ({}, 4),
        ({"repeats": 1}, 0),  # on changing batches nothing converges
        ({"predicted": 1.1 * FAINT * 1e-3}, 0),
        ({"loss": 10.0 - 1.1 * FAINT * 1e-3}, 0),
        ({"idle_from": 10.0 + 0.6 * FAINT * 1e-3}, 0),  # all in all they have found something
        ({"predicted": math.inf, "low": 10.0 - 0.9 * FAINT * 1e-3}, 4),  # there is nothing left to find
    ],
)
def test_idle_steps(change, idle):
    now = start(repeats=change.get("repeats", 2), idle=3, idle_from=change.get("idle_from", 10.0))
    now = now._replace(level=now.level._replace(low=change.get("low", 1.0)))
    judgement = QUIET["judgement"]._replace(predicted=change.get("predicted", QUIET["judgement"].predicted))
    state, _ = conclude(now, ending("decrease", change.get("loss", LITTLE), judgement=judgement))
    assert state.idle == idle


def test_the_first_idle_step_says_where_they_began():
    state, _ = conclude(start(repeats=2, idle=0, idle_from=99.0), ending("decrease", LITTLE, **QUIET))
    assert (state.idle, state.idle_from) == (1, 10.0)


def test_convergence_after_idle_steps():
    """With a λ above λ₀ that may be why they predict so little."""
    end = ending("decrease", LITTLE, **QUIET)
    assert conclude(start(repeats=9, idle=IDLE - 1, idle_from=10.0), end)[1]
    assert not conclude(start(repeats=9, idle=IDLE - 2, idle_from=10.0), end)[1]
    assert not conclude(start(repeats=9, idle=IDLE - 1, idle_from=10.0), end, used=1.1)[1]


def test_report():
    now, loss = start(), resolve("mse")
    step = report(loss, now, ending("search", 6.0, lr=0.5), 0.3, ["one", "two"], True)
    assert (step.accepted, step.rule, step.lam, step.lr, step.gain) == (True, "search", 0.3, 0.5, 0.7)
    assert (step.note, step.slope, step.converged) == ("one; two", 3.0, True)
    assert (step.loss, step.new_loss) == (loss.report(10.0, 1.0), loss.report(6.0, 1.0))
    failed = report(loss, now, Ending("rejected", 1.0, None, 10.0, None, FAILED), 0.3, [], False)
    assert not failed.accepted
    assert math.isnan(failed.slope)
    assert math.isnan(failed.averaged_loss)
    assert math.isnan(step.averaged_loss)
    averaged = ending(found=found(8.0, mean_loss=6.0))
    assert report(resolve("mse"), now, averaged, 0.3, [], False).averaged_loss == loss.report(6.0, 1.0)
    rounded = ending(found=found(8.0, gDg=-1e-20))
    assert report(loss, now, rounded, 0.3, [], False).slope == 0


def test_readings_and_their_numbers():
    numbers = torch.arange(8.0).unbind()
    readings = Readings(*numbers[:6], None, *numbers[6:])
    assert readings.read([float(t) for t in readings.tensors()]) == Found(0, 1, 2, 3, 4, 5, None, 6, 7)
    without = Readings(*numbers[:6], numbers[6], None, numbers[7])
    assert without.read([float(t) for t in without.tensors()]) == Found(0, 1, 2, 3, 4, 5, 6, None, 7)


# ---- propose


def proposed(
    old: State, lam: float, lr: float, same_data: bool, doubt: float = 1.0, **others: Any
) -> tuple[Proposal, reference.Quadratic, Linearization]:
    model, x, y = problem()
    expected = reference.quadratic(model, "mse", x, y)
    lin, some = mq.linearize(model, "mse", x, y), parts(damping=mq.MaxDiagonal(), **others)
    matrices = damped(some, mq.Dense().represent(lin), old, same_data)
    return propose(some, lin, matrices, lam, lr, old, same_data, doubt), expected, lin


def test_propose():
    previous = torch.linspace(-1, 1, 27)
    proposal, expected, lin = proposed(State(1.0, previous=previous), 0.3, 0.5, True)
    (batch,), model, D = lin.batches, lin.objective.model, expected.diagonal()
    d = -torch.linalg.solve(expected.G + 0.3 * D.diag(), expected.g)
    assert error(proposal.plain, d) < 1e-10
    assert proposal.d is proposal.plain
    assert error(flat(model), lin.theta + 0.5 * d) < 1e-10  # the model is there
    found = proposal.readings
    assert error(found.new_loss, nn.functional.mse_loss(model(batch.inputs), batch.targets)) < 1e-12
    assert error(found.gd, expected.g @ d) < 1e-10
    assert error(found.dGd, d @ expected.G @ d) < 1e-10
    assert error(found.gDg, expected.g @ (expected.g / D)) < 1e-10
    assert error(found.length, d.norm()) < 1e-10
    assert error(found.theta, lin.theta.norm()) < 1e-12
    assert error(found.dDd, d @ (D * d)) < 1e-10
    assert error(found.cosine, torch.cosine_similarity(d, previous, 0)) < 1e-10


def test_what_is_not_asked_for_is_not_there():
    proposal = proposed(State(1.0), 0.3, 1.0, False)[0]
    assert proposal.readings.dDd is None
    assert proposal.readings.cosine is None
    assert proposal.readings.mean_loss is None
    assert len(proposal.readings.tensors()) == 6
    assert proposed(State(1.0, mean=torch.zeros(27)), 0.3, 1.0, True)[0].readings.mean_loss is None


@pytest.mark.parametrize("lr", [1.0, 0.25])
def test_the_loss_of_the_averaged_weights(lr):
    """Of the whole of them, whatever the learning rate; the model ends where the step goes."""
    mean = torch.linspace(-0.4, 0.6, 27)
    proposal, _, lin = proposed(State(1.0, mean=mean), 0.3, lr, False)
    (batch,), model = lin.batches, lin.objective.model
    assert error(flat(model), lin.theta + lr * proposal.d) < 1e-12
    there = nn.functional.mse_loss(model(batch.inputs), batch.targets)
    assert error(proposal.readings.new_loss, there) < 1e-12
    nn.utils.vector_to_parameters(mean, model.parameters())
    assert error(proposal.readings.mean_loss, nn.functional.mse_loss(model(batch.inputs), batch.targets)) < 1e-12


def test_momentum_refines_the_step():
    """The cosine is that of the plain step, the model's decrease that of the refined one."""

    class Backwards:
        recordable = True

        def refine(self, newton: Tensor, previous: Tensor | None, H: object, same_data: bool) -> Tensor:
            assert previous is not None
            return newton - 2 * previous

    previous = torch.linspace(-1, 1, 27)
    proposal, expected, _ = proposed(State(1.0, previous=previous), 0.3, 1.0, True, momentum=Backwards())
    assert error(proposal.d, proposal.plain - 2 * previous) < 1e-12
    assert error(proposal.readings.gd, expected.g @ proposal.d) < 1e-10
    assert error(proposal.readings.cosine, torch.cosine_similarity(proposal.plain, previous, 0)) < 1e-10


@pytest.mark.parametrize(("stride", "shorter"), [(1e-3, True), (math.inf, False), (1e3, False)])
def test_in_doubt_a_step_is_shorter_than_the_last_one(stride, shorter):
    proposal = proposed(State(1.0, stride=stride), 0.3, 1.0, False, doubt=4.0)[0]
    assert error(proposal.d / proposal.d.norm(), proposal.plain / proposal.plain.norm()) < 1e-12
    assert float(proposal.d.norm()) == pytest.approx(stride / 2 if shorter else float(proposal.plain.norm()))
    assert float(proposal.readings.length) == pytest.approx(float(proposal.d.norm()))


def test_damped():
    """D is what the damping makes of the last one, A has no zeros."""
    model, x, y = problem()
    G = mq.Dense().represent(mq.linearize(model, "mse", x, y))
    n = len(flat(model))

    class Zeros:
        def update(self, D: mq.Metric | None, G: mq.Curvature) -> mq.Metric:
            self.old = D
            return mq.Diagonal.of(torch.arange(n).clamp(max=2).double(), G.parameters.sizes)

    zeros, last = Zeros(), mq.Diagonal(torch.ones(()))
    matrices = damped(parts(damping=zeros), G, State(1.0, D=last), False)
    assert zeros.old is last
    assert matrices.G is G
    assert matrices.D.entries(G.parameters.sizes)[:3].tolist() == [0, 1, 2]
    assert matrices.A.entries(G.parameters.sizes)[:3].tolist() == [1, 1, 2]


def test_check_metric():
    with pytest.raises(TypeError, match=r"Mine\.update returned Tensor.*mq\.Diagonal"):
        check_metric(torch.ones(3), "Mine", [3])
    with pytest.raises(ValueError, match=r"Mine\.update .*\[3, 2\]"):
        check_metric(mq.Diagonal.of(torch.ones(5), [2, 3]), "Mine", [3, 2])
    check_metric(mq.Diagonal.of(torch.ones(5), [3, 2]), "Mine", [3, 2])


# ---- what the next step is left with


def test_remembered():
    d = torch.arange(3.0)
    assert remembered(parts(), d, 0.5) is None
    for some in (parts(acceptance=mq.Uphill()), parts(momentum=mq.AdaptiveMomentum())):
        assert remembered(some, d, 1.0) is d
        assert remembered(some, d, 0.5).tolist() == [0, 0.5, 1]


class Settling(mq.Diagonal):
    """A metric that tells how many steps it was told of."""

    def settled(self, steps: int, ranks: Ranks = ALONE) -> mq.Metric:
        return mq.Diagonal(torch.tensor(float(steps)))


def test_kept():
    model, x, y = problem()
    G = mq.Dense(inertia=0.5).represent(mq.linearize(model, "mse", x, y))
    D, before = mq.Diagonal(torch.tensor(2.0)), mq.Diagonal(torch.tensor(1.0))
    matrices, state = Matrices(G, D, D), State(1.0, D=before, past={"old": torch.zeros(())})
    some, end = parts(acceptance=mq.Uphill()), ending(d=torch.arange(2.0), lr=0.5)
    G.recall(None, False)
    after = kept(some, state, matrices, end, start())
    assert after.previous.tolist() == [0, 0.5]
    assert after.D is D
    assert after.past["G"] is G.G
    settling = Settling(torch.tensor(3.0))
    assert kept(some, replace(state, steps=7), Matrices(G, settling, settling), end, start()).D.scale == 7
    doubted = kept(some, state, matrices, end, start(doubt=2.0))  # one batch must not undo what others have taught
    assert doubted.previous.tolist() == [0, 0.5]
    assert doubted.D is before
    assert doubted.past is state.past


def test_with_mean():
    model = nn.Linear(2, 1)
    parameters = mq.linearize(model, "mse", torch.randn(3, 2), torch.randn(3, 1)).parameters
    theta, old = flat(model), torch.zeros(3)
    state = State(1.0, mean=old, points=3)
    assert with_mean(parts(), state, parameters, False) is state
    polyak = with_mean(parts(average=mq.Polyak()), state, parameters, True)
    assert error(polyak.mean, theta / 4) < 1e-12
    assert polyak.points == 4
    assert not old.any()
    for first in (
        with_mean(parts(average=mq.Polyak()), State(1.0), parameters, False),
        with_mean(parts(average=mq.EMA()), state, parameters, True),  # on the same data it starts anew
    ):
        assert torch.equal(first.mean, theta)
        assert first.points == 1
    ema = with_mean(parts(average=mq.EMA(0.2)), state, parameters, False)
    assert error(ema.mean, 0.8 * theta) < 1e-12
