"""One iteration: propose a step, which takes tensors only, and judge it, which takes numbers only.

The plain step and the one recorded as a CUDA graph are made of the same functions. A recording cannot know what a
tensor holds: what `propose` calls asks by `deferred.ask`, and a momentum that must read numbers says so (`recordable`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .curvature.contract import Curvature, Damped, Past, Representation
from .curvature.plan import Plan
from .deferred import floats
from .jacobian.linearization import Linearization
from .jacobian.objective import Level, Objective
from .jacobian.rows import Rows
from .metric import KINDS, Metric
from .model.parameters import Parameters
from .parts.acceptance import Acceptance, Trial
from .parts.average import Average
from .parts.damping import Damping
from .parts.line_search import LineSearch
from .parts.momentum import Momentum
from .parts.schedule import Outcome, Schedule
from .state import UNHEARD, State
from .tolerances import SAME_LOSS
from .trials import Trials

# A decrease of so many roundings of the loss is taken for one. A run on the same data has converged if so many steps in
# a row, with several λ, predict no more than so many roundings each, and have found no more all in all.
ROUNDINGS, IDLE, FAINT = 4, 10, 64
CONVERGED = "converged: no decrease is left that could be told from the rounding of the loss"


@dataclass(frozen=True)
class Parts:
    """What an optimizer is assembled from."""

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
        """Whether the next step asks for this one."""
        return self.momentum is not None or self.acceptance.looks_back


def rows_of(parts: Parts, plan: Plan | None) -> Rows:
    """The rows of a step: those that were given, or planned; before there is a plan, some for a first look."""
    if parts.rows is not None:
        return parts.rows
    return parts.curvature.first_rows if plan is None or plan.kind is None else plan.rows


# --- tensors only


class Matrices(NamedTuple):
    """G and D of a step, for all λ that it may try."""

    G: Curvature
    D: Metric
    A: Metric  # D without zeros


class Readings(NamedTuple):
    """What the judgement asks of a proposal, all of them ()."""

    new_loss: Tensor  # f(θ + lr·d), in float64
    gd: Tensor  # gᵀd
    dGd: Tensor  # dᵀ(G + W)d
    gDg: Tensor  # gᵀD⁻¹g
    length: Tensor  # ‖d‖
    theta: Tensor  # ‖θ‖
    dDd: Tensor | None  # dᵀDd, on the same data
    cosine: Tensor | None  # between the plain step and the previous one, if there was one
    mean_loss: Tensor | None  # f(θ̄), in float64, on changing batches
    decay: Tensor | None = None  # what weight decay has of f(θ), in float64,
    new_decay: Tensor | None = None  # and of f(θ + lr·d)
    uncut: Tensor | None = None  # ‖d‖ before it was cut back to the radius

    def tensors(self) -> list[Tensor]:
        return [t for t in self if t is not None]

    def read(self, numbers: Sequence[float]) -> Found:
        """The numbers of these tensors, in their order"""
        found = iter(numbers)
        return Found(*(None if t is None else next(found) for t in self))  # type: ignore[arg-type]


class Proposal(NamedTuple):
    """A step, not yet taken, though the model is there."""

    d: Tensor  # (n,)
    plain: Tensor  # −(G + W + λD)⁻¹g, before momentum: (n,)
    readings: Readings


def damped(parts: Parts, G: Curvature, old: State, same_data: bool) -> Matrices:
    """G with what it recalls of earlier batches, and D ← damping of the parameters."""
    G.same_data = same_data
    G.recall(old.past, same_data)
    D = parts.damping.update(old.D, G)
    check_metric(D, type(parts.damping).__name__, G.parameters.sizes)
    return Matrices(G, D, D.positive())


def check_metric(D: Metric, damping: str, sizes: Sequence[int]) -> None:
    """What a damping of one's own may get wrong: before anything is solved with it."""
    if not isinstance(D, KINDS):  # those that can be saved and loaded
        raise TypeError(
            f"{damping}.update returned {type(D).__name__}: a damping returns a metric, for example "
            "mq.Diagonal.of(entries, G.parameters.sizes)"
        )
    if not D.fits(sizes):
        raise ValueError(f"{damping}.update returned a D that does not fit parameters of the sizes {list(sizes)}")


