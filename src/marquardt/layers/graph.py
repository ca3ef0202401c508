"""Rows of parameters that no rule of a layer covers: from their uses in the graph of z, with a rule for each kind of
node; or, slower and always right, from backward passes for the rows themselves."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.func import vjp, vmap
from torch.utils._pytree import tree_map

from ..model.anatomy import call_with
from ..model.batch import leaves, opaque, wide, widened
from ..surroundings import out_of_memory
from .blocks import SLAB, Bilinear, Block, Explicit, Lookup, Nothing, cached_rows
from .capture import LEAF, PICKING, Misfit, Node, Place, Walk, convolution, shape_at

# --- What the nodes of an autograd graph make of a tensor V at one of their inputs: a rule for each kind of node. A
# rule reads what its node has saved for the backward pass: so these are the very numbers of the forward pass, masks
# of Dropout included, and the products of a backward pass within the model are nodes like all others.


Shape = Sequence[int]


class Outer(NamedTuple):
    """V multiplies: its gradient is Σ δ ⊗ a over the leading dimensions."""

    a: Callable[[], Tensor]  # (*lead, G, I)
    delta: Callable[[Tensor], Tensor]  # (R, *output) → (R, *lead, G, O)
    dims: Sequence[int] = (0,)  # leading dimensions, in which the samples may be
    turned: bool = False  # V is (G, I, O), not (G·O, I)


class Spread(NamedTuple):
    """V is broadcast to the output: its gradient is the sum over where it was broadcast."""

    delta: Callable[[Tensor], Tensor]  # (R, *output) → (R, *output): gradient of every element
    shape: Shape  # of V, with ones for the dimensions that it lacks

    @property
    def dims(self) -> Sequence[int]:
        return [d for d, size in enumerate(self.shape) if size == 1]


class Picked(NamedTuple):
    """V is a table, whose rows are picked."""

    rows: Callable[[], Tensor]  # (*lead)
    delta: Callable[[Tensor], Tensor]  # (R, *output) → (R, *lead, E)
    dims: Sequence[int]


Form = Outer | Spread | Picked


Rule = Callable[
    [Any, int, Shape, Shape], "Form | None"
]  # of a node, an input of it, and the shapes of that and of the output


def products(left: str, right: str, *, added: bool = False, groups: bool = False) -> Rule:
    """Y = αAB + βC, or AB alone, (*, J, K) (*, K, L), V one of them. With a product for every group, these come first
    in V, and last among the dimensions of a and δ."""

    def rule(node: Any, slot: int, V: Shape, out: Shape) -> Form:
        if added and slot == 0:
            return Spread(lambda delta: _times(delta, node._saved_beta), _aligned(V, out))
        of_left, factor = slot == int(added), node._saved_alpha if added else 1
        other = f"_saved_{right if of_left else left}"

        def matrices(t: Tensor, first: int) -> Tensor:
            t = t.mT if of_left else t  # every column of Y is a position
            return t.transpose(first, first + 1) if groups else t[..., None, :]

        return Outer(
            lambda: matrices(getattr(node, other), 0), lambda delta: matrices(_times(delta, factor), 1),
            turned=not of_left,
        )  # fmt: skip

    return rule


def mv(node: Any, slot: int, V: Shape, out: Shape) -> Form | None:
    """y = Av"""
    if slot == 0:
        return None
    return Outer(lambda: node._saved_self[:, None, :], lambda delta: delta[..., None, None])


def broadcast(at_input: Callable[[Any, int, Tensor], Tensor], slots: Collection[int] = (0, 1)) -> Rule:
    """V is one of these inputs, with the gradient `at_input` of every element of the output"""
    return lambda node, slot, V, out: Spread(partial(at_input, node, slot), _aligned(V, out)) if slot in slots else None


def sums(sign: int) -> Rule:
    """Y = A ± αB"""
    return broadcast(lambda node, slot, delta: _times(delta, sign * node._saved_alpha if slot else 1))


def quotient(node: Any, slot: int, delta: Tensor) -> Tensor:
    other: Tensor = node._saved_other
    return -delta * (node._saved_self / other**2) if slot else delta / other


def normalisation(node: Any, slot: int, delta: Tensor) -> Tensor:
    """y = x̂∘γ + β"""
    normalised: Tensor = (node._saved_input - node._saved_result1) * node._saved_result2
    return delta * normalised if slot == 1 else delta


def choice(node: Any, slot: int, delta: Tensor) -> Tensor:
    condition: Tensor = node._saved_condition
    return torch.where(~condition if slot else condition, delta, 0)


def expand(node: Any, slot: int, V: Shape, out: Shape) -> Form | None:
    aligned = _aligned(V, out)
    fits = all(v in (1, o) for v, o in zip(aligned, out, strict=True))
    return Spread(lambda delta: delta, aligned) if fits else None


def lookup(node: Any, slot: int, V: Shape, out: Shape) -> Form | None:
    if node._saved_scale_grad_by_freq:
        return None
    padding = node._saved_padding_idx

    def at_output(delta: Tensor) -> Tensor:
        # None is saved as −1, as a number without sign.
        return delta * (node._saved_indices != padding)[..., None] if 0 <= padding < V[0] else delta

    return Picked(lambda: node._saved_indices, at_output, range(len(out) - 1))


def convolve_back(node: Any, slot: int, V: Shape, out: Shape) -> Form | None:
    """The backward pass of a convolution to its input: what was δ there is a, and a is made of the δ of now"""
    if node._saved_transposed or slot != 2:
        return None
    return _in_patches(node, lambda: node._saved_grad_output)


def convolve(node: Any, slot: int, V: Shape, out: Shape) -> Form | None:
    if slot == 0:
        return None
    if slot == 2:
        return Spread(lambda delta: delta, (1, *V, *[1] * (len(out) - 2)))
    if node._saved_transposed:  # the same as the backward pass of a convolution
        return _in_patches(node, lambda: node._saved_input)
    operand = _patches(node, node._saved_input)
    return None if operand is None else Outer(operand.a, operand.delta)


def _in_patches(node: Any, inputs: Callable[[], Tensor]) -> Form:
    """An input for every place of a kernel, which spreads it over a patch of the output: there δ is seen"""

    def at_output(delta: Tensor) -> Tensor:
        found: Tensor = _patches(node, delta.flatten(0, 1)).a().unflatten(0, delta.shape[:2])
        return found

    return Outer(lambda: _patches(node, node._saved_input).delta(inputs()[None])[0], at_output, turned=True)


def _patches(node: Any, x: Tensor) -> Any:
    return convolution(
        x, node._saved_weight, None, node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_groups
    )


NODES: dict[str, Rule] = {
    "AddBackward0": sums(1),
    "AddmmBackward0": products("mat1", "mat2", added=True),
    "BaddbmmBackward0": products("batch1", "batch2", added=True, groups=True),
    "BmmBackward0": products("self", "mat2", groups=True),
    "ConvolutionBackward0": convolve,
    "ConvolutionBackwardBackward0": convolve_back,
    "DivBackward0": broadcast(quotient),
    "EmbeddingBackward0": lookup,
    "ExpandBackward0": expand,
    "MmBackward0": products("self", "mat2"),
    "MulBackward0": broadcast(lambda node, slot, delta: delta * (node._saved_self if slot else node._saved_other)),
    "MvBackward0": mv,
    "NativeLayerNormBackward0": broadcast(normalisation, (1, 2)),
    "PreluKernelBackward0": broadcast(lambda node, slot, delta: delta * node._saved_self.clamp(max=0), (1,)),
    "RepeatBackward0": expand,
    "SubBackward0": sums(-1),
    "WhereBackward0": broadcast(choice, (0, 1, 2)),
}

# Whether these see samples beside V no shape can tell: 2·V and x·V are the same node, and an expanded V may be a token
# for every sample, or a matrix for every derivative.
UNSURE = {"AddBackward0", "DivBackward0", "ExpandBackward0", "MulBackward0", "RepeatBackward0", "SubBackward0"}

# The same tensor again,
COPIES = {"AliasBackward0", "CloneBackward0"}

# and the same elements in the same order.
VIEWS = COPIES | {
    "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "SqueezeBackward3",
    "SqueezeBackward4", "SqueezeBackward5", "UnsafeViewBackward0", "UnsqueezeBackward0", "UnsqueezeBackward1",
    "ViewBackward0",
}  # fmt: skip


def _aligned(V: Shape, out: Shape) -> Shape:
    return (*[1] * (len(out) - len(V)), *V)


def _times(delta: Tensor, factor: Any) -> Tensor:
    return delta if factor == 1 else delta * factor


# --- Every node that makes something of a parameter and of samples is a use of it, with the rule of its kind.


@dataclass(frozen=True)
class Use:
    """A node of the graph with a tensor V among its inputs that is made of parameters alone."""

    number: int  # of the node
    node: Node
    slot: int
    source: GradientEdge  # V
    params: frozenset[int]  # what V is made of
    direct: bool  # V is one parameter with its elements in order, or transposed:
    turned: bool
    alone: bool  # nothing else that is differentiated goes into the node: it may see no samples at all

    @property
    def site(self) -> tuple[int, int]:
        return self.number, self.slot

    @property
    def edge(self) -> GradientEdge:
        return GradientEdge(self.node, 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the node's output"""
        return tuple(self.node._input_metadata[0].shape)

    @property
    def source_shape(self) -> tuple[int, ...]:
        return shape_at(self.source.node, self.source.output_nr)

    def form(self) -> Form:
        """What the rule of the node says."""
        name = self.node.name()
        others = [m for m in self.node._input_metadata[1:] if len(m.shape)]
        try:
            found = NODES[name](self.node, self.slot, self.source_shape, self.shape) if name in NODES else None
        except (AttributeError, RuntimeError) as error:  # nothing saved, or changed since, or another version of torch
            if out_of_memory(error):
                raise
            raise Misfit(str(error)) from error
        if found is None or not self.shape or others:
            raise Misfit(f"no rule for input {self.slot} of {name}")
        return found


