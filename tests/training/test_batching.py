"""All data or mini-batches: chosen from shapes, and an order that can be gone on with."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

import marquardt as mq
from marquardt.sources import source
from marquardt.training import batching as module
from marquardt.training.batching import (
    Order,
    batching,
    generators,
    seconds,
    set_generators,
    shapes,
    unchanged,
)
from support.fits import net, noisy_sine


def planned(model, data, batch_size=None, loss="mse", **parts):
    return batching(mq.LM(model, loss, **parts), source(data), batch_size)


def wide(n: int = 300) -> nn.Module:
    return nn.Sequential(nn.Linear(10, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 1))


def table(N: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(N, 10), torch.zeros(N, 1)


def test_it_depends_on_shapes_alone():
    """The same numbers for other values, and whatever the machine does meanwhile; as large as is quick."""
    opt = mq.LM(wide(50), "mse")
    x, y = table(400)
    one, other = (shapes(opt, source((x + k, y - k))) for k in range(2))
    assert one == other
    assert seconds(opt, one, 1000) < seconds(opt, one, 2000) < seconds(opt, one, 10**6)
    size = batching(opt, source(table(10**6)), None).size
    assert size > 512
    assert size & (size - 1) == 0
    assert seconds(opt, one, size) <= module.QUICK < seconds(opt, one, 2 * size)


def test_looking_changes_nothing():
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    planned(model, noisy_sine(50))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


LOADER = DataLoader(TensorDataset(*noisy_sine()), batch_size=10)


@pytest.mark.parametrize(
    ("model", "data", "asked", "kind", "size", "words"),
    [
        (net(), noisy_sine(), 8, "mini", 8, "mini-batches of 8 of 40 samples, as asked for"),
        (net(), noisy_sine(), 40, "whole", None, "all 40 samples in every step: there are no more than batch_size=40"),
        (net(), noisy_sine(), "all", "whole", None, "all 40 samples in every step"),
        (net(), noisy_sine(), None, "whole", None, "all samples in every step: a step with all 40 samples takes about"),
        (wide(), table(30_000), None, "mini", 2048, "mini-batches of 2,048: a step with all 30,000 samples takes abou"),
        (net(), LOADER, None, "mini", None, "the batches as they come"),
        (net(), LOADER, "all", "streamed", None, "all batches in every step"),
    ],
)
def test_what_the_steps_are_given(model, data, asked, kind, size, words):
    found = planned(model, data, asked)
    assert (found.kind, found.size, found.words[: len(words)]) == (kind, size, words)


class Pictures(Dataset):
    def __init__(self, size: int = 100, random: bool = False) -> None:
        self.size, self.random = size, random

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        x = torch.full((1,), float(i), dtype=torch.float64)
        return x + torch.rand(1).double() if self.random else x, torch.sin(x)


def test_a_dataset_is_read_if_it_has_room(monkeypatch):
    assert planned(net(), Pictures()).kind == "whole"
    monkeypatch.setattr(module, "READ", 100 * 16 - 1)
    found = planned(net(), Pictures())
    assert (found.kind, found.size) == ("streamed", 512)
    assert planned(net(), Pictures(random=True)).mini  # other items every time
    assert len(mq.fit(net(), Pictures(random=True), "mse", steps=3, batch_size=30).history) == 3


def test_samples_that_cannot_be_told_apart():
    class Pair(nn.Module):
        """Points of two kinds, one after the other"""

        def __init__(self):
            super().__init__()
            self.inner = net()

        def forward(self, a, b):
            return torch.cat([self.inner(a), self.inner(b)])

    x = torch.zeros(7, 1).double()
    data = ((x[:3], x), None)
    found = planned(Pair(), data, loss=mq.losses.Residual())
    assert (found.kind, found.words) == (
        "whole",
        "all data in every step: without a row of the inputs for each sample they cannot be cut into batches",
    )
    with pytest.raises(ValueError, match="batch_size=2, and the inputs have no row for each sample"):
        planned(Pair(), data, 2, loss=mq.losses.Residual())


# The order.


def taken(order: Order, k: int) -> list[list[float]]:
    return [order.next().inputs[:, 0].tolist() for _ in range(k)]


def test_every_epoch_has_every_sample_once_in_another_order():
    x = torch.arange(10.0)[:, None]
    order = Order(source((x, x)), 4, seed=3)
    first, second = taken(order, 3), taken(order, 3)
    for epoch in (first, second):
        assert [len(batch) for batch in epoch] == [4, 4, 2]
        assert sorted(x for batch in epoch for x in batch) == list(range(10))
    assert first != second
    assert taken(Order(source((x, x)), 4, seed=3), 6) == first + second
    assert (order.epoch, order.index) == (1, 3)


@pytest.mark.parametrize("after", [0, 1, 3, 4, 6])
@pytest.mark.parametrize("kind", ["tensors", "loader", "shuffled"])
def test_it_goes_on_where_it_was(kind, after):
    x = torch.arange(10.0)[:, None]

    def data(seed):
        torch.manual_seed(1)
        g = torch.Generator().manual_seed(seed)
        loader = DataLoader(TensorDataset(x, x), 4, shuffle=True, generator=g if kind == "loader" else None)
        return source((x, x) if kind == "tensors" else loader)

    order = Order(data(5), 4 if kind == "tensors" else None, seed=3)
    taken(order, after)
    state, began, random = order.state(), order.began, module.generators(order.data)
    rest = taken(order, 5)
    again = Order(data(99), order.size, seed=3)
    again.resume(state, began)
    module.set_generators(random, again.data)
    assert taken(again, 5) == rest
    assert (again.epoch, again.index) == (order.epoch, order.index)


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


@pytest.mark.parametrize("loader", [[], None, [torch.zeros(3)], [torch.zeros(8, dtype=torch.uint8)]], ids=repr)
def test_damaged_states_of_a_loader_change_nothing(loader):
    items = TensorDataset(torch.zeros(4, 1), torch.zeros(4, 1))
    data = source(DataLoader(items, shuffle=True, generator=torch.Generator().manual_seed(1)))
    assert generators(source(items))["loader"] == []
    found = {**generators(data), "loader": loader}
    drawn()
    before = generators(data)
    with pytest.raises(ValueError, match=r"'loader'.*load another one"):
        set_generators(found, data)
    assert torch.equal(torch.get_rng_state(), before["torch"])
    assert random.getstate()[1] == tuple(before["python"][1])
