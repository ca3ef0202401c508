"""Policies watch a run from step to step, independently of each other: each is one file here and one line below."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Ending, Judgement, Measurements, Policy, Start
from .convergence import Convergence
from .lag import Lag
from .outliers import Outliers
from .recent import Recent
from .same_data import SameData

__all__ = ["POLICIES", "RISING", "Ending", "Judgement", "Measurements", "Policies", "Policy", "Start"]


@dataclass(frozen=True, kw_only=True)
class Policies:
    """Every policy of a run. One line here makes another policy part of each step and of the saved state."""

    same_data: SameData = SameData()
    outliers: Outliers = Outliers()
    recent: Recent = Recent()
    convergence: Convergence = Convergence()
    lag: Lag = Lag()


POLICIES: dict[str, Policy] = vars(Policies())

# The policies that can object to uphill moves; the others need not be asked.
RISING = [name for name, policy in POLICIES.items() if type(policy).uphill is not Policy.uphill]
