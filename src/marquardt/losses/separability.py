"""Whether a function of a batch is a mean or a sum over its samples: fn of the batch is compared with fn of its
parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ..surroundings import unless_interrupted
from ..tolerances import SAME_LOSS, coarser, of_functions
from .base import Target, part

PER_SAMPLE = "return one value per sample, a tensor (N,)"

# The number of samples among which the effect of one of them is visible even in a coarse precision.
FEW = 5


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


class Samples(NamedTuple):
    """What batches show about fn; `found` stores whether a scalar is a "sum", and whether fn is "proven"."""

    name: str
    called: Callable[[Tensor, Target], Tensor]  # () or (N, …)
    found: dict[str, bool]

    def prove(self, z: Tensor, y: Target) -> None:
        """Raises ValueError if samples are coupled, for then a sample has no derivatives of its own. A scalar is looked
        at again: it may couple the samples of this batch, as with a mask, but not those of the first."""
        if self.found.get("proven"):
            if len(z) > 1:
                self._check(z, y, 1)
            return
        self._check_gradients(z, y)
        out, again = self.called(z, y), self.called(z, y)
        if not bool(out.isfinite().all()):
            return  # the value of the batch is then not finite, which the step reports
        if not torch.equal(out, again):
            i = int((out != again).flatten().nonzero()[0])
            raise ValueError(
                f"{self.name} returned {out.flatten()[i]:.6g}, and {again.flatten()[i]:.6g} for the same outputs: it "
                "must not be random, nor remember earlier calls; draw random numbers in the model, or pass them with "
                "the targets"
            )
        self._check(z, y, 4)
        self.found["proven"] = len(z) > 1 and (bool(out.ndim) or "sum" in self.found)

    def _check(self, z: Tensor, y: Target, ways: int) -> None:
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
            raise ValueError(f"{self.name} {fault}{_broadcast(z, y)}")

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
                f"{self.name} depends on a tensor of shape {tuple(other.shape)} that requires gradients and is not an "
                "output of the model, so that this part of its gradient would be lost: a penalty on parameters is "
                'weight_decay=1e-4, or an output of the model with a loss of its own, such as "residual"; what is not '
                "to train takes requires_grad_(False)"
            )

    def _fault(self, z: Tensor, y: Target, ways: int, allowed: float) -> str:
        """The contradiction between fn of the batch and fn of its parts, "" if there is none."""
        out, cuts = self.called(z, y), list(self._cuts(z, y, ways))
        if not out.ndim:
            return self._fault_of_scalar(out, cuts, len(z), allowed)
        found = (_fault_of_samples(out[index], values, len(z), allowed) for index, values in cuts)
        return next(filter(None, found), "")

    def _cuts(self, z: Tensor, y: Target, ways: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of the batch, each with the rest, cut in so many ways, and fn of them; a single sample twice, to
        distinguish mean and sum."""
        N, i = len(z), torch.arange(len(z), device=z.device)
        firsts = [i == 0, i == N - 1, i % 2 == 0, 3 * i < N][:ways]
        halves = [i[half] for first in firsts for half in (first, ~first)] if N > 1 else [i.expand(2), i]
        for index in halves:
            try:
                found = self.called(*part((z, y), index, N))
            except Exception as error:
                unless_interrupted(error)
                raise ValueError(
                    f"{self.name} was taken of {N} samples, and fails with {len(index)} of them: {error}. It must take "
                    "batches of any size, with targets that have a row per sample"
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
