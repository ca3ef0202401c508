"""Damping: the D of (G + λD)δ = −g."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .curvature import Curvature


class Damping(Protocol):
    def update(self, D: Tensor | None, G: Curvature) -> Tensor:
        """The next D, () or (n,), from the last one (None at first) and the curvature of this step."""
        ...


@dataclass(frozen=True)
class Identity:
    """D = I: Levenberg's damping. λ carries the units of the curvature."""

    def update(self, D: Tensor | None, G: Curvature) -> Tensor:
        return torch.ones((), dtype=G.gradient.dtype, device=G.gradient.device)


@dataclass(frozen=True)
class MeanEigenvalue:
    """D = τI with τ = tr G / rank G, the largest so far: all parameters alike, in the units of the loss.

    λ = 1 stands for the mean of the eigenvalues that are not zero, whatever the loss and the number of parameters:
    multiplying the loss by a constant changes nothing.
    """

    def update(self, D: Tensor | None, G: Curvature) -> Tensor:
        tau = G.diagonal().sum() / G.rank
        return tau if D is None else torch.maximum(D, tau)


@dataclass(frozen=True)
class MaxDiagonal:
    """D ← max(D, diag G) element-wise over all steps: invariant to rescaling a parameter where diag G exceeds D₀."""

    floor: float = 0.01  # D₀: the paper, section 2.3

    def __post_init__(self) -> None:
        if not 0 <= self.floor < float("inf"):
            raise ValueError(f"MaxDiagonal(floor={self.floor!r}): D₀ must be finite and at least 0")

    def update(self, D: Tensor | None, G: Curvature) -> Tensor:
        diagonal = G.diagonal()
        return torch.maximum(torch.full_like(diagonal, self.floor) if D is None else D, diagonal)
