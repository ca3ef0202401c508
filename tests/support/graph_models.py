"""Models whose rows come from the graph: networks that differentiate themselves, parameters used outside of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import hessian, vmap
from torch.nn.utils import parametrizations

from support.cases.problem import Fn


class GraphCase(NamedTuple):
    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]  # of its inputs
    outputs: tuple[int, ...] = ()  # shape of its targets; (): it returns residuals

    def data(self, dtype: torch.dtype) -> tuple[Any, Tensor | None]:
        x = tuple(torch.randn(shape, dtype=dtype) for shape in self.shapes)
        return x, torch.randn(self.outputs, dtype=dtype) if self.outputs else None


def net(inputs: int = 2, outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, outputs))


def slopes(u: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(u.sum(), x, create_graph=True)[0]


def laplacian(u: Tensor, x: Tensor) -> Tensor:
    g = slopes(u, x)
    return sum(slopes(g[:, i], x)[:, i] for i in range(x.shape[1]))


class Parts(nn.Module):
    """Δu inside and u at the edge, in one order or the other."""

    def __init__(self, edge_first: bool = False) -> None:
        super().__init__()
        self.net, self.edge_first = net(), edge_first

    def forward(self, inner: Tensor, edge: Tensor) -> Tensor:
        with torch.enable_grad():
            x = inner.detach().requires_grad_(True)
            found = laplacian(self.net(x)[:, 0], x)
        both = [found - 1, 10 * self.net(edge)[:, 0]]
        return torch.cat(both[::-1] if self.edge_first else both)


def three_sets(inner: Tensor, start: Tensor, edge: Tensor, log_kappa: Tensor, B: Tensor, net: nn.Module) -> Tensor:
    """u_t = κ·u_xx with κ unknown, on Fourier features, with the start and the edge in tensors of their own."""

    def u(x: Tensor) -> Tensor:
        h = x @ B
        return net(torch.cat([h.sin(), h.cos()], 1))[:, 0]

    with torch.enable_grad():
        x = inner.detach().requires_grad_(True)
        g = slopes(u(x), x)
        residual = g[:, 0] - 2 * log_kappa.exp() * slopes(g[:, 1], x)[:, 1]
    return torch.cat([u(start) - start[:, 1], residual / len(inner) ** 0.5, u(edge)])


class Equations(nn.Module):
    """Three equations for three unknowns, beside each other or put together in one of several ways."""

    def __init__(self, join: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.net, self.join = net(2, 3), join

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            u, v, p = self.net(x).unbind(1)
            du, dv, dp = (slopes(f, x) for f in (u, v, p))
            rows = [u * du[:, 0] + dp[:, 0] - slopes(du[:, 1], x)[:, 1], du[:, 0] + dv[:, 1], v * dv[:, 0] + dp[:, 1]]
        found = torch.stack(rows, 1)
        return found if self.join is None else self.join(found)


def functional(inner: Tensor, edge: Tensor, net: nn.Module, scale: Tensor) -> Tensor:
    """The same by torch.func."""

    def at_point(x: Tensor) -> Tensor:
        return scale * hessian(lambda q: net(q)[0])(x).diagonal().sum()

    return torch.cat([vmap(at_point)(inner), net(edge)[:, 0]])


def convolved_slope(x: Tensor, net: nn.Module) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        return slopes(net(x), x).flatten(1)[:, 3:6]


class Attentive(nn.Module):
    """A class token, positions, a scale of the branch, Dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner, self.token = nn.Linear(3, 4), nn.Parameter(torch.randn(1, 1, 4))
        self.positions, self.scale = nn.Parameter(torch.randn(1, 4, 4)), nn.Parameter(torch.rand(4))
        self.attention = nn.MultiheadAttention(4, 2, dropout=dropout, batch_first=True)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), self.inner(x)], 1) + self.positions
        h = h + self.scale * self.drop(self.attention(h, h, h, need_weights=False)[0])
        return self.head(h[:, 0])


def on_grids(f: Tensor, grid: Tensor, branch: nn.Module, trunk: nn.Module, bias: Tensor) -> Tensor:
    """A DeepONet on a grid of its own for every sample,"""
    return torch.einsum("nk,nqk->nq", branch(f), trunk(grid)) + bias


def on_one_grid(f: Tensor, grid: Tensor, branch: nn.Module, trunk: nn.Module, bias: Tensor) -> Tensor:
    """or on one that all share."""
    return torch.einsum("nk,qk->nq", branch(f), trunk(grid[0])) + bias


def operator(on: Callable[..., Tensor]) -> nn.Module:
    return Fn(on, net(3, 4), net(2, 4), nn.Parameter(torch.zeros(())))


