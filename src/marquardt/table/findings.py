"""What a run starts from and what it finds, before any of it is written."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd  # type: ignore[import-untyped]
from torch import Tensor

from ..tabular import Committee
from . import metrics
from .columns import Columns
from .importance import Importance
from .predictions import Predicted
from .request import Request
from .targets import Target

LEVEL = 0.95  # of the intervals in predictions.csv and the report


@dataclass(frozen=True)
class Prepared:
    """A table that can be trained on."""

    frame: pd.DataFrame
    columns: Columns
    target: Target
    X: Tensor  # (N, inputs)
    Y: Tensor  # (N, targets), or classes (N,)
    train: Tensor  # places of rows
    test: Tensor
    says: list[str]
    commas: bool  # whether numbers in the file have decimal commas

    @property
    def judged(self) -> tuple[str, Tensor]:
        """The rows that the report is about: those of training only if no others were kept back."""
        return ("test", self.test) if len(self.test) else ("training", self.train)


@dataclass(frozen=True)
class Findings:
    """Everything that the report tells."""

    request: Request
    prepared: Prepared
    committee: Committee
    predicted: Predicted
    measured: dict[str, dict[str, dict[str, float]]]  # {"train" or "test": {target: {measure: value}}}
    importances: list[Importance]
    seconds: float

    @property
    def judged(self) -> dict[str, dict[str, float]]:
        """The measures of the rows that the report is about."""
        return self.measured["test" if "test" in self.measured else "train"]

    @property
    def chosen(self) -> list[str]:
        """What the committee says of itself, as sentences."""
        return [f"{words[:1].upper()}{words[1:]}." for words in self.committee.says]

    @property
    def told(self) -> list[str]:
        """How it went, in a sentence for each target."""
        return metrics.words(self.judged, LEVEL)
