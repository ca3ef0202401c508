"""What is set in this thread is as it was, whatever was interrupted at whatever moment."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fuzz.settings import settings
from marquardt.surroundings import (
    Exhausted,
    Surroundings,
    back_afterwards,
    interrupt_of,
    out_of_memory,
    surely,
    undisturbed,
)


def left_open() -> list[Callable[[], object]]:
    functorch = torch._C._functorch
    return [
        lambda: BaseTorchFunctionMode().__enter__(),
        lambda: TorchDispatchMode().__enter__(),
        lambda: functorch._vmap_increment_nesting(3, "error"),
        lambda: functorch._jvp_increment_nesting(),
        lambda: functorch._grad_increment_nesting(),
        lambda: torch._C._vmapmode_increment_nesting(),
        lambda: forward_ad.enter_dual_level(),
        lambda: torch._C._enter_dual_level(),
        lambda: torch.no_grad().__enter__(),
        lambda: torch._C._set_fwd_grad_enabled(False),
        lambda: torch.autocast("cpu").__enter__(),
        lambda: torch.autograd.graph.saved_tensors_hooks(torch.neg, torch.neg).__enter__(),
        lambda: torch._C._autograd._saved_tensors_hooks_disable("not now"),
        lambda: warnings.catch_warnings(record=True).__enter__(),
    ]


WHAT = range(len(left_open()))


@pytest.mark.parametrize("which", [*([i] for i in WHAT), [i for i in WHAT if i not in (7, 12)]], ids=str)
def test_what_was_left_open_is_found(which):
    before, here = settings(), Surroundings()
    for i in which:
        left_open()[i]()
    assert settings() != before
    here.restore()
    assert settings() == before
    x = torch.arange(3.0)
    assert torch.equal(torch.func.vmap(torch.neg)(x), -x)
    assert torch.equal(torch.func.jacfwd(torch.sin)(x), x.cos().diag())
    assert torch.func.hessian(lambda x: x.sin().sum())(x).isfinite().all()


def test_what_the_caller_has_set_stays():
    mode = BaseTorchFunctionMode()
    with mode, torch.no_grad(), torch.autocast("cpu"), forward_ad.dual_level(), warnings.catch_warnings():
        before, here = settings(), Surroundings()
        with torch.enable_grad():
            BaseTorchFunctionMode().__enter__()
            here.restore()
        assert settings() == before
    assert not torch.is_autocast_enabled("cpu")


def test_a_batched_backward_pass_of_the_caller_goes_on():
    """Amid `is_grads_batched` and within a backward function of one's own something fails, and that is dealt with."""

    @undisturbed
    def failing() -> None:
        torch._C._vmapmode_increment_nesting()
        raise ValueError

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(ValueError):
                failing()
            return 2 * g

    x = torch.ones(3, requires_grad=True)
    before = settings()
    (found,) = torch.autograd.grad(Own.apply(x), x, torch.eye(3), is_grads_batched=True)
    assert torch.equal(found, 2 * torch.eye(3))
    assert settings() == before


def test_generators_that_an_interrupt_has_left_amid_their_block_are_ended():
    """As at the moment when `__exit__` begins: the garbage collector would do it at any time later."""
    told: list[str] = []

    @contextmanager
    def block(name: str) -> Iterator[None]:
        yield
        told.append("too late")

    @contextmanager
    def outer() -> Iterator[None]:
        try:
            yield
        finally:
            told.append("left")

    def interrupt(frame: object, event: str, arg: object) -> None:
        if event == "call" and getattr(frame, "f_code", None) is contextmanager_exit:
            raise KeyboardInterrupt

    def call() -> None:
        with outer():
            sys.setprofile(interrupt)

    contextmanager_exit = type(outer()).__exit__.__code__
    here = Surroundings()
    with pytest.raises(KeyboardInterrupt) as caught:
        call()
    sys.setprofile(None)
    assert told == []
    here.restore(caught.value)
    assert told == ["left"]


def test_what_undoes_is_begun_again():
    done: list[int] = []

    def undo() -> None:
        done.append(len(done))
        if len(done) < 3:
            raise KeyboardInterrupt if len(done) == 1 else ValueError("once more")

    with pytest.raises(KeyboardInterrupt):
        surely(undo)
    assert done == [0, 1, 2]


def test_what_cannot_be_undone_says_so():
    def undo() -> None:
        raise ValueError("no way back")

    with pytest.raises(ValueError, match="no way back"), back_afterwards(undo):
        pass


# ---- How torch says that memory ran out.


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA says so"), True),
        (Exhausted("there is no smaller plan"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError(), False),
    ],
)
def test_out_of_memory(error, expected):
    assert out_of_memory(error) == expected


def test_a_cpu_that_has_too_little_memory_says_so():
    """By the words of the torch that is installed."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 59, dtype=torch.float64)
    assert out_of_memory(caught.value)


class Failing:
    """What an interrupt leaves half-entered fails when it is left."""

    def __enter__(self) -> None:
        torch.no_grad().__enter__()

    def __exit__(self, *error: object) -> None:
        raise RuntimeError("this was not entered")


def interrupted() -> None:
    with Failing():
        raise KeyboardInterrupt


def test_an_interrupt_is_found_behind_the_error_that_took_its_place():
    with torch.enable_grad(), pytest.raises(RuntimeError) as caught:
        interrupted()
    assert isinstance(interrupt_of(caught.value), KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        out_of_memory(caught.value)
    with pytest.raises(KeyboardInterrupt):
        undisturbed(interrupted)()
    assert torch.is_grad_enabled()


def test_an_interrupt_that_somebody_else_deals_with_is_left_to_them():
    """A step that is taken within `except KeyboardInterrupt:`, and fails."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(ValueError, match="fails") as caught:
            raise ValueError("a step fails")  # noqa: B904
        found = interrupt_of(caught.value), out_of_memory(caught.value)
    assert isinstance(caught.value.__context__, KeyboardInterrupt)
    assert found == (None, False)
