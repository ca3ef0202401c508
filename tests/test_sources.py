"""Where batches come from: every form of data gives the same samples, and what cannot train is refused by name."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from marquardt.model.batch import Batches
from marquardt.sources import source

x = torch.arange(24.0).reshape(8, 3)
y = torch.arange(8.0)[:, None]
w = torch.arange(8.0) + 1


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return x[i], y[i], w[i]


class Noisy(Rows):
    def __getitem__(self, i):
        return x[i] + torch.randn(3), y[i], w[i]


def joined(batches):
    found = list(batches)
    return [torch.cat([getattr(b, name) for b in found]) for name in ("inputs", "targets", "weight")]


FORMS = {
    "tensors": lambda: (x, y, w),
    "arrays": lambda: (x.numpy(), y.numpy(), w.numpy()),
    "frames": lambda: (pd.DataFrame(x.numpy()), pd.DataFrame(y.numpy()), pd.Series(w.numpy())),
    "lists": lambda: (x.tolist(), y.tolist(), w.tolist()),
    "TensorDataset": lambda: TensorDataset(x, y, w),
    "Dataset": Rows,
    "DataLoader": lambda: DataLoader(Rows(), batch_size=3),
    "list of batches": lambda: [(x[:5], y[:5], w[:5]), (x[5:], y[5:], w[5:])],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_same_samples(form):
    found = source(FORMS[form](), dtype=torch.float64)
    assert source(found) is found
    batches = found.batches()
    for _ in range(2):  # they can be gone through again
        for got, want in zip(joined(batches), (x, y, w), strict=True):
            assert torch.equal(got, want.double())
    in_memory = form not in ("DataLoader", "list of batches")
    assert (found.whole is not None) == in_memory
    assert found.samples == (None if form == "list of batches" else 8)
    if in_memory:
        assert [b.samples for b in found.batches(3)] == [3, 3, 2]
        assert torch.equal(found.whole.inputs, x.double())
        for fraction in (0.0, 1.0, 0.01, 0.99):
            with pytest.raises(ValueError, match=f"a fraction of {fraction} of 8 samples"):
                found.split(fraction)
    else:
        with pytest.raises(ValueError, match="cannot be told from the rest: pass a validation set"):
            found.split(0.2)
    (batch,) = Batches(source((x, y)).batches())  # as `step_over` goes through them
    assert batch.inputs is x


def test_columns_of_several_kinds_of_numbers():
    frame = pd.DataFrame({"flag": [True, False], "size": [0.5, 2.0], "count": pd.array([3, 4], dtype="Int64")})
    found = source((frame, y[:2])).whole
    assert found.inputs.tolist() == [[1.0, 0.5, 3.0], [0.0, 2.0, 4.0]]
    with pytest.raises(ValueError, match=re.escape("inputs[1, 1] is nan")):
        source((frame.assign(size=pd.array([3, None], dtype="Int64")), y[:2]))


def test_several_inputs():
    """Integers keep their type."""
    mask = torch.full((8,), -torch.inf)
    found = source(({"x": x.numpy(), "mask": mask}, torch.arange(8)), dtype=torch.float64)
    assert torch.equal(found.whole.inputs["x"], x.double())
    assert (found.whole.targets.dtype, found.whole.weight) == (torch.int64, None)
    part = next(iter(found.batches(3)))
    assert torch.equal(part.inputs["mask"], mask[:3].double())
    both = source(((x, y), None)).whole
    assert torch.equal(both.inputs[1], y)
    assert both.targets is None


def test_a_split_takes_every_sample_once():
    for data in ((x, y, w), Rows()):
        train, held = source(data).split(0.25, seed=3)
        assert (train.samples, held.samples) == (6, 2)
        both = torch.cat([train.whole.targets, held.whole.targets])
        assert torch.equal(both.sort(0).values, y)
        again = source(data).split(0.25, seed=3)[1]
        assert torch.equal(again.whole.inputs, held.whole.inputs)
    seeds = [source((x, y)).split(0.5, seed=k)[1].whole.targets for k in range(5)]
    assert any(not torch.equal(seeds[0], other) for other in seeds)


def test_items_that_are_drawn_anew_are_no_whole():
    state = torch.get_rng_state()
    found = source(Noisy())
    assert torch.equal(torch.get_rng_state(), state)
    assert found.whole is None
    assert not torch.equal(joined(found.batches(4))[0], joined(found.batches(4))[0])


def test_a_loader_says_how_many_samples_it_has():
    assert source(DataLoader(Rows(), batch_size=3, drop_last=True)).samples == 6
    assert source(DataLoader(Rows(), batch_size=3, shuffle=True)).samples == 8
    assert len(source(DataLoader(Rows(), batch_size=3)).batches()) == 3


def nan(t, *where):
    t = t.clone()
    t[where] = torch.nan
    return t


class Endless(IterableDataset):
    def __iter__(self):
        yield x[0], y[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((nan(x, 5, 2), y), "inputs[5, 2] is nan"),
        ((x, nan(y, 6, 0)), "targets[6, 0] is nan"),
        ((x, y, nan(w, 4)), "weight[4] is nan"),
        (((x, nan(y, 1, 0)), y), "inputs[1, 0] is nan"),
        ((x, y[:5]), "have the shape (8, 3), and there are 5 samples"),
        ((x.T, y), "by targets of the shape (8, 1): both need one row for each sample, as inputs.T has"),
        ((x, y.T), "by targets of the shape (1, 8): both need one row for each sample, as targets.T has"),
        ((x.T, y.T), "both need one row for each sample, as inputs.T and targets.T have"),
        ((x.to("meta"), y), "the inputs are on the meta device"),
        ((x, y, w[:5]), "the weights have the shape (5,), and there are 8 samples"),
        ((x, y, -w), "the weights must be one number of at least 0"),
        ((x, y, 0 * w), "the weights of all samples are 0"),
        ((x[:0], y[:0]), "the data have no samples"),
        ((x,), "1 entries in the place of (inputs, targets)"),
        ((x, y, w, w), "4 entries in the place of"),
        (x, "data of the type Tensor: pass a tuple"),
        (pd.DataFrame(x.numpy()), "data of the type DataFrame: pass a tuple"),
        ({"x": x}, "data of the type dict"),
        ("data.csv", "data of the type str"),
        (3, "data of the type int"),
        ((b for b in [(x, y)]), "generator is used up when it was gone through once"),
        (Endless(), "Endless is an IterableDataset"),
        ((np.array([["a", "b"]]), y[:1]), "the inputs are no numbers"),
        ((pd.DataFrame({"size": [1.0, 2.0], "town": ["Ulm", "Bonn"]}), y[:2]),
         "the inputs are no numbers (object), in the columns 'town'"),
        ([(x, y), (nan(x, 5, 2), y)], "inputs[5, 2] is nan"),
        ([x, y], "Tensor in the place of (inputs, targets)"),
        ([x, y], "a list is one of batches"),
        (list(zip(x, y, strict=True)), "a torch Dataset has single samples"),
        ([], "list has no batches"),
        (DataLoader(TensorDataset(x), batch_size=4), "1 entries in the place of"),
    ],
)  # fmt: skip
def test_refused(data, message):
    """At once, or when they come"""
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        list(source(data).batches())
