"""Networks of which curvlinops knows the Kronecker factors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from support.cases import mlp


class Tokens(nn.Module):
    """Logits for every token, classes second as torch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x).tanh()).transpose(1, 2)


class Pooled(nn.Module):
    """A sequence inside, one output per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x).tanh().mean(1))


def conv(bias: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=bias), nn.Tanh(), nn.Conv2d(3, 2, 2, bias=bias), nn.Flatten(),
        nn.Linear(8, 3, bias=bias),
    )  # fmt: skip


# name → model, loss, inputs, targets
NETWORKS = {
    "linear mse": lambda: (mlp(3, 4, 2), "mse", torch.randn(5, 3), torch.randn(5, 2)),
    "linear ce": lambda: (mlp(3, 4, 3), "cross_entropy", torch.randn(5, 3), torch.randint(3, (5,))),
    "linear sum": lambda: (mlp(3, 4, 3), nn.MSELoss(reduction="sum"), torch.randn(5, 3), torch.randn(5, 3)),
    "linear bce": lambda: (mlp(3, 4, 2), "bce", torch.randn(5, 3), torch.rand(5, 2).round()),
    "linear no bias": lambda: (
        nn.Sequential(nn.Linear(3, 4, bias=False), nn.ELU(), nn.Linear(4, 3, bias=False)),
        "cross_entropy",
        torch.randn(5, 3),
        torch.randint(3, (5,)),
    ),
    "conv mse": lambda: (conv(), "mse", torch.randn(4, 2, 5, 5), torch.randn(4, 3)),
    "conv ce": lambda: (conv(), "cross_entropy", torch.randn(4, 2, 5, 5), torch.randint(3, (4,))),
    "conv no bias": lambda: (conv(False), "cross_entropy", torch.randn(4, 2, 5, 5), torch.randint(3, (4,))),
    "tokens ce": lambda: (Tokens(), "cross_entropy", torch.randn(4, 5, 3), torch.randint(3, (4, 5))),
    "pooled mse": lambda: (Pooled(), "mse", torch.randn(4, 5, 3), torch.randn(4, 3)),
    "pooled ce": lambda: (Pooled(), "cross_entropy", torch.randn(4, 5, 3), torch.randint(3, (4,))),
}  # fmt: skip
EVERY_NETWORK = pytest.mark.parametrize("name", NETWORKS)


def build(name: str):
    model, loss, x, y = NETWORKS[name]()
    return model.double(), loss, x.double(), y.double() if y.is_floating_point() else y


def represent(model, loss, x, y, weight=None, rows=mq.Exact(), chunk=None, params=None, **options):
    lin = mq.linearize(model, loss, x, y, weight, rows=rows, chunk=chunk, params=params)
    return mq.Kronecker(**options).represent(lin)


def damped(K, lam: float, D: mq.Diagonal | None = None) -> Tensor:  # λD with D = scale·u ⊗ v, None: u = v = 1
    """(B + √λ/π·diag u) ⊗ (A + π√λ·diag v) for networks of plain layers with a bias, by torch.kron: (n, n)"""
    H = torch.zeros(K.lin.n, K.lin.n, dtype=torch.float64)
    lam = lam if D is None else lam * D.scale.item()
    for layer in K.layers:
        B, A = layer.left[0], layer.right[0]
        weight, bias = layer.members
        u, v = torch.ones(len(B)).double(), torch.ones(len(A)).double()
        if D is not None and D.parts is not None:
            u, v = D.parts[weight].u.flatten(), torch.cat([D.parts[weight].v.flatten(), v[:1]])
        pi = ((A.diagonal() / v).mean() / (B.diagonal() / u).mean()).sqrt()
        both = torch.kron(B + lam**0.5 / pi * u.diag(), A + lam**0.5 * pi * v.diag())
        where = torch.arange(K.lin.n).split(K.lin.parameters.sizes)  # of [W b], row by row
        order = torch.cat([where[weight].view(len(B), -1), where[bias].view(-1, 1)], 1).flatten()
        H[order[:, None], order] = both
    return H


def fresh_batches(steps: int, N: int = 12):
    x = torch.randn(steps, N, 3).double()
    return list(zip(x, (x.sum(2) > 0).long() + (x[:, :, 0] > 1).long(), strict=True))
