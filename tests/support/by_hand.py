"""The algorithm, written out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import marquardt as mq
from support import reference
from support.steps import objective


@dataclass
class ByHand:
    """(G + λD)δ = −g with dense matrices: TenFold λ, acceptance of a decrease; the model holds θ."""

    model: nn.Module
    loss: Any
    params: list[nn.Parameter] | None = None
    lam: float = 0.1
    lr: float = 1.0
    max_diagonal: bool = False
    momentum: bool = False
    D: Any = None
    previous: Tensor | None = None

    def step(self, x: Any, y: Any, weight: Tensor | None = None) -> tuple[float, float, bool, float]:
        """f, f at the trial point, whether it was accepted, and the gain ratio."""
        params = list(self.model.parameters()) if self.params is None else self.params
        old = parameters_to_vector(params).detach().clone()
        q = reference.quadratic(self.model, self.loss, x, y, weight, params)
        D = torch.ones_like(q.g)
        if self.max_diagonal:
            D = q.diagonal().clamp(min=0.01) if self.D is None else torch.maximum(self.D, q.diagonal())
        d = q.step(self.lam * D)
        if self.momentum and self.previous is not None:
            d = reference.adaptive_momentum(q.damped(self.lam * D), q.g, self.previous, xi=0.9, dP=0.6)
        vector_to_parameters(old + self.lr * d, params)
        f, f_new = q.f.item(), objective(self.model, self.loss, x, y, weight)
        predicted = (-self.lr * q.g @ d - 0.5 * self.lr**2 * d @ q.G @ d).item()
        accepted = f_new < f
        if accepted:
            self.D, self.previous, self.lam = D, self.lr * d, self.lam / 10
        else:
            vector_to_parameters(old, params)
            self.lam *= 10
        return f, f_new, accepted, (f - f_new) / predicted if predicted > 0 else -math.inf


RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # parts, and the same by hand
    "plain": ({}, {}),
    "damped lr": ({"lr": 0.3}, {"lr": 0.3}),
    "max-diagonal": ({"damping": mq.MaxDiagonal()}, {"max_diagonal": True}),
    "momentum": ({"momentum": mq.AdaptiveMomentum()}, {"momentum": True}),
    "both": (
        {"damping": mq.MaxDiagonal(), "momentum": mq.AdaptiveMomentum()},
        {"max_diagonal": True, "momentum": True},
    ),
    "both, damped lr": (
        {"damping": mq.MaxDiagonal(), "momentum": mq.AdaptiveMomentum(), "lr": 0.3},
        {"max_diagonal": True, "momentum": True, "lr": 0.3},
    ),
}
