"""Losses, all on one small network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from support.cases.problem import (
    CASES,
    Problem,
    classes,
    counts,
    mlp,
    probabilities,
    sample_weights,
)  # fmt: skip


def network(loss: Any, y: Any, weighted: bool = False, out: int = 3, N: int = 5) -> Problem:
    return Problem(mlp(2, 4, out), loss, torch.randn(N, 2), y, sample_weights(N) if weighted else None)


def masked_weights(N: int) -> Tensor:
    """One sample counts nothing at all."""
    return torch.cat([torch.zeros(1), sample_weights(N - 1)])


def ignoring(index: int, c: int, N: int) -> Tensor:
    y = classes(c, N)
    y[1] = index
    return y


def class_weights() -> Tensor:
    return torch.tensor([0.5, 1.0, 3.0])


def both_sides(N: int, *out: int) -> Tensor:
    """Targets within and far outside δ of outputs of order 1."""
    y = torch.randn(N, *out)
    y[::2] *= 10
    return y


CE, BCE = nn.CrossEntropyLoss, nn.BCEWithLogitsLoss
LOSSES: dict[str, Callable[[], Problem]] = {
    "mse_weighted": lambda: network(nn.MSELoss(), torch.randn(5, 3), weighted=True),
    "mse_sum": lambda: network(nn.MSELoss(reduction="sum"), torch.randn(5, 3)),
    "mse_sum_weighted": lambda: network(nn.MSELoss(reduction="sum"), torch.randn(5, 3), weighted=True),
    "mse_masked": lambda: network("mse", torch.randn(5, 3))._replace(weight=masked_weights(5)),
    "ce": lambda: network("cross_entropy", classes(3, 5)),
    "ce_weighted": lambda: network("cross_entropy", classes(3, 5), weighted=True),
    "ce_masked": lambda: network("cross_entropy", classes(3, 5))._replace(weight=masked_weights(5)),
    "ce_sum": lambda: network(CE(reduction="sum"), classes(3, 5), weighted=True),
    "ce_class_weights": lambda: network(CE(weight=class_weights()), classes(3, 5)),
    "ce_class_weights_weighted": lambda: network(CE(weight=class_weights()), classes(3, 5), weighted=True),
    "ce_smooth": lambda: network(CE(label_smoothing=0.2), classes(3, 5)),
    "ce_smooth_class_weights": lambda: network(
        CE(weight=class_weights(), label_smoothing=0.2), classes(3, 5), weighted=True
    ),
    "ce_ignore": lambda: network(CE(), ignoring(-100, 3, 5)),
    "ce_ignore_weighted": lambda: network(CE(ignore_index=2), ignoring(2, 3, 5), weighted=True),
    "ce_ignore_everything_else": lambda: network(
        CE(weight=class_weights(), label_smoothing=0.1, ignore_index=0), ignoring(0, 3, 5), weighted=True
    ),
    "ce_probabilities": lambda: network(CE(), probabilities(3, 5)),
    "ce_probabilities_class_weights": lambda: network(CE(weight=class_weights()), probabilities(3, 5), weighted=True),
    "ce_probabilities_smooth": lambda: network(CE(label_smoothing=0.2), probabilities(3, 5)),
    "ce_two_classes": lambda: network("cross_entropy", classes(2, 5), out=2),
    "bce": lambda: network("bce", counts(2, 5, 1), out=1),
    "bce_soft_weighted": lambda: network(BCE(), torch.rand(5, 3), weighted=True),
    "bce_pos_weight": lambda: network(BCE(pos_weight=class_weights()), counts(2, 5, 3)),
    "bce_pos_weight_weighted": lambda: network(BCE(pos_weight=class_weights()), torch.rand(5, 3), weighted=True),
    "huber": lambda: network("huber", both_sides(5, 3)),
    "huber_delta_weighted": lambda: network(nn.HuberLoss(delta=0.5), both_sides(5, 3), weighted=True),
    "huber_inside": lambda: network(nn.HuberLoss(delta=50.0), torch.randn(5, 3)),
    "smooth_l1": lambda: network(nn.SmoothL1Loss(), both_sides(5, 2), out=2),
    "smooth_l1_beta_weighted": lambda: network(nn.SmoothL1Loss(beta=0.4), both_sides(5, 2), weighted=True, out=2),
    "poisson": lambda: network("poisson", counts(5, 5, 3)),
    "poisson_weighted": lambda: network(nn.PoissonNLLLoss(), counts(5, 5, 3), weighted=True),
    "residual": lambda: network("residual", None),
    "residual_weighted": lambda: network("residual", None, weighted=True),
}
CASES.update(LOSSES)
