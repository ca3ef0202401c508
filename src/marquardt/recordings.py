"""Steps as CUDA graphs: for small networks the GPU waits for the host, which has to launch hundreds of kernels.

A step is recorded when it occurs for the second time in a row with the same signature, and replayed from then on as
long as the signature is the same. See step.py: the result of a replay is judged and concluded as in any other step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from . import tolerances
from .arguments import users
from .curvature.auto import free
from .curvature.contract import Damped
from .deferred import Tape, answers, capturing, recorded
from .jacobian.linearization import Linearization
from .jacobian.objective import Objective, Totals
from .jacobian.passes import Facts
from .metric import restored
from .model.anatomy import held, hooks, submodules
from .model.batch import Batch, modes, without_autocast
from .policies.convergence import FAINT
from .step import (
    Parts,
    State,
    Step,
    begin,
    changed,
    conclude,
    damped,
    dtheta,
    ended,
    measured,
    next_lam,
    propose,
    reweighted,
    rows_of,
    tried,
)
from .surroundings import out_of_memory

# A model may use numbers that no signature contains. Therefore, before this replay of a recording, and before the
# replay of twice the number, and so on, the model is called outside of the graph, and both losses must be the same.
LOOK = 8

# How many kinds of steps are remembered.
KINDS = 64


class Recorder(Protocol):
    """Records some work on tensors that keep their places in memory."""

    def record(self, work: Callable[[], Tensor]) -> Tensor:
        """Does or records the work; the tensor that it returns is filled again by every replay."""
        ...

    def replay(self) -> None: ...


class CudaGraph:
    """A recorder that uses a CUDA graph."""

    def __init__(self, device: torch.device) -> None:
        self.graph, self.device = torch.cuda.CUDAGraph(), device

    def record(self, work: Callable[[], Tensor]) -> Tensor:
        # Other threads of the program may do anything, for example pin memory for a DataLoader.
        with capturing(self.device), torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            return work()

    def replay(self) -> None:
        self.graph.replay()


# The recorder for each kind of device; on other devices no step is recorded.
RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaGraph}


class Unlike(Exception):
    """A step does not end as it began, for example the first one after a change of the data."""


class RecordedStep:
    """One step, recorded: linearise, represent, solve, try. It is judged by the host.

    All inputs of a step are in tensors that the recording owns: the batch, λ, random draws, weight decay by element,
    and what one step leaves to the next (D, what the curvature keeps, the step). A replay begins by copying `after` to
    `before` and ends by writing the new values to `after`. Conditions that are asked on the way are assumed to be true
    and verified after the replay; if one was false, the caller undoes the step and repeats it without the recording.
    """

    def __init__(
        self, parts: Parts, objective: Objective, batch: Batch, state: State, known: Facts, assumed: Totals, lr: float
    ) -> None:
        self.parts, self.objective, self.known, self.lr = parts, objective, known, lr
        self.same_data, self.replays, self.early = state.same_data.soon, 0, state.D is not None and state.D.early
        self.batch, self.before, self.after = (_clone(item) for item in (vars(batch), carry(state), carry(state)))
        self.lam = torch.zeros((), dtype=objective.parameters.dtype, device=objective.parameters.device)
        self.normaliser = assumed.normaliser
        tape = self._record(state, Tape((*assumed[:3], 0.0), known.drawn))
        self.questions, self.drawn = len(tape.asked), tape.drawn

    @property
    def looks(self) -> bool:
        """Whether the next replay is compared with a call of the model outside of the graph."""
        number = self.replays + 1
        return number >= LOOK and number & (number - 1) == 0

    def _record(self, state: State, tape: Tape) -> Tape:
        device = self.objective.parameters.device
        self.recorder = RECORDERS[device.type](device)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            self.answers = self.recorder.record(lambda: self._work(state, tape))
        return tape

    def _work(self, state: State, tape: Tape) -> Tensor:
        parts, lr, same, space = self.parts, self.lr, self.same_data, self.objective.parameters
        tape.rewind()
        with recorded(tape), without_autocast(space.device.type):
            _copy(self.before, self.after)
            old = changed(state, mean=self.before[3], **_entries(self.before))
            rows = rows_of(parts, state.plan)
            lin = Linearization(
                self.objective, [Batch(**self.batch)], rows, parts.curvature.needs, known=self.known,
                most=state.most_rows,
            )  # fmt: skip
            steady = None if state.plan is None else state.plan.steady
            representation, _ = parts.curvature.choose(lin, state.plan, parts.rows, steady)
            lin = lin.made_for(representation.needs)
            matrices = damped(parts, representation.represent(lin), old, same)
            H = Damped(matrices.G, self.lam * matrices.A)
            d, plain, uncut = propose(parts, H, old, lr, same)
            self.readings, self.d = tried(lin, matrices, H, d, plain, uncut, lr, old, same), d
            W = lin.decay  # at θ and at θ + lr·d
            decays = [] if W is None else [W.value(space.shaped(lin.theta)), W.value(space.tensors)]
            self.theta, self.averaged, self.rounding = lin.theta, matrices.G.averaged, lin.whole().whole.rounding
            _copy(self.after, [matrices.D.state(), matrices.G.keep(), dtheta(parts, d, lr), self.before[3]])
            lin.close()
            return answers(tape, *self.readings.values(), *decays)

    def run(self, batch: Batch, state: State, objective: Objective) -> None:
        """Takes a step before the host knows whether it is right: see `concluded`."""
        self.replays += 1
        _copy(self.batch, vars(batch))
        _copy(_elements(self.objective), _elements(objective))
        _copy(self.after, carry(state))
        self.lam.fill_(state.lam)
        for place, numbers, seed in self.drawn:
            place.copy_(numbers(seed + state.steps))
        self.recorder.replay()

    def concluded(self, old: State) -> tuple[Step, State] | None:
        """The report of a replay and the next state; None unless it was accepted and ran as recorded, see `undo`."""
        parts, lr, numbers = self.parts, self.lr, iter(self.answers.tolist())
        fine = all([next(numbers) for _ in range(self.questions)])
        value, normaliser, low, sensitivity = (next(numbers) for _ in range(4))
        self.totals = Totals(value, normaliser, low, self.rounding * (abs(value) + sensitivity))
        trial = measured(self.readings, [next(numbers) for _ in self.readings])
        decay, new_decay = next(numbers, 0.0), next(numbers, 0.0)
        if not fine or normaliser != self.normaliser:
            return None
        level = self.objective.level(self.totals, decay)
        if not math.isfinite(level.f):
            return None
        old = reweighted(old, level)
        start = begin(old, level, self.theta)
        end = ended(parts, old, start, trial, self.d, old.lam, lr, old.convergence.unjudged)
        usual = start.same_data == self.same_data and start.excess == 1
        if end.d is None or not usual:
            return None
        with torch.no_grad():
            memory = {**_entries(self.after), "decay": new_decay}
            memory["D"] = None if memory["D"] is None else memory["D"].settled(start.steps + 1)
            lam = next_lam(parts, start, old.lam, end, self.averaged)
            return conclude(parts, self.objective, old, start, end, lam, old.lam, memory)

    def undo(self, state: State) -> State:
        """Restores the model before the step, and returns its state."""
        self.objective.parameters.assign(self.theta)
        return changed(state, **_entries(self.before))


def carry(state: State) -> list[Any]:
    """The tensors that one step leaves to the next."""
    mean = None if state.same_data.soon else state.mean  # if its loss is needed
    return [None if state.D is None else state.D.state(), state.past, state.previous, mean]


def _entries(carry: list[Any]) -> dict[str, Any]:
    """These tensors as fields of the state"""
    D, past, previous, _ = carry
    return {"D": None if D is None else restored(D), "past": past, "previous": previous}


def _elements(objective: Objective) -> dict[int, Tensor]:
    return {} if objective.penalty is None else objective.penalty.weights.elements


def _clone(item: Any) -> Any:
    return tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, item)


def _copy(to: Any, source: Any) -> None:
    targets, sources = tree_leaves(to), tree_leaves(source)
    if [isinstance(t, Tensor) for t in targets] != [isinstance(t, Tensor) for t in sources]:
        raise Unlike("the step leaves other tensors for the next one than it was given")
    pairs = [(a, b) for a, b in zip(targets, sources, strict=True) if isinstance(a, Tensor) and a is not b]
    if pairs:
        with torch.no_grad():  # inputs may require a gradient
            torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])


# Which steps are recorded.


@dataclass
class Kind:
    """Steps with the same signature."""

    key: Any
    needed: int = 2  # how many in a row are recorded; doubled by each recording, in case kinds alternate
    refused: str = ""  # the reason why it is not to be recorded


class Recordings:
    """The recording in use, if there is one. A step of another kind, such as the last batch of an epoch, is taken
    without it; if another kind occurs often enough in a row, its recording replaces this one."""

    def __init__(self) -> None:
        self.made: tuple[Any, RecordedStep] | None = None  # the key of its kind, and the recording
        self.note = ""  # the outcome, as text
        self._kinds: list[Kind] = []  # in the order of their last steps
        self._row = 0  # how many steps of the last kind came in a row

    def of(
        self, parts: Parts, objective: Objective, batch: Batch, state: State, known: Facts, lr: float, forced: bool
    ) -> RecordedStep | None:
        """The recording for such a step; None if there is none."""
        totals, D = known.totals, state.D
        if totals is None or D is None or not recordable(parts, objective, batch, state, known):
            return None
        if not forced and (any(hooks(objective.model)) or torch.are_deterministic_algorithms_enabled()):
            return None  # because a replay does not call hooks
        now = signature(parts, objective, batch, changed(state, D=D.later) if D.early else state, known, lr)
        # Comparing the contents of the modules takes long: this is left until the replay has begun, see `confirmed`.
        if self.made is not None and self.made[0][0] == now and self.made[1].early == D.early:
            self._row = 0
            return self.made[1]
        kind = self._come((now, attributes(objective.model)))
        # The first steps differ from the later ones in when D is formed, and in nothing else: these follow at once.
        follows = self.made is not None and self.made[0] == kind.key and self.made[1].early
        if (self._row < kind.needed and not follows) or kind.refused:
            return None
        if not forced and not room(state, objective.parameters.device):
            self._refuse(kind, "there is no memory for it")
            return None
        self.made = None  # first, as its memory may be needed
        try:
            made = RecordedStep(parts, objective, batch, state, known, totals, lr)
        except Unlike as error:
            self._refuse(kind, str(error))
            return None
        except Exception as error:  # there are many reasons why CUDA may refuse
            self._refuse(kind, f"it ran out of memory: {error}" if out_of_memory(error) else str(error))
            if forced:
                words = "this step cannot be recorded as a CUDA graph, it goes on without"
                warnings.warn(f"{words}: {error}", stacklevel=2)
            return None
        self.made, self.note, kind.needed = (kind.key, made), "steps are recorded", 2 * kind.needed
        return made

    def confirmed(self, objective: Objective) -> bool:
        """Whether the modules are still the same as when the replay that is running was recorded."""
        if self.made is not None and self.made[0][1] == attributes(objective.model):
            return True
        self.made = None
        return False

    def agrees(self, recording: RecordedStep, value: float) -> bool:
        """Whether a replay has found the same loss as the model outside of it, Σwℓ. They may differ if the model uses
        numbers from elsewhere, such as a global variable."""
        relative = tolerances.of_trials(recording.objective.parameters.dtype)
        allowed = relative * abs(value) + FAINT * recording.totals.rounding
        if abs(recording.totals.value - value) <= allowed:
            return True
        if self.made is not None:
            self._refuse(self._come(self.made[0]), "the model does not do the same in every step")
            self.made = None
        words = "those since the last look were wrong, and capture=False records none"
        warnings.warn(f"{self.note}; {words}", stacklevel=users())
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return False

    def _come(self, key: Any) -> Kind:
        """Counts one more step of this kind"""
        place = next((i for i, kind in enumerate(self._kinds) if kind.key == key), -1)
        self._row = self._row + 1 if 0 <= place == len(self._kinds) - 1 else 1
        kind = Kind(key) if place < 0 else self._kinds.pop(place)
        self._kinds = [*self._kinds[1 - KINDS :], kind]
        return kind

    def _refuse(self, kind: Kind, why: str) -> None:
        kind.refused, self.note = why, f"steps are not recorded: {why}"


def recordable(parts: Parts, objective: Objective, batch: Batch, state: State, known: Facts) -> bool:
    """Whether a step can be recorded at all."""
    # The contents of an object cannot be copied, and the θ of coarse parameters is not carried over.
    if batch.opaque or objective.parameters.coarse or not objective.loss.recordable:
        return False
    if not known.only_slopes or not rows_of(parts, state.plan).recordable or state.D is None:
        return False
    plan = state.plan
    if plan is not None and plan.options and plan.steady != state.same_data.steady(state.steps):
        return False  # Auto is about to make a new plan, which a replay would not notice
    unlike = parts.remembers and state.previous is None  # the next step will have a previous step
    steady = known.steady or next(objective.model.buffers(), None) is None
    return steady and not unlike and (parts.momentum is None or parts.momentum.recordable)


def room(state: State, device: torch.device) -> bool:
    """Whether there is memory for another step: a recording keeps its memory, and not all steps are replayed."""
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    size, limit, budget = idle, None, free(device)
    if state.plan is not None:
        size, limit = state.plan.bytes, state.plan.budget
    return all(2 * size <= most for most in (limit, budget) if most is not None)


def signature(parts: Parts, objective: Objective, batch: Batch, state: State, known: Facts, lr: float) -> Any:
    """Everything a recording depends on, except for the `attributes` of the model."""
    leaves, spec = tree_flatten([vars(batch), carry(state)])
    shapes = tuple((t.shape, t.dtype, t.device) if isinstance(t, Tensor) else t for t in leaves)
    places = tuple(t.data_ptr() for t in held(objective.model))
    mode = modes(objective.model), hooks(objective.model), torch.get_float32_matmul_precision(), objective.autocast
    plan = None if state.plan is None else state.plan.choice
    decay = objective.penalty
    penalty = None if decay is None else (decay.weights.shape, fingerprint(decay.towards))
    return (
        parts, objective.loss, penalty, state.same_data.soon, shapes, spec, places, mode, lr, known.proven, plan,
    )  # fmt: skip


OWN = frozenset(vars(nn.Module()))  # the attributes of every module
PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


def attributes(model: nn.Module) -> list[Any]:
    """The other attributes of the modules: for a recording, a model whose temperature was changed is another model."""
    return [
        (name, fingerprint(value))
        for module in submodules(model)
        if len(vars(module)) > len(OWN)
        for name, value in vars(module).items()
        if name not in OWN
    ]


def fingerprint(value: Any, deep: bool = True) -> Any:
    """A plain value itself; the place and the version of a tensor; the attributes of an object."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        return id(value), value._version, value.data_ptr() if value.layout == torch.strided else 0
    if isinstance(value, (tuple, list)):
        return [v if isinstance(v, PLAIN) else fingerprint(v) for v in value]
    if isinstance(value, dict):
        return [(key, fingerprint(v)) for key, v in value.items()]
    own = getattr(value, "__dict__", None) if deep and not isinstance(value, (type, nn.Module)) else None
    return (
        id(value) if not isinstance(own, dict) else [id(value), *((k, fingerprint(v, False)) for k, v in own.items())]
    )
