"""Cross-entropy over classes: the loss that couples the outputs of a sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..deferred import current
from .base import Fault, Loss, Target, check_like, check_number, check_weights, same_device, weighted


@dataclass(frozen=True, kw_only=True, eq=False)
class CrossEntropy(Loss):
    """Over classes, with logits z (N, C, d₁, …), p = softmax(z), q̃ = class_weight ∘ q and w̃ = Σ q̃:

        ℓ = −Σₖ q̃ₖ log pₖ,  ∂ℓ/∂z = w̃p − q̃,  S = √w̃ (I − p1ᵀ) diag(s),  u = (w̃p − q̃)/(√w̃ s),  s = √p.

    y: class indices (N, d₁, …), or probabilities q (N, C, d₁, …). One group per position: P = d₁⋯, r = C − 1.

    `class_dim` is the dimension of the classes in the logits. 1 is torch's; None is that too, unless class indices show
    that the classes come last, (N, d₁, …, C), as language models have them.

    Args:
        label_smoothing: the share of every target that is spread over all classes.
        class_weight: of every class, (C,).
        ignore_index: the target of positions that do not count.
        class_dim: the dimension of the classes in the logits.

    >>> opt = mq.LM(classifier, mq.losses.CrossEntropy(label_smoothing=0.1))  # or "cross_entropy"
    >>> step = opt.step(x, labels)
    """

    likelihood: ClassVar[str | None] = "categorical"
    label_smoothing: float = 0.0
    class_weight: Tensor | None = None  # (C,)
    ignore_index: int = -100
    class_dim: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.class_dim not in (None, 1, -1):
            raise ValueError(f"class_dim must be 1, -1 or None, got {self.class_dim!r}: classes come second or last")
        check_number(self.label_smoothing, "label_smoothing")
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing must lie in [0, 1], got {self.label_smoothing!r}")
        if self.class_weight is not None:
            check_weights(self.class_weight, "class_weight")
            if self.class_weight.ndim != 1:
                raise ValueError(f"class_weight must have shape (C,), got {tuple(self.class_weight.shape)}")

    def bound(self, raw: Any, y: Target, weight: Tensor | None = None, sums: Tensor | None = None) -> CrossEntropy:
        if raw.__class__ is Tensor and raw.ndim == 2:
            return self
        z = self.joined(raw)
        if self.class_dim is not None or not isinstance(y, Tensor) or y.is_floating_point() or z.ndim < 3:
            return self
        second, last = y.shape == (len(z), *z.shape[2:]), y.shape == z.shape[:-1]
        if second and last:
            raise ValueError(
                f"logits of shape {tuple(z.shape)} with class indices of shape {tuple(y.shape)}: the classes may be "
                "dimension 1 or the last one; say which with losses.CrossEntropy(class_dim=1) or (class_dim=-1)"
            )
        return replace(self, class_dim=-1) if last else self

    def axis(self, z: Tensor) -> int:
        """The dimension of the classes in z."""
        return z.ndim - 1 if self.class_dim == -1 else 1

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        if z.ndim > 2 and (axis := self.axis(z)) != 1:
            z, y = z.movedim(axis, 1), y.movedim(axis, 1) if y.is_floating_point() else y
        if current.tape is not None and not y.is_floating_point():
            # `check` is answered when all is done; until then no class that does not exist may end the process.
            y = y.long()
            y = torch.where((y >= 0) & (y < z.shape[1]), y, self.ignore_index)
        return F.cross_entropy(
            z,
            y if y.dtype is torch.long or y.is_floating_point() else y.long(),
            weight=None if self.class_weight is None else self.class_weight.to(z),
            ignore_index=self.ignore_index,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        q = self.targets(z, y)
        return self.ungroup(self.difference(self.group(z).softmax(-1), q, q.sum(-1, keepdim=True)), z)

    def difference(self, p: Tensor, q: Tensor, w: Tensor) -> Tensor:
        """w̃p − q̃ (N, P, C)."""
        return tangent(w * p - q, p)

    def factors(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """SQ and Qᵀu without the column m of Q: with m = argmax p, Q the Householder reflection of n = p/s to −eₘ,
        and Sn = 0, that column of SQ is 0.
        """
        p, q = self.group(z).softmax(-1), self.targets(z, y)  # (N, P, C)
        w = q.sum(-1, keepdim=True)  # (N, P, 1)
        root_w, limits = w.sqrt(), torch.finfo(p.dtype)
        # Su = ∂ℓ/∂z for any s > 0: the floor keeps it so, and u bounded, for a class with q > 0 whose p underflows
        s = p.sqrt()
        s = torch.where(q == 0, s.clamp(min=limits.tiny), s.clamp(min=limits.eps))
        u = self.difference(p, q, w) / root_w.clamp(min=limits.tiny) / s  # 0 if w̃ is
        n = p / s  # |n| = 1
        # column m leaves, the last one takes its place; m = argmax p keeps 1 − pₘ, which cancels, away from a large u
        top = p.argmax(-1, keepdim=True)  # (N, P, 1)
        classes = torch.arange(p.shape[-1], device=p.device)
        keep = torch.where(classes[:-1] == top, classes[-1], classes[:-1])  # (N, P, C−1)
        together = torch.stack((s, n, u))
        s_m, n_m, u_m = together.gather(-1, top.expand(3, *top.shape))
        s_k, n_k, u_k = together.gather(-1, keep.expand(3, *keep.shape))
        e_k = (classes[:, None] == keep[..., None, :]).to(p)  # (N, P, C, C−1)
        e_m = (classes[:, None] == top[..., None, :]).to(p)  # (N, P, C, 1)
        # Q = I − hhᵀ/(1 + nₘ), h = n + eₘ, Sh = √w̃ sₘ(eₘ − p), hᵀu = nᵀu + uₘ
        h_k = n_k / (1 + n_m)
        S = s_k[..., None, :] * (e_k - p[..., None])
        S -= (h_k * s_m)[..., None, :] * (e_m - p[..., None])
        S *= root_w[..., None]
        return S, u_k - h_k * ((n * u).sum(-1, keepdim=True) + u_m)

    def mixed(self, z: Tensor, y: Target, weight: Tensor | None, signs: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        """√w̃ (s∘ε − p(sᵀε)): S itself has as many numbers as pairs of classes"""
        if self._other_root:
            return super().mixed(z, y, weight, signs)
        p, q = self.group(z).softmax(-1), self.targets(z, y)  # (N, P, C)
        found = p.sqrt() * signs(tuple(p.shape))  # (k, N, P, C)
        found = found - p * found.sum(-1, keepdim=True)
        root_w = q.sum(-1, keepdim=True).sqrt()  # (N, P, 1)
        return found * (root_w if weight is None else weighted(root_w, weight.sqrt()))

    def count(self, z: Tensor, y: Target, weight: Tensor | None = None) -> int:
        C = z.shape[self.axis(z)]
        return super().count(z, y, weight) if self._other_root else math.prod(z.shape[1:]) // C * (C - 1)

    @property
    def _other_root(self) -> bool:
        """Whether a subclass has an S of its own."""
        return type(self).factors is not CrossEntropy.factors or type(self).root is not CrossEntropy.root

    def empirical_factors(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Hard labels: S = √w̃ (p − e_y), u = √w̃, r = 1. Soft: one column √q̃ₖ (p − eₖ), uₖ = √q̃ₖ, per class."""
        p, q = self.group(z).softmax(-1), self.targets(z, y)  # (N, P, C)
        if not y.is_floating_point() and self.label_smoothing == 0:
            w = q.sum(-1, keepdim=True)
            u = w.sqrt()  # (N, P, 1)
            return (self.difference(p, q, w) / u.clamp(min=torch.finfo(p.dtype).tiny))[..., None], u  # 0 if w̃ is
        p = p[..., None]  # (N, P, C, 1)
        columns = tangent(p - torch.eye(p.shape[-2], dtype=p.dtype, device=p.device), p, dim=-2)
        return columns * q.sqrt()[..., None, :], q.sqrt()

    def targets(self, z: Tensor, y: Tensor) -> Tensor:
        """q̃ (N, P, C): smoothed, times the class weights, 0 where ignored."""
        C = z.shape[1] if z.ndim == 2 else z.shape[self.axis(z)]
        if y.dtype.is_floating_point:
            q, kept = self.group(y), z.new_ones(())
        else:
            y = y if y.dtype is torch.long else y.long()  # small integer types could not hold ignore_index
            y = y.reshape(z.shape[0], -1, 1)  # (N, P, 1)
            kept = (y != self.ignore_index).to(z)
            q = (torch.arange(C, device=z.device) == y) * kept
        if self.label_smoothing:
            q = (1 - self.label_smoothing) * q + self.label_smoothing / C * kept
        return q if self.class_weight is None else q * self.class_weight.to(z)

    def normaliser(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        """Class indices: Σ w · class_weight[y] over the positions not ignored. Probabilities: P · Σw."""
        if y.is_floating_point():
            return super().normaliser(z, y, weight)
        y = y.long()
        count = (y != self.ignore_index).to(z)
        if self.class_weight is not None:
            count = count * self.class_weight.to(z)[y.clamp(0, len(self.class_weight) - 1)]
        return weighted(count, weight).sum()

    def group(self, t: Tensor, z: Tensor | None = None) -> Tensor:
        if z is None and t.ndim == 2:
            return t[:, None]
        z = t if z is None else z
        k, axis = t.ndim - z.ndim, self.axis(z)
        P = math.prod(z.shape[1:]) // max(z.shape[axis], 1)
        return t.movedim(k + axis, -1).reshape(*t.shape[:k], z.shape[0], P, z.shape[axis])

    def ungroup(self, t: Tensor, z: Tensor) -> Tensor:
        if z.ndim == 2:
            return t.squeeze(-2)
        lead, axis = t.shape[:-3], self.axis(z)
        return t.reshape(*lead, *z.movedim(axis, -1).shape).movedim(-1, len(lead) + axis)

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        if not isinstance(y, Tensor) or y.dtype == torch.bool or y.is_complex():
            got = y.dtype if isinstance(y, Tensor) else type(y).__name__
            raise TypeError(f"CrossEntropy needs a tensor of class indices or probabilities as targets, got {got}")
        if y.device != z.device:
            same_device(y, z, "targets")
        axis = 1 if z.ndim == 2 else self.axis(z)
        if z.ndim < 2 or z.shape[axis] < 2:
            raise ValueError(
                f"logits have shape {tuple(z.shape)}: CrossEntropy needs (N, C, …) with at least 2 classes "
                "(one logit per sample takes BinaryCrossEntropy)"
            )
        C, indices = z.shape[axis], (*z.shape[:axis], *z.shape[axis + 1 :])
        if self.class_weight is not None and len(self.class_weight) != C:
            raise ValueError(f"class_weight has {len(self.class_weight)} entries, the logits have {C} classes")
        if y.is_floating_point() and y.shape == indices:
            raise TypeError(f"class indices are {y.dtype}: they must be integers, use targets.long()")
        if not y.is_floating_point() and y.shape == z.shape:
            raise TypeError(
                f"targets of the logits' shape are {y.dtype}: use targets.to({z.dtype}), or indices targets.argmax(1)"
            )
        if y.shape != (z.shape if y.is_floating_point() else indices):
            way_out = ""
            if y.shape == z.shape[:-1]:
                way_out = "; classes are dimension 1 of the logits: use z.movedim(-1, 1), or CrossEntropy(class_dim=-1)"
            elif y.shape == (*indices, 1):
                way_out = "; use targets.squeeze(-1)"
            raise ValueError(
                f"logits of shape {tuple(z.shape)} need class indices of shape {indices} or probabilities "
                f"of shape {tuple(z.shape)}, got targets of shape {tuple(y.shape)}{way_out}"
            )
        if y.is_floating_point():
            if self.ignore_index >= 0:
                raise ValueError(f"ignore_index={self.ignore_index} needs class indices, the targets are probabilities")
            check_like(y, z, "targets")
            return [
                Fault(~y.isfinite(), y, "targets", "the targets are non-finite; drop or repair such samples"),
                Fault(y < 0, y, "targets", "probabilities must not be negative"),
            ]
        y = y.long()
        outside = ((y < 0) | (y >= C)) & (y != self.ignore_index)
        advice = f"the logits have {C} classes, so indices run from 0 to {C - 1} (ignore_index is {self.ignore_index})"
        return [Fault(outside, y, "targets", advice)]


def tangent(d: Tensor, p: Tensor, dim: int = -1) -> Tensor:
    """(I − p1ᵀ)d: unchanged when Σd = 0. Where pₘ ≈ 1, pₘ − 1 has lost its digits; the other entries restore them."""
    return d - p * d.sum(dim, keepdim=True)
