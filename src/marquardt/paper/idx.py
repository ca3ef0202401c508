"""Files in the idx format, in which MNIST comes: read with every size and checksum checked."""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

MAX_IDX_BYTES = 2**30  # twenty times MNIST: a header that asks for more is damaged, or a decompression bomb
UNSIGNED_BYTE = 0x08  # the idx format's code for uint8
GZIP_MAGIC = b"\x1f\x8b"  # RFC 1952


def read_idx(path: str | Path, *, ndim: int | None = None, md5: str | None = None) -> Tensor:
    """The uint8 tensor of an idx file, plain or gzipped: bytes 0, 0, 8, ndim; ndim big-endian uint32 sizes; the data.

    `ndim` is the number of dimensions expected and `md5` the checksum of the uncompressed content, None for any. What
    does not fit, or holds more or fewer bytes than its header says, is a ValueError.
    """
    with Path(path).open("rb") as raw:
        return read_idx_stream(raw, str(path), ndim, md5)


def read_idx_stream(raw: IO[bytes], origin: str, ndim: int | None, md5: str | None) -> Tensor:
    """The same from an open file; errors name it `origin`."""
    zipped = raw.read(2) == GZIP_MAGIC  # by content: an idx file begins with two zeros
    raw.seek(0)
    stream = gzip.GzipFile(fileobj=raw) if zipped else raw
    try:
        header, shape, data = _parse_idx(stream, origin, ndim)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{origin}: expected a whole gzip file, found it corrupt or truncated ({error})") from error
    if md5 is not None:
        digest = hashlib.md5(header, usedforsecurity=False)
        digest.update(data)
        if digest.hexdigest() != md5:
            raise ValueError(f"{origin}: expected content with MD5 {md5}, found {digest.hexdigest()}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(shape)  # writable: frombuffer shares the memory


def _parse_idx(
    stream: IO[bytes] | gzip.GzipFile, origin: str, ndim: int | None
) -> tuple[bytes, tuple[int, ...], bytes]:
    """Header, shape and data; never reads more than the header announces, and one byte to see that it ends there."""
    magic = stream.read(4)
    if len(magic) < 4:
        raise ValueError(f"{origin}: expected an idx header, found a truncated file of {len(magic)} bytes")
    if magic[:2] != b"\0\0":
        raise ValueError(f"{origin}: expected an idx file, which begins with 00 00, found magic {magic.hex(' ')}")
    if magic[2] != UNSIGNED_BYTE:
        raise ValueError(f"{origin}: expected unsigned bytes (idx data type 0x08), found data type 0x{magic[2]:02x}")
    if magic[3] == 0 or ndim not in (None, magic[3]):
        raise ValueError(f"{origin}: expected {ndim or 'one or more'} dimensions, found {magic[3]}")
    sizes = stream.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise ValueError(
            f"{origin}: expected {4 * magic[3]} bytes of sizes in the header, found {len(sizes)}: truncated"
        )
    shape = struct.unpack(f">{magic[3]}I", sizes)
    count = math.prod(shape)  # Python integers: a damaged header cannot overflow
    if not 0 < count <= MAX_IDX_BYTES:
        raise ValueError(f"{origin}: expected 1 to {MAX_IDX_BYTES} bytes of data, found a header of shape {shape}")
    data = stream.read(count + 1)
    if len(data) < count:
        raise ValueError(f"{origin}: expected {count} bytes of data for shape {shape}, found {len(data)}: truncated")
    if len(data) > count:
        raise ValueError(f"{origin}: expected {count} bytes of data for shape {shape}, found more: oversized")
    return magic + sizes, shape, data