def propose(
    parts: Parts, lin: Linearization, matrices: Matrices, lam: float | Tensor, lr: float, old: State, same_data: bool,
    doubt: float = 1.0,
) -> Proposal:  # fmt: skip
    """Solve (G + W + λD)d = −g, add momentum, try. In doubt of the batch the step is shorter than the last one."""
    G, W, space = matrices.G, lin.decay, lin.parameters
    H = Damped(G, lam * matrices.A)
    plain = H.step()
    d = plain if parts.momentum is None else parts.momentum.refine(plain, old.previous, H, same_data)
    if doubt > 1:
        d = d * (old.stride / math.sqrt(doubt) / space.norm(d)).clamp(max=1)
    uncut = None if parts.radius is None else space.norm(d)
    alone, d = d is plain, lin.ranks.one(within(parts.radius, lr, d, space))
    plain = d if alone else lin.ranks.one(within(parts.radius, lr, plain, space))
    cosine = None if old.previous is None else space.cosine(plain, old.previous)
    # First, for the model stays where it was tried last.
    mean_loss = None if old.mean is None or same_data else Trials(lin).loss(old.mean - lin.theta, 1.0)
    new_loss = Trials(lin).loss(d, lr)
    decay, new_decay = (None if W is None else W.value(p) for p in (space.shaped(lin.theta), space.tensors))
    dDd = matrices.A.quadratic(d, space.sizes, space.dot) if same_data else None
    lengths = space.norm(d), space.norm(lin.theta)
    found = new_loss, *H.model(d), G.slope(matrices.A), *lengths
    return Proposal(d, plain, Readings(*found, dDd, cosine, mean_loss, decay, new_decay, uncut))


def within(radius: float | None, lr: float, d: Tensor, space: Parameters) -> Tensor:
    """d, cut back to ‖lr·d‖ ≤ radius"""
    return d if radius is None or lr == 0 else d * (radius / (lr * space.norm(d))).clamp(max=1)


# --- numbers only


class Found(NamedTuple):
    """What the tensors of Readings hold."""

    new_loss: float
    gd: float
    dGd: float
    gDg: float
    length: float
    theta: float
    dDd: float | None
    cosine: float | None
    mean_loss: float | None
    decay: float | None = None
    new_decay: float | None = None
    uncut: float | None = None

    @property
    def cut(self) -> bool:
        """Whether the step was cut back to the radius."""
        return self.uncut is not None and self.length < self.uncut


class Judgement(NamedTuple):
    """What a trial point is worth."""

    rule: str | None  # "decrease" | "uphill", None if the point is not accepted
    judged: bool  # whether its decrease, predicted or found, exceeds the rounding of f
    gain: float  # ρ, NaN if it was not judged
    predicted: float  # the absolute value of the predicted decrease
    share: float  # of damping in the step: see schedule.Outcome
    lag: float = math.nan  # of the averaged weights: see schedule.Outcome


class Start(NamedTuple):
    """What is known before any λ is tried."""

    old: State  # that the step before has left
    level: Level
    repeats: int  # how often in a row the loss before a step was the loss after the last one
    doubt: float  # see State.doubt

    @property
    def same_data(self) -> bool:
        return self.repeats > 1  # once may be chance, on large batches

    @property
    def floor(self) -> float:
        return self.old.floor(self.level.f, self.level.low)


