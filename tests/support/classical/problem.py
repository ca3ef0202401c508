"""A problem: its residuals, its start and its minima."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

SOLVED = 1e-6  # of Σf², relative to a minimum
SOLVED_ZERO = 1e-12  # of Σf², absolute, where the minimum is 0


@dataclass(frozen=True)
class Minimum:
    value: str  # Σf² with the digits as printed
    x: tuple[float, ...]
    digits: int = 8  # of every parameter (absolute for zeros) that float64 can be asked for; 0: x is one of many

    def errors(self, x: Tensor) -> Tensor:
        """Of every parameter: relative, absolute for zeros."""
        known = torch.tensor(self.x, dtype=torch.float64)
        return (x - known).abs() / torch.where(known == 0, 1.0, known.abs())


@dataclass(frozen=True)
class Problem:
    name: str
    residuals: Callable[[Any], Any]  # (n,) → (m,)
    start: tuple[float, ...]
    minima: tuple[Minimum, ...]
    source: str
    note: str = ""
    symmetric: bool = False  # every permutation of a minimiser is one, and the sorted one is listed
    far: bool = True  # from multiples of the start as well; not Chebyquad, polynomials far outside their interval

    def x0(self, factor: float = 1.0) -> Tensor:
        """The standard start times a factor; from the origin, as in MINPACK's own tests, all parameters = factor."""
        x = torch.tensor(self.start, dtype=torch.float64)
        return torch.full_like(x, factor) if factor != 1 and not x.any() else factor * x

    def jacobian(self, x: Tensor) -> Tensor:
        """∂f/∂x, exact. (m, n)"""
        return traced_jacobian(self.residuals, len(x))(x)

    def sum_of_squares(self, x: Any) -> float:
        f = self.residuals(torch.as_tensor(x, dtype=torch.float64))
        return float(f @ f)

    def solved(self, x: Any) -> Minimum | None:
        """The known minimum that x has reached by its Σf², the nearest of several; None where it has reached none."""
        x = torch.as_tensor(x, dtype=torch.float64)
        found = self.sum_of_squares(x)

        def reached(minimum: Minimum) -> bool:
            if minimum.value == "0":
                return found <= SOLVED_ZERO
            known = self.sum_of_squares(minimum.x)
            return abs(found - known) <= SOLVED * known

        candidates = [minimum for minimum in self.minima if reached(minimum)]
        return min(candidates, key=lambda minimum: float(minimum.errors(self.ordered(x)).max()), default=None)

    def digits(self, x: Any) -> float:
        """Correct digits of the worst parameter, 16 at most; NaN where no minimum or none in particular is reached."""
        minimum = self.solved(x)
        if minimum is None or not minimum.digits:
            return math.nan
        worst = float(minimum.errors(self.ordered(torch.as_tensor(x, dtype=torch.float64))).max())
        return -math.log10(max(worst, 1e-16))

    def ordered(self, x: Tensor) -> Tensor:
        return x.sort().values if self.symmetric else x


@cache
def traced_jacobian(residuals: Callable[[Any], Any], n: int) -> Callable[[Tensor], Tensor]:
    """torch.func.jacfwd as a plain list of operations: twice as fast."""
    return make_fx(torch.func.jacfwd(residuals))(torch.ones(n, dtype=torch.float64))
