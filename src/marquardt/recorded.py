"""A step as one CUDA graph: for small networks the GPU waits for the host, which launches hundreds of kernels."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from .deferred import Tape, answers, capturing, recorded
from .jacobian.chunk import Totals
from .jacobian.linearization import Linearization
from .metric import Diagonal
from .model.batch import Batch
from .model.parameters import assign
from .parts.acceptance import cosine_of

if TYPE_CHECKING:
    from .optimizer import LM
    from .state import State


class Result(NamedTuple):
    """What a replay found."""

    value: float  # Σwℓ before the step
    lower_bound: float
    rounding: float  # of the value
    new_loss: float
    gd: float
    dGd: float
    gDg: float
    length: float  # ‖d‖
    cosine: float | None = None


class Recorded:
    """One step, recorded: linearise, represent, solve, try. The judgement stays with the host.

    Everything that a step reads lies in tensors of its own: batch, λ, what is drawn, and what one step leaves to the
    next (D, what the curvature keeps, the step), which the graph itself takes over from `next` to `kept`. Questions on
    the way are assumed to be answered by yes and verified after the replay; where one was not, the caller takes the
    step back and does it again without the graph.
    """

    def __init__(self, opt: LM, batch: Batch, state: State, assumed: Totals) -> None:
        self.batch, self.kept, self.next = (_clone(item) for item in (vars(batch), _tensors(state), _tensors(state)))
        self.lam = torch.zeros_like(opt.params[0].flatten()[0])
        self.normaliser = assumed.normaliser
        tape = self._record(opt, state, Tape(assumed))
        if tape.drawn:  # again: the graph uses its own memory several times over, what is put there does not last
            tape = self._record(opt, state, Tape(assumed, [torch.empty_like(place) for place, _, _ in tape.drawn]))
        self.questions, self.drawn = len(tape.asked), tape.drawn

    def _record(self, opt: LM, state: State, tape: Tape) -> Tape:
        self.graph = torch.cuda.CUDAGraph()
        old = _with(state, self.kept)
        with warnings.catch_warnings(), torch.no_grad(), torch.autocast("cuda", enabled=False), recorded(tape):
            warnings.simplefilter("ignore")
            with torch.cuda.graph(self.graph):
                _copy(self.kept, self.next)
                lin = Linearization(
                    opt.model, opt.loss, opt.params, [Batch(**self.batch)], opt.rows, opt.curvature.chunk,
                    plan=opt._plan, seed=0, most=state.rows,
                )  # fmt: skip
                G = opt.curvature.represent(lin)
                G.recall(old.past, old.steps, False)
                D = opt.damping.update(old.D, G)
                A = D.positive()
                d = G.step(A.scaled(self.lam))
                back = [] if old.previous is None else [cosine_of(d, old.previous)]
                self.found = answers(
                    tape, lin.evaluate(d, opt.lr), *G.model(d), G.slope(A), torch.linalg.vector_norm(d), *back
                )
                remembers = opt.momentum is not None or opt.acceptance.looks_back
                previous = None if not remembers else d if opt.lr == 1 else opt.lr * d
                _copy(self.next, [D.state(), G.keep(), previous])
        self.averaged, self.theta = G.averaged, lin.theta
        lin.close()
        return tape

    def run(self, batch: Batch, state: State) -> None:
        """The model one step further, before the host knows whether that is right: see `result`."""
        _copy(self.batch, vars(batch))
        _copy(self.next, _tensors(state))
        self.lam.fill_(state.lam)
        for place, numbers, seed in self.drawn:
            place.copy_(numbers(seed + state.steps))
        self.graph.replay()

    def result(self) -> Result | None:
        """None where something was not as assumed: then `undo`."""
        found: list[float] = self.found.tolist()
        asked, (value, normaliser, *rest) = found[: self.questions], found[self.questions :]
        if not all(asked) or normaliser != self.normaliser or not math.isfinite(value):
            return None
        return Result(value, *rest)

    def keep(self, state: State) -> State:
        """The state with what the step leaves for the next one."""
        return _with(state, self.next)

    def undo(self, opt: LM) -> State:
        """The model as before the step, and its state."""
        assign(opt.params, self.theta)
        return _with(opt._state, self.kept)


def _tensors(state: State) -> list[Any]:
    return [None if state.D is None else state.D.state(), state.past, state.previous]


def _with(state: State, kept: list[Any]) -> State:
    D, past, previous = kept
    return replace(state, D=None if D is None else Diagonal.restored(D), past=past, previous=previous)


def _clone(item: Any) -> Any:
    return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, item)


def _copy(to: Any, source: Any) -> None:
    leaves = zip(tree_leaves(to), tree_leaves(source), strict=True)
    pairs = [(a, b) for a, b in leaves if isinstance(a, Tensor) and a is not b]
    if pairs:
        torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])


def signature(opt: LM, batch: Batch, state: State) -> Any:
    """What a recording depends on."""
    leaves, spec = tree_flatten([vars(batch), _tensors(state)])
    shapes = tuple((t.shape, t.dtype, t.device) if isinstance(t, Tensor) else t for t in leaves)
    places = tuple(p.data_ptr() for p in opt.params)
    modes = tuple(m.training for m in opt.model.modules())
    return shapes, spec, places, modes, opt.lr, opt._plan.proven


def record(opt: LM, batch: Batch, state: State, assumed: Totals) -> Recorded | None:
    """A recording, or None where the model or a part of the optimizer cannot be recorded."""
    try:
        with capturing(opt.params[0].device):
            return Recorded(opt, batch, state, assumed)
    except Exception as error:  # CUDA refuses in many ways
        warnings.warn(f"this step cannot be recorded as a CUDA graph, it goes on without: {error}", stacklevel=2)
        return None
