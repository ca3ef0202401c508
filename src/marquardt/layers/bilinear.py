"""Layers that are linear in their weight: every row is a sum of outer products, J̃ = Σₚ δₚ ⊗ aₚ.

Linear, convolution (on patches) and the scale of a normalisation layer differ only in what a and δ are.

    N samples, R rows per sample, P positions in a sample (pixels, tokens), G groups, I inputs and O outputs per group
    a (N, P, G, I)       what the weight multiplies
    δ (R, N, P, G, O)    gradients of the rows at the layer's output
    weight (G·O, I)      row (r, n) of its J̃ is Σₚ δ[r, n, p] ⊗ a[n, p]
    bias (G·O,)          row (r, n) of its J̃ is Σₚ δ[r, n, p]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from ..metric import Part, Turn
from ..model.precision import COARSE, widened
from .block import SLAB, Block, Product, Sums, add_product
from .coarse import FASTER, fast, pull, pulls, times
from .traces import Traces, of_rows, of_vectors, product_of, square


class Bilinear(Block):
    """J̃ of a weight and, after it, a bias; either may be missing."""

    def __init__(
        self, a: Tensor, delta: Tensor, weight: Tensor | None, bias: Tensor | None, one: Tensor | None = None
    ) -> None:
        self.factors = a, delta  # in the precision of the layer, which under autocast is not that of the parameters
        self.weight, self.bias = weight, bias
        self.one = one  # what the bias multiplies, if it is not 1: ()
        self.params = [p for p in (weight, bias) if p is not None]
        self.R, self.N, self.P, self.G, self.O = delta.shape
        self.I = a.shape[-1]
        self.m = self.R * self.N

    @property
    def a(self) -> Tensor:
        a = self.factors[0]
        return widened(a) if a.dtype in COARSE else a

    @property
    def delta(self) -> Tensor:
        delta = self.factors[1]
        return widened(delta) if delta.dtype in COARSE else delta

    def without(self, some: Sequence[Tensor]) -> Block | None:
        weight, bias = (None if any(p is q for q in some) else p for p in (self.weight, self.bias))
        if weight is None and bias is None:
            return None
        a, delta = self.factors
        return Bilinear(a if weight is not None else a[..., :0], delta, weight, bias, self.one)

    def slabs(self, dtype: torch.dtype) -> Iterable[tuple[slice, Tensor]]:
        if self.P == 1 and self.m * self.G * self.O * self.I <= SLAB:
            return self._at_once(dtype)
        return self._one_by_one(dtype)

    def _at_once(self, dtype: torch.dtype) -> list[tuple[slice, Tensor]]:
        """The rows of one position, if they are few"""
        a, delta = self.factors
        delta, a = delta[:, :, 0], a[:, 0]  # (R, N, G, O), (N, G, I)
        if delta.dtype is not dtype or a.dtype is not dtype:
            delta, a = delta.to(dtype), a.to(dtype)
        found: list[tuple[slice, Tensor]] = []
        columns = 0
        if self.weight is not None:
            piece = (delta[..., None] * a[:, :, None]).reshape(self.m, -1)
            columns = piece.shape[1]
            found += ((slice(0, columns), piece),)
        if self.bias is not None:
            piece = delta.reshape(self.m, -1)
            piece = piece if self.one is None else self._times_one(piece)
            found += ((slice(columns, columns + piece.shape[1]), piece),)
        return found

    def _one_by_one(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        start = 0
        for g, o in self._pieces() if self.weight is not None else ():
            piece = self._outer(self.delta[:, :, :, g, o].to(dtype), self.a[:, :, g].to(dtype))
            yield slice(start, start + piece.shape[1]), piece
            start += piece.shape[1]
        if self.bias is not None:
            piece = self.delta.to(dtype).sum(2).reshape(self.m, -1)
            yield slice(start, start + piece.shape[1]), self._times_one(piece)

    def _times_one(self, t: Tensor) -> Tensor:
        return t if self.one is None else t * self.one.to(t)

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
        if self.O == self.I == 1:  # a scale: no matrices to multiply
            return (delta[..., 0] * a[..., 0]).sum(2).reshape(self.m, -1)
        return torch.einsum("rnpgo,npgi->rngoi", delta, a).reshape(self.m, -1)

    @cached_property
    def _plain(self) -> tuple[Tensor, Tensor] | None:
        """a (N, I) and δ (N, O), if there is one row, position and group, and one precision that is no coarse one"""
        if not self.R == self.P == self.G == 1 or self.one is not None:
            return None
        a, delta = self.factors
        return (a[:, 0, 0], delta[0, :, 0, 0]) if a.dtype is delta.dtype and a.dtype not in COARSE else None

    def apply(self, v: Sequence[Tensor]) -> Tensor:
        dtype = v[0].dtype
        if (plain := self._plain) is not None and self.weight is not None and plain[0].dtype is dtype:
            out = plain[0] @ v[0].view(self.O, self.I).T  # (N, O)
            return ((out if self.bias is None else out.add_(v[-1])) * plain[1]).sum(1)
        total: Tensor | None = None
        if self.weight is not None and self.G == 1:
            V = v[0].view(self.O, self.I)
            total = times(self.factors[0].flatten(0, 2), V.T, dtype).view(self.N, self.P, 1, self.O)
        elif self.weight is not None:
            V = v[0].view(self.G, self.O, self.I)
            total = torch.einsum("npgi,goi->npgo", self.a.to(dtype), V)
        if self.bias is not None:
            b = self._times_one(v[-1]).view(self.G, self.O)
            total = b.expand(self.N, self.P, -1, -1) if total is None else total.add_(b)
        assert total is not None
        # (N, R, P·G·O) (N, P·G·O, 1) → (N, R)
        rows = self.delta.to(dtype).flatten(2).transpose(0, 1) @ total.flatten(1)[:, :, None]
        return rows[:, :, 0].T.flatten()

    def adjoint(self, w: Tensor, out: Sequence[Tensor]) -> None:
        if self.R == self.G == 1 and self.weight is not None and w.dtype == torch.float32 and pulls(self.factors[0]):
            a, delta = (t.flatten(0, -2) for t in self.factors)  # (N·P, I), (N·P, O)
            pull(delta, a, w.repeat_interleave(self.P)[:, None], [t.view(self.O, -1) for t in out])
            if self.bias is not None and self.one is not None:
                out[-1].mul_(self.one)
            return
        if (plain := self._plain) is not None and self.weight is not None and plain[0].dtype is w.dtype:
            delta = w[:, None] * plain[1]  # (N, O)
            torch.mm(delta.T, plain[0], out=out[0].view(self.O, self.I))
            if self.bias is not None:
                torch.sum(delta, 0, out=out[-1])
            return
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
            elif self.O == self.I == 1:
                torch.sum((delta * a)[..., 0], (0, 1), out=out[0])
            else:
                out[0].copy_(torch.einsum("npgo,npgi->goi", delta, a).flatten())
        if self.bias is not None:
            torch.sum(delta.flatten(2).flatten(0, 1), 0, out=out[-1])
            if self.one is not None:
                out[-1].mul_(self.one)

    @property
    def factored(self) -> bool:
        return self.P == self.G == 1 < self.R and self.one is None

    def samples(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        if self.G > 1:
            return super().samples(dtype, out)
        if out is None:
            out = torch.empty(self.m, self.columns, dtype=dtype, device=self.delta.device)
        if self.weight is not None:
            weight = out[:, : self.O * self.I]
            if self.P == 1:
                delta, a = self.delta[:, :, 0, 0].transpose(0, 1).to(dtype), self.a[:, 0, 0].to(dtype)
                view = weight.view(self.N, self.R, self.O, self.I)
                torch.mul(delta[:, :, :, None], a[:, None, None, :], out=view)
            else:
                weight.copy_(self._samples(slice(None), dtype))
        if self.bias is not None:
            out[:, -self.O :] = self._biases(dtype)
        return out

    def against(self, samples: Tensor) -> Tensor:
        """Σₙ (Σᵣ x ⊗ δ) ⊗ a: the R rows of a sample share their a, so they are contracted before a comes in."""
        if not self.factored:
            return super().against(samples)
        X = samples.view(self.N, self.R, -1)
        delta, a = self._pair(samples.dtype)
        product = samples.new_empty(X.shape[2], self.columns)
        size = max(1, SLAB // (self.N * self.O))
        for part, place in zip(X.split(size, 2), product.split(size), strict=True):
            T = delta.mT @ part  # (N, O, q)
            if self.weight is not None:
                found = (T.flatten(1).T @ a).view(self.O, -1, self.I)
                place[:, : self.O * self.I].unflatten(1, (self.O, self.I)).copy_(found.transpose(0, 1))
            if self.bias is not None:
                place[:, -self.O :] = T.sum(0).T
        return product

    def square(self, dtype: torch.dtype) -> Tensor:
        """Σₙ (Σᵣ δδᵀ) ⊗ aaᵀ, half of the pairs of outputs: (columns, columns)"""
        pairs, weights = self.O * (self.O + 1) // 2, self.O * self.I
        if not self.factored or self.N * pairs * (self.I + 1) > SLAB:
            return super().square(dtype)
        delta, a = self._pair(dtype)
        B = delta.mT @ delta  # (N, O, O)
        product = a.new_empty(self.columns, self.columns)
        if self.weight is not None:
            o, p = torch.triu_indices(self.O, self.O, device=a.device)
            which = torch.empty(self.O, self.O, dtype=torch.long, device=a.device)
            which[o, p] = which[p, o] = torch.arange(pairs, device=a.device)
            found = ((B[:, o, p, None] * a[:, None, :]).flatten(1).T @ a).view(pairs, self.I, self.I)
            whole = product[:weights, :weights].unflatten(1, (self.O, self.I)).unflatten(0, (self.O, self.I))
            whole.copy_(found[which].transpose(1, 2))  # (O, I, O, I)
        if self.bias is not None:
            product[-self.O :, -self.O :] = B.sum(0)
        if self.weight is not None and self.bias is not None:
            product[weights:, :weights] = (B.flatten(1).T @ a).view(self.O, weights)
            product[:weights, weights:] = product[weights:, :weights].T
        return product

    def _pair(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """δ (N, R, O) and a (N, I)"""
        return self.delta[:, :, 0, 0].transpose(0, 1).to(dtype), self.a[:, 0, 0].to(dtype)

    def diagonal(self) -> Tensor:
        if self.P != 1 or self.one is not None:
            return super().diagonal()
        squares = self.delta[:, :, 0].square().sum(0)  # (N, G, O)
        parts = []
        if self.weight is not None:
            parts.append(torch.einsum("ngo,ngi->goi", squares, self.a[:, 0].square()).flatten())
        if self.bias is not None:
            parts.append(squares.sum(0).flatten())
        return torch.cat(parts)

    def trace(self) -> Tensor:
        if self.P > 1 or self.G > 1 or self.one is not None:
            return super().trace()
        inputs = self.a.square().sum((1, 2, 3)) + (self.bias is not None)  # (N,)
        return self.delta.square().sum((0, 2, 3, 4)) @ inputs

    def inputs(self) -> Tensor | None:
        # Not .mean(): a chunk that does not reach the layer has no positions.
        return None if self.weight is None else self.a.square().sum((0, 1))[:, None] / max(1, self.N * self.P)

    def gram(self, K: Tensor, other: Block, product: Product | None = None) -> None:
        """(AAᵀ + 1) ∘ ΔΔᵀ, summed over pairs of positions: J̃ is never built."""
        if self.G > 1:
            return super().gram(K, other, product)
        if other is not self:
            other = cast(Bilinear, other)
        pairs, faster = self.m * self.P * other.m * other.P, FASTER if fast(self.factors[0]) else 1
        # Operations of the pairwise form against those of the explicit rows: take the cheaper one.
        explicit = (self.m * other.m + self.m * self.P / faster) * self.O * self.I
        pairwise = pairs * (self.O + self.I / self.R**2) / faster < explicit
        if (self.P > 1 and not pairwise) or pairs > 8 * SLAB:
            return self._gram_of_rows(K, other, product)
        if product is not None:
            product.add(self)
        left, A = self.factors[1].reshape(-1, self.O), self.factors[0].reshape(self.N * self.P, self.I)
        right, B = left, A
        if other is not self:
            right, B = other.factors[1].reshape(-1, other.O), other.factors[0].reshape(other.N * other.P, other.I)
        deltas = times(left, right.T, K.dtype).view(self.R, self.N, self.P, other.R, other.N, other.P)
        inputs = times(A, B.T, K.dtype)  # (N·P, N'·P'), zero where there is no weight (I = 0)
        if self.bias is not None:
            inputs += 1 if self.one is None else self.one.square().to(K.dtype)
        factor = inputs.view(1, self.N, self.P, 1, other.N, other.P)
        blocks = K.view(self.R, self.N, other.R, other.N)
        if self.P == other.P == 1:
            blocks.addcmul_(deltas[:, :, 0, :, :, 0], factor[:, :, 0, :, :, 0])
        else:
            # One dimension after the other: both at once take ten times as long on a CPU, and twice on a GPU.
            blocks += deltas.mul_(factor).sum(2).sum(-1)

    def _gram_of_rows(self, K: Tensor, other: Bilinear, product: Product | None) -> None:
        """The same from explicit rows, some outputs at a time: cheaper for long samples."""
        total = K.new_zeros(self.m, other.m)  # rows in the order (n, r)
        image = K.new_zeros(self.m)
        for o in self._outputs():
            if self.weight is not None:
                right = other._samples(o, K.dtype)
                add_product(total, right if other is self else self._samples(o, K.dtype), right)
                if product is not None:
                    image.addmv_(right, product.v[0].view(self.O, self.I)[o].flatten())
        if self.bias is not None:
            right = other._biases(K.dtype)
            if product is not None:
                image.addmv_(right, product.v[-1])
            total.addmm_(right if other is self else self._biases(K.dtype), right.T)
        K.view(self.R, self.N, other.R, other.N).add_(total.view(self.N, self.R, other.N, other.R).permute(1, 0, 3, 2))
        if product is not None:
            product.out.add_(image.view(self.N, self.R).T.flatten())

    def _biases(self, dtype: torch.dtype) -> Tensor:
        """Rows of the bias, sample by sample: (N·R, O)"""
        rows = self.delta[:, :, :, 0].to(dtype).sum(2).transpose(0, 1).reshape(self.m, self.O)
        return self._times_one(rows)

    def _outputs(self) -> Iterator[slice]:
        size = max(1, SLAB // max(1, self.m * self.I))
        for first in range(0, self.O, size):
            yield slice(first, first + size)

    def _samples(self, o: slice, dtype: torch.dtype) -> Tensor:
        """Rows of some outputs of the weight, sample by sample: (N·R, o·I)"""
        a, delta = self.factors[0][:, :, 0], self.factors[1][:, :, :, 0, o]
        folded = delta.permute(1, 0, 3, 2).reshape(self.N, self.R * delta.shape[3], self.P)  # (N, R·o, P)
        return times(folded, a, dtype).view(self.m, -1)

    def whitened(self, D: Sequence[Part]) -> Block:
        """With D = u ⊗ (v, b) it is of the same form: δ/√u, a/√v, and 1/√b for the bias"""
        parts = {id(p): d for p, d in zip(self.params, D, strict=True)}
        written = [d for p, d in zip(self.params, D, strict=True) if d.entries is not None and d.entries.numel() > 1]
        u = next((d.u for d in D if d.u is not None), None)
        if written or self.G > 1 or not all(_equal(d.u, u) for d in D):
            return super().whitened(D)
        a, one = self.a, self.one
        if self.weight is not None:
            weight = parts[id(self.weight)]
            v = weight.v if weight.entries is None else weight.entries
            a = a if v is None else a / v.reshape(-1).sqrt()
        if self.bias is not None and (b := parts[id(self.bias)].entries) is not None:
            one = b.reshape(()).rsqrt() if one is None else one * b.reshape(()).rsqrt()
        delta = self.delta if u is None else self.delta / u.reshape(-1).sqrt()
        return Bilinear(a, delta, self.weight, self.bias, one)

    def turned(self, layers: Sequence[Turn]) -> Block:
        """With one W for weight and bias it is of the same form: δ·leftᵀ and (a, 1)·rightᵀ"""
        layer, *others = layers
        left, right = layer.left, layer.right
        if others or self.weight is None or right is None or left.shape[:2] != (self.G, self.O):
            return super().turned(layers)
        a, delta = self._with_one(left.dtype), self.delta
        delta = delta if delta.dtype is left.dtype else delta.to(left)
        found = Bilinear(_mapped(a, right), _mapped(delta, left), self.weight, None)
        found.params, found.members = self.params, self.members
        return found

    def _with_one(self, dtype: torch.dtype) -> Tensor:
        """(a, 1), or a alone if there is no bias: (N, P, G, I + 1)"""
        a = self.a
        a = a if a.dtype is dtype else a.to(dtype)
        if self.bias is None:
            return a
        one = a.new_ones(*a.shape[:-1], 1)
        return torch.cat([a, one if self.one is None else self._times_one(one)], -1)

    @property
    def by_units(self) -> bool:
        """Whether every output has inputs of its own: there is no matrix then."""
        return self.weight is None or self.weight.ndim < 2 or self.O == self.I == 1 < self.G

    def partial_traces(self) -> list[Traces]:
        """With one position Σ|a|²δδᵀ and Σ|δ|²aaᵀ; with several from pairs of them or from the rows of a few samples"""
        if self.by_units:
            return of_vectors(self.params, self.diagonal())
        if self.P != 1 and self.G == 1 and self._positions_are_cheaper():
            return [Traces(self.params, *self._traces_of_positions())]
        if self.P != 1:
            parts = [part.partial_traces_of_rows() for part in self.parts()]
            left, right = (torch.stack(sides).sum(0) for sides in zip(*parts, strict=True))
            return [Traces(self.params, left, right)]
        a, delta = self.a, self.delta[:, :, 0]  # (N, P, G, I), (R, N, G, O)
        a = self._with_one(a.dtype)[:, 0]  # (N, G, I)
        lengths = torch.linalg.vector_norm(a, dim=2), torch.linalg.vector_norm(delta, dim=(0, 3))  # (N, G)
        left = (delta * lengths[0][:, :, None]).permute(2, 0, 1, 3).flatten(1, 2)
        return [Traces(self.params, square(left), square((a * lengths[1][:, :, None]).transpose(0, 1)))]

    def _positions_are_cheaper(self) -> bool:
        """By the multiplications: for short samples of wide layers"""
        O, I, R = self.O, self.I, self.R
        positions = 2 * self.P * (I + R * O) + R * O**2 + I**2
        return self.P * positions < R * O * I * (self.P + O + I)

    def _traces_of_positions(self) -> tuple[Tensor, Tensor]:
        """ΣΔᵀ(AAᵀ)Δ and ΣAᵀ(ΔΔᵀ)A over the samples: rows are not written out"""
        a, delta = self._with_one(self.delta.dtype)[:, :, 0], self.delta[:, :, :, 0]  # (N, P, I), (R, N, P, O)
        side = delta.permute(1, 2, 0, 3).flatten(2)  # (N, P, R·O)
        return product_of(delta, (a @ a.mT) @ delta), product_of(a, (side @ side.mT) @ a)

    def parts(self) -> Iterator[Bilinear]:
        """A few samples at a time, whose rows can be written out"""
        size = max(1, SLAB // max(1, self.R * self.columns))
        for n in range(0, self.N, size):
            some = slice(n, n + size)
            yield Bilinear(self.factors[0][some], self.factors[1][:, some], self.weight, self.bias, self.one)

    def partial_traces_of_rows(self) -> tuple[Tensor, Tensor]:
        pieces = self.samples(self.delta.dtype).split([p.numel() for p in self.params], 1)
        return of_rows(Turn.joined(pieces, (self.G, self.O)))

    def beside(self, others: Sequence[Bilinear]) -> Bilinear:
        blocks = [self, *others]
        a, delta = (torch.cat([b.factors[k] for b in blocks], 1 + k) for k in (0, 1))
        return Bilinear(a, delta, self.weight, self.bias, self.one)

    def sums(self, weight: Tensor | None) -> Sums:
        if self.G > 1 and self.O == 1:
            return Sums(self._own_blocks(), None, 1.0, self.bias is not None)
        a = self.a.permute(2, 0, 1, 3).reshape(self.G, self.N * self.P, self.I)  # (G, N·P, I)
        each = a.new_ones(self.N) if weight is None else weight.to(a)
        each = each.repeat_interleave(self.P)[:, None]  # (N·P, 1)
        A = a.mT @ (a if weight is None else a * each)
        if self.bias is not None:  # the row and the column of its input 1, without a copy of a
            A = torch.nn.functional.pad(A, (0, 1, 0, 1))
            A[:, -1, :-1] = A[:, :-1, -1] = (a.mT @ each)[:, :, 0]
            A[:, -1, -1] = each.sum()
        delta = self.delta.permute(3, 0, 1, 2, 4).reshape(self.G, -1, self.O)
        return Sums(A, delta.mT @ delta, each.sum(), self.bias is not None)

    def _own_blocks(self) -> Tensor:
        """The block of every output itself, Σ xxᵀ with x = Σₚ δₚaₚ: (G, I, I)"""
        total = self.a.new_zeros(())
        for delta in self.delta[..., 0]:  # (N, P, G), row by row to bound the memory
            pieces = [torch.einsum("npg,npgi->gni", delta, self.a)]
            if self.bias is not None:
                pieces.append(delta.sum(1).T[:, :, None])
            x = torch.cat(pieces, 2)
            total = total + x.mT @ x
        return total

    def second_moments(self, left: Tensor | None, right: Tensor | None) -> Tensor:
        """δ → δ·left, (a, 1) → (a, 1)·right, and the diagonal as if of one weight: (G, O, I + 1)"""
        a = self.a if self.bias is None else torch.cat([self.a, self.a.new_ones(*self.a.shape[:-1], 1)], -1)
        if right is not None and (missing := right.shape[1] - a.shape[-1]):  # inputs of a parameter without influence
            a = torch.nn.functional.pad(a, (missing, 0) if self.weight is None else (0, missing))
        a = a if right is None else torch.einsum("npgi,gij->npgj", a, right)
        delta = self.delta if left is None else torch.einsum("rnpgo,gok->rnpgk", self.delta, left)
        J = a.shape[-1]
        weight = a.new_empty(()).expand(self.G * self.O, J)  # for its shape
        return Bilinear(a, delta, weight, None).diagonal().view(self.G, self.O, J)


def _mapped(x: Tensor, side: Tensor) -> Tensor:
    """x·sideᵀ in every group: (…, G, d), by a matrix (G, d, d) or the diagonal of one"""
    if side.ndim == 2:
        return x * side
    return x @ side[0].mT if side.shape[0] == 1 else torch.einsum("...gi,gji->...gj", x, side)


def _equal(u: Tensor | None, other: Tensor | None) -> bool:
    return u is other or (u is not None and other is not None and torch.equal(u, other))
