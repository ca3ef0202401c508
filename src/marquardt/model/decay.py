"""Weight decay: ½Σwᵢ‖θᵢ − θ₀ᵢ‖² added to the loss of the data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ..deferred import floats
from ..values import MAX
from ..weights import Weights
from .parameters import Parameters, named_parameters

KINDS = ("bias", "norm")


@dataclass(frozen=True, eq=False)
class WeightDecay:
    """Adds ½w‖θ − θ₀‖² to the loss that is reported, which moves its minimum and makes its curvature at least w.

    `exclude` names the parameters that do not decay: "bias" means all biases, "norm" all parameters of normalisation
    layers. Any other string is a part of the parameter's name between dots, such as "head" or "LayerNorm.weight" in
    "bert.LayerNorm.weight", or, with wildcards, a pattern for the whole name, such as "layers.[01].*". `exclude` may
    also be a function of the name and the parameter. By default all parameters decay, as with a plain number, and as in
    torch.optim.

    `towards` is θ₀: None for 0, "start" for the weights at the time LM is created, as in fine-tuning, or tensors: a
    state_dict, or one tensor for each parameter that trains. θ₀ is saved with the optimizer.

    A tensor with one number per element of a parameter is given as the `weight_decay` of a parameter group.

    Args:
        w: the weight, at least 0.
        exclude: parameters that do not decay.
        towards: θ₀.

    >>> opt = mq.LM(model, "mse", weight_decay=mq.WeightDecay(1e-3, exclude="bias"))
    """

    w: float
    exclude: str | Collection[str] | Callable[[str, Tensor], bool] = ()
    towards: str | Mapping[str, Tensor] | Sequence[Tensor] | None = None

    def __post_init__(self) -> None:
        check_weight(self.w)
        names = isinstance(self.exclude, Collection) and all(isinstance(p, str) for p in self.exclude)
        if not callable(self.exclude) and not names:
            raise TypeError(
                f'exclude={self.exclude!r}: "bias", "norm", patterns for names such as "head" or "layers.[01].*", or a '
                "function of the name and the parameter"
            )
        words = f'towards={self.towards!r}: None for 0, "start" for the weights as they are, or tensors'
        if isinstance(self.towards, str) and self.towards != "start":
            raise ValueError(words)
        if self.towards is not None and not isinstance(self.towards, Iterable):
            raise TypeError(words)

    @staticmethod
    def of(given: Any) -> WeightDecay:
        """Accepts a number as well"""
        return given if isinstance(given, WeightDecay) else WeightDecay(given)

    def spared(self, model: nn.Module, parameters: Parameters) -> list[bool]:
        """For each parameter, whether it is excluded"""
        pairs = list(zip(parameters.names, parameters.tensors, strict=True))
        if callable(self.exclude):
            return [bool(self.exclude(name, p)) for name, p in pairs]
        patterns = [self.exclude] if isinstance(self.exclude, str) else list(self.exclude)
        names = [name for name, _ in named_parameters(model)]
        for pattern in patterns:
            if pattern not in KINDS and not any(_named(name, pattern) for name in names):
                some = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
                raise ValueError(
                    f"exclude={pattern!r} matches none of the parameters {some}: correct it or leave it out. It is "
                    'what stands between dots, as "head" or "LayerNorm.weight", or a pattern of whole names, "*.head.*"'
                )
        return [any(_matches(model, name, pattern) for pattern in patterns) for name in parameters.names]

    def anchor(self, parameters: Parameters, spared: Sequence[bool]) -> Tensor | None:
        """A copy of θ₀, or None for 0: (n,)"""
        if self.towards is None:
            return None
        if isinstance(self.towards, str):
            return parameters.vector()
        given = self.towards
        found = [given.get(name) for name in parameters.names] if isinstance(given, Mapping) else list(given)
        if len(found) != len(parameters):
            raise ValueError(
                f"towards= has {len(found)} tensors, and {len(parameters)} parameters train: one for each, or a "
                "state_dict"
            )
        there = zip(parameters.names, parameters.tensors, found, spared, strict=True)
        return torch.cat([_towards(*each).flatten() for each in there])


def _matches(model: nn.Module, name: str, pattern: str) -> bool:
    owner, _, last = name.rpartition(".")
    if pattern == "bias" and "bias" in last:
        return True
    if pattern == "norm" and "Norm" in type(model.get_submodule(owner)).__name__:
        return True
    return _named(name, pattern)


def _named(name: str, pattern: str) -> bool:
    """Whether the pattern is a part of the name between dots; with wildcards, whether it matches all of it."""
    return fnmatchcase(name, pattern) if set("*?[") & set(pattern) else f".{pattern}." in f".{name}."


def _towards(name: str, p: Tensor, there: Any, spared: bool) -> Tensor:
    """θ₀ of one parameter; not needed for a parameter that does not decay"""
    if there is None and spared:
        return torch.zeros_like(p, requires_grad=False)
    if not isinstance(there, Tensor) or there.shape != p.shape or not bool(there.isfinite().all()):
        found = f"a tensor of the shape {tuple(there.shape)}" if isinstance(there, Tensor) else type(there).__name__
        raise ValueError(
            f"towards= has {found} for parameter {name!r}: it takes finite values of the shape {tuple(p.shape)}, or "
            "exclude= names the parameter"
        )
    return there.detach().to(p, copy=True)


def check_weight(w: Any) -> None:
    if isinstance(w, Tensor):
        raise TypeError(
            f"weight_decay is a tensor of the shape {tuple(w.shape)}, and parameters have different shapes: give the "
            'groups theirs, params=[{"params": [weight], "weight_decay": tensor}], or one number for all'
        )
    if isinstance(w, bool) or not isinstance(w, (int, float)):
        raise TypeError(
            f"weight_decay={w!r}: a number of at least 0, or an object made of one, mq.WeightDecay(1e-4, "
            'exclude="bias")'
        )
    if not 0 <= w <= MAX:
        raise ValueError(f"weight_decay={w!r}: it must be finite and at least 0; 0 for none")


class Penalty:
    """½(θ − θ₀)ᵀW(θ − θ₀), W = diag w."""

    def __init__(self, parameters: Parameters, weights: Weights, towards: Tensor | None = None) -> None:
        self.parameters, self.weights, self.towards = parameters, weights, towards

    def scaled(self, c: float) -> Penalty:
        return Penalty(self.parameters, self.weights.scaled(c), self.towards)

    def times(self, v: Tensor) -> Tensor:
        """Wv: (n,) → (n,)"""
        if self.weights.number is not None:
            return self.weights.number * v
        found = v.clone()
        self.weights.multiply(self.parameters.split(found))
        return found

    def quadratic(self, v: Tensor) -> Tensor:
        """vᵀWv: ()"""
        return self.parameters.dot(v, self.times(v))

    def slope(self, theta: Tensor) -> Tensor:
        """W(θ − θ₀): (n,)"""
        return self.times(theta if self.towards is None else theta - self.towards.to(theta))

    def value(self, params: Sequence[Tensor]) -> Tensor:
        """The penalty for these values of the parameters: () in float64"""
        here = [p.detach() for p in params]
        if self.towards is not None:
            here = list(torch._foreach_sub(here, self.parameters.shaped(self.towards.to(here[0]))))
        return self.parameters.total(0.5 * self.weights.squares(here))

    def along(self, theta: Tensor, d: Tensor, rates: Sequence[float]) -> list[float]:
        """The penalty at θ + lr·d for every lr"""
        slope = self.slope(theta.double())
        here = theta.double() if self.towards is None else theta.double() - self.towards.to(slope)
        dot, d = self.parameters.dot, d.double()
        a, b, c = floats(dot(here, slope), dot(d, slope), dot(d, self.times(d)))
        return [0.5 * a + lr * b + 0.5 * lr**2 * c for lr in rates]
