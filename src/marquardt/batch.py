"""What a step is taken on: batches, the model called on them, and the state that such a call changes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .tape import recording

# What holds no samples, whatever the model makes of it.
PLAIN = (
    Number, str, bytes, type, type(None), range, slice, Enum, Iterator, Set, torch.dtype, torch.device, torch.Generator,
    nn.Module,
)  # fmt: skip

# What keeps several copies or parts of a model, on devices or ranks.
WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")


def opaque(t: Any) -> bool:
    """Whether it is an object that holds samples in a way of its own: a graph, a dataclass, an encoding."""
    return not (isinstance(t, (Tensor, *PLAIN)) or hasattr(t, "__array__") or inspect.isroutine(t))


def tensors(item: Any, depth: int = 3) -> Iterator[Tensor]:
    """The tensors in it, also those in the attributes of objects, which may hold others (a PyG graph: two levels)."""
    for t in tree_leaves(item):
        if isinstance(t, Tensor):
            yield t
        elif depth and opaque(t):
            slots = [getattr(t, name, None) for kind in type(t).__mro__ for name in getattr(kind, "__slots__", ())]
            yield from tensors([getattr(t, "__dict__", None), slots], depth - 1)


@dataclass(frozen=True)
class Batch:
    """Inputs as the model takes them, targets, and a weight per sample.

    The inputs are a tensor, a tuple or dict of tensors, or an object that the model takes whole.
    """

    inputs: Any
    targets: Any = None
    weight: Tensor | None = None

    def check(self) -> None:
        """Inputs that no model can take a batch from."""
        if isinstance(self.inputs, (tuple, list, dict)):
            leaves = tree_leaves(self.inputs)
            if leaves and not any(isinstance(t, Tensor) or opaque(t) for t in leaves):
                raise TypeError(
                    f"the inputs are a {type(self.inputs).__name__} without a tensor: use torch.as_tensor()"
                )
        elif not isinstance(self.inputs, Tensor):
            if not opaque(self.inputs):
                raise TypeError(f"the inputs are {type(self.inputs).__name__}, not a tensor: use torch.as_tensor()")
        elif self.inputs.ndim == 0:
            raise ValueError("the inputs have shape (): the first dimension must be the samples, as in (N, …)")

    def versions(self) -> list[tuple[int, int]]:
        """What an operation in place would change, or another tensor in the place of an object's attribute."""
        return [(id(t), t._version) for t in tensors(self.inputs)]

    def checksum(self) -> Tensor | float:
        """One number for the targets, or for the inputs where there are none."""
        found = next(tensors([self.targets, self.inputs]), None)
        return 0.0 if found is None else found.sum(dtype=torch.float64)

    @property
    def opaque(self) -> bool:
        """Whether the inputs cannot be taken apart."""
        return any(opaque(t) for t in tree_leaves(self.inputs))

    @property
    def samples(self) -> int:
        """0 where it is not known before the model is called."""
        # Targets have a row per sample; inputs may hold other tensors too, such as a mask.
        items = [self.targets] if self.opaque else [self.targets, self.inputs]
        return next((len(t) for t in tree_leaves(items) if isinstance(t, Tensor) and t.ndim), 0)

    def _check_parts(self, way_out: str) -> None:
        for t in tree_leaves(self.inputs):
            if opaque(t):
                raise TypeError(
                    f"the inputs hold a {type(t).__name__}, which goes to the model whole and cannot be cut into "
                    f"samples: {way_out}, or pass tensors in a tuple or dict"
                )

    def split(self, size: int | None) -> list[Batch]:
        """Chunks of at most `size` samples: tensors with a row per sample are cut, others go along whole."""
        N = self.samples
        if size is None or (size >= N and (N or not self.opaque)):
            return [self]
        self._check_parts("leave chunk out")
        for what in ("targets", "weight"):
            for t in tree_leaves(getattr(self, what)):
                if isinstance(t, Tensor) and (t.ndim == 0 or len(t) != N):
                    raise ValueError(f"{what} of shape {tuple(t.shape)} for {N} samples: one row per sample is needed")

        def part(item: Any, first: int) -> Any:
            whole = [isinstance(t, Tensor) and t.ndim > 0 and len(t) == N for t in tree_leaves(item)]
            flags = iter(whole)
            return tree_map(lambda t: t[first : first + size] if next(flags) else t, item)

        return [
            Batch(*(part(item, first) for item in (self.inputs, self.targets, self.weight)))
            for first in range(0, N, size)
        ]

    def take(self, index: Tensor) -> Batch:
        """Some of the samples."""
        self._check_parts("take the rows of all samples, rows=mq.Exact()")
        N = self.samples

        def part(t: Any) -> Any:
            return t[index.to(t.device)] if isinstance(t, Tensor) and t.ndim and len(t) == N else t

        return Batch(*(tree_map(part, item) for item in (self.inputs, self.targets, self.weight)))


