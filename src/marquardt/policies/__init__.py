"""Policies watch a run from step to step, each by itself: a file here, and a line below."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Ending, Found, Judgement, Policy, Start
from .convergence import Convergence
from .lag import Lag
from .outliers import Outliers
from .recent import Recent
from .same_data import SameData

__all__ = ["POLICIES", "RISING", "Ending", "Found", "Judgement", "Policies", "Policy", "Start"]


@dataclass(frozen=True, kw_only=True)
class Policies:
    """Every policy of a run: a line is all that makes another one part of each step, and of what is saved."""

    same_data: SameData = SameData()
    outliers: Outliers = Outliers()
    recent: Recent = Recent()
    convergence: Convergence = Convergence()
    lag: Lag = Lag()


POLICIES: dict[str, Policy] = vars(Policies())

# Those that have a say in uphill moves: the others would be asked for nothing.
RISING = [name for name, policy in POLICIES.items() if type(policy).uphill is not Policy.uphill]
