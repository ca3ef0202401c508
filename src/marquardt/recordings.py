"""Which steps are recorded, and whether that pays: the time of steps with a recording against that without."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from . import tolerances
from .curvature.auto import free
from .iteration import FAINT, Parts, rows_of
from .jacobian.known import Known
from .jacobian.objective import Objective, Totals
from .jacobian.proof import EVERY
from .memory import out_of_memory
from .model.batch import Batch, modes
from .model.walk import held, hooks, submodules
from .recorded import RecordedStep, Unlike, carried, on_same_data
from .state import State

# Plain steps of one kind before they are recorded by themselves. A recording costs about as much as ten of them (two
# passes of the host, and a garbage collection): a run that ends before loses nothing, any other at most as much again.
BEFORE = 8

# Seconds of a plain step above which none is recorded by itself. The host launches a thousand kernels in 10 to 25 ms,
# and no more than that can be gained; the memory of a step that takes longer is better left free.
SLOW = 0.05

# Replays that are looked at, and how many of them there must be. A recording is dropped for good if the steps that it
# has saved would have taken less than so many times as long as all replays, undone ones included.
WINDOW, TRIED, MARGIN = 16, 8, 1.05

# Kinds of steps that are remembered.
KINDS = 64


@dataclass
class Tally:
    """Steps of one kind: how long they took, without and with a recording."""

    plain: int = 0  # how many there were without
    fastest: float = math.inf  # seconds of the fastest of them
    replays: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=WINDOW))  # seconds, and if it stood
    recordings: int = 0  # how many of them were made: others may have taken their place
    refused: str = ""  # why there shall be no recording

    @property
    def pays(self) -> bool:
        """Replays take the median of their times each: one that had to wait for something else says nothing."""
        if len(self.replays) < TRIED:
            return True
        spent = statistics.median(seconds for seconds, _ in self.replays) * len(self.replays)
        return MARGIN * spent <= self.fastest * sum(stood for _, stood in self.replays)


class Recordings:
    """The recording in use, if there is one: of the kind of steps that came twice in a row, and took long enough."""

    def __init__(self) -> None:
        self.made: tuple[Any, RecordedStep] | None = None  # of this kind
        self.note = ""  # what came of it, in words
        self.clock: Callable[[], float] = time.perf_counter
        self.looks = False  # every eighth replay is undone, and compared with the plain step in its place
        self._expected: Totals | None = None  # what the last one found
        self._tallies: list[tuple[Any, Tally]] = []  # by kind, the last one at the end
        self._tally: Tally | None = None  # of the step under way

    def of(
        self, parts: Parts, objective: Objective, batch: Batch, state: State, known: Known, lr: float, forced: bool
    ) -> RecordedStep | None:
        """The recording of such a step; None if there is none. Unless it is forced it must pay."""
        self._tally, totals = None, known.totals
        self._compare(totals, objective.parameters.dtype)
        if totals is None or not recordable(parts, objective, batch, state, known):
            return None
        if not forced and (watched(objective.model) or torch.are_deterministic_algorithms_enabled()):
            return None
        now = signature(parts, objective, batch, state, known, lr)
        # What the modules hold takes long to look at: that waits until the replay has begun, see `confirmed`.
        kind = self.made[0] if self.made is not None and self.made[0][0] == now else (now, attributes(objective.model))
        again = bool(self._tallies) and self._tallies[-1][0] == kind
        tally = self._tally = self._of_kind(kind)
        if self.made is None or self.made[0] != kind:
            if again and not tally.refused and (forced or self._promising(tally, state, objective)):
                self.made = None  # first: its memory may be needed
                made = self._tried(lambda: RecordedStep(parts, objective, batch, state, known, totals, lr), forced)
                self.made = None if made is None else (kind, made)
            return None
        self.looks = state.steps % EVERY == EVERY - 1
        return self.made[1]

    def confirmed(self, objective: Objective) -> bool:
        """Whether the modules are as they were when the replay that is under way was recorded."""
        if self.made is not None and self.made[0][1] == attributes(objective.model):
            return True
        self.made = None
        return False

    def _of_kind(self, kind: Any) -> Tally:
        place = next((i for i, (key, _) in enumerate(self._tallies) if key == kind), None)
        self._tallies.append((kind, Tally()) if place is None else self._tallies.pop(place))
        del self._tallies[:-KINDS]
        return self._tallies[-1][1]

    def _promising(self, tally: Tally, state: State, objective: Objective) -> bool:
        if tally.plain < BEFORE * 2**tally.recordings or tally.fastest > SLOW:
            return False
        if not room(state, objective.parameters.device):
            tally.refused = "there is no memory for it"
            self.note = f"steps are not recorded: {tally.refused}"
        return not tally.refused

    def _tried(self, make: Callable[[], RecordedStep], forced: bool) -> RecordedStep | None:
        """None if the model or a part of the optimizer cannot be recorded."""
        assert self._tally is not None
        try:
            made = make()
        except Unlike as error:
            self._tally.refused = str(error)
        except Exception as error:  # CUDA refuses in many ways
            self._tally.refused = f"it ran out of memory: {error}" if out_of_memory(error) else str(error)
            if forced:
                warnings.warn(
                    f"this step cannot be recorded as a CUDA graph, it goes on without: {error}", stacklevel=2
                )
        else:
            self._tally.recordings += 1
            self.note = "steps are recorded"
            return made
        self.note = f"steps are not recorded: {self._tally.refused}"
        return None

    # What it takes.

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Around a step without a recording; one that fails does not count."""
        tally, begun = self._tally, self.clock()
        yield
        if tally is not None:
            tally.plain, tally.fastest = tally.plain + 1, min(tally.fastest, self.clock() - begun)

    def replayed(self, begun: float, stood: bool, forced: bool) -> None:
        """After a replay that began then, and may have been undone. A recording that does not pay is dropped."""
        tally = self._tally
        if tally is None or self.made is None:
            return
        tally.replays.append((self.clock() - begun, stood))
        self._expected = self.made[1].totals if self.looks else None
        if not forced and not tally.pays:
            self._drop(tally, "replays are not faster")

    def _compare(self, totals: Totals | None, dtype: torch.dtype) -> None:
        """A model that takes numbers from elsewhere, such as a global variable, may not do as it did."""
        expected, self._expected = self._expected, None
        if expected is None or totals is None or self.made is None:
            return
        allowed = tolerances.of_trials(dtype) * abs(totals.value) + FAINT * totals.rounding
        if not abs(expected.value - totals.value) <= allowed:
            self._drop(self._of_kind(self.made[0]), "the model does not do the same in every step")
            words = "those since the last look were wrong, and capture=False records none"
            warnings.warn(f"{self.note}; {words}", stacklevel=2)

    def _drop(self, tally: Tally, why: str) -> None:
        tally.refused, self.made = why, None
        self.note = f"steps are no longer recorded: {why}"
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def recordable(parts: Parts, objective: Objective, batch: Batch, state: State, known: Known) -> bool:
    """Whether a step can be recorded at all."""
    # What an object holds cannot be copied, nor is the θ of coarse parameters carried along.
    if batch.opaque or objective.parameters.coarse or not objective.loss.recordable:
        return False
    if not known.only_slopes or not rows_of(parts, state.plan).recordable or state.D is None:
        return False
    unlike = parts.remembers and state.previous is None  # the next step will have one
    steady = known.steady or next(objective.model.buffers(), None) is None
    return steady and not unlike and (parts.momentum is None or parts.momentum.recordable)


