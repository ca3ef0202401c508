"""What a step leaves for the next one, and what can be told from it: the same data, an unheard-of loss, a lost way."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .curvature.contract import Past
from .curvature.plan import Plan
from .metric import Metric
from .tolerances import SAME_LOSS

# A batch whose loss is more than so many times those of late is doubted, once so many batches were heard.
UNHEARD, HEARD = 10.0, 10

# Steps that uphill moves on the same data may take until the loss is below where they began. On the sine of the paper
# those that come back at all do so within 20; 10 of them are too few for one seed in twenty.
PATIENCE = 20

# How slowly the loss of late falls towards the best one, on the same data. On the sine of the paper 0.9 leaves too
# little room to follow a valley, and with 0.98 one run in ten is half above its best loss when it stops.
FADE = 0.95

# How far below the best loss a bound is assumed if none is known, in heights of late. With 1 uphill moves give back
# what took many steps, with 0 there are none: of four losses 0.1 was better than 1 on two, and as good on the others.
BELOW = 0.1


# What is as long as θ.
VECTORS = ("previous", "master", "mean", "haven", "towards")


@dataclass(frozen=True)
class State:
    """Everything a step leaves for the next one; replaced whole when a step is over. What is loaded is held against
    these fields, see plain.py."""

    lam: float
    steps: int = 0
    accepted: int = 0
    D: Metric | None = None
    previous: Tensor | None = None  # last accepted step dθ
    master: Tensor | None = None  # θ, if the parameters are its rounding
    mean: Tensor | None = None  # average of the weights
    points: int = 0  # how many points it is of
    lag: float | None = None  # log f(θ̄)/f of late, on batches before their steps; None if that is not known
    past: Past | None = None  # what the curvature keeps of earlier steps
    plan: Plan | None = None  # how the curvature is represented, if that was a choice
    most_rows: int = 0  # that a step had
    repeats: int = 0  # how often in a row the loss before a step was the loss after the last one
    best: float = math.inf  # least f so far
    expected: float | None = None  # f after the last step: the next one starts with it if the data stay the same
    unjudged: int = 0  # steps in a row whose decrease could not be told from the rounding of f
    idle: int = 0  # steps in a row on the same data that found next to nothing, and predicted no more
    idle_from: float = math.inf  # f before them
    # On changing batches: see `doubt`.
    height: float = 0.0  # the largest f of late, above its lower bound; above its best if there is no bound
    stride: float = math.inf  # how far the last accepted step went
    doubted: bool = False  # whether the last batch was
    # Uphill moves on the same data: see `settled`.
    haven: Tensor | None = None  # θ before the first of those that have not paid so far
    haven_loss: float = math.inf
    away: int = 0  # steps since
    ceiling: float = math.inf  # the loss that they may reach, since earlier ones have not paid
    late: float = math.inf  # what the best loss was of late, see FADE
    towards: Tensor | None = None  # θ₀, which the weights decay towards; None for 0
    decay: float | None = None  # what weight decay has of `expected`; None if that is not known,
    haven_decay: float = 0.0  # and of `haven_loss`

    @property
    def steady(self) -> bool | None:
        """Whether the data are the same in every step, as far as the last step has shown; None after too few steps."""
        if self.repeats:
            return True
        return None if self.steps < 2 else False

    @property
    def behind(self) -> bool:
        """Whether the averaged weights lag behind the last ones."""
        return self.lag is not None and self.lag > 0

    def starts_with(self, f: float, dtype: torch.dtype, low: float = 0.0) -> int:
        """How often in a row the loss before a step was the loss after the last one, if this step begins with f. A loss
        without a lower bound may pass through 0, where it is told from others by its height."""
        if self.expected is None:
            return 0
        size = abs(self.expected) if low > -math.inf else max(abs(self.expected), self.height)
        return self.repeats + 1 if abs(f - self.expected) <= SAME_LOSS[dtype] * size else 0

    def decayed(self, here: float, there: float) -> State:
        """The same levels if weight decay has other weights now, by which it has `here` of f where the model is and
        `there` at the haven: the data stay the same. Heights above the best loss, that of the haven if there is one,
        stay too."""
        more = here - (here if self.decay is None else self.decay)
        away = there - self.haven_decay if self.haven is not None else 0.0
        best = more if self.haven is None else away
        return replace(
            self, expected=None if self.expected is None else self.expected + more, decay=here,
            haven_loss=self.haven_loss + away, haven_decay=self.haven_decay + away, best=self.best + best,
            late=self.late + best, ceiling=self.ceiling + best, idle_from=self.idle_from + more,
            height=max(0.0, self.height + more),
        )  # fmt: skip

    def floor(self, f: float, low: float) -> float:
        """What heights are measured from: the lower bound of the loss. If none is known, a little below the best loss,
        as heights of late go: a constant in the loss then changes nothing."""
        return low if low > -math.inf else min(self.best, f) - BELOW * self.height

    def doubt(self, f: float, low: float, same_data: bool) -> float:
        """What λ is multiplied with on a batch whose loss f is unheard-of: f over UNHEARD times those of late, as
        heights above `floor`. 1 on all others.

        One corrupt sample must not undo what all others have taught. A sample that is only hard loses little: it alone
        has a large share of tr G, which is as many times λD as G has rank. Two such batches in a row are no accident.
        """
        if same_data or self.doubted or self.steps < HEARD or not self.height > 0:
            return 1.0
        return max(1.0, (f - self.floor(f, low)) / (UNHEARD * self.height))

    def overdue(self, loss: float, same_data: bool) -> bool:
        """Whether uphill moves on the same data had time enough to pay, and end with this loss."""
        return same_data and self.haven is not None and self.away >= PATIENCE and loss >= self.haven_loss

    def settled(self, f: float, loss: float, low: float, theta: Tensor, same_data: bool) -> State:
        """Uphill moves on the same data are loans: the point before them is kept until the loss is below that of this
        point. If that takes too long the model goes back there, and until the loss has fallen by a hundredth others
        rise by a hundredth at most. `theta` is the point with the loss f, `low` what heights are measured from."""
        if not same_data:
            return replace(self, haven=None, haven_loss=math.inf, away=0, ceiling=math.inf, late=math.inf)
        best = min(self.best, f, loss)
        late = best + FADE * ((f if self.late == math.inf else self.late) - best)
        home = replace(self, haven=None, haven_loss=math.inf, away=0, late=late)
        if self.haven is None:
            state = replace(home, haven=theta, haven_loss=f, away=1) if loss > f else home
        elif loss > self.haven_loss:
            state = replace(self, away=self.away + 1, late=late)
        elif loss == self.haven_loss:
            state = replace(home, ceiling=low + 1.01 * (loss - low))
        else:
            state = home
        return replace(state, ceiling=math.inf) if loss - low < 0.98 * (state.ceiling - low) else state

    def after(self, f: float, new_loss: float, low: float, lam: float, doubt: float = 1.0) -> State:
        """One step later."""
        state = replace(self, lam=lam, steps=self.steps + 1, best=min(self.best, f, new_loss), expected=new_loss)
        if doubt > 1:
            return replace(state, doubted=True)
        above = f - (low if low > -math.inf else state.best)
        return replace(state, height=max(above, 0.9 * self.height), doubted=False)

    def like(self, theta: Tensor) -> State:
        """The vectors in the precision and on the device of θ: the model may have been moved."""
        found = {k: getattr(self, k) for k in ("D", "previous", "mean", "haven", "towards")}
        moved: dict[str, Any] = {k: v.to(theta) for k, v in found.items() if v is not None}
        if self.past is not None:  # in the precision that its representation chose
            moved["past"] = {k: v.to(theta.device) for k, v in self.past.items()}
        return replace(self, **moved)
