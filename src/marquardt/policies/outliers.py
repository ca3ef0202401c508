"""Batches with an unusually high loss: one corrupt sample must not undo what all others have taught."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .base import Ending, Policy, Start

# A batch is an outlier if its loss is more than UNHEARD times the recent ones, from the HEARD-th batch on.
UNHEARD, HEARD = 10.0, 10

# How far below the best loss a bound is assumed if none is known, in units of the recent heights. With 1, uphill moves
# give back what took many steps; with 0 there are none. On two of four losses 0.1 was better than 1, on the others
# equal.
BELOW = 0.1


@dataclass(frozen=True)
class Outliers(Policy):
    """On changing batches a loss f of more than UNHEARD times the largest recent height h makes the batch an outlier:

        excess = (f − floor) / (UNHEARD·h)      λ ← excess·λ, ‖d‖ ≤ the last stride/√excess, only a decrease counts,
        h ← max(f − low, 0.9·h)                 and its curvature is not kept

    A sample that is merely hard loses little by this: its share of tr G is large, and so its curvature exceeds λD by a
    factor of up to the rank of G. Two such batches in a row are no accident, and the second one is treated like any
    other.
    """

    height: float = 0.0  # the largest recent f above its lower bound; above the best f if there is no bound
    stride: float = math.inf  # how far the last accepted step went
    doubted: bool = False  # whether the last batch was an outlier

    def floor(self, best: float, low: float) -> float:
        """What heights are measured from: the lower bound of the loss. If none is known, it is a little below the best
        loss, by a share of the recent heights, so that adding a constant to the loss changes nothing."""
        return low if low > -math.inf else best - BELOW * self.height

    def excess(self, f: float, floor: float, steps: int, same_data: bool) -> float:
        """The factor of λ on a batch with this loss, after this number of steps."""
        if same_data or self.doubted or steps < HEARD or not self.height > 0:
            return 1.0
        return max(1.0, (f - floor) / (UNHEARD * self.height))

    def uphill(self, start: Start, loss: float) -> bool:
        return start.excess == 1

    def after(self, start: Start, end: Ending) -> Outliers:
        if start.excess > 1:
            return Outliers(self.height, self.stride, True)
        f, low = start.level.f, start.level.low
        above = f - (low if low > -math.inf else min(start.best, end.loss))
        stride = self.stride if end.d is None else end.lr * end.length
        return Outliers(max(above, 0.9 * self.height), stride, False)

    def raised(self, by: float, low: float) -> Outliers:
        if low == -math.inf:  # heights are above the best loss, which rises by as much
            return self
        return Outliers(max(0.0, self.height + by), self.stride, self.doubted)
