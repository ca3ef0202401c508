"""The step, told once: `take` is the algorithm box of LM, and `attempt` is one λ of it. Their pieces follow in order.

Between `begin` and the judgement `damped`, `propose` and `tried` work on tensors, all the rest on numbers. A step that
was recorded as a CUDA graph is therefore the same step: these three are recorded, and the measurements of a replay go
through `judge`, `next_lam` and `conclude` like any others. A recording cannot branch on the contents of a tensor:
recorded code asks through `deferred.ask`, and a momentum that has to read numbers declares it (`recordable`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .curvature.contract import Curvature, Damped, Past, Representation
from .curvature.cost import Plan
from .curvature.direct import FactorizationError
from .deferred import floats
from .jacobian.linearization import Linearization, Trials
from .jacobian.objective import Level, Objective, Rows
from .losses import Loss
from .metric import KINDS, Metric
from .model.parameters import Parameters
from .parts.direction import Damping, Momentum
from .parts.judging import Acceptance, Average, LineSearch, Outcome, Schedule, Trial
from .policies import POLICIES, RISING, Ending, Judgement, Measurements, Policies, Policy, Start
from .policies.lag import ratio
from .policies.outliers import UNHEARD
from .tolerances import SAME_LOSS

# A decrease of at least this many roundings of the loss counts as a decrease.
ROUNDINGS = 4
CONVERGED = "converged: no decrease is left that could be told from the rounding of the loss"
FAILED = Judgement(None, True, -math.inf, math.inf, 1.0)

T = TypeVar("T")


@dataclass(frozen=True)
class Parts:
    """The parts an optimizer is assembled from."""

    curvature: Representation
    rows: Rows | None  # None: chosen with the curvature
    damping: Damping
    schedule: Schedule
    momentum: Momentum | None
    acceptance: Acceptance
    line_search: LineSearch | None
    average: Average | None
    radius: float | None = None  # ‖lr·d‖ at most

    @property
    def remembers(self) -> bool:
        """Whether the next step needs this one: for momentum, or to judge uphill moves."""
        return self.momentum is not None or self.acceptance.looks_back


@dataclass(frozen=True)
class Step:
    """What one step did.

    >>> step = mq.LM(model, "mse").step(x, y)
    >>> step.accepted, step.rule, step.new_loss < step.loss
    (True, 'decrease', True)
    """

    loss: float  # f before
    new_loss: float  # f after the step; f before it if it was rejected
    accepted: bool  # whether the weights have moved
    rule: str  # "decrease" | "uphill" | "search" | "rejected"
    lam: float  # λ of this step
    lr: float  # learning rate of this step; after a line search the one it found
    gain: float  # ρ, actual over predicted decrease of the full step; NaN if both are below the rounding of the loss
    note: str = ""  # escalations, in words
    slope: float = math.nan  # √(gᵀD⁻¹g): the length of the gradient in the metric of the damping
    converged: bool = False  # on the same data: no decrease is left that could be told from the rounding of the loss
    averaged_loss: float = math.nan  # on changing batches, f of the averaged weights before the step
    seconds: float = field(default=math.nan, compare=False)  # that it took,
    predicted: float = field(default=math.nan, compare=False)  # and that were predicted before it began; NaN if none
    data_loss: float = math.nan  # `loss` without weight decay,
    new_data_loss: float = math.nan  # and `new_loss`


# --- the story


def take(
    parts: Parts, lin: Linearization, representation: Representation, plan: Plan | None, old: State, lr: float,
    attempts: int,
) -> tuple[Step, State]:  # fmt: skip
    """One step on a batch, and the next state; the model ends at the next θ."""
    G = representation.represent(lin)  # f, g, G ← linearise the model at θ
    level, theta = lin.level, lin.theta
    old = reweighted(like(old, theta), level)
    start = begin(old, level, theta)  # the same data? an unheard-of loss?
    matrices = damped(parts, G, old, start.same_data)  # D ← damping of the parameters
    lam, unjudged, notes = old.lam, old.convergence.unjudged, first_notes(start, old.plan, plan)
    for _ in range(attempts):
        used = start.excess * lam
        end = attempt(parts, lin, matrices, old, start, used, lr, notes, unjudged)  # d, tried and judged, or a search
        lam, unjudged = next_lam(parts, start, lam, end, G.averaged), end.unjudged  # λ ← smaller or larger
        if end.rule != "rejected":
            break
        if not end.judgement.judged:
            notes.append("rejected: rounding of the loss hides what the step would gain")
            break
        notes.append(f"rejected at λ = {used:.3g}, next {lam:.3g}")
    decay = commit(lin, end)  # θ: nothing else moves it for good
    memory = {**memories(parts, matrices, start, end), "plan": plan, "most_rows": lin.most, "decay": decay}
    return conclude(parts, lin.objective, old, start, end, lam, used, memory, notes)


def attempt(
    parts: Parts, lin: Linearization, matrices: Matrices, old: State, start: Start, lam: float, lr: float,
    notes: list[str], unjudged: int = 0,
) -> Ending:  # fmt: skip
    """One λ: propose a step, try it, judge it, or search along its line. The weights are left where they were last
    tried; only `commit` decides where they stay."""
    G, f = matrices.G, start.level.f
    try:
        A = matrices.A
        H = Damped(G, A.with_scale(lam * A.scale))  # G + W + λD
        d, plain, uncut = propose(parts, H, old, lr, start.same_data, start.excess)
        readings = tried(lin, matrices, H, d, plain, uncut, lr, old, start.same_data)
    except FactorizationError as error:
        blame_gradient(lin.parameters, G.gradient)
        notes += [str(error), *G.notes]
        G.notes.clear()
        return Ending("rejected", lr, None, f, None, FAILED)
    notes += G.notes
    G.notes.clear()
    trial = measured(readings, floats(*readings.values()))  # one synchronisation for all that the judgement needs
    if not math.isfinite(trial.new_loss):
        notes.append(f"the trial loss is {trial.new_loss}")
    end = ended(parts, old, start, trial, d, lam, lr, unjudged, lin.parameters.coarse)
    if end.d is not None or parts.line_search is None or lr <= 0 or not end.judgement.judged or start.excess > 1:
        return end
    return searched(parts, lin, end, d, plain, f)


# --- before any λ


def changed(record: T, **values: Any) -> T:
    """A copy of a frozen record with other values; dataclasses.replace takes ten times as many calls."""
    copy = object.__new__(type(record))
    copy.__dict__.update(record.__dict__, **values)
    return copy


def like(state: State, theta: Tensor) -> State:
    """The state with its tensors in the precision and on the device of θ, since the model may have been moved."""
    old: dict[str, Any] = state.__dict__
    moved: dict[str, Any] = {}
    for name in ("previous", "mean", "towards"):
        if (v := old[name]) is not None and (v.dtype != theta.dtype or v.device != theta.device):
            moved[name] = v.to(theta)
    if (D := state.D) is not None and (D.scale.dtype != theta.dtype or D.scale.device != theta.device):
        moved["D"] = D.to(theta)
    for v in (state.past or {}).values():  # in the precision that its representation chose
        if v.device != theta.device:
            moved["past"] = {k: v.to(theta.device) for k, v in (state.past or {}).items()}
    return changed(state, **moved) if moved else state


def reweighted(old: State, level: Level) -> State:
    """The state of earlier steps, corrected if the weights of weight decay have changed since: its share of f is then
    another one at the same θ, although the data are the same."""
    if old.decay is None or abs(level.decay - old.decay) <= SAME_LOSS[torch.float64] * max(level.decay, old.decay):
        return old
    by = level.decay - old.decay
    others = {name: old.__dict__[name].raised(by, level.low) for name in POLICIES}
    return changed(old, decay=level.decay, best=old.best + by, **others)


def begin(old: State, level: Level, theta: Tensor) -> Start:
    """What the policies say about a batch. Two of them depend on each other: without a lower bound, the heights that
    outliers are measured by also tell equal losses from different ones; and a batch of the same data is no outlier."""
    f, low, best = level.f, level.low, min(old.best, level.f)
    repeats = old.same_data.repeated(f, theta.dtype, low, old.outliers.height)
    floor, same = old.outliers.floor(best, low), repeats > 1
    return Start(level, theta, old.steps, best, floor, repeats, same, old.outliers.excess(f, floor, old.steps, same))


def first_notes(start: Start, past: Plan | None, plan: Plan | None) -> list[str]:
    """The notes of a step before any λ is tried."""
    notes = []
    if plan is not None and plan.squeeze > (0 if past is None else past.squeeze):
        notes.append(f"out of memory, planned anew: {plan}")
    if plan is not None and plan.couples and not (past is not None and past.couples):
        notes.append("samples depend on each other, as in BatchNorm: conjugate gradients in the place of rows")
    if start.excess > 1:
        times = UNHEARD * start.excess
        notes.append(f"the loss is {times:.2g} times those of late: a careful step, λ times {start.excess:.2g}")
    return notes


# --- tensors only


class Matrices(NamedTuple):
    """G and D of a step, for all λ that it may try."""

    G: Curvature
    D: Metric
    A: Metric  # D without zeros


def damped(parts: Parts, G: Curvature, old: State, same_data: bool) -> Matrices:
    """G with what it recalls of earlier batches, and D ← damping of the parameters."""
    G.same_data = same_data
    G.recall(old.past, same_data)
    D, damping, sizes = parts.damping.update(old.D, G), type(parts.damping).__name__, G.parameters.sizes
    if type(D) not in KINDS and not isinstance(D, KINDS):  # those that can be saved and loaded
        raise TypeError(
            f"{damping}.update returned {type(D).__name__}: a damping returns a metric, for example "
            "mq.Diagonal.of(entries, G.parameters.sizes)"
        )
    if not D.fits(sizes):
        raise ValueError(f"{damping}.update returned a D that does not fit parameters of the sizes {list(sizes)}")
    return Matrices(G, D, D.positive())


def propose(
    parts: Parts, H: Damped, old: State, lr: float, same_data: bool, excess: float = 1.0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """−(G + W + λD)⁻¹g with momentum and without it, (n,) each, and the length of the first before it was cut back to
    the radius, if there is one. On an outlier batch the step is shorter than the last one. Nothing moves yet."""
    space, ranks = H.G.parameters, H.G.lin.ranks
    plain = H.step()
    d = plain if parts.momentum is None else parts.momentum.refine(plain, old.previous, H, same_data)
    if excess > 1:
        d = d * (old.outliers.stride / math.sqrt(excess) / space.norm(d)).clamp(max=1)
    alone, uncut = d is plain, None
    if parts.radius is not None:
        uncut = space.norm(d)
        d, plain = within(parts.radius, lr, d, space), plain if alone else within(parts.radius, lr, plain, space)
    if ranks.several:
        d, plain = ranks.one(d), plain if alone else ranks.one(plain)
    return d, d if alone else plain, uncut


def within(radius: float, lr: float, d: Tensor, space: Parameters) -> Tensor:
    """d, cut back to ‖lr·d‖ ≤ radius"""
    return d if lr == 0 else d * (radius / (lr * space.norm(d))).clamp(max=1)


def tried(
    lin: Linearization, matrices: Matrices, H: Damped, d: Tensor, plain: Tensor, uncut: Tensor | None, lr: float,
    old: State, same_data: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """The `Measurements` at θ + lr·d, each of shape (), with the numbers that its cosine is made of."""
    trials, space, past = Trials(lin), lin.parameters, old.previous
    readings: dict[str, Tensor] = {}
    if old.mean is not None and not same_data:  # first, because the weights are left where they were tried last
        readings["mean_loss"] = trials.loss(old.mean - lin.theta, 1.0)
    readings["new_loss"] = trials.loss(d, lr)
    readings["gd"], readings["dGd"] = H.model(d)
    readings["gDg"] = matrices.G.slope(matrices.A)
    readings["length"], readings["theta"] = space.norm(d), space.norm(lin.theta)
    if same_data:
        readings["dDd"] = matrices.A.quadratic(d, space.sizes, space.dot)
    if uncut is not None:
        readings["uncut"] = uncut
    if past is not None:  # torch.cosine_similarity would copy both vectors, which may be large
        readings["along"] = space.dot(plain, past)
        readings["plain"] = readings["length"] if plain is d else space.norm(plain)
        readings["past"] = space.norm(past)
    return readings


# --- numbers only


def measured(readings: Iterable[str], numbers: Sequence[float]) -> Measurements:
    """`Measurements` of the numbers that were read"""
    entries: dict[str, Any] = dict(zip(readings, numbers, strict=True))
    if "along" in entries:
        entries["cosine"] = entries.pop("along") / max(entries.pop("plain") * entries.pop("past"), 1e-30)
    return Measurements(**entries)


def judge(parts: Parts, old: State, start: Start, trial: Measurements, lam: float, lr: float) -> Judgement:
    """Accept θ + lr·d if the loss falls, or if it rises a little in the direction of the previous step and no policy
    objects."""
    f, rounding, f_new = start.level.f, start.level.rounding, trial.new_loss
    predicted = -lr * trial.gd - 0.5 * lr**2 * trial.dGd
    # A step can be judged if its decrease, predicted or measured, can be told from rounding. The estimate of the
    # rounding leaves out the hidden layers: if the first half of the digits of θ stay the same, the measured change is
    # taken for rounding as well.
    least = ROUNDINGS * rounding
    hardly_moves = lr * trial.length <= torch.finfo(start.theta.dtype).eps ** 0.5 * trial.theta
    hidden = abs(predicted) <= least and (abs(f - f_new) <= least or hardly_moves)
    judged = f_new != f and not hidden
    gain = gain_ratio(f - f_new, predicted) if judged else math.nan
    share = 1.0
    if trial.dDd is not None and judged and predicted > 0:
        share = 0.5 * lam * lr**2 * trial.dDd / predicted
    rises = judged and all([old.__dict__[name].uphill(start, f_new) for name in RISING])
    cosine = trial.cosine if rises else None  # without a cosine no uphill move is accepted
    rule = parts.acceptance.judge(Trial(f, f_new, start.floor, start.best, cosine, old.recent.late))
    if rule == "uphill" and not rises:  # an acceptance that does not ask for the cosine
        rule = None
    lag = math.nan if trial.mean_loss is None else ratio(f, start.floor, least, trial.mean_loss)
    return Judgement(rule, judged, gain, abs(predicted), share, lag)


def gain_ratio(decrease: float, predicted: float) -> float:
    """ρ = (f − f_new) / (−lr·gᵀd − ½lr²·dᵀ(G + W)d); a model that predicts no decrease counts as failure."""
    return decrease / predicted if predicted > 0 and not math.isnan(decrease) else -math.inf


def ended(
    parts: Parts, old: State, start: Start, trial: Measurements, d: Tensor, lam: float, lr: float, unjudged: int,
    coarse: bool = False,
) -> Ending:  # fmt: skip
    """The ending at θ + lr·d if it was accepted, otherwise where the step began."""
    judgement, f = judge(parts, old, start, trial, lam, lr), start.level.f
    if coarse and trial.new_loss == f:  # both round to the same weights: θ moves on in full precision
        judgement = judgement._replace(rule="decrease")
    unjudged = 0 if judgement.judged else unjudged + 1
    cut = trial.uncut is not None and trial.length < trial.uncut
    rule, at, loss = ("rejected", None, f) if judgement.rule is None else (judgement.rule, d, trial.new_loss)
    return Ending(rule, lr, at, loss, trial, judgement, trial.length, cut, unjudged)


def searched(parts: Parts, lin: Linearization, end: Ending, d: Tensor, plain: Tensor, f: float) -> Ending:
    """The ending at a point on the line of the step, or of the step without momentum, within the radius; the given
    ending if no point is better."""
    search, radius, lr = parts.line_search, parts.radius, end.lr
    assert search is not None
    assert end.trial is not None
    line = d if search.along_step else plain
    tried = (lr, end.trial.new_loss) if line is d else None
    (length,) = floats(lin.parameters.norm(line))
    # Both lines were cut back with this lr: rounding must not exclude it.
    longest = math.inf if radius is None else max(lr, radius / length if length else math.inf)

    def along(rates: Sequence[float]) -> list[float]:
        inside = [rate for rate in rates if rate <= longest]
        losses = iter(Trials(lin).losses(line, inside) if inside else [])
        return [next(losses) if rate <= longest else math.inf for rate in rates]

    point = search.search(along, f, lr, tried)
    return end if point is None else end._replace(rule="search", lr=point[0], d=line, loss=point[1], length=length)


def blame_gradient(parameters: Parameters, g: Tensor) -> None:
    """Raises an error for a gradient that is not finite: no λ helps then."""
    for name, part in zip(parameters.names, parameters.split(g), strict=True):
        if not bool(parameters.finite(part)):
            raise ValueError(
                f"the gradient of parameter {name!r} is not finite, though the loss is; see its layer (if it computes "
                "in float16, numbers end at 65504: take bfloat16, whose range is that of float32)"
            )


def next_lam(parts: Parts, start: Start, lam: float, end: Ending, over_batches: bool) -> float:
    """λ ← smaller after a good step, larger after a bad one, unchanged after an outlier batch. It does not fall after a
    step that was cut back to the radius or saved by the line search: a smaller λ asks for a longer step.
    `over_batches`: whether G is a running average."""
    if start.excess > 1:
        return lam
    full_loss = math.nan if end.trial is None else end.trial.new_loss
    _, _, gain, _, share, lag = end.judgement
    outcome = Outcome(start.level.f, full_loss, gain, end.rule, start.same_data, over_batches, end.unjudged, share, lag)
    new_lam = parts.schedule.update(lam, outcome)
    return max(new_lam, lam) if end.cut or end.rule == "search" else new_lam


# --- the conclusion: what the next step is left with


def commit(lin: Linearization, end: Ending) -> float:
    """Moves the weights to where the next step begins, for good; returns the share of weight decay in f there."""
    at = lin.position.at
    if at is None or at[0] is not end.d or at[1] != end.lr:  # not where they were tried last
        lin.position.move(end.d, end.lr)
    W = lin.decay if lin.objective.penalty else None
    return 0.0 if W is None else floats(W.value(lin.parameters.tensors))[0]


def memories(parts: Parts, matrices: Matrices, start: Start, end: Ending) -> dict[str, Any]:
    """The tensors that a step leaves for the next one; all others stay as they are. An outlier batch leaves only its
    step."""
    if end.d is None:
        return {}
    previous = {"previous": dtheta(parts, end.d, end.lr)}
    if start.excess > 1:
        return previous
    D, G = matrices.D, matrices.G
    if D.turns:  # a diagonal has no factors to renew
        D = D.settled(start.steps + 1, G.lin.ranks)
    past = G.keep()
    for key, t in (past or {}).items():
        if not isinstance(t, Tensor):  # torch.load accepts only tensors
            raise TypeError(f"{type(G).__name__}.keep returned {type(t).__name__} for {key!r}: tensors only")
    return {**previous, "D": D, "past": past}


def dtheta(parts: Parts, d: Tensor, lr: float) -> Tensor | None:
    """The step dθ = lr·d, if the next one needs it: (n,)"""
    return None if not parts.remembers else d if lr == 1 else lr * d


def conclude(
    parts: Parts, objective: Objective, old: State, start: Start, end: Ending, lam: float, used: float,
    memory: dict[str, Any], notes: Sequence[str] = (),
) -> tuple[Step, State]:  # fmt: skip
    """The report of a step, and the next state with what it is to remember. `lam` is λ of the next step, `used` that of
    this one."""
    if parts.average is not None and end.d is not None:
        memory |= averaged(parts.average, old, objective.parameters, start)
    policies = {name: old.__dict__[name].after(start, end) for name in POLICIES}
    best = end.loss if end.loss < start.best else start.best
    state = changed(
        old, lam=lam, steps=old.steps + 1, accepted=old.accepted + (end.d is not None), best=best, **policies, **memory
    )
    idle = state.convergence
    converged = idle.idle > 0 and idle.reached(used, parts.schedule.initial)
    return report(objective.given, start, end, used, notes, converged, memory["decay"]), state


def averaged(average: Average, old: State, parameters: Parameters, start: Start) -> dict[str, Any]:
    """θ̄ after one more θ; on the same data there is none, and the last weights stand for it"""
    if start.same_data and average.restarts:
        return {"mean": None, "points": 0}
    theta = parameters.vector()
    if old.mean is None:
        return {"mean": theta, "points": 1}
    return {"mean": average.update(old.mean, theta, old.points), "points": old.points + 1}


def report(
    loss: Loss, start: Start, end: Ending, lam: float, notes: Sequence[str], converged: bool, decay: float = 0.0
) -> Step:
    """The step in the units in which the loss is reported. `decay` is the share of weight decay in f where it ends."""
    f, _, _, normaliser, before = start.level
    unit = 1.0 if loss.reported is None else loss.report(1.0, normaliser)
    here, there, data, new_data = f * unit, end.loss * unit, (f - before) * unit, (end.loss - decay) * unit
    slope = averaged = math.nan
    if end.trial is not None:
        slope = math.sqrt(max(end.trial.gDg, 0.0))
        averaged = math.nan if end.trial.mean_loss is None else end.trial.mean_loss * unit
    words = CONVERGED if converged else "; ".join(notes)
    return Step(
        here, there, end.d is not None, end.rule, lam, end.lr, end.judgement.gain, words, slope, converged, averaged,
        data_loss=data, new_data_loss=new_data,
    )  # fmt: skip


# --- before there is a linearisation


def rows_of(parts: Parts, plan: Plan | None) -> Rows:
    """The rows of a step: those that were given, otherwise those of the plan, or a first choice before there is one."""
    if parts.rows is not None:
        return parts.rows
    return parts.curvature.first_rows if plan is None or plan.kind is None else plan.rows


# --- What a step leaves for the next one.


@dataclass(frozen=True)
class State(Policies):
    """Everything a step leaves for the next one, policies included. It is replaced as a whole when a step is over,
    saved as one flat dict, and checked against `ENTRIES` when it is loaded, see values.py."""

    lam: float
    steps: int = 0
    accepted: int = 0
    best: float = math.inf  # least f so far
    D: Metric | None = None
    previous: Tensor | None = None  # last accepted step dθ
    master: Tensor | None = None  # θ, if the parameters are its rounding
    mean: Tensor | None = None  # average of the weights
    points: int = 0  # how many points it averages
    past: Past | None = None  # what the curvature keeps of earlier steps
    plan: Plan | None = None  # how the curvature is represented, if that was a choice
    most_rows: int = 0  # that a step had
    towards: Tensor | None = None  # θ₀, which the weights decay towards; None for 0
    decay: float | None = None  # the share of weight decay in f after the last step; None if unknown

    def flat(self) -> dict[str, Any]:
        """One dict in which the fields of the policies stand in the place of the policies"""
        flat: dict[str, Any] = {}
        for name, value in vars(self).items():
            flat.update(vars(value) if name in POLICIES else {name: value})
        return flat

    def __setstate__(self, flat: dict[str, Any]) -> None:  # from a copy, or from a pickle made while State was flat
        self.__dict__.update(nested(flat))


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of `flat`; a policy whose fields are missing gets its defaults."""
    rest, policies = {key: value for key, value in flat.items() if key not in RETIRED}, {}
    for name, default in POLICIES.items():
        given = rest.pop(name) if isinstance(rest.get(name), Policy) else None
        own = {f.name: rest.pop(f.name) for f in fields(default) if f.name in rest}
        policies[name] = type(default)(**own) if given is None else given
    return rest | policies


