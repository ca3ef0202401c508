"""G in products only, and (G + A)⁻¹g by conjugate gradients: Hessian-free optimisation.

J. Martens, Deep learning via Hessian-free optimization, ICML 2010.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from .. import tolerances
from ..deferred import ask, floats
from ..jacobian import statistics
from ..jacobian.linearization import Linearization, Needs, Trials
from ..jacobian.objective import Combined
from ..jacobian.piece import Piece, scattered
from ..jacobian.statistics import Moments, PartialTraces
from ..layers.blocks import SLAB
from ..metric import Diagonal, Metric
from ..model.batch import twice_differentiable
from ..model.checks import check_coupling, coupled
from ..model.parameters import joined
from ..surroundings import LEVEL, out_of_memory
from .contract import Curvature, Interchangeable, Past, check_chunk
from .cost import Cost, Shapes, Work, forward, gathered, reduced
from .direct import FactorizationError
from .hessian import NOT_SYMMETRIC, again, slope_with_graph


class Products(ABC):
    """A linear map of one piece, as a sum over its samples."""

    def __init__(self, piece: Piece) -> None:
        self.piece, self.parameters = piece, piece.objective.parameters
        self.versions = versions(piece.objective.model)

    @abstractmethod
    def product(self, v: Tensor) -> Tensor:
        """(n,) → (n,)"""

    def square(self, v: Tensor) -> Tensor:
        """vᵀ(product): ()"""
        return self.parameters.dot(v, self.product(v))


class GaussNewton(Products):
    """JᵀS(SᵀJv)"""

    def __init__(self, piece: Piece, way: Way) -> None:
        super().__init__(piece)
        self.rows, self.adjoint = way(piece)

    def product(self, v: Tensor) -> Tensor:
        return self.adjoint(self.rows(v))

    def square(self, v: Tensor) -> Tensor:
        return self.rows(v).square().sum()

    def proven(self) -> bool:
        """Whether tᵀ(SᵀJv) = (JᵀSt)ᵀv for random t and v = JᵀSt.

        A layer may have wrong derivatives that autograd accepts without complaint: a backward pass that is not a
        function of its cotangent, or weights that are stored where nothing replaces them.
        """
        t = self.piece.random()
        v = self.adjoint(t)
        there, here = (t * self.rows(v)).sum().item(), self.parameters.dot(v, v).item()
        # If something is not finite, the step finds out.
        return not abs(there - here) > tolerances.of_rules(self.piece.jacobian.forward.coarsest) * here


class HessianProducts(Products):
    """∂(∇fᵀv)/∂θ"""

    def __init__(self, piece: Piece) -> None:
        super().__init__(piece)
        self.slopes = [(i, s) for i, s in enumerate(slope_with_graph(piece)) if s is not None and s.requires_grad]

    def product(self, v: Tensor) -> Tensor:
        params, parts = self.parameters.tensors, self.parameters.split(v)
        if not self.slopes:
            return torch.zeros_like(v)
        along = [parts[i].view_as(s).to(s.dtype) for i, s in self.slopes]
        return joined(again([s for _, s in self.slopes], params, along), params)

    def proven(self) -> bool:
        """Whether uᵀ(Hv) = vᵀ(Hu) for random u and v."""
        n, dtype, device = self.parameters.n, self.parameters.dtype, self.parameters.device
        generator = torch.Generator(device).manual_seed(0)
        u, v = (torch.randn(n, generator=generator, dtype=dtype, device=device) for _ in "uv")
        Hv, Hu = self.product(v), self.product(u)
        difference = self.parameters.dot(u, Hv) - self.parameters.dot(v, Hu)
        size = self.parameters.norm(u) * self.parameters.norm(Hv)
        return not abs(difference.item()) > tolerances.of_rules(self.piece.whole.coarsest) * size.item()


# Ways to form SᵀJv, (n,) → (R, N), and JᵀSt, (R, N) → (n,). The first one that is proven right is used.

Pair = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
Way = Callable[[Piece], Pair]


def by_double_backward(piece: Piece) -> Pair:
    """Jᵀw is linear in w, and its derivative with respect to w along v is Jv: the graph of Jᵀw is made once."""
    J, parameters = piece.jacobian, piece.objective.parameters
    z = J.forward.graph
    with torch.enable_grad():
        w = torch.zeros_like(z, requires_grad=True)
        grads = torch.autograd.grad(z, parameters.tensors, w, create_graph=True, allow_unused=True)
        dense = [g.to_dense() if g is not None and g.is_sparse else g for g in grads]
    pulled = [(i, g) for i, g in enumerate(dense) if g is not None and g.requires_grad]

    def rows(v: Tensor) -> Tensor:
        parts = parameters.split(v)
        along = [parts[i].view_as(g).to(g.dtype) for i, g in pulled]
        (Jv,) = torch.autograd.grad([g for _, g in pulled], w, along, retain_graph=True, allow_unused=True)
        return J.seen(Jv)

    return rows, J.adjoint


def by_forward_mode(piece: Piece) -> Pair:
    """Jv by a forward pass with dual numbers, for every product."""
    J, parameters = piece.jacobian, piece.objective.parameters

    def rows(v: Tensor) -> Tensor:
        with LEVEL, forward_ad.dual_level(), torch.set_grad_enabled(piece.known.differentiates):
            pairs = zip(parameters.tensors, parameters.shaped(v), strict=True)
            z = J.forward.repeated({id(p): forward_ad.make_dual(p.detach(), t.to(p.dtype)) for p, t in pairs})
            Jv = forward_ad.unpack_dual(z).tangent
        return J.seen(None if Jv is None else Jv.detach())

    return rows, J.adjoint


def by_rows(piece: Piece) -> Pair:
    """Products from the rows of every layer, for operations that can be differentiated only once."""
    R, _ = piece.jacobian.R, piece.blocks
    return lambda v: piece.apply(v).view(R, -1), lambda t: piece.adjoint(t.flatten())


def ways(model: nn.Module) -> tuple[Way, ...]:
    """Fastest first. For a convolution torch's double backward also computes gradients that are not needed, and takes
    twice as long as forward mode (paper CNN on a CPU: 114 against 66 ms a product)."""
    if any(isinstance(m, nn.modules.conv._ConvNd) for m in model.modules()):
        return by_forward_mode, by_double_backward, by_rows
    return by_double_backward, by_forward_mode, by_rows


def versions(model: nn.Module) -> list[tuple[int, int]]:
    """The tensors and their versions, which autograd compares before it uses a graph."""
    return [(id(t), t._version) for t in [*model.parameters(), *model.buffers()]]


# Iterates number ⌈1.3ʲ⌉ are kept for backtracking (Martens, section 4.6).
SPACING = 1.3


class Iterate(NamedTuple):
    x: Tensor  # (n,)
    number: int
    gx: float  # gᵀx
    xHx: float  # xᵀ(G + A)x


def conjugate_gradients(
    H: Callable[[Tensor], Tensor],
    g: Tensor,
    M: Tensor | Callable[[Tensor], Tensor] | None,
    start: Tensor | None,
    iterations: int,
    tolerance: float,
    *,
    keep: bool = True,
    dot: Callable[[Tensor, Tensor], Tensor] = torch.dot,
) -> tuple[list[Iterate], bool]:
    """Minimises φ(x) = ½xᵀHx − gᵀx, preconditioned by a diagonal M or by r ↦ M⁻¹r. Returns some of the iterates, always
    including the last one, and whether negative curvature ended the iteration.

    Stops at i > k, φᵢ < 0, (φᵢ − φᵢ₋ₖ)/φᵢ < kε with k = max(10, ⌈0.1·i⌉) (Martens, section 4.4).
    """

    divided = M if callable(M) else (lambda r: r.clone()) if M is None else (lambda r: r / M)
    x, r, phi, gx, xr = torch.zeros_like(g), g.clone(), 0.0, 0.0, 0.0
    if start is not None:
        residual = g - H(start)
        sx, sr = floats(dot(g, start), dot(residual, start))
        if sx > sr and sx + sr > 0:  # positive curvature, and better than 0: φ = −½(gᵀx + rᵀx)
            x, r, gx, xr, phi = start, residual, sx, sr, -0.5 * (sx + sr)
    z = divided(r)
    p = z.clone()
    rz, scale = floats(dot(r, z), dot(g, divided(g)))
    phis, iterates, curved = [phi], [], False
    marks = {math.ceil(SPACING**j) for j in range(100)} if keep else set()
    i = 0
    while i < iterations and rz > torch.finfo(g.dtype).eps ** 2 * scale:
        Hp = H(p)
        (pHp,) = floats(dot(p, Hp))
        if not math.isfinite(pHp):
            raise FactorizationError("conjugate gradients overflowed")
        if pHp <= 0:
            curved = True
            if i == 0 and gx == 0:  # the preconditioned gradient, as long as for the opposite curvature
                x = p.mul_(rz / -pHp if pHp < 0 else 1.0)
                (gx,) = floats(dot(g, x))
                xr = gx - pHp * (rz / pHp) ** 2 if pHp < 0 else gx
            break
        if i in marks:
            iterates.append(Iterate(x.clone(), i, gx, gx - xr))
        x.add_(p, alpha=rz / pHp)
        r.sub_(Hp, alpha=rz / pHp)
        z = divided(r)
        old = rz
        rz, gx, xr = floats(dot(r, z), dot(g, x), dot(r, x))
        i += 1
        phis.append(-0.5 * (gx + xr))
        if not math.isfinite(phis[i] + rz):
            raise FactorizationError("conjugate gradients overflowed")
        k = max(10, math.ceil(0.1 * i))
        if i > k and phis[i] < 0 and (phis[i] - phis[i - k]) / phis[i] < k * tolerance:
            break
        p.mul_(rz / old).add_(z)
    return [*iterates, Iterate(x, i, gx, gx - xr)], curved


# The number of random sign vectors in an estimate of a trace: accurate to √(2/8) in the worst case.
PROBES = 8
# The usual number of iterations until the stopping rule applies, between 10 and 100 on most networks at most λ.
LIKELY = 30
# Up to this many rows per sample the trace comes from the rows; beyond it, an estimate from products costs less.
FEW_ROWS = 64


@dataclass(frozen=True)
class MatrixFree(Interchangeable):
    """(G + A)x = g by preconditioned conjugate gradients: G appears only in products Gv = JᵀS(SᵀJv) (Martens, 2010).

    A product costs about as much as two gradients, and only the activations need memory beyond some vectors of θ.
    Samples may depend on each other, as with BatchNorm in train mode. With `hessian` G is the full ∇²f; the iteration
    then ends where it meets negative curvature.

    The iteration stops where the last k steps together improved the quadratic model by less than a share kε, k =
    max(10, i/10), ε = `tolerance`, or after `iterations`. It starts from `warm` times the last solution and is
    preconditioned by (diag G + A)^`precondition`, where layers have rules for the diagonal; by A itself if A is not
    diagonal. With `backtrack` the step is an earlier iterate, if the loss itself is lower there. With `chunk` that many
    samples are linearised at once, again for every product. Each of several ranks forms its part of a product.

    Args:
        chunk: samples that are linearised at once; None for all. Samples must not depend on each other; neither
            backward hooks that mix them nor state in plain attributes of the model is detected.
        hessian: whether G is the full ∇²f.
        iterations: of conjugate gradients in one step, at most.
        tolerance: ε, the relative progress at which they stop.
        warm: share of the last solution from which they start.
        backtrack: whether an earlier iterate is taken if the loss itself is lower there.
        precondition: exponent of diag G + A; None for no preconditioner.

    >>> opt = mq.LM(model, "mse", curvature=mq.MatrixFree(iterations=50))
    """

    adds_up = True

    chunk: int | None = None
    hessian: bool = False
    iterations: int = 250  # Martens (2010)
    tolerance: float = 5e-4  # section 4.4
    warm: float = 0.95  # Martens and Sutskever (2012) use this factor
    backtrack: bool = True
    precondition: float | None = 0.75  # section 4.7

    @property
    def shares(self) -> bool:  # type: ignore[override]
        """Whether it serves sharded parameters: their products are formed from rows, which a Hessian does not have."""
        return not self.hessian

    def __post_init__(self) -> None:
        check_chunk(self.chunk)
        rules = {
            "iterations": (
                isinstance(self.iterations, int) and self.iterations >= 1,
                "the most that CG may take, an integer of at least 1",
            ),
            "tolerance": (
                0 <= self.tolerance < 1,
                "the relative progress at which CG stops, at least 0 and below 1; Martens uses 5e-4",
            ),
            "warm": (0 <= self.warm <= 1, "the share of the last solution that CG starts from, between 0 and 1"),
            "precondition": (
                self.precondition is None or 0 < self.precondition <= 1,
                "the exponent of diag G + A, above 0 and at most 1 (Martens uses 0.75), or None for no preconditioner",
            ),
        }
        for name, (fine, words) in rules.items():
            if not fine:
                raise ValueError(f"{name}={getattr(self, name)!r}: {words}")

    @cached_property
    def needs(self) -> Needs:
        return Needs(self.chunk, by_sample=self.chunk is not None, graph=True)

    def form(self, lin: Linearization) -> MatrixFreeCurvature:
        return MatrixFreeCurvature(lin, self)

    def cost(self, s: Shapes) -> Cost:
        """The vectors of conjugate gradients, including the iterates that are kept, and two graphs."""
        samples = s.at_once(self.chunk)
        # Two gradients and some trial points; in chunks the forward pass is repeated for every product.
        passes = (8 if self.chunk is None else 11) * forward(s, s.pieces(self.chunk))
        product = passes + Work(numbers=12.0 * s.R * s.N * s.out + 10.0 * s.n, calls=40)
        size = s.itemsize * (32 * s.n / s.shards + samples * (4 * (s.inputs + s.outputs) + s.R * s.out))
        return Cost(int(size), (min(self.iterations, LIKELY) + self.probes) * product)

    def sent(self, s: Shapes) -> float:
        """The gradient, the diagonal, a product in every iteration, and the step"""
        return reduced(s, (min(self.iterations, LIKELY) + 2.0) * s.n) + gathered(s, s.n)

    @property
    def probes(self) -> int:
        """The sign vectors in an estimate of a trace: fewer if there is no time for many iterations."""
        return PROBES if self.iterations >= LIKELY else PROBES // 2


class MatrixFreeCurvature(Curvature):
    takes_sums = True

    def __init__(self, lin: Linearization, options: MatrixFree) -> None:
        super().__init__(lin)
        self.options = options
        # A single piece stays open between products; several pieces are linearised again for every product.
        self._open: Products | None = None
        shared = self.parameters.shards is not None  # second derivatives are not gathered
        self._ways = [by_rows] if shared else list(ways(lin.objective.model))  # the ways that have not failed
        self._way: Way | None = None  # the first of them, once it is proven
        self._proven = False
        self._R = 0  # rows per sample
        for piece in lin.pieces():
            if not self._R and lin.known.proven is None:  # otherwise the proof of the rows has shown it
                lin.known.differentiates = not piece.whole.same_without_grad()
            self._R, self._rows_fit = piece.jacobian.R, _fits(piece, piece.m)
            self._sketch_fits = _fits(piece, piece.jacobian.N)
            if lin.in_one:
                _ = piece.gradient  # while the graph is fresh
                with twice_differentiable(lin.objective.model):
                    self._open = self._products(piece)
        own = None if self._open is None else self._open.piece.gradient * lin.scale
        self._g = lin.slope if own is None else lin.ranks.sum(own)  # of the data
        self._rows_fit, self._sketch_fits = lin.ranks.all(self._rows_fit), lin.ranks.all(self._sketch_fits)
        self._inert: set[int] | None = None  # parameters without influence, as found by the preconditioner
        self._zeros: set[int] | None = None  # and as agreed by all ranks
        self._start: Tensor | None = None  # (n,) of an earlier step
        self._last: Tensor | None = None  # (n,) where CG ended
        self._known: tuple[Tensor, float, float] | None = None  # x, gᵀx, xᵀGx of the step taken

    @property
    def gradient(self) -> Tensor:
        return self.lin.regularised(self._without_inert(self._g))

    def _without_inert(self, v: Tensor) -> Tensor:
        if self._zeros is None:
            self._zeros = self.lin.inert if self._inert is None else self.lin.common(self._inert)
        return self.parameters.without(v, self._zeros)

    # Products.

    def __matmul__(self, v: Tensor) -> Tensor:
        total: Tensor | None = None
        with torch.no_grad(), twice_differentiable(self.lin.objective.model):
            for found in self._each(lambda part: part.product(v)):
                total = found if total is None else total.add_(found)
        assert total is not None
        return self._without_inert(self.lin.ranks.sum(total.mul_(self.lin.scale)))

    def quadratic(self, v: Tensor) -> Tensor:
        """vᵀGv = ‖SᵀJv‖², at half the cost of a product; for a Hessian at that of a whole one"""
        with torch.no_grad(), twice_differentiable(self.lin.objective.model):
            squares = list(self._each(lambda part: part.square(v)))
        return self.lin.ranks.sum(torch.stack(squares).sum() * self.lin.scale)

    def _each(self, form: Callable[[Products], Tensor]) -> Iterator[Tensor]:
        """The result of `form` for every part; if the current way to form products fails on these data, the next is
        used."""
        lin = self.lin
        if self._open is not None and self._open.versions != versions(lin.objective.model):
            self._open = None  # trial points have changed what its graph refers to
            self._open = self._products(lin.reopened())
        for part in map(self._products, lin.pieces()) if self._open is None else [self._open]:
            try:
                yield form(part)
            except Exception as error:
                if self._way is None or len(self._ways) == 1 or out_of_memory(error):
                    raise
                self._ways.pop(0)
                self._way = None
                other = self._products(part.piece)
                self._open = None if self._open is None else other
                yield form(other)

    def _products(self, piece: Piece) -> Products:
        if self.options.hessian:
            second = HessianProducts(piece)
            if not (self._proven or second.proven()):
                raise ValueError(NOT_SYMMETRIC)
            self._proven = True
            return second
        reasons = []
        while self._ways:
            way = self._ways[0]
            try:
                found = GaussNewton(piece, way)
                if way is self._way or found.proven():
                    self._way = way
                    return found
                reason = "its derivatives contradict each other"
            except Exception as error:  # there are many reasons why autograd may refuse a model
                if out_of_memory(error):
                    raise
                reason = str(error).split("\n")[0]
            reasons.append(f"{way.__name__.replace('_', ' ')}: {reason}")
            self._ways.pop(0)
        raise ValueError(f"no product Gv can be formed with this model. {'; '.join(reasons)}")

    # The step.

    def newton(self, damping: Metric | Tensor) -> Tensor:
        """(G + A)⁻¹g by conjugate gradients, until the stopping rule applies"""
        lin, options, sizes = self.lin, self.options, self.parameters.sizes
        with torch.no_grad():
            if not ask(self.parameters.finite(self._g)):
                raise FactorizationError("the gradient is not finite")
            A = Diagonal.of(damping, sizes).to(lin.theta)
            M = self._preconditioner(A)
            self._zeros = None
            g = self.gradient  # after the preconditioner, whose rows show the parameters without influence
            start = None if self._start is None or options.warm == 0 else options.warm * self._start.to(g)
            iterates, curved = conjugate_gradients(
                lambda v: (self @ v).add_(A.times(v, sizes)), g, M, start, options.iterations, options.tolerance,
                keep=options.backtrack, dot=self.parameters.dot,
            )  # fmt: skip
            taken = self._best(iterates) if options.backtrack and len(iterates) > 1 else iterates[-1]
            if not ask(self.parameters.finite(taken.x)):
                raise FactorizationError("conjugate gradients overflowed")
            last = iterates[-1].number
            self.notes.append(
                f"{last} CG iteration{'' if last == 1 else 's'}"
                + (", ended by negative curvature" if curved else "")
                + ("" if taken is iterates[-1] else f", back to iteration {taken.number}")
            )
            self._last = iterates[-1].x
            (xAx,) = floats(A.quadratic(taken.x, sizes, self.parameters.dot))
            xGx = taken.xHx - xAx
            self._known = taken.x, taken.gx, xGx if options.hessian else max(xGx, 0.0)
            return taken.x.clone()

    def _best(self, iterates: list[Iterate]) -> Iterate:
        """Backtracking: go back as long as the loss of the previous iterate is lower (Martens, section 4.6)"""
        trials = Trials(self.lin)

        def loss(x: Tensor) -> float:
            (f,) = floats(trials.loss(x, -1.0))
            return f if math.isfinite(f) else math.inf

        best, least = iterates[-1], loss(iterates[-1].x)
        for iterate in reversed(iterates[:-1]):
            f = loss(iterate.x)
            if least < math.inf and not f < least:
                break
            best, least = iterate, f
        self.lin.position.move()
        return best

    def model(self, d: Tensor) -> tuple[Tensor, Tensor]:
        known = self._known is not None and torch.equal(d.neg(), self._known[0])
        if self.parameters.ranks.all(known) and self._known is not None:  # CG has formed this product already
            numbers = torch.tensor([-self._known[1], self._known[2]], dtype=torch.float64, device=d.device)
            return numbers[0], numbers[1]
        return super().model(d)

    def recall(self, past: Past | None, same_data: bool) -> None:
        if past is not None and "x" in past and len(past["x"]) == self.parameters.n:
            self._start = past["x"]

    def keep(self) -> Past | None:
        last = self._start if self._last is None else self._last
        return None if last is None else {"x": last}

    # Statistics, for damping and the preconditioner.

    def diagonal(self) -> Tensor:
        self._need_rows("diag G")
        return super().diagonal()

    def moments(self) -> Iterator[Moments]:
        self._need_rows("diag G")
        return super().moments()

    def trace(self) -> Tensor:
        """tr G from the rows, or Hutchinson's estimate vᵀGv with random signs v, the same in every step

        The trace of a Hessian may have any sign, but damping needs a size: the result is max(|tr|, ‖·‖_F), both
        estimated.
        """
        if self._has_rows() and self._R <= FEW_ROWS and self._rows_fit:
            return self.parameters.total(
                sum((trace for _, trace in statistics.traces(self.lin)), self.lin.theta.new_zeros(()))
            )
        return self._size(slice(None))

    def traces(self) -> list[tuple[list[int], Tensor, int]]:
        if self._has_rows() and self._rows_fit:
            return super().traces()
        sizes, most = self.parameters.sizes, self.lin.most
        return [([i], self._size(self.parameters.slice_of(i)), min(size, most)) for i, size in enumerate(sizes)]

    def partial_traces(self) -> PartialTraces | None:
        """Estimated from one row per sample, like the diagonal in the preconditioner"""
        told = self._has_rows() and self._sketch_fits and self.parameters.shards is None
        return statistics.partial_traces(self.lin, self._combined) if told else None

    def _size(self, block: slice) -> Tensor:
        """The trace of a diagonal block of G, estimated with signs in this block alone: it cannot become negative"""
        generator = torch.Generator("cpu").manual_seed(self.parameters.ranks.rank)
        v = torch.zeros_like(self.lin.theta)
        trace, square = v.new_zeros(()), v.new_zeros(())
        probes = self.options.probes
        for _ in range(probes):
            bits = torch.randint(0, 2, v[block].shape, generator=generator, dtype=torch.int8, device="cpu")
            v[block] = (2 * bits - 1).to(v)
            if self.options.hessian:
                Gv = self @ v
                trace, square = trace + self.parameters.dot(v, Gv) / probes, square + Gv[block].square().sum() / probes
            else:
                trace = trace + self.quadratic(v) / probes
        return torch.maximum(trace.abs(), square.sqrt())

    def _has_rows(self) -> bool:
        return not self.options.hessian and coupled(self.lin.objective.model) is None

    def _need_rows(self, what: str) -> None:
        ways_out = "use damping=mq.Identity() or mq.MeanEigenvalue()"
        if self.options.hessian:
            raise ValueError(
                f"{what} of a Hessian cannot be had from products: {ways_out}, or curvature=mq.Hessian() for a small "
                "model, or mq.MatrixFree(hessian=False)"
            )
        try:
            check_coupling(self.lin.objective.model)
        except ValueError as error:
            raise ValueError(f"{what} needs rows that belong to one sample each, but {error}. Or {ways_out}") from error

    def _preconditioner(self, A: Metric) -> Tensor | Callable[[Tensor], Tensor] | None:
        """(diag G + A)^¾: (n,); or A⁻¹, up to a factor, if A is not diagonal, since A then contains what is known of
        G"""
        if self.options.precondition is None:
            return None
        if A.turns:
            return lambda r: A.above.solve(r.clone(), self.parameters.sizes, scaled=False)
        if self._sketch is None:
            return None
        M = (self._sketch + A.diagonal(self.parameters.sizes)).pow_(self.options.precondition)
        return M.where(M > 0, 1)

    @cached_property
    def _sketch(self) -> Tensor | None:
        """diag G, estimated from one row per sample: one backward pass, whatever the number of outputs."""
        if not self._has_rows():
            return None
        total, fits = torch.zeros_like(self.lin.theta), True
        for piece in self._combined():
            fits = fits and _fits(piece, piece.m)
            if fits:
                total += scattered(((block, block.diagonal()) for block in piece.blocks), self.parameters)
        return self.lin.ranks.sum(total.mul_(self.lin.scale)) if self.lin.ranks.all(fits) else None

    def _combined(self) -> Iterator[Piece]:
        """Every piece with one row per sample; notes the parameters that have no influence"""
        lin = self.lin
        lin.rewind()
        for i, batch in enumerate(lin.cut()):
            piece = lin.piece(batch, i, Combined(lin.rows_kind), graph=False)
            yield piece
            if piece.inert is not None:
                self._inert = piece.inert if self._inert is None else self._inert & piece.inert


def _fits(piece: Piece, m: int) -> bool:
    """Whether m rows of the parameters without a rule, which are formed explicitly, are few enough."""
    return m * piece.others() <= SLAB
