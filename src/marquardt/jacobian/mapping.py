"""Where the samples are in the uses of the parameters, found by gradients that tell the samples apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.autograd.graph import GradientEdge

from .. import tolerances
from ..layers.capture import Form, Misfit, Use, Walk
from ..layers.cuts import cuts
from ..layers.places import Place, Signs, found_in, guessed
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
    forms, edges = _forms(walk.uses())
    found = best = _mapped(J, walk, forms, [_look(J, edges, slice(0, J.N))])
    parts = cuts(J.forward.graph, J.N) if found.lost else []
    if 1 < len(parts) <= MOST:
        coloured = _mapped(J, walk, forms, _coloured([_look(J, edges, samples) for samples in parts]))
        best = min(found, coloured, key=lambda m: len(_lost(walk, m)))
    for _ in range(MOST if _lost(walk, best) else 0):
        uses = walk.uses(found.stops, found.blind)
        blind = found.blind | {use.number for use in uses if use.alone and use.site in found.lost}
        if blind == found.blind:
            break
        forms, edges = _forms(walk.uses(None, blind))
        found = _mapped(J, walk, forms, [_look(J, edges, slice(0, J.N))], blind)
        best = min(best, found, key=lambda m: len(_lost(walk, m)))
    return best


def _lost(walk: Walk, found: Map) -> set[int]:
    """The parameters with a use that cannot be read"""
    return {i for use in walk.uses(found.stops, found.blind) if use.site in found.lost for i in use.params}


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
    sites = {use.site for use in walk.uses(stops, blind)}
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
