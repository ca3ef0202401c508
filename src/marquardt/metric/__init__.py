"""The D of (G + λD)d = −g: the metric in which the length of a step is measured."""

from .base import Diagonal, Dot, Metric, Part, Turn, Whitenable
from .layered import KINDS, Layered, check_saved, restored
from .sides import LayerSides, joined, trusted

__all__ = [
    "KINDS", "Diagonal", "Dot", "LayerSides", "Layered", "Metric", "Part", "Turn", "Whitenable", "check_saved",
    "joined", "restored", "trusted",
]  # fmt: skip
