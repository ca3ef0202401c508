"""What is read from a disk and written on it: files that are whole or not there and show damage, folders that one
process at a time writes to, archives of torch.save, and JSON.

A file that comes from outside is data. torch.load(weights_only=True) runs no code of a file either, but it unpacks what
is compressed, calls `bytearray` and `torch.Tensor` with any size, and takes whatever a program has registered by
torch.serialization.add_safe_globals. An archive that is read here holds tensors and plain values, and none of them is
larger than the file. JSON has a checksum, and every entry the type that a dataclass names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
import pickle
import platform
import re
import reprlib
import secrets
import shlex
import sys
import types
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch.utils._pytree import tree_leaves, tree_map

from .values import quoted


class Held(OSError):
    """Another process writes there."""


class Unwritable(OSError):
    """A file could not be written."""


class Damaged(ValueError):
    """A file is not what was written."""


class Foreign(Unwritable):
    """A name is taken by what is not marquardt's."""


# Whole files.


@contextmanager
def whole(path: Path) -> Iterator[Callable[[str | bytes | memoryview], None]]:
    """What is written gets the name `path` at the end; until then, and after an error, `path` is what it was. Meanwhile
    it has a name that no other process has, and that cannot be a link to another file."""
    part = path.with_name(f"{path.stem}.{secrets.token_hex(4)}.part")
    with told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = part.open("xb")

    def put(content: str | bytes | memoryview) -> None:
        with told(path):
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()

    try:
        yield put
        with told(path):
            os.fsync(file.fileno())  # some file systems notice only here that they are full
            file.close()
            os.replace(part, path)
            settle(path.parent)
    finally:
        with suppress(OSError):  # closing writes again what could not be written before
            file.close()
        part.unlink(missing_ok=True)


def settle(folder: Path) -> None:
    """The names in it are on the disk, too; some systems have no such thing."""
    with suppress(OSError):
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


@contextmanager
def told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        blocked = isinstance(error, (FileExistsError, NotADirectoryError))
        for place in (path, *path.parents) if blocked else ():
            if place.is_file():
                raise Unwritable(
                    f"{path} could not be written: {place} is a file where a folder should be; name another folder, or "
                    "move the file away"
                ) from error
        raise Unwritable(
            f"{path} could not be written ({error.strerror or error}): free some space or choose another folder, and "
            "do the same again; what was finished before is kept"
        ) from error


# Folders that one process at a time writes to.


if sys.platform == "win32":
    import msvcrt

    def _lock(file: int) -> None:
        os.lseek(file, 2**30, os.SEEK_SET)  # past the text: what is locked there cannot be read by others
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def held(out: Path, what: str) -> Iterator[None]:
    """`what` under `out` is this process's to write; where it is another's, `Held` says whose.

    The lock is the system's, on the file .`what`.lock: it ends with the process, also with one that is killed. The
    file stays: a process that removed it could remove the lock of the next one.
    """
    path = out / f".{what}.lock"
    with told(path):
        out.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o666)
    try:
        try:
            _lock(file)
        except (BlockingIOError, PermissionError):  # PermissionError: Windows
            holder = path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
            raise Held(
                f"{out} is in use, {holder} writes its {what}: wait until that has ended, or choose another --out"
            ) from None
        except OSError as error:
            raise Held(f"{path} cannot be locked ({error.strerror}): choose another --out, on a local disk") from error
        if not os.read(file, len(HOLDER)) == HOLDER[: os.fstat(file).st_size]:
            raise Held(f"{path} is no lock of marquardt: move it, or choose another --out")
        with told(path):
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            os.write(file, _self().encode(errors="backslashreplace"))  # names of files may be no UTF-8
        try:
            yield
        finally:
            os.ftruncate(file, 0)
    finally:
        os.close(file)


HOLDER = b"process "  # what a lock begins with, if it is not empty
NO_LINK = getattr(os, "O_NOFOLLOW", 0)


def _self() -> str:
    since = datetime.now().astimezone().isoformat(" ", timespec="seconds")
    return f"{HOLDER.decode()}{os.getpid()} on {platform.node()} ({shlex.join(sys.argv)}, since {since})"


