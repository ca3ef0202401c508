"""A user's function as a loss: derivatives by automatic differentiation, what a scalar means, and whether samples are
coupled."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ..surroundings import unless_interrupted
from ..tolerances import SAME_LOSS, coarser, of_functions
from .base import Fault, Loss, OutputLayout, Root, Target, alone, check_number, noise, part, weighted

PER_SAMPLE = "return one value per sample, a tensor (N,)"

# The number of samples among which the effect of one of them is visible even in a coarse precision.
FEW = 5

# The largest groups whose H is formed when rows of it are drawn at random; larger ones use Lanczos' method.
FORMED = 64

# The number of products in Lanczos' method: the square root of a matrix of condition 1000 is then accurate to 1e-3.
PRODUCTS = 24

# The relative difference allowed between two results for H times a random vector: by the blocks, and by a product.
SAME = {torch.float32: 1e-4, torch.float64: 1e-9}

Product = Callable[[Tensor], Tensor]  # Hv, like z


@dataclass(frozen=True, eq=False)
class Function(Loss):
    """f is the mean of fn(outputs, targets): of one value per sample (N,), or of several (N, …).

    A scalar is the mean over the samples, or their sum: the first batch shows which, and for every batch the values of
    its parts must add up. S comes from the Hessian of every sample, by automatic differentiation, with negative
    eigenvalues made positive; the part of the gradient outside its range is the remainder. `low` is a lower bound of
    all values of fn, if one is known. Sample weights require the value of every sample: fn is then called on one sample
    at a time if it returns a scalar.

    If the model returns more than a tensor, fn receives all outputs that are floating-point tensors with a row per
    sample, see `OutputLayout.structure`.

    Args:
        fn: a function of outputs and targets.
        low: a lower bound of all values of fn; −∞ if unknown.
        layout: the layout if the model returns more than a tensor; None before the model has been called.

    >>> opt = mq.LM(model, mq.losses.Function(lambda z, y: (z - y).abs().pow(1.5).mean(1), low=0.0))
    >>> step = opt.step(x, y)
    """

    majorises: ClassVar[bool] = True
    automatic: ClassVar[bool] = True
    recordable: ClassVar[bool] = False
    fn: Callable[[Any, Any], Any]
    low: float = -math.inf
    layout: OutputLayout | None = field(default=None, repr=False)  # if the model returns more than a tensor
    # What batches have shown about fn: whether it is "curved" and "proven", and whether a scalar is a "sum".
    found: dict[str, bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.fn):
            raise TypeError(f"Function needs a function of outputs and targets, got {self.fn!r}")
        check_number(self.low, "low")
        if not self.low < math.inf:
            raise ValueError(f"low={self.low!r}: what no value of fn falls below, a number or -math.inf")
        if isinstance(self.fn, nn.Module):
            trained = next((name for name, p in self.fn.named_parameters() if p.requires_grad), None)
            if trained is not None:
                raise ValueError(
                    f"the loss {self.display_name} has a parameter {trained!r} that would not train: move it into the "
                    "model, which may return it beside its outputs, or freeze it with requires_grad_(False)"
                )

    @property
    def display_name(self) -> str:
        fn = self.fn.func if isinstance(self.fn, functools.partial) else self.fn
        return str(getattr(fn, "__name__", type(fn).__name__))

    @property
    def curvature_kind(self) -> str:
        return "projected hessian"

    # The outputs of the model.

    def bound(self, raw: Any, y: Target, weight: Tensor | None = None, sums: Tensor | None = None) -> Function:
        layout = None if isinstance(raw, Tensor) else OutputLayout.of(raw)
        if layout == self.layout:
            return self
        bound = copy(self)  # `found` is shared
        object.__setattr__(bound, "layout", layout)
        return bound

    def joined(self, raw: Any) -> Tensor:
        return super().joined(raw) if isinstance(raw, Tensor) else OutputLayout.of(raw).joined(raw)

    # Values.

    def called(self, z: Tensor, y: Target) -> Tensor:
        """The result of fn: () or (N, …)"""
        out = self.fn(z if self.layout is None else self.layout.structure(z), y)
        if not isinstance(out, Tensor) or not out.is_floating_point():
            got = out.dtype if isinstance(out, Tensor) else type(out).__name__
            raise TypeError(f"{self.display_name} returned {got}: {PER_SAMPLE} of floating point, computed by torch")
        if out.ndim and len(out) != len(z):
            raise ValueError(
                f"{self.display_name} returned the shape {tuple(out.shape)} for outputs of shape {tuple(z.shape)}: "
                f"{PER_SAMPLE}, here ({len(z)},), or a scalar that is their mean"
            )
        return out.to(z.dtype)

    def ell(self, z: Tensor, y: Target) -> Tensor:
        out = self.called(z, y)
        return out if out.ndim else torch.stack([self.called(*one) for one in alone(z, y)])

    def value(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        out = self.called(z, y)
        if out.ndim:
            return weighted(out, weight).sum()
        return self._total(out, len(z)) if weight is None else weighted(self.ell(z, y), weight).sum()

    def _total(self, out: Tensor, N: int) -> Tensor:
        """Σℓ from the result of fn for N samples"""
        return out.sum() if out.ndim or self.found.get("sum") else N * out

    def normaliser(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        entries = self.called(*next(alone(z, y))).numel()
        return entries * (z.new_full((), len(z)) if weight is None else weight.sum())

    def scale(self, normaliser: float) -> float:
        return self.factor if self.found.get("sum") else super().scale(normaliser)

    def lower_bound(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        return self.low * self.normaliser(z, y, weight) if self.low > -math.inf else z.new_full((), self.low)

    # Derivatives.

    def slope(self, z: Tensor, y: Target) -> Tensor:
        return self._sloped(z, y, False)[1].detach()

    def factors(self, z: Tensor, y: Target) -> tuple[Tensor, Tensor]:
        S, u, _ = self.root(z, y)
        return S, u

    def root(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Root:
        product, slope = self._products(z, y)
        blocks = find(product, z, math.inf)
        assert blocks is not None
        values, Q = eigen(self._finite(blocks, z, y))
        self._check_curved(values.any(), slope)
        # Columns of 0 would need an infinite u: that part of the gradient goes into the remainder.
        eps, largest = torch.finfo(z.dtype).eps, values.amax()
        s = values.where(values > eps * largest, 0).sqrt()  # (N, P, C)
        along = torch.einsum("npcr,npc->npr", Q, group(slope, blocks.dim))
        u = (along / s).where(s > 0, 0)
        v = torch.einsum("npcr,npr->npc", Q, along.where(s == 0, 0))
        outside = bool(v.norm() > 16 * eps * slope.norm())
        S = spread(Q * s[..., None, :], blocks.dim, z)
        u, v = (self.group(ungroup(t, blocks.dim, z)) for t in (u, v))
        root_w = None if weight is None else weight.sqrt()
        return Root(weighted(S, root_w), weighted(u, root_w), weighted(v, weight) if outside else None)

    def mixed(self, z: Tensor, y: Target, weight: Tensor | None, signs: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        product, slope = self._products(z, y)
        e = self.ungroup(signs(tuple(self.group(z).shape)), z)  # (k, *z.shape)
        blocks = find(product, z, FORMED)
        if blocks is None:
            found = torch.stack([lanczos(product, row) for row in e])
        else:
            values, Q = eigen(self._finite(blocks, z, y))
            rows = torch.stack([group(row, blocks.dim) for row in e]) * values.sqrt()  # (k, N, P, C)
            rows = torch.einsum("npcr,knpr->knpc", Q, rows)
            found = torch.stack([ungroup(row, blocks.dim, z) for row in rows])
        self._check_curved(found.any(), slope)
        return self.group(found if weight is None else found * weighted(torch.ones_like(z), weight.sqrt()), z)

    def count(self, z: Tensor, y: Target, weight: Tensor | None = None) -> int:
        return z[0].numel()

    def _sloped(self, z: Tensor, y: Target, again: bool) -> tuple[Tensor, Tensor]:
        """z and ∂value/∂z, with a graph if ∂value/∂z is to be differentiated again"""
        with torch.enable_grad():
            x = z.detach().requires_grad_()
            total = self._total(self.called(x, y), len(z))
            if not total.requires_grad:
                raise ValueError(
                    f"{self.display_name} returned a value without a gradient: compute it from the outputs with "
                    "operations of torch, without .item(), .detach(), numpy or torch.no_grad()"
                )
            (slope,) = torch.autograd.grad(total, x, create_graph=again, allow_unused=True)
        if slope is None:
            raise ValueError(f"{self.display_name} does not depend on the outputs: it is given (outputs, targets)")
        return x, slope

    def _products(self, z: Tensor, y: Target) -> tuple[Product, Tensor]:
        """Products with ∂²value/∂z², and ∂value/∂z"""
        x, slope = self._sloped(z, y, True)
        product = product_of(slope, x)
        try:
            product(torch.zeros_like(z))
        except (RuntimeError, NotImplementedError) as error:
            unless_interrupted(error)
            raise ValueError(
                f"{self.display_name} cannot be differentiated twice: {str(error).splitlines()[0]}. Write it with "
                "operations that can, or use its gradients alone: rows=mq.Empirical()"
            ) from error
        return product, slope.detach()

    def _finite(self, blocks: Blocks, z: Tensor, y: Target) -> Blocks:
        """The blocks, or zeros if the value itself is not finite: that is an error of the step, which finds the
        cause."""
        fine = blocks.H.isfinite().flatten(1).all(1)  # (N,)
        if bool(fine.all()):
            return blocks
        if bool(self.value(z, y).isfinite()):
            raise ValueError(
                f"{self.display_name} has a second derivative that is not finite, at sample "
                f"{int((~fine).nonzero()[0])}: smooth it there, such as (r² + ε)^½ for a norm, or use its gradients "
                "alone: rows=mq.Empirical()"
            )
        return blocks._replace(H=torch.zeros_like(blocks.H))

    def _check_curved(self, curved: Tensor, slope: Tensor) -> None:
        """Raises ValueError without any curvature: there is then no Gauss-Newton matrix, and no scale for a step."""
        told = bool(slope.any() & slope.isfinite().all())
        if told and not self.found.get("curved") and not bool(curved):
            raise ValueError(
                f"{self.display_name} has no curvature anywhere in this batch, as a function that is piecewise linear, "
                "that only passes on what the model returns, or that autograd differentiates only once: smooth its "
                "corners, see losses.Quantile and losses.AbsoluteError; let the model return what its loss is made of, "
                "as the point and the log-determinant of a flow; or use its gradients alone: rows=mq.Empirical()"
            )
        self.found["curved"] = True

    # What batches show: whether fn is a mean or a sum over its samples, for which it is compared with fn of its parts.

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        if not self.found.get("proven") or "sum" in self.found:
            with torch.no_grad(), torch.random.fork_rng([z.device] if z.is_cuda else []):
                self._prove(z, y)
        return []

    def _prove(self, z: Tensor, y: Target) -> None:
        """Raises ValueError if samples are coupled, for then a sample has no derivatives of its own. A scalar is looked
        at again: it may couple the samples of this batch, as with a mask, but not those of the first."""
        if self.found.get("proven"):
            if len(z) > 1:
                self._check_samples(z, y, 1)
            return
        self._check_gradients(z, y)
        out, again = self.called(z, y), self.called(z, y)
        if not bool(out.isfinite().all()):
            return  # the value of the batch is then not finite, which the step reports
        if not torch.equal(out, again):
            i = int((out != again).flatten().nonzero()[0])
            raise ValueError(
                f"{self.display_name} returned {out.flatten()[i]:.6g}, and {again.flatten()[i]:.6g} for the same "
                "outputs: it must not be random, nor remember earlier calls; draw random numbers in the model, or pass "
                "them with the targets"
            )
        self._check_samples(z, y, 4)
        self.found["proven"] = len(z) > 1 and (bool(out.ndim) or "sum" in self.found)

    def _check_samples(self, z: Tensor, y: Target, ways: int) -> None:
        """Compares in float64, because numbers that cancel in float32 would look coupled. If fn contains numbers in
        another precision, or computes in another one, the precision of the outputs decides."""
        try:
            at, data = part((z, y), torch.arange(len(z), device=z.device), len(z), torch.float64)
            fault = self._fault(at, data, ways, SAME_LOSS[torch.float64])
            own = bool(fault) and self._precision(at, data) != torch.float64
        except Exception as error:  # fn may raise anything in another precision
            unless_interrupted(error)
            own = True
        if own:
            allowed = of_functions(self._precision(z, y))
            few = torch.linspace(0, len(z) - 1, min(len(z), FEW), device=z.device).long()
            fault = self._fault(z, y, ways, allowed)
            fault = fault or self._fault(part(z, few, len(z)), part(y, few, len(z)), ways, allowed)
        if fault:
            raise ValueError(f"{self.display_name} {fault}{_broadcast(z, y)}")

    def _precision(self, z: Tensor, y: Target) -> torch.dtype:
        """The precision of z, or a coarser one in which fn computes"""
        with Coarsest() as seen:
            self.called(z, y)
        return coarser(seen.dtype, z.dtype)

    def _check_gradients(self, z: Tensor, y: Target) -> None:
        """Checks that fn depends on nothing else that requires gradients: its gradient is only taken through the
        outputs."""
        with torch.enable_grad():
            x = z.detach().requires_grad_()
            out = self.called(x, tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, y))
        other = next((t for t in _leaves(out) if t is not x), None)
        if other is not None:
            raise ValueError(
                f"{self.display_name} depends on a tensor of shape {tuple(other.shape)} that requires gradients and is "
                "not an output of the model, so that this part of its gradient would be lost: a penalty on parameters "
                'is weight_decay=1e-4, or an output of the model with a loss of its own, such as "residual"; what is '
                "not to train takes requires_grad_(False)"
            )

    def _fault(self, z: Tensor, y: Target, ways: int, allowed: float) -> str:
        """The contradiction between fn of the batch and fn of its parts, "" if there is none."""
        out, cuts = self.called(z, y), list(self._cuts(z, y, ways))
        if not out.ndim:
            return self._fault_of_scalar(out, cuts, len(z), allowed)
        found = (_fault_of_samples(out[index], values, len(z), allowed) for index, values in cuts)
        return next(filter(None, found), "")

    def _cuts(self, z: Tensor, y: Target, ways: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of the batch, each with the rest, and fn of them; a single sample twice, to distinguish mean and
        sum."""
        N, i = len(z), torch.arange(len(z), device=z.device)
        firsts = [i == 0, i == N - 1, i % 2 == 0, 3 * i < N][:ways]
        halves = [i[half] for first in firsts for half in (first, ~first)] if N > 1 else [i.expand(2), i]
        for index in halves:
            try:
                found = self.called(*part((z, y), index, N))
            except Exception as error:
                unless_interrupted(error)
                raise ValueError(
                    f"{self.display_name} was taken of {N} samples, and fails with {len(index)} of them: {error}. It "
                    "must take batches of any size, with targets that have a row per sample"
                ) from error
            yield index, found

    def _fault_of_scalar(self, out: Tensor, cuts: list[tuple[Tensor, Tensor]], N: int, allowed: float) -> str:
        """Finds out whether a scalar is a mean or a sum, by which of the two adds up."""
        if N == 1:
            twice, once = (float(found) for _, found in cuts)
            if once:
                self.found["sum"] = abs(twice - 2 * once) < abs(twice - once)
            return ""
        if not bool(out.isfinite()):
            return ""  # the step reports that as well
        known = self.found.get("sum")
        fits = [not known, known is not False]  # as a mean, as a sum
        for (i, a), (j, b) in zip(cuts[::2], cuts[1::2], strict=True):
            mean, total = (len(i) * a + len(j) * b) / N, a + b
            most = allowed * (a.abs() + b.abs() + out.abs())
            fits = [fit and bool((t - out).abs() <= most) for fit, t in zip(fits, (mean, total), strict=True)]
            if not any(fits):
                empty = "" if bool(total.isfinite()) else ". A mean over a mask is not finite if nothing of it is left"
                return (
                    f"couples the samples: of {N} samples it is {float(out):.9g}, of two parts {float(a):.9g} and "
                    f"{float(b):.9g}, whose mean is {float(mean):.9g} and whose sum is {float(total):.9g}: {PER_SAMPLE}"
                    "; a mean over what is not masked is ignore_index of cross_entropy, or weight= of a step"
                    f"{empty}"
                )
        if fits[0] != fits[1]:
            self.found["sum"] = fits[1]
        return ""


