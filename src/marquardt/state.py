"""What a step leaves for the next one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any

from torch import Tensor

from .curvature.contract import Past
from .curvature.plan import Plan
from .metric import Metric
from .policies import POLICIES, Policies, Policy


@dataclass(frozen=True)
class State(Policies):
    """Everything a step leaves for the next one, its policies among it; replaced whole when a step is over. It is saved
    as one flat dict, and what is loaded is held against `ENTRIES`, see plain.py."""

    lam: float
    steps: int = 0
    accepted: int = 0
    best: float = math.inf  # least f so far
    D: Metric | None = None
    previous: Tensor | None = None  # last accepted step dθ
    master: Tensor | None = None  # θ, if the parameters are its rounding
    mean: Tensor | None = None  # average of the weights
    points: int = 0  # how many points it is of
    past: Past | None = None  # what the curvature keeps of earlier steps
    plan: Plan | None = None  # how the curvature is represented, if that was a choice
    most_rows: int = 0  # that a step had
    towards: Tensor | None = None  # θ₀, which the weights decay towards; None for 0
    decay: float | None = None  # what weight decay has of f after the last step; None if that is not known

    def flat(self) -> dict[str, Any]:
        """With the fields of every policy in its place"""
        found: dict[str, Any] = {}
        for name, value in vars(self).items():
            found.update(vars(value) if name in POLICIES else {name: value})
        return found

    def __setstate__(self, found: dict[str, Any]) -> None:  # of a copy, or pickled while State was flat
        self.__dict__.update(nested(found))


def nested(found: Mapping[str, Any]) -> dict[str, Any]:
    """The policies in the place of their fields; those that a flat dict lacks have their defaults."""
    rest, policies = dict(found), {}
    for name, default in POLICIES.items():
        given = rest.pop(name) if isinstance(rest.get(name), Policy) else None
        own = {f.name: rest.pop(f.name) for f in fields(default) if f.name in rest}
        policies[name] = type(default)(**own) if given is None else given
    return rest | policies


# The entries of the flat dict.
ENTRIES: dict[str, Field[Any]] = {f.name: f for f in fields(State) if f.name not in POLICIES}
ENTRIES |= {f.name: f for policy in POLICIES.values() for f in fields(policy)}

# What is as long as θ.
VECTORS = [name for name, entry in ENTRIES.items() if str(entry.type).endswith("Tensor | None")]
