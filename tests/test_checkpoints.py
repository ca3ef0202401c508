"""mq.save_checkpoint and mq.load_checkpoint: whole or not there, by any number of ranks, for the same model alone."""

import io
import os
import pickle
import random
import re
import resource
import shutil
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import marquardt as mq
from fuzz.checkpoints import Canary, first_version, sealed, there
from marquardt import checkpoints, files, generators
from marquardt.ranks import ALONE
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
    """After Ctrl-C nothing is left of the other; of one that is killed, until the next (tests/fuzz/checkpoints.py)."""
    model, opt = made()
    mq.save_checkpoint(tmp_path, model, opt, n=1)
    true = files.save

    def interrupted(path, content):
        if path.name == checkpoints.CONTENTS:
            raise KeyboardInterrupt
        true(path, content)

    monkeypatch.setattr(files, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mq.save_checkpoint(tmp_path, model, opt, n=2)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
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

    place = re.escape(str(tmp_path / "1"))
    refused(rf"{place} is of another model: '0.weight' is \(9, 1\) in this one, and was \(8, 1\)", hidden=9)
    refused(rf"{place} is of another optimizer: .*damping=MaxDiagonal", damping=mq.MeanEigenvalue())
    refused("holds no checkpoint that is complete", folder=tmp_path / "nothing", kind=FileNotFoundError)
    damaged = tmp_path / "damaged"
    shutil.copytree(tmp_path / "1", damaged / "1")
    for name in ("tensors-0.pt", checkpoints.CONTENTS):
        (damaged / "1" / name).write_bytes(b"")
        refused(f"1 is no checkpoint, or damaged .*{name}", folder=damaged)
    checkpoints.write(tmp_path / "other", {"weights": torch.ones(2)}, None, ALONE)
    refused("is no checkpoint of mq.save_checkpoint", folder=tmp_path / "other")


UNREADABLE = {
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "a quantised tensor"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "a tensor of the layout torch.sparse_coo"),
    "compressed": (lambda: torch.eye(3).to_sparse_csr(), "a tensor of the layout torch.sparse_csr"),
    "meta": (lambda: torch.ones(3, device="meta"), "on the meta device, without numbers"),
    "long": (lambda: 10**1000, r"1000000.*0000 \(it has the instruction 139"),
    "too long to print": (lambda: 10**5000, "int of too many digits"),
    "numpy": (lambda: np.float64(1), "float64"),
    "module": (nn.Tanh, "Tanh"),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("where", ["more", "model"])
@pytest.mark.parametrize("name", UNREADABLE)
def test_what_could_not_be_loaded_is_refused_by_name_before_anything_is_written(name, where, tmp_path, monkeypatch):
    model, opt = made()
    mq.save_checkpoint(tmp_path, model, opt, n=1)
    before = there(tmp_path)
    make, words = UNREADABLE[name]
    item = make()
    more = {"other": [0, {"entry": item}]} if where == "more" else {}
    if where == "model":
        monkeypatch.setattr(nn.Sequential, "get_extra_state", lambda self: item, raising=False)
    monkeypatch.setattr(checkpoints, "begun", lambda folder: pytest.fail("something is written"))
    place = r"more\['other'\]\[1\]\['entry'\]" if where == "more" else r"model\['_extra_state'\]"
    with pytest.raises(TypeError, match=f"a checkpoint holds .* alone.*{place}.*{words}.*leave it out"):
        mq.save_checkpoint(tmp_path, model, opt, **more)
    monkeypatch.undo()
    assert there(tmp_path) == before


def test_an_optimizer_whose_options_do_not_go_with_its_state_is_not_saved(tmp_path):
    model, opt = made()
    steps(model, opt, 2)
    mq.save_checkpoint(tmp_path, model, opt, n=1)
    with pytest.raises(TypeError, match="the optimizer is SGD"):
        mq.save_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters()))
    opt.damping = mq.MeanEigenvalue()
    with pytest.raises(ValueError, match="could not be loaded from a checkpoint again: the damping D in this state"):
        mq.save_checkpoint(tmp_path, model, opt, n=2)
    steps(model, opt, 1)
    mq.save_checkpoint(tmp_path, model, opt, n=3)
    assert mq.load_checkpoint(tmp_path, model, opt) == {"n": 3}
    opt.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="could not be loaded from a checkpoint again: lr=nan"):
        mq.save_checkpoint(tmp_path, model, opt, n=4)