# --- H = ∂²ℓ/∂z², from as few products as its structure allows, and a root of its absolute value. H does not couple
# samples. Within a sample it couples outputs in P groups of C: each output alone, those along one dimension, or all of
# them, c = PC.


class Blocks(NamedTuple):
    """H as blocks of groups along a dimension of z: 0 for each output alone, −1 for all of them."""

    dim: int
    H: Tensor  # (N, P, C, C)


def group(t: Tensor, dim: int) -> Tensor:
    """(N, …) → (N, P, C)"""
    if dim < 1:
        return t.reshape(len(t), *((-1, 1) if dim == 0 else (1, -1)))
    return t.movedim(dim, -1).reshape(len(t), -1, t.shape[dim])


def ungroup(t: Tensor, dim: int, like: Tensor) -> Tensor:
    """The inverse of `group`."""
    if dim < 1:
        return t.reshape(like.shape)
    return t.reshape(like.movedim(dim, -1).shape).movedim(-1, dim)


def product_of(slope: Tensor, z: Tensor) -> Product:
    """v ↦ ∂(slopeᵀv)/∂z"""

    def product(v: Tensor) -> Tensor:
        if not slope.requires_grad:  # fn is linear in z
            return torch.zeros_like(v)
        (Hv,) = torch.autograd.grad(slope, z, v, retain_graph=True)
        return Hv.detach()

    return product


