"""Nonlinear least squares and curve fitting: SciPy's habits, torch's tensors and derivatives."""

from .curve_fit import curve_fit
from .fit import CurveFit
from .least_squares import least_squares
from .result import Result

__all__ = ["CurveFit", "Result", "curve_fit", "least_squares"]
