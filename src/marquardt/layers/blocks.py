"""Columns of J̃, a block for each layer: the contract, blocks without a structure, and layers linear in their weight."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ..metric import Part, Turn, joined
from ..model.batch import COARSE, wide, widened

# The peak rates of an H200: 990 TFLOP/s in bfloat16 to 67 in float32.
FASTER = 15

# To take a factor apart costs as much as 240 columns of the other in float32 (30 bytes a number at 4 TB/s).
COLUMNS = 256


def fast(t: Tensor) -> bool:
    """Whether the device multiplies such numbers and adds up in float32."""
    return t.dtype in COARSE and t.is_cuda and t.numel() > 0


def kernel(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """In float32: (M, K) (K, L), or many of them"""
    multiply = torch.mm if left.ndim == 2 else torch.bmm
    return multiply(left, right, out_dtype=torch.float32, out=out)


def times(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """LR as if both were converted to this dtype, which is at least float32: (M, K) (K, L), or many of them"""
    if left.dtype is right.dtype is dtype:
        return left @ right
    if dtype == torch.float32 and left.dtype == right.dtype and fast(left):
        return kernel(left, right)
    if dtype == right.dtype == torch.float32 and _apart(left, left.shape[-2]):
        return kernel(torch.cat([left] * 3, -1), torch.cat(digits(right), -2))
    if dtype == left.dtype == torch.float32 and _apart(right, right.shape[-1]):
        return kernel(torch.cat(digits(left), -1), torch.cat([right] * 3, -2))
    return left.to(dtype) @ right.to(dtype)


def _apart(t: Tensor, columns: int) -> bool:
    """Whether the other factor is better taken apart: float16 has not the range for that"""
    return t.dtype == torch.bfloat16 and columns >= COLUMNS and fast(t)


def digits(t: Tensor) -> list[Tensor]:
    """The 24 binary digits of float32, 8 at a time: t is the sum of three tensors of bfloat16."""
    high = t.bfloat16()
    rest = t - high
    middle = rest.bfloat16()
    return [high, middle, (rest - middle).bfloat16()]


def pull(delta: Tensor, a: Tensor, w: Tensor, out: Sequence[Tensor]) -> None:
    """out ← Σ w·δ ⊗ a and, if there is a second one, Σ w·δ: (K, O), (K, I), (K, 1) → (O, I), (O, 1)

    Of bfloat16: float16 has not the range for products with any number. w·δ or w·a, whichever is smaller, is rounded
    once more, as both were: every number by itself, so that the errors do not add up.
    """
    left, right = (delta, _scaled(a, w)) if delta.shape[1] > a.shape[1] else (_scaled(delta, w), a)
    kernel(left.T, right, out[0])
    if len(out) > 1:
        out[1].copy_(kernel(delta.T, torch.cat(digits(w)[:2], 1)).sum(1, keepdim=True))


def _scaled(t: Tensor, factor: Tensor) -> Tensor:
    return torch.mul(t, factor, out=torch.empty_like(t))


# --- Partial traces of a layer's block of J̃ᵀJ̃: with rows that are matrices J_r (O × I), ΣJ_rJ_rᵀ and ΣJ_rᵀJ_r.


# Of a longer side there is only the diagonal: a matrix of this size takes 64 MiB in float32 and a second to factor on
# one core of a CPU.
SIDE = 4096


class Traces(NamedTuple):
    """Those of some parameters of a block, which are one matrix: a weight of G groups, and its bias as another input.
    A trace is a matrix (G, d, d), or the diagonal of one (G, d)."""

    params: list[Tensor]
    left: Tensor  # ΣJ_rJ_rᵀ, d = O; of a vector diag J̃ᵀJ̃, with G = 1 and d its size
    right: Tensor | None  # ΣJ_rᵀJ_r, d = I; None: of a vector


def square(X: Tensor) -> Tensor:
    """XᵀX of every group, or its diagonal: (G, K, d) → (G, d, d) or (G, d)"""
    return X.mT @ X if X.shape[2] <= SIDE else X.square().sum(1)


def product_of(X: Tensor, Y: Tensor) -> Tensor:
    """XᵀY, or its diagonal: (…, d), (…, d) → (1, d, d) or (1, d)"""
    X, Y = (t.reshape(-1, t.shape[-1]) for t in (X, Y))
    return (X.mT @ Y if X.shape[1] <= SIDE else (X * Y).sum(0))[None]


def of_rows(X: Tensor) -> tuple[Tensor, Tensor]:
    """Both partial traces of rows: (m, G, O, I)"""
    return square(X.permute(1, 0, 3, 2).flatten(1, 2)), square(X.permute(1, 0, 2, 3).flatten(1, 2))


def of_matrix(p: Tensor, rows: Tensor) -> Traces:
    """Of one parameter by itself, as a matrix of its first dimension and the rest: (m, size). As a vector if it has a
    hook: of a gradient that the hook masks, a matrix would couple what is masked with the rest."""
    if p.ndim < 2 or p._backward_hooks:
        return Traces([p], rows.square().sum(0)[None], None)
    return Traces([p], *of_rows(rows.view(len(rows), 1, len(p), -1)))


def of_vectors(params: Sequence[Tensor], diagonal: Tensor) -> list[Traces]:
    """Of parameters that are vectors, from diag J̃ᵀJ̃ of all: (columns,)"""
    pieces = diagonal.split([p.numel() for p in params])
    return [Traces([p], piece[None], None) for p, piece in zip(params, pieces, strict=True)]


# --- The contract of a block of columns of J̃, and the blocks without a structure.


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
    B: Tensor | None  # Σ δδᵀ, over rows too; None: no two outputs share an input, and A is the block of each
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
    by_rows = 0  # samples, if each of the N is a row
    # Whether its positions are those of several uses, of which a sample may lack some: moments mean nothing then.
    gathered = False

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

    def write(self, out: Tensor) -> None:
        """out ← J̃ᵀ: (columns, m)"""
        for columns, piece in self.slabs(out.dtype):
            out[columns].copy_(piece.T)

    def inputs(self) -> Tensor | None:
        """Mean of the squares of what a weight multiplies, where D_oi = u_o·v_i makes sense: (G, 1, I)"""
        return None

    def samples(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The rows with those of a sample side by side, row n·R + r: (m, columns)"""
        if out is None:
            out = torch.empty(self.m, self.columns, dtype=dtype, device=self.params[0].device)
        N = self.by_rows or self.N
        for columns, piece in self.slabs(dtype):
            out[:, columns].unflatten(0, (N, -1)).copy_(piece.unflatten(0, (-1, N)).transpose(0, 1))
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
        yield slice(0, self.columns), self.params[0].new_zeros((), dtype=dtype).expand(self.m, self.columns)

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
    """Another block with every column divided by the root of its entry of D."""

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


