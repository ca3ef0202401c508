"""The model with other tensors in the place of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..surroundings import back_afterwards


@contextmanager
def substituted(model: nn.Module, others: Mapping[int, Tensor]) -> Iterator[None]:
    """Other tensors in the place of some parameters and buffers, by the id of each.

    By identity and not by name as torch.func.functional_call has it: that restores a module with two names wrongly.
    """
    kept: list[tuple[dict[str, Any], str, Any]] = []

    def back() -> None:
        for place, name, value in kept:
            place[name] = value

    with back_afterwards(back):
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise RuntimeError("the tensors of a scripted module cannot be replaced")
            if isinstance(module, nn.RNNBase):  # makes itself new lists of its weights when it is called
                own = vars(module)
                kept += [(own, name, own[name]) for name in ("_flat_weights", "_flat_weight_refs") if name in own]
            places: list[dict[str, Any]] = [module._parameters, module._buffers]
            for tensors in places:
                for name, t in tensors.items():
                    if id(t) in others:
                        kept.append((tensors, name, t))
                        tensors[name] = others[id(t)]
        yield


def call_with(model: nn.Module, others: Mapping[int, Tensor]) -> Callable[..., Any]:
    """The model as a function, with these tensors in it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with substituted(model, others):
            return model(*args, **kwargs)

    return call
