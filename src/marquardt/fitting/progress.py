"""Where B problems are, and how they came there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from .factor import QRFactor, Subset, replaced

# Status codes: SciPy's, and STUCK.
RUNNING, STUCK, STOPPED, BAD, LIMIT, GTOL, FTOL, XTOL, BOTH = -9, -3, -2, -1, 0, 1, 2, 3, 4

P = TypeVar("P", bound="Point")


@dataclass(frozen=True)
class Point:
    """Where B problems are. f and J carry the weights, the factor the loss's correction as well."""

    x: Tensor  # (B, n)
    f: Tensor  # (B, m)
    J: Tensor  # (B, m, n)
    factor: QRFactor
    scale: Tensor  # (B,), √(2·cost)
    cosine: Tensor  # (B,), of the angle between residuals and tangent space
    D: Tensor  # (B, n)

    def __getitem__(self: P, index: Tensor) -> P:
        return mapped(lambda t: t[index], type(self), self)


@dataclass(frozen=True)
class Progress(Point):
    """And how they came there."""

    which: Tensor  # (B,), of the batch that was asked for
    radius: Tensor  # (B,), Δ of ‖Dp‖ ≤ Δ
    change: Tensor  # (B,), the largest relative change of a parameter in the last step; infinite after a damped one
    nfev: Tensor  # (B,)
    njev: Tensor  # (B,)
    status: Tensor  # (B,)

    def at(self, part: Subset, point: Point) -> Progress:
        """This one, with some of the problems at other points."""
        return replace(self, **vars(mapped(part.into, Point, self, point)))

    @property
    def running(self) -> Tensor:
        return self.status == RUNNING

    def tensors(self) -> list[Tensor]:
        values = [getattr(self, k.name) for k in fields(self)]
        return [value.Rc if isinstance(value, QRFactor) else value for value in values]

    def renewed(self) -> Progress:
        """The same tensors, without what was derived from them before."""
        return mapped(lambda t: QRFactor(t.Rc) if isinstance(t, QRFactor) else t, Progress, self)

    def copy(self) -> Progress:
        return mapped(lambda t: QRFactor(t.Rc.clone()) if isinstance(t, QRFactor) else t.clone(), Progress, self)

    def merge(self, index: Tensor, other: Progress) -> Progress:
        """This one, with the problems `index` replaced by those of the other."""
        if len(index) == len(self.x):
            return other
        return mapped(lambda old, new: replaced(old, index, new), Progress, self, other)


def mapped(of: Callable[..., Any], kind: type[P], *points: Point) -> P:
    """A point or progress of what `of` makes of each field of the others."""
    return kind(*(of(*(getattr(point, k.name) for point in points)) for k in fields(kind)))


def better_of(old: Progress, new: Progress, limit: Tensor, which: Tensor) -> Progress:
    """The new one where its scale is within the limit, with the evaluations of both."""
    index = (new.scale <= limit).nonzero().squeeze(-1)  # no NaN is
    kept = old.merge(index, new[index])
    status = torch.where(new.status == STOPPED, STOPPED, kept.status)  # the callback's word counts for all attempts
    return replace(kept, which=which, status=status, nfev=old.nfev + new.nfev, njev=old.njev + new.njev)
