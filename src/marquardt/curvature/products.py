"""Products with J, Jᵀ and ∇²f of one chunk, by automatic differentiation: the R-operator."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from ..jacobian.chunk import Chunk, tolerance_of
from ..jacobian.linearization import Linearization
from ..model.batch import forward
from ..model.randomness import SameSlopes
from ..model.substituted import call_with
from .hessian import again, flat, slope_with_graph

# The level of forward mode is one number for the whole program, and torch refuses a second one: a thread at a time.
LEVEL = threading.RLock()


class Products(ABC):
    """A linear map of one chunk, in Σ-units."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.versions = versions(chunk.lin)

    @abstractmethod
    def product(self, v: Tensor) -> Tensor:
        """(n,) → (n,)"""

    def square(self, v: Tensor) -> Tensor:
        """vᵀ(product): ()"""
        return v @ self.product(v)


class GaussNewton(Products):
    """JᵀS(SᵀJv)"""

    def __init__(self, chunk: Chunk, way: Way) -> None:
        super().__init__(chunk)
        self.rows, self.adjoint = way(chunk.picked_from)

    def product(self, v: Tensor) -> Tensor:
        return self.adjoint(self.rows(v))

    def square(self, v: Tensor) -> Tensor:
        return self.rows(v).square().sum()

    def proven(self) -> bool:
        """Whether tᵀ(SᵀJv) = (JᵀSt)ᵀv for random t and v = JᵀSt.

        A layer may have derivatives that autograd takes without complaint and that are wrong: a backward pass that is
        no function of its cotangent, weights that are kept where nothing replaces them.
        """
        S = self.chunk.rows.S
        t = torch.randn(S.shape[:2], generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float64, device="cpu")
        t = t.to(S)
        v = self.adjoint(t)
        there, here = (t * self.rows(v)).sum().item(), (v @ v).item()
        # What is not finite, the step will see.
        return not abs(there - here) > tolerance_of(self.chunk.picked_from.coarsest) * here


class HessianProducts(Products):
    """∂(∇fᵀv)/∂θ"""

    def __init__(self, chunk: Chunk) -> None:
        super().__init__(chunk)
        self.slopes = [(i, s) for i, s in enumerate(slope_with_graph(chunk)) if s is not None and s.requires_grad]

    def product(self, v: Tensor) -> Tensor:
        lin = self.chunk.lin
        parts = v.split(lin.sizes)
        if not self.slopes:
            return torch.zeros_like(v)
        along = [parts[i].view_as(s) for i, s in self.slopes]
        return flat(again([s for _, s in self.slopes], lin.params, along), lin.params)

    def proven(self) -> bool:
        """Whether uᵀ(Hv) = vᵀ(Hu) for random u and v."""
        theta = self.chunk.lin.theta
        generator = torch.Generator(theta.device).manual_seed(0)
        u, v = (torch.randn(theta.shape, generator=generator, dtype=theta.dtype, device=theta.device) for _ in "uv")
        Hv, Hu = self.product(v), self.product(u)
        size = (u.norm() * Hv.norm()).item()
        return not abs((u @ Hv - v @ Hu).item()) > tolerance_of(self.chunk.coarsest) * size


# Ways to SᵀJv, (n,) → (R, N), and JᵀSt, (R, N) → (n,). The first that is proven right is taken.

Pair = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
Way = Callable[[Chunk], Pair]


def by_double_backward(chunk: Chunk) -> Pair:
    """Jᵀw is linear in w, so that its derivative by w along v is Jv: the graph of Jᵀw is made once."""
    z, sizes = chunk.graph, chunk.lin.sizes
    with torch.enable_grad():
        w = torch.zeros_like(z, requires_grad=True)
        grads = torch.autograd.grad(z, chunk.lin.params, w, create_graph=True, allow_unused=True)
        dense = [g.to_dense() if g is not None and g.is_sparse else g for g in grads]
    pulled = [(i, g) for i, g in enumerate(dense) if g is not None and g.requires_grad]

    def rows(v: Tensor) -> Tensor:
        parts = v.split(sizes)
        along = [parts[i].view_as(g) for i, g in pulled]
        (Jv,) = torch.autograd.grad([g for _, g in pulled], w, along, retain_graph=True, allow_unused=True)
        return seen_by(chunk, Jv)

    return rows, partial(pullback, chunk)


def by_forward_mode(chunk: Chunk) -> Pair:
    """A forward pass with dual numbers, for every product."""
    lin = chunk.lin

    def rows(v: Tensor) -> Tensor:
        with LEVEL, forward_ad.dual_level(), torch.set_grad_enabled(lin.plan.trial_needs_grad):
            parts = zip(lin.params, v.split(lin.sizes), strict=True)
            z = repeated(chunk, {id(p): forward_ad.make_dual(p.detach(), t.view_as(p)) for p, t in parts})
            Jv = forward_ad.unpack_dual(z).tangent
        return seen_by(chunk, None if Jv is None else Jv.detach())

    return rows, partial(pullback, chunk)


def by_rows(chunk: Chunk) -> Pair:
    """From the rows of every layer, for operations that can be differentiated only once."""
    shape, blocks, lin = chunk.rows.S.shape[:2], chunk.blocks, chunk.lin
    return lambda v: lin.apply(blocks, v).view(shape), lambda t: lin.adjoint(blocks, t.flatten())


def ways(model: nn.Module) -> tuple[Way, ...]:
    """Fastest first. Of a convolution torch's double backward also computes the gradients that nobody asked for, and
    takes twice as long as forward mode (paper CNN on a CPU: 114 against 66 ms a product)."""
    if any(isinstance(m, nn.modules.conv._ConvNd) for m in model.modules()):
        return by_forward_mode, by_double_backward, by_rows
    return by_double_backward, by_forward_mode, by_rows


def pullback(chunk: Chunk, t: Tensor) -> Tensor:
    """Jᵀ(St): (R, N) → (n,)"""
    return chunk.vjp(torch.einsum("rn,rn...->n...", t, chunk.rows.S))


def seen_by(chunk: Chunk, Jv: Tensor | None) -> Tensor:
    """Sᵀ(Jv): (N, *out) → (R, N)"""
    S = chunk.rows.S
    return S.new_zeros(S.shape[:2]) if Jv is None else (S * Jv).reshape(*S.shape[:2], -1).sum(2)


def repeated(chunk: Chunk, replaced: dict[int, Tensor]) -> Tensor:
    """The forward pass of a chunk once more, with other tensors in the place of some parameters.

    On copies of the buffers: restoring them in place would spoil the graph of the chunk.
    """
    model = chunk.lin.model
    before = {id(b): value for _, saved in chunk.before.buffers for b, value in saved.values() if b is not None}
    buffers = {id(b): before[id(b)].clone() for b in model.buffers() if id(b) in before}
    chunk.before.restore(buffers=False)
    try:
        with SameSlopes(chunk.slopes):
            return forward(call_with(model, {**buffers, **replaced}), chunk.batch.inputs)
    finally:
        chunk.after.restore(buffers=False)


def same_without_grad(chunk: Chunk) -> bool:
    """Whether the model gives the same outputs under no_grad: a network that differentiates itself may not."""
    try:
        with torch.no_grad():
            z = repeated(chunk, {})
        return bool((z - chunk.z).norm() <= 1e-3 * chunk.z.norm())
    except Exception:  # whatever the model says to a forward pass without gradients
        return False


def versions(lin: Linearization) -> list[tuple[int, int]]:
    """What autograd looks at before it trusts a graph."""
    tensors = [*lin.model.parameters(), *lin.model.buffers()]
    return [(id(t), t._version) for t in tensors]
