"""Levenberg–Marquardt for PyTorch."""

from . import layers, losses, presets
from .checkpoints import load_checkpoint, save_checkpoint
from .curvature import (
    EKFAC,
    Auto,
    Curvature,
    Dense,
    FactorizationError,
    Gram,
    Hessian,
    Kronecker,
    MatrixFree,
    Representation,
)
from .fitting import curve_fit, least_squares
from .jacobian.linearization import Linearization, Needs, linearize
from .jacobian.objective import Cotangents, Empirical, Exact, Fraction, Rows, Sampled
from .metric import Diagonal, Metric
from .model.decay import WeightDecay
from .moved import alias
from .optimizer import LM
from .parts.direction import (
    AdaptiveMomentum,
    FactoredMaxDiagonal,
    Identity,
    KroneckerMetric,
    LayerMeanEigenvalue,
    MaxDiagonal,
    MeanEigenvalue,
    QuadraticMomentum,
)
from .parts.judging import (
    EMA,
    Backtracking,
    Balanced,
    Bracket,
    Constant,
    Decrease,
    GainRatio,
    Grid,
    Polyak,
    RelativeDecrease,
    TenFold,
    Uphill,
)
from .ranks import RankError
from .step import Step
from .training import Fit, History, fit
from .uncertainty import Evidence, Posterior, posterior

__version__ = "0.1.0"

alias()

__all__ = [
    "EKFAC",
    "EMA",
    "LM",
    "AdaptiveMomentum",
    "Auto",
    "Backtracking",
    "Balanced",
    "Bracket",
    "Constant",
    "Cotangents",
    "Curvature",
    "Decrease",
    "Dense",
    "Diagonal",
    "Empirical",
    "Evidence",
    "Exact",
    "FactoredMaxDiagonal",
    "FactorizationError",
    "Fit",
    "Fraction",
    "GainRatio",
    "Gram",
    "Grid",
    "Hessian",
    "History",
    "Identity",
    "Kronecker",
    "KroneckerMetric",
    "LayerMeanEigenvalue",
    "Linearization",
    "MatrixFree",
    "MaxDiagonal",
    "MeanEigenvalue",
    "Metric",
    "Needs",
    "Polyak",
    "Posterior",
    "QuadraticMomentum",
    "RankError",
    "RelativeDecrease",
    "Representation",
    "Rows",
    "Sampled",
    "Step",
    "TenFold",
    "Uphill",
    "WeightDecay",
    "curve_fit",
    "fit",
    "layers",
    "least_squares",
    "linearize",
    "load_checkpoint",
    "losses",
    "posterior",
    "presets",
    "save_checkpoint",
]
