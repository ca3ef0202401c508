"""Losses: value, gradient and curvature root of each, side by side."""

from .base import (
    BinaryCrossEntropy,
    Elementwise,
    Fault,
    Huber,
    Loss,
    OutputLayout,
    Poisson,
    Residual,
    Root,
    SquaredError,
)
from .classes import (
    BinaryProbabilities,
    CrossEntropy,
    Hinge,
    KLDivergence,
    NegativeLogLikelihood,
    Ordinal,
    SoftMargin,
)
from .function import Function
from .regression import AbsoluteError, Gamma, GaussianNLL, NegativeBinomial, Quantile, StudentT
from .resolve import resolve
from .tasks import Tasks, Term

__all__ = [
    "AbsoluteError",
    "BinaryCrossEntropy",
    "BinaryProbabilities",
    "CrossEntropy",
    "Elementwise",
    "Fault",
    "Function",
    "Gamma",
    "GaussianNLL",
    "Hinge",
    "Huber",
    "KLDivergence",
    "Loss",
    "NegativeBinomial",
    "NegativeLogLikelihood",
    "Ordinal",
    "OutputLayout",
    "Poisson",
    "Quantile",
    "Residual",
    "Root",
    "SoftMargin",
    "SquaredError",
    "StudentT",
    "Tasks",
    "Term",
    "resolve",
]
