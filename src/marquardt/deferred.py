"""Where the host waits for the device: questions and readings. On a tape they are answered later, all at once; if
several ranks ask the same, one of them answers."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

DOUBLE = torch.float64
AS_IS = nullcontext()


class Tape:
    """Collects what would be asked while a step is recorded as a CUDA graph, and assumes that all is well."""

    def __init__(self, assumed: Sequence[float], drawn: Sequence[Tensor] = ()) -> None:
        self.assumed = list(assumed)  # the answer to the one reading on the way: objective.Totals
        # Places for what is drawn, in memory of their own: that of a graph is used several times over in a replay.
        self._places = [torch.empty_like(t) for t in drawn]
        self.rewind()

    def rewind(self) -> None:
        """Before the recorded work is done, for the first time or again."""
        self.places = iter(self._places)
        self.asked: list[Tensor] = []
        self.drawn: list[tuple[Tensor, Callable[[int], Tensor], int]] = []  # a place, what draws for it, the seed
        self.read: list[Tensor] = []


class _Current(threading.local):
    tape: Tape | None = None
    drawn: list[Tensor] | None = None  # by a step that may be recorded when it comes again
    agree: Callable[[list[float]], list[float]] | None = None  # what the ranks make of numbers that all have found


current = _Current()  # each thread has its own


def recording() -> bool:
    return current.tape is not None


def ask(fine: Tensor) -> bool:
    """Whether all is well: a tensor of bool, () or one for each problem of a batch. Every rank asks it."""
    answer = ask_here(fine)
    return bool(agreed([float(answer)])[0]) if current.agree is not None else answer


def ask_here(fine: Tensor) -> bool:
    """The same about the data that this rank has."""
    if current.tape is None:
        return bool(fine if fine.ndim == 0 else fine.all())
    current.tape.asked.append(fine)
    return True


def agreed(numbers: list[float]) -> list[float]:
    """Numbers that every rank has found, as one of them has"""
    return numbers if current.agree is None else current.agree(numbers)


@contextmanager
def agreeing(agree: Callable[[list[float]], list[float]]) -> Iterator[None]:
    """Within it, numbers that all ranks have found are those that they agree on: rounding may differ between machines,
    and must not lead them different ways."""
    before, current.agree = current.agree, agree
    try:
        yield
    finally:
        current.agree = before


def read(first: Tensor, *others: Tensor | float) -> list[float]:
    """A few numbers of the data that this rank has, each (): in one synchronisation"""
    if current.tape is None and first.is_cpu:
        return [first.item(), *map(float, others)]
    each = [first, *(t if isinstance(t, Tensor) else first.new_full((), t) for t in others)]
    together = torch.stack([t.double() for t in each])
    if current.tape is None:
        numbers: list[float] = together.tolist()
        return numbers
    current.tape.read.append(together)
    return current.tape.assumed


def draw(numbers: Callable[[int], Tensor], seed: int, like: Tensor) -> Tensor:
    """Numbers that the host draws from a seed, of the dtype and device of another tensor. For a tape they are drawn
    before every replay, from other seeds."""
    draws = numbers(seed)
    if current.tape is None:
        moved = draws.to(like)
        if current.drawn is not None:
            current.drawn.append(moved)
        return moved
    place = next(current.tape.places, None)
    if place is None or place.shape != draws.shape:
        raise RuntimeError("this step draws other random numbers than the last one")
    current.tape.drawn.append((place, numbers, seed))
    return place


def ungraded() -> AbstractContextManager[None]:
    """torch.no_grad(), which costs as much as a small operation, where a step is not within it already"""
    return torch.no_grad() if torch.is_grad_enabled() else AS_IS


def floats(*tensors: Tensor) -> list[float]:
    """What several 0-dimensional tensors hold, in one synchronisation"""
    if tensors[0].is_cpu and current.agree is None:  # no device to wait for: each by itself is fastest
        return [t.item() for t in tensors]
    dtypes = list(dict.fromkeys(t.dtype for t in tensors))
    order = [i for dtype in dtypes for i, t in enumerate(tensors) if t.dtype == dtype]
    # Tensors of one precision at a time: each conversion by itself would be a kernel.
    parts = [torch.stack([t for t in tensors if t.dtype == dtype]).double() for dtype in dtypes]
    each = dict(zip(order, torch.cat(parts).tolist(), strict=True))
    return agreed([each[i] for i in range(len(tensors))])


def scaled(t: Tensor, factor: float) -> Tensor:
    """factor·t of a single number (), calculated on the host where it is at hand: in a fifth of the time of a kernel"""
    return t.new_full((), factor * t.item()) if t.is_cpu else factor * t


def at_hand(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same 0-dimensional tensors in float64 to calculate with: on the host after one synchronisation, where small
    calculations cost less than kernels; on the device if they are recorded."""
    if tensors[0].device.type == "cpu" and current.agree is None and all([t.dtype is DOUBLE for t in tensors]):
        return tensors
    together = torch.stack([t.double() for t in tensors])
    if current.agree is not None:
        return torch.tensor(agreed(together.tolist()), dtype=torch.float64).unbind()
    return (together.cpu() if current.tape is None else together).unbind()


def numbers(*tensors: Tensor) -> Sequence[Any]:
    """The same in float64 as plain numbers after one synchronisation, which formulas of operators and `root` take as
    well; as tensors if they are recorded."""
    return floats(*tensors) if current.tape is None else torch.stack([t.double() for t in tensors]).unbind()


def root(x: Any) -> Any:
    """√x of a number or a tensor"""
    return x.sqrt() if isinstance(x, Tensor) else math.sqrt(x)


@contextmanager
def recorded(tape: Tape) -> Iterator[None]:
    current.tape = tape
    try:
        yield
    finally:
        current.tape = None


def answers(tape: Tape, *more: Tensor) -> Tensor:
    """All of it in one tensor: what was asked, what was read, and more (): (k,)"""
    parts = [*(t.double().reshape(1) for t in tape.asked), *(t.double() for t in tape.read)]
    return torch.cat([*parts, *(t.double().reshape(1) for t in more)])


@contextmanager
def capturing(device: torch.device) -> Iterator[None]:
    """Around a recording on that device. One that breaks off leaves the device's generator as if it went on, and the
    next random number would be refused."""
    generator = torch.cuda.default_generators[device.index or 0]
    spare = generator.clone_state()
    try:
        with torch.cuda.device(device):
            yield
    except BaseException:
        generator.graphsafe_set_state(spare)
        raise
