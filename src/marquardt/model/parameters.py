"""The parameters that train, as one vector θ, and the algebra of such vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ..ranks import ALONE, Ranks
from .batch import COARSE, wide, widened
from .shards import Shards, sharded

# For sharded parameters, gradients of at most 1/SHARE of all numbers are formed at once, or those of one larger layer.
SHARE = 8

Range = tuple[slice, slice]  # columns of θ, columns of some blocks put side by side


class HasParameters(Protocol):
    """Columns of J̃, see layers.Block."""

    params: list[Tensor]
    members: Sequence[int] | None


class Parameters:
    """n numbers in the parameters of a model, flattened one after another: the vectors θ, g and d are (n,).

    Products of two such vectors are only formed here. θ is at least in float32: parameters of bfloat16 or float16 are
    its rounding, and `master` is the unrounded θ.

    If parameters are sharded, `tensors` are the shards of this rank, and all such vectors have their n numbers: `total`
    completes a sum over n by a sum over `ranks`. `whole` are the parameters as a forward pass sees them.
    """

    def __init__(self, model: nn.Module, params: Sequence[Tensor], master: Tensor | None = None) -> None:
        self._model, self.given = model, list(params)
        self.shards = Shards(model, self.given) if sharded(self.given[0]) else None
        self.ranks: Ranks = ALONE if self.shards is None else self.shards.ranks  # the ranks that hold parts of θ
        # aᵀb and ‖a‖ of vectors whose numbers may be shared among ranks: ()
        self.dot: Callable[[Tensor, Tensor], Tensor] = torch.dot if self.shards is None else self._dot
        self.norm: Callable[[Tensor], Tensor] = torch.linalg.vector_norm if self.shards is None else self._norm
        self.tensors = self.given if self.shards is None else self.shards.local
        self.index = {id(p): i for i, p in enumerate(self.tensors)}
        self.sizes = [p.numel() for p in self.tensors]
        self.n = sum(self.sizes)
        self.starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        self.dtype, self.device = wide(self.tensors[0].dtype), self.tensors[0].device
        self.coarse = any(p.dtype != self.dtype for p in self.tensors)
        self.master = master.to(self.device, self.dtype) if master is not None and self.coarse else None

    @cached_property
    def names(self) -> list[str]:
        if self.shards is not None:
            return self.shards.names
        names = {id(p): name for name, p in named_parameters(self._model)}
        return [names[id(p)] for p in self.tensors]

    @cached_property
    def whole(self) -> Parameters:
        """The parameters as a forward pass sees them: with all their numbers, and in the memory they have during the
        pass."""
        if self.shards is None:
            return self
        parameters = Parameters(self._model, self.shards.whole)
        parameters.names = self.names
        return parameters

    def __len__(self) -> int:
        return len(self.tensors)

    # θ and the model.

    def vector(self) -> Tensor:
        """A copy of θ: (n,). Numbers that differ from the rounding of `master` were set by other code, and are kept."""
        held = self._joined(self.tensors)
        if self.master is None:
            return held
        rounded = self._joined([t.to(p.dtype) for p, t in zip(self.tensors, self.split(self.master), strict=True)])
        return self.master.where(rounded == held, held)

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        if self.coarse or len(parts) == 1:
            return torch.cat([t.detach().flatten().to(self.dtype) for t in parts])
        theta: Tensor = _flatten_dense_tensors(parts).detach()
        return theta

    def unrounded(self) -> Tensor | None:
        """θ, if the parameters cannot represent it: (n,)"""
        return self.vector() if self.coarse else None

    def assign(self, theta: Tensor) -> None:
        """The parameters ← θ"""
        torch.clear_autocast_cache()  # which belongs to other weights
        if self.shards is not None:
            self.let_go()
        self.master = theta if self.coarse else None
        if torch.is_grad_enabled():
            with torch.no_grad():
                return torch._foreach_copy_(self.tensors, self.shaped(theta))
        torch._foreach_copy_(self.tensors, self.shaped(theta))

    def shift(self, d: Tensor, lr: float) -> None:
        """The parameters += lr·d, without another vector in memory unless the parameters are rounded"""
        if self.coarse:
            return self.assign(self.vector().add_(d, alpha=lr))
        if self.shards is not None:
            self.let_go()
        if torch.is_grad_enabled():
            with torch.no_grad():
                return torch._foreach_add_(self.tensors, self.shaped(d), alpha=lr)
        torch._foreach_add_(self.tensors, self.shaped(d), alpha=lr)

    def recover(self, theta: Tensor) -> None:
        """The parameters ← θ after a step that failed"""
        if self.shards is not None:
            self.shards.recover()
        self.assign(theta)

    def let_go(self) -> None:
        """Releases sharded parameters that were gathered for the last pass"""
        if self.shards is not None:
            self.shards.let_go()

    # Vectors and their pieces.

    def split(self, v: Tensor) -> Sequence[Tensor]:
        """The flat part of each parameter"""
        parts: Sequence[Tensor] = v.split_with_sizes(self.sizes)
        return parts

    def shaped(self, v: Tensor) -> tuple[Tensor, ...]:
        """The part of each parameter, in its shape"""
        parts: tuple[Tensor, ...] = _unflatten_dense_tensors(v, self.tensors)
        return parts

    def joined(self, grads: Sequence[Tensor | None]) -> Tensor:
        """One vector from one gradient per parameter, None for 0: (n,)"""
        return joined(grads, self.tensors)

    def members(self, some: Iterable[Tensor]) -> list[int]:
        """The indices of some parameters"""
        return [self.index[id(p)] for p in some]

    def of(self, block: HasParameters) -> Sequence[int]:
        """The indices of the parameters of a block of columns, looked up only once"""
        if block.members is None:
            block.members = self.members(block.params)
        return block.members

    def slice_of(self, i: int) -> slice:
        return slice(self.starts[i], self.starts[i] + self.sizes[i])

    def ranges(self, params: Iterable[Tensor]) -> list[Range]:
        """The ranges of some parameters, flattened side by side: (columns of θ, columns there), adjacent ranges
        merged"""
        joined: list[Range] = []
        start = 0
        for i in self.members(params):
            here, there = self.slice_of(i), slice(start, start + self.sizes[i])
            start = there.stop
            if joined and joined[-1][0].stop == here.start:
                a, b = joined.pop()
                here, there = slice(a.start, here.stop), slice(b.start, there.stop)
            joined.append((here, there))
        return joined

    def without(self, v: Tensor, inert: Iterable[int]) -> Tensor:
        """v with 0 for some parameters: (n,)"""
        inert = list(inert)
        v = v.clone() if inert else v
        for i in inert:
            v[self.slice_of(i)] = 0
        return v

    def portions(self, sizes: Sequence[int]) -> list[list[int]]:
        """Groups of gradients, by their sizes, that are formed at once: all together, but no rank can hold all sharded
        ones."""
        if not self.ranks.several:
            return [list(range(len(sizes)))]
        groups: list[list[int]] = []
        most, total = max(max(sizes, default=0), self.whole.n // SHARE), 0
        for k, size in enumerate(sizes):
            if not groups or total + size > most:
                groups.append([])
                total = 0
            groups[-1].append(k)
            total += size
        return groups

    # Products.

    def total(self, t: Tensor) -> Tensor:
        """The sum over all ranks that hold parts of θ, of sums over the n numbers of each rank"""
        return self.ranks.sum(t)

    def largest(self, t: Tensor, dim: int) -> Tensor:
        """The largest along the rows of a parameter on all ranks: a dimension of t, which is kept with length 1"""
        shape = [1 if k == dim else size for k, size in enumerate(t.shape)]
        most = t.amax(dim, keepdim=True) if t.shape[dim] else t.new_zeros(shape)
        return most if self.shards is None else self.ranks.gather(most[None]).amax(0)

    def finite(self, v: Tensor) -> Tensor:
        """Whether all numbers of v are finite, including those on other ranks: ()"""
        return v.isfinite().all() if self.shards is None else self.total((~v.isfinite()).sum()) == 0

    def _dot(self, a: Tensor, b: Tensor) -> Tensor:
        return self.total(a @ b)

    def _norm(self, a: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(a)
        return self.total(length.double().square()).sqrt().to(length.dtype)

    def cosine(self, a: Tensor, b: Tensor) -> Tensor:
        """The cosine, without torch.cosine_similarity's copies of vectors that may be large: ()"""
        return self.dot(a, b) / (self.norm(a) * self.norm(b)).clamp(min=1e-30)


