"""The ranks that take a step together, as everything else sees them: sums over them, and what all of them agree on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from torch import Tensor

Item = TypeVar("Item")
Key = TypeVar("Key")


# Block rows of a symmetric matrix that are sent one after the other: so many that the half below the diagonal is nearly
# all left out.
BLOCK_ROWS = 16


class RankError(RuntimeError):
    """The ranks of a process group cannot go on together: one has ended or failed, or they do not agree. The model of
    every rank is as it was before the step.

    >>> try:
    ...     step = opt.step(x, y)
    ... except mq.RankError:
    ...     raise SystemExit("start all ranks again from the last checkpoint")
    """


class OtherRank(RankError):
    """Another rank could not take the step, so that none has."""

    original: BaseException  # what was raised there


def cause(error: BaseException) -> BaseException:
    """What was raised first, here or on another rank: the same on every rank."""
    return error.original if isinstance(error, OtherRank) else error


class Ranks:
    """One process by itself: there is nothing to add and nobody to ask. `Several` has the same methods for a group.

    Every rank calls the same of these in the same order. What they return is the same on every rank, bit for bit; what
    they are given may be overwritten.
    """

    size = 1
    rank = 0
    several = False  # whether collectives take place
    sent = 0  # bytes that this rank has sent

    def sum(self, t: Tensor) -> Tensor:
        """Σ over the ranks, of any shape"""
        return t

    def sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same for several tensors, in few messages"""
        return list(tensors)

    def sums_by(self, tensors: Mapping[Key, Tensor], like: Tensor) -> dict[Key, Tensor]:
        """The same by keys, of which a rank may lack some: the order of the keys is that of rank 0, then of rank 1 …"""
        return dict(tensors)

    def sum_later(self, t: Tensor) -> Callable[[], Tensor]:
        """Begins to add up symmetric matrices, half of which is sent, and returns what waits for the sum"""
        return lambda: t

    def gather(self, t: Tensor) -> Tensor:
        """Those of all ranks one after the other; lengths may differ: (k, …) → (Σk, …)"""
        return t

    def dealt(self, parts: Sequence[Tensor]) -> Tensor:
        """A part for every rank: those of all ranks for this one, one after the other, (k, …) → (Σk, …). The k of a
        rank is the same in all its parts."""
        return parts[0]

    def one(self, t: Tensor, source: int = 0) -> Tensor:
        """The tensor that one rank has, of a shape that all know"""
        return t

    def ones(self, tensors: Sequence[Tensor], source: int = 0) -> list[Tensor]:
        """The tensors that one rank has, in few messages"""
        return list(tensors)

    def shown(self, item: Item | None, source: int, shared: Sequence[Tensor] = ()) -> Item:
        """An object of one rank with the tensors in it; None on the others. Those that are `shared` all ranks have."""
        assert item is not None
        return item

    def same(self, what: str) -> None:
        """Raises RankError if the ranks do not all say the same"""

    def agreed(self, item: Item) -> Item:
        """A plain object, as rank 0 has it"""
        return item

    def every(self, item: Item) -> list[Item]:
        """Plain objects of all ranks"""
        return [item]

    def all(self, flag: bool) -> bool:
        """Whether it is so on every rank"""
        return flag

    def numbers(self, number: int) -> list[int]:
        """A whole number of every rank"""
        return [number]

    def through(self, what: str, work: Callable[[Any], Item]) -> Item:
        """What torch.distributed does by itself, given a group on the host to do it over; None for one process"""
        return work(None)

    def deciding(self) -> AbstractContextManager[None]:
        """Within it, questions about tensors that all ranks ask are answered as rank 0 finds it: see `deferred`."""
        return nullcontext()

    def together(self) -> AbstractContextManager[None]:
        """What one rank raises within it, all raise."""
        return nullcontext()

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self


ALONE = Ranks()