def lock(file: int) -> bool:
    """Whether no living process holds it; assumed where the file system has no locks."""
    try:
        _lock(file)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True
    return True


# Archives of torch.save carry the SHA-256 of their bytes as the comment of the zip file, which torch.load passes over:
# a changed bit is noticed, and the file remains one that torch.load reads.
SEAL = b"marquardt sha256 "
SEALED = len(SEAL) + hashlib.sha256().digest_size * 2


def save(path: Path, content: Any) -> None:
    """Tensors and plain values by torch.save, whole or not at all, and sealed; refused if `load` would not take it."""
    if any(_alone(item) is not item for item in tree_leaves(content)):
        content = tree_map(_alone, content)
    try:
        archive = archived(content)
    except MemoryError:
        raise
    except Exception as error:
        raise TypeError(f"{path} holds tensors, numbers, strings, lists and dicts alone: {error}") from None
    with whole(path) as put:
        put(sealed_archive(archive))


def archived(content: Any) -> bytes:
    """By torch.save; raises if `load` would not take it, by an exception of any kind."""
    torch.save(content, file := io.BytesIO())
    check_archive(file)
    return file.getvalue()


def sealed_archive(archive: bytes) -> bytes:
    """The last two bytes of a zip file are the length of its comment."""
    assert archive.endswith(bytes(2)), "torch.save wrote an archive that has a comment"
    body = memoryview(archive)[:-2]
    return b"".join((body, SEALED.to_bytes(2, "little"), SEAL, hashlib.sha256(body).hexdigest().encode()))


def _alone(item: Any) -> Any:
    """Its storage has a number for each of its elements: `load` takes none that asks for memory, and what a view leaves
    out is not written."""
    strided = isinstance(item, torch.Tensor) and item.layout == torch.strided and not item.is_meta
    return item.clone() if strided and item.numel() * item.itemsize != item.untyped_storage().nbytes() else item


def load(path: Path) -> tuple[Any, bool]:
    """What `save` wrote, on the CPU, and whether it is sealed: files of earlier versions are not, and one of this
    version that is not has lost its seal. Runs no code of the file."""
    with path.open("rb") as file:  # the same one to the end, whatever takes its name meanwhile
        is_sealed = _is_sealed(path, file)
        try:
            return unpacked(file), is_sealed
        except MemoryError:
            raise
        except Exception as error:  # of many kinds
            words = f"{type(error).__name__}: {error}".splitlines()[0]
            raise Damaged(f"{path} is damaged, or no file of marquardt ({words})") from error


def check_seal(path: Path) -> bool:
    """Whether there is a seal; `Damaged` if the file is not what was sealed."""
    with path.open("rb") as file:
        return _is_sealed(path, file)


def _is_sealed(path: Path, file: BinaryIO) -> bool:
    size = file.seek(0, os.SEEK_END) - SEALED - 2
    if size < 0:
        return False
    file.seek(size + 2)
    seal = file.read(SEALED)
    if not seal.startswith(SEAL):
        return False
    file.seek(0)
    if SEAL + _digest(file, size).encode() != seal or file.read(2) != SEALED.to_bytes(2, "little"):
        raise Damaged(f"{path} is damaged: its checksum is another one than when it was written")
    return True


# What an archive may hold.


# Values that a small file may have by holding some of them in several places
SHARED_VALUES = 100_000


