"""What no other way helps against: that memory ran out, with the words that torch has for it, and an interrupt.

An interrupt is what comes from outside of the computation: KeyboardInterrupt and its like, and whatever the handler of
a signal raises, such as a time limit of an alarm.
"""

from __future__ import annotations

import signal
import sys
from types import CodeType, FrameType

import torch


class Exhausted(torch.OutOfMemoryError):
    """There is no smaller plan: what was tried last is in the message."""


# Of these kinds, or of torch's or of our own, is what says that a way does not fit a model.
REFUSALS = (
    ArithmeticError, AssertionError, AttributeError, BufferError, ImportError, LookupError, MemoryError, NameError,
    RuntimeError, StopIteration, SystemError, TypeError, ValueError, Warning,
)  # fmt: skip
OURS = (__name__.partition(".")[0], "torch")


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on a CPU: that is no fault of the way that was tried, and what comes from
    outside is none either."""
    unless_foreign(error)
    words = ("out of memory", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError) or any(w in str(error) for w in words)


def unless_interrupted(error: BaseException) -> None:
    """Raises the interrupt that an error is or took the place of, before another way is tried: what Ctrl-C leaves
    half-done, such as a level of vmap that was left and never entered, fails with errors of torch."""
    interrupt = interrupt_of(error)
    if interrupt is not None:
        raise interrupt


def unless_foreign(error: BaseException) -> None:
    """The same for a model that has been called before: an error of somebody's own kind, as another thread may raise it
    in this one, is no refusal of the way that is tried either."""
    unless_interrupted(error)
    if not isinstance(error, REFUSALS) and _package(type(error).__module__) not in OURS:
        raise error


def interrupt_of(error: BaseException) -> BaseException | None:
    """This error if it is an interrupt, or the one that it took the place of. One that is still being dealt with by a
    caller, as where a step is taken within `except KeyboardInterrupt:`, is none of these."""
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        if not isinstance(found, (Exception, GeneratorExit)) or _of_a_signal(found):
            return found if found is error or not _being_handled(found) else None
        seen.append(found)
        found = found.__context__
    return None


def _of_a_signal(error: BaseException) -> bool:
    """Whether the handler of a signal has raised it, at whatever moment of whatever function."""
    handlers = {code for s in signal.valid_signals() if (code := _code(signal.getsignal(s))) is not None}
    trace = error.__traceback__ if handlers else None
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code(handler: object) -> CodeType | None:
    """Of a function, a method, or an object that is called"""
    called = vars(type(handler)).get("__call__")
    found = getattr(handler, "__code__", None) or getattr(called, "__code__", None)
    return found if isinstance(found, CodeType) else None


def _being_handled(interrupt: BaseException) -> bool:
    """Whether the function that has caught it, which is none of ours, is still at work"""
    trace = interrupt.__traceback__
    caught = None if trace is None else trace.tb_frame
    if caught is None or _package(caught.f_globals.get("__name__", "")) == OURS[0]:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame is not caught:
        frame = frame.f_back
    return frame is not None


def _package(module: str) -> str:
    return module.partition(".")[0]
