"""What is seen of a forward pass: calls of layers, by their rules, and the graph of z, with the rules of its nodes.

A rule says what a and δ are for a kind of layer. It has the signature of the function it stands for in
torch.nn.functional, and says how the row-wise products of its weight and bias arise. Layers are recognised by the
functions they call, not by module hooks: `F.linear(x, embedding.weight)` counts like the module, a module called twice
counts twice, and nothing is ever attached to the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from ..model.anatomy import Slopes, drawn_rrelu
from ..model.batch import widened
from ..surroundings import out_of_memory, unless_interrupted
from .blocks import Bilinear, Block, Explicit, written
from .lookup import Lookup
from .pooled import Kept, Pooled, behind, users
from .unrolled import unrolled


class Operand(NamedTuple):
    """How a call uses its weight: an input of shape (*lead, *rest), and what becomes of it and of δ.

    Attributes:
        weight: the parameter that multiplies, or None.
        bias: the parameter that is added, or None.
        x: the input, (*lead, *rest).
        lead: leading dimensions of the input that are samples or positions.
        a: what the weight multiplies, (*lead, P', G, I); of a table lookup the indices (*lead).
        delta: from gradients at the output (R, *lead, *rest) to (R, *lead, P', G, O).
        window: numbers of x that one position sees, if positions share them.
        some: a of some samples, if a is larger than x.

    >>> operand = mq.layers.RULES[nn.functional.linear](x, model[0].weight, model[0].bias)
    >>> operand.a().shape
    torch.Size([64, 1, 1, 2])
    """

    weight: Tensor | None
    bias: Tensor | None
    x: Tensor
    lead: int  # leading dimensions that are samples or positions
    a: Callable[[], Tensor]  # (*lead, P', G, I), or for a table lookup the indices (*lead)
    delta: Callable[[Tensor], Tensor]  # (R, *lead, *rest) → (R, *lead, P', G, O)
    window: int | None = None  # numbers of x that one position sees, if positions share them; None: a is as large as x
    # a of some samples, without a graph, if a is larger than x; then `delta` must take those of some samples too.
    some: Callable[[slice], Tensor] | None = None


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Operand:
    """y = xWᵀ + b: a = x"""
    return Operand(
        weight, bias, input, input.ndim - 1, lambda: input[..., None, None, :], lambda delta: delta[..., None, None, :]
    )


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Operand | None:
    """A convolution is a linear layer at every position: a = the patches that the kernel sees."""
    d = weight.ndim - 2
    if input.ndim != d + 2:  # no sample dimension
        return None
    kernel = weight.shape[2:]
    step, spread = _each(stride, d), _each(dilation, d)
    images = input.detach()

    def patches(some: slice = slice(None)) -> Tensor:
        x = F.pad(images[some], _margins(padding, kernel, spread))
        sizes = [(x.shape[2 + i] - spread[i] * (kernel[i] - 1) - 1) // step[i] + 1 for i in range(d)]
        over, down = x.stride()[:2], x.stride()[2:]
        view = x.as_strided(  # (N, C, *positions, *kernel): no copy
            (*x.shape[:2], *sizes, *kernel),
            (*over, *(down[i] * step[i] for i in range(d)), *(down[i] * spread[i] for i in range(d))),
        )
        view = view.unflatten(1, (groups, -1))  # (N, G, C/G, *positions, *kernel)
        places, offsets = range(3, 3 + d), range(3 + d, 3 + 2 * d)
        if x.device.type == "cpu":  # one copy, twice as fast where positions are innermost, which are many
            found: Tensor = view.permute(0, 1, 2, *offsets, *places).reshape(len(x), groups, -1, math.prod(sizes))
            return found.permute(0, 3, 1, 2)  # (N, P, G, I)
        a: Tensor = view.permute(0, *places, 1, 2, *offsets).reshape(len(x), math.prod(sizes), groups, -1)
        return a

    def at_output(delta: Tensor) -> Tensor:
        moved: Tensor = delta.flatten(3).unflatten(2, (groups, -1)).permute(0, 1, 4, 2, 3)  # (R, N, P, G, O)
        return moved

    return Operand(weight, bias, input, 1, patches, at_output, input.shape[1] * math.prod(kernel), patches)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Operand | None:
    """y = W[x]: rows of a table"""
    if max_norm is not None or scale_grad_by_freq:  # changes the table, or the gradient
        return None

    def at_output(delta: Tensor) -> Tensor:
        if padding_idx is None:
            return delta
        return delta * (input != padding_idx % len(weight))[..., None]  # the padding row never learns

    return Operand(weight, None, input, input.ndim, lambda: input, at_output)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Operand:
    """y = x̂∘γ + β: a = x̂, every feature a group of its own"""
    lead = input.ndim - len(normalized_shape)
    return Operand(
        weight,
        bias,
        input,
        lead,
        lambda: F.layer_norm(input, normalized_shape, None, None, eps).flatten(lead)[..., None, :, None],
        lambda delta: delta.flatten(1 + lead)[..., None, :, None],
    )


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Operand:
    return _channels(weight, bias, input, lambda: F.group_norm(input, num_groups, None, None, eps))


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Operand | None:
    if training or running_mean is None or running_var is None:  # couples the samples
        return None
    return _channels(
        weight, bias, input, lambda: F.batch_norm(input, running_mean, running_var, None, None, False, momentum, eps)
    )


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Operand | None:
    if not use_input_stats:
        return None
    return _channels(weight, bias, input, lambda: F.instance_norm(input, eps=eps))


RULES: dict[Callable[..., Any], Callable[..., Operand | None]] = {
    F.linear: linear,
    F.conv1d: convolution,
    F.conv2d: convolution,
    F.conv3d: convolution,
    F.embedding: embedding,
    F.layer_norm: layer_norm,
    F.group_norm: group_norm,
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
}


def _channels(weight: Tensor | None, bias: Tensor | None, x: Tensor, normalised: Callable[[], Tensor]) -> Operand:
    """y = x̂∘γ + β with channels second: (N, C, *positions)"""
    return Operand(
        weight,
        bias,
        x,
        1,
        lambda: normalised().reshape(*x.shape[:2], -1).transpose(1, 2)[..., None],  # (N, P, C, 1)
        lambda delta: delta.reshape(*delta.shape[:3], -1).transpose(2, 3)[..., None],
    )


def _each(value: int | Sequence[int], d: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * d if len(values) == 1 else values


def _margins(padding: str | int | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Padding before and after each dimension, last dimension first, as F.pad takes it."""
    margins = []
    for i in reversed(range(len(kernel))):
        if padding == "same":
            total = dilation[i] * (kernel[i] - 1)
            margins += [total // 2, math.ceil(total / 2)]
        else:
            margins += [0, 0] if padding == "valid" else [_each(padding, len(kernel))[i]] * 2  # type: ignore[arg-type]
    return margins


def opened_attention() -> Callable[..., Any]:
    """F.multi_head_attention_forward, entered: as a whole it hides its linear layers from a function mode.

    It asks has_torch_function and hands itself over as one call; a copy of it whose globals say no does not.
    """
    whole = F.multi_head_attention_forward
    copy = FunctionType(
        whole.__code__,
        {**vars(F), "has_torch_function": lambda _: False},
        whole.__name__,
        whole.__defaults__,
    )
    copy.__kwdefaults__ = whole.__kwdefaults__
    return copy


# --- Watching one forward pass: which layers were called, on what, and which random slopes were drawn.


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
        unless_interrupted(error)
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


# --- What the nodes of an autograd graph make of a tensor V at one of their inputs: a rule for each kind of node. A
# rule reads what its node has saved for the backward pass: so these are the very numbers of the forward pass, masks
# of Dropout included, and the products of a backward pass within the model are nodes like all others.


Shape = Sequence[int]


class Outer(NamedTuple):
    """V multiplies: its gradient is Σ δ ⊗ a over the leading dimensions."""

    a: Callable[[], Tensor]  # (*lead, G, I)
    delta: Callable[[Tensor], Tensor]  # (R, *output) → (R, *lead, G, O)
    dims: Sequence[int] = (0,)  # leading dimensions, in which the samples may be
    turned: bool = False  # V is (G, I, O), not (G·O, I)


class Spread(NamedTuple):
    """V is broadcast to the output: its gradient is the sum over where it was broadcast."""

    delta: Callable[[Tensor], Tensor]  # (R, *output) → (R, *output): gradient of every element
    shape: Shape  # of V, with ones for the dimensions that it lacks

    @property
    def dims(self) -> Sequence[int]:
        return [d for d, size in enumerate(self.shape) if size == 1]


class Picked(NamedTuple):
    """V is a table, whose rows are picked."""

    rows: Callable[[], Tensor]  # (*lead)
    delta: Callable[[Tensor], Tensor]  # (R, *output) → (R, *lead, E)
    dims: Sequence[int]


Form = Outer | Spread | Picked


def _product(left: Callable[[], Tensor], right: Callable[[], Tensor], of_left: bool, factor: float = 1) -> Outer:
    """Y = AB (*, J, K) (*, K, L), V one of the two"""
    if of_left:  # every column of Y is a position
        return Outer(lambda: right().mT[..., None, :], lambda delta: _times(delta.mT, factor)[..., None, :])
    return Outer(lambda: left()[..., None, :], lambda delta: _times(delta, factor)[..., None, :], turned=True)


def mm(node: Any, slot: int, V: Shape, out: Shape) -> Form:
    return _product(lambda: node._saved_self, lambda: node._saved_mat2, slot == 0)


def addmm(node: Any, slot: int, V: Shape, out: Shape) -> Form:
    if slot == 0:
        return _spread(lambda delta: _times(delta, node._saved_beta), V, out)
    return _product(lambda: node._saved_mat1, lambda: node._saved_mat2, slot == 1, node._saved_alpha)


def bmm(node: Any, slot: int, V: Shape, out: Shape) -> Form:
    """A product for every group: the groups come first in V, and last among the dimensions of a and δ"""
    return _groups(lambda: node._saved_self, lambda: node._saved_mat2, slot == 0)


def baddbmm(node: Any, slot: int, V: Shape, out: Shape) -> Form:
    if slot == 0:
        return _spread(lambda delta: _times(delta, node._saved_beta), V, out)
    return _groups(lambda: node._saved_batch1, lambda: node._saved_batch2, slot == 1, node._saved_alpha)


def _groups(left: Callable[[], Tensor], right: Callable[[], Tensor], of_left: bool, factor: float = 1) -> Outer:
    if of_left:
        return Outer(lambda: right().permute(2, 0, 1), lambda delta: _times(delta, factor).permute(0, 3, 1, 2))
    return Outer(lambda: left().transpose(0, 1), lambda delta: _times(delta, factor).transpose(1, 2), turned=True)


def mv(node: Any, slot: int, V: Shape, out: Shape) -> Form | None:
    """y = Av"""
    if slot == 0:
        return None
    return Outer(lambda: node._saved_self[:, None, :], lambda delta: delta[..., None, None])


def add(node: Any, slot: int, V: Shape, out: Shape) -> Form:
    return _spread(lambda delta: _times(delta, node._saved_alpha if slot else 1), V, out)


def sub(node: Any, slot: int, V: Shape, out: Shape) -> Form:
    return _spread(lambda delta: _times(delta, -node._saved_alpha if slot else 1), V, out)


def mul(node: Any, slot: int, V: Shape, out: Shape) -> Form:
    return _spread(lambda delta: delta * (node._saved_self if slot else node._saved_other), V, out)


def div(node: Any, slot: int, V: Shape, out: Shape) -> Form:
    def at_input(delta: Tensor) -> Tensor:
        other: Tensor = node._saved_other
        return -delta * (node._saved_self / other**2) if slot else delta / other

    return _spread(at_input, V, out)


def expand(node: Any, slot: int, V: Shape, out: Shape) -> Form | None:
    aligned = _aligned(V, out)
    return _spread(lambda delta: delta, V, out) if all(v in (1, o) for v, o in zip(aligned, out, strict=True)) else None


def where(node: Any, slot: int, V: Shape, out: Shape) -> Form:
    def at_input(delta: Tensor) -> Tensor:
        condition: Tensor = node._saved_condition
        return torch.where(~condition if slot else condition, delta, 0)

    return _spread(at_input, V, out)


def prelu(node: Any, slot: int, V: Shape, out: Shape) -> Form | None:
    """y = x where x > 0, w·x elsewhere"""
    return _spread(lambda delta: delta * node._saved_self.clamp(max=0), V, out) if slot == 1 else None


def normalisation(node: Any, slot: int, V: Shape, out: Shape) -> Form | None:
    """y = x̂∘γ + β"""
    if slot == 0:
        return None

    def at_input(delta: Tensor) -> Tensor:
        normalised: Tensor = (node._saved_input - node._saved_result1) * node._saved_result2
        return delta * normalised if slot == 1 else delta

    return _spread(at_input, V, out)


def lookup(node: Any, slot: int, V: Shape, out: Shape) -> Form | None:
    if node._saved_scale_grad_by_freq:
        return None
    padding = node._saved_padding_idx

    def at_output(delta: Tensor) -> Tensor:
        # None is saved as −1, as a number without sign.
        return delta * (node._saved_indices != padding)[..., None] if 0 <= padding < V[0] else delta

    return Picked(lambda: node._saved_indices, at_output, range(len(out) - 1))


def convolve_back(node: Any, slot: int, V: Shape, out: Shape) -> Form | None:
    """The backward pass of a convolution to its input: what was δ there is a, and a is made of the δ of now"""
    if node._saved_transposed or slot != 2:
        return None
    return _in_patches(node, lambda: node._saved_grad_output)


def convolve(node: Any, slot: int, V: Shape, out: Shape) -> Form | None:
    if slot == 0:
        return None
    if slot == 2:
        return Spread(lambda delta: delta, (1, *V, *[1] * (len(out) - 2)))
    if node._saved_transposed:  # the same as the backward pass of a convolution
        return _in_patches(node, lambda: node._saved_input)
    operand = _patches(node, node._saved_input)
    return None if operand is None else Outer(operand.a, operand.delta)


def _in_patches(node: Any, inputs: Callable[[], Tensor]) -> Form:
    """An input for every place of a kernel, which spreads it over a patch of the output: there δ is seen"""

    def at_output(delta: Tensor) -> Tensor:
        found: Tensor = _patches(node, delta.flatten(0, 1)).a().unflatten(0, delta.shape[:2])
        return found

    return Outer(lambda: _patches(node, node._saved_input).delta(inputs()[None])[0], at_output, turned=True)


def _patches(node: Any, x: Tensor) -> Any:
    return convolution(
        x, node._saved_weight, None, node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_groups
    )


NODES: dict[str, Callable[[Any, int, Shape, Shape], Form | None]] = {
    "AddBackward0": add,
    "AddmmBackward0": addmm,
    "BaddbmmBackward0": baddbmm,
    "BmmBackward0": bmm,
    "ConvolutionBackward0": convolve,
    "ConvolutionBackwardBackward0": convolve_back,
    "DivBackward0": div,
    "EmbeddingBackward0": lookup,
    "ExpandBackward0": expand,
    "MmBackward0": mm,
    "MulBackward0": mul,
    "MvBackward0": mv,
    "NativeLayerNormBackward0": normalisation,
    "PreluKernelBackward0": prelu,
    "RepeatBackward0": expand,
    "SubBackward0": sub,
    "WhereBackward0": where,
}

# Whether these see samples beside V no shape can tell: 2·V and x·V are the same node, and an expanded V may be a token
# for every sample, or a matrix for every derivative.
UNSURE = {"AddBackward0", "DivBackward0", "ExpandBackward0", "MulBackward0", "RepeatBackward0", "SubBackward0"}

# These pick by numbers that no edge leads to.
PICKING = {"EmbeddingBackward0", "GatherBackward0", "IndexBackward0", "IndexSelectBackward0", "TakeBackward0"}

# The same tensor again,
COPIES = {"AliasBackward0", "CloneBackward0"}

# and the same elements in the same order.
VIEWS = COPIES | {
    "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "SqueezeBackward3",
    "SqueezeBackward4", "SqueezeBackward5", "UnsafeViewBackward0", "UnsqueezeBackward0", "UnsqueezeBackward1",
    "ViewBackward0",
}  # fmt: skip


def _spread(delta: Callable[[Tensor], Tensor], V: Shape, out: Shape) -> Spread:
    return Spread(delta, _aligned(V, out))


def _aligned(V: Shape, out: Shape) -> Shape:
    return (*[1] * (len(out) - len(V)), *V)


def _times(delta: Tensor, factor: Any) -> Tensor:
    return delta if factor == 1 else delta * factor


# --- The graph of z, walked from the outputs to the parameters: every node that makes something of a parameter and of
# samples is a use of it, with the rule of its kind.


Node = Any  # torch's own type does not know the names of what is saved


@dataclass(frozen=True)
class Use:
    """A node of the graph with a tensor V among its inputs that is made of parameters alone."""

    number: int  # of the node
    node: Node
    slot: int
    source: GradientEdge  # V
    params: frozenset[int]  # what V is made of
    direct: bool  # V is one parameter with its elements in order, or transposed:
    turned: bool
    alone: bool  # nothing else that is differentiated goes into the node: it may see no samples at all

    @property
    def site(self) -> tuple[int, int]:
        return self.number, self.slot

    @property
    def edge(self) -> GradientEdge:
        return GradientEdge(self.node, 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the node's output"""
        return tuple(self.node._input_metadata[0].shape)

    @property
    def source_shape(self) -> tuple[int, ...]:
        return _shape(self.source)

    def form(self) -> Form:
        """What the rule of the node says."""
        name = self.node.name()
        others = [m for m in self.node._input_metadata[1:] if len(m.shape)]
        try:
            found = NODES[name](self.node, self.slot, self.source_shape, self.shape) if name in NODES else None
        except (AttributeError, RuntimeError) as error:  # nothing saved, or changed since, or another version of torch
            if out_of_memory(error):
                raise
            raise Misfit(str(error)) from error
        if found is None or not self.shape or others:
            raise Misfit(f"no rule for input {self.slot} of {name}")
        return found


class Walk:
    """All nodes behind z, each after those that it leads to."""

    def __init__(
        self, z: Tensor, params: Sequence[Tensor], others: Iterable[Tensor] = (), index: dict[int, int] | None = None
    ) -> None:
        self.index = {id(p): i for i, p in enumerate(params)} if index is None else index
        self._held = others
        self.root: tuple[Node, int] = (z.grad_fn, z.output_nr)
        self.nodes: list[Node] = []
        self._read()

    @cached_property
    def others(self) -> set[int]:
        """Leaves that depend on no sample either"""
        return {id(p) for p in self._held}

    def _read(self) -> None:
        """Every step reads the whole graph: so this is one loop, that calls nothing it need not."""
        index, nodes = self.index, self.nodes
        kinds: list[object] = [self.root[1]]  # what each node does, with what, in their order
        sizes: list[object] = []  # dimensions and sizes that they have noted
        edges_of: dict[Node, Any] = {}
        numbers: dict[Node | None, int] = {None: -1}
        number = 0
        stack = [node for node in self.root[:1] if node is not None]  # the outputs may be a parameter itself
        while stack:
            node = stack[-1]
            if node not in edges_of:
                edges = edges_of[node] = node.next_functions
                if edges:
                    for child, _ in edges:
                        if child is not None and child not in edges_of:
                            stack += (child,)
                    continue
            del stack[-1]
            if node in numbers:
                continue
            edges = edges_of[node]
            numbers[node] = number
            number += 1
            nodes += (node,)
            kind = node.__class__
            if kind in NOTED:
                noted = NOTED[kind]
            else:
                kind, noted = _noted(node)
            kinds += (kind,)
            for child, k in edges:
                kinds += ((numbers[child], k) if k else numbers[child],)
            for name in noted:
                value = getattr(node, name)
                if value.__class__ is not float:
                    sizes += (repr(value) if value.__class__ is list else value,)
            if kind is LEAF_NODE:
                variable = id(node.variable)
                kinds += (index[variable] if variable in index else -1,)
        # Numbers for all of it: of the sizes without what is in the tensors.
        self.structure, self.sizes = hash(tuple(kinds)), hash(tuple(sizes))

    def signature(self, N: int) -> object:
        """All that decides what the uses are and where in them the samples, beside the structure."""
        return tuple((u.number, u.slot, tuple("N" if d == N else d for d in u.shape)) for u in self.uses())

    def uses(self, stops: Collection[int] | None = None, blind: Collection[int] = ()) -> list[Use]:
        """The uses, if of the nodes that need not see samples `stops` do, and `blind` do not though they seem to. None:
        all that there might be."""
        made_of: dict[Node, frozenset[int]] = {}  # nodes whose outputs are made of parameters alone
        found: list[Use] = []
        for number, node in enumerate(self.nodes):
            name, edges = node.name(), node.next_functions
            if name == LEAF:
                i = self.index.get(id(node.variable))
                if i is not None or id(node.variable) in self.others:
                    made_of[node] = frozenset() if i is None else frozenset([i])
                continue
            inputs = [child for child, _ in edges if child is not None]
            alone = bool(inputs) and all(child in made_of for child in inputs)
            sure = name not in UNSURE and name not in PICKING and len(inputs) == len(edges)
            unsure = name in UNSURE and (stops is None or number not in stops)
            if alone and (sure or unsure or number in blind):
                made_of[node] = frozenset().union(*(made_of[child] for child in inputs))
                if stops is not None or sure or number in blind:
                    continue
            found += [
                self._use(number, slot, GradientEdge(child, k), made_of[child], alone)
                for slot, (child, k) in enumerate(edges)
                if made_of.get(child)
            ]
        return found

    def _use(self, number: int, slot: int, source: GradientEdge, params: frozenset[int], alone: bool) -> Use:
        direct, turned = _chain(source.node)
        return Use(number, self.nodes[number], slot, source, params, direct and len(params) == 1, turned, alone)


LEAF = "torch::autograd::AccumulateGrad"
LEAF_NODE: Any = get_gradient_edge(torch.empty(0, requires_grad=True)).node.__class__

# By the class of a node: what it has noted beside tensors, which to read would unpack, and beside factors.
NOTED: dict[type, list[str]] = {}
FACTORS = ("_alpha", "_beta", "_dtype", "_layout", "_options", "_scale", "_strides")


def _noted(node: Node) -> tuple[object, list[str]]:
    """Its kind, and the names of that; classes of functions of one's own may be made anew in every step."""
    kind = type(node)
    if issubclass(kind, torch.autograd.function.BackwardCFunction) or kind.__name__ == "CppFunction":
        return node.name(), []
    names = [name for name in dir(kind) if name.startswith("_saved_") and not hasattr(kind, f"_raw{name}")]
    plain = (name for name in names if isinstance(getattr(node, name, set()), (Hashable, list)))
    NOTED[kind] = [name for name in plain if not name.endswith(FACTORS)]
    return kind, NOTED[kind]


def _chain(node: Node) -> tuple[bool, bool]:
    """Whether only views lead to a leaf, and whether they transpose it: after that no view may come."""
    turned = seen = False
    while node.name() != LEAF:
        if _transposes(node) and not seen:
            turned = not turned
        elif node.name() in VIEWS:
            seen = seen or node.name() not in COPIES
        else:
            return False, False
        node = node.next_functions[0][0]
    return True, turned


def _transposes(node: Node) -> bool:
    """Whether it is one of the three ways to turn a matrix"""
    if len(node._input_metadata[0].shape) != 2:
        return False
    return node.name() in TURNING and tuple(getattr(node, "_saved_dims", ())) != (0, 1)


TURNING = {"PermuteBackward0", "TBackward0", "TransposeBackward0"}


def _shape(edge: GradientEdge) -> tuple[int, ...]:
    node: Node = edge.node
    if node.name() == LEAF:
        return tuple(node.variable.shape)
    return tuple(node._input_metadata[edge.output_nr].shape)
