"""Folders that one process at a time writes to."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

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
    spec = importlib.util.spec_from_file_location("windows", locks.__file__)
    windows = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(windows)
    with windows.held(out, "logs"), pytest.raises(windows.Held, match=f"process {os.getpid()} on "):
        windows.held(out, "logs").__enter__()
    assert min(taken) > (out / ".logs.lock").stat().st_size  # a locked byte cannot be read
