"""Training without a loop: `mq.fit`."""

from .fit import Fit, Running, fit
from .history import Entry, History

__all__ = ["Entry", "Fit", "History", "Running", "fit"]
