"""Where the samples are in the nodes of a graph, by kinds, dimensions and shapes alone: whatever numbers are in it.

A node of a kind that is not known here may bring any sample to any other, and so may one that picks by numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch.autograd.graph import GradientEdge

from ..surroundings import unless_interrupted
from .capture import LEAF, PICKING, Node, Place, Walk, shape_at

Shape = tuple[int, ...]


class Axis(NamedTuple):
    """Some samples in a tensor, one after the other: with its elements in order, `stride` of them belong to the first
    sample, the next to the second, and after all of them come those of the first again. An element of a sample has
    influence on the output of no other sample."""

    start: int  # the first sample,
    count: int  # type: ignore[assignment]  # and how many there are
    stride: int  # 0 if there is one


Axes = Sequence["Axis | None"]


def sample_axes(walk: Walk, N: int) -> dict[tuple[Node, int], Axis | None]:
    """By every output of a node: where the samples are in it; None where it may hold something of several samples, or
    is shared by them."""
    root = walk.root
    if root[0] is None:
        return {}
    found: dict[tuple[Node, int], Axis | None] = {root: Axis(0, N, math.prod(shape_at(*root)) // N) if N > 1 else None}
    used: dict[Node, dict[int, Axis | None]] = {root[0]: {root[1]: found[root]}}
    for node in reversed(walk.nodes):
        edges = node.next_functions
        if not edges:
            continue
        for (child, k), axis in zip(edges, _through(node, edges, used[node]), strict=True):
            if child is None:
                continue
            outputs = used.setdefault(child, {})
            outputs[k] = axis if outputs.get(k, axis) == axis else None
            found[child, k] = outputs[k]
    return found


def keeps_apart(walk: Walk, N: int) -> bool:
    """Whether no tensor that may hold samples mixes them."""
    axes = sample_axes(walk, N)
    shared: set[Node] = set()  # nodes that hold none: made of leaves, or with too few numbers beside them
    for node in walk.nodes:
        edges = node.next_functions
        known = bool(edges) and all(child is not None for child, _ in edges) and node.name() not in PICKING
        if not edges:
            alone = node.name() == LEAF and (node.variable.numel() % N != 0 or id(node.variable) in walk.index)
        else:
            alone = known or all(math.prod(m.shape) % N for m in node._input_metadata)
        if alone and all(child is None or child in shared for child, _ in edges):
            shared.add(node)
    return all(axis is not None or node in shared for (node, _), axis in axes.items())


def all_at(place: Place, axis: Axis | None, edge: GradientEdge, N: int) -> bool:
    """Whether all samples are at this place."""
    shape = shape_at(edge.node, edge.output_nr)
    found = None if axis is None or axis[:2] != (0, N) else _place(shape, axis)
    if found is None:
        return False
    dim, inner = found
    return dim == place.dim and (inner == 1 and shape[dim] != N if place.apart else shape[dim] == inner * N)


def _through(node: Node, edges: Sequence[tuple[Node | None, int]], outputs: dict[int, Axis | None]) -> Axes:
    """Where the samples are at the inputs of a node, by where they are at those of its outputs that are used."""
    nothing: list[Axis | None] = [None] * len(edges)
    base = _base(node.name())
    several = SEVERAL.get(base)
    if None in outputs.values() or (several is None and len(outputs) > 1):
        return nothing
    try:
        inputs = [None if child is None else shape_at(child, k) for child, k in edges]
        if several is not None:
            return [several(node, outputs, inputs[0])]
        ((number, axis),) = outputs.items()
        assert axis is not None
        if axis.count == 1:  # whatever it does
            return [axis] * len(edges)
        rule = RULES.get(base) if number == 0 else None
        out = shape_at(node, number)
        place = _place(out, axis)
        if rule is None or place is None:
            return nothing
        return rule(Output(node, axis, out, *place), inputs)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:  # another version of torch
        unless_interrupted(error)
        return nothing


@cache
def _base(name: str) -> str:
    """AddBackward0 → Add, TanhBackwardBackward0 → TanhBackward; a function of one's own has no number: MyBackward"""
    return name.rpartition("Backward")[0] if name[-1].isdigit() else name


