"""A job that goes on from its last checkpoint: started again by torchrun, or on another number of ranks."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import marquardt as mq
from marquardt import checkpoints
from marquardt.training import checkpoint
from support import restarted_program
from support.command_line import environment
from support.fits import net, noisy_sine, weights
from support.ranks import run

TESTS = Path(restarted_program.__file__).parents[1]


def torchrun(*arguments):
    place = environment()
    place["PYTHONPATH"] += f":{TESTS}"
    place["GLOO_SOCKET_IFNAME"] = min(socket.if_nameindex())[1]  # loopback: needs neither network nor names
    # Without it ranks that are started again find the addresses of those before them (pytorch#135712).
    place["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=place, timeout=300)


def undisturbed(folder):
    found = restarted_program.fitted(folder)
    return weights(found.model), found.loss, found.history["loss"]


def test_torchrun_starts_a_killed_job_again_to_the_same_weights(tmp_path):
    done = torchrun(
        "--nproc-per-node", 2, "--max-restarts", 1, restarted_program.__file__, tmp_path / "run", 6, tmp_path / "result"
    )
    assert done.returncode == 0, done.stderr
    want = run(undisturbed, 2, tmp_path / "other")
    for rank, (theta, loss, losses) in enumerate(want):
        found, plan, found_loss, found_losses = torch.load(tmp_path / f"result.{rank}")
        assert "goes on after step 5" in plan
        assert torch.equal(found, theta)
        assert (found_loss, found_losses) == (loss, losses)
    assert checkpoints.latest(tmp_path / "run").name == "9"


# On another number of ranks.

KINDS = {
    "whole": {"validation": 0.2},
    "mini": {"batch_size": 12, "validation": 0.2},
    "evidence": {"weight_decay": mq.Evidence(every=2)},
}


def fitted(folder, steps, kinds=tuple(KINDS)):
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "SECONDS", 0.0)  # a checkpoint after every step
        patch.setattr(checkpoint, "SHARE", 0.0)
        for kind in kinds:
            fit = mq.fit(
                net(), noisy_sine(41), "mse", steps=steps, patience=None, checkpoint=folder / kind,
                curvature=mq.Dense(), damping=mq.MaxDiagonal(), **KINDS[kind],
            )  # fmt: skip
            found[kind] = torch.cat([weights(fit.model), torch.tensor(fit.history["loss"])]), fit.plan
    return found


def refused(folder):
    """Another model, and a checkpoint of another kind, by all ranks"""
    said = []
    for model, where in ((net(hidden=9), "whole"), (net(), "loop")):
        try:
            mq.fit(model, noisy_sine(41), "mse", checkpoint=folder / where, curvature=mq.Dense())
        except ValueError as error:
            said.append(str(error))
    return said


def made(folder):
    found = fitted(folder, 4)
    model = net()
    mq.save_checkpoint(folder / "loop", model, mq.LM(model, "mse", curvature=mq.Dense()))
    return found, refused(folder)


def test_a_fit_of_two_ranks_goes_on_on_one_and_on_four(tmp_path):
    want = fitted(tmp_path / "one", 8)
    assert all((tmp_path / "one" / kind).is_file() for kind in KINDS)
    for _, said in run(made, 2, tmp_path / "two"):
        assert "is of another model: parameters is {'0.weight': [9, 1]" in said[0]
        assert "is no checkpoint of mq.fit of this version" in said[1]
    for ranks in (1, 4):
        folder = tmp_path / str(ranks)
        shutil.copytree(tmp_path / "two", folder)
        for found in [fitted(folder, 8)] if ranks == 1 else run(fitted, ranks, folder, 8):
            for kind, (theta, plan) in found.items():
                assert "goes on after step 4" in plan
                torch.testing.assert_close(theta, want[kind][0], rtol=1e-10, atol=1e-10, msg=f"{kind}, {ranks}")
        assert {checkpoints.latest(folder / kind).name for kind in KINDS} == {"8"}


def started_by_one(folder):
    return fitted(folder, 8, ["mini"])["mini"], dist.get_rank()


def test_a_file_of_one_process_is_gone_on_with_by_two_ranks(tmp_path):
    want = fitted(tmp_path / "whole", 8, ["mini"])["mini"][0]
    fitted(tmp_path / "part", 4, ["mini"])
    for (theta, plan), _ in run(started_by_one, 2, tmp_path / "part"):
        assert "goes on after step 4" in plan
        torch.testing.assert_close(theta, want, rtol=1e-10, atol=1e-10)
    assert (tmp_path / "part" / "mini").is_file()
    again = fitted(tmp_path / "part", 8, ["mini"])["mini"]
    assert "goes on after step 8" in again[1]


@pytest.mark.parametrize("name", ["RANK", "TORCHELASTIC_RUN_ID"])
def test_torchrun_without_a_process_group_is_noticed(name, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv(name, raising=False)
    if name == "TORCHELASTIC_RUN_ID":
        mq.fit(net(), noisy_sine(), "mse", steps=1)
    else:
        with pytest.raises(RuntimeError, match=r"init_process_group\(\) first, or pass group=False"):
            mq.fit(net(), noisy_sine(), "mse", steps=1)
    mq.fit(net(), noisy_sine(), "mse", steps=1, group=False)
