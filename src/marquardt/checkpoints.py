"""Checkpoints in folders, which any number of ranks can continue from.

    folder/12/.marquardt     says that marquardt has made the folder 12, and may remove it
    folder/12/tensors-0.pt   the tensors
    folder/12/contents.pt    the rest, and which tensor is where: written last, without it the folder counts for nothing

Only when a checkpoint is complete those before it are removed; and what a killed process has left with the next one. A
folder without the mark, and whatever else is beside these files, is the user's and stays.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
import re
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import KeyPath, keystr, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

from . import files, generators
from .model.checks import unwrapped
from .model.shards import sharded
from .optimizer import LM
from .ranks import RankError, Ranks
from .values import is_count, short

# Version 1 had no checksums, no mark, and the pickle of torch.distributed.checkpoint in the place of an index. In
# version 2 each rank may have written a part of the tensors, each to another file.
VERSION = 2
CONTENTS, MARK = "contents.pt", ".marquardt"

# Marks the place of a tensor among what is plain.
STORED = "torch.distributed.checkpoint"


def save_checkpoint(folder: str | PathLike[str], model: nn.Module, opt: LM, **more: Any) -> None:
    """Saves model, optimizer, the random numbers of every rank, and `more`: tensors and plain values by name.

    All ranks of the optimizer's group call it, unlike `if rank == 0: torch.save(...)`; `more` is that of rank 0.
    The folder is on a file system that all of them see. It is written whole or not at all: until the new one is
    complete, the last one stays. What else is in the folder stays, too. One process without torch.distributed can save
    and load as well. What could not be loaded again is refused by name, before anything is written.

    Args:
        folder: of the checkpoints, which is made if it is not there.
        model: whose state_dict is saved.
        opt: that trains it.
        more: tensors and plain values by name, which `load_checkpoint` returns.

    >>> mq.save_checkpoint("run", model, opt, epoch=3)
    >>> epoch = mq.load_checkpoint("run", model, opt)["epoch"]
    """
    inner, ranks = checked(model, opt)
    with ranks.together():
        content = {"model": inner.state_dict(), "optimizer": loadable(opt), "more": more}
        write(Path(folder), content, generators.states(), ranks)


def load_checkpoint(folder: str | PathLike[str], model: nn.Module, opt: LM) -> dict[str, Any]:
    """Loads the last checkpoint of `save_checkpoint` into model and optimizer, and returns what was saved beside them.

    The number of ranks may be another one. Each rank gets the random numbers that it had; one that was not there
    begins with another seed. Nothing in a checkpoint runs, and if it is damaged, or of another model or optimizer,
    nothing changes. All ranks of the optimizer's group call it.

    Args:
        folder: that `save_checkpoint` has written to.
        model: made as the one that was saved.
        opt: made with the same options.

    Returns:
        What was saved beside them, by name.

    >>> mq.save_checkpoint("run", model, opt, epoch=3)
    >>> mq.load_checkpoint("run", model, opt)["epoch"]
    3
    """
    inner, ranks = checked(model, opt)
    with ranks.together():
        ranks.same(f"the checkpoint in {folder}")
        own = inner.state_dict()
        path, content, random = read(Path(folder), ranks)
        check_model(path, content.get("model"), own)
        ranks.same(f"the checkpoint {path} is read")  # by all, or none of them changes
        with unchanged_by_errors(inner, opt):
            apply(path, content, random, inner, opt)
            ranks.same(f"the checkpoint {path} is loaded")
        return dict(content["more"])


def apply(path: Path, content: dict[str, Any], random: Any, model: nn.Module, opt: LM) -> None:
    try:
        opt.load_state_dict(content["optimizer"])
    except (TypeError, ValueError) as error:
        raise type(error)(f"the checkpoint {path} is of another optimizer: {error}") from None
    except Exception as error:  # of many kinds
        raise unreadable(path, error) from error
    try:
        model.load_state_dict(content["model"])
        generators.set_states(generators.of_rank(random, opt._ranks.rank))
        dict(content["more"])
    except RankError:
        raise
    except Exception as error:
        raise unreadable(path, error) from error


@contextmanager
def unchanged_by_errors(model: nn.Module, opt: LM) -> Iterator[None]:
    """Model, optimizer and random numbers are afterwards as they were, if something is raised within it."""
    before = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
    extra = {name: item for name, item in model.state_dict().items() if not isinstance(item, Tensor)}
    held, random = dict(vars(opt)), generators.states()
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for t, value in before:
                t.copy_(value)
        vars(opt).clear()
        vars(opt).update(held)
        generators.set_states(random)
        if extra:
            model.load_state_dict(extra, strict=False)
        raise


def loadable(opt: LM) -> dict[str, Any]:
    """Its state, which options that have changed since the last step may not go with"""
    state = opt.state_dict()
    try:
        opt._checked(state)
    except (TypeError, ValueError) as error:
        raise type(error)(f"the optimizer could not be loaded from a checkpoint again: {error}") from None
    return state


def checked(model: nn.Module, opt: Any) -> tuple[nn.Module, Ranks]:
    """The model without its wrapper, and the ranks that train it; the state of an optimizer of shards is that of its
    rank alone."""
    if not isinstance(opt, LM):
        raise TypeError(f"the optimizer is {type(opt).__name__}: checkpoints are of marquardt.LM")
    if any(sharded(p) for p in model.parameters()):
        raise TypeError(
            "mq.save_checkpoint and mq.load_checkpoint take no model whose parameters are sharded: save its state_dict "
            "by torch.distributed.checkpoint, and opt.state_dict() by torch.save in a file for every rank "
            "(docs/sharded.md)"
        )
    return unwrapped(model, None)[0], opt._ranks


def check_model(path: Path, there: Any, here: Mapping[str, Any]) -> None:
    if not isinstance(there, Mapping):
        raise ValueError(
            f"{path} is no checkpoint of mq.save_checkpoint: mq.fit(model, data, loss, checkpoint=path) goes on with "
            "its own"
        )
    for name in dict.fromkeys([*there, *here]):
        before, now = (shape(found[name]) if name in found else "missing" for found in (there, here))
        if before != now:
            raise ValueError(
                f"the checkpoint {path} is of another model: {name!r} is {now} in this one, and was {before}. Make the "
                "model as it was, or name another folder"
            )


def shape(item: Any) -> str:
    return str(tuple(item.shape)) if isinstance(item, Tensor) else "no tensor"


# A folder of checkpoints.


NUMBER = re.compile("[1-9][0-9]{0,17}")


def numbered(folder: Path, links: bool = False) -> dict[int, Path]:
    """Folders that may be checkpoints, by number: no digits but 0 to 9. Or the links with such a name."""
    found = folder.iterdir() if folder.is_dir() else ()
    paths = [path for path in found if NUMBER.fullmatch(path.name) and path.is_symlink() == links]
    return {int(path.name): path for path in sorted(paths, key=lambda path: int(path.name)) if links or path.is_dir()}


def complete(path: Path) -> bool:
    return os.path.lexists(path / CONTENTS)


def latest(folder: Path) -> Path | None:
    """The last one that is complete."""
    check_links(folder)
    found = [path for path in numbered(folder).values() if complete(path)]
    return found[-1] if found else None


def check_links(folder: Path) -> None:
    """Before one is read, and before one is written that could not be read then"""
    for path in numbered(folder, links=True).values():
        if complete(path):
            raise ValueError(
                f"{path} is a symbolic link: a checkpoint is read from its own folder alone; move the link away, or "
                "name another folder"
            )


def words(number: int) -> bytes:
    """That a copy of the folder under another number has as well, and which is no mark there"""
    return f"Checkpoint {number} of marquardt, which removes this folder when a later one is complete.\n".encode()


@contextmanager
def begun(folder: Path) -> Iterator[Path]:
    """A new folder with the mark, which no other process removes meanwhile; it is gone again if it is not completed."""
    check_links(folder)
    for path in numbered(folder).values():
        if not complete(path):
            remove(path)  # what a killed process has left
    last = max((number for number, path in numbered(folder).items() if complete(path) or ours(path)), default=0)
    path = made(folder, last + 1)
    try:
        with files.told(path / MARK):
            mark = (path / MARK).open("x+b", buffering=0)
        with mark:
            files.lock(mark.fileno())  # before it is a mark
            with files.told(path / MARK):
                mark.write(words(int(path.name)))
            yield path
    finally:
        if not complete(path):
            remove(path, here=True)
            with suppress(OSError):
                path.rmdir()  # if there was no room for the mark


def made(folder: Path, number: int) -> Path:
    """The first folder from this number on that is not there."""
    with files.told(folder / str(number)):
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            path = folder / str(number)
            with suppress(FileExistsError):
                path.mkdir()
                return path
            number += 1


def ours(path: Path) -> bool:
    """Whether it has the mark of this number."""
    mark = path / MARK
    if mark.is_symlink() or not mark.is_file():
        return False
    with mark.open("rb") as file:
        return file.read(200) == words(int(path.name))


# What a checkpoint has, also half-written.
NAMES = re.compile(r"(contents|tensors-[0-9]+)\.(pt|[0-9a-f]{8}\.part)")


def remove(path: Path, here: bool = False) -> None:
    """Only what has the mark (or was made `here`), and no process writes; of that only what marquardt has written, and
    the folder if nothing else is in it. Before all else it is no complete checkpoint any more, and up to the end it has
    the mark."""
    with suppress(FileNotFoundError):  # another process removes it, too
        if not (here or ours(path)):
            return
        with (path / MARK).open("r+b") as mark:
            if not files.lock(mark.fileno()):
                return
            for name in sorted(os.listdir(path), key=lambda name: name != CONTENTS):
                if NAMES.fullmatch(name) and not (path / name).is_dir():
                    os.unlink(path / name)
        if os.listdir(path) == [MARK]:
            os.unlink(path / MARK)
            os.rmdir(path)


def write(folder: Path, content: Any, own: Any, ranks: Ranks) -> None:
    """`content` is the same on all ranks, and rank 0 writes it; `own` is what each of them has by itself."""
    ranks.same(f"a checkpoint in {folder}")
    tensors, plain = taken_apart(content)
    token = secrets.token_hex(16)
    index = {key: [[[0] * t.ndim, list(t.shape), 0, k]] for k, (key, t) in enumerate(tensors.items())}
    shared = {
        "marquardt": VERSION, "content": plain, "ranks": ranks.every(own), "checkpoint": token, "index": index
    }  # fmt: skip
    check_plain(shared, len(tensors))
    with ExitStack() as stack:
        path = ranks.agreed(stack.enter_context(begun(folder)) if ranks.rank == 0 else folder)
        if not path.is_dir():
            raise OSError(
                f"rank {ranks.rank} does not see {path}, which rank 0 has made: name a folder that all ranks share"
            )
        ranks.same(f"the folder {path}")  # which all see, before anything is in it
        if ranks.rank == 0:
            stored = {"checkpoint": token, "file": 0, "tensors": list(tensors.values())}
            files.save(path / "tensors-0.pt", stored)
            files.save(path / CONTENTS, shared)
            files.settle(folder)
            for number, old in numbered(folder).items():
                if number < int(path.name):
                    remove(old)
    ranks.same(f"the checkpoint {path} is complete")


def read(folder: Path, ranks: Ranks) -> tuple[Path, dict[str, Any], list[Any]]:
    """Where it was, what all ranks have saved, and what each had by itself. All of it is checked."""
    path = ranks.agreed(latest(folder))
    if path is None:
        raise FileNotFoundError(f"{folder} holds no checkpoint that is complete: begin anew, or name another folder")
    try:
        return path, *put_together(path)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # of many kinds
        raise unreadable(path, error) from error


def unreadable(path: Path, error: BaseException) -> files.Damaged:
    reason = str(error) if isinstance(error, files.Damaged) else f"{type(error).__name__}: {error}"
    return files.Damaged(f"{path} is no checkpoint, or damaged ({reason}): move it away, or name another folder")


def check_plain(content: Any, tensors: int) -> None:
    """Checks that it can be loaded, with this number of tensors"""
    if (error := unplain(content)) is not None:
        inner = (dict, list, tuple, OrderedDict)
        items = tree_flatten_with_path(content, is_leaf=lambda item: type(item) not in inner)[0]
        named = (f", unlike {entry(place)}, {short(item)}" for place, item in items if unplain(item) is not None)
        raise TypeError(
            f"a checkpoint holds tensors, numbers, strings, lists and dicts alone{next(named, '')} ({error}): save it "
            "as one of these, or leave it out"
        ) from None
    if sum(map(is_stored, tree_leaves(content, is_leaf=is_stored))) != tensors:
        raise ValueError(f"a dict with the entry {STORED!r}: name it otherwise, it marks the place of a tensor")


def unplain(content: Any) -> Exception | None:
    """Why it could not be loaded, if it could not"""
    try:
        files.archived(content)
    except Exception as error:
        return error
    return None


def entry(place: KeyPath) -> str:
    """Such as more['epoch']"""
    return re.sub(r"^(\['content'\])?\['(\w+)'\]", r"\2", keystr(place))


# Tensors.


def taken_apart(content: Any) -> tuple[dict[str, Tensor], Any]:
    """The tensors by their places, and everything with these in their stead. Of a DTensor all ranks have a part."""
    leaves, tree = tree_flatten_with_path(content)
    tensors: dict[str, Tensor] = {}
    plain = []
    for place, leaf in leaves:
        if isinstance(leaf, Tensor):
            t = leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf
            check_dense(place, t)
            tensors[keystr(place)] = t.detach()
            leaf = {STORED: keystr(place), "shape": list(t.shape), "dtype": t.dtype}
        plain.append(leaf)
    return tensors, tree_unflatten(plain, tree)


def check_dense(place: KeyPath, t: Any) -> None:
    """That a tensor can be made again from its shape and its dtype, and filled with its numbers"""
    kinds = {
        "a quantised tensor": t.is_quantized, "a nested tensor": t.is_nested,
        "on the meta device, without numbers": t.is_meta,
        f"a tensor of the layout {t.layout}": t.layout != torch.strided,
        f"a {type(t).__name__}": type(t.detach()) is not Tensor,
    }  # fmt: skip
    for kind, so in kinds.items():
        if so:
            raise TypeError(
                f"a checkpoint holds dense tensors alone, and {entry(place)} is {kind}: save numbers, such as "
                "t.dequantize() or t.to_dense(), or leave it out"
            )


def is_stored(item: Any) -> bool:
    return isinstance(item, dict) and STORED in item


# Of every tensor by name, for each of its parts: offsets, sizes, and where it is: file and place in it, or name, first
# byte and length in a folder of version 1.
Index = dict[str, list[list[Any]]]
Forms = dict[str, tuple[list[int], torch.dtype]]


def put_together(path: Path) -> tuple[dict[str, Any], list[Any]]:
    found, is_sealed = files.load(regular(path / CONTENTS))
    version = found.get("marquardt") if isinstance(found, dict) else None
    if version not in (1, VERSION):
        raise files.Damaged(f"its version is {short(version)}, this marquardt reads 1 to {VERSION}")
    if version == VERSION and not is_sealed:
        raise files.Damaged(f"{path / CONTENTS} has lost its checksum")
    index, token = (old_index(path), None) if version == 1 else (found["index"], found["checkpoint"])
    items = [item for item in tree_leaves(found["content"], is_leaf=is_stored) if is_stored(item)]
    forms = {item[STORED]: (item["shape"], item["dtype"]) for item in items}
    if set(forms) != set(index):
        raise files.Damaged("the tensors in it are others than it lists")
    tensors = filled(path, forms, index, token)
    content = tree_map(lambda i: tensors[i[STORED]] if is_stored(i) else i, found["content"], is_leaf=is_stored)
    return dict(content), list(found["ranks"])


def filled(folder: Path, forms: Forms, index: Index, token: str | None) -> dict[str, Tensor]:
    """The tensors, each of its form: a shape and a dtype. A folder of version 1 has no token."""
    rows = [(key, *row) for key, parts in index.items() for row in parts]
    check_size(forms, {part_file(folder, row[3], token) for row in rows})
    for key, (shape, _) in forms.items():
        check_parts(key, shape, index[key])
    tensors = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in forms.items()}
    for name, parts in itertools.groupby(sorted(rows, key=lambda row: row[3:]), key=lambda row: row[3]):
        path = part_file(folder, name, token)
        stored = [] if token is None else stored_in(path, name, token)
        for key, offsets, sizes, _, *place in parts:
            part, t = old_part(path, *place) if token is None else stored[place[0]], tensors[key]
            if list(part.shape) != sizes or part.dtype != t.dtype or part.layout != torch.strided:
                raise files.Damaged(f"{path} is damaged: a tensor in it is not the one that is listed")
            t[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].copy_(part.detach())
    return tensors


def check_parts(key: str, shape: list[int], rows: list[list[Any]]) -> None:
    """That they are a division of the tensor"""
    for offsets, sizes, *_ in rows:
        fits = len(offsets) == len(sizes) == len(shape) and all(map(is_count, (*offsets, *sizes)))
        if not fits or any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            raise files.Damaged(f"{key} has a part outside of it")
    if sum(math.prod(row[1]) for row in rows) != math.prod(shape):
        raise files.Damaged(f"{key} is not whole")
    for (a, m, *_), (b, n, *_) in itertools.combinations(rows, 2):
        if all(o < p + t and p < o + s for o, s, p, t in zip(a, m, b, n, strict=True)):
            raise files.Damaged(f"{key} has a part twice")


def check_size(forms: Forms, paths: set[Path]) -> None:
    """Nothing is made that is larger than the files it is to be read from."""
    there = sum(path.stat().st_size for path in paths)
    wanted = sum(math.prod(shape) * dtype.itemsize for shape, dtype in forms.values())
    if wanted > there:
        names = ", ".join(sorted(path.name for path in paths))
        raise files.Damaged(f"tensors of {wanted:,} bytes are to be in {names}, of {there:,} bytes")


def part_file(folder: Path, name: Any, token: str | None) -> Path:
    known = is_count(name) if token is not None else isinstance(name, str) and OLD_NAME.fullmatch(name)
    if not known:
        raise files.Damaged(f"{folder} is damaged: it names a file {short(name)}, which is none of a checkpoint")
    return regular(folder / (name if token is None else f"tensors-{name}.pt"))


def regular(path: Path) -> Path:
    """A file of this folder, and no link out of it."""
    if path.is_symlink():
        raise files.Damaged(f"{path} is a symbolic link: a checkpoint is read from its own folder alone")
    if not path.is_file():
        raise files.Damaged(f"{path} is missing: the checkpoint is damaged")
    return path


def stored_in(path: Path, number: int, token: str) -> list[Any]:
    found, is_sealed = files.load(path)
    if not is_sealed:
        raise files.Damaged(f"{path} is damaged: it has lost its checksum")
    if not isinstance(found, dict) or (found.get("checkpoint"), found.get("file")) != (token, number):
        raise files.Damaged(f"{path} is of another checkpoint")
    return list(found["tensors"])


# Folders of version 1: `.metadata` is a pickle of torch.distributed.checkpoint, and a file has several archives.

OLD_NAME = re.compile(r"__[0-9]{1,9}_[0-9]{1,9}\.distcp")
BYTEARRAY = pickle.BYTEARRAY8[0]


class Plain(pickle._Unpickler):
    """With a stand-in for every class, none of which is looked up or called."""

    # Without the instruction that makes room for what it has not read.
    dispatch: ClassVar[dict[int, Any]] = {k: v for k, v in pickle._Unpickler.dispatch.items() if k != BYTEARRAY}

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.standin = type("Standin", (files.Standin,), {})

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        return found if isinstance(found, torch.dtype) else tuple if name == "Size" else self.standin


def old_index(folder: Path) -> Index:
    # From memory: asked for as many bytes as a forged length says, a file would make room for them.
    metadata = Plain(io.BytesIO(regular(folder / ".metadata").read_bytes())).load().state
    found: Index = {key: [] for key in metadata["state_dict_metadata"]}
    sizes = {
        (key, chunk.state["offsets"]): chunk.state["sizes"]
        for key, tensor in metadata["state_dict_metadata"].items() for chunk in tensor.state["chunks"]
    }  # fmt: skip
    for index, info in metadata["storage_data"].items():
        key, offsets, place = index.state["fqn"], index.state["offset"], info.state
        row = [list(offsets), list(sizes[key, offsets]), place["relative_path"], place["offset"], place["length"]]
        found[key].append(row)
    return found


def old_part(path: Path, first: int, length: int) -> Tensor:
    if not is_count(first) or not is_count(length) or first + length > path.stat().st_size:
        raise files.Damaged(f"{path} is damaged: it is shorter than it was")
    with path.open("rb") as file:
        file.seek(first)
        found: Tensor = files.unpacked(io.BytesIO(file.read(length)))
    return found
