"""mq.fit on several ranks: the same steps on any number of them, one end for all, and nothing begun that cannot be."""

import signal
import time
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import marquardt as mq
from marquardt.ranks import OtherRank, RankError
from marquardt.training import batching, history
from support.fits import net, noisy_sine, weights
from support.ranks import run

PARTS = {"curvature": mq.Dense(), "damping": mq.MaxDiagonal()}


class Pairs(Dataset):
    """Samples that are read one by one, and counted."""

    def __init__(self, x, y):
        self.x, self.y, self.read = x, y, set()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.read.add(i)
        return self.x[i], self.y[i]


def weighted(N):
    x, y = noisy_sine(N)
    return x, y, 0.5 + torch.arange(N).double() / N


def loader(batch):
    """Of every batch each rank has its samples."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    data = TensorDataset(*noisy_sine(48))
    sampler = DistributedSampler(data, num_replicas=ranks, rank=rank, shuffle=False)
    return DataLoader(data, batch_size=batch // ranks, sampler=sampler)


# A validation set of its own, a fraction, fewer than there are ranks, none; a ragged last batch and one that is left to
# the batch before it; samples in memory and not.
KINDS = {
    "whole": lambda: {"data": weighted(41), "validation": 0.2},
    "items": lambda: {"data": Pairs(*noisy_sine(41)), "validation": noisy_sine(3, seed=5), "weight_decay": 1e-3},
    "ragged": lambda: {"data": noisy_sine(46), "batch_size": 10, "validation": 0.1},
    "tail": lambda: {"data": Pairs(*noisy_sine(41)), "batch_size": 10},
    "evidence": lambda: {"data": noisy_sine(41), "weight_decay": mq.Evidence(every=2)},
    "streamed": lambda: {"data": Pairs(*noisy_sine(600)), "batch_size": "all", "validation": Pairs(*noisy_sine(9))},
    "loader": lambda: {"data": loader(8), "validation": loader(8)},
    "all of a loader": lambda: {"data": loader(8), "batch_size": "all"},
}


def fitted():
    """What does not depend on the process"""
    found = {}
    for name, arguments in KINDS.items():
        batching.READ = 0 if name == "streamed" else 2**31
        torch.manual_seed(0)
        fit = mq.fit(net(), loss="mse", steps=3, patience=None, **arguments(), **PARTS)
        found[name] = (
            torch.cat([weights(fit.model), torch.tensor([fit.loss])]), fit.history["validation"], fit.best_step,
            fit.reason,
        )  # fmt: skip
    return found


def test_the_same_weights_on_any_number_of_ranks():
    want = fitted()
    for ranks in (2, 4):
        for found in run(fitted, ranks):
            for name, (theta, validated, *words) in want.items():
                torch.testing.assert_close(found[name][0], theta, rtol=1e-10, atol=1e-10, msg=f"{name}, {ranks} ranks")
                torch.testing.assert_close(
                    torch.tensor(found[name][1]), torch.tensor(validated), rtol=1e-9, atol=1e-9, equal_nan=True
                )
                assert found[name][2:] == tuple(words)


def ends():
    """How fits end that one rank ends."""
    one, found = dist.get_rank() == 1, {}

    def at(step, do):
        return lambda running: do() if one and running.step.step == step else None

    def fit(**options):
        x, y = noisy_sine()
        return mq.fit(net(), (x, y), "mse", **{"steps": 9, **PARTS, **options})

    def interrupt():
        raise KeyboardInterrupt

    def signalled():
        signal.raise_signal(signal.SIGINT)  # to this thread, not to one of gloo's

    for name, do in (("asked", lambda: True), ("interrupted", interrupt), ("signalled", signalled)):
        result = fit(callbacks=at(3, do))
        found[name] = result.reason, len(result.history), weights(result.model)
    true, time.perf_counter = time.perf_counter, lambda: (100 if one else 1) * true()
    result = fit(steps=None, seconds=0.05, min_gradient=None, max_lam=None)
    found["seconds"] = result.reason, result.history["seconds"]
    time.perf_counter = true
    bars = []
    history.Bar = lambda stops: bars.append(stops) or MagicMock()
    fit(progress=True, steps=2)
    found["bars"] = len(bars)
    try:
        fit(callbacks=at(2, lambda: int("no number")))
    except ValueError as error:
        found["failed"] = isinstance(error, OtherRank), str(error)
    found["posterior"] = float(fit(steps=40, weight_decay=1e-2).posterior().log_evidence)
    return found


def test_one_rank_ends_the_fit_of_all():
    first, second = run(ends, 2)
    for name, reason, steps in [
        ("asked", "a callback asked for it", 3), ("interrupted", "interrupted", 3), ("signalled", "interrupted", 3)
    ]:  # fmt: skip
        for found in (first, second):
            assert found[name][:2] == (reason, steps), name
            assert torch.equal(found[name][2], first[name][2])
    assert first["seconds"] == second["seconds"]  # rank 0's, though the clock of rank 1 is a hundred times faster
    assert "are over" in first["seconds"][0]
    assert (first["bars"], second["bars"]) == (1, 0)
    assert first["failed"][0]
    assert "all ranks stop here. ValueError: invalid literal" in first["failed"][1]
    assert not second["failed"][0]
    x, y = noisy_sine()
    alone = mq.fit(net(), (x, y), "mse", steps=40, weight_decay=1e-2, **PARTS).posterior().log_evidence
    assert first["posterior"] == pytest.approx(float(alone), rel=1e-9)


def refused():
    """What is said to data and options that cannot be shared, on each rank."""
    rank, (x, y) = dist.get_rank(), noisy_sine()
    items, other, model = TensorDataset(x, y), DistributedSampler(TensorDataset(x, y), 2, 0), net()
    cases = {
        "other numbers": {"data": (x + rank, y)},
        "other samples": {"data": (x[: 40 - rank], y[: 40 - rank])},
        "another validation set": {"data": (x, y), "validation": (x[rank:], y[rank:])},
        "bad": {"data": (x / (1 - rank), y)},
        "loader": {"data": DataLoader(items, batch_size=8)},
        "batches": {"data": [(x, y)]},
        "another rank": {"data": DataLoader(items, batch_size=8, sampler=other)},
        "evidence": {"data": loader(8), "weight_decay": mq.Evidence()},
        "few": {"data": (x[:1], y[:1])},
        "small": {"data": (x, y), "batch_size": 1},
        "small last": {"data": (x[:37], y[:37]), "batch_size": 4},
        "undivided": {"data": ((x, torch.ones(3)), None), "loss": mq.losses.Residual()},
        "seed": {"data": (x, y), "seed": rank},
        "steps": {"data": (x, y), "steps": rank},
    }
    found, before = {}, weights(model)
    for name, arguments in cases.items():
        try:
            mq.fit(model, **{"loss": "mse", **arguments, **PARTS})
        except (ValueError, RankError) as error:
            found[name] = f"{type(error).__name__}: {error}"
        assert torch.equal(weights(model), before), name
    found["loader"] += f"{mq.fit(model, (x, y), 'mse', steps=2, group=False).loss}"
    return found, mq.fit(model, (x, y), "mse", steps=2, **PARTS).reason


def test_what_cannot_be_shared_is_refused_by_all():
    words = {
        "other numbers": "the data are not the same on all ranks: rank 0 has 40 samples and rank 1 has 40, with other",
        "other samples": "the data are not the same on all ranks: rank 0 has 40 samples and rank 1 has 39, with other",
        "another validation set": "the data are not the same on all ranks",
        "bad": "is inf: drop or repair such samples",
        "loader": "sampler=DistributedSampler(dataset)), or the Dataset or the tensors themselves",
        "batches": "a list on 2 ranks that does not say which samples are this rank's",
        "another rank": "is of rank 0 of 2, and this is rank 1 of 2",
        "evidence": "mq.Evidence() goes through all samples",
        "few": "1 samples for 2 ranks",
        "small": "a batch of 1 samples (batch_size=1 leaves it) for 2 ranks",
        "small last": "a batch of 1 samples (batch_size=4 leaves it) for 2 ranks",
        "undivided": "cannot be shared among 2 ranks",
        "seed": "the ranks do not agree",
        "steps": "the ranks do not agree",
    }
    for found, reason in run(refused, 2):
        assert set(found) == set(words)
        for name, said in found.items():
            assert words[name] in said, name
        assert reason == "2 steps are done"


def test_a_last_batch_of_few_samples_goes_with_the_one_before_it():
    sizes = {N: [len(index) for index in batching.cut(torch.arange(N), 16)] for N in (16, 17, 32, 34, 35)}
    assert sizes == {16: [16], 17: [17], 32: [16, 16], 34: [16, 18], 35: [16, 16, 3]}


def test_a_distributed_sampler_has_another_order_in_every_epoch():
    data = TensorDataset(*noisy_sine(20))
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    epochs = []
    sampler.set_epoch = epochs.append
    mq.fit(net(), DataLoader(data, batch_size=10, sampler=sampler), "mse", steps=6)
    assert epochs[:3] == [0, 1, 2]
