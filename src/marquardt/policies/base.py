"""What a policy is, and what it is shown of every step. Plain numbers: nothing here waits for a device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import Tensor

from ..jacobian.objective import Level


class Start(NamedTuple):
    """What is known of a step before any λ is tried."""

    level: Level  # f, its lower bound, its rounding, and what weight decay has of it
    theta: Tensor  # the point with this f: (n,)
    steps: int  # before this one
    best: float  # the least f so far, also of earlier data: a policy for the same data keeps its own
    floor: float  # what heights are measured from: see Outliers
    repeats: int  # how often in a row the loss before a step was the loss after the last one
    same_data: bool  # whether that says that the data are the same
    doubt: float  # what λ is multiplied with on a batch whose loss is unheard-of, 1 on all others


class Found(NamedTuple):
    """What was measured at a trial point θ + lr·d."""

    new_loss: float  # f(θ + lr·d)
    gd: float  # gᵀd
    dGd: float  # dᵀ(G + W)d
    gDg: float  # gᵀD⁻¹g
    length: float  # ‖d‖
    theta: float  # ‖θ‖
    dDd: float | None  # dᵀDd, on the same data
    cosine: float | None  # between the plain step and the previous one, if there was one
    mean_loss: float | None  # f(θ̄), on changing batches
    decay: float | None = None  # what weight decay has of f(θ),
    new_decay: float | None = None  # and of f(θ + lr·d)
    uncut: float | None = None  # ‖d‖ before it was cut back to the radius

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
    share: float  # of damping in the step: see judging.Outcome
    lag: float = math.nan  # of the averaged weights: see judging.Outcome


class Ending(NamedTuple):
    """What came of a step, or of one λ of it."""

    rule: str  # "decrease" | "uphill" | "search" | "rejected"
    lr: float
    d: Tensor | None  # (n,), None if the model stays
    loss: float  # f where it ends
    found: Found | None  # at the full step; None if there was no step to try
    judgement: Judgement
    length: float = math.nan  # ‖d‖
    cut: bool = False  # whether the step was cut back to the radius
    unjudged: int = 0  # steps in a row, with this one, whose decrease could not be told from the rounding of f


P = TypeVar("P", bound="Policy")


@dataclass(frozen=True)
class Policy:
    """A rule that watches a run. Frozen: every step puts another one in its place.

    Its fields are plain numbers, and entries of the `state_dict` under their own names: neither another policy nor the
    State has a field of this name, and no other policy is called so, or the import fails. Their defaults are those of a
    run that begins, and of a file that was written before there was this policy. It has no constructor of its own.
    """

    def uphill(self, start: Start, loss: float) -> bool:
        """Whether a step may end at this loss if that is a rise. Every policy must agree, and then the acceptance. It
        is asked about trial points with a lower loss too, where the answer does not matter, and not about those of a
        line search, which has a rule of its own."""
        return True

    def after(self: P, start: Start, end: Ending) -> P:
        """What the next step is left with: also after one that was rejected."""
        return self

    def raised(self: P, by: float, low: float) -> P:
        """The same if weight decay has other weights now, by which f is so much higher where the model is. `low` is the
        lower bound of f, −∞ if none is known; it stays."""
        return self
