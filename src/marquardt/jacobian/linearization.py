"""One pass over the batch: outputs z, loss f, gradient g, and the rows J̃ = SᵀJ of the curvature, block by block."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves

from ..layers import Block, Line
from ..losses import Loss, resolve
from ..metric import Diagonal, Factors, known, known_entries
from ..model.batch import Batch, forward
from ..model.checks import check_coupling, trainable
from ..model.parameters import assign, flatten, shift
from ..model.randomness import Chance, Moment, SameSlopes, Slopes
from ..model.substituted import call_with
from .chunk import Chunk, Plan, Totals
from .rows import Exact, Rows


class Linearization:
    """The batch at the current parameters: f, g and, chunk by chunk, the rows of G.

    `chunks()` gives them one after the other; `loss`, `gradient` and `scale` are those of all of them together.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        criterion: Loss,
        params: Sequence[Tensor],
        batches: Iterable[Batch],
        rows: Rows,
        chunk: int | None = None,
        *,
        plan: Plan | None = None,
        seed: int = 0,
        single: bool = True,
        most: int = 0,
    ) -> None:
        self.model, self.criterion, self.params, self.rows_kind = model, criterion, list(params), rows
        self.batches, self.chunk, self.seed = batches, chunk, seed
        self.single = single  # one batch that may be gone through again in any order
        self.keep_graph = False  # of the chunks, also after their rows were formed
        self.plan = plan if plan is not None else Plan()
        self.index = {id(p): i for i, p in enumerate(self.params)}
        self.sizes = [p.numel() for p in self.params]
        self.n = sum(self.sizes)
        self.starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        self.device = self.params[0].device
        names = {id(p): name for name, p in model.named_parameters()}
        self.names = [names[id(p)] for p in self.params]
        self.theta = flatten(self.params)
        self._most = most  # rows in an earlier step
        self.m = 0  # rows, counted on the first pass
        self.count = 0  # chunks
        self.checksum: Any = 0.0  # of the targets
        self.chance = Chance()
        self.start = self.moment()
        self.moments: list[Moment] = []
        self.slopes: list[list[Slopes]] = []
        self._totals: Totals | None = None
        self._h: Tensor | None = None  # remainder of several chunks, in Σ-units
        self._gradient: Tensor | None = None
        self._remainder: Tensor | None = None
        self._open: list[Chunk] = []
        self.mute: set[int] | None = None  # parameters without influence in all chunks whose rows were formed so far
        self._at: tuple[Tensor, float] | None = None  # (d, lr) where the parameters are θ + lr·d

    @property
    def paths(self) -> dict[str, str]:
        """Parameter name → "rule", or the path that its rows take; "none" if the outputs do not depend on it."""
        for chunk in self.chunks():
            _ = chunk.blocks
        return {name: self.plan.proof.path(i) for i, name in enumerate(self.names)}

    def moment(self) -> Moment:
        return Moment(self.model, self.device, self.chance)

    def pieces(self) -> Iterator[Batch]:
        for batch in self.batches:
            yield from batch.split(self.chunk)

    def chunks(self) -> Iterator[Chunk]:
        """Every chunk. The first time round also adds up f, g and the normaliser."""
        if self._open:
            yield from self._open
            return
        first = self._totals is None
        if first and self.chunk is not None:
            check_coupling(self.model)
        self.start.restore()
        self.move()  # trial points may have been tried since
        totals = Totals(0.0, 0.0, 0.0, 0.0)
        h: Tensor | None = None
        for i, batch in enumerate(self.pieces()):
            chunk = Chunk(self, batch, self.seed + i)
            if first:
                self.count += 1
                self.m += chunk.m
                if self.single:
                    self.moments.append(chunk.before)
                    self.slopes.append(chunk.slopes)
                else:  # bounded memory comes first: trials rely on the generators alone
                    self.checksum = self.checksum + batch.checksum()
                totals = Totals(*map(sum, zip(totals, chunk.totals, strict=True)))
            if self.single and self.chunk is None:
                self._open = [chunk]
            yield chunk
            if first and chunk.h is not None and not self._open:  # otherwise that chunk stays, and can be asked
                h = chunk.h if h is None else h + chunk.h
        if not self.count:
            raise ValueError("no batches: the iterable given to step_over is empty")
        if first:
            if not totals.normaliser > 0:
                raise ValueError(
                    "the total weight of the batch is 0: every target has weight 0 or is ignored, leave this batch out"
                )
            self._totals = totals
            self._h = h
            self.end = self.moment()

    def samples(self) -> int:
        """Samples of the batch, where there is one."""
        return max(1, sum(batch.samples for batch in self.batches)) if self.single else 1

    def split(self, chunk: int | None) -> None:
        """Starts again with chunks of another size."""
        self.close()
        self.chunk, self.m, self.count, self.mute = chunk, 0, 0, None
        self._totals = self._h = self._gradient = self._remainder = None
        self.start.restore()

    @property
    def most(self) -> int:
        """Rows in the largest step so far."""
        return max(self._most, self.m)

    def close(self) -> None:
        """Lets go of the rows at once: chunks and their linearisation know each other."""
        self._open.clear()
        self.moments.clear()
        self.slopes.clear()

    def open(self) -> list[Chunk]:
        """The only chunk, kept open: for representations that come back to the rows."""
        if not self._open:
            self._open = list(self.chunks())
        return self._open

    def chunk_at(self, i: int) -> Chunk:
        """Chunk i again, as it was the first time (same random numbers, same buffers)."""
        if self._open:
            return self._open[i]
        self.moments[i].restore()
        self.move()
        return Chunk(self, list(self.pieces())[i], self.seed + i)

    def totals(self) -> Totals:
        if self._totals is None:
            if self.single and self.chunk is None:
                self.open()
            else:
                for _ in self.chunks():
                    pass
        assert self._totals is not None
        return self._totals

    @property
    def normaliser(self) -> float:
        """Σ of the weights that the mean divides by."""
        return self.totals().normaliser

    @property
    def scale(self) -> float:
        """f = scale · Σwℓ, and so g and G."""
        return self.criterion.scale(self.normaliser)

    @property
    def loss(self) -> float:
        return self.totals().value * self.scale

    @property
    def lower_bound(self) -> float:
        return self.totals().lower_bound * self.scale

    @property
    def rounding(self) -> float:
        """By how much f is uncertain."""
        return self.totals().rounding * self.scale

    @property
    def gradient(self) -> Tensor:
        """∇f: (n,)"""
        if self._gradient is None:
            total: Tensor | None = None
            for chunk in self.chunks():
                total = chunk.gradient if total is None else total + chunk.gradient
            assert total is not None
            self._gradient = total * self.scale
        return self.silenced(self._gradient)

    @property
    def remainder(self) -> Tensor | None:
        """h = Jᵀv, the part of g outside the range of J̃ᵀ: (n,), None means 0"""
        self.totals()
        h = self._open[0].h if self._open else self._h
        if h is not None and self._remainder is None:
            self._remainder = h * self.scale
        return None if self._remainder is None else self.silenced(self._remainder)

    def heard(self, mute: Iterable[int]) -> None:
        """The parameters without influence in one more chunk: another chunk may have gone where they have some."""
        self.mute = set(mute) if self.mute is None else self.mute & set(mute)

    def silenced(self, v: Tensor) -> Tensor:
        """v with 0 for the parameters without influence: (n,). They are known only once there are rows."""
        v = v.clone() if self.mute else v
        for i in self.mute or ():
            v[self.starts[i] : self.starts[i] + self.sizes[i]] = 0
        return v

    def columns(self, blocks: Sequence[Block]) -> list[tuple[slice, slice]]:
        """Where the parameters of some blocks are: (columns of θ, columns of the blocks side by side)"""
        found, start = [], 0
        for p in (p for block in blocks for p in block.params):
            first = self.starts[self.index[id(p)]]
            found.append((slice(first, first + p.numel()), slice(start, start + p.numel())))
            start += p.numel()
        return found

    def ranges(self, blocks: Sequence[Block]) -> list[tuple[slice, slice]]:
        """The same, with neighbours joined."""
        joined: list[tuple[slice, slice]] = []
        for here, there in self.columns(blocks):
            if joined and joined[-1][0].stop == here.start and joined[-1][1].stop == there.start:
                a, b = joined.pop()
                here, there = slice(a.start, here.stop), slice(b.start, there.stop)
            joined.append((here, there))
        return joined

    def gather(self, v: Tensor, block: Block) -> Tensor:
        """The part of v that belongs to a block: (n,) → (columns,)"""
        parts = v.split(self.sizes)
        return torch.cat([parts[self.index[id(p)]] for p in block.params])

    def add(self, v: Tensor, blocks: Sequence[Block], part: Tensor) -> None:
        """v += a part that belongs to some blocks: (n,), (columns,)"""
        for here, there in self.ranges(blocks):
            v[here] += part[there]

    def apply(self, blocks: Iterable[Block], v: Tensor) -> Tensor:
        """J̃v of one chunk, in Σ-units: (n,) → (m,)"""
        parts = v.split(self.sizes)
        total: Tensor | None = None
        for block in blocks:
            found = block.apply([parts[self.index[id(p)]] for p in block.params])
            total = found if total is None else total.add_(found)
        assert total is not None
        return total

    def adjoint(self, blocks: Iterable[Block], w: Tensor) -> Tensor:
        """J̃ᵀw of one chunk, in Σ-units: (m,) → (n,)"""
        total = torch.empty(self.n, dtype=w.dtype, device=w.device)
        parts = total.split(self.sizes)
        for block in blocks:
            block.adjoint(w, [parts[self.index[id(p)]] for p in block.params])
        return total

    def scatter(self, columns: Iterable[tuple[Block, Tensor]]) -> Tensor:
        """The inverse: one vector (n,) from the parts of all blocks."""
        total: Tensor | None = None
        for block, v in columns:
            if total is None:
                total = torch.empty(self.n, dtype=v.dtype, device=v.device)
            for here, there in self.columns([block]):
                total[here] = v[there]
        assert total is not None
        return total

    def diagonal(self) -> Tensor:
        """diag J̃ᵀJ̃: (n,)"""
        total: Tensor | None = None
        for chunk in self.chunks():
            found = self.scatter((block, block.diagonal()) for block in chunk.blocks)
            total = found if total is None else total + found
        assert total is not None
        return self.scale * total

    def traces(self) -> list[tuple[list[int], Tensor]]:
        """tr J̃ᵀJ̃ of every layer: (its parameters, by number; ())"""
        totals: dict[tuple[int, ...], Tensor] = {}
        for chunk in self.chunks():
            for block in (b for b in chunk.blocks if not b.empty):
                key = tuple(sorted(self.index[id(p)] for p in block.params))
                trace = block.trace() * self.scale
                for other in [k for k in totals if set(k) & set(key)]:  # the same one, or chunks that go other ways
                    trace = trace + totals.pop(other)
                    key = tuple(sorted({*key, *other}))
                totals[key] = trace
        return [(list(key), trace) for key, trace in totals.items()]

    def factored_maximum(self, D: Diagonal | None) -> Diagonal:
        """D_oi = u_o·v_i for every layer, see damping.FactoredMaxDiagonal."""
        # A layer that no batch has reached so far has one 0; one that this batch does not reach keeps what it has.
        zero = torch.zeros((), dtype=self.theta.dtype, device=self.device)
        parts: list[Factors] = [(zero,)] * len(self.params) if D is None or D.factors is None else list(D.factors)
        old = [() if part[0].ndim == 0 else part for part in parts]
        found = self._layers() if self.single and self.chunk is None else self._summed()
        for members, v, columns in found:
            columns = [column * self.scale for column in columns]
            weight, *bias = members
            if v is None or len(old[weight]) == 1:  # entry by entry; also where a rule was lost or found since
                for i, column in zip(members, columns, strict=True):
                    last = Diagonal(zero + 1, [old[i]]).entries([self.sizes[i]]) if old[i] else column
                    parts[i] = (known_entries(torch.maximum(last, column), self.params[i]),)
                continue
            if old[weight]:
                v = torch.maximum(old[weight][1], v)  # (G, 1, I)
            ratio = columns[0].view(len(v), -1, v.shape[2]) / v  # (G, O, I)
            u = ratio.where(v > 0, 0).amax(2, keepdim=True)  # (G, O, 1)
            if bias:  # its input is 1
                u = torch.maximum(u, columns[1].view_as(u))
            if old[weight]:
                u = torch.maximum(old[weight][0], u)
            u = known(u, 1)
            parts[weight] = (u, v)
            for i in bias:
                parts[i] = (u,)
        return Diagonal(zero + 1, parts)

    def _layers(self) -> Iterator[tuple[Sequence[int], Tensor | None, Sequence[Tensor]]]:
        """(parameters, mean a², diagonals) of the one chunk, layer by layer: all diagonals together are never there."""
        for block in (b for b in self.open()[0].blocks if not b.empty):
            members = [self.index[id(p)] for p in block.params]
            yield members, block.inputs(), block.diagonal().split([self.sizes[i] for i in members])

    def _summed(self) -> Iterator[tuple[Sequence[int], Tensor | None, Sequence[Tensor]]]:
        """The same from several chunks."""
        columns: dict[int, Tensor] = {}
        squares: dict[tuple[int, ...], Tensor] = {}
        ways: dict[int, set[tuple[int, ...] | None]] = {}  # the rules by which a parameter was reached
        total = 0
        for chunk in self.chunks():
            blocks = [b for b in chunk.blocks if not b.empty]
            total += chunk.N if blocks else 0
            for block in blocks:
                key, v = tuple(self.index[id(p)] for p in block.params), block.inputs()
                for i, column in zip(key, block.diagonal().split([self.sizes[i] for i in key]), strict=True):
                    columns[i] = columns[i] + column if i in columns else column
                    ways.setdefault(i, set()).add(None if v is None else key)
                if v is not None:
                    squares[key] = squares[key] + v * chunk.N if key in squares else v * chunk.N
        for key, v in squares.items():
            if all(ways[i] == {key} for i in key):
                yield key, v / total, [columns.pop(i) for i in key]
        for i, column in columns.items():
            yield (i,), None, (column,)

    def rows(self) -> Tensor:
        """J̃ itself, (m, n): for small problems and for tests."""
        parts = []
        for chunk in self.chunks():
            parts.append(self.dense(chunk.blocks, self.params[0].dtype))
        return torch.cat(parts) * float(self.scale**0.5)

    def dense(self, blocks: list[Block], dtype: torch.dtype) -> Tensor:
        """The rows of one chunk with their columns in the order of the parameters: (m, n)"""
        columns: list[Tensor] = [torch.empty(0)] * len(self.params)
        for block in blocks:
            pieces = block.rows(dtype).split([p.numel() for p in block.params], 1)
            for p, piece in zip(block.params, pieces, strict=True):
                columns[self.index[id(p)]] = piece
        return torch.cat(columns, 1)

    # Trial losses: the same batches, chunks, random numbers and buffers as in the linearisation.

    def move(self, d: Tensor | None = None, lr: float = 0.0) -> None:
        """The parameters to θ + lr·d."""
        there = None if d is None else (d, lr)
        if self._at is not None:
            if there is not None and self._at[0] is there[0] and self._at[1] == there[1]:
                return
            assign(self.params, self.theta)
        if d is not None:
            shift(self.params, d, lr)
        self._at = there

    def hardly_moves(self, length: float) -> bool:
        """Whether a step of this length leaves the first half of the digits of θ as they are."""
        return bool(length <= torch.finfo(self.theta.dtype).eps ** 0.5 * torch.linalg.vector_norm(self.theta))

    def evaluate(self, d: Tensor, lr: float) -> Tensor:
        """f(θ + lr·d): () in float64. The model stays there: the optimizer decides where it ends."""
        self.move(d, lr)
        self.start.restore()
        total: Any = 0.0
        checksum: Any = 0.0
        for i, batch in enumerate(self.pieces()):
            with torch.set_grad_enabled(self.plan.trial_needs_grad), self._replay(i):
                z = forward(self.model, batch.inputs)
            with torch.no_grad():
                total = total + self.criterion.value(z.detach(), batch.targets, batch.weight)
            if not self.single:
                checksum = checksum + batch.checksum()
        if not self.single and not abs(float(checksum) - float(self.checksum)) <= 1e-6 * abs(float(self.checksum)):
            raise ValueError(
                "the batches are not the same every time they are gone through: use the same data in each pass"
            )
        found: Tensor = total.double() * self.scale
        return found

    def _replay(self, i: int) -> AbstractContextManager[object]:
        return SameSlopes(self.slopes[i]) if self.single else nullcontext()

    def evaluate_along(self, d: Tensor, rates: Sequence[float]) -> list[float]:
        """f(θ + lr·d) for every lr: all in one batched forward pass, or one after the other where vmap refuses."""
        size, proven = self._together(), self.plan.batched_trials
        # Which random numbers a batched pass draws depends on the modes and the strides, and so on the sizes.
        sizes = tuple(batch.samples for batch in self.batches) if self.single and self.chance.drawn else None
        key = tuple(m.training for m in self.model.modules()), sizes
        try:
            if len(rates) > 1 and size > 1 and proven.get(key, True) and not self.plan.trial_needs_grad:
                self.move()
                losses = self._evaluate_together(d, rates, size)
                if key in proven:
                    return losses
                # A model may keep its weights where nothing replaces them, or draw other numbers in a batched pass. At
                # one point alone, far away, that may not show.
                true = [float(self.evaluate(d, lr)) for lr in rates]
                tolerance = 1e-6 if d.dtype == torch.float64 else 1e-3
                pairs = zip(losses, true, strict=True)
                proven[key] = not any(abs(a - b) > tolerance * abs(b) for a, b in pairs)
                return (
                    losses if proven[key] else true
                )  # as in every later step: a run that is resumed goes on bit for bit
        except torch.OutOfMemoryError:
            pass
        except Exception:  # vmap refuses models in many ways
            proven[key] = False
        return [float(self.evaluate(d, lr)) for lr in rates]

    def _together(self) -> int:
        """How many trial points one forward pass may hold: a CPU gains nothing from large ones."""
        inputs = sum(t.numel() for batch in self.batches for t in tree_leaves(batch.inputs) if isinstance(t, Tensor))
        return ((1 << 26) if self.device.type == "cuda" else (1 << 18)) // max(1, inputs) if self.single else 1

    def _evaluate_together(self, d: Tensor, rates: Sequence[float], size: int) -> list[float]:
        origin = self._by_id(self.theta)
        direction = self._by_id(d)
        self.start.restore()
        total: Any = 0.0
        for batch, slopes in zip(self.pieces(), self.slopes, strict=True):

            def value(lr: Tensor, batch: Batch = batch, slopes: list[Slopes] = slopes) -> Tensor:
                at = {key: p + lr * direction[key] for key, p in origin.items()}
                with SameSlopes(slopes), Line(origin, direction, at, lr) if lr.is_cuda else nullcontext():
                    z = forward(call_with(self.model, at), batch.inputs)
                return self.criterion.value(z, batch.targets, batch.weight)

            with torch.no_grad(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")
                lrs = torch.tensor(rates, dtype=d.dtype, device=d.device)
                total = total + vmap(value, randomness="same", chunk_size=size)(lrs)
        return [float(f) for f in (total.double() * self.scale).tolist()]

    def _by_id(self, theta: Tensor) -> dict[int, Tensor]:
        """The parts of θ in the place of the parameters."""
        return {id(p): t.view_as(p) for p, t in zip(self.params, theta.split(self.sizes), strict=True)}


def linearize(
    model: torch.nn.Module,
    loss: Any,
    x: Any,
    y: Any = None,
    weight: Tensor | None = None,
    *,
    rows: Rows | None = None,
    params: Iterable[Tensor] | None = None,
    chunk: int | None = None,
) -> Linearization:
    """The linearisation of one batch, to look at: `mq.Dense().represent(linearize(...))` is its Gauss-Newton matrix."""
    return Linearization(model, resolve(loss), trainable(model, params), [Batch(x, y, weight)], rows or Exact(), chunk)
