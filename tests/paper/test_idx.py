"""Files in the idx format: read whole, or refused."""

import gzip
import hashlib
import math
import random

import pytest
import torch

from marquardt.paper import idx as idx_files
from marquardt.paper.idx import read_idx
from support.mnist_mirror import flipped, idx


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("shape", [(7,), (2, 3, 4)])
def test_read_idx(tmp_path, pack, shape):
    path = tmp_path / "file"
    path.write_bytes(pack(idx(shape)))
    tensor = read_idx(path)
    assert tensor.dtype == torch.uint8
    assert tensor.shape == shape
    assert tensor.flatten().tolist() == [i % 10 for i in range(math.prod(shape))]
    tensor.zero_()  # the memory is the tensor's own
    assert read_idx(str(path), ndim=len(shape)).sum() > 0


BAD = {
    "empty": (b"", "truncated file of 0 bytes"),
    "truncated magic": (b"\0\0\x08", "truncated file of 3 bytes"),
    "truncated sizes": (idx((2, 3))[:9], r"expected 8 bytes of sizes in the header, found 5: truncated"),
    "truncated data": (idx((2, 3))[:-1], r"expected 6 bytes of data for shape \(2, 3\), found 5: truncated"),
    "no data": (idx((2, 3), b""), "found 0: truncated"),
    "oversized data": (idx((2, 3)) + b"\0", r"expected 6 bytes of data for shape \(2, 3\), found more: oversized"),
    "wrong magic": (idx((2, 3), zeros=b"\x89P"), "found magic 89 50 08 02"),
    "wrong type": (idx((2, 3), code=0x0D), "found data type 0x0d"),
    "no dimensions": (idx(()), "expected one or more dimensions, found 0"),
    "empty shape": (idx((0, 3)), r"found a header of shape \(0, 3\)"),
    "enormous shape": (idx((2**32 - 1,) * 3, b"abc"), r"found a header of shape \(4294967295, "),
}


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD.keys())
def test_read_idx_refuses(tmp_path, content, message, pack):
    path = tmp_path / "some-idx-file"
    path.write_bytes(pack(content))
    with pytest.raises(ValueError, match="some-idx-file: .*" + message):
        read_idx(path)


def test_read_idx_refuses_the_wrong_number_of_dimensions(tmp_path):
    path = tmp_path / "some-idx-file"
    path.write_bytes(idx((2, 3)))
    with pytest.raises(ValueError, match="some-idx-file: expected 3 dimensions, found 2"):
        read_idx(path, ndim=3)


PACKED = gzip.compress(idx((40, 28, 28), random.Random(0).randbytes(40 * 28 * 28)))
BAD_GZIP = {
    "cut in the data": PACKED[: len(PACKED) // 2],
    "cut in the checksum": PACKED[:-4],
    "cut in the header": PACKED[:5],
    "flipped data": flipped(PACKED, len(PACKED) // 2),
    "flipped checksum": flipped(PACKED, len(PACKED) - 6),
    "garbage after the end": PACKED + b"garbage",
    "unknown method": flipped(PACKED, 2),
}


@pytest.mark.parametrize("content", BAD_GZIP.values(), ids=BAD_GZIP.keys())
def test_read_idx_refuses_a_damaged_gzip(tmp_path, content):
    path = tmp_path / "some-idx-file.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"some-idx-file.gz: expected"):
        read_idx(path)


def test_read_idx_stops_at_the_size_of_the_header(tmp_path, monkeypatch):
    """A small file that unpacks to gigabytes is refused for its first surplus byte."""
    read = []
    original = gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda self, size=-1: read.append(size) or original(self, size))
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(idx((10,)) + bytes(10**6)))
    with pytest.raises(ValueError, match="oversized"):
        read_idx(path)
    assert read == [4, 4, 11]


def test_read_idx_respects_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(idx_files, "MAX_IDX_BYTES", 5)
    path = tmp_path / "file"
    path.write_bytes(idx((6,)))
    with pytest.raises(ValueError, match="expected 1 to 5 bytes"):
        read_idx(path)


def test_read_idx_checksum(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(idx((6,)))
    md5 = hashlib.md5(idx((6,))).hexdigest()
    assert len(read_idx(path, md5=md5)) == 6
    with pytest.raises(ValueError, match=f"file: expected content with MD5 {'0' * 32}, found {md5}"):
        read_idx(path, md5="0" * 32)


def test_read_idx_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        read_idx(tmp_path / "absent")
