"""One forward pass of a piece of the batch, its Jacobian, and what has been found out about the model."""

from __future__ import annotations

import random
import warnings
import weakref
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward

from .. import tolerances
from ..deferred import AS_IS
from ..layers.axes import keeps_apart
from ..layers.capture import Place, Walk, Watch
from ..layers.graph import rows_by_vmap, rows_in_parts, rows_one_by_one
from ..model.anatomy import Anatomy, Chance, Draws, Moment, SameSlopes, Slopes, anatomy, call_with
from ..model.batch import COARSE, Batch, full, open_cells
from ..model.checks import FAILURES, explained
from ..surroundings import out_of_memory, unless_foreign
from .objective import Objective, Totals

Groups = dict[tuple[int, ...], list[int]]  # calls that share parameters, by these
Site = tuple[int, int]  # a node of the graph by its number, and an input of it


@dataclass(frozen=True)
class Map:
    """Which uses there are, and the place of the samples in each.

    If a row of a layer goes into several samples, as with the residuals of several equations one after the other, they
    have different colours, and each colour takes separate backward passes.
    """

    stops: frozenset[int]  # nodes that see samples, of those that could do without
    blind: frozenset[int]  # nodes that see none, of those that could see some
    colours: tuple[tuple[slice, ...], ...]  # the samples of each
    places: tuple[Mapping[Site, Place], ...]  # by colour
    lost: frozenset[Site]  # uses that cannot be read


@dataclass
class Proof:
    """How the rows of each parameter are found, as it was proven on first use."""

    places: dict[tuple[int, ...], Place] = field(
        default_factory=dict
    )  # of the samples in calls with a rule, by parameters
    general: dict[int, str] = field(default_factory=dict)  # the other parameters: "graph", or one of PATHS
    map: Map | None = None  # for those whose path is "graph"
    inert: dict[int, float] = field(default_factory=dict)  # parameters without influence, and a bound on their rounding
    unused: dict[Hashable, bool] = field(default_factory=dict)  # edges, and whether the outputs do not depend on them
    # By what shows of the passes that it was compared on: whether it holds there whatever numbers are in the graph.
    passes: dict[int, bool] = field(default_factory=dict)
    noise: dict[int, float] = field(default_factory=dict)  # what rounding may leave of a parameter's gradient, in all
    # To compare a piece with autograd once more costs a backward pass: after a comparison, or a proof that was repeated
    # for nothing, the eighth piece is compared, then the sixteenth after that, and so on.
    apart: int = 8
    quiet: int = 0  # pieces until then

    def rest(self) -> None:
        """After a comparison that has shown nothing new"""
        self.quiet, self.apart = self.apart - 1, 2 * self.apart

    def path(self, i: int) -> str:
        return "none" if i in self.inert else self.general.get(i, "rule")

    def same(self, other: Proof) -> bool:
        mine, its = ((p.places, p.general, p.map, set(p.inert)) for p in (self, other))
        return mine == its


class RowByRow(RuntimeError):
    """Rows of single samples take a backward pass each, through all samples, and those of all together would do."""


class Coupled(ValueError):
    """Samples of a batch that cannot go through the model in parts."""


