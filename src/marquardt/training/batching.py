"""All data in every step, or mini-batches: chosen from shapes alone, so that every run and every machine agrees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..curvature import Auto, Dense, Gram, MatrixFree
from ..curvature.cost import Shapes, duration, look, step
from ..jacobian.linearization import Linearization, Needs
from ..jacobian.objective import Sampled
from ..model.batch import Batch
from ..model.checks import coupled
from ..optimizer import LM
from ..ranks import ALONE, Ranks
from ..sources import Arrays, Indexed, Items, Source, Stream
from .history import check_count
from .randomness import generators, set_generators
from .sharing import apart, parcels

# Seconds of a step with all data, on a machine of the usual speed, up to which every step has them all.
WHOLE = 1.0

# Seconds of a step on a mini-batch up to which it is made larger, and its samples at least: docs/recipe.md has batches
# of 600, and the more rows there are, the less do steps fit the noise of a batch.
QUICK, LEAST = 0.1, 512

# Batches that the data are to be cut into at least.
PARTS = 8

# A last mini-batch of at most such a part of the others goes with the one before it: its step would fit a few samples.
TAIL = 8

# Bytes of a Dataset up to which it is read into memory.
READ = 2**31


@dataclass(frozen=True)
class Batching:
    """How the samples are given to the steps."""

    kind: str  # "whole": one batch; "streamed": all batches in every step; "mini": one batch in every step
    size: int | None  # samples of a batch, None if they come in batches of their own
    words: str

    @property
    def mini(self) -> bool:
        return self.kind == "mini"


def batching(opt: LM, data: Source, batch_size: int | str | None) -> Batching:
    """`batch_size`: samples of a mini-batch, "all", or None to choose. Nothing changes by it."""
    check_batch_size(batch_size)
    if not isinstance(data, Indexed):
        return own_batches(data, batch_size)
    N, whole = data.samples, data.whole if isinstance(data, Arrays) else None
    kind, part = ("whole", None) if in_memory(data) else ("streamed", LEAST)
    if whole is not None and not apart(whole):
        return undivided(batch_size)
    if isinstance(batch_size, int) and batch_size < N:
        return Batching("mini", batch_size, f"mini-batches of {batch_size:,} of {N:,} samples, as asked for")
    if batch_size == "all" or isinstance(batch_size, int):
        more = f": there are no more than batch_size={batch_size}" if isinstance(batch_size, int) else ""
        return Batching(kind, part, f"all {N:,} samples in every step{more}")
    s = shapes(opt, data)
    took = seconds(opt, s, N)
    usual = f"a step with all {N:,} samples takes about {duration(took)} on a usual machine"
    if took <= WHOLE and not (isinstance(data, Items) and not data.steady):
        return Batching(kind, part, f"all samples in every step: {usual}")
    size = chosen_size(opt, s, N)
    return Batching("mini", size, f"mini-batches of {size:,}: {usual}")


def undivided(batch_size: int | str | None) -> Batching:
    if isinstance(batch_size, int):
        raise ValueError(
            f"batch_size={batch_size}, and the inputs have no row for each sample, so that they cannot be cut into "
            "batches: leave it out, or pass a list of batches"
        )
    words = "all data in every step: without a row of the inputs for each sample they cannot be cut into batches"
    return Batching("whole", None, words)


def own_batches(data: Source, batch_size: int | str | None) -> Batching:
    if isinstance(batch_size, int):
        raise ValueError(
            f"batch_size={batch_size}, and the data come in batches of their own: leave it out, or pass the Dataset or "
            'the tensors; batch_size="all" takes all batches in every step'
        )
    if batch_size == "all":
        return Batching("streamed", None, "all batches in every step")
    return Batching("mini", None, 'the batches as they come, one in every step; batch_size="all" takes all of them')


def check_batch_size(batch_size: Any) -> None:
    number = isinstance(batch_size, int) and not isinstance(batch_size, bool) and batch_size > 0
    if batch_size is not None and batch_size != "all" and not number:
        raise ValueError(f'batch_size={batch_size!r}: samples of a mini-batch, "all", or None to choose')


def in_memory(data: Indexed) -> bool:
    """Whether all samples are, or may be, one batch."""
    if not isinstance(data, Items):
        return True
    first = data.take(torch.arange(1))
    size = sum(t.numel() * t.element_size() for t in tree_leaves(list(vars(first).values())) if isinstance(t, Tensor))
    return data.steady and size * data.samples <= READ


def shapes(opt: LM, data: Indexed) -> Shapes:
    """Of a few samples, by one forward pass."""
    batch = data.take(torch.arange(min(data.samples, LEAST)))
    lin = Linearization(opt._objective(), [batch], Sampled(1), Needs(by_sample=False))
    try:
        return look(lin, None, True)
    finally:
        lin.close()
        lin.rewind()


def seconds(opt: LM, s: Shapes, N: int) -> float:
    """Of a step on N samples, on a machine of the usual speed, in the fastest way."""
    s = replace(s, N=N)
    ways = [MatrixFree()] if coupled(opt.model) is not None else [Dense(), Gram()]
    picked: Any = [opt.curvature] if not isinstance(opt.curvature, Auto) and hasattr(opt.curvature, "cost") else ways
    return min(step(s, way.cost(s)).seconds(s) for way in picked)


def chosen_size(opt: LM, s: Shapes, N: int) -> int:
    """The largest power of two whose step is quick."""
    size = min(LEAST, N)
    while 2 * size <= N // PARTS and seconds(opt, s, 2 * size) <= QUICK:
        size *= 2
    return size


def cut(index: Tensor, size: int | None) -> list[Tensor]:
    """Into mini-batches, the same for any number of ranks"""
    parts = list(index.split(size or len(index)))
    if len(parts) > 1 and TAIL * len(parts[-1]) <= len(parts[0]):
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


class Order:
    """Mini-batches, epoch after epoch; the position can be saved and gone back to."""

    def __init__(self, data: Source, size: int | None, seed: int, ranks: Ranks = ALONE) -> None:
        self.data, self.size, self.seed, self.ranks = data, size, seed, ranks
        self.epoch, self.index = 0, 0  # of the next batch
        self.began: dict[str, Any] = generators(data)  # before the epoch
        self._batches: Iterator[Batch] | None = None

    def next(self) -> Batch:
        if self._batches is None:
            self._begin()
        assert self._batches is not None
        batch = next(self._batches, None)
        if batch is None:
            if self.index == 0:
                raise ValueError("the data have no batches")
            self.epoch, self.index, self._batches = self.epoch + 1, 0, None
            return self.next()
        self.index += 1
        return batch

    def _begin(self) -> None:
        self.began = generators(self.data)
        self._batches = iter(self._epoch())

    def _epoch(self) -> Iterable[Batch]:
        """Own batches come in the order of their loader, samples in one that depends on the seed alone."""
        if not isinstance(self.data, Indexed):
            if isinstance(self.data, Stream):
                self.data.begin_epoch(self.epoch)
            return self.data.batches()
        random = torch.Generator().manual_seed(self.seed + self.epoch)
        return parcels(self.data, cut(torch.randperm(self.data.samples, generator=random), self.size), self.ranks)

    def state(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "index": self.index}

    def resume(self, state: dict[str, Any], began: dict[str, Any]) -> None:
        """Goes to where it was: the epoch begins as it did, and what was seen of it is passed over."""
        for name in ("epoch", "index"):
            check_count(name, state[name])
        self.epoch, self.index = state["epoch"], state["index"]
        set_generators(began, self.data)
        if self.index:
            self._begin()
            assert self._batches is not None
            for _ in islice(self._batches, self.index):
                pass
