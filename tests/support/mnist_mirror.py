"""Files in the idx format, as bytes, and damage to them; and a web that has small ones in place of MNIST's."""

from __future__ import annotations

import gzip
import io
import math
import socket
import struct
from urllib.error import URLError

from marquardt.paper.data import MIRRORS, MNIST_MD5


def idx(shape, data=None, *, code=8, zeros=b"\0\0"):
    """An idx file of this shape, as bytes."""
    data = bytes(i % 10 for i in range(math.prod(shape))) if data is None else data
    return zeros + bytes([code, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + data


def flipped(content, at):
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


FILES = {
    name: idx((4, 28, 28)) if "images" in name else idx((4,), bytes([3, 1, 4, 1])) for name in MNIST_MD5
}  # stand in for MNIST


class Web:
    """Stands in for urlopen: `answers` maps a mirror to the function that answers for the name of a file."""

    def __init__(self):
        self.asked = []
        self.answers = {}

    def __call__(self, url, timeout):
        assert timeout is not None
        self.asked.append(url)
        mirror = next(mirror for mirror in MIRRORS if url.startswith(mirror))
        answer = self.answers.get(mirror, serve)(url.removeprefix(mirror).removesuffix(".gz"))
        if isinstance(answer, Exception):
            raise answer
        return io.BytesIO(answer) if isinstance(answer, bytes) else answer

    def asked_mirrors(self):
        return list(dict.fromkeys(mirror for url in self.asked for mirror in MIRRORS if url.startswith(mirror)))


def serve(name):
    return gzip.compress(FILES[name])


def no_name(name):
    return URLError(socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"))


def refuse(name):
    return URLError(ConnectionRefusedError(111, "Connection refused"))


def write_files(directory):
    directory.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (directory / f"{name}.gz").write_bytes(serve(name))


def files_in(directory):
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


ALL = sorted(f"mnist/{name}.gz" for name in FILES)
