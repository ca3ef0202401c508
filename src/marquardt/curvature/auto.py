"""The cheaper of the two exact representations."""

from __future__ import annotations

from dataclasses import dataclass

from ..linearize import Linearization
from .contract import Curvature
from .dense import Dense, check_chunk, check_inertia
from .gram import Gram


@dataclass(frozen=True)
class Auto:
    """Dense where there are fewer parameters than rows (or several batches in a step), Gram elsewhere."""

    chunk: int | None = None
    inertia: float = 0.0  # see Dense

    def __post_init__(self) -> None:
        check_chunk(self.chunk)
        check_inertia(self.inertia)

    def represent(self, lin: Linearization) -> Curvature:
        if lin.single:
            lin.totals()
            if lin.n > lin.most:  # of the largest batch so far: a ragged one does not change the representation
                return Gram(self.chunk).represent(lin)
        return Dense(self.chunk, self.inertia).represent(lin)
