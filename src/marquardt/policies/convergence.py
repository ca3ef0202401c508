"""When a run on the same data has converged: no decrease is left that could be told from the rounding of the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .base import Ending, Policy, Start

# A run on the same data has converged after IDLE steps in a row, with several λ, each of which predicted a decrease of
# at most FAINT roundings of the loss, and which together found no more than that.
IDLE, FAINT = 10, 64


@dataclass(frozen=True)
class Convergence(Policy):
    """Counts steps that predict next to no decrease and together find none. Steps with a λ above λ₀, or cut back to the
    radius, do not count: that alone may be why they predict so little."""

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
