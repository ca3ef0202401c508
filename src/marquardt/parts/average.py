"""Averages of the weights, for evaluation: mini-batch LM fits every batch, and the average takes the noise out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Average(Protocol):
    @property
    def restarts(self) -> bool:
        """Whether the average starts anew with every step on the same data, where each is better than the last."""
        ...

    def update(self, mean: Tensor, theta: Tensor, count: int) -> Tensor:
        """The next average from the last one, which is of `count` points and stays as it is."""
        ...


@dataclass(frozen=True)
class EMA:
    """θ̄ ← β·θ̄ + (1−β)·θ with β = min(decay, (1 + t)/(10 + t)): short memory at first, when the weights move fast.

    The warm-up is that of TensorFlow's ExponentialMovingAverage.

    Args:
        decay: β once the average is warm: 0.95 is a mean over about twenty steps.
        restarts: whether the average begins anew with every step on the same data, where each is better than the last.

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
        restarts: whether the average begins anew with every step on the same data.

    >>> opt = mq.LM(model, "mse", average=mq.Polyak())
    """

    restarts: bool = False

    def update(self, mean: Tensor, theta: Tensor, count: int) -> Tensor:
        return mean.lerp(theta, 1 / (count + 1))
