"""Levenberg–Marquardt for PyTorch."""

from . import losses, presets
from .curvature import EKFAC, Auto, Dense, Gram, Hessian, Kronecker, MatrixFree
from .fitting import curve_fit, least_squares
from .iteration import Step
from .jacobian.linearization import Linearization, linearize
from .jacobian.rows import Empirical, Exact, Fraction, Sampled
from .metric import Diagonal
from .optimizer import LM
from .parts.acceptance import Decrease, Uphill
from .parts.average import EMA, Polyak
from .parts.damping import FactoredMaxDiagonal, Identity, LayerMeanEigenvalue, MaxDiagonal, MeanEigenvalue
from .parts.line_search import Backtracking, Bracket, Grid
from .parts.momentum import AdaptiveMomentum
from .parts.schedule import Constant, GainRatio, PaperSchedule, TenFold

__version__ = "0.1.0"

__all__ = [
    "EKFAC",
    "EMA",
    "LM",
    "AdaptiveMomentum",
    "Auto",
    "Backtracking",
    "Bracket",
    "Constant",
    "Decrease",
    "Dense",
    "Diagonal",
    "Empirical",
    "Exact",
    "FactoredMaxDiagonal",
    "Fraction",
    "GainRatio",
    "Gram",
    "Grid",
    "Hessian",
    "Identity",
    "Kronecker",
    "LayerMeanEigenvalue",
    "Linearization",
    "MatrixFree",
    "MaxDiagonal",
    "MeanEigenvalue",
    "PaperSchedule",
    "Polyak",
    "Sampled",
    "Step",
    "TenFold",
    "Uphill",
    "curve_fit",
    "least_squares",
    "linearize",
    "losses",
    "presets",
]
