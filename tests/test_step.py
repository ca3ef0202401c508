"""The pieces of a step: what is proposed as a function of tensors, what is judged as a function of numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.curvature.contract import Damped
from marquardt.jacobian.linearization import Linearization
from marquardt.jacobian.objective import Level
from marquardt.losses import resolve
from marquardt.parts.judging import Outcome
from marquardt.policies import Ending, Found, Judgement, Start
from marquardt.policies.convergence import IDLE, Convergence
from marquardt.policies.outliers import HEARD, Outliers
from marquardt.policies.recent import Recent
from marquardt.policies.same_data import SameData
from marquardt.ranks import ALONE, Ranks
from marquardt.step import (
    FAILED,
    ROUNDINGS,
    Matrices,
    Parts,
    State,
    Step,
    attempt,
    averaged,
    begin,
    blame_gradient,
    check_metric,
    conclude,
    damped,
    ended,
    found_of,
    gain_ratio,
    judge,
    kept,
    next_lam,
    present,
    propose,
    remembered,
    report,
    tried,
)
from support import reference
from support.parts import Never, ending, flat, found, start
from support.reference import error
from support.steps import PLAIN, problem

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


def judged(
    of: Found, lam: float = 1.0, lr: float = 1.0, old: State = State(1.0), doubt: float = 1.0, **others: Any
) -> Judgement:
    return judge(parts(**others), old, start(best=old.best, doubt=doubt), of, lam, lr)


@pytest.mark.parametrize("lr", [1.0, 0.5])
def test_a_decrease(lr):
    predicted = 4 * lr - lr**2  # −lr·gᵀd − ½lr²·dᵀGd
    rule, was_judged, *numbers = judged(found(8.0, mean_loss=7.0), lr=lr)
    assert (rule, was_judged) == ("decrease", True)
    assert numbers == pytest.approx([2 / predicted, predicted, 1.0, 6 / 9])


def test_an_increase():
    rule, was_judged, gain, predicted, *_ = judged(found(11.5))
    assert (rule, was_judged, gain, predicted) == (None, True, pytest.approx(-0.5), 3.0)


@pytest.mark.parametrize(
    ("f_new", "cosine", "late", "doubt", "rule"),
    [
        (11.0, 0.5, math.inf, 1.0, "uphill"),  # (1 − ½)²·(11 − 1) ≤ 10 − 1
        (11.0, 0.0, math.inf, 1.0, None),
        (11.0, None, math.inf, 1.0, None),
        (11.0, 0.5, 11.0, 1.0, "uphill"),
        (11.0, 0.5, 10.9, 1.0, None),  # more than the best loss was of late
        (11.0, 0.5, math.inf, 2.0, None),  # in doubt of the batch only a decrease counts
        (9.0, 0.5, 1.0, 2.0, "decrease"),
        (math.nan, 0.5, math.inf, 1.0, None),
        (math.inf, 0.5, math.inf, 1.0, None),
    ],
)
def test_uphill_and_what_bars_it(f_new, cosine, late, doubt, rule):
    here, acceptance = State(1.0, recent=Recent(late)), mq.Uphill(of_late=True)
    assert judged(found(f_new, cosine=cosine), old=here, doubt=doubt, acceptance=acceptance).rule == rule


class Blind:
    """Accepts whatever it is shown."""

    looks_back = False

    def judge(self, trial):
        return "uphill"


@pytest.mark.parametrize(("doubt", "rule"), [(1.0, "uphill"), (2.0, None)])
def test_what_a_policy_bars_no_acceptance_lets_through(doubt, rule):
    assert judged(found(11.0, cosine=0.5), doubt=doubt, acceptance=Blind()).rule == rule


def test_uphill_against_the_best_so_far():
    """f counts too: the best may be infinite, before the first step is over."""
    uphill = mq.Uphill(against_best=True)
    near = found(11.0, cosine=0.5)  # a quarter of 10
    assert judged(near, acceptance=uphill).rule == "uphill"
    assert judged(near, old=State(1.0, best=3.6), acceptance=uphill).rule == "uphill"
    assert judged(near, old=State(1.0, best=3.4), acceptance=uphill).rule is None
    assert judged(found(50.0, cosine=0.5), acceptance=uphill).rule is None


def test_heights_of_a_trial_are_above_the_floor():
    """Not above the bound, which may be far below, or none."""
    here = start(low=-math.inf, floor=9.5)  # ¼·(11 − 9.5) ≤ 10 − 9.5
    uphill, near = parts(acceptance=mq.Uphill()), found(11.0, cosine=0.5)
    assert judge(uphill, State(1.0), here, near, 1.0, 1.0).rule == "uphill"
    assert judge(uphill, State(1.0), here._replace(floor=9.9), near, 1.0, 1.0).rule is None


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
    judgement = judged(step)
    assert judgement.judged == expected
    assert math.isnan(judgement.gain) != expected
    assert judgement.predicted == pytest.approx(abs(predicted))
    # A decrease is taken all the same; an uphill move is none that could be told from rounding.
    assert judgement.rule == ("decrease" if decrease > 0 else None)
    along = judged(step._replace(cosine=1.0), acceptance=mq.Uphill()).rule
    assert along == ("decrease" if decrease > 0 else "uphill" if expected else None)


def test_hardly_moving_counts_the_learning_rate():
    """‖lr·d‖ against √ε‖θ‖"""
    step = found(10 - 1.1 * LEAST, gd=-1e-5, dGd=0.0, length=1.0, theta=0.5 / math.sqrt(EPS))
    assert judged(step).judged
    assert not judged(step, lr=0.4).judged


def test_a_trial_that_is_not_a_number_has_failed():
    judgement = judged(found(math.nan))
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
    assert judged(step, lam=5.0, lr=0.5).share == pytest.approx(0.5 * 5 * 0.25 * 0.6 / 1.75)
    assert judged(step._replace(dDd=None), lam=5.0).share == 1
    assert judged(step._replace(gd=4.0), lam=5.0).share == 1  # an increase is predicted
    assert judged(step._replace(new_loss=10.0), lam=5.0).share == 1  # not judged


# ---- next_lam


class Asked:
    """A schedule that tells what it was asked."""

    initial = 1.0

    def update(self, lam: float, outcome: Outcome) -> float:
        self.outcome = outcome
        return 7 * lam


def test_next_lam():
    asked = Asked()
    # After a search the loss is another one: the schedule is told that of the full step.
    end = ending("search", 6.0, found=found(8.0), unjudged=4)
    assert next_lam(parts(schedule=asked), start(repeats=2), 3.0, end, True) == 21
    assert asked.outcome == Outcome(10.0, 8.0, 0.7, "search", True, True, 4, 0.2, 0.9)
    next_lam(parts(schedule=asked), start(repeats=1), 3.0, ending(), False)
    assert not asked.outcome.same_data  # once may be chance
    failed = Ending("rejected", 1.0, None, 10.0, None, FAILED)
    next_lam(parts(schedule=asked), start(), 3.0, failed, False)
    assert math.isnan(asked.outcome.new_loss)
    assert asked.outcome[2:4] == (-math.inf, "rejected")
    assert math.isnan(asked.outcome.lag)


def test_lambda_stays_in_doubt_of_the_batch():
    assert next_lam(parts(schedule=Asked()), start(doubt=1.5), 3.0, ending(), False) == 3


def test_lambda_does_not_fall_after_a_step_that_was_too_long():
    class Falls(Asked):
        def update(self, lam: float, outcome: Outcome) -> float:
            return lam / 7

    for end in (ending("search"), ending(cut=True)):
        assert next_lam(parts(schedule=Falls()), start(), 7.0, end, False) == 7
    assert next_lam(parts(schedule=Falls()), start(), 7.0, ending(), False) == 1


# ---- begin, conclude, report


def test_begin():
    """The same loss twice in a row is the same data; an unheard-of one is doubted, if the data change."""
    theta, level = torch.zeros(2), Level(10.0 * (1 + 1e-10), 0.0, 1e-3, 1.0)

    def begun(
        repeats: int = 0, expected: float = 10.0, level: Level = level, dtype: torch.dtype = theta.dtype
    ) -> Start:
        old = State(1.0, steps=HEARD, same_data=SameData(repeats, expected), outliers=Outliers(2.0))
        return begin(old, level, theta.to(dtype))

    first = begun()
    assert (first.repeats, first.same_data, first.doubt) == (1, False, 1.0)
    again = begun(1)
    assert (again.repeats, again.same_data) == (2, True)
    other = begun(5, level=level._replace(f=10.0 * (1 + 1e-8)))
    assert other.repeats == 0
    assert begun(5, level=level._replace(f=10.0 * (1 + 1e-8)), dtype=torch.float32).repeats == 6
    assert begun(level=level._replace(f=40.0)).doubt == pytest.approx(2)
    assert begun(0, 40.0, level._replace(f=40.0)).doubt == pytest.approx(2)  # once may be chance
    assert begun(1, 40.0, level._replace(f=40.0)).doubt == 1


class Objective:
    given, parameters = resolve("mse"), None


def done(old: State, now: Start, end: Ending, lam: float = 0.5, used: float = 1.0) -> tuple[Step, State]:
    left = {} if end.d is None else {"previous": end.d}
    return conclude(parts(), Objective(), old, now, end, lam, used, {**left, "decay": 0.0}, ["one"])


def test_conclude():
    old = State(1.0, steps=6, accepted=5, best=9.0, outliers=Outliers(2.0, 0.3))
    now = start(repeats=4, best=9.0)
    step, state = done(old, now, ending(lr=0.25, unjudged=3))
    assert (step.converged, step.note) == (False, "one")
    assert (state.lam, state.steps, state.accepted) == (0.5, 7, 6)
    assert (state.same_data.repeats, state.convergence.unjudged) == (4, 3)
    assert (state.best, state.same_data.expected, state.outliers.stride) == (8.0, 8.0, 0.5)
    assert (state.outliers.height, state.outliers.doubted) == (9.0, False)
    _, rejected = done(old, now, ending("rejected", 10.0))
    assert (rejected.accepted, rejected.outliers.stride, rejected.best) == (5, 0.3, 9.0)
    _, doubted = done(old, now._replace(doubt=2.0), ending())
    assert (doubted.accepted, doubted.outliers) == (6, Outliers(2.0, 0.3, True))


def test_a_run_that_has_converged_says_so_and_nothing_else():
    quiet = ending("decrease", 10.0 - 1e-3, judgement=Judgement("decrease", False, math.nan, 1e-3, 1.0))
    old = State(1.0, convergence=Convergence(IDLE - 1, 10.0))
    step, _ = done(old, start(repeats=9), quiet)
    assert step.converged
    assert step.note.startswith("converged")
    assert not done(old, start(repeats=9), quiet, used=1.1)[0].converged


def test_report():
    now, loss = start(), resolve("mse")
    step = report(loss, now, ending("search", 6.0, lr=0.5), 0.3, ["one", "two"], False)
    assert (step.accepted, step.rule, step.lam, step.lr, step.gain) == (True, "search", 0.3, 0.5, 0.7)
    assert (step.note, step.slope, step.converged) == ("one; two", 3.0, False)
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
    readings = [*numbers[:6], None, *numbers[6:]]
    assert found_of(readings, [float(t) for t in present(readings)]) == Found(0, 1, 2, 3, 4, 5, None, 6, 7)
    without = [*numbers[:6], numbers[6], None, numbers[7]]
    assert found_of(without, [float(t) for t in present(without)]) == Found(0, 1, 2, 3, 4, 5, 6, None, 7)


# ---- propose


def proposed(
    old: State, lam: float, lr: float, same_data: bool, doubt: float = 1.0, **others: Any
) -> tuple[SimpleNamespace, SimpleNamespace, reference.Quadratic, Linearization]:
    model, x, y = problem()
    expected = reference.quadratic(model, "mse", x, y)
    lin, some = mq.linearize(model, "mse", x, y), parts(damping=mq.MaxDiagonal(), **others)
    matrices = damped(some, mq.Dense().represent(lin), old, same_data)
    H, theta = Damped(matrices.G, lam * matrices.A), flat(model)
    d, plain, uncut = propose(some, H, old, lr, same_data, doubt)
    assert torch.equal(flat(model), theta)  # nothing has moved
    readings = tried(lin, matrices, H, d, plain, uncut, lr, old, same_data)
    return (
        SimpleNamespace(d=d, plain=plain),
        SimpleNamespace(**dict(zip(Found._fields, readings, strict=True))),
        expected,
        lin,
    )


def test_propose():
    previous = torch.linspace(-1, 1, 27)
    proposal, readings, expected, lin = proposed(State(1.0, previous=previous), 0.3, 0.5, True)
    (batch,), model, D = lin.batches, lin.objective.model, expected.diagonal()
    d = -torch.linalg.solve(expected.G + 0.3 * D.diag(), expected.g)
    assert error(proposal.plain, d) < 1e-10
    assert proposal.d is proposal.plain
    assert error(flat(model), lin.theta + 0.5 * d) < 1e-10  # the model is there
    found = readings
    assert error(found.new_loss, nn.functional.mse_loss(model(batch.inputs), batch.targets)) < 1e-12
    assert error(found.gd, expected.g @ d) < 1e-10
    assert error(found.dGd, d @ expected.G @ d) < 1e-10
    assert error(found.gDg, expected.g @ (expected.g / D)) < 1e-10
    assert error(found.length, d.norm()) < 1e-10
    assert error(found.theta, lin.theta.norm()) < 1e-12
    assert error(found.dDd, d @ (D * d)) < 1e-10
    assert error(found.cosine, torch.cosine_similarity(d, previous, 0)) < 1e-10


def test_what_is_not_asked_for_is_not_there():
    readings = proposed(State(1.0), 0.3, 1.0, False)[1]
    assert readings.dDd is None
    assert readings.cosine is None
    assert readings.mean_loss is None
    assert len(present(list(vars(readings).values()))) == 6
    assert proposed(State(1.0, mean=torch.zeros(27)), 0.3, 1.0, True)[1].mean_loss is None


@pytest.mark.parametrize("lr", [1.0, 0.25])
def test_the_loss_of_the_averaged_weights(lr):
    """Of the whole of them, whatever the learning rate; the model ends where the step goes."""
    mean = torch.linspace(-0.4, 0.6, 27)
    proposal, readings, _, lin = proposed(State(1.0, mean=mean), 0.3, lr, False)
    (batch,), model = lin.batches, lin.objective.model
    assert error(flat(model), lin.theta + lr * proposal.d) < 1e-12
    there = nn.functional.mse_loss(model(batch.inputs), batch.targets)
    assert error(readings.new_loss, there) < 1e-12
    nn.utils.vector_to_parameters(mean, model.parameters())
    assert error(readings.mean_loss, nn.functional.mse_loss(model(batch.inputs), batch.targets)) < 1e-12


def test_momentum_refines_the_step():
    """The cosine is that of the plain step, the model's decrease that of the refined one."""

    class Backwards:
        recordable = True

        def refine(self, newton: Tensor, previous: Tensor | None, H: object, same_data: bool) -> Tensor:
            assert previous is not None
            return newton - 2 * previous

    previous = torch.linspace(-1, 1, 27)
    proposal, readings, expected, _ = proposed(State(1.0, previous=previous), 0.3, 1.0, True, momentum=Backwards())
    assert error(proposal.d, proposal.plain - 2 * previous) < 1e-12
    assert error(readings.gd, expected.g @ proposal.d) < 1e-10
    assert error(readings.cosine, torch.cosine_similarity(proposal.plain, previous, 0)) < 1e-10


