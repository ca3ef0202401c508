"""Networks of one shape, several at once, and their losses: θ is (k, n), a row for each of the k members.

The losses are those of `marquardt.losses` in the shapes that members have, (k, N, c): on small tables it is the calls
that take time, and one call does for all of the members.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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


# --- losses: −log p(y|z) of every sample is β·ℓ + a constant ---
#
# value  ℓ: (k, N)
# slope  ∂ℓ/∂z: (k, N, c)
# root   Sᵀ with SSᵀ = ∂²ℓ/∂z²: (k, N, rank, c)


@dataclass(frozen=True)
class Numbers:
    """ℓ = ½‖z − y‖², y (k, N, c); β is the precision of the noise."""

    rank: int  # the number of outputs
    name: ClassVar[str] = "mse"  # for mq.fit

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (z - y).square().sum(-1)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return z - y

    def root(self, z: Tensor) -> Tensor:
        return torch.eye(self.rank, dtype=z.dtype).expand(*z.shape[:2], self.rank, self.rank)


@dataclass(frozen=True)
class TwoClasses:
    """ℓ = −log σ(±z) of two classes, one logit; y (k, N) is 0 or 1. β = 1."""

    rank: ClassVar[int] = 1
    name: ClassVar[str] = "bce_with_logits"

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        z = z[..., 0]
        return F.softplus(z) - y * z

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.sigmoid(z) - y[..., None]

    def root(self, z: Tensor) -> Tensor:
        return (torch.sigmoid(z) * torch.sigmoid(-z)).sqrt()[..., None]


@dataclass(frozen=True)
class Classes:
    """ℓ = −log softmax(z)ᵧ; y (k, N) is the class. S = (1 − p1ᵀ)diag √p. β = 1."""

    rank: int  # the number of classes
    name: ClassVar[str] = "cross_entropy"

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        return z.logsumexp(-1) - z.gather(-1, y[..., None].long())[..., 0]

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return z.softmax(-1) - F.one_hot(y.long(), self.rank).to(z)

    def root(self, z: Tensor) -> Tensor:
        p = z.softmax(-1)
        s = p.sqrt()
        return torch.diag_embed(s) - s[..., None] * p[..., None, :]


Law: TypeAlias = Numbers | TwoClasses | Classes


def law_of(frequencies: Tensor | None, outputs: int) -> tuple[Law, int]:
    """The loss of numbers, or of classes with these frequencies, and how many outputs it takes"""
    if frequencies is None:
        return Numbers(outputs), outputs
    classes = len(frequencies)
    return (TwoClasses(), 1) if classes == 2 else (Classes(classes), classes)


def probabilities(z: Tensor) -> Tensor:
    """The probabilities of the classes, from one logit or several: (…, classes)"""
    return torch.cat((torch.sigmoid(-z), torch.sigmoid(z)), -1) if z.shape[-1] == 1 else z.softmax(-1)


def softened(z: Tensor, variance: Tensor) -> Tensor:
    """Probabilities if every logit is normal around z, MacKay's approximation: p(z/√(1 + π/8·variance))"""
    return probabilities(z / (1 + math.pi / 8 * variance).sqrt())
