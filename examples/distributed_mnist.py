"""Handwritten digits on several processes: every rank has a part of each batch, and all take the step of the whole.

torchrun --standalone --nproc-per-node 2 examples/distributed_mnist.py
python examples/distributed_mnist.py            # one process: the same steps
python examples/distributed_mnist.py --steps 20 --checkpoint run

With --checkpoint the same command goes on after the last step that was saved, also on another number of ranks; torchrun
--max-restarts 3 starts a job again whose ranks have failed.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import marquardt as mq
from marquardt.paper import data

BATCH, EVERY = 1000, 10  # samples of a step, on all ranks together; steps between two looks at the test set


def main(steps: int, checkpoint: Path | None = None, **options) -> float:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    digits = data.find("mnist-5k")
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(49, 20), nn.Tanh(), nn.Linear(20, 10))
    opt = mq.LM(model, "cross_entropy", **options)
    done = 0 if checkpoint is None else resumed(checkpoint, model, opt)
    for step in range(done + 1, steps + 1):
        # Every rank draws the same batch, and takes its part of it.
        batch = torch.randint(len(digits.train_labels), (BATCH,), generator=torch.Generator().manual_seed(step))
        mine = batch.tensor_split(ranks)[rank]
        result = opt.step(digits.train_images[mine], digits.train_labels[mine])
        if step % EVERY == 0 or step == steps:
            if checkpoint is not None:
                mq.save_checkpoint(checkpoint, model, opt, steps=step)
            if rank == 0:
                print(f"step {step}  loss {result.loss:.4f}  test accuracy {accuracy(model, opt, digits):.1%}")
    return accuracy(model, opt, digits)


def resumed(checkpoint: Path, model: nn.Module, opt: mq.LM) -> int:
    """The steps that were taken before"""
    try:
        return mq.load_checkpoint(checkpoint, model, opt)["steps"]
    except FileNotFoundError:
        return 0


def accuracy(model: nn.Module, opt: mq.LM, digits: data.Digits) -> float:
    with torch.no_grad(), opt.averaged():
        return float((model(digits.test_images).argmax(1) == digits.test_labels).float().mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--checkpoint", type=Path, help="a folder, from which the same command goes on")
    chosen = parser.parse_args()
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group("gloo")
    main(chosen.steps, chosen.checkpoint)
    if dist.is_initialized():
        dist.destroy_process_group()