@pytest.mark.parametrize(("stride", "shorter"), [(1e-3, True), (math.inf, False), (1e3, False)])
def test_in_doubt_a_step_is_shorter_than_the_last_one(stride, shorter):
    proposal, readings, *_ = proposed(State(1.0, outliers=Outliers(0.0, stride)), 0.3, 1.0, False, doubt=4.0)
    assert error(proposal.d / proposal.d.norm(), proposal.plain / proposal.plain.norm()) < 1e-12
    assert float(proposal.d.norm()) == pytest.approx(stride / 2 if shorter else float(proposal.plain.norm()))
    assert float(readings.length) == pytest.approx(float(proposal.d.norm()))


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


# ---- one λ: what a search along the line may try, and what is an error instead of a failed step


class Recorded:
    """A line search that asks for some rates and takes the largest that has a loss."""

    along_step = False

    def __init__(self, *rates: float) -> None:
        self.rates = rates

    def search(self, along, loss, lr, tried):
        self.tried, self.losses = tried, along(self.rates)
        found = [(rate, f) for rate, f in zip(self.rates, self.losses, strict=True) if math.isfinite(f)]
        return max(found) if found else None


def attempted(search: Recorded, radius: float | None, lr: float = 1.0, doubt: float = 1.0, rounding: float = 0.0):
    model, x, y = problem()
    some = Parts(**{**PLAIN, "rows": mq.Exact(), "acceptance": Never(), "line_search": search, "radius": radius})
    lin: Linearization = mq.linearize(model, "mse", x, y)
    G = mq.Dense().represent(lin)
    old, now = State(1.0), begin(State(1.0), lin.level._replace(rounding=rounding), lin.theta)
    with torch.no_grad():
        matrices = damped(some, G, old, False)
        return attempt(some, lin, matrices, old, now._replace(doubt=doubt), 0.1, lr, [])


