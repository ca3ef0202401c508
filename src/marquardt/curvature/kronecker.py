"""G of every layer as a Kronecker product B ⊗ A, from its inputs and the gradients at its outputs (KFAC)."""

from __future__ import annotations

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
from ..metric.sides import by_layers, diagonal_of, joined, outer, product, transposed, vector_of
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

    @property
    def sides(self) -> list[tuple[str, Tensor]]:
        return [("left", self.left), ("right", self.right)]

    def split(self, X: Tensor) -> list[Tensor]:
        return [p.flatten() for p in X.split(self.widths, 2)]

    def times(self, X: Tensor) -> Tensor:
        """left·X·right"""
        return product(self.left.to(X.dtype), self.right.to(X.dtype), X)

    def diagonal(self) -> Tensor:
        """The diagonal of left ⊗ right: (K, L, R)"""
        return outer(self.left, self.right)

    def trace(self) -> Tensor:
        return (diagonal_of(self.left).sum(1) * diagonal_of(self.right).sum(1)).sum()

    def scales(self, D: Sequence[Part] | None) -> tuple[Tensor, Tensor] | None:
        """u (K, L) and v (K, R) with D = u ⊗ v; None if D, a part for each parameter, does not have that form"""
        one = self.left.new_ones(self.K, self.L)
        if D is None:
            return one, torch.ones_like(diagonal_of(self.right))
        if self.small:  # every D has that form
            entries = [d.flat(self.K * width) for d, width in zip(D, self.widths, strict=True)]
            return one, joined(entries, (self.K, 1))[:, 0]
        us: list[Tensor] = []
        vs: list[Tensor] = []
        for d, width in zip(D, self.widths, strict=True):
            u, v = d.u, d.v
            if d.entries is not None:
                X = d.entries.view(1, 1, 1) if d.entries.numel() == 1 else d.entries.view(self.K, self.L, width)
                if X.shape[1] == 1 or torch.equal(X, X[:, :1].expand_as(X)):
                    v = X[:, :1]
                elif width == 1:  # one number per output of a bias
                    u = X
                else:
                    return None
            us.append(one if u is None else u.view(self.K, self.L))
            ones = self.right.new_ones(self.K, width)
            vs.append(ones if v is None else v[:, 0].expand_as(ones))
        if not all(u is us[0] or torch.equal(u, us[0]) for u in us):
            return None
        return us[0], torch.cat(vs, 1)


SumsByLayer = dict[tuple[int, ...], Sums]  # by its parameters


def add(sums: SumsByLayer, key: tuple[int, ...], more: Sums) -> None:
    """Adds those of another piece or rank. A weight or a bias may be missing in one of them, where it has no influence:
    it counts as having the input 0 there."""
    for other in [k for k in sums if set(k) & set(key)]:
        key, more = merged(key, more, other, sums.pop(other))
    sums[key] = more


def merged(key: tuple[int, ...], sums: Sums, other: tuple[int, ...], more: Sums) -> tuple[tuple[int, ...], Sums]:
    """The sum of both"""
    if len(key) < len(other):
        key, sums, other, more = other, more, key, sums
    missing = sums.A.shape[1] - more.A.shape[1]
    if key != other:
        before = missing if more.bias else 0  # the bias comes last
        more = replace(more, A=torch.nn.functional.pad(more.A, (before, missing - before) * 2), bias=sums.bias)
    return key, sums + more


def over(ranks: Ranks, sums: SumsByLayer, device: torch.device) -> SumsByLayer:
    """The sums over all ranks. A layer, or a part of it, that a rank lacks counts as zeros there."""
    if not ranks.several:
        return sums
    for each in ranks.every({key: _zeros(s, torch.device("meta")) for key, s in sums.items()}):
        for key, form in each.items():
            add(sums, key, _zeros(form, device))
    whole = sorted(sums.items())  # in the same order on every rank
    own = [t for _, s in whole for t in (s.A, s.B, torch.as_tensor(s.count).to(s.A)) if t is not None]
    total = iter(ranks.sums(own))
    return {
        key: Sums(next(total), None if s.B is None else next(total), next(total), s.bias, s.table) for key, s in whole
    }


