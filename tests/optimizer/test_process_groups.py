"""Process groups are refused, unless the runs are independent."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import marquardt as mq
from support.cases import mlp
from support.steps import lm, problem
from support.unchanged import changes, refused, world

pytestmark = pytest.mark.usefixtures("double")

RANKS = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, distribute_module
from torch.nn.parallel import DistributedDataParallel

import marquardt as mq

def says(make):
    try:
        make()
    except (TypeError, ValueError) as error:
        return str(error)
    return "nothing"

rank, file = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
x, y = torch.randn(8, 2), torch.randn(8, 3)
before = mq.LM(nn.Linear(2, 3), "mse")
before.step(x, y)
dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)
kept = [p.clone() for p in before.params]
assert f"rank {rank} of a process group of 2" in says(lambda: before.step(x, y))
assert all(torch.equal(p, q) for p, q in zip(before.params, kept)) and before._state.steps == 1
assert "group=False" in says(lambda: mq.LM(nn.Linear(2, 3), "mse"))
for group in (None, False):
    wrapped = says(lambda: mq.LM(DistributedDataParallel(nn.Linear(2, 3)), "mse", group=group))
    assert "DistributedDataParallel" in wrapped and "model.module" in wrapped, wrapped
shards = distribute_module(nn.Linear(2, 3), DeviceMesh("cpu", [0, 1]))
assert "'weight' is a DTensor" in says(lambda: mq.LM(shards, "mse", group=False))
model = nn.Linear(2, 3)
step = mq.LM(model, "mse", group=False).step(x[rank::2], y[rank::2])
assert step.accepted and step.new_loss < step.loss
dist.barrier()
dist.destroy_process_group()
assert before.step(x, y).accepted
print("rank", rank, "is through")
"""


def test_ranks_of_a_process_group(tmp_path):
    """Two processes: each is refused alike, before anything changes, unless the runs are independent."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(rank), str(tmp_path / "group")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    for rank, process in enumerate(ranks):
        said, _ = process.communicate(timeout=120)
        assert f"rank {rank} is through" in said, said


@pytest.fixture
def two_ranks(monkeypatch):
    """What torch says in a process group, without one."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)


def test_a_group_of_two_is_refused(two_ranks):
    model, x, y = problem()
    with refused("rank 1", "group of 2", "group=False"):
        lm(model)
    assert lm(model, group=False).step(x, y).accepted
    assert mq.presets.vanilla(model, "mse", group=False).step(x, y).accepted


def test_a_group_that_comes_later_is_refused(request):
    model, x, y = problem()
    opt = lm(model)
    opt.step(x, y)
    request.getfixturevalue("two_ranks")
    before = world(model, opt)
    for ask in (lambda: opt.step(x, y), lambda: opt.step_over([(x, y)])):
        with refused("rank 1", "group=False"):
            ask()
    assert changes(before, world(model, opt)) == []


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