def find(product: Product, z: Tensor, most: float) -> Blocks | None:
    """The smallest blocks that contain all of H; None if they have more than `most` outputs."""
    v = noise(z, 0)
    Hv, dims = product(v), range(1, z.ndim) if z.ndim > 2 else ()
    along = sorted(((dim, z.shape[dim]) for dim in dims), key=lambda pair: pair[1])
    for dim, C in [(0, 1), *along, (-1, z[0].numel())]:
        if most < C or (C > 1 and _leaks(product, v, dim)):
            continue
        columns = (e.expand_as(group(z, dim)) for e in torch.eye(C, dtype=z.dtype, device=z.device))
        H = torch.stack([group(product(ungroup(e, dim, z)), dim) for e in columns], -1)  # (N, P, C, C)
        found = ungroup((H @ group(v, dim)[..., None])[..., 0], dim, z)
        if dim < 0 or bool((found - Hv).norm() <= SAME[z.dtype] * Hv.norm()):
            return Blocks(dim, (H + H.mT) / 2)
    return None


def _leaks(product: Product, v: Tensor, dim: int) -> bool:
    """Whether H couples the groups with even and odd numbers: one product shows it, before C of them are formed."""
    t = group(v, dim)
    here = torch.arange(t.shape[1], device=v.device) % 2 == 0
    Hv = group(product(ungroup(t * here[:, None], dim, v)), dim)
    return bool(Hv[:, ~here].norm() > SAME[v.dtype] * Hv.norm())


