"""A user's function as a loss, with derivatives by automatic differentiation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..surroundings import unless_interrupted
from .base import Fault, Loss, OutputLayout, Root, Target, alone, check_number, weighted
from .output_hessian import FORMED, Blocks, Product, eigen, find, group, lanczos, product_of, spread, ungroup
from .separability import PER_SAMPLE, Samples


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
    # What batches have shown about fn: "curved", "proven", and the results of Samples.
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

    # What batches show.

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        if not self.found.get("proven") or "sum" in self.found:
            with torch.no_grad(), torch.random.fork_rng([z.device] if z.is_cuda else []):
                Samples(self.display_name, self.called, self.found).prove(z, y)
        return []