@pytest.mark.parametrize("lr", [1.0, 0.5])
def test_a_search_sees_no_point_beyond_the_radius(lr):
    search = Recorded(0.1 * lr, lr, 1.1 * lr, 4 * lr)
    end = attempted(search, 1e-2, lr)
    assert end.rule == "search"
    assert [math.isfinite(f) for f in search.losses] == [True, True, False, False]
    assert end.lr == lr
    assert end.lr * end.length == pytest.approx(1e-2, rel=1e-10)


def test_without_a_radius_it_sees_all():
    search = Recorded(0.1, 1.0, 1.1, 4.0)
    assert attempted(search, None).lr == 4.0
    assert all(math.isfinite(f) for f in search.losses)


def test_the_point_that_failed_is_told():
    """Without momentum the plain step is the step, cut back or not."""
    for radius in (None, 1e-2):
        search = Recorded(0.5)
        end = attempted(search, radius)
        assert search.tried == (1.0, end.found.new_loss)


@pytest.mark.parametrize("why", [{"doubt": 2.0}, {"rounding": 1e9}, {"lr": 0.0}], ids=str)
def test_there_is_no_search_for_what_the_step_cannot_tell(why):
    """In doubt of the batch, for a decrease that rounding hides, and where nothing moves."""
    search = Recorded(0.5)
    assert attempted(search, None, **why).rule == "rejected"
    assert not hasattr(search, "tried")


