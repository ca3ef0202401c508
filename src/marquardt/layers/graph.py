"""The graph of z, walked from the outputs to the parameters: every node that makes something of a parameter and of
samples is a use of it, with the rule of its kind."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..memory import out_of_memory
from .nodes import COPIES, NODES, PICKING, UNSURE, VIEWS, Form
from .watch import Misfit

Node = Any  # torch's own type does not know the names of what is saved


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
        return _shape(self.source)

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


class Walk:
    """All nodes behind z, each after those that it leads to."""

    def __init__(
        self, z: Tensor, params: Sequence[Tensor], others: Iterable[Tensor] = (), index: dict[int, int] | None = None
    ) -> None:
        self.index = {id(p): i for i, p in enumerate(params)} if index is None else index
        self._held = others
        self.root: tuple[Node, int] = (z.grad_fn, z.output_nr)
        self.nodes: list[Node] = []
        self._read()

    @cached_property
    def others(self) -> set[int]:
        """Leaves that depend on no sample either"""
        return {id(p) for p in self._held}

    def _read(self) -> None:
        """Every step reads the whole graph: so this is one loop, that calls nothing it need not."""
        index, nodes = self.index, self.nodes
        kinds: list[object] = [self.root[1]]  # what each node does, with what, in their order
        sizes: list[object] = []  # dimensions and sizes that they have noted
        edges_of: dict[Node, Any] = {}
        numbers: dict[Node | None, int] = {None: -1}
        number = 0
        stack = [node for node in self.root[:1] if node is not None]  # the outputs may be a parameter itself
        while stack:
            node = stack[-1]
            if node not in edges_of:
                edges = edges_of[node] = node.next_functions
                if edges:
                    for child, _ in edges:
                        if child is not None and child not in edges_of:
                            stack += (child,)
                    continue
            del stack[-1]
            if node in numbers:
                continue
            edges = edges_of[node]
            numbers[node] = number
            number += 1
            nodes += (node,)
            kind = node.__class__
            if kind in NOTED:
                noted = NOTED[kind]
            else:
                kind, noted = _noted(node)
            kinds += (kind,)
            for child, k in edges:
                kinds += ((numbers[child], k) if k else numbers[child],)
            for name in noted:
                value = getattr(node, name)
                if value.__class__ is not float:
                    sizes += (repr(value) if value.__class__ is list else value,)
            if kind is LEAF_NODE:
                variable = id(node.variable)
                kinds += (index[variable] if variable in index else -1,)
        # Numbers for all of it: of the sizes without what is in the tensors.
        self.structure, self.sizes = hash(tuple(kinds)), hash(tuple(sizes))

    def signature(self, N: int) -> object:
        """All that decides what the uses are and where in them the samples, beside the structure."""
        return tuple((u.number, u.slot, tuple("N" if d == N else d for d in u.shape)) for u in self.uses())

    def uses(self, stops: Collection[int] | None = None, blind: Collection[int] = ()) -> list[Use]:
        """The uses, if of the nodes that need not see samples `stops` do, and `blind` do not though they seem to. None:
        all that there might be."""
        made_of: dict[Node, frozenset[int]] = {}  # nodes whose outputs are made of parameters alone
        found: list[Use] = []
        for number, node in enumerate(self.nodes):
            name, edges = node.name(), node.next_functions
            if name == LEAF:
                i = self.index.get(id(node.variable))
                if i is not None or id(node.variable) in self.others:
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
            found += [
                self._use(number, slot, GradientEdge(child, k), made_of[child], alone)
                for slot, (child, k) in enumerate(edges)
                if made_of.get(child)
            ]
        return found

    def _use(self, number: int, slot: int, source: GradientEdge, params: frozenset[int], alone: bool) -> Use:
        direct, turned = _chain(source.node)
        return Use(number, self.nodes[number], slot, source, params, direct and len(params) == 1, turned, alone)


LEAF = "torch::autograd::AccumulateGrad"
LEAF_NODE: Any = get_gradient_edge(torch.empty(0, requires_grad=True)).node.__class__

# By the class of a node: what it has noted beside tensors, which to read would unpack, and beside factors.
NOTED: dict[type, list[str]] = {}
FACTORS = ("_alpha", "_beta", "_dtype", "_layout", "_options", "_scale", "_strides")


def _noted(node: Node) -> tuple[object, list[str]]:
    """Its kind, and the names of that; classes of functions of one's own may be made anew in every step."""
    kind = type(node)
    if issubclass(kind, torch.autograd.function.BackwardCFunction) or kind.__name__ == "CppFunction":
        return node.name(), []
    names = [name for name in dir(kind) if name.startswith("_saved_") and not hasattr(kind, f"_raw{name}")]
    plain = (name for name in names if isinstance(getattr(node, name, set()), (Hashable, list)))
    NOTED[kind] = [name for name in plain if not name.endswith(FACTORS)]
    return kind, NOTED[kind]


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


def _shape(edge: GradientEdge) -> tuple[int, ...]:
    node: Node = edge.node
    if node.name() == LEAF:
        return tuple(node.variable.shape)
    return tuple(node._input_metadata[edge.output_nr].shape)
