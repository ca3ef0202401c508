"""States of random numbers that were read from outside are checked before any of them is set."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from marquardt import generators
from support.unchanged import same


def drawn() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.rand())]  # noqa: NPY002


def test_states_are_set_as_they_were():
    before = generators.states()
    first = drawn()
    generators.check(before)
    generators.set_states(before)
    assert drawn() == first
    generators.set_states({**before, "seed": 7})
    assert drawn() != first


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def edit(found: dict[str, Any]) -> None:
        found[name] = change(found[name])

    return edit


def at(place: int, value: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda found: [value if i == place else item for i, item in enumerate(found)]


DAMAGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "torch missing": (lambda found: found.pop("torch"), "'torch'"),
    "python missing": (lambda found: found.pop("python"), "'python'"),
    "torch a list": (changed("torch", lambda t: t.tolist()), "'torch' is list"),
    "torch of floats": (changed("torch", lambda t: t.float()), "torch.float32"),
    "torch cut": (changed("torch", lambda t: t[:-8]), "'torch' is none of torch"),
    "torch all zero": (changed("torch", torch.zeros_like), "'torch' is none of torch"),
    "cuda a number": (changed("cuda", lambda _: 3), "'cuda' is int"),
    "cuda of floats": (changed("cuda", lambda _: [torch.zeros(16)]), "'cuda:0' is torch.float32"),
    "python of another version": (changed("python", at(0, 9)), "'python'"),
    "python cut": (changed("python", at(1, [1, 2, 3])), "'python'"),
    "python a huge number": (changed("python", lambda p: at(1, at(5, 2**80)(p[1]))(p)), "'python'"),
    "python keeps words": (changed("python", at(2, "0.5")), "'python' keeps '0.5'"),
    "numpy of another kind": (changed("numpy", at(0, "PCG64")), "'numpy'"),
    "numpy negative": (changed("numpy", lambda p: at(1, at(5, -1)(p[1]))(p)), "'numpy'"),
    "numpy beyond its keys": (changed("numpy", at(2, 10**6)), "place 1000000"),
    "numpy keeps NaN": (changed("numpy", at(4, float("nan"))), "'numpy' keeps nan"),
    "numpy all zero": (changed("numpy", at(1, [0] * 624)), "'numpy'"),
    "a seed that is none": (lambda found: found.update(seed=-1), "seed"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_states_change_nothing(case):
    edit, says = DAMAGED[case]
    damaged = copy.deepcopy(generators.states())
    edit(damaged)
    before = generators.states()
    with pytest.raises(ValueError, match=says):
        generators.check(damaged)
    with pytest.raises(ValueError, match="load another one"):
        generators.set_states(damaged)
    assert same(before, generators.states())


def test_no_dict():
    with pytest.raises(ValueError, match="list, not a dict"):
        generators.check([1])
