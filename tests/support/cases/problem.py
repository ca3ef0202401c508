"""A problem, the register of all cases, and what they are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Problem(NamedTuple):
    model: nn.Module
    loss: Any
    x: Any
    y: Any
    weight: Tensor | None = None
    params: list[nn.Parameter] | None = None


CASES: dict[str, Callable[[], Problem]] = {}


class Fn(nn.Module):
    """A function of the inputs, of modules and of parameters, which have the names of its last arguments."""

    def __init__(self, function: Callable[..., Tensor], *parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        names = list(signature(function).parameters)
        self.function, self.names = function, names[len(names) - len(parts) :]
        for name, part in zip(self.names, parts, strict=True):
            setattr(self, name, part)

    @property
    def parts(self) -> list[Any]:
        return [getattr(self, name) for name in self.names]

    def forward(self, *inputs: Any) -> Tensor:
        return self.function(*inputs, *self.parts)


def regression(model: nn.Module, x: Any, *outputs: int, weighted: bool = False) -> Problem:
    """The inputs, or their shape, and the shape of the targets"""
    x = torch.randn(x) if isinstance(x[0], int) else x
    y = torch.randn(outputs)
    return Problem(model, "mse", x, y, sample_weights(len(y)) if weighted else None)


def classification(model: nn.Module, x: Any, c: int, *shape: int) -> Problem:
    x = torch.randn(x) if isinstance(x[0], int) else x
    return Problem(model, "cross_entropy", x, classes(c, *shape))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(name: str, dtype: torch.dtype = torch.float64) -> Problem:
    """The case, the same at every call; the global RNG is left as it was."""
    with torch.random.fork_rng(devices=[]), default_dtype(dtype):
        torch.manual_seed(sum(map(ord, name)))
        problem = CASES[name]()
        with torch.no_grad():  # norms start at weight 1, bias 0: a point where mistakes cancel
            for p in problem.model.parameters():
                p.add_(0.1 * torch.randn_like(p))
    return problem


def classes(c: int, *shape: int) -> Tensor:
    return torch.randint(c, shape)


def counts(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape).to(torch.get_default_dtype())


def probabilities(c: int, *shape: int) -> Tensor:
    """Soft targets, the classes in dimension 1."""
    return torch.rand(shape[0], c, *shape[1:]).softmax(dim=1)


def sample_weights(N: int) -> Tensor:
    return torch.rand(N) + 0.3


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o), nn.ELU()]
    return nn.Sequential(*layers[:-1])


def settled(model: nn.Module) -> nn.Module:
    """Eval mode with running statistics that are neither 0 nor 1."""
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            m.running_mean.normal_()
            m.running_var.uniform_(0.5, 2)
    return model.eval()