def ensemble(x: Tensor, W: Tensor, b: Tensor, V: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Batched products with weights that no layer holds."""
    h = torch.baddbmm(b, x.expand(2, -1, -1), W, beta=0.5, alpha=2).tanh().mean(0)  # (N, 4)
    y = (V @ torch.where(h > 0, h, mask).T).T / (1 + v**2)
    return torch.stack([y.tanh() @ v, (y - 3 * v).sum(1)], 1)


def recurring(cell: Callable[..., nn.Module], **options: Any) -> nn.Module:
    head = nn.Linear(8 if options.get("bidirectional") else 4, 2)
    return Fn(lambda x, cell, head: head(cell(x)[0].mean(1)), cell(3, 4, batch_first=True, **options), head)


def normed(
    one: Tensor, two: Tensor, inner: nn.Module, norm: nn.Module, table: nn.Module, act: nn.Module, head: nn.Module
) -> Tensor:
    """A layer norm and a table within calls on parts of the samples."""

    def part(x: Tensor) -> Tensor:
        return head(act(norm(inner(x)) + table((x[:, :1] > 0).long() + (x[:, 1:2] > 0)).sum(1)))

    return torch.cat([part(two), part(one)])


def upwards(x: Tensor, down: nn.Module, up: nn.Module, shared: Tensor) -> Tensor:
    """A transposed convolution among others, and one whose weight a plain one shares"""
    h = nn.functional.conv2d(up(down(x).tanh()).tanh(), shared, stride=2).tanh()
    return nn.functional.conv_transpose2d(h, shared).flatten(1)[:, :4]


def weight_normed() -> nn.Module:
    model = Parts()
    for i in (0, 2):
        parametrizations.weight_norm(model.net[i])
    return model


def numbers(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


INNER, EDGE = (7, 2), (4, 2)
GRAPH_CASES = {
    "parts": GraphCase(Parts, (INNER, EDGE)),
    "edge first": GraphCase(lambda: Parts(True), (INNER, EDGE)),
    "parts of one size": GraphCase(Parts, (EDGE, EDGE)),
    "three sets": GraphCase(
        lambda: Fn(three_sets, nn.Parameter(torch.tensor(-1.0)), numbers(2, 3), net(6)), (INNER, EDGE, (5, 2))
    ),
    "equations": GraphCase(Equations, (INNER,)),
    "equations joined": GraphCase(lambda: Equations(lambda t: torch.cat(list(t.unbind(1)))), (INNER,)),
    "equations in blocks": GraphCase(lambda: Equations(lambda t: t.T.flatten()), (INNER,)),
    "equations in turns": GraphCase(lambda: Equations(lambda t: t.flatten()), (INNER,)),
    "torch.func": GraphCase(lambda: Fn(functional, net(), nn.Parameter(torch.tensor(0.7))), (INNER, EDGE)),
    "convolved": GraphCase(
        lambda: Fn(
            convolved_slope, nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, stride=2), nn.Tanh(), nn.Conv2d(3, 1, 2))
        ),
        ((5, 2, 5, 5),),
    ),
    "upwards": GraphCase(
        lambda: Fn(
            upwards,
            nn.Conv2d(2, 4, 3, stride=2, padding=1),
            nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1),
            numbers(2, 3, 2, 2),
        ),
        ((5, 2, 4, 4),),
        (5, 4),
    ),
    "attentive": GraphCase(Attentive, ((5, 3, 3),), (5, 3)),
    "operator": GraphCase(lambda: operator(on_grids), ((5, 3), (5, 4, 2)), (5, 4)),
    "operator on one grid": GraphCase(lambda: operator(on_one_grid), ((5, 3), (5, 4, 2)), (5, 4)),
    "ensemble": GraphCase(
        lambda: Fn(ensemble, numbers(2, 3, 4), numbers(2, 1, 4), numbers(3, 4), numbers(3), numbers(4)),
        ((5, 3),),
        (5, 2),
    ),
    "lstm": GraphCase(lambda: recurring(nn.LSTM, num_layers=2), ((5, 3, 3),), (5, 2)),
    "gru": GraphCase(lambda: recurring(nn.GRU, bidirectional=True), ((5, 3, 3),), (5, 2)),
    "rnn": GraphCase(lambda: recurring(nn.RNN, nonlinearity="relu"), ((5, 3, 3),), (5, 2)),
    "normed": GraphCase(
        lambda: Fn(
            normed, nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(3, 4, padding_idx=1), nn.PReLU(4), nn.Linear(4, 1)
        ),
        ((5, 3), (3, 3)),
        (8, 1),
    ),
    "weight normed": GraphCase(weight_normed, (INNER, EDGE)),
    "one by one": GraphCase(
        lambda: Fn(lambda x, net: torch.stack([net(one) for one in x]), net(3, 2)), ((5, 3),), (5, 2)
    ),
}
