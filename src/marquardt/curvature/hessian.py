"""The full Hessian as an n×n matrix: Newton's method, for small models."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .. import tolerances
from ..deferred import ask
from ..jacobian.linearization import Linearization, Needs
from ..jacobian.piece import Piece
from ..jacobian.statistics import Moments
from ..metric import Diagonal, Metric
from ..model.batch import twice_differentiable, widened
from ..model.parameters import joined
from ..surroundings import out_of_memory
from .contract import Curvature, Representation
from .direct import SMALL, FactorizationError

# How many numbers the cotangents of one batched backward pass may have.
BATCH = 1 << 22


@dataclass(frozen=True)
class Hessian(Representation):
    """G = ∇²f, not only its Gauss-Newton part: Newton's method, for up to some thousand parameters.

    The model must be twice differentiable, and G may be indefinite: where G + λD is not positive definite the step
    fails and λ rises. Damping uses |diag ∇²f|.

    >>> opt = mq.LM(model, "mse", curvature=mq.Hessian(), damping=mq.Identity(), attempts=10)
    """

    adds_up = True

    @cached_property
    def needs(self) -> Needs:
        return Needs(by_sample=False, graph=True)

    def form(self, lin: Linearization) -> HessianCurvature:
        return HessianCurvature(lin)


class HessianCurvature(Curvature):
    def __init__(self, lin: Linearization) -> None:
        super().__init__(lin)
        n, device, params = lin.n, self.parameters.device, self.parameters.tensors
        dtype = torch.float64 if n <= SMALL else self.parameters.dtype
        self.G = torch.zeros(n, n, dtype=dtype, device=device)
        self._g = torch.zeros(n, dtype=dtype, device=device)
        for piece in lin.pieces():
            with twice_differentiable(lin.objective.model):
                slopes = slope_with_graph(piece)
                self.G += hessian_of(slopes, params, piece.whole.coarsest)
                self._g += self.parameters.joined([None if s is None else s.detach() for s in slopes])
        self.G = lin.ranks.sum_later(self.G * lin.scale)()
        self._g = lin.regularised(lin.ranks.sum(self._g * lin.scale))

    @property
    def rank(self) -> int:
        return self.parameters.n

    @property
    def gradient(self) -> Tensor:
        return self._g.to(self.parameters.dtype)

    def __matmul__(self, v: Tensor) -> Tensor:
        return (self.G @ v.to(self.G.dtype)).to(v.dtype)

    def newton(self, damping: Metric | Tensor) -> Tensor:
        """(G + A)⁻¹g by Cholesky, which is also the test for positive definiteness, so that no jitter is added."""
        H = self.G.double()
        if H is self.G:
            H = H.clone()
        H.diagonal().add_(Diagonal.of(damping, self.parameters.sizes).entries(self.parameters.sizes))
        diagonal = H.diagonal()
        if not ask((diagonal > 0).all()):  # False for NaN as well
            raise FactorizationError(NOT_POSITIVE)
        s = diagonal.rsqrt()
        L, info = torch.linalg.cholesky_ex(H * s * s[:, None])  # unit diagonal: the units of the parameters cancel
        # The sign of a pivot that consists of rounding means nothing.
        smallest = L.diagonal().square().min()
        if not ask((info == 0) & (smallest > len(H) * torch.finfo(H.dtype).eps)):
            raise FactorizationError(NOT_POSITIVE)
        x: Tensor = torch.cholesky_solve((s * self._g.double())[:, None], L)[:, 0] * s
        if not ask(x.isfinite().all()):
            raise FactorizationError("the step is not finite")
        return x.to(self.parameters.dtype)

    # Statistics: damping uses |diag ∇²f|.

    def diagonal(self) -> Tensor:
        return self.G.diagonal().to(self.parameters.dtype)

    def trace(self) -> Tensor:
        """Σ|∂²f/∂θᵢ²|"""
        return self.diagonal().abs().sum()

    def traces(self) -> list[tuple[list[int], Tensor, int]]:
        """Those of every parameter separately"""
        parts = self.parameters.split(self.diagonal().abs())
        return [([i], part.sum(), len(part)) for i, part in enumerate(parts)]

    def moments(self) -> Iterator[Moments]:
        """The diagonal of a Hessian has no factors, so every parameter is separate"""
        for i, part in enumerate(self.parameters.split(self.diagonal().abs())):
            yield Moments((i,), (part,), None)


NOT_POSITIVE = "the Hessian with this damping is not positive definite"
ONCE = "the model cannot be differentiated twice"
WAY_OUT = "Use mq.Dense(), mq.Gram() or mq.MatrixFree(), which need no second derivatives"
NOT_SYMMETRIC = (
    "the second derivatives of the model are not symmetric: one of its operations has a backward pass that torch "
    f"cannot differentiate again (weight_norm is one). {WAY_OUT}"
)


def slope_with_graph(piece: Piece) -> list[Tensor | None]:
    """∂value/∂θ, one tensor for each parameter, differentiable again; None where the outputs do not depend on it."""
    objective = piece.objective
    with torch.enable_grad():
        value = objective.value(piece.whole.graph.view_as(piece.z), piece.batch)
        slopes = torch.autograd.grad(value, objective.parameters.tensors, create_graph=True, allow_unused=True)
        found: list[Tensor | None] = [s.to_dense() if s is not None and s.is_sparse else s for s in slopes]
    if ends_early(found):
        raise ValueError(f"{ONCE}. {WAY_OUT}")
    return found


def ends_early(slopes: Sequence[Tensor | None]) -> bool:
    """Whether a @once_differentiable function ends the graph: autograd treats everything behind it as constant."""
    todo = [s.grad_fn for s in slopes if s is not None and s.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node.name() == "torch::autograd::Error":
            return True
        new = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= new
        todo += new
    return False


def hessian_of(slopes: Sequence[Tensor | None], params: Sequence[Tensor], coarsest: torch.dtype) -> Tensor:
    """∂slopes/∂θ: (n, n), many rows in one backward pass, or one at a time where vmap refuses or is wrong."""
    for batched in (True, False):
        try:
            H = widened(torch.cat([rows_of(s, p, params, batched) for s, p in zip(slopes, params, strict=True)]))
        except RuntimeError as error:
            if not batched or out_of_memory(error):
                raise
            continue  # an operation whose backward pass vmap refuses
        # If H is not finite, `newton` finds out.
        if not bool((H - H.T).norm() > tolerances.of_symmetry(coarsest) * H.norm()):
            return (H + H.T) / 2
    raise ValueError(NOT_SYMMETRIC)


def rows_of(slope: Tensor | None, p: Tensor, params: Sequence[Tensor], batched: bool) -> Tensor:
    """∂slope/∂θ for the slope of one parameter: (its size, n)"""
    n = sum(q.numel() for q in params)
    if slope is None or not slope.requires_grad:  # the loss is linear in it
        return p.new_zeros(p.numel(), n)
    pieces = []
    size = max(1, BATCH // n)
    for first in range(0, p.numel(), size):
        rows = min(size, p.numel() - first)
        unit = torch.eye(rows, p.numel(), dtype=p.dtype, device=p.device).roll(first, 1).view(-1, *p.shape)
        if not batched:
            pieces += [joined(again(slope, params, one), params)[None] for one in unit]
            continue
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")
            grads = torch.autograd.grad(
                slope, params, unit, retain_graph=True, allow_unused=True, is_grads_batched=True
            )  # fmt: skip
        pairs = zip(grads, params, strict=True)
        pieces.append(
            torch.cat([q.new_zeros(rows, q.numel()) if g is None else g.reshape(rows, -1) for g, q in pairs], 1)
        )
    return torch.cat(pieces)


def again(
    slopes: Tensor | Sequence[Tensor], params: Sequence[Tensor], along: Tensor | Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """∂(slopesᵀalong)/∂θ by parameters"""
    try:
        return torch.autograd.grad(slopes, params, along, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        raise ValueError(f"{ONCE}: {error}. {WAY_OUT}") from error
