"""A committee: networks of several configurations that predict together."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..training import Entry, History
from .law import Classes, Law, Numbers, TwoClasses, probabilities, softened
from .members import Members
from .scaling import Inputs, Scale
from .settings import Settings
from .storing import part_from, part_state

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
    def from_state(cls, state: dict[str, Any]) -> Committee:
        centre, spread, *others = state["inputs"]
        plain = {name: state[name] for name in PLAIN}
        targets, law = state["targets"], law_of(plain["frequencies"], len(plain["floor"]))[0]
        return cls(
            settings=Settings(**state["settings"]), inputs=Inputs(Scale(centre, spread), *others),
            targets=None if targets is None else Scale(*targets),
            parts=[part_from(part, law) for part in state["parts"]], **plain,
        )  # fmt: skip


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
