"""A metric from a saved state: each kind that can be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..plain import WAY_OUT, check_tensor, is_count, short
from .base import Diagonal, Metric, Part
from .layered import Layered

KINDS = (Diagonal, Layered)


def restored(state: list[Any]) -> Metric:
    """The metric that a saved state holds, in one precision: the finest of its tensors"""
    precisions = {t.dtype for t in tree_leaves(state) if _real(t)}
    if len(precisions) > 1:
        finest = reduce(torch.promote_types, precisions)
        state = tree_map(lambda t: t.to(finest) if _real(t) else t, state)
    scale, parts = state
    if isinstance(parts, dict):
        return Layered.restored(scale, parts)
    return Diagonal(scale, None if parts is None else [Part.of(part) for part in parts])


def _real(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()


def check_saved(state: Any, sizes: Sequence[int], dtype: torch.dtype) -> Metric:
    """The same, if it is one of parameters of these sizes, in the precision of θ"""
    where = "the damping D in this state"
    if not isinstance(state, list) or len(state) != 2:
        raise ValueError(f"{where} is {short(state)}, not a scale and its parts: {WAY_OUT}")
    scale, parts = state
    check_tensor(scale, f"{where}, its scale,", ())
    if isinstance(parts, dict):
        _check_layered(parts, where)
    elif parts is not None:
        for part in _listed(parts, where):
            for factor in _listed(part, where, (1, 2)):
                check_tensor(factor, where)
    D = restored(state)
    for t in tree_leaves(state):
        if isinstance(t, Tensor):
            check_tensor(t, where, t.shape, dtype)
    if not D.fits(sizes):
        raise ValueError(f"{where} is that of another model: load the state of this one")
    D.check(where)
    return D


def _listed(item: Any, where: str, lengths: Sequence[int] | None = None) -> Sequence[Any]:
    if not isinstance(item, (list, tuple)) or (lengths is not None and len(item) not in lengths):
        raise ValueError(f"{where} holds {short(item)} where a list is due: {WAY_OUT}")
    return item


def _check_layered(parts: dict[Any, Any], where: str) -> None:
    """Sides (G, d, d) or (G, d), and roots of the same shapes"""
    missing = {"layers", "gamma", "rank", "batches", "every", "early"} - set(parts)
    if missing:
        raise ValueError(f"{where} has no entry {min(missing)!r}: {WAY_OUT}")
    for name in ("gamma", "batches"):
        check_tensor(parts[name], f"{where} {name!r}", ())
    for layer in _listed(parts["layers"], where):
        members, left, right, *roots = _listed(layer, where, (5,))
        if not all(is_count(i) for i in _listed(members, where)):
            raise ValueError(f"{where} holds {short(members)} where the numbers of parameters are due: {WAY_OUT}")
        for side, root in zip((left, right), roots, strict=True):
            if side is None and root is None and side is right:
                continue
            check_tensor(side, where)
            d = side.shape[-1] if side.ndim else 0
            check_tensor(side, where, (None, d, d) if side.ndim == 3 else (None, d))
            check_tensor(root, f"{where}, a root of it,", side.shape)
        if right is not None and len(left) != len(right):
            raise ValueError(f"{where} has {len(left)} groups on one side and {len(right)} on the other: {WAY_OUT}")
        if right is None and (left.ndim != 2 or len(left) != 1):
            raise ValueError(f"{where} has one side of the shape {tuple(left.shape)} alone: {WAY_OUT}")