def reweighted(old: State, level: Level, objective: Objective) -> State:
    """What earlier steps have left, if weight decay had other weights then: it has another part of f at the same θ."""
    W = objective.decay(level.normaliser)
    if old.decay is None or abs(level.decay - old.decay) <= SAME_LOSS[torch.float64] * max(level.decay, old.decay):
        return old
    there = [0.0] if W is None or old.haven is None else floats(W.value(objective.parameters.shaped(old.haven)))
    return old.decayed(level.decay, there[0])


def begin(old: State, level: Level, dtype: torch.dtype) -> Start:
    repeats = old.starts_with(level.f, dtype, level.low)
    return Start(old, level, repeats, old.doubt(level.f, level.low, repeats > 1))


def first_notes(start: Start, plan: Plan | None) -> list[str]:
    """What is told before any λ is tried."""
    old, notes = start.old, []
    before = 0 if old.plan is None else old.plan.squeeze
    if plan is not None and plan.squeeze > before:
        notes.append(f"out of memory, planned anew: {plan}")
    if plan is not None and plan.couples and not (old.plan is not None and old.plan.couples):
        notes.append("samples depend on each other, as in BatchNorm: conjugate gradients in the place of rows")
    if start.doubt > 1:
        times = UNHEARD * start.doubt
        notes.append(f"the loss is {times:.2g} times those of late: a careful step, λ times {start.doubt:.2g}")
    return notes


def judge(parts: Parts, start: Start, found: Found, lam: float, lr: float, eps: float) -> Judgement:
    """Accept θ + lr·d if the loss falls, or rises a little in the direction of the previous step. In doubt of the batch
    only a decrease counts. `eps` is the rounding of the parameters."""
    old, level, _, doubt = start
    f, f_new = level.f, found.new_loss
    predicted = -lr * found.gd - 0.5 * lr**2 * found.dGd
    # The step can be judged if the decrease, as predicted or as found, can be told from rounding. What is estimated
    # of that knows nothing of the layers within: if the first half of the digits of θ stay as they are, the change that
    # is found is rounding too.
    least = ROUNDINGS * level.rounding
    hardly_moves = lr * found.length <= eps**0.5 * found.theta
    hidden = abs(predicted) <= least and (abs(f - f_new) <= least or hardly_moves)
    judged = f_new != f and not hidden
    gain = gain_ratio(f - f_new, predicted) if judged else math.nan
    share = 1.0
    if found.dDd is not None and judged and predicted > 0:
        share = 0.5 * lam * lr**2 * found.dDd / predicted
    sure = judged and doubt == 1 and f_new <= old.ceiling  # otherwise there is no uphill
    cosine = found.cosine if sure else None
    rule = parts.acceptance.judge(Trial(f, f_new, start.floor, min(old.best, f), cosine, old.late))
    return Judgement(rule, judged, gain, abs(predicted), share, lag(level._replace(low=start.floor), found.mean_loss))


def lag(level: Level, mean_loss: float | None) -> float:
    """f(θ̄)/f, both above the lower bound; NaN if one of them cannot be told from it."""
    if mean_loss is None or min(level.f, mean_loss) - level.low <= ROUNDINGS * level.rounding:
        return math.nan
    return (mean_loss - level.low) / (level.f - level.low)


def gain_ratio(decrease: float, predicted: float) -> float:
    """ρ = (f − f_new) / (−lr·gᵀd − ½lr²·dᵀ(G + W)d); a model that predicts no decrease counts as failure."""
    return decrease / predicted if predicted > 0 and not math.isnan(decrease) else -math.inf


class Ending(NamedTuple):
    """What came of one λ."""

    rule: str
    lr: float
    d: Tensor | None  # (n,), None if it was rejected
    loss: float  # f where it ends
    found: Found | None  # None if there was no step to try
    judgement: Judgement
    length: float = math.nan  # ‖d‖

    @property
    def cut(self) -> bool:
        return self.found is not None and self.found.cut


FAILED = Judgement(None, True, -math.inf, math.inf, 1.0)