def faults(folder):
    """Rank 0 cannot write, or is asked for what cannot be saved: none has saved, and the checkpoint before it stays."""
    rank = dist.get_rank()
    model, opt = made()
    mq.save_checkpoint(folder, model, opt, n=1)
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):  # of all ranks, for all begin anew then
        mq.load_checkpoint(folder / "nothing", model, opt)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(os, "fsync", lambda _: os.write(-1, b""))  # an OSError
        with pytest.raises(OSError, match=r"could not be written \(Bad file descriptor\)"):
            mq.save_checkpoint(folder, model, opt, n=2)
    with pytest.raises(TypeError, match="lists and dicts alone"):
        mq.save_checkpoint(folder, model, opt, n=nn.Tanh() if rank == 1 else 2)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(type(folder), "is_dir", lambda path: False)
        with pytest.raises(OSError, match=r"rank 1 does not see .*name a folder that all ranks share"):
            mq.save_checkpoint(folder, model, opt, n=2)
    assert mq.load_checkpoint(folder, model, opt)["n"] == 1
    mq.save_checkpoint(folder, model, opt, n=3)
    assert mq.load_checkpoint(folder, model, opt)["n"] == 3


def damaged(folder):
    """What only one rank finds out changes nothing on the others"""
    rank, (model, opt) = dist.get_rank(), made()
    steps(model, opt, 2)
    true = generators.states
    if rank == 1:
        generators.states = lambda: {**true(), "python": [3, [1, 2], None]}
    mq.save_checkpoint(folder, model, opt)
    generators.states = true
    other, optimizer = made()
    before, drawn, lam = weights(other), torch.get_rng_state(), optimizer.lam
    with pytest.raises(ValueError, match="is no checkpoint, or damaged"):
        mq.load_checkpoint(folder, other, optimizer)
    assert torch.equal(weights(other), before)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert optimizer.lam == lam


