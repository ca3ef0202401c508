"""A model at one moment: its modules with their contents, and the randomness and state of a forward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import is_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..deferred import current, ungraded
from ..surroundings import back_afterwards

BatchNorm = nn.modules.batchnorm._BatchNorm
Norm = nn.modules.batchnorm._NormBase  # BatchNorm, SyncBatchNorm and InstanceNorm


class Anatomy:
    """A model at one moment: its modules, their contents and how they are called. As long as the same object is found
    again, nothing of this has changed, and everything derived from it is still valid."""

    def __init__(self, model: nn.Module) -> None:
        self.modules, self.tensors = [model], list[Tensor]()  # each module once; shared tensors repeatedly
        self.forward_hooks: list[int] = [*every_module._global_forward_pre_hooks, *every_module._global_forward_hooks]
        self.backward_hooks: list[int] = [
            *every_module._global_backward_pre_hooks, *every_module._global_backward_hooks
        ]  # fmt: skip
        modules, tensors, forward, backward = self.modules, self.tensors, self.forward_hooks, self.backward_hooks
        objects: list[Any] = []  # compared by identity
        values: list[Any] = []  # compared by value
        numbers = {id(model): True}
        for m in modules:  # the list grows during the loop
            own = m.__dict__
            objects += (m, m.__class__.forward, own["forward"] if "forward" in own else None)
            values += (m.training,)
            children, parameters, buffers = m._modules, m._parameters, m._buffers
            for name in children:
                child = children[name]
                if child is not None and (number := id(child)) not in numbers:
                    numbers[number] = True
                    modules += (child,)
            if m._forward_pre_hooks or m._forward_hooks:  # to go through dicts that are empty takes longer
                forward += (*m._forward_pre_hooks, *m._forward_hooks)
            if m._backward_pre_hooks or m._backward_hooks:
                backward += (*m._backward_pre_hooks, *m._backward_hooks)
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
        """The forward function and the training mode of every module. In another mode a model may take other branches,
        and draw other random numbers."""
        return tuple((m.training, type(m).forward) for m in self.modules)

    @cached_property
    def buffered(self) -> list[nn.Module]:
        """Modules that have buffers"""
        return [m for m in self.modules if m._buffers]

    @cached_property
    def coupled(self) -> str | None:
        """The name of a layer that makes the samples of a batch depend on each other, if there is one."""
        couples = {id(m) for m in self.modules if isinstance(m, BatchNorm) and _couples(m)}
        names = (name for name, m in self.modules[0].named_modules() if id(m) in couples)
        return next(names, None) if couples else None

    @cached_property
    def tracking(self) -> list[Norm]:
        """The layers that keep running statistics."""
        return [m for m in self.modules if isinstance(m, Norm) and m.running_mean is not None]

    @cached_property
    def recurrent(self) -> bool:
        """Whether there are recurrent layers"""
        return any(isinstance(m, nn.RNNBase) for m in self.modules)

    @cached_property
    def has_lstm(self) -> bool:
        """Whether there are LSTMs"""
        return any(isinstance(m, nn.LSTM) for m in self.modules)


def _couples(layer: nn.Module) -> bool:
    return layer.training or getattr(layer, "running_mean", None) is None


def anatomy(model: nn.Module, last: Anatomy | None = None) -> Anatomy:
    """The present anatomy; the same object as the last one, if nothing has changed since."""
    now = Anatomy(model)
    return last if last is not None and now.same(last) else now


def submodules(model: nn.Module) -> list[nn.Module]:
    """The model and all modules in it, each once."""
    return Anatomy(model).modules


def hooks(model: nn.Module) -> tuple[list[int], list[int]]:
    """The hooks that forward passes call and those that backward passes call, of the modules and parameters of the
    model and of torch as a whole. torch numbers all hooks, and no number is used twice."""
    now = Anatomy(model)
    return now.forward_hooks, now.backward_hooks


def held(model: nn.Module) -> list[Tensor]:
    """The parameters and buffers of the model; those of several modules more than once."""
    return Anatomy(model).tensors


# --- The randomness and state of a forward pass, and how a pass is repeated exactly: random number generators, buffers,
# and the slopes of RReLU.


class Draws(TorchDispatchMode):
    """Notices operations that draw random numbers."""

    drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.drew = self.drew or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


@dataclass
class Chance:
    """Whether the model draws random numbers. If not, the generators are not restored, since other threads may use
    them."""

    drawn: bool = False
    untold: bool = False  # during a forward pass, before it is known


class Moment:
    """The state that a forward pass changes: random number generators and buffers. `form` is the present anatomy of the
    model, if it is known."""

    def __init__(self, model: nn.Module, device: torch.device, chance: Chance, form: Anatomy | None = None) -> None:
        self.buffers: list[Any] = []
        self.form = form = anatomy(model) if form is None else form
        self.device, self.chance = device, chance
        self.cpu: Tensor | None = None
        self.cuda: Tensor | None = None
        if current.tape is not None:  # a recorded model changes no buffers, and the graph handles the generator
            return
        # By name: a forward pass may replace a buffer by another tensor, or set one that was None.
        self.buffers = [
            (module, {name: (b, None if b is None else b.detach().clone()) for name, b in module._buffers.items()})
            for module in form.buffered
        ]
        self.cpu = torch.default_generator.get_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def drew_since(self) -> bool:
        """Whether random numbers have been drawn since this moment, by the model or another thread."""
        if self.cpu is None:
            return False
        if self.cuda is not None and not torch.equal(self.cuda, torch.cuda.get_rng_state(self.device)):
            return True
        return not torch.equal(self.cpu, torch.default_generator.get_state())

    def same_buffers(self, other: Moment) -> bool:
        """Whether the buffers are the same tensors with the same values as at another moment."""
        here, there = (
            [(id(b), value) for _, saved in moment.buffers for b, value in saved.values() if b is not None]
            for moment in (self, other)
        )
        if [key for key, _ in here] != [key for key, _ in there]:
            return False
        pairs = [(a, b) for (_, a), (_, b) in zip(here, there, strict=True)]
        if any(a.shape != b.shape or torch.strided not in (a.layout, b.layout) for a, b in pairs):
            return False
        return not pairs or bool(torch.stack([(a == b).all().to(self.device) for a, b in pairs]).all())

    def changed(self, other: Moment, model: nn.Module) -> str | None:
        """The name of the first buffer whose value is different at another moment."""
        names = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
        for (module, here), (_, there) in zip(self.buffers, other.buffers, strict=False):
            for name, (_, value) in here.items():
                now = there.get(name, (None, None))[1]
                if now is not None and value is not None and not torch.equal(value, now):
                    return f"{names[id(module)]}{name}"
        return None

    def restore(self, *, buffers: bool = True, gently: bool = False) -> None:
        """Restores this moment. `gently` writes only to buffers that have changed, since a graph may refer to them."""
        if self.cpu is None:
            return
        if buffers and self.buffers:
            with ungraded():
                for module, saved in self.buffers:
                    module._buffers.clear()
                    for name, (buffer, value) in saved.items():
                        if buffer is not None and value is not None and not (gently and torch.equal(buffer, value)):
                            buffer.copy_(value)
                        module._buffers[name] = buffer
        if self.chance.drawn or self.chance.untold:
            torch.set_rng_state(self.cpu)
            if self.cuda is not None:
                torch.cuda.set_rng_state(self.cuda, self.device)


class Slopes:
    """The slopes that one RReLU drew, to be used as if the model had drawn them again. torch draws slopes for negative
    inputs only; here the other inputs have the mean slope, for trials in which an input changes its sign."""

    def __init__(self, noise: Tensor, lower: float, upper: float, started: Tensor | None) -> None:
        self.noise, self.mean = noise, (lower + upper) / 2
        self.part: tuple[Tensor, int] | None = None  # the samples that these are for, and N
        self.convex = upper <= 1
        self.started, self.state = started, rng_state(noise.device)  # of the generator, before and after the draw

    @cached_property
    def slope(self) -> Tensor:
        return self.noise.where(self.noise != 1, self.mean)  # 1 marks an input that was positive

    def take(self, index: Tensor, N: int) -> Slopes:
        """The slopes of some of the N samples."""
        some = copy.copy(self)
        some.part = (index.to(self.noise.device), N) if len(index) < N else None
        return some

    def _like(self, x: Tensor) -> Tensor:
        """The slopes for x; if x has some of the samples only, they are in the dimension that is shorter in x"""
        if self.part is None or x.shape == self.slope.shape:
            return self.slope
        index, N = self.part
        sizes = zip(self.slope.shape, x.shape, strict=True)
        changed = [(k, *size) for k, size in enumerate(sizes) if size[0] != size[1]]
        if [size for _, *size in changed] != [[N, len(index)]]:
            raise ValueError(
                f"Fraction takes {len(index)} of {N} samples, and the input of an RReLU has the shape {tuple(x.shape)} "
                f"in the place of {tuple(self.slope.shape)}: no dimension of it holds the samples, so their slopes "
                "cannot be told; use rows=mq.Exact() or another activation"
            )
        return self.slope.index_select(changed[0][0], index)

    def __call__(self, x: Tensor, inplace: bool = False) -> Tensor:
        if self.state is not None:
            set_rng_state(self.noise.device, self.state)  # as if the slopes had been drawn
        slope = self._like(x)
        if self.convex and not inplace and not torch.is_grad_enabled():
            return torch.maximum(x, x * slope).contiguous()  # the same result, but faster
        factor = torch.where(x.detach() < 0, slope, 1)
        return x.mul_(factor) if inplace else (x * factor).contiguous()


def drawn_rrelu(x: Tensor, lower: float, upper: float, inplace: bool) -> tuple[Tensor, Slopes]:
    """RReLU in training mode, and the slopes that it drew. It is written as a product, because the backward pass of
    torch's own cannot be batched over rows."""
    started = rng_state(x.device)
    # The kernel writes the slopes in order, whatever the strides.
    noise = torch.empty_like(x, requires_grad=False, memory_format=torch.contiguous_format)
    with torch.no_grad():
        torch.ops.aten.rrelu_with_noise(x, noise, lower, upper, True)  # the slopes, and 1 where x is positive
    slopes = Slopes(noise, lower, upper, started)
    return x.mul_(noise) if inplace else (x * noise).contiguous(), slopes  # contiguous as torch's, for Dropout after it


