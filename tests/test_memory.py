"""How torch says that memory ran out."""

from __future__ import annotations

import pytest
import torch

from marquardt.memory import Exhausted, out_of_memory


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
