"""JSON that shows damage, and whose entries have the types that dataclasses name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from marquardt import files
from marquardt.files import Damaged, Foreign, own, typed

CONTENT = {"format": 2, "words": ["a", "Zürich", "\x1b[31m", "\udce9"], "more": {"sha256": "x", "n": -0.25}}


def test_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for indent in (None, 1):
        files.write(path, CONTENT, indent)
        assert files.read(path) == (CONTENT, True)
        whole = path.read_bytes()
        assert json.loads(whole)["words"] == CONTENT["words"]
        assert b"\x1b" not in whole
        assert "Zürich".encode() in whole
        for k in range(len(whole)):
            for changed in (whole[:k] + bytes([whole[k] ^ 1]) + whole[k + 1 :], whole[:k] + whole[k + 1 :]):
                path.write_bytes(changed)
                try:
                    assert not files.read(path)[1]  # the seal itself is gone: a file of this version has one
                except Damaged:
                    continue


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
    files.write(tmp_path / "a.json", CONTENT)
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
