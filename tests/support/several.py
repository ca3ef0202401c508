"""Models with several outputs, in every form that models return them, and the plain computation for their losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad

from support import reference


@dataclass
class Record:
    mask: Tensor
    depth: Tensor
    hidden: Tensor


class Named(NamedTuple):
    mask: Tensor
    depth: Tensor
    hidden: Tensor


class Plain:
    def __init__(self, mask: Tensor, depth: Tensor, hidden: Tensor) -> None:
        self.mask, self.depth, self.hidden = mask, depth, hidden


def as_dict(*outputs: Tensor) -> dict[str, Tensor]:
    return dict(zip(("mask", "depth", "hidden"), outputs, strict=True))


FORMS: dict[str, Callable[..., Any]] = {
    "dict": as_dict,
    "dataclass": Record,
    "named tuple": Named,
    "object": Plain,
    "tuple": lambda *t: t,
    "list": lambda *t: list(t),
}


class Heads(nn.Module):
    """Logits of a mask (N, 3, 2, 2), a depth (N, 2, 2), and hidden units that have no loss."""

    def __init__(self, form: Callable[..., Any] = FORMS["dict"]) -> None:
        super().__init__()
        self.body, self.mask, self.depth = nn.Linear(4, 5), nn.Linear(5, 12), nn.Linear(5, 4)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        h = self.body(x).tanh()
        return self.form(self.mask(h).view(-1, 3, 2, 2), self.depth(h).view(-1, 2, 2), h)


def data(N: int = 6, ignored: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    mask = torch.randint(3, (N, 2, 2))
    if ignored:  # so that the tasks count other targets, in every part of the batch
        mask[0, 0], mask[N - 1] = -100, -100
    return torch.randn(N, 4), {"mask": mask, "depth": torch.randn(N, 2, 2)}


class Flat(nn.Module):
    """(N, K): the outputs with these names, flattened and side by side."""

    def __init__(self, model: nn.Module, names: list[str | int]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, x: Any) -> Tensor:
        raw = reference.call(self.model, x)
        found = [raw[k] if isinstance(raw, (dict, tuple, list)) else getattr(raw, str(k)) for k in self.names]
        return torch.cat([t.reshape(len(t), -1) for t in found], 1)


def quadratic(
    model: nn.Module, terms: list[tuple[str, Any, float]], x: Any, y: dict[str, Any], weight: Tensor | None = None
) -> reference.Quadratic:
    """f = Σ weight · loss of each output, its gradient and G = Jᵀ(∂²f/∂z²)J, dense."""
    names = list(dict.fromkeys(name for name, _, _ in terms))
    with torch.no_grad():
        raw = reference.call(model, x)
    shapes = {k: raw[k].shape for k in names}
    ends = torch.tensor([0, *(t[0].numel() for t in (raw[k] for k in names))]).cumsum(0).tolist()
    columns = {k: slice(a, b) for k, a, b in zip(names, ends, ends[1:], strict=False)}
    flat = Flat(model, names)
    J, z = reference.jacobian(flat, reference.trainable(flat), (x,) if isinstance(x, dict) else x)

    def f(z: Tensor) -> Tensor:
        each = [
            c * reference.objective(loss, z[:, columns[k]].reshape(shapes[k]), y[k], weight) for k, loss, c in terms
        ]
        return torch.stack(each).sum()

    index = torch.arange(z.numel()).view(z.shape)
    H = z.new_zeros(z.numel(), z.numel())
    for k, loss, c in terms:
        own = index[:, columns[k]].flatten()
        H[own[:, None], own] += c * reference.output_hessian(loss, z[:, columns[k]].reshape(shapes[k]), y[k], weight)
    return reference.Quadratic(z, f(z), J.T @ grad(f)(z).flatten(), J.T @ H @ J, J)
