"""A decay as residuals of parameters and data, fun(p, t, y), and the best fit by SciPy."""

from typing import Any

import numpy as np
import scipy.optimize
import torch

T = torch.linspace(0, 4, 40, dtype=torch.float64)
Y = 2.5 * torch.exp(-1.3 * T) + 0.5 + 0.05 * torch.sin(13 * T**2)


def decay(p: Any, t: Any, y: Any) -> Any:
    return p[0] * torch.exp(-p[1] * t) + p[2] - y


def decay_numpy(p: Any, t: Any, y: Any) -> Any:
    return p[0] * np.exp(-p[1] * t) + p[2] - y


def near(x: Any, best: Any, rtol: float = 1e-6) -> bool:
    return np.allclose(np.asarray(x), np.asarray(best), rtol=rtol, atol=1e-9)


BEST = scipy.optimize.least_squares(decay_numpy, np.ones(3), method="lm", xtol=1e-12, args=(T.numpy(), Y.numpy())).x
