"""What one step did, in the units in which the loss is reported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .arguments import brief
from .iteration import Ending, Parts, Start
from .losses import Loss
from .state import State


@dataclass(frozen=True)
class Step:
    """What one step did.

    >>> step = mq.LM(model, "mse").step(x, y)
    >>> step.accepted, step.rule, step.new_loss < step.loss
    (True, 'decrease', True)
    """

    loss: float  # f before
    new_loss: float  # f after the step; f before it if it was rejected
    accepted: bool  # whether the weights have moved
    rule: str  # "decrease" | "uphill" | "search" | "return" | "rejected"
    lam: float  # λ of this step
    lr: float  # learning rate of this step; after a line search the one it found
    gain: float  # ρ, actual over predicted decrease of the full step; NaN if both are below the rounding of the loss
    note: str = ""  # escalations, in words
    slope: float = math.nan  # √(gᵀD⁻¹g): the length of the gradient in the metric of the damping
    converged: bool = False  # on the same data: no decrease is left that could be told from the rounding of the loss
    averaged_loss: float = math.nan  # on changing batches, f of the averaged weights before the step
    seconds: float = field(default=math.nan, compare=False)  # that it took,
    predicted: float = field(default=math.nan, compare=False)  # and that were predicted before it began; NaN if none
    data_loss: float = math.nan  # `loss` without weight decay,
    new_data_loss: float = math.nan  # and `new_loss`


def report(
    loss: Loss, start: Start, end: Ending, lam: float, notes: Sequence[str], converged: bool, decay: float = 0.0
) -> Step:
    """`decay` is what weight decay has of f where the step ends."""
    level = start.level
    numbers = level.f, end.loss, level.f - level.decay, end.loss - decay
    before, after, data, new_data = (loss.report(x, level.normaliser) for x in numbers)
    slope = math.nan if end.found is None else math.sqrt(max(end.found.gDg, 0.0))
    mean = None if end.found is None else end.found.mean_loss
    averaged = math.nan if mean is None else loss.report(mean, level.normaliser)
    gain, words = end.judgement.gain, "; ".join(notes)
    return Step(
        before, after, end.d is not None, end.rule, lam, end.lr, gain, words, slope, converged, averaged,
        data_loss=data, new_data_loss=new_data,
    )  # fmt: skip


def described(head: str, parts: Parts, state: State, options: Sequence[str], more: Sequence[str]) -> str:
    """An optimizer in words, a line for each part."""
    named = [f"{name:<12}{brief(part)}" for name, part in vars(parts).items() if name != "radius"]
    found = f"λ = {state.lam:.3g}, steps: {state.steps}, accepted: {state.accepted}"
    return "\n    ".join([head, *named, *options, found, *more])
