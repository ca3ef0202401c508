"""G of every layer as a Kronecker product B ⊗ A, from its inputs and the gradients at its outputs (KFAC)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from ..deferred import ask
from ..jacobian.linearization import Linearization, Needs
from ..jacobian.statistics import Moments
from ..layers.blocks import Sums
from ..metric import Diagonal, Metric, Part, trusted
from ..ranks import ALONE, Ranks, completed, owned, owners
from ..values import ROUNDING, WAY_OUT, check_above, check_square, check_tensor, short
from .contract import KEPT, Curvature, Past, Representation, check_chunk, check_count
from .cost import Shapes, gathered, reduced, sides
from .direct import FactorizationError


class Layer:
    """left ⊗ right for the parameters of one layer: X ↦ left·X·right, where X (K, L, R) holds all of them.

    There are K independent blocks. A weight is X[:, :, :-1] and its bias X[:, :, -1]. A factor is a matrix (K, d, d) or
    the diagonal of one (K, d).
        linear    K = groups, left = B, right = A
        lookup    K = 1, left = diag A (how often each token occurs), right = B: the table is (tokens, outputs)
        small     L = 1, left = 1, right = the block itself
    """

    def __init__(
        self, members: list[int], sizes: Sequence[int], left: Tensor, right: Tensor, bias: bool, small: bool
    ) -> None:
        self.members, self.left, self.right = members, left, right
        self.bias = bias  # whether the last parameter is a bias
        self.small = small
        self.K, self.L = left.shape[:2]
        self.widths = [sizes[i] // (self.K * self.L) for i in members]  # columns of each parameter in X

    def join(self, parts: Iterable[Tensor]) -> Tensor:
        """X from the flat parameters"""
        pieces = [p.reshape(self.K, self.L, -1) for p in parts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)

    def split(self, X: Tensor) -> list[Tensor]:
        return [p.flatten() for p in X.split(self.widths, 2)]

    def times(self, X: Tensor) -> Tensor:
        """left·X·right"""
        left, right = self.left.to(X.dtype), self.right.to(X.dtype)
        X = left @ X if left.ndim == 3 else left[:, :, None] * X
        return X @ right if right.ndim == 3 else X * right[:, None]

    def diagonal(self) -> Tensor:
        """The diagonal of left ⊗ right: (K, L, R)"""
        return diagonal_of(self.left)[:, :, None] * diagonal_of(self.right)[:, None]

    def trace(self) -> Tensor:
        return (diagonal_of(self.left).sum(1) * diagonal_of(self.right).sum(1)).sum()

    def scales(self, D: Sequence[Part] | None) -> tuple[Tensor, Tensor] | None:
        """u (K, L) and v (K, R) with D = u ⊗ v; None if D, a part for each parameter, does not have that form"""
        one = self.left.new_ones(self.K, self.L)
        if D is None:
            return one, diagonal_of(torch.ones_like(self.right))
        if self.small:  # every D has that form
            return one, self.join(d.flat(self.K * width) for d, width in zip(D, self.widths, strict=True))[:, 0]
        us: list[Tensor] = []
        vs: list[Tensor] = []
        for d, width in zip(D, self.widths, strict=True):
            u, v = d.u, self.right.new_ones(self.K, width)
            if d.v is not None:
                v = d.v.view(self.K, width)
            elif d.entries is not None and d.entries.numel() == 1:
                v = v * d.entries.reshape(())
            elif d.entries is not None:
                X = d.entries.view(self.K, self.L, width)
                if torch.equal(X, X[:, :1].expand_as(X)):
                    v = X[:, 0]
                elif width == 1:  # one number per output of a bias
                    u = d.entries
                else:
                    return None
            us.append(one if u is None else u.view(self.K, self.L))
            vs.append(v)
        if not all(u is us[0] or torch.equal(u, us[0]) for u in us):
            return None
        return us[0], torch.cat(vs, 1)


def joined(key: tuple[int, ...], sums: Sums, other: tuple[int, ...], more: Sums) -> tuple[tuple[int, ...], Sums]:
    """The sum of both. A weight or a bias that is missing in one of them counts as having the input 0 there."""
    if len(key) < len(other):
        key, sums, other, more = other, more, key, sums
    if key != other:
        inputs, missing = sums.A.shape[1], sums.A.shape[1] - more.A.shape[1]
        before = missing if more.bias else 0  # the bias comes last
        more = replace(more, A=torch.nn.functional.pad(more.A, (before, missing - before) * 2), bias=sums.bias)
        assert more.A.shape[1] == inputs
    return key, sums + more


def over(ranks: Ranks, sums: dict[tuple[int, ...], Sums], device: torch.device) -> dict[tuple[int, ...], Sums]:
    """The sums over all ranks. A layer, or a part of it, that a rank lacks counts as zeros there."""
    if not ranks.several:
        return sums
    total: dict[tuple[int, ...], Sums] = {}
    for each in ranks.every({key: _on(torch.device("meta"), s) for key, s in sums.items()}):
        for key, form in each.items():
            for other in [k for k in total if set(k) & set(key)]:
                key, form = joined(key, form, other, total.pop(other))
            total[key] = form
    for key, form in total.items():
        total[key] = _on(device, form)
        for part in [k for k in sums if set(k) <= set(key)]:
            total[key] = joined(part, sums[part], key, total[key])[1]
    tensors = [t for s in total.values() for t in (s.A, s.B, torch.as_tensor(s.count).to(s.A)) if t is not None]
    found = iter(ranks.sums(tensors))
    each_with = ((key, s, next(found), None if s.B is None else next(found), next(found)) for key, s in total.items())
    return {key: replace(s, A=A, B=B, count=count) for key, s, A, B, count in each_with}


def _on(device: torch.device, s: Sums) -> Sums:
    """Zeros of the same form; shapes alone on the meta device"""
    A, B = (None if t is None else torch.zeros_like(t, device=device) for t in (s.A, s.B))
    return Sums(s.A if A is None else A, B, 0.0, s.bias, s.table)


def layer_of(members: list[int], sums: Sums, sizes: Sequence[int], scale: float) -> Layer:
    """The factors of a layer from the sums over the pieces: A is a mean over samples and positions, B a sum"""
    if sums.B is None:
        return Layer(members, sizes, torch.ones_like(sums.A[:, :1, 0]), sums.A * scale, sums.bias, True)
    A, B = sums.A / torch.as_tensor(sums.count).clamp(min=torch.finfo(sums.A.dtype).tiny), sums.B * scale
    left, right = (A, B) if sums.table else (B, A)
    return Layer(members, sizes, left, right, sums.bias, False)


class Factor(ABC):
    """M + c·diag w as a function of c (K, 1, 1): one side of H"""

    mean: Tensor  # of M_ii/w_i: (K, 1, 1)

    @abstractmethod
    def times(self, c: Tensor, X: Tensor) -> Tensor:
        """(M + c·diag w)X: (K, d, k) → (K, d, k)"""

    @abstractmethod
    def solve(self, c: Tensor, X: Tensor, jitter: float) -> tuple[Tensor, Tensor | None]:
        """(M + c·diag w)⁻¹X in the precision of X, and whether that failed"""

    def kept(self) -> dict[str, Tensor]:
        """The tensors from which later steps can restore the factor, if that saves time"""
        return {}


class DiagonalFactor(Factor):
    """M is diagonal."""

    def __init__(self, M: Tensor, w: Tensor) -> None:
        self.M, self.w = M[:, :, None], w[:, :, None]
        self.mean = (self.M / self.w).mean(1, keepdim=True)

    def times(self, c: Tensor, X: Tensor) -> Tensor:
        return (self.M + c * self.w).to(X.dtype) * X

    def solve(self, c: Tensor, X: Tensor, jitter: float) -> tuple[Tensor, Tensor | None]:
        total = (self.M + c * self.w).to(X.dtype)
        return X / total.where(total > 0, 1), None  # a total of 0 has no curvature and no gradient: X is 0 there


class FullFactor(Factor):
    """A factor with a Cholesky decomposition for every c."""

    def __init__(self, M: Tensor, w: Tensor) -> None:
        self.M, self.w = M, w[:, :, None]
        self.mean = (M.diagonal(dim1=1, dim2=2) / w).mean(1)[:, None, None]

    def times(self, c: Tensor, X: Tensor) -> Tensor:
        return self.M.to(X.dtype) @ X + (c * self.w).to(X.dtype) * X

    def solve(self, c: Tensor, X: Tensor, jitter: float) -> tuple[Tensor, Tensor | None]:
        H = self.M.to(X.dtype, copy=True)
        line = H.diagonal(dim1=1, dim2=2)
        line += (c * self.w)[:, :, 0].to(X.dtype)
        # Unit diagonal first: positive definiteness then no longer depends on the units of the parameters.
        s = line.where(line > 0, 1).rsqrt()[:, :, None]
        H *= s * s.mT
        line += jitter * H.shape[1]
        L, info = torch.linalg.cholesky_ex(H)
        return s * torch.cholesky_solve(s * X, L), info.any()


class Spectrum(Factor):
    """A factor with one eigendecomposition for all c: w^-½ M w^-½ = Q·diag e·Qᵀ."""

    def __init__(self, Q: Tensor, e: Tensor, w: Tensor) -> None:
        self.Q, self.e, self.w = Q, e, w  # (K, d, d), (K, d), (K, d)
        self.mean = e.mean(1)[:, None, None]

    @staticmethod
    def of(M: Tensor, w: Tensor) -> Spectrum:
        return spectra(ALONE, [(M, w)])[0]

    def kept(self) -> dict[str, Tensor]:
        return {"Q": self.Q, "e": self.e, "w": self.w}

    def times(self, c: Tensor, X: Tensor) -> Tensor:
        root = self.w.sqrt()[:, :, None].to(X.dtype)
        return root * self._with((self.e[:, :, None] + c).to(X.dtype), root * X)

    def solve(self, c: Tensor, X: Tensor, jitter: float) -> tuple[Tensor, Tensor | None]:
        s = self.w.rsqrt()[:, :, None].to(X.dtype)
        total = (self.e[:, :, None] + c).to(X.dtype)
        return s * self._with(1 / total.where(total > 0, 1), s * X), None

    def _with(self, values: Tensor, X: Tensor) -> Tensor:
        Q = self.Q.to(X.dtype)
        return Q @ (values * (Q.mT @ X))


def spectra(ranks: Ranks, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Spectrum]:
    """The spectrum for each M and w; each M is decomposed by one of the ranks."""
    scaled = [M * w.rsqrt()[:, :, None] * w.rsqrt()[:, None] for M, w in pairs]
    own = [decomposed(M) for M in owned(ranks, scaled)]
    found = completed(ranks, own, scaled, [(M, M[:, 0]) for M in scaled])
    if not all(ask(e.isfinite().all()) for _, e in found):
        raise FactorizationError("the curvature could not be decomposed")
    return [Spectrum(Q, e, w) for (Q, e), (_, w) in zip(found, pairs, strict=True)]


def decomposed(M: Tensor) -> tuple[Tensor, Tensor]:
    """Q and e with M = Q·diag e·Qᵀ, e at least its rounding; NaN if there is no decomposition: (K, d, d), (K, d)"""
    try:
        e, Q = torch.linalg.eigh(M)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return M, torch.full_like(M[:, 0], torch.nan)
    return Q, torch.maximum(e, torch.finfo(M.dtype).eps * M.shape[1] * e[:, -1:])


class Pair:
    """H = (left + √λ/π·diag u) ⊗ (right + π√λ·diag v) of one layer; 1 ⊗ (right + λ·diag v) of a small one"""

    def __init__(self, left: Factor, right: Factor, lam: Tensor, small: bool) -> None:
        self.left, self.right = left, right
        if small:
            self.c_left, self.c_right = torch.zeros_like(lam), lam.clone()
            return
        # For a layer without any curvature π is undefined, and any value will do.
        live = (left.mean > 0) & (right.mean > 0)
        pi = (right.mean / left.mean).where(live, 1).sqrt()
        self.c_left, self.c_right = lam.sqrt() / pi, lam.sqrt() * pi

    def times(self, X: Tensor) -> Tensor:
        return self.right.times(self.c_right, self.left.times(self.c_left, X).mT).mT


class Solver:
    """X ↦ H⁻¹X of one layer, and whether it failed."""

    def __init__(self, pair: Pair, dtype: torch.dtype, jitter: float) -> None:
        self.pair, self.dtype, self.jitter = pair, dtype, jitter
        self.failed: list[Tensor] = []

    def __call__(self, X: Tensor) -> Tensor:
        Y, first = self.pair.left.solve(self.pair.c_left, X, self.jitter)
        Z, second = self.pair.right.solve(self.pair.c_right, Y.mT, self.jitter)
        self.failed += [f for f in (first, second) if f is not None]
        return Z.mT


def diagonal_of(M: Tensor) -> Tensor:
    """The diagonal of a matrix that is given whole or by its diagonal: (K, d)"""
    return M if M.ndim == 2 else M.diagonal(dim1=1, dim2=2)


class NoFactors(ValueError):
    """A parameter is not part of one layer with Kronecker factors."""


@dataclass(frozen=True)
class Kronecker(Representation):
    """G ≈ B ⊗ A for every layer and 0 between layers: O² + I² numbers instead of (O·I)².

        A = mean of aaᵀ      over samples and positions; a the layer's input, with a 1 for the bias
        B = sum of δδᵀ       over rows, samples and positions; δ the gradients of the rows at the layer's output

    (Martens & Grosse 2015; convolutions Grosse & Martens 2016; positions of a sequence count as samples, which is the
    "expand" of Eschenhagen et al. 2023.) This is exact for one linear layer under squared error, and within every layer
    for one sample. With λD = λ·u ⊗ v the step solves with

        H = (B + √λ/π·diag u) ⊗ (A + π√λ·diag v)      π² = mean of A_ii/v_i over mean of B_oo/u_o

    Weight decay W is added to λD. If λD + W has the form u ⊗ v again, as for a D that is one number in every layer,
    these u and v are used above with λ = 1. Otherwise λ·u ⊗ v + w becomes (√λ·u + √w/ρ) ⊗ (√λ·v + ρ√w), where ρ² is the
    mean of v over that of u. If w differs by element, the largest w of each column is used for all of the column;
    nothing is lost for a weight (O, I) with a w (1, I).

    Layers: Linear, Conv, Embedding. If every output has separate inputs (scales of normalisation layers, depthwise
    convolutions), the block of each output is small and not approximated: there H = G + λD.

    On changing batches A and B are running averages, in which the past has the weight min(1 − 1/k, decay) in step k. On
    the same data again they are those of the data.

    With `every` > 1 the factors are decomposed in every `every`-th step, and the steps in between solve with the same
    A, B, u and v; λ is always that of the step. Products with G use the latest A and B. The quadratic model of the
    loss, and with it the gain ratio, uses the rows of the batch, as in Martens & Grosse, and so includes what lies
    between layers. Each of several ranks adds its samples to the factors, and solves for some of the layers.

    Args:
        decay: the largest weight of earlier batches in A and B.
        every: steps from one decomposition of the factors to the next.
        chunk: samples that are linearised at once; None for all.

    >>> opt = mq.LM(model, "mse", curvature=mq.Kronecker(), damping=mq.MeanEigenvalue())
    """

    adds_up = True

    decay: float = 0.95  # Martens & Grosse 2015, section 5
    every: int = 1
    chunk: int | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not 0 <= self.decay < 1:
            raise ValueError(f"{name}(decay={self.decay!r}): the weight of earlier batches, at least 0 (none), below 1")
        if not isinstance(self.every, int) or self.every < 1:
            raise ValueError(
                f"{name}(every={self.every!r}): steps from one decomposition to the next, an integer of at least 1"
            )
        check_chunk(self.chunk)

    @cached_property
    def needs(self) -> Needs:
        return Needs(self.chunk)

    def sent(self, s: Shapes) -> float:
        """The factors of all layers, the gradient, H⁻¹g for the layers of each rank, and the step"""
        return reduced(s, sides(s) + 2.0 * s.n) + gathered(s, s.n)

    def form(self, lin: Linearization) -> KroneckerCurvature:
        return KroneckerCurvature(lin, self.decay, self.every)

    def check(self, past: Past, sizes: Mapping[str, int]) -> None:
        if not past:
            return
        if "count" not in past:
            raise ValueError(f"{KEPT} has no entry 'count': {WAY_OUT}")
        for key, t in past.items():
            if key in ("count", "age"):
                check_count(t, key, key == "count")
                continue
            part, found, names = key.rpartition(" of ") if key.count(" of ") else ("", "", "")
            where = f"{KEPT} {key!r}"
            size = sum(sizes.get(name, 0) for name in names.split(","))
            if not found or any(name not in sizes for name in names.split(",")):
                raise ValueError(f"{KEPT} has an entry {short(key)}, which no layer of this model has: {WAY_OUT}")
            self.check_part(part, t, [past.get(f"{side} of {names}") for side in ("left", "right")], size, where)

    def check_part(self, part: str, t: Tensor, sides: Sequence[Tensor | None], size: int, where: str) -> None:
        """Checks a factor of a layer with parameters of this total size, or a tensor derived from it"""
        left, right = sides
        if left is None or right is None or min(left.ndim, right.ndim) < 2 or len(left) != len(right):
            raise ValueError(f"{where} is without a left and a right factor that belong together: {WAY_OUT}")
        if part not in ("left", "right"):
            return check_kept(part, t, sides, where)
        d = t.shape[-1]
        check_tensor(t, where, (None, d, d) if t.ndim == 3 else (None, d))
        (check_above if t.ndim == 2 else check_square)(t, where)
        if len(left) * left.shape[-1] * right.shape[-1] != size:
            shapes = f"{tuple(left.shape)} and {tuple(right.shape)}"
            raise ValueError(f"{where}: factors {shapes} are not those of a layer of {size} parameters: {WAY_OUT}")


def check_kept(part: str, t: Tensor, sides: Sequence[Tensor | None], where: str) -> None:
    """Checks Q, e or w of the decomposition of a factor"""
    name, _, side = part.partition(" of ")
    if name not in ("Q", "e", "w") or side not in ("left", "right"):
        raise ValueError(f"{where} is nothing that this version knows: {WAY_OUT}")
    M = sides[side == "right"]
    assert M is not None
    check_tensor(t, where, (len(M), *[M.shape[-1]] * (2 if name == "Q" else 1)))
    if name != "Q":
        return check_above(t, where, strictly=name == "w")
    Q = t.double()
    if bool(((Q.mT @ Q) - torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device)).abs().max() > ROUNDING):
        raise ValueError(f"{where} is not orthogonal: {WAY_OUT}")


class KroneckerCurvature(Curvature):
    separable = True

    def __init__(self, lin: Linearization, decay: float = 0.0, every: int = 1) -> None:
        super().__init__(lin)
        self.decay, self.every = decay, every
        self._count = torch.ones((), dtype=torch.int64, device=self.parameters.device)  # batches in the averages
        self._age = 0  # steps since the decomposition
        self._earlier: Past = {}  # the averages before this batch
        self._recalled: Past = {}  # contains a decomposition that is recent enough
        self._decomposed: tuple[object, list[tuple[Factor, Factor]]] | None = None  # D₀, and the factors made with it
        sums = self._sums()
        self.layers = [layer_of(list(key), s, self.parameters.sizes, lin.scale) for key, s in sums.items()]
        for i in sorted(set(range(len(self.parameters))) - {i for key in sums for i in key}):  # no influence
            zero = lin.theta.new_zeros(self.parameters.sizes[i], 1)
            self.layers.append(Layer([i], self.parameters.sizes, zero + 1, zero, bias=False, small=True))

    def _sums(self) -> dict[tuple[int, ...], Sums]:
        """The sums of all pieces, by the parameters of each layer"""
        sums: dict[tuple[int, ...], Sums] = {}
        for piece in self.lin.pieces():
            weight = piece.jacobian.forward.batch.weight  # of those samples that have rows
            if weight is not None and piece.whole.joined:
                raise ValueError(
                    "rows of all samples together have no Kronecker factors with a weight per sample: take rows of "
                    "every sample, rows=mq.Exact(), or curvature=mq.Gram()"
                )
            for block in (b for b in piece.blocks if not b.empty):
                key = tuple(self.parameters.of(block))
                found = block.sums(weight)
                if found is None:
                    raise NoFactors(
                        f"parameter {self.parameters.names[key[0]]!r} has no Kronecker factors: it would have to "
                        "belong to one Linear, Conv, Embedding or normalisation layer that sees all samples in their "
                        "order; use curvature=mq.MatrixFree(), mq.Dense() or mq.Gram()"
                    )
                # A weight or a bias may have no influence in another piece, where its layer then lacks it.
                for other in [k for k in sums if set(k) & set(key)]:
                    key, found = joined(key, found, other, sums.pop(other))
                sums[key] = found
        return over(self.lin.ranks, sums, self.parameters.device)

    def recall(self, past: Past | None, same_data: bool) -> None:
        if past is None or "count" not in past:
            return
        if self.decay > 0 and not same_data:
            self._earlier, self._count = past, past["count"] + 1
            weight = self._weight()
            for layer in self.layers:
                for side, new in (("left", layer.left), ("right", layer.right)):
                    old = past.get(f"{side} of {self._name(layer)}")
                    if old is not None and old.shape == new.shape:
                        old = old.to(new)
                        share = weight * trusted(diagonal_of(old).sum(0), diagonal_of(new).sum(0)).to(new)
                        setattr(layer, side, torch.lerp(new, old, share))
        if "age" in past and int(past["age"]) + 1 < self.every:
            self._recalled, self._age = past, int(past["age"]) + 1

    def _weight(self) -> Tensor:
        """The weight of the past in the running averages: ()"""
        return (1 - 1 / self._count.to(self.parameters.dtype)).clamp(max=self.decay)

    def keep(self) -> Past | None:
        """The averages, and with `every` > 1 the decompositions"""
        if self.decay == 0 and self.every == 1:
            return None
        kept = {"count": self._count}
        for layer in self.layers:
            kept[f"left of {self._name(layer)}"], kept[f"right of {self._name(layer)}"] = layer.left, layer.right
        if self.every > 1 and self._decomposed is not None:
            kept["age"] = torch.tensor(self._age, device=self.parameters.device)
            for layer, pair in zip(self.layers, self._decomposed[1], strict=True):
                for side, factor in zip(("left", "right"), pair, strict=True):
                    kept |= {f"{part} of {side} of {self._name(layer)}": t for part, t in factor.kept().items()}
        return kept

    def _name(self, layer: Layer) -> str:
        return ",".join(self.parameters.names[i] for i in layer.members)

    def _by_layer(self, v: Tensor, functions: Iterable[Callable[[Tensor], Tensor]]) -> Tensor:
        """v with one function, X ↦ Y, applied to every layer: (n,) → (n,)"""
        parts = self.parameters.split(v)
        pairs = zip(self.layers, functions, strict=True)
        return self._joined(function(layer.join(parts[i] for i in layer.members)) for layer, function in pairs)

    def _by_own_layers(self, v: Tensor, solvers: Sequence[Solver]) -> tuple[Tensor, Tensor]:
        """H⁻¹v, of which each rank solves for its layers, and whether any solver has failed"""
        ranks = self.lin.ranks
        own = owners([max(layer.left, layer.right, key=Tensor.numel) for layer in self.layers], ranks.size)
        x = self._by_layer(v, [s if k == ranks.rank else torch.zeros_like for s, k in zip(solvers, own, strict=True)])
        failed = torch.stack([v.new_zeros(()).bool(), *(f for solver in solvers for f in solver.failed)]).any()
        x, failures = ranks.sums([x, failed.to(x)])
        return x, failures > 0

    def _joined(self, matrices: Iterable[Tensor]) -> Tensor:
        """One vector from the X of every layer: (n,)"""
        pieces: list[Tensor] = [torch.empty(0)] * len(self.parameters)
        for layer, X in zip(self.layers, matrices, strict=True):
            for i, x in zip(layer.members, layer.split(X), strict=True):
                pieces[i] = x
        return torch.cat(pieces)

    # G itself.

    def __matmul__(self, v: Tensor) -> Tensor:
        return self._by_layer(v, [layer.times for layer in self.layers])

    def products(self, V: Tensor) -> Tensor:
        """From the rows of the batch, which include what lies between layers"""
        rows = torch.cat([torch.stack([piece.apply(v) for v in V]) for piece in self.lin.pieces()], 1)  # (k, m)
        return self.lin.ranks.sum(self.lin.scale * (rows @ rows.T))

    def model(self, d: Tensor) -> tuple[Tensor, Tensor]:
        return self.parameters.dot(self.gradient, d), self.products(d[None])[0, 0]

    def diagonal(self) -> Tensor:
        return self._joined(layer.diagonal() for layer in self.layers)

    def trace(self) -> Tensor:
        return torch.stack([trace for _, trace, _ in self.traces()]).sum()

    def traces(self) -> list[tuple[list[int], Tensor, int]]:
        sizes, most = self.parameters.sizes, self.lin.most
        return [(x.members, x.trace(), min(sum(sizes[i] for i in x.members), most)) for x in self.layers]

    def moments(self) -> Iterator[Moments]:
        """Inputs are the diagonal of the right factor: A for a weight. For an embedding A and B are exchanged"""
        for layer in self.layers:
            inputs = None
            if not layer.small and not (layer.bias and len(layer.members) == 1):
                inputs = diagonal_of(layer.right)[:, None, : layer.widths[0]]  # (K, 1, R)
            yield Moments(layer.members, layer.split(layer.diagonal()), inputs)

    # H, the damped factors.

    def with_decay(self, A: Metric) -> Metric:
        """λD + W in the form of D, u ⊗ v in every layer. Kept factors contain the λD + W of their step."""
        if self.lin.decay is None:
            return A
        w = self.lin.decay.weights
        for layer in (x for x in self.layers if not x.small and sum(x.widths) > 1):
            w = w.by_columns(layer.members, layer.K, layer.L)
        found = A.plus(w, self.parameters.sizes)
        if self.every > 1 and found.shape is not None:
            raise ValueError(
                f"Kronecker(every={self.every}) keeps factors for other λ, and λD + weight decay must be one number "
                "for that: use every=1, or damping=mq.MeanEigenvalue() with the same weight decay for all parameters"
            )
        return found

    def newton(self, damping: Metric | Tensor) -> Tensor:
        A, g = Diagonal.of(damping, self.parameters.sizes), self.gradient
        for dtype in dict.fromkeys((g.dtype, torch.float64)):
            for jitter in (0.0, 10 * torch.finfo(g.dtype).eps) if dtype == torch.float64 else (0.0,):
                solvers = [Solver(pair, dtype, jitter) for pair in self._damped(A)]
                x, failed = self._by_own_layers(g.to(dtype), solvers)
                if ask(x.isfinite().all() & ~failed):
                    x = x.to(g.dtype)
                    if dtype != g.dtype:
                        self.notes.append("factored in float64")
                    if jitter:
                        self.notes.append("factored with jitter")
                    return x
        raise FactorizationError("the damped curvature could not be factored")

    def damped_quadratic(self, v: Tensor, damping: Metric) -> Tensor:
        return self.parameters.dot(v, self._by_layer(v, [pair.times for pair in self._damped(damping)]))

    def _damped(self, A: Metric) -> list[Pair]:
        """H by layers. The factors do not depend on the scale of A, so they are used again for another λ."""
        if self._decomposed is None or self._decomposed[0] is not A.shape:
            self._decomposed = (A.shape, self._factors(A.parts))
        return [
            Pair(*factors, A.scale, layer.small)
            for layer, factors in zip(self.layers, self._decomposed[1], strict=True)
        ]

    def _factors(self, D: Sequence[Part] | None) -> list[tuple[Factor, Factor]]:
        """Both factors of every layer"""
        asked: list[tuple[Tensor, Tensor]] = []  # the pairs of M and w that are to be decomposed
        sides: list[Factor | None] = []
        for layer in self.layers:
            scales = layer.scales(None if D is None else [D[i] for i in layer.members])
            if scales is None:
                raise ValueError(
                    f"Kronecker cannot damp every entry of {self._name(layer)!r} by a number of its own: use "
                    "damping=mq.FactoredMaxDiagonal(), mq.Identity(), or curvature=mq.Dense() or mq.Gram()"
                )
            for side, M, w in zip(("left", "right"), (layer.left, layer.right), scales, strict=True):
                sides.append(self._factor(f"{side} of {self._name(layer)}", M, w, layer.small))
                if sides[-1] is None:
                    asked.append((M, w))
        found = iter(spectra(self.lin.ranks, asked))
        whole = iter(next(found) if side is None else side for side in sides)
        return [(next(whole), next(whole)) for _ in self.layers]

    def _factor(self, where: str, M: Tensor, w: Tensor, small: bool) -> Factor | None:
        """The factor of M, or None if it has to be decomposed now"""
        if M.ndim == 2:
            return DiagonalFactor(M, w)
        if self.every == 1 or small:
            return FullFactor(M, w)
        kept = [self._recalled.get(f"{part} of {where}") for part in ("Q", "e", "w")]
        if kept[0] is not None and kept[1] is not None and kept[2] is not None and kept[0].shape == M.shape:
            return Spectrum(kept[0].to(M), kept[1].to(M), kept[2].to(M))
        return None


ONE_NUMBER = (
    "EKFAC can be damped by one number for all parameters alone, which every eigenbasis leaves as it is: "
    "use damping=mq.MeanEigenvalue() or mq.Identity(), or curvature=mq.Kronecker()"
)


@dataclass(frozen=True)
class EKFAC(Kronecker):
    """G ≈ Q·diag s·Qᵀ for every layer, with Q = Q_B ⊗ Q_A from the eigenvectors of Kronecker's factors B and A.

        s = Σ (Qᵀx)²      over the rows x of the layer's J̃, each summed over positions first

    (George et al. 2018.) Of all matrices that are diagonal in this basis this is the nearest to the layer's block of G.
    It is never further from that block than B ⊗ A, which is one of these matrices. The step solves with

        H = Q·diag(s + λ + w)·Qᵀ      for a D that is one number: no other is diagonal in every basis, and it is refused

    Weight decay w may differ between layers. If it differs within a layer, as between a weight and its bias, w is the
    diagonal of QᵀWQ, just as s is that of QᵀGQ; the gradient contains all of W.

    On changing batches s is a running average like A and B, although the eigenvectors of A and B change meanwhile.

    Args:
        decay: the largest weight of earlier batches in A, B and s.
        chunk: samples that are linearised at once; None for all.

    >>> opt = mq.LM(model, "mse", curvature=mq.EKFAC(), damping=mq.MeanEigenvalue())
    """

    every: int = field(default=1, init=False, repr=False)  # the basis is always that of the step

    def sent(self, s: Shapes) -> float:
        """What Kronecker sends, and every eigenbasis with the second moments in it; every rank computes the whole
        step"""
        return super().sent(s) + gathered(s, sides(s))

    def form(self, lin: Linearization) -> EKFACCurvature:
        return EKFACCurvature(lin, self.decay)

    def check_part(self, part: str, t: Tensor, sides: Sequence[Tensor | None], size: int, where: str) -> None:
        left, right = sides
        if part != "s" or left is None or right is None:
            return super().check_part(part, t, sides, size, where)
        check_tensor(t, where, (len(left), left.shape[-1], right.shape[-1]))
        check_above(t, where)


class Basis:
    """Q_left ⊗ Q_right of one layer with its s: X ↦ Q_left·(f(s) ∘ Q_leftᵀ·X·Q_right)·Q_rightᵀ, X as in Layer."""

    def __init__(self, layer: Layer, left: Tensor | None, right: Tensor | None) -> None:
        self.left, self.right = left, right  # (K, d, d), or None for the unit vectors
        self.s = torch.zeros_like(layer.diagonal())  # (K, L, R)

    def times(self, f: Callable[[Tensor], Tensor], damping: Tensor | float, X: Tensor) -> Tensor:
        """Q·f(s + damping)·QᵀX"""
        left, right = (None if Q is None else Q.to(X.dtype) for Q in (self.left, self.right))
        X = X if left is None else left.mT @ X
        X = f(self.s + damping).to(X.dtype) * (X if right is None else X @ right)
        X = X if left is None else left @ X
        return X if right is None else X @ right.mT

    def diagonal(self) -> Tensor:
        """The diagonal of Q·diag s·Qᵀ: (K, L, R)"""
        X = self.s if self.left is None else self.left.square() @ self.s
        return X if self.right is None else X @ self.right.square().mT


class EKFACCurvature(KroneckerCurvature):
    separable, selects = False, True

    def __init__(self, lin: Linearization, decay: float = 0.0) -> None:
        super().__init__(lin, decay)
        self._bases: list[Basis] | None = None

    def keep(self) -> Past | None:
        kept = super().keep()
        pairs = zip(self.layers, self.bases, strict=True)
        return None if kept is None else kept | {f"s of {self._name(layer)}": basis.s for layer, basis in pairs}

    @property
    def bases(self) -> list[Basis]:
        """The basis of every layer. s takes another pass over the rows, after the factors are known"""
        if self._bases is None:
            self._bases = bases_of(self.layers, self.lin.ranks)
            found = {i: basis for x, basis in zip(self.layers, self._bases, strict=True) for i in x.members}
            for piece in self.lin.pieces():
                for block in (b for b in piece.blocks if not b.empty):
                    basis = found[self.parameters.of(block)[0]]
                    basis.s = basis.s + self.lin.scale * block.second_moments(basis.left, basis.right)
            for basis, s in zip(self._bases, self.lin.ranks.sums([basis.s for basis in self._bases]), strict=True):
                basis.s = s
            for layer, basis in zip(self.layers, self._bases, strict=True):
                old = self._earlier.get(f"s of {self._name(layer)}")
                if old is not None and old.shape == basis.s.shape:
                    share = self._weight() * trusted(old.flatten(), basis.s.flatten()).to(basis.s)
                    basis.s = basis.s.lerp(old.to(basis.s), share)
        return self._bases

    def __matmul__(self, v: Tensor) -> Tensor:
        return self._by_layer(v, [partial(basis.times, lambda s: s, 0.0) for basis in self.bases])

    def with_decay(self, A: Metric) -> Metric:
        if A.shape is not None:
            raise ValueError(ONE_NUMBER)
        decay = self.lin.decay
        return A if decay is None else A.sum(decay.weights, self.parameters.sizes)

    def newton(self, damping: Metric | Tensor) -> Tensor:
        A = Diagonal.of(damping, self.parameters.sizes)
        x = self._damped_with(A, lambda s: 1 / s.where(s > 0, 1), self.gradient)
        if not ask(x.isfinite().all()):
            raise FactorizationError("the step is not finite")
        return x

    def damped_quadratic(self, v: Tensor, damping: Metric) -> Tensor:
        return self.parameters.dot(v, self._damped_with(damping, lambda s: s, v))

    def _damped_with(self, A: Metric, f: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
        """Q·f(s + λ + w)·Qᵀv: (n,) → (n,)"""
        pairs = zip(self.layers, self.bases, strict=True)
        return self._by_layer(v, [partial(basis.times, f, self._in_basis(A, x, basis)) for x, basis in pairs])

    def _in_basis(self, A: Metric, layer: Layer, basis: Basis) -> Tensor:
        """The diagonal of QᵀAQ, exact if A is one number in the layer: (), (K, 1, R) or (K, L, R)"""
        if A.parts is None:
            return A.scale
        entries = [part.entries for part in (A.parts[i] for i in layer.members)]
        numbers = [e for e in entries if e is not None and e.numel() == 1]
        if len(numbers) < len(entries):
            each = zip((A.parts[i] for i in layer.members), layer.widths, strict=True)
            X = layer.join(part.flat(layer.K * layer.L * width) for part, width in each) * A.scale  # (K, L, R)
            X = X if basis.left is None else basis.left.square().mT @ X
            return X if basis.right is None else X @ basis.right.square()
        columns = torch.cat([e.expand(width) for e, width in zip(numbers, layer.widths, strict=True)]) * A.scale  # (R,)
        return columns if basis.right is None else (columns @ basis.right.square())[:, None]

    # Statistics.

    def diagonal(self) -> Tensor:
        return self._joined(basis.diagonal() for basis in self.bases)

    def traces(self) -> list[tuple[list[int], Tensor, int]]:
        pairs = zip(super().traces(), self.bases, strict=True)
        return [(members, basis.s.sum(), rank) for (members, _, rank), basis in pairs]


def bases_of(layers: Sequence[Layer], ranks: Ranks) -> list[Basis]:
    """The eigenbasis of every layer; for a factor that is diagonal these are the unit vectors."""
    sides = [M for layer in layers for M in (layer.left, layer.right)]
    found = iter(spectra(ranks, [(M, torch.ones_like(M[:, 0])) for M in sides if M.ndim == 3]))
    Q = iter(next(found).Q if M.ndim == 3 else None for M in sides)
    return [Basis(layer, next(Q), next(Q)) for layer in layers]
