"""The recent best loss on the same data: uphill moves near a minimum rise to it and no higher."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .base import Ending, Policy, Start

# How slowly the recent loss falls towards the best one on the same data. On the paper's sine 0.9 leaves too little room
# to follow a valley; with 0.98 one run in ten stops half as high again as its best loss.
FADE = 0.95


@dataclass(frozen=True)
class Recent(Policy):
    """late ← least + FADE·(late − least)        what uphill moves may rise to with Uphill(of_late=True)"""

    late: float = math.inf  # the recent best loss; ∞ on changing batches
    least: float = math.inf  # the best loss since the data have stayed the same

    def after(self, start: Start, end: Ending) -> Recent:
        if not start.same_data:
            return Recent()
        least = min(self.least, start.level.f, end.loss)
        late = start.level.f if self.late == math.inf else self.late
        return Recent(least + FADE * (late - least), least)

    def raised(self, by: float, low: float) -> Recent:
        return Recent(self.late + by, self.least + by)
