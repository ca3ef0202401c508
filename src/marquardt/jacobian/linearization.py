"""The batch linearised at θ: f, g and, piece by piece, the rows J̃ = SᵀJ of the curvature; and losses along
directions from there."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves

from .. import tolerances
from ..deferred import AS_IS, agreed, current, floats
from ..layers import Line
from ..losses import resolve
from ..model.anatomy import Anatomy, Chance, Moment, SameSlopes, Slopes, call_with
from ..model.batch import Batch, bounds, modes, twice_differentiable
from ..model.checks import check_coupling, trainable
from ..model.decay import Penalty, WeightDecay
from ..model.parameters import Parameters, Position
from ..ranks import ALONE, Ranks
from ..surroundings import out_of_memory
from ..weights import Weights
from .objective import Exact, Level, Objective, Rows, Seed, Totals
from .passes import Cut, Facts, Pass
from .piece import Piece
from .sharded import ShardedPiece


class Share:
    """The samples of rank 0 come first, then those of rank 1, and so on. What is asked here of all ranks, every rank
    asks."""

    def __init__(self, ranks: Ranks, batches: Iterable[Batch], single: bool, step: int) -> None:
        self.ranks, self.batches, self.single, self.step = ranks, batches, single, step

    @cached_property
    def _counts(self) -> list[int]:
        """Samples of every rank"""
        return self.ranks.numbers(sum(batch.samples for batch in self.batches) if self.single else 0)

    @property
    def samples(self) -> int:
        """Of the batch on all ranks; 1 if there are several batches."""
        return max(1, sum(self._counts))

    @cached_property
    def input_size(self) -> int:
        """Numbers in the inputs of the one batch, on the rank that has most."""
        leaves = tree_leaves([batch.inputs for batch in self.batches]) if self.single else []
        return max(self.ranks.numbers(sum(t.numel() for t in leaves if isinstance(t, Tensor))))

    def expected(self, N: int) -> int:
        """Samples of all pieces, if the first has N; N if nothing tells."""
        if self.single:
            return self.samples
        try:
            pieces = len(getattr(self.batches, "batches", ()))
        except TypeError:  # an iterable, or a DataLoader of one, which has the method and no answer
            pieces = 1
        return N * sum(max(1, pieces) for pieces in self.ranks.numbers(pieces))

    def seed(self, piece: int, chunk: int | None) -> Seed:
        """For the random numbers of one piece. Of one batch they belong to the samples, however it is cut."""
        number = self.step + piece * self.ranks.size + self.ranks.rank
        if self.single and chunk is None and not self.ranks.several:
            (batch,) = self.batches
            y = batch.targets
            samples = y.shape[0] if y.__class__ is Tensor and y.ndim else batch.samples
            return Seed(number, self.step, 0, samples) if samples else Seed(number)
        own = self._counts[self.ranks.rank] if self.single else 0
        if not own:
            return Seed(number)
        first = sum(self._counts[: self.ranks.rank]) + (0 if chunk is None else bounds(own, chunk)[piece])
        return Seed(number, self.step, first, self.samples)


# --- One pass over the batch: outputs z, loss f, gradient g, and the rows J̃ = SᵀJ of the curvature, piece by piece.


EMPTY = "no batches: the iterable given to step_over is empty"


@dataclass(frozen=True)
class Needs:
    """What a representation of the curvature asks of a linearisation, said before there is one.

    >>> lin = mq.linearize(model, "mse", x, y, needs=mq.MatrixFree().needs)
    """

    chunk: int | None = None  # samples that are linearised at once; None: any number
    by_sample: bool = True  # rows that belong to one sample each: then no layer may couple the samples
    graph: bool = False  # graphs that stay, and can be differentiated again
    together: bool = False  # all rows of a step at once, so that several batches are refused


# What a linearisation knows of the whole batch, after the first time through its pieces.
CONCLUSIONS = ("decay", "scale", "m", "most")


class Linearization:
    """The batch at the current parameters: f, g and, piece by piece, the rows of G.

    `pieces()` gives them one after the other; `loss`, `gradient` and `scale` are those of all of them together. Of
    several ranks each has its own pieces: what is added up over them is added up over `ranks` too, after the loop.

    >>> gradient = mq.linearize(model, "mse", x, y).gradient
    """

    decay: Penalty | None  # weight decay, in the units of f; None if there is none
    scale: float  # f = scale · Σwℓ, and so g and G, but for weight decay
    m: int  # rows of this step, on all ranks,
    most: int  # and in the largest step so far

    def __init__(
        self, objective: Objective, batches: Iterable[Batch], rows: Rows = Exact(), needs: Needs = Needs(), *,
        known: Facts | None = None, seed: int = 0, single: bool = True, most: int = 0, chance: Chance | None = None,
        ranks: Ranks = ALONE, form: Anatomy | None = None,
    ) -> None:  # fmt: skip
        self.objective, self.batches, self.rows_kind, self.needs = objective, batches, rows, needs
        self.parameters = objective.parameters
        self.known = known if known is not None else Facts()
        self.seed = seed
        self.single = single  # one batch that may be gone through again in any order
        self.in_one = single and needs.chunk is None  # whether there is one piece, which stays open
        self.n = self.parameters.whole.n
        self.ranks = ranks if self.parameters.shards is None else ALONE  # a ShardedPiece has the rows of all ranks
        self.share = Share(ranks, batches, single, seed)
        self.position = Position(self.parameters)
        self.theta = self.position.theta  # (n,)
        self.chance = chance if chance is not None else Chance()
        form = self.known.look(objective.model) if form is None else form
        self.start = Moment(objective.model, self.parameters.device, self.chance, form)
        self.end = self.start
        self.slopes: list[list[Slopes]] = []  # of RReLU, by piece
        self.objectives: list[Objective] = []  # for the outputs of each piece
        self.structures: set[int] = set()  # of the graphs of the pieces
        self.checksum: Any = 0.0  # of the targets
        self._most = most  # rows in an earlier step
        self._m = 0  # rows of this one, on this rank,
        self._pieces = 0  # and its pieces
        self._rows = 0  # and on all of them
        self._totals: Totals | None = None
        self._moments: list[Moment] = []  # before each piece
        self._inert: set[int] | None = None  # parameters without influence in all pieces whose rows were formed so far
        self._h: Tensor | None = None  # remainder of several pieces, in Σ-units
        self._gradient: Tensor | None = None
        self._remainder: Tensor | None = None
        self._rest: tuple[set[int], Tensor] | None = None  # without these, and with weight decay
        self._pull: Tensor | None = None
        self._open: Piece | None = None

    def made_for(self, needs: Needs, rows: Rows | None = None) -> Linearization:
        """This, if its rows, chunks and graphs serve these needs; otherwise another one of the same batch, as if this
        had never been. Whether there is one batch and whether its samples are independent is for the optimizer to
        check."""
        chunk = self.needs.chunk if needs.chunk is None else needs.chunk
        rows = self.rows_kind if rows is None else rows
        same = rows is self.rows_kind or rows == self.rows_kind
        if chunk == self.needs.chunk and (self.needs.graph or not needs.graph) and same:
            return self
        self.close()
        self.rewind()
        other = Linearization(
            self.objective, self.batches, rows, replace(needs, chunk=chunk), known=self.known,
            seed=self.seed, single=self.single, most=self._most if rows == self.rows_kind else 0, chance=self.chance,
            ranks=self.share.ranks,
        )  # fmt: skip
        other.share = self.share
        return other

    @property
    def steady(self) -> bool:
        """Whether the forward pass has left the buffers as they were."""
        return self.single and self.end.same_buffers(self.start)

    # The pieces.

    def cut(self) -> Iterator[Batch]:
        """The batches, at most `chunk` samples each."""
        for batch in self.batches:
            yield from batch.split(self.needs.chunk)

    def _parts(self, look: bool) -> Iterator[tuple[Batch, Cut | None, bool]]:
        """The same; with what has to be looked at where a batch was cut, and whether a part is the last one of it."""
        for number, batch in enumerate(self.batches):
            parts = batch.split(self.needs.chunk)
            cut = Cut(batch, self.needs.chunk or 0, self.known, self.seed + number) if look and parts[1:] else None
            for part in parts:
                yield part, cut, part is parts[-1]

    def piece(
        self, batch: Batch, number: int, rows: Rows | None = None, *, graph: bool | None = None,
        before: Moment | None = None,
    ) -> Piece:  # fmt: skip
        """A part of the batch linearised at θ, with the random numbers that come next: `before` is this moment, if that
        is known."""
        graph = self.needs.graph if graph is None else graph
        seed = self.share.seed(number, self.needs.chunk)
        rows = self.rows_kind if rows is None else rows
        kind = Piece if self.parameters.shards is None else ShardedPiece
        try:
            with twice_differentiable(self.objective.model) if graph else AS_IS:
                return kind(self.objective, batch, rows, self.known, self.chance, seed, graph, before)
        except Exception as error:
            if self.needs.chunk is not None and batch.samples == 1 and hasattr(error, "add_note"):  # Python 3.11
                error.add_note(
                    f"chunk={self.needs.chunk}: a sample went through the model by itself; if that takes only several, "
                    "choose chunk=3 or more, or leave chunk out"
                )
            raise

    def rewind(self) -> None:
        """Parameters, buffers and random numbers as they were before the first piece."""
        if self.start.buffers or self.chance.drawn:
            self.start.restore()
        if self.position.at is not None:  # trial points may have been tried since
            self.position.move()

    def whole(self) -> Piece:
        """The only piece: for representations that come back to the rows."""
        if self._open is None:
            self.rewind()
            (batch,) = self.batches
            self._open = piece = self.piece(batch, 0, before=self.start)
            if self._totals is None:
                self._remember(piece)
                self._conclude(piece.totals)
        return self._open

    def first(self) -> Piece:
        """The first of several pieces, to look at: nothing is kept of it."""
        self.rewind()
        self._survey()
        batch = next(iter(self.cut()), None)
        if batch is None:
            raise ValueError(EMPTY)
        piece = self.piece(batch, 0)
        self.rewind()
        return piece

    def reopened(self) -> Piece:
        """The only piece once more, with a new graph: the last one held weights that have changed."""
        self._gather_inert(self.whole())
        self._open = None  # first: two graphs may not fit
        return self.whole()

    def pieces(self) -> Iterable[Piece]:
        """Every piece. The first time round also adds up f and the normaliser, which are known after it."""
        return [self.whole()] if self.in_one else self._each()

    def _each(self) -> Iterator[Piece]:
        first = self._totals is None
        if first and self._pieces:
            raise RuntimeError(
                "lin.loss, lin.scale and lin.m cannot be asked within the first loop over lin.pieces(): "
                "ask before it, or after it"
            )
        if first and self.needs.chunk is not None:
            check_coupling(self.objective.model)
        self.rewind()
        self._survey()
        totals, h = Totals(0.0, 0.0, 0.0, 0.0), None
        for i, (batch, cut, last) in enumerate(self._parts(first)):
            piece = self.piece(batch, i)
            if cut is not None:
                if not piece.divisible:
                    raise ValueError(
                        f"chunk={self.needs.chunk}: {batch.samples} samples gave {piece.N} outputs, so the batch "
                        "cannot be cut into samples; leave chunk out, or pass inputs and outputs with one row per "
                        "sample"
                    )
                cut.saw(piece.whole)
            if first:
                totals = Totals(*map(sum, zip(totals, piece.totals, strict=True)))
                self._remember(piece)
            yield piece
            self._gather_inert(piece)
            if first and piece.h is not None:
                h = piece.h if h is None else h + piece.h
            if cut is not None and last:
                cut.check(
                    f"chunk={self.needs.chunk}", "leave chunk out, so that the batch goes through the model whole"
                )
        if first:
            self._h = h
            self._conclude(totals)

    def _survey(self) -> None:
        """What the loss must know of all pieces before the first: by a forward pass of each."""
        if not self.objective.given.surveys or self.objective.sums is not None:
            return
        found = [Pass(self.objective, batch, self.known, self.chance).sums() for batch in self.cut()]
        if not found:
            raise ValueError(EMPTY)
        self.objective = self.objective.knowing(self.share.ranks.sum(torch.stack(found).sum(0)))
        self.rewind()

    def _conclude(self, totals: Totals) -> None:
        if not self._pieces:
            raise ValueError(EMPTY)
        self._rows = self._m
        if self.share.ranks.several:
            own = torch.tensor([*totals, self._m], dtype=torch.float64, device=self.parameters.device)
            *found, rows = self.share.ranks.sum(own).tolist()
            totals, self._rows = Totals(*found), int(rows)
        if not totals.normaliser > 0:
            raise ValueError(
                "the total weight of the batch is 0: every target has weight 0 or is ignored, leave this batch out"
            )
        objective = self.objective
        self.decay = None if objective.penalty is None else objective.decay(totals.normaliser)
        self.scale = objective.loss.scale(totals.normaliser)
        self.m, self.most = self._rows, max(self._most, self._rows)
        self._level: Level | None = None
        self._totals, self.end = totals, self.start
        if self._open is None or self._open.whole.after is not self.start:
            model = self.objective.model
            self.end = Moment(model, self.parameters.device, self.chance, self.known.look(model))

    def _remember(self, piece: Piece) -> None:
        """What repeats this piece as it was; for several batches bounded memory comes first."""
        self._m += piece.telling
        self._pieces += 1
        if self.single:
            self._moments += (piece.whole.before,)
            self.slopes += ([*piece.whole.slopes],)
            self.objectives += (piece.objective,)
            if current.tape is None:
                self.structures |= {piece.whole.walk.structure}
        else:
            self.checksum = self.checksum + piece.batch.checksum()

    def _gather_inert(self, piece: Piece) -> None:
        """A parameter is without influence only if it is so in every piece."""
        if piece.inert is not None:
            self._inert = set(piece.inert) if self._inert is None else self._inert & piece.inert

    @property
    def inert(self) -> set[int]:
        """The parameters without influence on any rank, as far as rows have shown it."""
        if self._open is not None:
            self._gather_inert(self._open)
        return self.common(self._inert or set())

    def common(self, own: set[int]) -> set[int]:
        """The parameters that every rank has among these"""
        if not self.ranks.several:
            return own
        if len(set(self.ranks.numbers(zlib.crc32(repr(sorted(own)).encode())))) == 1:
            return own
        return set.intersection(*self.ranks.every(own))

    def piece_at(self, i: int) -> Piece:
        """Piece i again, as it was the first time (same random numbers, same buffers)."""
        if self.in_one:
            return self.whole()
        self._moments[i].restore()
        self.position.move()
        return self.piece(list(self.cut())[i], i)

    def close(self) -> None:
        """Lets go of the rows at once; what is asked after that is linearised anew."""
        torch.clear_autocast_cache()  # of weights at a trial point, without a graph
        if self.parameters.shards is not None:
            self.parameters.let_go()
        if self._totals is not None:
            del self.decay, self.scale, self.m, self.most
        self._open = self._totals = self._inert = self._h = self._gradient = self._remainder = self._pull = None
        self._rest = None
        self._moments, self.slopes, self.objectives, self.structures = [], [], [], set()
        self._m, self._pieces, self._rows, self.checksum = 0, 0, 0, 0.0

    # What they add up to.

    def __getattr__(self, name: str) -> Any:
        """What is known after the first time through the pieces: asked before, that takes place now."""
        if name not in CONCLUSIONS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self.totals()
        return self.__dict__[name]

    def totals(self) -> Totals:
        if self._totals is None:
            for _ in self.pieces():
                pass
        assert self._totals is not None
        return self._totals

    @property
    def level(self) -> Level:
        totals, decay = self.totals(), self.decay
        if self._level is None:
            at_theta = 0.0 if decay is None else floats(decay.value(self.parameters.shaped(self.theta)))[0]
            self._level = self.objective.level(totals, at_theta, self.scale)
        return self._level

    @property
    def loss(self) -> float:
        return self.level.f

    @property
    def gradient(self) -> Tensor:
        """∇f: (n,)"""
        return self.regularised(self.parameters.without(self.slope, self.inert))

    @property
    def told(self) -> bool:
        """Whether the remainder is what it will be: the rows of the only piece have told which parameters are inert."""
        return self._rest is not None and self._open is not None

    def regularised(self, slope: Tensor) -> Tensor:
        """∇f from its part that the data have: (n,)"""
        pull = self.pull
        return slope if pull is None else slope + pull.to(slope.dtype)

    @property
    def pull(self) -> Tensor | None:
        """W(θ − θ₀), the part of ∇f that weight decay has: (n,), None means 0"""
        decay = self.decay
        if decay is not None and self._pull is None:
            self._pull = decay.slope(self.theta)
        return self._pull

    @property
    def slope(self) -> Tensor:
        """The part of ∇f that the data have, also where it is all rounding: (n,)"""
        if self._gradient is None:
            total: Tensor | None = None
            for piece in self.pieces():
                total = piece.gradient if total is None else total + piece.gradient
            assert total is not None
            self._gradient = self.ranks.sum(total * self.scale)
        return self._gradient

    @property
    def remainder(self) -> Tensor | None:
        """h = Jᵀv + W(θ − θ₀), the part of g that is not J̃ᵀu: (n,), None means 0"""
        if self._rest is not None and self._open is not None:  # whose rows have told
            return self._rest[1]
        if self._totals is None:
            self.totals()
        piece = self._open
        h = self._h if piece is None or piece.cotangents.v is None else piece.h
        if h is None and self._remainder is None:
            return self.pull
        if self._remainder is None:
            assert h is not None
            self._remainder = h * self.scale if not self.ranks.several else self.ranks.sum(h * self.scale)
        inert = self.inert
        rest = self.regularised(self.parameters.without(self._remainder, inert) if inert else self._remainder)
        if self._open is not None and self._open.inert is not None:
            self._rest = inert, rest
        return rest

    # To look at.

    @property
    def loss_curvature(self) -> str:
        """What the rows have for ∂²ℓ/∂z²: the "hessian", a "fisher" information, a "majoriser" of it, …"""
        return self.objective.loss.curvature_kind

    def rows(self) -> Tensor:
        """J̃ itself, of this rank, (m, n): for small problems and for tests."""
        return torch.cat([piece.dense(self.parameters.dtype) for piece in self.pieces()]) * float(self.scale**0.5)

    @property
    def paths(self) -> dict[str, str]:
        """Parameter name → "rule", "graph" or another path of its rows; "none" if the outputs do not depend on it."""
        for piece in self.pieces():
            _ = piece.blocks
        return {name: self.known.proof.path(i) for i, name in enumerate(self.parameters.names)}


# --- Losses at trial points θ + lr·d: on the same pieces, random numbers and buffers as in the linearisation.


# Numbers in the inputs of all trial points of one forward pass: a CPU gains nothing from more.
TOGETHER = {"cuda": 1 << 26, "cpu": 1 << 18}

# Losses that differ by no more than this number of roundings may be the same.
SAME_ROUNDINGS = 4


class Trials:
    """Losses along directions from the point of a linearisation."""

    def __init__(self, lin: Linearization) -> None:
        self.lin, self.objective, self.known = lin, lin.objective, lin.known

    def loss(self, d: Tensor, lr: float) -> Tensor:
        """f(θ + lr·d): () in float64. The model stays there: the optimizer decides where it ends."""
        lin = self.lin
        if lin._totals is None:  # trials repeat what the linearisation has done
            lin.totals()
        lin.position.move(d, lr)
        if lin.start.buffers or lin.chance.drawn:
            lin.start.restore()
        total: Tensor | None = None
        checksum: Any = 0.0
        for i, batch in enumerate(lin.batches if lin.in_one else lin.cut()):
            objective, z = self._passed(i, batch)
            value = objective.loss.value(z.detach(), batch.targets, batch.weight)
            total = value if total is None else total + value
            if not lin.single:
                checksum = checksum + batch.checksum()
        if not lin.single and not abs(float(checksum) - float(lin.checksum)) <= 1e-6 * abs(float(lin.checksum)):
            raise ValueError(
                "the batches are not the same every time they are gone through: use the same data in each pass"
            )
        assert total is not None
        total = total.double()
        found: Tensor = (lin.share.ranks.sum(total) if lin.share.ranks.several else total) * lin.scale
        return found if lin.decay is None else found + lin.decay.value(lin.parameters.tensors)

    def _passed(self, i: int, batch: Batch) -> tuple[Objective, Tensor]:
        """z, with the slopes of RReLU that were drawn; with a graph if the model differentiates itself"""
        lin, graph = self.lin, self.known.differentiates
        if not graph and not torch.is_grad_enabled() and lin.single and not lin.slopes[i] and not lin.chance.drawn:
            return self._outputs(i, batch)
        with torch.set_grad_enabled(graph), SameSlopes(lin.slopes[i]) if lin.single else nullcontext():
            return self._outputs(i, batch)

    def _outputs(self, i: int, batch: Batch) -> tuple[Objective, Tensor]:
        if not self.lin.single:
            return self.lin.objective.taken(self.lin.objective.called(batch.inputs), batch)
        objective = self.lin.objectives[i]
        return objective, objective.outputs(batch.inputs)

    def losses(self, d: Tensor, rates: Sequence[float]) -> list[float]:
        """f(θ + lr·d) for every lr: all in one batched forward pass, or one after the other if vmap refuses."""
        lin = self.lin
        lin.totals()
        size, proven = self._together(), self.known.batched_trials
        # Which random numbers a batched pass draws depends on the modes and the strides, and so on the sizes.
        sizes = tuple(batch.samples for batch in lin.batches) if lin.single and lin.chance.drawn else None
        key = modes(self.objective.model), sizes, self.objective.autocast, frozenset(lin.structures)
        batched = len(rates) > 1 and size > 1 and proven.get(key, True) and not self.known.differentiates
        batched = batched and lin.parameters.shards is None  # weights are gathered in ordinary passes alone
        if lin.ranks.all(batched):
            total = self._tried(key, d, rates, size)
            if lin.ranks.all(total is not None):
                assert total is not None
                losses = self._in_units(total, d, rates)
                if lin.ranks.all(key in proven):
                    return losses
                # A model may keep its weights where nothing replaces them, or draw other numbers in a batched pass. At
                # one point alone, far away, that may not show.
                true = floats(*(self.loss(d, lr) for lr in rates))
                pairs = zip(losses, true, strict=True)
                least = SAME_ROUNDINGS * lin.level.rounding
                proven[key] = all(abs(a - b) <= tolerances.of_trials(d.dtype) * abs(b) + least for a, b in pairs)
                # As in every later step: a run that is resumed goes on bit for bit.
                return losses if proven[key] else true
        return floats(*(self.loss(d, lr) for lr in rates))

    def _tried(self, key: object, d: Tensor, rates: Sequence[float], size: int) -> Tensor | None:
        """Σwℓ on this rank for every lr: (k,); None if vmap refuses, or has no memory for it"""
        try:
            self.lin.position.move()
            return self._batched(d, rates, size)
        except Exception as error:  # vmap refuses models in many ways
            if not out_of_memory(error):
                self.known.batched_trials[key] = False
            return None

    def _in_units(self, total: Tensor, d: Tensor, rates: Sequence[float]) -> list[float]:
        """f from Σwℓ of this rank, for every lr"""
        lin = self.lin
        losses = [float(f) for f in (lin.ranks.sum(total.double()) * lin.scale).tolist()]
        decays = [0.0] * len(losses) if lin.decay is None else lin.decay.along(lin.theta, d, rates)
        return agreed([f + decay for f, decay in zip(losses, decays, strict=True)])

    def _together(self) -> int:
        """How many trial points one forward pass may hold."""
        lin = self.lin
        inputs = sum(t.numel() for batch in lin.batches for t in tree_leaves(batch.inputs) if isinstance(t, Tensor))
        most = TOGETHER.get(lin.parameters.device.type, TOGETHER["cpu"])
        return most // max(1, inputs) if lin.single else 1

    def _batched(self, d: Tensor, rates: Sequence[float], size: int) -> Tensor:
        lin = self.lin
        ids = [id(p) for p in lin.parameters.tensors]
        dtypes = {id(p): p.dtype for p in lin.parameters.tensors}
        straight = d.is_cuda and not lin.parameters.coarse  # rounded points are on no line
        origin, direction = (dict(zip(ids, lin.parameters.shaped(v), strict=True)) for v in (lin.theta, d))
        lin.start.restore()
        total: Any = 0.0
        for batch, slopes, objective in zip(lin.cut(), lin.slopes, lin.objectives, strict=True):

            def value(
                lr: Tensor, batch: Batch = batch, slopes: list[Slopes] = slopes, objective: Objective = objective
            ) -> Tensor:
                at = {key: (p + lr * direction[key]).to(dtypes[key]) for key, p in origin.items()}
                with SameSlopes(slopes), Line(origin, direction, at, lr) if straight else nullcontext():
                    z = objective.outputs(batch.inputs, call_with(objective.model, at))
                return objective.value(z, batch)

            with torch.no_grad(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")
                lrs = torch.tensor(rates, dtype=d.dtype, device=d.device)
                total = total + vmap(value, randomness="same", chunk_size=size)(lrs)
        found: Tensor = total
        return found


def linearize(
    model: nn.Module,  # in the mode in which it is trained
    loss: Any,  # as `mq.LM` takes it
    x: Any,  # inputs, as `LM.step` takes them
    y: Any = None,  # targets
    weight: Tensor | None = None,  # of the samples
    *,
    rows: Rows | None = None,  # which are formed; None for all
    params: Iterable[Tensor] | None = None,  # None for all that train
    chunk: int | None = None,  # samples that are linearised at once; None for all
    needs: Needs | None = None,  # of a representation, in the place of `chunk`
    weight_decay: float | WeightDecay = 0.0,  # part of f and g; G is that of the data
) -> Linearization:
    """The linearisation of one batch, to look at: `mq.Dense().represent(linearize(...))` is its Gauss-Newton matrix.
    The model runs under the torch.autocast in which this is called; to look at what comes of it, leave that.

    Returns:
        f, g and the rows of G, while the model stays as it is.

    >>> paths = mq.linearize(model, "mse", x, y).paths
    """
    rule, chosen = WeightDecay.of(weight_decay), trainable(model, params)
    spared = rule.spared(model, parameters := Parameters(model, chosen))
    weights = Weights([0.0 if free else rule.w for free in spared])
    objective = Objective(model, resolve(loss), chosen, weights, rule.anchor(parameters, spared))
    batches, ranks = [Batch(x, y, weight)], objective.parameters.ranks
    return Linearization(objective, batches, rows or Exact(), needs or Needs(chunk), ranks=ranks)
