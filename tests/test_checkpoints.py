"""mq.save_checkpoint and mq.load_checkpoint: whole or not there, by any number of ranks, for the same model alone."""

import os
import random
import re
import shutil

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import marquardt as mq
from marquardt import checkpoints, generators
from marquardt.ranks import ALONE, of
from support.fits import net, noisy_sine, weights
from support.ranks import outcomes, run, shard

PARTS = {"curvature": mq.Dense(), "damping": mq.MaxDiagonal(), "momentum": mq.AdaptiveMomentum()}


def made(**options):
    model = net()
    return model, mq.LM(model, "mse", **{**PARTS, **options})


def steps(model, opt, k):
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    x, y = (shard(t, rank, ranks) for t in noisy_sine())
    for _ in range(k):
        opt.step(x, y)


def saved(folder, k=4):
    """Random numbers that differ from rank to rank"""
    model, opt = made()
    steps(model, opt, k)
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    mq.save_checkpoint(folder, model, opt, epoch=3, curve=torch.arange(3.0), names=["a", None])
    return weights(model), torch.rand(2), random.random(), np.random.rand()  # noqa: NPY002


def resumed(folder, k=4):
    model, opt = made()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    more = mq.load_checkpoint(folder, model, opt)
    drawn = torch.rand(2), random.random(), np.random.rand()  # noqa: NPY002
    before = weights(model)
    steps(model, opt, k)
    return before, weights(model), more, drawn


def test_one_process_goes_on_bit_for_bit(tmp_path):
    then = saved(tmp_path / "run")
    before, after, more, drawn = resumed(tmp_path / "run")
    assert torch.equal(before, then[0])
    assert torch.equal(drawn[0], then[1])
    assert drawn[1:] == then[2:]
    assert more["epoch"] == 3
    assert more["names"] == ["a", None]
    assert torch.equal(more["curve"], torch.arange(3.0))
    model, opt = made()
    steps(model, opt, 8)
    assert torch.equal(weights(model), after)


def test_two_ranks_are_gone_on_with_by_any_number(tmp_path):
    model, opt = made()
    steps(model, opt, 8)
    folder = tmp_path / "run"
    then = run(saved, 2, folder)
    assert not torch.equal(then[0][1], then[1][1])
    for ranks in (1, 2, 4):
        found = [resumed(folder)] if ranks == 1 else run(resumed, ranks, folder)
        for rank, (before, after, more, drawn) in enumerate(found):
            assert torch.equal(before, then[0][0])
            torch.testing.assert_close(after, weights(model), rtol=1e-10, atol=1e-10)
            assert more["epoch"] == 3
            if rank < 2:
                assert torch.equal(drawn[0], then[rank][1])
        assert len({tuple(drawn[0].tolist()) for *_, drawn in found}) == ranks  # none has the numbers of another one


# Files.


def test_the_last_one_stays_until_the_next_is_complete(tmp_path, monkeypatch):
    model, opt = made()
    mq.save_checkpoint(tmp_path, model, opt, n=1)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "put", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            mq.save_checkpoint(tmp_path, model, opt, n=2)
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2.part"}
    assert mq.load_checkpoint(tmp_path, model, opt) == {"n": 1}
    mq.save_checkpoint(tmp_path, model, opt, n=3)
    assert [path.name for path in tmp_path.iterdir()] == ["2"]
    assert mq.load_checkpoint(tmp_path, model, opt) == {"n": 3}


def test_what_cannot_be_loaded_changes_nothing(tmp_path):
    model, opt = made()
    steps(model, opt, 2)
    mq.save_checkpoint(tmp_path, model, opt)

    def refused(words, folder=tmp_path, hidden=8, kind=ValueError, **options):
        other = net(hidden=hidden)
        before, optimizer = weights(other), mq.LM(other, "mse", **{**PARTS, **options})
        with pytest.raises(kind, match=words):
            mq.load_checkpoint(folder, other, optimizer)
        assert torch.equal(weights(other), before)
        assert optimizer.lam == mq.LM(net(), "mse", **{**PARTS, **options}).lam

    place = re.escape(str(tmp_path))
    refused(rf"{place} is of another model: '0.weight' is \(9, 1\) in this one, and was \(8, 1\)", hidden=9)
    refused(rf"{place} is of another optimizer: .*damping=MaxDiagonal", damping=mq.MeanEigenvalue())
    refused("holds no checkpoint that is complete", folder=tmp_path / "nothing", kind=FileNotFoundError)
    damaged = tmp_path / "damaged"
    shutil.copytree(tmp_path / "1", damaged / "1")
    (damaged / "1" / "__0_0.distcp").write_bytes(b"")
    refused("is no checkpoint, or damaged", folder=damaged)
    (damaged / "1" / checkpoints.CONTENTS).write_bytes(b"")
    refused("is no checkpoint, or damaged", folder=damaged)
    checkpoints.write(tmp_path / "other", {"weights": torch.ones(2)}, None, ALONE)
    refused("is no checkpoint of mq.save_checkpoint", folder=tmp_path / "other")


