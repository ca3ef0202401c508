"""One piece of the batch, linearised: its loss, its gradient and its rows. Rules apply only where proven: backward
passes are linear, and the blocks of J̃ by the rules of layers and nodes equal plain autograd."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.nn.modules import module as every_module
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils.checkpoint import CheckpointFunction

from .. import tolerances
from ..deferred import AS_IS, current, read
from ..layers import Block, Explicit, Misfit, Nothing, assemble
from ..layers.axes import all_at, sample_axes
from ..layers.capture import LEAF_NODE, PLACES, Node, Place, cached, grouped
from ..layers.graph import Glimpse, Use, block_of, signature, uses_in
from ..losses import Loss
from ..losses.proof import prove
from ..model.anatomy import Chance, Moment
from ..model.batch import Batch, tensors
from ..model.checks import check_coupling
from ..model.parameters import Parameters, flat, named_parameters
from ..model.shards import own_part
from ..surroundings import out_of_memory
from .mapping import find
from .objective import Cotangents, Empirical, Exact, Objective, Rows, Sampled, Seed, Totals, check_gradient, drawn
from .passes import PATHS, REENTRANT, UNRELATED, Facts, Groups, Jacobian, Map, Pass, Proof, RowByRow, check_picked


def apply(blocks: Iterable[Block], v: Tensor, parameters: Parameters) -> Tensor:
    """J̃v: (n,) → (m,)"""
    parts = v.split_with_sizes(parameters.sizes)
    total: Tensor | None = None
    for block in blocks:
        found = block.apply([parts[i] for i in block.members or parameters.of(block)])
        total = found if total is None else total.add_(found)
    assert total is not None
    return total if parameters.shards is None else parameters.total(total)


def adjoint(blocks: Iterable[Block], w: Tensor, parameters: Parameters) -> Tensor:
    """J̃ᵀw: (m,) → (n,)"""
    total = torch.empty(parameters.n, dtype=w.dtype, device=w.device)
    parts = total.split_with_sizes(parameters.sizes)
    for block in blocks:
        block.adjoint(w, [parts[i] for i in block.members or parameters.of(block)])
    return total


def scattered(columns: Iterable[tuple[Block, Tensor]], parameters: Parameters) -> Tensor:
    """One vector from the parts of all blocks: (n,)"""
    total: Tensor | None = None
    for block, v in columns:
        if total is None:
            total = torch.empty(parameters.n, dtype=v.dtype, device=v.device)
        for here, there in parameters.ranges(block.params):
            total[here] = v[there]
    assert total is not None
    return total


def dense(blocks: Sequence[Block], dtype: torch.dtype, parameters: Parameters) -> Tensor:
    """J̃ itself, with the columns in the order of the parameters: (m, n)"""
    Jt = torch.empty(parameters.n, blocks[0].m, dtype=dtype, device=blocks[0].params[0].device)  # rows side by side
    if [i for b in blocks for i in b.members or parameters.of(b)] == [*range(len(parameters.sizes))]:  # in that order
        for block, part in zip(blocks, Jt.split([b.columns for b in blocks]), strict=True):
            block.write(part)
        return Jt.T
    parts = Jt.split(parameters.sizes)
    for block in blocks:
        pieces = block.rows(dtype).split([p.numel() for p in block.params], 1)
        for i, piece in zip(parameters.of(block), pieces, strict=True):
            parts[i].copy_(piece.T)
    return Jt.T


def together(
    blocks: Sequence[Block], groups: Sequence[Sequence[int]], dtype: torch.dtype, parameters: Parameters
) -> list[Block]:
    """The blocks, with those that share a group of parameters written out as one"""
    found = list(blocks)
    own = {tuple(b.members or parameters.of(b)) for b in blocks}
    for group in (group for group in groups if tuple(group) not in own):
        some = [b for b in found if not set(group).isdisjoint(parameters.of(b))]
        if len(some) > 1 and not all(b.empty for b in some):
            one = _as_one(some, [parameters.tensors[i] for i in group], dtype)
            found = [b for b in found if all(b is not c for c in some)] + one
    return found


def _as_one(blocks: Sequence[Block], members: Sequence[Tensor], dtype: torch.dtype) -> list[Block]:
    """One block for these parameters and all that stand beside them, and what is left of blocks that are zero"""
    full = [b for b in blocks if not b.empty]
    missing = [p for p in members if all(p is not q for b in full for q in b.params)]
    full += [Nothing(missing, full[0].m, full[0].N)] if missing else []
    rows = torch.cat([b.rows(dtype) for b in full], 1)
    rest = (b.without(members) for b in blocks if b.empty)
    return [Explicit([p for b in full for p in b.params], rows, full[0].N), *(b for b in rest if b is not None)]


# --- A backward pass must be linear in what is sent back: a hook that clips gradients falsifies the rows of J̃, which
# are of other sizes than the gradient of the loss, and a function that calls .backward() hides its parameters.


# What is sent back is changed by these factors: rounding is the same for each power of two, so that gradients are too.
# float16 has fewer.
SCALES = {torch.float16: (-1.0, 2.0**5, 2.0**-5)}
FAR = (-1.0, 2.0**40, 2.0**-20)

# A part of a gradient that may differ all the same: rounding by a hook, to bfloat16 for example, does no harm.
LEAST = 1e-2

# Rounding of a gradient that is nothing else, in multiples of what it is seen to be, and of eps times all gradients.
NOISE = 50.0

# Sums that are compared: in the few numbers of a small batch, such as the largest of them, one may agree by chance.
MOST, SOME = 8, 64

NOT_LINEAR = "is not linear"
WAY_OUT = "mq.LM(model, loss, radius=0.1) bounds the length of a step, which is what clipping is for"
HOOKS = f"J and the gradient are made of backward passes of many sizes, so a hook must be linear. Remove it; {WAY_OUT}"
FUNCTIONS = (
    "J and the gradient are made of backward passes of many sizes. Let it return the derivative as it is (a solver "
    f"within needs a tolerance relative to the gradient it is given); {WAY_OUT}"
)

Leaf = LEAF_NODE  # of parameters and inputs
Pull = Callable[[Tensor], Sequence[Tensor | None]]


def check_backward(forward: Pass, again: bool = False) -> None:
    """Before there is a gradient: whether hooks and functions of the user's own, if there are any, have backward passes
    that are linear and that reach the parameters. `again`: though they had when they were seen first."""
    if current.tape is not None:
        return
    known, ranks = forward.known, forward.objective.parameters.ranks
    way = forward.walk.structure, forward.hooks, forward.form.modes, forward.N  # a hook may look at how many there are
    if way in known.linear and not again and not ranks.several:
        return
    nodes, index = forward.walk.nodes, forward.walk.index
    functions = _functions(nodes)
    reached = {id(node.variable) for node in nodes if type(node) is Leaf} & index.keys()
    if len(reached) < len(index):
        _check_recomputed(forward)
    if not reached:
        _check_reach(forward, functions)
        raise ValueError(UNRELATED)
    if ranks.all(not (forward.hooks or functions)):
        known.linear.add(way)
        return
    key = forward.form.modes, forward.hooks, tuple(node.name() for node in functions), forward.N
    if ranks.all(key in known.linear and not again):
        known.linear.add(way)
        return
    with torch.random.fork_rng([forward.z.device] if forward.z.is_cuda else []):
        if not ranks.several:
            _check_reach(forward, functions)
        verdict = _judged(forward)
        if verdict.reason is not None:
            raise ValueError(_blame(forward, verdict.reason))
    forward.after.restore(gently=True)  # a backward pass may call a part of the model again
    if not verdict.zeros:  # of a gradient that is zero, as behind a layer that starts at zero, nothing is known
        known.linear.add(key)


def _check_recomputed(forward: Pass) -> None:
    """Layers behind torch.utils.checkpoint with inputs that need no gradient, as the first ones have: if it is the
    reentrant one they are not in the graph at all, and nothing tells but its warning."""
    known, key = forward.known, ("recomputed", forward.form.modes, forward.walk.structure)
    if key in known.linear or forward.objective.parameters.ranks.several:
        return
    with warnings.catch_warnings(record=True) as told, torch.enable_grad():  # the model may differentiate itself
        warnings.simplefilter("always")
        forward.repeated({})
    if any(HIDES in str(warning.message) for warning in told):
        raise ValueError(REENTRANT)
    known.linear.add(key)


HIDES = "None of the inputs have requires_grad=True"  # torch.utils.checkpoint


def _functions(nodes: Sequence[Node]) -> list[Node]:
    """Those whose backward pass is not torch's own formula: where there are none, and no hooks, all is linear."""
    foreign = {kind for kind in set(map(type, nodes)) if _foreign(kind)}
    return [node for node in nodes if type(node) in foreign] if foreign else []


