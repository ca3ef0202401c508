"""Networks of one shape, several at once, and their losses: θ is (k, n), a row for each of the k members.

On small tables it is the calls that take time, and one call does for all of the members: outputs are (k, N, c).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..losses import BinaryCrossEntropy, CrossEntropy, Loss, SquaredError
from ..losses.base import spread


class Activation(NamedTuple):
    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]  # f′(z), from z and f(z)
    module: type[nn.Module]


def silu_slope(z: Tensor, a: Tensor) -> Tensor:
    """σ + a(1 − σ)"""
    s = torch.sigmoid(z)
    return s.addcmul_(a, 1 - s)


ACTIVATIONS = {
    "tanh": Activation(torch.tanh, lambda z, a: 1 - a * a, nn.Tanh),
    "silu": Activation(F.silu, silu_slope, nn.SiLU),
    "relu": Activation(torch.relu, lambda z, a: (z > 0).to(z), nn.ReLU),
    "identity": Activation(lambda z: z, lambda z, a: torch.ones_like(z), nn.Identity),
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
        for a, b in pairwise(self.sizes):
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

    def layer(self, theta: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """W (k, outputs, inputs) and b (k, 1, outputs)"""
        begin, middle, end = self.places[i]
        W: Tensor = theta[:, begin:middle].unflatten(1, (self.sizes[i + 1], self.sizes[i]))
        return W, theta[:, None, middle:end]

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """z: (k, N, c)"""
        f, a = ACTIVATIONS[self.activation].value, x.expand(len(theta), *x.shape[-2:])
        for i in range(len(self.places)):
            W, b = self.layer(theta, i)
            a = torch.baddbmm(b, f(a) if i else a, W.mT)
        return a

    def passed(self, theta: Tensor, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """z (k, N, c), the input of every layer, and the derivative of every activation"""
        f, inputs, slopes = ACTIVATIONS[self.activation], [x.expand(len(theta), *x.shape[-2:])], []
        for i in range(len(self.places)):
            W, b = self.layer(theta, i)
            z = torch.baddbmm(b, inputs[i], W.mT)
            if i < len(self.places) - 1:
                inputs.append(f.value(z))
                slopes.append(f.slope(z, inputs[-1]))
        return z, inputs, slopes

    def gradient(self, theta: Tensor, inputs: list[Tensor], slopes: list[Tensor], back: Tensor) -> Tensor:
        """Σ Jᵀ·back over the samples, `back` (k, N, c): (k, n)"""
        parts: list[Tensor] = []
        for i in reversed(range(len(self.places))):
            parts[:0] = [(back.mT @ inputs[i]).flatten(1), back.sum(1)]
            if i:
                back = (back @ self.layer(theta, i)[0]) * slopes[i - 1]
        return torch.cat(parts, 1)

    def rows(self, theta: Tensor, inputs: list[Tensor], slopes: list[Tensor], back: Tensor) -> Tensor:
        """backᵀ·J of every sample, for R vectors each, `back` (k, N, R, c): (k, N·R, n)"""
        k, N, R, _ = back.shape
        found = back.new_empty(k, N, R, self.n)
        for i in reversed(range(len(self.places))):
            begin, middle, end = self.places[i]
            columns = found[..., begin:middle].unflatten(3, (self.sizes[i + 1], self.sizes[i]))
            torch.mul(back[..., None], inputs[i][:, :, None, None], out=columns)
            found[..., middle:end] = back
            if i:
                back = (back.flatten(1, 2) @ self.layer(theta, i)[0]).unflatten(1, (N, R)) * slopes[i - 1][:, :, None]
        return found.flatten(1, 2)

    def groups(self, kind: str) -> Tensor:
        """Which α every parameter has: one for "all"; or ("inputs") one for each input column of the first weight, and
        one for each other weight and bias. (n,)"""
        found, count = torch.zeros(self.n, dtype=torch.long), 0
        for i, (begin, middle, end) in enumerate(self.places if kind == "inputs" else ()):
            columns = 1 if i else self.sizes[0]
            found[begin:middle] = count + torch.arange(middle - begin) % columns
            found[middle:end] = count + columns
            count += columns + 1
        return found


# --- losses ---


@dataclass(frozen=True)
class Law:
    """A loss in the shapes of members: −log p(y|z) is β·factor·ℓ + a constant, and β = 1 for classes. y is (k, N, c), or
    (k, N) for more than two classes."""

    loss: Loss
    outputs: int
    factor: float = 1.0

    @classmethod
    def of(cls, frequencies: Tensor | None, outputs: int) -> Law:
        """The loss of numbers, or of classes with these frequencies"""
        if frequencies is None:
            return cls(SquaredError(), outputs, 0.5)
        classes = len(frequencies)
        return cls(BinaryCrossEntropy(), 1) if classes == 2 else cls(CrossEntropy(), classes)

    def targets(self, y: Tensor) -> Tensor:
        """y as the loss takes it: one of two classes is a number"""
        return y[:, None].double() if isinstance(self.loss, BinaryCrossEntropy) else y

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        """factor·ℓ of every sample: (k, N)"""
        ell = self.loss.ell(z.flatten(0, 1), y.flatten(0, 1))
        return self.factor * ell.view(*z.shape[:2], -1).sum(-1)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        """factor·∂ℓ/∂z: (k, N, c)"""
        return self.factor * self.loss.slope(z.flatten(0, 1), y.flatten(0, 1)).view_as(z)

    def root(self, z: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Sᵀ with SSᵀ = factor·∂²ℓ/∂z²: (k, N, rows, c); with a generator its one row (Sε)ᵀ, E[εεᵀ] = 1, ε = ±1"""

        def signs(shape: tuple[int, ...]) -> Tensor:
            return torch.randint(0, 2, (1, *shape), generator=generator).to(z) * 2 - 1

        shape, z, y = z.shape[:2], z.flatten(0, 1), y.flatten(0, 1)
        if generator is None:
            rows = spread(self.loss, self.loss.root(z, y), z)[0]  # (rows, kN, c)
        else:
            rows = self.loss.ungroup(self.loss.mixed(z, y, None, signs), z)
        return math.sqrt(self.factor) * rows.transpose(0, 1).unflatten(0, shape)


def probabilities(z: Tensor) -> Tensor:
    """The probabilities of the classes, from one logit or several: (…, classes)"""
    return torch.cat((torch.sigmoid(-z), torch.sigmoid(z)), -1) if z.shape[-1] == 1 else z.softmax(-1)


def softened(z: Tensor, variance: Tensor) -> Tensor:
    """Probabilities if every logit is normal around z, MacKay's approximation: p(z/√(1 + π/8·variance))"""
    return probabilities(z / (1 + math.pi / 8 * variance).sqrt())
