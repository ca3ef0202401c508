"""Which trial points are accepted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Trial(NamedTuple):
    """What is known of a trial point."""

    loss: float  # f, before
    new_loss: float  # f at the trial point
    lower_bound: float  # of the loss, 0 for most; an estimate if it has none
    best: float  # the least f so far
    cosine: float | None  # between the plain LM direction and the previous accepted step; None where there is none
    late: float = math.inf  # on the same data, what the least f so far was of late; it falls towards `best`


class Acceptance(Protocol):
    @property
    def looks_back(self) -> bool:
        """Whether it asks for the direction of the previous step, which is then kept."""
        ...

    def judge(self, trial: Trial) -> str | None:
        """The rule that accepts the trial point, "decrease" or "uphill", or None."""
        ...


@dataclass(frozen=True)
class Decrease:
    """f_new < f

    >>> opt = mq.LM(model, "mse", acceptance=mq.Decrease())
    """

    @property
    def looks_back(self) -> bool:
        return False

    def judge(self, trial: Trial) -> str | None:
        return "decrease" if math.isfinite(trial.new_loss) and trial.new_loss < trial.loss else None


@dataclass(frozen=True)
class Uphill:
    """f_new < f, or min(1, 1−cos)ᵇ·(f_new − f_low) ≤ f_ref − f_low: uphill moves along the previous step are allowed.

    f_ref is f, or with `against_best` the least f so far (for full batches). After Transtrum & Sethna (2012). With
    `of_late` such a move gives back at most what the last steps on the same data have gained: near a minimum, where
    somebody may stop at any step, that is next to nothing.

    Args:
        b: the larger it is, the more a step may lose that goes in the direction of the previous one.
        against_best: whether f_ref is the least f so far, and not that before the step.
        of_late: whether a move gives back at most what the last steps on the same data have gained.

    >>> opt = mq.LM(model, "mse", acceptance=mq.Uphill(b=1.0))
    """

    b: float = 2.0  # the authors' code
    against_best: bool = False
    of_late: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.b < math.inf:
            raise ValueError(f"Uphill(b={self.b!r}): b must be positive and finite; the authors use 2")

    @property
    def looks_back(self) -> bool:
        return True

    def judge(self, trial: Trial) -> str | None:
        if not math.isfinite(trial.new_loss):
            return None
        if trial.new_loss < trial.loss:
            return "decrease"
        if trial.cosine is None or (self.of_late and trial.new_loss > trial.late):
            return None
        reference = trial.best if self.against_best else trial.loss
        factor = min(1.0, 1.0 - max(-1.0, min(1.0, trial.cosine))) ** self.b
        return "uphill" if factor * (trial.new_loss - trial.lower_bound) <= reference - trial.lower_bound else None
