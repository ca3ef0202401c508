"""Running statistics of BatchNorm layers: those that belong to other weights are found anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .batch import forward
from .randomness import rng_state, set_rng_state
from .walk import submodules


def counting(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The layers in train mode that keep statistics."""
    kinds = nn.modules.batchnorm._BatchNorm
    return [m for m in submodules(model) if isinstance(m, kinds) and m.training and m.track_running_stats]


@contextmanager
def estimated(model: nn.Module, inputs: list[Any]) -> Iterator[None]:
    """The statistics of these batches at the weights that the model has now; afterwards those from before.

    As torch.optim.swa_utils.update_bn has it: all batches weigh the same, in train mode.
    """
    layers = counting(model) if inputs else []
    kept = [({k: b.clone() for k, b in layer.named_buffers()}, layer.momentum) for layer in layers]
    try:
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # the mean of all batches
        _pass(model, inputs if layers else [])
        for layer, (_, momentum) in zip(layers, kept, strict=True):
            layer.momentum = momentum
        yield
    finally:
        for layer, (buffers, momentum) in zip(layers, kept, strict=True):
            layer.momentum = momentum
            with torch.no_grad():
                for key, b in layer.named_buffers():
                    b.copy_(buffers[key])


def _pass(model: nn.Module, inputs: list[Any]) -> None:
    """Forward passes that leave random numbers as they were."""
    device = next(model.parameters()).device
    before, own = torch.get_rng_state(), rng_state(device)
    others = {id(b) for layer in counting(model) for b in layer.buffers()}
    kept = [(b, b.clone()) for b in model.buffers() if id(b) not in others]
    try:
        with torch.no_grad():
            for batch in inputs:
                forward(model, batch)
            for b, value in kept:
                b.copy_(value)
    finally:
        torch.set_rng_state(before)
        if own is not None:
            set_rng_state(device, own)
