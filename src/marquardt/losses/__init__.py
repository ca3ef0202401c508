"""Losses: value, gradient and curvature root of each, side by side."""

from .base import Fault, Loss, Root
from .cross_entropy import CrossEntropy
from .elementwise import BinaryCrossEntropy, Elementwise, Huber, Poisson, Residual, SquaredError
from .outputs import OutputLayout
from .resolve import resolve
from .tasks import Tasks, Term

__all__ = [
    "BinaryCrossEntropy",
    "CrossEntropy",
    "Elementwise",
    "Fault",
    "Huber",
    "Loss",
    "OutputLayout",
    "Poisson",
    "Residual",
    "Root",
    "SquaredError",
    "Tasks",
    "Term",
    "resolve",
]
