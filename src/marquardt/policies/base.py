"""What a policy is, and what it sees of every step. These are plain numbers: nothing here waits for a device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import Tensor

from ..jacobian.objective import Level


class Start(NamedTuple):
    """What is known about a step before any λ is tried."""

    level: Level  # f, its lower bound, its rounding, and the share of weight decay in it
    theta: Tensor  # the point with this f: (n,)
    steps: int  # before this one
    best: float  # the least f so far, on earlier data too: a policy for the same data keeps a minimum itself
    floor: float  # what heights are measured from: see Outliers
    repeats: int  # how often in a row the loss before a step was the loss after the last one
    same_data: bool  # whether that shows that the data are the same
    excess: float  # the factor of λ on a batch with an unusually high loss, 1 on all others


class Measurements(NamedTuple):
    """What was measured at a trial point θ + lr·d."""

    new_loss: float  # f(θ + lr·d)
    gd: float  # gᵀd
    dGd: float  # dᵀ(G + W)d
    gDg: float  # gᵀD⁻¹g
    length: float  # ‖d‖
    theta: float  # ‖θ‖
    dDd: float | None = None  # dᵀDd, on the same data
    cosine: float | None = None  # between the plain step and the previous one, if there was one
    mean_loss: float | None = None  # f(θ̄), on changing batches
    uncut: float | None = None  # ‖d‖ before it was cut back to the radius


class Judgement(NamedTuple):
    """The verdict on a trial point."""

    rule: str | None  # "decrease" | "uphill", None if the point is not accepted
    judged: bool  # whether its decrease, predicted or measured, exceeds the rounding of f
    gain: float  # ρ, NaN if it was not judged
    predicted: float  # the absolute value of the predicted decrease
    share: float  # of the damping in the predicted decrease: see judging.Outcome
    lag: float = math.nan  # of the averaged weights behind the last ones: see judging.Outcome


class Ending(NamedTuple):
    """How a step ended, or one λ of it."""

    rule: str  # "decrease" | "uphill" | "search" | "rejected"
    lr: float
    d: Tensor | None  # (n,), None if the model stays
    loss: float  # f where it ends
    trial: Measurements | None  # at the full step; None if there was no step to try
    judgement: Judgement
    length: float = math.nan  # ‖d‖
    cut: bool = False  # whether the step was cut back to the radius
    unjudged: int = 0  # steps in a row, with this one, whose decrease could not be told from the rounding of f


P = TypeVar("P", bound="Policy")


@dataclass(frozen=True)
class Policy:
    """A rule that watches a run. A policy is frozen: every step replaces it.

    Its fields are plain numbers and become entries of the `state_dict` under their own names, so no other policy and no
    field of State may have the same name; otherwise the import fails. Their defaults are the values at the start of a
    run, and stand in for a file that was written before the policy existed. A policy defines no constructor.
    """

    def uphill(self, start: Start, loss: float) -> bool:
        """Whether a step may end at this loss if that is a rise. All policies must agree, and then the acceptance. It
        is called for trial points with a lower loss too, where the answer does not matter, and never for points of a
        line search, which follows a separate rule."""
        return True

    def after(self: P, start: Start, end: Ending) -> P:
        """The policy that the next step begins with; it is called after rejected steps too."""
        return self

    def raised(self: P, by: float, low: float) -> P:
        """The policy after the weights of weight decay have changed, which raises f by `by` at the current point. `low`
        is the lower bound of f, −∞ if none is known, and does not change."""
        return self
