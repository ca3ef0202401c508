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


def source(data: Any, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Source:
    """Batches of `data` on `device`, with floating-point numbers in `dtype`.

    A tuple is (inputs, targets) or (inputs, targets, weight) of tensors, arrays, data frames or lists of numbers; the
    inputs may be a tuple or a dict of these. A Dataset has such tuples as its items; a DataLoader, a list, or anything
    else that can be gone through again, as its batches.
    """
    if isinstance(data, Source):
        return data
    place = Destination(device, dtype)
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, tuple):
        return Arrays(place(data))
    if isinstance(data, IterableDataset):
        raise TypeError(
            f"{type(data).__name__} is an IterableDataset, which has no batches: pass "
            "DataLoader(dataset, batch_size=32)"
        )
    if isinstance(data, Dataset):
        return Items(data, place)
    return Stream(data, place)


class Source(ABC):
    """Batches that can be gone through again and again."""

    samples: int | None  # None if that is not known before all batches were gone through
    whole: Batch | None  # all samples as one batch; None if they come in batches, or differ from one time to the next

    @abstractmethod
    def batches(self, size: int | None = None) -> Iterable[Batch]:
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

    samples: int
    steady = True  # whether a sample is the same every time

    @abstractmethod
    def take(self, index: Tensor) -> Batch: ...

    @abstractmethod
    def only(self, index: Tensor) -> Source: ...

    def batches(self, size: int | None = None) -> Iterable[Batch]:
        return Parcels(self.take, torch.arange(self.samples).split(size or self.samples))

    def split(self, fraction: float, seed: int = 0) -> tuple[Source, Source]:
        N, k = self.samples, round(fraction * self.samples)
        if not 0 < k < N:
            raise ValueError(
                f"a fraction of {fraction!r} of {N} samples: it must be between 0 and 1, and leave at least one sample "
                "on either side"
            )
        order = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
        return self.only(order[k:].sort().values), self.only(order[:k].sort().values)


class Arrays(Indexed):
    """Samples in memory, as one batch."""

    whole: Batch

    def __init__(self, batch: Batch) -> None:
        check(batch)
        self.whole, self.samples = batch, batch.samples
        if self.samples == 0 and not batch.opaque:
            raise ValueError("the data have no samples")

    def take(self, index: Tensor) -> Batch:
        every = len(index) == self.samples and torch.equal(index, torch.arange(self.samples))
        return self.whole if every else self.whole.take(index)

    def only(self, index: Tensor) -> Source:
        return Arrays(self.take(index))


class Items(Indexed):
    """The items of a Dataset, collated as a DataLoader does it."""

    def __init__(self, data: Any, place: Destination, index: Tensor | None = None) -> None:
        self.data, self.place = data, place
        if not hasattr(data, "__len__"):
            raise TypeError(f"{type(data).__name__} has no length: pass DataLoader(dataset, batch_size=32)")
        self.index = torch.arange(len(data)) if index is None else index
        self.samples = len(self.index)
        if self.samples == 0:
            raise ValueError(f"the data have no samples: {type(data).__name__} is empty")
        with torch.random.fork_rng(devices=[]):
            first, again = (tree_leaves(data[int(self.index[0])]) for _ in range(2))
        pairs = zip(first, again, strict=True)
        self.steady = all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)

    @cached_property
    def whole(self) -> Batch | None:  # type: ignore[override]
        return self.take(torch.arange(self.samples)) if self.steady else None

    def take(self, index: Tensor) -> Batch:
        batch = self.place(default_collate([self.data[i] for i in self.index[index].tolist()]))
        check(batch)
        return batch

    def only(self, index: Tensor) -> Source:
        return Items(self.data, self.place, self.index[index])


