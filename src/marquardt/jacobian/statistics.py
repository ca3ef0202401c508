"""What the rows of all pieces tell of G = J̃ᵀJ̃ without forming it: its diagonal, and of its layers traces, partial
traces and moments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..metric import LayerSides
from ..model.parameters import Parameters
from ..ranks import Ranks
from .linearization import Linearization
from .objective import Empirical, Exact
from .piece import Piece, scattered


class Moments(NamedTuple):
    """One layer's part of the diagonal, and the mean squares of what its weight multiplies."""

    members: Sequence[int]  # its parameters, by number: a weight and its bias
    diagonals: Sequence[Tensor]  # of G, one for each of them: flat
    inputs: Tensor | None  # (G, 1, I); None if entries of its D have no such structure


def diagonal(lin: Linearization) -> Tensor:
    """diag J̃ᵀJ̃: (n,)"""
    total: Tensor | None = None
    for piece in lin.pieces():
        found = scattered(((block, block.diagonal()) for block in piece.blocks), lin.parameters)
        total = found if total is None else total + found
    assert total is not None
    return lin.ranks.sum(lin.scale * total)


def traces(lin: Linearization) -> list[tuple[list[int], Tensor]]:
    """tr J̃ᵀJ̃ of every layer: (its parameters, by number; ())"""
    found = [
        (tuple(sorted(lin.parameters.of(block))), block.trace())
        for piece in lin.pieces()
        for block in piece.blocks
        if not block.empty
    ]
    if lin.ranks.several:  # a few numbers, whose layers may differ from rank to rank
        plain = lin.ranks.every([(key, float(trace)) for key, trace in found])
        found = [(key, lin.theta.new_tensor(trace)) for each in plain for key, trace in each]
    totals: dict[tuple[int, ...], Tensor] = {}
    for key, trace in found:
        for other in [k for k in totals if set(k) & set(key)]:  # the same one, or pieces that go other ways
            trace = trace + totals.pop(other)
            key = tuple(sorted({*key, *other}))
        totals[key] = trace
    return [(list(key), trace * lin.scale) for key, trace in totals.items()]


def moments(lin: Linearization) -> Iterator[Moments]:
    """Moments by layer; of one open piece all diagonals together are never there."""
    if not lin.in_one or lin.ranks.several:
        yield from _summed(lin)
        return
    for block in (b for b in lin.whole().blocks if not b.empty):
        members = lin.parameters.of(block)
        diagonals = (block.diagonal() * lin.scale).split([lin.parameters.sizes[i] for i in members])
        yield Moments(members, diagonals, block.inputs())


def _summed(lin: Linearization) -> Iterator[Moments]:
    """Layer by layer from several pieces or ranks, whose diagonals are added up first."""
    columns: dict[int, Tensor] = {}
    squares: dict[tuple[int, ...], Tensor] = {}
    ways: dict[int, set[tuple[int, ...] | None]] = {}  # the rules by which a parameter was reached
    total = 0
    for piece in lin.pieces():
        blocks = [b for b in piece.blocks if not b.empty]
        total += piece.N if blocks else 0
        for block in blocks:
            key, v = tuple(lin.parameters.of(block)), block.inputs()
            sizes = [lin.parameters.sizes[i] for i in key]
            for i, column in zip(key, block.diagonal().split(sizes), strict=True):
                columns[i] = columns[i] + column if i in columns else column
                ways.setdefault(i, set()).add(None if v is None else key)
            if v is not None:
                squares[key] = squares[key] + v * piece.N if key in squares else v * piece.N
    if lin.ranks.several:
        total = sum(lin.ranks.numbers(total))
        for each in lin.ranks.every(ways):
            for i, found in each.items():
                ways.setdefault(i, set()).update(found)
        columns, squares = (lin.ranks.sums_by(each, lin.theta) for each in (columns, squares))
    for key, v in squares.items():
        if all(ways[i] == {key} for i in key):
            yield Moments(key, [columns.pop(i) * lin.scale for i in key], v / total)
    for i, column in columns.items():
        yield Moments((i,), (column * lin.scale,), None)


class PartialTraces(NamedTuple):
    """Of the block of G that every layer has."""

    layers: list[LayerSides]  # of those that the outputs depend on
    rows: int  # that would be if none were left out or sampled


def partial_traces(lin: Linearization, pieces: Callable[[], Iterable[Piece]] | None = None) -> PartialTraces:
    """By layers. Parameters that different pieces have in different forms are matrices by themselves."""
    apart: set[int] = set()
    all_rows = lin.rows_kind.__class__ in (Exact, Empirical)
    while True:
        found: dict[tuple[int, ...], LayerSides] = {}
        rows, unlike = 0, set()
        for piece in lin.pieces() if pieces is None else pieces():
            rows += 0 if all_rows else piece.N * piece.exact_rows()
            for layer in _layers(piece, lin.parameters, apart):
                known = found.get(layer.members)
                if known is None or not layer.like(known):
                    others = [key for key in found if set(key) & set(layer.members)]
                    unlike |= {i for key in others if not layer.like(found[key]) for i in (*key, *layer.members)}
                found[layer.members] = layer if known is None or unlike else known.each(torch.add, layer)
        unlike = unlike_on(lin.ranks, found, unlike)
        if not unlike:
            total = summed(lin.ranks, found, lin.theta)
            scale = lin.scale
            scaled = [
                LayerSides(k.members, k.left * scale, None if k.right is None else k.right * scale) for k in total
            ]
            return PartialTraces(
                scaled, lin.m if all_rows else sum(lin.ranks.numbers(rows)) if lin.ranks.several else rows
            )
        apart |= unlike


def unlike_on(ranks: Ranks, found: dict[tuple[int, ...], LayerSides], unlike: set[int]) -> set[int]:
    """Parameters that any of the ranks, or two of them together, have in different forms."""
    if not ranks.several:
        return unlike
    forms: dict[tuple[int, ...], object] = {}
    unlike = set(unlike)
    for each, own in ranks.every(({key: layer.form for key, layer in found.items()}, unlike)):
        unlike |= own
        for key, form in each.items():
            others = [k for k in forms if set(k) & set(key) and (k, forms[k]) != (key, form)]
            unlike |= {i for other in others for i in (*key, *other)}
            forms.setdefault(key, form)
    return unlike


def summed(ranks: Ranks, found: dict[tuple[int, ...], LayerSides], like: Tensor) -> list[LayerSides]:
    """Over the ranks, of which some may lack a layer"""
    if not ranks.several:
        return list(found.values())
    left = ranks.sums_by({key: layer.left for key, layer in found.items()}, like)
    right = ranks.sums_by({key: layer.right for key, layer in found.items() if layer.right is not None}, like)
    return [LayerSides(key, t, right.get(key)) for key, t in left.items()]


def _layers(piece: Piece, parameters: Parameters, apart: set[int]) -> Iterator[LayerSides]:
    for block in piece.blocks:
        if block.empty:
            continue
        own = not apart or apart.isdisjoint(parameters.of(block))
        for params, left, right in block.partial_traces() if own else block.partial_traces_apart():
            members = block.members if params is block.params and block.members else parameters.members(params)
            yield LayerSides(tuple(members), left, right)
