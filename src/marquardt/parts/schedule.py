"""Schedules: the next λ, from how the last step went."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol


class Outcome(NamedTuple):
    """How a step went, before any line search."""

    loss: float  # f, before
    new_loss: float  # f after the full step; NaN where it could not be computed
    gain: float  # ρ = (f − f_new) / (−lr·gᵀd − ½lr²·dᵀGd), −∞ if the denominator is not positive
    rule: str  # "decrease" | "uphill" | "search" | "return" | "rejected"
    same_data: bool  # the loss before this step was the loss after the last one; False on changing batches
    averaged_curvature: bool = False  # over batches, not that of this one alone
    unjudged: int = 0  # steps in a row, this one included, whose decrease could not be told from the rounding of f
    share: float = 1.0  # λdᵀDd over twice the predicted decrease: what damping has of the step; known on the same data
    lag: float = math.nan  # f(θ̄)/f of the averaged weights θ̄, both above the lower bound and before the step; NaN if
    # there is no average, or on the same data


class Schedule(Protocol):
    @property
    def initial(self) -> float:
        """λ₀"""
        ...

    def update(self, lam: float, outcome: Outcome) -> float:
        """The next λ. It does not fall after a step that only the line search saved, rule "search", whatever this says:
        with this λ the full step was too long."""
        ...


FAILED = ("rejected", "return")

# A share of damping in a step that a smaller λ could not use.
NEGLIGIBLE = 1e-6

# After so many steps in a row that could not be judged, smaller λ have been tried in vain.
ENOUGH = 5


def unjudged(lam: float, down: float, initial: float, outcome: Outcome) -> float:
    """λ after a step whose decrease, predicted and found, is below the rounding of f.

    Such a step says nothing against its λ: to raise it would make the next step smaller still, until θ + d = θ and
    nothing could ever lower it again. A λ above λ₀ falls, since the step may be that small because of λ. On the same
    data λ falls further, since a smaller one may still find a decrease, but not for ever: at a minimum there is none.
    After some such steps λ goes back to λ₀, where it began and where other data may begin.
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

    A step that only the line search saved is a failure, which vanilla LM does not know: with a λ that falls, or stays,
    the full step would be too long every time, and hardly any would be taken.

    Args:
        initial: λ₀.
        factor: by which λ falls and rises.
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
            lam = lam * self.factor if outcome.rule in (*FAILED, "search") else lam / self.factor
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
        if outcome.rule in FAILED:
            raised = decrease > -0.25 or not math.isfinite(outcome.new_loss)
            return lam * 1.5 if raised and lam <= self.maximum else lam
        return lam * 2 / 3 if outcome.rule != "search" and decrease > 0.75 and lam >= self.minimum else lam


@dataclass(frozen=True)
class GainRatio:
    """λ by the gain ratio ρ, actual over predicted decrease: λ falls above ¾, rises below ¼ (Martens' thresholds).

    On the same data ρ is exact, and λ moves fast. From batch to batch ρ is noisy, and λ moves slowly. Where the
    curvature is that of the batch alone, ρ praises every step that fits the noise of the batch: λ then stays above
    `floor`. A λ that no longer matters to the step does not fall any further: it could not come back in time. After an
    uphill step λ stays: to follow the valley further with the same λ is what the step was accepted for (Transtrum &
    Sethna 2012). The factors were measured, docs/recipe.md.

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
        elif not outcome.gain >= 0.25 and outcome.rule != "uphill":  # also if there is no gain to speak of
            lam *= up
        honest = outcome.same_data or outcome.averaged_curvature
        return min(max(lam, self.minimum if honest else self.floor), self.maximum)


@dataclass(frozen=True)
class Balanced:
    """λ by the averaged weights on changing batches, and by the gain ratio on the same data.

    A new batch judges two points that have not been fitted to it: the weights θ and their running average θ̄. If θ̄ is
    ahead, f(θ̄) < target·f(θ), the steps carry more noise of their batches than progress, and λ rises. If it lags
    behind, they still make headway, and λ falls: on data without noise as far as rounding allows. So λ has no floor,
    and depends neither on the units of the loss nor on the numbers of parameters and rows. After a gain ratio below ¼
    λ rises and never falls: that says how far the model of the loss can be trusted, and nothing of noise. Beyond `most`
    it rises for that reason alone: steps so short gain nothing, however noisy they are.

    It is meant for an average over some twenty steps, as EMA(0.95): a longer one lags behind longer, and λ falls
    further. Without an average, the gain ratio alone has to do.

    Args:
        initial: λ₀.
        target: λ rises while f(θ̄) is below this share of f(θ), and falls while it is above.
        quickest: factor by which the averaged weights change λ, at most, in one step.
        most: λ beyond which only a bad gain ratio raises it.
        gain: the schedule on the same data, and for bad gain ratios.

    >>> opt = mq.LM(model, "mse", schedule=mq.Balanced(initial=10.0))
    """

    initial: float = 3.0  # more than it needs: a first step too long costs more than one too short
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
