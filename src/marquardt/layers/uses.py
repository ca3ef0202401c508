"""The rows of a parameter from its uses in the graph: J̃ is the sum over them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..model.batch import wide, widened
from ..surroundings import out_of_memory
from .blocks import SLAB, Bilinear, Block, Explicit, Nothing, Sums, written
from .capture import Form, Misfit, Outer, Picked, Use
from .lookup import Lookup
from .places import Place, stacked


class Glimpse(NamedTuple):
    """A use by some of the samples, with the gradients of their rows at its output."""

    use: Use
    place: Place
    delta: Tensor  # (R, *output)


def block_of(p: Tensor, glimpses: Sequence[Glimpse], R: int, N: int) -> Block:
    """The columns of a parameter, all of whose uses these are."""
    if not glimpses:
        return Nothing([p], R * N, N)
    try:
        forms = [g.use.form() for g in glimpses]
        kinds = {_kind(g.use, form) for g, form in zip(glimpses, forms, strict=True)}
        if kinds == {Lookup}:
            return _lookup(p, glimpses, forms, N)
        if kinds == {Bilinear}:
            return _bilinear(p, glimpses, forms, N)
        return Explicit([p], _explicit(p, glimpses, forms, R, N), N)
    except Exception as error:  # not saved, changed since, or of shapes that do not fit together
        if out_of_memory(error):
            raise
        raise Misfit(str(error)) from error


def _kind(use: Use, form: Form) -> type[Block]:
    """The cheapest block that can hold the rows of this use."""
    if use.direct and isinstance(form, Picked):
        return Lookup
    return Bilinear if use.direct and isinstance(form, Outer) else Explicit


def _bilinear(p: Tensor, glimpses: Sequence[Glimpse], forms: Sequence[Form], N: int) -> Block:
    """Every use has positions of its own; uses by different samples share them. In y = gW the roles of a and δ are
    changed: then every row has an a of its own, as if it were that of a sample of its own."""
    places = [g.place for g in glimpses]
    changed = [isinstance(form, Outer) and form.turned != g.use.turned for g, form in zip(glimpses, forms, strict=True)]
    inputs, deltas = [], []
    for (_, place, delta), form, swaps in zip(glimpses, forms, changed, strict=True):
        a, d = _pair(form, place, delta, wide(p.dtype))
        a = a.expand(len(d), *a.shape) if any(changed) else a[None]  # (R, M, P, G, I), or one for all rows
        inputs.append(d if swaps else a)
        deltas.append(a if swaps else d)
    a, d = _joined(inputs, places, N, 1).detach(), _joined(deltas, places, N, 1).detach()
    if a[0, 0, 0].numel() * d.shape[-1] != p.numel():
        raise Misfit("a and δ are not those of a weight of this size")
    one = Gathered(a[0], d, p, None) if len(a) == 1 else ByRows(a.flatten(0, 1), d.flatten(0, 1)[None], p, N)
    return written(one)


class Gathered(Bilinear):
    """Positions of several uses. Not all samples have them, and a and δ may have changed their roles: moments of a, and
    factors made of them, would mean nothing."""

    def inputs(self) -> Tensor | None:
        return None

    def sums(self, weight: Tensor | None) -> Sums | None:  # type: ignore[override]
        return None


class ByRows(Gathered):
    """Every row as one of a sample of its own, of R·N samples: row r·N + n is where it was."""

    def __init__(self, a: Tensor, delta: Tensor, weight: Tensor, N: int) -> None:
        super().__init__(a, delta, weight, None)
        self.true_N = N

    def samples(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        rows = super().samples(dtype).view(-1, self.true_N, self.columns).transpose(0, 1)  # (N, R, columns)
        return rows.reshape(self.m, -1) if out is None else out.copy_(rows.reshape(self.m, -1))


class GatheredTable(Lookup):
    """The same for a table: positions that a sample does not have would count as its first row."""

    def sums(self, weight: Tensor | None) -> Sums | None:  # type: ignore[override]
        return None


def _lookup(p: Tensor, glimpses: Sequence[Glimpse], forms: Sequence[Form], N: int) -> Lookup:
    index, deltas = [], []
    for (_, place, delta), form in zip(glimpses, forms, strict=True):
        assert isinstance(form, Picked)
        index.append(place(form.rows(), 0).flatten(1))  # (M, P)
        deltas.append(place(form.delta(widened(delta)), 1).flatten(2, -2))  # (R, M, P, E)
    places = [g.place for g in glimpses]
    return GatheredTable(_joined(index, places, N, 0), _joined(deltas, places, N, 1), p)


def _joined(pieces: Sequence[Tensor], places: Sequence[Place], N: int, skip: int) -> Tensor:
    """(skip…, M, P, *rest), one for each use → (skip…, N, all positions, *rest), zero where a sample has none"""
    sizes = [t.shape[skip + 1] for t in pieces]
    if all(place.M == N for place in places):
        return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), skip + 1)
    offsets, P = stacked(list(zip(places, sizes, strict=True)))
    first = pieces[0]
    out = first.new_zeros(*first.shape[:skip], N, P, *first.shape[skip + 2 :])
    for t, place, offset, size in zip(pieces, places, offsets, sizes, strict=True):
        out[(slice(None),) * skip + (place.samples, slice(offset, offset + size))] = t
    return out


def _pair(form: Form, place: Place, delta: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """a (M, P, G, I) and δ (R, M, P, G, O)"""
    assert isinstance(form, Outer)
    a = place(form.a().to(dtype), 0).flatten(1, -3)
    return a, place(form.delta(delta.to(dtype)), 1).flatten(2, -3)


def _explicit(p: Tensor, glimpses: Sequence[Glimpse], forms: Sequence[Form], R: int, N: int) -> Tensor:
    """The rows themselves, those of tensors that are made of the parameter by a backward pass to it: (m, columns)"""
    total = p.new_zeros(R, N, p.numel(), dtype=wide(p.dtype))
    made: dict[GradientEdge, Tensor] = {}
    for (use, place, delta), form in zip(glimpses, forms, strict=True):
        found = _rows_of(form, place, delta, use.source_shape, wide(p.dtype))  # (R, M, *V)
        if use.direct:
            total[:, place.samples] += (found.mT if use.turned else found).reshape(R, place.M, -1)
        else:
            if use.source not in made:
                size = math.prod(use.source_shape)
                if R * N * size > max(SLAB, 4 * total.numel()):
                    raise Misfit(f"rows of a tensor of {size:,} numbers, made of {p.numel():,}")
                made[use.source] = total.new_zeros(R, N, *use.source_shape)
            made[use.source][:, place.samples] += found
    if made:
        rows = [t.flatten(0, 1) for t in made.values()]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")
            (back,) = torch.autograd.grad(list(made), [p], rows, retain_graph=True, is_grads_batched=True)
        total += back.reshape(total.shape)
    return total.flatten(0, 1)


def _rows_of(form: Form, place: Place, delta: Tensor, V: Sequence[int], dtype: torch.dtype) -> Tensor:
    """(R, M, *V)"""
    R = len(delta)
    if isinstance(form, Outer):
        a, d = _pair(form, place, delta, dtype)
        found = torch.einsum("rnpgo,npgi->rngio" if form.turned else "rnpgo,npgi->rngoi", d, a)
    elif isinstance(form, Picked):
        index = place(form.rows(), 0).flatten(1)  # (M, P)
        d = place(form.delta(delta.to(dtype)), 1).flatten(2, -2)  # (R, M, P, E)
        found = d.new_zeros(*d.shape[:2], *V)
        found.scatter_add_(2, index[None, :, :, None].expand_as(d), d)
    else:
        if place.dim is not None and form.shape[place.dim] != 1:
            raise Misfit("every sample has numbers of its own in it")
        shape = [size for d, size in enumerate(form.shape) if d != place.dim]
        found = place(form.delta(delta.to(dtype)), 1).sum(2)  # (R, M, *other dimensions)
        found = found.sum_to_size(R, place.M, *shape)
    return found.reshape(R, place.M, *V)
