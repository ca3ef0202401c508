"""Batches whose loss is unheard-of: one corrupt sample must not undo what all others have taught."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .base import Ending, Policy, Start

# A batch whose loss is more than so many times those of late is doubted, once so many batches were heard.
UNHEARD, HEARD = 10.0, 10

# How far below the best loss a bound is assumed if none is known, in heights of late. With 1 uphill moves give back
# what took many steps, with 0 there are none: of four losses 0.1 was better than 1 on two, and as good on the others.
BELOW = 0.1


@dataclass(frozen=True)
class Outliers(Policy):
    """On changing batches a loss f over UNHEARD times the largest height h of late is doubted:

        doubt = (f − floor) / (UNHEARD·h)       λ ← doubt·λ, ‖d‖ ≤ the last stride/√doubt, only a decrease counts,
        h ← max(f − low, 0.9·h)                 and nothing is kept of its curvature

    A sample that is only hard loses little by that: it alone has a large share of tr G, which is as many times λD as G
    has rank. Two such batches in a row are no accident.
    """

    height: float = 0.0  # the largest f of late, above its lower bound; above its best if there is no bound
    stride: float = math.inf  # how far the last accepted step went
    doubted: bool = False  # whether the last batch was

    def floor(self, best: float, low: float) -> float:
        """What heights are measured from: the lower bound of the loss. If none is known, a little below the best loss,
        as heights of late go: a constant in the loss then changes nothing."""
        return low if low > -math.inf else best - BELOW * self.height

    def doubt(self, f: float, floor: float, steps: int, same_data: bool) -> float:
        """What λ is multiplied with on a batch with this loss, after so many steps."""
        if same_data or self.doubted or steps < HEARD or not self.height > 0:
            return 1.0
        return max(1.0, (f - floor) / (UNHEARD * self.height))

    def uphill(self, start: Start, loss: float) -> bool:
        return start.doubt == 1

    def after(self, start: Start, end: Ending) -> Outliers:
        if start.doubt > 1:
            return Outliers(self.height, self.stride, True)
        f, low = start.level.f, start.level.low
        above = f - (low if low > -math.inf else min(start.best, end.loss))
        stride = self.stride if end.d is None else end.lr * end.length
        return Outliers(max(above, 0.9 * self.height), stride, False)

    def raised(self, by: float, low: float) -> Outliers:
        if low == -math.inf:  # heights above the best loss, which is raised as much
            return self
        return Outliers(max(0.0, self.height + by), self.stride, self.doubted)
