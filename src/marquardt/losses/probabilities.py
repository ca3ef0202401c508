"""Outputs that are probabilities, or their logarithms: the model ends with a sigmoid, a softmax or a log-softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..tolerances import FORMULA
from .base import Elementwise, Fault, Target, check_weights, of_outputs, weighted
from .cross_entropy import CrossEntropy


@dataclass(frozen=True, kw_only=True, eq=False)
class NegativeLogLikelihood(CrossEntropy):
    """Cross-entropy of outputs that are log-probabilities z = log p already:  ℓ = −Σₖ q̃ₖ zₖ:  `nn.NLLLoss`.

    ℓ is linear in z, and the curvature is in the log-softmax of the model. The softmax of z is p, so that the S of
    cross-entropy, sent back through the log-softmax, is that of the logits.

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

    With `log_target` the targets are log q. The mean is that over N, or without `batchmean` that over all outputs.

    Args:
        log_target: whether the targets are log q.
        batchmean: whether the mean is that over the samples, and not over all outputs.

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
        """Σ w Q log Q with Q = Σ q, 1 for probabilities: where p = q/Q."""
        Q = self.q(y).sum(1)
        return weighted(torch.xlogy(Q, Q), weight).sum()

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        if not isinstance(y, Tensor) or not y.is_floating_point():
            got = y.dtype if isinstance(y, Tensor) else type(y).__name__
            raise TypeError(f"KLDivergence needs a tensor of probabilities as targets, like the outputs, got {got}")
        return super().faults(z, self.q(y))


@dataclass(frozen=True, kw_only=True, eq=False)
class BinaryProbabilities(Elementwise):
    """Probabilities z, v = z(1 − z):  ℓ = −y log z − (1 − y) log(1 − z),  ℓ′ = (z − y)/v,  s = v^−½:  `nn.BCELoss`.

    s² is the mean of ℓ″ over y of this probability: behind a sigmoid it is the curvature of the logits. As in torch,
    logarithms are at least −100, and v is at least 1e-12.

    Args:
        output_weight: of every output; broadcasts against those of a sample.

    >>> opt = mq.LM(nn.Sequential(model, nn.Sigmoid()), mq.losses.BinaryProbabilities())  # or "binary_probabilities"
    >>> step = opt.step(x, (y > 0).float())
    """

    fisher: ClassVar[bool] = True
    likelihood: ClassVar[str | None] = "bernoulli probability"
    output_weight: Tensor | None = None  # of every output; broadcasts against one sample's

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output_weight is not None:
            check_weights(self.output_weight, "output_weight")

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
        of_outputs(self.b(z), z, "output_weight")
        outside = "BinaryProbabilities needs outputs in [0, 1]: end the model with a sigmoid, or use bce of logits"
        return [
            *super().faults(z, y),
            Fault((y < 0) | (y > 1), y, "targets", "BinaryProbabilities needs targets in [0, 1]"),
            Fault((z < 0) | (z > 1), z, "outputs", outside),
        ]