@dataclass
class Facts:
    """What has been found out about one model, for one optimizer, by those who have found it out."""

    # A pass
    anatomy: Anatomy | None = None  # of the model when it was last looked at
    random: set[object] = field(default_factory=set)  # modes of the modules in which the model draws random numbers
    batched_rows: bool = True  # backward passes of all rows at once
    # By what shows of a pass through part of a batch: whether the structure of its graph keeps the samples apart.
    parts: dict[object, bool] = field(default_factory=dict)

    # A piece: of its rows,
    proof: Proof = field(default_factory=Proof)  # of the last piece
    proven: object = None  # how the model was called when this was proven; None while some gradient is still zero
    proofs: dict[object, Proof] = field(default_factory=dict)  # by how the model is called
    # By all that decides how the rows are found: calls that share parameters, by these, and what proofs are kept by.
    ways: dict[object, tuple[Groups, object]] = field(default_factory=dict)
    walks: set[object] = field(default_factory=set)  # ways of calling it in which the graph decides too
    linear: set[object] = field(default_factory=set)  # hooks and functions whose backward passes are linear
    only_slopes: bool = False  # the model draws no random numbers but slopes of RReLU
    differentiates: bool = False  # the model differentiates itself: trial points need a graph too
    # and of its loss
    exact_rows: tuple[object, object, int] | None = None  # of a sample, by the loss and the shapes of z and the targets
    loss: object = None  # the loss whose derivatives are proven
    # Targets of which the loss can be taken, and what else that was found by.
    checked: tuple[weakref.ref[Tensor], tuple[object, ...]] | None = None

    # Trial points: whether one forward pass for all is right, by how the model is called; missing while unproven.
    batched_trials: dict[object, bool] = field(default_factory=dict)

    # Representations of G
    may_join: bool = False  # rows of all samples together would do
    decays: int = 0  # steps that were looked at, whether weight decay is in them

    # The optimizer: what represents G, with all that was looked at when it was chosen, see LM; and of the last step
    chosen: tuple[tuple[Any, ...], object, object] | None = None
    steady: bool = False  # a forward pass leaves the buffers as they are
    totals: Totals | None = None
    drawn: Sequence[Tensor] = ()  # random numbers, if it may be recorded when it comes again

    def __reduce__(self) -> Any:
        return Facts, ()  # a copy, or another process, finds them out again

    def __setstate__(self, _: object) -> None:  # of pickles of earlier versions
        self.__dict__.update(vars(Facts()))

    def look(self, model: nn.Module) -> Anatomy:
        """The model as it is now: the same object while nothing has changed."""
        self.anatomy = found = anatomy(model, self.anatomy)
        return found


Known = Facts  # in pickles of earlier versions


# --- One forward pass of a piece of the batch, and backward passes through it.


UNRELATED = "the outputs do not depend on the trainable parameters: nothing to optimise"
REENTRANT = (
    "the model calls torch.utils.checkpoint with use_reentrant=True, which hides its layers and allows no gradients "
    "but those of .backward(): pass use_reentrant=False"
)

# What torch says where autograd.grad cannot do as .backward() does, and what is to be done about it.
UNABLE = {
    "use_reentrant": REENTRANT,
    "_will_engine_execute_node": (
        "parameters have a hook of torch.autograd.graph.register_multi_grad_hook, which torch has for .backward() "
        'alone, while steps are made of torch.autograd.grad: remove it, or pass mode="any"'
    ),
}


