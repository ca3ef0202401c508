"""What a step costs, by hand: layers, shapes that several batches have in common, work by kinds."""

from __future__ import annotations

from dataclasses import replace

import pytest

import marquardt as mq
from marquardt.curvature.cost import (
    BLOCK,
    STEP,
    USUAL,
    Cost,
    Layer,
    Shapes,
    Work,
    deltas,
    factors_together,
    forward,
    gathered,
    gradient,
    in_gradients,
    overhead,
    reduced,
    step,
)  # fmt: skip

LINEAR = Layer(P=1, G=1, I=5, O=7)
CONVOLUTION = Layer(P=36, G=2, I=9, O=4)
TABLE = Layer(P=6, G=1, I=11, O=3, lookup=True)
SHAPES = Shapes(
    n=500, N=64, R=9, layers=(LINEAR, CONVOLUTION), itemsize=4, others=3, out=10, numbers=400.0, nodes=20, piece=64
)


# ---- layers


# ---- chunks

SEVERAL = replace(SHAPES, single=False, piece=20)  # 64 samples in batches of 20


@pytest.mark.parametrize(
    ("shapes", "chunk", "at_once", "pieces"),
    [
        (SHAPES, None, 64, 1),
        (SHAPES, 100, 64, 1),
        (SHAPES, 63, 63, 2),
        (SHAPES, 10, 10, 7),
        (SEVERAL, None, 20, 4),
        (SEVERAL, 7, 7, 10),
        (SEVERAL, 30, 20, 4),
    ],
)
def test_chunks(shapes, chunk, at_once, pieces):
    assert (shapes.at_once(chunk), shapes.pieces(chunk)) == (at_once, pieces)


# ---- batches of other sizes


def longer(P: float, out: int, s: Shapes = SHAPES) -> Shapes:
    """Sequences of another length"""
    return replace(s, out=out, layers=(LINEAR, replace(CONVOLUTION, P=P)))


def test_a_ragged_batch_changes_nothing():
    assert SHAPES.with_others(replace(SHAPES, N=5, piece=5)) is SHAPES
    assert SHAPES.with_others(longer(12, 4)) is SHAPES
    assert SHAPES.with_others(replace(SHAPES, R=2)) is SHAPES


def test_the_larger_of_each():
    found = SHAPES.with_others(replace(longer(12, 30), N=100, piece=100, R=29))
    assert (found.N, found.R, found.out, found.piece) == (100, 29, 30, 100)
    assert found.layers == SHAPES.layers  # whose sequences were longer
    found = SHAPES.with_others(replace(longer(50, 4), N=3, piece=3))
    assert (found.N, found.out, found.layers[1].P) == (64, 10, 50)


@pytest.mark.parametrize(
    "change",
    [{"n": 501}, {"itemsize": 8}, {"others": 4}, {"cuda": True}, {"single": False}, {"divisible": False},
     {"layers": (LINEAR,)}, {"layers": (LINEAR, TABLE)}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_another_model_is_another_model(change):
    """Also if it is smaller."""
    other = replace(SHAPES, N=5, piece=5, **change)
    assert SHAPES.with_others(other) == other


# ---- work


def test_seconds():
    rates = USUAL[False]
    one = Work(rates.products, rates.factor, rates.numbers, 1 / rates.call)  # a second of each
    assert one.seconds(SHAPES) == pytest.approx(4)
    assert one.seconds(replace(SHAPES, itemsize=8)) == pytest.approx(7)  # a call is a call
    assert Work(calls=1e3).seconds(replace(SHAPES, cuda=True)) == pytest.approx(1e3 * USUAL[True].call)


def test_step():
    """Rows of a part of the samples need a forward pass of their own; loss and trial are those of the whole batch."""
    cost = Cost(0, Work(products=5.0))
    part = replace(SHAPES, N=16)
    assert overhead(SHAPES) == Work(numbers=20 * 500 + 2 * 9 * 64 * 10, calls=STEP + 2 * BLOCK)
    assert step(SHAPES, cost) == overhead(SHAPES) + cost.work + 2 * forward(SHAPES)
    assert step(SHAPES, cost, SHAPES) == step(SHAPES, cost)
    assert step(part, cost, SHAPES) == overhead(part) + cost.work + forward(part) + 2 * forward(SHAPES)
    assert in_gradients(part, cost, SHAPES) == pytest.approx(
        step(part, cost, SHAPES).seconds(part) / gradient(SHAPES).seconds(SHAPES)
    )


@pytest.mark.parametrize("kind", [mq.Dense, mq.Gram, mq.MatrixFree])
def test_chunks_are_slower_and_smaller(kind):
    s = replace(SHAPES, N=4096, piece=4096)
    whole, cut = kind().cost(s), kind(chunk=64).cost(s)
    assert cut.bytes < whole.bytes
    assert cut.work.seconds(s) > whole.work.seconds(s)


def test_matrices_and_pairs_of_chunks():
    """A running average is one more matrix; of 8 chunks there are 36 pairs to linearise, 4.5 for each of them."""
    assert mq.Dense(inertia=0.5).cost(SHAPES).bytes - mq.Dense().cost(SHAPES).bytes == 4 * 500**2
    once, again = (mq.Gram(chunk=chunk).cost(SHAPES).work for chunk in (None, 8))
    assert again.numbers - once.numbers == pytest.approx(3.5 * deltas(SHAPES).numbers)


# ---- several ranks


def test_what_every_rank_sends():
    """Sums go round a ring, every number twice but for a rank's own part."""
    several = replace(SHAPES, ranks=4)
    assert reduced(several, 100) == 2 * 3 / 4 * 400
    assert gathered(several, 100) == 3 / 4 * 400


def test_small_matrices_are_factored_by_every_rank_itself():
    assert [factors_together(m, 4, 4, False) for m in (64, 32768)] == [False, True]
    assert not factors_together(32768, 1, 4, False)
