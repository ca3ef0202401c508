"""The ranks that take a step together, as everything else sees them: sums over them, and what all of them agree on."""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from .deferred import agreeing

Item = TypeVar("Item")
Key = TypeVar("Key")


# Block rows of a symmetric matrix that are sent one after the other: enough to leave out nearly all of the half
# below the diagonal.
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
    """One process by itself, with nothing to add. `Several` has the same methods for a group.

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

    def deciding(self) -> AbstractContextManager[None]:
        """Within it, questions about tensors that all ranks ask are answered as rank 0 finds it: see `deferred`."""
        return nullcontext()

    def together(self) -> AbstractContextManager[None]:
        """What one rank raises within it, all raise."""
        return nullcontext()

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self


ALONE = Ranks()


if dist.is_available():
    # Its functions have the default group as an argument, that of when it is first imported: by torch.optim, after
    # init_process_group(). Then they would keep the group alive when it is destroyed (see Several).
    import torch.distributed.nn.functional


# Numbers in one message of several tensors; of a matrix that is on its way while a rank goes on.
BUCKET, SOME = 1 << 24, 1 << 17

# Numbers that a rank can say in a meeting.
SLOTS = 16

FINE, FAILED = 0, 1


class Several(Ranks):
    """Before every collective the ranks meet: each says whether it is well and what it is about to do, in two numbers
    over gloo, and a few more to be added up or agreed on. If one of them has failed all refuse together, and
    if they are not at the same place in the program they say so: without that, the others would wait for a message that
    never comes, or add up what does not belong together.
    """

    several = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.sent = 0
        self.timeout = _timeout(group)
        # Not kept alive here: torch holds groups until destroy_process_group(), and one that outlives it may abort the
        # program as it ends (pytorch#190489).
        self._group = ref(group)
        self._host = self._group if "gloo" in str(dist.get_backend_config(group)) else ref(self._on_the_host())
        self._broken = False  # whether a message was lost: then no other rank can be told
        self._told: BaseException | None = None  # what the others know already

    def _on_the_host(self) -> Any:
        ranks = dist.get_process_group_ranks(self.group)
        return dist.new_group(ranks, timeout=self.timeout, backend="gloo", use_local_synchronization=True)

    @property
    def group(self) -> dist.ProcessGroup:
        return _living(self._group)

    @property
    def _control(self) -> dist.ProcessGroup:
        return _living(self._host)

    # Meetings.

    def _said(self, *own: float) -> list[Tensor]:
        """A few numbers of every rank: (2 + SLOTS,)"""
        padded = torch.tensor([*own, *[0.0] * (2 + SLOTS - len(own))], dtype=torch.float64)
        found = [torch.empty_like(padded) for _ in range(self.size)]
        self._wait(lambda: dist.all_gather(found, padded, group=self._control))
        return found

    def _meet(self, what: str, numbers: Sequence[float] = ()) -> list[list[float]]:
        """A few numbers of every rank, once all of them are about to do the same."""
        found = self._said(FINE, zlib.crc32(what.encode()), *numbers)
        states, codes, *_ = torch.stack(found).T.tolist()
        if any(states):
            self._raise_first(None)
        if len(set(codes)) > 1:
            raise RankError(
                f"the ranks do not agree on what comes next ({_difference(self._objects(what))}): all must take the "
                "same steps, with the same model and the same options"
            )
        return [each[2 : 2 + len(numbers)].tolist() for each in found]

    def _objects(self, item: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        self._wait(lambda: dist.all_gather_object(found, item, group=self._control))
        return found

    def _wait(self, work: Callable[[], object]) -> None:
        """Done by all ranks, or an error that says that one of them is gone."""
        try:
            work()
        except RuntimeError as error:
            self._broken = True
            raise RankError(
                f"rank {self.rank} of {self.size} has lost another rank: it has ended, or has not answered within "
                f"{self.timeout}. This rank's model is as it was before the step; start all ranks again from the last "
                f"checkpoint, as torchrun --max-restarts does (docs/distributed.md). torch says: {error}"
            ) from error

    def _raise_first(self, own: BaseException | None) -> None:
        """What the first of the ranks that failed has raised; nothing if that is this one."""
        found = self._objects(None if own is None else _packed(own))
        first = next(rank for rank, packed in enumerate(found) if packed is not None)
        if first != self.rank:
            raise _other(first, *found[first]) from own

    @contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            if not self._broken and error is not self._told:
                self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        """The others wait in their next meeting, if they have not failed as well."""
        self._said(FAILED)
        self._told = error
        self._raise_first(error)

    # Tensors.

    def sum(self, t: Tensor) -> Tensor:
        what = f"sum of {t.dtype} {tuple(t.shape)}"
        if t.numel() <= SLOTS and t.is_floating_point():  # a meeting has room for them
            total = [sum(each) for each in zip(*self._meet(what, t.flatten().tolist()), strict=True)]
            return torch.tensor(total, dtype=t.dtype, device=t.device).view_as(t)
        self._meet(what)
        t = t.contiguous()
        self._wait(lambda: dist.all_reduce(t, group=self.group))
        self.sent += self._reduced(t)
        return t

    def sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return _flat(tensors, self.sum)

    def sums_by(self, tensors: Mapping[Key, Tensor], like: Tensor) -> dict[Key, Tensor]:
        forms: dict[Key, tuple[torch.Size, torch.dtype]] = {}
        for each in self.every({key: (t.shape, t.dtype) for key, t in tensors.items()}):
            forms |= {key: form for key, form in each.items() if key not in forms}
        own = [
            tensors[key] if key in tensors else torch.zeros(shape, dtype=dtype, device=like.device)
            for key, (shape, dtype) in forms.items()
        ]
        return dict(zip(forms, self.sums(own), strict=True))

    def ones(self, tensors: Sequence[Tensor], source: int = 0) -> list[Tensor]:
        return _flat(tensors, lambda t: self.one(t, source))

    def shown(self, item: Item | None, source: int, shared: Sequence[Tensor] = ()) -> Item:
        own = self.rank == source
        data, tensors = packed(item, shared) if own else (b"", [])
        device = shared[0].device if shared else torch.device("cpu")
        data, forms = self._object(f"what rank {source} has", (data, [(t.shape, t.dtype) for t in tensors]), source)
        if not own:
            tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in forms]
        found = self.ones(tensors, source)
        return item if own and item is not None else unpacked(data, found, shared)

    def same(self, what: str) -> None:
        self._meet(what)

    def sum_later(self, t: Tensor) -> Callable[[], Tensor]:
        self._meet(f"sum of {t.dtype} {tuple(t.shape)}, later")
        cuts = itertools.pairwise(len(t) * k // BLOCK_ROWS for k in range(BLOCK_ROWS + 1))
        rows = [(first, last) for first, last in cuts if first < last]
        parts = [t[first:last, first:] for first, last in rows]
        begun = []
        for members in _buckets(parts, SOME):
            flat = torch.cat([parts[i].flatten() for i in members])
            begun.append((members, flat, dist.all_reduce(flat, group=self.group, async_op=True)))
            self.sent += self._reduced(flat)

        def wait() -> Tensor:
            for members, flat, work in begun:
                self._wait(work.wait)
                for i, whole in zip(members, flat.split([parts[i].numel() for i in members]), strict=True):
                    first, last = rows[i]
                    t[first:last, first:] = whole.view(last - first, -1)
                    t[last:, first:last] = t[first:last, last:].T
            return t

        return wait

    def gather(self, t: Tensor) -> Tensor:
        lengths = [int(length) for (length,) in self._meet(f"rows of {t.dtype} {tuple(t.shape[1:])}", [len(t)])]
        padded = t.new_zeros(max(lengths), *t.shape[1:])
        padded[: len(t)] = t
        found = [torch.empty_like(padded) for _ in lengths]
        self._wait(lambda: dist.all_gather(found, padded, group=self.group))
        self.sent += (self.size - 1) * padded.numel() * padded.element_size()
        return torch.cat([part[:length] for part, length in zip(found, lengths, strict=True)])

    def dealt(self, parts: Sequence[Tensor]) -> Tensor:
        own = parts[self.rank]
        others = [tuple(t.shape[1:]) for t in parts]
        what = f"a part of {own.dtype} {others} for every rank"
        lengths = [int(length) for (length,) in self._meet(what, [len(own)])]
        given = torch.cat([t.flatten() for t in parts])
        found = own.new_empty(sum(lengths), *own.shape[1:])
        sizes = [length * math.prod(own.shape[1:]) for length in lengths]
        self._wait(lambda: dist.all_to_all_single(found.view(-1), given, sizes, [t.numel() for t in parts], self.group))
        self.sent += (given.numel() - own.numel()) * given.element_size()
        return found

    def one(self, t: Tensor, source: int = 0) -> Tensor:
        self._meet(f"{t.dtype} {tuple(t.shape)} of rank {source}")
        t = t.contiguous()
        self._wait(lambda: dist.broadcast(t, group_src=source, group=self.group))
        self.sent += (self.size - 1) * t.numel() * t.element_size() if self.rank == source else 0
        return t

    def _reduced(self, t: Tensor) -> int:
        """What a rank sends in a ring: every number twice, but for its own part"""
        return 2 * (self.size - 1) * t.numel() * t.element_size() // self.size

    # Plain values.

    def agreed(self, item: Item) -> Item:
        return self._object("what rank 0 has", item)

    def _object(self, what: str, item: Item, source: int = 0) -> Item:
        self._meet(what)
        found = [item]
        self._wait(lambda: dist.broadcast_object_list(found, group_src=source, group=self._control))
        return found[0]

    def every(self, item: Item) -> list[Item]:
        self._meet("what every rank has")
        return self._objects(item)

    def all(self, flag: bool) -> bool:
        return all(answer for (answer,) in self._meet("whether it is so on every rank", [flag]))

    def numbers(self, number: int) -> list[int]:
        return [int(found) for (found,) in self._meet("a number of every rank", [number])]

    def deciding(self) -> AbstractContextManager[None]:
        return agreeing(self._decided)

    def _decided(self, numbers: list[float]) -> list[float]:
        what = f"{len(numbers)} numbers of rank 0"
        return self._meet(what, numbers)[0] if len(numbers) <= SLOTS else self._object(what, numbers)


def _living(group: ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    found = group()
    if found is None:
        raise RankError(
            "the process group of this optimizer has been destroyed: make another optimizer after "
            "init_process_group(), or one with group=False"
        )
    return found


def _difference(places: Sequence[str]) -> str:
    """Between rank 0 and the first rank that is elsewhere; of two lists the entries that differ."""
    other = next(rank for rank, place in enumerate(places) if place != places[0])
    here, there = places[0].split(", "), places[other].split(", ")
    if len(here) == len(there):
        pairs = [(a, b) for a, b in zip(here, there, strict=True) if a != b]
        here, there = [a for a, _ in pairs], [b for _, b in pairs]
    return f"rank 0: {', '.join(here)}; rank {other}: {', '.join(there)}"


def _flat(tensors: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Many tensors changed as if they were few"""
    found = list(tensors)
    for members in _buckets(found):
        flat = change(torch.cat([found[i].flatten() for i in members]))
        for i, part in zip(members, flat.split([found[i].numel() for i in members]), strict=True):
            found[i] = part.view_as(found[i])
    return found


