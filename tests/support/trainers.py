"""What runs under a trainer are compared by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def progress(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """LM's state in a state_dict, λ, D, averages and all, less the plan, which knows how much memory was free."""
    return {k: v for k, v in state_dict["marquardt"].items() if k != "plan"}
