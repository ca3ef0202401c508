"""How much a column matters: by how much predictions get worse once its values are dealt to other rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

REPEATS = 5
ROWS = 1000  # that are looked at


class Importance(NamedTuple):
    name: str
    rise: float  # of the error, in the mean of the repeats
    spread: float  # the standard deviation of the repeats


def permutation(
    error: Callable[[Tensor, Tensor], float], X: Tensor, groups: Mapping[str, Sequence[int]], seed: int
) -> list[Importance]:
    """The largest first; `error(X, rows)` is that of the rows, with these inputs. A column's inputs stay together."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(X), generator=generator)[:ROWS]
    X = X[rows]
    base = error(X, rows)
    found = []
    for name, places in groups.items():
        rises = []
        for _ in range(REPEATS):
            dealt = X.clone()
            order = torch.randperm(len(X), generator=generator)
            dealt[:, list(places)] = X[order][:, list(places)]
            rises.append(error(dealt, rows) - base)
        values = torch.tensor(rises, dtype=torch.float64)
        found.append(Importance(name, float(values.mean()), float(values.std(correction=0))))
    return sorted(found, key=lambda importance: -importance.rise)
