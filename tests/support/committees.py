"""Small tables, and settings with which a committee takes a moment."""

from __future__ import annotations

import torch
from torch import Tensor

QUICK = {"hidden": (4,), "members": 2, "steps": 15}


def table(N: int = 60, outputs: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 3, generator=g, dtype=torch.float64)
    y = torch.stack([x[:, 0].tanh() + k * x[:, 1] for k in range(outputs)], 1)
    return x, y + 0.1 * torch.randn(N, outputs, generator=g, dtype=torch.float64)


def classes(N: int = 60, count: int = 3) -> tuple[Tensor, Tensor]:
    x, y = table(N)
    return x, torch.bucketize(y[:, 0], torch.linspace(-0.5, 0.5, count - 1, dtype=torch.float64))
