"""What a step is given: all data or a mini-batch, chosen from shapes alone, so that every run and every machine agrees;
in which order, also in a run that goes on; and which part of it is that of a rank."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ..curvature import Auto, Dense, Gram, MatrixFree
from ..curvature.cost import Shapes, duration, look, step
from ..generators import WAY_OUT, check, check_state, set_states, states
from ..jacobian.linearization import Linearization, Needs
from ..jacobian.objective import Objective, Sampled
from ..model.batch import Batch
from ..model.checks import coupled
from ..optimizer import LM
from ..ranks import ALONE, Ranks
from ..sources import Arrays, Indexed, Items, Parcels, Source, Stream
from ..surroundings import back_afterwards
from .history import check_count

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
    size: int | None  # samples of a batch; None if the data come in batches
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
    lin = Linearization(Objective(opt.model, opt.loss, opt.params), [batch], Sampled(1), Needs(by_sample=False))
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
        batches = cut(torch.randperm(self.data.samples, generator=random), self.size)
        return Parcels(self.data.take, [part(index, self.ranks) for index in batches])

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


# What each rank has of the data: consecutive samples of every batch, which are those of one process in the same order,
# so that on any number of ranks the steps are the same.


def apart(batch: Batch) -> bool:
    """Whether it can be divided into samples. With inputs of several lengths and without targets it is not clear what
    belongs to one sample."""
    lengths = {len(t) for t in tree_leaves(batch.inputs) if isinstance(t, Tensor) and t.ndim}
    return batch.divisible(batch.samples) and (len(lengths) == 1 or batch.targets is not None)


def part(index: Tensor, ranks: Ranks) -> Tensor:
    """This rank's samples among these: consecutive ones, the first ranks have one more if they are no multiple."""
    return index.tensor_split(ranks.size)[ranks.rank]


def own(data: Source, size: int | None, ranks: Ranks) -> tuple[Iterable[Batch], Ranks]:
    """Batches of this rank's part of all samples, and the ranks to add up over: this one alone if every rank goes
    through all of them, since they cannot be shared."""
    if not ranks.several:
        return data.batches(size), ALONE
    if isinstance(data, Stream):
        return data.batches(), ranks if sharded(data) else ALONE
    if not isinstance(data, Indexed) or data.samples < ranks.size or not divisible(data):
        return data.batches(size), ALONE
    mine = part(torch.arange(data.samples), ranks)
    return Parcels(data.take, mine.split(size or len(mine))), ranks


def divisible(data: Indexed) -> bool:
    return not isinstance(data, Arrays) or apart(data.whole)


def sharded(data: Stream) -> bool:
    """Whether its batches are those of one rank alone."""
    return isinstance(sampler(data), DistributedSampler)


def sampler(data: Stream) -> Any:
    """That of a DataLoader, also within its batch_sampler"""
    if not isinstance(data.data, DataLoader):
        return None
    found: Any = data.data.sampler
    within = getattr(data.data.batch_sampler, "sampler", None)
    return found if isinstance(found, DistributedSampler) else within


# What cannot be shared is refused before the first step.


def check_shared(data: Source, ranks: Ranks, evidence: bool) -> None:
    """Every rank must get a part of the data in every step, and all of them if `evidence` goes through them."""
    if not ranks.several:
        return
    if isinstance(data, Stream):
        check_sampler(data, ranks)
        if evidence:
            raise ValueError(
                "weight_decay=mq.Evidence() goes through all samples, and a DataLoader with a DistributedSampler has "
                "those of one rank alone: pass the Dataset or the tensors, which mq.fit shares among the ranks"
            )
    elif isinstance(data, Indexed):
        if not divisible(data):
            raise ValueError(
                f"the inputs have no row for each sample, so that they cannot be shared among {ranks.size} ranks: pass "
                "tensors with a row for each sample, or group=False for runs that are independent of the other ranks"
            )
        check_enough(data.samples, f"{data.samples} samples", ranks)


