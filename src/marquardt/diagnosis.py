"""Why a model has learnt little or nothing: a constant does as well, activations are saturated, data are far from the
size that a network expects. It takes a forward pass, made only when there is a reason to ask."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from .jacobian.objective import Objective
from .losses import Loss
from .model.anatomy import Chance, Draws, Moment
from .model.batch import Batch, tensors
from .surroundings import back_afterwards, undisturbed, unless_interrupted

T = TypeVar("T")

# A loss that is lower than that of a constant by this share or less has learnt nothing. One that is lower by all but
# this share is good, however it came about.
NOTHING, LITTLE = 0.01, 1e-3

# Root mean squares of standardised data are 1; these are far from it.
SMALL, LARGE = 0.01, 10.0

# Activations that hardly respond, of all of them; and samples, for a unit without a bend within them to mean something.
MOST, ENOUGH = 0.5, 20

# Where the slope of an activation has fallen to a thousandth of its largest, by operation,
FLAT = {"tanh": 4.15, "sigmoid": 8.29}
# and how far from 0 one that bends there is straight.
STRAIGHT = {"relu": 0.0, "leaky_relu": 0.0, "elu": 5.0, "gelu": 4.0, "silu": 7.0, "softplus": 7.0}

# Numbers at the outputs of all batches together that are compared with a constant: they are in memory.
ROOM = 1 << 26

STANDARDISE = {
    "inputs": "standardise the inputs, x = (x - x.mean(0)) / x.std(0)",
    "targets": "standardise the targets, y = (y - y.mean(0)) / y.std(0)",
}


class Activations(Draws):
    """How many of the inputs of activations lie where these hardly respond, by operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: dict[str, list[int]] = {}  # [that hardly respond, all]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "overloadpacket", func).__name__.rstrip("_")
        if name in FLAT or name in STRAIGHT:
            self._count(name, args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _count(self, name: str, x: Tensor) -> None:
        if name in FLAT:
            idle = x.abs() > FLAT[name]
        elif x.ndim > 1 and len(x) >= ENOUGH:  # a unit is straight if all samples lie on one side of its bend
            idle = (x > STRAIGHT[name]).all(0) | (x < -STRAIGHT[name]).all(0)
        else:
            return
        count = self.counts.setdefault(name, [0, 0])
        count[0] += int(idle.sum())
        count[1] += idle.numel()

    @property
    def words(self) -> str:
        """The operation most of whose inputs lie there, if there is one."""
        shares = {name: idle / total for name, (idle, total) in self.counts.items() if total}
        name = max(shares, key=lambda name: shares[name], default="")
        if not name or shares[name] < MOST:
            return ""
        if name in FLAT:
            return f"{shares[name]:.0%} of the outputs of {name} are saturated"
        return f"{shares[name]:.0%} of the units of {name} bend nowhere within the data"


@dataclass(frozen=True)
class Diagnosis:
    """What was found."""

    loss: float = math.nan  # without weight decay, in the units in which it is reported
    constant: float = math.nan  # the loss of the best constant that was tried; NaN if that has no meaning
    low: float = 0.0  # that no loss falls below; −∞ if it is not known
    saturated: str = ""  # in words,
    sizes: dict[str, float] = field(default_factory=dict)  # "inputs" and "targets" that are far from the usual size

    @property
    def explained(self) -> float:
        """The share by which the loss is lower than that of a constant; NaN if it is not known."""
        height = self.constant - self.low if math.isfinite(self.low) else abs(self.constant)
        return (self.constant - self.loss) / height if height > 0 else math.nan

    @property
    def learnt_nothing(self) -> bool:
        """Whether a constant has the same loss."""
        return self.explained <= NOTHING

    def __str__(self) -> str:
        """In words; nothing if nothing is wrong."""
        facts = [f"the {name} are of the size {rms:.2g}" for name, rms in self.sizes.items()]
        facts += [self.saturated] if self.saturated else []
        data = "; ".join([", ".join(facts), *(STANDARDISE[name] for name in self.sizes)])
        if not self.learnt_nothing:
            good = self.explained >= 1 - LITTLE
            return "" if good or not self.sizes or not self.saturated else data
        if self.saturated and not self.sizes:
            data = f"{self.saturated}, but the data are of the usual size: begin with other, smaller weights"
        elif not self.sizes:
            data = (
                "the data are of the usual size, so that the inputs may say nothing of the targets (are both in the "
                "same order?), or the weights at the start may be poor: try others"
            )
        return f"a constant has the same loss, {self.constant:.4g}: {data}"


@undisturbed
def diagnosed(objective: Objective, batches: Iterable[Batch], chunk: int | None = None) -> Diagnosis:
    """The model as it is, on all data together, which may be gone through twice, at most `chunk` samples at once.
    Buffers and random numbers are then as before. If the model cannot be asked in this way, nothing is found."""
    try:
        return without_grad(lambda: _diagnosed(objective, batches, chunk))
    except Exception as error:  # this must not end what it explains
        unless_interrupted(error)
        return Diagnosis()


def without_grad(call: Callable[[], T]) -> T:
    """Without a graph, unless the model makes one itself to differentiate it."""
    try:
        with torch.no_grad():
            return call()
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        return call()


def _diagnosed(objective: Objective, batches: Iterable[Batch], chunk: int | None) -> Diagnosis:
    outputs: list[tuple[Loss, Tensor, Batch]] = []
    activations, sizes, numbers, chance = Activations(), (0.0, 0.0), 0, Chance()
    before = Moment(objective.model, objective.parameters.device, chance)

    def back() -> None:
        chance.drawn = activations.drew
        before.restore()

    with back_afterwards(back):
        for i, batch in enumerate(part for whole in batches for part in whole.split(chunk)):
            with activations if i == 0 else nullcontext():  # one batch shows how large things are
                raw = objective.called(batch.inputs)
            bound, z = objective.taken(raw, batch)
            if i == 0:
                sizes = size(tensors(batch.inputs)), size(tensors(batch.targets))
            numbers += z.numel()
            if numbers > ROOM and i:  # those of one batch are in memory in every step
                outputs.clear()
                break
            outputs.append((bound.loss, z.detach(), Batch(None, batch.targets, batch.weight)))
    inputs, targets = sizes
    of_values = {"inputs": inputs} | ({"targets": targets} if objective.given.sum_of_squares else {})  # not of labels
    unusual = {name: rms for name, rms in of_values.items() if rms > LARGE or 0 < rms < SMALL}
    return Diagnosis(*compared(objective.given, outputs), activations.words, unusual)


def size(items: Iterable[Tensor]) -> float:
    """The largest root mean square of a column; 0 if there are no such numbers."""
    numbers = [t.detach() for t in items if t.is_floating_point() and t.ndim and t.numel()]
    columns = [t.reshape(len(t), -1) if t.ndim < 3 else t.flatten(0, -2) for t in numbers]
    norms = [torch.linalg.vector_norm(t, dim=0, dtype=torch.float64) for t in columns]
    return max((float(n.max()) / math.sqrt(len(t)) for n, t in zip(norms, columns, strict=True)), default=0.0)


def compared(given: Loss, outputs: list[tuple[Loss, Tensor, Batch]]) -> tuple[float, float, float]:
    """The loss of all outputs, that of a constant in their place, and the lower bound."""
    if not outputs or given.surveys or not all(isinstance(b.targets, Tensor) for _, _, b in outputs):
        return math.nan, math.nan, 0.0
    loss = outputs[0][0]
    z, y = torch.cat([z for _, z, _ in outputs]), torch.cat([b.targets for _, _, b in outputs])
    weights: list[Any] = [b.weight for _, _, b in outputs]
    w = None if any(each is None for each in weights) else torch.cat(weights)
    if len(y) != len(z) or not bool((y != y[:1]).any()):
        return math.nan, math.nan, 0.0
    shifted = loss.gradient(z, y.roll(1, 0), w)
    if torch.equal(shifted, loss.gradient(z, y, w)):  # targets that are not looked at
        return math.nan, math.nan, 0.0
    normaliser = float(loss.normaliser(z, y, w))
    scale = loss.scale(normaliser)
    constants = [z, y] if loss.sum_of_squares else [z]
    means = [
        t.mean(0, keepdim=True) if w is None else torch.tensordot(w.to(t), t, 1)[None] / w.sum() for t in constants
    ]
    values = [*(loss.value(t.expand_as(z), y, w) for t in (z, *means)), loss.lower_bound(z, y, w)]
    own, *constant, low = (loss.report(float(value) * scale, normaliser) for value in values)
    return own, min(constant), low