def _zeros(s: Sums, device: torch.device) -> Sums:
    """Zeros of the same form; shapes alone on the meta device"""
    B = None if s.B is None else torch.zeros_like(s.B, device=device)
    return replace(s, A=torch.zeros_like(s.A, device=device), B=B, count=0.0)


def layer_of(members: list[int], sums: Sums, sizes: Sequence[int], scale: float) -> Layer:
    """The factors of a layer from the sums over the pieces: A is a mean over samples and positions, B a sum"""
    if sums.B is None:
        return Layer(members, sizes, torch.ones_like(sums.A[:, :1, 0]), sums.A * scale, sums.bias, True)
    A, B = sums.A / torch.as_tensor(sums.count).clamp(min=torch.finfo(sums.A.dtype).tiny), sums.B * scale
    left, right = (A, B) if sums.table else (B, A)
    return Layer(members, sizes, left, right, sums.bias, False)


class FullFactor:
    """M + c·diag w as a function of c (K, 1, 1), one side of H, with a Cholesky decomposition for every c."""

    def __init__(self, M: Tensor, w: Tensor) -> None:
        self.M, self.w = M, w[:, :, None]
        self.mean = (diagonal_of(M) / w).mean(1)[:, None, None]  # of M_ii/w_i: (K, 1, 1)

    def times(self, c: Tensor, X: Tensor) -> Tensor:
        """(M + c·diag w)X: (K, d, k) → (K, d, k)"""
        return self.M.to(X.dtype) @ X + (c * self.w).to(X.dtype) * X

    def solve(self, c: Tensor, X: Tensor, jitter: float) -> tuple[Tensor, Tensor | None]:
        """(M + c·diag w)⁻¹X in the precision of X, and whether that failed"""
        H = self.M.to(X.dtype, copy=True)
        line = diagonal_of(H)
        line += (c * self.w)[:, :, 0].to(X.dtype)
        # Unit diagonal first: positive definiteness then no longer depends on the units of the parameters.
        s = line.where(line > 0, 1).rsqrt()[:, :, None]
        H *= s * s.mT
        line += jitter * H.shape[1]
        L, info = torch.linalg.cholesky_ex(H)
        return s * torch.cholesky_solve(s * X, L), info.any()


class Spectrum:
    """The same with one eigendecomposition for all c: w^-½ M w^-½ = Q·diag e·Qᵀ; Q = None: M is diagonal."""

    def __init__(self, Q: Tensor | None, e: Tensor, w: Tensor) -> None:
        self.Q, self.e, self.w = Q, e, w  # (K, d, d), (K, d), (K, d)
        self.mean = e.mean(1)[:, None, None]

    @staticmethod
    def of(M: Tensor, w: Tensor) -> Spectrum:
        return spectra(ALONE, [(M, w)])[0]

    def times(self, c: Tensor, X: Tensor) -> Tensor:
        return self._with(self.w.sqrt(), self.e[:, :, None] + c, X)

    def solve(self, c: Tensor, X: Tensor, jitter: float) -> tuple[Tensor, Tensor | None]:
        total = self.e[:, :, None] + c
        # Where the total is 0 there is neither curvature nor gradient, and X is 0.
        return self._with(self.w.rsqrt(), 1 / total.where(total > 0, 1), X), None

    def _with(self, s: Tensor, values: Tensor, X: Tensor) -> Tensor:
        """s·Q·values·Qᵀ·s·X"""
        s = s[:, :, None]
        if self.Q is None:
            return (s * s * values).to(X.dtype) * X
        s, Q = s.to(X.dtype), self.Q.to(X.dtype)
        return s * (Q @ (values.to(X.dtype) * (Q.mT @ (s * X))))


