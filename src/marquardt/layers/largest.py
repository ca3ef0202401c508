"""Max-pools of forward passes without gradients on a CPU: torch's own looks for places too, ten times as slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Largest(TorchFunctionMode):
    """Max-pools by comparing slices, where that is the same."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = largest(*args, **(kwargs or {})) if func is F.max_pool2d else None
        return func(*args, **(kwargs or {})) if found is None else found


def largest(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """max_pool2d of contiguous images by windows side by side; None if it is another one, or has a gradient"""
    kernel, step = _two(kernel_size), _two(stride or kernel_size)
    other = step != kernel or _two(padding) != [0, 0] or _two(dilation) != [1, 1] or ceil_mode or return_indices
    if other or torch.is_grad_enabled() or input.device.type != "cpu" or not input.is_contiguous():
        return None
    if input.ndim not in (3, 4) or kernel == [1, 1] or input.shape[-2] < kernel[0] or input.shape[-1] < kernel[1]:
        return None
    found = input
    for dim, size in zip((-2, -1), kernel, strict=True):
        windows = found.narrow(dim, 0, found.shape[dim] // size * size).unflatten(dim, (-1, size))
        first, *others = windows.unbind(dim)
        for slices in others:
            first = torch.maximum(first, slices)
        found = first
    return found


def _two(value: int | Sequence[int]) -> list[int]:
    return [value, value] if isinstance(value, int) else [*value, *value][:2]
