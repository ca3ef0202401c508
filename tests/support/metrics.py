"""The Kronecker product by layers as a plain matrix: from G itself, by torch.kron."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Form(NamedTuple):
    """Parameters, by number, that are one matrix of G groups, O × I each; I = 0 stands for a vector."""

    members: tuple[int, ...]
    G: int
    O: int
    I: int
    thin: tuple[bool, bool] = (False, False)  # of which sides, left and right, there is only the diagonal

    def columns(self, sizes: Sequence[int]) -> Tensor:
        """Where the entries of X are in θ: (G, O, I)"""
        starts = [sum(sizes[:i]) for i in self.members]
        spans = [torch.arange(s, s + sizes[i]) for s, i in zip(starts, self.members, strict=True)]
        return torch.cat([span.view(self.G, self.O, -1) for span in spans], 2)


class ByHand:
    """D of every batch in turn; `tau` is the last one."""

    def __init__(self, forms: Sequence[Form], sizes: Sequence[int], c: float = 1.0, decay: float = 0.95) -> None:
        self.forms, self.sizes, self.c, self.decay = forms, sizes, c, decay
        self.past: list[list[tuple[Tensor, Tensor]]] = []
        self.batches = self.rank = 0
        self.tau = math.nan

    def after(self, G: Tensor, rows: int) -> Tensor:
        """D with the G of another batch, which has so many rows: (n, n)"""
        present = [self._traces(form, G) for form in self.forms]
        self.batches += 1
        beta = min(1 - 1 / self.batches, self.decay)
        self.past = [
            now if self.batches == 1 else self._mixed(old, now, beta)
            for old, now in zip(self.past or present, present, strict=True)
        ]
        self.rank = max(self.rank, min(len(G), rows))
        self.tau = float(sum(torch.trace(left) for layer in self.past for left, _ in layer)) / self.rank
        return self._dense(self.c * self.tau)

    def _mixed(
        self, old: list[tuple[Tensor, Tensor]], now: list[tuple[Tensor, Tensor]], beta: float
    ) -> list[tuple[Tensor, Tensor]]:
        before, after = (float(sum(torch.trace(left) for left, _ in layer)) for layer in (old, now))
        if after == 0:
            return old
        beta *= min(1.0, 10 * after / before) if before else 1.0
        pairs = zip(old, now, strict=True)
        return [tuple(beta * p + (1 - beta) * q for p, q in zip(a, b, strict=True)) for a, b in pairs]  # type: ignore[misc]

    def _traces(self, form: Form, G: Tensor) -> list[tuple[Tensor, Tensor]]:
        """ΣJJᵀ and ΣJᵀJ of every group, as matrices; of a vector its diagonal and nothing"""
        found = []
        for index in form.columns(self.sizes):
            block = G[index.flatten()[:, None], index.flatten()]
            if not form.I:
                found.append((block.diagonal().diag(), torch.zeros(0, 0)))
                continue
            block = block.view(form.O, form.I, form.O, form.I)
            sides = torch.einsum("oipi->op", block), torch.einsum("oioj->ij", block)
            left, right = (
                side.diagonal().diag() if thin else side for side, thin in zip(sides, form.thin, strict=True)
            )
            found.append((left, right))
        return found

    def _dense(self, gamma: float) -> Tensor:
        gamma = gamma or 1.0
        D = torch.zeros(sum(self.sizes), sum(self.sizes))
        for form, layer in zip(self.forms, self.past, strict=True):
            for index, (left, right) in zip(form.columns(self.sizes), layer, strict=True):
                where = index.flatten()
                D[where[:, None], where] = self._product(form, left, right, gamma)
        return D

    @staticmethod
    def _product(form: Form, left: Tensor, right: Tensor, gamma: float) -> Tensor:
        eye = torch.eye(form.O)
        if not form.I:
            return left + gamma * eye
        t, pi = float(torch.trace(left)), math.sqrt(form.O / form.I)
        root = math.sqrt(t) or 1.0
        B = left / root + math.sqrt(gamma) / pi * eye
        return torch.kron(B, right / root + math.sqrt(gamma) * pi * torch.eye(form.I))
