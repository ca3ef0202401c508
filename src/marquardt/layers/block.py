"""The contract of a block of columns of J̃, and the blocks without a structure."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ..metric import Part, Turn
from ..model.precision import wide
from .traces import Traces, of_matrix

# A slab of explicit rows is at most this many numbers: 256 MiB in float32.
SLAB = 1 << 26
# Columns of a piece of a product that few rows share: 512 measured best on an H200.
PIECE = 512
# Half of a symmetric product pays for its calls from this many rows on, and on a GPU from this many operations on. So
# many block rows have three fifths of it; 3 and 8 of them are slower on a CPU.
HALF, HALF_ON_GPU, BLOCK_ROWS = 256, 10**11, 5

Own = TypeVar("Own", bound="Block")


@dataclass(frozen=True)
class Sums:
    """What Kronecker factors are made of, added up over samples and positions, in Σ-units.

    A weight is left ⊗ right with B at its outputs and A at its inputs; a table of an embedding has them the other way
    round. A factor is a matrix (G, d, d) or the diagonal of one (G, d).
    """

    A: Tensor  # Σ w·aaᵀ, a the input with a 1 for the bias
    B: Tensor | None  # Σ δδᵀ, over rows too; None: every output has inputs of its own, and A is the block of each
    count: Tensor | float  # Σ w over samples and positions
    bias: bool
    table: bool = False

    def __add__(self, other: Sums) -> Sums:
        B = None if self.B is None or other.B is None else self.B + other.B
        return Sums(self.A + other.A, B, self.count + other.count, self.bias, self.table)


class Block(ABC):
    """The columns of J̃ (m rows, m = R·N, row r·N + n) that belong to a few parameters.

    The columns are those of `params`, each flattened, one after the other. Products are formed in the dtype of what
    the rows are multiplied with.

    >>> lin = mq.linearize(model, "mse", x, y)
    >>> block = next(iter(lin.pieces())).blocks[0]
    >>> isinstance(block, mq.layers.Block), block.rows(torch.float32).shape
    (True, torch.Size([64, 24]))
    """

    params: list[Tensor]
    members: Sequence[int] | None = None  # the numbers of these, see Parameters.of
    m: int
    N: int
    empty = False  # whether its rows are zero by their nature

    @abstractmethod
    def slabs(self, dtype: torch.dtype) -> Iterable[tuple[slice, Tensor]]:
        """Rows in pieces: (columns of this block, their part of every row (m, columns)), each of bounded size."""

    @abstractmethod
    def apply(self, v: Sequence[Tensor]) -> Tensor:
        """J̃v: v by parameter, flat → (m,)"""

    @abstractmethod
    def adjoint(self, w: Tensor, out: Sequence[Tensor]) -> None:
        """out ← J̃ᵀw: (m,) → by parameter, flat"""

    def without(self, some: Sequence[Tensor]) -> Block | None:
        """The same for its other parameters; None if there are none."""
        return None

    def plain(self) -> Block:
        """The same of tensors and plain values alone, as it is sent to other ranks"""
        return self

    def pull(self, w: Tensor) -> Tensor:
        """J̃ᵀw: (m,) → (columns,)"""
        total = torch.empty(self.columns, dtype=w.dtype, device=w.device)
        self.adjoint(w, total.split([p.numel() for p in self.params]))
        return total

    @property
    def dtype(self) -> torch.dtype:
        """Of statistics of the rows"""
        return wide(self.params[0].dtype)

    @property
    def columns(self) -> int:
        return sum(p.numel() for p in self.params)

    def rows(self, dtype: torch.dtype) -> Tensor:
        """J̃ itself: (m, columns)"""
        return torch.cat([piece for _, piece in self.slabs(dtype)], 1)

    def inputs(self) -> Tensor | None:
        """Mean of the squares of what a weight multiplies, where D_oi = u_o·v_i makes sense: (G, 1, I)"""
        return None

    def samples(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The rows with those of a sample side by side, row n·R + r: (m, columns)"""
        if out is None:
            out = torch.empty(self.m, self.columns, dtype=dtype, device=self.params[0].device)
        for columns, piece in self.slabs(dtype):
            out[:, columns].view(self.N, -1, piece.shape[1]).copy_(
                piece.view(-1, self.N, piece.shape[1]).transpose(0, 1)
            )
        return out

    @property
    def factored(self) -> bool:
        """Whether `against` and `square` know a cheaper way than the product with the rows."""
        return False

    def against(self, samples: Tensor) -> Tensor:
        """Xᵀ J̃ for rows X of any columns, sample by sample: (m, q) → (q, columns)"""
        return samples.T @ self.samples(samples.dtype)

    def square(self, dtype: torch.dtype) -> Tensor:
        """J̃ᵀJ̃: (columns, columns)"""
        return self.against(self.samples(dtype))

    def diagonal(self) -> Tensor:
        """diag J̃ᵀJ̃: (columns,)"""
        return torch.cat([piece.square().sum(0) for _, piece in self.slabs(self.dtype)])

    def trace(self) -> Tensor:
        """tr J̃ᵀJ̃: ()"""
        return self.diagonal().sum()

    def whitened(self, D: Sequence[Part]) -> Block:
        """The columns J̃D^-½; D by parameter"""
        return Whitened(self, D)

    def turned(self, layers: Sequence[Turn]) -> Block:
        """The columns J̃Wᵀ with a W for every layer; in a layer they have no parameter of their own, but the order and
        the sizes of its parameters"""
        rows = self.rows(layers[0].left.dtype)
        pieces = list(rows.split([p.numel() for p in self.params], 1))
        for layer in layers:
            for i, piece in zip(layer.places, layer([pieces[i] for i in layer.places]), strict=True):
                pieces[i] = piece
        return Explicit(self.params, torch.cat(pieces, 1), self.N)

    def partial_traces(self) -> list[Traces]:
        """Of its block of J̃ᵀJ̃, for every matrix among its parameters: in the form that this kind of block has"""
        return self.partial_traces_apart()

    def partial_traces_apart(self) -> list[Traces]:
        """The same with every parameter a matrix by itself"""
        pieces = self.rows(self.dtype).split([p.numel() for p in self.params], 1)
        return [of_matrix(p, piece) for p, piece in zip(self.params, pieces, strict=True)]

    def pairs_with(self, other: Block) -> bool:
        """Whether `gram` takes the other: the same parameters in the same form"""
        return type(self) is type(other) and [id(p) for p in self.params] == [id(p) for p in other.params]

    def gram(self, K: Tensor, other: Block, product: Product | None = None) -> None:
        """K += J̃J̃'ᵀ with this block's J̃ and the other's J̃' (the same layer, other samples). A product J̃v goes along,
        which explicit rows give for nothing."""
        if product is not None:
            product.add(self)
        pairs = (
            ((s, s) for s in self.slabs(K.dtype))
            if other is self
            else zip(self.slabs(K.dtype), other.slabs(K.dtype), strict=True)
        )
        for (_, left), (_, right) in pairs:
            add_product(K, left, right)

    def beside(self: Own, others: Sequence[Own]) -> Own | None:
        """One block of the same parameters with the positions of all of them; None if this kind has no positions"""
        return None

    # What Kronecker factors ask for; None if this block has none.

    def sums(self, weight: Tensor | None) -> Sums | None:
        """Its part of the sums that the factors are made of; one weight per sample (N,)"""
        return None

    def second_moments(self, left: Tensor | None, right: Tensor | None) -> Tensor:
        """The diagonal of J̃ᵀJ̃ in another basis, that of the columns of left ⊗ right, each (G, d, d) or None for the
        identity: (G, outputs, inputs), with the bias beside the inputs. For blocks that have `sums`."""
        raise NotImplementedError(f"{type(self).__name__} has sums but no second_moments, which EKFAC asks for")


