"""Nonlinear least squares and curve fitting: SciPy's habits, torch's tensors and derivatives."""

from .curve_fit import CurveFit, curve_fit
from .least_squares import Result, least_squares

__all__ = ["CurveFit", "Result", "curve_fit", "least_squares"]
