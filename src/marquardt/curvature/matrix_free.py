"""G by products alone, and (G + A)⁻¹g by conjugate gradients: Hessian-free optimisation.

J. Martens, Deep learning via Hessian-free optimization, ICML 2010.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.func import functional_call

from ..batch import check_coupling, forward
from ..chunk import Chunk
from ..diagonal import Diagonal, Factors
from ..layers import Replay
from ..layers.block import SLAB
from ..linearize import Linearization
from ..losses import Loss
from ..rows import Cotangents, Rows
from .contract import Curvature, FactorizationError, Past
from .dense import check_chunk
from .hessian import NOT_SYMMETRIC, again, flat, slope_with_graph, twice_differentiable

# Iterates number ⌈1.3ʲ⌉ are kept for backtracking: Martens, section 4.6.
SPACING = 1.3
# Random signs in an estimate of a trace: it is right to √(2/8) at the worst.
PROBES = 8
# Up to this many rows per sample the trace comes from the rows: beyond, the products of an estimate cost less.
FEW_ROWS = 64


@dataclass(frozen=True)
class MatrixFree:
    """(G + A)x = g by preconditioned conjugate gradients: G appears only in products Gv = JᵀS(SᵀJv) (Martens, 2010).

    A product costs about as much as two gradients, and memory grows with the activations alone. Samples may depend on
    each other, as with BatchNorm in train mode. With `hessian` G is the full ∇²f; the iteration then ends where it
    meets negative curvature.

    The iteration stops where k steps together improved the quadratic model by less than kε of it, k = max(10, i/10),
    ε = `tolerance`, or after `iterations`. It starts from `warm` times the last solution and is preconditioned by
    (diag G + A)^`precondition`, where layers have rules for the diagonal. With `backtrack` the step is the earlier
    iterate, if the loss itself is lower there. With `chunk` that many samples are linearised at once, for every product
    again.
    """

    chunk: int | None = None
    hessian: bool = False
    iterations: int = 250  # Martens (2010)
    tolerance: float = 5e-4  # section 4.4
    warm: float = 0.95  # Martens and Sutskever (2012) decay it so
    backtrack: bool = True
    precondition: float | None = 0.75  # section 4.7

    def __post_init__(self) -> None:
        check_chunk(self.chunk)
        if not isinstance(self.iterations, int) or self.iterations < 1:
            raise ValueError(f"iterations={self.iterations!r}: the most that CG may take, an integer of at least 1")
        if not 0 <= self.tolerance < 1:
            raise ValueError(
                f"tolerance={self.tolerance!r}: the relative progress at which CG stops, at least 0 and below 1; "
                "Martens uses 5e-4"
            )
        if not 0 <= self.warm <= 1:
            raise ValueError(
                f"warm={self.warm!r}: the share of the last solution that CG starts from, between 0 (none) and 1"
            )
        if self.precondition is not None and not 0 < self.precondition <= 1:
            raise ValueError(
                f"precondition={self.precondition!r}: the exponent of diag G + A, above 0 and at most 1 "
                "(Martens uses 0.75), or None for no preconditioner"
            )

    @property
    def by_sample(self) -> bool:
        return False

    def represent(self, lin: Linearization) -> MatrixFreeCurvature:
        return MatrixFreeCurvature(lin, self)


class MatrixFreeCurvature(Curvature):
    def __init__(self, lin: Linearization, options: MatrixFree) -> None:
        self.options = options
        lin.keep_graph = True
        # One chunk that stays open between products; several are linearised again for every product.
        self._open: Products | None = None
        self._way: Way | None = None
        self._proven = False
        lin.split(lin.chunk)  # a chunk from before may come from kernels that cannot be differentiated twice
        self._R = 0  # rows per sample
        with twice_differentiable(lin.model):
            for chunk in lin.chunks():
                if not self._R and lin.plan.proven is None:  # otherwise the rows have shown it
                    lin.plan.trial_needs_grad = not same_without_grad(chunk)
                self._R, self._rows_fit = len(chunk.rows.S), _fits(chunk)
                if lin.single and lin.chunk is None:
                    _ = chunk.gradient  # while the graph is fresh
                    self._open = self._products(chunk)
        self._g = lin.gradient if self._open is None else self._open.chunk.gradient * lin.scale
        self._start: Tensor | None = None  # (n,) of an earlier step
        self._last: Tensor | None = None  # (n,) where CG ended
        self._known: tuple[Tensor, float, float] | None = None  # x, gᵀx, xᵀGx of the step taken
        self._diagonal: Tensor | None = None
        self._sketched = False
        super().__init__(lin)

    @property
    def gradient(self) -> Tensor:
        return self._g

    # Products.

    def __matmul__(self, v: Tensor) -> Tensor:
        total: Tensor | None = None
        with torch.no_grad(), twice_differentiable(self.lin.model):
            for part in self._parts():
                found = part.product(v)
                total = found if total is None else total.add_(found)
        assert total is not None
        return total.mul_(self.lin.scale)

    def quadratic(self, v: Tensor) -> Tensor:
        """vᵀGv = ‖SᵀJv‖², half of a product"""
        if self.options.hessian:
            return super().quadratic(v)
        with torch.no_grad(), twice_differentiable(self.lin.model):
            squares = [part.rows(v).square().sum() for part in self._parts() if isinstance(part, GaussNewton)]
        return torch.stack(squares).sum() * self.lin.scale

    def _parts(self) -> Iterator[Products]:
        lin = self.lin
        if self._open is None:
            for chunk in lin.chunks():
                yield self._products(chunk)
            return
        if self._open.versions != versions(lin):  # trial points were tried, and the graph holds on to its weights
            self._open = None  # first: two graphs may not fit
            lin.start.restore()
            lin.move()
            (batch,) = lin.pieces()
            self._open = self._products(Chunk(lin, batch, lin.seed))
        yield self._open

    def _products(self, chunk: Chunk) -> Products:
        if self.options.hessian:
            second = HessianProducts(chunk)
            if not (self._proven or second.proven()):
                raise ValueError(NOT_SYMMETRIC)
            self._proven = True
            return second
        if self._way is not None:
            return GaussNewton(chunk, self._way)
        reasons = []
        for way in ways(chunk.lin.model):
            try:
                found = GaussNewton(chunk, way)
                if found.proven():
                    self._way = way
                    return found
                reason = "its derivatives contradict each other"
            except Exception as error:  # autograd and functional_call refuse models in many ways
                if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                    raise
                reason = str(error).split("\n")[0]
            reasons.append(f"{way.__name__.replace('_', ' ')}: {reason}")
        raise ValueError(f"no product Gv can be formed with this model. {'; '.join(reasons)}")

    # The step.

    def newton(self, damping: Diagonal | Tensor) -> Tensor:
        """(G + A)⁻¹g by conjugate gradients, as far as the model of the loss is worth it"""
        lin, options, g = self.lin, self.options, self._g
        with torch.no_grad():
            if not bool(g.isfinite().all()):
                raise FactorizationError("the gradient is not finite")
            A = Diagonal.of(damping, lin.sizes).to(g).entries(lin.sizes)  # (n,)
            start = None if self._start is None or options.warm == 0 else options.warm * self._start.to(g)
            iterates, curved = conjugate_gradients(
                lambda v: (self @ v).add_(A * v), g, self._preconditioner(A), start, options.iterations,
                options.tolerance, keep=options.backtrack,
            )  # fmt: skip
            taken = self._best(iterates) if options.backtrack and len(iterates) > 1 else iterates[-1]
            if not bool(taken.x.isfinite().all()):
                raise FactorizationError("conjugate gradients overflowed")
            last = iterates[-1].number
            self.notes.append(
                f"{last} CG iteration{'' if last == 1 else 's'}"
                + (", ended by negative curvature" if curved else "")
                + ("" if taken is iterates[-1] else f", back to iteration {taken.number}")
            )
            self._last = iterates[-1].x
            xGx = taken.xHx - float((A * taken.x) @ taken.x)
            self._known = taken.x, taken.gx, xGx if options.hessian else max(xGx, 0.0)
            return taken.x.clone()

    def _best(self, iterates: list[Iterate]) -> Iterate:
        """Backtracking: while the loss of the iterate before is lower (Martens, section 4.6)"""

        def loss(x: Tensor) -> float:
            f = float(self.lin.evaluate(x, -1.0))
            return f if math.isfinite(f) else math.inf

        best, least = iterates[-1], loss(iterates[-1].x)
        for iterate in reversed(iterates[:-1]):
            f = loss(iterate.x)
            if least < math.inf and not f < least:
                break
            best, least = iterate, f
        self.lin.move()
        return best

    def model(self, d: Tensor) -> tuple[Tensor, Tensor]:
        if self._known is not None and torch.equal(d.neg(), self._known[0]):  # CG has formed this product
            numbers = torch.tensor([-self._known[1], self._known[2]], dtype=torch.float64, device=d.device)
            return numbers[0], numbers[1]
        return super().model(d)

    def recall(self, past: Past | None, steps: int, same_data: bool) -> None:
        if past is not None and "x" in past and len(past["x"]) == self.lin.n:
            self._start = past["x"]

    def keep(self) -> Past | None:
        last = self._start if self._last is None else self._last
        return None if last is None else {"x": last}

    # What damping and the preconditioner ask for.

    def diagonal(self) -> Tensor:
        self._need_rows("diag G")
        return super().diagonal()

    def factored_maximum(self, D: Diagonal | None) -> Diagonal:
        self._need_rows("diag G")
        return super().factored_maximum(D)

    def trace(self) -> Tensor:
        """tr G from the rows, or by Hutchinson's estimate vᵀGv with random signs v, the same in every step

        A Hessian may have any trace, where damping asks for a size: there it is max(|tr|, ‖·‖_F), both estimated.
        """
        if self._has_rows() and self._R <= FEW_ROWS and self._rows_fit:
            return torch.stack([trace for _, trace in self.lin.traces()]).sum()
        return self._size(slice(None))

    def traces(self) -> Diagonal:
        if self._has_rows() and self._rows_fit:
            return super().traces()
        lin = self.lin
        parts: list[Factors] = [
            (self._size(slice(start, start + size)) / min(size, lin.most),)
            for start, size in zip(lin.starts, lin.sizes, strict=True)
        ]
        return Diagonal(torch.ones_like(parts[0][0]), parts)

    def _size(self, block: slice) -> Tensor:
        """The trace of a diagonal block of G, estimated by signs in this block alone: it cannot become negative"""
        generator = torch.Generator("cpu").manual_seed(0)
        v = torch.zeros_like(self.lin.theta)
        trace, square = v.new_zeros(()), v.new_zeros(())
        for _ in range(PROBES):
            bits = torch.randint(0, 2, v[block].shape, generator=generator, dtype=torch.int8, device="cpu")
            v[block] = (2 * bits - 1).to(v)
            if self.options.hessian:
                Gv = self @ v
                trace, square = trace + v @ Gv / PROBES, square + Gv[block].square().sum() / PROBES
            else:
                trace = trace + self.quadratic(v) / PROBES
        return torch.maximum(trace.abs(), square.sqrt())

    def _has_rows(self) -> bool:
        try:
            self._need_rows("")
        except ValueError:
            return False
        return True

    def _need_rows(self, what: str) -> None:
        ways_out = "use damping=mq.Identity() or mq.MeanEigenvalue()"
        if self.options.hessian:
            raise ValueError(
                f"{what} of a Hessian cannot be had from products: {ways_out}, or curvature=mq.Hessian() for a small "
                "model, or mq.MatrixFree(hessian=False)"
            )
        try:
            check_coupling(self.lin.model)
        except ValueError as error:
            raise ValueError(f"{what} needs rows that belong to one sample each, but {error}. Or {ways_out}") from error

    def _preconditioner(self, A: Tensor) -> Tensor | None:
        """(diag G + A)^¾: (n,)"""
        if self.options.precondition is None:
            return None
        if not self._sketched:
            self._diagonal, self._sketched = self._sketch() if self._has_rows() else None, True
        if self._diagonal is None:
            return None
        M = (self._diagonal + A).pow_(self.options.precondition)
        return M.where(M > 0, 1)

    def _sketch(self) -> Tensor | None:
        """diag G, estimated from one row per sample: one backward pass, however many outputs there are."""
        lin = self.lin
        lin.start.restore()
        lin.move()
        sketch = copy.copy(lin)
        sketch.rows_kind, sketch.keep_graph = Combined(lin.rows_kind), False
        total: Tensor | None = None
        for i, batch in enumerate(lin.pieces()):
            chunk = Chunk(sketch, batch, lin.seed + i)
            if not _fits(chunk):
                return None
            found = lin.scatter((block, block.diagonal()) for block in chunk.blocks)
            total = found if total is None else total.add_(found)
        assert total is not None
        return total.mul_(lin.scale)


def _fits(chunk: Chunk) -> bool:
    """Whether the rows of parameters without a rule, which are written out, are few enough."""
    return chunk.m * chunk.numbers()[2] <= SLAB


# The linear maps of one chunk, in Σ-units.


class Products:
    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.versions = versions(chunk.lin)

    def product(self, v: Tensor) -> Tensor:
        """(n,) → (n,)"""
        raise NotImplementedError


class GaussNewton(Products):
    """JᵀS(SᵀJv)"""

    def __init__(self, chunk: Chunk, way: Way) -> None:
        super().__init__(chunk)
        self.rows, self.adjoint = way(chunk.picked_from)

    def product(self, v: Tensor) -> Tensor:
        return self.adjoint(self.rows(v))

    def proven(self) -> bool:
        """Whether tᵀ(SᵀJv) = (JᵀSt)ᵀv for random t and v = JᵀSt.

        A layer may have derivatives that autograd takes without complaint and that are wrong: a backward pass that is
        no function of its cotangent, weights that functional_call does not find.
        """
        S = self.chunk.rows.S
        t = torch.randn(S.shape[:2], generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float64, device="cpu")
        t = t.to(S)
        v = self.adjoint(t)
        there, here = (t * self.rows(v)).sum().item(), (v @ v).item()
        # TF32 is right to 1e-3; a wrong derivative is wrong by far. What is not finite, the step will see.
        return not abs(there - here) > (1e-6 if S.dtype == torch.float64 else 1e-2) * here


class HessianProducts(Products):
    """∂(∇fᵀv)/∂θ"""

    def __init__(self, chunk: Chunk) -> None:
        super().__init__(chunk)
        self.slopes = [(i, s) for i, s in enumerate(slope_with_graph(chunk)) if s is not None and s.requires_grad]

    def product(self, v: Tensor) -> Tensor:
        lin = self.chunk.lin
        parts = v.split(lin.sizes)
        if not self.slopes:
            return torch.zeros_like(v)
        along = [parts[i].view_as(s) for i, s in self.slopes]
        return flat(again([s for _, s in self.slopes], lin.params, along), lin.params)

    def proven(self) -> bool:
        """Whether uᵀ(Hv) = vᵀ(Hu) for random u and v."""
        theta = self.chunk.lin.theta
        generator = torch.Generator(theta.device).manual_seed(0)
        u, v = (torch.randn(theta.shape, generator=generator, dtype=theta.dtype, device=theta.device) for _ in "uv")
        Hv, Hu = self.product(v), self.product(u)
        size = (u.norm() * Hv.norm()).item()
        return not abs((u @ Hv - v @ Hu).item()) > (1e-6 if theta.dtype == torch.float64 else 1e-2) * size


# Ways to SᵀJv, (n,) → (R, N), and JᵀSt, (R, N) → (n,). The first that is proven right is taken.

Pair = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
Way = Callable[[Chunk], Pair]


def by_double_backward(chunk: Chunk) -> Pair:
    """Jᵀw is linear in w, so that its derivative by w along v is Jv: the graph of Jᵀw is made once."""
    z, sizes = chunk.graph, chunk.lin.sizes
    with torch.enable_grad():
        w = torch.zeros_like(z, requires_grad=True)
        grads = torch.autograd.grad(z, chunk.lin.params, w, create_graph=True, allow_unused=True)
        dense = [g.to_dense() if g is not None and g.is_sparse else g for g in grads]
    pulled = [(i, g) for i, g in enumerate(dense) if g is not None and g.requires_grad]

    def rows(v: Tensor) -> Tensor:
        parts = v.split(sizes)
        along = [parts[i].view_as(g) for i, g in pulled]
        (Jv,) = torch.autograd.grad([g for _, g in pulled], w, along, retain_graph=True, allow_unused=True)
        return seen_by(chunk, Jv)

    return rows, partial(pullback, chunk)


def by_forward_mode(chunk: Chunk) -> Pair:
    """A forward pass with dual numbers, for every product."""
    lin = chunk.lin

    def rows(v: Tensor) -> Tensor:
        with forward_ad.dual_level(), torch.set_grad_enabled(lin.plan.trial_needs_grad):
            parts = zip(lin.names, lin.params, v.split(lin.sizes), strict=True)
            z = repeated(chunk, {name: forward_ad.make_dual(p.detach(), t.view_as(p)) for name, p, t in parts})
            Jv = forward_ad.unpack_dual(z).tangent
        return seen_by(chunk, None if Jv is None else Jv.detach())

    return rows, partial(pullback, chunk)


def by_rows(chunk: Chunk) -> Pair:
    """From the rows of every layer, for operations that can be differentiated only once."""
    shape, blocks, lin = chunk.rows.S.shape[:2], chunk.blocks, chunk.lin
    return lambda v: lin.apply(blocks, v).view(shape), lambda t: lin.adjoint(blocks, t.flatten())


def ways(model: nn.Module) -> tuple[Way, ...]:
    """Fastest first. Of a convolution torch's double backward also computes the gradients that nobody asked for, and
    takes twice as long as forward mode (paper CNN on a CPU: 114 against 66 ms a product)."""
    if any(isinstance(m, nn.modules.conv._ConvNd) for m in model.modules()):
        return by_forward_mode, by_double_backward, by_rows
    return by_double_backward, by_forward_mode, by_rows


def pullback(chunk: Chunk, t: Tensor) -> Tensor:
    """Jᵀ(St): (R, N) → (n,)"""
    return chunk.vjp(torch.einsum("rn,rn...->n...", t, chunk.rows.S))


def seen_by(chunk: Chunk, Jv: Tensor | None) -> Tensor:
    """Sᵀ(Jv): (N, *out) → (R, N)"""
    S = chunk.rows.S
    return S.new_zeros(S.shape[:2]) if Jv is None else (S * Jv).reshape(*S.shape[:2], -1).sum(2)


def repeated(chunk: Chunk, replaced: dict[str, Tensor]) -> Tensor:
    """The forward pass of a chunk once more, with other tensors in the place of some parameters.

    On copies of the buffers: restoring them in place would spoil the graph of the chunk.
    """
    model = chunk.lin.model
    before = {id(b): value for _, saved in chunk.before.buffers for b, value in saved.values() if b is not None}
    values = {name: before.get(id(b)) for name, b in model.named_buffers()}
    buffers = {name: value.clone() for name, value in values.items() if value is not None}
    chunk.before.restore(buffers=False)
    try:
        with Replay(chunk.slopes):
            return forward(lambda *a, **k: functional_call(model, {**buffers, **replaced}, a, k), chunk.batch.inputs)
    finally:
        chunk.after.restore(buffers=False)


def same_without_grad(chunk: Chunk) -> bool:
    """Whether the model gives the same outputs under no_grad: a network that differentiates itself may not."""
    try:
        with torch.no_grad():
            z = repeated(chunk, {})
        return bool((z - chunk.z).norm() <= 1e-3 * chunk.z.norm())
    except Exception:  # whatever the model says to a forward pass without gradients
        return False


def versions(lin: Linearization) -> list[tuple[int, int]]:
    """What autograd looks at before it trusts a graph."""
    tensors = [*lin.model.parameters(), *lin.model.buffers()]
    return [(id(t), t._version) for t in tensors]


@dataclass(frozen=True)
class Combined:
    """The rows of every sample added up with random signs: one row, whose square is the sum of their squares in the
    mean (Chapelle and Erhan, 2011)."""

    rows: Rows

    @property
    def random(self) -> bool:
        return True

    def pick(self, N: int, seed: int) -> Tensor | None:
        return self.rows.pick(N, seed)

    def draw(self, loss: Loss, z: Tensor, y: Any, weight: Tensor | None, seed: int) -> Cotangents:
        S = self.rows.draw(loss, z, y, weight, seed).S  # (R, N, *out)
        if len(S) > 1:
            generator = torch.Generator("cpu").manual_seed(seed)
            bits = torch.randint(0, 2, S.shape[:2], generator=generator, device="cpu")
            S = torch.einsum("rn,rn...->n...", (2 * bits - 1).to(S), S)[None]
        return Cotangents(S, None, None)


# Conjugate gradients.


class Iterate(NamedTuple):
    x: Tensor  # (n,)
    number: int
    gx: float  # gᵀx
    xHx: float  # xᵀ(G + A)x


def conjugate_gradients(
    H: Callable[[Tensor], Tensor],
    g: Tensor,
    M: Tensor | None,
    start: Tensor | None,
    iterations: int,
    tolerance: float,
    *,
    keep: bool = True,
) -> tuple[list[Iterate], bool]:
    """Minimises φ(x) = ½xᵀHx − gᵀx, preconditioned by the diagonal M: some of the iterates, the last one always, and
    whether negative curvature ended it.

    Stops at i > k, φᵢ < 0, (φᵢ − φᵢ₋ₖ)/φᵢ < kε with k = max(10, ⌈0.1·i⌉) (Martens, section 4.4).
    """

    def divided(r: Tensor) -> Tensor:
        return r.clone() if M is None else r / M

    x, r, phi = torch.zeros_like(g), g.clone(), 0.0
    gx, xr = 0.0, 0.0
    if start is not None:
        residual = g - H(start)
        sx, sr = scalars(g @ start, residual @ start)
        if sx > sr and sx + sr > 0:  # positive curvature, and better than 0: φ = −½(gᵀx + rᵀx)
            x, r, gx, xr, phi = start, residual, sx, sr, -0.5 * (sx + sr)
    z = divided(r)
    p = z.clone()
    rz, scale = scalars(r @ z, g @ divided(g))
    phis, iterates, curved = [phi], [], False
    marks = {math.ceil(SPACING**j) for j in range(100)} if keep else set()
    i = 0
    while i < iterations and rz > torch.finfo(g.dtype).eps ** 2 * scale:
        Hp = H(p)
        (pHp,) = scalars(p @ Hp)
        if not math.isfinite(pHp):
            raise FactorizationError("conjugate gradients overflowed")
        if pHp <= 0:
            curved = True
            if i == 0 and gx == 0:  # the preconditioned gradient, as long as if the curvature had the other sign
                x = p.mul_(rz / -pHp if pHp < 0 else 1.0)
                (gx,) = scalars(g @ x)
                xr = gx - pHp * (rz / pHp) ** 2 if pHp < 0 else gx
            break
        if i in marks:
            iterates.append(Iterate(x.clone(), i, gx, gx - xr))
        x.add_(p, alpha=rz / pHp)
        r.sub_(Hp, alpha=rz / pHp)
        z = divided(r)
        old = rz
        rz, gx, xr = scalars(r @ z, g @ x, r @ x)
        i += 1
        phis.append(-0.5 * (gx + xr))
        if not math.isfinite(phis[i] + rz):
            raise FactorizationError("conjugate gradients overflowed")
        k = max(10, math.ceil(0.1 * i))
        if i > k and phis[i] < 0 and (phis[i] - phis[i - k]) / phis[i] < k * tolerance:
            break
        p.mul_(rz / old).add_(z)
    return [*iterates, Iterate(x, i, gx, gx - xr)], curved


def scalars(*tensors: Tensor) -> list[float]:
    """In one synchronisation"""
    found: list[float] = torch.stack(tensors).double().tolist()
    return found
