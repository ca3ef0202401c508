"""A step as one CUDA graph: for small networks the GPU waits for the host, which launches hundreds of kernels."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from .deferred import Tape, answers, capturing, recorded
from .iteration import Found, Parts, damped, propose, remembered, rows_of
from .jacobian.known import Known
from .jacobian.linearization import Linearization
from .jacobian.objective import Level, Objective, Totals
from .jacobian.proof import EVERY
from .metric import restored
from .model.batch import Batch, modes
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
        with capturing(self.device), torch.cuda.graph(self.graph):
            return work()

    def replay(self) -> None:
        self.graph.replay()


# How a step is recorded on each kind of device; on others it is not.
RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaGraph}


class RecordedStep:
    """One step, recorded: linearise, represent, solve, try. The judgement stays with the host.

    All inputs of a step lie in tensors that the recording owns: the batch, λ, what is drawn, and what one step leaves
    to the next (D, what the curvature keeps, the step). At the start of a replay `next` is copied to `kept`, at its end
    the new ones are written to `next`. Questions on the way are assumed to be answered by yes and verified after the
    replay; if one was not, the caller takes the step back and does it again without the recording.
    """

    def __init__(
        self, parts: Parts, objective: Objective, batch: Batch, state: State, known: Known, assumed: Totals, lr: float
    ) -> None:
        self.parts, self.objective, self.known, self.lr = parts, objective, known, lr
        self.batch, self.kept, self.next = (_clone(item) for item in (vars(batch), _tensors(state), _tensors(state)))
        self.lam = torch.zeros((), dtype=objective.parameters.dtype, device=objective.parameters.device)
        self.normaliser = assumed.normaliser
        tape = self._record(state, Tape(assumed))
        if tape.drawn:  # again: the graph uses its own memory several times over, what is put there does not last
            tape = self._record(state, Tape(assumed, [torch.empty_like(place) for place, _, _ in tape.drawn]))
        self.questions, self.drawn = len(tape.asked), tape.drawn

    def _record(self, state: State, tape: Tape) -> Tape:
        device = self.objective.parameters.device
        self.recorder = RECORDERS[device.type](device)
        with warnings.catch_warnings(), torch.no_grad(), torch.autocast(device.type, enabled=False):
            warnings.simplefilter("ignore")
            self.answers = self.recorder.record(lambda: self._work(state, tape))
        return tape

    def _work(self, state: State, tape: Tape) -> Tensor:
        parts = self.parts
        tape.rewind()
        with recorded(tape):
            _copy(self.kept, self.next)
            old = _with(state, self.kept)
            rows = rows_of(parts, state.plan)
            lin = Linearization(
                self.objective, [Batch(**self.batch)], rows, parts.curvature.needs, known=self.known,
                most=state.most_rows,
            )  # fmt: skip
            steady = None if state.plan is None else state.plan.steady
            representation, _ = parts.curvature.choose(lin, state.plan, parts.rows, steady)
            lin = lin.made_for(representation.needs)
            matrices = damped(parts, representation.represent(lin), old, False)
            proposal = propose(parts, lin, matrices, self.lam, self.lr, old, False)
            self.readings, self.d = proposal.readings, proposal.d
            self.theta, self.averaged = lin.theta, matrices.G.averaged
            _copy(self.next, [matrices.D.state(), matrices.G.keep(), remembered(parts, proposal.d, self.lr)])
            lin.close()
            return answers(tape, *proposal.readings.tensors())

    def run(self, batch: Batch, state: State) -> None:
        """The model one step further, before the host knows whether that is right: see `result`."""
        _copy(self.batch, vars(batch))
        _copy(self.next, _tensors(state))
        self.lam.fill_(state.lam)
        for place, numbers, seed in self.drawn:
            place.copy_(numbers(seed + state.steps))
        self.recorder.replay()

    def result(self) -> tuple[Level, Found] | None:
        """None if something was not as assumed: then `undo`."""
        found: list[float] = self.answers.tolist()
        asked, totals, rest = found[: self.questions], found[self.questions :][:4], found[self.questions + 4 :]
        level = self.objective.level(Totals(*totals)) if totals[1] == self.normaliser else None
        if not all(asked) or level is None or not math.isfinite(level.f):
            return None
        return level, self.readings.read(rest)

    def keep(self, state: State) -> State:
        """The state with what the step leaves for the next one."""
        return _with(state, self.next)

    def undo(self, state: State) -> State:
        """The model as before the step, and its state."""
        self.objective.parameters.assign(self.theta)
        return _with(state, self.kept)


class Recordings:
    """Which step is recorded, if any: the second of two in a row that look alike to a recording."""

    def __init__(self) -> None:
        self.made: tuple[Any, RecordedStep | None] | None = None  # for these shapes; None if that failed
        self._last: Any = None  # shapes of the last step

    def of(
        self, parts: Parts, objective: Objective, batch: Batch, state: State, known: Known, lr: float
    ) -> RecordedStep | None:
        """The recording of such a step; None if there is none."""
        totals = known.totals
        if totals is None or not recordable(parts, objective, batch, state, known):
            return None
        key = signature(parts, objective, batch, state, known, lr)
        if self.made is None or self.made[0] != key:
            if self._last == key:
                self.made = (key, self._tried(lambda: RecordedStep(parts, objective, batch, state, known, totals, lr)))
            self._last = key
            return None
        return self.made[1]

    @staticmethod
    def _tried(make: Callable[[], RecordedStep]) -> RecordedStep | None:
        """None if the model or a part of the optimizer cannot be recorded."""
        try:
            return make()
        except Exception as error:  # CUDA refuses in many ways
            warnings.warn(f"this step cannot be recorded as a CUDA graph, it goes on without: {error}", stacklevel=2)
            return None


def recordable(parts: Parts, objective: Objective, batch: Batch, state: State, known: Known) -> bool:
    """Whether a step can be recorded at all. Every eighth is done without, for a look at what was proven."""
    if objective.parameters.device.type not in RECORDERS or batch.opaque:  # what an object holds cannot be copied
        return False
    steady = parts.momentum is None or parts.momentum.recordable
    if not known.only_slopes or not rows_of(parts, state.plan).recordable or not steady or state.D is None:
        return False
    plain = next(objective.model.buffers(), None) is None
    return plain and not state.repeats and state.steps % EVERY != EVERY - 1


def signature(parts: Parts, objective: Objective, batch: Batch, state: State, known: Known, lr: float) -> Any:
    """What a recording depends on."""
    leaves, spec = tree_flatten([vars(batch), _tensors(state)])
    shapes = tuple((t.shape, t.dtype, t.device) if isinstance(t, Tensor) else t for t in leaves)
    places = tuple(p.data_ptr() for p in objective.parameters.tensors)
    return parts, objective.loss, shapes, spec, places, modes(objective.model), lr, known.proven, state.plan


def _tensors(state: State) -> list[Any]:
    return [None if state.D is None else state.D.state(), state.past, state.previous]


def _with(state: State, kept: list[Any]) -> State:
    D, past, previous = kept
    return replace(state, D=None if D is None else restored(D), past=past, previous=previous)


def _clone(item: Any) -> Any:
    return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, item)


def _copy(to: Any, source: Any) -> None:
    leaves = zip(tree_leaves(to), tree_leaves(source), strict=True)
    pairs = [(a, b) for a, b in leaves if isinstance(a, Tensor) and a is not b]
    if pairs:
        torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])
