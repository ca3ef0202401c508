"""Parts of the samples that members leave out: what each configuration counts, and how wide intervals are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .committee import Committee
from .law import softened
from .members import Given, Members
from .stacking import calibrated, mixed, stacked

# Configurations that would count for less are left out.
LEAST = 0.05

# How much of the Laplace variance of a logit counts, tried on the samples that were left out.
SOFTENING = (0.0, 0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True)
class Divided:
    """What is trained on: scaled inputs (N, d), scaled targets (N, c) or classes (N,), weights (N,) and folds (N,)."""

    x: Tensor
    y: Tensor
    weight: Tensor
    fold: Tensor | None
    members: int

    def given(self) -> tuple[Given, Given | None]:
        """What each member trains on, and what it holds out"""
        if self.fold is None:
            everything = [torch.arange(len(self.x))] * self.members
            return self._gathered(everything), None
        inside = [(self.fold != j).nonzero()[:, 0] for j in range(self.members)]
        return self._gathered(inside), self._gathered(self.outside())

    def outside(self) -> list[Tensor]:
        assert self.fold is not None
        return [(self.fold == j).nonzero()[:, 0] for j in range(self.members)]

    def _gathered(self, chosen: list[Tensor]) -> Given:
        """Members have different numbers of samples: the last ones are filled up with weight 0"""
        most = max(len(c) for c in chosen)
        index = torch.stack([torch.cat((c, c.new_zeros(most - len(c)))) for c in chosen])
        real = torch.stack([torch.arange(most) < len(c) for c in chosen])
        return Given(self.x[index], self.y[index], self.weight[index] * real)


def weigh(found: Committee, table: Divided) -> None:
    """Weights of the configurations and the spread of the predictions, from what the members left out"""
    outside = table.outside()
    index = torch.cat(outside)
    left = [of_left_out(part, table.x, outside) for part in found.parts]
    z, v = torch.stack([a for a, _ in left]), torch.stack([b for _, b in left])  # (C, N, c)
    y, weight = table.y[index], table.weight[index]
    if found.frequencies is not None:
        soften(found, z, v, y, weight)
        return
    w = stacked(z, y, weight)
    w = torch.where(w >= LEAST, w, 0.0)
    found.weights = w / w.sum()
    mean, variance = (torch.einsum("c,cno->no", found.weights, t) for t in (z, v))
    squares = (y - mean).square()
    pairs = [calibrated(squares[:, o], variance[:, o], weight) for o in range(y.shape[1])]
    found.floor, found.factor = (torch.tensor(t, dtype=torch.float64) for t in zip(*pairs, strict=True))
    error = float((weight[:, None] * squares).sum() / weight.sum() / y.shape[1]) ** 0.5
    found.says.append(f"{error:.3g} of the targets' standard deviation is not explained, on samples left out")


def unweighted(found: Committee) -> None:
    """Nothing was left out: all configurations count alike, and noise and variance are those of the evidence"""
    found.weights = uniform(len(found.parts))
    if found.frequencies is not None:
        return
    noise = torch.stack([(1 / part.beta).mean() for part in found.parts]).mean()
    found.floor, found.factor = noise.repeat(len(found.floor)), noise.sqrt().repeat(len(found.floor))


def uniform(count: int) -> Tensor:
    return torch.full((count,), 1 / count, dtype=torch.float64)


def soften(found: Committee, z: Tensor, v: Tensor, y: Tensor, weight: Tensor) -> None:
    """Weights and softening with the least log loss on what was left out"""
    least = float("inf")
    for factor in SOFTENING:
        p = softened(z, factor * v).gather(2, y.long().expand(len(z), -1)[..., None])[..., 0]  # (C, N)
        w = mixed(p, weight)
        loss = -float((weight * (w @ p).clamp(min=1e-300).log()).sum() / weight.sum())
        if loss < least:
            least, found.weights, found.factor = loss, w, torch.full((1,), factor, dtype=torch.float64)
    found.says.append(f"log loss {least:.3g} on samples left out")


def of_left_out(part: Members, x: Tensor, outside: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs and their variance, of every sample by the member that left it out: (N, c) each"""
    found = []
    for i, index in enumerate(outside):
        one = part.only(i)
        found.append((one.outputs(x[index])[0], one.variance(x[index])[0]))
    return torch.cat([a for a, _ in found]), torch.cat([b for _, b in found])
