"""When a fit ends, and the sentence that says why."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from ..curvature.cost import duration
from .history import Entry

INTERRUPTED = "interrupted"
CALLBACK = "a callback asked for it"

# Of two log evidences that differ by less than this the higher one is not worth a mention (Kass and Raftery, 1995).
ALIKE = 1.0


@dataclass(frozen=True)
class Stops:
    """The stops of MATLAB's trainlm; None leaves one out.

    `patience` counts validations without a new best, or estimates of the evidence. The gradient is √(gᵀD⁻¹g), the
    length that a step reports, and is compared with the largest so far: the units of the loss do not matter.
    """

    steps: int | None = 1000
    seconds: float | None = None
    goal: float | None = None  # of the loss of the data
    min_gradient: float | None = 1e-7  # over the largest
    max_lam: float | None = 1e10
    patience: int | None = 20

    def __post_init__(self) -> None:
        for entry in fields(self):
            check_stop(entry.name, getattr(self, entry.name), entry.name in ("steps", "patience"))

    def reason(self, entry: Entry | None, seen: Seen) -> str | None:
        """Why the fit ends after this step; None if it goes on."""
        if entry is None:
            return None if self.steps != 0 else "no steps were asked for"
        if self.goal is not None and seen.loss <= self.goal:
            return f"the goal is reached: the loss is {seen.loss:.4g}, at most {self.goal:g}"
        if seen.settled:
            return "settled: neither the effective parameters nor the noise, nor the loss, change any more"
        if seen.settled is None and (words := self._minimum(entry, seen)):  # otherwise one minimum follows another
            return words
        if self.max_lam is not None and seen.lam > self.max_lam:
            return f"λ is {seen.lam:.2g}, above {self.max_lam:g}: no step lowers the loss"
        if self.patience is not None and seen.fails >= self.patience > 0:
            return f"validation: {seen.fails} in a row without a loss below {seen.least:.4g}"
        if self.impatient(seen):
            return f"the log evidence was {seen.highest:.4g}, and lower in {seen.idle} estimates since"
        if self.steps is not None and entry.step >= self.steps:
            return f"{self.steps} steps are done"
        if self.seconds is not None and entry.seconds >= self.seconds:
            return f"{duration(self.seconds)} are over"
        return None

    def impatient(self, seen: Seen) -> bool:
        """Whether the evidence has been lower for too long."""
        return self.patience is not None and seen.idle >= self.patience > 0

    def _minimum(self, entry: Entry, seen: Seen) -> str | None:
        if entry.converged:
            return "converged: no decrease is left that could be told from the rounding of the loss"
        if self.min_gradient is not None and entry.gradient <= self.min_gradient * seen.steepest:
            return f"the gradient is {entry.gradient:.2g}, at most {self.min_gradient:g} of the largest"
        return None


@dataclass
class Seen:
    """What the stops must know of all steps so far. Plain numbers: they are saved."""

    loss: float = math.inf  # of the data; on mini-batches the mean of some of the last
    steepest: float = 0.0  # the largest gradient
    lam: float = 0.0  # of the next step
    least: float = math.inf  # the best loss so far, of the validation set if there is one
    best_step: int = 0
    fails: int = 0  # validations since
    settled: bool | None = None  # weight decay that is found from the data; None if it is not
    highest: float = -math.inf  # log evidence in this descent, if that decides which weights are the best,
    idle: int = 0  # estimates since that were lower,
    before: float = -math.inf  # and the highest one in earlier descents

    def found(self, loss: float, step: int) -> bool:
        """Whether this loss is the least so far."""
        better = loss < self.least
        if better:
            self.least, self.best_step = loss, step
        self.fails = 0 if better else self.fails + 1
        return better

    def judged(self, log_evidence: float, step: int) -> bool:
        """Whether it is as good as the highest of this descent, and better than earlier ones."""
        good = log_evidence > self.highest - ALIKE
        self.highest, self.idle = (max(self.highest, log_evidence), 0) if good else (self.highest, self.idle + 1)
        best = good and log_evidence > self.before
        if best:
            self.best_step = step
        return best

    def begin_anew(self) -> None:
        """Another descent."""
        self.before, self.highest, self.idle = max(self.before, self.highest), -math.inf, 0
        self.settled, self.fails = False, 0


def check_stop(name: str, value: Any, whole: bool) -> None:
    if value is None:
        return
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"{name}={value!r}: {'an integer' if whole else 'a number'}, or None to leave this stop out")
    if math.isnan(value) or (value < 0 and name != "goal"):
        raise ValueError(f"{name}={value!r}: at least 0, or None to leave this stop out")
