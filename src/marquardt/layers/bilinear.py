"""Layers that are linear in their weight: every row is a sum of outer products, J̃ = Σₚ δₚ ⊗ aₚ.

Linear, convolution (on patches) and the scale of a normalisation layer differ only in what a and δ are.

    N samples, R rows per sample, P positions in a sample (pixels, tokens), G groups, I inputs and O outputs per group
    a (N, P, G, I)       what the weight multiplies
    δ (R, N, P, G, O)    gradients of the rows at the layer's output
    weight (G·O, I)      row (r, n) of its J̃ is Σₚ δ[r, n, p] ⊗ a[n, p]
    bias (G·O,)          row (r, n) of its J̃ is Σₚ δ[r, n, p]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..metric import Factors
from .block import SLAB, Block, Product, add_product


class Bilinear(Block):
    """J̃ of a weight and, after it, a bias; either may be missing."""

    def __init__(self, a: Tensor, delta: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
        self.a, self.delta, self.weight, self.bias = a, delta, weight, bias
        self.params = [p for p in (weight, bias) if p is not None]
        self.R, self.N, self.P, self.G, self.O = delta.shape
        self.I = a.shape[-1]
        self.m = self.R * self.N

    def without(self, some: Sequence[Tensor]) -> Block | None:
        weight, bias = (None if any(p is q for q in some) else p for p in (self.weight, self.bias))
        if weight is None and bias is None:
            return None
        return Bilinear(self.a if weight is not None else self.a[..., :0], self.delta, weight, bias)

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

    def apply(self, v: Sequence[Tensor]) -> Tensor:
        dtype = v[0].dtype
        total: Tensor | None = None
        if self.weight is not None:
            V = v[0].view(self.G, self.O, self.I)
            total = torch.einsum("npgi,goi->npgo", self.a.to(dtype), V)
        if self.bias is not None:
            b = v[-1].view(self.G, self.O)
            total = b.expand(self.N, self.P, -1, -1) if total is None else total.add_(b)
        assert total is not None
        # (N, R, P·G·O) (N, P·G·O, 1) → (N, R)
        rows = self.delta.to(dtype).flatten(2).transpose(0, 1) @ total.flatten(1)[:, :, None]
        return rows[:, :, 0].T.flatten()

    def adjoint(self, w: Tensor, out: Sequence[Tensor]) -> None:
        # a is the same for the R rows of a sample: contract them first, then it is one ordinary backward.
        if self.R == 1:
            delta = w.view(self.N, 1, 1, 1) * self.delta[0].to(w.dtype)
        else:
            rows = w.view(self.R, self.N).T[:, None]  # (N, 1, R)
            delta = (rows @ self.delta.to(w.dtype).flatten(2).transpose(0, 1)).view(self.N, self.P, self.G, self.O)
        if self.weight is not None:
            a = self.a.to(w.dtype)
            if self.G == 1:
                torch.mm(delta.flatten(0, 2).T, a.flatten(0, 2), out=out[0].view(self.O, self.I))
            else:
                out[0].copy_(torch.einsum("npgo,npgi->goi", delta, a).flatten())
        if self.bias is not None:
            torch.sum(delta.flatten(2).flatten(0, 1), 0, out=out[-1])

    @property
    def factored(self) -> bool:
        return self.P == self.G == 1 < self.R

    def samples(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        if self.G > 1 or self.P == 1:
            return super().samples(dtype, out)
        if out is None:
            out = torch.empty(self.m, self.columns, dtype=dtype, device=self.delta.device)
        if self.weight is not None:
            out[:, : self.O * self.I] = self._samples(slice(None), None, None, dtype)
        if self.bias is not None:
            out[:, -self.O :] = self._biases(dtype)
        return out

    def against(self, samples: Tensor) -> Tensor:
        """Σₙ (Σᵣ x ⊗ δ) ⊗ a: the R rows of a sample share their a, so they are contracted before a comes in."""
        if not self.factored:
            return super().against(samples)
        X = samples.view(self.N, self.R, -1)
        delta, a = self._pair(samples.dtype)
        pieces = []
        for part in X.split(max(1, SLAB // (self.N * self.O)), 2):
            T = part.transpose(1, 2) @ delta  # (N, q, O)
            pieces.append((T.flatten(1).T @ a).view(-1, self.O, a.shape[1]))  # (q, O, I + 1)
        return self._ordered(torch.cat(pieces) if len(pieces) > 1 else pieces[0])

    def square(self, dtype: torch.dtype) -> Tensor:
        """Σₙ (Σᵣ δδᵀ) ⊗ aaᵀ, half of the pairs of outputs: (columns, columns)"""
        pairs = self.O * (self.O + 1) // 2
        if not self.factored or self.N * pairs * (self.I + 1) > SLAB:
            return super().square(dtype)
        delta, a = self._pair(dtype)  # (N, R, O), (N, J)
        J = a.shape[1]
        o, p = torch.triu_indices(self.O, self.O, device=a.device)
        B = (delta.transpose(1, 2) @ delta)[:, o, p]  # (N, pairs)
        found = (a.T @ (B[:, :, None] * a[:, None, :]).flatten(1)).view(J, pairs, J)
        which = torch.empty(self.O, self.O, dtype=torch.long, device=a.device)
        which[o, p] = which[p, o] = torch.arange(pairs, device=a.device)
        whole = found[:, which].permute(1, 0, 2, 3)  # (O, J, O, J)
        half = self._ordered(whole.reshape(self.O * J, self.O, J)).T  # (columns, O·J)
        return self._ordered(half.view(-1, self.O, J))

    def _pair(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """δ (N, R, O) and a (N, I), with 1 beside it for a bias"""
        delta, a = self.delta[:, :, 0, 0].transpose(0, 1).to(dtype), self.a[:, 0, 0].to(dtype)
        return delta, a if self.bias is None else torch.cat([a, a.new_ones(self.N, 1)], 1)

    def _ordered(self, found: Tensor) -> Tensor:
        """(q, O, I + 1) → (q, columns): the weight's first, then the bias's"""
        if self.bias is None or self.weight is None:
            return found.flatten(1)
        return torch.cat([found[:, :, :-1].flatten(1), found[:, :, -1]], 1)

    def diagonal(self) -> Tensor:
        if self.P != 1:
            return super().diagonal()
        squares = self.delta[:, :, 0].square().sum(0)  # (N, G, O)
        parts = []
        if self.weight is not None:
            parts.append(torch.einsum("ngo,ngi->goi", squares, self.a[:, 0].square()).flatten())
        if self.bias is not None:
            parts.append(squares.sum(0).flatten())
        return torch.cat(parts)

    def trace(self) -> Tensor:
        if self.P > 1 or self.G > 1:
            return super().trace()
        inputs = self.a.square().sum((1, 2, 3)) + (self.bias is not None)  # (N,)
        return self.delta.square().sum((0, 2, 3, 4)) @ inputs

    def inputs(self) -> Tensor | None:
        # Not .mean(): a chunk that does not reach the layer has no positions.
        return None if self.weight is None else self.a.square().sum((0, 1))[:, None] / max(1, self.N * self.P)

    def gram(self, K: Tensor, other: Block, D: Sequence[Factors] | None, product: Product | None = None) -> None:
        """(AV⁻¹Aᵀ + 1) ∘ ΔU⁻¹Δᵀ for D = U ⊗ V, summed over pairs of positions: J̃ is never built."""
        assert isinstance(other, Bilinear)
        scales = None if self.G > 1 else self._scales(D)
        if scales is None:
            return super().gram(K, other, D, product)
        pairs = self.m * self.P * other.m * other.P
        # Operations of the pairwise form against those of the explicit rows: take the cheaper one.
        pairwise = pairs * (self.O + self.I / self.R**2) < (self.m * other.m + self.m * self.P) * self.O * self.I
        if (self.P > 1 and not pairwise) or pairs > 8 * SLAB:
            return self._gram_of_rows(K, other, *scales, product)
        if product is not None:
            product.add(self)
        u, v, b = scales
        left, right = (block.delta.reshape(-1, block.O).to(K.dtype) for block in (self, other))
        A, B = (block.a.reshape(block.N * block.P, block.I).to(K.dtype) for block in (self, other))
        deltas = ((left if u is None else left / u) @ right.T).view(self.R, self.N, self.P, other.R, other.N, other.P)
        inputs = (A if v is None else A / v) @ B.T  # (N·P, N'·P'), zero where there is no weight (I = 0)
        if self.bias is not None:
            inputs += 1 if b is None else 1 / b
        factor = inputs.view(1, self.N, self.P, 1, other.N, other.P)
        blocks = K.view(self.R, self.N, other.R, other.N)
        if self.P == other.P == 1:
            blocks.addcmul_(deltas[:, :, 0, :, :, 0], factor[:, :, 0, :, :, 0])
        else:
            blocks += deltas.mul_(factor).sum((2, 5))

    def _gram_of_rows(
        self,
        K: Tensor,
        other: Bilinear,
        u: Tensor | None,
        v: Tensor | None,
        b: Tensor | None,
        product: Product | None,
    ) -> None:
        """The same from explicit rows, some outputs at a time: cheaper for long samples."""
        total = K.new_zeros(self.m, other.m)  # rows in the order (n, r)
        image = K.new_zeros(self.m)
        for o in self._outputs():
            if self.weight is not None:
                right = other._samples(o, None, None, K.dtype)
                plain = u is None and v is None and other is self
                add_product(total, right if plain else self._samples(o, u, v, K.dtype), right)
                if product is not None:
                    image.addmv_(right, product.v[0].view(self.O, self.I)[o].flatten())
        if self.bias is not None:
            right = other._biases(K.dtype)
            if product is not None:
                image.addmv_(right, product.v[-1])
            left = right if other is self else self._biases(K.dtype)
            left = left if u is None else left / u
            total.addmm_(left if b is None else left / b, right.T)
        K.view(self.R, self.N, other.R, other.N).add_(total.view(self.N, self.R, other.N, other.R).permute(1, 0, 3, 2))
        if product is not None:
            product.out.add_(image.view(self.N, self.R).T.flatten())

    def _biases(self, dtype: torch.dtype) -> Tensor:
        """Rows of the bias, sample by sample: (N·R, O)"""
        return self.delta[:, :, :, 0].to(dtype).sum(2).transpose(0, 1).reshape(self.m, self.O)

    def _outputs(self) -> Iterator[slice]:
        size = max(1, SLAB // max(1, self.m * self.I))
        for first in range(0, self.O, size):
            yield slice(first, first + size)

    def _samples(self, o: slice, u: Tensor | None, v: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Rows of some outputs of the weight over u ⊗ v, sample by sample: (N·R, o·I)"""
        delta, a = self.delta[:, :, :, 0, o].to(dtype), self.a[:, :, 0].to(dtype)
        delta = delta if u is None else delta / u[o]
        folded = delta.permute(1, 0, 3, 2).reshape(self.N, self.R * delta.shape[3], self.P)  # (N, R·o, P)
        return torch.bmm(folded, a if v is None else a / v).view(self.m, -1)

    def _scales(self, D: Sequence[Factors] | None) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
        """u (O,), v (I,) and the number b of the bias with D = u ⊗ (v, b); None where D is not of that form."""
        found: list[Tensor | None] = [None, None]  # v and b
        along: list[list[Tensor]] = []  # what depends on the output, by parameter
        for p, factors in zip(self.params, D or (), strict=D is not None):
            k = 0 if p is self.weight else 1
            along.append([])
            for f in factors:
                if f.numel() == 1 or f.shape[-2:-1] == (1,):
                    old = found[k]
                    found[k] = f.flatten() if old is None else old * f.flatten()
                elif f.shape[-1] == 1:
                    along[-1].append(f)
                else:
                    return None
        first = along[0] if along else []
        for others in along[1:]:
            same = len(first) == len(others) and all(
                f is g or torch.equal(f, g) for f, g in zip(first, others, strict=True)
            )
            if not same:
                return None
        u: Tensor | None = None
        for f in first:
            u = f.flatten() if u is None else u * f.flatten()
        return u, found[0], found[1]
