"""G layer by layer as a Kronecker product B ⊗ A, from the layer's inputs and the gradients at its outputs (KFAC)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..deferred import ask
from ..jacobian.linearization import Linearization, Needs
from ..jacobian.statistics import Moments
from ..layers.blocks import Sums
from ..metric import Diagonal, Metric, Part, trusted
from ..plain import ROUNDING, WAY_OUT, check_above, check_square, check_tensor, short
from ..ranks import owners
from .contract import KEPT, Curvature, Past, Representation, check_chunk, check_count
from .cost import Shapes, gathered, reduced, sides
from .direct import FactorizationError
from .factors import (
    DiagonalFactor,
    Factor,
    FullFactor,
    Layer,
    Pair,
    Solver,
    Spectrum,
    diagonal_of,
    joined,
    layer_of,
    over,
    spectra,
)


class NoFactors(ValueError):
    """A parameter that does not belong to one layer with Kronecker factors."""


@dataclass(frozen=True)
class Kronecker(Representation):
    """G ≈ B ⊗ A for every layer and nothing between layers: O² + I² numbers in the place of (O·I)².

        A = mean of aaᵀ      over samples and positions; a the layer's input, with a 1 for the bias
        B = sum of δδᵀ       over rows, samples and positions; δ the gradients of the rows at the layer's output

    (Martens & Grosse 2015; convolutions Grosse & Martens 2016; positions of a sequence count as samples, which is the
    "expand" of Eschenhagen et al. 2023.) It is exact for one linear layer under squared error, and for one sample
    within every layer. With λD = λ·u ⊗ v the step solves with

        H = (B + √λ/π·diag u) ⊗ (A + π√λ·diag v)      π² = mean of A_ii/v_i over mean of B_oo/u_o

    Weight decay W joins λD: if λD + W is u ⊗ v again, as for a D that is one number in every layer, these u and v stand
    above with λ = 1. Otherwise λ·u ⊗ v + w becomes (√λ·u + √w/ρ) ⊗ (√λ·v + ρ√w), ρ² the mean of v over that of u. Of
    a w by element the largest of every column stands for all of it: of a weight (O, I) with a w (1, I) that is all.

    Layers: Linear, Conv, Embedding. Where every output has inputs of its own (scales of normalisation layers, depthwise
    convolutions) the block of each output is small, and taken as it is: H = G + λD there.

    From batch to batch A and B are running averages; the past has the weight min(1 − 1/k, decay) in step k. On the
    same data again they are those of the data.

    With `every` > 1 the factors are decomposed in one step of so many, and the step solves with factors A, B, u and v
    as old as that; λ is always that of the step. Products with G use the latest A and B. The model of the loss (and so
    the gain ratio) is that of the rows of the batch, as Martens & Grosse have it: it knows what lies between layers.
    Of several ranks each adds its samples to the factors, and solves with those of some of the layers.

    Args:
        decay: the weight of earlier batches in A and B, at most.
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
        """The factors of all layers, the gradient, H⁻¹g of the layers of each rank, and the step"""
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
        """A factor of a layer with parameters of this size, beside the other one, or something made of them"""
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
    """Q, e or w of the decomposition of a factor"""
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
        self._earlier: Past = {}  # the averages of the batches before
        self._recalled: Past = {}  # with a decomposition that is still good
        self._decomposed: tuple[object, list[tuple[Factor, Factor]]] | None = None  # with the D₀ it belongs to
        sums = self._sums()
        self.layers = [layer_of(list(key), s, self.parameters.sizes, lin.scale) for key, s in sums.items()]
        for i in sorted(set(range(len(self.parameters))) - {i for key in sums for i in key}):  # without influence
            zero = lin.theta.new_zeros(self.parameters.sizes[i], 1)
            self.layers.append(Layer([i], self.parameters.sizes, zero + 1, zero, bias=False, small=True))

    def _sums(self) -> dict[tuple[int, ...], Sums]:
        """Of all pieces, by the parameters of a layer"""
        sums: dict[tuple[int, ...], Sums] = {}
        for piece in self.lin.pieces():
            weight = piece.jacobian.forward.batch.weight  # of the samples that have rows
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
                # In another piece a weight or a bias may be without influence, and its layer without it.
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
        """Of the past in the running averages: ()"""
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
        """One function for every layer, X ↦ Y: (n,) → (n,)"""
        parts = self.parameters.split(v)
        pairs = zip(self.layers, functions, strict=True)
        return self._joined(function(layer.join(parts[i] for i in layer.members)) for layer, function in pairs)

    def _by_own_layers(self, v: Tensor, solvers: Sequence[Solver]) -> tuple[Tensor, Tensor]:
        """The same for the layers of this rank, added up over the ranks, and whether one of them has failed"""
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
        """From the rows of the batch, which know what lies between layers"""
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
        """Inputs are the diagonal of the right factor: A of a weight; an embedding has A and B the other way round"""
        for layer in self.layers:
            inputs = None
            if not layer.small and not (layer.bias and len(layer.members) == 1):
                inputs = diagonal_of(layer.right)[:, None, : layer.widths[0]]  # (K, 1, R)
            yield Moments(layer.members, layer.split(layer.diagonal()), inputs)

    # H, the damped factors.

    def with_decay(self, A: Metric) -> Metric:
        """In the form of D, u ⊗ v in every layer. Factors that are older than λ have the λD + W of their time."""
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
        """H by layers. The factors do not depend on the scale of A: another λ reuses them."""
        if self._decomposed is None or self._decomposed[0] is not A.shape:
            self._decomposed = (A.shape, self._factors(A.parts))
        return [
            Pair(*factors, A.scale, layer.small)
            for layer, factors in zip(self.layers, self._decomposed[1], strict=True)
        ]

    def _factors(self, D: Sequence[Part] | None) -> list[tuple[Factor, Factor]]:
        """Both sides of every layer"""
        asked: list[tuple[Tensor, Tensor]] = []  # what is to be decomposed: the matrix, and w
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
        """None if it is to be decomposed now"""
        if M.ndim == 2:
            return DiagonalFactor(M, w)
        if self.every == 1 or small:
            return FullFactor(M, w)
        kept = [self._recalled.get(f"{part} of {where}") for part in ("Q", "e", "w")]
        if kept[0] is not None and kept[1] is not None and kept[2] is not None and kept[0].shape == M.shape:
            return Spectrum(kept[0].to(M), kept[1].to(M), kept[2].to(M))
        return None