def _foreign(kind: type) -> bool:
    if issubclass(kind, BackwardCFunction):
        home: str = kind._forward_cls.__module__  # type: ignore[attr-defined]
        return not home.startswith(("marquardt.", "torch.distributed."))
    return kind.__name__ == "CppFunction"  # registered by an extension


def _check_reach(forward: Pass, functions: Sequence[Node]) -> None:
    """Functions that call .backward() within their own add to p.grad, and autograd.grad hears nothing of it. They are
    called even where no parameter lies behind them."""
    functions = [node for node in functions if getattr(node, "_forward_cls", None) is not BackwardHookFunction]
    if any(getattr(node, "_forward_cls", None) is CheckpointFunction for node in functions):
        raise ValueError(REENTRANT)
    edges = [GradientEdge(child, k) for node in functions for child, k in node.next_functions if child is not None]
    if not edges:
        return
    own = [(name, p, p.grad) for name, p in named_parameters(forward.objective.model)]
    names = ", ".join(sorted({_name(node) for node in functions}))
    try:
        for _, p, _ in own:
            p.grad = None
        torch.autograd.grad(
            forward.graph, edges, torch.ones_like(forward.graph), retain_graph=True, allow_unused=True
        )  # fmt: skip
        hidden = [name for name, p, _ in own if p.grad is not None]
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        raise ValueError(f"the backward pass of {names} fails within torch.autograd.grad: {error}") from error
    finally:
        for _, p, grad in own:
            p.grad = grad
    if hidden:
        raise ValueError(
            f"the backward pass of {names} calls .backward() itself, so that torch.autograd.grad finds no gradient of "
            f"parameter {hidden[0]!r}: have it return the gradients of its inputs, the parameters among them; "
            "torch.utils.checkpoint does so with use_reentrant=False"
        )


@dataclass(frozen=True)
class Verdict:
    """Of several gradients"""

    reason: str | None = None  # why one is no linear function of what is sent back,
    where: int = 0  # and which: the first
    zeros: bool = False  # whether one is zero


def _judged(forward: Pass) -> Verdict:
    """The gradients of the parameters"""
    parameters = forward.objective.parameters
    found = []
    for part in parameters.portions(parameters.sizes):
        some = [parameters.whole.tensors[i] for i in part]
        found.append(_judge(partial(forward.pull, params=some), forward))
    reason = next((v.reason for v in found if v.reason is not None), None)
    if reason is None and not parameters.ranks.all(reason is None):
        reason = "is not linear on another rank"
    return Verdict(reason, zeros=any(v.zeros for v in found))


