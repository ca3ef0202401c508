"""The contract of the curvature: what a representation of G must define, and what it may override.

To add one, write two classes in one file. The first is a frozen dataclass with the options, derived from
`Representation`: `needs` states the requirements for the linearisation, `form` returns the second. The second derives
from `Curvature` and defines `__matmul__` and `newton`; docs/extending.md adds one from outside the package.

    entries of a damping A      Diagonal.of(A, sizes).entries(sizes): (n,)
    a question about tensors    deferred.ask(condition) instead of bool(condition), if steps are to be recorded
    the first pass              f, scale and m are known after the first loop over lin.pieces(), not within it
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..deferred import floats, recording
from ..jacobian import statistics
from ..jacobian.linearization import Linearization, Needs
from ..jacobian.objective import Exact, Rows
from ..jacobian.statistics import Moments, PartialTraces
from ..metric import Metric
from ..values import MOST, WAY_OUT, check_keys, check_square, check_tensor, short
from .cost import NOTHING, Cost, Plan, Shapes, look

Past = dict[str, Tensor]  # what a representation keeps from step to step
KEPT = "the state 'past'"

FASTER = "curvature=mq.Auto() picks what is faster"

# In how many steps, at most, it is checked that weight decay is included.
LOOKS = 8


class Curvature(ABC):
    """G at one point. A representation must define Gv and (G + A)⁻¹g, and may override the rest by something cheaper.

    G and its statistics are those of the data, g is that of the objective, with weight decay W(θ − θ₀). W is part of
    the A that `newton` receives, see `with_decay`.

    >>> G = mq.Dense().represent(mq.linearize(model, "mse", x, y))
    >>> G.gradient.shape, (G @ G.gradient).shape, G.newton(torch.tensor(0.1)).shape
    (torch.Size([33]), torch.Size([33]), torch.Size([33]))
    """

    averaged = False  # whether `model` uses a running average of G over batches, not G of this batch alone
    same_data = False  # whether the data are those of the step before
    takes_sums: ClassVar[bool] = False  # whether `newton` takes a sum, which has products and `beside` but no `solve`
    selects: ClassVar[bool] = False  # whether `with_decay` refuses some dampings, even without weight decay
    separable: ClassVar[bool] = False  # whether the damping D must have the form u ⊗ v in every layer

    def __init__(self, lin: Linearization) -> None:
        self.lin, self.parameters = lin, lin.parameters
        self.notes: list[str] = []  # escalations since the last step, as texts

    @property
    def rank(self) -> int:
        """The rank of G, at most: for J̃ᵀJ̃ the number of parameters or of rows in the largest batch so far, whichever
        is smaller. Another G overrides it: λ = 1 stands for tr G / rank"""
        return min(self.lin.n, self.lin.most)

    @property
    def gradient(self) -> Tensor:
        """g: (n,)"""
        return self.lin.gradient

    @abstractmethod
    def __matmul__(self, v: Tensor) -> Tensor:
        """Gv: (n,) → (n,)"""

    @abstractmethod
    def newton(self, damping: Metric | Tensor) -> Tensor:
        """(G + A)⁻¹g: (n,); A is a metric, one number () or one per parameter (n,). If G + A is not positive definite,
        it raises FactorizationError: the step fails, and λ rises."""

    def with_decay(self, A: Metric) -> Metric:
        """λD + W, the A that `newton` and `damped_quadratic` receive; if D is not diagonal, a metric of the same form
        that is at least λD + W, see Metric.plus"""
        decay, sizes = self.lin.decay, self.parameters.sizes
        if decay is None:
            return A
        exact = self.takes_sums or not A.turns
        return A.sum(decay.weights, sizes) if exact else A.plus(decay.weights, sizes)

    def step(self, A: Metric) -> Tensor:
        """−(G + A)⁻¹g: (n,)"""
        return -self.newton(A)  # not in place: `newton` may return a tensor that it keeps

    def quadratic(self, v: Tensor) -> Tensor:
        """vᵀGv"""
        return self.parameters.dot(v, self @ v)

    def products(self, V: Tensor) -> Tensor:
        """vᵢᵀGvⱼ of a few vectors, with the G of this batch alone if that is available: (k, n) → (k, k)"""
        return torch.stack([torch.stack([self.parameters.dot(v, Gw) for v in V]) for Gw in (self @ w for w in V)], 1)

    def damped_quadratic(self, v: Tensor, damping: Metric) -> Tensor:
        """vᵀHv with the H that `newton` solves with: G + A, unless a representation adds the damping in another way"""
        return self.quadratic(v) + damping.quadratic(v, self.parameters.sizes, self.parameters.dot)

    def slope(self, D: Metric) -> Tensor:
        """gᵀD⁻¹g, the square of the length of the gradient in the metric of D"""
        g = self.gradient
        return self.parameters.dot(g, D.solve(g.clone(), self.parameters.sizes))

    def model(self, d: Tensor) -> tuple[Tensor, Tensor]:
        """gᵀd and dᵀGd: the model of the loss is f + gᵀd + ½dᵀ(G + W)d"""
        return self.parameters.dot(self.gradient, d), self.quadratic(d)

    # What is kept from step to step.

    def recall(self, past: Past | None, same_data: bool) -> None:
        """Restores what an earlier step kept."""
        return None

    def keep(self) -> Past | None:
        """The tensors that the next step will recall."""
        return None

    # Statistics, for damping. Only the diagonal may have negative entries, if G is indefinite.

    def diagonal(self) -> Tensor:
        """diag G: (n,)"""
        return statistics.diagonal(self.lin)

    def trace(self) -> Tensor:
        """tr G: ()"""
        return self.diagonal().sum()

    def traces(self) -> list[tuple[list[int], Tensor, int]]:
        """For every layer: the indices of its parameters, the trace of its block of G (), and at most the rank of the
        block"""
        sizes, most = self.parameters.whole.sizes, self.lin.most
        found = {tuple(members): trace for members, trace in statistics.traces(self.lin)}
        totals = self.parameters.ranks.sums_by(found, self.lin.theta)
        return [(list(key), trace, min(sum(sizes[i] for i in key), most)) for key, trace in totals.items()]

    def moments(self) -> Iterator[Moments]:
        """diag G layer by layer, with the mean squares of the inputs of the layer"""
        return statistics.moments(self.lin)

    def partial_traces(self) -> PartialTraces | None:
        """The partial traces of the block of G of every layer, see statistics. A D formed from them is not diagonal:
        None if `newton` does not accept such a D (`Metric.turns`), or if there are no rows to form them from"""
        return None


class Damped:
    """H, the matrix the step solves with: G + A + W, where A is the damping and W weight decay; with Kronecker the
    product of the damped factors. Weight decay is added here, for all representations."""

    def __init__(self, G: Curvature, A: Metric) -> None:
        self.G, self.A, self.decay = G, A, G.lin.decay
        self.dot = G.parameters.dot  # aᵀb
        self.damping = A if self.decay is None and not G.selects else G.with_decay(A)

    def step(self) -> Tensor:
        """−H⁻¹g"""
        d = self.G.step(self.damping)
        if d.shape != (self.G.parameters.n,):
            name, shape = type(self.G).__name__, tuple(d.shape)
            raise ValueError(
                f"{name}.newton returned the shape {shape}: one number per parameter, ({self.G.parameters.n},)"
            )
        known = self.G.lin.known
        if self.decay is not None and known.decays < LOOKS and not recording():
            known.decays = LOOKS if self._proven(d) else known.decays + 1
        return d

    def _proven(self, d: Tensor) -> bool:
        """Whether weight decay is shown to be in g and H, by gᵀd = −dᵀHd for the step −H⁻¹g; False if its share is too
        small to tell. A user's curvature may leave weight decay out: it is refused if the equation fails, and holds far
        better without that term."""
        lin = self.G.lin
        assert self.decay is not None
        assert lin.pull is not None
        gradients = lin.pull, lin.gradient, self.gradient
        pull, gd, own = floats(*(self.dot(g, d) for g in gradients))
        press, dHd = floats(self.decay.quadratic(d), self.quadratic(d))
        least = 1e-3 * (abs(gd) + abs(dHd))
        sums = [(gd + dHd, [gd - pull + dHd, gd + dHd - press, gd - pull + dHd - press]), (gd - own, [gd - pull - own])]
        if any(abs(right) > least and min(map(abs, others)) < 1e-3 * abs(right) for right, others in sums):
            raise ValueError(
                f"{type(self.G).__name__} leaves weight decay out: its `gradient` is lin.gradient, that of the data "
                "and W(θ − θ₀), and `newton` solves for it with all of A, of which W is a part; or use weight_decay=0"
            )
        return min(abs(pull), abs(press)) > least

    @property
    def gradient(self) -> Tensor:
        """g"""
        return self.G.gradient

    def quadratic(self, v: Tensor) -> Tensor:
        """vᵀHv"""
        return self.G.damped_quadratic(v, self.damping)

    def model(self, d: Tensor) -> tuple[Tensor, Tensor]:
        """gᵀd and dᵀ(G + W)d: the model of the loss is f + gᵀd + ½dᵀ(G + W)d"""
        gd, dGd = self.G.model(d)
        return gd, dGd if self.decay is None else dGd + self.decay.quadratic(d)

    def products(self, V: Tensor) -> Tensor:
        """vᵢᵀ(G + A + W)vⱼ of a few vectors, even if H is not that sum: (k, n) → (k, k)"""
        AV = torch.stack([self.A.times(v, self.G.parameters.sizes) for v in V])
        if self.decay is not None:
            AV = AV + torch.stack([self.decay.times(v) for v in V])
        return self.G.products(V) + self.G.parameters.total(AV @ V.T)


@dataclass(frozen=True)
class Representation(ABC):
    """A way to represent G, chosen before G exists.

    `form` is the only method that must be defined; [a page](../extending.md) has a complete example.

    >>> isinstance(mq.Gram(), mq.Representation)
    True
    """

    adds_up: ClassVar[bool] = False  # whether its sums over pieces are also taken over ranks, by lin.ranks
    shares: ClassVar[bool] = False  # whether `Parameters` takes its sums over n: for sharded parameters

    @property
    def needs(self) -> Needs:
        """The requirements for the linearisation."""
        return Needs()

    def represent(self, lin: Linearization) -> Curvature:
        """G of a batch. If `lin` was made for other needs, another linearisation of the same batch replaces it."""
        needs, there = self.needs, lin.needs
        serves = needs.chunk in (None, there.chunk) and (there.graph or not needs.graph)
        G = self.form(lin if serves else lin.made_for(needs))
        if Curvature not in G.__class__.__mro__:
            raise TypeError(f"{type(self).__name__}.form returned {type(G).__name__}: it returns an mq.Curvature")
        return G

    @abstractmethod
    def form(self, lin: Linearization) -> Curvature:
        """G of a linearisation that was made for these needs."""

    @property
    def first_rows(self) -> Rows:
        """The rows to begin with, if LM was given none."""
        return Exact()

    def cost(self, s: Shapes) -> Cost | None:
        """The cost of forming G and solving with it once, from shapes alone; None if unknown."""
        return None

    def sent(self, s: Shapes) -> float | None:
        """The bytes that each rank sends on average to form G and solve with it once, from shapes alone; None if
        unknown."""
        return None

    def choose(
        self, lin: Linearization, plan: Plan | None, rows: Rows | None = None, steady: bool | None = None
    ) -> tuple[Representation, Plan | None]:
        """The representation of G in this step, chosen after a look at the batch, and a plan for the next step. `lin`
        is made for the needs of this representation; if the chosen one has other needs, another linearisation is made.
        Without `rows` the rows are chosen too. `steady` is whether the data are the same in every step, None if that is
        not known yet."""
        if self.cost(NOTHING) is None:
            return self, None
        shapes = look(lin, plan)
        if plan is not None and plan.shapes == shapes:
            return self, plan
        why = f"{shapes.n:,} parameters, {shapes.m:,} rows"
        plan = Plan((), kind=type(self).__name__, name=str(self), why=why, shapes=shapes, faster=FASTER)
        return self, plan.with_cost(shapes, self.cost(shapes))

    def smaller(self, plan: Plan | None, error: BaseException) -> Plan | None:
        """The next plan after memory ran out, or if rows turned out to be too expensive; None if there is no other."""
        return None

    def restored(self, plan: Plan, device: torch.device) -> Plan | None:
        """A saved plan, if it is still valid here."""
        return plan if plan.name == str(self) else None

    def takes(self, name: str) -> bool:
        """Whether this representation can continue with what another one, of this name, has kept."""
        return name == type(self).__name__

    def check(self, past: Past, sizes: Mapping[str, int]) -> None:
        """Raises ValueError if `past`, tensors of finite numbers, cannot have been kept by a step with parameters of
        these names and sizes."""
        return None


@dataclass(frozen=True)
class Interchangeable(Representation):
    """Auto, and what it may choose: all solve the same system, and each can continue with, or ignore, what another one
    has kept."""

    def takes(self, name: str) -> bool:
        return name in ("Auto", "Dense", "Gram", "MatrixFree")

    def check(self, past: Past, sizes: Mapping[str, int]) -> None:
        n = sum(sizes.values())
        check_keys(past, ("G", "batches", "x"), KEPT)
        if "x" in past:  # MatrixFree's last step
            check_tensor(past["x"], f"{KEPT} 'x'", (n,))
        if ("G" in past) != ("batches" in past):
            raise ValueError(f"{KEPT} has {' and '.join(past)}, and 'G' goes with 'batches': {WAY_OUT}")
        if "G" in past:  # Dense's running average
            check_tensor(past["G"], f"{KEPT} 'G'", (n, n))
            check_square(past["G"], f"{KEPT} 'G'")
            check_count(past["batches"], "batches")


def check_count(t: Tensor, name: str, least: int = 1) -> None:
    """Checks a number of steps or batches, given as a tensor"""
    if t.ndim or not least <= float(t) <= MOST:
        raise ValueError(f"{KEPT} {name!r} is {short(t.tolist())}, and a number of at least {least} is due: {WAY_OUT}")


def check_chunk(chunk: int | None) -> None:
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"chunk={chunk!r}: a number of samples of at least 1, or None for all at once")


def check_inertia(inertia: float) -> None:
    if not 0 <= inertia < 1:
        raise ValueError(f"inertia={inertia!r}: the weight of earlier batches, at least 0 (none) and below 1")