class SameSlopes(TorchFunctionMode):
    """A forward pass with the RReLU slopes of an earlier one."""

    def __init__(self, slopes: Sequence[Slopes]) -> None:
        super().__init__()
        self.slopes = iter(slopes)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.rrelu and kwargs.get("training", args[3] if len(args) > 3 else False):
            inplace = kwargs.get("inplace", args[4] if len(args) > 4 else False)
            slopes = next(self.slopes, None)
            if slopes is None:
                raise RuntimeError(
                    "the model called RReLU more often than before: it must not depend on chance otherwise"
                )
            return slopes(args[0] if args else kwargs["input"], inplace)
        return func(*args, **kwargs)


def rng_state(device: torch.device) -> Tensor | None:
    if current.tape is not None:
        return None
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_rng_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@contextmanager
def substituted(model: nn.Module, others: Mapping[int, Tensor]) -> Iterator[None]:
    """Replaces some parameters and buffers, given by their ids, with other tensors.

    Tensors are matched by identity and not by name as in torch.func.functional_call, which restores a module with two
    names wrongly.
    """
    originals: list[tuple[dict[str, Any], str, Any]] = []

    def back() -> None:
        for place, name, value in originals:
            place[name] = value

    with back_afterwards(back):
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise RuntimeError("the tensors of a scripted module cannot be replaced")
            if isinstance(module, nn.RNNBase):  # creates new lists of its weights when it is called
                own = vars(module)
                originals += [(own, name, own[name]) for name in ("_flat_weights", "_flat_weight_refs") if name in own]
            places: list[dict[str, Any]] = [module._parameters, module._buffers]
            for tensors in places:
                for name, t in tensors.items():
                    if id(t) in others:
                        originals.append((tensors, name, t))
                        tensors[name] = others[id(t)]
        yield


def call_with(model: nn.Module, others: Mapping[int, Tensor]) -> Callable[..., Any]:
    """The model as a function in which these tensors replace its own."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with substituted(model, others):
            return model(*args, **kwargs)

    return call
