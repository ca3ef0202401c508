"""What has been found out about a model: proven on first use, kept while it is called in the same way."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..layers.watch import Layout
from .objective import Totals


@dataclass
class Proof:
    """How the rows of each parameter are found, as it was proven on first use."""

    layouts: dict[tuple[int, ...], Layout] = field(default_factory=dict)  # blocks with a rule, by their parameters
    general: dict[int, str] = field(default_factory=dict)  # the other parameters: one of jacobian.PATHS
    inert: dict[int, float] = field(default_factory=dict)  # parameters without influence, and a bound on their rounding
    unused: set[int] | None = None  # calls that the outputs do not depend on
    sizes: set[int] = field(default_factory=set)  # numbers of samples that it was compared on
    alarms: int = 0  # how often a proof was repeated for nothing
    quiet: int = 0  # pieces that need not be compared with autograd: some after a success, more after such an alarm

    def path(self, i: int) -> str:
        return "none" if i in self.inert else self.general.get(i, "rule")

    def same(self, other: Proof) -> bool:
        return (self.layouts, self.general, set(self.inert)) == (other.layouts, other.general, set(other.inert))


@dataclass
class Known:
    """Of one model, for one optimizer."""

    proof: Proof = field(default_factory=Proof)  # of the last piece
    proven: object = None  # how the model was called when this was proven; None while some gradient is still zero
    proofs: dict[object, Proof] = field(default_factory=dict)  # by how the model is called
    random: set[object] = field(default_factory=set)  # modes of the modules in which the model draws random numbers
    only_slopes: bool = False  # the model draws no random numbers but slopes of RReLU
    steady: bool = False  # a forward pass leaves the buffers as they are
    loss: object = None  # the loss whose derivatives are proven
    batched_rows: bool = True  # backward passes of all rows at once
    unrolls: bool = True  # convolutions may have a backward pass of our own
    rows_per_sample: int = 0  # on the last step
    totals: Totals | None = None  # of the last step
    differentiates: bool = False  # the model differentiates itself: trial points need a graph too
    # Whether forward passes of all trial points at once are right, by how the model is called; missing while unproven.
    batched_trials: dict[object, bool] = field(default_factory=dict)
