"""G layer by layer as a Kronecker product B ⊗ A, from the layer's inputs and the gradients at its outputs (KFAC)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..jacobian.linearization import Linearization
from ..layers import Block, Nothing
from ..layers.bilinear import Bilinear
from ..layers.lookup import Lookup
from ..metric import Diagonal, Factors, known, known_entries
from .contract import Curvature, FactorizationError, Past, one_each, trusted
from .dense import check_chunk


@dataclass(frozen=True)
class Kronecker:
    """G ≈ B ⊗ A for every layer and nothing between layers: O² + I² numbers in the place of (O·I)².

        A = mean of aaᵀ      over samples and positions; a the layer's input, with a 1 for the bias
        B = sum of δδᵀ       over rows, samples and positions; δ the gradients of the rows at the layer's output

    (Martens & Grosse 2015; convolutions Grosse & Martens 2016; positions of a sequence count as samples, which is the
    "expand" of Eschenhagen et al. 2023.) It is exact for one linear layer under squared error, and for one sample
    within every layer. With λD = λ·u ⊗ v the step solves with

        H = (B + √λ/π·diag u) ⊗ (A + π√λ·diag v)      π² = mean of A_ii/v_i over mean of B_oo/u_o

    Layers: Linear, Conv, Embedding. Where every output has inputs of its own (scales of normalisation layers, depthwise
    convolutions) the block of each output is small, and taken as it is: H = G + λD there.

    From batch to batch A and B are running averages; the past has the weight min(1 − 1/k, decay) in step k. On the
    same data again they are those of the data.

    With `every` > 1 the factors are decomposed in one step of so many, and the step solves with factors A, B, u and v
    as old as that; λ is always that of the step. Products with G (and so the gain ratio) use the latest A and B.
    """

    decay: float = 0.95  # Martens & Grosse 2015, section 5
    every: int = 1
    chunk: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(
                f"Kronecker(decay={self.decay!r}): the weight of earlier batches, at least 0 (none) and below 1"
            )
        if not isinstance(self.every, int) or self.every < 1:
            raise ValueError(
                f"Kronecker(every={self.every!r}): steps from one decomposition to the next, an integer of at least 1"
            )
        check_chunk(self.chunk)

    @property
    def by_sample(self) -> bool:
        return True

    def represent(self, lin: Linearization) -> KroneckerCurvature:
        return KroneckerCurvature(lin, self.decay, self.every)


class Layer:
    """left ⊗ right for the parameters of one layer: X ↦ left·X·right with all of them in one X (K, L, R).

    K independent blocks. A weight is X[:, :, :-1] and its bias X[:, :, -1]. A factor is a matrix (K, d, d) or the
    diagonal of one (K, d).
        linear    K = groups, left = B, right = A
        lookup    K = 1, left = diag A (how often each token occurs), right = B: the table is (tokens, outputs)
        small     L = 1, left = 1, right = the block itself
    """

    def __init__(
        self, members: list[int], sizes: Sequence[int], left: Tensor, right: Tensor, bias: bool, small: bool
    ) -> None:
        self.members, self.left, self.right = members, left, right
        self.bias = bias  # whether the last parameter is one
        self.small = small
        self.K, self.L = left.shape[:2]
        self.widths = [sizes[i] // (self.K * self.L) for i in members]  # columns of each parameter in X

    def join(self, parts: Iterable[Tensor]) -> Tensor:
        """X from the parameters, each flat"""
        pieces = [p.reshape(self.K, self.L, -1) for p in parts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)

    def split(self, X: Tensor) -> list[Tensor]:
        return [p.flatten() for p in X.split(self.widths, 2)]

    def times(self, X: Tensor) -> Tensor:
        """left·X·right"""
        left, right = self.left.to(X.dtype), self.right.to(X.dtype)
        X = left @ X if left.ndim == 3 else left[:, :, None] * X
        return X @ right if right.ndim == 3 else X * right[:, None]

    def diagonal(self, _: Tensor) -> Tensor:
        """Of left ⊗ right: (K, L, R)"""
        return _diagonal(self.left)[:, :, None] * _diagonal(self.right)[:, None]

    def trace(self) -> Tensor:
        return (_diagonal(self.left).sum(1) * _diagonal(self.right).sum(1)).sum()

    def scales(self, D: Sequence[Factors] | None) -> tuple[Tensor, Tensor] | None:
        """u (K, L) and v (K, R) with D = u ⊗ v, None where D (of each parameter) is not of that form"""
        ones = self.left.new_ones(self.K, self.L, 1)
        if D is None:
            return ones[:, :, 0], _diagonal(torch.ones_like(self.right))
        if self.small:  # every D is
            sizes = [width * self.K for width in self.widths]
            return ones[:, :, 0], self.join(Diagonal(ones[0, 0, 0], D).entries(sizes).split(sizes))[:, 0]
        us: list[Tensor] = []
        vs: list[Tensor] = []
        for factors, width in zip(D, self.widths, strict=True):
            u, v = ones, self.right.new_ones(self.K, 1, width)
            for f in factors:
                if f.numel() == 1:
                    v = v * f.reshape(())
                elif f.shape == (self.K, self.L, 1) or (width == 1 and f.shape == (self.K * self.L,)):
                    u = f.view(self.K, self.L, 1) if u is ones else u * f.view(self.K, self.L, 1)
                elif f.shape == (self.K, 1, width):
                    v = v * f
                else:
                    return None
            us.append(u)
            vs.append(v)
        if not all(u is us[0] or torch.equal(u, us[0]) for u in us):
            return None
        return us[0][:, :, 0], torch.cat(vs, 2)[:, 0]


class Sums:
    """What the chunks add up to for one layer, before anything is divided."""

    def __init__(self) -> None:
        self.A: Tensor | None = None
        self.B: Tensor | None = None
        self.count: Tensor | float = 0.0  # samples times positions, by weight
        self.bias = False

    def add(self, block: Block, weight: Tensor | None) -> None:
        if isinstance(block, Lookup):
            each = torch.ones_like(block.delta[0, :, :, 0])  # (N, P)
            each = each if weight is None else each * weight.to(each)[:, None]
            A = each.new_zeros(1, len(block.table)).index_add_(1, block.index.flatten(), each.reshape(1, -1))
            self._plus(A, _moment(block.delta.reshape(1, -1, block.E)), each.sum())
            return
        assert isinstance(block, Bilinear)
        self.bias = block.bias is not None
        if block.G > 1 and block.O == 1:
            self._plus(self._small(block), None, 1.0)
            return
        a = block.a.permute(2, 0, 1, 3).reshape(block.G, block.N * block.P, block.I)  # (G, N·P, I)
        each = a.new_ones(block.N) if weight is None else weight.to(a)
        each = each.repeat_interleave(block.P)[:, None]  # (N·P, 1)
        A = a.mT @ (a if weight is None else a * each)
        if self.bias:  # the row and the column of its input 1, without a copy of a
            A = torch.nn.functional.pad(A, (0, 1, 0, 1))
            A[:, -1, :-1] = A[:, :-1, -1] = (a.mT @ each)[:, :, 0]
            A[:, -1, -1] = each.sum()
        self._plus(A, _moment(block.delta.permute(3, 0, 1, 2, 4).reshape(block.G, -1, block.O)), each.sum())

    def _small(self, block: Bilinear) -> Tensor:
        """The block of every output itself, Σ xxᵀ with x = Σₚ δₚaₚ: (G, I, I)"""
        total = block.a.new_zeros(())
        for delta in block.delta[..., 0]:  # (N, P, G), row by row to bound the memory
            pieces = [torch.einsum("npg,npgi->gni", delta, block.a)]
            if block.bias is not None:
                pieces.append(delta.sum(1).T[:, :, None])
            total = total + _moment(torch.cat(pieces, 2))
        return total

    def _plus(self, A: Tensor, B: Tensor | None, count: Tensor | float) -> None:
        self.A = A if self.A is None else self.A + A
        self.B = B if self.B is None or B is None else self.B + B
        self.count = self.count + count

    def layer(self, members: list[int], lin: Linearization) -> Layer:
        assert self.A is not None
        if self.B is None:
            return Layer(members, lin.sizes, torch.ones_like(self.A[:, :1, 0]), self.A * lin.scale, self.bias, True)
        A, B = self.A / torch.as_tensor(self.count).clamp(min=torch.finfo(self.A.dtype).tiny), self.B * lin.scale
        left, right = (A, B) if A.ndim == 2 else (B, A)
        return Layer(members, lin.sizes, left, right, self.bias, False)


class KroneckerCurvature(Curvature):
    def __init__(self, lin: Linearization, decay: float = 0.0, every: int = 1) -> None:
        self.decay, self.every = decay, every
        self._count = torch.ones((), dtype=torch.int64, device=lin.device)  # batches in the averages
        self._age = 0  # steps since the decomposition
        self._recalled: Past = {}  # with a decomposition that is still good
        self._decomposed: tuple[tuple[Factors, ...] | None, list[tuple[Factor, Factor]]] | None = None
        if lin.single and lin.chunk is None:
            lin.open()
        sums: dict[tuple[int, ...], Sums] = {}
        for chunk in lin.chunks():
            weight = chunk.picked_from.batch.weight  # of the samples that have rows
            for block in chunk.blocks:
                if isinstance(block, Nothing):
                    continue
                key = tuple(lin.index[id(p)] for p in block.params)
                if not isinstance(block, (Bilinear, Lookup)):
                    raise ValueError(
                        f"parameter {lin.names[key[0]]!r} has no Kronecker factors: it would have to belong to one "
                        "Linear, Conv, Embedding or normalisation layer that sees all samples in their order; use "
                        "curvature=mq.MatrixFree(), mq.Dense() or mq.Gram()"
                    )
                sums.setdefault(key, Sums()).add(block, weight)
        super().__init__(lin)
        self.layers = [s.layer(list(key), lin) for key, s in sums.items()]
        for i in sorted(set(range(len(lin.params))) - {i for key in sums for i in key}):  # no output depends on them
            zero = lin.theta.new_zeros(lin.sizes[i], 1)
            self.layers.append(Layer([i], lin.sizes, zero + 1, zero, bias=False, small=True))

    def recall(self, past: Past | None, steps: int, same_data: bool) -> None:
        self.averaged = self.decay > 0 and not same_data
        if past is None or "count" not in past:
            return
        if self.averaged:
            self._count = past["count"] + 1
            weight = (1 - 1 / self._count.to(self.lin.theta)).clamp(max=self.decay)
            for layer in self.layers:
                for side, new in (("left", layer.left), ("right", layer.right)):
                    old = past.get(f"{side} of {self._name(layer)}")
                    if old is not None and old.shape == new.shape:
                        old = old.to(new)
                        share = weight * trusted(_diagonal(old).sum(0), _diagonal(new).sum(0)).to(new)
                        setattr(layer, side, torch.lerp(new, old, share))
        if "age" in past and int(past["age"]) + 1 < self.every:
            self._recalled, self._age = past, int(past["age"]) + 1

    def keep(self) -> Past | None:
        """The averages, and with `every` > 1 the decompositions"""
        if self.decay == 0 and self.every == 1:
            return None
        kept = {"count": self._count}
        for layer in self.layers:
            kept[f"left of {self._name(layer)}"], kept[f"right of {self._name(layer)}"] = layer.left, layer.right
        if self.every > 1 and self._decomposed is not None:
            kept["age"] = torch.tensor(self._age, device=self.lin.device)
            for layer, pair in zip(self.layers, self._decomposed[1], strict=True):
                for side, factor in zip(("left", "right"), pair, strict=True):
                    if isinstance(factor, Spectrum):
                        where = f"{side} of {self._name(layer)}"
                        kept |= {f"Q of {where}": factor.Q, f"e of {where}": factor.e, f"w of {where}": factor.w}
        return kept

    def _name(self, layer: Layer) -> str:
        return ",".join(self.lin.names[i] for i in layer.members)

    def _by_layer(self, v: Tensor, functions: Iterable[Callable[[Tensor], Tensor]]) -> Tensor:
        """One function for every layer, X ↦ Y: (n,) → (n,)"""
        found, parts = torch.empty_like(v), v.split(self.lin.sizes)
        pieces = found.split(self.lin.sizes)
        for layer, function in zip(self.layers, functions, strict=True):
            Y = function(layer.join(parts[i] for i in layer.members))
            for i, y in zip(layer.members, layer.split(Y), strict=True):
                pieces[i].copy_(y)
        return found

    # G itself.

    def __matmul__(self, v: Tensor) -> Tensor:
        return self._by_layer(v, [layer.times for layer in self.layers])

    def diagonal(self) -> Tensor:
        return self._by_layer(self.lin.theta, [layer.diagonal for layer in self.layers])

    def trace(self) -> Tensor:
        return torch.stack([layer.trace() for layer in self.layers]).sum()

    def traces(self) -> Diagonal:
        means = [self.lin.theta.new_zeros(())] * len(self.lin.params)
        for layer in self.layers:
            size = sum(self.lin.sizes[i] for i in layer.members)
            for i in layer.members:
                means[i] = layer.trace() / min(size, self.lin.most)
        return one_each(means)

    def maximum(self, D: Diagonal | None, floor: float) -> Diagonal:
        """The factored one. u and v start at √floor: D = u ⊗ v starts at the floor in a weight, at its root in a bias,
        whose v is 1. Entries of small blocks start at the floor."""
        return self._maximum(D, floor)

    def factored_maximum(self, D: Diagonal | None) -> Diagonal:
        """v_i ← max(v_i, A_ii), u_o ← max(u_o, max_i B_oo·A_ii/v_i); an embedding has A and B the other way round.
        Small blocks: max(D, diag G)."""
        return self._maximum(D, 0.0)

    def _maximum(self, D: Diagonal | None, floor: float) -> Diagonal:
        parts: list[Factors] = [()] * len(self.lin.params)
        before = [()] * len(parts) if D is None or D.factors is None else D.factors
        for layer in self.layers:
            if layer.small:
                diagonal = layer.split(layer.diagonal(layer.left))
                for i, new in zip(layer.members, diagonal, strict=True):
                    parts[i] = (known_entries(_larger(before[i], 0, new, floor), self.lin.params[i]),)
                continue
            first, old = layer.members[0], before[layer.members[0]]
            u, v = _diagonal(layer.left)[:, :, None], _diagonal(layer.right)[:, None]  # (K, L, 1), (K, 1, R)
            if layer.bias and len(layer.members) == 1:  # its input is 1
                parts[first] = (known(_larger(old, 0, u, floor**0.5), 1),)
                continue
            v = v[:, :, : layer.widths[0]]
            top = _larger(old, 1, v, floor**0.5)
            if not layer.bias:
                u = u * (v / top).where(top > 0, 0).amax(2, keepdim=True)
            u = known(_larger(old, 0, u, floor**0.5), 1)
            parts[first] = (u, top)
            for i in layer.members[1:]:
                parts[i] = (u,)
        return Diagonal(self.lin.theta.new_ones(()), parts)

    # H, the damped factors.

    def newton(self, damping: Diagonal | Tensor) -> Tensor:
        A, g = Diagonal.of(damping, self.lin.sizes), self.gradient
        for dtype in dict.fromkeys((g.dtype, torch.float64)):
            for jitter in (0.0, 10 * torch.finfo(g.dtype).eps) if dtype == torch.float64 else (0.0,):
                solvers = [Solver(pair, dtype, jitter) for pair in self._damped(A)]
                x = self._by_layer(g.to(dtype), solvers).to(g.dtype)
                failed = [x.isfinite().all().logical_not(), *(f for solver in solvers for f in solver.failed)]
                if not bool(torch.stack(failed).any()):  # one synchronisation
                    if dtype != g.dtype:
                        self.notes.append("factored in float64")
                    if jitter:
                        self.notes.append("factored with jitter")
                    return x
        raise FactorizationError("the damped curvature could not be factored")

    def damped_quadratic(self, v: Tensor, damping: Diagonal) -> Tensor:
        return v @ self._by_layer(v, [pair.times for pair in self._damped(damping)])

    def _damped(self, A: Diagonal) -> list[Pair]:
        """H by layers. The factors do not depend on the scale of A: another λ reuses them."""
        if self._decomposed is None or self._decomposed[0] is not A.factors:
            self._decomposed = (A.factors, [self._factors(layer, A.factors) for layer in self.layers])
        return [
            Pair(*factors, A.scale, layer.small)
            for layer, factors in zip(self.layers, self._decomposed[1], strict=True)
        ]

    def _factors(self, layer: Layer, D: Sequence[Factors] | None) -> tuple[Factor, Factor]:
        scales = layer.scales(None if D is None else [D[i] for i in layer.members])
        if scales is None:
            raise ValueError(
                f"Kronecker cannot damp every entry of {self._name(layer)!r} by a number of its own: use "
                "damping=mq.FactoredMaxDiagonal(), mq.Identity(), or curvature=mq.Dense() or mq.Gram()"
            )
        left, right = (
            self._factor(f"{side} of {self._name(layer)}", M, w, layer.small)
            for side, M, w in zip(("left", "right"), (layer.left, layer.right), scales, strict=True)
        )
        return left, right

    def _factor(self, where: str, M: Tensor, w: Tensor, small: bool) -> Factor:
        if M.ndim == 2:
            return Line(M, w)
        if self.every == 1 or small:
            return Full(M, w)
        kept = [self._recalled.get(f"{part} of {where}") for part in ("Q", "e", "w")]
        if kept[0] is not None and kept[1] is not None and kept[2] is not None and kept[0].shape == M.shape:
            return Spectrum(kept[0].to(M), kept[1].to(M), kept[2].to(M))
        return Spectrum.of(M, w)


class Factor(ABC):
    """M + c·diag w as a function of c (K, 1, 1): one side of H"""

    mean: Tensor  # of M_ii/w_i: (K, 1, 1)

    @abstractmethod
    def times(self, c: Tensor, X: Tensor) -> Tensor:
        """(M + c·diag w)X: (K, d, k) → (K, d, k)"""

    @abstractmethod
    def solve(self, c: Tensor, X: Tensor, jitter: float) -> tuple[Tensor, Tensor | None]:
        """(M + c·diag w)⁻¹X in the precision of X, and whether that failed"""


class Line(Factor):
    """M is diagonal."""

    def __init__(self, M: Tensor, w: Tensor) -> None:
        self.M, self.w = M[:, :, None], w[:, :, None]
        self.mean = (self.M / self.w).mean(1, keepdim=True)

    def times(self, c: Tensor, X: Tensor) -> Tensor:
        return (self.M + c * self.w).to(X.dtype) * X

    def solve(self, c: Tensor, X: Tensor, jitter: float) -> tuple[Tensor, Tensor | None]:
        total = (self.M + c * self.w).to(X.dtype)
        return X / total.where(total > 0, 1), None  # 0 where nothing is there, and X is 0 too


class Full(Factor):
    """By a Cholesky decomposition for every c."""

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
    """By one eigendecomposition for all c: w^-½ M w^-½ = Q·diag e·Qᵀ."""

    def __init__(self, Q: Tensor, e: Tensor, w: Tensor) -> None:
        self.Q, self.e, self.w = Q, e, w  # (K, d, d), (K, d), (K, d)
        self.mean = e.mean(1)[:, None, None]

    @staticmethod
    def of(M: Tensor, w: Tensor) -> Spectrum:
        s = w.rsqrt()
        try:
            e, Q = torch.linalg.eigh(M * s[:, :, None] * s[:, None])
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            raise FactorizationError(f"the curvature could not be decomposed: {error}") from error
        rounding = torch.finfo(M.dtype).eps * M.shape[1] * e[:, -1:]
        return Spectrum(Q, torch.maximum(e, rounding), w)

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


class Pair:
    """H = (left + √λ/π·diag u) ⊗ (right + π√λ·diag v) of one layer; of a small one 1 ⊗ (right + λ·diag v)"""

    def __init__(self, left: Factor, right: Factor, lam: Tensor, small: bool) -> None:
        self.left, self.right = left, right
        if small:
            self.c_left, self.c_right = torch.zeros_like(lam), lam.clone()
            return
        # A layer without any curvature has no π: any will do.
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


def _diagonal(M: Tensor) -> Tensor:
    """Of a matrix, or of what already is the diagonal of one: (K, d)"""
    return M if M.ndim == 2 else M.diagonal(dim1=1, dim2=2)


def _moment(x: Tensor) -> Tensor:
    """Σ xxᵀ: (K, samples, d) → (K, d, d)"""
    return x.mT @ x


def _larger(old: Factors, k: int, new: Tensor, floor: float) -> Tensor:
    """Factor k of D so far against a new one; from the floor on where there is none of that shape yet"""
    return torch.maximum(old[k], new) if k < len(old) and old[k].shape == new.shape else new.clamp(min=floor)
