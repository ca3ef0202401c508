"""Where the samples are in the uses of the parameters, found by gradients that tell the samples apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .. import tolerances
from ..layers.capture import ALL, LEAF, Misfit, Node, Place, Walk
from ..layers.graph import Form, Use, uses_in
from ..surroundings import out_of_memory
from .passes import Jacobian, Map, Site

# Parts of the outputs that are looked at one by one.
MOST = 32


class Colour:
    """Some of the samples, and gradients that tell of each where it is."""

    def __init__(self, samples: tuple[slice, ...], signs: dict[int, Signs]) -> None:
        self.samples, self.signs = samples, signs  # by the numbers of nodes

    def joined(self, other: Colour) -> Colour:
        both = {k: t.joined(other.signs[k]) for k, t in self.signs.items() if k in other.signs}
        return Colour(self.samples + other.samples, {**self.signs, **other.signs, **both})

    def overlaps(self, other: Colour) -> bool:
        """Whether both have influence on the same number, or lie between each other"""
        if any(s.step not in (None, 1) for s in self.samples + other.samples):
            return True
        return any(bool((t.even * other.signs[k].even).any()) for k, t in self.signs.items() if k in other.signs)

    def reaches(self, number: int) -> bool:
        return number in self.signs and bool(self.signs[number].even.any())

    def place(self, site: Site, form: Form, tolerance: float) -> Place | None:
        try:
            signs = self.signs[site[0]].through(form.delta)
        except Exception as error:  # what was saved has been changed since
            if out_of_memory(error):
                raise
            return None
        return found_in(signs, form.dims, self.samples[0].step or 1, tolerance)


def find(J: Jacobian, walk: Walk) -> Map:
    """One colour if that will do. Otherwise parts of the outputs share one if they have no use in common; or nodes in
    which the samples cannot be told apart see none, as those of a network on a grid that all samples share."""
    forms, edges = _forms(uses_in(walk))
    found = best = _mapped(J, walk, forms, [_look(J, edges, slice(0, J.N))])
    parts = cuts(J.forward.graph.grad_fn, 0, J.N) if found.lost else []
    if 1 < len(parts) <= MOST:
        coloured = _mapped(J, walk, forms, _coloured([_look(J, edges, samples) for samples in parts]))
        best = min(found, coloured, key=lambda m: len(_lost(walk, m)))
    for _ in range(MOST if _lost(walk, best) else 0):
        uses = uses_in(walk, found.stops, found.blind)
        blind = found.blind | {use.number for use in uses if use.alone and use.site in found.lost}
        if blind == found.blind:
            break
        forms, edges = _forms(uses_in(walk, None, blind))
        found = _mapped(J, walk, forms, [_look(J, edges, slice(0, J.N))], blind)
        best = min(best, found, key=lambda m: len(_lost(walk, m)))
    return best


def _lost(walk: Walk, found: Map) -> set[int]:
    """The parameters with a use that cannot be read"""
    return {i for use in uses_in(walk, found.stops, found.blind) if use.site in found.lost for i in use.params}


def _forms(uses: Sequence[Use]) -> tuple[dict[Site, Form], dict[int, GradientEdge]]:
    """Of the uses that have a rule; and their edges, by the numbers of the nodes"""
    forms: dict[Site, Form] = {}
    edges: dict[int, GradientEdge] = {}
    for use in uses:
        try:
            forms[use.site], edges[use.number] = use.form(), use.edge
        except Misfit:
            continue
    return forms, edges


def _coloured(parts: Sequence[Colour]) -> list[Colour]:
    colours: list[Colour] = []
    for part in parts:
        free = next((i for i, colour in enumerate(colours) if not colour.overlaps(part)), None)
        if free is None:
            colours.append(part)
        else:
            colours[free] = colours[free].joined(part)
    return colours


def _look(J: Jacobian, edges: Mapping[int, GradientEdge], samples: slice) -> Colour:
    """Three backward passes, of a random sum of the rows of each sample."""
    if not edges:
        return Colour((samples,), {})
    cotangent = J.cotangent(J.random())
    mask = torch.zeros(J.N, dtype=cotangent.dtype, device=cotangent.device)
    mask[samples] = 1
    count, labels = torch.arange(1, J.N + 1, dtype=mask.dtype, device=mask.device), J.random(1)[0]
    shape = [-1] + [1] * (cotangent.ndim - 1)
    passes = [J.gradients(list(edges.values()), cotangent * w.view(shape)) for w in (mask, mask * count, mask * labels)]
    signs = {
        k: Signs(even, rising, labelled, labels)
        for k, even, rising, labelled in zip(edges, *passes, strict=True)
        if even is not None and rising is not None and labelled is not None
    }
    return Colour((samples,), signs)


def _mapped(
    J: Jacobian, walk: Walk, forms: Mapping[Site, Form], colours: Sequence[Colour], blind: frozenset[int] = frozenset()
) -> Map:
    """What the gradients of these colours tell."""
    tolerance = tolerances.of_rules(J.forward.coarsest)
    places: list[dict[Site, Place]] = [{} for _ in colours]
    missing: set[Site] = set()
    for colour, found in zip(colours, places, strict=True):
        for site, form in ((s, form) for s, form in forms.items() if colour.reaches(s[0])):
            place = colour.place(site, form, tolerance)
            if place is None:
                missing.add(site)
            else:
                found[site] = place
    silent = [s for s in forms if any(s[0] in c.signs for c in colours) and not any(c.reaches(s[0]) for c in colours)]
    if len(colours) == 1:
        places[0] |= _guesses(J, forms, silent, places[0], colours[0])
    missing |= {site for site in silent if site not in places[0]}
    stops = frozenset(number for found in places for number, _ in found)
    sites = {use.site for use in uses_in(walk, stops, blind)}
    lost = frozenset(sites & missing | sites - set(forms))
    return Map(stops, blind, tuple(c.samples for c in colours), tuple(places), lost)


def _guesses(
    J: Jacobian, forms: Mapping[Site, Form], silent: Sequence[Site], places: Mapping[Site, Place], colour: Colour
) -> dict[Site, Place]:
    """Of uses without a gradient as yet: the place in another use of the same shape, or by size."""
    shapes = {s: forms[s].delta(colour.signs[s[0]].even[None]).shape[1:] for s in [*silent, *places] if silent}
    found: dict[Site, Place] = {}
    for site in silent:
        like = (p for s, p in places.items() if (shapes[s], forms[s].dims) == (shapes[site], forms[site].dims))
        place = next(like, None) or guessed(shapes[site], forms[site].dims, J.N)
        found |= {} if place is None else {site: place}
    return found


# --- A place from the gradients that tell the samples apart.


class Signs(NamedTuple):
    """A gradient three times: of all samples alike, of sample n taken n + 1 times, and taken `labels[n]` times."""

    even: Tensor
    rising: Tensor
    labelled: Tensor
    labels: Tensor  # (N,)

    def joined(self, other: Signs) -> Signs:
        """Of the samples of both"""
        even, rising, labelled = (mine + its for mine, its in zip(self[:3], other[:3], strict=True))
        return Signs(even, rising, labelled, self.labels)

    def through(self, delta: Callable[[Tensor], Tensor]) -> Signs:
        """What becomes of them on the way to an input: (1, …) → (1, …)"""
        even, rising, labelled = (delta(t[None])[0] for t in self[:3])
        return Signs(even, rising, labelled, self.labels)


def found_in(signs: Signs, dims: Sequence[int], step: int, tolerance: float) -> Place | None:
    """The place of the samples in one of these dimensions: where one sample alone has influence, what is taken n times
    is n times as much."""
    even, _, labelled, labels = signs
    ways: list[int | None] = [*sorted(dims, key=lambda d: even.shape[d] != len(labels)), None]
    for dim in ways:
        shape = [even.shape[d] if d == dim else 1 for d in range(even.ndim)]
        for place in _candidates(signs, dim, shape, step):
            expected = even * labels[place.numbers(math.prod(shape), len(labels))].view(shape)
            if bool((labelled - expected).norm() <= tolerance * labelled.norm()):
                return place
    return None


def _candidates(signs: Signs, dim: int | None, shape: Sequence[int], step: int) -> Iterator[Place]:
    """All samples, if there is room for them; and what agrees with the numbers that can be read."""
    D, N = math.prod(shape), len(signs.labels)
    if dim is not None and D % N == 0:
        yield Place(dim, 0, ALL)
        yield Place(dim, 0, ALL, apart=True)
    even = signs.even.conj()  # complex behind a Fourier transform
    product, square = ((even * t).real.sum_to_size(shape).flatten() for t in (signs.rising, signs.even))
    known = square > 0
    numbers = (product[known] / square[known]).round().long() - 1
    if not len(numbers):
        return
    index = torch.arange(D, device=known.device)[known]
    if dim is None:
        yield from [Place(None, int(numbers[0]), 1)] if 0 <= int(numbers[0]) < N else []
        return
    for M in (M for M in range(min(D, N), 0, -1) if D % M == 0):  # many samples first
        for apart in (False, True):
            offset = numbers - step * (index % M if apart else index // (D // M))
            start = int(offset[0])
            if bool((offset == start).all()) and 0 <= start < N - step * (M - 1):
                yield Place(dim, start, M, step, apart)


def guessed(shape: Sequence[int], dims: Sequence[int], N: int) -> Place | None:
    """By size alone, if there is no gradient yet."""
    return next((Place(d, 0, ALL) for d in dims if shape[d] == N), None)


# --- Parts of the samples that may share rows of a layer: where the outputs were put together.


def cuts(node: Node, start: int, size: int) -> list[slice]:
    """Of samples start, …, start + size − 1, which are the first dimension of the node's output: those of each of the
    tensors that were joined; one slice if they were not."""
    while node is not None and _size(node) == size:
        children = [child for child, _ in node.next_functions]
        if node.name() == "CatBackward0" and node._saved_dim in (0, 2**64 - len(node._input_metadata[0].shape)):
            return _joined(children, start, size)
        (first, *_) = children or [None]
        if node.name() in FLATTENING and first is not None and _size(first) != size:
            return _flattened(first, start, size)
        node = next((child for child in children if child is not None and _size(child) == size), first)
    return [slice(start, start + size)]


FLATTENING = {"ReshapeAliasBackward0", "UnsafeViewBackward0", "ViewBackward0"}


def _joined(children: list[Node], start: int, size: int) -> list[slice]:
    sizes = [None if child is None else _size(child) for child in children]
    if sizes.count(None) > 1:  # constants of sizes that cannot be told
        return [slice(start, start + size)]
    rest = size - sum(s for s in sizes if s is not None)
    found: list[slice] = []
    for child, length in zip(children, (rest if s is None else s for s in sizes), strict=True):
        found += [slice(start, start + length)] if child is None else cuts(child, start, length)
        start += length
    return found


def _flattened(node: Node, start: int, size: int) -> list[slice]:
    """(k, n) or (n, k) → (k·n,): one part after the other, or in turns"""
    first = _size(node) or size
    if size % first == 0 and first * first <= size:
        return [slice(s, s + size // first) for s in range(start, start + size, size // first)]
    second = size // first
    return [slice(start + i, start + size, second) for i in range(second)]


def _size(node: Node) -> int | None:
    """Of the first dimension of the node's output"""
    if node.name() == LEAF:
        return None
    shape = node._input_metadata[0].shape
    return shape[0] if shape else None
