"""When a run on the same data has converged: no decrease is left that could be told from the rounding of the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .base import Ending, Policy, Start

# A run on the same data has converged if so many steps in a row, with several λ, predict no more than so many roundings
# of the loss each, and have found no more all in all.
IDLE, FAINT = 10, 64


@dataclass(frozen=True)
class Convergence(Policy):
    """Steps that all in all have found next to nothing, and predicted no more. A λ above λ₀ or the radius may be why
    they predict so little."""

    idle: int = 0  # steps in a row on the same data that found next to nothing, and predicted no more
    idle_from: float = math.inf  # f before them
    unjudged: int = 0  # steps in a row whose decrease could not be told from the rounding of f

    def reached(self, lam: float, initial: float) -> bool:
        """After a step with this λ"""
        return self.idle >= IDLE and lam <= initial

    def after(self, start: Start, end: Ending) -> Convergence:
        f, low, rounding = start.level[:3]
        faint = start.same_data and not end.cut and min(end.judgement.predicted, f - low) <= FAINT * rounding
        idle_from = self.idle_from if self.idle else f
        idle = self.idle + 1 if faint and abs(idle_from - end.loss) <= FAINT * rounding else 0
        return Convergence(idle, idle_from, end.unjudged)

    def raised(self, by: float, low: float) -> Convergence:
        return Convergence(self.idle, self.idle_from + by, self.unjudged)
