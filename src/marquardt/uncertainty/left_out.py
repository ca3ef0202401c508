"""Every sample as the others predict it: one Newton step to where θ̂ and H would be without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..losses.base import weighted
from ..model.batch import Batch
from .expansion import Expansion
from .precision import Precision

# A sample determines its own outputs at most so far: H that is not the sum over samples, as that of Kronecker factors,
# may say more.
OWN = 0.999


class Temper(NamedTuple):
    """What is made of outputs before they become probabilities."""

    temperature: float = 1.0  # the covariance of θ is so many times H⁻¹
    sharpness: float = 1.0  # logits count so many times


def predicted(at: Expansion, H: Precision, tempers: Sequence[Temper]) -> list[float]:
    """−log p of all samples, each left out, of classes and for each of these."""
    totals = torch.zeros(len(tempers), dtype=torch.float64)
    for batch in at.batches:
        for part in at.parts(batch):
            totals += torch.tensor(_predicted(at, H, part, tempers), dtype=torch.float64)
    found: list[float] = totals.tolist()
    return found


def _predicted(at: Expansion, H: Precision, part: Batch, tempers: Sequence[Temper]) -> list[float]:
    z, mean, rows = at.functional(part.inputs)
    loss, kind, w = at.likelihood.loss, at.likelihood, part.weight
    y = part.targets.to(z) if part.targets.is_floating_point() else part.targets
    half = H.half(rows.flatten(0, 2)).unflatten(0, rows.shape[:3])
    shift, V = without(half @ half.mT, loss.root(z, y, w).S, loss.group(loss.gradient(z, y, w)))
    found = []
    for T, s in tempers:
        outputs = loss.ungroup(kind.averaged(*kind.sharpened(mean + shift, T * V, s), True), z)
        found.append(float(weighted(loss.ell(outputs, y), w).sum()))
    return found


def without(V: Tensor, S: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """By how much outputs move, and their covariance, without their own sample, SSᵀ and g its derivatives:
    (V⁻¹ − SSᵀ)⁻¹ = V + VS(1 − SᵀVS)⁻¹SᵀV (N, P, C, C), and that times g (N, P, C)"""
    VS = V @ S  # (N, P, C, r)
    e, Q = torch.linalg.eigh(S.mT @ VS)
    B = VS @ Q
    found = V + (B / (1 - e.clamp(0, OWN))[..., None, :]) @ B.mT
    return (found @ g[..., None])[..., 0], found
