"""Autocast as the caller has it, and what is coarse in float32."""

from __future__ import annotations

import pytest
import torch

from marquardt.model.batch import Autocast, full, wide
from marquardt.model.parameters import Parameters

CPU = torch.device("cpu")


def now() -> tuple[object, ...]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_callers_autocast_again(dtype, cache):
    """Within another one, or none: enabled, dtype and cache."""
    with torch.autocast("cpu", dtype, cache_enabled=cache):
        there, caller = now(), Autocast.of_caller(CPU)
    outside = now()
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled):
            with caller():
                assert now() == there == (True, dtype, cache)
            with Autocast.of_caller(CPU)._replace(enabled=False)():
                assert not torch.is_autocast_enabled("cpu")
    assert now() == outside
    assert caller != Autocast.of_caller(CPU)


def test_what_is_coarse_is_widened():
    item = {"a": torch.ones(2).half(), "b": [torch.ones(2).bfloat16(), torch.ones(2).double(), torch.arange(2), "c"]}
    found = full(item)
    assert [t.dtype for t in (found["a"], *found["b"][:3])] == [
        torch.float32, torch.float32, torch.float64, torch.int64,
    ]  # fmt: skip
    assert found["b"][3] == "c"
    assert [wide(d) for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)] == [
        torch.float32, torch.float32, torch.float32, torch.float64,
    ]  # fmt: skip


def test_weights_are_the_rounding_of_theta():
    """What was assigned and moved comes back to the last digit, in θ and not in the parameters."""
    model = torch.nn.Linear(3, 2).bfloat16()
    space = Parameters(model, list(model.parameters()))
    assert space.coarse
    assert space.unrounded().dtype == torch.float32
    theta, d = torch.randn(8), 1e-4 * torch.randn(8)
    space.assign(theta)
    space.shift(d, 0.5)
    assert torch.equal(space.vector(), theta.add(d, alpha=0.5))
    assert torch.equal(model.bias, space.vector()[-2:].bfloat16())
    again = Parameters(model, list(model.parameters()), space.unrounded())
    assert torch.equal(again.vector(), space.vector())
    fine = torch.nn.Linear(3, 2)
    assert Parameters(fine, list(fine.parameters()), theta).unrounded() is None
