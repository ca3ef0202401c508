"""Named assemblies of parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .acceptance import Decrease, Uphill
from .curvature import Auto
from .damping import Identity, MaxDiagonal
from .line_search import Grid
from .losses import CrossEntropy, Loss, SquaredError, resolve
from .momentum import AdaptiveMomentum
from .optimizer import LM
from .rows import Empirical, Exact
from .schedule import Constant, PaperSchedule, TenFold


def _in_sums(loss: Any) -> Loss:
    """Squared error as the authors take it, ½Σr²: λ, δP and D₀ carry its units. Reported as the user has it."""
    loss = resolve(loss)
    return replace(loss, reduction="sum", factor=0.5, reported=loss) if isinstance(loss, SquaredError) else loss


def paper(model: torch.nn.Module, loss: Any, **parts: Any) -> LM:
    """The paper's LM: max-diagonal damping, adaptive momentum, learning-rate line search, uphill acceptance."""
    loss = _in_sums(loss)
    ours: dict[str, Any] = {
        "curvature": Auto(),
        "rows": Empirical() if isinstance(loss, CrossEntropy) else Exact(),
        "damping": MaxDiagonal(),
        "schedule": PaperSchedule(),
        "momentum": AdaptiveMomentum(),
        "acceptance": Uphill(),
        "line_search": Grid(),
        "average": None,
    }
    return LM(model, loss, **{**ours, **parts})


def vanilla(model: torch.nn.Module, loss: Any, **parts: Any) -> LM:
    """Levenberg's LM: identity damping, λ/10 after success and 10λ after failure."""
    ours: dict[str, Any] = {
        "curvature": Auto(),
        "damping": Identity(),
        "schedule": TenFold(),
        "momentum": None,
        "acceptance": Decrease(),
        "line_search": None,
        "average": None,
    }
    return LM(model, _in_sums(loss), **{**ours, **parts})


def gauss_newton(model: torch.nn.Module, loss: Any, **parts: Any) -> LM:
    """λ = 0, with a line search after a failed step."""
    return vanilla(model, loss, **{"schedule": Constant(0.0), "line_search": Grid(), **parts})
