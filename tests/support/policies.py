"""Steps in numbers, as policies are shown them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from marquardt.jacobian.objective import Level
from marquardt.policies import Ending, Found, Judgement, Start


def start(
    f: float = 10.0, low: float = 1.0, rounding: float = 1e-3, *, repeats: int = 0, best: float = math.inf,
    floor: float | None = None, doubt: float = 1.0, steps: int = 0, theta: Tensor | None = None, decay: float = 0.0,
) -> Start:  # fmt: skip
    """A batch with this loss; the data are the same after two repeats."""
    level = Level(f, low, rounding, 1.0, decay)
    theta = torch.zeros(2, dtype=torch.float64) if theta is None else theta
    return Start(level, theta, steps, min(best, f), low if floor is None else floor, repeats, repeats > 1, doubt)


def found(new_loss: float, **others: Any) -> Found:
    lengths, absent = {"length": 1.0, "theta": 1.0}, {"dDd": None, "cosine": None, "mean_loss": None}
    return Found(new_loss, **{"gd": -4.0, "dGd": 2.0, "gDg": 9.0, **lengths, **absent, **others})


def ending(rule: str = "decrease", loss: float = 8.0, d: Tensor | None = None, **others: Any) -> Ending:
    d = torch.ones(2) if d is None and rule != "rejected" else d
    judgement = Judgement("decrease", True, 0.7, 3.0, 0.2, 0.9)
    known = {"lr": 1.0, "found": found(loss), "judgement": judgement, "length": 2.0}
    return Ending(rule, d=d, loss=loss, **{**known, **others})
