"""Files that are whole or not there, and folders that one process at a time writes to."""

from __future__ import annotations

import os
import platform
import secrets
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

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


@contextmanager
def held(out: Path, what: str) -> Iterator[None]:
    """`what` under `out` is this process's to write; where it is another's, `Held` says whose.

    The lock is the system's, on the file .`what`.lock: it ends with the process, also with one that is killed. The
    file stays, since whoever removed it could remove the lock of the next one.
    """
    path = out / f".{what}.lock"
    with _told(path):
        out.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
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
        with _told(path):
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            os.write(file, _self().encode())
        try:
            yield
        finally:
            os.ftruncate(file, 0)
    finally:
        os.close(file)


def _self() -> str:
    since = datetime.now().astimezone().isoformat(" ", timespec="seconds")
    return f"process {os.getpid()} on {platform.node()} ({shlex.join(sys.argv)}, since {since})"


@contextmanager
def whole(path: Path) -> Iterator[Callable[[str | bytes], None]]:
    """What is written gets the name `path` at the end; until then, and after an error, `path` is what it was."""
    part = path.with_name(f"{path.stem}.{secrets.token_hex(4)}.part")  # no other process has this name
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = part.open("xb")

    def write(content: str | bytes) -> None:
        with _told(path):
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()

    try:
        yield write
        with _told(path):
            os.fsync(file.fileno())  # some file systems notice only here that they are full
            file.close()
            os.replace(part, path)
    finally:
        with suppress(OSError):  # closing writes again what could not be written before
            file.close()
        part.unlink(missing_ok=True)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unwritable(
            f"{path} could not be written ({error.strerror or error}): free some space or choose another folder, and "
            "do the same again; what was finished before is kept"
        ) from error
