"""The loss of all data at θ, and what the outputs of other inputs owe to θ: all that a posterior is made of, whatever
its prior and its noise are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..curvature import Dense, Gram, Kronecker, Representation
from ..curvature.auto import free
from ..curvature.cost import Shapes, Work, look
from ..jacobian.linearization import Linearization, Needs
from ..jacobian.objective import Exact, Objective
from ..jacobian.passes import Coupled, Cut, Facts
from ..losses import Loss, Residual
from ..losses.base import Elementwise, weighted
from ..model.anatomy import Chance, Moment, submodules
from ..model.batch import Batch
from ..model.checks import check_coupling
from ..model.parameters import Parameters
from ..sources import Source
from ..surroundings import back_afterwards
from .likelihood import Likelihood, likelihood_of
from .precision import DataCurvature, DenseData, KroneckerData, RowsData

# Samples that are looked at first, before it is known how many numbers their rows have.
LOOK = 1024

# Numbers in rows that are written out at once: 256 MiB.
ROWS = 1 << 25

# Seconds on a machine of the usual speed that a matrix of all parameters may take before layers are taken apart.
LONG = 60.0


@dataclass(frozen=True, kw_only=True, eq=False)
class OutputsAlone(Residual):
    """The outputs that another loss is taken of: its rows are √2 ∂z/∂θ."""

    of: Loss

    def joined(self, raw: Any) -> Tensor:
        return self.of.joined(raw)


@dataclass(frozen=True, kw_only=True, eq=False)
class ByOutput(Elementwise):
    """b·ℓ with a factor for each output: noise of different size."""

    of: Elementwise
    b: Tensor  # (*out)

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return self.b.to(z) * self.of.ell(z, y)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return self.b.to(z) * self.of.slope(z, y)

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return self.b.to(z).sqrt() * self.of.s(z, y)

    def faults(self, z: Tensor, y: Any) -> list[Any]:
        return self.of.faults(z, y)


class Functional(NamedTuple):
    """Outputs and how they move with θ, in the groups of the loss."""

    z: Tensor  # (N, *out)
    mean: Tensor  # (N, P, C)
    rows: Tensor  # (N, P, C, n)


def evaluated(
    model: nn.Module, device: torch.device, move: Callable[[], object] = int, back: Callable[[], object] = int
) -> back_afterwards:
    """The model as it predicts, in eval mode and `move`d; its modes, buffers and the random numbers are afterwards as
    before."""
    modes, grad = [(module, module.training) for module in submodules(model)], torch.is_grad_enabled()
    before = Moment(model, device, Chance(drawn=True))

    def begin() -> None:
        torch.set_grad_enabled(True)
        for module, _ in modes:
            module.training = False
        move()

    def undo() -> None:
        torch.set_grad_enabled(grad)
        for module, training in modes:
            module.training = training
        back()
        before.restore(gently=True)

    return back_afterwards(undo, begin)


@dataclass
class Expansion:
    """Sums over all data at θ, in Σ-units: of ℓ, of its gradient, and of G."""

    model: nn.Module
    loss: Loss
    parameters: Parameters
    source: Source
    chunk: int | None = None  # samples that are linearised at once; None for what has room
    known: Facts = field(default_factory=Facts)

    def __post_init__(self) -> None:
        kind = likelihood_of(self.loss)
        self.theta = self.parameters.vector()  # (n,)
        self.passes = Facts()  # of the outputs alone
        whole = self.source.whole
        self.batches: Iterable[Batch] = self.source.batches() if whole is None else [whole]
        self.single = whole is not None
        chosen = self.chunk is None
        if chosen and whole is not None and whole.samples > LOOK and not whole.opaque:
            self.chunk = LOOK
        with self.at_rest():
            check_coupling(self.model)
            lin = self.linearization(self.loss)
            self.shapes = look(lin, None)
            if chosen and not self.shapes.divisible:
                self.chunk = None
            self.written = self._written()
            try:
                self._survey(self.linearization(self.loss), kind)
            except Coupled as error:
                raise ValueError(
                    f"the outputs of {type(self.model).__name__} for a sample depend on the other samples of its "
                    "batch also in eval mode, and a posterior is that of a function of single samples: take out what "
                    "mixes them"
                ) from error
            if lin.chance.drawn:
                raise ValueError(
                    f"{type(self.model).__name__} draws random numbers also in eval mode, so that its outputs are no "
                    "function of its parameters: take them out, or pass the model without them"
                )

    def at_rest(self) -> back_afterwards:
        """θ is where it was, for as long as this is looked at."""
        held, assign = self.parameters.vector(), self.parameters.assign
        moved = not torch.equal(held, self.theta)
        there, back = (partial(assign, self.theta), partial(assign, held)) if moved else (int, int)
        return evaluated(self.model, self.parameters.device, there, back)

    def _written(self) -> int | None:
        """Samples at once whose rows are written out; None for all of a batch"""
        s = self.shapes
        size = max(1, ROWS // (s.R * s.n))
        return self.chunk if size >= s.at_once(self.chunk) or not s.divisible else size

    def linearization(self, loss: Loss, written: bool = False) -> Linearization:
        objective = Objective(self.model, loss, self.parameters.tensors)
        needs = Needs(self.written if written else self.chunk)
        return Linearization(objective, self.batches, Exact(), needs, known=self.known, single=self.single)

    def _weighed(self, b: Tensor | None) -> Loss:
        """The loss, with factors by output"""
        of: Any = self.loss
        return self.loss if b is None else ByOutput(of=of, b=b)

    def _survey(self, lin: Linearization, kind: type[Likelihood]) -> None:
        """One pass over all data: the sums, and by output that of ℓ if there is a noise to learn from it."""
        constant, squares, weights, samples = 0.0, None, [], 0
        gradient: Tensor | None = None
        for piece in lin.pieces():
            if self.chunk is None and piece.divisible:  # in chunks they have been compared
                cut = Cut(piece.batch, -(-piece.N // 2), self.known, samples)
                cut.saw(piece.whole)
                cut.check("a posterior", "", thorough=False)
            loss, y, w = piece.objective.loss, piece.batch.targets, piece.batch.weight
            self.likelihood = kind(loss)
            constant += float(self.likelihood.constant(y, w))
            samples += piece.N
            weights += [] if w is None else [w.flatten().double()]
            if kind.noisy:
                own = weighted(loss.ell(piece.z, y), w).double().sum(0)  # (*out)
                squares = own if squares is None else squares + own
            gradient = piece.gradient if gradient is None else gradient + piece.gradient
        assert gradient is not None
        totals = lin.totals()
        self.value, self.normaliser, self.rounding = totals.value, totals.normaliser, totals.rounding
        self.constant, self.squares, self.gradient = constant, squares, gradient.double()
        self.total = replace(self.shapes, N=samples)  # of all batches
        self.mean_weight = mean_weight(torch.cat(weights)) if weights else 1.0

    def gradient_by(self, b: Tensor | None) -> Tensor:
        """Σ∂ℓ/∂θ with factors by output: (n,)"""
        if b is None:
            return self.gradient
        with self.at_rest():
            pieces = self.linearization(self._weighed(b)).pieces()
            return torch.stack([piece.gradient.double() for piece in pieces]).sum(0)

    # G of all data.

    def curvature(self, kind: Representation | None, proper: bool, b: Tensor | None = None) -> DataCurvature:
        """`proper`: every parameter has a prior, which rows and layers need; `b` are factors of ℓ by output"""
        s, loss = self.total, self._weighed(b)
        rows = isinstance(kind, Gram) or (
            kind is None and proper and s.m < s.n
        )  # which need a prior of every parameter
        layers = isinstance(kind, Kronecker) or (kind is None and not fits(s, rows, self.parameters.device))
        with self.at_rest():
            lin = self.linearization(loss, written=not layers)
            return by_layers(lin) if layers else by_rows(lin) if rows else by_matrix(lin)

    def by_row(self, b: Tensor | None = None) -> Iterator[Tensor]:
        """The rows J̃ of all pieces, by output: (R, N, n)"""
        with self.at_rest():
            for piece in self.linearization(self._weighed(b), written=True).pieces():
                yield piece.dense(torch.float64).unflatten(0, (-1, piece.N))

    # Other inputs.

    def parts(self, batch: Batch) -> list[Batch]:
        """So many samples at once that their rows can be written out"""
        size = max(1, ROWS // (self.shapes.out * self.parameters.n))
        return batch.split(None if batch.opaque or batch.samples <= size else size)

    def functional(self, inputs: Any) -> Functional:
        """z and ∂z/∂θ"""
        objective = Objective(self.model, OutputsAlone(of=self.likelihood.loss), self.parameters.tensors)
        with self.at_rest():
            piece = Linearization(objective, [Batch(inputs)], known=self.passes).whole()
            loss, z = self.likelihood.loss, piece.z.double()
            place = loss.group(torch.arange(z[0].numel(), device=z.device).view(1, *z.shape[1:]))[0]  # (P, C)
            rows = piece.dense(torch.float64).unflatten(0, (-1, piece.N)) / 2**0.5  # (outputs, N, n)
            return Functional(z, loss.group(z), rows[place].movedim(2, 0))


def mean_weight(w: Tensor) -> float:
    """Of the samples that count; 1 if weights are whole numbers, as counts are"""
    return 1.0 if torch.equal(w, w.round()) else float(w[w > 0].mean())


def by_matrix(lin: Linearization) -> DataCurvature:
    """G in Σ-units"""
    G: Any = Dense(lin.needs.chunk, double=True).represent(lin)
    return DenseData(G.G / lin.scale)


def by_rows(lin: Linearization) -> DataCurvature:
    return RowsData(torch.cat([piece.dense(torch.float64) for piece in lin.pieces()]))


def by_layers(lin: Linearization) -> DataCurvature:
    G: Any = Kronecker(decay=0.0, chunk=lin.needs.chunk).represent(lin)
    return KroneckerData(G.layers, lin.parameters, lin.scale)


def fits(s: Shapes, rows: bool, device: torch.device) -> bool:
    """Whether a matrix of all parameters, or all rows of them, have room and time."""
    small, large = sorted((s.m, s.n))
    numbers = 3.0 * small * large + 3.0 * small**2 if rows else 4.0 * s.n**2
    work = Work(products=2.0 * small**2 * large, factor=10.0 * small**3) if rows else Work(
        products=2.0 * s.m * s.n**2, factor=2.0 * s.n**3
    )  # fmt: skip
    memory = free(device)
    return (memory is None or 8 * numbers <= memory) and work.seconds(replace(s, itemsize=8)) <= LONG
