"""What random networks have found more than once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import marquardt as mq

PLAIN: dict[str, Any] = {"schedule": mq.Constant(1.0), "momentum": None, "line_search": None, "average": None}


class Fn(nn.Module):
    """A function of the input and of modules."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parts)


SWAPPED = Fn(lambda x: x.transpose(0, 1))


class Attention(nn.Module):
    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=batch_first), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def routed(width: int) -> nn.Module:
    """All samples go to the second of two experts."""

    def f(x: Tensor, f: nn.Module, g: nn.Module) -> Tensor:
        first = x[:, 0] > 100
        out = x.new_zeros(len(x), width)
        out[first], out[~first] = f(x[first]), g(x[~first])
        return out.tanh()

    return nn.Sequential(Fn(f, nn.Linear(3, width), nn.Linear(3, width)), nn.Linear(width, 2))