class Stream(Source):
    """Batches as they come, checked one by one: of a DataLoader, or of anything that can be gone through again."""

    whole = None

    def __init__(self, data: Any, place: Destination) -> None:
        self.data, self.place, self.kind = data, place, type(data).__name__
        if isinstance(data, Iterator):
            raise TypeError(
                f"{self.kind} is used up when it was gone through once, and a fit does so many times: pass a list or "
                "a DataLoader"
            )
        alone = isinstance(data, (Tensor, Mapping, str)) or hasattr(data, "__array__")
        if not isinstance(data, Iterable) or alone:
            raise TypeError(f"data of the type {self.kind}: pass {FORMS}")
        self.samples = None
        if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset) and data.batch_size:
            sampler: Any = data.sampler  # without a batch_size a batch_sampler of the user decides
            self.samples = len(sampler) - len(sampler) % data.batch_size * data.drop_last

    def batches(self, size: int | None = None) -> Iterable[Batch]:
        return self

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Batch]:
        empty = True
        for item in self.data:
            batch, empty = self.place(item), False
            check(batch)
            yield batch
        if empty:
            raise ValueError(f"{self.kind} has no batches: it is empty, or used up")

    def begin_epoch(self, number: int) -> None:
        """A DistributedSampler has another order in every epoch if it is given the number of the epoch."""
        for name in ("sampler", "batch_sampler"):
            change = getattr(getattr(self.data, name, None), "set_epoch", None)
            if callable(change):
                change(number)

    def split(self, fraction: float, seed: int = 0) -> tuple[Source, Source]:
        raise ValueError(
            f"a fraction of {fraction!r} of a {self.kind} cannot be told from the rest: pass a validation set of its "
            "own, or the Dataset or the tensors in the place of its batches"
        )


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
        if isinstance(item, list) and not any(hasattr(t, "__array__") for t in item):
            item = tensor(item, name)

        def moved(t: Any) -> Any:
            if not hasattr(t, "__array__"):
                return t
            t = tensor(t, name)
            if t.is_meta:
                raise ValueError(f"the {name} are on the meta device, without values")
            return t.to(self.device, self.dtype if t.is_floating_point() else None)

        return tree_map(moved, item)


def tensor(item: Any, name: str) -> Tensor:
    """Of an array, a data frame, or a list of numbers"""
    if isinstance(item, Tensor):
        return item
    values, strange = item, []  # columns of a data frame that hold something else than numbers
    if hasattr(item, "to_numpy"):
        values = item.to_numpy()
        dtypes: Any = getattr(item, "dtypes", None)
        if hasattr(dtypes, "items"):
            strange = [name for name, dtype in dtypes.items() if getattr(dtype, "kind", "O") not in "biuf"]
            if not strange and values.dtype == object:  # columns of several kinds, each of them numbers or flags
                values = item.to_numpy(dtype="float64", na_value=float("nan"))
    try:
        frozen = hasattr(values, "flags") and not values.flags.writeable  # which a tensor must not share
        return torch.tensor(values) if frozen else torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = getattr(values, "dtype", type(item).__name__)
        where = f", in the columns {', '.join(map(repr, strange))}" if strange else ""
        raise TypeError(f"the {name} are no numbers ({kind}){where}: {error}") from None


def rows_of(batch: Batch, t: Tensor) -> str:
    """The end of the message on data that do not have their samples first"""
    x, y = batch.inputs, batch.targets
    if not isinstance(y, Tensor) or not isinstance(x, Tensor) or t is not x:
        return ": one row for each sample"
    if x.ndim == y.ndim == 1:
        return ": data have batches, with one row for each sample; a torch Dataset has single samples"
    turns = [
        ("inputs.T and targets.T have", x.ndim == y.ndim == 2 and x.shape[1] == y.shape[1]),
        ("inputs.T has", x.ndim == 2 and y.ndim > 0 and x.shape[1] == len(y) != len(x)),
        ("targets.T has", y.ndim == 2 and x.ndim > 0 and y.shape[1] == len(x) != len(y)),
    ]
    turn = next((f", as {words}" for words, fits in turns if fits), "")
    return f", by targets of the shape {tuple(y.shape)}: both need one row for each sample{turn}"


def check(batch: Batch) -> None:
    """Lengths that do not agree, numbers that are not finite, weights that weigh nothing."""
    N, w, single = batch.samples, batch.weight, isinstance(batch.inputs, Tensor)
    found = [(name, t) for name, item in vars(batch).items() for t in tree_leaves(item) if isinstance(t, Tensor)]
    for name, t in found:
        if (single or name != "inputs") and (t.ndim == 0 or len(t) != N):
            words = "weights" if name == "weight" else name
            raise ValueError(
                f"the {words} have the shape {tuple(t.shape)}, and there are {N} samples{rows_of(batch, t)}"
            )
    for name, t in found:
        if t.is_floating_point():
            # A mask among several inputs may hold −∞.
            bad = t.isnan() if name == "inputs" and not single else ~t.isfinite()
            if bool(bad.any()):
                where = bad.nonzero()[0].tolist()
                raise ValueError(f"{name}{where} is {float(t[tuple(where)])}: drop or repair such samples")
    if isinstance(w, Tensor) and (w.ndim != 1 or bool((w < 0).any())):
        raise ValueError("the weights must be one number of at least 0 for each sample")
    if isinstance(w, Tensor) and not bool((w > 0).any()):
        raise ValueError("the weights of all samples are 0")