# --- Layers that are linear in their weight: every row is a sum of outer products, J̃ = Σₚ δₚ ⊗ aₚ. Linear,
# convolution (on patches) and the scale of a normalisation layer differ only in what a and δ are.
#
#     N samples, R rows per sample, P positions in a sample (pixels, tokens), G groups, I inputs and O outputs per group
#     a (N, P, G, I)       what the weight multiplies
#     δ (R, N, P, G, O)    gradients of the rows at the layer's output
#     weight (G·O, I)      row (r, n) of its J̃ is Σₚ δ[r, n, p] ⊗ a[n, p]
#     bias (G·O,)          row (r, n) of its J̃ is Σₚ δ[r, n, p]


class Bilinear(Block):
    """J̃ of a weight and, after it, a bias; either may be missing. With one position and group a and δ may also be given
    as vectors: (N, I), (R, N, O)."""

    def __init__(
        self, a: Tensor, delta: Tensor, weight: Tensor | None, bias: Tensor | None, one: Tensor | None = None
    ) -> None:
        self.weight, self.bias = weight, bias
        self.one = one  # what the bias multiplies, if it is not 1: ()
        self.params = [p for p in (weight, bias) if p is not None]
        if a.ndim == 2:
            self.vectors = a, delta
            self.R, self.N, self.O = delta.shape
            self.P = self.G = 1
        else:
            self.factors = a, delta
            self.R, self.N, self.P, self.G, self.O = delta.shape
        self.I = a.shape[-1]
        self.m = self.R * self.N

    @cached_property
    def factors(self) -> tuple[Tensor, Tensor]:
        """a (N, P, G, I) and δ (R, N, P, G, O), in the precision of the layer, which under autocast is not that of the
        parameters"""
        a, delta = self.vectors
        return a[:, None, None], delta[:, :, None, None]

    @cached_property
    def vectors(self) -> tuple[Tensor, Tensor]:
        """The same with one position and group: (N, I), (R, N, O)"""
        a, delta = self.factors
        return a[:, 0, 0], delta[:, :, 0, 0]

    @property
    def single(self) -> tuple[Tensor, Tensor]:
        """The same with one position: (N, …, I), (R, N, …, O), with a dimension for the groups if there are several"""
        return self.vectors if self.G == 1 else (self.factors[0][:, 0], self.factors[1][:, :, 0])

    @property
    def a(self) -> Tensor:
        return widened(self.factors[0])

    @property
    def delta(self) -> Tensor:
        return widened(self.factors[1])

    def without(self, some: Sequence[Tensor]) -> Block | None:
        weight, bias = (None if any(p is q for q in some) else p for p in (self.weight, self.bias))
        if weight is None and bias is None:
            return None
        a, delta = self.factors
        return Bilinear(a if weight is not None else a[..., :0], delta, weight, bias, self.one)

    @property
    def _flat(self) -> tuple[Tensor, Tensor]:
        """a (N·P, I) and δ (R·N·P, O) of one group"""
        a, delta = self.vectors if self.P == 1 else self.factors
        return a.reshape(self.N * self.P, self.I), delta.reshape(self.m * self.P, self.O)

    def write(self, out: Tensor) -> None:
        if not self.P == self.G == 1:
            super().write(out)
            return
        a, delta = self.vectors
        if delta.dtype is not out.dtype or a.dtype is not out.dtype:
            delta, a = delta.to(out.dtype), a.to(out.dtype)
        columns = delta.permute(2, 0, 1)  # (O, R, N)
        if self.weight is not None:
            weight = out if self.bias is None else out[: self.O * self.I]
            torch.mul(columns.unsqueeze(1), a.T.unsqueeze(1), out=weight.view(self.O, self.I, self.R, self.N))
        if self.bias is not None:
            bias = out[-self.O :].view(self.O, self.R, self.N).copy_(columns)
            if self.one is not None:
                bias.mul_(self.one)

    def slabs(self, dtype: torch.dtype) -> Iterable[tuple[slice, Tensor]]:
        if self.P == 1 and self.m * self.G * self.O * self.I <= SLAB:
            return self._at_once(dtype)
        return self._one_by_one(dtype)

    def _at_once(self, dtype: torch.dtype) -> list[tuple[slice, Tensor]]:
        """The rows of one position, if they are few"""
        a, delta = self.single
        if delta.dtype is not dtype or a.dtype is not dtype:
            delta, a = delta.to(dtype), a.to(dtype)  # (R, N, …, O), (N, …, I)
        found: list[tuple[slice, Tensor]] = []
        columns = 0
        if self.weight is not None:
            # A vector times a single number needs no further dimension.
            outer = delta * a if 1 in (self.O, self.I) else delta.unsqueeze(-1) * a.unsqueeze(-2)
            piece = outer.reshape(self.m, -1)
            columns = piece.shape[1]
            found += ((slice(0, columns), piece),)
        if self.bias is not None:
            piece = delta.reshape(self.m, -1)
            piece = piece if self.one is None else self._times_one(piece)
            found += ((slice(columns, columns + piece.shape[1]), piece),)
        return found

    def _one_by_one(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        start = 0
        for g, o in self._pieces() if self.weight is not None else ():
            piece = self._outer(self.delta[:, :, :, g, o].to(dtype), self.a[:, :, g].to(dtype))
            yield slice(start, start + piece.shape[1]), piece
            start += piece.shape[1]
        if self.bias is not None:
            piece = self.delta.to(dtype).sum(2).reshape(self.m, -1)
            yield slice(start, start + piece.shape[1]), self._times_one(piece)

    def _times_one(self, t: Tensor) -> Tensor:
        return t if self.one is None else t * self.one.to(t)

    def _pieces(self) -> Iterator[tuple[slice, slice]]:
        """(groups, outputs) of each slab: several groups at once, or a part of one, as memory allows."""
        groups = max(1, SLAB // max(1, self.m * self.O * self.I))
        outputs = self.O if groups > 1 else max(1, SLAB // max(1, self.m * self.I))
        for g in range(0, self.G, groups):
            for o in range(0, self.O, outputs):
                yield slice(g, g + groups), slice(o, o + outputs)

    def _outer(self, delta: Tensor, a: Tensor) -> Tensor:
        """Σₚ δₚ ⊗ aₚ: (R, N, P, g, o), (N, P, g, I) → (m, g·o·I)"""
        if self.O == self.I == 1:  # a scale: no matrices to multiply
            return (delta[..., 0] * a[..., 0]).sum(2).reshape(self.m, -1)
        return torch.einsum("rnpgo,npgi->rngoi", delta, a).reshape(self.m, -1)

    @property
    def shortest(self) -> tuple[Tensor, Tensor]:
        """a and δ without dimensions for positions and groups, if there is one of each"""
        return self.vectors if self.P == self.G == 1 else self.factors

    def apply(self, v: Sequence[Tensor]) -> Tensor:
        dtype, (a, delta) = v[0].dtype, self.shortest
        total: Tensor | None = None
        if self.weight is not None and self.G == 1:
            V = v[0].view(self.O, self.I)
            total = times(a, V.T, dtype) if a.ndim == 2 else times(a.flatten(0, 2), V.T, dtype).view(delta.shape[1:])
        elif self.weight is not None:
            V = v[0].view(self.G, self.O, self.I)
            total = torch.einsum("npgi,goi->npgo", a.to(dtype), V)
        if self.bias is not None:
            b = v[-1] if self.one is None else self._times_one(v[-1])
            b = b if a.ndim == 2 else b.view(self.G, self.O)
            total = b.expand(delta.shape[1:]) if total is None else total.add_(b)
        assert total is not None
        if self.R == 1:
            return total.mul(delta[0] if delta.dtype is dtype else delta[0].to(dtype)).flatten(1).sum(1)
        # (N, R, P·G·O) (N, P·G·O, 1) → (N, R)
        rows = delta.to(dtype).flatten(2).transpose(0, 1) @ total.flatten(1)[:, :, None]
        return rows[:, :, 0].T.flatten()

    def adjoint(self, w: Tensor, out: Sequence[Tensor]) -> None:
        a, delta = self.shortest
        coarse = a.dtype == torch.bfloat16 and w.dtype == torch.float32 and fast(a)
        if coarse and self.R == self.G == 1 and self.weight is not None:
            a, delta = a.flatten(0, -2), delta.flatten(0, -2)  # (N·P, I), (N·P, O)
            pull(delta, a, w.repeat_interleave(self.P)[:, None], [t.view(self.O, -1) for t in out])
            if self.bias is not None and self.one is not None:
                out[-1].mul_(self.one)
            return
        # a is the same for the R rows of a sample: contract them first, then it is one ordinary backward.
        if self.R == 1:
            delta = w.view(self.N, *[1] * (delta.ndim - 2)) * (delta[0] if delta.dtype is w.dtype else delta[0].to(w))
        else:
            rows = w.view(self.R, self.N).T[:, None]  # (N, 1, R)
            delta = (rows @ delta.to(w.dtype).flatten(2).transpose(0, 1)).view(delta.shape[1:])
        flat = delta.reshape(self.N * self.P, self.G * self.O)
        if self.weight is not None:
            a = a if a.dtype is w.dtype else a.to(w.dtype)
            if self.G == 1:
                torch.mm(flat.T, a.reshape(self.N * self.P, self.I), out=out[0].view(self.O, self.I))
            elif self.O == self.I == 1:
                torch.sum((delta * a)[..., 0], (0, 1), out=out[0])
            else:
                out[0].copy_(torch.einsum("npgo,npgi->goi", delta, a).flatten())
        if self.bias is not None:
            torch.sum(flat, 0, out=out[-1])
            if self.one is not None:
                out[-1].mul_(self.one)

    @property
    def factored(self) -> bool:
        return self.P == self.G == 1 < self.R and self.one is None

    def samples(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        if self.G > 1 or self.by_rows:
            return super().samples(dtype, out)
        if out is None:
            out = torch.empty(self.m, self.columns, dtype=dtype, device=self.delta.device)
        if self.weight is not None:
            weight = out[:, : self.O * self.I]
            if self.P == 1:
                delta, a = self._by_sample(dtype)
                view = weight.view(self.N, self.R, self.O, self.I)
                torch.mul(delta[:, :, :, None], a[:, None, None, :], out=view)
            else:
                weight.copy_(self._samples(slice(None), dtype))
        if self.bias is not None:
            out[:, -self.O :] = self._biases(dtype)
        return out

    def against(self, samples: Tensor) -> Tensor:
        """Σₙ (Σᵣ x ⊗ δ) ⊗ a: the R rows of a sample share their a, so they are contracted before a comes in."""
        if not self.factored:
            return super().against(samples)
        X = samples.view(self.N, self.R, -1)
        delta, a = self._by_sample(samples.dtype)
        product = samples.new_empty(X.shape[2], self.columns)
        size = max(1, SLAB // (self.N * self.O))
        for part, place in zip(X.split(size, 2), product.split(size), strict=True):
            T = delta.mT @ part  # (N, O, q)
            if self.weight is not None:
                found = (T.flatten(1).T @ a).view(self.O, -1, self.I)
                place[:, : self.O * self.I].unflatten(1, (self.O, self.I)).copy_(found.transpose(0, 1))
            if self.bias is not None:
                place[:, -self.O :] = T.sum(0).T
        return product

    def square(self, dtype: torch.dtype) -> Tensor:
        """Σₙ (Σᵣ δδᵀ) ⊗ aaᵀ, half of the pairs of outputs: (columns, columns)"""
        pairs, weights = self.O * (self.O + 1) // 2, self.O * self.I
        if not self.factored or self.N * pairs * (self.I + 1) > SLAB:
            return super().square(dtype)
        delta, a = self._by_sample(dtype)
        B = delta.mT @ delta  # (N, O, O)
        product = a.new_empty(self.columns, self.columns)
        if self.weight is not None:
            o, p = torch.triu_indices(self.O, self.O, device=a.device)
            which = torch.empty(self.O, self.O, dtype=torch.long, device=a.device)
            which[o, p] = which[p, o] = torch.arange(pairs, device=a.device)
            found = ((B[:, o, p, None] * a[:, None, :]).flatten(1).T @ a).view(pairs, self.I, self.I)
            whole = product[:weights, :weights].unflatten(1, (self.O, self.I)).unflatten(0, (self.O, self.I))
            whole.copy_(found[which].transpose(1, 2))  # (O, I, O, I)
        if self.bias is not None:
            product[-self.O :, -self.O :] = B.sum(0)
        if self.weight is not None and self.bias is not None:
            product[weights:, :weights] = (B.flatten(1).T @ a).view(self.O, weights)
            product[:weights, weights:] = product[weights:, :weights].T
        return product

    def _by_sample(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """δ (N, R, O) and a (N, I)"""
        a, delta = self.vectors
        return delta.transpose(0, 1).to(dtype), a.to(dtype)

    def diagonal(self) -> Tensor:
        if self.P != 1 or self.one is not None:
            return super().diagonal()
        a, delta = map(widened, self.single)
        squares = delta.square().sum(0)  # (N, …, O)
        parts = []
        if self.weight is not None:
            parts.append(torch.einsum("n...o,n...i->...oi", squares, a.square()).flatten())
        if self.bias is not None:
            parts.append(squares.sum(0).flatten())
        return torch.cat(parts)

    def trace(self) -> Tensor:
        if self.P > 1 or self.G > 1 or self.one is not None:
            return super().trace()
        inputs = self.a.square().sum((1, 2, 3)) + (self.bias is not None)  # (N,)
        return self.delta.square().sum((0, 2, 3, 4)) @ inputs

    def inputs(self) -> Tensor | None:
        if self.weight is None or self.gathered:
            return None
        # Not .mean(): a chunk that does not reach the layer has no positions.
        return self.a.square().sum((0, 1))[:, None] / max(1, self.N * self.P)

    def gram(self, K: Tensor, other: Block, product: Product | None = None) -> None:
        """(AAᵀ + 1) ∘ ΔΔᵀ, summed over pairs of positions: J̃ is never built."""
        if self.G > 1:
            return super().gram(K, other, product)
        other = cast(Bilinear, other)
        pairs, coarse = self.m * self.P * other.m * other.P, self.factors[0].dtype in COARSE
        faster = FASTER if coarse and fast(self.factors[0]) else 1
        # Operations of the pairwise form against those of the explicit rows: take the cheaper one.
        explicit = (self.m * other.m + self.m * self.P / faster) * self.O * self.I
        pairwise = pairs * (self.O + self.I / self.R**2) / faster < explicit
        if (self.P > 1 and not pairwise) or pairs > 8 * SLAB:
            return self._gram_of_rows(K, other, product)
        if product is not None:
            product.add(self)
        A, left = self._flat
        B, right = (A, left) if other is self else other._flat
        deltas = times(left, right.T, K.dtype)  # (R·N·P, R'·N'·P')
        inputs = times(A, B.T, K.dtype)  # (N·P, N'·P'), zero where there is no weight (I = 0)
        if self.bias is not None:
            inputs += 1 if self.one is None else self.one.square().to(K.dtype)
        if self.R == other.R == self.P == other.P == 1:
            K.addcmul_(deltas, inputs)
            return
        deltas = deltas.view(self.R, self.N, self.P, other.R, other.N, other.P)
        factor = inputs.view(1, self.N, self.P, 1, other.N, other.P)
        blocks = K.view(self.R, self.N, other.R, other.N)
        if self.P == other.P == 1:
            blocks.addcmul_(deltas[:, :, 0, :, :, 0], factor[:, :, 0, :, :, 0])
        else:
            # One dimension after the other: both at once take ten times as long on a CPU, and twice on a GPU.
            blocks += deltas.mul_(factor).sum(2).sum(-1)

    def _gram_of_rows(self, K: Tensor, other: Bilinear, product: Product | None) -> None:
        """The same from explicit rows, some outputs at a time: cheaper for long samples."""
        total = K.new_zeros(self.m, other.m)  # rows in the order (n, r)
        image = K.new_zeros(self.m)
        size = max(1, SLAB // max(1, self.m * self.I))  # outputs at a time
        for o in (slice(first, first + size) for first in range(0, self.O, size)):
            if self.weight is not None:
                right = other._samples(o, K.dtype)
                add_product(total, right if other is self else self._samples(o, K.dtype), right)
                if product is not None:
                    image.addmv_(right, product.v[0].view(self.O, self.I)[o].flatten())
        if self.bias is not None:
            right = other._biases(K.dtype)
            if product is not None:
                image.addmv_(right, product.v[-1])
            total.addmm_(right if other is self else self._biases(K.dtype), right.T)
        K.view(self.R, self.N, other.R, other.N).add_(total.view(self.N, self.R, other.N, other.R).permute(1, 0, 3, 2))
        if product is not None:
            product.out.add_(image.view(self.N, self.R).T.flatten())

    def _biases(self, dtype: torch.dtype) -> Tensor:
        """Rows of the bias, sample by sample: (N·R, O)"""
        rows = self.delta[:, :, :, 0].to(dtype).sum(2).transpose(0, 1).reshape(self.m, self.O)
        return self._times_one(rows)

    def _samples(self, o: slice, dtype: torch.dtype) -> Tensor:
        """Rows of some outputs of the weight, sample by sample: (N·R, o·I)"""
        a, delta = self.factors[0][:, :, 0], self.factors[1][:, :, :, 0, o]
        folded = delta.permute(1, 0, 3, 2).reshape(self.N, self.R * delta.shape[3], self.P)  # (N, R·o, P)
        return times(folded, a, dtype).view(self.m, -1)

    def whitened(self, D: Sequence[Part]) -> Block:
        """With D = u ⊗ (v, b) it is of the same form: δ/√u, a/√v, and 1/√b for the bias"""
        parts = {id(p): d for p, d in zip(self.params, D, strict=True)}
        written = [d for p, d in zip(self.params, D, strict=True) if d.entries is not None and d.entries.numel() > 1]
        u = next((d.u for d in D if d.u is not None), None)
        same = all(d.u is u or (d.u is not None and u is not None and torch.equal(d.u, u)) for d in D)
        if written or self.G > 1 or not same:
            return super().whitened(D)
        a, one = self.a, self.one
        if self.weight is not None:
            weight = parts[id(self.weight)]
            v = weight.v if weight.entries is None else weight.entries
            a = a if v is None else a / v.reshape(-1).sqrt()
        if self.bias is not None and (b := parts[id(self.bias)].entries) is not None:
            one = b.reshape(()).rsqrt() if one is None else one * b.reshape(()).rsqrt()
        delta = self.delta if u is None else self.delta / u.reshape(-1).sqrt()
        return Bilinear(a, delta, self.weight, self.bias, one)

    def turned(self, layers: Sequence[Turn]) -> Block:
        """With one W for weight and bias it is of the same form: δ·leftᵀ and (a, 1)·rightᵀ"""
        layer, *others = layers
        left, right = layer.left, layer.right
        if others or self.weight is None or right is None or left.shape[:2] != (self.G, self.O):
            return super().turned(layers)
        a, delta = self.shortest
        if a.dtype is not left.dtype or delta.dtype is not left.dtype:
            a, delta = a.to(left), delta.to(left)
        turned = Bilinear(_mapped(self._with_one(a), right), _mapped(delta, left), self.weight, None)
        turned.params, turned.members = self.params, self.members
        return turned

    def _with_one(self, a: Tensor) -> Tensor:
        """(a, 1), or a alone if there is no bias: (…, I + 1)"""
        if self.bias is None:
            return a
        one = a.new_ones(*a.shape[:-1], 1)
        return torch.cat([a, one if self.one is None else self._times_one(one)], -1)

    @property
    def by_units(self) -> bool:
        """Whether no two outputs share an input: there is no matrix then."""
        return self.weight is None or self.weight.ndim < 2 or self.O == self.I == 1 < self.G

    def partial_traces(self) -> list[Traces]:
        """With one position Σ|a|²δδᵀ and Σ|δ|²aaᵀ; with several from pairs of them or from the rows of a few samples"""
        if self.by_units:
            return of_vectors(self.params, self.diagonal())
        if self.P != 1 and self.G == 1 and self._positions_are_cheaper():
            return [Traces(self.params, *self._traces_of_positions())]
        if self.P != 1:
            parts = [part.traces_of_rows(part.samples(part.delta.dtype)) for part in self.parts()]
            left, right = (torch.stack(sides).sum(0) for sides in zip(*parts, strict=True))
            return [Traces(self.params, left, right)]
        a, delta = self.single  # (N, …, I), (R, N, …, O)
        if a.dtype in COARSE or delta.dtype in COARSE:
            a, delta = widened(a), widened(delta)
        a = self._with_one(a)
        left = (delta * torch.linalg.vector_norm(a, dim=-1, keepdim=True)).flatten(0, 1)  # (R·N, …, O)
        right = a * torch.linalg.vector_norm(delta, dim=(0, -1)).unsqueeze(-1)
        left, right = (t[None] if self.G == 1 else t.transpose(0, 1) for t in (left, right))
        return [Traces(self.params, square(left), square(right))]

    def _positions_are_cheaper(self) -> bool:
        """By the multiplications: for short samples of wide layers"""
        O, I, R = self.O, self.I, self.R
        positions = 2 * self.P * (I + R * O) + R * O**2 + I**2
        return self.P * positions < R * O * I * (self.P + O + I)

    def _traces_of_positions(self) -> tuple[Tensor, Tensor]:
        """ΣΔᵀ(AAᵀ)Δ and ΣAᵀ(ΔΔᵀ)A over the samples: rows are not written out"""
        a, delta = (
            self._with_one(self.a.to(self.delta.dtype))[:, :, 0],
            self.delta[:, :, :, 0],
        )  # (N, P, I), (R, N, P, O)
        side = delta.permute(1, 2, 0, 3).flatten(2)  # (N, P, R·O)
        return product_of(delta, (a @ a.mT) @ delta), product_of(a, (side @ side.mT) @ a)

    def parts(self) -> Iterator[Bilinear]:
        """A few samples at a time, whose rows can be written out"""
        size = max(1, SLAB // max(1, self.R * self.columns))
        for n in range(0, self.N, size):
            some = slice(n, n + size)
            yield Bilinear(self.factors[0][some], self.factors[1][:, some], self.weight, self.bias, self.one)

    def traces_of_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Both partial traces: (m, columns)"""
        pieces = rows.split([p.numel() for p in self.params], 1)
        return of_rows(joined(pieces, (self.G, self.O)))

    def beside(self, others: Sequence[Bilinear]) -> Bilinear:
        blocks = [self, *others]
        a, delta = (torch.cat([b.factors[k] for b in blocks], 1 + k) for k in (0, 1))
        return Bilinear(a, delta, self.weight, self.bias, self.one)

    def sums(self, weight: Tensor | None) -> Sums | None:
        if self.gathered:
            return None
        if self.G > 1 and self.O == 1:
            return Sums(self._own_blocks(), None, 1.0, self.bias is not None)
        a = self.a.permute(2, 0, 1, 3).reshape(self.G, self.N * self.P, self.I)  # (G, N·P, I)
        each = a.new_ones(self.N) if weight is None else weight.to(a)
        each = each.repeat_interleave(self.P)[:, None]  # (N·P, 1)
        A = a.mT @ (a if weight is None else a * each)
        if self.bias is not None:  # the row and the column of its input 1, without a copy of a
            A = torch.nn.functional.pad(A, (0, 1, 0, 1))
            A[:, -1, :-1] = A[:, :-1, -1] = (a.mT @ each)[:, :, 0]
            A[:, -1, -1] = each.sum()
        delta = self.delta.permute(3, 0, 1, 2, 4).reshape(self.G, -1, self.O)
        return Sums(A, delta.mT @ delta, each.sum(), self.bias is not None)

    def _own_blocks(self) -> Tensor:
        """The block of every output itself, Σ xxᵀ with x = Σₚ δₚaₚ: (G, I, I)"""
        total = self.a.new_zeros(())
        for delta in self.delta[..., 0]:  # (N, P, G), row by row to bound the memory
            pieces = [torch.einsum("npg,npgi->gni", delta, self.a)]
            if self.bias is not None:
                pieces.append(delta.sum(1).T[:, :, None])
            x = torch.cat(pieces, 2)
            total = total + x.mT @ x
        return total

    def second_moments(self, left: Tensor | None, right: Tensor | None) -> Tensor:
        """δ → δ·left, (a, 1) → (a, 1)·right, and the diagonal as if of one weight: (G, O, I + 1)"""
        a = self._with_one(self.a)
        if right is not None and (missing := right.shape[1] - a.shape[-1]):  # inputs of a parameter without influence
            a = torch.nn.functional.pad(a, (missing, 0) if self.weight is None else (0, missing))
        a = a if right is None else torch.einsum("npgi,gij->npgj", a, right)
        delta = self.delta if left is None else torch.einsum("rnpgo,gok->rnpgk", self.delta, left)
        J = a.shape[-1]
        weight = a.new_empty(()).expand(self.G * self.O, J)  # for its shape
        return Bilinear(a, delta, weight, None).diagonal().view(self.G, self.O, J)


def _mapped(x: Tensor, side: Tensor) -> Tensor:
    """x·sideᵀ in every group, by a matrix (G, d, d) or the diagonal of one: (…, G, d), or (…, d) of one group"""
    if side.ndim == 2:
        return x * side
    if side.shape[0] > 1:
        return torch.einsum("...gi,gji->...gj", x, side)
    if x.ndim < 4:
        return x @ side[0].mT
    X = x.reshape(-1, x.shape[-1]).mm(side[0].mT)  # `@` may multiply sample by sample
    return X.view(*x.shape[:-1], side.shape[1])


# --- Rows of a layer with many positions, written out: they are fewer numbers than its inputs and gradients.


def cached_rows(block: Bilinear) -> Block:
    """The block, with its rows kept once they are there if R·O·I numbers of them take the place of P·(I + R·O)."""
    rows, numbers = block.R * block.O * block.I, block.P * (block.I + block.R * block.O)
    if block.weight is None or block.P == 1 or rows > numbers or block.m * block.columns > SLAB:
        return block
    return CachedRows(block)


class CachedRows(Bilinear):
    """The same rows, formed once. Products that come before them, or that have another precision, are left to a and δ,
    and so are statistics of a and δ."""

    def __init__(self, block: Bilinear) -> None:
        vars(self).update(vars(block))
        self.block = block

    def plain(self) -> Block:
        return self.block.plain()

    @cached_property
    def _rows(self) -> Tensor:
        return torch.cat([piece for _, piece in super().slabs(self.delta.dtype)], 1)  # (m, columns)

    def _there(self, dtype: torch.dtype) -> bool:
        return "_rows" in vars(self) and dtype == self.delta.dtype

    def slabs(self, dtype: torch.dtype) -> Iterable[tuple[slice, Tensor]]:
        return [(slice(0, self.columns), self._rows)] if dtype == self.delta.dtype else super().slabs(dtype)

    def apply(self, v: Sequence[Tensor]) -> Tensor:
        return self._rows @ torch.cat(list(v)) if self._there(v[0].dtype) else super().apply(v)

    def adjoint(self, w: Tensor, out: Sequence[Tensor]) -> None:
        if not self._there(w.dtype):
            return super().adjoint(w, out)
        for part, piece in zip(out, (w @ self._rows).split([len(part) for part in out]), strict=True):
            part.copy_(piece)

    def gram(self, K: Tensor, other: Block, product: Product | None = None) -> None:
        other = cast(CachedRows, other)
        there = self._there(K.dtype) and other._there(K.dtype)
        return (Block if there else Bilinear).gram(self, K, other, product)

    def diagonal(self) -> Tensor:
        return self._rows.square().sum(0) if self._there(self.delta.dtype) else super().diagonal()

    def whitened(self, D: Sequence[Part]) -> Block:
        return (Block if self._there(self.delta.dtype) else Bilinear).whitened(self, D)

    def turned(self, layers: Sequence[Turn]) -> Block:
        return Block.turned(self, layers)

    def partial_traces(self) -> list[Traces]:
        if self.by_units:
            return of_vectors(self.params, self._rows.square().sum(0))
        return [Traces(self.params, *self.traces_of_rows(self._rows))]


class Lookup(Block):
    """J̃ of an embedding table (V, E): row (r, n) holds Σₚ δ[r, n, p] at the table's row index[n, p]."""

    def __init__(self, index: Tensor, delta: Tensor, table: Tensor, roots: Tensor | None = None) -> None:
        self.index, self.delta, self.table = index, delta, table  # (N, P), (R, N, P, E)
        self.roots = roots  # that the columns are divided by, like the table
        self.params = [table]
        self.R, self.N, self.P, self.E = delta.shape
        self.m = self.R * self.N

    def slabs(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        tokens = max(1, SLAB // (self.m * self.E))
        for first in range(0, len(self.table), tokens):
            last = min(first + tokens, len(self.table))
            yield (
                slice(first * self.E, last * self.E),
                self._rows_of(torch.arange(first, last, device=self.index.device), dtype),
            )

    def _rows_of(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        hot = (self.index[:, :, None] == tokens).to(dtype)  # (N, P, tokens)
        rows = torch.einsum("rnpe,npt->rnte", self.delta.to(dtype), hot)
        return (rows if self.roots is None else rows / self.roots[tokens].to(dtype)).reshape(self.m, -1)

    def apply(self, v: Sequence[Tensor]) -> Tensor:
        table = v[0].view_as(self.table)
        table = table if self.roots is None else table / self.roots.to(table)
        return torch.einsum("npe,rnpe->rn", table[self.index], self.delta.to(table.dtype)).flatten()

    def adjoint(self, w: Tensor, out: Sequence[Tensor]) -> None:
        delta = torch.einsum("rn,rnpe->npe", w.view(self.R, self.N), self.delta.to(w.dtype))
        found = out[0].zero_().view_as(self.table).index_add_(0, self.index.flatten(), delta.flatten(0, 1))
        if self.roots is not None:
            found /= self.roots

    def diagonal(self) -> Tensor:
        total = torch.zeros_like(self.table, dtype=self.delta.dtype)
        for tokens in self._tokens(self.index.unique()):  # the other rows of the table are zero
            total[tokens] = self._rows_of(tokens, self.delta.dtype).square().sum(0).view(-1, self.E)
        return total.flatten()

    def gram(self, K: Tensor, other: Block, product: Product | None = None) -> None:
        other = cast(Lookup, other)
        if product is not None:
            product.add(self)
        shared = self.index.unique()
        for tokens in self._tokens(shared[torch.isin(shared, other.index)]):
            left = self._rows_of(tokens, K.dtype)
            K.addmm_(left, (left if other is self else other._rows_of(tokens, K.dtype)).T)

    def whitened(self, D: Sequence[Part]) -> Block:
        """Whatever D is, only the tokens that occur are looked at"""
        (part,) = D
        roots = part.flat(self.table.numel()).view_as(self.table).sqrt()
        return Lookup(self.index, self.delta, self.table, roots if self.roots is None else roots * self.roots)

    def turned(self, layers: Sequence[Turn]) -> Block:
        """With a number for every token it is of the same form: δ·rightᵀ, and its roots"""
        (layer,) = layers
        if layer.left.ndim == 3 or layer.right is None:
            return super().turned(layers)
        right, roots = layer.right[0], 1 / layer.left[0][:, None]  # (V, 1)
        delta = self.delta.to(right)
        return Lookup(self.index, delta * right if right.ndim == 1 else delta @ right.mT, self.table, roots)

    def partial_traces(self) -> list[Traces]:
        """The diagonal of the one over the tokens: those that do not occur have zeros"""
        left, right = self.delta.new_zeros(1, len(self.table)), square(self.delta.new_zeros(1, 0, self.E))
        for tokens in self._tokens(self.index.unique()):
            rows = self._rows_of(tokens, self.delta.dtype).view(self.m, -1, self.E)
            left[0, tokens] = rows.square().sum((0, 2))
            right = right + square(rows.view(1, -1, self.E))
        return [Traces(self.params, left, right)]

    def beside(self, others: Sequence[Lookup]) -> Lookup:
        blocks = [self, *others]
        return Lookup(
            torch.cat([b.index for b in blocks], 1), torch.cat([b.delta for b in blocks], 2), self.table, self.roots
        )

    def sums(self, weight: Tensor | None) -> Sums | None:
        if self.gathered:  # positions that a sample does not have would count as the first row of the table
            return None
        each = torch.ones_like(self.delta[0, :, :, 0])  # (N, P)
        each = each if weight is None else each * weight.to(each)[:, None]
        A = each.new_zeros(1, len(self.table)).index_add_(1, self.index.flatten(), each.reshape(1, -1))
        delta = self.delta.reshape(1, -1, self.E)
        return Sums(A, delta.mT @ delta, each.sum(), bias=False, table=True)

    def second_moments(self, left: Tensor | None, right: Tensor | None) -> Tensor:
        """δ → δ·right: (1, V, E)"""
        delta = self.delta if right is None else self.delta @ right[0]
        return Lookup(self.index, delta, self.table).diagonal().view(1, *self.table.shape)

    def _tokens(self, tokens: Tensor) -> Iterator[Tensor]:
        yield from tokens.split(max(1, SLAB // (self.m * self.E)))