Factor = FullFactor | Spectrum


def spectra(ranks: Ranks, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Spectrum]:
    """The spectrum for each M and w; each matrix is decomposed by one of the ranks."""
    scaled = [M * w.rsqrt()[:, :, None] * w.rsqrt()[:, None] for M, w in pairs if M.ndim == 3]
    own = [decomposed(M) for M in owned(ranks, scaled)]
    found = completed(ranks, own, scaled, [(M, M[:, 0]) for M in scaled])
    if not all(ask(e.isfinite().all()) for _, e in found):
        raise FactorizationError("the curvature could not be decomposed")
    whole = iter(found)
    parts = [(None, M / w) if M.ndim == 2 else next(whole) for M, w in pairs]
    return [Spectrum(Q, e, w) for (Q, e), (_, w) in zip(parts, pairs, strict=True)]


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

    def solve(self, X: Tensor, jitter: float) -> tuple[Tensor, list[Tensor]]:
        """H⁻¹X, and whether either side failed"""
        Y, first = self.left.solve(self.c_left, X, jitter)
        Z, second = self.right.solve(self.c_right, Y.mT, jitter)
        return Z.mT, [f for f in (first, second) if f is not None]


class NoFactors(ValueError):
    """A parameter does not belong to exactly one layer that has Kronecker factors."""


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
        if past and "count" not in past:
            raise ValueError(f"{KEPT} has no entry 'count': {WAY_OUT}")
        for key, t in past.items():
            if key in ("count", "age"):
                check_count(t, key, key == "count")
                continue
            part, _, names = key.rpartition(" of ")
            where, members = f"{KEPT} {key!r}", names.split(",")
            if not part or any(name not in sizes for name in members):
                raise ValueError(f"{KEPT} has an entry {short(key)}, which no layer of this model has: {WAY_OUT}")
            left, right = (past.get(f"{side} of {names}") for side in ("left", "right"))
            if left is None or right is None or min(left.ndim, right.ndim) < 2 or len(left) != len(right):
                raise ValueError(f"{where} is without a left and a right factor that belong together: {WAY_OUT}")
            self.check_part(part, t, left, right, where)
            size = sum(sizes[name] for name in members)
            if len(left) * left.shape[-1] * right.shape[-1] != size:
                shapes = f"{tuple(left.shape)} and {tuple(right.shape)}"
                raise ValueError(f"{where}: factors {shapes} are not those of a layer of {size} parameters: {WAY_OUT}")

    def check_part(self, part: str, t: Tensor, left: Tensor, right: Tensor, where: str) -> None:
        """Checks a factor of a layer, or Q, e or w of its decomposition"""
        name, _, side = part.rpartition(" of ")
        if name not in ("", "Q", "e", "w") or side not in ("left", "right"):
            raise ValueError(f"{where} is nothing that this version knows: {WAY_OUT}")
        M = left if side == "left" else right
        K, d = len(M), M.shape[-1]
        check_tensor(t, where, (K, d, d) if name == "Q" or (name == "" and t.ndim == 3) else (K, d))
        if name == "Q":
            Q = t.double()
            if bool(((Q.mT @ Q) - torch.eye(d, dtype=Q.dtype, device=Q.device)).abs().max() > ROUNDING):
                raise ValueError(f"{where} is not orthogonal: {WAY_OUT}")
        elif t.ndim == 3:
            check_square(t, where)
        else:
            check_above(t, where, strictly=name == "w")


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
        sums, sizes = self._sums(), self.parameters.sizes
        self.layers = [layer_of(list(key), s, sizes, lin.scale) for key, s in sums.items()]
        for i in sorted(set(range(len(self.parameters))) - {i for key in sums for i in key}):  # no influence
            zero = lin.theta.new_zeros(sizes[i], 1)
            self.layers.append(Layer([i], sizes, zero + 1, zero, bias=False, small=True))

    def _sums(self) -> SumsByLayer:
        """The sums of all pieces"""
        sums: SumsByLayer = {}
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
                add(sums, key, found)
        return over(self.lin.ranks, sums, self.parameters.device)

    def recall(self, past: Past | None, same_data: bool) -> None:
        if past is None or "count" not in past:
            return
        if self.decay > 0 and not same_data:
            self._earlier, self._count = past, past["count"] + 1
            for layer in self.layers:
                for side, M in layer.sides:
                    setattr(layer, side, self._mixed(f"{side} of {self._name(layer)}", M, diagonal_of))
        if "age" in past and int(past["age"]) + 1 < self.every:
            self._recalled, self._age = past, int(past["age"]) + 1

    def _mixed(self, key: str, new: Tensor, diagonal: Callable[[Tensor], Tensor]) -> Tensor:
        """The running average of what was kept by this name"""
        old = self._earlier.get(key)
        if old is None or old.shape != new.shape:
            return new
        weight = (1 - 1 / self._count.to(self.parameters.dtype)).clamp(max=self.decay)
        share = weight * trusted(diagonal(old).flatten(), diagonal(new).flatten()).to(new)
        return torch.lerp(new, old.to(new), share)

    def keep(self) -> Past | None:
        """The averages, and with `every` > 1 the decompositions"""
        if self.decay == 0 and self.every == 1:
            return None
        kept = {"count": self._count}
        for layer in self.layers:
            kept |= {f"{side} of {self._name(layer)}": M for side, M in layer.sides}
        if self.every > 1 and self._decomposed is not None:
            kept["age"] = torch.tensor(self._age, device=self.parameters.device)
            for layer, pair in zip(self.layers, self._decomposed[1], strict=True):
                for (side, _), factor in zip(layer.sides, pair, strict=True):
                    if isinstance(factor, Spectrum) and factor.Q is not None:
                        parts = ("Q", factor.Q), ("e", factor.e), ("w", factor.w)
                        kept |= {f"{part} of {side} of {self._name(layer)}": t for part, t in parts}
        return kept

    def _name(self, layer: Layer) -> str:
        return ",".join(self.parameters.names[i] for i in layer.members)

    def _by_layer(self, v: Tensor, functions: Iterable[Callable[[Tensor], Tensor]]) -> Tensor:
        """v with one function, X ↦ Y, applied to every layer: (n,) → (n,)"""
        return by_layers(lambda f, X: f(X), self.layers, zip(functions), v, self.parameters.sizes)

    def _by_own_layers(self, v: Tensor, pairs: Sequence[Pair], jitter: float) -> tuple[Tensor, Tensor]:
        """H⁻¹v, of which each rank solves for its layers, and whether any of them has failed"""
        ranks, failures = self.lin.ranks, [v.new_zeros(())]

        def solved(pair: Pair, owner: int, X: Tensor) -> Tensor:
            if owner != ranks.rank:
                return torch.zeros_like(X)
            Y, failed = pair.solve(X, jitter)
            failures.extend(failed)
            return Y

        own = owners([max(layer.left, layer.right, key=Tensor.numel) for layer in self.layers], ranks.size)
        x = by_layers(solved, self.layers, zip(pairs, own, strict=True), v, self.parameters.sizes)
        x, failed = ranks.sums([x, torch.stack([f.to(x) for f in failures]).sum()])
        return x, failed > 0

    def _joined(self, matrices: Iterable[Tensor]) -> Tensor:
        """One vector from the X of every layer: (n,)"""
        out = self.layers[0].left.new_empty(self.parameters.n)
        return vector_of(self.layers, matrices, out, self.parameters.sizes)

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
        own, double = g.dtype, torch.float64
        for dtype, jitter in dict.fromkeys([(own, 0.0), (double, 0.0), (double, 10 * torch.finfo(own).eps)]):
            x, failed = self._by_own_layers(g.to(dtype), self._damped(A), jitter)
            if ask(x.isfinite().all() & ~failed):
                if dtype != own:
                    self.notes.append("factored in float64")
                if jitter:
                    self.notes.append("factored with jitter")
                return x.to(own)
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
        sides: dict[str, tuple[Tensor, Tensor]] = {}  # M and w
        found: dict[str, Factor | None] = {}
        for layer in self.layers:
            scales = layer.scales(None if D is None else [D[i] for i in layer.members])
            if scales is None:
                raise ValueError(
                    f"Kronecker cannot damp every entry of {self._name(layer)!r} by a number of its own: use "
                    "damping=mq.FactoredMaxDiagonal(), mq.Identity(), or curvature=mq.Dense() or mq.Gram()"
                )
            for (side, M), w in zip(layer.sides, scales, strict=True):
                key = f"{side} of {self._name(layer)}"
                sides[key], found[key] = (M, w), self._factor(key, M, w, layer.small)
        asked = [key for key, factor in found.items() if factor is None]
        found |= zip(asked, spectra(self.lin.ranks, [sides[key] for key in asked]), strict=True)
        whole = (factor for factor in found.values() if factor is not None)
        return [(next(whole), next(whole)) for _ in self.layers]

    def _factor(self, key: str, M: Tensor, w: Tensor, small: bool) -> Factor | None:
        """The factor of M, or None if it has to be decomposed now"""
        if M.ndim == 3 and (self.every == 1 or small):
            return FullFactor(M, w)
        kept = [self._recalled[name] for part in ("Q", "e", "w") if (name := f"{part} of {key}") in self._recalled]
        return Spectrum(*(t.to(M) for t in kept)) if len(kept) == 3 and kept[0].shape == M.shape else None


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

    def check_part(self, part: str, t: Tensor, left: Tensor, right: Tensor, where: str) -> None:
        if part != "s":
            return super().check_part(part, t, left, right, where)
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
        X = f(self.s + damping).to(X.dtype) * product(transposed(left), right, X)
        return product(left, transposed(right), X)

    def diagonal(self) -> Tensor:
        """The diagonal of Q·diag s·Qᵀ: (K, L, R)"""
        left, right = (None if Q is None else Q.square() for Q in (self.left, self.right))
        return product(left, transposed(right), self.s)


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
            total = self.lin.ranks.sums([basis.s for basis in self._bases])
            for layer, basis, s in zip(self.layers, self._bases, total, strict=True):
                basis.s = self._mixed(f"s of {self._name(layer)}", s, lambda s: s)
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
        """The diagonal of QᵀAQ: () or (K, L, R)"""
        if A.parts is None:
            return A.scale
        each = zip((A.parts[i] for i in layer.members), layer.widths, strict=True)
        entries = [part.flat(layer.K * layer.L * width) for part, width in each]
        left, right = (None if Q is None else Q.square() for Q in (basis.left, basis.right))
        return product(transposed(left), right, joined(entries, (layer.K, layer.L)) * A.scale)

    # Statistics.

    def diagonal(self) -> Tensor:
        return self._joined(basis.diagonal() for basis in self.bases)

    def traces(self) -> list[tuple[list[int], Tensor, int]]:
        pairs = zip(super().traces(), self.bases, strict=True)
        return [(members, basis.s.sum(), rank) for (members, _, rank), basis in pairs]


def bases_of(layers: Sequence[Layer], ranks: Ranks) -> list[Basis]:
    """The eigenbasis of every layer; for a factor that is diagonal these are the unit vectors."""
    pairs = [(M, torch.ones_like(diagonal_of(M))) for layer in layers for _, M in layer.sides]
    Q = (spectrum.Q for spectrum in spectra(ranks, pairs))
    return [Basis(layer, next(Q), next(Q)) for layer in layers]
