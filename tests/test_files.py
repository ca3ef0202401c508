"""Files that show damage, and folders that one process at a time writes to."""

from __future__ import annotations

import importlib.util
import os
import sys
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