class Product(NamedTuple):
    """J̃v, to be added up over the blocks."""

    v: Sequence[Tensor]  # by parameter of the block, flat
    out: Tensor  # (m,)

    def add(self, block: Block) -> None:
        self.out.add_(block.apply(self.v))


def add_product(K: Tensor, left: Tensor, right: Tensor) -> None:
    """K += LRᵀ. On a GPU few rows with many columns go in pieces at once, which keeps all of it busy."""
    columns = left.shape[1]
    pieces = columns // PIECE
    if not K.is_cuda or pieces < 8 or max(K.shape) > 512:
        if left is right:
            add_square(K, left)
        else:
            K.addmm_(left, right.T)
        return
    whole = pieces * PIECE
    a, b = (t[:, :whole].unflatten(1, (pieces, PIECE)).transpose(0, 1) for t in (left, right))  # (pieces, m, PIECE)
    K += torch.bmm(a, b.transpose(1, 2)).sum(0)
    if whole < columns:
        K.addmm_(left[:, whole:], right[:, whole:].T)


def add_square(K: Tensor, rows: Tensor) -> None:
    """K += XXᵀ for a symmetric K, where it pays by the upper half alone: (m, m), (m, columns)"""
    m, columns = rows.shape
    if m < HALF or (K.is_cuda and m * m * columns < HALF_ON_GPU):
        K.addmm_(rows, rows.T)
        return
    cuts = [m * k // BLOCK_ROWS for k in range(BLOCK_ROWS + 1)]
    for first, last in itertools.pairwise(cuts):
        K[first:last, first:].addmm_(rows[first:last], rows[first:].T)
        K[last:, first:last] = K[first:last, last:].T


class Nothing(Block):
    """Parameters that the outputs do not depend on."""

    empty = True

    def __init__(self, params: list[Tensor], m: int, N: int) -> None:
        self.params, self.m, self.N = params, m, N

    def without(self, some: Sequence[Tensor]) -> Block | None:
        kept = [p for p in self.params if all(p is not q for q in some)]
        return Nothing(kept, self.m, self.N) if kept else None

    def slabs(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        size = max(1, SLAB // self.m)
        for first in range(0, self.columns, size):
            last = min(first + size, self.columns)
            yield slice(first, last), self.params[0].new_zeros(self.m, last - first, dtype=dtype)

    def apply(self, v: Sequence[Tensor]) -> Tensor:
        return v[0].new_zeros(self.m)

    def adjoint(self, w: Tensor, out: Sequence[Tensor]) -> None:
        for part in out:
            part.zero_()

    def diagonal(self) -> Tensor:
        return self.params[0].new_zeros(self.columns, dtype=self.dtype)

    def gram(self, K: Tensor, other: Block, product: Product | None = None) -> None:
        pass

    def whitened(self, D: Sequence[Part]) -> Block:
        return self

    def turned(self, layers: Sequence[Turn]) -> Block:
        return self


class Explicit(Block):
    """Rows that are simply there."""

    def __init__(self, params: list[Tensor], rows: Tensor, N: int) -> None:
        self.params, self._rows, self.m, self.N = params, rows, rows.shape[0], N  # (m, columns)

    def without(self, some: Sequence[Tensor]) -> Block | None:
        pieces = self._rows.split([p.numel() for p in self.params], 1)
        kept = [(p, piece) for p, piece in zip(self.params, pieces, strict=True) if all(p is not q for q in some)]
        return Explicit([p for p, _ in kept], torch.cat([piece for _, piece in kept], 1), self.N) if kept else None

    def slabs(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        yield slice(0, self._rows.shape[1]), self._rows.to(dtype)

    def apply(self, v: Sequence[Tensor]) -> Tensor:
        whole = torch.cat(list(v))
        return self._rows.to(whole.dtype) @ whole

    def adjoint(self, w: Tensor, out: Sequence[Tensor]) -> None:
        found = self._rows.T.to(w.dtype) @ w
        for part, piece in zip(out, found.split([len(part) for part in out]), strict=True):
            part.copy_(piece)


class Whitened(Block):
    """Another block with every column divided by the root of a number of its own."""

    def __init__(self, block: Block, D: Sequence[Part]) -> None:
        self.block, self.params, self.m, self.N = block, block.params, block.m, block.N
        self.roots = torch.cat([d.flat(p.numel()) for d, p in zip(D, self.params, strict=True)]).sqrt()  # (columns,)

    def _split(self, t: Tensor) -> Sequence[Tensor]:
        parts: Sequence[Tensor] = t.split([p.numel() for p in self.params])
        return parts

    def pairs_with(self, other: Block) -> bool:
        return super().pairs_with(other) and self.block.pairs_with(cast(Whitened, other).block)

    def slabs(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        for columns, piece in self.block.slabs(dtype):
            yield columns, piece / self.roots[columns].to(dtype)

    def apply(self, v: Sequence[Tensor]) -> Tensor:
        return self.block.apply([part / root for part, root in zip(v, self._split(self.roots.to(v[0])), strict=True)])

    def adjoint(self, w: Tensor, out: Sequence[Tensor]) -> None:
        self.block.adjoint(w, out)
        for part, root in zip(out, self._split(self.roots.to(w)), strict=True):
            part /= root