# Entries of older files, for the way back after uphill moves, which nothing needs any more.
RETIRED = ("haven", "haven_loss", "away", "ceiling", "haven_decay")


def entries(policies: Mapping[str, Policy]) -> dict[str, Field[Any]]:
    """The entries of the flat dict. A name with two meanings is an error: one of the two would be lost."""
    table = {f.name: f for f in fields(State) if f.name in State.__annotations__}
    owners = dict.fromkeys(RETIRED, "an entry of older files, which is left out")
    owners |= dict.fromkeys(table, "a field of State")
    for name in policies:
        if name in owners:
            raise TypeError(f"the policy {name!r} has the name of {owners[name]}: give it another one in Policies")
    owners |= dict.fromkeys(policies, "a policy")
    for name, policy in policies.items():
        for f in fields(policy):
            if f.name in owners and f.name != name:
                raise TypeError(
                    f"the field {f.name!r} of {type(policy).__name__} has the name of {owners[f.name]}: give it "
                    "another one, for all are entries of one state_dict"
                )
            owners[f.name], table[f.name] = f"a field of {type(policy).__name__}", f
    return table


ENTRIES = entries(POLICIES)

# What is as long as θ.
VECTORS = [name for name, entry in ENTRIES.items() if str(entry.type).endswith("Tensor | None")]
