"""A fixed budget of random networks; `python tests/fuzz/networks.py` goes on from there."""

from dataclasses import replace

import pytest

import marquardt as mq
from fuzz.compared import run
from fuzz.drawn import draw

CHUNKS, CASES = 4, 30


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_steps_are_those_of_brute_force(chunk):
    """A fuzzer that refuses or rejects everything would pass too."""
    cases = map(draw, range(chunk * CASES, (chunk + 1) * CASES))
    assert sum(run(case).count["compared"] for case in cases) > CASES


RECIPES = {
    "order by data, chunks without weight": {
        "kind": "v", "pieces": ("ordered",), "curvature": mq.Gram(chunk=2), "weights": "halves", "sizes": (4, 6, 5),
    },
    "batched rows through dropout": {
        "kind": "i", "pieces": ("conv", "prelu", "conv", "dropout", "flatten"), "curvature": mq.Dense(),
    },
    "one sample, then many": {
        "kind": "s", "pieces": ("attention",), "curvature": mq.Gram(chunk=2), "sizes": (1, 7, 3), "weights": "none",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_what_chance_meets_seldom(name):
    recipe = dict(RECIPES[name])
    names = recipe.pop("pieces")
    for seed in range(10):
        pieces = tuple((piece, 10 * seed + i) for i, piece in enumerate(names))
        plain = {"damping": mq.Identity(), "line_search": None, "over": False, "same": False}
        run(replace(draw(seed), pieces=pieces, **plain, **recipe))
