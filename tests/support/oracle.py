"""KFAC by somebody else: the Kronecker product of curvlinops, for tests of our own. Nothing here imports marquardt.

Of a layer with weight W (O, I) and bias b, a (N, P, I) is what the weight multiplies (for a convolution its patches),
δ (R, N, P, O) are the gradients of the rows SᵀJ at its output, with SSᵀ = ∂²Σℓ/∂z² and f = scale · Σℓ:

    A = Σₙₚ aaᵀ / NP            B = scale · Σᵣₙₚ δδᵀ

The block of [W b], flattened by rows, is B ⊗ A, where a ends in a 1.

curvlinops sends all loss terms of a sample (pixels, tokens) back in one go, so that their gradients mix, in a way
that depends on which root S was taken. Here it sees one term at a time: then R counts every row of every term, as the
formulas say. It is right for layers that are called once and share nothing, for convolutions without groups that are
padded with zeros, and for losses without weights; of all others it computes something else without a word.
"""

from __future__ import annotations

from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from support.reference import NAMED, trainable


class Term(nn.Module):
    """The model seen through term k of its loss: the C logits at position k, or element k alone."""

    def __init__(self, model: nn.Module, loss: nn.Module, k: int) -> None:
        super().__init__()
        self.model, self.k = model, k
        self.logits = isinstance(loss, nn.CrossEntropyLoss)

    def forward(self, x: Tensor) -> Tensor:
        z = self.model(x)
        return z.reshape(*z.shape[:2], -1)[:, :, self.k] if self.logits else z.reshape(len(z), -1)[:, self.k, None]

    def targets(self, y: Tensor) -> Tensor:
        y = y.reshape(len(y), -1)
        return y[:, self.k] if self.logits else y[:, self.k, None]  # (N,) or (N, 1)


def kfac_dense(
    model: nn.Module, loss: Any, x: Tensor, y: Tensor, fisher: Literal["type-2", "empirical"] = "type-2"
) -> Tensor:
    """The whole approximation (n, n) in the order of the parameters, as curvlinops multiplies with it."""
    from curvlinops import KFACLinearOperator  # the test decides what happens without it

    loss = NAMED[loss] if isinstance(loss, str) else loss
    params = list(trainable(model).values())
    I, total, terms = torch.eye(sum(p.numel() for p in params), dtype=x.dtype), 0.0, prod(y.shape[1:])
    for term in (Term(model, loss, k) for k in range(terms)):
        operator = KFACLinearOperator(
            term, loss, params, [(x, term.targets(y))], fisher_type=fisher, kfac_approx="expand",
            separate_weight_and_bias=False, check_deterministic=False,
        )  # fmt: skip
        operator.compute_kronecker_factors()
        total = total + operator @ I  # A is that of every term: the sum is the sum of the B
    return total / terms if loss.reduction == "mean" else total