def check_sampler(data: Stream, ranks: Ranks) -> None:
    found, kind = sampler(data), type(data.data).__name__
    if not isinstance(found, DistributedSampler):
        raise ValueError(
            f"a {kind} on {ranks.size} ranks that does not say which samples are this rank's: pass "
            "DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset)), or the Dataset or the tensors "
            "themselves, which mq.fit shares among the ranks; group=False makes every rank train by itself"
        )
    if (found.num_replicas, found.rank) != (ranks.size, ranks.rank):
        raise ValueError(
            f"the DistributedSampler is of rank {found.rank} of {found.num_replicas}, and this is rank {ranks.rank} of "
            f"{ranks.size}: DistributedSampler(dataset, num_replicas={ranks.size}, rank={ranks.rank})"
        )


def check_batches(parts: Sequence[Tensor], ranks: Ranks) -> None:
    """Mini-batches with a sample for every rank"""
    least = min(map(len, parts))
    check_enough(least, f"a batch of {least} samples (batch_size={max(map(len, parts))} leaves it)", ranks)


def check_enough(samples: int, words: str, ranks: Ranks) -> None:
    if samples < ranks.size:
        raise ValueError(
            f"{words} for {ranks.size} ranks: each needs a sample of its own, take larger batches, or fewer ranks"
        )


def check_same_data(described: list[Any], alike: Callable[[Any, Any], bool], ranks: Ranks) -> None:
    """Every rank has all data, in the same order; `described` is how many there are, and sums of what they hold."""
    found = ranks.every(described)
    for rank, there in enumerate(found):
        if not alike(there, found[0]):
            raise ValueError(
                f"the data are not the same on all ranks: rank 0 has {found[0][0]} samples and rank {rank} has "
                f"{there[0]}, with other numbers in them. mq.fit shares every batch among the ranks, so pass all data "
                "on every rank, made with the same seed; if each rank has data of its own, take the steps of mq.LM in "
                "a loop, or pass group=False for independent runs"
            )


# Ctrl-C.


@contextmanager
def interrupts(ranks: Ranks) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: of several ranks none is interrupted amid a message to the others, but asks for the
    end after the step. The second time it ends the process at once."""
    ours = threading.current_thread() is threading.main_thread()
    if not (ranks.several and ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler):
        yield lambda: False
        return
    asked: list[int] = []

    def noticed(number: int, frame: Any) -> None:
        if asked:
            signal.default_int_handler(number, frame)
        asked.append(number)

    before = signal.signal(signal.SIGINT, noticed)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


# The random numbers that a fit may depend on, as they are saved.


def generators(data: Source) -> dict[str, Any]:
    """The states of torch's, Python's and NumPy's, and of a DataLoader's own: tensors and plain numbers."""
    return {**states(), "loader": [g.get_state() for g in loader_generators(data)]}


def set_generators(found: dict[str, Any], data: Source) -> None:
    """All of them; none, and a ValueError that names the entry, if one is damaged."""
    check(found)
    loader, here = found.get("loader"), list(loader_generators(data))
    if not isinstance(loader, list) or len(loader) != len(here):
        there = len(loader) if isinstance(loader, list) else type(loader).__name__
        raise ValueError(f"the random states 'loader' are {there}, the data have {len(here)} generators: {WAY_OUT}")
    for g, state in zip(here, loader, strict=True):
        check_state(state, "loader", g.device)
    set_states(found)
    for g, state in zip(here, loader, strict=True):
        g.set_state(state.cpu())


@contextmanager
def unchanged(data: Source) -> Iterator[None]:
    """Batches of a loader come in the same order every time: the generators are afterwards as they were."""
    before = generators(data) if isinstance(data, Stream) else None
    with nullcontext() if before is None else back_afterwards(partial(set_generators, before, data)):
        yield


def loader_generators(data: Source) -> Iterator[torch.Generator]:
    """Of a DataLoader and its samplers, each once"""
    if not isinstance(data, Stream):
        return
    seen: list[torch.Generator] = []
    loader = data.data
    for holder in (loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler"))):
        g = getattr(holder, "generator", None)
        if isinstance(g, torch.Generator) and not any(g is other for other in seen):
            seen.append(g)
            yield g
