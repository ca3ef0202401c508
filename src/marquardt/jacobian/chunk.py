"""The rows of one chunk: its forward pass, its gradient, and the proof that every layer's rule is right."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..deferred import read, recording
from ..layers import (
    Block,
    Explicit,
    Misfit,
    Nothing,
    Watch,
    assemble,
    rows_by_loop,
    rows_by_vmap,
    rows_in_batches,
    rows_in_parts,
)
from ..layers.unrolled import Refused
from ..layers.watch import LAYOUTS, Layout, grouped
from ..losses.proof import prove
from ..model.batch import Batch, forward, tensors, unlike
from ..model.checks import check_coupling
from ..model.randomness import Draws, SameSlopes, Slopes
from ..model.substituted import call_with
from .rows import Cotangents

if TYPE_CHECKING:
    from .linearization import Linearization

# Ways to the rows of parameters without a rule, fastest first; the first that is proven right is taken.
PATHS = ("vmap", "parts", "rows", "loop")

# Blocks of up to this many columns are watched; for larger ones the proof on first use has to do.
GUARDED = 1_000_000

# A look costs a backward pass: one chunk in so many gets it.
EVERY = 8

# Ways of calling the model whose proofs are kept.
KEPT = 64

Key = TypeVar("Key")


@dataclass
class Proof:
    """How the rows of each parameter are found, as it was proven on first use."""

    layouts: dict[tuple[int, ...], Layout] = field(default_factory=dict)  # blocks with a rule, by their parameters
    general: dict[int, str] = field(default_factory=dict)  # the other parameters: one of PATHS
    mute: dict[int, float] = field(default_factory=dict)  # parameters without influence, and a bound on their rounding
    unused: set[int] | None = None  # calls that the outputs do not depend on
    sizes: set[int] = field(default_factory=set)  # numbers of samples that it was compared on
    alarms: int = 0  # how often a proof was repeated for nothing
    quiet: int = 0  # chunks that are not watched: a few after a good look, more after such an alarm

    def path(self, i: int) -> str:
        return "none" if i in self.mute else self.general.get(i, "rule")

    def same(self, other: Proof) -> bool:
        return (self.layouts, self.general, set(self.mute)) == (other.layouts, other.general, set(other.mute))


@dataclass
class Plan:
    """What is known of the model: proven on first use, kept while it is called the same way."""

    proof: Proof = field(default_factory=Proof)  # of the last chunk
    proven: object = None  # how the model was called when this was proven; None while some gradient is still zero
    proofs: dict[object, Proof] = field(default_factory=dict)  # by how the model is called
    random: set[object] = field(default_factory=set)  # modes of the modules in which the model draws random numbers
    loss: object = None  # the loss whose derivatives are proven
    batched_rows: bool = True  # backward passes of all rows at once
    numbers: Totals | None = None  # of the last step
    unrolls: bool = True  # convolutions may have a backward pass of our own
    rows: int = 0  # per sample, on the last step
    only_slopes: bool = False  # the model draws no random numbers but slopes of RReLU
    # Whether forward passes of all trial points at once are right, by how the model is called; missing while unproven.
    batched_trials: dict[object, bool] = field(default_factory=dict)
    trial_needs_grad: bool = False  # the model differentiates itself
    choice: Any = None  # what Auto picked,
    shapes: Any = None  # for these shapes
    squeeze: int = 0  # how often memory ran out since


class Totals(NamedTuple):
    """What is added up over the chunks, in Σ-units."""

    value: float  # Σwℓ
    normaliser: float
    lower_bound: float
    rounding: float  # of the value


class Chunk:
    """The linearisation of one chunk, in Σ-units: value, gradient and J̃ = SᵀJ, without the normaliser."""

    def __init__(self, lin: Linearization, batch: Batch, seed: int, whole: Chunk | None = None) -> None:
        self.lin, self.batch = lin, batch
        self.before = lin.moment()
        loss, params = lin.criterion, lin.params
        batch.check()
        versions = batch.versions()
        known = None if whole is None else whole.picked
        try:
            z, capture = self._forward(known, self._unrolls(lin.plan.rows))
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
        self.after = lin.moment()
        self.slopes = capture.slopes if known is None else known
        self.z = z.detach()
        y, w = batch.targets, batch.weight
        loss.check(self.z, y, w, part=True)
        self.N = len(z)
        index = lin.rows_kind.pick(self.N, seed) if whole is None else None
        self.rows: Cotangents  # of all samples, or of those picked
        with torch.no_grad():
            value, normaliser = loss.value(self.z, y, w), loss.normaliser(self.z, y, w)
            if index is None:
                self.rows = lin.rows_kind.draw(loss, self.z, y, w, seed)
            else:
                self.rows = Cotangents(self.z[None], None, loss.gradient(self.z, y, w))
            rounding = self.rows.rounding(value, self.z, capture.coarsest)
            numbers = [value, normaliser, loss.lower_bound(self.z, y, w), rounding]
            self.totals = Totals(*read(torch.stack(numbers)))
            self.value = self.totals.value
            if not math.isfinite(self.value):
                raise ValueError(f"the loss is {self.value} at the current parameters: {self._blame()}")
            if lin.plan.loss is not loss and not recording():
                lin.plan.loss = loss if prove(loss, lin.rows_kind.empirical, self.z, y, w) else None
        self.picked: list[Slopes] = []
        self._is_part = whole is not None
        self._part: Chunk | None = None  # the samples whose rows are formed, where they are not all
        if index is not None:
            check_coupling(lin.model)
            self.picked = [slopes.take(index, self.N) for slopes in capture.slopes]
            self._part = Chunk(lin, batch.take(index), seed, self)
            self.after.restore(gently=True)
            self.rows = self.rows._replace(S=self._part.rows.S)
        elif whole is not None:  # in the units of the whole
            self.rows = Cotangents(self.rows.S * (whole.N / self.N) ** 0.5, None, None)
        self.m = self.rows.S.shape[0] * self.rows.S.shape[1]
        lin.plan.rows = len(self.rows.S)
        self._graph: Tensor | None = z
        self._capture = capture
        self.coarsest = capture.coarsest  # of all dtypes that the model computes with
        self._blocks: list[Block] | None = None
        self._gradient: Tensor | None = None
        if capture.convolves and not capture.once and self._part is None and self._unrolls(len(self.rows.S)):
            self._forward_again(True)  # the first time: so the first step goes the way of all others

    def _unrolls(self, rows: int) -> bool:
        """Several rows of a sample pay for a backward pass of our own."""
        return self.lin.plan.unrolls and rows > 1 and not self.lin.keep_graph and self.lin.device.type == "cpu"

    def _forward(self, known: Sequence[Slopes] | None, once: bool) -> tuple[Tensor, Watch]:
        lin = self.lin
        try:
            with torch.enable_grad(), Watch(lin.params, known, once, self.batch.samples) as capture:
                capture.reorders = self.batch.opaque  # where the samples are in an object, no operation may tell
                return forward(lin.model, self.batch.inputs), capture
        except Refused:
            lin.plan.unrolls = False
            self._notice_chance()
            self.before.restore()
            return self._forward(known, False)
        finally:
            self._notice_chance()

    def _forward_again(self, once: bool) -> None:
        """The graph in the other form."""
        self._graph = None
        self.before.restore(gently=True)  # the graph of a whole batch may hold them
        self._graph, self._capture = self._forward(self.slopes, once)

    def _notice_chance(self) -> None:
        """Whether it was the model that drew random numbers. The state of a generator does not tell, for other threads
        draw from the same: if it has changed, the model is called again and its operations are asked."""
        lin, modes = self.lin, self._modes()
        if lin.chance.drawn or not self.before.drew_since():
            return
        here = lin.moment()
        lin.chance.drawn = True  # even if the look is interrupted
        lin.chance.drawn = modes in lin.plan.random or self._draws()
        if lin.chance.drawn:
            lin.plan.random.add(modes)
            here.restore(buffers=False)

    def _draws(self) -> bool:
        """Whether a forward pass draws random numbers; it is made on copies of the buffers, which a graph may hold."""
        model = self.lin.model
        with torch.enable_grad(), Draws() as draws:  # type: ignore[no-untyped-call]
            try:
                forward(call_with(model, {id(b): b.clone() for b in model.buffers()}), self.batch.inputs)
            except Exception:  # the model fails, or cannot be watched
                return True
        return bool(draws.drew)

    def _modes(self) -> object:
        return tuple(m.training for m in self.lin.model.modules())

    def _blame(self) -> str:
        """Where a loss that is not finite comes from; the loss itself has checked the targets and weights."""
        for t in tensors(self.batch.inputs):
            if t.is_floating_point() and not bool(t.isfinite().all()):
                return "the inputs hold NaN or infinite values, clean the data"
        for name, p in self.lin.model.named_parameters():
            if not bool(p.isfinite().all()):
                return f"the model's parameter {name!r} holds NaN or infinite values, load an earlier checkpoint"
        if not bool(self.z.isfinite().all()):
            return "inputs, targets and parameters are finite, so it is the model that overflows; look at its outputs"
        data = {"output": self.z, "target": self.batch.targets, "weight": self.batch.weight}
        largest = {name: max((float(t.abs().max()) for t in tensors(item)), default=0.0) for name, item in data.items()}
        found = ", ".join(f"the largest {name} is {size:.3g}" for name, size in largest.items() if size)
        way_out = "scale the data" + (", or use float64" if self.z.dtype == torch.float32 else "")
        loss = type(self.lin.criterion).__name__
        return f"outputs, targets and parameters are finite, but {loss} of them is not; {found}: {way_out}"

    @property
    def gradient(self) -> Tensor:
        """∂value/∂θ: (n,), from the rows where they are there and span it, otherwise by a backward pass"""
        if self._gradient is None:
            u = self.rows.u
            if self._blocks is not None and u is not None and self.rows.v is None:
                self._gradient = self.lin.adjoint(self._blocks, u.flatten())
            else:
                self._gradient = self.vjp(self.lin.criterion.gradient(self.z, self.batch.targets, self.batch.weight))
        return self._gradient

    @cached_property
    def h(self) -> Tensor | None:
        """Jᵀv, the part of the gradient outside the range of the rows: (n,), None means 0"""
        if self.rows.v is None:
            return None
        return self.gradient if self.rows.u is None else self.vjp(self.rows.v)

    def numbers(self) -> tuple[float, float, int]:
        """Numbers per sample at the inputs and outputs of the layers with a rule, and parameters without a rule."""
        calls = self._capture.calls
        known = {id(p) for call in calls for p in call.params}
        others = sum(p.numel() for p in self.lin.params if id(p) not in known)
        return sum(c.inputs for c in calls) / self.N, sum(c.outputs for c in calls) / self.N, others

    @property
    def picked_from(self) -> Chunk:
        """The chunk of the samples whose rows are formed: this one, or a part of it"""
        return self if self._part is None else self._part

    @property
    def graph(self) -> Tensor:
        """z with its graph: (N, *out)"""
        assert self._graph is not None
        return self._graph

    def vjp(self, w: Tensor) -> Tensor:
        """Jᵀw: (N, *out) → (n,)"""
        params = self.lin.params
        return torch.cat([_flat(g, p) for g, p in zip(self._pull(w, params), params, strict=True)])

    def _pull(self, w: Tensor, params: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The same by parameters, None for those that the outputs do not depend on."""
        assert self._graph is not None
        grads = torch.autograd.grad(self._graph, params, w, retain_graph=True, allow_unused=True)
        return [g.to_dense() if g is not None and g.is_sparse else g for g in grads]

    @property
    def blocks(self) -> list[Block]:
        """The columns of J̃, by layer; once they are there, the graph of the forward pass is released."""
        if self._blocks is None:
            if not self._is_part:
                _ = self.h  # while there is a graph
            if self._part is not None:
                self._blocks = self._part.blocks
                self.after.restore(gently=True)  # where the forward pass of the whole ended
                return self._blocks
            with torch.no_grad():
                try:
                    self._blocks = self._form()
                except Exception as error:
                    if not self._capture.unrolled or exhausted(error):
                        raise
                    self.lin.plan.unrolls = False  # for good: this model needs a graph of torch's own
                    self._forward_again(False)
                    self._blocks = self._form()
        return self._blocks

    def _form(self) -> list[Block]:
        plan, calls = self.lin.plan, self._capture.calls
        groups = {tuple(sorted({self.lin.index[id(p)] for i in g for p in calls[i].params})): g for g in grouped(calls)}
        signature = self._signature(groups)
        plan.only_slopes = not self.lin.chance.drawn or self._draws_slopes_only()
        known = recording() or signature in plan.proofs
        if not known and not bool(self.rows.S.any()):  # all weights are zero: that proves nothing
            return self._formed([Nothing(self.lin.params, self.m, self.N)])
        if not known:
            check_coupling(self.lin.model)
            self._prove(signature)
        elif not recording():
            plan.proof, plan.proven = plan.proofs[signature], signature
        try:
            blocks, loud = self._audible(self._rules(groups) + self._others())
            doubtful = known and not recording() and (loud or not self._plausible(blocks))
        except Exception as error:  # what was proven on other data may fail on these
            if not known or recording() or exhausted(error):
                raise
            doubtful = True
        if doubtful:
            old = plan.proof
            self._prove(signature)
            if plan.proof.same(old):  # near a minimum the gradient is all rounding
                plan.proof.alarms = old.alarms + 1
                plan.proof.quiet = EVERY * 2**plan.proof.alarms
            blocks, _ = self._audible(self._rules(groups) + self._others())
        # Of the samples that were not picked nothing is known.
        self.lin.heard(() if self._is_part else plan.proof.mute)
        blocks = self._formed(blocks)
        if not known:
            plan.trial_needs_grad = not self._same_without_grad()
            self.after.restore()
        return blocks

    def _formed(self, blocks: list[Block]) -> list[Block]:
        """Lets go of the graph."""
        del self._capture
        if not self.lin.keep_graph:
            self._graph = None
        self.after.restore()  # some ways to the rows call the model again
        return blocks

    def _signature(self, groups: dict[tuple[int, ...], list[int]]) -> object:
        """All that decides which code finds the rows. In a batch of one sample every layout is right: what is proven
        there holds for no other."""
        capture, N = self._capture, self.N
        fits = tuple(call.fits(N) for call in capture.calls)
        kind = (N == 1, len(self.rows.S) == 1, capture.unrolled, self.coarsest, self.lin.theta.dtype)
        return tuple(groups), fits, kind, self._modes(), self.lin.chance.drawn

    def _rules(self, groups: dict[tuple[int, ...], list[int]]) -> list[Block]:
        """The blocks of the layers whose rules are proven."""
        calls, params, layouts = self._capture.calls, self.lin.params, self.lin.plan.proof.layouts
        wanted = [i for key, members in groups.items() if key in layouts for i in members]
        deltas = dict(zip(wanted, self._deltas(wanted), strict=True))
        blocks: list[Block] = []
        for key, layout in layouts.items():
            members = groups.get(key, [])
            block = assemble([calls[i] for i in members], [deltas[i] for i in members], self.N, layout)
            blocks.append(block or Nothing([params[i] for i in key], self.m, self.N))
        return blocks

    def _audible(self, blocks: list[Block]) -> tuple[list[Block], bool]:
        """The blocks, with zero in the columns of the parameters without influence, and whether one of them has some
        now: a bias before InstanceNorm may gain it through an activation between the two."""
        index, limits = self.lin.index, self.lin.plan.proof.mute
        found: list[Block] = []
        loud: list[Tensor] = []
        for block in blocks:
            mute = [p for p in block.params if index[id(p)] in limits]
            if not mute or block.empty:
                found.append(block)
                continue
            pulled = block.pull(self._random().flatten()).split([p.numel() for p in block.params])
            # The rows round in another way than a backward pass.
            loud += [
                t.norm() > 4 * limits[index[id(p)]]
                for p, t in zip(block.params, pulled, strict=True)
                if index[id(p)] in limits
            ]
            rest = block.without(mute)
            found += [*([] if rest is None else [rest]), Nothing(mute, self.m, self.N)]
        return found, bool(loud) and not recording() and bool(torch.stack(loud).any())

    def _others(self) -> list[Block]:
        """The blocks of all other parameters."""
        blocks: list[Block] = []
        proof = self.lin.plan.proof
        for path in ("none", *PATHS):
            indices = [i for i in proof.general if proof.general[i] == path]
            some = [self.lin.params[i] for i in indices]
            if indices:
                blocks.append(
                    Nothing(some, self.m, self.N)
                    if path == "none"
                    else Explicit(some, self._general(path, indices), self.N)
                )
        return blocks

    def _plausible(self, blocks: list[Block]) -> bool:
        """Whether a proof on earlier data still holds, for J̃ᵀw with a random w.

        Layers that see the samples in another order for other data (sorted by length, routed to experts) fail here.
        """
        proof, index = self.lin.plan.proof, self.lin.index
        new = self.N not in proof.sizes
        some = [b for b in blocks if new or b.columns <= GUARDED]
        if (proof.quiet and not new) or not some:
            proof.quiet = max(0, proof.quiet - 1)
            return True
        proof.sizes.add(self.N)
        proof.quiet = 0 if self._capture.reorders else EVERY - 1
        w, tolerance = self._random(), tolerance_of(self.coarsest)
        pulled = iter(self._pull(self._cotangent(w), [p for b in some for p in b.params]))
        wrong = []
        for b in some:
            true = [_flat(next(pulled), p) for p in b.params]
            if b.empty:
                limits = [proof.mute.get(index[id(p)], 0.0) for p in b.params]
                wrong += [t.norm() > limit for t, limit in zip(true, limits, strict=True)]
            else:
                whole = torch.cat(true)
                wrong.append((b.pull(w.flatten()) - whole).norm() > tolerance * whole.norm())
        return not bool(torch.stack(wrong).any())

    def _cotangent(self, w: Tensor) -> Tensor:
        """Sw: (R, N) → (N, *out)"""
        return torch.einsum("rn,rn...->n...", w, self.rows.S)

    def _draws_slopes_only(self) -> bool:
        """Whether all random numbers of the forward pass are slopes of RReLU."""
        if self.before.cuda is None or recording():
            return False
        state: Tensor | None = self.before.cuda
        for slopes in self.slopes:
            if state is None or slopes.started is None or not torch.equal(state, slopes.started):
                return False
            state = slopes.state
        return state is not None and self.after.cuda is not None and torch.equal(state, self.after.cuda)

    def _random(self, seed: int = 0) -> Tensor:
        """One number for every row, the same every time: (R, N)"""
        generator = torch.Generator("cpu").manual_seed(seed)
        shape = self.rows.S.shape[:2]
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(self.rows.S)

    def _deltas(self, wanted: Sequence[int]) -> Sequence[Tensor | None]:
        """δ: gradients of the R rows of every sample at the output of each call, (R, *output)."""
        if not wanted:
            return []
        edges = [self._capture.calls[i].edge for i in wanted]
        S = self.rows.S
        assert self._graph is not None
        graph = self._graph

        def backward(s: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(graph, edges, s, retain_graph=True, allow_unused=True)

        if len(S) == 1:
            return [None if d is None else d[None] for d in backward(S[0])]
        if self.lin.plan.batched_rows and S.is_cuda:  # on a CPU one backward pass after the other is faster
            try:
                unused = self.lin.plan.proof.unused
                if unused is None:
                    unused = {i for i, d in zip(wanted, backward(S[0]), strict=True) if d is None}
                    self.lin.plan.proof.unused = unused
                used = [self._capture.calls[i].edge for i in wanted if i not in unused]
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "There is a performance drop")
                    found = iter(torch.func.vmap(lambda s: torch.autograd.grad(graph, used, s, retain_graph=True))(S))
                return [None if i in unused else next(found) for i in wanted]
            except RuntimeError as error:
                if exhausted(error):
                    raise
                self.lin.plan.batched_rows = False  # an operation whose backward vmap refuses
        # In memory the rows of a sample stand together: that is how they are used. Each goes to its place at once, so
        # that the next one finds its memory warm.
        places: list[Tensor | None] = []
        for r, s in enumerate(S):
            row = backward(s)
            places = places or [None if d is None else d.new_empty(len(d), len(S), *d.shape[1:]) for d in row]
            for place, d in zip(places, row, strict=True):
                if place is not None:
                    place[:, r] = d
        return [None if place is None else place.transpose(0, 1) for place in places]

    def _general(self, path: str, indices: list[int]) -> Tensor:
        lin, params = self.lin, [self.lin.params[i] for i in indices]
        if path == "vmap":
            return rows_by_vmap(lin.model, params, forward, self.batch.inputs, self.rows.S)
        if path == "parts":
            if lin.chance.drawn:
                raise ValueError("a random model draws other numbers in parts")
            return rows_in_parts(lin.model, params, forward, self.batch.inputs, self.rows.S)
        assert self._graph is not None
        return (rows_in_batches if path == "rows" else rows_by_loop)(self._graph, params, self.rows.S)

    def _prove(self, signature: object) -> None:
        """Rules apply only where proven: J̃ᵀw from the rows must equal Jᵀ(Sw) from plain autograd.

        Every group of layers is judged by itself. The proof is not kept while a gradient is zero, as behind a layer
        that starts at zero: there a wrong rule could pass.
        """
        params, lin, plan = self.lin.params, self.lin, self.lin.plan
        proof = plan.proof = Proof(sizes={self.N})
        plan.proven = None
        plan.proofs.pop(signature, None)
        evidence = Evidence(self)
        calls = self._capture.calls
        deltas = self._deltas(range(len(calls)))
        for members in grouped(calls):
            some = [calls[i] for i in members]
            key = tuple(sorted({lin.index[id(p)] for call in some for p in call.params}))
            found: dict[Layout, Block] = {}
            for layout in LAYOUTS:
                try:
                    block = assemble(some, [deltas[i] for i in members], self.N, layout)
                except Misfit:
                    continue
                found[layout] = block or Nothing([params[i] for i in key], self.m, self.N)
            right = evidence.first(found)
            if right is not None:
                proof.layouts[key] = right
        covered = {i for key in proof.layouts for i in key}
        proof.general.update({i: "none" for i, g in enumerate(evidence.pulled) if g is None and i not in covered})
        rest = [i for i in range(len(params)) if i not in covered and i not in proof.general]
        for path in PATHS if rest else ():
            if self._capture.unrolled and path in ("rows", "loop"):
                raise Refused("these paths need a graph of torch's own")
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    block = Explicit([params[i] for i in rest], self._general(path, rest), self.N)
            except Exception as error:  # torch.func and vmap refuse models in many ways
                if path == "loop" or exhausted(error):
                    raise
                continue
            if path == "loop" or evidence.first({path: block}) is not None:
                proof.general.update(dict.fromkeys(rest, path))
                break
        if any(other.mute for other in plan.proofs.values()):
            evidence.listen()
        proof.mute = evidence.mute
        if all(g is None or bool(g.any()) for g in evidence.pulled):
            if len(plan.proofs) >= KEPT:
                plan.proofs.clear()
            plan.proven, plan.proofs[signature] = signature, proof

    def _same_without_grad(self) -> bool:
        """Whether the model gives the same outputs under no_grad: a network that differentiates itself does not."""
        self.before.restore()
        try:
            with torch.no_grad(), SameSlopes(self.slopes):
                z = forward(self.lin.model, self.batch.inputs)
            return bool((z - self.z).norm() <= 1e-3 * self.z.norm())
        except Exception:  # whatever the model says to a forward pass without gradients
            return False


