"""What a loss says of the targets: −log p(y|z) = β·unit·ℓ + constant, and what follows from outputs that are uncertain.

Outputs come in the groups of the loss: means z (N, P, C) and covariances V (N, P, C, C).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..losses import Loss
from ..losses.base import weighted


class TargetMoments(NamedTuple):
    """Of a target, by output."""

    mean: Tensor  # (N, P)
    model: Tensor  # (N, P) the part of its variance that more data would remove
    noise: Tensor  # (N, P) and the part that stays


class Likelihood:
    """Of targets that the loss names in `Loss.likelihood`. Weights of samples are counts: a sample of weight 2 is there
    twice."""

    unit: ClassVar[float] = 1.0
    noisy: ClassVar[bool] = False  # has a noise σ² = 1/β that the model does not return
    classes: ClassVar[bool] = False

    def __init__(self, loss: Loss) -> None:
        self.loss: Any = loss  # bound to outputs, with options of its own

    def constant(self, y: Any, weight: Tensor | None) -> Tensor | float:
        """What −log p has beside ℓ, added up"""
        return 0.0

    def moments(self, z: Tensor, V: Tensor, noise: Tensor) -> TargetMoments:
        raise NotImplementedError

    def averaged(self, z: Tensor, V: Tensor, joint: bool) -> Tensor:
        """Outputs that have the probabilities of uncertain ones, which are a mean: (N, P, C)"""
        raise NotImplementedError

    def sharpened(self, z: Tensor, V: Tensor, s: float) -> tuple[Tensor, Tensor]:
        """Logits times s"""
        return s * z, s**2 * V

    def linked(self, z: Tensor) -> Tensor:
        """Probabilities of the classes (N, P, ·), or of 1 (N, P, 1), for certain outputs"""
        raise NotImplementedError

    def probabilities(self, z: Tensor, V: Tensor, joint: bool) -> Tensor:
        return self.linked(self.averaged(z, V, joint))

    def placed(self, t: Tensor, z: Tensor) -> Tensor:
        """(N, P) → in the shape of the targets"""
        return t.reshape(z.shape)

    def laid_out(self, p: Tensor, z: Tensor) -> Tensor:
        """Probabilities (N, P, C) → like the outputs"""
        found: Tensor = self.loss.ungroup(p, z)
        return found


class Normal(Likelihood):
    """ℓ = r²: −log p = ½βr² + ½ log(2π/β), β one number for all outputs, or one for each."""

    unit: ClassVar[float] = 0.5
    noisy: ClassVar[bool] = True

    def moments(self, z: Tensor, V: Tensor, noise: Tensor) -> TargetMoments:
        model = V[..., 0, 0]
        return TargetMoments(z[..., 0], model, noise.square().expand_as(model))


class NormalWithVariance(Likelihood):
    """ℓ = ½(log v + e²/v), v an output too: the noise is that of the model, at its mean value."""

    def constant(self, y: Any, weight: Tensor | None) -> Tensor | float:
        return 0.0 if self.loss.full else 0.5 * math.log(2 * math.pi) * weighted(torch.ones_like(y), weight).sum()

    def moments(self, z: Tensor, V: Tensor, noise: Tensor) -> TargetMoments:
        v = z[..., 1].clamp(min=self.loss.eps) if self.loss.variance else (z[..., 1] + 0.5 * V[..., 1, 1]).exp()
        return TargetMoments(z[..., 0], V[..., 0, 0], v)

    def placed(self, t: Tensor, z: Tensor) -> Tensor:
        return t.reshape(z.chunk(2, 1)[0].shape)


class LogMean(Likelihood):
    """The mean μ of a target is e^z, log-normal if z is normal; the variance of a target is a + bμ + cμ²."""

    def coefficients(self) -> tuple[float, float]:
        """b and c"""
        raise NotImplementedError

    def moments(self, z: Tensor, V: Tensor, noise: Tensor) -> TargetMoments:
        variance = V[..., 0, 0]
        mean = (z[..., 0] + 0.5 * variance).exp()
        b, c = self.coefficients()
        square = mean.square() * variance.exp()  # of μ, its mean
        return TargetMoments(mean, square - mean.square(), b * mean + c * square)


class PoissonCounts(LogMean):
    def constant(self, y: Any, weight: Tensor | None) -> Tensor | float:
        return weighted(torch.lgamma(y + 1), weight).sum()

    def coefficients(self) -> tuple[float, float]:
        return 1.0, 0.0


class NegativeBinomialCounts(LogMean):
    def constant(self, y: Any, weight: Tensor | None) -> Tensor | float:
        k = 1 / self.loss.dispersion
        found = torch.lgamma(y + 1) + math.lgamma(k) - torch.lgamma(y + k) - y * math.log(self.loss.dispersion)
        return weighted(found, weight).sum()

    def coefficients(self) -> tuple[float, float]:
        return 1.0, self.loss.dispersion


class GammaSizes(LogMean):
    def constant(self, y: Any, weight: Tensor | None) -> Tensor | float:
        a = self.loss.shape
        return weighted(math.lgamma(a) - a * math.log(a) - (a - 1) * y.log(), weight).sum()

    def coefficients(self) -> tuple[float, float]:
        return 0.0, 1 / self.loss.shape


def softened(z: Tensor, variance: Tensor) -> Tensor:
    """z/√(1 + πv/8), whose sigmoid is nearly the mean of that of a normal z (MacKay, 1992)"""
    return z / (1 + math.pi / 8 * variance).sqrt()


class Categorical(Likelihood):
    """Classes by logits, or by the logarithms of their probabilities.

    `joint`: pₖ ∝ 1/Σⱼ exp(−φₖⱼ), φₖⱼ the softened difference zₖ − zⱼ: that of two classes is the sigmoid of one, and a
    number that is added to all logits changes nothing. Otherwise pₖ ∝ exp φₖ, every logit softened by its own variance.
    """

    classes: ClassVar[bool] = True

    def averaged(self, z: Tensor, V: Tensor, joint: bool) -> Tensor:
        own = V.diagonal(dim1=-2, dim2=-1)  # (N, P, C)
        if not joint:
            return softened(z, own)
        difference = z[..., :, None] - z[..., None, :]  # (N, P, C, C)
        variance = (own[..., :, None] + own[..., None, :] - 2 * V).clamp(min=0)
        return -torch.logsumexp(-softened(difference, variance), -1)

    def linked(self, z: Tensor) -> Tensor:
        return z.softmax(-1)


class Bernoulli(Likelihood):
    """0 and 1, or −1 and 1, by one logit."""

    classes: ClassVar[bool] = True

    def averaged(self, z: Tensor, V: Tensor, joint: bool) -> Tensor:
        return softened(z, V[..., 0])

    def linked(self, z: Tensor) -> Tensor:
        return z.sigmoid()


class BernoulliProbability(Likelihood):
    """By the probability itself: its logit has the variance V/(p(1 − p))²."""

    classes: ClassVar[bool] = True

    def averaged(self, z: Tensor, V: Tensor, joint: bool) -> Tensor:
        return softened(z.logit(eps=1e-12), V[..., 0] / self._slope(z).square()).sigmoid()

    def sharpened(self, z: Tensor, V: Tensor, s: float) -> tuple[Tensor, Tensor]:
        p = (s * z.logit(eps=1e-12)).sigmoid()
        return p, V * (s * self._slope(p) / self._slope(z)).square()[..., None]

    def _slope(self, p: Tensor) -> Tensor:
        return (p * (1 - p)).clamp(min=1e-12)

    def linked(self, z: Tensor) -> Tensor:
        return z


class Ordered(Likelihood):
    """Classes in an order, P(y ≤ k) = σ(zₖ): differences of softened cumulative probabilities."""

    classes: ClassVar[bool] = True

    def averaged(self, z: Tensor, V: Tensor, joint: bool) -> Tensor:
        found: Tensor = softened(z, V.diagonal(dim1=-2, dim2=-1)).cummax(-1).values
        return found

    def linked(self, z: Tensor) -> Tensor:
        ends = torch.zeros_like(z[..., :1]), torch.ones_like(z[..., :1])
        return torch.cat((ends[0], z.sigmoid(), ends[1]), -1).diff(dim=-1)

    def laid_out(self, p: Tensor, z: Tensor) -> Tensor:
        return p[:, 0]


LIKELIHOODS: dict[str, type[Likelihood]] = {
    "normal": Normal,
    "normal with variance": NormalWithVariance,
    "categorical": Categorical,
    "bernoulli": Bernoulli,
    "bernoulli probability": BernoulliProbability,
    "ordered": Ordered,
    "poisson": PoissonCounts,
    "negative binomial": NegativeBinomialCounts,
    "gamma": GammaSizes,
}


def likelihood_of(loss: Loss) -> type[Likelihood]:
    """Raises if the loss is none."""
    if loss.likelihood is None:
        raise ValueError(
            f"{loss.display_name} is no likelihood of the targets, so that there is no posterior: train with 'mse' or "
            "'gaussian_nll' (numbers), 'cross_entropy' or 'bce' (classes), 'poisson', 'negative_binomial' or 'gamma'; "
            "a loss of your own that is −log p(y|z) names p in its class, such as likelihood = 'categorical'"
        )
    if loss.likelihood not in LIKELIHOODS:
        raise ValueError(
            f"{loss.display_name} says likelihood = {loss.likelihood!r}: one of {', '.join(map(repr, LIKELIHOODS))}"
        )
    return LIKELIHOODS[loss.likelihood]