def divided(folder):
    """A tensor that no rank has whole, in a checkpoint of a model that all have"""
    model, opt = made()
    t = torch.arange(12.0).reshape(6, 2)
    parts = distribute_tensor(t, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    mq.save_checkpoint(folder, model, opt, parts=parts)
    assert torch.equal(mq.load_checkpoint(folder, model, opt)["parts"], t)


def on_two_ranks(folder):
    for test in (faults, damaged, divided):
        test(folder / test.__name__)


def test_ranks_save_and_load_together_or_not_at_all(tmp_path):
    run(on_two_ranks, 2, tmp_path)


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


# What is in the folder, and was not written by marquardt.


@pytest.mark.parametrize("inside", ["", "inside"])
def test_a_file_where_the_folder_should_be(inside, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    model, opt = made()
    with pytest.raises(OSError, match=r"notes.txt is a file where a folder should be; name another folder"):
        mq.save_checkpoint(file / inside, model, opt)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"notes.txt": "mine"}


def test_a_file_of_the_user_within_a_checkpoint_stays(tmp_path):
    model, opt = made()
    mq.save_checkpoint(tmp_path, model, opt, n=1)
    (tmp_path / "1" / "notes.txt").write_text("mine")
    shutil.copytree(tmp_path / "1", tmp_path / "5")  # to keep it: the mark is that of another number
    kept = there(tmp_path / "5")
    for n in range(2, 4):
        mq.save_checkpoint(tmp_path, model, opt, n=n)
        assert mq.load_checkpoint(tmp_path, model, opt) == {"n": n}
    assert (tmp_path / "1" / "notes.txt").read_text() == "mine"
    assert there(tmp_path / "5") == kept


def test_two_processes_may_save_in_one_folder(tmp_path, monkeypatch):
    """The second one begins and ends while the first one writes."""
    model, opt = made()
    true, under_way = os.fsync, []

    def fsync(number):
        true(number)
        if not under_way:
            under_way.append(1)
            mq.save_checkpoint(tmp_path, model, opt, n=2)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        mq.save_checkpoint(tmp_path, model, opt, n=1)
    assert mq.load_checkpoint(tmp_path, model, opt)["n"] in (1, 2)
    mq.save_checkpoint(tmp_path, model, opt, n=3)
    assert len(list(tmp_path.iterdir())) == 1
    assert mq.load_checkpoint(tmp_path, model, opt) == {"n": 3}


def test_links_are_not_followed(tmp_path):
    model, opt = made()
    for name in ("run", "other"):
        mq.save_checkpoint(tmp_path / name, model, opt)
    (tmp_path / "run" / "7").symlink_to(tmp_path / "other" / "1")
    with pytest.raises(ValueError, match="7 is a symbolic link: a checkpoint is read from its own folder alone; move"):
        mq.load_checkpoint(tmp_path / "run", model, opt)
    with pytest.raises(ValueError, match="7 is a symbolic link"):  # before hours of a run that could not be read
        mq.save_checkpoint(tmp_path / "run", model, opt)
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir()) == ["1", "7"]
    (tmp_path / "run" / "7").unlink()
    for name in ("contents.pt", "tensors-0.pt"):
        path = tmp_path / "run" / "1" / name
        path.rename(tmp_path / name)
        path.symlink_to(tmp_path / name)
        with pytest.raises(ValueError, match=f"{name} is a symbolic link"):
            mq.load_checkpoint(tmp_path / "run", model, opt)
        (tmp_path / name).replace(path)


@pytest.mark.parametrize("name", ["contents.pt", "tensors-0.pt", "__0_0.distcp", ".metadata", "__0.metadata"])
@pytest.mark.parametrize("version", [1, 2])
def test_nothing_in_a_checkpoint_runs(name, version, tmp_path):
    """Neither a pickle in the place of a file, nor one beside the files."""
    model, opt = made()
    folder, canary = tmp_path / "run", tmp_path / "canary"
    save = old_version if version == 1 else mq.save_checkpoint
    save(folder, model, opt)
    (folder / "1" / name).write_bytes(pickle.dumps(Canary(canary)))
    before = weights(model)
    read = name in (("contents.pt", "__0_0.distcp", ".metadata"), ("contents.pt", "tensors-0.pt"))[version - 1]
    with pytest.raises(ValueError, match=re.escape(str(folder / "1"))) if read else nullcontext():
        mq.load_checkpoint(folder, model, opt)
    assert not canary.exists()
    assert torch.equal(weights(model), before)


# Folders of the first version, as torch.distributed.checkpoint wrote them; tests/test_old_files.py goes on from one.


def old_version(folder, model, opt):
    first_version(folder / "1", model, opt)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("relative_path", name) for name in ("../{}", "/{}", "a/../../{}", "..", "", "__0_0.distcp/../__0_0.distcp")),
        *((field, n) for field in ("length", "offset") for n in (2**40, 2**64, 10**400, -1, 1.5, None)),
    ],
)
def test_a_forged_place_in_the_metadata_is_refused(field, value, tmp_path):
    model, opt = made()
    old_version(tmp_path / "run", model, opt)
    part = tmp_path / "run" / "1"
    shutil.copy(part / "__0_0.distcp", tmp_path / "__0_0.distcp")
    metadata = pickle.loads((part / ".metadata").read_bytes())
    if isinstance(value, str):
        value = value.format(f"{tmp_path}/__0_0.distcp" if value.startswith("/") else "../__0_0.distcp")
    for place in metadata.storage_data.values():
        setattr(place, field, value)
    (part / ".metadata").write_bytes(pickle.dumps(metadata))
    words = "which is none of a checkpoint" if field == "relative_path" else "is no checkpoint, or damaged"
    with pytest.raises(ValueError, match=words):
        mq.load_checkpoint(tmp_path / "run", model, opt)