class Evidence:
    """Jᵀ(Sw) from plain autograd for a random w: what J̃ᵀw from the rows must equal.

    Equality for one random w proves J̃ itself, column by column: each column of a wrong J̃ would have to be orthogonal to
    w. It is equality up to rounding, and rounding may be all there is: a bias before InstanceNorm, or that of the keys
    of attention, has no influence on the outputs. How much it is shows in multiples of w, which round in other ways.
    """

    def __init__(self, chunk: Chunk) -> None:
        self.chunk, self.params, self.index = chunk, chunk.lin.params, chunk.lin.index
        self.w = chunk._random()
        self.pulled = chunk._pull(chunk._cotangent(self.w), self.params)
        self.true = [_flat(g, p) for g, p in zip(self.pulled, self.params, strict=True)]
        self.tolerance = tolerance_of(chunk.coarsest)
        # Multiples differ by about as much as rounding leaves, and a true gradient is 1/eps times that: measured 130
        # times in bfloat16, and some 1000 times may be expected of TF32.
        self.bound = min(50.0, 0.1 / torch.finfo(chunk.coarsest).eps)
        self.noise: list[Tensor] | None = None  # what rounding may leave, by parameters: ()
        self.mute: dict[int, float] = {}  # parameters whose gradient is no more than that

    def first(self, blocks: Mapping[Key, Block]) -> Key | None:
        """The first that agrees; rounding is asked only if none does."""
        for key, block in blocks.items():
            if self._agrees(block):
                return key
        if blocks:
            self.listen()
        for key, block in blocks.items():
            if self._agrees(block):
                return key
        return None

    def _agrees(self, block: Block) -> bool:
        found = block.pull(self.w.flatten()).split([p.numel() for p in block.params])
        smallest = torch.finfo(self.w.dtype).tiny
        for p, f in zip(block.params, found, strict=True):
            i = self.index[id(p)]
            noise = smallest if self.noise is None else smallest + self.noise[i]
            if not bool((f - self.true[i]).norm() <= self.tolerance * self.true[i].norm() + noise):
                return False
        return True

    def listen(self) -> None:
        """How much rounding leaves, and which gradients are no more: with another w too, for one of them may be small
        by chance."""
        if self.noise is not None:
            return
        squares = [t.new_zeros(()) for t in self.true]
        for c in (3, 5, 7):
            for square, t, other in zip(squares, self.true, self._pull(c * self.w), strict=True):
                square += (other / c - t).square().sum() / 3
        self.noise = [self.bound * square.sqrt() for square in squares]
        again = self._pull(self.chunk._random(1))
        for i, (t, other, noise) in enumerate(zip(self.true, again, self.noise, strict=True)):
            if bool((noise > 0) & (t.norm() <= noise) & (other.norm() <= noise)):
                self.mute[i] = float(noise)

    def _pull(self, w: Tensor) -> list[Tensor]:
        pulled = self.chunk._pull(self.chunk._cotangent(w), self.params)
        return [_flat(g, p) for g, p in zip(pulled, self.params, strict=True)]


def _flat(gradient: Tensor | None, p: Tensor) -> Tensor:
    return torch.zeros_like(p).flatten() if gradient is None else gradient.flatten()


def tolerance_of(dtype: torch.dtype) -> float:
    """TF32 convolutions are right to 1e-3, bfloat16 to 1e-2; a wrong rule is wrong by far."""
    return 1e-6 if dtype == torch.float64 else max(1e-2, 8 * torch.finfo(dtype).eps)


def exhausted(error: BaseException) -> bool:
    """Whether memory ran out: that is no fault of the path."""
    words = ("out of memory", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError) or any(w in str(error) for w in words)
