"""Uncertainty from the curvature: the Laplace approximation, and the evidence for priors and models."""

from .build import laplace, posterior
from .evidence import Estimate, Evidence, reestimate
from .posterior import Posterior, Prediction

__all__ = ["Estimate", "Evidence", "Posterior", "Prediction", "laplace", "posterior", "reestimate"]
