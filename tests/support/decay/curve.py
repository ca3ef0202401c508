"""A decay as a curve f(x, a, b, c), noisy data of it, and their standard deviations."""

from typing import Any

import numpy as np
import torch

X = np.linspace(0, 4, 40)
NOISE = np.random.default_rng(0).standard_normal((1000, 40))
Y = 2.5 * np.exp(-1.3 * X) + 0.5 + 0.05 * NOISE[0]
SIGMA = 0.05 + 0.02 * X
COVARIANCE = np.diag(SIGMA**2) + 0.0005
TIGHT = {"ftol": 1e-14, "xtol": 1e-14, "gtol": 1e-14}


def decay(x: Any, a: Any, b: Any, c: Any) -> Any:
    return a * torch.exp(-b * x) + c


def decay_numpy(x: Any, a: Any, b: Any, c: Any) -> Any:
    return a * np.exp(-b * x) + c


def slopes(x: Any, a: Any, b: Any, c: Any) -> Any:
    e = np.exp(-b * x)
    return np.stack([e, -a * x * e, np.ones_like(x)], 1)
