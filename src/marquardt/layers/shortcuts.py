"""Operations of layers that are faster in another form: each gives way to torch's own where it does not pay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.overrides import TorchFunctionMode

from .blocks import Bilinear


class Largest(TorchFunctionMode):
    """Max-pools by comparing slices, where that is the same."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = largest(*args, **(kwargs or {})) if func is F.max_pool2d else None
        return func(*args, **(kwargs or {})) if found is None else found


def _pair(value: int | Sequence[int]) -> list[int]:
    return [value, value] if isinstance(value, int) else [*value, *value][:2]


def largest(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """max_pool2d of contiguous images by windows side by side; None if it is another one, or has a gradient"""
    kernel, step = _pair(kernel_size), _pair(stride or kernel_size)
    other = step != kernel or _pair(padding) != [0, 0] or _pair(dilation) != [1, 1] or ceil_mode or return_indices
    if other or torch.is_grad_enabled() or input.device.type != "cpu" or not input.is_contiguous():
        return None
    if input.ndim not in (3, 4) or kernel == [1, 1] or input.shape[-2] < kernel[0] or input.shape[-1] < kernel[1]:
        return None
    found = input
    for dim, size in zip((-2, -1), kernel, strict=True):
        windows = found.narrow(dim, 0, found.shape[dim] // size * size).unflatten(dim, (-1, size))
        first, *others = windows.unbind(dim)
        for slices in others:
            first = torch.maximum(first, slices)
        found = first
    return found


CONVOLUTIONS: tuple[Callable[..., Any], ...] = (torch.conv1d, torch.conv2d, torch.conv3d)


class Line(TorchFunctionMode):
    """Convolutions with weights W + lr·d, under vmap over lr: W∗x + lr·(d∗x).

    That is one convolution of the samples of all trial points with weights [W; d], which are the same for all of them.
    Weights of its own for each point would make it one with a group for each point, and cuDNN launches group by group.
    """

    def __init__(
        self, origin: Mapping[int, Tensor], direction: Mapping[int, Tensor], at: Mapping[int, Tensor], lr: Tensor
    ) -> None:
        super().__init__()
        self.ends = {id(p): (origin[key], direction[key]) for key, p in at.items()}
        self.lr = lr

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in CONVOLUTIONS and len(args) == 7 and args[6] == 1:  # as nn.ConvNd calls it, one group
            x, weight, bias, *rest = args
            if id(weight) in self.ends and (bias is None or id(bias) in self.ends):
                weights = torch.cat(self.ends[id(weight)])
                biases = None if bias is None else torch.cat(self.ends[id(bias)])
                origin, direction = func(x, weights, biases, *rest).chunk(2, 1 - weight.ndim)
                return torch.addcmul(origin, direction, self.lr)
        if args and func.__name__.endswith("_") and not func.__name__.endswith("__"):
            self.ends.pop(id(args[0]), None)  # changed in place: no longer on the line
        return func(*args, **kwargs)


POOLS = {"MaxPool2DWithIndicesBackward0": 4, "MaxPool3DWithIndicesBackward0": 5}  # and dimensions of a batch

# Each entry of the result depends on one entry of the layer's output; what else enters, as a mask, has no part in it.
ELEMENTWISE = {
    "Add", "Celu", "Clone", "Div", "Elu", "Gelu", "Hardswish", "Hardtanh", "LeakyRelu", "Mul", "Relu", "Sigmoid",
    "Silu", "Softplus", "Sub", "Tanh",
}  # fmt: skip

# Numbers in a and δ of the samples that are written out at once, so that they stay in a cache.
CACHED = 1 << 20


class Maxima(NamedTuple):
    """The outputs of a layer that reach the result of a max-pool."""

    places: Tensor  # among the positions of a sample: (N, C, Q)
    slope: Tensor | None  # of the activations between layer and pool, at these: (N, C, Q)
    positions: Sequence[int]

    def scaled(self, delta: Tensor, some: slice = slice(None)) -> Tensor:
        """δ of some samples at the outputs kept: (R, n, C, *pooled)"""
        return delta if self.slope is None else delta * self.slope[some].view(delta.shape[1:]).to(delta.dtype)

    def spread(self, delta: Tensor, some: slice = slice(None)) -> Tensor:
        """This at all outputs: (R, n, C, *pooled) → (R, n, C, *positions)"""
        small = delta.flatten(3).transpose(0, 1)  # (n, R, C, Q)
        whole = small.new_zeros(*small.shape[:3], math.prod(self.positions))
        whole.scatter_add_(3, self.places[some, None].expand(small.shape), small)  # windows may overlap
        found: Tensor = whole.transpose(0, 1).unflatten(3, self.positions)
        return found


def users(result: Tensor) -> dict[Node, list[Node]]:
    """By every node of a graph those that use what it computes, once for each use."""
    assert result.grad_fn is not None
    found: dict[Node, list[Node]] = {result.grad_fn: []}
    rest = [result.grad_fn]
    while rest:
        user = rest.pop()
        for node, _ in user.next_functions:
            if node is not None:
                if node not in found:
                    found[node] = []
                    rest.append(node)
                found[node].append(user)
    return found


def behind(
    edge: GradientEdge, shape: Sequence[int], using: dict[Node, list[Node]]
) -> tuple[GradientEdge, Maxima] | None:
    """The edge of the max-pool that alone uses the output of a layer, if there is one, perhaps after activations."""
    last, above = edge.node, using.get(edge.node, [])
    while len(above) == 1 and above[0].name().rpartition("Backward")[0] in ELEMENTWISE:
        last, above = above[0], using[above[0]]
    if len(above) != 1 or above[0].name() not in POOLS:
        return None
    pool: Any = above[0]
    x, places = pool._saved_self, pool._saved_result1
    if x.ndim != POOLS[pool.name()] or x.shape != shape or 2 * places.numel() > x.numel():
        return None  # without a dimension of samples, broadcast on the way, or no gain
    places, slope = places.flatten(2), None
    if last is not edge.node:
        ones = x.new_ones(()).expand(shape)
        (slopes,) = torch.autograd.grad(GradientEdge(last, 0), edge, ones, retain_graph=True)
        slope = slopes.flatten(2).gather(2, places)
    return GradientEdge(pool, 0), Maxima(places, slope, shape[2:])


class Pooled(Bilinear):
    """The rows of such a layer, with a and δ written out for a few samples at a time; all of both only if asked for."""

    def __init__(self, read: Callable[[Tensor, slice], Bilinear], delta: Tensor, maxima: Maxima) -> None:
        self._read, self._small, self._maxima = read, delta, maxima  # (R, N, C, *pooled)
        one = self._part(slice(0, 1))
        self.weight, self.bias, self.one, self.params = one.weight, one.bias, one.one, one.params
        self.R, self.N, self.P, self.G, self.O, self.I = one.R, delta.shape[1], one.P, one.G, one.O, one.I
        self.m = self.R * self.N

    def _part(self, some: slice) -> Bilinear:
        delta = self._maxima.scaled(self._small[:, some], some)
        return self._read(self._maxima.spread(delta, some), some)

    def _parts(self) -> Iterator[slice]:
        size = max(1, CACHED // (self.P * self.G * (self.R * self.O + self.I)))
        for first in range(0, self.N, size):
            yield slice(first, min(first + size, self.N))

    def parts(self) -> Iterator[Bilinear]:
        for some in self._parts():
            yield self._part(some)

    @cached_property
    def _whole(self) -> Bilinear:
        return self._part(slice(0, self.N))

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        return self._whole.factors

    def plain(self) -> Bilinear:
        return Bilinear(*self.factors, self.weight, self.bias, self.one)

    def samples(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(self.m, self.columns, dtype=dtype, device=self._small.device)
        for some in self._parts():
            self._part(some).samples(dtype, out[self.R * some.start : self.R * some.stop])
        return out

    def adjoint(self, w: Tensor, out: Sequence[Tensor]) -> None:
        rows = w.view(self.R, self.N).T[:, None]  # (N, 1, R)
        delta = self._maxima.scaled(self._small).to(w.dtype).flatten(2).transpose(0, 1)  # (N, R, C·Q)
        delta = (rows @ delta).view(1, self.N, *self._small.shape[2:])
        for total in out:
            total.zero_()
        for some in self._parts():
            part = self._read(self._maxima.spread(delta[:, some], some), some)
            found = part.pull(w.new_ones(part.N)).split([len(total) for total in out])
            for total, piece in zip(out, found, strict=True):
                total += piece
