"""Committees for tables: what the estimators of `marquardt.sklearn` and the command line share."""

from .building import train
from .committee import Committee
from .settings import Configuration, Settings

__all__ = ["Committee", "Configuration", "Settings", "train"]
