"""What has been found out about a model: proven on first use, kept while it is called in the same way."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..layers.places import Place
from ..layers.watch import Layout
from ..model.walk import Anatomy, anatomy
from .objective import Totals

Groups = dict[tuple[int, ...], list[int]]  # calls that share parameters, by these
Site = tuple[int, int]  # a node of the graph by its number, and an input of it


@dataclass(frozen=True)
class Map:
    """Which uses there are, and the place of the samples in each.

    If a row of a layer goes into several samples, as with the residuals of several equations one after the other, they
    have different colours, and each colour has backward passes of its own.
    """

    stops: frozenset[int]  # nodes that see samples, of those that could do without
    blind: frozenset[int]  # nodes that see none, of those that could see some
    colours: tuple[tuple[slice, ...], ...]  # the samples of each
    places: tuple[Mapping[Site, Place], ...]  # by colour
    lost: frozenset[Site]  # uses that cannot be read


@dataclass
class Proof:
    """How the rows of each parameter are found, as it was proven on first use."""

    layouts: dict[tuple[int, ...], Layout] = field(default_factory=dict)  # blocks with a rule, by their parameters
    general: dict[int, str] = field(default_factory=dict)  # the other parameters: "graph", or one of jacobian.PATHS
    map: Map | None = None  # for those whose path is "graph"
    inert: dict[int, float] = field(default_factory=dict)  # parameters without influence, and a bound on their rounding
    unused: dict[Hashable, bool] = field(default_factory=dict)  # edges, and whether the outputs do not depend on them
    # By what shows of the passes that it was compared on: whether it holds there whatever numbers are in the graph.
    seen: dict[int, bool] = field(default_factory=dict)
    noise: dict[int, float] = field(default_factory=dict)  # what rounding may leave of a parameter's gradient, in all
    alarms: int = 0  # how often a proof was repeated for nothing
    quiet: int = 0  # pieces that need not be compared with autograd: some after a success, more after such an alarm

    def path(self, i: int) -> str:
        return "none" if i in self.inert else self.general.get(i, "rule")

    def same(self, other: Proof) -> bool:
        mine, its = ((p.layouts, p.general, p.map, set(p.inert)) for p in (self, other))
        return mine == its


class RowByRow(RuntimeError):
    """Rows of single samples take a backward pass each, through all samples, and those of all together would do."""


class Coupled(ValueError):
    """Samples of a batch that cannot go through the model in parts."""


@dataclass
class Known:
    """Of one model, for one optimizer."""

    anatomy: Anatomy | None = None  # of the model when it was last looked at
    proof: Proof = field(default_factory=Proof)  # of the last piece
    proven: object = None  # how the model was called when this was proven; None while some gradient is still zero
    proofs: dict[object, Proof] = field(default_factory=dict)  # by how the model is called
    # What was made of a plan, with all that was looked at then, see Auto.choose
    chosen: tuple[Any, ...] | None = None
    # By all that decides how the rows are found: calls that share parameters, by these, and what proofs are kept by.
    ways: dict[object, tuple[Groups, object]] = field(default_factory=dict)
    walks: set[object] = field(default_factory=set)  # ways of calling it in which the graph decides too
    linear: set[object] = field(default_factory=set)  # hooks and functions whose backward passes are linear
    random: set[object] = field(default_factory=set)  # modes of the modules in which the model draws random numbers
    only_slopes: bool = False  # the model draws no random numbers but slopes of RReLU
    steady: bool = False  # a forward pass leaves the buffers as they are
    loss: object = None  # the loss whose derivatives are proven
    decays: int = 0  # steps that were looked at, whether weight decay is in them
    batched_rows: bool = True  # backward passes of all rows at once
    may_join: bool = False  # rows of all samples together would do
    unrolls: bool = True  # convolutions may have a backward pass of our own
    rows_per_sample: int = 0  # on the last step
    exact_rows: tuple[object, object, int] | None = None  # of a sample, by the loss and the shapes of z and the targets
    totals: Totals | None = None  # of the last step
    differentiates: bool = False  # the model differentiates itself: trial points need a graph too
    # Whether forward passes of all trial points at once are right, by how the model is called; missing while unproven.
    batched_trials: dict[object, bool] = field(default_factory=dict)
    # By what shows of a pass through part of a batch: whether the structure of its graph keeps the samples apart.
    parts: dict[object, bool] = field(default_factory=dict)

    def look(self, model: nn.Module) -> Anatomy:
        """The model as it is now: the same object while nothing has changed."""
        self.anatomy = found = anatomy(model, self.anatomy)
        return found