def next_lam(parts: Parts, start: Start, lam: float, end: Ending, over_batches: bool, unjudged: int) -> float:
    """λ ← smaller after a good step, larger after a bad one; in doubt of the batch it stays. After a step that was cut
    back to the radius, or was too long and saved by the line search, it does not fall: a smaller λ asks for a longer
    step. `over_batches`: whether G is a running average."""
    if start.doubt > 1:
        return lam
    full_loss = math.nan if end.found is None else end.found.new_loss
    _, _, gain, _, share, lag = end.judgement
    outcome = Outcome(start.level.f, full_loss, gain, end.rule, start.same_data, over_batches, unjudged, share, lag)
    found = parts.schedule.update(lam, outcome)
    return max(found, lam) if end.cut or end.rule == "search" else found


def concluded(
    parts: Parts, start: Start, end: Ending, lam: float, used: float, theta: Tensor, unjudged: int
) -> tuple[State, bool]:
    """The numbers that the step leaves for the next one, and whether the run has converged. `lam` is λ of the next
    step, `used` that of this one; `theta` is the point with the loss f."""
    old, (f, low, rounding, _, decay), repeats, doubt = start
    # Steps that all in all have found next to nothing; a λ above λ₀ or the radius may be why they predict so little.
    faint = start.same_data and not end.cut and min(end.judgement.predicted, f - low) <= FAINT * rounding
    idle_from = old.idle_from if old.idle else f
    idle = old.idle + 1 if faint and abs(idle_from - end.loss) <= FAINT * rounding else 0
    state = old.after(f, end.loss, low, lam, doubt).settled(f, end.loss, start.floor, theta, start.same_data)
    accepted = end.d is not None
    state = replace(
        state, repeats=repeats, unjudged=unjudged, idle=idle, idle_from=idle_from, accepted=old.accepted + accepted,
        haven_decay=decay if state.haven is theta else old.haven_decay,
        stride=end.lr * end.length if accepted and doubt == 1 else old.stride,
        lag=None if start.same_data else smoothed(old.lag, end.judgement.lag),
    )  # fmt: skip
    return state, idle >= IDLE and used <= parts.schedule.initial


def smoothed(past: float | None, lag: float) -> float | None:
    """The mean of log f(θ̄)/f over the last steps: one batch alone says little."""
    if not 0 < lag < math.inf:
        return past
    return math.log(lag) if past is None else 0.8 * past + 0.2 * math.log(lag)


# --- what the next step is left with


def with_mean(parts: Parts, state: State, parameters: Parameters, same_data: bool) -> State:
    """θ̄ after another θ, that of the model; of uphill moves on the same data that before them, until they have paid."""
    if parts.average is None:
        return state
    theta = parameters.vector() if state.haven is None else state.haven
    if state.mean is None or (same_data and parts.average.restarts):
        return replace(state, mean=theta, points=1)
    mean = parts.average.update(state.mean, theta, state.points)
    return replace(state, mean=mean, points=state.points + 1)


def remembered(parts: Parts, d: Tensor, lr: float) -> Tensor | None:
    """The step dθ = lr·d, if the next one asks for it: (n,)"""
    if not parts.remembers:
        return None
    return d if lr == 1 else lr * d


def kept(parts: Parts, state: State, matrices: Matrices, end: Ending, start: Start) -> State:
    """The tensors that an accepted step leaves for the next one."""
    previous = None if end.d is None else remembered(parts, end.d, end.lr)
    if start.doubt > 1:
        return replace(state, previous=previous)
    D = matrices.D.settled(state.steps, matrices.G.lin.ranks)
    return replace(state, previous=previous, D=D, past=check_past(matrices.G))


def check_past(G: Curvature) -> Past | None:
    """What the curvature keeps, which torch.load takes only if it is tensors."""
    past = G.keep()
    for key, t in (past or {}).items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{type(G).__name__}.keep returned {type(t).__name__} for {key!r}: tensors only")
    return past
