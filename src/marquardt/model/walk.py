"""The modules of a model and what they hold, in a fraction of the time of `Module.modules` and `Module.parameters`,
which make names: every step asks several times, and a GPU waits."""

from __future__ import annotations

from torch import Tensor, nn


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


def held(model: nn.Module) -> list[Tensor]:
    """Its parameters and buffers, those of several modules more than once."""
    return [t for m in submodules(model) for own in (m._parameters, m._buffers) for t in own.values() if t is not None]
