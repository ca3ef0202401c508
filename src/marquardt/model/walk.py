"""The modules of a model and what they hold, in a fraction of the time of `Module.modules` and `Module.parameters`,
which make names: every step asks several times, and a GPU waits."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules import module as every_module


def submodules(model: nn.Module) -> list[nn.Module]:
    """The model and all modules in it, each once."""
    found = [model]
    seen = {id(model)}
    for module in found:  # which grows on the way
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def hooks(model: nn.Module) -> tuple[list[int], list[int]]:
    """Those that forward passes call and those that backward passes call, of its modules and parameters, and of all
    modules there are: torch has a number for every hook, and none comes twice."""
    forward = [*every_module._global_forward_pre_hooks, *every_module._global_forward_hooks]
    backward = [*every_module._global_backward_pre_hooks, *every_module._global_backward_hooks]
    for m in submodules(model):
        if m._forward_pre_hooks or m._forward_hooks:
            forward += [*m._forward_pre_hooks, *m._forward_hooks]
        if m._backward_pre_hooks or m._backward_hooks:
            backward += [*m._backward_pre_hooks, *m._backward_hooks]
        for p in m._parameters.values():
            if p is not None and p._backward_hooks:
                backward += p._backward_hooks
    return forward, backward


def held(model: nn.Module) -> list[Tensor]:
    """Its parameters and buffers, those of several modules more than once."""
    return [t for m in submodules(model) for own in (m._parameters, m._buffers) for t in own.values() if t is not None]
