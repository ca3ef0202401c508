"""Weight decay as plain matrices, and what lies above λD + W by torch.kron."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.jacobian.linearization import Linearization
from marquardt.jacobian.objective import Objective
from marquardt.losses import resolve
from marquardt.metric import Layered, Metric
from marquardt.model.batch import Batch
from marquardt.protocol import weights as weights_of
from marquardt.weights import Weights

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


# By name: the weight decay of a parameter, a tensor that broadcasts to its shape; of some elements it is 0.
ELEMENTS: dict[str, Callable[[Tensor], Any]] = {
    "by column": lambda p: torch.linspace(0, 0.5, p.shape[-1])[None] if p.ndim > 1 else 0.1,
    "by row": lambda p: torch.linspace(0.5, 0, len(p)).view(-1, *[1] * (p.ndim - 1)),
    "by element": lambda p: torch.rand(p.shape).sub(0.3).clamp(min=0),
    "everywhere": lambda p: torch.rand(p.shape).add(0.1) if p.ndim > 1 else 0,
}


def by_parameter(model: nn.Module, name: str) -> list[Any]:
    """A number or a tensor for each"""
    if name in ELEMENTS:
        return [ELEMENTS[name](p.detach()) for p in model.parameters()]
    return [0.3 if DECAYS[name][1](key) else 0.0 for key, _ in model.named_parameters()]


def weights(model: nn.Module, by_parameter: Sequence[Any]) -> Tensor:
    """diag W: (n,)"""
    pairs = zip(model.parameters(), by_parameter, strict=True)
    return torch.cat([torch.as_tensor(w, dtype=p.dtype).expand(p.shape).flatten() for p, w in pairs])


def grouped(params: Sequence[Tensor], by_parameter: Sequence[Any]) -> list[dict[str, Any]]:
    """A group for every parameter"""
    return [{"params": [p], "weight_decay": w} for p, w in zip(params, by_parameter, strict=True)]


def made(params: Sequence[Tensor], by_parameter: Sequence[Any]) -> Weights:
    return weights_of(grouped(params, by_parameter), [False] * len(params))


def linearized(model: nn.Module, x: Tensor, y: Tensor, by_parameter: Sequence[Any], needs: Any) -> Linearization:
    params = list(model.parameters())
    objective = Objective(model, resolve("mse"), params, made(params, by_parameter))
    return Linearization(objective, [Batch(x, y, None)], mq.Exact(), needs)


def dense(D: Metric, sizes: Sequence[int]) -> Tensor:
    """(n, n)"""
    return torch.stack([D.times(unit, sizes) for unit in torch.eye(sum(sizes), dtype=D.scale.dtype)])


def above(D: Layered, lam: float, W: Tensor, sizes: Sequence[int]) -> Tensor:
    """(√λA + π√w·E) ⊗ (√λB + √w/π·I) in every layer of D = A ⊗ B, w the largest of W there and E the share of w that
    the largest of each input has: from D itself, whose partial traces are its sides. (n, n)"""
    whole, found = dense(D, sizes), torch.zeros(sum(sizes), sum(sizes), dtype=D.scale.dtype)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    for layer in D.layers:
        G, O, I = layer.shape
        spans = [torch.arange(starts[i], starts[i] + sizes[i]).view(G, O, -1) for i in layer.members]
        most = W[torch.cat(spans, 2)].max()
        for index in torch.cat(spans, 2):  # (O, I)
            where = index.flatten()
            block = whole[where[:, None], where]
            if layer.right is None:
                raised = lam * block + W[where].diag()
            else:
                raised = _raised(block.view(O, I, O, I), lam, W[index].amax(0), most)
            found[where[:, None], where] = raised
    return found


def _raised(block: Tensor, lam: float, columns: Tensor, w: Tensor) -> Tensor:
    O, I = block.shape[:2]
    t = block.reshape(O * I, O * I).trace()
    B, A = torch.einsum("oipi->op", block) / t.sqrt(), torch.einsum("oioj->ij", block) / t.sqrt()
    E = (columns / w if w > 0 else columns).diag()
    pi = ((A.trace() / I) / (B.trace() / O)).sqrt()
    return torch.kron(lam**0.5 * B + w.sqrt() / pi * torch.eye(O), lam**0.5 * A + pi * w.sqrt() * E)
