"""Small models and data for mq.fit."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector


def net(inputs: int = 1, hidden: int = 8, outputs: int = 1, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()


def noisy_sine(N: int = 40, noise: float = 0.2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """One period: (N, 1), (N, 1)"""
    g = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(N, 1, generator=g, dtype=torch.float64) - 1
    return x, torch.sin(math.pi * x) + noise * torch.randn(N, 1, generator=g, dtype=torch.float64)


def weights(model: nn.Module) -> Tensor:
    """θ: (n,)"""
    return parameters_to_vector(model.parameters()).detach().clone()


def mse(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x) - y).square().mean())
