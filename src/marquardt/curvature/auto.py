"""The cheaper of the two exact representations."""

from __future__ import annotations

from dataclasses import dataclass

from ..linearize import Linearization
from .contract import Curvature
from .dense import Dense, check_chunk, check_memory
from .gram import Gram


@dataclass(frozen=True)
class Auto:
    """Dense where there are fewer parameters than rows (or several batches in a step), Gram elsewhere."""

    chunk: int | None = None
    memory: float = 0.8  # see Dense

    def __post_init__(self) -> None:
        check_chunk(self.chunk)
        check_memory(self.memory)

    def represent(self, lin: Linearization) -> Curvature:
        if lin.single:
            lin.totals()
            if lin.n > lin.m:
                return Gram(self.chunk).represent(lin)
        return Dense(self.chunk, self.memory).represent(lin)