def signature(walk: Walk, N: int) -> object:
    """All that decides what the uses are and where in them the samples, beside the structure."""
    return tuple((u.number, u.slot, tuple("N" if d == N else d for d in u.shape)) for u in uses_in(walk))


def uses_in(walk: Walk, stops: Collection[int] | None = None, blind: Collection[int] = ()) -> list[Use]:
    """The uses, if of the nodes that need not see samples `stops` do, and `blind` do not though they seem to. None:
    all that there might be."""
    made_of: dict[Node, frozenset[int]] = {}  # nodes whose outputs are made of parameters alone
    found: list[Use] = []
    for number, node in enumerate(walk.nodes):
        name, edges = node.name(), node.next_functions
        if name == LEAF:
            i = walk.index.get(id(node.variable))
            if i is not None or id(node.variable) in walk.others:
                made_of[node] = frozenset() if i is None else frozenset([i])
            continue
        inputs = [child for child, _ in edges if child is not None]
        alone = bool(inputs) and all(child in made_of for child in inputs)
        sure = name not in UNSURE and name not in PICKING and len(inputs) == len(edges)
        unsure = name in UNSURE and (stops is None or number not in stops)
        if alone and (sure or unsure or number in blind):
            made_of[node] = frozenset().union(*(made_of[child] for child in inputs))
            if stops is not None or sure or number in blind:
                continue
        for slot, (child, k) in enumerate(edges):
            if params := made_of.get(child):
                direct, turned = _chain(child)
                direct = direct and len(params) == 1
                found.append(Use(number, node, slot, GradientEdge(child, k), params, direct, turned, alone))
    return found


