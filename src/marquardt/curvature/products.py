"""Products with J, Jᵀ and ∇²f of one piece, by automatic differentiation: the R-operator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from .. import tolerances
from ..jacobian.piece import Piece
from ..model.parameters import joined
from ..surroundings import LEVEL
from .hessian import again, slope_with_graph


class Products(ABC):
    """A linear map of one piece, in Σ-units."""

    def __init__(self, piece: Piece) -> None:
        self.piece, self.parameters = piece, piece.objective.parameters
        self.versions = versions(piece.objective.model)

    @abstractmethod
    def product(self, v: Tensor) -> Tensor:
        """(n,) → (n,)"""

    def square(self, v: Tensor) -> Tensor:
        """vᵀ(product): ()"""
        return self.parameters.dot(v, self.product(v))


class GaussNewton(Products):
    """JᵀS(SᵀJv)"""

    def __init__(self, piece: Piece, way: Way) -> None:
        super().__init__(piece)
        self.rows, self.adjoint = way(piece)

    def product(self, v: Tensor) -> Tensor:
        return self.adjoint(self.rows(v))

    def square(self, v: Tensor) -> Tensor:
        return self.rows(v).square().sum()

    def proven(self) -> bool:
        """Whether tᵀ(SᵀJv) = (JᵀSt)ᵀv for random t and v = JᵀSt.

        A layer may have derivatives that autograd takes without complaint and that are wrong: a backward pass that is
        no function of its cotangent, weights that are kept where nothing replaces them.
        """
        t = self.piece.random()
        v = self.adjoint(t)
        there, here = (t * self.rows(v)).sum().item(), self.parameters.dot(v, v).item()
        # What is not finite, the step will see.
        return not abs(there - here) > tolerances.of_rules(self.piece.jacobian.forward.coarsest) * here


class HessianProducts(Products):
    """∂(∇fᵀv)/∂θ"""

    def __init__(self, piece: Piece) -> None:
        super().__init__(piece)
        self.slopes = [(i, s) for i, s in enumerate(slope_with_graph(piece)) if s is not None and s.requires_grad]

    def product(self, v: Tensor) -> Tensor:
        params, parts = self.parameters.tensors, self.parameters.split(v)
        if not self.slopes:
            return torch.zeros_like(v)
        along = [parts[i].view_as(s).to(s.dtype) for i, s in self.slopes]
        return joined(again([s for _, s in self.slopes], params, along), params)

    def proven(self) -> bool:
        """Whether uᵀ(Hv) = vᵀ(Hu) for random u and v."""
        n, dtype, device = self.parameters.n, self.parameters.dtype, self.parameters.device
        generator = torch.Generator(device).manual_seed(0)
        u, v = (torch.randn(n, generator=generator, dtype=dtype, device=device) for _ in "uv")
        Hv, Hu = self.product(v), self.product(u)
        difference = self.parameters.dot(u, Hv) - self.parameters.dot(v, Hu)
        size = self.parameters.norm(u) * self.parameters.norm(Hv)
        return not abs(difference.item()) > tolerances.of_rules(self.piece.whole.coarsest) * size.item()


# Ways to SᵀJv, (n,) → (R, N), and JᵀSt, (R, N) → (n,). The first that is proven right is taken.

Pair = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
Way = Callable[[Piece], Pair]


def by_double_backward(piece: Piece) -> Pair:
    """Jᵀw is linear in w, so that its derivative by w along v is Jv: the graph of Jᵀw is made once."""
    J, parameters = piece.jacobian, piece.objective.parameters
    z = J.forward.graph
    with torch.enable_grad():
        w = torch.zeros_like(z, requires_grad=True)
        grads = torch.autograd.grad(z, parameters.tensors, w, create_graph=True, allow_unused=True)
        dense = [g.to_dense() if g is not None and g.is_sparse else g for g in grads]
    pulled = [(i, g) for i, g in enumerate(dense) if g is not None and g.requires_grad]

    def rows(v: Tensor) -> Tensor:
        parts = parameters.split(v)
        along = [parts[i].view_as(g).to(g.dtype) for i, g in pulled]
        (Jv,) = torch.autograd.grad([g for _, g in pulled], w, along, retain_graph=True, allow_unused=True)
        return J.seen(Jv)

    return rows, J.adjoint


def by_forward_mode(piece: Piece) -> Pair:
    """A forward pass with dual numbers, for every product."""
    J, parameters = piece.jacobian, piece.objective.parameters

    def rows(v: Tensor) -> Tensor:
        with LEVEL, forward_ad.dual_level(), torch.set_grad_enabled(piece.known.differentiates):
            pairs = zip(parameters.tensors, parameters.shaped(v), strict=True)
            z = J.forward.repeated({id(p): forward_ad.make_dual(p.detach(), t.to(p.dtype)) for p, t in pairs})
            Jv = forward_ad.unpack_dual(z).tangent
        return J.seen(None if Jv is None else Jv.detach())

    return rows, J.adjoint


def by_rows(piece: Piece) -> Pair:
    """From the rows of every layer, for operations that can be differentiated only once."""
    R, _ = piece.jacobian.R, piece.blocks
    return lambda v: piece.apply(v).view(R, -1), lambda t: piece.adjoint(t.flatten())


def ways(model: nn.Module) -> tuple[Way, ...]:
    """Fastest first. Of a convolution torch's double backward also computes the gradients that nobody asked for, and
    takes twice as long as forward mode (paper CNN on a CPU: 114 against 66 ms a product)."""
    if any(isinstance(m, nn.modules.conv._ConvNd) for m in model.modules()):
        return by_forward_mode, by_double_backward, by_rows
    return by_double_backward, by_forward_mode, by_rows


def versions(model: nn.Module) -> list[tuple[int, int]]:
    """What autograd looks at before it trusts a graph."""
    return [(id(t), t._version) for t in [*model.parameters(), *model.buffers()]]
