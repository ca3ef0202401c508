"""Uncertainty from the curvature: the Laplace approximation, and the evidence for priors and models."""

from .evidence import Estimate, Evidence, reestimate
from .posterior import Posterior, Prediction, laplace, posterior

__all__ = ["Estimate", "Evidence", "Posterior", "Prediction", "laplace", "posterior", "reestimate"]
