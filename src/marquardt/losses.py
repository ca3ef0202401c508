"""Losses: value, gradient and curvature root of each, side by side.

z, y    outputs of the model (N, …) and targets; w sample weights (N,), or None for 1
value   Σᵢ wᵢ ℓᵢ: a sum, so everything here adds up over batches; f = factor · value / normaliser
S, u    SSᵀ = ∂²ℓ/∂z² and Su = ∂ℓ/∂z of each group of outputs that ℓ couples:
        N samples, P groups per sample, C outputs per group, r columns
"""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .tape import ask, recording

__all__ = [
    "BinaryCrossEntropy",
    "CrossEntropy",
    "Elementwise",
    "Huber",
    "Loss",
    "Poisson",
    "Residual",
    "Root",
    "SquaredError",
    "resolve",
]

Target: TypeAlias = Any  # a tensor; Residual takes None too


class Root(NamedTuple):
    """SSᵀ = ∂²value/∂z² and Su + v = ∂value/∂z, group by group."""

    S: Tensor  # (N, P, C, r)
    u: Tensor  # (N, P, r)
    v: Tensor | None = None  # (N, P, C); None means 0


class Fault(NamedTuple):
    """A condition on the data that must hold nowhere, and what to tell the user where it does."""

    bad: Tensor  # mask, shaped like `data`
    data: Tensor
    name: str
    advice: str

    def __str__(self) -> str:
        index = [int(i) for i in self.bad.nonzero()[0]]  # the first offender
        value = self.data[tuple(index)].item()
        return f"{self.name}{index or ''} is {value:{'g' if isinstance(value, float) else ''}}: {self.advice}"


def weighted(t: Tensor, weight: Tensor | None) -> Tensor:
    """wᵢ tᵢ for t (N, …)."""
    return t if weight is None else t * weight.reshape(-1, *[1] * (t.ndim - 1))


