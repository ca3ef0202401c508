"""How much two computations of the same may differ, by the precision they are made in. A wrong one is wrong by far."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Two losses of the same data at the same θ differ by rounding alone (sums on a GPU are not reproducible).
SAME_LOSS = {torch.float32: 1e-5, torch.float64: 1e-9}

# A formula of a user's loss against autograd: a right one may smooth a corner, or lose digits.
FORMULA = {torch.float32: 1e-2, torch.float64: 1e-3}


def within(dtype: torch.dtype, double: float, least: float = 1e-2) -> float:
    """In float64, or in float32 and coarser, of which a few roundings remain"""
    return double if dtype == torch.float64 else max(least, 8 * torch.finfo(dtype).eps)


def of_rules(dtype: torch.dtype) -> float:
    """Rows by a rule against plain autograd: TF32 convolutions are right to 1e-3, bfloat16 to 1e-2."""
    return within(dtype, 1e-6)


def of_parts(dtype: torch.dtype, cuda: bool) -> float:
    """Outputs of the same samples in batches of different sizes, for which kernels differ; on a GPU in TF32."""
    return within(dtype, 1e-8, 1e-2 if cuda else 1e-3)


def of_noise(dtype: torch.dtype) -> float:
    """A gradient that is nothing but rounding, as a share of all gradients together"""
    return max(math.sqrt(torch.finfo(dtype).eps), of_rules(dtype))


def of_functions(dtype: torch.dtype) -> float:
    """A user's function of a batch against the same of its parts, in this precision and not in float64."""
    return max(FORMULA[torch.float32], 8 * torch.finfo(dtype).eps)


def coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return max(a, b, key=lambda dtype: torch.finfo(dtype).eps)


def of_trials(dtype: torch.dtype) -> float:
    """Losses of many trial points at once against one after the other."""
    return 1e-6 if dtype == torch.float64 else 1e-3


def of_symmetry(dtype: torch.dtype) -> float:
    """A Hessian against its transpose: rounding in float32 leaves 1e-5, in bfloat16 some times its rounding."""
    return within(dtype, 1e-8)


def same_outputs(z: Tensor, other: Tensor) -> bool:
    """Whether two forward passes gave the same, up to rounding in any precision."""
    return bool((z - other).norm() <= 1e-3 * other.norm())
