"""Uphill moves on the same data are loans: they are paid back, or called in."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from .base import Ending, Policy, Start

# Steps that uphill moves on the same data may take until the loss is below where they began. On the sine of the paper
# those that come back at all do so within 20; 10 of them are too few for one seed in twenty.
PATIENCE = 20

# How slowly the loss of late falls towards the best one, on the same data. On the sine of the paper 0.9 leaves too
# little room to follow a valley, and with 0.98 one run in ten is half above its best loss when it stops.
FADE = 0.95


@dataclass(frozen=True)
class Loans(Policy):
    """The point before an uphill move is the haven, until the loss is below that of this point. If that takes PATIENCE
    steps the model goes back there, and until the loss has fallen by a hundredth others rise by a hundredth at most.

        late ← best + FADE·(late − best)        what uphill moves may rise to with Uphill(of_late=True)
    """

    haven: Tensor | None = None  # θ before the first uphill move of those that have not paid so far
    haven_loss: float = math.inf
    away: int = 0  # steps since
    ceiling: float = math.inf  # the loss that they may reach, since earlier ones have not paid
    late: float = math.inf  # what the best loss was of late
    haven_decay: float = 0.0  # what weight decay has of `haven_loss`

    def uphill(self, start: Start, loss: float) -> bool:
        return loss <= self.ceiling

    def overdue(self, loss: float, same_data: bool) -> bool:
        """Whether they had time enough to pay, and end with this loss."""
        return same_data and self.haven is not None and self.away >= PATIENCE and loss >= self.haven_loss

    def after(self, start: Start, end: Ending) -> Loans:
        if not start.same_data:
            return Loans(haven_decay=self.haven_decay)
        f, loss, low = start.level.f, end.loss, start.floor
        best = min(start.best, loss)
        late = best + FADE * ((f if self.late == math.inf else self.late) - best)
        haven, haven_loss, away, ceiling, decay = None, math.inf, 0, self.ceiling, self.haven_decay
        if self.haven is None:
            if loss > f:
                haven, haven_loss, away, decay = start.theta, f, 1, start.level.decay
        elif loss > self.haven_loss:
            haven, haven_loss, away = self.haven, self.haven_loss, self.away + 1
        elif loss == self.haven_loss:
            ceiling = low + 1.01 * (loss - low)
        if loss - low < 0.98 * (ceiling - low):
            ceiling = math.inf
        return Loans(haven, haven_loss, away, ceiling, late, decay)

    def raised(self, here: float, best: float) -> Loans:
        away = 0.0 if self.haven is None else best  # the haven is where the loss was least
        return Loans(
            self.haven, self.haven_loss + away, self.away, self.ceiling + best, self.late + best,
            self.haven_decay + away,
        )  # fmt: skip
