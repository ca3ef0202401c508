"""The Mackey–Glass equation ẋ = 0.2·x(t − 17)/(1 + x(t − 17)¹⁰) − 0.1·x."""

from __future__ import annotations

import random

import torch
from torch import Tensor

DELAY, STEP = 17, 0.1  # in units of time
LENGTH, SETTLING = 4000, 500  # values that are kept, one each unit of time, after those that are not


def mackey_glass(seed: int) -> Tensor:
    """(LENGTH,), from a start in [0.9, 1.3]. Runge and Kutta's rule, the delayed value halfway as the mean of two."""
    per_unit = round(1 / STEP)
    lag = DELAY * per_unit
    x = [random.Random(seed).uniform(0.9, 1.3)] * (lag + 1)

    def slope(value: float, delayed: float) -> float:
        return 0.2 * delayed / (1 + delayed**10) - 0.1 * value

    for _ in range((LENGTH + SETTLING) * per_unit):
        now, old, next_old = x[-1], x[-1 - lag], x[-lag]
        half = (old + next_old) / 2
        a = slope(now, old)
        b = slope(now + STEP / 2 * a, half)
        c = slope(now + STEP / 2 * b, half)
        d = slope(now + STEP * c, next_old)
        x.append(now + STEP / 6 * (a + 2 * b + 2 * c + d))
    return torch.tensor(x[-LENGTH * per_unit :: per_unit], dtype=torch.float64)


def embedded(values: Tensor, delays: int, apart: int, ahead: int) -> tuple[Tensor, Tensor]:
    """Inputs (N, delays), the oldest value first, and targets (N, 1), both about their mean in units of deviation."""
    values = (values - values.mean()) / values.std()
    windows = values.unfold(0, (delays - 1) * apart + ahead + 1, 1)  # (N, span)
    return windows[:, : (delays - 1) * apart + 1 : apart].contiguous(), windows[:, -1:].contiguous()
