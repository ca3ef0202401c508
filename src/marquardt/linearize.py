"""One pass over the batch: outputs z, loss f, gradient g, and the rows J̃ = SᵀJ of the curvature, block by block."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_leaves

from .batch import Batch, Moment, assign, flatten, forward, trainable
from .chunk import Chunk, Plan
from .layers import Block, Replay
from .layers.capture import Slopes
from .losses import Loss, resolve
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
        self.start = Moment(model, self.device)
        self.moments: list[Moment] = []
        self.slopes: list[list[Slopes]] = []
        self._totals: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None] | None = None
        self._open: list[tuple[Chunk, list[Block]]] = []

    @property
    def paths(self) -> dict[str, str]:
        """Parameter name → "rule", or the path that its rows take."""
        self.totals()
        covered = {i for key in self.plan.layouts for i in key}
        return {name: "rule" if i in covered else self.plan.general[i] for i, name in enumerate(self.names)}

    def pieces(self) -> Iterator[Batch]:
        for batch in self.batches:
            yield from batch.split(self.chunk)

    def chunks(self) -> Iterator[tuple[Chunk, list[Block]]]:
        """Every chunk with its blocks. The first time round also adds up f, g and the normaliser."""
        if self._open:
            yield from self._open
            return
        first = self._totals is None
        self.start.restore()
        if not first:
            assign(self.params, self.theta)  # trial points may have been tried since
        totals: list[Any] = [0.0, 0.0, 0.0, 0.0, None]
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
                for k, term in enumerate((chunk.value, chunk.normaliser, chunk.lower_bound, chunk.gradient)):
                    totals[k] = totals[k] + term
                if chunk.h is not None:
                    totals[4] = chunk.h if totals[4] is None else totals[4] + chunk.h
            yield chunk, chunk.blocks()
        if not self.count:
            raise ValueError("no batches: the iterable given to step_over is empty")
        if first:
            if not bool(totals[1] > 0):
                raise ValueError(
                    "the total weight of the batch is 0: every target has weight 0 or is ignored, leave this batch out"
                )
            self._totals = (totals[0], totals[1], totals[2], totals[3], totals[4])
            self.end = Moment(self.model, self.device)

    @property
    def most(self) -> int:
        """Rows in the largest step so far."""
        return max(self._most, self.m)

    def close(self) -> None:
        """Lets go of the rows at once: chunks and their linearisation know each other."""
        self._open.clear()
        self.moments.clear()
        self.slopes.clear()

    def open(self) -> list[tuple[Chunk, list[Block]]]:
        """The only chunk, kept open: for representations that come back to the rows."""
        if not self._open:
            self._open = list(self.chunks())
        return self._open

    def chunk_at(self, i: int) -> tuple[Chunk, list[Block]]:
        """Chunk i again, as it was the first time (same random numbers, same buffers)."""
        if self._open:
            return self._open[i]
        self.moments[i].restore()
        assign(self.params, self.theta)
        chunk = Chunk(self, list(self.pieces())[i], self.seed + i)
        return chunk, chunk.blocks()

    def totals(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        if self._totals is None:
            if self.single and self.chunk is None:
                self.open()
            else:
                for _ in self.chunks():
                    pass
        assert self._totals is not None
        return self._totals

    @property
    def normaliser(self) -> Tensor:
        """Σ of the weights that the mean divides by."""
        return self.totals()[1]

    @property
    def scale(self) -> Tensor:
        """f = scale · Σwℓ, and so g and G."""
        return self.criterion.scale(self.normaliser)

    @property
    def loss(self) -> float:
        return float(self.totals()[0] * self.scale)

    @property
    def lower_bound(self) -> float:
        return float(self.totals()[2] * self.scale)

    @property
    def gradient(self) -> Tensor:
        """∇f: (n,)"""
        return self.totals()[3] * self.scale

    @property
    def remainder(self) -> Tensor | None:
        """h = Jᵀv, the part of g outside the range of J̃ᵀ: (n,), None means 0"""
        h = self.totals()[4]
        return None if h is None else h * self.scale

    def columns(self, blocks: Sequence[Block]) -> list[tuple[slice, slice]]:
        """Where the parameters of some blocks are: (columns of θ, columns of the blocks side by side)"""
        found, start = [], 0
        for p in (p for block in blocks for p in block.params):
            first = self.starts[self.index[id(p)]]
            found.append((slice(first, first + p.numel()), slice(start, start + p.numel())))
            start += p.numel()
        return found

    def gather(self, v: Tensor, block: Block) -> Tensor:
        """The part of v that belongs to a block: (n,) → (columns,)"""
        parts = v.split(self.sizes)
        return torch.cat([parts[self.index[id(p)]] for p in block.params])

    def scatter(self, columns: Iterable[tuple[Block, Tensor]]) -> Tensor:
        """The inverse: one vector (n,) from the parts of all blocks."""
        parts: list[Tensor] = [torch.empty(0)] * len(self.params)
        for block, v in columns:
            for p, part in zip(block.params, v.split([p.numel() for p in block.params]), strict=True):
                parts[self.index[id(p)]] = part
        return torch.cat(parts)

    def rows(self) -> Tensor:
        """J̃ itself, (m, n): for small problems and for tests."""
        parts = []
        for _, blocks in self.chunks():
            parts.append(self.dense(blocks, self.params[0].dtype))
        return torch.cat(parts) * self.scale.sqrt()

    def dense(self, blocks: list[Block], dtype: torch.dtype) -> Tensor:
        """The rows of one chunk with their columns in the order of the parameters: (m, n)"""
        columns: list[Tensor] = [torch.empty(0)] * len(self.params)
        for block in blocks:
            pieces = block.rows(dtype).split([p.numel() for p in block.params], 1)
            for p, piece in zip(block.params, pieces, strict=True):
                columns[self.index[id(p)]] = piece
        return torch.cat(columns, 1)

    # Trial losses: the same batches, chunks, random numbers and buffers as in the linearisation.

    def evaluate(self, theta: Tensor) -> float:
        """f(θ). The model keeps this θ: the optimizer decides with which one it ends."""
        assign(self.params, theta)
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
        return float(total * self.scale)

    def _replay(self, i: int) -> AbstractContextManager[object]:
        return Replay(self.slopes[i]) if self.single else nullcontext()

    def evaluate_along(self, theta: Tensor, d: Tensor, rates: Sequence[float]) -> list[float]:
        """f(θ + lr·d) for every lr: all in one batched forward pass, or one after the other where vmap refuses."""
        size = self._together()
        try:
            if len(rates) > 1 and size > 1 and self.plan.batched_trials is not False and not self.plan.trial_needs_grad:
                losses = self._evaluate_together(theta, d, rates, size)
                if self.plan.batched_trials is None:  # a model may keep its weights where functional_call does not look
                    true = self.evaluate(theta + rates[-1] * d)
                    self.plan.batched_trials = not abs(losses[-1] - true) > 1e-3 * abs(true)
                if self.plan.batched_trials:
                    return losses
        except torch.OutOfMemoryError:
            pass
        except Exception:  # vmap and functional_call refuse models in many ways
            self.plan.batched_trials = False
        finally:
            assign(self.params, theta)
        return [self.evaluate(theta + lr * d) for lr in rates]

    def _together(self) -> int:
        """How many trial points one forward pass may hold: a CPU gains nothing from large ones."""
        inputs = sum(t.numel() for batch in self.batches for t in tree_leaves(batch.inputs) if isinstance(t, Tensor))
        return ((1 << 25) if self.device.type == "cuda" else (1 << 18)) // max(1, inputs) if self.single else 1

    def _evaluate_together(self, theta: Tensor, d: Tensor, rates: Sequence[float], size: int) -> list[float]:
        origin = self._named(theta)
        direction = self._named(d)
        self.start.restore()
        total: Any = 0.0
        for batch, slopes in zip(self.pieces(), self.slopes, strict=True):

            def value(lr: Tensor, batch: Batch = batch, slopes: list[Slopes] = slopes) -> Tensor:
                at = {name: p + lr * direction[name] for name, p in origin.items()}
                with Replay(slopes):
                    z = forward(lambda *a, **k: functional_call(self.model, at, a, k), batch.inputs)
                return self.criterion.value(z, batch.targets, batch.weight)

            with torch.no_grad(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")
                lrs = torch.tensor(rates, dtype=theta.dtype, device=theta.device)
                total = total + vmap(value, randomness="same", chunk_size=size)(lrs)
        return [float(f) for f in (total * self.scale).tolist()]

    def _named(self, theta: Tensor) -> dict[str, Tensor]:
        pieces = theta.split(self.sizes)
        return {name: t.view_as(p) for name, p, t in zip(self.names, self.params, pieces, strict=True)}


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
