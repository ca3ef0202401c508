"""The modules of a model and what they hold, in a fraction of the time of `Module.modules` and `Module.parameters`,
which make names: every step asks several times, and a GPU waits."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

EVERYWHERE = [
    torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks, torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
]  # fmt: skip


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


def hooks(model: nn.Module) -> list[int]:
    """Of its modules and parameters, and of all modules there are: torch gives every hook a number."""
    found = [number for some in EVERYWHERE for number in some]
    for m in submodules(model):
        if m._forward_pre_hooks or m._forward_hooks or m._backward_hooks or m._backward_pre_hooks:
            found += [*m._forward_pre_hooks, *m._forward_hooks, *m._backward_hooks, *m._backward_pre_hooks]
        for p in m._parameters.values():
            if p is not None and p._backward_hooks:
                found += p._backward_hooks
    return found


def held(model: nn.Module) -> list[Tensor]:
    """Its parameters and buffers, those of several modules more than once."""
    return [t for m in submodules(model) for own in (m._parameters, m._buffers) for t in own.values() if t is not None]
