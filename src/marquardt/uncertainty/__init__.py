"""Uncertainty from the curvature: the Laplace approximation, and the evidence for priors and models."""

from .evidence import Evidence
from .posterior import Posterior, Prediction, laplace, posterior, reestimate

__all__ = ["Evidence", "Posterior", "Prediction", "laplace", "posterior", "reestimate"]
