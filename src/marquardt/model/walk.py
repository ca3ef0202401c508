"""The modules of a model and what they hold, read in one loop that calls nothing: every step asks, and a GPU waits."""

from __future__ import annotations

from functools import cached_property
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.nn.parameter import is_lazy

BatchNorm = nn.modules.batchnorm._BatchNorm
Norm = nn.modules.batchnorm._NormBase  # BatchNorm, SyncBatchNorm and InstanceNorm


class Anatomy:
    """A model at one moment: its modules, what they hold and how they are called. While the same object is found again,
    none of this has changed, and what was made of it still holds."""

    def __init__(self, model: nn.Module) -> None:
        self.modules, self.tensors = [model], list[Tensor]()  # each once; those of several modules more than once
        self.forward_hooks: list[int] = [*every_module._global_forward_pre_hooks, *every_module._global_forward_hooks]
        self.backward_hooks: list[int] = [
            *every_module._global_backward_pre_hooks, *every_module._global_backward_hooks
        ]  # fmt: skip
        modules, tensors, forward, backward = self.modules, self.tensors, self.forward_hooks, self.backward_hooks
        objects: list[Any] = []  # which they are,
        values: list[Any] = []  # and what they are like
        seen = {id(model): True}
        for m in modules:  # which grows on the way
            own = m.__dict__
            objects += (m, m.__class__.forward, own["forward"] if "forward" in own else None)
            values += (m.training,)
            children, parameters, buffers = m._modules, m._parameters, m._buffers
            for name in children:
                child = children[name]
                if child is not None and (number := id(child)) not in seen:
                    seen[number] = True
                    modules += (child,)
            forward += m._forward_pre_hooks
            forward += m._forward_hooks
            backward += m._backward_pre_hooks
            backward += m._backward_hooks
            for name in parameters:
                p = parameters[name]
                objects += (p,)
                if p is not None:
                    tensors += (p,)
                    known = p.__class__ is nn.Parameter or not is_lazy(p)
                    values += (p.requires_grad, p.dtype, p.device, p.shape if known else None)
                    if p._backward_hooks:
                        backward += p._backward_hooks
            for name in buffers:
                b = buffers[name]
                objects += (b,)
                if b is not None:
                    tensors += (b,)
        self._objects, self._values = objects, values

    def same(self, other: Anatomy) -> bool:
        """Whether nothing has changed"""
        return (
            self._values == other._values
            and self.forward_hooks == other.forward_hooks
            and self.backward_hooks == other.backward_hooks
            and len(self._objects) == len(other._objects)
            and all(map(is_, self._objects, other._objects))
        )

    @cached_property
    def modes(self) -> tuple[object, ...]:
        """What its modules do, and whether in training. A model may take other ways, and draw other numbers, in another
        mode."""
        return tuple((m.training, type(m).forward) for m in self.modules)

    @cached_property
    def buffered(self) -> list[nn.Module]:
        """Modules that have buffers"""
        return [m for m in self.modules if m._buffers]

    @cached_property
    def coupled(self) -> str | None:
        """The name of a layer that makes the samples of a batch depend on each other."""
        found = {id(m) for m in self.modules if isinstance(m, BatchNorm) and _couples(m)}
        return next((name for name, m in self.modules[0].named_modules() if id(m) in found), None) if found else None

    @cached_property
    def tracking(self) -> list[Norm]:
        """The layers that keep statistics."""
        return [m for m in self.modules if isinstance(m, Norm) and m.running_mean is not None]

    @cached_property
    def recurrent(self) -> bool:
        """Whether there are recurrent layers,"""
        return any(isinstance(m, nn.RNNBase) for m in self.modules)

    @cached_property
    def has_lstm(self) -> bool:
        """and LSTMs among them"""
        return any(isinstance(m, nn.LSTM) for m in self.modules)


def _couples(layer: nn.Module) -> bool:
    return layer.training or getattr(layer, "running_mean", None) is None


def anatomy(model: nn.Module, last: Anatomy | None = None) -> Anatomy:
    """That of now; the last one, if nothing has changed since."""
    found = Anatomy(model)
    return last if last is not None and found.same(last) else found


def submodules(model: nn.Module) -> list[nn.Module]:
    """The model and all modules in it, each once."""
    return Anatomy(model).modules


def hooks(model: nn.Module) -> tuple[list[int], list[int]]:
    """Those that forward passes call and those that backward passes call, of its modules and parameters, and of all
    modules there are: torch has a number for every hook, and none comes twice."""
    found = Anatomy(model)
    return found.forward_hooks, found.backward_hooks


def held(model: nn.Module) -> list[Tensor]:
    """Its parameters and buffers, those of several modules more than once."""
    return Anatomy(model).tensors
