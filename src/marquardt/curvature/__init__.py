"""Representations of the curvature G, all behind one contract."""

from .auto import Auto
from .contract import Curvature, Representation
from .dense import Dense
from .gram import Gram

__all__ = ["Auto", "Curvature", "Dense", "Gram", "Representation"]