def eigen(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """|λ| (N, P, C) and eigenvectors Q (N, P, C, C), computed in float64: eigenvalues of 0 differ from rounding
    there"""
    if blocks.H.shape[-1] == 1:
        return blocks.H[..., 0].abs(), torch.ones_like(blocks.H)
    values, Q = torch.linalg.eigh(blocks.H.double())
    return values.abs().to(blocks.H), Q.to(blocks.H)


def spread(S: Tensor, dim: int, z: Tensor) -> Tensor:
    """Blocks (N, P, C, C) as one matrix per sample: (N, 1, c, c)"""
    index = group(torch.arange(z[0].numel(), device=z.device).reshape(1, *z.shape[1:]), dim)[0]  # (P, C)
    full = S.new_zeros(len(z), 1, z[0].numel(), z[0].numel())
    full[:, 0, index[:, :, None], index[:, None, :]] = S
    return full


def lanczos(product: Product, e: Tensor) -> Tensor:
    """|H|^½ e of every sample: ‖e‖ V|T|^½e₁ with H ≈ VTVᵀ on the span of the first powers of H times e, like e"""
    norm = e.flatten(1).norm(dim=1)  # (N,)
    v = e.flatten(1) / norm[:, None]
    V, diagonal, beside = [v], [], []
    for _ in range(min(PRODUCTS, v.shape[1])):
        w = product(V[-1].reshape(e.shape)).flatten(1)
        diagonal.append((w * V[-1]).sum(1))
        for _ in range(2):  # one pass leaves rounding behind
            for u in V:
                w = w - (w * u).sum(1, keepdim=True) * u
        length = w.norm(dim=1)
        told = length > torch.finfo(w.dtype).eps ** 0.5 * torch.stack(diagonal).abs().amax(0)
        beside.append(length.where(told, 0))
        V.append(w / length[:, None].where(told[:, None], torch.inf))
    T = torch.diag_embed(torch.stack(diagonal, 1))  # (N, k, k)
    off = torch.diag_embed(torch.stack(beside[:-1], 1), 1) if len(beside) > 1 else torch.zeros_like(T)
    values, Q = torch.linalg.eigh((T + off + off.mT).double())
    first = (Q * values.abs().sqrt()[:, None]) @ Q[:, :1].mT  # (N, k, 1)
    found = torch.einsum("knc,nk->nc", torch.stack(V[:-1]), first[..., 0].to(e))
    root: Tensor = norm[:, None] * found
    return root.reshape(e.shape)


# --- What the comparison of a batch with its parts needs.


class Coarsest(TorchFunctionMode):
    """Records the precision in which something is computed, if it is coarser than that of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float64

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point() and coarser(out.dtype, self.dtype) != self.dtype:
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
            if any(coarser(t.dtype, out.dtype) != t.dtype for t in given):
                self.dtype = out.dtype
        return out


def _fault_of_samples(whole: Tensor, found: Tensor, N: int, allowed: float) -> str:
    if whole.shape != found.shape:
        return (
            f"returned the shape {tuple(found.shape)} for a part of the batch, where {tuple(whole.shape)} was "
            f"expected: {PER_SAMPLE}"
        )
    near = (whole - found).abs() <= allowed * (whole.abs() + found.abs() + whole.abs().max())
    if bool(near.all()):
        return ""
    i = int((~near).flatten().nonzero()[0])
    return (
        f"couples the samples: a value is {whole.flatten()[i]:.9g} in a batch of {N}, but {found.flatten()[i]:.9g} in "
        f"a batch of {len(found)}. The value of a sample must depend on its own output and target alone: return one "
        "value per sample, without sums, means or maxima over the batch"
    )


def _leaves(t: Tensor) -> Iterator[Tensor]:
    """All tensors that t is computed from and that require gradients"""
    nodes: list[Any] = [t.grad_fn]
    met = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in met:
            met.add(node)
            nodes += [before for before, _ in node.next_functions]
            if hasattr(node, "variable"):
                yield node.variable


def _broadcast(z: Tensor, y: Target) -> str:
    """A likely cause of coupled samples: z (N, 1) and y (N,), or vice versa"""
    if not isinstance(y, Tensor) or not y.is_floating_point() or {z.shape, y.shape} != {z.shape[:1], (len(z), 1)}:
        return ""
    way_out = "targets.unsqueeze(-1), or outputs.squeeze(-1)" if y.ndim < z.ndim else "targets.squeeze(-1)"
    return (
        f". Outputs have shape {tuple(z.shape)}, targets {tuple(y.shape)}: broadcasting pairs every output with the "
        f"targets of all samples, use {way_out}"
    )