def _place(shape: Shape, axis: Axis) -> tuple[int, int] | None:
    """The dimension that the samples are in, and how many entries of it one has before the next begins"""
    below = 1
    for dim in reversed(range(len(shape))):
        above = below * shape[dim]
        if below <= axis.stride < above:
            period = axis.count * axis.stride
            return None if axis.stride % below or above % period else (dim, axis.stride // below)
        below = above
    return None


class Output(NamedTuple):
    """A node, and where the samples are in its output."""

    node: Any
    axis: Axis
    out: Shape
    dim: int
    inner: int

    def at(self, shape: Shape | None, dim: int) -> Axis | None:
        """In the same order in this dimension of an input; None if that has another size"""
        if shape is None or not 0 <= dim < len(shape) or shape[dim] != self.out[self.dim]:
            return None
        return self.axis._replace(stride=self.inner * math.prod(shape[dim + 1 :]))

    def attribute(self, name: str) -> Any:
        return getattr(self.node, f"_saved_{name}")

    def dims(self, name: str, ndim: int) -> list[int]:
        """Negative ones are saved as numbers without sign; none means all."""
        value = self.attribute(name)
        given = [value] if isinstance(value, int) else list(value or range(ndim))
        return [(d - 2**64 if d >= 2**63 else d) % ndim for d in given]


Rule = Callable[[Output, Sequence["Shape | None"]], Axes]


def _elementwise(s: Output, inputs: Sequence[Shape | None]) -> Axes:
    """With inputs that are broadcast: from the last dimension on"""
    return [None if shape is None else s.at(shape, s.dim - len(s.out) + len(shape)) for shape in inputs]


def _in_order(s: Output, inputs: Sequence[Shape | None]) -> Axes:
    """The same elements in the same order, in another shape"""
    return [s.axis if shape is not None and _place(shape, s.axis) is not None else None for shape in inputs]


def _permuted(s: Output, inputs: Sequence[Shape | None]) -> Axes:
    dims = s.dims("dims", len(s.out))
    return [s.at(inputs[0], dims[s.dim])]


def _transposed(s: Output, inputs: Sequence[Shape | None]) -> Axes:
    ndim = len(s.out)
    (first, second) = (0, 1) if s.node.name() == "TBackward0" else s.dims("dim0", ndim) + s.dims("dim1", ndim)
    return [s.at(inputs[0], {first: second, second: first}.get(s.dim, s.dim) if ndim > 1 else s.dim)]


def _reduced(s: Output, inputs: Sequence[Shape | None]) -> Axes:
    """Sums, means, maxima over some dimensions"""
    shape = inputs[0]
    assert shape is not None
    dims = s.dims("dim", len(shape))
    kept = range(len(shape)) if len(shape) == len(s.out) else [d for d in range(len(shape)) if d not in dims]
    dim = kept[s.dim]
    return [None if dim in dims else s.at(shape, dim), *[None] * (len(inputs) - 1)]


def _along(s: Output, inputs: Sequence[Shape | None]) -> Axes:
    """Something along one dimension, or some, which leaves the others as they are"""
    name = "dims" if hasattr(s.node, "_saved_dims") else "dim"
    return [None if shape is None or s.dim in s.dims(name, len(s.out)) else s.at(shape, s.dim) for shape in inputs]


def _sliced(s: Output, inputs: Sequence[Shape | None]) -> Axes:
    """A part of the samples, if it is their dimension"""
    shape = inputs[0]
    assert shape is not None
    if s.dim not in s.dims("dim", len(s.out)):
        return [s.at(shape, s.dim)]
    start, size = s.attribute("start") or 0, shape[s.dim]
    whole = s.inner == 1 and s.out[s.dim] == s.axis.count and s.attribute("step") == 1
    first = min(start if start >= 0 else start + size, size)
    below = math.prod(shape[s.dim + 1 :])
    return [Axis(s.axis.start - first, size, below) if whole and size > 1 else None]


def _selected(s: Output, inputs: Sequence[Shape | None]) -> Axes:
    (dim,) = s.dims("dim", len(s.out) + 1)
    return [s.at(inputs[0], s.dim + (s.dim >= dim))]


def _put_back(s: Output, inputs: Sequence[Shape | None]) -> Axes:
    """The gradient of a selection: zeros but for one place of a dimension"""
    (dim,) = s.dims("dim", len(s.out))
    return [None if s.dim == dim else s.at(inputs[0], s.dim - (s.dim > dim))]


def _stacked(s: Output, inputs: Sequence[Shape | None]) -> Axes:
    (dim,) = s.dims("dim", len(s.out))
    if s.dim != dim:
        return [s.at(shape, s.dim - (s.dim > dim)) for shape in inputs]
    alone = s.inner == 1 and s.out[dim] == s.axis.count
    return [Axis(s.axis.start + i, 1, 0) if alone else None for i in range(len(inputs))]


def _joined(s: Output, inputs: Sequence[Shape | None]) -> Axes:
    """Parts of the samples one after the other, if it is their dimension"""
    (dim,) = s.dims("dim", len(s.out))
    if s.dim != dim:
        return [s.at(shape, s.dim) for shape in inputs]
    rest = s.out[dim] - sum(shape[dim] for shape in inputs if shape is not None)
    if inputs.count(None) > 1 or s.inner != 1 or s.out[dim] != s.axis.count:
        return [None] * len(inputs)
    found: list[Axis | None] = []
    start = s.axis.start
    for shape in inputs:
        size = rest if shape is None else shape[dim]
        below = 0 if shape is None or size == 1 else math.prod(shape[dim + 1 :])
        found.append(None if shape is None else Axis(start, size, below))
        start += size
    return found


def _split(node: Any, outputs: dict[int, Axis | None], shape: Shape | None) -> Axis | None:
    """Parts of a dimension: of all samples the same one, or of some samples each"""
    sizes = [tuple(m.shape) for m in node._input_metadata]
    parts = [Output(node, axis, sizes[k], *(_place(sizes[k], axis) or (-1, 0))) for k, axis in outputs.items() if axis]
    assert shape is not None
    (dim,) = parts[0].dims("dim", len(shape))
    places = [s.at(shape, s.dim) for s in parts if s.dim not in (-1, dim)]
    if len(places) == len(parts):
        return places[0] if len(set(places)) == 1 else None
    starts = {s.axis.start - sum(t[dim] for t in sizes[:k]) for k, s in zip(outputs, parts, strict=True)}
    alone = all(s.dim == dim and s.inner == 1 and s.out[dim] == s.axis.count for s in parts)
    return Axis(starts.pop(), shape[dim], math.prod(shape[dim + 1 :])) if alone and len(starts) == 1 else None


def _unbound(node: Any, outputs: dict[int, Axis | None], shape: Shape | None) -> Axis | None:
    """The same for parts that have lost the dimension"""
    axes = {k: axis for k, axis in outputs.items() if axis}
    assert shape is not None
    first = next(iter(axes.values()))
    if len(set(axes.values())) == 1:
        if first.count == 1:
            return first if len(axes) > 1 else None  # of one alone it cannot be told
        out = tuple(node._input_metadata[next(iter(axes))].shape)
        place = _place(out, first)
        if place is None:
            return None
        s = Output(node, first, out, *place)
        (dim,) = s.dims("dim", len(shape))
        return s.at(shape, s.dim + (s.dim >= dim))
    starts = {axis.start - k for k, axis in axes.items()}
    (dim,) = Output(node, first, (), 0, 0).dims("dim", len(shape))
    alone = len(starts) == 1 and all(axis.count == 1 for axis in axes.values())
    return Axis(starts.pop(), shape[dim], math.prod(shape[dim + 1 :])) if alone else None


def _products(s: Output, inputs: Sequence[Shape | None]) -> Axes:
    """Of matrices, or of a batch of them; perhaps added to something"""
    *more, left, right = inputs
    last = len(s.out) - 1
    pair = [None if s.dim == last else s.at(left, s.dim), None if s.dim == last - 1 else s.at(right, s.dim)]
    return [*_elementwise(s, more), *pair]


def _first_dims(dims: Callable[[Output], int], of_all: bool = False) -> Rule:
    """A layer that leaves the first dimensions of its input as they are, or of all inputs of the shape of its output"""

    def rule(s: Output, inputs: Sequence[Shape | None]) -> Axes:
        if of_all:
            return [s.at(shape, s.dim) if shape == s.out and s.dim < dims(s) else None for shape in inputs]
        fits = inputs[0] is not None and len(inputs[0]) == len(s.out) and s.dim < dims(s)
        return [s.at(inputs[0], s.dim) if fits else None, *[None] * (len(inputs) - 1)]

    return rule


def _batch_norm(s: Output, inputs: Sequence[Shape | None]) -> Axes:
    """With batch statistics a channel sees no other: InstanceNorm has the samples among the channels"""
    trains = getattr(s.node, "_saved_training", True)
    return [s.at(inputs[0], s.dim) if s.dim == 1 or not trains else None, *[None] * (len(inputs) - 1)]


def _attention(s: Output, inputs: Sequence[Shape | None]) -> Axes:
    """Queries, keys and values (*, T, E), and a mask: queries see the keys of their own sample and head"""
    heads = s.dim < len(s.out) - 2
    mask = _elementwise(s, inputs[3:]) if heads else [None] * len(inputs[3:])
    return [s.at(inputs[0], s.dim), *(s.at(shape, s.dim) if heads else None for shape in inputs[1:3]), *mask]


def _trilinear(s: Output, inputs: Sequence[Shape | None]) -> Axes:
    ndim = len(s.out) + len(s.attribute("sumdim"))
    dim = [d for d in range(ndim) if d not in s.attribute("sumdim")][s.dim]
    lacking = [s.attribute(f"expand{i}") for i in (1, 2, 3)]
    return [
        None if dim in lacks else s.at(shape, dim - sum(d < dim for d in lacks))
        for lacks, shape in zip(lacking, inputs, strict=True)
    ]


def _unfolded(s: Output, inputs: Sequence[Shape | None]) -> Axes:
    (dim,) = s.dims("dimension", len(s.out) - 1)
    return [None if s.dim in (dim, len(s.out) - 1) else s.at(inputs[0], s.dim)]


ACTIVATIONS = """Celu Elu Gelu Hardshrink Hardsigmoid Hardswish Hardtanh LeakyRelu LogSigmoid Mish PreluKernel Relu
    Selu Sigmoid Silu Softplus Softshrink Tanh Threshold"""
ELEMENTWISE = """Abs Acos Acosh Add Addcdiv Addcmul Asin Asinh Atan Atan2 Atanh Ceil Clamp ClampMax ClampMin Copysign
    Copy Cos Cosh Deg2Rad Digamma Div Erf Erfc Erfinv Exp Exp2 Expand Expm1 Floor Fmax Fmin Fmod Frac FusedDropout
    Hypot Ldexp Lerp Lgamma Log Log10 Log1P Log2 Logaddexp Logaddexp2 Logit MaskedFill Maximum Minimum Mul NanToNum
    NativeDropout Neg Pow Rad2Deg Reciprocal Remainder Repeat Round RreluWithNoise Rsqrt Rsub Sgn Sign Sin Sinc Sinh
    Sqrt Square Sub Tan ToCopy Tril Triu Trunc Where Xlogy"""
IN_ORDER = """Alias Clone Detach LazyClone ReshapeAlias ReshapeCopy Squeeze UnsafeView Unsqueeze View"""
REDUCED = """Amax Amin Kthvalue LinalgVectorNorm Logsumexp Max Mean Median Min Mode Nansum Norm Prod Std Sum Var"""
ALONG = """Cumprod Cumsum Flip Gather Glu IndexSelect LogSoftmax LogSoftmaxBackwardData Logcumsumexp Roll SafeSoftmax
    SliceBackward Softmax SoftmaxBackwardData Sort Topk"""
CONVOLUTIONS = """ConvDepthwise2D ConvDepthwise3D Convolution ConvolutionBackward ConvolutionOverrideable
    CudnnConvolution CudnnConvolutionTranspose MiopenConvolution MkldnnConvolution SlowConv2D SlowConv3D"""
NORMS = """FusedRmsNorm NativeLayerNorm NativeLayerNormBackward"""
ATTENTIONS = """ScaledDotProductCudnnAttention ScaledDotProductEfficientAttention ScaledDotProductFlashAttention
    ScaledDotProductFlashAttentionForCpu"""
POOLS = """AdaptiveAvgPool AdaptiveMaxPool AvgPool MaxPool ReflectionPad ReplicationPad UpsampleBicubic
    UpsampleBilinear UpsampleLinear UpsampleNearest UpsampleNearestExact UpsampleTrilinear"""


RULES: dict[str, Rule] = {
    **dict.fromkeys(f"{ACTIVATIONS} {ELEMENTWISE}".split(), _elementwise),
    **{f"{name}Backward": _elementwise for name in ACTIVATIONS.split()},
    "torch::autograd::CopyBackwards": _elementwise,
    **dict.fromkeys(IN_ORDER.split(), _in_order),
    **dict.fromkeys(REDUCED.split(), _reduced),
    **dict.fromkeys(ALONG.split(), _along),
    **dict.fromkeys(CONVOLUTIONS.split(), _first_dims(lambda s: 1)),
    **dict.fromkeys(
        NORMS.split(), _first_dims(lambda s: len(s.out) - len(s.attribute("normalized_shape")), of_all=True)
    ),
    **dict.fromkeys(["NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"], _batch_norm),
    **dict.fromkeys(ATTENTIONS.split(), _attention),
    **{f"{name}{k}D{more}": _first_dims(lambda s, k=k: len(s.out) - k)  # type: ignore[misc]
       for name in POOLS.split() for k in (1, 2, 3) for more in ("", "WithIndices")},
    "Addmm": _products, "Baddbmm": _products, "Bmm": _products, "Cat": _joined,
    "ConstantPadNd": _first_dims(lambda s: len(s.out) - len(s.attribute("pad")) // 2),
    "Linear": _first_dims(lambda s: len(s.out) - 1), "Mm": _products,
    "Mv": lambda s, inputs: [s.at(inputs[0], 0), None],
    "NativeGroupNorm": _first_dims(lambda s: 1), "Permute": _permuted,
    "PixelShuffle": _first_dims(lambda s: len(s.out) - 3), "PixelUnshuffle": _first_dims(lambda s: len(s.out) - 3),
    "Select": _selected, "SelectBackward": _put_back, "Slice": _sliced, "Stack": _stacked, "T": _transposed,
    "Transpose": _transposed, "Trilinear": _trilinear, "Unfold": _unfolded,
}  # fmt: skip

# Of nodes with several outputs.
SEVERAL: dict[str, Callable[[Any, dict[int, Axis | None], Shape | None], Axis | None]] = {
    "Split": _split, "SplitWithSizes": _split, "UnsafeSplit": _split, "UnsafeSplitWithSizes": _split,
    "Unbind": _unbound,
}  # fmt: skip
