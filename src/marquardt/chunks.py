"""Tensors that several ranks have, whole or by shards, in files of one folder: torch.distributed.checkpoint plans who
writes what, and which parts of it another number of ranks reads.

Its own reader and writer keep that plan in a pickle, `.metadata`, which runs code when it is read and names the files
to read. Here the plan is plain values that the caller keeps (`Index`), and a rank's tensors are in one file by
`files.save`, whose name is a number: nothing runs, and nothing outside the folder is read. Folders of earlier versions
are read as data, too (`old_index`).
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from . import files
from .files import Standin, unpacked
from .values import short

# Of every tensor by name, for each of its chunks: offsets, sizes, and where it is: file and place in it, or name, first
# byte and length in a folder of an earlier version.
Index = dict[str, list[list[Any]]]


def regular(path: Path) -> Path:
    """A file of this folder, and no link out of it."""
    if path.is_symlink():
        raise files.Damaged(f"{path} is a symbolic link: a checkpoint is read from its own folder alone")
    if not path.is_file():
        raise files.Damaged(f"{path} is missing: the checkpoint is damaged")
    return path


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


# Writing.


class Writer(StorageWriter):
    """Each rank a file; the index stays with the first one."""

    def __init__(self, folder: Path, token: str) -> None:
        self.folder, self.token, self.index = folder, token, Index()

    def reset(self, checkpoint_id: Any = None) -> None:
        """There is one folder."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=number) for number, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        number: int = plan.storage_data
        tensors = [alone(planner.resolve_data(item)) for item in plan.items]
        files.save(file(self.folder, number), {"checkpoint": self.token, "file": number, "tensors": tensors})
        return done(
            [
                WriteResult(item.index, t.nbytes, [number, k])
                for k, (item, t) in enumerate(zip(plan.items, tensors, strict=True))
            ]
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        where = {result.index: result.storage_data for part in results for result in part}
        places = {(index.fqn, tuple(index.offset or ())): place for index, place in where.items()}
        for key, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            self.index[key] = [
                [list(chunk.offsets), list(chunk.sizes), *places[key, tuple(chunk.offsets)]] for chunk in tensor.chunks
            ]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def file(folder: Path, number: int) -> Path:
    return folder / f"tensors-{number}.pt"


def alone(t: Any) -> Tensor:
    """On the CPU, without the rest of a larger storage"""
    found: Tensor = t.detach().cpu()
    return found if found.untyped_storage().nbytes() == found.nbytes else found.clone()


def written(tensors: dict[str, Any], folder: Path, token: str, group: Any) -> Index:
    """By all ranks of the group, or by one process; the index is that of the first rank."""
    writer = Writer(folder, token)
    failures = failed(lambda: save(tensors, storage_writer=writer, process_group=group, no_dist=group is None))
    for rank, failure in failures:
        raise files.Unwritable(f"rank {rank} cannot save: {failure}") if isinstance(failure, OSError) else failure
    return writer.index


def failed(call: Callable[[], object]) -> list[tuple[int, BaseException]]:
    """What the ranks have raised, if any has. torch's CheckpointException, which is no Exception and would be taken for
    an interrupt, is left behind."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one process does it by itself, which is meant
            call()
    except CheckpointException as error:
        return [(rank, failure) for rank, (failure, _) in error.failures.items()]
    return []


# Reading.


class Reader(StorageReader):
    def __init__(self, metadata: Metadata, places: Mapping[Any, list[Any]], chunk: Callable[[list[Any]], Tensor]):
        self.metadata, self.places, self.chunk = metadata, places, chunk

    def reset(self, checkpoint_id: Any = None) -> None:
        """There is one folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """All is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        asked = [(self.places[i.storage_index.fqn, tuple(i.storage_index.offset or ())], i) for i in plan.items]
        for place, item in sorted(asked, key=lambda each: each[0][2:]):  # one file after the other
            found = self.chunk(place)
            for dim, (first, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                found = found.narrow(dim, first, length)
            target = planner.resolve_tensor(item).detach()
            if target.shape != found.shape:
                raise files.Damaged(f"{tuple(found.shape)} numbers for {tuple(target.shape)}")
            target.copy_(found)
            planner.commit_tensor(item, target)
        return done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def read_into(
    tensors: dict[str, Any], forms: Mapping[str, tuple[list[int], torch.dtype]], folder: Path, index: Index,
    token: str | None,
) -> None:  # fmt: skip
    """Fills these tensors, each of which has its own form: a shape and a dtype. Without a token the folder is one of an
    earlier version."""
    metadata = Metadata({key: tensor(key, *forms[key], index[key]) for key in tensors})
    places = {(key, tuple(row[0])): row for key in tensors for row in index[key]}
    chunk = Chunks(folder, token) if token is not None else lambda row: old_chunk(folder, *row[1:])
    dtypes = {id(row): forms[key][1] for key in tensors for row in index[key]}

    def checked(row: list[Any]) -> Tensor:
        found = chunk(row)
        if list(found.shape) != row[1] or found.dtype != dtypes[id(row)] or found.layout != torch.strided:
            raise files.Damaged(f"{folder} is damaged: a tensor in it is not the one that is listed")
        return found

    for _, failure in failed(lambda: load(tensors, storage_reader=Reader(metadata, places, checked), no_dist=True)):
        raise failure


def check_size(forms: Mapping[str, tuple[list[int], torch.dtype]], folder: Path, index: Index, old: bool) -> None:
    """Nothing is made that is larger than the files it is to be read from."""
    places = [row[2] for rows in index.values() for row in rows]
    found = {regular(old_file(folder, place) if old else new_file(folder, place)) for place in places}
    there = sum(path.stat().st_size for path in found)
    wanted = sum(math.prod(shape) * dtype.itemsize for shape, dtype in forms.values())
    if wanted > there:
        names = ", ".join(sorted(path.name for path in found))
        raise files.Damaged(f"tensors of {wanted:,} bytes are to be in {names}, of {there:,} bytes")


def new_file(folder: Path, number: Any) -> Path:
    if not whole(number):
        raise files.Damaged(f"{folder} is damaged: it has no file {short(number)}")
    return file(folder, number)


def whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def tensor(key: str, shape: list[int], dtype: torch.dtype, rows: list[list[Any]]) -> TensorStorageMetadata:
    """As torch.distributed.checkpoint knows it, if the chunks are a division of it."""
    for offsets, sizes, *_ in rows:
        fits = len(offsets) == len(sizes) == len(shape) and all(map(whole, (*offsets, *sizes)))
        if not fits or any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            raise files.Damaged(f"{key} has a part outside of it")
    if sum(math.prod(row[1]) for row in rows) != math.prod(shape):
        raise files.Damaged(f"{key} is not whole")
    for (a, m, *_), (b, n, *_) in itertools.combinations(rows, 2):
        if all(o < p + t and p < o + s for o, s, p, t in zip(a, m, b, n, strict=True)):
            raise files.Damaged(f"{key} has a part twice")
    chunks = [ChunkStorageMetadata(torch.Size(row[0]), torch.Size(row[1])) for row in rows]
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), chunks)


class Chunks:
    """From one file after the other"""

    def __init__(self, folder: Path, token: str) -> None:
        self.folder, self.token = folder, token
        self.number, self.tensors = -1, list[Any]()

    def __call__(self, row: list[Any]) -> Tensor:
        _, _, number, k = row
        if number != self.number:
            self.tensors = []  # of the file before, whose memory is free again
            self.number, self.tensors = number, self.opened(number)
        if not whole(k) or k >= len(self.tensors) or not isinstance(self.tensors[k], Tensor):
            raise files.Damaged(f"{file(self.folder, number)} has no tensor {short(k)}")
        found: Tensor = self.tensors[k]
        return found

    def opened(self, number: int) -> list[Any]:
        path = regular(new_file(self.folder, number))
        found, is_sealed = files.load(path)
        if not is_sealed:
            raise files.Damaged(f"{path} is damaged: it has lost its checksum")
        if not isinstance(found, dict) or (found.get("checkpoint"), found.get("file")) != (self.token, number):
            raise files.Damaged(f"{path} is of another checkpoint")
        return list(found["tensors"])


# Folders of version 1: `.metadata` is a pickle of torch.distributed.checkpoint, and a file has several archives.

OLD = ".metadata"
BYTEARRAY = pickle.BYTEARRAY8[0]
OLD_NAME = re.compile(r"__[0-9]{1,9}_[0-9]{1,9}\.distcp")


class Plain(pickle._Unpickler):
    """With a stand-in for every class, none of which is looked up or called."""

    # Without the instruction that makes room for what it has not read.
    dispatch: ClassVar[dict[int, Any]] = {k: v for k, v in pickle._Unpickler.dispatch.items() if k != BYTEARRAY}

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.standin = type("Standin", (Standin,), {})

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        return found if isinstance(found, torch.dtype) else tuple if name == "Size" else self.standin


def old_index(folder: Path) -> Index:
    # From memory: asked for as many bytes as a forged length says, a file would make room for them.
    metadata = Plain(io.BytesIO(regular(folder / OLD).read_bytes())).load().state
    found: dict[str, list[list[Any]]] = {key: [] for key in metadata["state_dict_metadata"]}
    sizes = {
        (key, chunk.state["offsets"]): chunk.state["sizes"]
        for key, tensor in metadata["state_dict_metadata"].items() for chunk in tensor.state["chunks"]
    }  # fmt: skip
    for index, info in metadata["storage_data"].items():
        key, offsets, place = index.state["fqn"], index.state["offset"], info.state
        row = [list(offsets), list(sizes[key, offsets]), place["relative_path"], place["offset"], place["length"]]
        found[key].append(row)
    return found


def old_file(folder: Path, name: Any) -> Path:
    if not isinstance(name, str) or not OLD_NAME.fullmatch(name):
        raise files.Damaged(f"{folder} is damaged: it names a file {short(name)}, which is none of a checkpoint")
    return folder / name


def old_chunk(folder: Path, sizes: list[int], name: str, first: int, length: int) -> Tensor:
    path = regular(old_file(folder, name))
    if not whole(first) or not whole(length) or first + length > path.stat().st_size:
        raise files.Damaged(f"{path} is damaged: it is shorter than it was")
    with path.open("rb") as file:
        file.seek(first)
        found = unpacked(io.BytesIO(file.read(length)))
    if not isinstance(found, Tensor):
        raise files.Damaged(f"{path} is damaged: a tensor is {type(found).__name__}")
    return found
