"""Kronecker factors of the layers, damped and solved with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..deferred import ask
from ..layers.blocks import Sums
from ..metric import Part
from ..ranks import ALONE, Ranks, completed, owned
from .direct import FactorizationError


class Layer:
    """left ⊗ right for the parameters of one layer: X ↦ left·X·right with all of them in one X (K, L, R).

    K independent blocks. A weight is X[:, :, :-1] and its bias X[:, :, -1]. A factor is a matrix (K, d, d) or the
    diagonal of one (K, d).
        linear    K = groups, left = B, right = A
        lookup    K = 1, left = diag A (how often each token occurs), right = B: the table is (tokens, outputs)
        small     L = 1, left = 1, right = the block itself
    """

    def __init__(
        self, members: list[int], sizes: Sequence[int], left: Tensor, right: Tensor, bias: bool, small: bool
    ) -> None:
        self.members, self.left, self.right = members, left, right
        self.bias = bias  # whether the last parameter is one
        self.small = small
        self.K, self.L = left.shape[:2]
        self.widths = [sizes[i] // (self.K * self.L) for i in members]  # columns of each parameter in X

    def join(self, parts: Iterable[Tensor]) -> Tensor:
        """X from the parameters, each flat"""
        pieces = [p.reshape(self.K, self.L, -1) for p in parts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)

    def split(self, X: Tensor) -> list[Tensor]:
        return [p.flatten() for p in X.split(self.widths, 2)]

    def times(self, X: Tensor) -> Tensor:
        """left·X·right"""
        left, right = self.left.to(X.dtype), self.right.to(X.dtype)
        X = left @ X if left.ndim == 3 else left[:, :, None] * X
        return X @ right if right.ndim == 3 else X * right[:, None]

    def diagonal(self) -> Tensor:
        """Of left ⊗ right: (K, L, R)"""
        return diagonal_of(self.left)[:, :, None] * diagonal_of(self.right)[:, None]

    def trace(self) -> Tensor:
        return (diagonal_of(self.left).sum(1) * diagonal_of(self.right).sum(1)).sum()

    def scales(self, D: Sequence[Part] | None) -> tuple[Tensor, Tensor] | None:
        """u (K, L) and v (K, R) with D = u ⊗ v, None if D (of each parameter) is not of that form"""
        one = self.left.new_ones(self.K, self.L)
        if D is None:
            return one, diagonal_of(torch.ones_like(self.right))
        if self.small:  # every D is
            return one, self.join(d.flat(self.K * width) for d, width in zip(D, self.widths, strict=True))[:, 0]
        us: list[Tensor] = []
        vs: list[Tensor] = []
        for d, width in zip(D, self.widths, strict=True):
            u, v = d.u, self.right.new_ones(self.K, width)
            if d.v is not None:
                v = d.v.view(self.K, width)
            elif d.entries is not None and d.entries.numel() == 1:
                v = v * d.entries.reshape(())
            elif d.entries is not None:
                X = d.entries.view(self.K, self.L, width)
                if torch.equal(X, X[:, :1].expand_as(X)):
                    v = X[:, 0]
                elif width == 1:  # a number for every output of a bias
                    u = d.entries
                else:
                    return None
            us.append(one if u is None else u.view(self.K, self.L))
            vs.append(v)
        if not all(u is us[0] or torch.equal(u, us[0]) for u in us):
            return None
        return us[0], torch.cat(vs, 1)


def joined(key: tuple[int, ...], sums: Sums, other: tuple[int, ...], more: Sums) -> tuple[tuple[int, ...], Sums]:
    """Both added up. A weight or a bias that one of them lacks has the input 0 there."""
    if len(key) < len(other):
        key, sums, other, more = other, more, key, sums
    if key != other:
        inputs, missing = sums.A.shape[1], sums.A.shape[1] - more.A.shape[1]
        before = missing if more.bias else 0  # the bias comes last
        more = replace(more, A=torch.nn.functional.pad(more.A, (before, missing - before) * 2), bias=sums.bias)
        assert more.A.shape[1] == inputs
    return key, sums + more


def over(ranks: Ranks, sums: dict[tuple[int, ...], Sums], device: torch.device) -> dict[tuple[int, ...], Sums]:
    """The same of all ranks. A layer that one of them lacks, or a part of it, has zeros there."""
    if not ranks.several:
        return sums
    total: dict[tuple[int, ...], Sums] = {}
    for each in ranks.every({key: _on(torch.device("meta"), s) for key, s in sums.items()}):
        for key, form in each.items():
            for other in [k for k in total if set(k) & set(key)]:
                key, form = joined(key, form, other, total.pop(other))
            total[key] = form
    for key, form in total.items():
        total[key] = _on(device, form)
        for part in [k for k in sums if set(k) <= set(key)]:
            total[key] = joined(part, sums[part], key, total[key])[1]
    tensors = [t for s in total.values() for t in (s.A, s.B, torch.as_tensor(s.count).to(s.A)) if t is not None]
    found = iter(ranks.sums(tensors))
    each_with = ((key, s, next(found), None if s.B is None else next(found), next(found)) for key, s in total.items())
    return {key: replace(s, A=A, B=B, count=count) for key, s, A, B, count in each_with}


def _on(device: torch.device, s: Sums) -> Sums:
    """The same with zeros, or with shapes alone if that is no real device"""
    A, B = (None if t is None else torch.zeros_like(t, device=device) for t in (s.A, s.B))
    return Sums(s.A if A is None else A, B, 0.0, s.bias, s.table)


def layer_of(members: list[int], sums: Sums, sizes: Sequence[int], scale: float) -> Layer:
    """The factors from what the pieces add up to: A a mean over samples and positions, B a sum"""
    if sums.B is None:
        return Layer(members, sizes, torch.ones_like(sums.A[:, :1, 0]), sums.A * scale, sums.bias, True)
    A, B = sums.A / torch.as_tensor(sums.count).clamp(min=torch.finfo(sums.A.dtype).tiny), sums.B * scale
    left, right = (A, B) if sums.table else (B, A)
    return Layer(members, sizes, left, right, sums.bias, False)


class Factor(ABC):
    """M + c·diag w as a function of c (K, 1, 1): one side of H"""

    mean: Tensor  # of M_ii/w_i: (K, 1, 1)

    @abstractmethod
    def times(self, c: Tensor, X: Tensor) -> Tensor:
        """(M + c·diag w)X: (K, d, k) → (K, d, k)"""

    @abstractmethod
    def solve(self, c: Tensor, X: Tensor, jitter: float) -> tuple[Tensor, Tensor | None]:
        """(M + c·diag w)⁻¹X in the precision of X, and whether that failed"""

    def kept(self) -> dict[str, Tensor]:
        """What makes it again in later steps, if it is worth that"""
        return {}


class DiagonalFactor(Factor):
    """M is diagonal."""

    def __init__(self, M: Tensor, w: Tensor) -> None:
        self.M, self.w = M[:, :, None], w[:, :, None]
        self.mean = (self.M / self.w).mean(1, keepdim=True)

    def times(self, c: Tensor, X: Tensor) -> Tensor:
        return (self.M + c * self.w).to(X.dtype) * X

    def solve(self, c: Tensor, X: Tensor, jitter: float) -> tuple[Tensor, Tensor | None]:
        total = (self.M + c * self.w).to(X.dtype)
        return X / total.where(total > 0, 1), None  # a total of 0 has no curvature and no gradient: X is 0 there


class FullFactor(Factor):
    """By a Cholesky decomposition for every c."""

    def __init__(self, M: Tensor, w: Tensor) -> None:
        self.M, self.w = M, w[:, :, None]
        self.mean = (M.diagonal(dim1=1, dim2=2) / w).mean(1)[:, None, None]

    def times(self, c: Tensor, X: Tensor) -> Tensor:
        return self.M.to(X.dtype) @ X + (c * self.w).to(X.dtype) * X

    def solve(self, c: Tensor, X: Tensor, jitter: float) -> tuple[Tensor, Tensor | None]:
        H = self.M.to(X.dtype, copy=True)
        line = H.diagonal(dim1=1, dim2=2)
        line += (c * self.w)[:, :, 0].to(X.dtype)
        # Unit diagonal first: positive definiteness then no longer depends on the units of the parameters.
        s = line.where(line > 0, 1).rsqrt()[:, :, None]
        H *= s * s.mT
        line += jitter * H.shape[1]
        L, info = torch.linalg.cholesky_ex(H)
        return s * torch.cholesky_solve(s * X, L), info.any()


class Spectrum(Factor):
    """By one eigendecomposition for all c: w^-½ M w^-½ = Q·diag e·Qᵀ."""

    def __init__(self, Q: Tensor, e: Tensor, w: Tensor) -> None:
        self.Q, self.e, self.w = Q, e, w  # (K, d, d), (K, d), (K, d)
        self.mean = e.mean(1)[:, None, None]

    @staticmethod
    def of(M: Tensor, w: Tensor) -> Spectrum:
        return spectra(ALONE, [(M, w)])[0]

    def kept(self) -> dict[str, Tensor]:
        return {"Q": self.Q, "e": self.e, "w": self.w}

    def times(self, c: Tensor, X: Tensor) -> Tensor:
        root = self.w.sqrt()[:, :, None].to(X.dtype)
        return root * self._with((self.e[:, :, None] + c).to(X.dtype), root * X)

    def solve(self, c: Tensor, X: Tensor, jitter: float) -> tuple[Tensor, Tensor | None]:
        s = self.w.rsqrt()[:, :, None].to(X.dtype)
        total = (self.e[:, :, None] + c).to(X.dtype)
        return s * self._with(1 / total.where(total > 0, 1), s * X), None

    def _with(self, values: Tensor, X: Tensor) -> Tensor:
        Q = self.Q.to(X.dtype)
        return Q @ (values * (Q.mT @ X))


def spectra(ranks: Ranks, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Spectrum]:
    """Of every M and w; each is decomposed by one of the ranks."""
    scaled = [M * w.rsqrt()[:, :, None] * w.rsqrt()[:, None] for M, w in pairs]
    own = [decomposed(M) for M in owned(ranks, scaled)]
    found = completed(ranks, own, scaled, [(M, M[:, 0]) for M in scaled])
    if not all(ask(e.isfinite().all()) for _, e in found):
        raise FactorizationError("the curvature could not be decomposed")
    return [Spectrum(Q, e, w) for (Q, e), (_, w) in zip(found, pairs, strict=True)]


def decomposed(M: Tensor) -> tuple[Tensor, Tensor]:
    """Q and e with M = Q·diag e·Qᵀ, e at least its rounding; not finite if there are none: (K, d, d), (K, d)"""
    try:
        e, Q = torch.linalg.eigh(M)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return M, torch.full_like(M[:, 0], torch.nan)
    return Q, torch.maximum(e, torch.finfo(M.dtype).eps * M.shape[1] * e[:, -1:])


class Pair:
    """H = (left + √λ/π·diag u) ⊗ (right + π√λ·diag v) of one layer; of a small one 1 ⊗ (right + λ·diag v)"""

    def __init__(self, left: Factor, right: Factor, lam: Tensor, small: bool) -> None:
        self.left, self.right = left, right
        if small:
            self.c_left, self.c_right = torch.zeros_like(lam), lam.clone()
            return
        # A layer without any curvature has no π: any will do.
        live = (left.mean > 0) & (right.mean > 0)
        pi = (right.mean / left.mean).where(live, 1).sqrt()
        self.c_left, self.c_right = lam.sqrt() / pi, lam.sqrt() * pi

    def times(self, X: Tensor) -> Tensor:
        return self.right.times(self.c_right, self.left.times(self.c_left, X).mT).mT


class Solver:
    """X ↦ H⁻¹X of one layer, and whether it failed."""

    def __init__(self, pair: Pair, dtype: torch.dtype, jitter: float) -> None:
        self.pair, self.dtype, self.jitter = pair, dtype, jitter
        self.failed: list[Tensor] = []

    def __call__(self, X: Tensor) -> Tensor:
        Y, first = self.pair.left.solve(self.pair.c_left, X, self.jitter)
        Z, second = self.pair.right.solve(self.pair.c_right, Y.mT, self.jitter)
        self.failed += [f for f in (first, second) if f is not None]
        return Z.mT


def diagonal_of(M: Tensor) -> Tensor:
    """Of a matrix, or of what already is the diagonal of one: (K, d)"""
    return M if M.ndim == 2 else M.diagonal(dim1=1, dim2=2)
