"""What is observed of a step: a part that remembers, a snapshot, a report; and how numbers are compared."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import marquardt as mq
from fuzz import attacks
from fuzz.brute import Brute, cut, length
from support.steps import state
from support.unchanged import same

EPS = torch.finfo(torch.float64).eps


class Failure(attacks.Fault):
    """What is wrong: a class of failures, and the figures."""

    def __init__(self, what: str, detail: str = "", size: float | None = None) -> None:
        super().__init__(f"{what}: {detail}" if detail else what)
        self.what, self.size = what, size  # relative error, where there is one


class Snapshot:
    """All that a refused step must leave as it was."""

    def __init__(self, model: nn.Module, lm: mq.LM) -> None:
        self.rng = torch.get_rng_state()
        self.params = [p.detach().clone() for p in model.parameters()]
        self.buffers = [b.clone() for b in model.buffers()]
        self.theta = flat(lm.params)
        where = {id(p): i for i, p in enumerate(model.parameters())}
        self.trained = [where[id(p)] for p in lm.params]
        self.saved = state(lm)
        self.state = SimpleNamespace(**self.saved)

    def restore_rng(self) -> None:
        torch.set_rng_state(self.rng)

    def model(self, now: nn.Module) -> tuple[nn.Module, list[Tensor]]:
        """A copy of the model as it was, and the parameters that train"""
        then = copy.deepcopy(now)
        with torch.no_grad():
            for tensors, values in ((then.parameters(), self.params), (then.buffers(), self.buffers)):
                for t, value in zip(tensors, values, strict=True):
                    t.copy_(value)
        params = list(then.parameters())
        return then, [params[i] for i in self.trained]

    def frozen(self, model: nn.Module, trained: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        own = {id(p) for p in trained}
        return ((p, q) for p, q in zip(model.parameters(), self.params, strict=True) if id(p) not in own)

    def refused(self, model: nn.Module, lm: mq.LM) -> None:
        if not torch.equal(torch.get_rng_state(), self.rng):
            raise Failure("a refused step drew random numbers")
        for what, now, then in (("θ", model.parameters(), self.params), ("a buffer", model.buffers(), self.buffers)):
            if not all(torch.equal(a, b) for a, b in zip(now, then, strict=True)):
                raise Failure(f"a refused step changed {what}")
        if not same(state(lm), self.saved):
            raise Failure("a refused step changed the state")


def structure(model: nn.Module) -> dict[str, Any]:
    """What a step must not change: which tensors and modules are where, hooks, flags."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found[name] = (id(module), module.training, type(module).__name__)
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            found[f"{name} {kind}"] = len(getattr(module, kind))
        for key, p in module._parameters.items():
            if p is not None:
                hooks = len(p._backward_hooks or {})
                found[f"{name}.{key}"] = (id(p), type(p).__name__, p.requires_grad, p.grad is None, p.is_leaf, hooks)
        for key, b in module._buffers.items():
            found[f"{name}.{key}"] = id(b)
        found[f"{name} attributes"] = sorted(module.__dict__)
    return found


def difference(now: dict[str, Any], then: dict[str, Any]) -> str:
    keys = [k for k in {**now, **then} if now.get(k) != then.get(k)]
    return "; ".join(f"{k}: {then.get(k)} → {now.get(k)}" for k in keys[:3])


def noise_of(b: Brute) -> float:
    """Of the slopes of the loss, relative to them: near 0 they, and second derivatives, are differences of numbers near
    1."""
    J = math.sqrt(sum(float(part.J.square().sum()) for part in b.parts))
    return 8 * EPS * J / b.norm / max(float(b.g.norm()), 1e-300)


def halves(batch: tuple[Any, Any, Any]) -> list[tuple[Any, Any, Any]]:
    N = length(batch[0])
    parts = [slice(0, N - N // 2), slice(N - N // 2, N)] if N > 1 else [slice(0, 1)]
    return [tuple(cut(t, part, N) for t in batch) for part in parts]


def flat(params: list[Tensor]) -> Tensor:
    return torch.cat([p.detach().flatten() for p in params])


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()).clamp(min=1e-30))


def near(what: str, found: float, wanted: float, tolerance: float, size: float) -> None:
    if not abs(found - wanted) <= tolerance * size + 1e-25 and found != wanted:
        raise Failure(what, f"{found:.12g} instead of {wanted:.12g}")
