"""A layer before a max-pool: gradients reach only those of its outputs that the pool keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .blocks import Bilinear

POOLS = {"MaxPool2DWithIndicesBackward0": 4, "MaxPool3DWithIndicesBackward0": 5}  # and dimensions of a batch

# Each entry of the result depends on one entry of the layer's output; what else enters, as a mask, has no part in it.
ELEMENTWISE = {
    "Add", "Celu", "Clone", "Div", "Elu", "Gelu", "Hardswish", "Hardtanh", "LeakyRelu", "Mul", "Relu", "Sigmoid",
    "Silu", "Softplus", "Sub", "Tanh",
}  # fmt: skip

# Numbers in a and δ of the samples that are written out at once, so that they stay in a cache.
CACHED = 1 << 20


class Kept(NamedTuple):
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


def behind(edge: GradientEdge, shape: Sequence[int], using: dict[Node, list[Node]]) -> tuple[GradientEdge, Kept] | None:
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
    return GradientEdge(pool, 0), Kept(places, slope, shape[2:])


class Pooled(Bilinear):
    """The rows of such a layer, with a and δ written out for a few samples at a time; all of both only if asked for."""

    def __init__(self, read: Callable[[Tensor, slice], Bilinear], delta: Tensor, kept: Kept) -> None:
        self._read, self._small, self._kept = read, delta, kept  # (R, N, C, *pooled)
        one = self._part(slice(0, 1))
        self.weight, self.bias, self.one, self.params = one.weight, one.bias, one.one, one.params
        self.R, self.N, self.P, self.G, self.O, self.I = one.R, delta.shape[1], one.P, one.G, one.O, one.I
        self.m = self.R * self.N

    def _part(self, some: slice) -> Bilinear:
        delta = self._kept.scaled(self._small[:, some], some)
        return self._read(self._kept.spread(delta, some), some)

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
    def factors(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
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
        delta = self._kept.scaled(self._small).to(w.dtype).flatten(2).transpose(0, 1)  # (N, R, C·Q)
        delta = (rows @ delta).view(1, self.N, *self._small.shape[2:])
        for total in out:
            total.zero_()
        for some in self._parts():
            part = self._read(self._kept.spread(delta[:, some], some), some)
            found = part.pull(w.new_ones(part.N)).split([len(total) for total in out])
            for total, piece in zip(out, found, strict=True):
                total += piece