def test_weights_that_are_rounded_to_what_they_were_go_on():
    """As θ does, of which they are the rounding: in time they follow."""
    d, stays = torch.ones(2), found(10.0)
    for coarse, rule in ((True, "decrease"), (False, "rejected")):
        end = ended(parts(), State(1.0), start(), stays, d, 1.0, 1.0, 0, coarse)
        assert (end.rule, end.d is d) == (rule, coarse)
    assert ended(parts(), State(1.0), start(), found(11.0), d, 1.0, 1.0, 0, True).rule == "rejected"


def test_a_gradient_that_is_not_finite_is_blamed_on_its_parameter():
    model = nn.Linear(2, 1)
    parameters = mq.linearize(model, "mse", torch.randn(3, 2), torch.randn(3, 1)).parameters
    blame_gradient(parameters, torch.ones(3))
    with pytest.raises(ValueError, match="'bias'"):
        blame_gradient(parameters, torch.tensor([1.0, 2.0, math.inf]))


# ---- what the next step is left with


def test_remembered():
    d = torch.arange(3.0)
    assert remembered(parts(), d, 0.5) is None
    for some in (parts(acceptance=mq.Uphill()), parts(momentum=mq.AdaptiveMomentum())):
        assert remembered(some, d, 1.0) is d
        assert remembered(some, d, 0.5).tolist() == [0, 0.5, 1]


