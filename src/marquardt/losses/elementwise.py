"""Losses of each output on its own: squared error, Huber, binary cross-entropy, Poisson."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Fault, Loss, Target, check_positive, check_weights, weighted


@dataclass(frozen=True, kw_only=True, eq=False)
class Elementwise(Loss):
    """ℓ(zₒ, yₒ) of each output on its own: P = outputs per sample, C = r = 1.

    S = s = √ℓ″ and u = ℓ′/s. Empirical rows are per output too: S = ℓ′, u = 1.

    A loss of your own defines three functions, which are compared with each other on the first step:

    >>> @dataclass(frozen=True, kw_only=True, eq=False)
    ... class LogCosh(mq.losses.Elementwise):
    ...     def ell(self, z, y):
    ...         return (z - y).cosh().log()
    ...
    ...     def slope(self, z, y):
    ...         return (z - y).tanh()
    ...
    ...     def s(self, z, y):
    ...         return 1 / (z - y).cosh()
    >>> step = mq.LM(model, LogCosh()).step(x, y)
    """

    @abstractmethod
    def s(self, z: Tensor, y: Tensor) -> Tensor:
        """√ℓ″, or with `majorises` the root of more, like z."""

    def factors(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        # s·(ℓ′/s) is the gradient for any s > 0; the floor keeps it so where ℓ″ underflows and ℓ′ does not
        s = self.s(z, y).clamp(min=torch.finfo(z.dtype).eps)
        return self.group(s)[..., None], self.group(self.slope(z, y) / s)

    def group(self, t: Tensor, z: Tensor | None = None) -> Tensor:
        if z is None:
            return t.reshape(t.shape[0], -1, 1)
        return t.reshape(*t.shape[: t.ndim - z.ndim], z.shape[0], math.prod(z.shape[1:]), 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class SquaredError(Elementwise):
    """ℓ = (z − y)²,  ℓ′ = 2(z − y),  s = √2:  `nn.MSELoss`.

    >>> opt = mq.LM(model, mq.losses.SquaredError())  # or "mse"
    """

    sum_of_squares: ClassVar[bool] = True
    likelihood: ClassVar[str | None] = "normal"

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return (z - y).square()

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return 2 * (z - y)

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.full_like(z, math.sqrt(2))


@dataclass(frozen=True, kw_only=True, eq=False)
class Residual(SquaredError):
    """ℓ = z²: the squared error of residuals that the model returns itself; targets are not looked at.

    >>> opt = mq.LM(model, mq.losses.Residual())  # or "residual"
    >>> step = opt.step(x)
    """

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

    Args:
        delta: δ, up to which an error counts as its square.

    >>> opt = mq.LM(model, mq.losses.Huber(delta=0.5))  # or "huber"
    """

    majorises: ClassVar[bool] = True
    delta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.delta, "delta")

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return F.huber_loss(z, y, reduction="none", delta=self.delta)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return (z - y).clamp(-self.delta, self.delta)

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return (self.delta / (z - y).abs().clamp(min=self.delta)).sqrt()


@dataclass(frozen=True, kw_only=True, eq=False)
class BinaryCrossEntropy(Elementwise):
    """On logits, σ = sigmoid(z), a = pos_weight, b = output_weight:  ℓ = b(−a y log σ − (1 − y) log(1 − σ)),
    ℓ′ = b((1 − y)σ − a y(1 − σ)),  s = √(b(a y + 1 − y) σ(1 − σ)):  `nn.BCEWithLogitsLoss`.

    Args:
        pos_weight: a, of the targets 1; broadcasts against the outputs of a sample.
        output_weight: b, of every output; broadcasts likewise.

    >>> opt = mq.LM(model, mq.losses.BinaryCrossEntropy())  # or "bce"
    >>> step = opt.step(x, (y > 0).float())
    """

    likelihood: ClassVar[str | None] = "bernoulli"
    pos_weight: Tensor | None = None  # broadcasts against one sample's outputs
    output_weight: Tensor | None = None  # and so does this

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("pos_weight", "output_weight"):
            if getattr(self, name) is not None:
                check_weights(getattr(self, name), name)

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(z, y, self.b(z), pos_weight=self.a(z), reduction="none")

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        # 1 − σ(z) = σ(−z), without cancellation
        return self.b(z) * ((1 - y) * z.sigmoid() - self.a(z) * y * (-z).sigmoid())

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return (self.b(z) * (self.a(z) * y + 1 - y) * z.sigmoid() * (-z).sigmoid()).sqrt()

    def a(self, z: Tensor) -> Tensor:
        return z.new_ones(()) if self.pos_weight is None else self.pos_weight.to(z)

    def b(self, z: Tensor) -> Tensor:
        return z.new_ones(()) if self.output_weight is None else self.output_weight.to(z)

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        of_outputs(self.a(z), z, "pos_weight")
        of_outputs(self.b(z), z, "output_weight")
        advice = "BinaryCrossEntropy needs targets in [0, 1]"
        return [*super().faults(z, y), Fault((y < 0) | (y > 1), y, "targets", advice)]


def of_outputs(t: Tensor, z: Tensor, name: str) -> None:
    """t must broadcast to the outputs of one sample: a weight of samples comes with the step."""
    shape = (1, *z.shape[1:])
    if not broadcasts(t.shape, shape):
        raise ValueError(f"{name} of shape {tuple(t.shape)} does not broadcast to the outputs of one sample, {shape}")


def broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """a broadcasts to b without widening it."""
    return len(a) <= len(b) and all(i in (1, j) for i, j in zip(reversed(a), reversed(b), strict=False))


@dataclass(frozen=True, kw_only=True, eq=False)
class Poisson(Elementwise):
    """Counts y with log-rate z:  ℓ = e^z − y z,  ℓ′ = e^z − y,  s = e^{z/2}:  `nn.PoissonNLLLoss`.

    >>> opt = mq.LM(model, mq.losses.Poisson())  # or "poisson"
    >>> step = opt.step(x, y.abs().round())
    """

    likelihood: ClassVar[str | None] = "poisson"

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
