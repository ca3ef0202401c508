"""Losses: value, gradient and curvature root of each, side by side."""

from .base import Fault, Loss, Root
from .cross_entropy import CrossEntropy
from .elementwise import BinaryCrossEntropy, Elementwise, Huber, Poisson, Residual, SquaredError
from .resolve import resolve

__all__ = [
    "BinaryCrossEntropy",
    "CrossEntropy",
    "Elementwise",
    "Fault",
    "Huber",
    "Loss",
    "Poisson",
    "Residual",
    "Root",
    "SquaredError",
    "resolve",
]
