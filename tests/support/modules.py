"""Modules with buffers, random numbers and derivatives of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import marquardt as mq
from support.cases.problem import Fn


class Counting(nn.Module):
    """Passes on its input, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x


def noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 5), nn.RReLU(), Counting(), nn.Linear(5, 4), nn.Dropout(0.3), nn.Linear(4, 3))


class Scaling(nn.Module):
    """A parameter of its own, which no rule of a layer covers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.exp()


class Slope(nn.Module):
    """∂u/∂x and u of a network u(x). Unlike a careful module, it does not switch gradients on by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), Counting(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        u = self.u(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return torch.cat([slope, u], 1)  # (N, 3)


class Messages(nn.Module):
    """Nodes of one graph, each of which hears four others: (N, 3) → (N, outputs)"""

    def __init__(self, N: int, outputs: int = 2, width: int = 4) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, outputs)
        self.register_buffer("ends", torch.randint(0, N, (2, 4 * N), generator=torch.Generator().manual_seed(0)))

    def heard(self, h: Tensor) -> Tensor:
        return h.index_add(0, self.ends[0], h[self.ends[1]] / 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.heard(self.first(x)).tanh()
        return self.head(self.heard(self.second(h)).tanh())


PLAIN: dict[str, Any] = {"schedule": mq.Constant(1.0), "momentum": None, "line_search": None, "average": None}


SWAPPED = Fn(lambda x: x.transpose(0, 1))


class Hiding(torch.autograd.Function):
    """A module whose parameters get their gradients by .backward() within."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x).detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.module(x).backward(g)
        return x.grad, None


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
