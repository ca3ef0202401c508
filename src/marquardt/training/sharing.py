"""What each rank has of the data, if several processes make a fit together: its part of every batch.

The batches are those of one process, in the same order, and each rank takes consecutive samples of every one of them:
on any number of ranks the steps are the same.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ..model.batch import Batch
from ..ranks import ALONE, Ranks
from ..sources import Arrays, Indexed, Parcels, Source, Stream


def apart(batch: Batch) -> bool:
    """Whether its samples can be told apart: inputs of several lengths do not tell, without targets, what belongs to
    one."""
    lengths = {len(t) for t in tree_leaves(batch.inputs) if isinstance(t, Tensor) and t.ndim}
    return batch.divisible(batch.samples) and (len(lengths) == 1 or batch.targets is not None)


def part(index: Tensor, ranks: Ranks) -> Tensor:
    """This rank's samples among these: consecutive ones, the first ranks have one more if they are no multiple."""
    return index.tensor_split(ranks.size)[ranks.rank]


def parcels(data: Indexed, parts: Iterable[Tensor], ranks: Ranks) -> Iterable[Batch]:
    """This rank's samples of each of these batches"""
    return Parcels(data.take, [part(index, ranks) for index in parts])


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
    """Data that give every rank a part of its own in every step, and all of them if `evidence` goes through them."""
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


def check_same(described: list[Any], alike: Callable[[Any, Any], bool], ranks: Ranks) -> None:
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
