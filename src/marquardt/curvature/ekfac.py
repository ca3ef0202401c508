"""EKFAC: KFAC's eigenbasis with the second moments that the rows really have there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ..jacobian.linearization import Linearization
from ..metric import Diagonal, Metric
from .contract import Past, trusted
from .factors import Layer, Spectrum
from .kronecker import Kronecker, KroneckerCurvature
from .solve import FactorizationError


@dataclass(frozen=True)
class EKFAC(Kronecker):
    """G ≈ Q·diag s·Qᵀ for every layer, with Q = Q_B ⊗ Q_A from the eigenvectors of Kronecker's factors B and A.

        s = Σ (Qᵀx)²      over the rows x of the layer's J̃, each summed over positions first

    (George et al. 2018.) Of all matrices that are diagonal in this basis it is the nearest to the layer's block of G,
    so it is never further from it than B ⊗ A, which is one of them. The step solves with

        H = Q·diag(s + λ)·Qᵀ      for a D that is one number: no other is diagonal in every basis, and it is refused

    From batch to batch s is a running average like A and B, though their eigenvectors move meanwhile.
    """

    every: int = field(default=1, init=False, repr=False)  # the basis is that of the step

    def form(self, lin: Linearization) -> EKFACCurvature:
        return EKFACCurvature(lin, self.decay)


class Basis:
    """Q_left ⊗ Q_right of one layer, and s in it: X ↦ Q_left·(f(s) ∘ Q_leftᵀ·X·Q_right)·Q_rightᵀ, X as in Layer."""

    def __init__(self, layer: Layer) -> None:
        self.left, self.right = eigenvectors(layer.left), eigenvectors(layer.right)
        self.s = torch.zeros_like(layer.diagonal())  # (K, L, R)

    def times(self, f: Callable[[Tensor], Tensor], X: Tensor) -> Tensor:
        """Q·f(s)·QᵀX"""
        left, right = (None if Q is None else Q.to(X.dtype) for Q in (self.left, self.right))
        X = X if left is None else left.mT @ X
        X = f(self.s).to(X.dtype) * (X if right is None else X @ right)
        X = X if left is None else left @ X
        return X if right is None else X @ right.mT

    def diagonal(self) -> Tensor:
        """Of Q·diag s·Qᵀ: (K, L, R)"""
        X = self.s if self.left is None else self.left.square() @ self.s
        return X if self.right is None else X @ self.right.square().mT


class EKFACCurvature(KroneckerCurvature):
    separable = False

    def __init__(self, lin: Linearization, decay: float = 0.0) -> None:
        super().__init__(lin, decay)
        self._bases: list[Basis] | None = None

    def keep(self) -> Past | None:
        kept = super().keep()
        pairs = zip(self.layers, self.bases, strict=True)
        return None if kept is None else kept | {f"s of {self._name(layer)}": basis.s for layer, basis in pairs}

    @property
    def bases(self) -> list[Basis]:
        """Of every layer, with s from the rows once more, now that the factors are known"""
        if self._bases is None:
            self._bases = [Basis(layer) for layer in self.layers]
            found = {i: basis for x, basis in zip(self.layers, self._bases, strict=True) for i in x.members}
            for piece in self.lin.pieces():
                for block in (b for b in piece.blocks if not b.empty):
                    basis = found[self.parameters.members(block.params)[0]]
                    basis.s = basis.s + self.lin.scale * block.second_moments(basis.left, basis.right)
            for layer, basis in zip(self.layers, self._bases, strict=True):
                old = self._earlier.get(f"s of {self._name(layer)}")
                if old is not None and old.shape == basis.s.shape:
                    share = self._weight() * trusted(old.flatten(), basis.s.flatten()).to(basis.s)
                    basis.s = basis.s.lerp(old.to(basis.s), share)
        return self._bases

    def _with(self, f: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
        """Q·f(s)·Qᵀv: (n,) → (n,)"""
        return self._by_layer(v, [partial(basis.times, f) for basis in self.bases])

    def __matmul__(self, v: Tensor) -> Tensor:
        return self._with(lambda s: s, v)

    def newton(self, damping: Metric | Tensor) -> Tensor:
        lam = self._number(Diagonal.of(damping, self.parameters.sizes))
        x = self._with(lambda s: 1 / (s + lam).where(s + lam > 0, 1), self.gradient)
        if not bool(x.isfinite().all()):
            raise FactorizationError("the step is not finite")
        return x

    def damped_quadratic(self, v: Tensor, damping: Metric) -> Tensor:
        lam = self._number(damping)
        return self.parameters.dot(v, self._with(lambda s: s + lam, v))

    def _number(self, A: Metric) -> Tensor:
        if A.shape is not None:
            raise ValueError(
                "EKFAC can be damped by one number for all parameters alone, which every eigenbasis leaves as it is: "
                "use damping=mq.MeanEigenvalue() or mq.Identity(), or curvature=mq.Kronecker()"
            )
        return A.scale

    # Statistics.

    def diagonal(self) -> Tensor:
        return self._joined(basis.diagonal() for basis in self.bases)

    def traces(self) -> list[tuple[list[int], Tensor, int]]:
        pairs = zip(super().traces(), self.bases, strict=True)
        return [(members, basis.s.sum(), rank) for (members, _, rank), basis in pairs]


def eigenvectors(M: Tensor) -> Tensor | None:
    """(K, d, d), None for the diagonal of a matrix, whose eigenvectors are the unit vectors"""
    return None if M.ndim == 2 else Spectrum.of(M, torch.ones_like(M[:, 0])).Q
