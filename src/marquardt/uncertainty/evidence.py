"""The prior precision α, the noise 1/β and the effective number of parameters γ, from the evidence p(y|α, β).

The loss that is minimised is proportional to −log p(θ|y): with ℓ the loss of one target, N̂ the normaliser of its mean,
f = factor·Σℓ/N̂ + ½Σₖwₖ‖θₖ‖² and −log p(y|θ) = cΣℓ + …,

    −log p(y|θ)p(θ) = cΣℓ + ½Σₖαₖ‖θₖ‖² + …        αₖ = c·wₖ·N̂/factor

so that α = w·N for a mean over N samples whose ℓ is −log p (c = 1), and α = w·β·N̂/2 for the mean of N̂ squared
residuals, −log p = ½βr² (c = ½β). The evidence is at its highest if (MacKay, 1992)

    γₖ = nₖ − αₖ tr(H⁻¹)ₖₖ,   αₖ = γₖ/‖θₖ‖²,   β = (N̂ − Σₖγₖ)/Σr²        H = cΣ∂²ℓ + diag α
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from ..losses import Loss

# α in units of the mean curvature of the data, at least and at most: beyond it nothing changes but rounding.
LEAST, MOST = 1e-10, 1e8

# The least share of the targets that is left for the noise, however many parameters fit them.
LEFT = 0.01


@dataclass(frozen=True)
class Evidence:
    """Weight decay by evidence, for `mq.fit(weight_decay=mq.Evidence())`: α and β from βG + diag α without λD, every
    few steps (Bayesian regularisation, MATLAB's trainbr). Weight decay at most doubles from one estimate to the next,
    and without a validation set the weights with the highest evidence are the best ones.

    `groups`: "layers" has an α for the weight and the bias of each layer, "parameters" one for each tensor, None one
    for all (MATLAB's); or lists of patterns for names, one list for each α. `start` is the weight decay to begin with;
    if there are several, as many descents from the same weights follow each other: a large one may keep a network from
    learning at all, and from a small one it may learn the noise.

    Args:
        every: steps from one estimate to the next.
        groups: which parameters share an α.
        start: weight decay to begin with, one or several.

    >>> result = mq.fit(model, (x, y), "mse", weight_decay=mq.Evidence(), steps=20)
    >>> result.evidence.gamma < 33
    True
    """

    every: int = 5
    groups: str | Sequence[Sequence[str]] | None = "layers"
    start: float | Sequence[float] = (1e-3, 1e-5)

    @property
    def starts(self) -> Sequence[float]:
        return self.start if isinstance(self.start, Sequence) else (self.start,)

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"every={self.every!r}: steps from one estimate to the next, an integer of at least 1")
        if not self.starts or any(isinstance(w, bool) or not 0 < w < float("inf") for w in self.starts):
            raise ValueError(
                f"start={self.start!r}: the weight decay of the first steps, one or several numbers above 0"
            )
        if isinstance(self.groups, str) and self.groups not in ("layers", "parameters"):
            raise ValueError(f'groups={self.groups!r}: None, "layers", "parameters", or lists of patterns for names')


def unit(loss: Loss, normaliser: float) -> float:
    """f/Σℓ in the units in which weight decay is given: factor/N̂ for a mean"""
    return loss.report(loss.scale(normaliser), normaliser)


def grouped_names(names: Sequence[str], groups: str | Sequence[Sequence[str]] | None) -> list[list[int]]:
    """The parameters, by number, that share an α"""
    if groups is None:
        return [list(range(len(names)))]
    if groups == "parameters":
        return [[i] for i in range(len(names))]
    if groups == "layers":
        owners = [name.rpartition(".")[0] for name in names]
        return [[i for i, owner in enumerate(owners) if owner == one] for one in dict.fromkeys(owners)]
    found = [[i for i, name in enumerate(names) if any(fnmatchcase(name, p) for p in some)] for some in groups]
    taken = [i for some in found for i in some]
    if sorted(taken) != list(range(len(names))) or not all(found):
        raise ValueError(
            f"groups={groups!r}: every one of the parameters {', '.join(names)} belongs to one group, and every group "
            "has one"
        )
    return found


def noise_precision(targets: Tensor, gamma: Tensor, squares: Tensor, rounding: float) -> Tensor:
    """β = (N̂ − γ)/Σr², by output. A hundredth of the targets is left at least, and Σr² is not below its rounding."""
    left = torch.maximum(targets - gamma, LEFT * targets)
    return left / squares.clamp(min=max(rounding, torch.finfo(torch.float64).tiny ** 0.5))


def alone(
    eigenvalues: Tensor, size: float, count: int, targets: float, squares: float | None, rounding: float
) -> tuple[float, float]:
    """α and β of the highest evidence, one of each, by the eigenvalues of Σ∂²ℓ/∂θ²·(c at β = 1). Without `squares`
    there is no noise, and β = 1."""
    e = eigenvalues[eigenvalues > 0]
    mean = max(float(e.sum()) / count, torch.finfo(e.dtype).tiny)
    alpha, beta = mean, 1.0
    for _ in range(1000):
        gamma = (beta * e / (beta * e + alpha)).sum()
        if squares is not None:
            total = torch.tensor(squares, dtype=torch.float64)
            beta = float(noise_precision(torch.tensor(targets, dtype=torch.float64), gamma.cpu(), total, rounding))
        low, high = LEAST * beta * mean, MOST * beta * mean
        after = min(max(float(gamma) / size, low), high) if size > 0 else high
        done, alpha = abs(after - alpha) <= 1e-8 * alpha, after
        if done:
            break
    return alpha, beta
