"""Small networks of all kinds of layers, for computations in bfloat16 and float16."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Reader(nn.Module):
    """Embedding, attention, LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.table(x)).mean(1))


class Bare(nn.Module):
    """Parameters that only the graph shows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(8, 16) / 3), nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x @ self.weight * self.scale).tanh())


class Inside(nn.Module):
    """A model that enters autocast itself, and returns what comes out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.model(x)


class Coarse(NamedTuple):
    make: Callable[[], nn.Module]
    loss: str
    inputs: Callable[[], Tensor]

    def build(self) -> tuple[nn.Module, Tensor, Tensor]:
        torch.manual_seed(0)
        model, x = self.make(), self.inputs()
        y = torch.sin(x.sum(1, keepdim=True)) if self.loss == "mse" else torch.randint(3, (len(x),))
        return model, x, y


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 1))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(24, 3),
    )  # fmt: skip


COARSE = {
    "mlp": Coarse(mlp, "mse", lambda: torch.randn(64, 8)),
    "bare": Coarse(Bare, "mse", lambda: torch.randn(64, 8)),
    "cnn": Coarse(cnn, "cross_entropy", lambda: torch.randn(64, 1, 10, 10)),
    "attention": Coarse(Reader, "cross_entropy", lambda: torch.randint(11, (64, 7))),
}
