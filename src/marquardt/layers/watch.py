"""Watching one forward pass: which layers were called, on what, and which random slopes were drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from ..memory import out_of_memory
from ..model.precision import widened
from ..model.randomness import Slopes, drawn_rrelu
from .bilinear import Bilinear
from .block import Block, Explicit
from .lookup import Lookup
from .pooled import Kept, Pooled, behind, users
from .rules import RULES, Operand, opened_attention
from .unrolled import unrolled
from .written import written

_attention = opened_attention()
MAX_POOLS = {
    F.max_pool2d, F.max_pool2d_with_indices, F.max_pool3d, F.max_pool3d_with_indices, torch.max_pool2d,
    torch.max_pool3d,
}  # fmt: skip


class Misfit(Exception):
    """The rows of a layer cannot be read in this layout."""


class Call:
    """One use of trainable parameters by a layer that has a rule."""

    kept: Kept | None = None  # if δ is taken of a max-pool behind it: which outputs the pool keeps

    def __init__(self, operand: Operand, edge: GradientEdge, shape: Sequence[int]) -> None:
        self.operand = operand
        self.edge = edge  # where δ is taken: of its output, or of a max-pool behind it
        self.shape = shape  # of its output
        self.version = operand.x._version

    @property
    def params(self) -> list[Tensor]:
        return [p for p in (self.operand.weight, self.operand.bias) if p is not None]

    @property
    def is_lookup(self) -> bool:
        return not self.operand.x.dtype.is_floating_point

    @property
    def outputs(self) -> int:
        """Numbers at its output"""
        return math.prod(self.shape)

    @property
    def inputs(self) -> int:
        """Numbers in a"""
        o = self.operand
        if o.window is not None and o.weight is not None:
            return self.outputs // len(o.weight) * o.window
        return o.x.numel()

    def sizes(self, N: int) -> tuple[float, int, int, int, bool]:
        """Positions per sample, groups, inputs and outputs of each: what its work depends on."""
        o = self.operand
        if o.weight is None:
            O = self.params[0].numel()
            return self.outputs / (N * O), 1, 0, O, False
        if self.is_lookup:
            return o.x.numel() / N, 1, 1, o.weight.shape[-1], True
        if o.weight.ndim == 1 or o.weight.shape == o.x.shape[o.lead :]:  # a scale
            return self.outputs / (N * o.weight.numel()), o.weight.numel(), 1, 1, False
        I, O = math.prod(o.weight.shape[1:]), len(o.weight)
        groups = 1 if o.window is None else max(1, o.window // I)
        return self.outputs / (N * O), groups, I, O // groups, False

    @property
    def kind(self) -> tuple[int, ...]:
        """Equal for calls whose rows can be added up as further positions of one layer: same weight, same bias."""
        weight, bias = self.operand.weight, self.operand.bias
        return (self.is_lookup, id(weight), id(bias))

    def block(self, delta: Tensor, N: int, layout: Layout) -> Bilinear | Lookup:
        """The rows of this call, with its leading dimensions read in this layout."""
        o = self.operand
        if o.x._version != self.version:
            raise Misfit("the input was changed in place after the call")
        if not layout.fits(o.x.shape[: o.lead], N):
            raise Misfit("no dimension holds the samples")
        try:
            return self._read(delta, N, layout)
        except RuntimeError as error:  # shapes that a rule of one's own has wrong
            if out_of_memory(error):
                raise
            raise Misfit(str(error)) from error

    def _read(self, delta: Tensor, N: int, layout: Layout) -> Bilinear | Lookup:
        o, kept = self.operand, self.kept
        # Under autocast a and δ may be less precise, and products of matrices take them as they are.
        is_lookup = self.is_lookup
        if is_lookup or kept is not None or (o.weight is not None and o.weight.ndim < 2):
            delta = widened(delta)
        if kept is not None and o.some is not None and layout.name == "first":
            some_a = o.some

            def read(delta: Tensor, some: slice) -> Bilinear:
                return _bilinear(o, some_a(some), delta, delta.shape[1], layout)

            return Pooled(read, delta, kept)
        delta = delta if kept is None else kept.spread(kept.scaled(delta))
        if is_lookup:
            assert o.weight is not None
            a = layout(o.a().detach(), o.lead, N, 0)
            return Lookup(a.flatten(1), layout(o.delta(delta), o.lead, N, 1), o.weight)
        a = o.a()
        return _bilinear(o, a.detach() if a.requires_grad else a, delta, N, layout)

    def fits(self, N: int) -> tuple[bool, ...]:
        """The layouts that its leading dimensions could have."""
        return tuple(layout.fits(self.operand.x.shape[: self.operand.lead], N) for layout in LAYOUTS)


def _bilinear(o: Operand, a: Tensor, delta: Tensor, N: int, layout: Layout) -> Bilinear:
    delta, plain = o.delta(delta), o.lead == 1 and layout.name == "first"  # then they are as they shall be
    if not (plain and a.ndim == 4 and delta.ndim == 5):
        a, delta = layout(a, o.lead, N, 0), layout(delta, o.lead, N, 1)
        if a.ndim < 4 or delta.ndim < 5:
            raise Misfit(f"a has {a.ndim} dimensions and δ {delta.ndim}, too few for (N, P, G, I) and (R, N, P, G, O)")
        a, delta = a.flatten(1, -3), delta.flatten(2, -3)  # (N, P, G, I), (R, N, P, G, O)
    a = a if o.weight is not None else a[..., :0]
    if a.dtype is not delta.dtype:
        a = a.to(delta.dtype)  # a layer multiplies in the precision of its outputs
    matrix = o.weight is not None and o.weight.shape == (delta.shape[-1], a.shape[-1]) and a.shape[2] == 1
    if matrix and a.shape[:2] == delta.shape[1:3]:
        return Bilinear(a, delta, o.weight, o.bias)
    numbers = math.prod(a.shape[2:]) * delta.shape[-1]
    if o.weight is not None and (a.shape[:3] != delta.shape[1:4] or numbers != o.weight.numel()):
        raise Misfit("a and δ are not those of a weight of this size")
    return Bilinear(a, delta, o.weight, o.bias)


class Watch(TorchFunctionMode):
    """Records the calls that use one of `params` directly, and the slopes that RReLU draws."""

    def __init__(
        self,
        params: Iterable[Tensor] | dict[int, int],
        known: Sequence[Slopes] | None = None,
        once: bool = False,
    ) -> None:
        super().__init__()
        self.once = once  # the graph is differentiated once only, for several rows of a sample
        self.known = None if known is None else iter(known)  # slopes to take instead of drawing some
        self.trainable = params if isinstance(params, dict) else {id(p): i for i, p in enumerate(params)}
        self.calls: list[Call] = []
        self.ways: list[object] = []  # of each call: its parameters, by number, and what its layout depends on
        self.slopes: list[Slopes] = []
        self.functions: list[object] = []  # that were called, those of what is not differentiated among them
        self.convolves = False  # whether there is a convolution that might have a backward pass of our own,
        self.unrolled = False  # and whether one has
        self.pools = False  # whether there is a max-pool
        self.hooks: list[object] = []  # of tensors, which the forward pass has set, and of nodes, which it may have set
        self.coarsest = torch.float64  # of all dtypes that the model computes with
        self.shapes: list[Sequence[int]] = []  # of the outputs of all functions

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        self.functions += (func,)
        if func in SPECIAL:
            out = self._special(func, args, kwargs)
            if func in REPLACED:
                return out
        else:
            out = func(*args, **kwargs)
        if out.__class__ is Tensor or isinstance(out, Tensor):
            self.shapes += (out.shape,)
            if out.dtype is not self.coarsest and out.dtype.is_floating_point:
                self.coarsest = max(out.dtype, self.coarsest, key=lambda dtype: torch.finfo(dtype).eps)
            if func in RULES and out.requires_grad:
                self._called(func, args, kwargs, out)
        return out

    def _special(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Functions that are entered, replaced, or of which more is noted"""
        if func is F.multi_head_attention_forward:
            with self:
                return _attention(*args, **kwargs)
        if func is F.rrelu:
            return self._rrelu(*args, **kwargs)
        if func in HOOKING and (name := _hook(func, *args, **kwargs)) is not None:
            self.hooks.append(name)
        out = unrolled(*args, **kwargs) if self.once and func is F.conv2d else None
        self.convolves = self.convolves or func is F.conv2d
        self.unrolled = self.unrolled or out is not None
        self.pools = self.pools or func in MAX_POOLS
        return func(*args, **kwargs) if out is None else out

    def _called(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> None:
        """A call of a layer, if a parameter of it trains. The edge is kept and not the tensor, which an in-place
        activation may overwrite."""
        operand = _operand(func, args, kwargs)
        if operand is None:
            return
        weight, bias, trainable = operand.weight, operand.bias, self.trainable
        i = None if weight is None or (own := id(weight)) not in trainable else trainable[own]
        j = None if bias is None or (own := id(bias)) not in trainable else trainable[own]
        if i is None and j is None:
            return
        if (i is None and weight is not None) or (j is None and bias is not None):
            operand = operand._replace(weight=None if i is None else weight, bias=None if j is None else bias)
        self.calls += (Call(operand, GradientEdge(out.grad_fn, out.output_nr), out.shape),)  # type: ignore[arg-type]
        self.ways += ((i, j, operand.lead, operand.x.shape),)

    @property
    def numbers(self) -> int:
        """At the outputs of all functions"""
        return sum(map(math.prod, self.shapes))

    def shorten(self, result: Tensor) -> None:
        """δ behind a max-pool in the place of δ before it, which is mostly zero."""
        if self.pools:
            using = users(result)
            for call in self.calls:
                if call.kept is None and (found := behind(call.edge, call.shape, using)) is not None:
                    call.edge, call.kept = found

    def _rrelu(
        self, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
    ) -> Tensor:
        if not training:
            return F.rrelu(input, lower, upper, training, inplace)
        if self.known is not None:
            return next(self.known)(input, inplace)
        out, slopes = drawn_rrelu(input, lower, upper, inplace)
        self.slopes.append(slopes)
        return out


def _operand(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Operand | None:
    """What the rule of a function says of a call; a fault in a rule of one's own is told as such."""
    try:
        operand = RULES[func](*args, **kwargs)
    except Exception as error:
        name = getattr(func, "__name__", func)
        raise RuntimeError(f"the layer rule of {name} raised {type(error).__name__}: {error}") from error
    if operand.__class__ is not Operand and not isinstance(operand, (Operand, type(None))):
        name, found = getattr(func, "__name__", func), type(operand).__name__
        raise TypeError(f"the layer rule of {name} returned {found}: it returns an Operand, or None")
    return operand


# What a forward pass sets a hook with: that of a tensor, or that of its node.
HOOKING = {Tensor.register_hook, Tensor.grad_fn.__get__}  # type: ignore[union-attr]

# What others stand for, and all of which more is noted than that it was called.
REPLACED = {F.multi_head_attention_forward, F.rrelu}
SPECIAL = {*REPLACED, *HOOKING, *MAX_POOLS, F.conv2d}


def _hook(func: Callable[..., Any], tensor: Tensor, hook: object = None, *_: object) -> object:
    """What is the same in every pass that sets this hook: a function is made anew, its code is not. Those of FSDP2
    change no gradient."""
    own = str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
    return None if own else getattr(hook, "__code__", type(hook))


class Layout:
    """Where the samples are in the leading dimensions of a layer's input."""

    def __init__(self, name: str) -> None:
        self.name = name

    def fits(self, dims: Sequence[int], N: int) -> bool:
        """Whether these leading dimensions can mean this."""
        if self.name in ("flat", "flat-time"):  # (N·T, …) or (T·N, …)
            return bool(dims) and dims[0] != N and dims[0] % N == 0
        if self.name == "first":  # (N, …)
            return bool(dims) and dims[0] == N
        return len(dims) > 1 and dims[1] == N  # (T, N, …)

    def __call__(self, t: Tensor, lead: int, N: int, skip: int) -> Tensor:
        """(skip…, *lead, *rest) → (skip…, N, T, *rest)"""
        samples_first = self.name in ("first", "flat")
        if self.name in ("flat", "flat-time"):
            t = t.unflatten(skip, (N, -1) if samples_first else (-1, N))
            lead += 1
        if not samples_first:
            t = t.movedim(skip + 1, skip)
        rest = t.shape[skip + lead :]
        return t.reshape(*t.shape[: skip + 1], math.prod(t.shape[skip + 1 : skip + lead]), *rest)


# In the order in which they are tried; the first that is proven right on real rows is kept.
LAYOUTS = [Layout("first"), Layout("time"), Layout("flat"), Layout("flat-time")]


def grouped(calls: Sequence[Call]) -> list[list[int]]:
    """Calls that share a parameter belong together: indices into `calls`."""
    groups: list[tuple[set[int], list[int]]] = []
    for i, call in enumerate(calls):
        ids, members = {id(p) for p in call.params}, [i]
        for other in [g for g in groups if g[0] & ids]:
            groups.remove(other)
            ids |= other[0]
            members = other[1] + members
        groups.append((ids, sorted(members)))
    return [members for _, members in groups]


def alone(block: Block | None) -> Block | None:
    """The block of one call, or of several of one layer"""
    return written(block) if block is not None and block.__class__ is Bilinear and block.P > 1 else block


def assemble(calls: Sequence[Call], deltas: Sequence[Tensor | None], N: int, layout: Layout) -> Block | None:
    """The block of a group of calls: J̃ is the sum over the calls. None where the outputs do not depend on them."""
    blocks: list[Block] = [
        call.block(delta, N, layout) for call, delta in zip(calls, deltas, strict=True) if delta is not None
    ]
    if not blocks:
        return None
    first, *others = blocks
    if len(calls) == 1 or len({call.kind for call in calls}) == 1:
        return alone(first.beside(others) if others else first)
    # A weight that different layers share: add its columns up.
    columns: dict[int, Tensor] = {}
    params: dict[int, Tensor] = {}
    for block in blocks:
        pieces = block.rows(block.dtype).split([p.numel() for p in block.params], 1)
        for p, piece in zip(block.params, pieces, strict=True):
            params[id(p)] = p
            columns[id(p)] = columns[id(p)] + piece if id(p) in columns else piece
    return Explicit(list(params.values()), torch.cat(list(columns.values()), 1), N)
