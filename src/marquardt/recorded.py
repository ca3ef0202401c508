"""A step as one CUDA graph: for small networks the GPU waits for the host, which launches hundreds of kernels."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .deferred import Tape, answers, capturing, recorded
from .iteration import (
    CONVERGED,
    Ending,
    Found,
    Parts,
    begin,
    concluded,
    damped,
    judge,
    next_lam,
    propose,
    remembered,
    reweighted,
    rows_of,
    with_mean,
)  # fmt: skip
from .jacobian.known import Known
from .jacobian.linearization import Linearization
from .jacobian.objective import Level, Objective, Totals
from .metric import restored
from .model.batch import Batch
from .model.precision import without_autocast
from .report import Step, report
from .state import State


class Recorder(Protocol):
    """Makes a recording of some work on tensors that stay where they are."""

    def record(self, work: Callable[[], Tensor]) -> Tensor:
        """Does or records the work; the tensor that it returns is what every replay fills again."""
        ...

    def replay(self) -> None: ...


class CudaGraph:
    """By a CUDA graph."""

    def __init__(self, device: torch.device) -> None:
        self.graph, self.device = torch.cuda.CUDAGraph(), device

    def record(self, work: Callable[[], Tensor]) -> Tensor:
        # Other threads of the program, such as one that pins memory for a DataLoader, go on as they like.
        with capturing(self.device), torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            return work()

    def replay(self) -> None:
        self.graph.replay()


class Unlike(Exception):
    """A step that does not go on as it began, such as the first one after a change of the data."""


# How a step is recorded on each kind of device; on others it is not.
RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaGraph}


class RecordedStep:
    """One step, recorded: linearise, represent, solve, try. The judgement stays with the host.

    All inputs of a step lie in tensors that the recording owns: the batch, λ, what is drawn, weight decay by element,
    and what one step leaves to the next (D, what the curvature keeps, the step). At the start of a replay `next` is
    copied to `kept`, at its end the new ones are written to `next`. Questions on the way are assumed to be answered by
    yes and verified after the replay; if one was not, the caller takes the step back and does it again without the
    recording.
    """

    def __init__(
        self, parts: Parts, objective: Objective, batch: Batch, state: State, known: Known, assumed: Totals, lr: float
    ) -> None:
        self.parts, self.objective, self.known, self.lr = parts, objective, known, lr
        self.same_data = on_same_data(state)
        self.batch, self.kept, self.next = (_clone(item) for item in (vars(batch), carried(state), carried(state)))
        self.lam = torch.zeros((), dtype=objective.parameters.dtype, device=objective.parameters.device)
        self.normaliser = assumed.normaliser
        tape = self._record(state, Tape(assumed))
        if tape.drawn:  # again: the graph uses its own memory several times over, what is put there does not last
            tape = self._record(state, Tape(assumed, [torch.empty_like(place) for place, _, _ in tape.drawn]))
        self.questions, self.drawn = len(tape.asked), tape.drawn

    def _record(self, state: State, tape: Tape) -> Tape:
        device = self.objective.parameters.device
        self.recorder = RECORDERS[device.type](device)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            self.answers = self.recorder.record(lambda: self._work(state, tape))
        return tape

    def _work(self, state: State, tape: Tape) -> Tensor:
        parts = self.parts
        tape.rewind()
        with recorded(tape), without_autocast(self.objective.parameters.device.type):
            _copy(self.kept, self.next)
            old = replace(_with(state, self.kept), mean=self.kept[3])
            rows = rows_of(parts, state.plan)
            lin = Linearization(
                self.objective, [Batch(**self.batch)], rows, parts.curvature.needs, known=self.known,
                most=state.most_rows,
            )  # fmt: skip
            steady = None if state.plan is None else state.plan.steady
            representation, _ = parts.curvature.choose(lin, state.plan, parts.rows, steady)
            lin = lin.made_for(representation.needs)
            matrices = damped(parts, representation.represent(lin), old, self.same_data)
            proposal = propose(parts, lin, matrices, self.lam, self.lr, old, self.same_data)
            self.readings, self.d = proposal.readings, proposal.d
            self.theta, self.averaged = lin.theta, matrices.G.averaged
            previous = remembered(parts, proposal.d, self.lr)
            _copy(self.next, [matrices.D.state(), matrices.G.keep(), previous, self.kept[3]])
            lin.close()
            return answers(tape, *proposal.readings.tensors())

    def run(self, batch: Batch, state: State, objective: Objective) -> None:
        """The model one step further, before the host knows whether that is right: see `concluded`."""
        _copy(self.batch, vars(batch))
        _copy(_elements(self.objective), _elements(objective))
        _copy(self.next, carried(state))
        self.lam.fill_(state.lam)
        for place, numbers, seed in self.drawn:
            place.copy_(numbers(seed + state.steps))
        self.recorder.replay()

    def _result(self) -> tuple[Level, Found] | None:
        """None if something was not as assumed."""
        found: list[float] = self.answers.tolist()
        asked, totals, rest = found[: self.questions], found[self.questions :][:4], found[self.questions + 4 :]
        self.totals = Totals(*totals)
        read = self.readings.read(rest)
        if not all(asked) or self.totals.normaliser != self.normaliser:
            return None
        level = self.objective.level(self.totals, read.decay or 0.0)
        return (level, read) if math.isfinite(level.f) else None

    def concluded(self, old: State) -> tuple[Step, State] | None:
        """What a replay came to, and the next state; None unless it was accepted and went as recorded: then `undo`."""
        result, parts, lr, dtype = self._result(), self.parts, self.lr, self.theta.dtype
        if result is None:
            return None
        level, found = result
        old = reweighted(old, level, self.objective)
        start = begin(old, level, dtype)
        judgement = judge(parts, start, found, old.lam, lr, torch.finfo(dtype).eps)
        usual = start.same_data == self.same_data and start.doubt == 1 and not old.overdue(found.new_loss, True)
        if judgement.rule is None or not usual:
            return None
        unjudged = 0 if judgement.judged else old.unjudged + 1
        end = Ending(judgement.rule, lr, self.d, found.new_loss, found, judgement, found.length)
        lam = next_lam(parts, start, old.lam, end, self.averaged, unjudged)
        state, converged = concluded(parts, start, end, lam, old.lam, self.theta, unjudged)
        if state.haven is self.theta:  # which the next replay writes over
            state = replace(state, haven=self.theta.clone())
        with torch.no_grad():
            state = with_mean(parts, _with(state, self.next), self.objective.parameters, self.same_data)
            state = replace(state, D=None if state.D is None else state.D.settled(state.steps))
        state = replace(state, decay=found.new_decay or 0.0)
        notes = [CONVERGED] if converged else []
        return report(self.objective.loss, start, end, old.lam, notes, converged, found.new_decay or 0.0), state

    def undo(self, state: State) -> State:
        """The model as before the step, and its state."""
        self.objective.parameters.assign(self.theta)
        return _with(state, self.kept)


def on_same_data(state: State) -> bool:
    """Whether the next step will be, if the data stay what they are: see iteration.Start."""
    return state.repeats > 0


def carried(state: State) -> list[Any]:
    """The tensors that one step leaves to the next."""
    mean = None if on_same_data(state) else state.mean  # of which the loss is asked
    return [None if state.D is None else state.D.state(), state.past, state.previous, mean]


def _elements(objective: Objective) -> dict[int, Tensor]:
    return {} if objective.penalty is None else objective.penalty.weights.elements


def _with(state: State, kept: list[Any]) -> State:
    D, past, previous, _ = kept
    return replace(state, D=None if D is None else restored(D), past=past, previous=previous)


def _clone(item: Any) -> Any:
    return tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, item)


def _copy(to: Any, source: Any) -> None:
    there, here = tree_leaves(to), tree_leaves(source)
    if [isinstance(t, Tensor) for t in there] != [isinstance(t, Tensor) for t in here]:
        raise Unlike("the step leaves other tensors for the next one than it was given")
    pairs = [(a, b) for a, b in zip(there, here, strict=True) if isinstance(a, Tensor) and a is not b]
    if pairs:
        with torch.no_grad():  # a model may ask for the gradient of its inputs
            torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])
