"""A backward pass must be linear in what is sent back: a hook that clips gradients falsifies the rows of J̃, which are
of other sizes than the gradient of the loss, and a function that calls .backward() hides its parameters."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.nn.modules import module as every_module
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils.checkpoint import CheckpointFunction

from .. import tolerances
from ..deferred import recording
from ..layers.graph import LEAF_NODE, Node
from ..memory import out_of_memory
from ..model.parameters import named_parameters
from .passes import REENTRANT, UNRELATED, Pass

# What is sent back is changed by these factors: rounding is the same for each power of two, so that gradients are too.
# float16 has fewer.
SCALES = {torch.float16: (-1.0, 2.0**5, 2.0**-5)}
FAR = (-1.0, 2.0**40, 2.0**-20)

# A part of a gradient that may differ all the same: rounding by a hook, to bfloat16 for example, does no harm.
LEAST = 1e-2

# Rounding of a gradient that is nothing else, in multiples of what it is seen to be, and of eps times all gradients.
NOISE = 50.0

NOT_LINEAR = "is not linear"
WAY_OUT = "mq.LM(…, radius=…) bounds the length of a step, which is what clipping is for"
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
    if recording():
        return
    known, ranks = forward.known, forward.objective.parameters.ranks
    way = forward.walk.structure, forward.hooks, forward.form.modes
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
    key = forward.form.modes, forward.hooks, tuple(node.name() for node in functions)
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
    w, v = (torch.randn(forward.z.shape, generator=generator, dtype=torch.float64).to(forward.z) for _ in "wv")
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
            forward.again(forward.watch.once)
            if _judged(forward).reason is not None:
                return _node(forward, reason)
        for words, own in carriers:
            with _silent([place for place in places if not any(place is one for one in own)]):
                forward.again(forward.watch.once)
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