def _buckets(tensors: Sequence[Tensor], bucket: int = BUCKET) -> Iterator[list[int]]:
    """Those of one dtype, of bounded size together."""
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        some: list[int] = []
        size = 0
        for i, t in enumerate(tensors):
            if t.dtype == dtype:
                if some and size + t.numel() > bucket:
                    yield some
                    some, size = [], 0
                some.append(i)
                size += t.numel()
        yield some


def _packed(error: BaseException) -> tuple[str, bytes]:
    """Its words, and the error itself if it can be sent."""
    try:
        data = pickle.dumps(error)
    except Exception:  # objects refuse to be pickled in many ways
        data = b""
    return f"{type(error).__name__}: {error}", data


def _other(rank: int, words: str, data: bytes) -> OtherRank:
    """An error of the same kind, so that what catches the one catches the other."""
    try:
        original = pickle.loads(data)
    except Exception:
        original = RuntimeError(words)
    kinds = (ValueError, TypeError, FileNotFoundError, OSError)
    kind = next((kind for kind in kinds if isinstance(original, kind)), None)
    found = type("OtherRank", (OtherRank, kind), {}) if kind else OtherRank
    error: OtherRank = found(f"rank {rank} failed, so that all ranks stop here. {words}")
    error.original = original
    return error


def _timeout(group: dist.ProcessGroup) -> timedelta:
    """After which a rank that does not answer is given up."""
    for device in ("cpu", "cuda"):
        try:
            found = group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
        if isinstance(found, timedelta):
            return found
    return timedelta(minutes=30)


