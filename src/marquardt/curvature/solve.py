"""Solving with a symmetric positive definite matrix, and what to do when rounding spoils it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..deferred import ask, floats, recording
from ..ranks import ALONE, Ranks
from .cost import COLUMNS, factors_together


class FactorizationError(ArithmeticError):
    """G + λD is not positive definite in floating point: the step fails, and a larger λ is the way out.

    `LM` catches it and raises λ; it reaches those who solve by themselves.

    >>> G = mq.Hessian().represent(mq.linearize(model, "mse", x, y, needs=mq.Hessian().needs))
    >>> try:
    ...     d = G.newton(torch.tensor(-1e6))
    ... except mq.FactorizationError as error:
    ...     print("a larger damping is needed")
    a larger damping is needed
    """


def norm(M: Tensor, s: Tensor | None = None) -> Tensor:
    """‖diag s · M · diag s‖ for positive semi-definite M, by a few power iterations: right to a factor of two."""
    v = M.diagonal().clone() if s is None else s
    for _ in range(6):
        v = v / torch.linalg.vector_norm(v)
        v = M @ v if s is None else s * (M @ (s * v))
    length: Tensor = torch.linalg.vector_norm(v)
    return length


def holds(condition: Callable[[Tensor], Tensor], M: Tensor, s: Tensor | None = None) -> bool:
    """Whether a condition on ‖diag s · M · diag s‖ holds that no smaller norm could spoil. The trace is an upper bound
    and mostly does: the iterations are thirty kernels. A recording knows no answer, and takes the closer one."""
    diagonal = M.diagonal()
    if not recording() and ask(condition(diagonal.sum() if s is None else torch.dot(diagonal, s * s))):
        return True
    return ask(condition(norm(M, s)))


def spd_solve(H: Tensor, A: Tensor, b: Tensor, notes: list[str], ranks: Ranks = ALONE) -> Tensor:
    """(H + diag A)⁻¹b for symmetric positive definite H + diag A by Cholesky; on failure in float64, then with jitter.

    A is added to H in place and taken off again: H may be large. All ranks have the same H, and factor it together if
    that takes less time.
    """
    diagonal = H.diagonal()
    kept = diagonal.clone()
    try:
        diagonal.add_(A)
        x = _cholesky(H, b, ranks)
        if x is not None:
            return x
        # Unit diagonal first: positive definiteness then no longer depends on the units of the parameters.
        s = torch.where(diagonal > 0, diagonal, torch.ones_like(diagonal)).rsqrt().double()
        M = H.double() * s * s[:, None]
    finally:
        diagonal.copy_(kept)
    for jitter in (0.0, 1e2 * torch.finfo(torch.float64).eps):
        M.diagonal().add_(jitter * len(M))
        x = _cholesky(M, s * b, ranks)
        if x is not None:
            if H.dtype != torch.float64:
                notes.append("factored in float64")
            if jitter:
                notes.append("factored with jitter")
            return (x * s).to(b.dtype)
    raise FactorizationError("the damped curvature could not be factored")


def refined(
    H: Callable[[Tensor], Tensor], M: Callable[[Tensor], Tensor], b: Tensor, tolerance: float, products: int
) -> Tensor | None:
    """H⁻¹b by conjugate gradients in the precision of b, with an M that solves with nearly the same matrix in another.
    None if the error, in the metric of H and relative to the solution, is not within the tolerance after so many
    products: its square is rᵀH⁻¹r, for which rᵀMr is taken.
    """
    size = torch.linalg.vector_norm(b)
    if ask(size == 0):
        return torch.zeros_like(b)
    b = b / size
    x, r, z = torch.zeros_like(b), b.clone(), M(b)
    p, (rz,) = z, floats(b @ z)
    enough = tolerance**2 * rz
    for _ in range(products):
        Hp = H(p)
        (pHp,) = floats(p @ Hp)
        if not (rz > 0 and pHp > 0):  # also if they are not finite
            return None
        x.add_(p, alpha=rz / pHp)
        r.sub_(Hp, alpha=rz / pHp)
        before, z = z, M(r)
        # rᵀ(z − z') instead of rᵀz: M is rounded, and no fixed matrix.
        changed, after = floats(r @ (z - before), r @ z)
        if after <= enough:
            r = b - H(x)
            return x.mul_(size) if ask(r @ M(r) <= enough) else None
        p = z.add(p, alpha=changed / rz)
        rz = after
    return None


def factored(H: Tensor, A: Tensor) -> Callable[[Tensor], Tensor] | None:
    """v ↦ (H + diag A)⁻¹v in the precision of H, for v of any; None if the matrix cannot be factored."""
    kept = H.diagonal().clone()
    H.diagonal().add_(A)
    L, fine = _factor(H)
    H.diagonal().copy_(kept)
    if not ask(fine):
        return None

    def solve(v: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(v)  # whatever the range of the lower precision
        return _solve(L, (v / size).to(H.dtype)).to(v.dtype).mul_(size)

    return solve


def _cholesky(H: Tensor, b: Tensor, ranks: Ranks) -> Tensor | None:
    together = ranks.several and factors_together(len(H), ranks.size, H.element_size(), H.is_cuda)
    L, fine = shared_factor(H, ranks) if together else _factor(H)
    x = _solve(L, b if b.dtype is H.dtype else b.to(H.dtype))
    return x if ask(fine & (x.abs().amax() < math.inf)) else None


def shared_factor(H: Tensor, ranks: Ranks, width: int = COLUMNS) -> tuple[Tensor, Tensor]:
    """L with LLᵀ = H, and whether there is one: (). Block columns go round the ranks: the one that has the next factors
    it and sends it, and every rank takes its product off those that it has."""
    m = len(H)
    cuts = list(itertools.pairwise([*range(0, m, width), m]))
    L, rest = torch.zeros_like(H), H.clone()
    for k, (first, last) in enumerate(cuts):
        column = rest[first:, first:last].contiguous()  # (m − first, width)
        owner = k % ranks.size
        if owner == ranks.rank:
            head, info = torch.linalg.cholesky_ex(column[: last - first])
            below = torch.linalg.solve_triangular(head.mT, column[last - first :], upper=True, left=False)
            column = torch.cat([head, below]).mul_(torch.where(info == 0, 1.0, torch.nan))
        L[first:, first:last] = column = ranks.one(column, owner)
        for j, (start, end) in enumerate(cuts[k + 1 :], k + 1):
            if j % ranks.size == ranks.rank:
                rest[start:, start:end].addmm_(column[start - first :], column[start - first : end - first].T, alpha=-1)
    return L, L.diagonal().isfinite().all()


def _factor(H: Tensor) -> tuple[Tensor, Tensor]:
    """L with LLᵀ = H, and whether there is one: ()"""
    upper = not H.is_cuda  # the faster one: by a fifth on a CPU, and by half on a GPU
    F, info = torch.linalg.cholesky_ex(H, upper=upper)
    return F.mT if upper else F, info == 0


def _solve(L: Tensor, b: Tensor) -> Tensor:
    """(LLᵀ)⁻¹b; on a CPU a fraction of the time of cholesky_solve"""
    y = torch.linalg.solve_triangular(L, b[:, None], upper=False)
    x: Tensor = torch.linalg.solve_triangular(L.mT, y, upper=True)[:, 0]
    return x
