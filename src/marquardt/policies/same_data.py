"""Whether the data are the same in every step, as their loss shows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..tolerances import SAME_LOSS
from .base import Ending, Policy, Start


@dataclass(frozen=True)
class SameData(Policy):
    """The data are the same if the loss before a step equalled the loss after the last one twice in a row. Once may be
    chance on large batches."""

    repeats: int = 0  # how often in a row the loss before a step was the loss after the last one
    expected: float | None = None  # f after the last step, with which the next one starts if the data stay the same

    def repeated(self, f: float, dtype: torch.dtype, low: float = 0.0, height: float = 0.0) -> int:
        """How often in a row that was so, if this step begins with f. A loss without a lower bound may pass through 0,
        where it is compared by its height."""
        if self.expected is None:
            return 0
        size = abs(self.expected) if low > -math.inf else max(abs(self.expected), height)
        return self.repeats + 1 if abs(f - self.expected) <= SAME_LOSS[dtype] * size else 0

    def steady(self, steps: int) -> bool | None:
        """Whether the data are the same, as the last step has shown; None after too few steps."""
        if self.repeats:
            return True
        return None if steps < 2 else False

    @property
    def soon(self) -> bool:
        """Whether the next step will count as one on the same data, if they do not change."""
        return self.repeats > 0

    def after(self, start: Start, end: Ending) -> SameData:
        return SameData(start.repeats, end.loss)

    def raised(self, by: float, low: float) -> SameData:
        return SameData(self.repeats, None if self.expected is None else self.expected + by)
