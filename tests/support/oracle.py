"""KFAC by somebody else: the Kronecker factors of curvlinops, for tests of our own. Nothing here imports marquardt.

Of a layer with weight W (O, I) and bias b, a (N, P, I) is what the weight multiplies (for a convolution its patches),
δ (R, N, P, O) are the gradients of the rows SᵀJ at its output, with SSᵀ = ∂²Σℓ/∂z² and f = scale · Σℓ:

    A = Σₙₚ aaᵀ / NP            B = scale · Σᵣₙₚ δδᵀ

The block of [W b], flattened by rows, is B ⊗ A, where a ends in a 1.

curvlinops sends all loss terms of a sample (pixels, tokens) back in one go, so that their gradients mix, in a way
that depends on which root S was taken. Here it is shown one term at a time: then R counts every row of every term, as
the formulas say. With one term per sample it is curvlinops as it is.
"""

from __future__ import annotations

from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from support.reference import NAMED, trainable

Fisher = Literal["type-2", "empirical"]
Factors = dict[tuple[str, ...], tuple[Tensor, Tensor]]


def kfac_matrix(model: nn.Module, loss: Any, x: Tensor, y: Tensor, fisher: Fisher = "type-2") -> Factors:
    """Names of the parameters of a block → (A, B)."""
    operators, share = per_term(model, loss, x, y, fisher)
    blocks: Factors = {}
    states = [operator.state_dict() for operator in operators]
    for layer, B in states[0]["gradient_covariances"].items():
        B = share * sum(state["gradient_covariances"][layer] for state in states)  # (O, O)
        A = states[0]["input_covariances"].get(layer)  # (I, I) or (I + 1, I + 1); None where the weight is frozen
        name = layer.removeprefix("model").removeprefix(".")  # its name in Term
        names = tuple(k for k in trainable(model) if k.rpartition(".")[0] == name)
        blocks[names] = (B.new_ones(1, 1) if names[0].endswith("bias") else A, B)
    order = list(trainable(model))
    return dict(sorted(blocks.items(), key=lambda block: order.index(block[0][0])))


def kfac_dense(model: nn.Module, loss: Any, x: Tensor, y: Tensor, fisher: Fisher = "type-2") -> Tensor:
    """The whole approximation (n, n) in the order of the parameters, as curvlinops multiplies with it."""
    operators, share = per_term(model, loss, x, y, fisher)
    I = torch.eye(sum(p.numel() for p in trainable(model).values()), dtype=x.dtype)
    return share * sum(operator @ I for operator in operators)  # A is that of every term: the sum is the sum of the B


# ---- one curvlinops operator for every loss term


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


def per_term(model: nn.Module, loss: Any, x: Tensor, y: Tensor, fisher: Fisher) -> tuple[list[Any], float]:
    """One operator for every loss term of a sample, factors computed, and the share of each in the sum."""
    from curvlinops import KFACLinearOperator  # the test decides what happens without it

    loss = NAMED[loss] if isinstance(loss, str) else loss
    refuse_what_curvlinops_gets_wrong(model, loss, x, y, fisher)
    operators = []
    for k in range(prod(y.shape[1:])):
        term = Term(model, loss, k)
        data, options = [(x, term.targets(y))], {"fisher_type": fisher, "kfac_approx": "expand"}
        operator = KFACLinearOperator(
            term, loss, list(trainable(model).values()), data, separate_weight_and_bias=False,
            check_deterministic=False, **options,
        )  # fmt: skip
        operator.compute_kronecker_factors()
        operators.append(operator)
    return operators, 1 / len(operators) if loss.reduction == "mean" else 1.0


def refuse_what_curvlinops_gets_wrong(model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor, fisher: Fisher) -> None:
    """It takes all of these without a word, and computes something else (other layers and losses it refuses itself)."""
    if isinstance(loss, nn.CrossEntropyLoss):
        if y.is_floating_point():
            raise ValueError("the oracle has no cross-entropy with probabilities as targets")
        if loss.weight is not None or (y == loss.ignore_index).any():
            raise ValueError("the oracle has no class weights and no ignored targets")
        if loss.label_smoothing and fisher == "empirical":
            raise ValueError("the oracle has one empirical row per loss term, not one per class")
    if isinstance(loss, nn.BCEWithLogitsLoss) and (loss.weight is not None or loss.pos_weight is not None):
        raise ValueError("the oracle has no weights in BCEWithLogitsLoss")
    calls = dict.fromkeys((m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))), 0)

    def count(module: nn.Module, *_: object) -> None:
        calls[module] += 1

    handles = [m.register_forward_hook(count) for m in calls]
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    everywhere = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    if any(n != 1 for n in calls.values()) or len(everywhere) != len(set(everywhere)):
        raise ValueError("the oracle needs every layer called once, and no shared parameters: it adds up uses wrongly")
    for m in calls:
        if isinstance(m, nn.Conv2d) and (m.padding_mode != "zeros" or m.groups > 1):
            raise ValueError("the oracle has no padding but zeros, and averages the inputs over groups of channels")
