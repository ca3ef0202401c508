"""One iteration: propose a step, which takes tensors only, and judge it, which takes numbers only.

The plain step and the one recorded as a CUDA graph are made of the same functions: a recording cannot ask what a
tensor holds, so that nothing in `propose` may depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from .curvature.contract import Curvature, Damped, Representation
from .jacobian.linearization import Linearization
from .jacobian.objective import Level
from .jacobian.rows import Rows
from .metric import Metric
from .parts.acceptance import Acceptance, Trial
from .parts.average import Average
from .parts.damping import Damping
from .parts.line_search import LineSearch
from .parts.momentum import Momentum
from .parts.schedule import Outcome, Schedule
from .state import State
from .trials import Trials

# A decrease of so many roundings of the loss is taken for one. A run on the same data has converged if so many steps in
# a row, with several λ, predict no more than so many roundings each, and have found no more all in all.
ROUNDINGS, IDLE, FAINT = 4, 10, 64


@dataclass(frozen=True)
class Parts:
    """What an optimizer is assembled from."""

    curvature: Representation
    rows: Rows
    damping: Damping
    schedule: Schedule
    momentum: Momentum | None
    acceptance: Acceptance
    line_search: LineSearch | None
    average: Average | None

    @property
    def remembers(self) -> bool:
        """Whether the next step asks for this one."""
        return self.momentum is not None or self.acceptance.looks_back


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
    dGd: Tensor  # dᵀGd
    gDg: Tensor  # gᵀD⁻¹g
    length: Tensor  # ‖d‖
    theta: Tensor  # ‖θ‖
    dDd: Tensor | None  # dᵀDd, on the same data
    cosine: Tensor | None  # between the plain step and the previous one, if there was one

    def tensors(self) -> list[Tensor]:
        return [t for t in self if t is not None]

    def read(self, numbers: Sequence[float]) -> Found:
        """The numbers of these tensors, in their order"""
        found = iter(numbers)
        return Found(*(None if t is None else next(found) for t in self))  # type: ignore[arg-type]


class Proposal(NamedTuple):
    """A step, not yet taken, though the model is there."""

    d: Tensor  # (n,)
    plain: Tensor  # −(G + λD)⁻¹g, before momentum: (n,)
    readings: Readings


def damped(parts: Parts, G: Curvature, old: State, same_data: bool) -> Matrices:
    """G with what it recalls of earlier batches, and D ← damping of the parameters."""
    G.recall(old.past, same_data)
    D = parts.damping.update(old.D, G)
    return Matrices(G, D, D.positive())


def propose(
    parts: Parts, lin: Linearization, of: Matrices, lam: float | Tensor, lr: float, old: State, same_data: bool,
    doubt: float = 1.0,
) -> Proposal:  # fmt: skip
    """Solve (G + λD)d = −g, add momentum, try. In doubt of the batch the step is shorter than the last one."""
    G, space = of.G, lin.parameters
    H = Damped(G, lam * of.A)
    plain = H.step()
    d = plain if parts.momentum is None else parts.momentum.refine(plain, old.previous, H, same_data)
    if doubt > 1:
        d = d * (old.stride / math.sqrt(doubt) / space.norm(d)).clamp(max=1)
    cosine = None if old.previous is None else space.cosine(plain, old.previous)
    new_loss = Trials(lin).loss(d, lr)
    dDd = of.A.quadratic(d, space.sizes) if same_data else None
    lengths = space.norm(d), space.norm(lin.theta)
    return Proposal(d, plain, Readings(new_loss, *G.model(d), G.slope(of.A), *lengths, dDd, cosine))


# --- numbers only


class Found(NamedTuple):
    """The same as Readings."""

    new_loss: float
    gd: float
    dGd: float
    gDg: float
    length: float
    theta: float
    dDd: float | None
    cosine: float | None


class Verdict(NamedTuple):
    """What a trial point is worth."""

    rule: str | None  # "decrease" | "uphill", None if the point is not accepted
    judged: bool  # whether its decrease, predicted or found, exceeds the rounding of f
    gain: float  # ρ, NaN if it was not judged
    predicted: float  # the decrease, or its absolute value
    share: float  # of damping in the step: see schedule.Outcome


def judge(
    parts: Parts, level: Level, found: Found, lam: float, lr: float, old: State, eps: float, doubt: float = 1.0
) -> Verdict:
    """Accept θ + lr·d if the loss falls, or rises a little in the direction of the previous step. In doubt of the batch
    only a decrease counts. `eps` is the rounding of the parameters."""
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
    rule = parts.acceptance.judge(Trial(f, f_new, level.low, min(old.best, f), found.cosine if sure else None))
    return Verdict(rule, judged, gain, abs(predicted), share)


def gain_ratio(decrease: float, predicted: float) -> float:
    """ρ = (f − f_new) / (−lr·gᵀd − ½lr²·dᵀGd); a model that predicts no decrease counts as failure."""
    return decrease / predicted if predicted > 0 and not math.isnan(decrease) else -math.inf


class Ending(NamedTuple):
    """What came of one λ."""

    rule: str
    lr: float
    d: Tensor | None  # (n,), None where rejected
    loss: float  # f where it ends
    found: Found | None  # None where there was no step to try
    verdict: Verdict
    length: float = math.nan  # ‖d‖


FAILED = Verdict(None, True, -math.inf, math.inf, 1.0)


def next_lam(
    parts: Parts, lam: float, level: Level, end: Ending, same_data: bool, averaged: bool, unjudged: int
) -> float:
    """λ ← smaller after a good step, larger after a bad one."""
    full_loss = math.nan if end.found is None else end.found.new_loss
    verdict = end.verdict
    outcome = Outcome(level.f, full_loss, verdict.gain, end.rule, same_data, averaged, unjudged, verdict.share)
    return parts.schedule.update(lam, outcome)


def concluded(
    old: State, level: Level, end: Ending, lam: float, used: float, theta: Tensor, same_data: bool, repeats: int,
    unjudged: int, doubt: float, initial: float,
) -> tuple[State, bool]:  # fmt: skip
    """The numbers that the step leaves for the next one, and whether the run has converged. `lam` is λ of the next
    step, `used` that of this one; `theta` is the point with the loss f."""
    f = level.f
    # Steps that all in all have found next to nothing; a λ above λ₀ may be why they predict so little.
    faint = same_data and min(end.verdict.predicted, f - level.low) <= FAINT * level.rounding
    start = old.idle_from if old.idle else f
    idle = old.idle + 1 if faint and abs(start - end.loss) <= FAINT * level.rounding else 0
    state = old.after(f, end.loss, level.low, lam, doubt).settled(f, end.loss, level.low, theta, same_data)
    state = replace(state, repeats=repeats, unjudged=unjudged, idle=idle, idle_from=start)
    if end.d is not None:
        stride = end.lr * end.length if doubt == 1 else old.stride
        state = replace(state, accepted=old.accepted + 1, stride=stride)
    return state, idle >= IDLE and used <= initial


def averaged(parts: Parts, state: State, theta: Tensor, same_data: bool) -> State:
    """θ̄ after another θ."""
    if parts.average is None:
        return state
    if state.mean is None or (same_data and parts.average.restarts):
        return replace(state, mean=theta, points=1)
    mean = parts.average.update(state.mean, theta, state.points)
    return replace(state, mean=mean, points=state.points + 1)


def kept(parts: Parts, state: State, of: Matrices, end: Ending, doubt: float) -> State:
    """The tensors that an accepted step leaves for the next one."""
    if doubt == 1:
        state = replace(state, D=of.D, past=of.G.keep())
    if parts.remembers and end.d is not None:
        state = replace(state, previous=end.d if end.lr == 1 else end.lr * end.d)
    return state
