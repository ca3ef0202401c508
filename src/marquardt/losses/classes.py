"""Losses of classes, from logits or probabilities: two classes, many, or ordered ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..deferred import current
from ..tolerances import FORMULA
from .base import (
    FRACTIONS,
    NON_FINITE,
    SIGNS,
    Domain,
    Elementwise,
    Fault,
    Loss,
    Target,
    check_like,
    check_number,
    mistyped,
    same_device,
    weighted,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class CrossEntropy(Loss):
    """Over classes, with logits z (N, C, d₁, …), p = softmax(z), q̃ = class_weight ∘ q and w̃ = Σ q̃:

        ℓ = −Σₖ q̃ₖ log pₖ,  ∂ℓ/∂z = w̃p − q̃,  S = √w̃ (I − p1ᵀ) diag(s),  u = (w̃p − q̃)/(√w̃ s),  s = √p.

    y: class indices (N, d₁, …), or probabilities q (N, C, d₁, …). One group per position: P = d₁⋯, r = C − 1.

    `class_dim` is the dimension of the classes in the logits. It is 1 in torch, and here with None, unless class
    indices show that the classes come last, (N, d₁, …, C), as in language models.

    Args:
        label_smoothing: the share of every target that is distributed evenly over all classes.
        class_weight: one per class, (C,).
        ignore_index: the target of positions that are ignored.
        class_dim: the dimension of the classes in the logits.

    >>> opt = mq.LM(classifier, mq.losses.CrossEntropy(label_smoothing=0.1))  # or "cross_entropy"
    >>> step = opt.step(x, labels)
    """

    likelihood: ClassVar[str | None] = "categorical"
    weight_options: ClassVar[tuple[str, ...]] = ("class_weight",)
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
        if self.class_weight is not None and self.class_weight.ndim != 1:
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
            # The result of `check` is only read after the step; until then no invalid class may end the process.
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
        # Su = ∂ℓ/∂z for any s > 0: so also with the floor, which keeps u bounded for a class with q > 0 whose p
        # underflows
        s = p.sqrt()
        s = torch.where(q == 0, s.clamp(min=limits.tiny), s.clamp(min=limits.eps))
        u = self.difference(p, q, w) / root_w.clamp(min=limits.tiny) / s  # 0 if w̃ = 0
        n = p / s  # |n| = 1
        # column m is left out and the last one replaces it; m = argmax p avoids a large u times 1 − pₘ, which cancels
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
        """√w̃ (s∘ε − p(sᵀε)): S itself would have as many numbers as there are pairs of classes"""
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
        """Whether a subclass has its own S."""
        return type(self).factors is not CrossEntropy.factors or type(self).root is not CrossEntropy.root

    def empirical_factors(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Hard labels: S = √w̃ (p − e_y), u = √w̃, r = 1. Soft: one column per class, √q̃ₖ (p − eₖ), uₖ = √q̃ₖ."""
        p, q = self.group(z).softmax(-1), self.targets(z, y)  # (N, P, C)
        if not y.is_floating_point() and self.label_smoothing == 0:
            w = q.sum(-1, keepdim=True)
            u = w.sqrt()  # (N, P, 1)
            return (self.difference(p, q, w) / u.clamp(min=torch.finfo(p.dtype).tiny))[..., None], u  # 0 if w̃ = 0
        p = p[..., None]  # (N, P, C, 1)
        columns = tangent(p - torch.eye(p.shape[-2], dtype=p.dtype, device=p.device), p, dim=-2)
        return columns * q.sqrt()[..., None, :], q.sqrt()

    def targets(self, z: Tensor, y: Tensor) -> Tensor:
        """q̃ (N, P, C): smoothed, times the class weights, and 0 at ignored positions."""
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
        """For class indices Σ w · class_weight[y] over the positions not ignored, for probabilities P · Σw."""
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
            raise mistyped(y, "CrossEntropy needs a tensor of class indices or probabilities as targets")
        if y.device != z.device:
            same_device(y, z, "targets")
        axis = 1 if z.ndim == 2 else self.axis(z)
        if z.ndim < 2 or z.shape[axis] < 2:
            raise ValueError(
                f"logits have shape {tuple(z.shape)}: CrossEntropy needs (N, C, …) with at least 2 classes "
                "(one logit per sample takes BinaryCrossEntropy)"
            )
        C, soft = z.shape[axis], y.is_floating_point()
        indices = (*z.shape[:axis], *z.shape[axis + 1 :])
        if self.class_weight is not None and len(self.class_weight) != C:
            raise ValueError(f"class_weight has {len(self.class_weight)} entries, the logits have {C} classes")
        if soft and y.shape == indices:
            raise TypeError(f"class indices are {y.dtype}: they must be integers, use targets.long()")
        if not soft and y.shape == z.shape:
            raise TypeError(
                f"targets of the logits' shape are {y.dtype}: use targets.to({z.dtype}), or indices targets.argmax(1)"
            )
        if y.shape != (z.shape if soft else indices):
            way_out = ""
            if y.shape == z.shape[:-1]:
                way_out = "; classes are dimension 1 of the logits: use z.movedim(-1, 1), or CrossEntropy(class_dim=-1)"
            elif y.shape == (*indices, 1):
                way_out = "; use targets.squeeze(-1)"
            raise ValueError(
                f"logits of shape {tuple(z.shape)} need class indices of shape {indices} or probabilities "
                f"of shape {tuple(z.shape)}, got targets of shape {tuple(y.shape)}{way_out}"
            )
        if soft:
            if self.ignore_index >= 0:
                raise ValueError(f"ignore_index={self.ignore_index} needs class indices, the targets are probabilities")
            check_like(y, z, "targets")
            negative = Fault(y < 0, y, "targets", "probabilities must not be negative")
            return [Fault(~y.isfinite(), y, "targets", NON_FINITE), negative]
        y = y.long()
        outside = ((y < 0) | (y >= C)) & (y != self.ignore_index)
        advice = f"the logits have {C} classes, so indices run from 0 to {C - 1} (ignore_index is {self.ignore_index})"
        return [Fault(outside, y, "targets", advice)]


