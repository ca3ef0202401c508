"""The generators that a fit may depend on go on where they were."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from marquardt.sources import source
from marquardt.training.batching import generators, set_generators, unchanged


def drawn(*own: torch.Generator) -> list[float]:
    rest = [float(torch.rand((), generator=g)) for g in own]
    return [float(torch.rand(())), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), *rest]  # noqa: NPY002


def test_they_go_on():
    """Also after a file, and those of a DataLoader and of its sampler."""
    own = [torch.Generator().manual_seed(k) for k in range(2)]
    items = TensorDataset(torch.zeros(4, 1), torch.zeros(4, 1))
    loader = DataLoader(items, sampler=RandomSampler(items, generator=own[1]), generator=own[0])
    data = source(loader)
    drawn(*own)
    file = io.BytesIO()
    torch.save(generators(data), file)
    want = drawn(*own)
    drawn(*own)
    file.seek(0)
    set_generators(torch.load(file, weights_only=True), data)
    assert drawn(*own) == want


def test_an_order_that_is_the_same_every_time():
    x = torch.arange(6.0)[:, None]
    for own in (None, torch.Generator().manual_seed(3)):
        data = source(DataLoader(TensorDataset(x, x), batch_size=2, shuffle=True, generator=own))
        orders = []
        for _ in range(3):
            with unchanged(data):
                orders.append([batch.inputs.tolist() for batch in data.batches()])
        assert orders[0] == orders[1] == orders[2]
        assert [batch.inputs.tolist() for batch in data.batches()] == orders[0]


def test_tensors_have_none_of_their_own():
    assert generators(source((torch.zeros(4, 1), torch.zeros(4, 1))))["loader"] == []


@pytest.mark.parametrize("loader", [[], None, [torch.zeros(3)], [torch.zeros(8, dtype=torch.uint8)]], ids=repr)
def test_damaged_states_of_a_loader_change_nothing(loader):
    items = TensorDataset(torch.zeros(4, 1), torch.zeros(4, 1))
    data = source(DataLoader(items, shuffle=True, generator=torch.Generator().manual_seed(1)))
    found = {**generators(data), "loader": loader}
    drawn()
    before = generators(data)
    with pytest.raises(ValueError, match=r"'loader'.*load another one"):
        set_generators(found, data)
    assert torch.equal(torch.get_rng_state(), before["torch"])
    assert random.getstate()[1] == tuple(before["python"][1])