def _judge(pull: Pull, forward: Pass) -> Verdict:
    """Gradients of w, of multiples of it, of another and of their sum. Where nothing but rounding is left, additions in
    another order may change all of it, as on a GPU: what is not the same twice is not compared, if it is so small."""
    generator = torch.Generator("cpu").manual_seed(0)
    several = forward.objective.parameters.ranks.several  # all ranks make the same passes, with parts of other sizes
    rounds = 1 if several else max(1, min(MOST, SOME // max(1, forward.z.numel())))
    w, *others = (
        torch.randn(forward.z.shape, generator=generator, dtype=torch.float64).to(forward.z) for _ in range(1 + rounds)
    )
    coarsest, info = forward.coarsest, torch.finfo(forward.coarsest)
    tolerance = max(LEAST, tolerances.of_rules(coarsest))

    def at(w: Tensor) -> dict[int, Tensor]:
        return {i: g for i, g in enumerate(pull(w)) if g is not None}

    def apart(c: float = 1.0) -> dict[int, float]:
        """How far the gradients of c·w are from c times those of w"""
        again = at(c * w)
        return {i: float((again[i] / c - g).norm()) for i, g in first.items()}

    first = at(w)
    sizes = {i: float(g.norm()) for i, g in first.items()}
    total = math.sqrt(sum(size**2 for size in sizes.values()))
    least, most = NOISE * info.eps * total, tolerances.of_noise(coarsest) * total  # of rounding alone
    unsure = {i: d for i, d in apart().items() if d > tolerance * sizes[i]}
    reasons = {i: "is another one in every backward pass" for i, d in unsure.items() if d > most}
    for c in SCALES.get(coarsest, FAR):
        smallest = 0.0 if abs(c) >= 1 else info.tiny / info.eps / abs(c)  # that does not underflow
        seen = {i: d for i, d in apart(c).items() if i not in unsure and sizes[i] >= smallest}
        reasons |= {i: NOT_LINEAR for i, d in seen.items() if (tolerance * sizes[i] or most) < d < math.inf}
    for v in others:
        other, both = at(v), at(w + v)
        for i, g in first.items():
            d = float((both[i] - other[i] - g).norm())
            if i not in unsure and max(tolerance * (sizes[i] + float(other[i].norm())), least) < d < math.inf:
                noise = math.sqrt(sum(apart(c)[i] ** 2 / 3 for c in (3, 5, 7)))
                reasons |= {i: NOT_LINEAR} if d > min(NOISE * noise, most) else {}
    where = min(reasons, default=0)
    return Verdict(reasons.get(where), where, 0.0 in sizes.values())


# Who it is.


def _blame(forward: Pass, reason: str) -> str:
    """The first whose hook, alone, makes it so; otherwise a node of the graph."""
    carriers = list(_carriers(forward.objective.model))
    places = [place for _, own in carriers for place in own]
    if not forward.objective.parameters.ranks.several:
        with _silent(places):
            forward.again()
            if _judged(forward).reason is not None:
                return _node(forward, reason)
        for words, own in carriers:
            with _silent([place for place in places if not any(place is one for one in own)]):
                forward.again()
                if _judged(forward).reason is not None:
                    return f"{words} has a backward hook, and what it returns {reason}: {HOOKS}"
    found = " or ".join(words for words, _ in carriers) or "the forward pass"
    return f"the gradient of the model {reason}, and {found} has a backward hook: {HOOKS}"


def _carriers(model: nn.Module) -> Iterator[tuple[str, list[dict[int, Any]]]]:
    """Who carries hooks, in words, and where they are kept"""
    for name, p in named_parameters(model):
        if p._backward_hooks:
            yield f"parameter {name!r}", [p._backward_hooks]
    for name, m in model.named_modules():
        if m._backward_pre_hooks or m._backward_hooks:
            which = f"module {name!r}" if name else "the model"
            yield f"{which} ({type(m).__name__})", [m._backward_pre_hooks, m._backward_hooks]
    every: list[dict[int, Any]] = [every_module._global_backward_pre_hooks, every_module._global_backward_hooks]
    if any(every):
        yield "torch.nn.modules.module, for all modules,", every


@contextmanager
def _silent(places: Sequence[dict[int, Any]]) -> Iterator[None]:
    """Without these hooks"""
    kept = [(place, dict(place)) for place in places]
    try:
        for place in places:
            place.clear()
        yield
    finally:
        for place, hooks in kept:
            place.update(hooks)


def _node(forward: Pass, reason: str) -> str:
    """Where on the way back the first gradient is at fault: by a function, or a hook between two nodes."""
    nodes = reversed(forward.walk.nodes)
    places = [(node, k) for node in nodes for k in range(1 if type(node) is Leaf else len(node._input_metadata))]
    edges = [GradientEdge(node, k) for node, k in places]
    verdict = _judge(
        lambda w: torch.autograd.grad(
            forward.graph, edges, w.view_as(forward.graph), retain_graph=True, allow_unused=True
        ),
        forward,
    )
    if verdict.reason is None:
        return f"the gradient of the model {reason}: {HOOKS}"
    node, k = places[verdict.where]
    users = [user for user in forward.walk.nodes if (node, k) in user.next_functions]
    functions = _functions(users) or ([] if forward.watch.hooks else _functions(forward.walk.nodes))
    if functions:
        names = " or ".join(sorted({_name(node) for node in functions}))
        return f"what the backward pass of {names} returns {verdict.reason}: {FUNCTIONS}"
    leaves = {id(p): f"parameter {name!r}" for name, p in named_parameters(forward.objective.model)}
    here = leaves.get(id(node.variable), "a leaf") if type(node) is Leaf else node.name()
    where = " and ".join([*dict.fromkeys(user.name() for user in users), here])
    return f"the forward pass sets a hook between {where}, and what it returns {verdict.reason}: {HOOKS}"


def _name(node: Node) -> str:
    """Of a torch.autograd.Function, as in the code"""
    kind = getattr(node, "_forward_cls", None)
    return node.name() if kind is None else f"torch.autograd.Function {kind.__qualname__!r}"


# --- What plain autograd says of J̃ᵀw, for the rows that rules have found to be compared with it.


Key = TypeVar("Key")


class Comparison:
    """Jᵀ(Sw) from plain autograd for a random w: what J̃ᵀw from the rows must equal.

    Equality for one random w proves J̃ itself, column by column: each column of a wrong J̃ would have to be orthogonal to
    w. It is equality up to rounding, and rounding may be all there is: a bias before InstanceNorm, or that of the keys
    of attention, has no influence on the outputs. How much it is shows in multiples of w, which round in other ways.
    """

    def __init__(self, J: Jacobian, thorough: bool = False) -> None:
        self.J, self.params, self.index = J, J.parameters.tensors, J.parameters.index
        self.thorough = thorough  # whether rounding is measured in any case
        self.w = J.random()
        self.tolerance = tolerances.of_rules(J.forward.coarsest)
        # Multiples differ by about as much as rounding leaves, and a true gradient is 1/eps times that: measured 130
        # times in bfloat16, and some 1000 times may be expected of TF32. But only 8 times for the bias of a LayerNorm
        # of bfloat16 on a CPU, which adds up in it; without influence it is once.
        self.bound = min(50.0, 0.02 / torch.finfo(J.forward.coarsest).eps)
        self.true: dict[int, Tensor] = {}  # by parameter, those that are looked at: (size,)
        self.noise: dict[int, Tensor] | None = None  # what rounding may leave in them: ()
        self.inert: dict[int, float] = {}  # parameters whose gradient is no more than that
        self.unused: set[int] = set()  # parameters that the outputs do not depend on
        self.zeros = False  # whether the gradient of another one is zero
        if not J.ranks.several:
            self._see(range(len(self.params)))

    def look(self, some: Sequence[int]) -> None:
        """At these parameters from here on: at sharded ones a part at a time, for no rank holds all their gradients."""
        if self.J.ranks.several and some:
            self.end()
            self._see(some)

    def end(self) -> None:
        """What is left to find out about the parameters that are looked at"""
        if self.thorough and self.true:
            self.measure_rounding()

    def _see(self, some: Sequence[int]) -> None:
        self.noise, self.true = None, {}
        pulled = self.J.forward.pull(self.J.cotangent(self.w), [self.params[i] for i in some])
        for i, g in zip(some, pulled, strict=True):
            self.true[i] = flat(g, self.params[i])
            if g is None:
                self.unused.add(i)
            elif not bool(g.any()):
                self.zeros = True

    def first(self, blocks: Mapping[Key, Block | None]) -> Key | None:
        """The first that agrees, on every rank that shares the weights; rounding is asked only if none does."""
        for key, block in blocks.items():
            if self._agrees(block):
                return key
        if not self.J.ranks.all(all(block is None for block in blocks.values())):
            self.measure_rounding()
        for key, block in blocks.items():
            if self._agrees(block):
                return key
        return None

    def _agrees(self, block: Block | None) -> bool:
        return self.J.ranks.all(block is not None and self._agrees_here(block))

    def _agrees_here(self, block: Block) -> bool:
        found = block.pull(self.w.flatten()).split([p.numel() for p in block.params])
        smallest = torch.finfo(self.w.dtype).tiny
        for p, f in zip(block.params, found, strict=True):
            i = self.index[id(p)]
            noise = smallest if self.noise is None else smallest + self.noise[i]
            if not bool((f - self.true[i]).norm() <= self.tolerance * self.true[i].norm() + noise):
                return False
        return True

    def measure_rounding(self) -> None:
        """How much rounding leaves, and which gradients are no more: with another w too, for one of them may be small
        by chance."""
        if self.noise is not None:
            return
        squares = {i: t.new_zeros(()) for i, t in self.true.items()}
        for c in (3, 5, 7):
            for i, other in self._pull(c * self.w).items():
                squares[i] += (other / c - self.true[i]).square().sum() / 3
        self.noise = {i: self.bound * square.sqrt() for i, square in squares.items()}
        if not self.J.ranks.several and self.noise:  # a hook may round too, or draw: more than that is no rounding
            share, all_of_them = tolerances.of_noise(self.J.forward.coarsest), list(self.true.values())
            most = share * torch.stack([t.norm() for t in all_of_them]).norm()
            self.noise = {i: noise.minimum(most) for i, noise in self.noise.items()}
        again = self._pull(self.J.random(1))
        for i, noise in self.noise.items():
            small = bool((noise > 0) & (self.true[i].norm() <= noise) & (again[i].norm() <= noise))
            if self.J.ranks.all(small):
                self.inert[i] = float(noise)

    def _pull(self, w: Tensor) -> dict[int, Tensor]:
        pulled = self.J.forward.pull(self.J.cotangent(w), [self.params[i] for i in self.true])
        return {i: flat(g, self.params[i]) for i, g in zip(self.true, pulled, strict=True)}


# --- Rules apply only where proven: the blocks of J̃ by the rules of layers and nodes, compared with plain autograd.


# Blocks of up to this many columns are watched; for larger ones the proof on first use has to do.
GUARDED = 1_000_000

# Ways of calling the model whose proofs are kept, and of each kinds of passes that were compared.
PROOFS, PASSES = 64, 1024


def blocks_of(J: Jacobian) -> tuple[list[Block], set[int] | None]:
    """The columns of J̃ by layer, and the parameters without influence; None if these rows cannot tell. Ranks that share
    the weights find the same, for they make the same passes."""
    known, model, records = J.forward.known, J.forward.objective.model, (current.tape is not None)
    if J.R > 1:
        J.shorten()
    groups, base = _grouped(J)
    signature = _with_uses(J, base)
    if not records:
        known.only_slopes = not J.forward.chance.drawn or _draws_slopes_only(J)
    proven = records or signature in known.proofs
    if J.ranks.several:
        proven = J.ranks.all(proven)
    if records and known.proof.map is not None and known.proofs.get(signature) is not known.proof:
        raise RuntimeError("the graph of the recorded pass is not the one that was proven")
    if not proven and J.ranks.all(not bool(J.S.any())):  # all weights are zero: that proves nothing
        return [Nothing(J.parameters.tensors, J.m, J.N)], None
    if not proven:
        check_coupling(model)
        _prove(J, base)
    elif not records:
        known.proof, known.proven = known.proofs[signature], signature
    try:
        blocks, influential = _without_inert(J, _blocks(J, groups))
        doubtful = proven and not records and (influential or not _plausible(J, blocks))
    except Exception as error:  # what was proven on other data may fail on these
        if not proven or records or out_of_memory(error) or J.ranks.several:
            raise
        doubtful = True
    if doubtful:
        check_backward(J.forward, again=True)
        old = known.proof
        _prove(J, base)
        if known.proof.same(old):  # near a minimum the gradient is all rounding
            known.proof.apart = 2 * old.apart
            known.proof.rest()
        blocks, _ = _without_inert(J, _blocks(J, groups))
    if not proven:
        known.differentiates = not J.ranks.all(J.forward.same_without_grad())
    return blocks, set(known.proof.inert)


def _grouped(J: Jacobian) -> tuple[Groups, object]:
    """Calls that share parameters, by these, and the signature: all that decides which code finds the rows, the calls
    of layers and the graph. In a batch of one sample every place is right: what is proven there holds for no other."""
    forward, watch, known, N = J.forward, J.forward.watch, J.forward.known, J.N
    walk, kind = forward.walk, (J.R == 1, forward.coarsest, J.parameters.dtype)
    same = kind, forward.form.modes, forward.chance.drawn, forward.hooks
    way = walk.structure, walk.sizes, N, same, tuple(watch.ways)
    if way in known.ways:
        return known.ways[way]
    calls = watch.calls
    groups = {tuple(sorted({i for c in g for i in J.parameters.members(calls[c].params)})): g for g in grouped(calls)}
    fits = tuple(call.fits(N) for call in calls)
    pooled = tuple(call.maxima is not None for call in calls)
    if len(known.ways) >= PASSES:
        known.ways.clear()
    known.ways[way] = found = groups, (walk.structure, tuple(groups), fits, N == 1, pooled, same)
    return found


def _with_uses(J: Jacobian, base: object) -> object:
    """And the uses in the graph, if rows come from these."""
    return (base, signature(J.forward.walk, J.N)) if base in J.forward.known.walks else base


def _blocks(J: Jacobian, groups: Groups) -> list[Block]:
    """The blocks of all parameters, each by the way that is proven for it."""
    calls, params, proof = J.forward.watch.calls, J.parameters.tensors, J.forward.known.proof
    if not proof.general and len(proof.places) == len(groups):
        deltas = J.at([call.edge for call in calls])
        return [_by_rule(J, key, groups[key], deltas, place) for key, place in proof.places.items()]
    indices = {i for i, path in proof.general.items() if path == "graph"}
    uses = _uses(J, proof.map, indices)
    ruled, by_node = _deltas(
        J, [i for key, members in groups.items() if key in proof.places for i in members], uses, proof.map
    )
    blocks = [_by_rule(J, key, groups.get(key, []), ruled, place) for key, place in proof.places.items()]
    glimpses = [] if proof.map is None else _glimpses(J, uses, proof.map, by_node)
    blocks += [_by_graph(J, i, glimpses) for i in sorted(indices)]
    for path in ("none", *PATHS):
        if some := [i for i in proof.general if proof.general[i] == path]:
            own = [params[i] for i in some]
            blocks.append(Nothing(own, J.m, J.N) if path == "none" else Explicit(own, J.explicit(path, some), J.N))
    return blocks


def _by_rule(J: Jacobian, key: tuple[int, ...], members: Sequence[int], deltas: Any, place: Place) -> Block:
    """The block of the parameters `key`, from these calls and all δ"""
    calls, params = J.forward.watch.calls, J.parameters.tensors
    block: Block | None
    if len(members) == 1 and (delta := deltas[members[0]]) is not None:
        block = cached(calls[members[0]].block(delta, J.N, place))
    else:
        block = assemble([calls[i] for i in members], [deltas[i] for i in members], J.N, place)
    if block is None:
        return Nothing([params[i] for i in key], J.m, J.N)
    if block.params[0] is params[key[0]] and len(block.params) == len(key) < 3:
        block.members = key
    return block


def _uses(J: Jacobian, where: Map | None, indices: Collection[int]) -> list[Use]:
    if where is None:
        return []
    return [use for use in uses_in(J.forward.walk, where.stops, where.blind) if not use.params.isdisjoint(indices)]


def _deltas(
    J: Jacobian, calls: Sequence[int], uses: Sequence[Use], where: Map | None = None
) -> tuple[dict[int, Tensor | None], list[dict[int, Tensor]]]:
    """δ of these calls; and of these uses by the numbers of their nodes, for each colour of samples."""
    edges = {("call", i): J.forward.watch.calls[i].edge for i in calls}
    edges |= {("node", use.number): use.edge for use in uses}
    one = where is None or len(where.colours) == 1
    passes = [J.deltas(edges)] if one else [J.deltas(edges, samples) for samples in where.colours]  # type: ignore[union-attr]
    each = {i: [d for found in passes if (d := found["call", i]) is not None] for i in calls}
    ruled = {i: sum(some[1:], some[0]) if some else None for i, some in each.items()}
    return ruled, [{k: d for (kind, k), d in p.items() if kind == "node" and d is not None} for p in passes]


def _glimpses(J: Jacobian, uses: Sequence[Use], where: Map, seen: Sequence[Mapping[int, Tensor]]) -> list[Glimpse]:
    return [
        Glimpse(use, places[use.site].of(J.N), deltas[use.number])
        for places, deltas in zip(where.places, seen, strict=True)
        for use in uses
        if use.site in places and use.number in deltas
    ]


def _by_graph(J: Jacobian, i: int, glimpses: Sequence[Glimpse]) -> Block:
    return block_of(J.parameters.tensors[i], [g for g in glimpses if i in g.use.params], J.R, J.N)


def _without_inert(J: Jacobian, blocks: list[Block]) -> tuple[list[Block], bool]:
    """The blocks, with zero in the columns of the parameters without influence, and whether one of them has some
    now: a bias before InstanceNorm may gain it through an activation between the two."""
    index, limits = J.parameters.index, J.forward.known.proof.inert
    if not limits and not J.ranks.several:
        return blocks, False
    found: list[Block] = []
    influential: list[Tensor] = []
    for block in blocks:
        inert = [p for p in block.params if index[id(p)] in limits]
        if not inert or block.empty:
            found.append(block)
            continue
        pulled = block.pull(J.random().flatten()).split([p.numel() for p in block.params])
        # The rows round in another way than a backward pass.
        influential += [
            t.norm() > 4 * limits[index[id(p)]]
            for p, t in zip(block.params, pulled, strict=True)
            if index[id(p)] in limits
        ]
        rest = block.without(inert)
        found += [*([] if rest is None else [rest]), Nothing(inert, J.m, J.N)]
    same = (current.tape is not None) or not influential or not bool(torch.stack(influential).any())
    return found, not J.ranks.all(same)


def _plausible(J: Jacobian, blocks: list[Block]) -> bool:
    """Whether a proof on earlier data still holds, for J̃ᵀw with a random w: in every pass that shows anything new, and
    in all where the numbers in the graph decide (samples sorted by length, routed to experts, multiplied by a matrix).
    """
    proof, index = J.forward.known.proof, J.parameters.index
    fingerprint = J.forward.fingerprint
    new = fingerprint not in proof.passes
    if J.ranks.several:
        new = not J.ranks.all(not new)
    doubtful = new or not proof.passes[fingerprint]
    if J.ranks.several:
        doubtful = not J.ranks.all(not doubtful)
    some = [] if proof.quiet and not doubtful else [b for b in blocks if doubtful or b.columns <= GUARDED]
    if not some:
        proof.quiet = max(0, proof.quiet - 1)
        return True
    if new:
        if len(proof.passes) >= PASSES:
            proof.passes.clear()
        proof.passes[fingerprint] = _sure(J)
    proof.rest()
    w, tolerance = J.random(), tolerances.of_rules(J.forward.coarsest)
    wrong: list[Tensor] = []
    pairs: list[tuple[Tensor, Tensor, float]] = []  # how far off, how large, and what may be noise
    for part in J.portions([b.columns for b in some]):
        pulled = iter(J.forward.pull(J.cotangent(w), [p for k in part for p in some[k].params]))
        for b in (some[k] for k in part):
            true = [flat(next(pulled), p) for p in b.params]
            if b.empty:
                limits = [proof.inert.get(index[id(p)], 0.0) for p in b.params]
                wrong += [t.norm() > limit for t, limit in zip(true, limits, strict=True)]
            else:
                whole = torch.cat(true)
                noise = sum(proof.noise.get(index[id(p)], 0.0) for p in b.params)
                pairs.append(((b.pull(w.flatten()) - whole).norm(), whole.norm(), noise))
    if pairs:
        total = torch.stack([size for _, size, _ in pairs]).norm()
        wrong += [~(off <= tolerance * size + noise * total) for off, size, noise in pairs]
    return J.ranks.all(not bool(torch.stack(wrong).any()))


def _sure(J: Jacobian) -> bool:
    """Whether the samples are where the proof has them by the structure of the graph alone."""
    proof, forward = J.forward.known.proof, J.forward
    if forward.hooks:  # which may do something else the next time
        return False
    if J.N == 1:
        return True
    if not {"vmap", "parts"}.isdisjoint(proof.general.values()):  # these take single samples for all that there is
        return False
    axes = sample_axes(forward.walk, J.N)
    for key, members in _grouped(J)[0].items():
        place = proof.places.get(key)
        for edge in (forward.watch.calls[i].edge for i in members):
            at = edge.node, edge.output_nr
            if place is not None and at in axes and not all_at(place, axes[at], edge, J.N):
                return False
    indices = {i for i, path in proof.general.items() if path == "graph"}
    uses = _uses(J, proof.map, indices)
    return all(axes.get((use.node, 0)) is not None for use in uses)


def _draws_slopes_only(J: Jacobian) -> bool:
    """Whether all random numbers of the forward pass are slopes of RReLU."""
    before, after = J.forward.before, J.forward.after
    if before.cuda is None:
        return False
    state: Tensor | None = before.cuda
    for slopes in J.forward.slopes:
        if state is None or slopes.started is None or not torch.equal(state, slopes.started):
            return False
        state = slopes.state
    return state is not None and after.cuda is not None and torch.equal(state, after.cuda)


def _prove(J: Jacobian, base: object) -> None:
    """J̃ᵀw from the rows must equal Jᵀ(Sw) from plain autograd.

    Every group of layers is judged by itself. The proof is not kept while a gradient is zero, as behind a layer
    that starts at zero: there a wrong rule could pass.
    """
    known = J.forward.known
    proof = known.proof = Proof()
    known.proven = None
    known.proofs.pop(_with_uses(J, base), None)
    comparison = Comparison(J, any(other.inert for other in known.proofs.values()))
    _prove_rules(J, proof, comparison)
    covered = {i for key in proof.places for i in key}
    rest = [i for i in range(len(J.parameters)) if i not in covered]
    for part in J.portions([J.parameters.sizes[i] for i in rest]):
        comparison.look([rest[k] for k in part])
    proof.general.update({i: "none" for i in rest if J.ranks.all(i in comparison.unused)})
    rest = [i for i in rest if i not in proof.general]
    if J.ranks.several and rest:
        raise ValueError(
            f"the rows of parameter {J.parameters.names[rest[0]]!r} cannot be found by a rule of its layer, and other "
            "ways need all of the model on one rank: LM takes sharded parameters of linear layers, convolutions, "
            "embeddings and normalisations whose samples can be told; pass the plain model, or leave it out by params="
        )
    _prove_graph(J, proof, comparison, rest)
    _prove_paths(J, proof, comparison, [i for i in rest if i not in proof.general])
    comparison.end()
    proof.inert, proof.passes[J.forward.fingerprint] = comparison.inert, _sure(J)
    if comparison.noise is not None and not J.ranks.several:
        total = float(torch.stack([t.norm() for t in comparison.true.values()]).norm())
        proof.noise = {i: float(noise) / total for i, noise in comparison.noise.items() if total}
    if J.ranks.all(not comparison.zeros):
        if proof.map is not None:
            known.walks.add(base)
        if len(known.proofs) >= PROOFS:
            known.proofs.clear()
        known.proven = signature = _with_uses(J, base)
        known.proofs[signature] = proof


def _prove_rules(J: Jacobian, proof: Proof, comparison: Comparison) -> None:
    """Where the samples are in every group of calls, if one place is right."""
    deltas, _ = _deltas(J, range(len(J.forward.watch.calls)), [])
    groups = [*_grouped(J)[0].items()]
    for part in J.portions([sum(J.parameters.sizes[i] for i in key) for key, _ in groups]):
        comparison.look([i for k in part for i in groups[k][0]])
        for key, members in (groups[k] for k in part):
            found: dict[Place, Block | None] = {}
            for place in PLACES:
                try:
                    found[place] = _by_rule(J, key, members, deltas, place)
                except Misfit:
                    found[place] = None
            if (right := comparison.first(found)) is not None:
                proof.places[key] = right


def _prove_graph(J: Jacobian, proof: Proof, comparison: Comparison, rest: list[int]) -> None:
    """Those of the parameters without a rule whose uses the graph shows, each by itself."""
    if not rest:
        return
    where = find(J, J.forward.walk)
    uses = _uses(J, where, rest)
    glimpses = _glimpses(J, uses, where, _deltas(J, [], uses, where)[1])
    lost = {i for use in uses if use.site in where.lost for i in use.params}
    for i in (i for i in rest if i not in lost):
        try:
            block = _by_graph(J, i, glimpses)
        except Misfit:
            continue
        if comparison.first({"graph": block}) is not None:
            proof.general[i], proof.map = "graph", where


def _prove_paths(J: Jacobian, proof: Proof, comparison: Comparison, rest: list[int]) -> None:
    """The fastest general path that is right for the parameters without a rule."""
    for path in PATHS if rest else ():
        if J.forward.known.may_join and J.N > 1 and path in ("rows", "loop"):
            raise RowByRow(f"the rows of {J.N} samples take a backward pass each")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                block = Explicit([J.parameters.tensors[i] for i in rest], J.explicit(path, rest), J.N)
        except Exception as error:  # torch.func and vmap refuse models in many ways
            if path == "loop" or out_of_memory(error):
                raise
            continue
        if path == "loop" or comparison.first({path: block}) is not None:
            proof.general.update(dict.fromkeys(rest, path))
            break


# --- One piece of the batch, linearised: its loss, its gradient, and its rows.


class Piece:
    """Value, gradient and J̃ = SᵀJ of one piece, in Σ-units, without the normaliser.

    `keep_graph`: products by automatic differentiation come after the rows.
    """

    def __init__(
        self, objective: Objective, batch: Batch, rows: Rows, known: Facts, chance: Chance, seed: Seed,
        keep_graph: bool, before: Moment | None = None,
    ) -> None:  # fmt: skip
        self.objective, self.batch, self.known, self.keep_graph = objective, batch, known, keep_graph
        joined = rows.__class__ not in (Exact, Empirical) and rows.joined
        self.whole = Pass(objective, batch, known, chance, joined=joined, before=before)
        self.objective = objective = self.whole.objective
        check_backward(self.whole)
        self.z, self.N = self.whole.z, self.whole.N
        y = batch.targets
        self._check(y)
        samples = y.shape[0] if y.__class__ is Tensor and y.ndim else batch.samples
        seed = seed if samples == self.N else seed.apart()
        index = None if rows.__class__ in (Exact, Empirical, Sampled) else rows.pick(self.N, seed)
        with torch.no_grad() if torch.is_grad_enabled() else AS_IS:
            if index is None:
                self.cotangents = drawn(rows, objective.loss, self.z, batch, seed)
            else:
                # The rows are those of the samples picked: S of all of them is never formed, z only has its shape.
                self.cotangents = Cotangents(self.z[None], None, objective.slope(self.z, batch))
            self.totals = self._totals(rows)
        if index is not None:
            self.jacobian = self._picked(rows, index, seed)
        else:
            self.jacobian = Jacobian(self.whole, self.cotangents.S[:, None] if joined else self.cotangents.S)
        self.m = self.jacobian.m
        self.telling = 0 if index is not None and len(index) == 0 else self.m  # its own rows that are not zero
        self.inert: set[int] | None = None  # parameters without influence; None before the rows can tell
        self._blocks: list[Block] | None = None
        self._gradient: Tensor | None = None
        self._outside: Tensor | None = None  # h
        if index is not None:
            self.whole.after.restore(gently=True)  # the samples that were picked had forward passes of their own

    def _check(self, y: Any) -> None:
        """Whether the loss can be taken of these targets. Those of the last step, unchanged, need no second look, if
        the loss looks at nothing else."""
        z, weight, loss, checked = self.z, self.batch.weight, self.objective.loss, self.known.checked
        looks = type(loss).faults is not Loss.faults or weight is not None or current.tape is not None
        if looks or y.__class__ is not Tensor:
            loss.check(z, y, weight, part=True)
            return
        now = (y._version, y.shape, y.dtype, y.device, z.shape, z.dtype, z.device, loss)
        if checked is None or checked[0]() is not y or checked[1] != now:
            loss.check(z, y, weight, part=True)
            self.known.checked = weakref.ref(y), now

    def _totals(self, rows: Rows) -> Totals:
        objective, batch, loss = self.objective, self.batch, self.objective.loss
        z, y, w = self.z, batch.targets, batch.weight
        value, normaliser, low, sensitivity = read(*loss.totals(z, y, w), self.cotangents.sensitivity(z))
        totals = Totals(value, normaliser, low, self.whole.rounding * (abs(value) + sensitivity))
        if not math.isfinite(totals.value):
            raise ValueError(f"the loss is {totals.value} at the current parameters: {self._blame()}")
        if self.known.loss is not objective.given and current.tape is None:
            proven = prove(loss, rows.empirical, self.z, batch.targets, batch.weight)
            if rows.spans:
                check_gradient(rows, self.cotangents, objective.slope(self.z, batch))
            self.known.loss = objective.given if proven else None
        return totals

    def _picked(self, rows: Rows, index: Tensor, seed: Seed) -> Jacobian:
        """J̃ of some of the samples, in the units of the whole"""
        check_coupling(self.objective.model)
        if not self.batch.opaque and not self.divisible:  # `take` tells what cannot be taken apart
            raise ValueError(
                f"{type(rows).__name__}: the model returned {self.N} outputs, and the inputs have no row for each, "
                "so that a part of them cannot be taken: take the rows of all samples, such as rows=mq.Sampled(1)"
            )
        none = len(index) == 0  # other pieces have all that were picked: a row that counts for nothing
        index = index.new_zeros(1) if none else index
        slopes = [s.take(index, self.N) for s in self.whole.slopes]
        batch, chance = self.batch.take(index), self.whole.chance
        part = Pass(self.objective, batch, self.known, chance, slopes=slopes)
        if not none or self.objective.parameters.ranks.several:
            check_picked(self.whole, part, index, self.known, int(seed), type(rows).__name__)
        with torch.no_grad():
            S = drawn(rows, self.objective.loss, part.z, batch, seed.picked(index)).S
        return Jacobian(part, S * (0.0 if none else rows.stands_for(part.N, self.N, seed)) ** 0.5)

    def _blame(self) -> str:
        """Where a loss that is not finite comes from; the loss itself has checked the targets and weights."""
        for t in tensors(self.batch.inputs):
            if t.is_floating_point() and not bool(t.isfinite().all()):
                return "the inputs hold NaN or infinite values, clean the data"
        for name, p in named_parameters(self.objective.model):
            if not bool(own_part(p).isfinite().all()):
                return f"the model's parameter {name!r} holds NaN or infinite values, load an earlier checkpoint"
        if not bool(self.z.isfinite().all()):
            return "inputs, targets and parameters are finite, so it is the model that overflows; look at its outputs"
        data = {"output": self.z, "target": self.batch.targets, "weight": self.batch.weight}
        largest = {name: max((float(t.abs().max()) for t in tensors(item)), default=0.0) for name, item in data.items()}
        found = ", ".join(f"the largest {name} is {size:.3g}" for name, size in largest.items() if size)
        way_out = "scale the data" + (", or use float64" if self.z.dtype == torch.float32 else "")
        name = self.objective.loss.display_name
        return f"outputs, targets and parameters are finite, but {name} of them is not; {found}: {way_out}"

    @property
    def u(self) -> Tensor | None:
        """J̃ᵀu + h is the gradient: (R, N); None if no part of it lies in the range of the rows"""
        return self.cotangents.u

    @property
    def gradient(self) -> Tensor:
        """∂value/∂θ: (n,), from the rows if they are there and span it, otherwise by a backward pass"""
        if self._gradient is None:
            if self._blocks is not None and self.u is not None and self.cotangents.v is None:
                self._gradient = self.adjoint(self.u.flatten())
            else:
                slope = self.cotangents.v if self.u is None else None  # then v is all of it
                self._gradient = self.whole.vjp(self.objective.slope(self.z, self.batch) if slope is None else slope)
        return self._gradient

    @property
    def h(self) -> Tensor | None:
        """Jᵀv, the part of the gradient outside the range of the rows: (n,), None means 0"""
        if self.cotangents.v is None:
            return None
        if self._outside is None:
            self._outside = self.gradient if self.u is None else self.whole.vjp(self.cotangents.v)
        return self._outside

    def others(self) -> int:
        """Parameters whose rows are written out: those without a rule, and weights that different layers share."""
        calls = self.whole.watch.calls
        groups = [[calls[i] for i in members] for members in grouped(calls)]
        alike = [group for group in groups if len({call.kind for call in group}) == 1]
        ruled = {id(p) for group in alike for call in group for p in call.params}
        return sum(p.numel() for p in self.objective.parameters.whole.tensors if id(p) not in ruled)

    @property
    def divisible(self) -> bool:
        """Whether a part of the samples can go through the model."""
        return self.batch.divisible(self.N)

    def exact_rows(self) -> int:
        """Rows that one sample has in all, whichever are formed."""
        y, loss = self.batch.targets, self.objective.loss
        shapes = self.z.shape[1:], (y.shape[1:], y.dtype) if isinstance(y, Tensor) else None
        last = self.known.exact_rows
        if last is not None and last[0] is loss and last[1] == shapes and shapes[1] is not None:
            return last[2]
        first = self.batch.head(self.N)
        count = loss.count(self.z[:1], first.targets, first.weight)
        self.known.exact_rows = loss, shapes, count
        return count

    @property
    def blocks(self) -> list[Block]:
        """The columns of J̃, by layer; once they are there, the graph of the forward pass is released."""
        if self._blocks is None:
            forward = self.jacobian.forward
            with torch.no_grad() if torch.is_grad_enabled() else AS_IS:
                self._blocks, self.inert = self._formed()
            if forward is not self.whole:  # of the samples that were not picked nothing is known
                self.inert = set()
            forward.release(graph=not self.keep_graph)
            self.objective.parameters.let_go()
            if forward.after.buffers or forward.chance.drawn:
                forward.after.restore()  # some ways to the rows call the model again
            if forward is not self.whole:
                self.whole.after.restore(gently=True)  # where the forward pass of the whole ended
        return self._blocks

    def _formed(self) -> tuple[list[Block], set[int] | None]:
        _ = self.h  # while there is a graph
        return blocks_of(self.jacobian)

    def random(self) -> Tensor:
        """One number for every row, the same every time: (R, N)"""
        return self.jacobian.random()

    def apply(self, v: Tensor) -> Tensor:
        """J̃v: (n,) → (m,)"""
        return apply(self.blocks, v, self.objective.parameters)

    def adjoint(self, w: Tensor) -> Tensor:
        """J̃ᵀw: (m,) → (n,)"""
        return adjoint(self.blocks, w, self.objective.parameters)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """J̃ itself, with the columns in the order of the parameters: (m, n)"""
        return dense(self.blocks, dtype, self.objective.parameters)
