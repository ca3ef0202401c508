"""Faults, one at a time, each with the tests that find it: what a refactoring must not lose.

A mutation is told by a piece of the source, wherever it stands: it is searched for in all of src/marquardt, with any
white space between its words, and must be found exactly once. Tests are told by file and name: one that has moved to
another file is found by its name.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCE, TESTS, LIST = ROOT / "src", ROOT / "tests", Path(__file__).with_name("list.txt")


class Mutation(NamedTuple):
    name: str  # area: what is wrong
    snippet: str
    mutant: str  # what takes its place
    tests: tuple[str, ...]  # files, or tests as file::name; through the public interface first


def every() -> list[Mutation]:
    """All of `list.txt`: a line "name | tests", the snippet after "- ", and the mutant after "+ ". In the names of the
    tests, "losses/base::root" is tests/losses/test_base.py::test_root. A line that begins with # is a comment."""
    found: list[Mutation] = []
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if line.startswith("- "):
            found[-1] = found[-1]._replace(snippet=f"{found[-1].snippet}\n{line[2:]}".lstrip("\n"))
        elif line.startswith("+ "):
            found[-1] = found[-1]._replace(mutant=f"{found[-1].mutant}\n{line[2:]}".lstrip("\n"))
        elif line and not line.startswith("#"):
            name, _, tests = line.partition(" | ")
            found.append(Mutation(name, "", "", tuple(map(_whole, tests.split()))))
    return found


def _whole(test: str) -> str:
    file, _, name = test.partition("::")
    path = Path("tests", file)
    return f"{path.with_name(f'test_{path.name}.py').as_posix()}{f'::test_{name}' if name else ''}"


def find(snippet: str, sources: dict[Path, str]) -> list[tuple[Path, int, int]]:
    """Where it is: file, first character and the one behind the last"""
    pattern = re.compile(r"\s+".join(map(re.escape, snippet.split())))
    return [(path, *found.span()) for path, text in sources.items() for found in pattern.finditer(text)]


def read(folder: Path = SOURCE) -> dict[Path, str]:
    """All sources, by their paths in the folder"""
    return {path.relative_to(folder): path.read_text() for path in sorted(folder.rglob("*.py"))}


@cache
def _tests() -> dict[Path, str]:
    return read(TESTS)


def located(test: str) -> str | None:
    """The test where it is now, as pytest takes it; None if it is in no file, or in several"""
    file, _, name = test.partition("::")
    path = Path(file).relative_to("tests")
    if path in _tests() and (not name or f"def {name}(" in _tests()[path]):
        return test
    if name:
        found = [f"tests/{path}::{name}" for path, text in _tests().items() if f"\ndef {name}(" in text]
    else:
        found = [f"tests/{other}" for other in _tests() if other.name == path.name]
    return found[0] if len(found) == 1 else None
