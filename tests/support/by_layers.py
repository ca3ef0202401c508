"""Networks with every kind of layer, for damping by layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq

f64 = torch.float64


class Tokens(nn.Module):
    """Embedding, attention, norms: (N, 4) tokens → (N, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=5, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.table(x)).mean(1))


class Twice(nn.Module):
    """A layer that is called twice, and one without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.inner(x).tanh()).tanh())


NETS = {
    "mlp": lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)),
    "one output": lambda: nn.Sequential(nn.Linear(3, 1), nn.Tanh(), nn.Linear(1, 3)),
    "norms": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3)),
    "conv": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 3, 2), nn.Flatten(),
        nn.Linear(3, 3),
    ),
    "grouped conv": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), nn.Conv2d(4, 4, 2, groups=4, bias=False), nn.Flatten(),
        nn.Linear(4, 3),
    ),
    "tokens": Tokens,
    "twice": Twice,
}  # fmt: skip
EVERY_NET = pytest.mark.parametrize("name", NETS)
FACTORED, BY_LAYER = mq.FactoredMaxDiagonal(), mq.LayerMeanEigenvalue(memory=float("inf"))


def net(name: str) -> nn.Module:
    torch.manual_seed(3)
    return NETS[name]().double()


def samples(name: str, seed: int, N: int = 7) -> tuple[Tensor, Tensor]:
    """Other seeds are other data of other sizes, larger and smaller."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (N,), generator=generator)
    if name == "tokens":
        return torch.randint(7, (N, 4), generator=generator), y
    shape = {"conv": (N, 2, 4, 4), "grouped conv": (N, 2, 3, 3)}.get(name, (N, 3))
    return [1.0, 3.0, 0.3, 1.5][seed % 4] * torch.randn(shape, dtype=f64, generator=generator), y


def represented(name: str, model: nn.Module, seed: int, chunk: int | None = None, representation=mq.Gram):
    return representation(chunk=chunk).represent(
        mq.linearize(model, "cross_entropy", *samples(name, seed), chunk=chunk)
    )


def disturb(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn_like(p)