def packed(item: Any, shared: Sequence[Tensor]) -> tuple[bytes, list[Tensor]]:
    """What is left of an object without its tensors, and these. Tensors that are `shared` all ranks have: of them only
    the place is sent."""
    tensors = list(shared)
    places = {id(t): i for i, t in enumerate(shared)}

    class Pickler(pickle.Pickler):
        def persistent_id(self, part: Any) -> int | None:
            if not isinstance(part, Tensor):
                return None
            if id(part) not in places:
                places[id(part)] = len(tensors)
                tensors.append(part)
            return places[id(part)]

    file = io.BytesIO()
    Pickler(file).dump(item)
    return file.getvalue(), tensors[len(shared) :]


def unpacked(data: bytes, tensors: Sequence[Tensor], shared: Sequence[Tensor]) -> Any:
    known = [*shared, *tensors]

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, place: int) -> Tensor:
            return known[place]

    return Unpickler(io.BytesIO(data)).load()


AVAILABLE = dist.is_available()

# Every process group has one, whose control group all ranks have made together; it goes when the group is destroyed.
_made: WeakKeyDictionary[Any, Several] = WeakKeyDictionary()


def of(group: Any) -> Ranks:
    """None: the default process group, if it has several ranks. False: this process by itself. A process group or a
    DeviceMesh of one dimension: that one, also if it has one rank alone."""
    if group is False or not AVAILABLE:
        return ALONE
    if group is None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return ALONE
        group = dist.group.WORLD
    if hasattr(group, "get_group"):  # a DeviceMesh
        if group.ndim != 1:
            raise ValueError(f"group= is a DeviceMesh of {group.ndim} dimensions: pass one of them, mesh['dp']")
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process is no member of the group that group= names: make the optimizer on its ranks")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group={group!r}: a process group of torch.distributed, None for the default one, or False for runs that "
            "are independent of the other ranks"
        )
    if group not in _made:
        _made[group] = Several(group)
    return _made[group]


