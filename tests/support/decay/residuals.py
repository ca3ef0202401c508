"""A decay as residuals of its parameters, fun(p), with an outlier in the data."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, exp


def grid(a: float, b: float, n: int) -> Tensor:
    return torch.linspace(a, b, n, dtype=torch.float64)


T = grid(0, 4, 40)  # 40 points
Y = 2.5 * exp(-1.3 * T) + 0.5 + 0.05 * torch.sin(12.9898 * torch.arange(40.0) ** 2) + (T[5] == T)  # one outlier


def decay(p: Any) -> Any:
    return p[0] * exp(-p[1] * T) + p[2] - Y


def decay_numpy(p: Any) -> Any:
    return p[0] * np.exp(-p[1] * T.numpy()) + p[2] - Y.numpy()
