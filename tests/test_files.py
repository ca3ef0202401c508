"""Files that show damage, and folders that one process at a time writes to."""

from __future__ import annotations

import importlib.util
import io
import os
import pickle
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from marquardt import files as locks


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "results"


def test_the_lock_of_windows(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: set[int] = set()

    def locking(file: int, mode: int, length: int) -> None:
        if taken:
            raise PermissionError(13, "Permission denied")
        taken.add(os.lseek(file, 0, os.SEEK_CUR))

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK=2))
    spec = importlib.util.spec_from_file_location("marquardt.windows", locks.__file__)
    windows = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(windows)
    with windows.held(out, "logs"), pytest.raises(windows.Held, match=f"process {os.getpid()} on "):
        windows.held(out, "logs").__enter__()
    assert min(taken) > (out / ".logs.lock").stat().st_size  # a locked byte cannot be read


def test_a_sealed_file_is_one_of_torch_and_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    path, content = tmp_path / "a.pt", {"version": 3, "weights": torch.arange(5.0)}
    locks.save(path, content)
    assert torch.equal(torch.load(path, weights_only=True)["weights"], content["weights"])
    found, sealed = locks.load(path)
    assert sealed
    assert torch.equal(found["weights"], content["weights"])
    whole = path.read_bytes()
    for k in range(len(whole)):
        path.write_bytes(whole[:k] + bytes([whole[k] ^ 1]) + whole[k + 1 :])
        try:
            assert not locks.load(path)[1]  # the seal itself is gone: a file of this version has one
        except locks.Damaged:
            continue
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(locks.Damaged, match=r"a\.pt is damaged"):
        locks.load(path)


class Registered:
    """That a program lets torch.load build"""


def archive(pickled: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as new:
        for name, content in (("data.pkl", pickled), ("version", b"3\n"), ("byteorder", b"little")):
            new.writestr(f"archive/{name}", content)
    return file.getvalue()


PICKLED = {
    "a number of bytes": b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "a number of numbers": b"\x80\x02ctorch\nTensor\nJ\xff\xff\xff\x7f\x85R.",
    "a storage": b"\x80\x02ctorch.storage\nUntypedStorage\nJ\xff\xff\xff\x7f\x85R.",
    "bytes that are not there": b"\x80\x05\x96\xff\xff\xff\xff\x0f\x00\x00\x00.",
    "a class that is registered": pickle.dumps(Registered(), 2),
    "a program": b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.",
}


@pytest.mark.parametrize("name", PICKLED)
def test_what_is_neither_tensor_nor_plain_value_is_not_built(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(archive(PICKLED[name]))
    with torch.serialization.safe_globals([Registered]), pytest.raises(locks.Damaged, match=r"a\.pt is damaged"):
        locks.load(path)


def test_what_is_compressed_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(archive(pickle.dumps("x" * 10**6, 2)))
    assert len(locks.load(path)[0]) == 10**6
    path.write_bytes(archive(pickle.dumps("x" * 10**6, 2), zipfile.ZIP_DEFLATED))
    with pytest.raises(locks.Damaged, match="it is compressed"):
        locks.load(path)


def test_what_cannot_be_loaded_is_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with pytest.raises(TypeError, match=r"a\.pt holds tensors, numbers, strings, lists and dicts alone"):
        locks.save(path, {"x": Registered()})
    assert list(tmp_path.iterdir()) == []
    items = [
        torch.arange(6).view(2, 3).T, torch.zeros(0, 3), torch.tensor(True),
        torch.ones(2, dtype=torch.uint16), torch.ones(2).bfloat16(), torch.eye(2).to_sparse(), torch.float64, 2**100,
        1j, {1, 2}, b"ab", torch.nn.Parameter(torch.ones(1)), torch.Size([2]), torch.nn.Linear(1, 1).state_dict(),
    ]  # fmt: skip
    locks.save(path, items)
    assert str(locks.load(path)[0]) == str(items)
    locks.save(path, {"x": torch.arange(4.0)[3:].expand(9, 1)})
    assert torch.equal(locks.load(path)[0]["x"], torch.full((9, 1), 3.0))


def test_a_lock_is_no_file_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / ".logs.lock").symlink_to("thesis.txt")
    (tmp_path / ".runs.lock").write_text("mine")
    for name in ("logs", "runs"):
        with pytest.raises(OSError, match=rf"\.{name}\.lock"):
            locks.held(tmp_path, name).__enter__()
    assert (tmp_path / "thesis.txt").read_text() == (tmp_path / ".runs.lock").read_text() == "mine"
