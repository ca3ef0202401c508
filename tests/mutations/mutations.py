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
SOURCE, TESTS = ROOT / "src", ROOT / "tests"


class Mutation(NamedTuple):
    name: str  # area: what is wrong
    snippet: str
    mutant: str  # what takes its place
    tests: tuple[str, ...]  # files, or tests as file::name; through the public interface first

    @property
    def area(self) -> str:
        return self.name.partition(":")[0]


def mutation(name: str, snippet: str, mutant: str, *tests: str) -> Mutation:
    return Mutation(name, snippet, mutant, tests)


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


def every() -> list[Mutation]:
    from . import of_curvature, of_judge, of_losses, of_parts, of_policies

    modules = of_losses, of_parts, of_curvature, of_policies, of_judge
    return [m for module in modules for m in module.MUTATIONS]
