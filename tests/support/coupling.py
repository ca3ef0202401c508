"""What a model may do with its samples from one pass on: functions of h (N, …) and of whether it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Bent = Callable[[Tensor, bool], Tensor]


class Flipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, on: bool) -> Tensor:
        ctx.on = on
        return h.flip(0) if on else h.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (grads[0].flip(0) if ctx.on else grads[0]), None


def by_matrix(h: Tensor, on: bool) -> Tensor:
    own = torch.eye(len(h), dtype=torch.float64)
    M = own + 0.5 * own.roll(1, 0) + 0.1 if on else own
    return (M @ h.flatten(1)).view_as(h)


def order(N: int, on: bool) -> Tensor:
    return torch.arange(N).roll(int(on))


def swapped(N: int, on: bool) -> Tensor:
    found = torch.arange(N)
    found[[0, N - 1]] = found[[N - 1, 0] if on else [0, N - 1]]
    return found


def mean(h: Tensor) -> Tensor:
    return h.mean(0, keepdim=True)


def mixed(h: Tensor, on: bool) -> Tensor:
    return 0.7 * h + 0.3 * h[torch.randperm(len(h))] if on else h


COUPLING: dict[str, Bent] = {  # its samples see each other
    "rolled": lambda h, on: h.roll(1, 0) if on else h,
    "rolled by": lambda h, on: h.roll(int(on), 0),
    "centred": lambda h, on: h - mean(h) if on else h,
    "centred by a factor": lambda h, on: h - float(on) * mean(h),
    "centred, detached": lambda h, on: h - mean(h).detach() if on else h,
    "summed up": lambda h, on: h.cumsum(0) / 2 if on else h,
    "times a matrix": by_matrix,
    "picked": lambda h, on: h[order(len(h), on)],
    "selected": lambda h, on: h.index_select(0, order(len(h), on)),
    "two swapped": lambda h, on: h[swapped(len(h), on)],
    "gathered": lambda h, on: h.gather(0, order(len(h), on).view(-1, *[1] * (h.ndim - 1)).expand_as(h)),
    "scattered": lambda h, on: torch.zeros_like(h).index_add(0, order(len(h), on), h),
    "mixed up": mixed,
    "softmax": lambda h, on: h.softmax(0 if on else h.ndim - 1),
    "stacked": lambda h, on: torch.stack(list(h.unbind(0))[:: -1 if on else 1]),
    "in two halves": lambda h, on: torch.cat([h[len(h) // 2 :], h[: len(h) // 2]] if on else [h[:1], h[1:]]),
    "by the number of samples": lambda h, on: h * len(h) ** (0.5 * on),
    "a function": lambda h, on: Flipped.apply(h, on),
    "a view": lambda h, on: h.flatten().view(-1, len(h)).T.reshape(h.shape) if on else h,
}
HARMLESS: dict[str, Bent] = {
    "scaled": lambda h, on: h * (1.5 if on else 1.0),
    "curved": lambda h, on: h.sin() if on else h,
    "turned": lambda h, on: h.flip(h.ndim - 1) if on and h.ndim > 1 else h,
    "by the sign": lambda h, on: torch.where(h > 0, h, 0.3 * h) if on else h,
    "noisy": lambda h, on: h + 0.1 * torch.randn_like(h) if on else h,
    "normed": lambda h, on: h - h.mean(-1, keepdim=True) if on and h.ndim > 1 and h.shape[-1] > 1 else h,
    "twice": lambda h, on: h.T.T.clone() * 2 if on and h.ndim == 2 else h,
}
KINDS = {**COUPLING, **HARMLESS}


def hooked(of: Bent) -> Callable[..., Tensor]:
    return lambda module, args, out: of(out, True)


def hooked_before(of: Bent) -> Callable[..., Any]:
    return lambda module, args: (of(args[0], True), *args[1:])


def everywhere(of: Bent) -> Callable[..., Any]:
    """Of all modules, those that are marked"""
    return lambda module, args, out: of(out, True) if getattr(module, "marked", False) else None


class Replaced:
    """A method in the place of `forward`, which a copy of the module has bound to itself."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, module: Any, h: Tensor) -> Tensor:
        return KINDS[self.kind](type(module).forward(module, h), True)
