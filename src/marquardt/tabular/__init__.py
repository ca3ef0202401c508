"""Committees for tables: what the estimators of `marquardt.sklearn` and the command line share."""

import sys

from . import committee, members
from .building import train
from .committee import Committee
from .settings import Configuration, Settings

__all__ = ["Committee", "Configuration", "Settings", "train"]

# Pickled estimators of earlier versions name the modules that their classes stood in.
sys.modules |= {f"{__name__}.law": members, f"{__name__}.network": members, f"{__name__}.scaling": committee}
