"""What must not change, and whether it did."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq


def world(model: nn.Module, opt: mq.LM | None = None) -> dict[str, Any]:
    """Everything that belongs to the user, and the optimizer's state."""
    modules, params = list(model.modules()), list(model.parameters())
    return {
        "parameters": {k: p.detach().clone() for k, p in model.named_parameters()},
        "buffers": {k: b.detach().clone() for k, b in model.named_buffers()},
        "gradients": [None if p.grad is None else p.grad.clone() for p in params],
        "identity": [id(p) for p in params],
        "requires_grad": [p.requires_grad for p in params],
        "training": [m.training for m in modules],
        "hooks": [list(each) for each in hooks(model)],
        "generator": torch.get_rng_state(),
        "grad mode": torch.is_grad_enabled(),
        "function modes": len(torch.overrides._get_current_function_mode_stack()),
        "optimizer": None if opt is None else copy.deepcopy(opt.state_dict()),
    }


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit, containers and all."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [k for k in before if not same(before[k], after[k])]


def everything(model: nn.Module) -> dict[str, object]:
    """What belongs to the user, but for numbers."""
    return {
        "hooks": [
            list(each.values()) for each in [*hooks(model), *(p._backward_hooks or {} for p in model.parameters())]
        ],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "identity": [id(p) for p in model.parameters()],
        "training": [m.training for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "grad": [id(p.grad) for p in model.parameters()],
    }


def hooks(model: nn.Module) -> list[dict[int, object]]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [getattr(m, kind) for m in model.modules() for kind in kinds]


@contextmanager
def refused(*says: str) -> Iterator[None]:
    """A ValueError or TypeError of this library, not one that torch or Python happened to raise underneath."""
    with pytest.raises((ValueError, TypeError)) as refusal:
        yield
    message = str(refusal.value)
    assert [fragment for fragment in says if fragment.lower() not in message.lower()] == [], message
    raised_in = refusal.traceback[-1].path
    assert "marquardt" in str(raised_in), f"raised in {raised_in}: {message}"


def progress(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """LM's state in a state_dict, λ, D, averages and all, less the plan, which knows how much memory was free."""
    return {k: v for k, v in state_dict["marquardt"].items() if k != "plan"}
