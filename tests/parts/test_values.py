"""What all parts promise: they are values, and bad ones are refused by name."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re

import pytest
from torch import nn

import marquardt as mq

NAN, INF = math.nan, math.inf
PARTS = [
    mq.Exact(), mq.Sampled(2), mq.Empirical(), mq.Dense(), mq.Gram(chunk=3), mq.Auto(), mq.Hessian(), mq.MatrixFree(),
    mq.Identity(), mq.MaxDiagonal(0.01), mq.MeanEigenvalue(), mq.LayerMeanEigenvalue(), mq.FactoredMaxDiagonal(),
    mq.Constant(1.0), mq.TenFold(1.0), mq.RelativeDecrease(1.0), mq.GainRatio(1.0),
    mq.AdaptiveMomentum(0.9, 0.6), mq.QuadraticMomentum(), mq.Decrease(), mq.Uphill(2.0),
    mq.Grid(1e-6, 9, 0.125), mq.Backtracking(0.5),
    mq.EMA(0.95), mq.Polyak(),
]  # fmt: skip


@pytest.mark.parametrize("part", PARTS, ids=lambda p: type(p).__name__)
def test_parts_are_values(part):
    assert dataclasses.is_dataclass(part)
    assert part == dataclasses.replace(part) == copy.deepcopy(part) == pickle.loads(pickle.dumps(part))
    assert hash(part) == hash(dataclasses.replace(part))
    for field in dataclasses.fields(part):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, field.name, getattr(part, field.name))


LINEAR = nn.Linear(1, 1)
BAD = [
    *((mq.Constant, {"initial": v}) for v in (-1.0, NAN, INF)),
    *((s, {"initial": v}) for s in (mq.TenFold, mq.RelativeDecrease, mq.GainRatio) for v in (-1.0, 0.0, NAN, INF)),
    *((mq.TenFold, {"factor": v}) for v in (1.0, 0.5, -10.0, NAN, INF)),
    *((mq.GainRatio, {k: v}) for k in ("down", "slow_down") for v in (0.0, -0.5, 1.5, NAN)),
    *((mq.GainRatio, {k: v}) for k in ("up", "slow_up") for v in (0.5, -1.0, NAN, INF)),
    *((mq.GainRatio, {"floor": v}) for v in (-1.0, NAN, INF)),
    *((s, {"minimum": v}) for s in (mq.TenFold, mq.RelativeDecrease, mq.GainRatio) for v in (-1.0, 0.0, NAN)),
    *((s, {"maximum": v}) for s in (mq.TenFold, mq.RelativeDecrease, mq.GainRatio) for v in (-1.0, NAN, INF)),
    *((s, {"minimum": 3.0, "maximum": 2.0}) for s in (mq.TenFold, mq.RelativeDecrease, mq.GainRatio)),
    *((mq.AdaptiveMomentum, {"xi": v}) for v in (0.0, 1.0, -0.5, 1.5, NAN)),
    *((mq.AdaptiveMomentum, {"dP": v}) for v in (0.0, -0.6, NAN, INF)),
    *((mq.AdaptiveMomentum, {"dP": v, "cap": True}) for v in (0.0, -0.6, NAN)),
    *((mq.MaxDiagonal, {"floor": v}) for v in (-0.01, NAN, INF)),
    *((mq.Uphill, {"b": v}) for v in (0.0, -2.0, NAN, INF)),
    *((mq.EMA, {"decay": v}) for v in (-0.1, 1.0, 1.5, NAN)),
    (mq.Grid, {"start": 2.0, "stop": 1.0}),
    (mq.Grid, {"start": 2.0, "stop": 2.0}),
    *((mq.Grid, {"start": v}) for v in (0.0, -1.0, NAN)),
    *((mq.Grid, {"stop": v}) for v in (NAN, INF)),
    *((mq.Grid, {"step": v}) for v in (0.0, -0.125, NAN, INF)),
    *((mq.Backtracking, {"factor": v}) for v in (0.0, 1.0, -0.5, NAN)),
    *((mq.Backtracking, {"trials": v}) for v in (0, -1, 2.5)),
    *((mq.Sampled, {"k": v}) for v in (0, -1, 1.5)),
    *((mq.KroneckerMetric, {"c": v}) for v in (0.0, NAN, INF)),
    *((mq.Balanced, {"target": v}) for v in (0.0, -1.0, 1.01, INF, NAN)),
    *((mq.Balanced, {"quickest": v}) for v in (1.0, 0.5, INF, NAN)),
    *((mq.Balanced, {"initial": v}) for v in (0.0, -1.0, INF, NAN)),
    *((mq.Balanced, {"most": v}) for v in (0.0, -1.0, NAN)),
    *((c, {"decay": v}) for c in (mq.KroneckerMetric, mq.Kronecker, mq.EKFAC) for v in (-0.1, 1.0, NAN)),
    *((c, {"every": v}) for c in (mq.KroneckerMetric, mq.Kronecker) for v in (0, 1.5)),
    *((mq.MatrixFree, {"iterations": v}) for v in (0, 2.5)),
    *((mq.MatrixFree, {"tolerance": v}) for v in (-1e-3, 1.0, NAN)),
    *((mq.MatrixFree, {"warm": v}) for v in (-0.1, 1.5)),
    *((mq.MatrixFree, {"precondition": v}) for v in (0.0, 2.0)),
    *((mq.Auto, {"memory": v}) for v in (0, -1, "", "lots", "4 parsecs", "-4GiB", "0GiB", True, "GiB", NAN, "1e9x")),
    *((mq.Auto, {"work": v}) for v in (0, 0.5, -1, True, "30", NAN)),
    *((r, {"chunk": v}) for r in (mq.Dense, mq.Gram, mq.MatrixFree, mq.Kronecker, mq.Auto) for v in (0, -1, 2.5)),
    *((r, {"inertia": v}) for r in (mq.Dense, mq.Auto) for v in (-0.1, 1.0, NAN)),
]
BAD_FOR_LM = [
    *(("lr", v) for v in (-1.0, NAN, INF)),
    *(("attempts", v) for v in (0, -1, 1.5)),
]


def spelled(part, arguments) -> str:
    return f"{part.__name__}({', '.join(f'{k}={v}' for k, v in arguments.items())})"


@pytest.mark.parametrize(("part", "arguments"), BAD, ids=[spelled(*b) for b in BAD])
def test_bad_values_are_refused_by_name(part, arguments):
    name, value = next(iter(arguments.items()))
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
        part(**arguments)


@pytest.mark.parametrize(("name", "value"), BAD_FOR_LM)
def test_bad_values_of_the_optimizer(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
        mq.LM(LINEAR, "mse", **{name: value})


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (lambda: mq.Constant(0.0), {"initial": 0.0}),  # Gauss-Newton
        (lambda: mq.MaxDiagonal(0.0), {"floor": 0.0}),
        (lambda: mq.EMA(0.0), {"decay": 0.0}),
        (lambda: mq.AdaptiveMomentum(0.9, INF, cap=True), {"dP": INF, "cap": True}),
        (lambda: mq.GainRatio(1.0, down=1.0, up=1.0), {"down": 1.0, "up": 1.0}),
        (lambda: mq.GainRatio(1.0, floor=1e-12, minimum=1e-12), {"floor": 1e-12, "minimum": 1e-12}),  # no floor
        (lambda: mq.Dense(inertia=0.0), {"inertia": 0.0}),
        (lambda: mq.Backtracking(0.5, trials=1), {"trials": 1}),
        (lambda: mq.LM(LINEAR, "mse", lr=0.0), {"lr": 0.0}),
    ],
)
def test_values_at_the_edge_are_fine(make, kept):
    """Neither refused nor moved inwards."""
    made = make()
    options = made.param_groups[0] if isinstance(made, mq.LM) else dataclasses.asdict(made)
    assert {name: options[name] for name in kept} == kept
