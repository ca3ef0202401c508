"""How a step is judged: which trial points are accepted, the next λ, the search along a line after a failure, and the
average of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

from torch import Tensor


class Trial(NamedTuple):
    """What is known about a trial point."""

    loss: float  # f, before
    new_loss: float  # f at the trial point
    lower_bound: float  # of the loss, 0 for most; an estimate if it has none
    best: float  # the least f so far
    cosine: float | None  # between the plain LM direction and the previous accepted step; None where there is none
    late: float = math.inf  # on the same data, the recent best loss, which falls slowly towards `best`


class Acceptance(Protocol):
    @property
    def looks_back(self) -> bool:
        """Whether it needs the direction of the previous step, which is then kept."""
        ...

    def judge(self, trial: Trial) -> str | None:
        """The rule that accepts the trial point, "decrease" or "uphill", or None."""
        ...


@dataclass(frozen=True)
class Decrease:
    """f_new < f

    >>> opt = mq.LM(model, "mse", acceptance=mq.Decrease())
    """

    @property
    def looks_back(self) -> bool:
        return False

    def judge(self, trial: Trial) -> str | None:
        return "decrease" if math.isfinite(trial.new_loss) and trial.new_loss < trial.loss else None


@dataclass(frozen=True)
class Uphill:
    """f_new < f, or min(1, 1−cos)ᵇ·(f_new − f_low) ≤ f_ref − f_low: uphill moves along the previous step are allowed.

    f_ref is f, or with `against_best` the least f so far (for full batches). After Transtrum & Sethna (2012). With
    `of_late` such a move gives back at most what the last steps on the same data have gained. Near a minimum, where a
    run may be stopped at any step, that is next to nothing.

    Args:
        b: the larger it is, the more loss a step in the direction of the previous one may add.
        against_best: whether f_ref is the least f so far instead of f before the step.
        of_late: whether a move gives back at most what the last steps on the same data have gained.

    >>> opt = mq.LM(model, "mse", acceptance=mq.Uphill(b=1.0))
    """

    b: float = 2.0  # the authors' code
    against_best: bool = False
    of_late: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.b < math.inf:
            raise ValueError(f"Uphill(b={self.b!r}): b must be positive and finite; the authors use 2")

    @property
    def looks_back(self) -> bool:
        return True

    def judge(self, trial: Trial) -> str | None:
        if not math.isfinite(trial.new_loss):
            return None
        if trial.new_loss < trial.loss:
            return "decrease"
        if trial.cosine is None or (self.of_late and trial.new_loss > trial.late):
            return None
        reference = trial.best if self.against_best else trial.loss
        factor = min(1.0, 1.0 - max(-1.0, min(1.0, trial.cosine))) ** self.b
        return "uphill" if factor * (trial.new_loss - trial.lower_bound) <= reference - trial.lower_bound else None


# --- Schedules: the next λ, from the outcome of the last step.


class Outcome(NamedTuple):
    """How a step went, before any line search."""

    loss: float  # f, before
    new_loss: float  # f after the full step; NaN where it could not be computed
    gain: float  # ρ = (f − f_new) / (−lr·gᵀd − ½lr²·dᵀGd), −∞ if the denominator is not positive
    rule: str  # "decrease" | "uphill" | "search" | "rejected"
    same_data: bool  # whether the data are those of the last steps; False on changing batches
    averaged_curvature: bool = False  # whether the curvature is an average over batches
    unjudged: int = 0  # steps in a row, this one included, whose decrease could not be told from the rounding of f
    share: float = 1.0  # λdᵀDd over twice the predicted decrease: the share of damping; known on the same data
    lag: float = math.nan  # f(θ̄)/f of the averaged weights θ̄, both above the lower bound and before the step; NaN if
    # there is no average, or on the same data


class Schedule(Protocol):
    @property
    def initial(self) -> float:
        """λ₀"""
        ...

    def update(self, lam: float, outcome: Outcome) -> float:
        """The next λ. After a step that only the line search saved, rule "search", λ never falls, whatever is returned
        here: with this λ the full step was too long."""
        ...


# Below this share of damping in a step, a smaller λ changes nothing. If λ went on falling, rounding would take its
# place in K + λ·I, and a run by Gram with more rows than parameters would not converge.
NEGLIGIBLE = 1e-6

# After this number of steps in a row that could not be judged, smaller λ have been tried in vain.
ENOUGH = 5


def unjudged(lam: float, down: float, initial: float, outcome: Outcome) -> float:
    """λ after a step whose decrease, predicted and measured, is below the rounding of f.

    Such a step is no argument against its λ. A larger λ would make the next step smaller still, until θ + d = θ and
    nothing could ever lower λ again. A λ above λ₀ falls, since it may be the reason why the step is so small. On the
    same data λ falls further, since a smaller λ may still find a decrease, but not for ever: at a minimum there is
    none. After ENOUGH such steps λ returns to λ₀, from where a run on other data would begin.
    """
    if lam > initial:
        return max(down * lam, initial)
    if outcome.unjudged > ENOUGH:
        return min(lam / down, initial)
    return down * lam if outcome.same_data else lam


def _check(schedule: Schedule, minimum: float, maximum: float) -> None:
    name, lam = type(schedule).__name__, schedule.initial
    if not 0 < lam < math.inf:
        raise ValueError(f"{name}(initial={lam!r}): λ must be finite and positive")
    if not 0 < minimum <= maximum < math.inf:
        raise ValueError(f"{name}(minimum={minimum!r}, maximum={maximum!r}): needs 0 < minimum ≤ maximum < ∞")


@dataclass(frozen=True)
class Constant:
    """λ stays.

    Args:
        initial: λ.

    >>> opt = mq.LM(model, "mse", schedule=mq.Constant(0.1))
    """

    initial: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.initial < math.inf:
            raise ValueError(f"Constant(initial={self.initial!r}): λ must be finite and at least 0")

    def update(self, lam: float, outcome: Outcome) -> float:
        return lam


@dataclass(frozen=True)
class TenFold:
    """λ/10 after success, 10λ after failure: the authors' vanilla LM.

    A step that only the line search saved counts as a failure. Vanilla LM has no such steps: if λ fell or stayed after
    them, every full step would be too long, and hardly any would be taken.

    Args:
        initial: λ₀.
        factor: the factor by which λ falls and rises.
        minimum: λ falls no further.
        maximum: λ rises no further.

    >>> opt = mq.LM(model, "mse", schedule=mq.TenFold(initial=0.01))
    """

    initial: float = 1.0
    factor: float = 10.0
    minimum: float = 1e-10
    maximum: float = 1e10

    def __post_init__(self) -> None:
        _check(self, self.minimum, self.maximum)
        if not 1 < self.factor < math.inf:
            raise ValueError(f"TenFold(factor={self.factor!r}): the factor must be finite and greater than 1")

    def update(self, lam: float, outcome: Outcome) -> float:
        if outcome.unjudged:
            lam = unjudged(lam, 1 / self.factor, self.initial, outcome)
        else:
            lam = lam * self.factor if outcome.rule in ("rejected", "search") else lam / self.factor
        return min(max(lam, self.minimum), self.maximum)


@dataclass(frozen=True)
class RelativeDecrease:
    """⅔λ when the relative decrease exceeds 0.75; 1.5λ on a failed step whose relative increase is below 0.25.

    The authors' code, with its limits 1e-5 and 1e5. A step saved by the line search leaves λ alone.

    Args:
        initial: λ₀.
        minimum: λ falls no further.
        maximum: λ rises no further.

    >>> opt = mq.LM(model, "mse", schedule=mq.RelativeDecrease())
    """

    initial: float = 1.0
    minimum: float = 1e-5
    maximum: float = 1e5

    def __post_init__(self) -> None:
        _check(self, self.minimum, self.maximum)

    def update(self, lam: float, outcome: Outcome) -> float:
        if outcome.unjudged:
            return max(unjudged(lam, 2 / 3, self.initial, outcome), min(lam, self.minimum))
        decrease = (outcome.loss - outcome.new_loss) / abs(outcome.loss) if outcome.loss else 0.0
        if outcome.rule == "rejected":
            raised = decrease > -0.25 or not math.isfinite(outcome.new_loss)
            return lam * 1.5 if raised and lam <= self.maximum else lam
        return lam * 2 / 3 if outcome.rule != "search" and decrease > 0.75 and lam >= self.minimum else lam


@dataclass(frozen=True)
class GainRatio:
    """λ by the gain ratio ρ, actual over predicted decrease: λ falls above ¾, rises below ¼ (Martens' thresholds).

    On the same data ρ is exact, and λ moves fast. From batch to batch ρ is noisy, and λ moves slowly. Where the
    curvature is that of one batch alone, ρ is high for every step that fits the noise of the batch, so λ stays above
    `floor`. A λ that no longer matters to the step does not fall any further, since it could not rise again in time.
    After an uphill step λ stays, because such a step is accepted in order to follow the valley with the same λ
    (Transtrum & Sethna 2012). The factors were measured, see docs/recipe.md.

    Args:
        initial: λ₀.
        down: factor of λ after a good step on the same data.
        up: factor of λ after a bad step on the same data.
        slow_down: the same on changing batches, after a good step,
        slow_up: and after a bad one.
        floor: λ falls no further on changing batches, if the curvature is that of the batch alone.
        minimum: λ falls no further, whatever the data.
        maximum: λ rises no further.

    >>> opt = mq.LM(model, "mse", schedule=mq.GainRatio(initial=0.1))
    """

    initial: float = 1.0
    down: float = 1 / 3
    up: float = 2.0
    slow_down: float = 0.7
    slow_up: float = 1.5
    floor: float = 3.0
    minimum: float = 1e-20
    maximum: float = 1e12

    def __post_init__(self) -> None:
        _check(self, self.minimum, self.maximum)
        for down, up in (("down", "up"), ("slow_down", "slow_up")):
            d, u = getattr(self, down), getattr(self, up)
            if not (0 < d <= 1 <= u < math.inf):
                raise ValueError(f"GainRatio({down}={d!r}, {up}={u!r}): needs 0 < {down} ≤ 1 ≤ {up}")
        if not self.minimum <= self.floor <= self.maximum:
            raise ValueError(
                f"GainRatio(minimum={self.minimum!r}, floor={self.floor!r}, maximum={self.maximum!r}): "
                "needs minimum ≤ floor ≤ maximum"
            )

    def update(self, lam: float, outcome: Outcome) -> float:
        down, up = (self.down, self.up) if outcome.same_data else (self.slow_down, self.slow_up)
        if outcome.unjudged:
            lam = unjudged(lam, down, self.initial, outcome)
        elif outcome.gain > 0.75:
            lam *= down if outcome.share > NEGLIGIBLE else 1.0
        elif not outcome.gain >= 0.25 and outcome.rule != "uphill":  # NaN included
            lam *= up
        honest = outcome.same_data or outcome.averaged_curvature
        return min(max(lam, self.minimum if honest else self.floor), self.maximum)


@dataclass(frozen=True)
class Balanced:
    """λ by the averaged weights on changing batches, and by the gain ratio on the same data.

    A new batch compares two points that have not been fitted to it: the weights θ and their running average θ̄. If θ̄
    is ahead, f(θ̄) < target·f(θ), the steps carry more noise of their batches than progress, and λ rises. If θ̄ lags
    behind, the steps still make progress, and λ falls; on data without noise it falls as far as rounding allows. λ
    therefore has no floor, and depends neither on the units of the loss nor on the numbers of parameters and rows.
    After a gain ratio below ¼ λ always rises: the quadratic model cannot be trusted that far, whatever the noise.
    Beyond `most` only a bad gain ratio raises λ: steps as short as that gain nothing, however noisy they are.

    Balanced is meant for an average over about twenty steps, such as EMA(0.95). A longer average lags behind longer,
    and λ falls further. Without an average, λ follows the gain ratio alone.

    Args:
        initial: λ₀.
        target: λ rises while f(θ̄) is below this share of f(θ), and falls while it is above.
        quickest: factor by which the averaged weights change λ, at most, in one step.
        most: λ beyond which only a bad gain ratio raises it.
        gain: the schedule on the same data, and for bad gain ratios.

    >>> opt = mq.LM(model, "mse", schedule=mq.Balanced(initial=10.0))
    """

    initial: float = 3.0  # on the large side: a first step that is too long costs more than one that is too short
    target: float = 0.95  # 0.9 and 1 were compared, docs/recipe.md
    quickest: float = 1.5  # the average changes λ by this factor at most
    most: float = 100.0
    gain: GainRatio = GainRatio(floor=1e-20)  # its λ₀ is `initial` too

    def __post_init__(self) -> None:
        if not isinstance(self.gain, GainRatio):
            raise TypeError(f"Balanced(gain={self.gain!r}): what λ follows on the same data, an mq.GainRatio()")
        _check(self, self.gain.minimum, self.gain.maximum)
        if not 0 < self.target <= 1:
            raise ValueError(f"Balanced(target={self.target!r}): f(θ̄)/f(θ) to aim at, above 0 and at most 1")
        if not 1 < self.quickest < math.inf:
            raise ValueError(f"Balanced(quickest={self.quickest!r}): the factor must be finite and greater than 1")
        if not self.most > 0:
            raise ValueError(f"Balanced(most={self.most!r}): what the average may raise λ to, above 0")

    @cached_property
    def _on_the_same_data(self) -> GainRatio:
        return replace(self.gain, initial=self.initial)

    def update(self, lam: float, outcome: Outcome) -> float:
        if outcome.same_data or outcome.unjudged or math.isnan(outcome.lag):
            return self._on_the_same_data.update(lam, outcome)
        change = min(max(self.target / outcome.lag, 1 / self.quickest), self.quickest)
        if not outcome.gain >= 0.25 and outcome.rule != "uphill":
            lam *= self.gain.slow_up
        elif change < 1:
            lam *= change
        if change > 1:
            lam = max(lam, min(change * lam, self.most))
        return min(max(lam, self.gain.minimum), self.gain.maximum)


# --- The line search for a learning rate after a failed step. It needs no new Jacobian and no new factorisation.


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
        """(rate, f there) of the point to take, or None. lr is the optimizer's, `tried` the point on this line that has
        failed, if any."""
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
        """Where the minimum may lie, from points in the order of their rates."""
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
    """The minimum of the parabola through three points; None if it has none."""
    (x0, f0), (x1, f1), (x2, f2) = low, best, high
    if not math.isfinite(f0) or not math.isfinite(f2):
        return None
    p, q = (x1 - x0) * (f1 - f2), (x1 - x2) * (f1 - f0)
    return None if p == q else x1 - 0.5 * ((x1 - x0) * p - (x1 - x2) * q) / (p - q)


# --- Averages of the weights, for evaluation: mini-batch steps fit the noise of every batch, and an average removes it.


class Average(Protocol):
    @property
    def restarts(self) -> bool:
        """Whether no average is kept while the data are the same, where each step is better than the last."""
        ...

    def update(self, mean: Tensor, theta: Tensor, count: int) -> Tensor:
        """The next average; `mean` is that of `count` points and is not changed."""
        ...


@dataclass(frozen=True)
class EMA:
    """θ̄ ← β·θ̄ + (1−β)·θ with β = min(decay, (1 + t)/(10 + t)): short memory at first, when the weights move fast.

    The warm-up is that of TensorFlow's ExponentialMovingAverage.

    Args:
        decay: β once the average is warm: 0.95 is a mean over about twenty steps.
        restarts: whether no average is kept while the data are the same, where each step is better than the last.

    >>> opt = mq.LM(model, "mse", average=mq.EMA(decay=0.99))
    >>> with opt.averaged():
    ...     z = model(x)
    """

    decay: float = 0.95
    restarts: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"EMA(decay={self.decay!r}): must be at least 0 and below 1")

    def update(self, mean: Tensor, theta: Tensor, count: int) -> Tensor:
        return mean.lerp(theta, 1 - min(self.decay, (1 + count) / (10 + count)))


@dataclass(frozen=True)
class Polyak:
    """θ̄ = the mean of all accepted θ.

    Args:
        restarts: whether no average is kept while the data are the same.

    >>> opt = mq.LM(model, "mse", average=mq.Polyak())
    """

    restarts: bool = False

    def update(self, mean: Tensor, theta: Tensor, count: int) -> Tensor:
        return mean.lerp(theta, 1 / (count + 1))