def unpacked(file: BinaryIO) -> Any:
    """What is in it, on the CPU."""
    check_archive(file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def check_archive(file: BinaryIO) -> None:
    """Raises if it is no archive of tensors and plain values, by an exception of any kind."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        names = {entry.filename.lower() for entry in entries}  # torch's reader takes capitals for small letters
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("it is compressed")
        if len(names) < len(entries) or sum(entry.file_size for entry in entries) > size:
            raise ValueError("its entries overlap")
        root = entries[0].filename.partition("/")[0]
        pickled = io.BytesIO(archive.read(f"{root}/data.pkl"))
        content = Trial(pickled, lambda key: archive.getinfo(f"{root}/data/{key}").file_size).load()
        if _written_out(content) > max(size, SHARED_VALUES):
            raise ValueError("it holds the same lists in each other, more of them than it has bytes")


def _written_out(content: Any) -> int:
    """How many values there are for who goes through all of them: what is held in several places counts in each"""
    counts: dict[int, int] = {}
    left = [(content, False)]
    while left:
        item, is_counted = left.pop()
        inner = [*item.values()] if isinstance(item, dict) else [*item] if isinstance(item, (list, tuple, set)) else []
        if is_counted:
            counts[id(item)] = 1 + sum(counts.get(id(part), 1) for part in inner)
        elif id(item) not in counts:
            counts[id(item)] = 1
            left += [(item, True), *((part, False) for part in inner)]
    return counts[id(content)]


class Standin:
    """In the place of any object: what is called, and what an object is built from, is kept and does nothing."""

    def __init__(self, *args: Any) -> None:
        self.args, self.state = args, None

    def __setstate__(self, state: Any) -> None:
        self.state = state


# The instructions of a pickle that torch.load knows as well. Others may ask for memory before they have read anything.
KNOWN = (
    pickle.PROTO + pickle.STOP + pickle.MARK + pickle.NONE + pickle.NEWTRUE + pickle.NEWFALSE + pickle.BININT
    + pickle.BININT1 + pickle.BININT2 + pickle.LONG1 + pickle.BINFLOAT + pickle.BINUNICODE + pickle.SHORT_BINSTRING
    + pickle.EMPTY_TUPLE + pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3 + pickle.EMPTY_LIST
    + pickle.APPEND + pickle.APPENDS + pickle.EMPTY_DICT + pickle.SETITEM + pickle.SETITEMS + pickle.EMPTY_SET
    + pickle.BINGET + pickle.LONG_BINGET + pickle.BINPUT + pickle.LONG_BINPUT + pickle.GLOBAL + pickle.REDUCE
    + pickle.NEWOBJ + pickle.BUILD + pickle.BINPERSID
)  # fmt: skip


class Instructions(dict[int, Any]):
    def __missing__(self, code: int) -> Any:
        raise ValueError(f"it has the instruction {code}, which torch.load does not know")


class Trial(pickle._Unpickler):
    """Goes through a pickle as torch.load will, in Python, and builds no tensors."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = Instructions({code: pickle._Unpickler.dispatch[code] for code in KNOWN})

    def load_build(self) -> None:
        """The attributes that torch gives to a state_dict are of no use here."""
        self.stack.pop()
        if type(self.stack[-1]) is not OrderedDict:
            raise ValueError("it gives attributes to what is no state_dict")

    dispatch[pickle.BUILD[0]] = load_build

    def __init__(self, file: Any, size: Callable[[str], int]) -> None:
        super().__init__(file)
        self.size = size  # of an entry with numbers, in bytes

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}".replace("__builtin__.", "builtins.")
        if path in CALLED:
            return CALLED[path]
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, (torch.dtype, torch.qscheme)):
            return found
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return name  # of which nothing can be made by calling it
        raise ValueError(f"it holds {path}, which is neither a tensor nor a plain value")

    def persistent_load(self, pid: Any) -> tuple[int, int]:
        """Numbers in a storage, and bytes of each"""
        _, _, key, _, count = pid
        size = self.size(key)
        each = 1 if not count else size // count
        if each * count != size or each > 16:
            raise ValueError(f"it has {size} bytes for {count} numbers")
        return count, each


def _tensor(storage: tuple[int, int], offset: int, size: tuple[int, ...], stride: tuple[int, ...], *more: Any) -> Any:
    """Whether it lies within its storage: not all versions of torch look."""
    count, each = storage
    dtypes = [item for item in more if isinstance(item, torch.dtype)]
    if each == 1 and dtypes:  # a storage without a type
        count //= dtypes[0].itemsize
    last = offset + sum((s - 1) * step for s, step in zip(size, stride, strict=True))
    if min((offset, *size, *stride)) < 0 or (0 not in size and last >= count) or math.prod(size) > count:
        raise ValueError(f"it has {count} numbers for a tensor of {tuple(size)}")
    return Standin()


