"""The check of a user's loss on first use: its gradient and its root are compared with its value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..surroundings import unless_interrupted
from ..tolerances import FORMULA, coarser
from . import Elementwise, Loss
from .base import alone, noise, part
from .function import Coarsest
from .resolve import NAMES
from .tasks import Tasks

OURS = {type(loss) for loss in NAMES.values()}  # these are covered by the tests; a subclass may compute anything

# How many samples are compared.
FEW = 4


class Check(NamedTuple):
    """Two numbers that must be equal, for every sample."""

    method: str
    what: str
    found: Tensor  # (k,)
    expected: Tensor  # (k,)
    by: str  # how `expected` was computed
    size: Tensor  # the size of the terms that were added up: (k,)
    rounding: Tensor  # (k,) the same at outputs where nothing underflows
    advice: str

    def fault(self) -> str | None:
        """The fault, or "" if there is none; None if a number is not finite, for then nothing is proven."""
        if not bool((self.found.isfinite() & self.expected.isfinite()).all()):
            return None
        eps = torch.finfo(self.found.dtype).eps
        rounding = self.rounding[self.rounding.isfinite()].sum()
        allowed = FORMULA[self.found.dtype] * self.size + eps**0.5 * rounding
        wrong = ((self.found - self.expected).abs() > allowed).nonzero().flatten().tolist()
        if not wrong:
            return ""
        found, expected = self.found[wrong[0]], self.expected[wrong[0]]
        return f"{self.method}: {self.what} is {found:.6g}, but {expected:.6g} {self.by}. {self.advice}"


def prove(loss: Loss, empirical: bool, z: Tensor, y: Any, weight: Tensor | None) -> bool:
    """Raises ValueError if the derivatives of the loss are not those of its value; False if these outputs cannot show
    it.

    `empirical`: whether the rows are those of `Loss.empirical` instead of `Loss.root`.

    Computed in float64, or in the precision of z if the loss refuses float64 or computes in a coarser precision. At a
    kink of the loss a right formula may differ from autograd, so it is only wrong if it is also wrong near the outputs.
    """
    if type(loss) in OURS:
        return True
    if isinstance(loss, Tasks):
        each = [prove(part.loss, empirical, part.z, part.y, weight) for part in loss.parts(z, y)]
        return all(each)
    index = torch.arange(len(z), device=z.device) if weight is None else weight.nonzero().flatten()
    if len(index) == 0:
        return False
    index = index[:FEW] if len(index) > 1 else index.expand(2)  # a single sample is used twice: do the two add up?
    for dtype in dict.fromkeys((torch.float64, z.dtype)):
        at, *data = part((z, y, weight), index, len(z), dtype)
        try:
            with Coarsest() as seen:
                found = _fault(loss, empirical, at, *data)
                if found != "":
                    beside = _fault(loss, empirical, at + 0.01 * (1 + at.abs()) * noise(at, 1), *data)
                    found = beside if beside == "" else found or beside
        except Exception as error:  # a loss may raise anything for a few samples in another precision
            unless_interrupted(error)
            continue
        # Differences of values that were rounded prove nothing; otherwise the precision of the outputs decides.
        if found and coarser(seen.dtype, dtype) != dtype and (loss.automatic or dtype != z.dtype):
            continue
        if found:
            raise ValueError(f"{loss.display_name}.{found}")
        return found is not None
    return True  # other outputs would not show more


def _fault(loss: Loss, empirical: bool, z: Tensor, y: Any, weight: Tensor | None) -> str | None:
    """The first fault at z, see Check."""
    faults = (check.fault() for check in _checks(loss, empirical, z, y, weight))
    return next((fault for fault in faults if fault != ""), "")


def _checks(loss: Loss, empirical: bool, z: Tensor, y: Any, weight: Tensor | None) -> Iterator[Check]:
    """All checks are along a random direction v of the outputs: a fault would have to be orthogonal to v to be
    missed."""
    singles, zero = _singles(loss, z, y, weight), z.new_zeros(len(z))
    advice = "ell must return an entry for every group of outputs, with the samples first, and couple no samples"
    yield Check(
        "ell", f"the value of {len(z)} samples", loss.value(z, y, weight)[None], singles.sum()[None],
        "by adding it up over the samples one by one", singles.abs().sum()[None], zero,
        "It couples the samples: return one value per sample" if loss.automatic else advice,
    )  # fmt: skip
    value, low = (f(z, y, weight)[None] for f in (loss.value, loss.lower_bound))
    low = low.clamp(min=torch.finfo(low.dtype).min)  # −∞ is a valid bound
    yield Check(
        "lower_bound", "a bound that the value never falls below", torch.minimum(low, value), low, "is returned",
        low.abs() + value.abs(), low.new_zeros(1),
        f"The value of {len(z)} samples is {float(value):.6g}: define lower_bound, or leave constants out of ell",
    )  # fmt: skip
    v = noise(z, 0)
    there_and_back = loss.ungroup(loss.group(v), z) * v
    yield Check(
        "ungroup", "vᵀ ungroup(group(v), v) of a random v", _by_sample(there_and_back), _by_sample(v * v), "by vᵀv",
        _by_sample(v * v), zero, "ungroup must be the inverse of group",
    )  # fmt: skip
    mild = z / z.abs().max().clamp(min=1)  # at these outputs nothing underflows
    slope = _named(loss, "gradient", "slope")
    gv, mild_gv = (loss.gradient(t, y, weight) * v for t in (z, mild))
    true_slope, true_curvature = _derivatives(loss, z, y, weight, v)
    by, advice = "by differentiating ell", f"Correct {slope}, or ell"
    if loss.automatic:
        by, advice = "by differences of its values", "Compute all of it with torch: no .item(), .detach() or numpy"
    yield Check(
        slope, "∂ℓ/∂z along a random direction", _by_sample(gv), true_slope, by, _by_sample(gv.abs()),
        _by_sample(mild_gv.abs()), advice,
    )  # fmt: skip
    method = _named(loss, *(("empirical", "empirical_factors") if empirical else ("root", "factors")))
    root = loss.empirical if empirical else loss.root
    S, u, remainder = root(z, y, weight)
    Suv = (torch.einsum("npcr,npr->npc", S, u) + (0 if remainder is None else remainder)) * loss.group(v)
    yield Check(
        method, "Su along a random direction", _by_sample(Suv), _by_sample(gv), f"by {slope}", _by_sample(Suv.abs()),
        _by_sample(mild_gv.abs()), "S and u must give the gradient, Su = ∂ℓ/∂z",
    )  # fmt: skip
    if empirical or loss.fisher:  # SSᵀ is then a mean over other targets than these
        return
    if isinstance(loss, Elementwise) and method == "factors" and type(loss).factors is Elementwise.factors:
        method = "s"
    floor = 2 * torch.finfo(z.dtype).eps ** 1.5 * _by_sample(v * v)  # the s of Elementwise is at least eps
    along = (torch.einsum("npcr,npc->npr", t, loss.group(v)) for t in (S, root(mild, y, weight).S))  # Sᵀv
    curvature, mild_curvature = (_by_sample(t.square()) for t in along)
    expected = torch.maximum(curvature, true_curvature) if loss.majorises else true_curvature
    yield Check(
        method, "vᵀSSᵀv in a random direction", curvature, expected, "by differentiating ell twice", curvature,
        mild_curvature + floor,
        f"Correct {method}; a loss whose SSᵀ lies above ∂²ℓ/∂z² declares majorises = True in its class",
    )  # fmt: skip


def _singles(loss: Loss, z: Tensor, y: Any, weight: Tensor | None) -> Tensor:
    """The value of every sample alone: (k,)"""
    return torch.stack([loss.value(*one) for one in alone(z, y, weight)])


def _derivatives(loss: Loss, z: Tensor, y: Any, weight: Tensor | None, v: Tensor) -> tuple[Tensor, Tensor]:
    """∂ℓ/∂z·v and vᵀ∂²ℓ/∂z²v of every sample, by autograd, or by differences if there is no graph: (k,), (k,)"""
    try:
        if loss.automatic:
            raise RuntimeError("autograd would be compared with itself")
        with torch.enable_grad():
            x = z.clone().requires_grad_()
            (g,) = torch.autograd.grad(loss.value(x, y, weight), x, create_graph=True)
            (Hv,) = torch.autograd.grad((g * v).sum(), x)
        return _by_sample(g.detach() * v), _by_sample(Hv * v)
    except RuntimeError as error:
        unless_interrupted(error)
        if z.dtype != torch.float64:
            raise
    h = 1e-5
    there, back = z + h * v, z - h * v
    slope = _singles(loss, there, y, weight) - _singles(loss, back, y, weight)
    Hv = loss.gradient(there, y, weight) - loss.gradient(back, y, weight)
    return slope / (2 * h), _by_sample(Hv * v) / (2 * h)


def _by_sample(t: Tensor) -> Tensor:
    """(k, …) → (k,)"""
    return t.reshape(len(t), -1).sum(1)


def _named(loss: Loss, method: str, called: str) -> str:
    """The method that the user's class defines: the method that calls the other, or if it is inherited, the called
    one."""
    return called if getattr(type(loss), method) is getattr(Loss, method) else method
