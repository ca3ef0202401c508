"""How far the averaged weights lag behind the last ones, on batches that neither has been fitted to."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .base import Ending, Policy, Start


@dataclass(frozen=True)
class Lag(Policy):
    """l ← 0.8·l + 0.2·log f(θ̄)/f(θ), smoothed because one batch alone says little. On the same data there is no lag,
    because no average is kept there."""

    lag: float | None = None  # recent log f(θ̄)/f, on batches before their steps; None if unknown

    @property
    def behind(self) -> bool:
        """Whether the averaged weights are worse than the last ones."""
        return self.lag is not None and self.lag > 0

    def after(self, start: Start, end: Ending) -> Lag:
        lag = None if start.same_data else smoothed(self.lag, end.judgement.lag)
        return self if lag == self.lag else Lag(lag)


def smoothed(past: float | None, lag: float) -> float | None:
    if not 0 < lag < math.inf:
        return past
    return math.log(lag) if past is None else 0.8 * past + 0.2 * math.log(lag)


def ratio(f: float, low: float, least: float, mean_loss: float) -> float:
    """f(θ̄)/f, both above the lower bound; NaN if one of them cannot be told from it, by no more than `least`."""
    return math.nan if min(f, mean_loss) - low <= least else (mean_loss - low) / (f - low)
