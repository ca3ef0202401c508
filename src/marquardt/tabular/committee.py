"""A committee: networks of several configurations that predict together, from inputs in units of their spread."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..files import typed
from ..training import Entry, History
from .members import Law, Members, check_entries, check_tensors, part_from, part_state, probabilities, softened
from .settings import Settings

# A column whose spread is below this share of its size is constant but for rounding.
CONSTANT = 1e-10

# Inputs are followed this far beyond those that were seen, in units of their range; from there on nothing changes.
BEYOND = 0.5


@dataclass(frozen=True)
class Scale:
    """(x − centre)/spread by column; a spread of 0 is a constant column."""

    centre: Tensor  # (d,)
    spread: Tensor  # (d,)

    @classmethod
    def of(cls, x: Tensor, weight: Tensor) -> Scale:
        """The weighted mean and standard deviation: x (N, d), weight (N,)"""
        share = (weight / weight.sum())[:, None]
        size = x.abs().amax(0)
        unit = torch.where(size > 0, size, 1.0)  # squares of what is huge or tiny stay within range
        u = x / unit
        centre = (share * u).sum(0)
        spread = (share * (u - centre).square()).sum(0).sqrt()
        spread = torch.where(spread > CONSTANT, spread, 0.0)
        return cls(torch.where(spread > 0, centre * unit, x[0]), spread * unit)

    def apply(self, x: Tensor) -> Tensor:
        return (x - self.centre) / torch.where(self.spread > 0, self.spread, 1.0)

    def undo(self, u: Tensor) -> Tensor:
        return self.centre + self.spread * u


@dataclass(frozen=True)
class Inputs:
    """Columns that are not constant, scaled, within half a range of what was seen; their main directions if there are
    too many."""

    scale: Scale
    columns: Tensor  # (d,) which are used
    low: Tensor
    high: Tensor
    rotation: Tensor | None  # (columns, directions)

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, most: int) -> Inputs:
        scale = Scale.of(x, weight)
        columns = scale.spread > 0
        u = scale.apply(x)[:, columns]
        low, high = (u.amin(0), u.amax(0)) if u.shape[1] else (u.new_zeros(0), u.new_zeros(0))
        margin = BEYOND * (high - low)
        rotation = None
        if u.shape[1] > most:
            e, Q = torch.linalg.eigh((weight[:, None] * u).T @ u / weight.sum())
            rotation = Q[:, -most:].flip(1) / e[-most:].mean().sqrt()
            rotation = rotation * torch.where(rotation.sum(0) < 0, -1.0, 1.0)
        return cls(scale, columns, low - margin, high + margin, rotation)

    def apply(self, x: Tensor) -> Tensor:
        u = self.scale.apply(x)[:, self.columns].clamp(self.low, self.high)
        return u if self.rotation is None else u @ self.rotation

    @property
    def width(self) -> int:
        return int(self.columns.sum()) if self.rotation is None else self.rotation.shape[1]


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
    def history(self) -> list[History]:
        """The steps of each member, in units of the scaled targets; validation is what it holds out"""
        nan = math.nan

        def entry(i: int, loss: float, validation: float, lam: float, accepted: bool) -> Entry:
            rule = "decrease" if accepted else "rejected"
            return Entry(i, i - 1, loss, nan, validation, lam, nan, rule, 1.0, nan, nan)

        return [
            History([entry(i, *step) for i, step in enumerate(steps, 1)]) for part in self.parts for steps in part.steps
        ]

    @torch.no_grad()
    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of new targets: (N, outputs) each"""
        assert self.targets is not None  # classes have probabilities
        u = self.inputs.apply(x)
        mean, variance = x.new_zeros(len(x), len(self.floor)), self.floor.repeat(len(x), 1)
        squares = torch.zeros_like(mean)
        for w, part in self.counted():
            z = part.outputs(u)
            mean, squares = mean + w * z.mean(0), squares + w * z.square().mean(0)
            variance = variance + w * self.factor * part.variance(u).mean(0)
        variance = variance + (squares - mean.square()).clamp(min=0)  # what the members do not agree on
        # Predicted from nothing but the targets that were seen, of mean 0 and variance 1, it is no more than this.
        variance = variance.minimum(self.floor + 1 + mean.square())
        return self.targets.undo(mean), variance.sqrt() * self.targets.spread

    @torch.no_grad()
    def mean(self, x: Tensor) -> Tensor:
        """What `predict` has as its mean, at less cost: (N, outputs)"""
        assert self.targets is not None
        u, mean = self.inputs.apply(x), x.new_zeros(len(x), len(self.floor))
        for w, part in self.counted():
            mean = mean + w * part.outputs(u).mean(0)
        return self.targets.undo(mean)

    @torch.no_grad()
    def probabilities(self, x: Tensor) -> Tensor:
        """Of the classes: (N, classes)"""
        assert self.frequencies is not None
        if not self.parts:
            return self.frequencies.repeat(len(x), 1)
        u, found, factor = self.inputs.apply(x), x.new_zeros(len(x), len(self.frequencies)), float(self.factor)
        for w, part in self.counted():
            z = part.outputs(u)
            p = softened(z, factor * part.variance(u)) if factor > 0 else probabilities(z)
            found = found + w * p.mean(0)
        return found / found.sum(1, keepdim=True)

    def counted(self) -> list[tuple[float, Members]]:
        return [(w, part) for w, part in zip(self.weights.tolist(), self.parts, strict=True) if w > 0]

    def state(self) -> dict[str, Any]:
        """Tensors and plain values, as torch.load(weights_only=True) takes them"""
        settings = asdict(self.settings)
        settings["hidden"] = settings["hidden"] if isinstance(settings["hidden"], str) else list(settings["hidden"])
        inputs, scale, targets = self.inputs, self.inputs.scale, self.targets
        return {
            "settings": settings,
            "inputs": [scale.centre, scale.spread, inputs.columns, inputs.low, inputs.high, inputs.rotation],
            "targets": None if targets is None else [targets.centre, targets.spread],
            "parts": [part_state(part) for part in self.parts],
            **{name: getattr(self, name) for name in PLAIN},
        }

    @classmethod
    def from_state(cls, state: Any) -> Committee:
        """What `state` has made. Anything else is a ValueError: a file may have been made by anybody."""
        check_entries(state, {"settings", "inputs", "targets", "parts", *PLAIN}, "a committee")
        settings, inputs = typed(state["settings"], Settings, "settings"), inputs_from(state["inputs"])
        targets, frequencies = state["targets"], state["frequencies"]
        if (settings.task == "regression") != (frequencies is None) or (targets is None) == (frequencies is None):
            raise ValueError(f"the targets are not those of {settings.task}")
        parts, says = typed(state["parts"], list[Any], "parts"), typed(state["says"], list[str], "says")
        parts, sizes = [part_from(part) for part in parts], {"members": len(parts)}
        forms = {"floor": "float64 outputs", "factor": "float64 outputs", "weights": "float64 members"}
        check_tensors(state, forms if frequencies is None else forms | {"frequencies": "float64 classes"}, sizes)
        if frequencies is not None and float(frequencies.min()) < 0:
            raise ValueError("a frequency is negative")
        outputs = Law.of(frequencies, sizes["outputs"]).outputs
        if any(part.network.sizes[:: len(part.network.sizes) - 1] != (inputs.width, outputs) for part in parts):
            raise ValueError("a network has other inputs or outputs than the committee")
        weights = state["weights"]
        if bool((weights < 0).any()) or (parts and not bool((weights > 0).any())):
            raise ValueError("the weights of the networks are not positive")
        scale = None if targets is None else scale_from(targets, {"columns": sizes["outputs"]})
        plain = {name: state[name] for name in PLAIN if name != "says"}
        return cls(settings, inputs, scale, parts=parts, says=says, **plain)


def scale_from(state: Any, sizes: dict[str, int]) -> Scale:
    centre, spread = typed(state, tuple[Any, Any], "a scale")
    check_tensors({"centre": centre, "spread": spread}, dict.fromkeys(("centre", "spread"), "float64 columns"), sizes)
    if bool((spread < 0).any()):
        raise ValueError("a spread is negative")
    return Scale(centre, spread)


def inputs_from(state: Any) -> Inputs:
    *scale, columns, low, high, rotation = typed(state, tuple[Any, Any, Any, Any, Any, Any], "inputs")
    sizes: dict[str, int] = {}
    found = Inputs(scale_from(scale, sizes), columns, low, high, rotation)
    check_tensors(vars(found), {"columns": "bool columns"}, sizes)
    forms = {"low": "float64 used", "high": "float64 used", "rotation": "float64 used directions"}
    if rotation is None:
        forms.pop("rotation")
    check_tensors(vars(found), forms, {"used": int(columns.sum())})
    if bool((low > high).any()):
        raise ValueError("the range of an input is negative")
    return found