@pytest.mark.parametrize("length", [2**40, 2**64 - 1])
@pytest.mark.parametrize("name", ["BINBYTES8", "BINUNICODE8", "BYTEARRAY8", "FRAME"])
def test_a_forged_length_in_the_metadata_takes_no_memory(name, length, tmp_path):
    model, opt = made()
    old_version(tmp_path, model, opt)
    forged = getattr(pickle, name) + length.to_bytes(8, "little")
    (tmp_path / "1" / ".metadata").write_bytes(pickle.PROTO + b"\x04" + forged + b"x.")
    with pytest.raises(ValueError, match=rf"{re.escape(str(tmp_path / '1'))} is no checkpoint, or damaged"):
        mq.load_checkpoint(tmp_path, model, opt)


# Damage; tests/fuzz/checkpoints.py has more of it.


class Wary(nn.Linear):
    """Takes its bias, and then raises"""

    def set_extra_state(self, state):
        raise RuntimeError("not today")

    def get_extra_state(self):
        return 1


def test_a_model_that_refuses_half_way_stays_as_it_was(tmp_path, monkeypatch):
    def wary(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(1, 4), Wary(4, 1)).double()
        return model, mq.LM(model, "mse")

    mq.save_checkpoint(tmp_path, *wary(0))
    model, opt = wary(1)
    before, state = weights(model), torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr(Wary, "set_extra_state", lambda self, state: None)
        mq.load_checkpoint(tmp_path, *wary(1))
    torch.set_rng_state(state)
    with pytest.raises((ValueError, RuntimeError), match="not today"):
        mq.load_checkpoint(tmp_path, model, opt)
    assert torch.equal(weights(model), before)
    assert torch.equal(torch.get_rng_state(), state)


def nested():
    item = [1]
    for _ in range(60):
        item = [item, item]
    return item


FORGED = {
    "larger": (
        lambda more: more["curve"].update(shape=[10**13]),
        r"40,000,000,\d+,\d+ bytes are to be in tensors-0.pt",
    ),
    "nested": (lambda more: more.update(item=nested()), "it holds the same lists in each other"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_file_takes_no_more_memory_than_its_size_explains(name, tmp_path):
    """Under a checksum that is right"""
    model, opt = made()
    mq.save_checkpoint(tmp_path, model, opt, curve=torch.ones(3))
    content = torch.load(tmp_path / "1" / "contents.pt", weights_only=True)
    change, words = FORGED[name]
    change(content["content"]["more"])
    torch.save(content, archive := io.BytesIO())
    (tmp_path / "1" / "contents.pt").write_bytes(sealed(archive.getvalue()))
    with pytest.raises(ValueError, match=words):
        mq.load_checkpoint(tmp_path, model, opt)


# A disk that is full.


@contextmanager
def room(size):
    """No file of more bytes than this can be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_by_name_and_leaves_the_last_checkpoint(tmp_path):
    model, opt = made()
    mq.save_checkpoint(tmp_path / "run", model, opt, n=1)
    for size in (10, 3000, 9000):
        with room(size), pytest.raises(OSError, match=r"run/2/.* could not be written \(File too large\): free some"):
            mq.save_checkpoint(tmp_path / "run", model, opt, n=2)
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["1"]
        assert mq.load_checkpoint(tmp_path / "run", model, opt) == {"n": 1}
        with room(size), pytest.raises(OSError, match=r"fit.pt could not be written \(File too large\): free some"):
            mq.fit(net(), noisy_sine(), "mse", steps=2, checkpoint=tmp_path / "fit.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