def tangent(d: Tensor, p: Tensor, dim: int = -1) -> Tensor:
    """(I − p1ᵀ)d: unchanged if Σd = 0. Where pₘ ≈ 1, pₘ − 1 has lost its digits, and the other entries restore them."""
    return d - p * d.sum(dim, keepdim=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class NegativeLogLikelihood(CrossEntropy):
    """Cross-entropy of outputs that are already log-probabilities z = log p:  ℓ = −Σₖ q̃ₖ zₖ:  `nn.NLLLoss`.

    ℓ is linear in z, and the curvature is that of the log-softmax in the model. The softmax of z is p, so the S of
    cross-entropy, taken back through the log-softmax, is that of the logits.

    >>> log_probabilities = nn.Sequential(classifier, nn.LogSoftmax(1))
    >>> opt = mq.LM(log_probabilities, mq.losses.NegativeLogLikelihood())  # or "nll"
    >>> step = opt.step(x, labels)
    """

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        faults = super().faults(z, y)
        total = z.logsumexp(1)
        advice = (
            f"{type(self).__name__} needs log-probabilities: end the model with F.log_softmax(z, 1), or take "
            "nn.CrossEntropyLoss of logits"
        )
        return [*faults, Fault(total.abs() > FORMULA[z.dtype], total, "the logarithm of Σ exp(outputs)", advice)]


@dataclass(frozen=True, kw_only=True, eq=False)
class KLDivergence(NegativeLogLikelihood):
    """From log-probabilities z (N, C, …) to probabilities q:  ℓ = Σₖ qₖ(log qₖ − zₖ):  `nn.KLDivLoss`.

    With `log_target` the targets are log q. The mean is over N, or without `batchmean` over all outputs.

    Args:
        log_target: whether the targets are log q.
        batchmean: whether the mean is over the samples instead of all outputs.

    >>> log_probabilities = nn.Sequential(classifier, nn.LogSoftmax(1))
    >>> opt = mq.LM(log_probabilities, mq.losses.KLDivergence())  # or "kl_div"
    >>> step = opt.step(x, torch.full((64, 3), 1 / 3))
    """

    likelihood: ClassVar[str | None] = None  # of distributions, not of targets
    log_target: bool = False
    batchmean: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing or self.class_weight is not None or self.ignore_index != -100:
            raise ValueError(
                "KLDivergence has no label_smoothing, class_weight or ignore_index: they are in the targets"
            )

    def q(self, y: Tensor) -> Tensor:
        return y.exp() if self.log_target else y

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        q = self.q(y)
        return super().ell(z, q) + torch.xlogy(q, q).sum(1)

    def targets(self, z: Tensor, y: Tensor) -> Tensor:
        return super().targets(z, self.q(y))

    def normaliser(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        N = z.new_full((), len(z)) if weight is None else weight.sum()
        return N if self.batchmean else N * z[0].numel()

    def lower_bound(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        """Σ w Q log Q with Q = Σ q, which is 1 for probabilities: the value at p = q/Q."""
        Q = self.q(y).sum(1)
        return weighted(torch.xlogy(Q, Q), weight).sum()

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        if not isinstance(y, Tensor) or not y.is_floating_point():
            raise mistyped(y, "KLDivergence needs a tensor of probabilities as targets, like the outputs")
        return super().faults(z, self.q(y))


@dataclass(frozen=True, kw_only=True, eq=False)
class BinaryProbabilities(Elementwise):
    """Probabilities z, v = z(1 − z):  ℓ = −y log z − (1 − y) log(1 − z),  ℓ′ = (z − y)/v,  s = v^−½:  `nn.BCELoss`.

    s² is the mean of ℓ″ over y with this probability: if the outputs come from a sigmoid, it is the curvature of the
    logits. As in torch, logarithms are at least −100, and v is at least 1e-12.

    Args:
        output_weight: one per output; broadcasts against those of a sample.

    >>> opt = mq.LM(nn.Sequential(model, nn.Sigmoid()), mq.losses.BinaryProbabilities())  # or "binary_probabilities"
    >>> step = opt.step(x, (y > 0).float())
    """

    fisher: ClassVar[bool] = True
    likelihood: ClassVar[str | None] = "bernoulli probability"
    weight_options: ClassVar[tuple[str, ...]] = ("output_weight",)
    target_domain: ClassVar[Domain | None] = FRACTIONS
    output_weight: Tensor | None = None  # one per output; broadcasts against one sample's outputs

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        likely, unlikely = z.log().clamp(min=-100), (-z).log1p().clamp(min=-100)
        return -self.b(z) * (y * likely + (1 - y) * unlikely)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return self.b(z) * (z - y) / self.v(z)

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return (self.b(z) / self.v(z)).sqrt()

    def v(self, z: Tensor) -> Tensor:
        return (z * (1 - z)).clamp(min=1e-12)

    def b(self, z: Tensor) -> Tensor:
        return z.new_ones(()) if self.output_weight is None else self.output_weight.to(z)

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        outside = "BinaryProbabilities needs outputs in [0, 1]: end the model with a sigmoid, or use bce of logits"
        return [*super().faults(z, y), Fault((z < 0) | (z > 1), z, "outputs", outside)]


@dataclass(frozen=True, eq=False)
class Hinge(Elementwise):
    """The squared hinge, y = ±1, e = max(0, margin − yz):  ℓ = e²,  ℓ′ = −2ye,  s = √2 if e > 0 else 0.

    Args:
        margin: the yz from which on an output costs nothing.

    >>> opt = mq.LM(model, mq.losses.Hinge())  # or "hinge"
    >>> step = opt.step(x, y.sign())
    """

    positive_options: ClassVar[tuple[str, ...]] = ("margin",)
    target_domain: ClassVar[Domain | None] = SIGNS
    margin: float = 1.0

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return (self.margin - y * z).relu().square()

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return -2 * y * (self.margin - y * z).relu()

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return math.sqrt(2) * (y * z < self.margin).to(z)


@dataclass(frozen=True, kw_only=True, eq=False)
class SoftMargin(Elementwise):
    """y = ±1:  ℓ = log(1 + e^−yz),  ℓ′ = −yσ(−yz),  s = √(σ(yz)σ(−yz)):  `nn.SoftMarginLoss`.

    >>> opt = mq.LM(model, mq.losses.SoftMargin())  # or "soft_margin"
    >>> step = opt.step(x, y.sign())
    """

    likelihood: ClassVar[str | None] = "bernoulli"
    target_domain: ClassVar[Domain | None] = SIGNS

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return F.softplus(-y * z)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return -y * (-y * z).sigmoid()

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return (z.sigmoid() * (-z).sigmoid()).sqrt()


@dataclass(frozen=True, kw_only=True, eq=False)
class Ordinal(Loss):
    """K classes in an order, y in 0, …, K − 1 (N,), outputs z (N, K − 1) with P(y ≤ k) = σ(zₖ), z₀ < z₁ < …:
    with b = z_y, a = z_{y−1} and d = b − a (at the ends σ(b) = 1, σ(a) = 0),

        ℓ = −log(σ(b) − σ(a)) = log(1 + e^−b) + log(1 + e^a) − log(1 − e^−d),
        S = columns √(σ(b)σ(−b)) e_b,  √(σ(a)σ(−a)) e_a,  (e_b − e_a)/(2 sinh ½d).

    The thresholds are part of the model: it returns zₖ = tₖ − m, with m the place of a sample and tₖ increasing, such
    as the cumulative sums of F.softplus of parameters.

    >>> class Ordered(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.place, self.gaps = nn.Linear(2, 1), nn.Parameter(torch.zeros(2))
    ...
    ...     def forward(self, x):
    ...         return nn.functional.softplus(self.gaps).cumsum(0) - self.place(x)
    >>> opt = mq.LM(Ordered(), mq.losses.Ordinal())  # or "ordinal"
    >>> step = opt.step(x, labels)
    """

    likelihood: ClassVar[str | None] = "ordered"

    def ends(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """b and a, ∞ and −∞ at the ends, where their terms vanish with all derivatives: (N,)"""
        k = y.long().clamp(0, z.shape[1])[:, None]
        b, a = F.pad(z, (0, 1), value=math.inf).gather(1, k), F.pad(z, (1, 0), value=-math.inf).gather(1, k)
        return b[:, 0], a[:, 0]

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        b, a = self.ends(z, y)
        between = (a - b).exp().neg().log1p().neg()  # −log(1 − e^−d), NaN if d < 0
        return F.softplus(-b) + F.softplus(a) + between

    def slopes(self, z: Tensor, y: Tensor) -> Tensor:
        """∂ℓ/∂b, ∂ℓ/∂a and ∂ℓ/∂d of the three terms: (3, N)"""
        b, a = self.ends(z, y)
        return torch.stack((-(-b).sigmoid(), a.sigmoid(), -1 / (b - a).expm1()))

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.einsum("rn,rnc->nc", self.slopes(z, y), self.directions(z, y))

    def directions(self, z: Tensor, y: Tensor) -> Tensor:
        """e_b, e_a and e_b − e_a, without unit vectors that do not exist for a sample: (3, N, K − 1)"""
        places = torch.arange(z.shape[1], device=z.device)
        e_b, e_a = ((places == k[:, None]).to(z) for k in (y.long(), y.long() - 1))
        return torch.stack((e_b, e_a, e_b - e_a))

    def factors(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        b, a = self.ends(z, y)
        s = torch.stack(((b.sigmoid() * (-b).sigmoid()).sqrt(), (a.sigmoid() * (-a).sigmoid()).sqrt(), (b - a) / 2))
        s[2] = 0.5 / s[2].sinh().abs()
        # as for elementwise losses: Su is the gradient for any s > 0, even where s² underflows
        s = s.clamp(torch.finfo(z.dtype).eps, 1 / torch.finfo(z.dtype).eps)
        slopes = self.slopes(z, y)
        S = s[..., None] * self.directions(z, y) * (slopes != 0)[..., None]  # (3, N, K − 1)
        return S.permute(1, 2, 0)[:, None], (slopes / s).mT[:, None]

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        if not isinstance(y, Tensor) or y.is_floating_point() or y.dtype == torch.bool or y.is_complex():
            raise mistyped(y, "Ordinal needs a tensor of class indices as targets", ": use targets.long()")
        same_device(y, z, "targets")
        if z.ndim != 2 or y.shape != z.shape[:1]:
            raise ValueError(
                f"outputs have shape {tuple(z.shape)}, targets {tuple(y.shape)}: Ordinal needs (N, K − 1) for K "
                "classes, and class indices (N,)"
            )
        K = z.shape[1] + 1
        advice = f"{K - 1} outputs tell {K} classes apart, so indices run from 0 to {K - 1}"
        steps = z.diff(dim=1)
        rising = "the outputs of a sample must increase, see Ordinal: return F.softplus(gaps).cumsum(0) - place"
        return [Fault((y < 0) | (y >= K), y, "targets", advice), Fault(steps <= 0, steps, "a step of outputs", rising)]