class Batches:
    """The user's batches as Batch objects, every time they are gone through."""

    def __init__(self, batches: Iterable[Any]) -> None:
        if isinstance(batches, Iterator):
            raise TypeError(
                f"step_over goes through the batches several times, and {type(batches).__name__} is used up after the "
                "first: pass a list or a DataLoader"
            )
        if not isinstance(batches, Iterable):
            raise TypeError(f"step_over takes a list of batches or a DataLoader, not {batches!r}")
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        for item in self.batches:
            if not isinstance(item, (tuple, list)) or len(item) not in (2, 3):
                found = f"{len(item)} items" if isinstance(item, (tuple, list)) else type(item).__name__
                raise TypeError(f"step_over takes batches (inputs, targets) or (inputs, targets, weight), not {found}")
            yield Batch(*item)


def forward(model: Callable[..., Any], inputs: Any) -> Tensor:
    """z = model(inputs), for a tensor or an object, a tuple (positional) or a dict (by name)."""
    # A model that enters autocast keeps its converted weights until the outermost autocast ends, and that is ours.
    torch.clear_autocast_cache()
    if isinstance(inputs, dict):
        z = model(**inputs)
    elif isinstance(inputs, (tuple, list)):
        z = model(*inputs)
    else:
        z = model(inputs)
    if not isinstance(z, Tensor) or z.ndim == 0:
        found = f"a {type(z).__name__}" if not isinstance(z, Tensor) else "a 0-dimensional tensor"
        raise TypeError(
            f"the model returned {found}; it must return one tensor with a row per sample: wrap it in one that does"
        )
    return z


def unlike(inputs: Any, p: Tensor) -> str | None:
    """Why a model with parameters like p may have failed on these inputs."""
    for t in tensors(inputs):
        if t.device != p.device:
            return f"the inputs are on {t.device}, the parameters on {p.device}: move them with .to()"
        if t.dtype != p.dtype:
            return f"the inputs are {t.dtype}, the parameters {p.dtype}: convert the inputs with .to({p.dtype})"
    return None


class Draws(TorchDispatchMode):
    """Looks for operations that draw random numbers."""

    drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.drew = self.drew or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


@dataclass
class Chance:
    """Whether the model draws random numbers. If not, the generators are left to the other threads of the program."""

    drawn: bool = False


class Moment:
    """The state that a forward pass changes: random number generators and buffers."""

    def __init__(self, model: nn.Module, device: torch.device, chance: Chance) -> None:
        self.buffers: list[Any] = []
        self.device, self.chance = device, chance
        self.cpu: Tensor | None = None
        self.cuda: Tensor | None = None
        if recording():  # a model that is recorded has no such state but the generator, which the graph knows
            return
        # By name: a forward pass may put another tensor in the place of a buffer, or a first one.
        self.buffers = [
            (module, {name: (b, None if b is None else b.detach().clone()) for name, b in module._buffers.items()})
            for module in model.modules()
            if module._buffers
        ]
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def drew_since(self) -> bool:
        """Whether random numbers were drawn since, by the model or another thread."""
        if self.cpu is None:
            return False
        if self.cuda is not None and not torch.equal(self.cuda, torch.cuda.get_rng_state(self.device)):
            return True
        return not torch.equal(self.cpu, torch.get_rng_state())

    def restore(self, *, buffers: bool = True, gently: bool = False) -> None:
        """As it was; gently where a graph may hold the buffers, which then must not be touched for nothing."""
        if self.cpu is None:
            return
        if buffers:
            with torch.no_grad():
                for module, saved in self.buffers:
                    module._buffers.clear()
                    for name, (buffer, value) in saved.items():
                        if buffer is not None and value is not None and not (gently and torch.equal(buffer, value)):
                            buffer.copy_(value)
                        module._buffers[name] = buffer
        if self.chance.drawn:
            torch.set_rng_state(self.cpu)
            if self.cuda is not None:
                torch.cuda.set_rng_state(self.cuda, self.device)


