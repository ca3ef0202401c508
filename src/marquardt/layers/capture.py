"""What is seen of a forward pass: calls of layers, by their rules, and the graph of z, with the rules of its nodes.

A rule says what a and δ are for a kind of layer. It has the signature of the function it stands for in
torch.nn.functional, and says how the row-wise products of its weight and bias arise. Layers are recognised by the
functions they call, not by module hooks: `F.linear(x, embedding.weight)` counts like the module, a module called twice
counts twice, and nothing is ever attached to the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
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
from .blocks import Bilinear, Block, Explicit, Lookup, cached_rows
from .shortcuts import Maxima, Pooled, behind, users


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
        vectors: whether a is x and δ is as it comes, for samples that are vectors: x (N, I), δ (R, N, O).

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
    vectors: bool = False  # a is x and δ as it comes, of samples that are vectors


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Operand:
    """y = xWᵀ + b: a = x"""
    return Operand(
        weight, bias, input, input.ndim - 1, lambda: input[..., None, None, :], lambda delta: delta[..., None, None, :],
        vectors=input.ndim == 2,
    )  # fmt: skip


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
    """y = x̂∘γ + β: a = x̂, every feature a group"""
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
    """The rows of a layer cannot be read in this way."""


ALL = -1  # samples, however many there are


class Place(NamedTuple):
    """M samples, from `start` on in equal steps, in one dimension: the entries of each side by side, or M apart."""

    dim: int | None  # None: all of the tensor belongs to one sample
    start: int = 0
    M: int = ALL
    step: int = 1
    apart: bool = False

    def of(self, N: int) -> Place:
        """With the number of samples filled in, if it is that of all."""
        return self._replace(M=N) if self.M == ALL else self

    @property
    def samples(self) -> slice:
        return slice(self.start, self.start + self.step * (self.M - 1) + 1, self.step)

    def numbers(self, D: int, N: int) -> Tensor:
        """The sample of every entry of the dimension, or of the one that all is: (D,)"""
        _, start, M, step, apart = self.of(N)
        number = torch.arange(D)
        return start + step * (number % M if apart else number // (D // M))

    def fits(self, dims: Sequence[int], N: int) -> bool:
        """Whether all samples may be here in a tensor with these dimensions."""
        return (d := self.dim or 0) < len(dims) and dims[d] % N == 0 and not (self.apart and dims[d] == N)

    def __call__(self, t: Tensor, skip: int) -> Tensor:
        """(skip…, *dims) → (skip…, M, T, *other dims)"""
        if self.dim is None:
            return t.unsqueeze(skip).unsqueeze(skip)
        t = t.movedim(skip + self.dim, skip)
        T = t.shape[skip] // self.M
        split: Tensor = t.unflatten(skip, (T, self.M) if self.apart else (self.M, T))
        return split.transpose(skip, skip + 1) if self.apart else split


# Where all samples may be in the leading dimensions of a layer's input, (N, …), (T, N, …) or (T·N, …), in the order in
# which these are tried; the first that is proven right on real rows is maxima.
PLACES = FIRST, *_ = Place(0), Place(1), Place(0, apart=True)


class Layout:
    """A place in pickles of earlier versions, which are read and forgotten."""


class Call:
    """One use of trainable parameters by a layer that has a rule."""

    maxima: Maxima | None = None  # if δ is that of a max-pool behind it: the outputs that the pool passes on

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

    def block(self, delta: Tensor, N: int, place: Place) -> Bilinear | Lookup:
        """The rows of this call, with the samples at this place of its leading dimensions."""
        o = self.operand
        if o.x._version != self.version:
            raise Misfit("the input was changed in place after the call")
        if not (o.lead and o.x.shape[0] == N and place == FIRST) and not place.fits(o.x.shape[: o.lead], N):
            raise Misfit("no dimension holds the samples")
        try:
            return self._read(delta, N, place)
        except RuntimeError as error:  # shapes that a user's rule has wrong
            if out_of_memory(error):
                raise
            raise Misfit(str(error)) from error

    def _read(self, delta: Tensor, N: int, place: Place) -> Bilinear | Lookup:
        o, maxima = self.operand, self.maxima
        if o.vectors and o.weight is not None and maxima is None and place == FIRST and o.x.shape[0] == N:
            a = o.x.detach()
            return Bilinear(a if a.dtype is delta.dtype else a.to(delta.dtype), delta, o.weight, o.bias)
        # Under autocast a and δ may be less precise, and products of matrices take them as they are.
        is_lookup = self.is_lookup
        if is_lookup or maxima is not None or (o.weight is not None and o.weight.ndim < 2):
            delta = widened(delta)
        if maxima is not None and o.some is not None and place == FIRST and o.x.shape[0] == N:
            some_a = o.some

            def read(delta: Tensor, some: slice) -> Bilinear:
                return _bilinear(o, some_a(some), delta, delta.shape[1], place)

            return Pooled(read, delta, maxima)
        delta = delta if maxima is None else maxima.spread(maxima.scaled(delta))
        if is_lookup:
            assert o.weight is not None
            place = place.of(N)
            index = place(o.a().detach(), 0).flatten(1)  # (N, P)
            return Lookup(index, place(o.delta(delta), 1).flatten(2, -2), o.weight)
        a = o.a()
        return _bilinear(o, a.detach() if a.requires_grad else a, delta, N, place)

    def fits(self, N: int) -> tuple[bool, ...]:
        """By place, whether the samples could be there."""
        return tuple(place.fits(self.operand.x.shape[: self.operand.lead], N) for place in PLACES)


def _bilinear(o: Operand, a: Tensor, delta: Tensor, N: int, place: Place) -> Bilinear:
    delta, plain = o.delta(delta), o.lead == 1 and place == FIRST  # then they are as they shall be
    if not (plain and a.ndim == 4 and delta.ndim == 5 and a.shape[0] == N):
        place = place.of(N)
        a, delta = place(a, 0), place(delta, 1)
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
    ) -> None:
        super().__init__()
        self.known = None if known is None else iter(known)  # slopes to take instead of drawing some
        self.trainable = params if isinstance(params, dict) else {id(p): i for i, p in enumerate(params)}
        self.calls: list[Call] = []
        # Of each call: its parameters, by number, and what the place of the samples depends on.
        self.ways: list[object] = []
        self.slopes: list[Slopes] = []
        self.functions: list[object] = []  # that were called, those of what is not differentiated among them
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
        self.pools = self.pools or func in MAX_POOLS
        return func(*args, **kwargs)

    def _called(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> None:
        """A call of a layer, if a parameter of it trains. The edge is maxima and not the tensor, which an in-place
        activation may overwrite."""
        if (operand := _operand(func, args, kwargs)) is None:
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
                if call.maxima is None and (found := behind(call.edge, call.shape, using)) is not None:
                    call.edge, call.maxima = found

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
    """What the rule of a function says of a call; a fault in a user's rule is named as such."""
    try:
        operand = RULES[func](*args, **kwargs)
    except Exception as error:
        unless_interrupted(error)
        if getattr(RULES[func], "__module__", None) == __name__:  # no fault of the rule: it came from outside
            raise
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
SPECIAL = {*REPLACED, *HOOKING, *MAX_POOLS}


