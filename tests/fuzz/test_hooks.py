"""A fixed budget of random hooks; `python tests/fuzz/hooks.py` goes on from there."""

import pytest
import torch

import marquardt as mq
from fuzz.attacks import run
from fuzz.hooks import one

# torch warns of hooks of modules none of whose inputs needs a gradient, and of checkpoints there.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:None of the inputs have")

CHUNKS, CASES = 3, 50


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_steps_are_those_of_brute_force_or_refused_by_name(chunk):
    count, faults = run(one, range(chunk * CASES, (chunk + 1) * CASES))
    assert faults == []
    assert count["refused"] > CASES // 6  # and neither everything nor nothing
    assert count["linear and right"] > CASES // 10


def test_a_hook_that_passes_unseen_is_a_fault(monkeypatch):
    monkeypatch.setattr(mq.jacobian.piece, "check_backward", lambda forward: None)
    with torch.random.fork_rng():
        _, faults = run(one, range(CASES // 2))
    assert faults