def flatten(params: Sequence[Tensor]) -> Tensor:
    """θ: (n,), a copy"""
    return torch.cat([p.detach().flatten() for p in params])


def assign(params: Sequence[Tensor], theta: Tensor) -> None:
    """The parameters ← θ"""
    with torch.no_grad():
        torch._foreach_copy_(list(params), _pieces(params, theta))


def shift(params: Sequence[Tensor], d: Tensor, lr: float) -> None:
    """The parameters += lr·d, without another vector in memory"""
    with torch.no_grad():
        torch._foreach_add_(list(params), _pieces(params, d), alpha=lr)


def _pieces(params: Sequence[Tensor], v: Tensor) -> list[Tensor]:
    return [t.view_as(p) for p, t in zip(params, v.split([p.numel() for p in params]), strict=True)]


def trainable(model: nn.Module, params: Iterable[Any] | None) -> list[Tensor]:
    """The parameters that train, after a look at all that no step can work with."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"LM(model, loss) takes the model itself, not {type(model).__name__}: LM(model, 'mse')")
    check_whole(model)
    given = list(model.parameters() if params is None else params)
    for p in given:
        if isinstance(p, dict):
            raise ValueError("LM solves for all parameters together: one parameter group, chosen by LM(..., params=)")
        if not isinstance(p, Tensor):
            raise TypeError(f"params= holds a {type(p).__name__}: pass parameters, such as model.head.parameters()")
    own = {id(p) for p in model.parameters()}
    if any(id(p) not in own for p in given):
        raise ValueError("params= holds a tensor that is not a parameter of the model: pass some of model.parameters()")
    if len({id(p) for p in given}) < len(given):
        raise ValueError("params= holds a parameter twice: pass each of them once")
    chosen = [p for p in given if p.requires_grad]
    if not chosen:
        raise ValueError("no trainable parameters: set requires_grad=True on some, or pass others as params=")
    for what, found in (("dtypes", {p.dtype for p in chosen}), ("devices", {p.device for p in chosen})):
        if len(found) > 1:
            names = ", ".join(sorted(str(f) for f in found))
            raise ValueError(f"the trainable parameters have several {what} ({names}): bring them to one by model.to()")
    if any(nn.parameter.is_lazy(p) for p in chosen):
        raise ValueError(
            "the model has lazy parameters without a shape: run a forward pass once, then make the optimizer"
        )
    p = chosen[0]
    if p.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"the parameters are {p.dtype}, steps need torch.float32 or torch.float64: model.float() or model.double()"
        )
    if p.device.type == "meta":
        raise ValueError(
            "the parameters are on the meta device, without values: model.to_empty(device=...) and load some"
        )
    return chosen


def check_whole(model: nn.Module) -> None:
    """A step sees all of the model, once: nothing here adds up over copies, ranks or shards."""
    for module in model.modules():
        for kind in type(module).__mro__:
            if kind.__name__ in WRAPPERS and kind.__module__.startswith("torch."):
                raise TypeError(
                    f"the model is wrapped in {kind.__name__}, and LM does not add up over its copies or shards, which "
                    "would drift apart: pass the plain model, model.module, and train it on one device"
                )
    for name, p in model.named_parameters():
        if any(kind.__name__ == "DTensor" for kind in type(p).__mro__):
            raise TypeError(
                f"parameter {name!r} is a DTensor, and LM does not add up over its shards: pass the plain model and "
                "train it on one device"
            )


def check_group(group: bool | None) -> None:
    """Ranks that each take steps of their own drift apart."""
    if group is not None and group is not False:
        raise ValueError(f"group={group!r}: None, or False for runs that are independent of the other ranks")
    if group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        raise ValueError(
            f"this is rank {rank} of a process group of {ranks}, and LM does not add up over ranks, which would drift "
            "apart: train on one rank alone, or let the ranks be independent runs, and say so by LM(..., group=False)"
        )


def check_coupling(model: nn.Module) -> None:
    """Samples that depend on each other have no rows of their own."""
    for name, module in model.named_modules():
        coupled = module.training or getattr(module, "running_mean", None) is None
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and coupled:
            call = f"model.get_submodule({name!r}).eval()" if name else "model.eval()"
            raise ValueError(
                f"layer {name!r} ({type(module).__name__}) couples the samples of a batch in train mode: call {call} "
                "to use its running statistics, replace it by GroupNorm or LayerNorm, or use curvature=mq.MatrixFree() "
                "on the whole batch (chunk=None, rows=mq.Exact())"
            )
