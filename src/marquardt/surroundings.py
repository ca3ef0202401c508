"""What torch and Python have set in this thread, as it was before something that was interrupted; and what no other
way helps against: an interrupt, and memory that ran out.

An interrupt is what comes from outside of the computation: KeyboardInterrupt and its like, and whatever the handler of
a signal raises, such as a time limit of an alarm.

Python raises KeyboardInterrupt wherever a function begins and wherever a call into C returns: also within the
`__enter__` of a context manager, which has done its work then and will not be left, within `__exit__`, and amid what a
`finally` undoes. What undoes is therefore done `surely`, and what a context manager has left behind is found by
comparing with what there was: at no cost but these looks while nothing happens.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from . import deferred


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
    if error.__context__ is not None and "INTERNAL ASSERT FAILED" in str(error):
        return error.__context__  # torch could not leave a transform that was left half entered
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


P = ParamSpec("P")
T = TypeVar("T")

# What `catch_warnings(record=True)` puts others in the place of.
SHOWING = ("showwarning", "_showwarnmsg_impl")

# Whether there is another attempt, should one be interrupted or fail.
ATTEMPTS = (True, True, True, True, False)

# Forward AD has one level for the whole program: one thread at a time.
LEVEL = threading.RLock()


def surely(undo: Callable[[], object]) -> None:
    """Does this until it has gone through. It may begin several times: what was raised meanwhile is raised after it.

    Where not even a moment may be missed, it is called once more for what is raised as this function begins:

        except BaseException:
            try:
                surely(undo)
            except BaseException:
                surely(undo)
                raise
            raise
    """
    raised: BaseException | None = None
    for more in ATTEMPTS:
        try:
            undo()
            break
        except BaseException as error:
            if not more:
                raise
            raised = error if raised is None or isinstance(raised, Exception) else raised
    if raised is not None:
        raise raised


class Leavable:
    """A context manager that leaves its block as often as it is told to, also amid `__enter__` and `__exit__`."""

    def leave(self) -> None:
        raise NotImplementedError


class Surroundings:
    """The settings of this thread, and of the program as far as steps change them."""

    def __init__(self) -> None:
        self.tape, self.agree = deferred.current.tape, deferred.current.agree
        self.filters, self.showing = warnings.filters, (warnings.showwarning, _show())
        self.functions = _function_modes() if torch._C._len_torch_function_stack() else []
        self.dispatch = _dispatch_modes() if torch._C._len_torch_dispatch_stack() else []
        self.functorch = torch._C._functorch.get_dynamic_layer_stack_depth()
        self.level = forward_ad._current_level
        self.nesting = _nesting()
        self.grad, self.forward = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
        self.autocast = _autocast()
        self.hooks = _top()
        self.refused = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()

    def restore(self, error: BaseException | None = None) -> None:
        """As it was. `error` is what ended the work: the context managers that it came through are left first."""
        _left(error)
        deferred.current.tape, deferred.current.agree, deferred.current.drawn = self.tape, self.agree, None
        if warnings.filters is not self.filters:
            warnings.filters = self.filters
            getattr(warnings, "_filters_mutated", int)()  # forgets what was decided by the others
        vars(warnings).update(zip(SHOWING, self.showing, strict=True))
        if (modes := _function_modes()) != self.functions:
            for _ in modes:
                torch._C._pop_torch_function_stack()
            for mode in self.functions:
                torch._C._push_on_torch_function_stack(mode)
        if (modes := _dispatch_modes()) != self.dispatch:
            for _ in modes:
                torch._C._pop_torch_dispatch_stack(None)
            for mode in self.dispatch:
                torch._C._push_on_torch_dispatch_stack(mode)
        for name in DISPATCH_FLAGS:
            if not self.dispatch and getattr(torch.utils._python_dispatch, name, False):
                setattr(torch.utils._python_dispatch, name, False)
        if torch._C._functorch.get_dynamic_layer_stack_depth() > self.functorch:
            torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(self.functorch)
        for _ in range(_vmaps() - _vmaps_around()):
            torch._C._vmapmode_decrement_nesting()
        if _nesting() != self.nesting:
            sys.modules[TRANSFORMS].JVP_NESTING = self.nesting  # type: ignore[attr-defined]
        self._leave_level()
        torch._C._set_grad_enabled(self.grad)
        torch._C._set_fwd_grad_enabled(self.forward)
        self._leave_autocast()
        while _top() not in (None, self.hooks):
            torch._C._autograd._pop_saved_tensors_default_hooks()
        if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() != self.refused:
            _refuse_hooks(self.refused)

    def undone(self, error: BaseException, undo: Callable[[], object]) -> None:
        """Everything as it was, first the settings, then by `undo` what else there is. If an interrupt has become
        `error`, it is raised in its place."""

        def back() -> None:
            self.restore(error)
            undo()

        surely(back)
        if (interrupt := interrupt_of(error)) not in (None, error):
            raise interrupt

    def _leave_level(self) -> None:
        if self.level >= 0:
            return
        with LEVEL:
            with contextlib.suppress(RuntimeError):  # there is one, which is to be left
                torch._C._enter_dual_level()
            torch._C._exit_dual_level(level=0)
            forward_ad._current_level = -1

    def _leave_autocast(self) -> None:
        *each, cache, depth = self.autocast
        for device, enabled, dtype in each:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cache)
        for _ in range(_autocast()[-1] - depth):
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


class back_afterwards(Leavable):
    """`undo` after the block, which may `begin` with something, whatever ends it. What an interrupt keeps from being
    left is found by `Surroundings`: there is no generator that would be gone."""

    def __init__(self, undo: Callable[[], object], begin: Callable[[], object] = int) -> None:
        self.undo, self.begin, self.left = undo, begin, False

    def leave(self) -> None:
        if not self.left:
            self.undo()
            self.left = True

    def __enter__(self) -> None:
        try:
            self.begin()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            surely(self.leave)
        except BaseException:
            surely(self.leave)
            raise


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """A block that an interrupt leaves with the settings that there were before it"""
    here = Surroundings()
    try:
        yield
    except BaseException as error:
        try:
            if interrupt_of(error) is not None:
                here.undone(error, int)
        except BaseException:
            here.undone(error, int)
            raise
        raise


def undisturbed(call: Callable[P, T]) -> Callable[P, T]:
    """A function that leaves the settings as they were, also if it is interrupted."""

    @functools.wraps(call)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        here = Surroundings()
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            try:
                here.undone(error, int)
            except BaseException:
                here.undone(error, int)
                raise
            raise

    return guarded


def _left(error: BaseException | None) -> None:
    """An interrupt within contextlib leaves a generator amid its block, for the garbage collector to end at some time:
    now, the innermost first."""
    errors: list[BaseException] = []
    while error is not None and error not in errors:
        errors.append(error)
        error = error.__context__
    for each in reversed(errors):
        trace = each.__traceback__
        while trace is not None:
            frame, trace = trace.tb_frame, trace.tb_next
            if frame.f_code.co_name in ("__enter__", "__exit__"):
                manager = frame.f_locals.get("self")
                with contextlib.suppress(Exception):
                    if isinstance(manager, contextlib._GeneratorContextManager):
                        manager.gen.close()
                    elif isinstance(manager, Leavable):
                        manager.leave()


# Of torch. Much of it has no public name; tests/test_surroundings.py looks for it in the torch at hand.

TRANSFORMS, VMAPS = "torch._functorch.eager_transforms", "torch._vmap_internals"
DISPATCH_FLAGS = (
    "_is_in_torch_dispatch_mode", "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)  # fmt: skip


def _nesting() -> int:
    """How many forward-mode derivatives of torch.func there are around"""
    return sys.modules[TRANSFORMS].JVP_NESTING if TRANSFORMS in sys.modules else 0


def _vmaps() -> int:
    """How many levels of the vmap behind `is_grads_batched` there are: a count that cannot be read"""
    try:
        return torch._C._vmapmode_increment_nesting() - 1
    finally:
        torch._C._vmapmode_decrement_nesting()


def _vmaps_around() -> int:
    """How many of them will be left by those that have entered them, who are still at work"""
    found, frame = 0, sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        found += frame.f_code.co_name == "wrapped" and frame.f_globals.get("__name__") == VMAPS
    return found


def _show() -> Any:
    return getattr(warnings, SHOWING[1], None)


def _function_modes() -> list[Any]:
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def _dispatch_modes() -> list[Any]:
    """Those of users; torch's own are kept apart from them"""
    modes = [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]
    return [mode for mode in modes if getattr(mode, "_mode_key", None) is None]


def _autocast() -> tuple[Any, ...]:
    """By kinds of devices, whether weights that it has converted are kept, and how deep in it this is"""
    each = [("cpu", torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))]
    if torch.cuda.is_initialized():
        each += (("cuda", torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),)
    try:
        depth = torch.autocast_increment_nesting() - 1
    finally:
        torch.autocast_decrement_nesting()
    return (*each, torch.is_autocast_cache_enabled(), depth)


def _top() -> Any:
    """The hooks of saved tensors that are in force"""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _refuse_hooks(words: str | None) -> None:
    if words is None:
        torch._C._autograd._saved_tensors_hooks_enable()
    else:
        torch._C._autograd._saved_tensors_hooks_disable(words)
