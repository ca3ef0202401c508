"""Every mutation can still be made: what it changes is there, and so are the tests that are to find it."""

from __future__ import annotations

import json
from collections import Counter

from mutations.mutations import every, find, located, read
from mutations.retired import NAMES
from mutations.run import BASELINE


def test_every_snippet_is_found_once():
    sources = read()
    counts = {m.name: len(find(m.snippet, sources)) for m in every()}
    assert {name: count for name, count in counts.items() if count != 1} == {}


def test_names_are_unique_and_every_mutation_changes_something():
    assert [name for name, count in Counter(m.name for m in every()).items() if count > 1] == []
    assert [m.name for m in every() if m.snippet.split() == m.mutant.split()] == []


def test_every_test_is_found():
    assert sorted({test for m in every() for test in m.tests if located(test) is None}) == []


def test_every_mutation_of_the_baseline_is_there_or_retired():
    names, then = {m.name for m in every()}, json.loads(BASELINE.read_text())["mutations"].keys()
    assert then - names == NAMES & then
    assert not names & NAMES
    assert then >= NAMES