def check_joined(group: Any) -> None:
    """Processes that torchrun has started, and that do not know of each other."""
    launched = AVAILABLE and dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", 1)) > 1
    if launched and group is None and not dist.is_initialized():
        raise RuntimeError(
            f"torchrun has started {os.environ['WORLD_SIZE']} processes, and each would train by itself: call "
            "torch.distributed.init_process_group() first, or pass group=False if that is meant"
        )


Some = Sequence[Tensor]


def owners(matrices: Some, size: int) -> list[int]:
    """Which of the ranks decomposes which matrix (…, d, d): the largest first, by the one that has least to do."""
    work = [M.numel() * M.shape[-1] for M in matrices]
    busy, found = [0] * size, [0] * len(work)
    for k in sorted(range(len(work)), key=lambda k: -work[k]):
        found[k] = busy.index(min(busy))
        busy[found[k]] += work[k]
    return found


def owned(ranks: Ranks, matrices: Some) -> list[Tensor]:
    """Those of this rank"""
    by = owners(matrices, ranks.size)
    return [M for M, rank in zip(matrices, by, strict=True) if rank == ranks.rank]


def completed(ranks: Ranks, own: Sequence[Some], matrices: Some, like: Sequence[Some]) -> list[Some]:
    """What was made of every matrix, by the rank that owns it; `like` has the shapes of all."""
    if not ranks.several:
        return list(own)
    by, mine = owners(matrices, ranks.size), iter(own)
    found = [
        next(mine) if rank == ranks.rank else [torch.empty_like(t) for t in some]
        for some, rank in zip(like, by, strict=True)
    ]
    for source in range(ranks.size):
        places = [k for k, rank in enumerate(by) if rank == source]
        sent = iter(ranks.ones([t for k in places for t in found[k]], source))
        for k in places:
            found[k] = [next(sent) for _ in found[k]]
    return found
