"""Representations of the curvature G, all behind one contract."""

from .auto import Auto
from .contract import Curvature, Damped, Representation
from .dense import Dense
from .ekfac import EKFAC
from .gram import Gram
from .hessian import Hessian
from .kronecker import Kronecker
from .matrix_free import MatrixFree
from .solve import FactorizationError

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
