"""Running statistics of normalisation layers: those that belong to other weights are found anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from ..surroundings import back_afterwards
from .anatomy import Anatomy, Norm, rng_state, set_rng_state, submodules
from .batch import Batch, forward


def tracking(model: nn.Module) -> list[Norm]:
    """The layers that keep statistics."""
    return Anatomy(model).tracking


def counting(model: nn.Module) -> list[Norm]:
    """Those in train mode: a forward pass changes their statistics."""
    return [m for m in tracking(model) if m.training]


@dataclass(frozen=True)
class Seen:
    """What the layers that keep statistics have seen last."""

    inputs: tuple[Any, ...] = ()  # of batches,
    training: tuple[nn.Module, ...] = ()  # and the modules that were in train mode then

    @staticmethod
    def of(form: Anatomy, batches: Iterable[Batch]) -> Seen:
        """The first of these batches, if a layer of this model counts it"""
        if not any([layer.training for layer in form.tracking]):
            return NOTHING
        return Seen(tuple(b.inputs for b in islice(batches, 1)), tuple(m for m in form.modules if m.training))


NOTHING = Seen()


@contextmanager
def estimated(model: nn.Module, seen: Seen) -> Iterator[None]:
    """The statistics of what was seen, at the weights that the model has now; afterwards those from before.

    As torch.optim.swa_utils.update_bn has it: all batches weigh the same, in the modes of training.
    """
    kept = [(layer, {k: b.clone() for k, b in layer.named_buffers(recurse=False)}) for layer in tracking(model)]

    def back() -> None:
        with torch.no_grad():
            for layer, buffers in kept:
                for key, b in layer.named_buffers(recurse=False):
                    b.copy_(buffers[key])

    with back_afterwards(back):
        if seen.inputs:
            _estimate(model, seen)
        yield


def _estimate(model: nn.Module, seen: Seen) -> None:
    there = {id(m) for m in seen.training}
    modes = [(m, m.training) for m in submodules(model)]
    layers = [m for m in tracking(model) if id(m) in there]
    momenta = [layer.momentum for layer in layers]

    def back() -> None:
        for m, mode in modes:
            m.training = mode
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum

    with back_afterwards(back):
        for m, _ in modes:
            m.training = id(m) in there
        for layer in layers:
            layer.reset_running_stats()
        _pass(model, seen.inputs, layers)


def _pass(model: nn.Module, inputs: Iterable[Any], layers: list[Norm]) -> None:
    """Forward passes that leave random numbers, and the buffers of all other modules, as they were."""
    device = next(model.parameters()).device
    before, own = torch.get_rng_state(), rng_state(device)
    others = {id(b) for layer in layers for b in layer.buffers()}
    kept = [(b, b.clone()) for b in model.buffers() if id(b) not in others]

    def back() -> None:
        with torch.no_grad():
            for b, value in kept:
                b.copy_(value)
        torch.set_rng_state(before)
        if own is not None:
            set_rng_state(device, own)

    with back_afterwards(back), torch.no_grad():
        for i, batch in enumerate(inputs):
            for layer in layers:  # the mean of all batches: None has it, which InstanceNorm does not know
                layer.momentum = None if isinstance(layer, nn.modules.batchnorm._BatchNorm) else 1 / (i + 1)
            forward(model, batch)
