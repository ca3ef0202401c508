"""Where the samples are in a tensor, found by gradients in which every sample has a weight of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Place(NamedTuple):
    """M samples, from `start` on in equal steps, in one dimension: the entries of each side by side, or M apart."""

    dim: int | None  # None: all of the tensor belongs to one sample
    start: int
    M: int
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

    def __call__(self, t: Tensor, skip: int) -> Tensor:
        """(skip…, *dims) → (skip…, M, T, *other dims)"""
        if self.dim is None:
            return t.unsqueeze(skip).unsqueeze(skip)
        t = t.movedim(skip + self.dim, skip)
        split: Tensor = t.unflatten(skip, (-1, self.M) if self.apart else (self.M, -1))
        return split.transpose(skip, skip + 1) if self.apart else split


ALL = -1  # samples, however many there are


class Signs(NamedTuple):
    """A gradient three times: of all samples alike, of sample n taken n + 1 times, and taken `labels[n]` times."""

    even: Tensor
    rising: Tensor
    labelled: Tensor
    labels: Tensor  # (N,)

    def joined(self, other: Signs) -> Signs:
        """Of the samples of both"""
        even, rising, labelled = (mine + its for mine, its in zip(self[:3], other[:3], strict=True))
        return Signs(even, rising, labelled, self.labels)

    def through(self, delta: Callable[[Tensor], Tensor]) -> Signs:
        """What becomes of them on the way to an input: (1, …) → (1, …)"""
        even, rising, labelled = (delta(t[None])[0] for t in self[:3])
        return Signs(even, rising, labelled, self.labels)


def found_in(signs: Signs, dims: Sequence[int], step: int, tolerance: float) -> Place | None:
    """The place of the samples in one of these dimensions: where one sample alone has influence, what is taken n times
    is n times as much."""
    even, _, labelled, labels = signs
    ways: list[int | None] = [*sorted(dims, key=lambda d: even.shape[d] != len(labels)), None]
    for dim in ways:
        shape = [even.shape[d] if d == dim else 1 for d in range(even.ndim)]
        for place in _candidates(signs, dim, shape, step):
            expected = even * labels[place.numbers(math.prod(shape), len(labels))].view(shape)
            if bool((labelled - expected).norm() <= tolerance * labelled.norm()):
                return place
    return None


def _candidates(signs: Signs, dim: int | None, shape: Sequence[int], step: int) -> Iterator[Place]:
    """All samples, if there is room for them; and what agrees with the numbers that can be read."""
    D, N = math.prod(shape), len(signs.labels)
    if dim is not None and D % N == 0:
        yield Place(dim, 0, ALL)
        yield Place(dim, 0, ALL, apart=True)
    even = signs.even.conj()  # complex behind a Fourier transform
    product, square = ((even * t).real.sum_to_size(shape).flatten() for t in (signs.rising, signs.even))
    known = square > 0
    numbers = (product[known] / square[known]).round().long() - 1
    if not len(numbers):
        return
    index = torch.arange(D, device=known.device)[known]
    if dim is None:
        yield from [Place(None, int(numbers[0]), 1)] if 0 <= int(numbers[0]) < N else []
        return
    for M in (M for M in range(min(D, N), 0, -1) if D % M == 0):  # many samples first
        for apart in (False, True):
            offset = numbers - step * (index % M if apart else index // (D // M))
            start = int(offset[0])
            if bool((offset == start).all()) and 0 <= start < N - step * (M - 1):
                yield Place(dim, start, M, step, apart)


def guessed(shape: Sequence[int], dims: Sequence[int], N: int) -> Place | None:
    """By size alone, if there is no gradient yet."""
    return next((Place(d, 0, ALL) for d in dims if shape[d] == N), None)


def stacked(ranges: Sequence[tuple[Place, int]]) -> tuple[list[int], int]:
    """At which position each begins, if it has so many, so that those of different samples share positions; and the
    number of positions in all."""
    cuts = sorted({c for place, _ in ranges for c in (place.samples.start, place.samples.stop)})
    heights = dict.fromkeys(cuts, 0)
    offsets = []
    for place, P in ranges:
        over = [c for c in cuts if place.samples.start <= c < place.samples.stop]
        offset = max(heights[c] for c in over)
        heights.update(dict.fromkeys(over, offset + P))
        offsets.append(offset)
    return offsets, max(heights.values())
