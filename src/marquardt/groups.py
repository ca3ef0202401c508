"""Parameter groups as torch.optim has them: they may differ in weight decay alone, a number or a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import check_rate
from .deferred import floats
from .model.batch import wide
from .model.checks import trainable
from .model.decay import check_weight
from .weights import Weights

KEYS = ("params", "lr", "weight_decay", "name", "initial_lr")  # the last is what schedulers write


def grouped(model: nn.Module, params: Iterable[Any] | None) -> list[dict[str, Any]]:
    """The parameters that train, by groups."""
    given = None if params is None else list(params)
    if given is None or not any(isinstance(group, dict) for group in given):
        return [{"params": trainable(model, given)}]
    for group in given:
        if not isinstance(group, dict) or "params" not in group:
            raise TypeError(
                f"params= holds groups and a {type(group).__name__} without 'params': groups alone, or none"
            )
        for key in group:
            if key not in KEYS:
                raise ValueError(
                    f"a group of params= has the option {key!r}: LM solves for all parameters together, and groups may "
                    "differ in weight_decay alone"
                )
    members = [[g["params"]] if isinstance(g["params"], Tensor) else list(g["params"]) for g in given]
    chosen = {id(p) for p in trainable(model, [p for group in members for p in group])}
    return [
        {**group, "params": [p for p in some if id(p) in chosen]}
        for group, some in zip(given, members, strict=True)
    ]  # fmt: skip


SAME_RATE = "LM solves for all parameters together, and lr is the length of that step; give all groups the same"


def check_same_rate(groups: Sequence[dict[str, Any]]) -> None:
    """All groups have the same lr, and a weight decay of their own."""
    rates = [group["lr"] for group in groups]
    for lr in rates:
        check_rate(lr)
    if any(float(lr) != float(rates[0]) for lr in rates):
        raise ValueError(f"the groups have the learning rates {[float(lr) for lr in rates]}: {SAME_RATE}")
    for i, group in enumerate(groups):
        check_decay(group["weight_decay"], i, group)


def check_decay(w: Any, i: int, group: dict[str, Any]) -> None:
    """Of group i: a number, or a tensor that broadcasts to each of its parameters."""
    if not isinstance(w, Tensor):
        return check_weight(w)
    name = f"weight_decay of group {group.get('name', i)!r}, a tensor of the shape {tuple(w.shape)},"
    if w.dtype == torch.bool or w.is_complex() or w.layout != torch.strided or w.is_meta:
        raise TypeError(f"{name} is of {w.dtype} and {w.layout}: real numbers in a dense tensor")
    for p in group["params"]:
        if not _broadcasts(w.shape, p.shape):
            raise ValueError(
                f"{name} does not broadcast to a parameter of the shape {tuple(p.shape)}: a number for every element "
                "of each parameter in the group, or give that parameter a group of its own"
            )
    for p in group["params"][:1]:
        there = _held(w, p)
        bad = w[~((there >= 0) & there.isfinite())]
        if bad.numel():
            raise ValueError(
                f"{name} holds {bad[0].item()}: all must be at least 0, 0 for none, and finite in {there.dtype}"
            )


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def weights(groups: Sequence[dict[str, Any]], spared: Sequence[bool]) -> Weights:
    """Weight decay of every parameter, 0 for those that are excluded: as it is now, in copies. A tensor whose elements
    are all the same is a number."""
    pairs = [(p, group["weight_decay"]) for group in groups for p in group["params"]]
    numbers: list[float] = []
    elements: dict[int, Tensor] = {}
    gaps = False
    for i, ((p, w), free) in enumerate(zip(pairs, spared, strict=True)):
        if free or not isinstance(w, Tensor):
            numbers.append(0.0 if free else float(w))
            continue
        there = _held(w, p)
        low, high = floats(*there.aminmax()) if there.numel() else (0.0, 0.0)
        numbers.append(low if low == high else 1.0)
        if low < high:
            place = torch.empty(p.shape, dtype=there.dtype, device=p.device)
            elements[i] = place.copy_(there.expand(p.shape)).flatten()
            gaps = gaps or low == 0
    return Weights(numbers, elements, gaps)


def _held(w: Tensor, p: Tensor) -> Tensor:
    """In the precision of θ"""
    return w.detach().to(wide(p.dtype))
