"""LM with every part named, small problems for it, and what it did."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import marquardt as mq
from support import reference
from support.cases import mlp
from support.unchanged import changes, refused, world

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
PLAIN: dict[str, Any] = {
    "curvature": mq.Dense(inertia=0.0),
    "damping": mq.Identity(),
    "schedule": mq.TenFold(0.1),
    "momentum": None,
    "acceptance": mq.Decrease(),
    "line_search": None,
    "average": None,
}
LOSSES = ["mse", "cross_entropy", "bce", "huber", "poisson"]
EVERY_LOSS = pytest.mark.parametrize("loss", LOSSES)
DENSE, GRAM = mq.Dense(inertia=0.0), mq.Gram()
CURVATURES = {
    "dense": DENSE,
    "gram": GRAM,
    "dense-chunked": mq.Dense(chunk=3, inertia=0.0),
    "gram-chunked": mq.Gram(chunk=3),
}
EVERY_CURVATURE = pytest.mark.parametrize("curvature", CURVATURES.values(), ids=CURVATURES)
DENSE_AND_GRAM = pytest.mark.parametrize("curvature", [DENSE, GRAM], ids=["dense", "gram"])


def lm(model: nn.Module, loss: Any = "mse", **parts: Any) -> mq.LM:
    """LM with every part named, so that no default matters."""
    return mq.LM(model, loss, **{**PLAIN, **parts})


def targets(loss: Any, N: int, out: int) -> Tensor:
    match loss:
        case "cross_entropy":
            return torch.randint(out, (N,))
        case "bce":
            return torch.randint(2, (N, out)).to(torch.get_default_dtype())
        case "poisson":
            return torch.randint(5, (N, out)).to(torch.get_default_dtype())
    return torch.randn(N, out)


def problem(loss: Any = "mse", N: int = 8, sizes: tuple[int, ...] = (2, 4, 3)) -> tuple[nn.Module, Tensor, Tensor]:
    return mlp(*sizes), torch.randn(N, sizes[0]), targets(loss, N, sizes[-1])


def theta(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach().clone()  # (n,)


def objective(model: nn.Module, loss: Any, x: Any, y: Any, weight: Tensor | None = None) -> float:
    with torch.no_grad():
        return reference.objective(loss, reference.call(model, x), y, weight).item()


def linear_problem() -> tuple[nn.Module, Tensor, Tensor]:
    """f(θ + lr·δ) = (1 − lr)²·f(θ) at λ → 0: the learning rate alone decides what a step does."""
    model, x = nn.Linear(2, 1, bias=False), torch.randn(6, 2)
    return model, x, x @ torch.tensor([[1.0], [-2.0]])


def overshooting(lr: float = 3.0, **parts: Any) -> tuple[nn.Module, mq.LM, Tensor, Tensor]:
    model, x, y = linear_problem()
    return model, lm(model, lr=lr, **{"schedule": mq.TenFold(1e-9), **parts}), x, y


PLAIN_TYPES = {"accepted": bool, "rule": str, "note": str, "converged": bool}  # the others are float
MAX_MOMENTUM = {"damping": mq.MaxDiagonal(), "momentum": mq.AdaptiveMomentum()}


def trained(sizes: tuple[int, ...] = (2, 4, 3), **parts: Any) -> tuple[nn.Module, mq.LM, Tensor, Tensor]:
    """A few steps done: every entry of the state is filled."""
    model, x, y = problem(sizes=sizes)
    opt = lm(model, **{**MAX_MOMENTUM, "average": mq.EMA(), **parts})
    for i in range(3):
        opt.step(x, y + 0.01 * i)
    return model, opt, x, y


def parts_of(x: Any, y: Any, weight: Tensor | None = None, sizes: tuple[int, ...] = (1, 5, 2)) -> list[Any]:
    pieces = [t.split(sizes) for t in (x, y, weight) if t is not None]
    return list(zip(*pieces, strict=True))


def stochastic() -> tuple[nn.Module, mq.LM, Tensor, Tensor]:
    """A run whose average differs from its weights."""
    model, x, y = problem(N=24)
    opt = lm(model, average=mq.EMA(0.9), schedule=mq.Constant(0.3))
    for t in range(4):
        opt.step(x[6 * t : 6 * t + 6], y[6 * t : 6 * t + 6])
    return model, opt, x, y


@contextmanager
def unharmed(model: nn.Module, opt: mq.LM | None, *says: str) -> Iterator[None]:
    """A refusal with these words, after which everything is as it was."""
    before = world(model, opt)
    with refused(*says):
        yield
    assert changes(before, world(model, opt)) == []


def state(opt: mq.LM) -> dict[str, Any]:
    """What it saves of itself"""
    found: dict[str, Any] = opt.state_dict()["marquardt"]
    return found


def edit(opt: mq.LM, **entries: Any) -> None:
    """It goes on as if it had saved these."""
    saved = opt.state_dict()
    assert entries.keys() <= saved["marquardt"].keys()
    saved["marquardt"].update(entries)
    opt.load_state_dict(saved)


class Spy:
    """A part that remembers what one of its methods was asked, and what that returned."""

    def __init__(self, part: Any, method: str = "update") -> None:
        self.part, self.method = part, method
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["part"], name)
        if name != self.method:
            return found

        def call(*args: Any) -> Any:
            self.calls.append((*args, found(*args)))
            return self.calls[-1][-1]

        return call


@dataclass
class ByHand:
    """(G + λD)δ = −g with dense matrices: TenFold λ, acceptance of a decrease; the model holds θ."""

    model: nn.Module
    loss: Any
    params: list[nn.Parameter] | None = None
    lam: float = 0.1
    lr: float = 1.0
    max_diagonal: bool = False
    momentum: bool = False
    D: Any = None
    previous: Tensor | None = None

    def step(self, x: Any, y: Any, weight: Tensor | None = None) -> tuple[float, float, bool, float]:
        """f, f at the trial point, whether it was accepted, and the gain ratio."""
        params = list(self.model.parameters()) if self.params is None else self.params
        old = parameters_to_vector(params).detach().clone()
        q = reference.quadratic(self.model, self.loss, x, y, weight, params)
        D = torch.ones_like(q.g)
        if self.max_diagonal:
            D = q.diagonal().clamp(min=0.01) if self.D is None else torch.maximum(self.D, q.diagonal())
        d = q.step(self.lam * D)
        if self.momentum and self.previous is not None:
            d = reference.adaptive_momentum(q.damped(self.lam * D), q.g, self.previous, xi=0.9, dP=0.6)
        vector_to_parameters(old + self.lr * d, params)
        f, f_new = q.f.item(), objective(self.model, self.loss, x, y, weight)
        predicted = (-self.lr * q.g @ d - 0.5 * self.lr**2 * d @ q.G @ d).item()
        accepted = f_new < f
        if accepted:
            self.D, self.previous, self.lam = D, self.lr * d, self.lam / 10
        else:
            vector_to_parameters(old, params)
            self.lam *= 10
        return f, f_new, accepted, (f - f_new) / predicted if predicted > 0 else -math.inf


RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # parts, and the same by hand
    "plain": ({}, {}),
    "damped lr": ({"lr": 0.3}, {"lr": 0.3}),
    "max-diagonal": ({"damping": mq.MaxDiagonal()}, {"max_diagonal": True}),
    "momentum": ({"momentum": mq.AdaptiveMomentum()}, {"momentum": True}),
    "both": (
        {"damping": mq.MaxDiagonal(), "momentum": mq.AdaptiveMomentum()},
        {"max_diagonal": True, "momentum": True},
    ),
    "both, damped lr": (
        {"damping": mq.MaxDiagonal(), "momentum": mq.AdaptiveMomentum(), "lr": 0.3},
        {"max_diagonal": True, "momentum": True, "lr": 0.3},
    ),
}


def compared(opt: mq.LM, x: Any, y: Any, weight: Tensor | None = None, loss: Any = "mse", within: float = 1e-8) -> None:
    """A step beside −(G + λI)⁻¹g with the same random numbers; its acceptance is to be `Always`."""
    random, before, lam = torch.get_rng_state(), theta(opt.model), opt.lam
    q = reference.quadratic(opt.model, loss, x, y, weight, traced=False)
    torch.set_rng_state(random)
    step = opt.step(x, y, weight)
    assert step.loss == pytest.approx(q.f.item(), rel=1e-9)
    assert reference.error(theta(opt.model) - before, q.step(lam)) < within
