"""Rows for parameters that neither a layer rule nor the graph covers: always right, slower. Fastest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.utils._pytree import tree_map

from ..model.anatomy import call_with
from ..model.batch import leaves, opaque
from .capture import Misfit

# Numbers that the cotangents of one batched backward pass may hold: 64 MiB in float32.
BATCH = 1 << 24


def rows_by_vmap(
    model: torch.nn.Module,
    params: Sequence[Tensor],
    call: Callable[[Callable[..., Any], Any], Tensor],
    inputs: Any,
    S: Tensor,
) -> Tensor:
    """Every sample by itself, all at once: (m, n). The model must treat the samples alike and independently."""
    _check_parts(inputs)
    R, N = S.shape[:2]
    dims = tree_map(lambda t: 0 if isinstance(t, Tensor) and t.ndim and len(t) == N else None, inputs)
    fixed = {id(t): t.detach() for t in [*model.parameters(), *model.buffers()]}

    def rows_of_one(x: Any, cotangents: Tensor) -> list[Tensor]:
        one = tree_map(lambda t, d: t[None] if d == 0 else t, x, dims)

        def outputs(theta: list[Tensor]) -> Tensor:
            return call(call_with(model, {**fixed, **{id(p): t for p, t in zip(params, theta, strict=True)}}), one)[0]

        pullback = vjp(outputs, [p.detach() for p in params])[1]
        return vmap(lambda w: pullback(w)[0])(cotangents)  # type: ignore[no-any-return]

    n = sum(p.numel() for p in params)
    found = vmap(rows_of_one, in_dims=(dims, 1), chunk_size=max(1, BATCH // (R * n)))(inputs, S)
    return torch.cat([rows.flatten(2) for rows in found], 2).transpose(0, 1).reshape(R * N, n)


def _check_parts(inputs: Any) -> None:
    """With an object that goes along whole, every part would be the whole batch: right for one sample only."""
    if any(opaque(t) for t in leaves(inputs)):
        raise Misfit("the inputs cannot be cut into samples")


def rows_in_parts(
    model: torch.nn.Module,
    params: Sequence[Tensor],
    call: Callable[[Callable[..., Any], Any], Tensor],
    inputs: Any,
    S: Tensor,
) -> Tensor:
    """A few samples at a time, each with its own forward pass: (m, n). The samples must be independent, the model not
    random. A backward pass for one row goes through all samples of its forward pass: the fewer, the less is wasted."""
    _check_parts(inputs)
    R, N = S.shape[:2]
    size = max(8, round(N**0.5))  # as many parts as samples in a part: neither the calls nor the waste dominate
    pieces = []
    for first in range(0, N, size):
        part = slice(first, first + size)
        some = tree_map(lambda t, i=part: t[i] if isinstance(t, Tensor) and t.ndim and len(t) == N else t, inputs)
        with torch.enable_grad():
            z = call(model, some)
        pieces.append(rows_in_batches(z, params, S[:, part]).unflatten(0, (R, -1)))
    return torch.cat(pieces, 1).flatten(0, 1)


def rows_in_batches(z: Tensor, params: Sequence[Tensor], S: Tensor) -> Tensor:
    """One cotangent for every row, many in one backward pass: (m, n). Nothing is assumed of the model."""
    R, N = S.shape[:2]
    size = max(1, BATCH // z.numel())
    pieces = []
    for first in range(0, R * N, size):
        index = torch.arange(first, min(first + size, R * N), device=z.device)
        single = S.new_zeros(len(index), *z.shape)
        single[torch.arange(len(index), device=z.device), index % N] = S.flatten(0, 1)[index]
        grads = torch.autograd.grad(z, params, single, retain_graph=True, is_grads_batched=True, allow_unused=True)
        pieces.append(_flat(grads, params, len(index)))
    return torch.cat(pieces)


def rows_by_loop(z: Tensor, params: Sequence[Tensor], S: Tensor) -> Tensor:
    """One backward pass for every row: (m, n). For what even batched gradients refuse."""
    pieces = []
    for r in range(S.shape[0]):
        for n in range(S.shape[1]):
            single = torch.zeros_like(z)
            single[n] = S[r, n]
            grads = torch.autograd.grad(z, params, single, retain_graph=True, allow_unused=True)
            pieces.append(_flat([None if g is None else g[None] for g in grads], params, 1))
    return torch.cat(pieces)


def _flat(grads: Sequence[Tensor | None], params: Sequence[Tensor], rows: int) -> Tensor:
    return torch.cat(
        [
            p.new_zeros(rows, p.numel()) if g is None else g.to_dense().reshape(rows, -1)
            for g, p in zip(grads, params, strict=True)
        ],
        1,
    )