def _chain(node: Node) -> tuple[bool, bool]:
    """Whether only views lead to a leaf, and whether they transpose it: after that no view may come."""
    turned = seen = False
    while node.name() != LEAF:
        if _transposes(node) and not seen:
            turned = not turned
        elif node.name() in VIEWS:
            seen = seen or node.name() not in COPIES
        else:
            return False, False
        node = node.next_functions[0][0]
    return True, turned


def _transposes(node: Node) -> bool:
    """Whether it is one of the three ways to turn a matrix"""
    if len(node._input_metadata[0].shape) != 2:
        return False
    return node.name() in TURNING and tuple(getattr(node, "_saved_dims", ())) != (0, 1)


TURNING = {"PermuteBackward0", "TBackward0", "TransposeBackward0"}


# --- J̃ is the sum over the uses.


def stacked(ranges: Sequence[tuple[Place, int]]) -> tuple[list[int], int]:
    """The first position of each range of samples with P positions, so that ranges of different samples share them; and
    the number of positions in all."""
    cuts = sorted({c for place, _ in ranges for c in (place.samples.start, place.samples.stop)})
    heights = dict.fromkeys(cuts, 0)
    offsets = []
    for place, P in ranges:
        over = [c for c in cuts if place.samples.start <= c < place.samples.stop]
        offset = max(heights[c] for c in over)
        heights.update(dict.fromkeys(over, offset + P))
        offsets.append(offset)
    return offsets, max(heights.values())


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
        kinds = {type(form) if g.use.direct else None for g, form in zip(glimpses, forms, strict=True)}
        if kinds == {Picked}:
            return _lookup(p, glimpses, forms, N)
        if kinds == {Outer}:
            return _bilinear(p, glimpses, forms, N)
        return Explicit([p], _explicit(p, glimpses, forms, R, N), N)
    except Exception as error:  # not saved, changed since, or of shapes that do not fit together
        if out_of_memory(error):
            raise
        raise Misfit(str(error)) from error


