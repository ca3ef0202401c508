"""What a step is given: all data or a mini-batch, chosen from shapes alone, so that every run and every machine agrees;
in which order, also in a run that goes on; and which part of it is that of a rank."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
from ..sources import Arrays, Indexed, Parcels, Source, Stream
from ..surroundings import back_afterwards
from .history import valid

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
    number = isinstance(batch_size, int) and not isinstance(batch_size, bool) and batch_size > 0
    if not (batch_size is None or batch_size == "all" or number):
        raise ValueError(f'batch_size={batch_size!r}: samples of a mini-batch, "all", or None to choose')
    if not isinstance(data, Indexed):
        why = "the data come in batches of their own"
        way_out = 'pass the Dataset or the tensors; batch_size="all" takes all batches in every step'
        found = Batching(
            "mini", None, 'the batches as they come, one in every step; batch_size="all" takes all of them'
        )
        if batch_size == "all":
            found = Batching("streamed", None, "all batches in every step")
    elif not divisible(data):
        why, way_out = (
            "the inputs have no row for each sample, so that they cannot be cut into batches",
            "pass a list of batches",
        )
        words = "all data in every step: without a row of the inputs for each sample they cannot be cut into batches"
        found = Batching("whole", None, words)
    else:
        return of_samples(opt, data, batch_size)
    if number:
        raise ValueError(f"batch_size={batch_size}, and {why}: leave it out, or {way_out}")
    return found


def of_samples(opt: LM, data: Indexed, batch_size: int | str | None) -> Batching:
    """The same for samples that can be divided as one likes"""
    N = data.samples
    kind, size = ("whole", None) if in_memory(data) else ("streamed", LEAST)
    if isinstance(batch_size, int) and batch_size < N:
        return Batching("mini", batch_size, f"mini-batches of {batch_size:,} of {N:,} samples, as asked for")
    if batch_size is not None:
        more = "" if batch_size == "all" else f": there are no more than batch_size={batch_size}"
        return Batching(kind, size, f"all {N:,} samples in every step{more}")
    s = shapes(opt, data)
    took = seconds(opt, s, N)
    usual = f"a step with all {N:,} samples takes about {duration(took)} on a usual machine"
    if took <= WHOLE and data.steady:
        return Batching(kind, size, f"all samples in every step: {usual}")
    size = min(LEAST, N)  # the largest power of two whose step is quick
    while 2 * size <= N // PARTS and seconds(opt, s, 2 * size) <= QUICK:
        size *= 2
    return Batching("mini", size, f"mini-batches of {size:,}: {usual}")


def in_memory(data: Indexed) -> bool:
    """Whether all samples are, or may be, one batch."""
    if isinstance(data, Arrays):
        return True
    leaves = tree_leaves(list(vars(data.take(torch.arange(1))).values()))
    size = sum(t.numel() * t.element_size() for t in leaves if isinstance(t, Tensor))
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
        batch = next(self._batches or self._begin(), None)
        if batch is None:
            self.epoch, self.index = self.epoch + 1, 0
            batch = next(self._begin())
        self.index += 1
        return batch

    def _begin(self) -> Iterator[Batch]:
        """Own batches come in the order of their loader, samples in one that depends on the seed alone."""
        self.began, data = generators(self.data), self.data
        batches = data.batches()
        if isinstance(data, Indexed):
            random = torch.Generator().manual_seed(self.seed + self.epoch)
            index = cut(torch.randperm(data.samples, generator=random), self.size)
            batches = Parcels(data.take, [part(some, self.ranks) for some in index])
        elif isinstance(data, Stream):
            data.begin_epoch(self.epoch)
        self._batches = iter(batches)
        return self._batches

    def state(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "index": self.index}

    def resume(self, state: dict[str, Any], began: dict[str, Any]) -> None:
        """Goes to where it was: the epoch begins as it did, and what was seen of it is passed over."""
        self.epoch, self.index = (valid(name, state[name], int) for name in ("epoch", "index"))
        set_generators(began, self.data)
        if self.index:
            for _ in islice(self._begin(), self.index):
                pass


# What each rank has of the data: consecutive samples of every batch, which are those of one process in the same order,
# so that on any number of ranks the steps are the same.


def divisible(data: Indexed) -> bool:
    """Whether it can be divided into samples. With inputs of several lengths and without targets it is not clear what
    belongs to one sample."""
    if not isinstance(data, Arrays):
        return True
    batch = data.whole
    lengths = {len(t) for t in tree_leaves(batch.inputs) if isinstance(t, Tensor) and t.ndim}
    return batch.divisible(batch.samples) and (len(lengths) == 1 or batch.targets is not None)


def part(index: Tensor, ranks: Ranks) -> Tensor:
    """This rank's samples among these: consecutive ones, the first ranks have one more if they are no multiple."""
    return index.tensor_split(ranks.size)[ranks.rank]


