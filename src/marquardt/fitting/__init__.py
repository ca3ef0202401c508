"""Nonlinear least squares and curve fitting: SciPy's habits, torch's tensors and derivatives."""

from .api import least_squares
from .curve_fit import Fit, curve_fit
from .result import Result

__all__ = ["Fit", "Result", "curve_fit", "least_squares"]
