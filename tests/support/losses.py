"""Targets of every kind of loss, how numbers are compared, and what holds for every loss."""

from __future__ import annotations

import torch
from torch.func import grad, jacrev, vmap

from marquardt.losses import CrossEntropy

f64 = torch.float64
CLASS_WEIGHT = torch.tensor([0.5, 2.0, 1.25], dtype=f64)
VECTOR, MATRIX, IMAGE = (4,), (4, 3), (4, 3, 2, 2)


def normal(shape):
    return torch.randn(shape, dtype=f64)


def fraction(shape):
    return torch.rand(shape, dtype=f64)


def labels(shape):
    y = torch.randint(shape[1], (shape[0], *shape[2:]))
    y.view(-1)[:3] = torch.arange(3)  # every class occurs
    return y


def some_ignored(shape):
    y = labels(shape)
    y[1].fill_(-100)
    y.view(-1)[-1] = -100
    return y


def close(a, b, tol=1e-12):
    scale = 1 + float(b.abs().max()) if b.numel() else 1.0
    assert a.shape == b.shape
    assert float((a - b).abs().max()) <= tol * scale


def image(root):
    """Su + v."""
    g = (root.S @ root.u[..., None])[..., 0]
    return g if root.v is None else g + root.v


WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.7], dtype=f64)


def blocks(loss, z, y, weight=None):
    """∂²value/∂z² of every group: (N, P, C, C)"""
    H = jacrev(grad(lambda z: loss.value(z, y, weight)))(z).reshape(z.numel(), z.numel())
    index = loss.group(torch.arange(z.numel()).reshape(z.shape))  # (N, P, C)
    found = H[index[..., :, None], index[..., None, :]]
    rest = H.clone()
    rest[index[..., :, None], index[..., None, :]] = 0
    close(rest, torch.zeros_like(rest))  # the groups hold all of it
    return found


def patterns(shape):
    """Every pattern of signs in the last dimension, the same in all groups: (2ʳ, N, P, r)"""
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=f64)] * shape[-1]).reshape(-1, shape[-1])
    return signs[:, None, None].expand(-1, *shape)


def conforms(loss, z, y):
    """Of four samples in float64: sums over batches and weights, slope and Su against autograd, SSᵀ against the Hessian
    as the class has it, the mean of Sε εᵀSᵀ over all signs ε, groups and back, vmap."""
    loss.check(z, y)
    if type(loss) is CrossEntropy:
        assert loss.root(z, y).S.shape[2:] == (3, 2)  # C − 1 columns
    bounded = bool(loss.lower_bound(z, y).isfinite())
    assert bounded or loss.lower_bound(z, y, WEIGHT) == -torch.inf
    for method in ("value", "normaliser", *(["lower_bound"] if bounded else [])):
        take = getattr(loss, method)
        close(take(z[:1], y[:1]) + take(z[1:], y[1:]), take(z, y))
        assert (take(z, y, WEIGHT).shape, take(z, y, WEIGHT).dtype) == ((), f64)
        times = torch.tensor([2, 1, 0, 3])
        close(take(z, y, times.to(f64)), take(*(t.repeat_interleave(times, 0) for t in (z, y))))
    assert loss.lower_bound(z, y) <= loss.value(z, y)
    assert torch.equal(loss.ungroup(loss.group(z), z), z)
    many = torch.stack([z, 2 * z])
    assert torch.equal(loss.ungroup(loss.group(many, z), z), many)
    many = torch.stack([z, z[:1] + 0 * z])
    for take in (loss.value, loss.gradient):
        each = torch.stack([take(z, y, WEIGHT) for z in many])
        close(vmap(lambda z, take=take: take(z, y, WEIGHT))(many), each)
    for weight in (None, WEIGHT):
        g, root = loss.gradient(z, y, weight), loss.root(z, y, weight)
        rows = loss.mixed(z, y, weight, patterns)  # (2ʳ, N, P, C)
        close(torch.einsum("knpc,knpd->npcd", rows, rows) / len(rows), root.S @ root.S.mT)
        assert loss.count(z[:1], y[:1]) == root.S.shape[1] * root.S.shape[3]
        close(g, grad(lambda z, w=weight: loss.value(z, y, w))(z), 1e-10)
        close(image(root), loss.group(g), 1e-10)
        close(image(loss.empirical(z, y, weight)), loss.group(g), 1e-10)
        if loss.curvature_kind != "fisher":
            H, SSt = blocks(loss, z, y, weight), root.S @ root.S.mT
            above = torch.linalg.eigvalsh(SSt - H)
            assert (above >= -1e-10).all()
            assert loss.curvature_kind == "majoriser" or (above <= 1e-10).all()


def majorises(loss, least=-5.0, most=5.0):
    """ℓ(e) + ℓ′d + ½s²d² ≥ ℓ(e + d) for all d."""
    e, d = torch.linspace(least, most, 41, dtype=f64)[:, None], torch.linspace(-9, 9, 181, dtype=f64)
    zero = torch.zeros_like(e)
    model = loss.ell(e, zero) + loss.slope(e, zero) * d + loss.s(e, zero).square() * d.square() / 2
    assert (model >= loss.ell(e + d, torch.zeros_like(e + d)) - 1e-12).all()
