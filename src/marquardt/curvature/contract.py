"""The contract of the curvature, and the one factorisation that the representations share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..deferred import ask
from ..jacobian.linearization import Linearization
from ..metric import Diagonal, Factors, known

Past = dict[str, Tensor]  # what a representation keeps from step to step

# In a running average the past has at most so many times the trace of the present.
MEMORY = 10.0


class Curvature(ABC):
    """G at one point. A representation has to say what Gv and (G + A)⁻¹g are; the rest may be cheaper in some."""

    averaged = False  # over batches, not that of this one alone

    def __init__(self, lin: Linearization) -> None:
        self.lin = lin
        self.rank = min(lin.n, lin.most)  # at most: the smaller of parameters and rows, in the largest batch so far
        self.notes: list[str] = []  # escalations since the last step, in words

    @property
    def gradient(self) -> Tensor:
        """g: (n,)"""
        return self.lin.gradient

    @abstractmethod
    def __matmul__(self, v: Tensor) -> Tensor:
        """Gv: (n,) → (n,)"""

    @abstractmethod
    def newton(self, damping: Diagonal | Tensor) -> Tensor:
        """(G + A)⁻¹g: (n,); A is a Diagonal, one number () or one per parameter (n,)"""

    def step(self, A: Diagonal) -> Tensor:
        """−(G + A)⁻¹g: (n,)"""
        return self.newton(A).neg_()

    def quadratic(self, v: Tensor) -> Tensor:
        """vᵀGv"""
        return v @ (self @ v)

    def damped_quadratic(self, v: Tensor, damping: Diagonal) -> Tensor:
        """vᵀHv with the H that `newton` solves with: G + A, unless a representation damps in a way of its own"""
        return self.quadratic(v) + damping.quadratic(v, self.lin.sizes)

    def slope(self, D: Diagonal) -> Tensor:
        """gᵀD⁻¹g, the square of the length of the gradient in the metric of D"""
        g = self.gradient
        return g @ D.divide(g.clone(), self.lin.sizes)

    def model(self, d: Tensor) -> tuple[Tensor, Tensor]:
        """gᵀd and dᵀGd: the model of the loss is f + gᵀd + ½dᵀGd"""
        return self.gradient @ d, self.quadratic(d)

    def recall(self, past: Past | None, steps: int, same_data: bool) -> None:
        """Takes up what an earlier step kept, after so many steps."""
        return None

    def keep(self) -> Past | None:
        """What the next step shall recall."""
        return None

    # What damping asks for.

    def diagonal(self) -> Tensor:
        """diag G: (n,)"""
        return self.lin.diagonal()

    def trace(self) -> Tensor:
        return self.diagonal().sum()

    def traces(self) -> Diagonal:
        """The mean eigenvalue of every layer: its trace over its rank"""
        zero = torch.zeros_like(self.lin.theta[0])
        means = [zero] * len(self.lin.params)  # where the outputs do not depend on a parameter
        for members, trace in self.lin.traces():
            size = sum(self.lin.sizes[i] for i in members)
            for i in members:
                means[i] = trace / min(size, self.lin.most)
        return one_each(means)

    def maximum(self, D: Diagonal | None, floor: float) -> Diagonal:
        """D ← max(D, diag G), element-wise, from `floor` on, and from the rounding of the largest on"""
        diagonal = self.diagonal()
        found = Diagonal.of(diagonal.clamp(min=floor) if D is None else diagonal, self.lin.sizes)
        return (found if D is None else D.maximum(found)).known(self.lin.params)

    def factored_maximum(self, D: Diagonal | None) -> Diagonal:
        """v_i ← max(v_i, mean a_i²), u_o ← max(u_o, max_i diag_oi/v_i) for every layer: u_o·v_i is at least every
        diagonal so far. Parameters without such a structure: max(D, diag G)."""
        return self.lin.factored_maximum(D)


def one_each(means: Sequence[Tensor]) -> Diagonal:
    """One number for every parameter, from the rounding of the largest on: () each"""
    parts: list[Factors] = [(mean,) for mean in known(torch.stack(list(means)))]
    return Diagonal(torch.ones_like(means[0]), parts)


class Representation(Protocol):
    """A way to represent G, chosen before there is one."""

    @property
    def chunk(self) -> int | None:
        """Samples that are linearised at once."""
        ...

    @property
    def by_sample(self) -> bool:
        """Whether it needs rows that belong to one sample each: then a layer must not couple the samples."""
        ...

    def represent(self, lin: Linearization) -> Curvature: ...


def trusted(past: Tensor, present: Tensor) -> Tensor:
    """The share of its weight that the past keeps in a running average of matrices, from their diagonals (…, n): all of
    it, unless it is far larger than the present. One outlier would otherwise rule the average for a hundred batches."""
    return (MEMORY * (present.sum(-1) / past.sum(-1))).nan_to_num(1.0).clamp(max=1)


class FactorizationError(ArithmeticError):
    """G + λD is not positive definite in floating point: the step fails, and a larger λ is the way out."""


def norm(M: Tensor, s: Tensor | None = None) -> Tensor:
    """‖diag s · M · diag s‖ for positive semi-definite M, by a few power iterations: right to a factor of two."""
    v = M.diagonal().clone() if s is None else s
    for _ in range(6):
        v = v / torch.linalg.vector_norm(v)
        v = M @ v if s is None else s * (M @ (s * v))
    length: Tensor = torch.linalg.vector_norm(v)
    return length


def spd_solve(H: Tensor, A: Tensor, b: Tensor, notes: list[str]) -> Tensor:
    """(H + diag A)⁻¹b for symmetric positive definite H + diag A by Cholesky; on failure in float64, then with jitter.

    A is added to H in place and taken off again: H may be large.
    """
    diagonal = H.diagonal()
    kept = diagonal.clone()
    try:
        diagonal.add_(A)
        x = _cholesky(H, b)
        if x is not None:
            return x
        # Unit diagonal first: positive definiteness then no longer depends on the units of the parameters.
        s = torch.where(diagonal > 0, diagonal, torch.ones_like(diagonal)).rsqrt().double()
        M = H.double() * s * s[:, None]
    finally:
        diagonal.copy_(kept)
    for jitter in (0.0, 1e2 * torch.finfo(torch.float64).eps):
        M.diagonal().add_(jitter * len(M))
        x = _cholesky(M, s * b)
        if x is not None:
            if H.dtype != torch.float64:
                notes.append("factored in float64")
            if jitter:
                notes.append("factored with jitter")
            return (x * s).to(b.dtype)
    raise FactorizationError("the damped curvature could not be factored")


def _cholesky(H: Tensor, b: Tensor) -> Tensor | None:
    upper = not H.is_cuda  # the faster one: by a fifth on a CPU, and by half on a GPU
    F, info = torch.linalg.cholesky_ex(H, upper=upper)
    L = F.mT if upper else F
    y = torch.linalg.solve_triangular(L, b.to(H.dtype)[:, None], upper=False)
    x: Tensor = torch.linalg.solve_triangular(L.mT, y, upper=True)[:, 0]
    return x if ask((info == 0) & x.isfinite().all()) else None
