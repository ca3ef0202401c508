"""Partial traces of a layer's block of J̃ᵀJ̃: with rows that are matrices J_r (O × I), ΣJ_rJ_rᵀ and ΣJ_rᵀJ_r."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

# Of a longer side there is only the diagonal: a matrix of this size takes 64 MiB in float32 and a second to factor on
# one core of a CPU.
SIDE = 4096


class Traces(NamedTuple):
    """Those of some parameters of a block, which are one matrix: a weight of G groups, and its bias as another input.
    A trace is a matrix (G, d, d), or the diagonal of one (G, d)."""

    params: list[Tensor]
    left: Tensor  # ΣJ_rJ_rᵀ, d = O; of a vector diag J̃ᵀJ̃, with G = 1 and d its size
    right: Tensor | None  # ΣJ_rᵀJ_r, d = I; None: of a vector


def square(X: Tensor) -> Tensor:
    """XᵀX of every group, or its diagonal: (G, K, d) → (G, d, d) or (G, d)"""
    return X.mT @ X if X.shape[2] <= SIDE else X.square().sum(1)


def product_of(X: Tensor, Y: Tensor) -> Tensor:
    """XᵀY, or its diagonal: (…, d), (…, d) → (1, d, d) or (1, d)"""
    X, Y = (t.reshape(-1, t.shape[-1]) for t in (X, Y))
    return (X.mT @ Y if X.shape[1] <= SIDE else (X * Y).sum(0))[None]


def of_rows(X: Tensor) -> tuple[Tensor, Tensor]:
    """Both partial traces of rows: (m, G, O, I)"""
    return square(X.permute(1, 0, 3, 2).flatten(1, 2)), square(X.permute(1, 0, 2, 3).flatten(1, 2))


def of_matrix(p: Tensor, rows: Tensor) -> Traces:
    """Of one parameter by itself, as a matrix of its first dimension and the rest: (m, size). As a vector if it has a
    hook: of a gradient that the hook masks, a matrix would couple what is masked with the rest."""
    if p.ndim < 2 or p._backward_hooks:
        return Traces([p], rows.square().sum(0)[None], None)
    return Traces([p], *of_rows(rows.view(len(rows), 1, len(p), -1)))


def of_vectors(params: Sequence[Tensor], diagonal: Tensor) -> list[Traces]:
    """Of parameters that are vectors, from diag J̃ᵀJ̃ of all: (columns,)"""
    pieces = diagonal.split([p.numel() for p in params])
    return [Traces([p], piece[None], None) for p, piece in zip(params, pieces, strict=True)]
