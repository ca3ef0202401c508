"""Files that show damage, and folders that one process at a time writes to."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from fuzz.checkpoints import BOMBS
from marquardt import files
from marquardt.files import Damaged, Foreign, own, typed
from support.unchanged import same


def test_the_lock_of_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: set[int] = set()

    def locking(file: int, mode: int, length: int) -> None:
        if taken:
            raise PermissionError(13, "Permission denied")
        taken.add(os.lseek(file, 0, os.SEEK_CUR))

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK=2))
    spec = importlib.util.spec_from_file_location("marquardt.windows", files.__file__)
    windows = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(windows)
    out = tmp_path / "results"
    with windows.held(out, "logs"), pytest.raises(windows.Held, match=f"process {os.getpid()} on "):
        windows.held(out, "logs").__enter__()
    assert min(taken) > (out / ".logs.lock").stat().st_size  # a locked byte cannot be read


ARCHIVE = {"version": 3, "weights": torch.arange(5.0)}
DOCUMENT = {"format": 2, "words": ["a", "Zürich", "\x1b[31m", "\udce9"], "more": {"sha256": "x", "n": -0.25}}
KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], tuple[Any, bool]], Any]] = {
    "archive": (lambda path: files.save(path, ARCHIVE), files.load, ARCHIVE),
    "document": (lambda path: files.write(path, DOCUMENT), files.read, DOCUMENT),
    "document in a line": (lambda path: files.write(path, DOCUMENT, None), files.read, DOCUMENT),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_changed_byte_is_noticed(kind: str, tmp_path: Path) -> None:
    path, (write, read, content) = tmp_path / "a.pt", KINDS[kind]
    write(path)
    assert same(list(read(path)), [content, True])
    whole = path.read_bytes()
    for k in range(len(whole)):
        for changed in (whole[:k] + bytes([whole[k] ^ 1]) + whole[k + 1 :], whole[:k] + whole[k + 1 :]):
            path.write_bytes(changed)
            try:
                assert not read(path)[1]  # the seal itself is gone: a file of this version has one
            except Damaged:
                continue
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Damaged, match=r"a\.pt is damaged"):
        read(path)


def test_what_is_sealed_is_one_of_torch_and_one_of_json(tmp_path: Path) -> None:
    files.save(tmp_path / "a.pt", ARCHIVE)
    assert same(torch.load(tmp_path / "a.pt", weights_only=True), ARCHIVE)
    text = files.sealed(DOCUMENT)
    assert json.loads(text)["words"] == DOCUMENT["words"]
    assert b"\x1b" not in text
    assert "Zürich".encode() in text


class Registered:
    """That a program lets torch.load build"""


def archive(pickled: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as new:
        for name, content in (("data.pkl", pickled), ("version", b"3\n"), ("byteorder", b"little")):
            new.writestr(f"archive/{name}", content)
    return file.getvalue()


PICKLED = {"a class that is registered": pickle.dumps(Registered(), 2), **BOMBS}


@pytest.mark.parametrize("name", PICKLED)
def test_what_is_neither_tensor_nor_plain_value_is_not_built(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(archive(PICKLED[name]))
    with torch.serialization.safe_globals([Registered]), pytest.raises(files.Damaged, match=r"a\.pt is damaged"):
        files.load(path)


def test_what_is_compressed_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(archive(pickle.dumps("x" * 10**6, 2)))
    assert len(files.load(path)[0]) == 10**6
    path.write_bytes(archive(pickle.dumps("x" * 10**6, 2), zipfile.ZIP_DEFLATED))
    with pytest.raises(files.Damaged, match="it is compressed"):
        files.load(path)


def test_what_cannot_be_loaded_is_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with pytest.raises(TypeError, match=r"a\.pt holds tensors, numbers, strings, lists and dicts alone"):
        files.save(path, {"x": Registered()})
    assert list(tmp_path.iterdir()) == []
    items = [
        torch.arange(6).view(2, 3).T, torch.zeros(0, 3), torch.tensor(True),
        torch.ones(2, dtype=torch.uint16), torch.ones(2).bfloat16(), torch.eye(2).to_sparse(), torch.float64, 2**100,
        1j, {1, 2}, b"ab", torch.nn.Parameter(torch.ones(1)), torch.Size([2]), torch.nn.Linear(1, 1).state_dict(),
    ]  # fmt: skip
    files.save(path, items)
    assert str(files.load(path)[0]) == str(items)
    files.save(path, {"x": torch.arange(4.0)[3:].expand(9, 1)})
    assert torch.equal(files.load(path)[0]["x"], torch.full((9, 1), 3.0))


def test_a_lock_is_no_file_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / ".logs.lock").symlink_to("thesis.txt")
    (tmp_path / ".runs.lock").write_text("mine")
    for name in ("logs", "runs"):
        with pytest.raises(OSError, match=rf"\.{name}\.lock"):
            files.held(tmp_path, name).__enter__()
    assert (tmp_path / "thesis.txt").read_text() == (tmp_path / ".runs.lock").read_text() == "mine"


# ---- JSON that shows damage, and whose entries have the types that dataclasses name.


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000, b'{"a": 1e400}\0', b'{"a": ' + b"9" * 5000 + b"}"],
)
def test_what_is_no_document(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(Damaged, match=r"a\.json is damaged, or no file of marquardt \(not "):
        files.read(tmp_path / "a.json")


def test_pipes_folders_and_huge_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Damaged, match="is no file"):
        files.read(tmp_path)
    with pytest.raises(FileNotFoundError):
        files.read(tmp_path / "none")
    files.write(tmp_path / "a.json", DOCUMENT)
    monkeypatch.setattr(files, "LARGEST", 20)
    with pytest.raises(Damaged, match="more than 20 bytes"):
        files.read(tmp_path / "a.json")


@dataclass(frozen=True)
class Inner:
    names: tuple[str, ...]
    kind: Literal["number", "date"] = "number"


@dataclass(frozen=True)
class Outer:
    n: int
    x: float | None
    inner: list[Inner]
    pair: tuple[int, str]
    by: dict[str, bool]
    path: Path | None = None


GOOD: dict[str, Any] = {"n": 1, "x": 2, "inner": [{"names": ["a"]}], "pair": [1, "b"], "by": {"c": True}, "path": "d"}


def test_entries_of_the_types_that_are_named() -> None:
    assert typed(GOOD, Outer) == Outer(1, 2.0, [Inner(("a",))], (1, "b"), {"c": True}, Path("d"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": True}, "n is True, not a whole number"),
        ({"n": 1.0}, "n is 1.0, not a whole number"),
        ({"x": "2"}, "x is '2', not a finite number"),
        ({"x": 10**400}, "x is 1.*, not a finite number"),
        ({"inner": {}}, r"inner is \{\}, not a list"),
        ({"inner": [{"names": [1]}]}, r"inner\[0\].names\[0\] is 1, not text"),
        ({"inner": [{"names": [], "kind": "text"}]}, r"inner\[0\].kind is 'text', not 'number' or 'date'"),
        ({"inner": [{}]}, r"inner\[0\] has no 'names'"),
        ({"inner": [{"names": [], "more": 1}]}, r"inner\[0\] has an entry 'more'"),
        ({"pair": [1, "b", 2]}, "pair is .*, not a list of 2"),
        ({"by": {"c": 1}}, r"by\['c'\] is 1, not true or false"),
        ({"unknown": 1}, "it has an entry 'unknown'"),
    ],
)
def test_other_entries_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        typed({**GOOD, **changes}, Outer)


def test_only_what_is_known_is_replaced(tmp_path: Path) -> None:
    path, other = tmp_path / "report.html", tmp_path / "none.html"
    path.write_text("mine")
    known = files.digest(b"mine")
    assert own({path: None, other: None}, [known], "move it away") == {known}
    assert own({path: known}, [], "move it away") == {known}
    with pytest.raises(Foreign, match=r"report\.html is there already, and is not as .*: move it away"):
        own({path: "0"}, ["1"], "move it away")
    link = tmp_path / "link.html"
    for target in (path, tmp_path / "nowhere", tmp_path):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        with pytest.raises(Foreign, match=r"link\.html is there already, and no file that marquardt has written"):
            own({link: known}, [known], "move it away")


def test_what_a_killed_process_has_left(tmp_path: Path) -> None:
    for name in ("run.0123abcd.part", "run.0123.part", "run.part", "x.0123abcd.part", "run.0123abcd.part2"):
        (tmp_path / name).touch()
    (tmp_path / "run.00000000.part").symlink_to(tmp_path / "run.part")
    (tmp_path / "run.11111111.part").mkdir()
    assert [path.name for path in files.left_over(tmp_path, "run|model")] == ["run.0123abcd.part"]
    assert files.left_over(tmp_path / "none", "run") == []
