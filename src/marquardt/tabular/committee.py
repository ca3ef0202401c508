"""A committee: networks of several configurations that predict together."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..files import typed
from ..training import Entry, History
from .law import Classes, Law, Numbers, TwoClasses, probabilities, softened
from .members import Members
from .scaling import Inputs, Scale
from .settings import Settings
from .storing import entries, part_from, part_state, tensor

F64 = torch.float64

# Fields that are stored as they are
PLAIN = ("frequencies", "weights", "floor", "factor", "says")


@dataclass
class Committee:
    """Networks that predict together. Without any, of a table from which nothing can be learnt, it is the mean."""

    settings: Settings
    inputs: Inputs
    targets: Scale | None  # of regression
    frequencies: Tensor | None  # of the classes
    parts: list[Members]
    weights: Tensor  # (configurations,)
    floor: Tensor  # s² of every output, in units of the scaled targets
    factor: Tensor  # by which the Laplace variance counts: of every output, or one of the logits
    says: list[str]

    @property
    def features(self) -> int:
        return len(self.inputs.columns)

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        return [part.network.sizes for part in self.parts]

    @property
    def history(self) -> list[History]:
        """The steps of each member, in units of the scaled targets; validation is what it holds out"""
        return [history_of(steps) for part in self.parts for steps in part.steps]

    @torch.no_grad()
    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of new targets: (N, outputs) each"""
        if self.targets is None:
            raise ValueError("a committee of classes has probabilities(x)")
        mean, variance = x.new_zeros(len(x), len(self.floor)), self.floor.repeat(len(x), 1)
        u, squares = self.inputs.apply(x), torch.zeros_like(mean)
        for w, part in self.counted():
            z = part.outputs(u)
            mean, squares = mean + w * z.mean(0), squares + w * z.square().mean(0)
            variance = variance + w * self.factor * part.variance(u).mean(0)
        variance = variance + (squares - mean.square()).clamp(min=0)  # what the members do not agree on
        # Who knows nothing but the targets that were seen, of mean 0 and variance 1, is off by no more than this.
        variance = variance.minimum(self.floor + 1 + mean.square())
        return self.targets.undo(mean), variance.sqrt() * self.targets.spread

    @torch.no_grad()
    def mean(self, x: Tensor) -> Tensor:
        """What `predict` has as its mean, at less cost: (N, outputs)"""
        if self.targets is None:
            raise ValueError("a committee of classes has probabilities(x)")
        mean, u = x.new_zeros(len(x), len(self.floor)), self.inputs.apply(x)
        for w, part in self.counted():
            mean = mean + w * part.outputs(u).mean(0)
        return self.targets.undo(mean)

    @torch.no_grad()
    def probabilities(self, x: Tensor) -> Tensor:
        """Of the classes: (N, classes)"""
        if self.frequencies is None:
            raise ValueError("a committee of numbers has predict(x)")
        if not self.parts:
            return self.frequencies.repeat(len(x), 1)
        u, found = self.inputs.apply(x), x.new_zeros(len(x), len(self.frequencies))
        for w, part in self.counted():
            found = found + w * classes_of(part, u, float(self.factor)).mean(0)
        return found / found.sum(1, keepdim=True)

    def counted(self) -> list[tuple[float, Members]]:
        return [(w, part) for w, part in zip(self.weights.tolist(), self.parts, strict=True) if w > 0]

    def state(self) -> dict[str, Any]:
        """Tensors and plain values, as torch.load(weights_only=True) takes them"""
        settings = asdict(self.settings)
        settings["hidden"] = settings["hidden"] if isinstance(settings["hidden"], str) else list(settings["hidden"])
        inputs, targets = self.inputs, self.targets
        return {
            "settings": settings,
            "inputs": [
                inputs.scale.centre,
                inputs.scale.spread,
                inputs.columns,
                inputs.low,
                inputs.high,
                inputs.rotation,
            ],
            "targets": None if targets is None else [targets.centre, targets.spread],
            "parts": [part_state(part) for part in self.parts],
            **{name: getattr(self, name) for name in PLAIN},
        }

    @classmethod
    def from_state(cls, state: Any) -> Committee:
        """What `state` has made. Anything else is a ValueError: a file may have been made by anybody."""
        entries(state, {"settings", "inputs", "targets", "parts", *PLAIN}, "a committee")
        settings, inputs = typed(state["settings"], Settings, "settings"), inputs_from(state["inputs"])
        floor = tensor(state["floor"], "floor", F64, (None,))
        targets, frequencies = state["targets"], state["frequencies"]
        if (settings.task == "regression") != (frequencies is None) or (targets is None) == (frequencies is None):
            raise ValueError(f"the targets are not those of {settings.task}")
        if frequencies is not None and float(tensor(frequencies, "frequencies", F64, (None,)).min()) < 0:
            raise ValueError("a frequency is negative")
        law, outputs = law_of(frequencies, len(floor))
        parts = [part_from(part, law) for part in typed(state["parts"], list[Any], "parts")]
        if any(part.network.sizes[:: len(part.network.sizes) - 1] != (inputs.width, outputs) for part in parts):
            raise ValueError("a network has other inputs or outputs than the committee")
        weights = tensor(state["weights"], "weights", F64, (len(parts),))
        if bool((weights < 0).any()) or (parts and not bool((weights > 0).any())):
            raise ValueError("the weights of the networks are not positive")
        factor = tensor(state["factor"], "factor", F64, (len(floor),))
        return cls(
            settings, inputs, None if targets is None else scale_from(targets, "targets", len(floor)), frequencies,
            parts, weights, floor, factor, typed(state["says"], list[str], "says"),
        )  # fmt: skip


def scale_from(state: Any, name: str, size: int | None) -> Scale:
    centre, spread = typed(state, tuple[Any, Any], name)
    found = Scale(tensor(centre, name, F64, (size,)), tensor(spread, name, F64, (size,)))
    if len(found.spread) != len(found.centre) or bool((found.spread < 0).any()):
        raise ValueError(f"{name} have no spread")
    return found


def inputs_from(state: Any) -> Inputs:
    centre, spread, columns, low, high, rotation = typed(state, tuple[Any, Any, Any, Any, Any, Any], "inputs")
    scale = scale_from([centre, spread], "inputs", None)
    used = int(tensor(columns, "columns", torch.bool, (len(scale.spread),)).sum())
    for name, t in (("low", low), ("high", high)):
        tensor(t, name, F64, (used,))
    if bool((low > high).any()):
        raise ValueError("the range of an input is negative")
    if rotation is not None:
        tensor(rotation, "rotation", F64, (used, None))
    return Inputs(scale, columns, low, high, rotation)


def history_of(steps: list[tuple[float, float, float, bool]]) -> History:
    nan, rules = math.nan, {True: "decrease", False: "rejected"}
    return History(
        [
            Entry(i, i - 1, loss, nan, validation, lam, nan, rules[accepted], 1.0, nan, nan)
            for i, (loss, validation, lam, accepted) in enumerate(steps, 1)
        ]
    )


def classes_of(part: Members, u: Tensor, factor: float) -> Tensor:
    """Probabilities by each member: (k, N, classes)"""
    z = part.outputs(u)
    return softened(z, factor * part.variance(u)) if factor > 0 else probabilities(z)


def law_of(frequencies: Tensor | None, outputs: int) -> tuple[Law, int]:
    """What is minimised, and the number of outputs"""
    if frequencies is None:
        return Numbers(outputs), outputs
    classes = len(frequencies)
    return (TwoClasses(), 1) if classes == 2 else (Classes(classes), classes)