def named_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters by the names they had before torch.compile"""
    for name, p in model.named_parameters():
        yield name.replace("_orig_mod.", ""), p


def changing(model: nn.Module, params: Iterable[Tensor]) -> dict[str, Tensor]:
    """Copies of the entries of a state_dict that may differ between the last and the averaged weights: parameters that
    train, under all their names, and buffers."""
    trained = {id(p) for p in params}
    entries = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    return {k: t.detach().clone() for k, t in entries.items() if id(t) in trained or not isinstance(t, nn.Parameter)}


def put(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Entries of its state_dict into the model, in place."""
    entries = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, t in values.items():
            entries[name].copy_(t)


def flat(gradient: Tensor | None, p: Tensor) -> Tensor:
    """The gradient of a parameter as a vector, None for 0"""
    if gradient is None:
        return p.new_zeros(p.numel(), dtype=wide(p.dtype))
    return widened(gradient.to_dense() if gradient.is_sparse else gradient).flatten()


def joined(grads: Sequence[Tensor | None], params: Sequence[Tensor]) -> Tensor:
    """One vector from one gradient for each of some parameters, None for 0"""
    plain = len(grads) > 1
    for g, p in zip(grads, params, strict=True):
        if g is None or g.dtype is not p.dtype or g.is_sparse or g.dtype in COARSE:
            plain = False
    if plain:
        gradient: Tensor = _flatten_dense_tensors(grads)
        return gradient
    return torch.cat([flat(g, p) for g, p in zip(grads, params, strict=True)])


class Position:
    """The present values of the parameters: θ, or a trial point θ + lr·d."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.theta = parameters.vector()  # (n,)
        self.at: tuple[Tensor, float] | None = None  # d and lr of a trial point; None: at θ

    def move(self, d: Tensor | None = None, lr: float = 0.0) -> None:
        """Moves the parameters to θ + lr·d, or back to θ."""
        there = None if d is None else (d, lr)
        if self.at is not None:
            if there is not None and self.at[0] is there[0] and self.at[1] == there[1]:
                return
            self.parameters.assign(self.theta)
        if d is not None:
            self.parameters.shift(d, lr)
        self.at = there