@dataclass(frozen=True, kw_only=True, eq=False)
class Loss(ABC):
    """f = factor · Σᵢ wᵢ ℓ(zᵢ, yᵢ) / normaliser with reduction="mean", factor · Σᵢ wᵢ ℓ(zᵢ, yᵢ) with "sum".

    A loss defines ℓ (`ell`), ∂ℓ/∂z (`slope`), the factors S, u of its curvature (`factors`), their empirical
    counterparts, and how outputs fall into groups; weights, normalisation and checks are the same for all.

    On the first step a loss of your own is compared with its `ell` on a few samples: `slope` with ∂ℓ/∂z, Su with
    `slope`, SSᵀ with ∂²ℓ/∂z². If SSᵀ lies above ∂²ℓ/∂z² on purpose, as for a loss that is not convex, the class says
    `majorises = True`.
    """

    majorises: ClassVar[bool] = False
    reduction: str = "mean"
    factor: float = 1.0
    reported: Loss | None = None  # the same loss in the units in which it is reported, where they are others

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f'reduction must be "mean" or "sum" (one number to minimise), got {self.reduction!r}')
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ValueError(f"factor must be positive and finite, got {self.factor!r}")

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        mine, theirs = ([getattr(loss, f.name) for f in fields(self)] for loss in (self, other))
        return all(
            torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b
            for a, b in zip(mine, theirs, strict=True)
        )

    def __hash__(self) -> int:
        return hash((type(self), self.reduction, self.factor))

    # what a loss defines, for weight 1
    @abstractmethod
    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        """ℓ, one entry per group, with the samples first."""

    @abstractmethod
    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        """∂ℓ/∂z, like z."""

    @abstractmethod
    def factors(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """S (N, P, C, r) and u (N, P, r) with SSᵀ = ∂²ℓ/∂z² and Su = ∂ℓ/∂z."""

    @abstractmethod
    def empirical_factors(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """S and u with the gradients of log-likelihood terms as columns of S."""

    @abstractmethod
    def group(self, t: Tensor, z: Tensor | None = None) -> Tensor:
        """t (…, *z.shape) → (…, N, P, C); without z, t has no leading dimensions."""

    @abstractmethod
    def ungroup(self, t: Tensor, z: Tensor) -> Tensor:
        """t (…, N, P, C) → (…, *z.shape): the inverse of `group`."""

    @abstractmethod
    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        """Raises for targets of the wrong shape or dtype; the faults are conditions on their values."""

    # what the optimizer calls
    def value(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        """Σᵢ wᵢ ℓᵢ."""
        return weighted(self.ell(z, y), weight).sum()

    def gradient(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        """∂value/∂z, like z."""
        return weighted(self.slope(z, y), weight)

    def root(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Root:
        """√w S and √w u: SSᵀ = ∂²value/∂z², Su = ∂value/∂z."""
        root_w = None if weight is None else weight.sqrt()
        S, u = self.factors(z, y)
        return Root(weighted(S, root_w), weighted(u, root_w))

    def empirical(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Root:
        """The paper's rows: S = √w ∂ℓ/∂z, u = √w, so that SSᵀ = w ∇ℓ∇ℓᵀ and Su = ∂value/∂z."""
        root_w = None if weight is None else weight.sqrt()
        S, u = self.empirical_factors(z, y)
        return Root(weighted(S, root_w), weighted(u, root_w))

    def normaliser(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        """What torch's mean divides by: P · Σw."""
        groups = self.group(z[:1]).shape[-2]
        return z.new_full((), groups * z.shape[0]) if weight is None else groups * weight.sum()

    def scale(self, normaliser: float) -> float:
        """f / value."""
        return self.factor / normaliser if self.reduction == "mean" else self.factor

    def report(self, f: float, normaliser: float) -> float:
        """f in the units of `reported`."""
        if self.reported is None:
            return f
        return f * self.reported.scale(normaliser) / self.scale(normaliser)

    def lower_bound(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        """A number that value never falls below, whatever z."""
        return z.new_zeros(())

    def check(self, z: Tensor, y: Target, weight: Tensor | None = None, *, part: bool = False) -> None:
        """Raises ValueError or TypeError, with the way out, if the loss cannot be taken of these arguments.

        A part of a batch may have no weight at all.
        """
        if not isinstance(z, Tensor):
            raise TypeError(f"the model must return one tensor, got {type(z).__name__}: wrap it so that it does")
        if z.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"outputs are {z.dtype}: the model must return torch.float32 or torch.float64 (in autocast: .float())"
            )
        if z.ndim == 0:
            raise ValueError("outputs have shape (): the first dimension must be the samples, as in (N, …)")
        if z.numel() == 0:
            raise ValueError(f"the batch is empty: outputs have shape {tuple(z.shape)}")
        faults = self.faults(z, y)
        if weight is not None:
            match(weight, z, "weight")
            if weight.shape != z.shape[:1]:
                shape = tuple(weight.shape)
                raise ValueError(f"weight has shape {shape}: one weight per sample is needed, {tuple(z.shape[:1])}")
            bad = ~(weight >= 0) | weight.isinf()
            faults.append(Fault(bad, weight, "weight", "sample weights must be finite and not negative"))
        if not part:
            total = self.normaliser(z, y, weight)
            nothing = "every target has weight 0 or is ignored (ignore_index), leave this batch out"
            faults.append(Fault(~(total > 0), total, "the total weight of the batch", nothing))
        if faults and not ask(~torch.stack([fault.bad.any() for fault in faults]).any()):
            raise ValueError(str(next(fault for fault in faults if fault.bad.any())))


def match(t: Any, z: Tensor, name: str) -> None:
    """t is a tensor with the dtype and device of the outputs."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(t).__name__}")
    if t.dtype != z.dtype:
        raise TypeError(f"{name}: dtype {t.dtype}, but the outputs are {z.dtype}: use {name}.to({z.dtype})")
    same_device(t, z, name)


def same_device(t: Tensor, z: Tensor, name: str) -> None:
    if t.device != z.device:
        raise ValueError(f"{name} on {t.device}, but the outputs are on {z.device}: use {name}.to({str(z.device)!r})")


def check_weights(t: Any, name: str) -> None:
    """t is a floating tensor, finite, not negative, not all zero: for options of a loss."""
    if not isinstance(t, Tensor) or not t.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {t!r}")
    if t.numel() == 0 or not bool(t.isfinite().all() & (t >= 0).all() & (t > 0).any()):
        raise ValueError(f"{name} must be finite, not negative and not all zero, got {t.tolist()}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Elementwise(Loss):
    """ℓ(zₒ, yₒ) of each output on its own: P = outputs per sample, C = r = 1.

    S = s = √ℓ″ and u = ℓ′/s. Empirical rows are per output too: S = ℓ′, u = 1.

    A loss of your own defines three functions, which are compared with each other on the first step:

    >>> @dataclass(frozen=True, kw_only=True, eq=False)
    ... class LogCosh(Elementwise):
    ...     def ell(self, z, y):
    ...         return (z - y).cosh().log()
    ...
    ...     def slope(self, z, y):
    ...         return (z - y).tanh()
    ...
    ...     def s(self, z, y):
    ...         return 1 / (z - y).cosh()
    """

    @abstractmethod
    def s(self, z: Tensor, y: Tensor) -> Tensor:
        """√ℓ″, or with `majorises` the root of more, like z."""

    def factors(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        # s·(ℓ′/s) is the gradient for any s > 0; the floor keeps it so where ℓ″ underflows and ℓ′ does not
        s = self.s(z, y).clamp(min=torch.finfo(z.dtype).eps)
        return self.group(s)[..., None], self.group(self.slope(z, y) / s)

    def empirical_factors(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        g = self.group(self.slope(z, y))
        return g[..., None], torch.ones_like(g)

    def group(self, t: Tensor, z: Tensor | None = None) -> Tensor:
        z = t if z is None else z
        lead = t.shape[: t.ndim - z.ndim]
        return t.reshape(*lead, z.shape[0], math.prod(z.shape[1:]), 1)

    def ungroup(self, t: Tensor, z: Tensor) -> Tensor:
        return t.reshape(*t.shape[:-3], *z.shape)

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        name = type(self).__name__
        if y is None:
            raise TypeError(f"{name} needs targets, got None (a model that returns residuals takes losses.Residual())")
        if isinstance(y, Tensor) and not y.is_floating_point():
            raise TypeError(
                f"targets are {y.dtype}: {name} needs floating-point targets, y.to({z.dtype}) "
                "(for class labels use cross_entropy)"
            )
        match(y, z, "targets")
        if y.shape != z.shape:
            way_out = "give the targets the shape of the outputs"
            if [d for d in z.shape if d != 1] == [d for d in y.shape if d != 1]:
                way_out = "use y.unsqueeze(-1), or z.squeeze(-1)" if z.ndim > y.ndim else "use y.squeeze(-1)"
            raise ValueError(
                f"outputs have shape {tuple(z.shape)}, targets {tuple(y.shape)}: "
                f"broadcasting would pair the wrong elements; {way_out}"
            )
        return [Fault(~y.isfinite(), y, "targets", "the targets are non-finite; drop or repair such samples")]


@dataclass(frozen=True, kw_only=True, eq=False)
class SquaredError(Elementwise):
    """ℓ = (z − y)²,  ℓ′ = 2(z − y),  s = √2:  `nn.MSELoss`."""

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return (z - y).square()

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return 2 * (z - y)

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.full_like(z, math.sqrt(2))


@dataclass(frozen=True, kw_only=True, eq=False)
class Residual(SquaredError):
    """ℓ = z²: the squared error of residuals that the model returns itself; targets are not looked at."""

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return super().ell(z, z.new_zeros(()))

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return super().slope(z, z.new_zeros(()))

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        return []


@dataclass(frozen=True, eq=False)
class Huber(Elementwise):
    """With e = z − y:  ℓ = ½e² if |e| ≤ δ else δ(|e| − ½δ),  ℓ′ = min(1, δ/|e|) e,  s = √min(1, δ/|e|).

    Beyond δ the curvature is 0 where the gradient is not: s is the root of the quadratic that touches ℓ at e
    and lies above it everywhere, so Su = ℓ′ holds on both sides.
    """

    majorises: ClassVar[bool] = True
    delta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.delta) and self.delta > 0):
            raise ValueError(f"delta must be positive and finite, got {self.delta!r}")

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return F.huber_loss(z, y, reduction="none", delta=self.delta)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return (z - y).clamp(-self.delta, self.delta)

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return (self.delta / (z - y).abs().clamp(min=self.delta)).sqrt()


@dataclass(frozen=True, kw_only=True, eq=False)
class BinaryCrossEntropy(Elementwise):
    """On logits, σ = sigmoid(z), a = pos_weight:  ℓ = −a y log σ − (1 − y) log(1 − σ),
    ℓ′ = (1 − y)σ − a y(1 − σ),  s = √((a y + 1 − y) σ(1 − σ)):  `nn.BCEWithLogitsLoss`.
    """

    pos_weight: Tensor | None = None  # broadcasts against one sample's outputs

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pos_weight is not None:
            check_weights(self.pos_weight, "pos_weight")

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(z, y, pos_weight=self.a(z), reduction="none")

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return (1 - y) * z.sigmoid() - self.a(z) * y * (-z).sigmoid()  # 1 − σ(z) = σ(−z), without cancellation

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return ((self.a(z) * y + 1 - y) * z.sigmoid() * (-z).sigmoid()).sqrt()

    def a(self, z: Tensor) -> Tensor:
        return z.new_ones(()) if self.pos_weight is None else self.pos_weight.to(z)

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        shape = (1, *z.shape[1:])
        if not broadcasts(self.a(z).shape, shape):
            raise ValueError(
                f"pos_weight of shape {tuple(self.a(z).shape)} does not broadcast to the outputs of one sample, {shape}"
            )
        advice = "BinaryCrossEntropy needs targets in [0, 1]"
        return [*super().faults(z, y), Fault((y < 0) | (y > 1), y, "targets", advice)]


def broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """a broadcasts to b without widening it."""
    return len(a) <= len(b) and all(i in (1, j) for i, j in zip(reversed(a), reversed(b), strict=False))


@dataclass(frozen=True, kw_only=True, eq=False)
class Poisson(Elementwise):
    """Counts y with log-rate z:  ℓ = e^z − y z,  ℓ′ = e^z − y,  s = e^{z/2}:  `nn.PoissonNLLLoss`."""

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return z.exp() - y * z

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return z.exp() - y

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return (z / 2).exp()

    def lower_bound(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        """Σ w (y − y log y): the saturated model, z = log y."""
        return weighted(y - torch.xlogy(y, y), weight).sum()

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        return [*super().faults(z, y), Fault(y < 0, y, "targets", "Poisson needs targets that are not negative")]


@dataclass(frozen=True, kw_only=True, eq=False)
class CrossEntropy(Loss):
    """Over classes, with logits z (N, C, d₁, …), p = softmax(z), q̃ = class_weight ∘ q and w̃ = Σ q̃:

        ℓ = −Σₖ q̃ₖ log pₖ,  ∂ℓ/∂z = w̃p − q̃,  S = √w̃ (I − p1ᵀ) diag(s),  u = (w̃p − q̃)/(√w̃ s),  s = √p.

    y: class indices (N, d₁, …), or probabilities q (N, C, d₁, …). One group per position: P = d₁⋯, r = C − 1.
    """

    label_smoothing: float = 0.0
    class_weight: Tensor | None = None  # (C,)
    ignore_index: int = -100

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing must lie in [0, 1], got {self.label_smoothing!r}")
        if self.class_weight is not None:
            check_weights(self.class_weight, "class_weight")
            if self.class_weight.ndim != 1:
                raise ValueError(f"class_weight must have shape (C,), got {tuple(self.class_weight.shape)}")

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        if recording() and not y.is_floating_point():
            # `check` is answered when all is done; until then no class that does not exist may end the process.
            y = y.long()
            y = torch.where((y >= 0) & (y < z.shape[1]), y, self.ignore_index)
        return F.cross_entropy(
            z,
            y if y.is_floating_point() else y.long(),
            weight=None if self.class_weight is None else self.class_weight.to(z),
            ignore_index=self.ignore_index,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return self.ungroup(self.difference(self.group(z).softmax(-1), self.targets(z, y)), z)

    def difference(self, p: Tensor, q: Tensor) -> Tensor:
        """w̃p − q̃ (N, P, C)."""
        return tangent(q.sum(-1, keepdim=True) * p - q, p)

    def factors(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """SQ and Qᵀu without the column m of Q: with m = argmax p, Q the Householder reflection of n = p/s to −eₘ,
        and Sn = 0, that column of SQ is 0.
        """
        p, q = self.group(z).softmax(-1), self.targets(z, y)  # (N, P, C)
        root_w = q.sum(-1, keepdim=True).sqrt()  # (N, P, 1)
        # Su = ∂ℓ/∂z for any s > 0: the floor keeps it so, and u bounded, for a class with q > 0 whose p underflows
        limits = torch.finfo(p.dtype)
        s = p.sqrt().clamp(min=limits.tiny)
        s = s.where((q == 0) | (s > limits.eps), limits.eps)
        u = self.difference(p, q) / root_w.where(root_w > 0, 1) / s
        n = p / s  # |n| = 1
        # column m leaves, the last one takes its place; m = argmax p keeps 1 − pₘ, which cancels, away from a large u
        top = p.argmax(-1, keepdim=True)  # (N, P, 1)
        classes = torch.arange(p.shape[-1], device=p.device)
        keep = torch.where(classes[:-1] == top, classes[-1], classes[:-1])  # (N, P, C−1)
        s_m, n_m, u_m = (t.gather(-1, top) for t in (s, n, u))
        s_k, n_k, u_k = (t.gather(-1, keep) for t in (s, n, u))
        e_k = (classes[:, None] == keep[..., None, :]).to(p)  # (N, P, C, C−1)
        e_m = (classes[:, None] == top[..., None, :]).to(p)  # (N, P, C, 1)
        # Q = I − hhᵀ/(1 + nₘ), h = n + eₘ, Sh = √w̃ sₘ(eₘ − p), hᵀu = nᵀu + uₘ
        S = s_k[..., None, :] * (e_k - p[..., None])
        S -= (n_k * s_m / (1 + n_m))[..., None, :] * (e_m - p[..., None])
        S *= root_w[..., None]
        return S, u_k - n_k * ((n * u).sum(-1, keepdim=True) + u_m) / (1 + n_m)

    def empirical_factors(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Hard labels: S = √w̃ (p − e_y), u = √w̃, r = 1. Soft: one column √q̃ₖ (p − eₖ), uₖ = √q̃ₖ, per class."""
        p, q = self.group(z).softmax(-1), self.targets(z, y)  # (N, P, C)
        if not y.is_floating_point() and self.label_smoothing == 0:
            u = q.sum(-1, keepdim=True).sqrt()  # (N, P, 1)
            return (self.difference(p, q) / u.where(u > 0, 1))[..., None], u
        p = p[..., None]  # (N, P, C, 1)
        columns = tangent(p - torch.eye(p.shape[-2], dtype=p.dtype, device=p.device), p, dim=-2)
        return columns * q.sqrt()[..., None, :], q.sqrt()

    def targets(self, z: Tensor, y: Tensor) -> Tensor:
        """q̃ (N, P, C): smoothed, times the class weights, 0 where ignored."""
        C = z.shape[1]
        if y.is_floating_point():
            q, kept = self.group(y), z.new_ones(())
        else:
            y = y.long().reshape(z.shape[0], -1, 1)  # (N, P, 1); small integer types could not hold ignore_index
            kept = (y != self.ignore_index).to(z)
            q = (torch.arange(C, device=z.device) == y) * kept
        q = (1 - self.label_smoothing) * q + self.label_smoothing / C * kept
        return q if self.class_weight is None else q * self.class_weight.to(z)

    def normaliser(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        """Class indices: Σ w · class_weight[y] over the positions not ignored. Probabilities: P · Σw."""
        if y.is_floating_point():
            return super().normaliser(z, y, weight)
        y = y.long()
        count = (y != self.ignore_index).to(z)
        if self.class_weight is not None:
            count = count * self.class_weight.to(z)[y.clamp(0, z.shape[1] - 1)]
        return weighted(count, weight).sum()

    def group(self, t: Tensor, z: Tensor | None = None) -> Tensor:
        z = t if z is None else z
        k = t.ndim - z.ndim
        return t.movedim(k + 1, -1).reshape(*t.shape[:k], z.shape[0], math.prod(z.shape[2:]), z.shape[1])

    def ungroup(self, t: Tensor, z: Tensor) -> Tensor:
        lead = t.shape[:-3]
        return t.reshape(*lead, z.shape[0], *z.shape[2:], z.shape[1]).movedim(-1, len(lead) + 1)

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        if not isinstance(y, Tensor) or y.dtype == torch.bool or y.is_complex():
            got = y.dtype if isinstance(y, Tensor) else type(y).__name__
            raise TypeError(f"CrossEntropy needs a tensor of class indices or probabilities as targets, got {got}")
        same_device(y, z, "targets")
        if z.ndim < 2 or z.shape[1] < 2:
            raise ValueError(
                f"logits have shape {tuple(z.shape)}: CrossEntropy needs (N, C, …) with at least 2 classes "
                "(one logit per sample takes BinaryCrossEntropy)"
            )
        C, indices = z.shape[1], (z.shape[0], *z.shape[2:])
        if self.class_weight is not None and len(self.class_weight) != C:
            raise ValueError(f"class_weight has {len(self.class_weight)} entries, the logits have {C} classes")
        if y.is_floating_point() and y.shape == indices:
            raise TypeError(f"class indices are {y.dtype}: they must be integers, use y.long()")
        if not y.is_floating_point() and y.shape == z.shape:
            raise TypeError(f"targets of the logits' shape are {y.dtype}: use y.to({z.dtype}), or indices y.argmax(1)")
        if y.shape != (z.shape if y.is_floating_point() else indices):
            way_out = ""
            if y.shape == z.shape[:-1]:
                way_out = "; classes are dimension 1 of the logits: use z.movedim(-1, 1)"
            elif y.shape == (*indices, 1):
                way_out = "; use y.squeeze(-1)"
            raise ValueError(
                f"logits of shape {tuple(z.shape)} need class indices of shape {indices} or probabilities "
                f"of shape {tuple(z.shape)}, got targets of shape {tuple(y.shape)}{way_out}"
            )
        if y.is_floating_point():
            if self.ignore_index >= 0:
                raise ValueError(f"ignore_index={self.ignore_index} needs class indices, the targets are probabilities")
            match(y, z, "targets")
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


NAMES: dict[str, Loss] = {
    "mse": SquaredError(),
    "squared_error": SquaredError(),
    "cross_entropy": CrossEntropy(),
    "bce": BinaryCrossEntropy(),
    "bce_with_logits": BinaryCrossEntropy(),
    "huber": Huber(),
    "smooth_l1": Huber(),
    "poisson": Poisson(),
    "residual": Residual(),
}


def from_smooth_l1(loss: nn.SmoothL1Loss) -> Loss:
    """Smooth-L1 of β is Huber of δ = β, divided by β."""
    if not loss.beta > 0:
        raise ValueError(f"SmoothL1Loss(beta={loss.beta}) has no curvature anywhere: use a positive beta")
    return Huber(delta=loss.beta, factor=1 / loss.beta, reduction=loss.reduction)


def from_bce(loss: nn.BCEWithLogitsLoss) -> Loss:
    if loss.weight is not None:
        raise ValueError("BCEWithLogitsLoss(weight=…) is not supported: use pos_weight, or sample weights")
    return BinaryCrossEntropy(pos_weight=loss.pos_weight, reduction=loss.reduction)


def from_poisson(loss: nn.PoissonNLLLoss) -> Loss:
    if not loss.log_input:
        raise ValueError("PoissonNLLLoss(log_input=False) is not supported: return the log of the rate, log_input=True")
    if loss.full:
        raise ValueError("PoissonNLLLoss(full=True) is not supported: its extra term is a constant, leave it out")
    return Poisson(reduction=loss.reduction)


def from_cross_entropy(loss: nn.CrossEntropyLoss) -> Loss:
    return CrossEntropy(
        label_smoothing=loss.label_smoothing,
        class_weight=loss.weight,
        ignore_index=loss.ignore_index,
        reduction=loss.reduction,
    )


MODULES: dict[type[nn.Module], Callable[[Any], Loss]] = {
    nn.MSELoss: lambda loss: SquaredError(reduction=loss.reduction),
    nn.CrossEntropyLoss: from_cross_entropy,
    nn.BCEWithLogitsLoss: from_bce,
    nn.HuberLoss: lambda loss: Huber(delta=loss.delta, reduction=loss.reduction),
    nn.SmoothL1Loss: from_smooth_l1,
    nn.PoissonNLLLoss: from_poisson,
}

INSTEAD: dict[type[Any], str] = {
    nn.BCELoss: "return logits and use nn.BCEWithLogitsLoss",
    nn.NLLLoss: "return logits and use nn.CrossEntropyLoss",
    nn.L1Loss: "it has no curvature; use nn.HuberLoss with a small delta",
}


def resolve(loss: str | nn.Module | Loss) -> Loss:
    """The Loss that a name, a torch.nn loss or a Loss stands for, with its options."""
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        if loss in NAMES:
            return NAMES[loss]
        close = difflib.get_close_matches(loss.lower(), NAMES, n=1)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown loss {loss!r}.{meant} The names are {', '.join(NAMES)}")
    if type(loss) in MODULES:  # the type itself: a subclass may compute anything
        return MODULES[type(loss)](loss)
    if isinstance(loss, type):
        raise TypeError(f"loss must be an object, got the class {loss.__name__}: write {loss.__name__}()")
    known = ", ".join(module.__name__ for module in MODULES)
    way_out = INSTEAD.get(type(loss), f"pass a name ({', '.join(NAMES)}), one of torch.nn's {known}, or a losses.Loss")
    raise TypeError(f"{getattr(loss, '__name__', type(loss).__name__)} is not a supported loss: {way_out}")