def _encoded(text: str, encoding: str) -> bytes:
    """How bytes are written in an old pickle"""
    if encoding != "latin1":
        raise ValueError(f"it has bytes in {encoding!r}")
    return text.encode("latin-1")


# What a pickle may call, and what is called in its stead.
CALLED: dict[str, Any] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_qtensor": _tensor,
    "torch._utils._rebuild_parameter": Standin,
    "torch._utils._rebuild_sparse_tensor": Standin,
    "torch.serialization._get_layout": Standin,
    "torch.device": Standin,
    "torch.Size": tuple,
    "collections.OrderedDict": OrderedDict,
    "collections.Counter": Counter,
    "builtins.set": set,
    "builtins.complex": complex,
    "_codecs.encode": _encoded,
}


# JSON.


COMPACT = (",", ": ")  # a tenth less where there are no lines
# The last entry of the outermost object is the SHA-256 of all the bytes before it: what is written stays JSON.
TEXT_SEAL = b', "sha256": "'
LARGEST = 2**28  # bytes; what is larger was not written here


def write(path: Path, content: Mapping[str, Any], indent: int | None = 1) -> None:
    with whole(path) as put:
        put(sealed(content, indent))


def sealed(content: Mapping[str, Any], indent: int | None = None) -> bytes:
    body = dumps(content, indent, COMPACT).removesuffix("}").rstrip().encode()
    return body + TEXT_SEAL + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def read(path: Path) -> tuple[dict[str, Any], bool]:
    """What was written, and whether it is sealed: files of earlier versions are not, and one of this version that is
    not has lost its seal. `Damaged` if it is not what was sealed."""
    text = content_of(path)
    is_sealed = check_text(path, text)
    try:
        found = loads(text)
    except ValueError as error:
        raise Damaged(f"{path} is damaged, or no file of marquardt ({error})") from None
    found.pop("sha256", None)
    return found, is_sealed


def check_text(path: Path, text: bytes) -> bool:
    """Whether there is a seal; `Damaged` if the text is not what was sealed."""
    body, seal, found = text.rpartition(TEXT_SEAL)
    if not seal:
        return False
    if found != hashlib.sha256(body).hexdigest().encode() + b'"}\n':
        raise Damaged(f"{path} is damaged or was edited: its checksum is another one than when it was written")
    return True


def content_of(path: Path) -> bytes:
    if path.exists() and not path.is_file():  # a pipe would never end
        raise Damaged(f"{path} is no file")
    with path.open("rb") as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise Damaged(f"{path} has more than {LARGEST:,} bytes, and so was not written by marquardt")
    return text


