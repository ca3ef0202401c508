"""Rules apply only where proven: the blocks of J̃ by the rules of layers and nodes, compared with plain autograd."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from .. import tolerances
from ..deferred import recording
from ..layers import Block, Explicit, Misfit, Nothing, assemble
from ..layers.apart import in_layout, sample_axes
from ..layers.graph import Use
from ..layers.unrolled import Refused
from ..layers.uses import Glimpse, block_of
from ..layers.watch import LAYOUTS, Layout, alone, grouped
from ..memory import out_of_memory
from ..model.checks import check_coupling
from ..model.parameters import flat
from .comparison import Comparison
from .jacobian import PATHS, Jacobian
from .known import Groups, Map, Proof, RowByRow
from .linearity import check_backward
from .mapping import find

# Blocks of up to this many columns are watched; for larger ones the proof on first use has to do.
GUARDED = 1_000_000

# To compare a piece with autograd once more costs a backward pass: one piece in so many is compared.
EVERY = 8

# Ways of calling the model whose proofs are kept, and of each kinds of passes that were compared.
KEPT, SEEN = 64, 1024


def blocks_of(J: Jacobian) -> tuple[list[Block], set[int] | None]:
    """The columns of J̃ by layer, and the parameters without influence; None if these rows cannot tell. Ranks that share
    the weights find the same, for they make the same passes."""
    known, model, records = J.forward.known, J.forward.objective.model, recording()
    J.shorten()
    groups, base = _grouped(J)
    signature = _with_uses(J, base)
    if not records:
        known.only_slopes = not J.forward.chance.drawn or _draws_slopes_only(J)
    proven = records or signature in known.proofs
    if J.ranks.several:
        proven = J.ranks.all(proven)
    if records and known.proof.map is not None and known.proofs.get(signature) is not known.proof:
        raise RuntimeError("the graph of the recorded pass is not the one that was proven")
    if not proven and J.ranks.all(not bool(J.S.any())):  # all weights are zero: that proves nothing
        return [Nothing(J.parameters.tensors, J.m, J.N)], None
    if not proven:
        check_coupling(model)
        _prove(J, base)
    elif not records:
        known.proof, known.proven = known.proofs[signature], signature
    try:
        blocks, influential = _without_inert(J, _blocks(J, groups))
        doubtful = proven and not records and (influential or not _plausible(J, blocks))
    except Exception as error:  # what was proven on other data may fail on these
        if not proven or records or out_of_memory(error) or J.ranks.several:
            raise
        doubtful = True
    if doubtful:
        check_backward(J.forward, again=True)
        old = known.proof
        _prove(J, base)
        if known.proof.same(old):  # near a minimum the gradient is all rounding
            known.proof.alarms = old.alarms + 1
            known.proof.quiet = EVERY * 2**known.proof.alarms
        blocks, _ = _without_inert(J, _blocks(J, groups))
    if not proven:
        known.differentiates = not J.ranks.all(J.forward.same_without_grad())
    return blocks, set(known.proof.inert)


def _grouped(J: Jacobian) -> tuple[Groups, object]:
    """Calls that share parameters, by these, and the signature: all that decides which code finds the rows, the calls
    of layers and the graph. In a batch of one sample every layout is right: what is proven there holds for no other."""
    forward, watch, known, N = J.forward, J.forward.watch, J.forward.known, J.N
    walk, kind = forward.walk, (J.R == 1, watch.unrolled, forward.coarsest, J.parameters.dtype)
    same = kind, forward.form.modes, forward.chance.drawn, forward.hooks
    way = walk.structure, walk.sizes, N, same, tuple(watch.ways)
    if way in known.ways:
        return known.ways[way]
    calls = watch.calls
    groups = {tuple(sorted({i for c in g for i in J.parameters.members(calls[c].params)})): g for g in grouped(calls)}
    fits = tuple(call.fits(N) for call in calls)
    pooled = tuple(call.kept is not None for call in calls)
    if len(known.ways) >= SEEN:
        known.ways.clear()
    known.ways[way] = found = groups, (walk.structure, tuple(groups), fits, N == 1, pooled, same)
    return found


def _with_uses(J: Jacobian, base: object) -> object:
    """And the uses in the graph, if rows come from these."""
    return (base, J.forward.walk.signature(J.N)) if base in J.forward.known.walks else base


def _blocks(J: Jacobian, groups: Groups) -> list[Block]:
    """The blocks of all parameters, each by the way that is proven for it."""
    calls, params, proof = J.forward.watch.calls, J.parameters.tensors, J.forward.known.proof
    if not proof.general and len(proof.layouts) == len(groups):
        return _by_rules(J, groups)
    wanted = [i for key, members in groups.items() if key in proof.layouts for i in members]
    indices = {i for i, path in proof.general.items() if path == "graph"}
    uses = [] if proof.map is None else _uses(J, proof.map, indices)
    ruled, seen = _deltas(J, wanted, uses, proof.map)
    blocks: list[Block] = []
    for key, layout in proof.layouts.items():
        members = groups.get(key, [])
        block = assemble([calls[i] for i in members], [ruled[i] for i in members], J.N, layout)
        blocks.append(block or Nothing([params[i] for i in key], J.m, J.N))
    glimpses = [] if proof.map is None else _glimpses(J, uses, proof.map, seen)
    blocks += [_by_graph(J, i, glimpses) for i in sorted(indices)]
    return blocks + _others(J)


def _by_rules(J: Jacobian, groups: Groups) -> list[Block]:
    """The blocks where every parameter has a rule."""
    calls, proof = J.forward.watch.calls, J.forward.known.proof
    deltas = J.at([call.edge for call in calls])
    blocks: list[Block] = []
    for key, layout in proof.layouts.items():
        members = groups[key]
        if len(members) == 1 and (delta := deltas[members[0]]) is not None:
            block: Block | None = alone(calls[members[0]].block(delta, J.N, layout))
            if block is not None and len(block.params) == len(key):
                block.members = key if len(key) == 1 or block.params[0] is J.parameters.tensors[key[0]] else None
        else:
            block = assemble([calls[i] for i in members], [deltas[i] for i in members], J.N, layout)
        blocks += (block or Nothing([J.parameters.tensors[i] for i in key], J.m, J.N),)
    return blocks


def _uses(J: Jacobian, where: Map, indices: Collection[int]) -> list[Use]:
    return [use for use in J.forward.walk.uses(where.stops, where.blind) if not use.params.isdisjoint(indices)]


def _deltas(
    J: Jacobian, calls: Sequence[int], uses: Sequence[Use], where: Map | None = None
) -> tuple[dict[int, Tensor | None], list[dict[int, Tensor]]]:
    """δ of these calls; and of these uses by the numbers of their nodes, for each colour of samples."""
    edges = {("call", i): J.forward.watch.calls[i].edge for i in calls}
    edges |= {("node", use.number): use.edge for use in uses}
    one = where is None or len(where.colours) == 1
    passes = [J.deltas(edges)] if one else [J.deltas(edges, samples) for samples in where.colours]  # type: ignore[union-attr]
    ruled = {i: _sum([found["call", i] for found in passes]) for i in calls}
    return ruled, [{k: d for (kind, k), d in p.items() if kind == "node" and d is not None} for p in passes]


def _sum(deltas: Sequence[Tensor | None]) -> Tensor | None:
    some = [d for d in deltas if d is not None]
    return sum(some[1:], some[0]) if some else None


def _glimpses(J: Jacobian, uses: Sequence[Use], where: Map, seen: Sequence[Mapping[int, Tensor]]) -> list[Glimpse]:
    return [
        Glimpse(use, places[use.site].of(J.N), deltas[use.number])
        for places, deltas in zip(where.places, seen, strict=True)
        for use in uses
        if use.site in places and use.number in deltas
    ]


def _by_graph(J: Jacobian, i: int, glimpses: Sequence[Glimpse]) -> Block:
    return block_of(J.parameters.tensors[i], [g for g in glimpses if i in g.use.params], J.R, J.N)


def _others(J: Jacobian) -> list[Block]:
    """The blocks of all other parameters."""
    blocks: list[Block] = []
    general = J.forward.known.proof.general
    for path in ("none", *PATHS):
        indices = [i for i in general if general[i] == path]
        some = [J.parameters.tensors[i] for i in indices]
        if indices and path == "none":
            blocks.append(Nothing(some, J.m, J.N))
        elif indices:
            blocks.append(Explicit(some, J.explicit(path, indices), J.N))
    return blocks


def _without_inert(J: Jacobian, blocks: list[Block]) -> tuple[list[Block], bool]:
    """The blocks, with zero in the columns of the parameters without influence, and whether one of them has some
    now: a bias before InstanceNorm may gain it through an activation between the two."""
    index, limits = J.parameters.index, J.forward.known.proof.inert
    if not limits and not J.ranks.several:
        return blocks, False
    found: list[Block] = []
    influential: list[Tensor] = []
    for block in blocks:
        inert = [p for p in block.params if index[id(p)] in limits]
        if not inert or block.empty:
            found.append(block)
            continue
        pulled = block.pull(J.random().flatten()).split([p.numel() for p in block.params])
        # The rows round in another way than a backward pass.
        influential += [
            t.norm() > 4 * limits[index[id(p)]]
            for p, t in zip(block.params, pulled, strict=True)
            if index[id(p)] in limits
        ]
        rest = block.without(inert)
        found += [*([] if rest is None else [rest]), Nothing(inert, J.m, J.N)]
    same = recording() or not influential or not bool(torch.stack(influential).any())
    return found, not J.ranks.all(same)


def _plausible(J: Jacobian, blocks: list[Block]) -> bool:
    """Whether a proof on earlier data still holds, for J̃ᵀw with a random w: in every pass that shows anything new, and
    in all where the numbers in the graph decide (samples sorted by length, routed to experts, multiplied by a matrix).
    """
    proof, index = J.forward.known.proof, J.parameters.index
    seen = J.forward.seen
    new = seen not in proof.seen
    if J.ranks.several:
        new = not J.ranks.all(not new)
    doubtful = new or not proof.seen[seen]
    if J.ranks.several:
        doubtful = not J.ranks.all(not doubtful)
    some = [] if proof.quiet and not doubtful else [b for b in blocks if doubtful or b.columns <= GUARDED]
    if not some:
        proof.quiet = max(0, proof.quiet - 1)
        return True
    if new:
        if len(proof.seen) >= SEEN:
            proof.seen.clear()
        proof.seen[seen] = _sure(J)
    proof.quiet = EVERY - 1
    w, tolerance = J.random(), tolerances.of_rules(J.forward.coarsest)
    wrong: list[Tensor] = []
    pairs: list[tuple[Tensor, Tensor, float]] = []  # how far off, how large, and what may be noise
    for part in _parts(J, [b.columns for b in some]):
        pulled = iter(J.forward.pull(J.cotangent(w), [p for k in part for p in some[k].params]))
        for b in (some[k] for k in part):
            true = [flat(next(pulled), p) for p in b.params]
            if b.empty:
                limits = [proof.inert.get(index[id(p)], 0.0) for p in b.params]
                wrong += [t.norm() > limit for t, limit in zip(true, limits, strict=True)]
            else:
                whole = torch.cat(true)
                noise = sum(proof.noise.get(index[id(p)], 0.0) for p in b.params)
                pairs.append(((b.pull(w.flatten()) - whole).norm(), whole.norm(), noise))
    if pairs:
        total = torch.stack([size for _, size, _ in pairs]).norm()
        wrong += [~(off <= tolerance * size + noise * total) for off, size, noise in pairs]
    return J.ranks.all(not bool(torch.stack(wrong).any()))


def _sure(J: Jacobian) -> bool:
    """Whether the samples are where the proof has them by the structure of the graph alone."""
    proof, forward = J.forward.known.proof, J.forward
    if forward.hooks:  # which may do something else the next time
        return False
    if J.N == 1:
        return True
    if not {"vmap", "parts"}.isdisjoint(proof.general.values()):  # these take single samples for all that there is
        return False
    axes = sample_axes(forward.walk, J.N)
    for group in grouped(forward.watch.calls):
        calls = [forward.watch.calls[i] for i in group]
        layout = proof.layouts.get(tuple(sorted({i for c in calls for i in J.parameters.members(c.params)})))
        for edge in (call.edge for call in calls):
            place = edge.node, edge.output_nr
            if layout is not None and place in axes and not in_layout(layout, axes[place], edge, J.N):
                return False
    indices = {i for i, path in proof.general.items() if path == "graph"}
    uses = [] if proof.map is None else _uses(J, proof.map, indices)
    return all(axes.get((use.node, 0)) is not None for use in uses)


def _parts(J: Jacobian, sizes: Sequence[int]) -> list[list[int]]:
    """What is compared at once."""
    return J.forward.objective.parameters.portions(sizes)


def _draws_slopes_only(J: Jacobian) -> bool:
    """Whether all random numbers of the forward pass are slopes of RReLU."""
    before, after = J.forward.before, J.forward.after
    if before.cuda is None:
        return False
    state: Tensor | None = before.cuda
    for slopes in J.forward.slopes:
        if state is None or slopes.started is None or not torch.equal(state, slopes.started):
            return False
        state = slopes.state
    return state is not None and after.cuda is not None and torch.equal(state, after.cuda)


def _prove(J: Jacobian, base: object) -> None:
    """J̃ᵀw from the rows must equal Jᵀ(Sw) from plain autograd.

    Every group of layers is judged by itself. The proof is not kept while a gradient is zero, as behind a layer
    that starts at zero: there a wrong rule could pass.
    """
    known = J.forward.known
    proof = known.proof = Proof()
    known.proven = None
    known.proofs.pop(_with_uses(J, base), None)
    comparison = Comparison(J, any(other.inert for other in known.proofs.values()))
    _prove_rules(J, proof, comparison)
    covered = {i for key in proof.layouts for i in key}
    rest = [i for i in range(len(J.parameters)) if i not in covered]
    for part in _parts(J, [J.parameters.sizes[i] for i in rest]):
        comparison.look([rest[k] for k in part])
    proof.general.update({i: "none" for i in rest if J.ranks.all(i in comparison.unused)})
    rest = [i for i in rest if i not in proof.general]
    if J.ranks.several and rest:
        raise ValueError(
            f"the rows of parameter {J.parameters.names[rest[0]]!r} cannot be found by a rule of its layer, and other "
            "ways need all of the model on one rank: LM takes sharded parameters of linear layers, convolutions, "
            "embeddings and normalisations whose samples can be told; pass the plain model, or leave it out by params="
        )
    _prove_graph(J, proof, comparison, rest)
    _prove_paths(J, proof, comparison, [i for i in rest if i not in proof.general])
    comparison.end()
    proof.inert, proof.seen[J.forward.seen] = comparison.inert, _sure(J)
    if comparison.noise is not None and not J.ranks.several:
        total = float(torch.stack([t.norm() for t in comparison.true.values()]).norm())
        proof.noise = {i: float(noise) / total for i, noise in comparison.noise.items() if total}
    if J.ranks.all(not comparison.zeros):
        if proof.map is not None:
            known.walks.add(base)
        if len(known.proofs) >= KEPT:
            known.proofs.clear()
        known.proven = signature = _with_uses(J, base)
        known.proofs[signature] = proof


def _prove_rules(J: Jacobian, proof: Proof, comparison: Comparison) -> None:
    """The layout of every group of calls, if one is right."""
    calls = J.forward.watch.calls
    deltas, _ = _deltas(J, range(len(calls)), [])
    groups = grouped(calls)
    keys = [tuple(sorted({i for c in g for i in J.parameters.members(calls[c].params)})) for g in groups]
    for part in _parts(J, [sum(J.parameters.sizes[i] for i in key) for key in keys]):
        comparison.look([i for k in part for i in keys[k]])
        for key, members in ((keys[k], groups[k]) for k in part):
            some = [calls[i] for i in members]
            found: dict[Layout, Block | None] = {}
            for layout in LAYOUTS:
                try:
                    block = assemble(some, [deltas[i] for i in members], J.N, layout)
                    found[layout] = block or Nothing([J.parameters.tensors[i] for i in key], J.m, J.N)
                except Misfit:
                    found[layout] = None
            right = comparison.first(found)
            if right is not None:
                proof.layouts[key] = right


def _prove_graph(J: Jacobian, proof: Proof, comparison: Comparison, rest: list[int]) -> None:
    """Those of the parameters without a rule whose uses the graph shows, each by itself."""
    if not rest:
        return
    where = find(J, J.forward.walk)
    uses = _uses(J, where, rest)
    glimpses = _glimpses(J, uses, where, _deltas(J, [], uses, where)[1])
    lost = {i for use in uses if use.site in where.lost for i in use.params}
    for i in (i for i in rest if i not in lost):
        try:
            block = _by_graph(J, i, glimpses)
        except Misfit:
            continue
        if comparison.first({"graph": block}) is not None:
            proof.general[i], proof.map = "graph", where


def _prove_paths(J: Jacobian, proof: Proof, comparison: Comparison, rest: list[int]) -> None:
    """The fastest general path that is right for the parameters without a rule."""
    for path in PATHS if rest else ():
        if J.forward.watch.unrolled and path in ("rows", "loop"):
            raise Refused("these paths need a graph of torch's own")
        if J.forward.known.may_join and J.N > 1 and path in ("rows", "loop"):
            raise RowByRow(f"the rows of {J.N} samples take a backward pass each")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                block = Explicit([J.parameters.tensors[i] for i in rest], J.explicit(path, rest), J.N)
        except Exception as error:  # torch.func and vmap refuse models in many ways
            if path == "loop" or out_of_memory(error):
                raise
            continue
        if path == "loop" or comparison.first({path: block}) is not None:
            proof.general.update(dict.fromkeys(rest, path))
            break
