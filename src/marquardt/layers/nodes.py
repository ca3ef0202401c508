"""What the nodes of an autograd graph make of a tensor V at one of their inputs: a rule for each kind of node.

A rule reads what its node has saved for the backward pass: so these are the very numbers of the forward pass, masks of
Dropout included, and the products of a backward pass within the model are nodes like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .rules import convolution

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


def _product(left: Callable[[], Tensor], right: Callable[[], Tensor], of_left: bool, factor: float = 1) -> Outer:
    """Y = AB (*, J, K) (*, K, L), V one of the two"""
    if of_left:  # every column of Y is a position
        return Outer(lambda: right().mT[..., None, :], lambda delta: _times(delta.mT, factor)[..., None, :])
    return Outer(lambda: left()[..., None, :], lambda delta: _times(delta, factor)[..., None, :], turned=True)


def mm(node: Any, slot: int, V: Shape, out: Shape) -> Form:
    return _product(lambda: node._saved_self, lambda: node._saved_mat2, slot == 0)


def addmm(node: Any, slot: int, V: Shape, out: Shape) -> Form:
    if slot == 0:
        return _spread(lambda delta: _times(delta, node._saved_beta), V, out)
    return _product(lambda: node._saved_mat1, lambda: node._saved_mat2, slot == 1, node._saved_alpha)


def bmm(node: Any, slot: int, V: Shape, out: Shape) -> Form:
    """A product for every group: the groups come first in V, and last among the dimensions of a and δ"""
    return _groups(lambda: node._saved_self, lambda: node._saved_mat2, slot == 0)


def baddbmm(node: Any, slot: int, V: Shape, out: Shape) -> Form:
    if slot == 0:
        return _spread(lambda delta: _times(delta, node._saved_beta), V, out)
    return _groups(lambda: node._saved_batch1, lambda: node._saved_batch2, slot == 1, node._saved_alpha)


def _groups(left: Callable[[], Tensor], right: Callable[[], Tensor], of_left: bool, factor: float = 1) -> Outer:
    if of_left:
        return Outer(lambda: right().permute(2, 0, 1), lambda delta: _times(delta, factor).permute(0, 3, 1, 2))
    return Outer(lambda: left().transpose(0, 1), lambda delta: _times(delta, factor).transpose(1, 2), turned=True)


def mv(node: Any, slot: int, V: Shape, out: Shape) -> Form | None:
    """y = Av"""
    if slot == 0:
        return None
    return Outer(lambda: node._saved_self[:, None, :], lambda delta: delta[..., None, None])


def add(node: Any, slot: int, V: Shape, out: Shape) -> Form:
    return _spread(lambda delta: _times(delta, node._saved_alpha if slot else 1), V, out)


def sub(node: Any, slot: int, V: Shape, out: Shape) -> Form:
    return _spread(lambda delta: _times(delta, -node._saved_alpha if slot else 1), V, out)


def mul(node: Any, slot: int, V: Shape, out: Shape) -> Form:
    return _spread(lambda delta: delta * (node._saved_self if slot else node._saved_other), V, out)


def div(node: Any, slot: int, V: Shape, out: Shape) -> Form:
    def at_input(delta: Tensor) -> Tensor:
        other: Tensor = node._saved_other
        return -delta * (node._saved_self / other**2) if slot else delta / other

    return _spread(at_input, V, out)


def expand(node: Any, slot: int, V: Shape, out: Shape) -> Form | None:
    aligned = _aligned(V, out)
    return _spread(lambda delta: delta, V, out) if all(v in (1, o) for v, o in zip(aligned, out, strict=True)) else None


def where(node: Any, slot: int, V: Shape, out: Shape) -> Form:
    def at_input(delta: Tensor) -> Tensor:
        condition: Tensor = node._saved_condition
        return torch.where(~condition if slot else condition, delta, 0)

    return _spread(at_input, V, out)


def prelu(node: Any, slot: int, V: Shape, out: Shape) -> Form | None:
    """y = x where x > 0, w·x elsewhere"""
    return _spread(lambda delta: delta * node._saved_self.clamp(max=0), V, out) if slot == 1 else None


def normalisation(node: Any, slot: int, V: Shape, out: Shape) -> Form | None:
    """y = x̂∘γ + β"""
    if slot == 0:
        return None

    def at_input(delta: Tensor) -> Tensor:
        normalised: Tensor = (node._saved_input - node._saved_result1) * node._saved_result2
        return delta * normalised if slot == 1 else delta

    return _spread(at_input, V, out)


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


NODES: dict[str, Callable[[Any, int, Shape, Shape], Form | None]] = {
    "AddBackward0": add,
    "AddmmBackward0": addmm,
    "BaddbmmBackward0": baddbmm,
    "BmmBackward0": bmm,
    "ConvolutionBackward0": convolve,
    "ConvolutionBackwardBackward0": convolve_back,
    "DivBackward0": div,
    "EmbeddingBackward0": lookup,
    "ExpandBackward0": expand,
    "MmBackward0": mm,
    "MulBackward0": mul,
    "MvBackward0": mv,
    "NativeLayerNormBackward0": normalisation,
    "PreluKernelBackward0": prelu,
    "RepeatBackward0": expand,
    "SubBackward0": sub,
    "WhereBackward0": where,
}

# Whether these see samples beside V no shape can tell: 2·V and x·V are the same node, and an expanded V may be a token
# for every sample, or a matrix for every derivative.
UNSURE = {"AddBackward0", "DivBackward0", "ExpandBackward0", "MulBackward0", "RepeatBackward0", "SubBackward0"}

# These pick by numbers that no edge leads to.
PICKING = {"EmbeddingBackward0", "GatherBackward0", "IndexBackward0", "IndexSelectBackward0", "TakeBackward0"}

# The same tensor again,
COPIES = {"AliasBackward0", "CloneBackward0"}

# and the same elements in the same order.
VIEWS = COPIES | {
    "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "SqueezeBackward3",
    "SqueezeBackward4", "SqueezeBackward5", "UnsafeViewBackward0", "UnsqueezeBackward0", "UnsqueezeBackward1",
    "ViewBackward0",
}  # fmt: skip


def _spread(delta: Callable[[Tensor], Tensor], V: Shape, out: Shape) -> Spread:
    return Spread(delta, _aligned(V, out))


def _aligned(V: Shape, out: Shape) -> Shape:
    return (*[1] * (len(out) - len(V)), *V)


def _times(delta: Tensor, factor: Any) -> Tensor:
    return delta if factor == 1 else delta * factor
