"""Work that every rank could do by itself, and of which each does a part: what comes of it is sent to the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import Ranks

Some = Sequence[Tensor]


def owners(matrices: Some, size: int) -> list[int]:
    """Which of the ranks decomposes which matrix (…, d, d): the largest first, by the one that has least to do."""
    work = [M.numel() * M.shape[-1] for M in matrices]
    busy, found = [0] * size, [0] * len(work)
    for k in sorted(range(len(work)), key=lambda k: -work[k]):
        found[k] = busy.index(min(busy))
        busy[found[k]] += work[k]
    return found


def owned(ranks: Ranks, matrices: Some) -> list[Tensor]:
    """Those of this rank"""
    by = owners(matrices, ranks.size)
    return [M for M, rank in zip(matrices, by, strict=True) if rank == ranks.rank]


def completed(ranks: Ranks, own: Sequence[Some], matrices: Some, like: Sequence[Some]) -> list[Some]:
    """What was made of every matrix, by the rank that owns it; `like` has the shapes of all."""
    if not ranks.several:
        return list(own)
    by, mine = owners(matrices, ranks.size), iter(own)
    found = [
        next(mine) if rank == ranks.rank else [torch.empty_like(t) for t in some]
        for some, rank in zip(like, by, strict=True)
    ]
    for source in range(ranks.size):
        places = [k for k, rank in enumerate(by) if rank == source]
        sent = iter(ranks.ones([t for k in places for t in found[k]], source))
        for k in places:
            found[k] = [next(sent) for _ in found[k]]
    return found
