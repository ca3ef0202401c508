"""One step by brute force: J by one backward pass per output, G from second derivatives of torch's own losses.

Of marquardt only the cotangents that `Sampled` draws and the samples that `Fraction` picks are taken.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import hessian
from torch.nn.attention import SDPBackend, sdpa_kernel

import marquardt as mq
from marquardt.jacobian.objective import Seed
from support.reference import NAMED, call, elements, per_sample

EPS = torch.finfo(torch.float64).eps


class Slopes:
    """The random slopes of RReLU in the order of the calls: trials take those of the linearisation, and the mean slope
    if an input was positive there."""

    def __init__(self) -> None:
        self.mode = "plain"
        self.drawn: list[tuple[Tensor, Tensor]] = []
        self.left: list[tuple[Tensor, Tensor]] = []
        self.index: Tensor | None = None

    def record(self) -> None:
        self.mode, self.drawn = "record", []

    def replay(self, drawn: list[tuple[Tensor, Tensor]]) -> None:
        self.mode, self.left = "replay", list(drawn)


class RReLU(nn.Module):
    def __init__(self, original: nn.RReLU, slopes: Slopes) -> None:
        super().__init__()
        self.lower, self.upper, self.inplace, self.slopes = original.lower, original.upper, original.inplace, slopes

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.slopes.mode == "plain":
            return F.rrelu(x, self.lower, self.upper, self.training, self.inplace)
        if self.slopes.mode == "replay":
            slope, state = self.slopes.left.pop(0)
            torch.set_rng_state(state)
            for dim, (whole, part) in enumerate(zip(slope.shape, x.shape, strict=True)):
                if whole != part:  # of a part of the samples, wherever they are
                    slope = slope.index_select(dim, self.slopes.index)
            return torch.where(x < 0, slope * x, x).contiguous()
        state, before = torch.get_rng_state(), x.detach().clone(memory_format=torch.contiguous_format)
        z = F.rrelu(x, self.lower, self.upper, True, self.inplace)
        after, noise = torch.get_rng_state(), torch.empty_like(before)
        torch.set_rng_state(state)
        torch.ops.aten.rrelu_with_noise(before, noise, self.lower, self.upper, True)  # once more, for the slopes
        assert torch.equal(torch.get_rng_state(), after)
        self.slopes.drawn.append((noise.where(noise != 1, (self.lower + self.upper) / 2), after))
        return z


def twin_of(model: nn.Module) -> tuple[nn.Module, Slopes]:
    """A copy that shares nothing with the model, with RReLUs that remember."""
    twin, slopes = copy.deepcopy(model), Slopes()
    made: dict[int, RReLU] = {}
    for module in list(twin.modules()):
        for name, child in module._modules.items():
            if isinstance(child, nn.RReLU):
                module._modules[name] = made.setdefault(id(child), RReLU(child, slopes).train(child.training))
    return twin, slopes


@dataclass
class Part:
    """The samples of one forward pass."""

    x: Any
    y: Any
    w: Tensor | None
    z: Tensor  # (N, …)
    J: Tensor  # (Z, n)
    slopes: list[tuple[Tensor, Tensor]]


def cut(t: Any, index: Any, N: int) -> Any:
    if isinstance(t, tuple):
        return tuple(cut(s, index, N) for s in t)
    if isinstance(t, dict):
        return {k: cut(s, index, N) for k, s in t.items()}
    return t if t is None else t[index]


def length(x: Any) -> int:
    return len(x[0] if isinstance(x, tuple) else x["x"] if isinstance(x, dict) else x)


class Brute:
    """f, g and G at the parameters of a model, over several batches."""

    def __init__(
        self, model: nn.Module, params: list[Tensor], loss: Any, rows: Any, batches: list[tuple[Any, Any, Any]],
        chunk: int | None, seed: int, over: bool, second: bool = False, nudge: float = 0.0,
    ) -> None:  # fmt: skip
        self.twin, self.slopes = twin_of(model)
        pairs = dict(zip(map(id, model.parameters()), self.twin.parameters(), strict=True))
        self.params = [pairs[id(p)] for p in params]
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.params if nudge else []:
                p.mul_(1 + nudge * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        self.sizes = [p.numel() for p in self.params]
        self.n = sum(self.sizes)
        self.loss, self.over = NAMED.get(loss, loss) if isinstance(loss, str) else loss, over
        # Smooth-L1 is Huber's loss over β, and rows are those of Huber's loss: G is linear in such a factor.
        self.unit = 1 / self.loss.beta if isinstance(self.loss, nn.SmoothL1Loss) else 1.0
        self.theta = torch.cat([p.detach().flatten() for p in self.params])
        self.buffers = [b.clone() for b in self.twin.buffers()]
        self.start = torch.get_rng_state()
        self.pieces = [piece for batch in batches for piece in self._split(batch, chunk)]
        self.m = 0
        self._linearise(rows, seed, second)

    def _split(self, batch: tuple[Any, Any, Any], chunk: int | None) -> list[tuple[Any, Any, Any]]:
        N = length(batch[0])
        parts = math.ceil(N / (chunk or N))  # as even as can be
        ends = [math.ceil(k * N / parts) for k in range(parts + 1)]
        return [tuple(cut(t, slice(*ends[k : k + 2]), N) for t in batch) for k in range(parts)]

    def _linearise(self, rows: Any, seed: int, second: bool) -> None:
        value, norm, low, rounding = 0.0, 0.0, 0.0, 0.0
        G, g, terms = self.theta.new_zeros(self.n, self.n), self.theta.new_zeros(self.n), self.theta.new_zeros(self.n)
        self.parts: list[Part] = []
        first, total = 0, sum(length(piece[0]) for piece in self.pieces)
        for i, piece in enumerate(self.pieces):
            part = self._forward(*piece, second=second)
            self.parts.append(part)
            value = value + self.value(part.z, part.y, part.w)
            norm = norm + self.normaliser(part)
            low = low + self.lower(part)
            slope = self._slope(part)
            rounding = rounding + EPS * (self.value(part.z, part.y, part.w).abs() + (slope * part.z.flatten()).norm())
            g += part.J.T @ slope
            terms += part.J.abs().T @ slope.abs()
            after, buffers = torch.get_rng_state(), [b.clone() for b in self.twin.buffers()]
            # What is drawn for the samples of one batch does not depend on how it is cut.
            place = Seed(seed + i) if self.over else Seed(seed + i, seed, first, total)
            first += len(part.z)
            G += self._second if second else self._rows(part, rows, place)
            torch.set_rng_state(after)
            self._restore(buffers)
        self.norm = 1.0 if getattr(self.loss, "reduction", "mean") == "sum" else float(norm)
        self.possible = float(norm) > 0  # some weight is left
        scale = 1 / self.norm if self.possible else math.nan
        self.f, self.low, self.rounding = float(value) * scale, float(low) * scale, float(rounding) * scale
        self.g, self.G = g * scale, G * scale
        largest = [t.max().expand_as(t) for t in (terms * scale).split(self.sizes)]
        self.terms = torch.cat(largest)  # of what g is summed from, the largest in each parameter: (n,)
        self.end, self.end_buffers = torch.get_rng_state(), [b.clone() for b in self.twin.buffers()]

    def _forward(self, x: Any, y: Any, w: Any, taken: Any = None, second: bool = False) -> Part:
        if taken is None:
            self.slopes.record()
        else:
            self.slopes.replay(taken)
        with sdpa_kernel(SDPBackend.MATH):
            z = call(self.twin, x)
            if second:
                self._second = self._hessian(z, y, w)
            rows = [torch.autograd.grad(zk, self.params, retain_graph=True, allow_unused=True) for zk in z.flatten()]
        J = torch.stack([self._flat(row) for row in rows])
        return Part(x, y, w, z.detach(), J, list(self.slopes.drawn))

    def _flat(self, grads: Any) -> Tensor:
        pairs = zip(grads, self.params, strict=True)
        return torch.cat([torch.zeros_like(p).flatten() if g is None else g.to_dense().flatten() for g, p in pairs])

    def _hessian(self, z: Tensor, y: Any, w: Any) -> Tensor:
        """∂²value/∂θ², row by row"""
        grads = torch.autograd.grad(self.value(z, y, w), self.params, create_graph=True, allow_unused=True)
        rows = []
        for g, p in zip(grads, self.params, strict=True):
            for k in range(p.numel()):
                if g is None or not g.requires_grad:
                    rows.append(torch.zeros_like(self.theta))
                else:
                    one = torch.autograd.grad(g.flatten()[k], self.params, retain_graph=True, allow_unused=True)
                    rows.append(self._flat(one))
        return torch.stack(rows).detach()

    # The loss, in sums.

    def value(self, z: Tensor, y: Any, w: Tensor | None) -> Tensor:
        l, _ = elements(self.loss, z, y)
        return (per_sample(w, l) * l).sum()

    def normaliser(self, part: Part) -> Tensor:
        l, kappa = elements(self.loss, part.z, part.y)
        return (per_sample(part.w, kappa) * kappa.to(l)).sum()

    def lower(self, part: Part) -> Tensor:
        """0, but for counts: the loss of a model that predicts them."""
        if not isinstance(self.loss, nn.PoissonNLLLoss):
            return part.z.new_zeros(())
        least = part.y - torch.xlogy(part.y, part.y)
        return (per_sample(part.w, least) * least).sum()

    def _slope(self, part: Part) -> Tensor:
        z = part.z.clone().requires_grad_()
        return torch.autograd.grad(self.value(z, part.y, part.w), z)[0].flatten()

    # The curvature, in sums.

    def _rows(self, part: Part, rows: Any, seed: Seed) -> Tensor:
        N = len(part.z)
        if isinstance(rows, mq.Fraction):
            index = rows.pick(N, seed)
            if len(index) == 0:
                return self.theta.new_zeros(self.n, self.n)
            self.slopes.index = index
            some = self._forward(*(cut(t, index, N) for t in (part.x, part.y, part.w)), taken=part.slopes)
            self.slopes.index = None
            return rows.stands_for(len(index), N, seed) * self._rows(some, rows.rows, seed.picked(index))
        self.m += N * self.rows_per_sample(part, rows)
        if isinstance(rows, mq.Sampled):
            S = rows.draw(mq.losses.resolve(self.loss), part.z, part.y, part.w, seed).S  # (k, N, …)
            JS = torch.einsum("kno,nop->knp", S.reshape(*S.shape[:2], -1), part.J.view(N, -1, self.n)).flatten(0, 1)
            return self.unit * JS.T @ JS
        return part.J.T @ self._outputs(part, isinstance(rows, mq.Empirical)) @ part.J

    def rows_per_sample(self, part: Part, rows: Any) -> int:
        out = part.z[0].numel()
        if isinstance(rows, mq.Sampled):
            return rows.k
        if not isinstance(self.loss, nn.CrossEntropyLoss):
            return out
        C = part.z.shape[1]
        if isinstance(rows, mq.Empirical):
            return out if part.y.is_floating_point() or self.loss.label_smoothing else out // C
        return out // C * (C - 1)

    def _outputs(self, part: Part, empirical: bool) -> Tensor:
        """∂²value/∂z², or Σ of the outer products of the gradients of log-likelihood terms: (Z, Z)"""
        z, y, w, loss = part.z, part.y, part.w, self.loss
        Z = z.numel()
        if empirical and isinstance(loss, nn.CrossEntropyLoss):
            q = self._probabilities(z, y)
            leaf = z.clone().requires_grad_()
            terms = -leaf.log_softmax(1)
            slopes = torch.stack(
                [torch.autograd.grad(t, leaf, retain_graph=True)[0].flatten() for t in terms.flatten()]
            )
            return slopes.T @ ((per_sample(w, q) * q).flatten()[:, None] * slopes)
        if empirical:
            leaf = z.clone().requires_grad_()
            slope = torch.autograd.grad(elements(loss, leaf, y)[0].sum(), leaf)[0]
            return (per_sample(w, slope) * slope.square()).flatten().diag() / self.unit
        if isinstance(loss, (nn.HuberLoss, nn.SmoothL1Loss)):
            delta = loss.delta if isinstance(loss, nn.HuberLoss) else loss.beta
            h = (delta / (z - y).abs()).clamp(max=1) * self.unit
            return (per_sample(w, h) * h).flatten().diag()
        H = hessian(lambda z: self.value(z, y, w))(z).reshape(Z, Z)
        if not isinstance(loss, nn.CrossEntropyLoss):  # √ℓ″ is at least eps: so ℓ′ over it, the residual, is finite
            H.diagonal().clamp_(min=EPS**2 * per_sample(w, torch.ones_like(z)).expand_as(z).flatten())
        return H

    def _probabilities(self, z: Tensor, y: Tensor) -> Tensor:
        """What each −log p counts: smoothed targets times the class weights, 0 if ignored: like z"""
        loss, C = self.loss, z.shape[1]
        if y.is_floating_point():
            q, kept = y, torch.ones_like(y)
        else:
            kept = (y != loss.ignore_index)[:, None].expand_as(z).to(z)
            q = F.one_hot(y.where(y != loss.ignore_index, 0), C).movedim(-1, 1).to(z) * kept
        q = (1 - loss.label_smoothing) * q + loss.label_smoothing / C * kept
        return q if loss.weight is None else q * loss.weight.reshape(-1, *[1] * (z.ndim - 2))

    # Other points.

    def at(self, theta: Tensor) -> float:
        """f there, with the random numbers and buffers of the linearisation"""
        torch.set_rng_state(self.start)
        self._restore(self.buffers)
        with torch.no_grad():
            for p, t in zip(self.params, theta.split(self.sizes), strict=True):
                p.copy_(t.view_as(p))
            total = 0.0
            for part in self.parts:
                if self.over:  # slopes are drawn again
                    self.slopes.mode = "plain"
                else:
                    self.slopes.replay(part.slopes)
                total += float(self.value(call(self.twin, part.x), part.y, part.w))
        return total / self.norm

    def _restore(self, buffers: list[Tensor]) -> None:
        with torch.no_grad():
            for b, value in zip(self.twin.buffers(), buffers, strict=True):
                b.copy_(value)


class Dampings:
    """D by its definition, from the diagonal of G: (n,). `most` are the rows of the largest step so far."""

    def __init__(self, diagonal: Tensor, params: list[Tensor], most: float) -> None:
        self.diagonal, self.params, self.most = diagonal, params, most
        self.parts = diagonal.split([p.numel() for p in params])

    def update(self, damping: Any, past: Tensor | None, layers: list[list[int]]) -> Tensor:
        """The next D. `layers` are the parameters that count as one layer."""
        if isinstance(damping, mq.Identity):
            return torch.ones_like(self.diagonal)
        if isinstance(damping, mq.MeanEigenvalue):
            return self._late(self._mean(range(len(self.parts))).expand_as(self.diagonal), past, damping.memory)
        if isinstance(damping, mq.LayerMeanEigenvalue):
            means = torch.zeros_like(self.diagonal).split([len(part) for part in self.parts])
            for members in layers:
                for i in members:
                    means[i].fill_(self._mean(members))
            return self._late(above_rounding(torch.cat(means)), past, damping.memory)
        # The diagonal of a Hessian has no factors: there FactoredMaxDiagonal is the same from 0 on.
        floor = damping.floor if isinstance(damping, mq.MaxDiagonal) else 0.0
        D = self.diagonal.clamp(min=floor) if past is None else torch.maximum(past, self.diagonal)
        pairs = zip(D.split([len(part) for part in self.parts]), self.params, strict=True)
        return torch.cat([above_rounding(t.view(*p.shape[:1], -1)).flatten() for t, p in pairs])

    def _mean(self, members: Any) -> Tensor:
        """Trace over rank of some parameters together: ()"""
        entries = torch.cat([self.parts[i] for i in members])
        return entries.sum() / min(len(entries), self.most)

    def _late(self, now: Tensor, past: Tensor | None, memory: float) -> Tensor:
        """The largest of late: the past is at most `memory` times the present, if that is not 0"""
        return now if past is None else torch.maximum(now, past.minimum((memory * now).where(now > 0, math.inf)))


def above_rounding(t: Tensor) -> Tensor:
    """From eps times the largest of a column on; 0 stays 0."""
    return t.maximum(EPS * t.amax(0, keepdim=True)).where(t > 0, 0) if t.numel() else t
