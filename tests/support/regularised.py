"""Weight decay as plain matrices, and what lies above λD + W by torch.kron."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.metric import Layered, Metric

# By name: what is given, and whether a parameter of that name decays.
DECAYS = {
    "all": (0.3, lambda name: True),
    "no bias": (mq.WeightDecay(0.3, exclude="bias"), lambda name: not name.endswith("bias")),
    "only biases": (
        mq.WeightDecay(0.3, exclude=lambda name, p: not name.endswith("bias")),
        lambda name: name.endswith("bias"),
    ),
    "not the first": (mq.WeightDecay(0.3, exclude=["0.*"]), lambda name: not name.startswith("0.")),
}


def by_parameter(model: nn.Module, w: float, decays) -> list[float]:
    return [w if decays(name) else 0.0 for name, _ in model.named_parameters()]


def weights(model: nn.Module, by_parameter: Sequence[float]) -> Tensor:
    """diag W: (n,)"""
    pairs = zip(model.parameters(), by_parameter, strict=True)
    return torch.cat([p.new_full((p.numel(),), w, requires_grad=False) for p, w in pairs])


def dense(D: Metric, sizes: Sequence[int]) -> Tensor:
    """(n, n)"""
    return torch.stack([D.times(unit, sizes) for unit in torch.eye(sum(sizes), dtype=D.scale.dtype)])


def above(D: Layered, lam: float, w: Sequence[float], sizes: Sequence[int]) -> Tensor:
    """(√λA + π√w·E) ⊗ (√λB + √w/π·I) in every layer of D = A ⊗ B, E the share of each input in w: from D itself, whose
    partial traces are its sides. (n, n)"""
    whole, found = dense(D, sizes), torch.zeros(sum(sizes), sum(sizes), dtype=D.scale.dtype)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    for layer in D.layers:
        G, O, I = layer.shape
        spans = [torch.arange(starts[i], starts[i] + sizes[i]).view(G, O, -1) for i in layer.members]
        shares = torch.cat([torch.full((s.shape[2],), w[i]) for s, i in zip(spans, layer.members, strict=True)])
        for index in torch.cat(spans, 2):  # (O, I)
            where = index.flatten()
            block = whole[where[:, None], where]
            if layer.right is None:
                raised = lam * block + shares[0] * torch.eye(O)
            else:
                raised = _raised(block.view(O, I, O, I), lam, shares)
            found[where[:, None], where] = raised
    return found


def _raised(block: Tensor, lam: float, shares: Tensor) -> Tensor:
    O, I = block.shape[:2]
    t = block.reshape(O * I, O * I).trace()
    B, A = torch.einsum("oipi->op", block) / t.sqrt(), torch.einsum("oioj->ij", block) / t.sqrt()
    w = shares.max()
    E = (shares / w if w > 0 else shares).diag()
    pi = ((A.trace() / I) / (B.trace() / O)).sqrt()
    return torch.kron(lam**0.5 * B + w.sqrt() / pi * torch.eye(O), lam**0.5 * A + pi * w.sqrt() * E)
