"""One pass over the batch: outputs z, loss f, gradient g, and the rows J̃ = SᵀJ of the curvature, block by block."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_leaves

from .batch import Batch, Moment, assign, flatten, forward, trainable, unlike
from .layers import (
    Block,
    Capture,
    Explicit,
    Misfit,
    Nothing,
    Replay,
    assemble,
    rows_by_loop,
    rows_by_vmap,
    rows_in_batches,
    rows_in_parts,
)
from .layers.capture import LAYOUTS, Layout, Slopes, grouped
from .losses import Loss, resolve
from .rows import Cotangents, Exact, Rows

# Ways to the rows of parameters without a rule, fastest first; the first that is proven right is taken.
PATHS = ("vmap", "parts", "rows", "loop")

# Blocks of up to this many columns are watched on every chunk; for larger ones the proof on first use has to do.
GUARDED = 1_000_000


@dataclass
class Plan:
    """How the rows of each parameter are found: proven on first use, kept while the model is called the same way."""

    layouts: dict[tuple[int, ...], Layout] = field(default_factory=dict)  # blocks with a rule, by their parameters
    general: dict[int, str] = field(default_factory=dict)  # the other parameters: one of PATHS
    proven: object = None  # how the model was called when this was proven; None while some gradient is still zero
    batched_rows: bool = True  # backward passes of all rows at once
    batched_trials: bool | None = None  # forward passes of all trial points at once; None while unproven
    trial_needs_grad: bool = False  # the model differentiates itself
    alarms: int = 0  # how often a proof was repeated for nothing
    quiet: int = 0  # chunks that are not watched after such an alarm


class Chunk:
    """The linearisation of one chunk, in Σ-units: value, gradient and J̃ = SᵀJ, without the normaliser."""

    def __init__(self, lin: Linearization, batch: Batch, seed: int) -> None:
        self.lin, self.batch = lin, batch
        self.before = Moment(lin.model, lin.device)
        loss, params = lin.criterion, lin.params
        batch.check()
        versions = batch.versions()
        try:
            with torch.enable_grad(), Capture(params) as capture:
                z = forward(lin.model, batch.inputs)
        except RuntimeError as error:
            reason = unlike(batch.inputs, params[0])
            if reason is None or isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(f"the model failed: {error} (Note that {reason})") from error
        if batch.versions() != versions:
            raise ValueError(
                "the model changes its inputs in place, so it cannot be called on them again: clone them first"
            )
        if not z.requires_grad:
            raise ValueError("the outputs do not depend on the trainable parameters: nothing to optimise")
        self.after = Moment(lin.model, lin.device)
        self.slopes = capture.slopes
        self.z = z.detach()
        y, w = batch.targets, batch.weight
        loss.check(self.z, y, w, part=True)
        self.N = len(z)
        self.m = 0  # rows
        with torch.no_grad():
            self.value = loss.value(self.z, y, w)
            if not bool(self.value.isfinite()):
                raise ValueError(f"the loss is {float(self.value)} at the current parameters: {self._blame()}")
            self.normaliser = loss.normaliser(self.z, y, w)
            self.lower_bound = loss.lower_bound(self.z, y, w)
            self.rows: Cotangents = lin.rows_kind.draw(loss, self.z, y, w, seed)
            slope = loss.gradient(self.z, y, w)
        self.m = self.rows.S.shape[0] * self.N
        self._graph, self._capture = z, capture
        self.gradient = self.vjp(slope)  # (n,)
        if self.rows.v is None:
            self.h = None  # the gradient is J̃ᵀu
        else:
            self.h = self.gradient if self.rows.u is None else self.vjp(self.rows.v)

    def _blame(self) -> str:
        """Where a loss that is not finite comes from; the loss itself has checked the targets and weights."""
        for t in tree_leaves(self.batch.inputs):
            if isinstance(t, Tensor) and t.is_floating_point() and not bool(t.isfinite().all()):
                return "the inputs hold NaN or infinite values, clean the data"
        for name, p in self.lin.model.named_parameters():
            if not bool(p.isfinite().all()):
                return f"the model's parameter {name!r} holds NaN or infinite values, load an earlier checkpoint"
        return "inputs, targets and parameters are finite, so it is the model that overflows; look at its outputs"

    def vjp(self, w: Tensor) -> Tensor:
        """Jᵀw: (N, *out) → (n,)"""
        pairs = zip(self._pull(w), self.lin.params, strict=True)
        return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])

    def _pull(self, w: Tensor) -> Sequence[Tensor | None]:
        """The same by parameters, None for those that the outputs do not depend on."""
        return torch.autograd.grad(self._graph, self.lin.params, w, retain_graph=True, allow_unused=True)

    @torch.no_grad()
    def blocks(self) -> list[Block]:
        """The columns of J̃, by layer. The graph of the forward pass is released."""
        plan, calls = self.lin.plan, self._capture.calls
        groups = {tuple(sorted({self.lin.index[id(p)] for i in g for p in calls[i].params})): g for g in grouped(calls)}
        random = self.after.drew_since(self.before)
        signature = (tuple(groups), tuple(m.training for m in self.lin.model.modules()), random)
        fresh = plan.proven != signature
        if fresh:
            plan.proven = signature if self._prove(plan) else None
        try:
            blocks = self._rules(groups) + self._others()
            doubtful = not fresh and not self._plausible(blocks)
        except Misfit:
            doubtful = True
        if doubtful:
            layouts, general = dict(plan.layouts), dict(plan.general)
            plan.proven = signature if self._prove(plan) else None
            if (layouts, general) == (plan.layouts, plan.general):  # near a minimum the gradient is all rounding
                plan.alarms += 1
                plan.quiet = 2**plan.alarms
            blocks = self._rules(groups) + self._others()
        del self._graph, self._capture
        if fresh:
            plan.trial_needs_grad = not self._same_without_grad()
        self.after.restore()  # some ways to the rows call the model again
        return blocks

    def _rules(self, groups: dict[tuple[int, ...], list[int]]) -> list[Block]:
        """The blocks of the layers whose rules are proven."""
        calls, params, layouts = self._capture.calls, self.lin.params, self.lin.plan.layouts
        wanted = [i for key, members in groups.items() if key in layouts for i in members]
        deltas = dict(zip(wanted, self._deltas(wanted), strict=True))
        blocks: list[Block] = []
        for key, layout in layouts.items():
            members = groups.get(key, [])
            block = assemble([calls[i] for i in members], [deltas[i] for i in members], self.N, layout)
            blocks.append(block or Nothing([params[i] for i in key], self.m))
        return blocks

    def _others(self) -> list[Block]:
        """The blocks of all other parameters."""
        blocks: list[Block] = []
        for path in ("none", *PATHS):
            indices = [i for i, p in self.lin.plan.general.items() if p == path]
            some = [self.lin.params[i] for i in indices]
            if indices:
                blocks.append(Nothing(some, self.m) if path == "none" else Explicit(some, self._general(path, indices)))
        return blocks

    def _plausible(self, blocks: list[Block]) -> bool:
        """Whether a proof on earlier data still holds: J̃ᵀu is the gradient, and that is known from plain autograd.

        Layers that see the samples in another order for other data (sorted by length, routed to experts) fail here.
        Rows without u are asked about a random vector instead, which costs a backward pass.
        """
        plan = self.lin.plan
        small = [b for b in blocks if b.columns <= GUARDED]
        if plan.quiet or not small:
            plan.quiet = max(0, plan.quiet - 1)
            return True
        if self.rows.u is not None and self.rows.v is None:
            w, true = self.rows.u, self.gradient
        else:
            w = self._random()
            true = self.vjp(torch.einsum("rn,rn...->n...", w, self.rows.S))
        wrong = [
            (b.adjoint(w.flatten()) - e).norm() > _tolerance(e) * e.norm()
            for b, e in ((b, self.lin.gather(true, b)) for b in small)
        ]
        return not bool(torch.stack(wrong).any())

    def _random(self) -> Tensor:
        """One number for every row, the same every time: (R, N)"""
        generator = torch.Generator("cpu").manual_seed(0)
        shape = self.rows.S.shape[:2]
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(self.rows.S)

    def _deltas(self, wanted: Sequence[int]) -> Sequence[Tensor | None]:
        """δ: gradients of the R rows of every sample at the output of each call, (R, *output)."""
        if not wanted:
            return []
        edges = [self._capture.calls[i].edge for i in wanted]
        S = self.rows.S
        if self.lin.plan.batched_rows and len(S) > 1:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "There is a performance drop")
                    return torch.autograd.grad(
                        self._graph, edges, S, is_grads_batched=True, retain_graph=True, allow_unused=True
                    )
            except RuntimeError as error:
                if "out of memory" in str(error):
                    raise
                self.lin.plan.batched_rows = False  # an operation whose backward vmap refuses
        one_by_one = [torch.autograd.grad(self._graph, edges, s, retain_graph=True, allow_unused=True) for s in S]
        return [None if d[0] is None else torch.stack(d) for d in zip(*one_by_one, strict=True)]

    def _general(self, path: str, indices: list[int]) -> Tensor:
        params = [self.lin.params[i] for i in indices]
        if path == "vmap":
            named = {self.lin.names[i]: self.lin.params[i] for i in indices}
            return rows_by_vmap(self.lin.model, named, forward, self.batch.inputs, self.rows.S)
        if path == "parts":
            if self.after.drew_since(self.before):
                raise ValueError("a random model draws other numbers in parts")
            return rows_in_parts(self.lin.model, params, forward, self.batch.inputs, self.rows.S)
        return (rows_in_batches if path == "rows" else rows_by_loop)(self._graph, params, self.rows.S)

    def _prove(self, plan: Plan) -> bool:
        """Rules apply only where proven: for random w, J̃ᵀw from the rows must equal Jᵀ(Sw) from plain autograd.

        Equality for one random w proves J̃ itself, column by column: each column of a wrong J̃ would have to be
        orthogonal to w. So every group of layers is judged by itself. False where a gradient is still zero, as behind a
        layer that starts at zero: there a wrong rule could pass.
        """
        S, params, lin = self.rows.S, self.lin.params, self.lin
        w = self._random()
        pulled = self._pull(torch.einsum("rn,rn...->n...", w, S))
        true = [(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(pulled, params, strict=True)]
        smallest = torch.finfo(S.dtype).tiny

        def agrees(block: Block) -> bool:
            found = block.adjoint(w.flatten()).split([p.numel() for p in block.params])
            expected = [true[lin.index[id(p)]] for p in block.params]
            return all(
                bool((f - e).norm() <= _tolerance(e) * e.norm() + smallest)
                for f, e in zip(found, expected, strict=True)
            )

        plan.layouts.clear()
        plan.general.clear()
        calls = self._capture.calls
        deltas = self._deltas(range(len(calls)))
        for members in grouped(calls):
            some = [calls[i] for i in members]
            key = tuple(sorted({lin.index[id(p)] for call in some for p in call.params}))
            for layout in LAYOUTS:
                try:
                    block = assemble(some, [deltas[i] for i in members], self.N, layout)
                except Misfit:
                    continue
                if agrees(block or Nothing([params[i] for i in key], self.m)):
                    plan.layouts[key] = layout
                    break
        covered = {i for key in plan.layouts for i in key}
        plan.general.update({i: "none" for i, g in enumerate(pulled) if g is None and i not in covered})
        rest = [i for i in range(len(params)) if i not in covered and i not in plan.general]
        for path in PATHS if rest else ():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    block = Explicit([params[i] for i in rest], self._general(path, rest))
            except Exception as error:  # torch.func and vmap refuse models in many ways
                if path == "loop" or "out of memory" in str(error):
                    raise
                continue
            if path == "loop" or agrees(block):
                plan.general.update(dict.fromkeys(rest, path))
                break
        return all(g is None or bool(g.any()) for g in pulled)

    def _same_without_grad(self) -> bool:
        """Whether the model gives the same outputs under no_grad: a network that differentiates itself does not."""
        self.before.restore()
        try:
            with torch.no_grad(), Replay(self.slopes):
                z = forward(self.lin.model, self.batch.inputs)
            return bool((z - self.z).norm() <= 1e-3 * self.z.norm())
        except Exception:  # whatever the model says to a forward pass without gradients
            return False


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
                self.checksum = self.checksum + batch.checksum()
                if self.single:  # otherwise bounded memory comes first: trials then rely on the generators alone
                    self.moments.append(chunk.before)
                    self.slopes.append(chunk.slopes)
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
            checksum = checksum + (0.0 if self.single else batch.checksum())
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


def _tolerance(t: Tensor) -> float:
    return (
        1e-6 if t.dtype == torch.float64 else 1e-2
    )  # TF32 convolutions are right to 1e-3; a wrong rule is wrong by far


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