class Pass:
    """z = model(x) with its graph, what was called on the way, and the state of the model before and after."""

    def __init__(
        self, objective: Objective, batch: Batch, known: Facts, chance: Chance, *,
        slopes: Sequence[Slopes] | None = None, joined: bool = False, before: Moment | None = None,
    ) -> None:  # fmt: skip
        self.objective, self.batch, self.known, self.chance = objective, batch, known, chance
        self.joined = joined  # whether all samples are one in the graph
        self.form = form = known.look(objective.model) if before is None else before.form
        self.before = self.moment() if before is None else before
        batch.check()
        plain = batch.inputs.__class__ is Tensor
        versions = batch.inputs._version if plain else batch.versions()
        try:
            z, self.watch = self._forward(slopes)
        except FAILURES as error:
            reason = explained(error, objective.model, batch, objective.parameters.whole.tensors[0])
            if reason is None:
                raise
            raise reason from error
        if (batch.inputs._version if plain else batch.versions()) != versions:
            raise ValueError(
                "the model changes its inputs in place, so it cannot be called on them again: clone them first"
            )
        if not z.requires_grad:
            raise ValueError(UNRELATED)
        objective.pools = self.objective.pools = self.watch.pools
        # RReLU draws for negative inputs only: there may be some at a trial point though there are none here.
        chance.drawn = chance.drawn or bool(self.watch.slopes)
        self.form = form = known.anatomy = anatomy(objective.model, known.anatomy)  # which a pass may change
        self.forward_hooks, self.hooks = form.forward_hooks, (*form.backward_hooks, *self.watch.hooks)
        # Where nothing was drawn and there are no buffers, all is as before.
        self.after = self.moment() if chance.drawn or form.buffered or self.before.buffers else self.before
        self.slopes = self.watch.slopes if slopes is None else slopes
        self.z, self.N = z.detach(), z.shape[0]
        self.coarsest = self.watch.coarsest  # of all dtypes that the model computes with
        self.rounding = torch.finfo(self.coarsest).eps
        self._graph: Tensor | None = self._together(z) if joined else z
        self.walk = walk = self._walked()
        # A number for what shows of this pass beside the structure of its graph: sizes, functions, hooks.
        self.fingerprint = hash((self.N, walk.sizes, *self.watch.functions, *self.forward_hooks, *self.hooks))

    def sums(self) -> Tensor:
        """See Loss.sums: (k,)"""
        return self.objective.loss.sums(self.z, self.batch.targets, self.batch.weight)

    def moment(self) -> Moment:
        return Moment(self.objective.model, self.objective.parameters.device, self.chance, self.form)

    def _forward(self, slopes: Sequence[Slopes] | None) -> tuple[Tensor, Watch]:
        self.chance.untold = not self.chance.drawn
        with torch.enable_grad():
            cells = open_cells(self.objective.model) if self.form.has_lstm else AS_IS
            with Watch(self.objective.parameters.whole.index, slopes) as watch, cells:
                raw = self.objective.raw(self.batch.inputs)
            raw = raw if raw.__class__ is Tensor and raw.dtype not in COARSE else full(raw)
            self.objective, z = self.objective.taken(raw, self.batch)
        self._notice_chance()  # after a pass that failed there is nothing to look for: what it drew is taken back
        return z, watch

    def again(self) -> None:
        """A new graph, as the hooks now are"""
        self._graph = None
        self.before.restore(gently=True)  # the graph of a whole batch may hold them
        z, self.watch = self._forward(self.slopes)
        self._graph = self._together(z)
        self.walk = self._walked()

    def _together(self, z: Tensor) -> Tensor:
        if not self.joined:
            return z
        with torch.enable_grad():
            return z[None]

    def _notice_chance(self) -> None:
        """Whether it was the model that drew random numbers. The state of a generator does not tell, for other threads
        draw from the same: if it has changed, the model is called again and its operations are asked."""
        ranks = self.objective.parameters.ranks
        alike = ranks.all  # ranks that share the weights make the same passes
        drew = not self.chance.drawn and self.before.drew_since()
        if not self.chance.drawn and (drew or (ranks.several and not alike(not drew))):
            here, modes = self.moment(), self.form.modes
            self.chance.drawn = modes in self.known.random or not alike(not self._draws())
            if self.chance.drawn:
                self.known.random.add(modes)
                here.restore(buffers=False)
        self.chance.untold = False

    def _draws(self) -> bool:
        """Whether a forward pass draws random numbers; it is made on copies of the buffers, which a graph may hold."""
        model = self.objective.model
        with torch.enable_grad(), Draws() as draws:  # type: ignore[no-untyped-call]
            try:
                self.objective.called(self.batch.inputs, call_with(model, {id(b): b.clone() for b in model.buffers()}))
            except Exception as error:  # the model fails, or cannot be watched
                unless_foreign(error)
                return True
        return bool(draws.drew)

    @property
    def graph(self) -> Tensor:
        """z with its graph: (N, *out), or (1, N, *out) if all samples are one"""
        assert self._graph is not None
        return self._graph

    def _walked(self) -> Walk:
        """The nodes of that graph."""
        whole = self.objective.parameters.whole
        return Walk(self.graph, whole.tensors, self.form.tensors, whole.index)

    def nodes(self) -> int:
        """Operations that the graph holds, those within functions and within gradients among them."""
        return len(self.walk.nodes)

    def release(self, graph: bool) -> None:
        """Lets go of what the rows were made of, and of the graph."""
        del self.watch, self.walk
        if graph:
            self._graph = None

    def pull(self, w: Tensor, params: Sequence[Tensor]) -> list[Tensor | None]:
        """Jᵀw by parameter, None for those that the outputs do not depend on: (N, *out) → like the parameters"""
        if (ranks := self.objective.parameters.ranks).several:
            ranks.same("a backward pass")
        try:
            grads = gradients(self.graph, params, w.view_as(self.graph))
        except RuntimeError as error:
            words = [reason for part, reason in UNABLE.items() if part in str(error)]
            if not words:
                raise
            raise ValueError(words[0]) from error
        return [g.to_dense() if g is not None and g.is_sparse else g for g in grads]

    def vjp(self, w: Tensor) -> Tensor:
        """Jᵀw: (N, *out) → (n,)"""
        parameters = self.objective.parameters
        return parameters.joined(self.pull(w, parameters.tensors))

    def repeated(self, replaced: dict[int, Tensor]) -> Tensor:
        """The forward pass once more, with other tensors in the place of some parameters.

        On copies of the buffers: restoring them in place would spoil the graph.
        """
        self.before.restore(buffers=False)
        try:
            return again(self.objective, self.batch.inputs, self.before, self.slopes, replaced)
        finally:
            self.after.restore(buffers=False)

    def same_without_grad(self) -> bool:
        """Whether the model gives the same outputs under no_grad: a network that differentiates itself does not."""
        try:
            with torch.no_grad():
                return tolerances.same_outputs(self.repeated({}), self.z)
        except Exception as error:  # whatever the model says to a forward pass without gradients
            unless_foreign(error)
            return False


