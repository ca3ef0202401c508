"""Averages: Polyak's mean and the exponential one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import marquardt as mq
from support.parts import batch, flat, lm, mlp, seeds
from support.reference import error

f64 = torch.float64


@given(seeds, st.integers(1, 30))
def test_polyak_is_the_arithmetic_mean(seed, steps):
    torch.manual_seed(seed)
    thetas = torch.randn(steps, 3, dtype=f64)
    mean = thetas[0]
    for t in range(1, steps):
        mean = mq.Polyak().update(mean, thetas[t], t)
    assert torch.allclose(mean, thetas.mean(0), rtol=0, atol=1e-13)


@given(seeds, st.integers(0, 500), st.floats(0, 0.999))
@example(0, 0, 0.95)
@example(0, 170, 0.95)  # the warm-up reaches 0.95 here: 171/180
@example(0, 171, 0.95)
def test_ema(seed, t, decay):
    torch.manual_seed(seed)
    mean, theta = torch.randn(2, 3, dtype=f64)
    kept = mean.clone()
    beta = min(decay, (1 + t) / (10 + t))
    assert torch.allclose(mq.EMA(decay).update(mean, theta, t), beta * mean + (1 - beta) * theta, rtol=0, atol=1e-13)
    assert torch.equal(mean, kept)


@pytest.mark.parametrize("part", [mq.Polyak(), mq.EMA(0.95), mq.EMA(0.1)])
def test_average_of_the_weights(part):
    """On changing batches: over the weights after every accepted step, the first of them included."""
    model = mlp()
    opt = lm(model, average=part)
    thetas = []
    for k in range(6):
        x, y = batch(seed=k, N=5 + k)
        assert opt.step(x, (k + 1) * y).accepted  # losses that nobody takes for the same
        thetas.append(flat(model))
    if isinstance(part, mq.Polyak):
        expected = torch.stack(thetas).mean(0)
    else:
        expected = thetas[0]
        for t, theta in enumerate(thetas[1:], start=1):
            beta = min(part.decay, (1 + t) / (10 + t))
            expected = beta * expected + (1 - beta) * theta
    assert error(opt._state.mean, expected) < 1e-12
    with opt.averaged():
        assert error(flat(model), thetas[-1] if opt._state.lag.behind else expected) < 1e-12
    assert torch.equal(flat(model), thetas[-1])
