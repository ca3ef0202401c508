"""What gives a step its direction besides G: the damping D in (G + λD)d = −g, and momentum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ..curvature.contract import Curvature, Damped
from ..deferred import at_hand, numbers, root, scaled
from ..jacobian.statistics import Moments
from ..metric import Diagonal, Layered, LayerSides, Metric, Part


class Damping(Protocol):
    def update(self, D: Metric | None, G: Curvature) -> Metric:
        """The next D, from the last one (None at first) and the curvature of this step. A damping with `shares = True`
        forms its sums over the n parameters by G.parameters.total, and so works with sharded parameters. A method
        `takes(D)`, if there is one, tells whether a saved D can come from this damping."""
        ...


@dataclass(frozen=True)
class Identity:
    """D = I: Levenberg's damping. λ carries the units of the curvature.

    >>> opt = mq.LM(model, "mse", damping=mq.Identity())
    """

    shares: ClassVar[bool] = True

    def takes(self, D: Metric) -> bool:
        return is_number(D)

    def update(self, D: Metric | None, G: Curvature) -> Diagonal:
        return Diagonal(one(G))


def is_number(D: Metric) -> bool:
    """Whether D is one number for all parameters"""
    return isinstance(D, Diagonal) and D.parts is None


def by_entries(D: Metric) -> bool:
    """Whether D has separate entries, or factors of entries, for each parameter"""
    return isinstance(D, Diagonal) and D.parts is not None


def check_memory(part: MeanEigenvalue | LayerMeanEigenvalue) -> None:
    name = type(part).__name__
    if not part.memory >= 1:
        raise ValueError(
            f"{name}(memory={part.memory!r}): how much larger than the present the past may be, at least 1"
        )


@dataclass(frozen=True)
class MeanEigenvalue:
    """D = τI with τ = tr G / min(n, m), the recent maximum: one number for all parameters, in the units of the loss.

    n is the number of parameters and m the number of rows of the largest batch so far. For `mq.Hessian()`, which has no
    rows, τ = Σ|∂²f/∂θᵢ²| / n. G has at most min(n, m) eigenvalues that are not zero, and λ = 1 stands for their mean,
    whatever the loss and the number of parameters: multiplying the loss by a constant changes nothing. The τ that is
    remembered from earlier steps is at most `memory` times the present one, so that one batch with an outlier costs a
    few steps and not the run.

    Args:
        memory: how much larger than the present τ the past one may be, at least 1.

    >>> opt = mq.LM(model, "mse", damping=mq.MeanEigenvalue())
    """

    memory: float = 10.0
    shares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_memory(self)

    def takes(self, D: Metric) -> bool:
        return is_number(D)

    def update(self, D: Metric | None, G: Curvature) -> Diagonal:
        return largest_of_late(D, Diagonal(scaled(G.trace(), 1 / G.rank)), self.memory)


@dataclass(frozen=True)
class LayerMeanEigenvalue:
    """D = τₗI in every layer l, with τₗ = tr Gₗ / min(nₗ, m) of its block of G, the recent maximum as in
    MeanEigenvalue.

    With one number per layer the dual solve stays as cheap as with one number for all. A τₗ below eps times the largest
    of all layers may be rounding, and is raised to that.

    Args:
        memory: how much larger than the present τₗ the past one may be, at least 1.

    >>> opt = mq.LM(model, "mse", damping=mq.LayerMeanEigenvalue())
    """

    memory: float = 10.0
    shares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_memory(self)

    def takes(self, D: Metric) -> bool:
        return by_entries(D) and all(f.ndim == 0 for part in D.parts or () for f in part.factors)

    def update(self, D: Metric | None, G: Curvature) -> Diagonal:
        means = [torch.zeros_like(one(G))] * len(G.parameters)  # where the outputs do not depend on a parameter
        for members, trace, rank in G.traces():
            for i in members:
                means[i] = trace / rank
        return largest_of_late(D, Diagonal(one(G), [Part(mean) for mean in known(torch.stack(means))]), self.memory)


def largest_of_late(D: Metric | None, tau: Diagonal, memory: float) -> Diagonal:
    """τ, or the last D if that is larger; a D of another damping, used in between, is not kept"""
    past = earlier(D)
    return tau if past is None or not past.like(tau) else past.recent(tau, memory).maximum(tau)


@dataclass(frozen=True)
class MaxDiagonal:
    """D ← max(D, diag G) element-wise over all steps: invariant to rescaling a parameter where diag G exceeds D₀.

    A curvature below eps times that of another output of the same layer may be rounding and is raised to that, which is
    where the invariance ends. A Kronecker product can only be damped by another product: then D = u ⊗ v, as in
    FactoredMaxDiagonal, and u and v start at √D₀.

    Args:
        floor: D₀, the least entry of D.

    >>> opt = mq.LM(model, "mse", damping=mq.MaxDiagonal(floor=1e-4))
    """

    floor: float = 0.01  # D₀: the paper, section 2.3
    shares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.floor < float("inf"):
            raise ValueError(f"MaxDiagonal(floor={self.floor!r}): D₀ must be finite and at least 0")

    def takes(self, D: Metric) -> bool:
        return by_entries(D)

    def update(self, D: Metric | None, G: Curvature) -> Diagonal:
        if G.separable:
            return factored_maximum(earlier(D), G, self.floor)
        diagonal, past = G.diagonal().abs(), earlier(D)  # only that of a Hessian may be negative
        least = self.floor if past is None else past.entries(G.parameters.sizes)
        pairs = zip(G.parameters.split(diagonal.clamp(min=least)), G.parameters.tensors, strict=True)
        return Diagonal(one(G), [Part(known_entries(part, p, G.parameters.largest)) for part, p in pairs])


@dataclass(frozen=True)
class FactoredMaxDiagonal:
    """D_oi = u_o·v_i for the weight of every layer: max-diagonal damping in O + I numbers instead of O·I.

        v_i ← max(v_i, mean a_i²)              a the layer's input; 1 for a bias
        u_o ← max(u_o, max_i (diag G)_oi/v_i)

    D is at least every diagonal so far, and covariant to rescaling any unit whose u is not below eps times that of
    another one, where it may be rounding. Dividing a by √v and δ by √u keeps the dual solve exact without J̃: this is
    the max-diagonal damping for large networks. There G has many more columns than its rank, and D is multiplied by n /
    min(n, m), so that λ = 1 stands for the mean eigenvalue, as in MeanEigenvalue.

    >>> opt = mq.LM(model, "mse", damping=mq.FactoredMaxDiagonal())
    """

    def takes(self, D: Metric) -> bool:
        return by_entries(D)

    def update(self, D: Metric | None, G: Curvature) -> Metric:
        return (G.parameters.n / G.rank) * factored_maximum(earlier(D), G, 0.0)


@dataclass(frozen=True)
class KroneckerMetric:
    """D = (A/√t + π√γ·I) ⊗ (B/√t + √γ/π·I) in every layer: the recent curvature, as a Kronecker product.

        A = Σ JᵀJ, B = Σ JJᵀ      over the rows of J̃, each a matrix J (O × I) with the bias as a last input
        t = tr A = tr B           the trace of the layer's block of G; A and B are its partial traces
        γ = c·τ, τ = Σt / min(n, m)      one number for all layers; m counts all exact rows of the largest batch so far
        π² = O/I                  the mean eigenvalues of both sides are then the same

    A and B are running averages, in which the past has the weight min(1 − 1/k, decay) in batch k. Systems with G + λD
    are solved exactly, as with any D. D carries the curvature of earlier batches, which G of one batch lacks.

    Groups of a convolution have separate sides. Sides longer than 4096, and the tokens of an embedding, are represented
    by their diagonal. A vector without a weight next to it has the running average of diag G, plus γ. A parameter that
    parts of a batch reach in different ways is one matrix, of its first dimension by the rest.

    D is renewed after every `every`-th step, and after each of the first 10; with `every` = 1 it is renewed before the
    step, from this batch too. D = τI, as with MeanEigenvalue, where there are no partial traces: without rows (samples
    that depend on each other), with a G that is a Kronecker product or a Hessian, with a user's curvature that does not
    offer them, and with sharded parameters, of which no rank has a whole layer. On the same data G already contains all
    that D could add, and another damping takes over, `steady`, unless that is None.

    Args:
        c: γ in units of the mean eigenvalue τ.
        decay: the weight of earlier batches in A and B, at most.
        every: steps from one D to the next.
        steady: the damping on the same data; None for this one.

    >>> opt = mq.LM(model, "mse", damping=mq.KroneckerMetric(every=5))
    """

    c: float = 1.0
    decay: float = 0.95  # Martens & Grosse 2015, section 5
    every: int = 10
    steady: Damping | None = MeanEigenvalue()

    def __post_init__(self) -> None:
        if not 0 < self.c < float("inf"):
            raise ValueError(f"KroneckerMetric(c={self.c!r}): the share of the mean eigenvalue, above 0 and finite")
        if not 0 <= self.decay < 1:
            raise ValueError(
                f"KroneckerMetric(decay={self.decay!r}): the weight of earlier batches, at least 0 (none), below 1"
            )
        if not isinstance(self.every, int) or self.every < 1:
            raise ValueError(
                f"KroneckerMetric(every={self.every!r}): steps from one D to the next, an integer of at least 1"
            )
        if self.steady is not None and (isinstance(self.steady, type) or not hasattr(self.steady, "update")):
            raise TypeError(
                f"KroneckerMetric(steady={self.steady!r}): the damping on the same data, mq.MeanEigenvalue(), or None"
            )

    @property
    def shares(self) -> bool:
        return self.steady is None or getattr(self.steady, "shares", False)

    def takes(self, D: Metric) -> bool:
        steady = getattr(self.steady, "takes", None)
        return isinstance(D, Layered) or is_number(D) or (self.steady is not None and (steady is None or steady(D)))

    def update(self, D: Metric | None, G: Curvature) -> Metric:
        past, before = (D, None) if D.__class__ is Layered else (None, D)
        if G.same_data and self.steady is not None:
            return self.steady.update(before, G)
        traces = G.partial_traces()
        if traces is None:
            return MeanEigenvalue().update(before, G)
        rank, batches, layers = min(G.parameters.n, traces.rows), one(G), traces.layers
        if past is not None:
            rank, batches = max(rank, past.rank), past.batches + 1
            layers = averaged(past.layers, layers, batches.reciprocal().neg_().add_(1).clamp_(max=self.decay))
        layers = completed(layers, G)
        renewed = past is None or past.early or self.every == 1 or not alike(past.layers, layers)
        sizes: list[Tensor] = []
        for layer in layers:
            sizes += (layer.trace,)
        gamma = self.c * torch.cat(sizes).sum() / rank
        if past is None or renewed:
            return Layered.of(layers, gamma, rank, batches, self.every, G.lin.ranks)
        return past.averaged(layers, gamma, rank, batches, self.every)


def alike(past: Sequence[LayerSides], present: Sequence[LayerSides]) -> bool:
    """Whether what was formed from one can replace what is formed from the other"""
    return len(past) == len(present) and all([a.like(b) for a, b in zip(past, present, strict=True)])


def averaged(past: Sequence[LayerSides], present: Sequence[LayerSides], weight: Tensor) -> list[LayerSides]:
    """The sides of every layer, averaged with the past. A layer that this batch does not reach keeps its sides, and a
    layer whose form has changed begins again."""
    known = {layer.members: layer for layer in past}
    mixed = [now if (old := known.get(now.members)) is None else old.mixed(now, weight) for now in present]
    reached = {i for layer in present for i in layer.members}
    return mixed + [layer for layer in past if reached.isdisjoint(layer.members)]


def completed(layers: Sequence[LayerSides], G: Curvature) -> list[LayerSides]:
    """With zeros for parameters that no batch has reached so far"""
    known = {i for layer in layers for i in layer.members}
    rest = [i for i in range(len(G.parameters.sizes)) if i not in known]
    return [*layers, *(LayerSides((i,), one(G).new_zeros(1, G.parameters.sizes[i]), None) for i in rest)]


def factored_maximum(D: Diagonal | None, G: Curvature, floor: float) -> Diagonal:
    """v_i ← max(v_i, mean a_i²), u_o ← max(u_o, max_i diag_oi/v_i) for every layer: u_o·v_i is at least every diagonal
    so far. Parameters without such a structure: max(D, diag G). The first u and v start at the root of the floor."""
    # A layer that no batch has reached so far has one 0; one that this batch does not reach keeps what it has.
    nothing = Part(torch.zeros_like(one(G)))
    parts = [nothing] * len(G.parameters) if D is None or D.parts is None else list(D.parts)
    for layer in G.moments():
        weight, *biases = layer.members
        old = parts[weight]
        if layer.inputs is None or (old.entries is not None and old.entries.ndim > 0):
            # Entry by entry; also where a rule was lost or found since.
            for i, column in zip(layer.members, layer.diagonals, strict=True):
                parts[i] = Part(_larger_entries(parts[i], column, floor, G.parameters.tensors[i]))
            continue
        u, v = _larger_factors(layer, old, floor)
        parts[weight] = Part(u=u, v=v)
        for i in biases:
            parts[i] = Part(u=u)
    return Diagonal(one(G), parts)


def _larger_factors(layer: Moments, old: Part, floor: float) -> tuple[Tensor, Tensor]:
    """u (G, O, 1) and v (G, 1, I) of a weight, after one more batch"""
    assert layer.inputs is not None
    # a loaded one may be cut into other groups
    old_v = old.v if old.v is not None and old.v.shape == layer.inputs.shape else None
    v = layer.inputs.clamp(min=floor**0.5) if old_v is None else torch.maximum(old_v, layer.inputs)
    ratio = layer.diagonals[0].view(len(v), -1, v.shape[2]) / v  # (G, O, I)
    u = ratio.where(v > 0, 0).amax(2, keepdim=True)  # (G, O, 1)
    for bias in layer.diagonals[1:]:  # its input is 1
        u = torch.maximum(u, bias.view_as(u))
    old_u = old.u if old.u is not None and old.u.shape == u.shape else None
    return known(u.clamp(min=floor**0.5) if old_u is None else torch.maximum(old_u, u), 1), v


def _larger_entries(old: Part, new: Tensor, floor: float, p: Tensor) -> Tensor:
    """max(D, diag G) of one parameter, flat"""
    first = old.entries is not None and old.entries.ndim == 0
    return known_entries(new.clamp(min=floor) if first else torch.maximum(old.flat(p.numel()), new), p)


def largest(t: Tensor, dim: int) -> Tensor:
    return t.amax(dim, keepdim=True)


def known(t: Tensor, dim: int = 0, largest: Callable[[Tensor, int], Tensor] = largest) -> Tensor:
    """t, from eps times the largest along one dimension on; what is 0 stays so.

    The gradient of a parameter without influence, like the bias of the keys of attention, is rounding: eps times that
    of others, and its curvature eps². Their ratio would be a step of 1/eps; with a curvature of eps it is an ordinary
    one.
    """
    return torch.maximum(t, torch.finfo(t.dtype).eps * largest(t, dim)).where(t > 0, 0)


def known_entries(t: Tensor, p: Tensor, largest: Callable[[Tensor, int], Tensor] = largest) -> Tensor:
    """The same for all entries of a parameter, flat: among its outputs, which are first. Its inputs may be of any size,
    for what they multiply has no part in that rounding."""
    return known(t.view(*p.shape[:1], math.prod(p.shape[1:])), 0, largest).flatten() if p.ndim else known(t.view(1))


def one(G: Curvature) -> Tensor:
    """1 in the precision of the parameters: ()"""
    return torch.ones((), dtype=G.parameters.dtype, device=G.parameters.device)


def earlier(D: Metric | None) -> Diagonal | None:
    """The D of the step before, which a loaded state may have from another damping."""
    if D is not None and D.__class__ is not Diagonal and not isinstance(D, Diagonal):
        raise ValueError("D is that of another damping: load a state that was saved with the same one")
    return D


# --- Momentum: how much of the previous step goes along with the plain one.


class Momentum(Protocol):
    @property
    def recordable(self) -> bool:
        """Whether `refine` works on tensors alone, so that a step can be recorded as a CUDA graph."""
        ...

    def refine(self, newton: Tensor, previous: Tensor | None, H: Damped, same_data: bool) -> Tensor:
        """The step dθ from the plain one −H⁻¹g and the previous accepted step. One that says `shares = True` has its
        products of two steps from H, and so works with sharded parameters."""
        ...


@dataclass(frozen=True)
class AdaptiveMomentum:
    """dθ = −α·H⁻¹g + β·dθₜ₋₁ with gᵀdθ = −ξ·δP·√I_GG and dθᵀH dθ = δP² (the paper, section 2.4).

    I_GG = gᵀH⁻¹g, I_GF = gᵀdθₜ₋₁, I_FF = dθₜ₋₁ᵀH dθₜ₋₁:
    β = √((1−ξ²)·I_GG·δP² / (I_FF·I_GG − I_GF²)),  α = (ξ·δP·√I_GG + β·I_GF)/I_GG.

    Args:
        xi: ξ, between 0 and 1: the cosine between dθ and the plain step, in the metric of H.
        dP: δP, the length of the step in the metric of H, in units of √loss; `math.inf` leaves it to `cap`.
        cap: whether δP is at most the length √I_GG of the plain step.
        same_data: whether there is momentum only on the same data, and none on changing batches.

    >>> opt = mq.LM(model, "mse", momentum=mq.AdaptiveMomentum(xi=0.9, dP=0.6, cap=True))
    """

    xi: float = 0.9  # the authors' code
    dP: float = 0.6  # the authors' code; in units of √loss
    cap: bool = (
        False  # δP ← min(δP, √I_GG): guarantees a decrease of the model, where a fixed δP stalls near the optimum
    )
    same_data: bool = False  # True: not on changing batches, where the previous step belongs to another loss
    shares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.xi < 1:
            raise ValueError(
                f"AdaptiveMomentum(xi={self.xi!r}): ξ must lie strictly between 0 and 1; the paper uses 0.9"
            )
        if not self.dP > 0:
            raise ValueError(f"AdaptiveMomentum(dP={self.dP!r}): δP must be positive; the paper uses 0.6")
        if math.isinf(self.dP) and not self.cap:
            raise ValueError(
                "AdaptiveMomentum(dP=inf) needs cap=True: the step length is then the Newton decrement alone"
            )

    @property
    def recordable(self) -> bool:
        return True

    def refine(self, newton: Tensor, previous: Tensor | None, H: Damped, same_data: bool) -> Tensor:
        if previous is None or (self.same_data and not same_data):
            return newton
        g = H.gradient
        gd, GF, FF = numbers(H.dot(g, newton), H.dot(g, previous), H.quadratic(previous))
        GG = -gd
        size = FF * GG
        sound = (GG > 0) & (FF > 0) & (size > 0) & (size < math.inf)
        if sound is False:
            return newton
        # 1 − cos² of the angle between the two directions in the metric H; the bare determinant loses it to rounding.
        sine2 = 1 - GF * GF / size
        sound = sound & (sine2 > math.sqrt(torch.finfo(g.dtype).eps))
        if sound is False:
            return newton
        dP = decrement = root(GG)
        if not self.cap:
            dP = self.dP
        elif self.dP < math.inf:
            dP = dP.clamp(max=self.dP) if isinstance(dP, Tensor) else min(dP, self.dP)
        beta = dP * root((1 - self.xi**2) / (FF * sine2))
        alpha = (self.xi * dP * decrement + beta * GF) / GG
        if sound is not True:  # a tensor, if it is recorded
            alpha, beta = alpha.where(sound, 1), beta.where(sound, 0)
        dtheta: Tensor = (alpha * newton).add_(beta * previous)
        return dtheta


@dataclass(frozen=True)
class QuadraticMomentum:
    """dθ = −α·H⁻¹g + β·dθₜ₋₁ with the least gᵀdθ + ½dθᵀ(G + λD)dθ (Martens & Grosse 2015, sections 6.4 and 7).

    G is that of the batch itself (`Curvature.products`), which knows what lies between layers even if H does not: α is
    then the length at which their steps do not overshoot together.

    >>> opt = mq.LM(model, "mse", momentum=mq.QuadraticMomentum())
    """

    shares: ClassVar[bool] = True

    @property
    def recordable(self) -> bool:
        return True

    def refine(self, newton: Tensor, previous: Tensor | None, H: Damped, same_data: bool) -> Tensor:
        if previous is None:
            previous = torch.zeros_like(newton)
        M = H.products(torch.stack([newton, previous]))  # (2, 2)
        g = H.gradient
        p, q, a, b, c = at_hand(-H.dot(g, newton), -H.dot(g, previous), M[0, 0], M[0, 1], M[1, 1])
        # As in AdaptiveMomentum: two directions that rounding cannot tell from one count as one.
        sine2 = 1 - b * b / (a * c)
        sound = (c > 0) & c.isfinite() & (sine2 > math.sqrt(torch.finfo(g.dtype).eps))
        alpha = ((p - q * b / c) / (a * sine2)).where(sound, p / a)
        beta = ((q - p * b / a) / (c * sine2)).where(sound, 0)
        return alpha.where(a > 0, 1) * newton + beta.where(a > 0, 0) * previous
