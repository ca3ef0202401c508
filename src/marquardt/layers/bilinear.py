"""Layers that are linear in their weight: every row is a sum of outer products, J̃ = Σₚ δₚ ⊗ aₚ.

Linear, convolution (on patches) and the scale of a normalisation layer differ only in what a and δ are.

    N samples, R rows per sample, P positions in a sample (pixels, tokens), G groups, I inputs and O outputs per group
    a (N, P, G, I)       what the weight multiplies
    δ (R, N, P, G, O)    gradients of the rows at the layer's output
    weight (G·O, I)      row (r, n) of its J̃ is Σₚ δ[r, n, p] ⊗ a[n, p]
    bias (G·O,)          row (r, n) of its J̃ is Σₚ δ[r, n, p]
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .block import SLAB, Block


class Bilinear(Block):
    """J̃ of a weight and, after it, a bias; either may be missing."""

    def __init__(self, a: Tensor, delta: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
        self.a, self.delta, self.weight, self.bias = a, delta, weight, bias
        self.params = [p for p in (weight, bias) if p is not None]
        self.R, self.N, self.P, self.G, self.O = delta.shape
        self.I = a.shape[-1]
        self.m = self.R * self.N

    def slabs(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        start = 0
        for g, o in self._pieces() if self.weight is not None else ():
            piece = self._outer(self.delta[:, :, :, g, o].to(dtype), self.a[:, :, g].to(dtype))
            yield slice(start, start + piece.shape[1]), piece
            start += piece.shape[1]
        if self.bias is not None:
            piece = self.delta.to(dtype).sum(2).reshape(self.m, -1)
            yield slice(start, start + piece.shape[1]), piece

    def _pieces(self) -> Iterator[tuple[slice, slice]]:
        """(groups, outputs) of each slab: several groups at once, or a part of one, as memory allows."""
        groups = max(1, SLAB // max(1, self.m * self.O * self.I))
        outputs = self.O if groups > 1 else max(1, SLAB // max(1, self.m * self.I))
        for g in range(0, self.G, groups):
            for o in range(0, self.O, outputs):
                yield slice(g, g + groups), slice(o, o + outputs)

    def _outer(self, delta: Tensor, a: Tensor) -> Tensor:
        """Σₚ δₚ ⊗ aₚ: (R, N, P, g, o), (N, P, g, I) → (m, g·o·I)"""
        if self.P == 1:
            return (delta[:, :, 0, :, :, None] * a[:, 0, :, None, :]).reshape(self.m, -1)
        return torch.einsum("rnpgo,npgi->rngoi", delta, a).reshape(self.m, -1)

    def apply(self, v: Tensor) -> Tensor:
        total = v.new_zeros(self.N, self.P, self.G, self.O)
        if self.weight is not None:
            V = v[: self.G * self.O * self.I].view(self.G, self.O, self.I)
            total = total + torch.einsum("npgi,goi->npgo", self.a.to(v.dtype), V)
        if self.bias is not None:
            total = total + v[-self.bias.numel() :].view(self.G, self.O)
        return torch.einsum("npgo,rnpgo->rn", total, self.delta.to(v.dtype)).flatten()

    def adjoint(self, w: Tensor) -> Tensor:
        # a is the same for the R rows of a sample: contract them first, then it is one ordinary backward.
        delta = torch.zeros_like(self.delta[0], dtype=w.dtype)
        for weight, part in zip(w.view(self.R, self.N, 1, 1, 1), self.delta, strict=True):
            delta.addcmul_(weight, part.to(w.dtype))  # (N, P, G, O)
        parts = []
        if self.weight is not None:
            parts.append(torch.einsum("npgo,npgi->goi", delta, self.a.to(w.dtype)).flatten())
        if self.bias is not None:
            parts.append(delta.sum((0, 1)).flatten())
        return torch.cat(parts)

    @property
    def factored(self) -> bool:
        return self.P == self.G == 1 < self.R

    def against(self, rows: Tensor) -> Tensor:
        """Σₙ (Σᵣ x ⊗ δ) ⊗ a: the R rows of a sample share their a, so they are contracted before a comes in."""
        if not self.factored:
            return super().against(rows)
        X = rows.view(self.R, self.N, -1).transpose(0, 1)  # (N, R, q)
        delta = self.delta[:, :, 0, 0].transpose(0, 1).to(rows.dtype)  # (N, R, O)
        a = self.a[:, 0, 0].to(rows.dtype)  # (N, I)
        if self.bias is not None:
            a = torch.cat([a, a.new_ones(self.N, 1)], 1)
        pieces = []
        for part in X.split(max(1, SLAB // (self.N * self.O)), 2):
            T = part.transpose(1, 2) @ delta  # (N, q, O)
            pieces.append((T.flatten(1).T @ a).view(-1, self.O, a.shape[1]))  # (q, O, I + 1)
        found = torch.cat(pieces)
        if self.bias is None or self.weight is None:
            return found.flatten(1)
        return torch.cat([found[:, :, :-1].flatten(1), found[:, :, -1]], 1)

    def diagonal(self) -> Tensor:
        if self.P > 1:
            return super().diagonal()
        squares = self.delta[:, :, 0].square().sum(0)  # (N, G, O)
        parts = []
        if self.weight is not None:
            parts.append(torch.einsum("ngo,ngi->goi", squares, self.a[:, 0].square()).flatten())
        if self.bias is not None:
            parts.append(squares.sum(0).flatten())
        return torch.cat(parts)

    def gram(self, K: Tensor, other: Block, inverse: Tensor | None) -> None:
        """(AAᵀ + 1) ∘ ΔΔᵀ, summed over pairs of positions: J̃ is never built."""
        assert isinstance(other, Bilinear)
        pairs = self.m * self.P * other.m * other.P
        # Operations of the pairwise form against those of the explicit rows: take the cheaper one.
        pairwise = pairs * (self.O + self.I / self.R**2) < (self.m * other.m + self.m * self.P) * self.O * self.I
        if inverse is not None or self.G > 1 or pairs > 8 * SLAB or (self.P > 1 and not pairwise):
            return super().gram(K, other, inverse)
        D, E = (b.delta.reshape(-1, b.O).to(K.dtype) for b in (self, other))
        A, B = (b.a.reshape(b.N * b.P, b.I).to(K.dtype) for b in (self, other))
        deltas = (D @ E.T).view(self.R, self.N, self.P, other.R, other.N, other.P)
        inputs = A @ B.T  # (N·P, N'·P'), zero where there is no weight (I = 0)
        if self.bias is not None:
            inputs += 1
        factor = inputs.view(1, self.N, self.P, 1, other.N, other.P)
        blocks = K.view(self.R, self.N, other.R, other.N)
        if self.P == other.P == 1:
            blocks.addcmul_(deltas[:, :, 0, :, :, 0], factor[:, :, 0, :, :, 0])
        else:
            blocks += deltas.mul_(factor).sum((2, 5))
