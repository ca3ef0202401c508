"""Where batches come from: tensors or arrays, a Dataset, a DataLoader. What cannot be trained on is refused by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from .model.batch import Batch

FORMS = (
    "a tuple (inputs, targets) or (inputs, targets, weight) of tensors or arrays, a torch Dataset of such items, or a "
    "DataLoader or a list of such batches"
)


def source(data: Any, *, batch_size: int | None = None, device: Any = None, dtype: torch.dtype | None = None) -> Source:
    """Batches of `data` on `device`, with floating-point numbers in `dtype`.

    A tuple is (inputs, targets) or (inputs, targets, weight) of tensors, arrays, data frames or lists of numbers; the
    inputs may be a tuple or a dict of these. A Dataset has such tuples as its items; a DataLoader, a list, or anything
    else that can be gone through again, as its batches. `batch_size` is that of `batches()`, if these are not given.
    """
    if isinstance(data, Source):
        return data
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(f"batch_size={batch_size!r}: samples of a batch, an integer of at least 1, or None")
    place = Destination(None if device is None else torch.device(device), dtype)
    if isinstance(data, TensorDataset):
        data = tuple(data.tensors)
    if isinstance(data, tuple):
        return Arrays(place(data), batch_size)
    if isinstance(data, IterableDataset):
        raise TypeError(
            f"{type(data).__name__} is an IterableDataset, which has no batches: pass "
            "DataLoader(dataset, batch_size=32)"
        )
    if isinstance(data, Dataset):
        return Items(data, place, batch_size)
    return Stream(data, place)


class Source(ABC):
    """Batches that can be gone through again and again."""

    @property
    @abstractmethod
    def samples(self) -> int | None:
        """None if that is not known before all batches were gone through."""

    @property
    @abstractmethod
    def whole(self) -> Batch | None:
        """All samples as one batch; None if they come in batches, or differ from one time to the next."""

    @abstractmethod
    def batches(self, size: int | None = None, order: Sequence[int] | Tensor | None = None) -> Iterable[Batch]:
        """All of them, every time that this is gone through: of `size` samples, the last one of what is left."""

    @abstractmethod
    def split(self, fraction: float, seed: int = 0) -> tuple[Source, Source]:
        """The other samples, and this fraction of them, drawn at random."""


@dataclass(frozen=True)
class Parcels:
    """Batches that are made when they are asked for, every time anew."""

    make: Callable[[Any], Batch]
    parts: Sequence[Any]

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Batch]:
        return map(self.make, self.parts)


class Indexed(Source):
    """N samples, any of which can be taken."""

    N: int
    batch_size: int | None

    @abstractmethod
    def take(self, index: Tensor) -> Batch: ...

    @abstractmethod
    def only(self, index: Tensor) -> Source: ...

    @property
    def samples(self) -> int:
        return self.N

    def batches(self, size: int | None = None, order: Sequence[int] | Tensor | None = None) -> Iterable[Batch]:
        size = size or self.batch_size or self.N
        index = torch.arange(self.N) if order is None else torch.as_tensor(order)
        return Parcels(self.take, index.split(size))

    def split(self, fraction: float, seed: int = 0) -> tuple[Source, Source]:
        k = round(fraction * self.N)
        if isinstance(fraction, bool) or not 0 < fraction < 1 or not 0 < k < self.N:
            raise ValueError(
                f"a fraction of {fraction!r} of {self.N} samples: it must be between 0 and 1, and leave at least one "
                "sample on either side"
            )
        order = torch.randperm(self.N, generator=torch.Generator().manual_seed(seed))
        return self.only(order[k:].sort().values), self.only(order[:k].sort().values)


class Arrays(Indexed):
    """Samples in memory, as one batch."""

    def __init__(self, batch: Batch, batch_size: int | None = None) -> None:
        check(batch)
        self.batch, self.batch_size, self.N = batch, batch_size, batch.samples
        if self.N == 0 and not batch.opaque:
            raise ValueError("the data have no samples")

    @property
    def whole(self) -> Batch:
        return self.batch

    def take(self, index: Tensor) -> Batch:
        if len(index) == self.N and torch.equal(index, torch.arange(self.N)):
            return self.batch
        return self.batch.take(index)

    def only(self, index: Tensor) -> Source:
        return Arrays(self.take(index), self.batch_size)


class Items(Indexed):
    """The items of a Dataset, collated as a DataLoader does it."""

    def __init__(
        self, data: Any, place: Destination, batch_size: int | None = None, index: Tensor | None = None
    ) -> None:
        self.data, self.place, self.batch_size = data, place, batch_size
        if not hasattr(data, "__len__"):
            raise TypeError(f"{type(data).__name__} has no length: pass DataLoader(dataset, batch_size=32)")
        self.index = torch.arange(len(data)) if index is None else index
        self.N = len(self.index)
        if self.N == 0:
            raise ValueError(f"the data have no samples: {type(data).__name__} is empty")
        self.steady = self._steady()  # the item is the same every time

    def _steady(self) -> bool:
        with torch.random.fork_rng(devices=[]):
            first, again = (tree_leaves(self.data[int(self.index[0])]) for _ in range(2))
        return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(first, again, strict=True))

    @cached_property
    def whole(self) -> Batch | None:
        return self.take(torch.arange(self.N)) if self.steady else None

    def take(self, index: Tensor) -> Batch:
        batch = self.place(default_collate([self.data[i] for i in self.index[index].tolist()]))
        check(batch)
        return batch

    def only(self, index: Tensor) -> Source:
        return Items(self.data, self.place, self.batch_size, self.index[index])


class Stream(Source):
    """Batches as they come: of a DataLoader, or of anything that can be gone through again."""

    def __init__(self, data: Any, place: Destination) -> None:
        if isinstance(data, Iterator):
            raise TypeError(
                f"{type(data).__name__} is used up when it was gone through once, and a fit does so many times: pass "
                "a list or a DataLoader"
            )
        alone = isinstance(data, (Tensor, Mapping, str)) or hasattr(data, "__array__")
        if not isinstance(data, Iterable) or alone:
            raise TypeError(f"data of the type {type(data).__name__}: pass {FORMS}")
        self.data: Any = data
        self.place = place

    @property
    def samples(self) -> int | None:
        if isinstance(self.data, DataLoader) and not isinstance(self.data.dataset, IterableDataset):
            sampler: Any = self.data.sampler
            whole, size = len(sampler), self.data.batch_size
            if size is not None:  # otherwise a batch_sampler of the user decides
                return whole // size * size if self.data.drop_last else whole
        return None

    @property
    def whole(self) -> Batch | None:
        return None

    def batches(self, size: int | None = None, order: Sequence[int] | Tensor | None = None) -> Iterable[Batch]:
        if size is not None or order is not None:
            raise ValueError("the data come in batches of their own: their size and order cannot be chosen")
        return Passes(self)

    def begin_epoch(self, number: int) -> None:
        """A DistributedSampler has another order in every epoch if it is given the number of the epoch."""
        for name in ("sampler", "batch_sampler"):
            change = getattr(getattr(self.data, name, None), "set_epoch", None)
            if callable(change):
                change(number)

    def split(self, fraction: float, seed: int = 0) -> tuple[Source, Source]:
        kind = type(self.data).__name__
        raise ValueError(
            f"a fraction of {fraction!r} of a {kind} cannot be told from the rest: pass a validation set of its own, "
            "or the Dataset or the tensors in the place of its batches"
        )


@dataclass(frozen=True)
class Passes:
    """All batches of a stream, each checked when it comes."""

    stream: Stream

    def __len__(self) -> int:
        return len(self.stream.data)

    def __iter__(self) -> Iterator[Batch]:
        empty = True
        for item in self.stream.data:
            batch, empty = self.stream.place(item), False
            check(batch)
            yield batch
        if empty:
            raise ValueError(f"{type(self.stream.data).__name__} has no batches: it is empty, or used up")


@dataclass(frozen=True)
class Destination:
    """Where batches go: a device, and the precision of floating-point numbers."""

    device: torch.device | None
    dtype: torch.dtype | None

    def __call__(self, item: Any) -> Batch:
        if not isinstance(item, (tuple, list)) or len(item) not in (2, 3):
            found = f"{len(item)} entries" if isinstance(item, (tuple, list)) else type(item).__name__
            raise TypeError(
                f"data with {found} in the place of (inputs, targets) or (inputs, targets, weight): pass {FORMS}; a "
                "list is one of batches"
            )
        names = ("inputs", "targets", "weight")
        return Batch(*(self._moved(part, name) for part, name in zip(item, names, strict=False)))

    def _moved(self, item: Any, name: str) -> Any:
        if hasattr(item, "__array__") or (isinstance(item, list) and not any(hasattr(t, "__array__") for t in item)):
            item = tensor(item, name)

        def moved(t: Any) -> Any:
            if not isinstance(t, Tensor) and hasattr(t, "__array__"):
                t = tensor(t, name)
            if not isinstance(t, Tensor):
                return t
            if t.is_meta:
                raise ValueError(f"the {name} are on the meta device, without values")
            return t.to(self.device, self.dtype if t.is_floating_point() else None)

        return tree_map(moved, item)


def tensor(item: Any, name: str) -> Tensor:
    """Of an array, a data frame, or a list of numbers"""
    if isinstance(item, Tensor):
        return item
    values = item.to_numpy() if hasattr(item, "to_numpy") else item
    strange = columns_without_numbers(item)
    if strange == [] and values.dtype == object:  # columns of several kinds, each of them numbers or flags
        values = item.to_numpy(dtype="float64", na_value=float("nan"))
    try:
        frozen = hasattr(values, "flags") and not values.flags.writeable  # which a tensor must not share
        return torch.tensor(values) if frozen else torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = getattr(values, "dtype", type(item).__name__)
        where = f", in the columns {', '.join(map(repr, strange))}" if strange else ""
        raise TypeError(f"the {name} are no numbers ({kind}){where}: {error}") from None


def columns_without_numbers(item: Any) -> list[Any] | None:
    """Of a data frame: the names of those that hold something else; None for anything that is none"""
    dtypes: Any = getattr(item, "dtypes", None)
    if not hasattr(item, "to_numpy") or not hasattr(dtypes, "items"):
        return None
    return [name for name, dtype in dtypes.items() if getattr(dtype, "kind", "O") not in "biuf"]


def rows_of(batch: Batch, t: Tensor) -> str:
    """The end of the message on data that do not have their samples first"""
    x, y = batch.inputs, batch.targets
    if isinstance(y, Tensor) and isinstance(x, Tensor) and t is x:
        if x.ndim == y.ndim == 1:
            return ": data have batches, with one row for each sample; a torch Dataset has single samples"
        turn = ", as inputs.T has" if turned(x, y) else ", as targets.T has" if turned(y, x) else ""
        if x.ndim == y.ndim == 2 and x.shape[1] == y.shape[1]:
            turn = ", as inputs.T and targets.T have"
        return f", by targets of the shape {tuple(y.shape)}: both need one row for each sample{turn}"
    return ": one row for each sample"


def turned(t: Tensor, other: Tensor) -> bool:
    """Whether t would have as many rows as the other if it were transposed"""
    return t.ndim == 2 and other.ndim > 0 and t.shape[1] == len(other) != len(t)


def check(batch: Batch) -> None:
    """Lengths that do not agree, numbers that are not finite, weights that weigh nothing."""
    N, single = batch.samples, isinstance(batch.inputs, Tensor)
    parts = [("inputs", [batch.inputs] if single else []), ("targets", tree_leaves(batch.targets))]
    for name, leaves in [*parts, ("weight", [batch.weight])]:
        for t in leaves:
            if isinstance(t, Tensor) and (t.ndim == 0 or len(t) != N):
                some = "weights" if name == "weight" else name
                raise ValueError(
                    f"the {some} have the shape {tuple(t.shape)}, and there are {N} samples{rows_of(batch, t)}"
                )
    for name, item in [("inputs", batch.inputs), ("targets", batch.targets), ("weight", batch.weight)]:
        for t in tree_leaves(item):
            if isinstance(t, Tensor) and t.is_floating_point():
                # A mask among several inputs may hold −∞.
                bad = t.isnan() if name == "inputs" and not single else ~t.isfinite()
                if bool(bad.any()):
                    where = bad.nonzero()[0].tolist()
                    raise ValueError(f"{name}{where} is {float(t[tuple(where)])}: drop or repair such samples")
    if isinstance(batch.weight, Tensor) and (batch.weight.ndim != 1 or bool((batch.weight < 0).any())):
        raise ValueError("the weights must be one number of at least 0 for each sample")
    if isinstance(batch.weight, Tensor) and not bool((batch.weight > 0).any()):
        raise ValueError("the weights of all samples are 0")