def gradients(z: Tensor, inputs: Sequence[Any], w: Tensor) -> tuple[Tensor | None, ...]:
    """∂(z·w), None where z does not depend on an input: torch.autograd.grad but for its checks, which cost as much as
    the backward pass of a small network; the graph stays."""
    found: tuple[Tensor | None, ...] = _engine_run_backward(
        (z,), (w,), True, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return found


def again(
    objective: Objective,
    inputs: Any,
    moment: Moment,
    slopes: Sequence[Slopes],
    replaced: dict[int, Tensor] | None = None,
) -> Tensor:
    """Another forward pass, on copies of the buffers of a moment and with slopes that were drawn: (N, *out)"""
    model = objective.model
    others = {
        id(now): value.clone()
        for module, saved in moment.buffers
        for name, (_, value) in saved.items()
        if value is not None and (now := module._buffers.get(name)) is not None
    } | (replaced or {})
    with SameSlopes(slopes):
        return objective.outputs(inputs, call_with(model, others) if others else model)


# --- J̃ = SᵀJ of one forward pass: products with it, and the ways to its rows.


# Ways to the rows of parameters that the graph does not show, fastest first; the first that is proven right is taken.
PATHS = ("vmap", "parts", "rows", "loop")

Key = TypeVar("Key", bound=Hashable)


class Jacobian:
    """J̃ in Σ-units, without the normaliser: R rows for each of the N samples of a pass, m = R·N."""

    def __init__(self, forward: Pass, S: Tensor) -> None:
        self.forward, self.S = forward, S  # (R, N, *out)
        self.R, self.N = S.shape[:2]
        self.m = self.R * self.N
        self.parameters = forward.objective.parameters.whole
        self.ranks = forward.objective.parameters.ranks  # that make the same passes, for they share the weights

    def seen(self, Jv: Tensor | None) -> Tensor:
        """Sᵀ(Jv): (N, *out) → (R, N)"""
        S = self.S
        return S.new_zeros(S.shape[:2]) if Jv is None else (S * Jv).reshape(*S.shape[:2], -1).sum(2)

    def cotangent(self, w: Tensor) -> Tensor:
        """Sw: (R, N) → (N, *out)"""
        return torch.einsum("rn,rn...->n...", w, self.S)

    def adjoint(self, w: Tensor) -> Tensor:
        """Jᵀ(Sw) by a backward pass: (R, N) → (n,)"""
        return self.forward.vjp(self.cotangent(w))

    def random(self, seed: int = 0) -> Tensor:
        """One number for every row, the same every time: (R, N)"""
        generator = torch.Generator("cpu").manual_seed(seed)
        return torch.randn(self.S.shape[:2], generator=generator, dtype=torch.float64, device="cpu").to(self.S)

    def shorten(self) -> None:
        """Fewer numbers in δ, to be asked for before δ is. A GPU has all rows in one pass and gains nothing; for one
        row it costs as much as it saves."""
        if self.R > 1 and self.S.device.type == "cpu" and not self.ranks.several:
            self.forward.watch.shorten(self.forward.graph)

    def gradients(self, edges: Sequence[GradientEdge], w: Tensor) -> tuple[Tensor | None, ...]:
        """Of z·w at these edges, None if z does not depend on one: (N, *out)"""
        if self.ranks.several:
            self.ranks.same("a backward pass")
        # Where a pass ends, torch takes the gradient after the tensor's hook, and where it goes on before it: with the
        # parameters it goes on behind all edges, whichever they are.
        if self.forward.watch.hooks:
            return gradients(self.forward.graph, [*edges, *self.parameters.tensors], w)[: len(edges)]
        return gradients(self.forward.graph, edges, w)

    def at(self, edges: Sequence[GradientEdge]) -> Sequence[Tensor | None]:
        """δ: gradients of the R rows of every sample at each of these edges, (R, *output)."""
        if self.R == 1 and edges:
            return [None if d is None else d[None] for d in self.gradients(edges, self.S[0])]
        return self._deltas({("call", i): edge for i, edge in enumerate(edges)}, self.S) if edges else []

    def deltas(self, edges: Mapping[Key, GradientEdge], samples: Sequence[slice] = ()) -> dict[Key, Tensor | None]:
        """δ: gradients of the R rows of every sample at each of these edges, (R, *output), or of some samples only."""
        if not edges:
            return {}
        S = self.S
        if samples:
            S = torch.zeros_like(self.S)
            for some in samples:
                S[:, some] = self.S[:, some]
        return dict(zip(edges, self._deltas(edges, S), strict=True))

    def _deltas(self, edges: Mapping[Key, GradientEdge], S: Tensor) -> Sequence[Tensor | None]:
        graph, known, wanted = self.forward.graph, self.forward.known, list(edges.values())
        if S.shape[0] == 1:
            return [None if d is None else d[None] for d in self.gradients(wanted, S[0])]
        # On a CPU one backward pass after the other is faster, and weights are gathered in ordinary ones alone.
        if known.batched_rows and S.is_cuda and not self.ranks.several and not self.forward.watch.hooks:
            try:
                unused = known.proof.unused
                if not unused.keys() >= edges.keys():
                    unused |= {key: d is None for key, d in zip(edges, self.gradients(wanted, S[0]), strict=True)}
                used = [edge for key, edge in edges.items() if not unused[key]]
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "There is a performance drop")
                    found = iter(torch.func.vmap(lambda s: torch.autograd.grad(graph, used, s, retain_graph=True))(S))
                return [None if unused[key] else next(found) for key in edges]
            except RuntimeError as error:
                if out_of_memory(error):
                    raise
                known.batched_rows = False  # an operation whose backward vmap refuses
        # In memory the rows of a sample stand together: that is how they are used. Each goes to its place at once, so
        # that the next one finds its memory warm.
        places: list[Tensor | None] = []
        for r, s in enumerate(S):
            row = self.gradients(wanted, s)
            places = places or [None if d is None else d.new_empty(len(d), len(S), *d.shape[1:]) for d in row]
            for place, d in zip(places, row, strict=True):
                if place is not None and d is not None:
                    place[:, r] = d
        return [None if place is None else place.transpose(0, 1) for place in places]

    def portions(self, sizes: Sequence[int]) -> list[list[int]]:
        """What is compared at once, of columns of these sizes"""
        return self.forward.objective.parameters.portions(sizes)

    def explicit(self, path: str, indices: Sequence[int]) -> Tensor:
        """The rows of some parameters, written out: (m, their columns)"""
        params = [self.parameters.tensors[i] for i in indices]
        if path == "parts" and self.forward.chance.drawn:
            raise ValueError("a random model draws other numbers in parts")
        if path in ("vmap", "parts"):
            objective, rows_of = self.forward.objective, rows_by_vmap if path == "vmap" else rows_in_parts
            inputs = self.forward.batch.inputs
            rows = rows_of(objective.model, params, lambda model, x: objective.outputs(x, model), inputs, self.S)
        else:
            rows = rows_one_by_one(self.forward.graph, params, self.S, batched=path == "rows")
        return rows.to(self.parameters.dtype)


