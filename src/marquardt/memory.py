"""What no other way helps against: that memory ran out, with the words that torch has for it, and an interrupt."""

from __future__ import annotations

import sys
from types import FrameType

import torch


class Exhausted(torch.OutOfMemoryError):
    """There is no smaller plan: what was tried last is in the message."""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on a CPU: that is no fault of the way that was tried, and an interrupt is
    none either."""
    unless_interrupted(error)
    words = ("out of memory", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError) or any(w in str(error) for w in words)


def unless_interrupted(error: BaseException) -> None:
    """Raises the interrupt that an error took the place of, before another way is tried: what Ctrl-C leaves half-done,
    such as a level of vmap that was left and never entered, fails with errors of torch."""
    interrupt = interrupt_of(error)
    if interrupt is not None and interrupt is not error:
        raise interrupt


def interrupt_of(error: BaseException) -> BaseException | None:
    """This error if it is an interrupt, or the one that it took the place of. One that is still being dealt with by a
    caller, as where a step is taken within `except KeyboardInterrupt:`, is none of these."""
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        if not isinstance(found, (Exception, GeneratorExit)):
            return found if found is error or not _being_handled(found) else None
        seen.append(found)
        found = found.__context__
    return None


def _being_handled(interrupt: BaseException) -> bool:
    """Whether the function that has caught it, which is none of ours, is still at work"""
    trace = interrupt.__traceback__
    caught = None if trace is None else trace.tb_frame
    if caught is None or caught.f_globals.get("__name__", "").partition(".")[0] == __name__.partition(".")[0]:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame is not caught:
        frame = frame.f_back
    return frame is not None
