"""A fixed budget of attacks on files; `python tests/fuzz/checkpoints.py` goes on from there."""

import contextlib
import itertools

import pytest
import torch

from fuzz import attacks, checkpoints
from marquardt import checkpoints as own
from marquardt import files


def attacked(kind, cases, first=0):
    count, faults = attacks.run(lambda seed: checkpoints.one(seed, kind), range(first, first + cases))
    return {what.removeprefix(f"{kind} "): n for what, n in count.items()}, faults


@pytest.mark.parametrize("kind", ["contents.pt", "tensors-0.pt", "fit.pt", "first version"])
def test_changed_files(kind):
    count, faults = attacked(kind, 300)
    assert not faults, "\n".join(faults)
    assert count["refused"] > 200
    assert count["loaded"] > 5  # a fuzzer of which all is refused would pass too


@pytest.mark.parametrize(("kind", "cases", "least"), [("folder", 60, 30), ("user", 60, 0), ("killed", 20, 0)])
def test_changed_folders(kind, cases, least):
    count, faults = attacked(kind, cases)
    assert not faults, "\n".join(faults)
    assert count.get("refused", 0) >= least
    assert count.get("saved", count.get("loaded", 0)) > cases / 10


def careless(patch):
    """Runs what is in a file, on its first byte"""

    def read(file):
        file.seek(0)
        return torch.load(file, weights_only=False)

    patch.setattr(files, "unpacked", read)


def blind(patch):
    """Sees no checksum that is another one"""
    patch.setattr(files, "_is_sealed", lambda path, file: True)


def greedy(patch):
    """Takes any folder for its own"""
    patch.setattr(own, "ours", lambda path: (path / own.MARK).exists())


def hasty(patch):
    """Changes the model before all is read"""
    patch.setattr(own, "unchanged_by_errors", lambda *_: contextlib.nullcontext())


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (careless, "contents.pt", "a file was executed"),
        (blind, "tensors-0.pt", "another result, silently"),
        (greedy, "user", "are not what they were"),
        (hasty, "contents.pt", "something has changed before"),
    ],
)
def test_a_planted_fault_is_found(fault, kind, words, monkeypatch):
    checkpoints.one(0, kind)
    fault(monkeypatch)
    found = itertools.chain.from_iterable(attacked(kind, 20, first)[1] for first in range(0, 1000, 20))
    assert any(words in message for message in found)
