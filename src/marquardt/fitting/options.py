"""What a search is told: tolerances, limits and ways."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Options:
    ftol: float = 0.0
    xtol: float = 1e-10
    gtol: float = 1e-10
    max_nfev: int = 1000
    factor: float = 100.0  # the first radius is this times ‖Dx₀‖: MINPACK
    geodesic: bool = False
    restarts: bool = True
    capture: bool = False
    x_scale: Tensor | None = None  # 1/D, or None for the norms of the Jacobian's columns
