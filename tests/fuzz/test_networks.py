"""A fixed budget of random networks; `python tests/fuzz/networks.py` goes on from there."""

import pytest
from networks import one

CHUNKS, CASES = 8, 60


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_steps_are_those_of_brute_force(chunk):
    reports = [one(seed) for seed in range(chunk * CASES, (chunk + 1) * CASES)]
    assert [(r.seed, r.failures, r.case) for r in reports if r.failures] == []
    # a fuzzer that refuses or rejects everything would pass too
    assert sum(r.compared for r in reports) > CASES
