"""Inputs and targets in units of their spread, and a table in a form that does not depend on the order of its rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# A column whose spread is below this share of its size is constant but for rounding.
CONSTANT = 1e-10

# Inputs are followed this far beyond those that were seen, in units of their range; from there on nothing changes.
BEYOND = 0.5


@dataclass(frozen=True)
class Scale:
    """(x − centre)/spread by column; a spread of 0 is a constant column."""

    centre: Tensor  # (d,)
    spread: Tensor  # (d,)

    @classmethod
    def of(cls, x: Tensor, weight: Tensor) -> Scale:
        """The weighted mean and standard deviation: x (N, d), weight (N,)"""
        share = (weight / weight.sum())[:, None]
        size = x.abs().amax(0)
        unit = torch.where(size > 0, size, 1.0)  # squares of what is huge or tiny stay within range
        u = x / unit
        centre = (share * u).sum(0)
        spread = (share * (u - centre).square()).sum(0).sqrt()
        spread = torch.where(spread > CONSTANT, spread, 0.0)
        return cls(torch.where(spread > 0, centre * unit, x[0]), spread * unit)

    def apply(self, x: Tensor) -> Tensor:
        return (x - self.centre) / torch.where(self.spread > 0, self.spread, 1.0)

    def undo(self, u: Tensor) -> Tensor:
        return self.centre + self.spread * u


@dataclass(frozen=True)
class Inputs:
    """Columns that are not constant, scaled, within half a range of what was seen; their main directions if there are
    too many."""

    scale: Scale
    columns: Tensor  # (d,) which are used
    low: Tensor
    high: Tensor
    rotation: Tensor | None  # (columns, directions)

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, most: int) -> Inputs:
        scale = Scale.of(x, weight)
        columns = scale.spread > 0
        u = scale.apply(x)[:, columns]
        low, high = (u.amin(0), u.amax(0)) if u.shape[1] else (u.new_zeros(0), u.new_zeros(0))
        margin = BEYOND * (high - low)
        rotation = None
        if u.shape[1] > most:
            e, Q = torch.linalg.eigh((weight[:, None] * u).T @ u / weight.sum())
            rotation = Q[:, -most:].flip(1) / e[-most:].mean().sqrt()
            rotation = rotation * torch.where(rotation.sum(0) < 0, -1.0, 1.0)
        return cls(scale, columns, low - margin, high + margin, rotation)

    def apply(self, x: Tensor) -> Tensor:
        u = self.scale.apply(x)[:, self.columns].clamp(self.low, self.high)
        return u if self.rotation is None else u @ self.rotation

    @property
    def width(self) -> int:
        return int(self.columns.sum()) if self.rotation is None else self.rotation.shape[1]


def distinct(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same rows once, sorted, with the sum of their weights; those of weight 0 left out."""
    kept = weight > 0
    x, y, weight = x[kept], y[kept], weight[kept]
    wide = y[:, None].to(x) if y.ndim == 1 else y
    table, place = torch.unique(torch.cat((x, wide), 1), dim=0, return_inverse=True)
    total = torch.zeros(len(table), dtype=x.dtype).index_add_(0, place, weight)
    found = table[:, x.shape[1] :]
    return table[:, : x.shape[1]].clone(), found[:, 0].to(y.dtype) if y.ndim == 1 else found.clone(), total


def folds(y: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """A fold of each sample, with classes or targets spread evenly over the folds: (N,)"""
    N = len(y)
    first = y if y.ndim == 1 else y[:, 0]
    order = torch.argsort(first.double() + 0.0, stable=True)
    mixed = torch.randperm(N, generator=generator)
    order = mixed[torch.argsort(first[mixed].double(), stable=True)] if y.ndim == 1 else order
    blocks = -(-N // count)
    within = torch.rand(blocks, count, generator=generator).argsort(1).flatten()[:N]
    found = torch.empty(N, dtype=torch.long)
    found[order] = within
    return found
