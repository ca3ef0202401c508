"""∂²ℓ/∂z² of any function, from as few products as its structure allows; and a root of its absolute value.

H = ∂²ℓ/∂z² does not couple samples. Within a sample it couples outputs in P groups of C: each output alone, those along
one dimension, or all of them, c = PC.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .base import noise

# The largest groups whose H is formed when rows of it are drawn at random; larger ones use Lanczos' method.
FORMED = 64

# The number of products in Lanczos' method: the square root of a matrix of condition 1000 is then accurate to 1e-3.
PRODUCTS = 24

# The relative difference allowed between two results for H times a random vector: by the blocks, and by a product.
SAME = {torch.float32: 1e-4, torch.float64: 1e-9}

Product = Callable[[Tensor], Tensor]  # Hv, like z


class Blocks(NamedTuple):
    """H as blocks of groups along a dimension of z: 0 for each output alone, −1 for all of them."""

    dim: int
    H: Tensor  # (N, P, C, C)


def group(t: Tensor, dim: int) -> Tensor:
    """(N, …) → (N, P, C)"""
    if dim < 1:
        return t.reshape(len(t), *((-1, 1) if dim == 0 else (1, -1)))
    return t.movedim(dim, -1).reshape(len(t), -1, t.shape[dim])


def ungroup(t: Tensor, dim: int, like: Tensor) -> Tensor:
    """The inverse of `group`."""
    if dim < 1:
        return t.reshape(like.shape)
    return t.reshape(like.movedim(dim, -1).shape).movedim(-1, dim)


def product_of(slope: Tensor, z: Tensor) -> Product:
    """v ↦ ∂(slopeᵀv)/∂z"""

    def product(v: Tensor) -> Tensor:
        if not slope.requires_grad:  # fn is linear in z
            return torch.zeros_like(v)
        (Hv,) = torch.autograd.grad(slope, z, v, retain_graph=True)
        return Hv.detach()

    return product


def find(product: Product, z: Tensor, most: float) -> Blocks | None:
    """The smallest blocks that contain all of H; None if they have more than `most` outputs."""
    v = noise(z, 0)
    Hv, dims = product(v), range(1, z.ndim) if z.ndim > 2 else ()
    along = sorted(((dim, z.shape[dim]) for dim in dims), key=lambda pair: pair[1])
    for dim, C in [(0, 1), *along, (-1, z[0].numel())]:
        if most < C or (C > 1 and _leaks(product, v, dim)):
            continue
        columns = (e.expand_as(group(z, dim)) for e in torch.eye(C, dtype=z.dtype, device=z.device))
        H = torch.stack([group(product(ungroup(e, dim, z)), dim) for e in columns], -1)  # (N, P, C, C)
        found = ungroup((H @ group(v, dim)[..., None])[..., 0], dim, z)
        if dim < 0 or bool((found - Hv).norm() <= SAME[z.dtype] * Hv.norm()):
            return Blocks(dim, (H + H.mT) / 2)
    return None


def _leaks(product: Product, v: Tensor, dim: int) -> bool:
    """Whether H couples the groups with even and odd numbers: one product shows it, before C of them are formed."""
    t = group(v, dim)
    here = torch.arange(t.shape[1], device=v.device) % 2 == 0
    Hv = group(product(ungroup(t * here[:, None], dim, v)), dim)
    return bool(Hv[:, ~here].norm() > SAME[v.dtype] * Hv.norm())


def eigen(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """|λ| (N, P, C) and eigenvectors Q (N, P, C, C), computed in float64: eigenvalues of 0 differ from rounding
    there"""
    if blocks.H.shape[-1] == 1:
        return blocks.H[..., 0].abs(), torch.ones_like(blocks.H)
    values, Q = torch.linalg.eigh(blocks.H.double())
    return values.abs().to(blocks.H), Q.to(blocks.H)


def spread(S: Tensor, dim: int, z: Tensor) -> Tensor:
    """Blocks (N, P, C, C) as one matrix per sample: (N, 1, c, c)"""
    index = group(torch.arange(z[0].numel(), device=z.device).reshape(1, *z.shape[1:]), dim)[0]  # (P, C)
    full = S.new_zeros(len(z), 1, z[0].numel(), z[0].numel())
    full[:, 0, index[:, :, None], index[:, None, :]] = S
    return full


def lanczos(product: Product, e: Tensor) -> Tensor:
    """|H|^½ e of every sample: ‖e‖ V|T|^½e₁ with H ≈ VTVᵀ on the span of the first powers of H times e, like e"""
    norm = e.flatten(1).norm(dim=1)  # (N,)
    v = e.flatten(1) / norm[:, None]
    V, diagonal, beside = [v], [], []
    for _ in range(min(PRODUCTS, v.shape[1])):
        w = product(V[-1].reshape(e.shape)).flatten(1)
        diagonal.append((w * V[-1]).sum(1))
        for _ in range(2):  # one pass leaves rounding behind
            for u in V:
                w = w - (w * u).sum(1, keepdim=True) * u
        length = w.norm(dim=1)
        told = length > torch.finfo(w.dtype).eps ** 0.5 * torch.stack(diagonal).abs().amax(0)
        beside.append(length.where(told, 0))
        V.append(w / length[:, None].where(told[:, None], torch.inf))
    T = torch.diag_embed(torch.stack(diagonal, 1))  # (N, k, k)
    off = torch.diag_embed(torch.stack(beside[:-1], 1), 1) if len(beside) > 1 else torch.zeros_like(T)
    values, Q = torch.linalg.eigh((T + off + off.mT).double())
    first = (Q * values.abs().sqrt()[:, None]) @ Q[:, :1].mT  # (N, k, 1)
    found = torch.einsum("knc,nk->nc", torch.stack(V[:-1]), first[..., 0].to(e))
    root: Tensor = norm[:, None] * found
    return root.reshape(e.shape)
