"""What was planned for a model and its batches: which representation fits into memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Shapes:
    """What memory depends on. Numbers per sample are those of the layers that have a rule."""

    n: int  # parameters
    N: int  # samples
    R: int  # rows per sample
    inputs: float  # numbers that the weights multiply, per sample
    outputs: float  # numbers at the outputs of these layers, per sample
    itemsize: int
    others: int = 0  # parameters without a rule: their rows are explicit
    single: bool = True  # one batch, not several in step_over

    @property
    def m(self) -> int:
        return self.R * self.N


@dataclass(frozen=True)
class Plan:
    """What was picked, for which shapes and options, and how often memory has run out since. All of it plain values:
    a part of the state, to be saved and to be agreed on."""

    options: tuple[Any, ...]  # of the representation that made it
    kind: str | None = None  # the class of the representation that was picked; None: another one is to be picked
    chunk: int | None = None  # its samples at once
    name: str = ""  # in words
    bytes: int = 0  # predicted for a step, beside the parameters themselves
    budget: int | None = None
    why: str = ""
    input_size: int = 0  # numbers in the inputs of the batch that it was made for
    shapes: Shapes | None = None
    squeeze: int = 0  # how often memory ran out

    def state(self) -> dict[str, Any]:
        return {**asdict(self), "options": list(self.options)}

    @staticmethod
    def restored(state: dict[str, Any]) -> Plan:
        shapes = state["shapes"]
        known = {**state, "options": tuple(state["options"]), "shapes": None if shapes is None else Shapes(**shapes)}
        return Plan(**known)

    def __str__(self) -> str:
        limit = "" if self.budget is None else f" of {readable(self.budget)}"
        return f"{self.name}: {self.why}; about {readable(self.bytes)}{limit}"


def readable(size: int) -> str:
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} B"
