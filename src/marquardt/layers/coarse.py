"""Products of factors in bfloat16 or float16, as autocast leaves them: multiplied as they are, added up in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..model.precision import COARSE

# The peak rates of an H200: 990 TFLOP/s in bfloat16 to 67 in float32.
FASTER = 15

# To take a factor apart costs as much as 240 columns of the other in float32 (30 bytes a number at 4 TB/s).
COLUMNS = 256


def fast(t: Tensor) -> bool:
    """Whether the device multiplies such numbers and adds up in float32."""
    return t.dtype in COARSE and t.is_cuda and t.numel() > 0


def kernel(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """In float32: (M, K) (K, L), or many of them"""
    multiply = torch.mm if left.ndim == 2 else torch.bmm
    return multiply(left, right, out_dtype=torch.float32, out=out)


def times(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """LR as if both were converted to this dtype, which is at least float32: (M, K) (K, L), or many of them"""
    if left.dtype is right.dtype is dtype:
        return left @ right
    if dtype == torch.float32 and left.dtype == right.dtype and fast(left):
        return kernel(left, right)
    if dtype == right.dtype == torch.float32 and _apart(left, left.shape[-2]):
        return kernel(torch.cat([left] * 3, -1), torch.cat(digits(right), -2))
    if dtype == left.dtype == torch.float32 and _apart(right, right.shape[-1]):
        return kernel(torch.cat(digits(left), -1), torch.cat([right] * 3, -2))
    return left.to(dtype) @ right.to(dtype)


def _apart(t: Tensor, columns: int) -> bool:
    """Whether the other factor is better taken apart: float16 has not the range for that"""
    return t.dtype == torch.bfloat16 and columns >= COLUMNS and fast(t)


def digits(t: Tensor) -> list[Tensor]:
    """The 24 binary digits of float32, 8 at a time: t is the sum of three tensors of bfloat16."""
    high = t.bfloat16()
    rest = t - high
    middle = rest.bfloat16()
    return [high, middle, (rest - middle).bfloat16()]


def pulls(t: Tensor) -> bool:
    """Whether `pull` takes it: float16 has not the range for products with any number"""
    return fast(t) and t.dtype == torch.bfloat16


def pull(delta: Tensor, a: Tensor, w: Tensor, out: Sequence[Tensor]) -> None:
    """out ← Σ w·δ ⊗ a and, if there is a second one, Σ w·δ: (K, O), (K, I), (K, 1) → (O, I), (O, 1)

    w·δ or w·a, whichever is smaller, is rounded once more, as both were: every number by itself, so that the errors do
    not add up.
    """
    left, right = (delta, _scaled(a, w)) if delta.shape[1] > a.shape[1] else (_scaled(delta, w), a)
    kernel(left.T, right, out[0])
    if len(out) > 1:
        out[1].copy_(kernel(delta.T, torch.cat(digits(w)[:2], 1)).sum(1, keepdim=True))


def _scaled(t: Tensor, factor: Tensor) -> Tensor:
    return torch.mul(t, factor, out=torch.empty_like(t))
