"""A metric from a saved state: each kind that can be."""

from __future__ import annotations

from typing import Any

from .base import Metric, Part
from .diagonal import Diagonal
from .layered import Layered

KINDS = (Diagonal, Layered)


def restored(state: list[Any]) -> Metric:
    """The metric that a saved state holds"""
    scale, parts = state
    if isinstance(parts, dict):
        return Layered.restored(scale, parts)
    return Diagonal(scale, None if parts is None else [Part.of(part) for part in parts])