def _bilinear(p: Tensor, glimpses: Sequence[Glimpse], forms: Sequence[Form], N: int) -> Block:
    """Uses by the same samples stand at different positions, uses by different samples share them. In y = gW a and δ
    change roles: a then differs from row to row, and every row counts as that of another sample."""
    places = [g.place for g in glimpses]
    changed = [isinstance(form, Outer) and form.turned != g.use.turned for g, form in zip(glimpses, forms, strict=True)]
    inputs, deltas = [], []
    for (_, place, delta), form, swaps in zip(glimpses, forms, changed, strict=True):
        a, d = _factors(form, place, delta, wide(p.dtype))
        a = a.expand(len(d), *a.shape) if any(changed) else a[None]  # (R, M, P, G, I), or one for all rows
        inputs.append(d if swaps else a)
        deltas.append(a if swaps else d)
    a, d = _joined(inputs, places, N, 1).detach(), _joined(deltas, places, N, 1).detach()
    if a[0, 0, 0].numel() * d.shape[-1] != p.numel():
        raise Misfit("a and δ are not those of a weight of this size")
    block = Bilinear(a[0], d, p, None) if len(a) == 1 else Bilinear(a.flatten(0, 1), d.flatten(0, 1)[None], p, None)
    block.gathered, block.by_rows = True, 0 if len(a) == 1 else N
    return cached_rows(block)


def _lookup(p: Tensor, glimpses: Sequence[Glimpse], forms: Sequence[Form], N: int) -> Lookup:
    index, deltas = [], []
    for (_, place, delta), form in zip(glimpses, forms, strict=True):
        assert isinstance(form, Picked)
        index.append(place(form.rows(), 0).flatten(1))  # (M, P)
        deltas.append(place(form.delta(widened(delta)), 1).flatten(2, -2))  # (R, M, P, E)
    places = [g.place for g in glimpses]
    table = Lookup(_joined(index, places, N, 0), _joined(deltas, places, N, 1), p)
    table.gathered = True
    return table


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


def _factors(form: Form, place: Place, delta: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
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
        a, d = _factors(form, place, delta, dtype)
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


# --- Rows for parameters that the graph does not show either: always right, slower. Fastest first.


# Numbers that the cotangents of one batched backward pass may hold: 64 MiB in float32.
BATCH = 1 << 24

Call = Callable[[Callable[..., Any], Any], Tensor]  # of a model and its inputs


def rows_by_vmap(model: torch.nn.Module, params: Sequence[Tensor], call: Call, inputs: Any, S: Tensor) -> Tensor:
    """Every sample by itself, all at once: (m, n). The model must treat the samples alike and independently."""
    R, N = S.shape[:2]
    dims = _dims(inputs, N)
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


def rows_in_parts(model: torch.nn.Module, params: Sequence[Tensor], call: Call, inputs: Any, S: Tensor) -> Tensor:
    """A few samples at a time, each with its own forward pass: (m, n). The samples must be independent, the model not
    random. A backward pass for one row goes through all samples of its forward pass: the fewer, the less is wasted."""
    R, N = S.shape[:2]
    dims = _dims(inputs, N)
    size = max(8, round(N**0.5))  # as many parts as samples in a part: neither the calls nor the waste dominate
    pieces = []
    for first in range(0, N, size):
        part = slice(first, first + size)
        with torch.enable_grad():
            z = call(model, tree_map(lambda t, d, i=part: t[i] if d == 0 else t, inputs, dims))
        pieces.append(rows_one_by_one(z, params, S[:, part]).unflatten(0, (R, -1)))
    return torch.cat(pieces, 1).flatten(0, 1)


def _dims(inputs: Any, N: int) -> Any:
    """0 for every tensor with a row for each sample, None for others. With an object that goes along whole, every part
    would be the whole batch: right for one sample only."""
    if any(opaque(t) for t in leaves(inputs)):
        raise Misfit("the inputs cannot be cut into samples")
    return tree_map(lambda t: 0 if isinstance(t, Tensor) and t.ndim and len(t) == N else None, inputs)


def rows_one_by_one(z: Tensor, params: Sequence[Tensor], S: Tensor, batched: bool = True) -> Tensor:
    """A cotangent for every row: (m, n). Nothing is assumed of the model. Many of them go in one backward pass, or each
    in its own, for what even batched gradients refuse."""
    R, N = S.shape[:2]
    size = max(1, BATCH // z.numel()) if batched else 1
    pieces = []
    for index in torch.arange(R * N, device=z.device).split(size):
        rows = len(index)
        single = S.new_zeros(rows, *z.shape)
        single[torch.arange(rows, device=z.device), index % N] = S.flatten(0, 1)[index]
        single = single if batched else single[0]
        grads = torch.autograd.grad(z, params, single, retain_graph=True, is_grads_batched=batched, allow_unused=True)
        pairs = zip(grads, params, strict=True)
        flat = [p.new_zeros(rows, p.numel()) if g is None else g.to_dense().reshape(rows, -1) for g, p in pairs]
        pieces.append(torch.cat(flat, 1))
    return torch.cat(pieces)