def _hook(func: Callable[..., Any], tensor: Tensor, hook: object = None, *_: object) -> object:
    """What is the same in every pass that sets this hook: a function is made anew, its code is not. Those of FSDP2
    change no gradient."""
    own = str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
    return None if own else getattr(hook, "__code__", type(hook))


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


def cached(block: Any) -> Block:
    """The block of one call, or of several of one layer"""
    return cached_rows(block) if block.__class__ is Bilinear and block.P > 1 else block


def assemble(calls: Sequence[Call], deltas: Sequence[Tensor | None], N: int, place: Place) -> Block | None:
    """The block of a group of calls: J̃ is the sum over the calls. None where the outputs do not depend on them."""
    blocks: list[Any] = [
        call.block(delta, N, place) for call, delta in zip(calls, deltas, strict=True) if delta is not None
    ]
    if not blocks:
        return None
    first, *others = blocks
    if len(calls) == 1 or len({call.kind for call in calls}) == 1:
        block = first.beside(others) if others else first
        return cached(block)
    # A weight that different layers share: add its columns up.
    columns: dict[int, Tensor] = {}
    params: dict[int, Tensor] = {}
    for block in blocks:
        pieces = block.rows(block.dtype).split([p.numel() for p in block.params], 1)
        for p, piece in zip(block.params, pieces, strict=True):
            params[id(p)] = p
            columns[id(p)] = columns[id(p)] + piece if id(p) in columns else piece
    return Explicit(list(params.values()), torch.cat(list(columns.values()), 1), N)


# --- The graph of z, walked from the outputs to the leaves.


Node = Any  # torch's own type does not know the names of what is saved


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


LEAF = "torch::autograd::AccumulateGrad"
LEAF_NODE: Any = get_gradient_edge(torch.empty(0, requires_grad=True)).node.__class__

# These pick by numbers that no edge leads to.
PICKING = {"EmbeddingBackward0", "GatherBackward0", "IndexBackward0", "IndexSelectBackward0", "TakeBackward0"}

# By the class of a node: what it has noted beside tensors, which to read would unpack, and beside factors.
NOTED: dict[type, list[str]] = {}
FACTORS = ("_alpha", "_beta", "_dtype", "_layout", "_options", "_scale", "_strides")


def _noted(node: Node) -> tuple[object, list[str]]:
    """Its kind, and the names of that; classes of custom functions may be made anew in every step."""
    kind = type(node)
    if issubclass(kind, torch.autograd.function.BackwardCFunction) or kind.__name__ == "CppFunction":
        return node.name(), []
    names = [name for name in dir(kind) if name.startswith("_saved_") and not hasattr(kind, f"_raw{name}")]
    plain = (name for name in names if isinstance(getattr(node, name, set()), (Hashable, list)))
    NOTED[kind] = [name for name in plain if not name.endswith(FACTORS)]
    return kind, NOTED[kind]


def shape_at(node: Node, number: int) -> tuple[int, ...]:
    """Of an output of a node"""
    return tuple(node.variable.shape if node.name() == LEAF else node._input_metadata[number].shape)
