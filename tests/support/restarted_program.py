"""A fit of several ranks, one of which is killed: torchrun … restarted_program.py FOLDER STEP RESULT

Without STEP nobody is. On the first attempt alone: what torchrun has started again goes on from the checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import marquardt as mq
from marquardt.training import checkpoint
from support.fits import mini, weights


def fitted(folder: str, step: int | None = None) -> mq.Fit:
    """On mini-batches, with random numbers in the model that differ from rank to rank"""
    checkpoint.SECONDS = checkpoint.SHARE = 0.0  # after every step

    def kill(running: mq.training.Running) -> None:
        if running.step.step == step and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    model, arguments = mini()
    torch.manual_seed(dist.get_rank())
    parts = {"curvature": mq.Dense(), "damping": mq.MaxDiagonal()}
    return mq.fit(model, loss="mse", checkpoint=folder, callbacks=kill, **{**arguments, **parts})


def main(folder: str, step: str, result: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    found = fitted(folder, int(step))
    torch.save([weights(found.model), found.plan, found.loss, found.history.columns()["loss"]],
               f"{result}.{dist.get_rank()}")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
