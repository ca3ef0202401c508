"""Parameter groups as torch.optim has them: they may differ in weight decay alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from .arguments import check_rate
from .model.checks import trainable
from .model.decay import check_weight

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


def check_same_rate(groups: Sequence[dict[str, Any]]) -> None:
    """All groups have the same lr, and a weight decay of their own."""
    rates = [group["lr"] for group in groups]
    for lr in rates:
        check_rate(lr)
    if any(float(lr) != float(rates[0]) for lr in rates):
        raise ValueError(
            f"the groups have the learning rates {[float(lr) for lr in rates]}: LM solves for all parameters together, "
            "and lr is the length of that step; give all groups the same"
        )
    for group in groups:
        check_weight(group["weight_decay"])


def weights(groups: Sequence[dict[str, Any]], spared: Sequence[bool]) -> list[float]:
    """Weight decay of every parameter; 0 for those that are excluded."""
    given = [float(group["weight_decay"]) for group in groups for _ in group["params"]]
    return [0.0 if free else w for w, free in zip(given, spared, strict=True)]
