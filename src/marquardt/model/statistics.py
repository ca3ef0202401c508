"""Running statistics of normalisation layers: they are estimated again if they belong to other weights."""

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
    """The layers that keep running statistics."""
    return Anatomy(model).tracking


def counting(model: nn.Module) -> list[Norm]:
    """The layers whose statistics change in a forward pass, because they are in train mode."""
    return [m for m in tracking(model) if m.training]


@dataclass(frozen=True)
class Seen:
    """The last batches that the layers with running statistics have seen."""

    inputs: tuple[Any, ...] = ()  # of these batches
    training: tuple[nn.Module, ...] = ()  # the modules that were in train mode

    @staticmethod
    def of(form: Anatomy, batches: Iterable[Batch]) -> Seen:
        """The first of these batches, if a layer of this model takes it into its statistics"""
        if not any([layer.training for layer in form.tracking]):
            return NOTHING
        return Seen(tuple(b.inputs for b in islice(batches, 1)), tuple(m for m in form.modules if m.training))


NOTHING = Seen()


@contextmanager
def estimated(model: nn.Module, seen: Seen) -> Iterator[None]:
    """The statistics of the batches in `seen` at the present weights of the model; afterwards the old ones are
    restored.

    As in torch.optim.swa_utils.update_bn, all batches have the same weight, in the modes of training.
    """
    before = [(layer, {k: b.clone() for k, b in layer.named_buffers(recurse=False)}) for layer in tracking(model)]

    def back() -> None:
        with torch.no_grad():
            for layer, buffers in before:
                for key, b in layer.named_buffers(recurse=False):
                    b.copy_(buffers[key])

    with back_afterwards(back):
        if seen.inputs:
            _estimate(model, seen)
        yield


def _estimate(model: nn.Module, seen: Seen) -> None:
    """By forward passes that leave random generators, modes and the buffers of other modules as they were."""
    device, there = next(model.parameters()).device, {id(m) for m in seen.training}
    layers = [m for m in tracking(model) if id(m) in there]
    modes, momenta = [(m, m.training) for m in submodules(model)], [(layer, layer.momentum) for layer in layers]
    counted = {id(b) for layer in layers for b in layer.buffers()}
    others = [(b, b.clone()) for b in model.buffers() if id(b) not in counted]
    drawn, own = torch.get_rng_state(), rng_state(device)

    def back() -> None:
        for m, mode in modes:
            m.training = mode
        for layer, momentum in momenta:
            layer.momentum = momentum
        with torch.no_grad():
            for b, value in others:
                b.copy_(value)
        torch.set_rng_state(drawn)
        if own is not None:
            set_rng_state(device, own)

    with back_afterwards(back), torch.no_grad():
        for m, _ in modes:
            m.training = id(m) in there
        for layer in layers:
            layer.reset_running_stats()
        for i, batch in enumerate(seen.inputs):
            for layer in layers:  # a mean over all batches: momentum=None, which InstanceNorm does not support
                layer.momentum = None if isinstance(layer, nn.modules.batchnorm._BatchNorm) else 1 / (i + 1)
            forward(model, batch)
