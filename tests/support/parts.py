"""What a part is given, and nothing else; and the plain step around it."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import marquardt as mq
from marquardt.jacobian.objective import Level
from marquardt.metric import restored
from marquardt.parts.judging import Trial
from marquardt.policies import Ending, Judgement, Measurements, Start

f64 = torch.float64
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(2, 10)


def decades(low: float, high: float):
    """Positive numbers, evenly spread over the orders of magnitude."""
    return st.floats(low, high).map(lambda e: 10.0**e)


class Always:
    """Accepts what is finite."""

    looks_back = False

    def judge(self, trial: Trial) -> str | None:
        return "decrease" if math.isfinite(trial.new_loss) else None


class Never:
    """Leaves every step to the line search."""

    looks_back = False

    def judge(self, trial: Trial) -> str | None:
        return None


def mlp(seed: int = 0, outputs: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def batch(seed: int = 0, N: int = 24, outputs: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 2, dtype=f64, generator=generator)
    return x, torch.sin(2 * x[:, :1] + torch.arange(outputs)) + x[:, 1:]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def lm(model: nn.Module, loss="mse", **parts) -> mq.LM:
    """Nothing but the plain step, unless told otherwise."""
    bare = {
        "curvature": mq.Dense(inertia=0.0),
        "rows": mq.Exact(),
        "damping": mq.Identity(),
        "schedule": mq.Constant(0.1),
        "momentum": None,
        "acceptance": Always(),
        "line_search": None,
        "average": None,
    }
    return mq.LM(model, loss, **{**bare, **parts})


def entries(opt: mq.LM) -> Tensor:
    """D as the optimizer keeps it: (n,)"""
    return restored(opt.state_dict()["marquardt"]["D"]).entries([p.numel() for p in opt.params])


def curvature(model: nn.Module, x: Tensor, y: Tensor, loss="mse"):
    return mq.Dense().represent(mq.linearize(model, loss, x, y))


def start(
    f: float = 10.0, low: float = 1.0, rounding: float = 1e-3, *, repeats: int = 0, best: float = math.inf,
    floor: float | None = None, excess: float = 1.0, steps: int = 0, theta: Tensor | None = None, decay: float = 0.0,
) -> Start:  # fmt: skip
    """A batch with this loss; the data are the same after two repeats."""
    level = Level(f, low, rounding, 1.0, decay)
    theta = torch.zeros(2, dtype=torch.float64) if theta is None else theta
    return Start(level, theta, steps, min(best, f), low if floor is None else floor, repeats, repeats > 1, excess)


def measurements(new_loss: float, **others: Any) -> Measurements:
    return Measurements(new_loss, **{"gd": -4.0, "dGd": 2.0, "gDg": 9.0, "length": 1.0, "theta": 1.0, **others})


def ending(rule: str = "decrease", loss: float = 8.0, d: Tensor | None = None, **others: Any) -> Ending:
    d = torch.ones(2) if d is None and rule != "rejected" else d
    judgement = Judgement("decrease", True, 0.7, 3.0, 0.2, 0.9)
    known = {"lr": 1.0, "trial": measurements(loss), "judgement": judgement, "length": 2.0}
    return Ending(rule, d=d, loss=loss, **{**known, **others})
