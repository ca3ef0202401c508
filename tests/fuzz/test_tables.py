"""A fixed budget of attacks on files; `python tests/fuzz/tables.py` goes on from there."""

from types import SimpleNamespace

import pytest
import torch

from fuzz import attacks, tables
from marquardt import files

CASES = 300  # of every kind of file
CHUNKS = 8


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_files_are_refused_or_read_as_before(chunk):
    each = CASES * len(tables.KINDS) // CHUNKS
    count, faults = attacks.run(tables.one, range(chunk * each, (chunk + 1) * each))
    assert not faults, "\n".join(faults)
    # a reader that refuses everything would pass too
    assert count["read"] > each / 40
    assert count["the same"] + count["forged"] > each / 100
    assert count["refused"] > each / 2


def found_out(name: str, words: str) -> bool:
    """Whether attacks on such files find this, soon"""
    seeds = range([*tables.KINDS].index(name), 3000, len(tables.KINDS))
    return any(words in fault for seed in seeds for fault in attacks.run(tables.one, [seed])[1])


@pytest.mark.parametrize("name", ["checkpoint", "report"])
def test_a_checksum_that_is_not_compared_is_found_out(monkeypatch, name):
    monkeypatch.setattr(files, "check_text", lambda *_: True)
    monkeypatch.setattr(files, "check_seal", lambda *_: True)
    monkeypatch.setattr(files, "load", lambda path: (torch.load(path, weights_only=True), True))
    assert found_out(name, "another result without a word")


def test_a_file_that_is_run_is_found_out(monkeypatch):
    monkeypatch.setattr(files, "load", lambda path: (torch.load(path, weights_only=False), True))
    assert found_out("model", "a file was run")


def test_what_is_changed_or_printed_is_found_out():
    place, kind = tables.world(), tables.KINDS["csv"]
    result = tables.invoked("predict", "nowhere", "nothing")
    before = place.there()
    assert tables.judged(place, kind, result, before, False) == "refused"
    with pytest.raises(attacks.Fault, match="something has changed"):
        tables.judged(place, kind, result, {}, False)
    shown = SimpleNamespace(exit_code=1, exception=None, output="Error: \x1b[31m\n", stdout="")
    with pytest.raises(attacks.Fault, match="is printed"):
        tables.judged(place, kind, shown, before, False)
    raised = SimpleNamespace(exit_code=1, exception=IndexError("a slip"), output="", stdout="")
    with pytest.raises(attacks.Fault, match="IndexError"):
        tables.judged(place, kind, raised, before, False)
