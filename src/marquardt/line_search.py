"""Learning-rate line search after a failed step: no new Jacobian and no new factorisation, so not an iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

# Losses at θ + lr·direction for several lr at once.
Along = Callable[[Sequence[float]], list[float]]


class LineSearch(Protocol):
    @property
    def along_step(self) -> bool:
        """Search along the step that failed (with its momentum) instead of the plain LM direction."""
        ...

    def search(
        self, along: Along, loss: float, lr: float, tried: tuple[float, float] | None
    ) -> tuple[float, float] | None:
        """(rate, f there) of the point to take, or None; lr is the optimizer's, `tried` the point that failed on this
        line, if it did."""
        ...


@dataclass(frozen=True)
class Grid:
    """lr ∈ {start, start + step, … < stop}: the least loss wins (the paper, Algorithm 1). Only a decrease counts."""

    start: float = 1e-6  # Algorithm 1
    stop: float = 9.0
    step: float = 0.125
    along_step: bool = False  # True: as in the authors' code
    uphill: bool = False  # True: the least loss is taken even where it is higher than before, as in the authors' code

    def __post_init__(self) -> None:
        if not (0 < self.start < self.stop < math.inf and 0 < self.step < math.inf):
            raise ValueError(
                f"Grid(start={self.start!r}, stop={self.stop!r}, step={self.step!r}): "
                "needs 0 < start < stop and a positive step; the paper's is Grid(1e-6, 9, 0.125)"
            )

    @property
    def rates(self) -> list[float]:
        rates = (self.start + k * self.step for k in range(math.ceil((self.stop - self.start) / self.step)))
        return [lr for lr in rates if lr < self.stop]

    def search(
        self, along: Along, loss: float, lr: float = 1.0, tried: tuple[float, float] | None = None
    ) -> tuple[float, float] | None:
        best = min(
            ((f, lr) for lr, f in zip(self.rates, along(self.rates), strict=True) if math.isfinite(f)), default=None
        )
        return None if best is None or not (best[0] < loss or self.uphill) else (best[1], best[0])


@dataclass(frozen=True)
class Backtracking:
    """lr ← factor·lr, at most `trials` times; the first decrease wins."""

    factor: float = 0.5
    trials: int = 6
    along_step: bool = False

    def __post_init__(self) -> None:
        if not (0 < self.factor < 1 and isinstance(self.trials, int) and self.trials >= 1):
            raise ValueError(
                f"Backtracking(factor={self.factor!r}, trials={self.trials!r}): "
                "needs a factor between 0 and 1 and at least one trial"
            )

    def search(
        self, along: Along, loss: float, lr: float = 1.0, tried: tuple[float, float] | None = None
    ) -> tuple[float, float] | None:
        first = 0 if tried is None else 1
        for k in range(first, first + self.trials):
            rate = lr * self.factor**k
            (f,) = along([rate])
            if math.isfinite(f) and f < loss:
                return rate, f
        return None