# Samples that are looked at in every step, and kinds of passes of which is known whether that will do.
FEW, KEPT = 8, 1024

# Where random numbers are drawn: how often a half of the samples stays while others take the places beside them.
ROUNDS = 4


class Cut:
    """A batch whose parts go through the model one after the other.

    Some of its samples are sent through the model once more, in other company: in every step a few of them, and all of
    them if the model does anything that it has not done before, or if numbers decide in it what a sample sees.
    """

    def __init__(self, batch: Batch, size: int, known: Facts, seed: int) -> None:
        self.batch, self.size, self.known = batch, size, known
        # Other numbers of samples, two of them: whatever permutes samples is no permutation of one, and two that change
        # places twice are where they were.
        self.together = max(3, size + 1)
        self.others = size - 1 if size > 3 else self.together + 1
        self.chosen = random.Random(seed)
        self.z: list[Tensor] = []  # by part
        self.thorough = False

    def saw(self, piece: Pass) -> None:
        """The next part, while it has its graph."""
        if not self.z:
            self.objective, self.before, self.after = piece.objective, piece.before, piece.after
            self.slopes, self.chance, self.coarsest = piece.slopes, piece.chance, piece.coarsest
        self.z.append(piece.z)
        self._keep(piece)
        self.thorough = self.thorough or not familiar(piece, self.known, self.size)

    def _keep(self, piece: Pass) -> None:
        """The last one, without its graph"""
        self.last = copy(piece)
        self.last.release(graph=True)

    def check(self, what: str, way_out: str, thorough: bool = True) -> None:
        """A Coupled error if parts are another function than the batch: `what` asked for parts, and what would not."""
        self.what, self.way_out = what, way_out
        self.thorough = self.thorough and thorough
        N = sum(map(len, self.z))
        if N < 2 or self.batch.samples != N:
            return
        here = self._now()
        try:
            self._check_buffers(self.before if self.z[1:] else self.after)
            if self.chance.drawn or self._in_other_company(torch.cat(self.z), here):
                self._beside_others(N)
        finally:
            here.restore(gently=True)

    def check_picked(self, part: Pass, index: Tensor, what: str, way_out: str) -> None:
        self.what, self.way_out = what, way_out
        here = part.moment()
        try:
            self._keep(part)
            self._check_buffers(self.before)
            if self.chance.drawn:
                self._beside_others(len(self.z[0]))
            elif not self._alike(part.z, self.z[0][index]):
                again = outputs(part.objective, part.batch.inputs, part.before, part.before, ())
                if self._alike(part.z, again):
                    raise self._error(COUPLED)
        finally:
            here.restore(gently=True)

    def _in_other_company(self, z: Tensor, here: Moment) -> bool:
        """Compares outputs of samples of different parts that go together; True if that cannot tell, because the model
        takes no such batch, or draws random numbers in it."""
        N, size = len(z), min(len(z), self.together)
        groups = [self.chosen.sample(range(N), min(size, FEW))]
        if self.thorough:
            K = -(-N // size)
            order = [i for k in range(K) for i in range(k, N, K)]  # neighbours are far apart
            groups = _in_turn(order, size, min(N, self.others))
        for group in groups:
            try:
                found = self._outputs(group, self.before)
            except Exception as error:  # only of this number of samples, perhaps
                unless_foreign(error)
                return True
            if found.shape != z[group].shape or self._drew(here, group):
                return True
            if not self._alike(found, z[group]) and self._alike(found, self._outputs(group, self.before)):
                raise self._error(COUPLED)
        return False

    def _drew(self, here: Moment, group: Sequence[int]) -> bool:
        """Whether the model has drawn random numbers, and not another thread."""
        if not here.drew_since():
            return False
        with Draws() as draws:  # type: ignore[no-untyped-call]
            self._outputs(group, self.before)
        self.chance.drawn = bool(draws.drew)
        return self.chance.drawn

    def _beside_others(self, N: int) -> None:
        """With the same random numbers: the same samples in the same places, beside others."""
        if N < 2:
            return
        group = list(range(min(N, self.together if self.thorough else min(self.together, FEW))))
        try:
            self._outputs(group, self.before)
        except Exception as error:
            unless_foreign(error)
            if self.size == 1:  # a model of single samples has no other batch
                return
            group = list(range(min(N, self.size)))
        rank = dict(zip(self.chosen.sample(group, len(group)), group, strict=True))
        bits = (len(group) - 1).bit_length()  # with all of them any two are apart once
        numbers = self.before
        for k in range(ROUNDS if self.thorough else 1):
            bit = k % bits
            first = self._outputs(group, self.before, numbers)
            later = self._now()
            for side in (0, 1) if self.thorough else (0,):
                kept = [i for i in group if rank[i] >> bit & 1 == side]
                beside = [i if i in kept else (i + max(1, len(group) // 2)) % N for i in group]
                if not self._alike(self._outputs(beside, self.before, numbers)[kept], first[kept]):
                    raise self._error(COUPLED)
            numbers = later  # others for the next: a permutation may leave the samples where they are

    def _check_buffers(self, other: Moment) -> None:
        """The last part has met the buffers as all others have left them: with those of another moment its outputs must
        be the very same, for nothing but the buffers differs."""
        if self.last.before.same_buffers(other):
            return
        last = self.last

        def repeated(buffers: Moment) -> Tensor:
            return outputs(last.objective, last.batch.inputs, last.before, buffers, last.slopes)

        found = repeated(other)
        if distance(found, last.z) == 0:
            return
        here = repeated(last.before)  # as the model is called without a watch
        if distance(found, here) > 10 * distance(repeated(last.before), here):
            name = other.changed(last.before, self.objective.model)
            raise self._error(MOVING.format(name))

    def _alike(self, found: Tensor, z: Tensor) -> bool:
        return alike(found, z, self.coarsest)

    def _error(self, why: str) -> Coupled:
        return Coupled(f"{self.what}: {why}: {self.way_out}")

    def _now(self) -> Moment:
        return Moment(self.objective.model, self.objective.parameters.device, self.chance)

    def _outputs(self, group: Sequence[int], buffers: Moment, numbers: Moment | None = None) -> Tensor:
        """With the buffers of a moment, and the random numbers that came then or at another one"""
        n = len(self.z[0])
        slopes = [s.take(torch.arange(len(group)) % n, n) for s in self.slopes]
        inputs = self.batch.take(torch.tensor(group)).inputs
        return outputs(self.objective, inputs, numbers or self.before, buffers, slopes)


def _in_turn(order: list[int], first: int, second: int) -> list[list[int]]:
    """Groups of two sizes by turns; the last ones begin again at the first sample, so that they are whole."""
    groups: list[list[int]] = []
    start = 0
    while start < len(order) or len(groups) < 2:
        size = second if len(groups) % 2 else first
        groups.append([order[i % len(order)] for i in range(start, start + size)])
        start += size
    return groups


def check_picked(whole: Pass, part: Pass, index: Tensor, known: Facts, seed: int, what: str) -> None:
    """The same of some samples that went through the model by themselves, after all of them."""
    ranks = whole.objective.parameters.ranks
    if ranks.several:  # they make the same passes, and these are enough unless the model draws random numbers
        if not ranks.all(whole.chance.drawn or alike(part.z, whole.z[index], whole.coarsest)):
            raise Coupled(f"{what}: {COUPLED}: {ALL_ROWS}")
        return
    cut = Cut(whole.batch, whole.N, known, seed)
    cut.saw(whole)
    cut.check_picked(part, index, what, ALL_ROWS)


ALL_ROWS = "take the rows of all samples, such as rows=mq.Sampled(1)"
COUPLED = (
    "the outputs of a sample depend on the other samples of its batch, so that a part of the batch is another loss"
)
MOVING = (
    "every forward pass changes buffers that the outputs depend on, such as {!r}, so that the next part of the batch "
    "sees another model, as under spectral_norm in train mode"
)


def outputs(objective: Objective, inputs: object, start: Moment, buffers: Moment, slopes: Sequence[Slopes]) -> Tensor:
    """z of these inputs, with the random numbers of one moment and the buffers of another"""
    start.restore(buffers=False)
    with torch.enable_grad():  # the model may differentiate itself
        return again(objective, inputs, buffers, slopes).detach()


def alike(found: Tensor, z: Tensor, dtype: torch.dtype) -> bool:
    """Whether these are the outputs of the same samples, up to rounding; what is not finite in both is the same."""
    found, z = (torch.nan_to_num(t.double(), 0.0, 0.0, 0.0).reshape(len(t), -1) for t in (found, z))
    return bool((found - z).norm(dim=1).max() <= tolerances.of_parts(dtype, z.is_cuda) * z.norm(dim=1).max())


def distance(found: Tensor, z: Tensor) -> float:
    """Between outputs; what is not finite in both is the same."""
    found, z = (torch.nan_to_num(t.double(), 0.0, 0.0, 0.0).flatten() for t in (found, z))
    return float((found - z).abs().max())


def familiar(forward: Pass, known: Facts, size: int) -> bool:
    """Whether there was such a pass before, and the structure of its graph keeps samples apart."""
    key = forward.walk.structure, forward.fingerprint
    if key in known.parts:
        return known.parts[key]
    if len(known.parts) >= KEPT:
        known.parts.clear()
    known.parts[key] = keeps_apart(forward.walk, forward.N) if forward.N > 1 else size > 1
    return False