def test_what_cannot_be_saved_is_refused(tmp_path):
    model, opt = made()
    with pytest.raises(TypeError, match="tensors, numbers, strings, lists and dicts alone"):
        mq.save_checkpoint(tmp_path, model, opt, layer=nn.Tanh())
    with pytest.raises(TypeError, match="the optimizer is SGD"):
        mq.save_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters()))
    assert checkpoints.latest(tmp_path) is None


def faults(folder):
    """One rank cannot write, or is asked for something else: none has saved, and the checkpoint before it stays."""
    rank = dist.get_rank()
    model, opt = made()
    mq.save_checkpoint(folder, model, opt, n=1)
    said = []
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):  # of all ranks, for all begin anew then
        mq.load_checkpoint(folder / "nothing", model, opt)
    true = torch.distributed.checkpoint.FileSystemWriter.write_data
    if rank == 1:

        def full(*_):
            raise OSError(28, "No space left on device")

        torch.distributed.checkpoint.FileSystemWriter.write_data = full
    for more in ({"n": 2}, {"n": nn.Tanh() if rank == 0 else 2}):
        try:
            mq.save_checkpoint(folder, model, opt, **more)
        except (OSError, RuntimeError, TypeError) as error:
            said.append(str(error))
        torch.distributed.checkpoint.FileSystemWriter.write_data = true
    left = mq.load_checkpoint(folder, model, opt)["n"]
    mq.save_checkpoint(folder, model, opt, n=3)
    return said, left, mq.load_checkpoint(folder, model, opt)["n"]


def sharded(folder, rows):
    """Tensors that no rank has whole"""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    t = distribute_tensor(torch.arange(12.0).reshape(6, 2), mesh, [Shard(0)])
    checkpoints.write(folder, {"model": {"t": t}, "state": [None, t * 2]}, None, of(None))
    mine, _ = checkpoints.read(
        folder, of(None), {"model": {"t": distribute_tensor(torch.zeros(6, 2), mesh, [Shard(1)])}}
    )
    assert mine["model"]["t"].placements == (Shard(1),)
    assert mine["state"][1].placements == (Shard(0),)
    assert tuple(mine["state"][1].to_local().shape) == (rows, 2)
    return mine["model"]["t"].full_tensor(), mine["state"][1].full_tensor()


def both(folder):
    return faults(folder / "faults"), sharded(folder / "shards", 3)


def test_ranks_save_together_or_not_at_all_and_shards_are_put_together(tmp_path):
    for (said, left, last), (t, state) in run(both, 2, tmp_path):
        assert "could not be written by rank 1 (OSError: [Errno 28] No space left on device)" in said[0]
        assert "lists and dicts alone" in said[1]
        assert (left, last) == (1, 3)
        assert torch.equal(t, torch.arange(12.0).reshape(6, 2))
        assert torch.equal(state, 2 * t)
    content, _ = checkpoints.read(tmp_path / "shards", ALONE)
    assert torch.equal(content["model"]["t"], torch.arange(12.0).reshape(6, 2))


def killed(folder):
    model, opt = made()
    mq.save_checkpoint(folder, model, opt, n=1)
    if dist.get_rank() == 1:
        generators.states = lambda: os._exit(9)
    mq.save_checkpoint(folder, model, opt, n=2)


def test_a_rank_that_dies_while_saving_leaves_the_last_checkpoint(tmp_path):
    waiting, died = outcomes(killed, 2, tmp_path, group_timeout=10)
    assert died.message == "exit code 9"
    assert waiting.kind == "RankError"
    model, opt = made()
    assert mq.load_checkpoint(tmp_path, model, opt)["n"] == 1