def watched(model: nn.Module) -> bool:
    """Whether somebody looks at what the modules do: hooks are not called in a replay."""
    return any(hooks(model))


def room(state: State, device: torch.device) -> bool:
    """Whether the memory of another step is free: a recording keeps it for itself, and not all steps are replayed."""
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    size, limit, budget = idle, None, free(device)
    if state.plan is not None:
        size, limit = state.plan.bytes, state.plan.budget
    return all(2 * size <= most for most in (limit, budget) if most is not None)


def signature(parts: Parts, objective: Objective, batch: Batch, state: State, known: Known, lr: float) -> Any:
    """What a recording depends on, beside the `attributes` of the model."""
    leaves, spec = tree_flatten([vars(batch), carried(state)])
    shapes = tuple((t.shape, t.dtype, t.device) if isinstance(t, Tensor) else t for t in leaves)
    places = tuple(t.data_ptr() for t in held(objective.model))
    mode = modes(objective.model), hooks(objective.model), torch.get_float32_matmul_precision(), objective.autocast
    plan = None if state.plan is None else state.plan.choice
    decay = objective.penalty
    penalty = None if decay is None else (decay.weights.shape, seen(decay.towards))
    return (
        parts, objective.loss, penalty, on_same_data(state), shapes, spec, places, mode, lr, known.proven, plan,
    )  # fmt: skip


OWN = frozenset(vars(nn.Module()))  # what every module has
PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


def attributes(model: nn.Module) -> list[Any]:
    """What else the modules hold: a model whose temperature was changed is another one to a recording."""
    return [
        (name, seen(value))
        for module in submodules(model)
        if len(vars(module)) > len(OWN)
        for name, value in vars(module).items()
        if name not in OWN
    ]


def seen(value: Any, deep: bool = True) -> Any:
    """A plain value itself, a tensor by where it is and how often it was changed, of an object what it holds."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        return id(value), value._version, value.data_ptr() if value.layout == torch.strided else 0
    if isinstance(value, (tuple, list)):
        return [v if isinstance(v, PLAIN) else seen(v) for v in value]
    if isinstance(value, dict):
        return [(key, seen(v)) for key, v in value.items()]
    held = getattr(value, "__dict__", None) if deep and not isinstance(value, (type, nn.Module)) else None
    return [id(value), *((key, seen(v, False)) for key, v in held.items())] if isinstance(held, dict) else id(value)
