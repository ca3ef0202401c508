"""What this rank has of a step's samples: its own batches, and their place among those of all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..model.batch import Batch
from ..ranks import Ranks
from .rows import Seed


class Share:
    """The samples of rank 0 come first, then those of rank 1, and so on. What is asked here of all ranks, every rank
    asks."""

    def __init__(self, ranks: Ranks, batches: Iterable[Batch], single: bool, step: int) -> None:
        self.ranks, self.batches, self.single, self.step = ranks, batches, single, step

    @cached_property
    def _counts(self) -> list[int]:
        """Samples of every rank"""
        return self.ranks.numbers(sum(batch.samples for batch in self.batches) if self.single else 0)

    @property
    def samples(self) -> int:
        """Of the batch on all ranks; 1 if there are several batches."""
        return max(1, sum(self._counts))

    @property
    def own(self) -> int:
        return self._counts[self.ranks.rank]

    @cached_property
    def input_size(self) -> int:
        """Numbers in the inputs of the one batch, on the rank that has most."""
        leaves = tree_leaves([batch.inputs for batch in self.batches]) if self.single else []
        return max(self.ranks.numbers(sum(t.numel() for t in leaves if isinstance(t, Tensor))))

    def expected(self, N: int) -> int:
        """Samples of all pieces, if the first has N; N if nothing tells."""
        if self.single:
            return self.samples
        try:
            pieces = len(getattr(self.batches, "batches", ()))
        except TypeError:  # an iterable, or a DataLoader of one, which has the method and no answer
            pieces = 1
        return N * sum(max(1, pieces) for pieces in self.ranks.numbers(pieces))

    def seed(self, piece: int, chunk: int | None) -> Seed:
        """For the random numbers of one piece. Of one batch they belong to the samples, however it is cut."""
        number = self.step + piece * self.ranks.size + self.ranks.rank
        if self.single and chunk is None and not self.ranks.several:
            (batch,) = self.batches
            samples = batch.samples
            return Seed(number, self.step, 0, samples) if samples else Seed(number)
        if not self.single or not self.own:
            return Seed(number)
        first = sum(self._counts[: self.ranks.rank]) + piece * (chunk or 0)
        return Seed(number, self.step, first, self.samples)
