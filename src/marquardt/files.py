"""Files that are whole or not there, that show damage, and folders that one process at a time writes to."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.utils._pytree import tree_leaves, tree_map

from . import archives

if sys.platform == "win32":
    import msvcrt

    def _lock(file: int) -> None:
        os.lseek(file, 2**30, os.SEEK_SET)  # past the text: what is locked there cannot be read by others
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


class Held(OSError):
    """Another process writes there."""


class Unwritable(OSError):
    """A file could not be written."""


class Damaged(ValueError):
    """A file is not what was written."""


@contextmanager
def held(out: Path, what: str) -> Iterator[None]:
    """`what` under `out` is this process's to write; where it is another's, `Held` says whose.

    The lock is the system's, on the file .`what`.lock: it ends with the process, also with one that is killed. The
    file stays, since whoever removed it could remove the lock of the next one.
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
    """Whether no living process holds it; where the file system has no locks nobody can tell, and it is so."""
    try:
        _lock(file)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True
    return True


@contextmanager
def whole(path: Path) -> Iterator[Callable[[str | bytes], None]]:
    """What is written gets the name `path` at the end; until then, and after an error, `path` is what it was."""
    with _part(path) as file:
        yield lambda content: _write(path, file, content.encode("utf-8") if isinstance(content, str) else content)


def _write(path: Path, file: BinaryIO, content: bytes) -> None:
    with told(path):
        file.write(content)
        file.flush()


@contextmanager
def _part(path: Path) -> Iterator[BinaryIO]:
    """Under a name that no other process has, and that nobody can have linked to another file."""
    part = path.with_name(f"{path.stem}.{secrets.token_hex(4)}.part")
    with told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = part.open("x+b")
    try:
        yield file
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


# Archives of torch.save carry the SHA-256 of their bytes as the comment of the zip file, which torch.load passes over:
# a changed bit is noticed, and the file remains one that torch.load reads.
SEAL = b"marquardt sha256 "
SEALED = len(SEAL) + hashlib.sha256().digest_size * 2


class _Sealing:
    """Passes on what torch.save writes, but for the last two bytes of a zip file: the length of its comment."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.pass_on, self.sum, self.held_back = write, hashlib.sha256(), b""
        self.failed: OSError | None = None

    def write(self, content: bytes) -> int:
        both = self.held_back + bytes(content)
        body, self.held_back = both[:-2], both[-2:]
        self.sum.update(body)
        try:
            self.pass_on(body)
        except OSError as error:
            self.failed = error
            raise
        return len(content)

    def flush(self) -> None:
        """`_write` does that with every part."""

    def end(self) -> None:
        assert self.held_back == bytes(2), "torch.save wrote an archive that has a comment"
        self.pass_on(SEALED.to_bytes(2, "little") + SEAL + self.sum.hexdigest().encode())


def save(path: Path, content: Any) -> None:
    """Tensors and plain values by torch.save, whole or not at all, and sealed; refused if `load` would not take it."""
    if any(_own(item) is not item for item in tree_leaves(content)):
        content = tree_map(_own, content)
    with _part(path) as file:
        sealing = _Sealing(lambda part: _write(path, file, part))
        try:
            torch.save(content, sealing)  # type: ignore[arg-type]  # writes, and needs no more
        except RuntimeError:  # what torch makes of an error while it writes
            if sealing.failed is not None:
                raise sealing.failed from None
            raise
        sealing.end()
        check_plain(file, path)


def _own(item: Any) -> Any:
    """A tensor has a number in its storage for each of its elements; `load` takes no others, which ask for memory."""
    strided = isinstance(item, torch.Tensor) and item.layout == torch.strided
    return item.clone() if strided and item.numel() * item.itemsize > item.untyped_storage().nbytes() else item


def check_plain(file: BinaryIO, what: object) -> None:
    try:
        archives.check(file)
    except Exception as error:
        raise TypeError(f"{what} holds tensors, numbers, strings, lists and dicts alone: {error}") from None


def load(path: Path) -> tuple[Any, bool]:
    """What `save` wrote, on the CPU, and whether it is sealed: files of earlier versions are not, and one of this
    version that is not has lost its seal. Runs no code of the file."""
    with path.open("rb") as file:  # the same one to the end, whatever takes its name meanwhile
        is_sealed = _is_sealed(path, file)
        try:
            return archives.read(file), is_sealed
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
    found, left = hashlib.sha256(), size
    while left and (part := file.read(min(left, 2**20))):
        found.update(part)
        left -= len(part)
    if SEAL + found.hexdigest().encode() != seal or file.read(2) != SEALED.to_bytes(2, "little"):
        raise Damaged(f"{path} is damaged: its checksum is another one than when it was written")
    return True


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