class Settling(mq.Diagonal):
    """A metric that tells how many steps it was told of."""

    turns = True

    def settled(self, steps: int, ranks: Ranks = ALONE) -> mq.Metric:
        return mq.Diagonal(torch.tensor(float(steps)))


def test_kept():
    model, x, y = problem()
    G = mq.Dense(inertia=0.5).represent(mq.linearize(model, "mse", x, y))
    D = mq.Diagonal(torch.tensor(2.0))
    matrices = Matrices(G, D, D)
    some, end = parts(acceptance=mq.Uphill()), ending(d=torch.arange(2.0), lr=0.5)
    G.recall(None, False)
    after = kept(some, matrices, start(), end)
    assert after["previous"].tolist() == [0, 0.5]
    assert after["D"] is D
    assert after["past"]["G"] is G.G
    settling = Settling(torch.tensor(3.0))
    assert kept(some, Matrices(G, settling, settling), start(steps=6), end)["D"].scale == 7
    doubted = kept(some, matrices, start(doubt=2.0), end)  # one batch must not undo what others have taught
    assert doubted.pop("previous").tolist() == [0, 0.5]
    assert not doubted
    assert kept(some, matrices, start(), ending("rejected")) == {}


def test_averaged():
    theta, old = torch.tensor([1.0, -2.0, 3.0]), torch.zeros(3)
    state = State(1.0, mean=old, points=3)
    polyak = averaged(mq.Polyak(), state, theta, start(repeats=2))
    assert error(polyak["mean"], theta / 4) < 1e-12
    assert polyak["points"] == 4
    assert not old.any()
    for first in (
        averaged(mq.Polyak(), State(1.0), theta, start()),
        averaged(mq.EMA(), state, theta, start(repeats=2)),  # on the same data it starts anew
    ):
        assert torch.equal(first["mean"], theta)
        assert first["points"] == 1
    ema = averaged(mq.EMA(0.2), state, theta, start())
    assert error(ema["mean"], 0.8 * theta) < 1e-12
