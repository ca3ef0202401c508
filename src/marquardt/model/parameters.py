"""The parameters that train, as one vector θ."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def flatten(params: Sequence[Tensor]) -> Tensor:
    """θ: (n,), a copy"""
    return torch.cat([p.detach().flatten() for p in params])


def assign(params: Sequence[Tensor], theta: Tensor) -> None:
    """The parameters ← θ"""
    with torch.no_grad():
        torch._foreach_copy_(list(params), _pieces(params, theta))


def shift(params: Sequence[Tensor], d: Tensor, lr: float) -> None:
    """The parameters += lr·d, without another vector in memory"""
    with torch.no_grad():
        torch._foreach_add_(list(params), _pieces(params, d), alpha=lr)


def _pieces(params: Sequence[Tensor], v: Tensor) -> list[Tensor]:
    return [t.view_as(p) for p, t in zip(params, v.split([p.numel() for p in params]), strict=True)]
