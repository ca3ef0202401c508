"""Which ranks take a step together, as far as one process can tell: see tests/ranks for several."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import marquardt as mq
from support.cases import mlp
from support.steps import lm, problem
from support.unchanged import refused

pytestmark = pytest.mark.usefixtures("double")


@pytest.fixture
def two_ranks(monkeypatch):
    """What torch says in a process group, without one."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)


def test_independent_runs_need_no_group(two_ranks):
    model, x, y = problem()
    assert lm(model, group=False).step(x, y).accepted
    assert mq.presets.vanilla(model, "mse", group=False).step(x, y).accepted


def test_a_group_of_one_is_none(monkeypatch, two_ranks):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    model, x, y = problem()
    assert lm(model).step(x, y).accepted


@pytest.mark.parametrize("group", [True, 0, "gloo", object()])
def test_other_groups_are_refused(group):
    with refused("group=", "None", "False"):
        lm(mlp(2, 3), group=group)


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: nn.Sequential(nn.DataParallel(m))], ids=["it", "within"])
def test_data_parallel_is_refused(wrap):
    with refused("DataParallel", "model.module"):
        lm(wrap(mlp(2, 3)))
