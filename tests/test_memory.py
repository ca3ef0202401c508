"""How torch says that memory ran out."""

from __future__ import annotations

import pytest
import torch

from marquardt.surroundings import Exhausted, interrupt_of, out_of_memory


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA says so"), True),
        (Exhausted("there is no smaller plan"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"), True),
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
        pass

    def __exit__(self, *error: object) -> None:
        raise RuntimeError("this was not entered")


def interrupted() -> None:
    with Failing():
        raise KeyboardInterrupt


def test_an_interrupt_is_found_behind_the_error_that_took_its_place():
    with pytest.raises(RuntimeError) as caught:
        interrupted()
    assert isinstance(interrupt_of(caught.value), KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        out_of_memory(caught.value)


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
