"""Damping: the D of (G + λD)δ = −g."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ..curvature import Curvature
from ..metric import Diagonal


class Damping(Protocol):
    def update(self, D: Diagonal | None, G: Curvature) -> Diagonal:
        """The next D, from the last one (None at first) and the curvature of this step."""
        ...


@dataclass(frozen=True)
class Identity:
    """D = I: Levenberg's damping. λ carries the units of the curvature."""

    def update(self, D: Diagonal | None, G: Curvature) -> Diagonal:
        return Diagonal(torch.ones_like(G.lin.theta[0]))


@dataclass(frozen=True)
class MeanEigenvalue:
    """D = τI with τ = tr G / rank G, the largest of late: all parameters alike, in the units of the loss.

    λ = 1 stands for the mean of the eigenvalues that are not zero, whatever the loss and the number of parameters:
    multiplying the loss by a constant changes nothing. What is remembered of earlier steps is at most `memory` times
    the present: one batch with an outlier costs a few steps, not the run.
    """

    memory: float = 10.0

    def __post_init__(self) -> None:
        check_memory(self)

    def update(self, D: Diagonal | None, G: Curvature) -> Diagonal:
        tau = Diagonal(G.trace() / G.rank)
        return tau if D is None else D.recent(tau, self.memory).maximum(tau)


@dataclass(frozen=True)
class LayerMeanEigenvalue:
    """D = τₗI in every layer l, with τₗ = tr Gₗ / rank Gₗ of its block of G, the largest of late, as in MeanEigenvalue.

    One number per layer: the dual solve stays as cheap as with one for all. A τₗ below eps times the largest of all
    layers may be rounding, and is taken for as much.
    """

    memory: float = 10.0

    def __post_init__(self) -> None:
        check_memory(self)

    def update(self, D: Diagonal | None, G: Curvature) -> Diagonal:
        tau = G.traces()
        return tau if D is None else D.recent(tau, self.memory).maximum(tau)


@dataclass(frozen=True)
class MaxDiagonal:
    """D ← max(D, diag G) element-wise over all steps: invariant to rescaling a parameter where diag G exceeds D₀.

    A curvature of less than eps times that of another output of the same layer may be rounding, and is taken for as
    much: there the invariance ends.
    """

    floor: float = 0.01  # D₀: the paper, section 2.3

    def __post_init__(self) -> None:
        if not 0 <= self.floor < float("inf"):
            raise ValueError(f"MaxDiagonal(floor={self.floor!r}): D₀ must be finite and at least 0")

    def update(self, D: Diagonal | None, G: Curvature) -> Diagonal:
        return G.maximum(D, self.floor)


@dataclass(frozen=True)
class FactoredMaxDiagonal:
    """D_oi = u_o·v_i for the weight of every layer: max-diagonal damping in O + I numbers instead of O·I.

        v_i ← max(v_i, mean a_i²)              a the layer's input; 1 for a bias
        u_o ← max(u_o, max_i (diag G)_oi/v_i)

    At least every diagonal so far, and covariant to rescaling any unit, as far as its u is not below eps times that of
    another one, where it may be rounding. Dividing a by √v and δ by √u keeps the dual
    solve exact without J̃: this is the max-diagonal damping for large networks. There G has many more columns than its
    rank, and D is multiplied by their ratio: λ = 1 stands for the mean eigenvalue, as in MeanEigenvalue.
    """

    def update(self, D: Diagonal | None, G: Curvature) -> Diagonal:
        return (G.lin.n / G.rank) * G.factored_maximum(D)


def check_memory(part: MeanEigenvalue | LayerMeanEigenvalue) -> None:
    name = type(part).__name__
    if not part.memory >= 1:
        raise ValueError(
            f"{name}(memory={part.memory!r}): how much larger than the present the past may be, at least 1"
        )
