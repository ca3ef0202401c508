"""EKFAC: KFAC's eigenbasis with the second moments that the rows really have there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ..deferred import ask
from ..jacobian.linearization import Linearization
from ..metric import Diagonal, Metric, trusted
from ..plain import check_above, check_tensor
from ..ranks import Ranks
from .contract import Past
from .cost import Shapes, gathered, sides
from .direct import FactorizationError
from .factors import Layer, spectra
from .kronecker import Kronecker, KroneckerCurvature

ONE_NUMBER = (
    "EKFAC can be damped by one number for all parameters alone, which every eigenbasis leaves as it is: "
    "use damping=mq.MeanEigenvalue() or mq.Identity(), or curvature=mq.Kronecker()"
)


@dataclass(frozen=True)
class EKFAC(Kronecker):
    """G ≈ Q·diag s·Qᵀ for every layer, with Q = Q_B ⊗ Q_A from the eigenvectors of Kronecker's factors B and A.

        s = Σ (Qᵀx)²      over the rows x of the layer's J̃, each summed over positions first

    (George et al. 2018.) Of all matrices that are diagonal in this basis it is the nearest to the layer's block of G,
    so it is never further from it than B ⊗ A, which is one of them. The step solves with

        H = Q·diag(s + λ + w)·Qᵀ      for a D that is one number: no other is diagonal in every basis, and it is refused

    Weight decay w may differ between layers. If it differs within one, as between a weight and its bias, w stands for
    the diagonal of QᵀWQ, as s does for that of QᵀGQ; the gradient has all of W.

    From batch to batch s is a running average like A and B, though their eigenvectors move meanwhile.

    Args:
        decay: the weight of earlier batches in A, B and s, at most.
        chunk: samples that are linearised at once; None for all.

    >>> opt = mq.LM(model, "mse", curvature=mq.EKFAC(), damping=mq.MeanEigenvalue())
    """

    every: int = field(default=1, init=False, repr=False)  # the basis is that of the step

    def sent(self, s: Shapes) -> float:
        """The same, every eigenbasis, and the second moments in it; the step is formed by every rank"""
        return super().sent(s) + gathered(s, sides(s))

    def form(self, lin: Linearization) -> EKFACCurvature:
        return EKFACCurvature(lin, self.decay)

    def check_part(self, part: str, t: Tensor, sides: Sequence[Tensor | None], size: int, where: str) -> None:
        left, right = sides
        if part != "s" or left is None or right is None:
            return super().check_part(part, t, sides, size, where)
        check_tensor(t, where, (len(left), left.shape[-1], right.shape[-1]))
        check_above(t, where)


class Basis:
    """Q_left ⊗ Q_right of one layer, and s in it: X ↦ Q_left·(f(s) ∘ Q_leftᵀ·X·Q_right)·Q_rightᵀ, X as in Layer."""

    def __init__(self, layer: Layer, left: Tensor | None, right: Tensor | None) -> None:
        self.left, self.right = left, right  # (K, d, d), None: the unit vectors
        self.s = torch.zeros_like(layer.diagonal())  # (K, L, R)

    def times(self, f: Callable[[Tensor], Tensor], damping: Tensor | float, X: Tensor) -> Tensor:
        """Q·f(s + damping)·QᵀX"""
        left, right = (None if Q is None else Q.to(X.dtype) for Q in (self.left, self.right))
        X = X if left is None else left.mT @ X
        X = f(self.s + damping).to(X.dtype) * (X if right is None else X @ right)
        X = X if left is None else left @ X
        return X if right is None else X @ right.mT

    def diagonal(self) -> Tensor:
        """Of Q·diag s·Qᵀ: (K, L, R)"""
        X = self.s if self.left is None else self.left.square() @ self.s
        return X if self.right is None else X @ self.right.square().mT


class EKFACCurvature(KroneckerCurvature):
    separable, selects = False, True

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
            self._bases = bases_of(self.layers, self.lin.ranks)
            found = {i: basis for x, basis in zip(self.layers, self._bases, strict=True) for i in x.members}
            for piece in self.lin.pieces():
                for block in (b for b in piece.blocks if not b.empty):
                    basis = found[self.parameters.of(block)[0]]
                    basis.s = basis.s + self.lin.scale * block.second_moments(basis.left, basis.right)
            for basis, s in zip(self._bases, self.lin.ranks.sums([basis.s for basis in self._bases]), strict=True):
                basis.s = s
            for layer, basis in zip(self.layers, self._bases, strict=True):
                old = self._earlier.get(f"s of {self._name(layer)}")
                if old is not None and old.shape == basis.s.shape:
                    share = self._weight() * trusted(old.flatten(), basis.s.flatten()).to(basis.s)
                    basis.s = basis.s.lerp(old.to(basis.s), share)
        return self._bases

    def __matmul__(self, v: Tensor) -> Tensor:
        return self._by_layer(v, [partial(basis.times, lambda s: s, 0.0) for basis in self.bases])

    def with_decay(self, A: Metric) -> Metric:
        if A.shape is not None:
            raise ValueError(ONE_NUMBER)
        decay = self.lin.decay
        return A if decay is None else A.sum(decay.weights, self.parameters.sizes)

    def newton(self, damping: Metric | Tensor) -> Tensor:
        A = Diagonal.of(damping, self.parameters.sizes)
        x = self._damped_with(A, lambda s: 1 / s.where(s > 0, 1), self.gradient)
        if not ask(x.isfinite().all()):
            raise FactorizationError("the step is not finite")
        return x

    def damped_quadratic(self, v: Tensor, damping: Metric) -> Tensor:
        return self.parameters.dot(v, self._damped_with(damping, lambda s: s, v))

    def _damped_with(self, A: Metric, f: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
        """Q·f(s + λ + w)·Qᵀv: (n,) → (n,)"""
        pairs = zip(self.layers, self.bases, strict=True)
        return self._by_layer(v, [partial(basis.times, f, self._in_basis(A, x, basis)) for x, basis in pairs])

    def _in_basis(self, A: Metric, layer: Layer, basis: Basis) -> Tensor:
        """The diagonal of QᵀAQ, which is all of it if A is one number in the layer: (), (K, 1, R) or (K, L, R)"""
        if A.parts is None:
            return A.scale
        entries = [part.entries for part in (A.parts[i] for i in layer.members)]
        numbers = [e for e in entries if e is not None and e.numel() == 1]
        if len(numbers) < len(entries):
            each = zip((A.parts[i] for i in layer.members), layer.widths, strict=True)
            X = layer.join(part.flat(layer.K * layer.L * width) for part, width in each) * A.scale  # (K, L, R)
            X = X if basis.left is None else basis.left.square().mT @ X
            return X if basis.right is None else X @ basis.right.square()
        columns = torch.cat([e.expand(width) for e, width in zip(numbers, layer.widths, strict=True)]) * A.scale  # (R,)
        return columns if basis.right is None else (columns @ basis.right.square())[:, None]

    # Statistics.

    def diagonal(self) -> Tensor:
        return self._joined(basis.diagonal() for basis in self.bases)

    def traces(self) -> list[tuple[list[int], Tensor, int]]:
        pairs = zip(super().traces(), self.bases, strict=True)
        return [(members, basis.s.sum(), rank) for (members, _, rank), basis in pairs]


def bases_of(layers: Sequence[Layer], ranks: Ranks) -> list[Basis]:
    """The diagonal of a matrix has no eigenvectors but the unit vectors."""
    sides = [M for layer in layers for M in (layer.left, layer.right)]
    found = iter(spectra(ranks, [(M, torch.ones_like(M[:, 0])) for M in sides if M.ndim == 3]))
    Q = iter(next(found).Q if M.ndim == 3 else None for M in sides)
    return [Basis(layer, next(Q), next(Q)) for layer in layers]
