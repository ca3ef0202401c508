"""Every sample as the others predict it: one Newton step to where θ̂ and H would be without it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..losses.base import weighted
from ..model.batch import Batch
from .expansion import Expansion
from .precision import Precision

# A sample determines its own outputs by less than 1, but for rounding.
OWN = 0.999


class Temper(NamedTuple):
    """What is made of outputs before they become probabilities."""

    temperature: float = 1.0  # the covariance of θ is so many times H⁻¹
    sharpness: float = 1.0  # logits count so many times


def predicted(at: Expansion, H: Precision, tempers: Sequence[Temper], exact: Precision | None = None) -> list[float]:
    """−log p of all samples, each left out, of classes and for each of these. `exact` is H as a sum over samples, if H
    is none: what a sample has moved follows from it, while variances stay those of H."""
    return _total(_left_out(at, H, exact, part, tempers) for batch in at.batches for part in at.parts(batch))


def held_out(at: Expansion, H: Precision, batches: Iterable[Batch], tempers: Sequence[Temper]) -> list[float]:
    """−log p of samples that H and θ̂ do not know, for each of these."""
    return _total(_lost(at, part, *_moments(at, H, part), tempers) for batch in batches for part in at.parts(batch))


def _total(parts: Iterable[Tensor]) -> list[float]:
    found: list[float] = torch.stack(list(parts)).sum(0).tolist()
    return found


def _left_out(at: Expansion, H: Precision, exact: Precision | None, part: Batch, tempers: Sequence[Temper]) -> Tensor:
    z, mean, own = _moments(at, H, part)
    V = own if exact is None else _moments(at, exact, part)[2]
    loss, y, w = at.likelihood.loss, _targets(part, z), part.weight
    shift, others = without(V, loss.root(z, y, w).S, loss.group(loss.gradient(z, y, w)))
    return _lost(at, part, z, mean + shift, others if exact is None else own, tempers)


def _moments(at: Expansion, H: Precision, part: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """z (N, *out), and by group its mean (N, P, C) and covariance (N, P, C, C)"""
    z, mean, rows = at.functional(part.inputs)
    half = H.half(rows.flatten(0, 2)).unflatten(0, rows.shape[:3])
    return z, mean, half @ half.mT


def _targets(part: Batch, z: Tensor) -> Tensor:
    y: Tensor = part.targets
    return y.to(z) if y.is_floating_point() else y


def _lost(at: Expansion, part: Batch, z: Tensor, mean: Tensor, V: Tensor, tempers: Sequence[Temper]) -> Tensor:
    """−log p of some samples with uncertain outputs, for each of these"""
    loss, kind, found = at.likelihood.loss, at.likelihood, []
    for T, s in tempers:
        outputs = loss.ungroup(kind.averaged(*kind.sharpened(mean, T * V, s), True), z)
        found.append(weighted(loss.ell(outputs, _targets(part, z)), part.weight).double().sum())
    return torch.stack(found)


def without(V: Tensor, S: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """By how much outputs move, and their covariance, without their own sample, SSᵀ and g its derivatives:
    (V⁻¹ − SSᵀ)⁻¹ = V + VS(1 − SᵀVS)⁻¹SᵀV (N, P, C, C), and that times g (N, P, C)"""
    VS = V @ S  # (N, P, C, r)
    e, Q = torch.linalg.eigh(S.mT @ VS)
    B = VS @ Q
    found = V + (B / (1 - e.clamp(0, OWN))[..., None, :]) @ B.mT
    return (found @ g[..., None])[..., 0], found