def own(data: Source, size: int | None, ranks: Ranks) -> tuple[Iterable[Batch], Ranks]:
    """Batches of this rank's part of all samples, and the ranks to add up over: this one alone if every rank goes
    through all of them, since they cannot be shared."""
    if isinstance(data, Indexed) and ranks.several and data.samples >= ranks.size and divisible(data):
        mine = part(torch.arange(data.samples), ranks)
        return Parcels(data.take, mine.split(size or len(mine))), ranks
    return data.batches(size), ranks if sharded(data) else ALONE


def sharded(data: Source | None) -> Any:
    """The sampler of a DataLoader, also within its batch_sampler, by which its batches are those of one rank alone"""
    loader = data.data if isinstance(data, Stream) and isinstance(data.data, DataLoader) else None
    each = getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return next((found for found in each if isinstance(found, DistributedSampler)), None)


# What cannot be shared is refused before the first step.


def check_shared(data: Source, ranks: Ranks, evidence: bool) -> None:
    """Every rank must get a part of the data in every step, and all of them if `evidence` goes through them."""
    if not ranks.several:
        return
    if isinstance(data, Indexed):
        if not divisible(data):
            raise ValueError(
                f"the inputs have no row for each sample, so that they cannot be shared among {ranks.size} ranks: pass "
                "tensors with a row for each sample, or group=False for runs that are independent of the other ranks"
            )
        return
    assert isinstance(data, Stream)
    sampler, size, rank = sharded(data), ranks.size, ranks.rank
    if sampler is None:
        raise ValueError(
            f"a {data.kind} on {size} ranks that does not say which samples are this rank's: pass "
            "DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset)), or the Dataset or the tensors "
            "themselves, which mq.fit shares among the ranks; group=False makes every rank train by itself"
        )
    if (sampler.num_replicas, sampler.rank) != (size, rank):
        raise ValueError(
            f"the DistributedSampler is of rank {sampler.rank} of {sampler.num_replicas}, and this is rank {rank} of "
            f"{size}: DistributedSampler(dataset, num_replicas={size}, rank={rank})"
        )
    if evidence:
        raise ValueError(
            "weight_decay=mq.Evidence() goes through all samples, and a DataLoader with a DistributedSampler has those "
            "of one rank alone: pass the Dataset or the tensors, which mq.fit shares among the ranks"
        )


def check_batches(N: int, plan: Batching, ranks: Ranks) -> None:
    """Batches with a sample for every rank"""
    sizes = [len(part) for part in cut(torch.arange(N), plan.size if plan.mini else None)]
    if min(sizes) < ranks.size:
        batch = f"a batch of {min(sizes)} samples (batch_size={max(sizes)} leaves it)" if plan.mini else f"{N} samples"
        raise ValueError(
            f"{batch} for {ranks.size} ranks: each needs a sample of its own, take larger batches, or fewer ranks"
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
    loader, here = found.get("loader"), loader_generators(data)
    if not isinstance(loader, list) or len(loader) != len(here):
        there = len(loader) if isinstance(loader, list) else type(loader).__name__
        raise ValueError(f"the random states 'loader' are {there}, the data have {len(here)} generators: {WAY_OUT}")
    for g, state in zip(here, loader, strict=True):
        check_state(state, "loader", g.device)
    set_states(found)
    for g, state in zip(here, loader, strict=True):
        g.set_state(state.cpu())


def unchanged(data: Source) -> back_afterwards:
    """The generators are afterwards as they were: batches of a loader come in the same order every time."""
    return back_afterwards(partial(set_generators, generators(data), data))


def loader_generators(data: Source) -> list[torch.Generator]:
    """Of a DataLoader and its samplers, each once"""
    loader = data.data if isinstance(data, Stream) else None
    holders = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    found = [g for holder in holders if isinstance(g := getattr(holder, "generator", None), torch.Generator)]
    return list({id(g): g for g in found}.values())
