"""Levenberg–Marquardt for PyTorch."""

from . import losses, presets
from .acceptance import Decrease, Uphill
from .average import EMA, Polyak
from .curvature import Auto, Dense, Gram
from .damping import Identity, MaxDiagonal, MeanEigenvalue
from .line_search import Backtracking, Grid
from .linearize import Linearization, linearize
from .momentum import AdaptiveMomentum
from .optimizer import LM, Step
from .rows import Empirical, Exact, Sampled
from .schedule import Constant, GainRatio, PaperSchedule, TenFold

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "LM",
    "AdaptiveMomentum",
    "Auto",
    "Backtracking",
    "Constant",
    "Decrease",
    "Dense",
    "Empirical",
    "Exact",
    "GainRatio",
    "Gram",
    "Grid",
    "Identity",
    "Linearization",
    "MaxDiagonal",
    "MeanEigenvalue",
    "PaperSchedule",
    "Polyak",
    "Sampled",
    "Step",
    "TenFold",
    "Uphill",
    "linearize",
    "losses",
    "presets",
]