def dumps(content: Any, indent: int | None = None, separators: tuple[str, str] | None = None) -> str:
    """Letters as they are, and what does not show itself as escapes: a terminal would obey it, and bytes of a file name
    that are no UTF-8 cannot be written otherwise."""
    text = json.dumps(content, indent=indent, separators=separators, ensure_ascii=False, allow_nan=False)
    if all(map(str.isprintable, text.split("\n"))):
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def loads(text: bytes) -> dict[str, Any]:
    """An object; ValueError with a reason in a few words."""
    try:
        found = json.loads(text.decode("utf-8"), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8, at byte {error.start + 1}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError("not JSON") from error
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def _refuse(name: str) -> None:
    raise ValueError(f"{name} in JSON")


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# Files beside a document, which holds their checksums.


def own(paths: Mapping[Path, str | None], known: Collection[str], way: str) -> set[str]:
    """The checksums of those that are there. What was not written by marquardt is not replaced: a file whose checksum
    is not `known` is refused.

    `paths` have the checksums of what is going to be there, None if that is not known yet: a file that is the same
    already may stay.
    """
    found = set()
    for path, new in paths.items():
        if not os.path.lexists(path):
            continue
        if path.is_symlink() or not path.is_file():
            raise Foreign(f"{path} is there already, and no file that marquardt has written: {way}")
        there = digest_of(path)
        if there != new and there not in known:
            raise Foreign(f"{path} is there already, and is not as marquardt has written it: {way}")
        found.add(there)
    return found


def left_over(folder: Path, stems: str) -> list[Path]:
    """What a killed process has left half-written of files whose names without their ends match `stems`: such names
    are given by `files.whole`. Links and folders are none of them."""
    form = re.compile(rf"({stems})\.[0-9a-f]{{8}}\.part")
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(p for p in found if form.fullmatch(p.name) and p.is_file() and not p.is_symlink())


class SealedLines:
    """Lines of JSON, the last of which holds the checksum of all that was written before it."""

    def __init__(self, put: Callable[[bytes], None]) -> None:
        self.put, self.sum = put, hashlib.sha256()

    def add(self, line: Mapping[str, Any], *, last: bool = False) -> None:
        text = dumps(line).encode()
        body = text.removesuffix(b"}") if last else text + b"\n"
        self.sum.update(body)
        self.put(body + TEXT_SEAL + self.sum.hexdigest().encode() + b'"}\n' if last else body)


def digest_of(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return _digest(file, sys.maxsize)


def _digest(file: BinaryIO, size: int) -> str:
    """SHA-256 of the next bytes of a file, of at most this size"""
    found = hashlib.sha256()
    while size and (part := file.read(min(size, 2**20))):
        found.update(part)
        size -= len(part)
    return found.hexdigest()


# Types of what JSON holds.


def typed(value: Any, wanted: Any, place: str = "") -> Any:
    """The value as `wanted`, a type of dataclasses, lists, tuples, dicts and plain values; a list becomes a tuple and
    an object a dataclass. What has another type, or is not finite, is a ValueError that names its place."""
    origin, inner = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return value
    if origin in (Union, types.UnionType):
        return _one_of(value, inner, place)
    if origin is Literal:
        return value if value in inner else _wrong(value, " or ".join(map(repr, inner)), place)
    if dataclasses.is_dataclass(wanted):
        return _dataclass(value, wanted, place)
    if origin in (list, tuple, Sequence):
        return _list(value, origin, inner, place)
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            _wrong(value, "an object", place)
        return {typed(k, inner[0], place): typed(v, inner[1], f"{place}[{quoted(k)}]") for k, v in value.items()}
    return _plain(value, wanted, place)


def _plain(value: Any, wanted: Any, place: str) -> Any:
    if wanted is float:
        try:
            finite = type(value) in (int, float) and math.isfinite(value)
        except OverflowError:  # an integer of hundreds of digits
            finite = False
        return float(value) if finite else _wrong(value, "a finite number", place)
    kind = str if wanted is Path else wanted
    if type(value) is not kind:  # not isinstance: true is no number
        names = {str: "text", int: "a whole number", bool: "true or false", type(None): "null"}
        _wrong(value, names[kind], place)
    return Path(value) if wanted is Path else value


def _one_of(value: Any, kinds: Sequence[Any], place: str) -> Any:
    errors = []
    for kind in kinds:
        try:
            return typed(value, kind, place)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _dataclass(value: Any, wanted: Any, place: str) -> Any:
    if not isinstance(value, dict):
        _wrong(value, "an object", place)
    hints, fields = get_type_hints(wanted), {field.name: field for field in dataclasses.fields(wanted)}
    if unknown := [name for name in value if name not in fields]:
        raise ValueError(f"{place or 'it'} has an entry {quoted(unknown[0])}, which is not known here")
    missing = [
        name
        for name, field in fields.items()
        if name not in value and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{place or 'it'} has no {missing[0]!r}")
    before = f"{place}." if place else ""
    return wanted(**{name: typed(item, hints[name], f"{before}{name}") for name, item in value.items()})


def _list(value: Any, kind: Any, inner: tuple[Any, ...], place: str) -> Any:
    if not isinstance(value, (list, tuple)):
        _wrong(value, "a list", place)
    each = inner if kind is tuple and inner[-1] is not Ellipsis else (inner[0],) * len(value)
    if len(each) != len(value):
        _wrong(value, f"a list of {len(each)}", place)
    found = [typed(item, one, f"{place}[{i}]") for i, (item, one) in enumerate(zip(value, each, strict=True))]
    return found if kind is list else tuple(found)


def _wrong(value: Any, words: str, place: str) -> Any:
    raise ValueError(f"{place or 'it'} is {reprlib.repr(value)}, not {words}")
