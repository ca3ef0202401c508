"""Networks of one shape, several at once: θ is (k, n), a row for each of the k members."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class Activation(NamedTuple):
    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]  # f′(z), from z and f(z)


def silu_slope(z: Tensor, a: Tensor) -> Tensor:
    """σ + a(1 − σ)"""
    s = torch.sigmoid(z)
    return s.addcmul_(a, 1 - s)


ACTIVATIONS = {
    "tanh": Activation(torch.tanh, lambda z, a: 1 - a * a),
    "silu": Activation(torch.nn.functional.silu, silu_slope),
    "relu": Activation(torch.relu, lambda z, a: (z > 0).to(z)),
    "identity": Activation(lambda z: z, lambda z, a: torch.ones_like(z)),
}


@dataclass(frozen=True)
class Network:
    """z = Wₗ f(… f(W₁x + b₁) …) + bₗ, for inputs (k, N, d) or (N, d)."""

    sizes: tuple[int, ...]  # inputs, hidden layers, outputs
    activation: str

    @cached_property
    def places(self) -> list[tuple[int, int, int]]:
        """Where the weight of a layer begins in θ, where its bias begins, and where that ends"""
        found, at = [], 0
        for a, b in zip(self.sizes, self.sizes[1:], strict=False):
            found.append((at, at + a * b, at + a * b + b))
            at += a * b + b
        return found

    @property
    def n(self) -> int:
        return self.places[-1][2]

    def drawn(self, k: int, generator: torch.Generator) -> Tensor:
        """θ to begin with, as nn.Linear has it: uniform in ±1/√inputs, (k, n)"""
        parts = []
        for (begin, _, end), a in zip(self.places, self.sizes, strict=False):
            u = torch.rand(k, end - begin, generator=generator, dtype=torch.float64)
            parts.append((2 * u - 1) / math.sqrt(max(a, 1)))
        return torch.cat(parts, 1)

    def weight(self, theta: Tensor, layer: int) -> Tensor:
        """W of a layer: (k, outputs, inputs)"""
        begin, middle, _ = self.places[layer]
        found: Tensor = theta[:, begin:middle].unflatten(1, (self.sizes[layer + 1], self.sizes[layer]))
        return found

    def bias(self, theta: Tensor, layer: int) -> Tensor:
        """b of a layer: (k, 1, outputs)"""
        _, middle, end = self.places[layer]
        return theta[:, None, middle:end]

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """z: (k, N, c)"""
        f, last, a = ACTIVATIONS[self.activation], len(self.places) - 1, x.expand(len(theta), *x.shape[-2:])
        for layer in range(last):
            a = f.value(torch.baddbmm(self.bias(theta, layer), a, self.weight(theta, layer).mT))
        return torch.baddbmm(self.bias(theta, last), a, self.weight(theta, last).mT)

    def passed(self, theta: Tensor, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """z (k, N, c), the input of every layer, and the derivative of every activation"""
        f, last = ACTIVATIONS[self.activation], len(self.places) - 1
        inputs, slopes = [x.expand(len(theta), *x.shape[-2:])], []
        for layer in range(last):
            z = torch.baddbmm(self.bias(theta, layer), inputs[-1], self.weight(theta, layer).mT)
            inputs.append(f.value(z))
            slopes.append(f.slope(z, inputs[-1]))
        return torch.baddbmm(self.bias(theta, last), inputs[-1], self.weight(theta, last).mT), inputs, slopes

    def gradient(self, theta: Tensor, inputs: list[Tensor], slopes: list[Tensor], back: Tensor) -> Tensor:
        """Σ Jᵀ·back over the samples, `back` (k, N, c): (k, n)"""
        parts: list[Tensor] = []
        for layer in reversed(range(len(self.places))):
            parts[:0] = [(back.mT @ inputs[layer]).flatten(1), back.sum(1)]
            if layer:
                back = (back @ self.weight(theta, layer)) * slopes[layer - 1]
        return torch.cat(parts, 1)

    def rows(self, theta: Tensor, inputs: list[Tensor], slopes: list[Tensor], back: Tensor) -> Tensor:
        """backᵀ·J of every sample, for R vectors each, `back` (k, N, R, c): (k, N·R, n)"""
        k, N, R, _ = back.shape
        found = back.new_empty(k, N, R, self.n)
        for layer in reversed(range(len(self.places))):
            begin, middle, end = self.places[layer]
            shape = (self.sizes[layer + 1], self.sizes[layer])
            torch.mul(
                back[..., None], inputs[layer][:, :, None, None], out=found[..., begin:middle].unflatten(3, shape)
            )
            found[..., middle:end] = back
            if layer:
                W = self.weight(theta, layer)
                back = (back.flatten(1, 2) @ W).unflatten(1, (N, R)) * slopes[layer - 1][:, :, None]
        return found.flatten(1, 2)

    def groups(self, kind: str) -> Tensor:
        """Which α every parameter has: one for "all"; one for each weight and bias ("tensors"); and one for each input
        column of the first weight as well ("inputs"). (n,)"""
        found = torch.zeros(self.n, dtype=torch.long)
        if kind == "all":
            return found
        count = 0
        for layer, (begin, middle, end) in enumerate(self.places):
            columns = self.sizes[0] if kind == "inputs" and layer == 0 else 1
            found[begin:middle] = count + torch.arange(middle - begin) % columns
            found[middle:end] = count + columns
            count += columns + 1
        return found
