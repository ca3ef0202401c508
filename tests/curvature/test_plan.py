"""Plans as plain values; how they are picked is in test_auto.py."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from marquardt.curvature.cost import Layer, Plan, Shapes, readable

SHAPES = Shapes(
    n=10, N=4, R=3, layers=(Layer(1.5, 1, 2, 3), Layer(2, 1, 1, 4, True)), itemsize=8, others=2, single=False
)
FULL = Plan(
    options=(None, 0.9, "auto"), kind="Gram", chunk=7, name="Gram(chunk=7)", bytes=3 << 20, budget=5 << 30, why="m < n",
    input_size=12, shapes=SHAPES, squeeze=2, work=30.4, seconds=0.0123, sampled=2, fraction=0.5, steady=False,
)  # fmt: skip


@pytest.mark.parametrize("plan", [FULL, Plan(options=())], ids=["full", "empty"])
def test_state_and_back(plan):
    """By nothing but plain values, which a file or another process can hold."""
    state = plan.state()
    assert set(state) == {f.name for f in fields(Plan)}
    again = Plan.restored(json.loads(json.dumps(state)), 1 if plan.shapes is None else plan.shapes.n)
    assert again == plan
    assert type(again.options) is tuple
    assert type(again.shapes) is type(plan.shapes)
    assert hash(again) == hash(plan)


def test_in_words():
    assert str(FULL) == "Gram(chunk=7): m < n; about 30 gradients a step, 3 MiB of 5 GiB"
    assert str(Plan((), name="Dense()", why="n is small", bytes=100)) == "Dense(): n is small; about 100 B"


@pytest.mark.parametrize(
    ("size", "words"), [(1023, "1023 B"), (1536, "1.5 KiB"), (1 << 20, "1 MiB"), (3 << 30, "3 GiB"), (1 << 40, "1 TiB")]
)
def test_readable(size, words):
    assert readable(size) == words
