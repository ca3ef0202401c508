"""Levenberg–Marquardt for PyTorch."""

from . import losses, presets
from .acceptance import Decrease, Uphill
from .average import EMA, Polyak
from .curvature import Auto, Dense, Gram, Hessian, Kronecker, MatrixFree
from .damping import FactoredMaxDiagonal, Identity, LayerMeanEigenvalue, MaxDiagonal, MeanEigenvalue
from .diagonal import Diagonal
from .fitting import curve_fit, least_squares
from .line_search import Backtracking, Bracket, Grid
from .linearize import Linearization, linearize
from .momentum import AdaptiveMomentum
from .optimizer import LM, Step
from .rows import Empirical, Exact, Fraction, Sampled
from .schedule import Constant, GainRatio, PaperSchedule, TenFold

__version__ = "0.1.0"

__all__ = [
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
