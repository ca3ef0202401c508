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
from .cross_entropy import CrossEntropy
from .function import Function
from .gaussian import GaussianNLL
from .margins import Hinge, SoftMargin
from .ordinal import Ordinal
from .positive import Gamma, NegativeBinomial
from .probabilities import BinaryProbabilities, KLDivergence, NegativeLogLikelihood
from .resolve import resolve
from .robust import AbsoluteError, Quantile, StudentT
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
