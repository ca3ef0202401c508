"""Targets of every kind of loss, and how numbers are compared."""

from __future__ import annotations

import torch

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
