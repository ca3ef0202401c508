"""Representations of the curvature G, all behind one contract."""

from .auto import Auto
from .contract import Curvature, Damped, Representation
from .direct import Dense, FactorizationError, Gram
from .ekfac import EKFAC
from .hessian import Hessian
from .kronecker import Kronecker
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
