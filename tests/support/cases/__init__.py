"""Small models × losses × inputs, one of every kind that linearisation has to get right.

Each case is a builder registered under its own name: it runs under a fixed seed in float64 and returns a Problem. At
most 150 parameters and 6 samples, so that the dense reference takes milliseconds.
"""

from support.cases import layers, losses, models  # noqa: F401 (each registers its cases)
from support.cases.layers import CONVOLUTIONS
from support.cases.models import Poisson1D, Recurrent, TwoTowers
from support.cases.problem import CASES, Fn, Problem, build, default_dtype, mlp, sample_weights

__all__ = [
    "CASES", "CONVOLUTIONS", "Fn", "Poisson1D", "Problem", "Recurrent", "TwoTowers", "build", "default_dtype", "mlp",
    "sample_weights",
]  # fmt: skip
