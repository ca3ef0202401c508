"""Classical nonlinear least-squares problems: residuals, the standard start, the known minima.

Most are from J. J. Moré, B. S. Garbow and K. E. Hillstrom, "Testing unconstrained optimization software", ACM TOMS 7
(1981) 17–41, here MGH with the number of the problem; f is theirs, some in another order. Published minima are of Σf²
and stand as printed there. The minimisers are exact where that is possible; the others were computed in 50 digits,
support/certify.py, and fitting/test_classical.py certifies all of them again.
"""

from .problem import Minimum, Problem
from .problems import PROBLEMS

__all__ = ["PROBLEMS", "Minimum", "Problem"]
