"""How much each configuration counts, and how far predictions are off, from samples that were left out."""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor

# Residuals that the spread of predictions is found from: evenly spaced ones of more.
MOST = 3000


def stacked(predictions: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """w ≥ 0, Σw = 1, with the least Σ(y − Σwₖpₖ)²: predictions (C, N, c), y (N, c), weight (N,) → (C,)

    Exact: the best weights of every set of configurations, if they are all positive, and of these the best.
    """
    E = (weight.sqrt()[:, None] * (predictions - y)).flatten(1)  # (C, N·c)
    Q = E @ E.T / weight.sum()  # with Σw = 1 the error is wᵀQw
    C = len(Q)
    best, least = torch.eye(C, dtype=Q.dtype)[int(Q.diagonal().argmin())], float(Q.diagonal().min())
    for size in range(2, C + 1):
        for some in combinations(range(C), size):
            chosen = torch.tensor(some)
            part = Q[chosen][:, chosen]
            part = part + 1e-10 * part.diagonal().mean() * torch.eye(size, dtype=Q.dtype)
            w = torch.linalg.solve(part, torch.ones(size, dtype=Q.dtype))
            w = w / w.sum()
            error = float(w @ Q[chosen][:, chosen] @ w)
            if bool((w >= 0).all()) and error < least:
                best, least = torch.zeros(C, dtype=Q.dtype).index_copy_(0, chosen, w), error
    return best


def mixed(found: Tensor, weight: Tensor, rounds: int = 200) -> Tensor:
    """w ≥ 0, Σw = 1, with the largest Σ log Σwₖpₖ, by expectation and maximisation: p of the true class (C, N)"""
    w = torch.full((len(found),), 1 / len(found), dtype=found.dtype)
    p, share = found.clamp(min=1e-300), weight / weight.sum()
    for _ in range(rounds):
        part = w[:, None] * p
        w = ((part / part.sum(0)) * share).sum(1)
    return w


def calibrated(squares: Tensor, variance: Tensor, weight: Tensor) -> tuple[float, float]:
    """s² and c with which residuals are most likely of the variance s² + c·v: squares, v and weight (N,)

    On a grid of both, in units of the mean square and of the mean of v. Few residuals say less than they seem to, and
    members have stopped by them: the variance is larger by (N + 2)/(N − 4).
    """
    every = -(-len(squares) // MOST)
    squares, variance, weight = squares[::every], variance[::every], weight[::every]
    w = weight / weight.sum()
    total = float((w * squares).sum())
    if total <= 0:
        return 0.0, 0.0
    mean = float((w * variance).sum())
    if mean <= 0:
        return total, 0.0
    shares = torch.cat((torch.zeros(1), torch.logspace(-3, 0.5, 36, dtype=torch.float64))).double()
    floors = torch.logspace(-4, 0, 41, dtype=torch.float64)
    v = floors[:, None, None] + shares[None, :, None] * (variance / mean)  # (s²/total, c·mean/total, N)
    cost = (w * (v.log() + squares / total / v)).sum(-1)
    at = int(cost.argmin())
    s2, c = float(floors[at // len(shares)]), float(shares[at % len(shares)])
    wider = (len(squares) + 2) / max(len(squares) - 4, 1)
    return wider * s2 * total, wider * c * total / mean
