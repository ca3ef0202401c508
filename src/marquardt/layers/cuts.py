"""Where the outputs were put together: parts of the samples that may share rows of a layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

Node = Any


def cuts(z: Tensor, N: int) -> list[slice]:
    """The samples of each of the tensors that were joined; one slice if they were not."""
    return _parts(z.grad_fn, 0, N)


def _parts(node: Node, start: int, size: int) -> list[slice]:
    """Of samples start, …, start + size − 1, which are the first dimension of the node's output"""
    while node is not None and _size(node) == size:
        children = [child for child, _ in node.next_functions]
        if node.name() == "CatBackward0" and _dim(node) == 0:
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
        found += [slice(start, start + length)] if child is None else _parts(child, start, length)
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
    if node.name() == "torch::autograd::AccumulateGrad":
        return None
    shape = node._input_metadata[0].shape
    return shape[0] if shape else None


def _dim(node: Node) -> int:
    """A negative one is saved as a number without sign."""
    dim, ndim = node._saved_dim, len(node._input_metadata[0].shape)
    return (dim - 2**64 if dim >= 2**63 else dim) % ndim  # type: ignore[no-any-return]
