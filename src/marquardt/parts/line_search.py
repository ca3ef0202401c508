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
    """lr ∈ {start, start + step, … < stop}: the least loss wins (the paper, Algorithm 1). Only a decrease counts.

    `Grid(0.01, 2, 0.05, power=3, along_step=True, uphill=True)` is the search of the authors' code.

    Args:
        start: the smallest rate.
        stop: where the rates end.
        step: from one rate to the next.
        along_step: whether the search goes along the step with its momentum, and not along the plain one.
        uphill: whether the least loss is taken even if it is higher than before.
        power: of each rate; 3 makes the small ones denser.

    >>> opt = mq.LM(model, "mse", line_search=mq.Grid(stop=2.0))
    """

    start: float = 1e-6  # Algorithm 1
    stop: float = 9.0
    step: float = 0.125
    along_step: bool = False
    uphill: bool = False  # True: the least loss is taken even if it is higher than before
    power: float = 1.0  # of each rate: 3 makes the small ones denser

    def __post_init__(self) -> None:
        if not (0 < self.start < self.stop < math.inf and 0 < self.step < math.inf and 0 < self.power < math.inf):
            raise ValueError(
                f"Grid(start={self.start!r}, stop={self.stop!r}, step={self.step!r}, power={self.power!r}): "
                "needs 0 < start < stop, a positive step and power; the paper's is Grid(1e-6, 9, 0.125)"
            )

    @property
    def rates(self) -> list[float]:
        rates = (self.start + k * self.step for k in range(math.ceil((self.stop - self.start) / self.step)))
        return [lr**self.power for lr in rates if lr < self.stop]

    def search(
        self, along: Along, loss: float, lr: float = 1.0, tried: tuple[float, float] | None = None
    ) -> tuple[float, float] | None:
        best = min(
            ((f, lr) for lr, f in zip(self.rates, along(self.rates), strict=True) if math.isfinite(f)), default=None
        )
        return None if best is None or not (best[0] < loss or self.uphill) else (best[1], best[0])


@dataclass(frozen=True)
class Backtracking:
    """lr ← factor·lr, at most `trials` times; the first decrease wins.

    Args:
        factor: by which the rate falls, below 1.
        trials: rates that are tried, at most.
        along_step: whether the search goes along the step with its momentum, and not along the plain one.

    >>> opt = mq.LM(model, "mse", line_search=mq.Backtracking(trials=3))
    """

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


@dataclass(frozen=True)
class Bracket:
    """The least loss along the line in few evaluations: some rates at once, then parabolas through the best three.

    Measured against the grid of the paper: docs/benchmarks. Only a decrease counts.

    Args:
        rates: that are tried first, all at once, in rising order.
        stop: the largest rate.
        evaluations: of the loss, at most.
        along_step: whether the search goes along the step with its momentum, and not along the plain one.

    >>> opt = mq.LM(model, "mse", line_search=mq.Bracket(evaluations=8))
    """

    rates: tuple[float, ...] = (1 / 64, 1 / 16, 1 / 4, 1.0, 3.0)
    stop: float = 9.0  # the end of the paper's grid
    evaluations: int = 10
    along_step: bool = False

    def __post_init__(self) -> None:
        if not self.rates or list(self.rates) != sorted(set(self.rates)) or not 0 < self.rates[0] <= self.stop:
            raise ValueError(f"Bracket(rates={self.rates!r}): needs positive rates in rising order, up to `stop`")
        if not len(self.rates) <= self.evaluations:
            raise ValueError(
                f"Bracket(evaluations={self.evaluations!r}): at least one for each of the {len(self.rates)} rates"
            )

    def search(
        self, along: Along, loss: float, lr: float = 1.0, tried: tuple[float, float] | None = None
    ) -> tuple[float, float] | None:
        points = [(0.0, loss)] if tried is None else [(0.0, loss), tried]
        first = [rate for rate in self.rates if tried is None or rate != tried[0]]
        points += zip(first, along(first), strict=True)
        for _ in range(self.evaluations - len(first)):
            points.sort()
            rate = self._next(points)
            points.append((rate, along([rate])[0]))
        f, rate = min((f, rate) for rate, f in points if math.isfinite(f))
        return (rate, f) if f < loss else None

    def _next(self, points: list[tuple[float, float]]) -> float:
        """Where the minimum may be, from points in the order of their rates."""
        k = min(range(len(points)), key=lambda i: points[i][1] if math.isfinite(points[i][1]) else math.inf)
        if k == 0:  # not even the smallest rate leads down
            return points[1][0] / 4
        if k == len(points) - 1 and points[k][0] < self.stop:
            return min(2 * points[k][0], self.stop)
        low, best, high = points[k - 1], points[k], points[min(k + 1, len(points) - 1)]
        width = high[0] - low[0]
        rate = parabola(low, best, high)
        margin = 0.02 * width
        if rate is not None and low[0] + margin < rate < high[0] - margin and abs(rate - best[0]) > 2 * margin:
            return rate
        # Into the longer of the two intervals, by the golden section.
        above, below = high[0] - best[0], best[0] - low[0]
        return best[0] + 0.382 * above if above > below else best[0] - 0.382 * below


def parabola(low: tuple[float, float], best: tuple[float, float], high: tuple[float, float]) -> float | None:
    """Where the parabola through three points is least; None where there is none."""
    (x0, f0), (x1, f1), (x2, f2) = low, best, high
    if not math.isfinite(f0) or not math.isfinite(f2):
        return None
    p, q = (x1 - x0) * (f1 - f2), (x1 - x2) * (f1 - f0)
    return None if p == q else x1 - 0.5 * ((x1 - x0) * p - (x1 - x2) * q) / (p - q)
