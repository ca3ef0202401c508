"""Representations of the curvature G, all behind one contract."""

from .auto import Auto
from .contract import Curvature, Damped, Representation
from .direct import Dense, FactorizationError, Gram
from .hessian import Hessian
from .kronecker import EKFAC, Kronecker
from .matrix_free import MatrixFree

__all__ = [
    "EKFAC",
    "Auto",
    "Curvature",
    "Damped",
    "Dense",
    "FactorizationError",
    "Gram",
    "Hessian",
    "Kronecker",
    "MatrixFree",
    "Representation",
]
