"""H = c·G + diag α, factored in float64: G of the data, α the precision of the prior."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ..curvature.kronecker import Layer, Spectrum
from ..metric.sides import diagonal_of
from ..model.parameters import Parameters

SINGULAR = (
    "the curvature does not determine all parameters, so that their variance is infinite: train with weight_decay and "
    "pass it here, or pass weight_decay=None for a prior that is chosen by evidence"
)


def check_proper(name: str, alpha: Tensor) -> None:
    if not bool((alpha > 0).all()):
        raise ValueError(
            f"{name} needs a prior for every parameter, and some have weight decay 0: give it to all of them, or use "
            "curvature=mq.Dense()"
        )


class Precision(ABC):
    """H with H⁻¹ = RRᵀ: what samples, variances and the evidence are made of. Vectors are rows, in float64."""

    @abstractmethod
    def half(self, V: Tensor) -> Tensor:
        """VR, with which VH⁻¹Wᵀ = (VR)(WR)ᵀ: (k, n) → (k, ·)"""

    @abstractmethod
    def drawn(self, E: Tensor) -> Tensor:
        """ERᵀ, of the covariance H⁻¹ if E is of the covariance 1: (k, n) → (k, n)"""

    @property
    @abstractmethod
    def log_determinant(self) -> float:
        """log |H|"""

    @property
    @abstractmethod
    def variances(self) -> Tensor:
        """diag H⁻¹: (n,)"""


class Scaled(Precision):
    """t·H: R/√t"""

    def __init__(self, H: Precision, t: float) -> None:
        self.H, self.t = H, t

    def half(self, V: Tensor) -> Tensor:
        return self.H.half(V) / math.sqrt(self.t)

    def drawn(self, E: Tensor) -> Tensor:
        return self.H.drawn(E) / math.sqrt(self.t)

    @property
    def log_determinant(self) -> float:
        return self.H.log_determinant + len(self.H.variances) * math.log(self.t)

    @property
    def variances(self) -> Tensor:
        return self.H.variances / self.t


class DataCurvature(ABC):
    """G of all data."""

    name: str  # in words
    sums: ClassVar[bool] = True  # over samples, of which one can be taken away

    @abstractmethod
    def precision(self, c: float, alpha: Tensor) -> Precision:
        """c·G + diag α, α (n,); raises if that cannot be inverted."""

    @abstractmethod
    def eigenvalues(self) -> Tensor:
        """Of G, those that may differ from 0, and none below it by rounding: (n,) or fewer"""

    @abstractmethod
    def trace(self) -> float:
        """tr G"""


class DenseData(DataCurvature):
    """G itself: (n, n)"""

    def __init__(self, G: Tensor) -> None:
        self.G = G.double()
        self.name = f"Dense, a matrix of {len(G):,} × {len(G):,}"

    def precision(self, c: float, alpha: Tensor) -> Precision:
        return DensePrecision(c * self.G, alpha)

    def eigenvalues(self) -> Tensor:
        e: Tensor = torch.linalg.eigvalsh(self.G)
        return e.clamp(min=0)

    def trace(self) -> float:
        return float(self.G.diagonal().sum())


class DensePrecision(Precision):
    """H = s⁻¹LLᵀs⁻¹ with s that makes the diagonal 1: R = sL⁻ᵀ"""

    def __init__(self, G: Tensor, alpha: Tensor) -> None:
        H = G + alpha.diag()
        line = H.diagonal()
        if not bool((line > 0).all()):
            raise ValueError(SINGULAR)
        self.s = line.rsqrt()  # (n,)
        self.L, info = torch.linalg.cholesky_ex(H * self.s * self.s[:, None])
        rounding = len(H) * torch.finfo(H.dtype).eps
        if bool(info != 0) or bool(self.L.diagonal().amin().square() < rounding):
            raise ValueError(SINGULAR)

    def half(self, V: Tensor) -> Tensor:
        found: Tensor = torch.linalg.solve_triangular(self.L, (V * self.s).T, upper=False).T
        return found

    def drawn(self, E: Tensor) -> Tensor:
        found: Tensor = torch.linalg.solve_triangular(self.L.T, E.T, upper=True).T * self.s
        return found

    @property
    def log_determinant(self) -> float:
        return float(2 * self.L.diagonal().log().sum() - 2 * self.s.log().sum())

    @cached_property
    def variances(self) -> Tensor:
        return torch.cholesky_inverse(self.L).diagonal() * self.s.square()


class RowsData(DataCurvature):
    """G = J̃ᵀJ̃ by its m rows, fewer than parameters: (m, n)"""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows.double()
        self.name = f"Gram, {len(rows):,} rows of {rows.shape[1]:,} parameters"

    def precision(self, c: float, alpha: Tensor) -> Precision:
        return RowsPrecision(c**0.5 * self.rows, alpha)

    def eigenvalues(self) -> Tensor:
        e: Tensor = torch.linalg.eigvalsh(self.rows @ self.rows.T)
        return e.clamp(min=0)

    def trace(self) -> float:
        return float(self.rows.square().sum())


class RowsPrecision(Precision):
    """With J = J̃α^-½, JJᵀ = U·diag e·Uᵀ, B = UᵀJ and s = √(1 + e) (Woodbury in the m rows):

    H⁻¹ = α^-½ (1 − Bᵀ diag(1/s²) B) α^-½,  R = α^-½ (1 − Bᵀ diag(1/(s(s + 1))) B).
    """

    def __init__(self, rows: Tensor, alpha: Tensor) -> None:
        check_proper("Gram", alpha)
        self.alpha = alpha
        J = rows * alpha.rsqrt()
        e, U = torch.linalg.eigh(J @ J.T)
        self.s: Tensor = (1 + e.clamp(min=0)).sqrt()[:, None]  # (m, 1)
        self.B: Tensor = U.T @ J  # (m, n)

    def _root(self, V: Tensor) -> Tensor:
        return V - ((V @ self.B.T) / (self.s * (self.s + 1)).T) @ self.B

    def half(self, V: Tensor) -> Tensor:
        return self._root(V * self.alpha.rsqrt())

    def drawn(self, E: Tensor) -> Tensor:
        return self._root(E) * self.alpha.rsqrt()

    @property
    def log_determinant(self) -> float:
        return float(2 * self.s.log().sum() + self.alpha.log().sum())

    @cached_property
    def variances(self) -> Tensor:
        return (1 - (self.B / self.s).square().sum(0)) / self.alpha


class KroneckerData(DataCurvature):
    """G ≈ left ⊗ right in every layer, and nothing between layers"""

    sums: ClassVar[bool] = False

    def __init__(self, layers: Sequence[Layer], parameters: Parameters, scale: float) -> None:
        self.layers, self.parameters, self.scale = layers, parameters, scale
        self.name = f"Kronecker, factors of {len(layers)} layers"

    def precision(self, c: float, alpha: Tensor) -> KroneckerPrecision:
        check_proper("Kronecker", alpha)
        split = self.parameters.split(alpha)
        found = [LayerPrecision(layer, c / self.scale, [split[i] for i in layer.members]) for layer in self.layers]
        return KroneckerPrecision(found, self.parameters)

    def eigenvalues(self) -> Tensor:
        one = torch.ones(self.parameters.n, dtype=torch.float64, device=self.parameters.device)
        return torch.cat([pair.e.flatten() for pair in self.precision(1.0, one).layers])

    def trace(self) -> float:
        return sum(float(layer.trace()) for layer in self.layers) / self.scale


class LayerPrecision:
    """c·left ⊗ right + 1 ⊗ diag v of one layer, v the prior of its columns, in the basis in which it is diagonal:

    left = P·diag l·Pᵀ,  v^-½ right v^-½ = Q·diag r·Qᵀ,  e = c·l rᵀ,  H = (P ⊗ v^½Q) diag(1 + e) (P ⊗ v^½Q)ᵀ.
    """

    def __init__(self, layer: Layer, c: float, alpha: Sequence[Tensor]) -> None:
        self.layer = layer
        self.v = self._joined(alpha)[0, :, 0]  # (K, R): a parameter has one α
        one = self.v.new_ones(layer.K, layer.L)
        l, self.P = _spectrum(layer.left.double(), one)
        r, self.Q = _spectrum(layer.right.double(), self.v)
        self.e = c * l[:, :, None] * r[:, None]  # (K, L, R)

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """X from the parameters of the layer, (k, ·) or flat: (k, K, L, R)"""
        K, L = self.layer.K, self.layer.L
        return torch.cat([p.reshape(-1, K, L, w) for p, w in zip(parts, self.layer.widths, strict=True)], 3)

    def _split(self, X: Tensor) -> list[Tensor]:
        return [p.flatten(1) for p in X.split(self.layer.widths, 3)]

    def half(self, parts: Sequence[Tensor]) -> Tensor:
        """(k, K·L·R)"""
        X = self._joined(parts) * self.v.rsqrt()[:, None]
        X = X if self.P is None else self.P.mT @ X
        X = X if self.Q is None else X @ self.Q
        return (X / (1 + self.e).sqrt()).flatten(1)

    def drawn(self, parts: Sequence[Tensor]) -> list[Tensor]:
        X = self._joined(parts) / (1 + self.e).sqrt()
        X = X if self.P is None else self.P @ X
        X = X if self.Q is None else X @ self.Q.mT
        return self._split(X * self.v.rsqrt()[:, None])

    def log_determinant(self) -> float:
        return float(self.e.log1p().sum() + self.layer.L * self.v.log().sum())

    def variances(self) -> list[Tensor]:
        X = 1 / (1 + self.e)
        X = X if self.P is None else self.P.square() @ X
        X = X if self.Q is None else X @ self.Q.square().mT
        return self._split((X / self.v[:, None])[None])


def _spectrum(M: Tensor, w: Tensor) -> tuple[Tensor, Tensor | None]:
    """w^-½Mw^-½: its eigenvalues (K, d) and vectors (K, d, d), None if it is diagonal"""
    if M.ndim == 2:
        return diagonal_of(M) / w, None
    found = Spectrum.of(M, w)
    return found.e, found.Q


class KroneckerPrecision(Precision):
    def __init__(self, layers: Sequence[LayerPrecision], parameters: Parameters) -> None:
        self.layers, self.parameters = layers, parameters

    def _parts(self, V: Tensor) -> list[list[Tensor]]:
        """By layer and parameter: (k, size)"""
        split = V.split(self.parameters.sizes, 1)
        return [[split[i] for i in pair.layer.members] for pair in self.layers]

    def _together(self, found: Sequence[Sequence[Tensor]]) -> Tensor:
        """(k, n) from what the layers have"""
        members = [i for pair in self.layers for i in pair.layer.members]
        pieces = dict(zip(members, (part for parts in found for part in parts), strict=True))
        return torch.cat([pieces[i] for i in sorted(pieces)], 1)

    def half(self, V: Tensor) -> Tensor:
        return torch.cat([pair.half(parts) for pair, parts in zip(self.layers, self._parts(V), strict=True)], 1)

    def drawn(self, E: Tensor) -> Tensor:
        pairs = zip(self.layers, self._parts(E), strict=True)
        return self._together([pair.drawn(parts) for pair, parts in pairs])

    @property
    def log_determinant(self) -> float:
        return sum(pair.log_determinant() for pair in self.layers)

    @cached_property
    def variances(self) -> Tensor:
        return self._together([pair.variances() for pair in self.layers])[0]
