"""The data of a step and how the model is called on them: batches, precision, and kernels that leave a graph."""

from __future__ import annotations

import inspect
import sys
import threading
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ..deferred import AS_IS
from ..surroundings import Leavable, surely
from .anatomy import Anatomy

COARSE = (torch.bfloat16, torch.float16)


class Autocast(NamedTuple):
    """torch.autocast as the caller of a step has set it. It only applies to the forward passes of the model."""

    device: str
    enabled: bool
    dtype: torch.dtype
    cache: bool

    @classmethod
    def of_caller(cls, device: torch.device) -> Autocast:
        kind = device.type
        return cls(
            kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
        )

    def __call__(self) -> AbstractContextManager[Any]:
        """The context of a forward pass"""
        if not self.enabled:
            return without_autocast(self.device)
        return torch.autocast(self.device, self.dtype, cache_enabled=self.cache)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else AS_IS


def full(item: Any) -> Any:
    """Tensors of bfloat16 and float16 in float32, also inside a dataclass: losses and their derivatives need the
    digits."""
    if item is None:
        return None
    if item.__class__ is Tensor:
        return item.float() if item.dtype in COARSE else item
    return widened(item) if isinstance(item, Tensor) else tree_map(_full, item)


def _full(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return widened(leaf)
    if not is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    whole = copy(leaf)
    for f in fields(leaf):
        object.__setattr__(whole, f.name, full(getattr(leaf, f.name)))
    return whole


def widened(t: Tensor) -> Tensor:
    return t.float() if t.dtype in COARSE else t


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of θ, of gradients and of rows, for a parameter of this dtype"""
    return torch.float32 if dtype in COARSE else dtype


# --- Kernels that can be differentiated twice, or that leave a graph, instead of fused or compiled ones.


class Shared:
    """A setting of the whole program: the first thread that enters changes it, the last one that leaves restores it."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> None:
        self.get, self.put, self.value = get, put, value
        self.lock, self.held = threading.Lock(), set[object]()  # by the entries that have not left
        self.before: Any = None

    def __call__(self) -> Held:
        return Held(self)

    def enter(self, entry: object) -> None:
        with self.lock:
            first = not self.held
            if first:
                self.before = self.get()
            self.held.add(entry)
            if first:
                self.put(self.value)

    def leave(self, entry: object) -> None:
        """May be called any number of times, also after an interrupt during `enter` or during this method"""
        with self.lock:
            if self.held == {entry}:
                self.put(self.before)
            self.held.discard(entry)


class Held(Leavable):
    """A block during which a shared setting is changed"""

    def __init__(self, setting: Shared) -> None:
        self.setting = setting

    def leave(self) -> None:
        self.setting.leave(self)

    def __enter__(self) -> None:
        try:
            self.setting.enter(self)
        except BaseException:
            surely(self.leave)
            raise

    def __exit__(self, *error: object) -> None:
        try:
            self.leave()
        except BaseException:
            surely(self.leave)
            raise


def _enabled(backend: Any) -> Shared:
    return Shared(lambda: backend.enabled, lambda value: setattr(backend, "enabled", value), False)


def _attention() -> list[bool]:
    """Which kernels of attention are enabled"""
    of = torch.backends.cuda
    return [
        of.math_sdp_enabled(), of.flash_sdp_enabled(), of.mem_efficient_sdp_enabled(), of.cudnn_sdp_enabled()
    ]  # fmt: skip


def _set_attention(each: list[bool]) -> None:
    of = torch.backends.cuda
    kinds = of.enable_math_sdp, of.enable_flash_sdp, of.enable_mem_efficient_sdp, of.enable_cudnn_sdp
    for enable, value in zip(kinds, each, strict=True):
        enable(value)


def _stance() -> Any:
    return sys.modules[DYNAMO]._stance


def _set_stance(stance: Any) -> None:
    dynamo: Any = sys.modules[DYNAMO]
    dynamo._set_stance(_eager(dynamo) if stance is None else stance)


@cache
def _eager(dynamo: Any) -> Any:
    return dynamo.DynamoStance("force_eager")


DYNAMO = "torch._dynamo.eval_frame"
PLAIN_ATTENTION = Shared(_attention, _set_attention, [True, False, False, False])
PLAIN_RECURRENCE = _enabled(torch.backends.cudnn)
OPEN_CELLS = _enabled(torch.backends.mkldnn)
UNCOMPILED = Shared(_stance, _set_stance, None)


@contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Kernels that can be differentiated twice instead of fused ones that cannot: attention, cuDNN's recurrent
    layers."""
    recurrent = any(isinstance(m, nn.RNNBase) for m in model.modules())
    with PLAIN_ATTENTION(), PLAIN_RECURRENCE() if recurrent else nullcontext():
        yield


def uncompiled() -> AbstractContextManager[object]:
    """The original code of a model, or of part of it, instead of its torch.compile version. Compiled code hides its
    layers, can be differentiated only once, draws different random numbers, and would be compiled again for every way
    it is called."""
    return Held(UNCOMPILED) if DYNAMO in sys.modules else AS_IS


def open_cells(model: nn.Module) -> AbstractContextManager[object]:
    """LSTMs on a CPU whose products are nodes of the graph: oneDNN's are one node without any structure."""
    return OPEN_CELLS() if Anatomy(model).has_lstm else nullcontext()


# --- The data of a step: batches, and the model called on them.


# Types that contain no samples, whatever the model does with them.
PLAIN = (
    Number, str, bytes, type, type(None), range, slice, Enum, Iterator, Set, torch.dtype, torch.device, torch.Generator,
    nn.Module,
)  # fmt: skip


def opaque(t: Any) -> bool:
    """Whether t is an object that contains samples in a form unknown here: a graph, a dataclass, an encoding."""
    return not (isinstance(t, (Tensor, *PLAIN)) or hasattr(t, "__array__") or inspect.isroutine(t))


def tensors(item: Any, depth: int = 3) -> list[Tensor]:
    """All tensors in an item, including those in attributes of objects, down to `depth` levels (a PyG graph has
    two)."""
    if isinstance(item, Tensor):
        return [item]
    held: list[Tensor] = []
    for t in tree_leaves(item):
        if isinstance(t, Tensor):
            held.append(t)
        elif depth and opaque(t):
            slots = [getattr(t, name, None) for kind in type(t).__mro__ for name in getattr(kind, "__slots__", ())]
            held += tensors([getattr(t, "__dict__", None), slots], depth - 1)
    return held


def leaves(item: Any) -> list[Any]:
    """The leaves of an item. A PackedSequence is a tuple of tensors without a row per sample, and is kept as one
    leaf."""
    return [item] if isinstance(item, Tensor) else tree_leaves(item, is_leaf=lambda t: isinstance(t, PackedSequence))


@dataclass(frozen=True)
class Batch:
    """Inputs as the model takes them, and targets and a weight per sample, both at least in float32.

    The inputs are a tensor, a tuple or dict of tensors, or an object that is passed to the model unchanged. The result
    of a tokenizer counts as a dict.
    """

    inputs: Any
    targets: Any = None
    weight: Tensor | None = None

    def __post_init__(self) -> None:
        for name, item in (("inputs", self.inputs), ("targets", self.targets), ("weight", self.weight)):
            value = item if item is None or name == "inputs" else full(item)
            if value is not None and value.__class__ is not Tensor and isinstance(value, (dict, UserDict)):
                value = dict(value)
            if value is not item:
                object.__setattr__(self, name, value)

    def check(self) -> None:
        """Checks for inputs from which no model can take a batch, and for tensors that autograd refuses."""
        for name, item in (("inputs", self.inputs), ("targets", self.targets), ("weight", self.weight)):
            if item is None:
                continue
            if item.is_inference() if item.__class__ is Tensor else any(t.is_inference() for t in tensors(item)):
                raise ValueError(
                    f"the {name} were made under torch.inference_mode(), and autograd does not take them: make them "
                    "outside of it, or clone them there: .clone()"
                )
        if self.inputs.__class__ is Tensor or isinstance(self.inputs, Tensor):
            if self.inputs.ndim == 0:
                raise ValueError("the inputs have shape (): the first dimension must be the samples, as in (N, …)")
        elif isinstance(self.inputs, (tuple, list, dict)):
            parts = leaves(self.inputs)
            if parts and not any(isinstance(t, Tensor) or opaque(t) for t in parts):
                raise TypeError(
                    f"the inputs are a {type(self.inputs).__name__} without a tensor: use torch.as_tensor()"
                )
        elif not opaque(self.inputs):
            raise TypeError(f"the inputs are {type(self.inputs).__name__}, not a tensor: use torch.as_tensor()")

    def versions(self) -> object:
        """The versions of the input tensors, which an operation in place or a replaced attribute of an object
        changes."""
        if self.inputs.__class__ is Tensor:
            return self.inputs._version
        return [(id(t), t._version) for t in tensors(self.inputs)]

    @property
    def form(self) -> object:
        """Shapes, dtypes and devices; None if there is an object that may contain more than tensors"""
        form: list[object] = []
        for item in (self.inputs, self.targets, self.weight):
            if item.__class__ is Tensor:
                form += (item.shape, item.dtype, item.device)
            elif item is None:
                form += (None,)
            else:
                leaves, spec = tree_flatten(item)
                if not all(isinstance(t, (Tensor, *PLAIN)) for t in leaves):
                    return None
                form += (spec, *((t.shape, t.dtype, t.device) if isinstance(t, Tensor) else t for t in leaves))
        return form

    def checksum(self) -> Tensor | float:
        """One number that depends on the targets, or on the inputs if there are no targets."""
        numbers = tensors([self.targets, self.inputs])
        return numbers[0].sum(dtype=torch.float64) if numbers else 0.0

    @property
    def opaque(self) -> bool:
        """Whether the inputs cannot be divided into samples."""
        return any(opaque(t) for t in leaves(self.inputs))

    @property
    def samples(self) -> int:
        """The number of samples; 0 if it is unknown before the model is called."""
        # Targets have a row per sample; inputs may contain other tensors as well, such as a mask.
        targets = self.targets
        if (targets.__class__ is Tensor or isinstance(targets, Tensor)) and targets.ndim:
            return targets.shape[0]
        items = [self.targets] if self.opaque else [self.targets, self.inputs]
        return next((len(t) for t in tree_leaves(items) if isinstance(t, Tensor) and t.ndim), 0)

    def divisible(self, N: int) -> bool:
        """Whether the model can be called on some of the samples: this requires that N outputs belong to N rows of the
        inputs. It does not hold for logits of all tokens in one list, nor for residuals of several kinds of points in
        sequence."""
        rows = {len(t) for t in leaves(self.inputs) if isinstance(t, Tensor) and t.ndim}
        return not self.opaque and self.samples == N and N in rows

    def _check_parts(self, way_out: str) -> None:
        for t in leaves(self.inputs):
            if opaque(t):
                raise TypeError(
                    f"the inputs hold a {type(t).__name__}, which goes to the model whole and cannot be cut into "
                    f"samples: {way_out}, or pass tensors in a tuple or dict"
                )

    def split(self, size: int | None) -> list[Batch]:
        """The fewest parts of at most `size` samples. Tensors with a row per sample are divided, others stay whole."""
        N = self.samples
        if size is None or (size >= N and (N or not self.opaque)):
            return [self]
        self._check_parts("leave chunk out")
        if not self.divisible(N):
            raise ValueError(
                f"chunk={size}: no tensor of the inputs has a row for each of the {N} targets, so that the batch "
                "cannot be cut into samples: leave chunk out, or pass inputs and targets with one row per sample"
            )
        for what in ("targets", "weight"):
            for t in tree_leaves(getattr(self, what)):
                if isinstance(t, Tensor) and (t.ndim == 0 or len(t) != N):
                    raise ValueError(f"{what} of shape {tuple(t.shape)} for {N} samples: one row per sample is needed")

        def part(item: Any, first: int, last: int) -> Any:
            whole = [isinstance(t, Tensor) and t.ndim > 0 and len(t) == N for t in tree_leaves(item)]
            flags = iter(whole)
            return tree_map(lambda t: _cut(t, first, last) if next(flags) else t, item)

        return [
            Batch(*(part(item, first, last) for item in (self.inputs, self.targets, self.weight)))
            for first, last in pairwise(bounds(N, size))
        ]

    def head(self, N: int) -> Batch:
        """Target and weight of the first of N samples; the inputs stay the same."""

        def first(t: Any) -> Any:
            return t[:1] if isinstance(t, Tensor) and t.ndim and len(t) == N else t

        return Batch(self.inputs, tree_map(first, self.targets), tree_map(first, self.weight))

    def take(self, index: Tensor) -> Batch:
        """Some of the samples."""
        self._check_parts("take the rows of all samples, rows=mq.Exact()")
        N = self.samples

        def part(t: Any) -> Any:
            return t[index.to(t.device)] if isinstance(t, Tensor) and t.ndim and len(t) == N else t

        return Batch(*(tree_map(part, item) for item in (self.inputs, self.targets, self.weight)))


def bounds(N: int, size: int) -> list[int]:
    """The ends of the fewest parts with at most `size` samples each. The parts are as even as possible, so that no
    sample is left alone: some models treat a single sample differently, or fail."""
    parts = -(-N // size)
    return [-(-k * N // parts) for k in range(parts + 1)]


def _cut(t: Tensor, first: int, last: int) -> Tensor:
    """Some of the samples, as a new leaf if t requires a gradient"""
    some = t.detach()[first:last]
    return some.requires_grad_() if t.requires_grad else some


class Batches:
    """The user's batches as Batch objects, on every iteration."""

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
            if isinstance(item, Batch):
                yield item
                continue
            if not isinstance(item, (tuple, list)) or len(item) not in (2, 3):
                given = f"{len(item)} items" if isinstance(item, (tuple, list)) else type(item).__name__
                raise TypeError(f"step_over takes batches (inputs, targets) or (inputs, targets, weight), not {given}")
            yield Batch(*item)


def forward(model: Callable[..., Any], inputs: Any) -> Any:
    """model(inputs), for a tensor or an object, a tuple (positional) or a dict (by name)."""
    # Converted weights are cached until the outermost autocast ends, which may be the caller's; they have changed
    # since.
    torch.clear_autocast_cache()
    if inputs.__class__ is Tensor:
        return model(inputs)
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)) and not isinstance(inputs, PackedSequence):
        return model(*inputs)
    return model(inputs)


def modes(model: nn.Module) -> tuple[object, ...]:
    """See Anatomy.modes"""
    return Anatomy(model).modes
