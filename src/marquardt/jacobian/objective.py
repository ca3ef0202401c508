"""What is minimised, and which rows J̃ = SᵀJ of its curvature G = J̃ᵀJ̃ are formed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..deferred import draw
from ..layers.shortcuts import Largest
from ..losses import Loss
from ..losses.base import spread
from ..model.batch import COARSE, Autocast, Batch, forward, full, tensors, uncompiled
from ..model.decay import Penalty
from ..model.parameters import Parameters
from ..tolerances import FORMULA
from ..weights import Weights

# Random signs come as bits of whole numbers, which are few to draw: as many as float32 holds exactly.
BITS = 24


class Cotangents(NamedTuple):
    """R rows per sample. In Σ-units, as the losses are: ΣSSᵀ = ∂²value/∂z² (exactly, or in the mean).

    Attributes:
        S: the root of the curvature, a row for each of R: (R, N, *out).
        u: what S is multiplied with to give the gradient, (R, N); None if that is not in the range of these rows.
        v: the rest of the gradient, Su + v = ∂value/∂z, (N, *out); None means 0.

    >>> z = model(x)
    >>> S, u, v = mq.Exact().draw(mq.losses.SquaredError(), z, y, None, 0)
    >>> S.shape, u.shape, v
    (torch.Size([1, 64, 1]), torch.Size([1, 64]), None)
    """

    S: Tensor  # (R, N, *out)
    u: Tensor | None  # (R, N)     None: the gradient is not in the range of these rows
    v: Tensor | None  # (N, *out)  Su + v = ∂value/∂z; None means 0

    def slope(self, like: Tensor) -> Tensor:
        """Su + v: (N, *out)"""
        if self.u is None:
            return torch.zeros_like(like) if self.v is None else self.v
        u = self.u.view(*self.u.shape, *[1] * (self.S.ndim - 2))
        total: Tensor = self.S[0] * u[0] if u.shape[0] == 1 else (self.S * u).sum(0)
        return total if self.v is None else total + self.v

    def sensitivity(self, z: Tensor) -> Tensor:
        """‖∂value/∂z ∘ z‖, by which the value changes with the last digits of z: ()"""
        found: Tensor = torch.linalg.vector_norm(self.slope(z) * z)
        return found


class Seed(int):
    """What random numbers are drawn from. As a number, another one for every piece of a step.

    If the samples of the piece are those from `first` on of `total`, what belongs to a sample is drawn by the number of
    the step, for all of them at once: it is the same however the batch is cut into pieces and shared among ranks.
    """

    step: int
    first: int
    total: int | None
    index: Tensor | None  # the samples that were picked, among all

    def __new__(cls, number: int, step: int = 0, first: int = 0, total: int | None = None) -> Seed:
        self = super().__new__(cls, number)
        self.step, self.first, self.total, self.index = step, first, total, None
        return self

    def apart(self) -> Seed:
        """For a piece whose samples have no place among others."""
        return Seed(int(self))

    def picked(self, index: Tensor) -> Seed:
        """For some of the samples of the piece."""
        found = Seed(int(self), self.step, self.first, self.total)
        found.index = None if self.total is None else index + self.first
        return found

    @staticmethod
    def of(seed: int, N: int) -> Seed:
        """Of N samples that are all there are, if no more is known."""
        found = seed if isinstance(seed, Seed) else Seed(seed)
        return Seed(int(found), int(found), 0, N) if found.total is None else found

    def those(self, numbers: Tensor, N: int) -> Tensor:
        """The N samples of the piece from numbers of all samples: (total, …) → (N, …)"""
        return numbers[self.first : self.first + N] if self.index is None else numbers[self.index]


@dataclass(frozen=True)
class Rows(ABC):
    """A choice of rows.

    >>> class Twice(mq.Exact):
    ...     def draw(self, loss, z, y, weight, seed):
    ...         S, u, v = super().draw(loss, z, y, weight, seed)
    ...         return mq.Cotangents(torch.cat([S, S]) / 2**0.5, torch.cat([u, u]) / 2**0.5, v)
    >>> opt = mq.LM(model, "mse", rows=Twice())
    """

    @property
    def recordable(self) -> bool:
        """Whether a step can be recorded as a CUDA graph: one forward pass, and what is random is drawn by the tape."""
        return False

    @property
    def empirical(self) -> bool:
        """Whether they come from `Loss.empirical`, and not from `Loss.root`."""
        return False

    @property
    def spans(self) -> bool:
        """Whether Su + v is the gradient, which is then compared with that of the loss on the first step."""
        return True

    @property
    def joined(self) -> bool:
        """Whether a row is one of all samples together, S (R, N, *out) with R rows in all and no u."""
        return False

    def pick(self, N: int, seed: int) -> Tensor | None:
        """The samples whose rows are formed, None for all of them."""
        return None

    def stands_for(self, picked: int, N: int, seed: int) -> float:
        """Samples that each one stands for, if `picked` of N have rows"""
        return N / picked

    @abstractmethod
    def draw(self, loss: Loss, z: Tensor, y: object, weight: Tensor | None, seed: int) -> Cotangents:
        """The cotangents of these outputs; what is random is drawn from `seed`, a number of the step and the piece."""


@dataclass(frozen=True)
class Exact(Rows):
    """All rows of the root S of the loss: the true generalised Gauss-Newton matrix.

    >>> opt = mq.LM(model, "mse", rows=mq.Exact())
    """

    @property
    def recordable(self) -> bool:
        return True

    def draw(self, loss: Loss, z: Tensor, y: object, weight: Tensor | None, seed: int) -> Cotangents:
        return Cotangents(*spread(loss, loss.root(z, y, weight), z))


@dataclass(frozen=True)
class Empirical(Rows):
    """The gradients of the samples, G = (1/N) Σ ∇fᵢ∇fᵢᵀ: what the paper's formula for cross-entropy comes to, and what
    `presets.authors_code` has. `presets.paper` takes `Exact` rows, which reach the paper's figures.

    >>> opt = mq.LM(classifier, "cross_entropy", rows=mq.Empirical())
    """

    @property
    def empirical(self) -> bool:
        return True

    @property
    def recordable(self) -> bool:
        return True

    def draw(self, loss: Loss, z: Tensor, y: object, weight: Tensor | None, seed: int) -> Cotangents:
        return Cotangents(*spread(loss, loss.empirical(z, y, weight), z))


@dataclass(frozen=True)
class Sampled(Rows):
    """k rows per sample, Sε/√k with random signs ε: E[Sε εᵀSᵀ] = SSᵀ, so G is unbiased.

    S depends on the model's own prediction alone, not on the targets, and so do these rows: they have the first two
    moments of gradients whose targets are drawn from the prediction.

    `together`: k rows in all, of which each is the sum of one of every sample; G is unbiased then too. For samples that
    depend on each other, as the nodes of a graph: there a row of one sample takes a backward pass through all of them.

    Args:
        k: rows of every sample, or with `together` of all of them.
        seed: of the signs; every step draws others.
        together: whether a row is one of all samples together.

    >>> opt = mq.LM(classifier, "cross_entropy", rows=mq.Sampled(1))
    """

    k: int = 1
    seed: int = 0
    together: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"Sampled(k={self.k!r}): k is the number of rows per sample, an integer of at least 1")

    @property
    def recordable(self) -> bool:
        return True

    @property
    def joined(self) -> bool:
        return self.together

    def draw(self, loss: Loss, z: Tensor, y: object, weight: Tensor | None, seed: int) -> Cotangents:
        def signs(shape: tuple[int, ...]) -> Tensor:
            N, count = shape[0], self.k * math.prod(shape[1:])  # samples, and signs of each
            at = Seed.of(seed, N)

            def words(step: int) -> Tensor:
                size, generator = (at.total or N, -(-count // BITS)), _generator(self.seed, step)
                return at.those(torch.randint(0, 1 << BITS, size, generator=generator, device="cpu"), N)

            place = torch.arange(BITS, device=z.device)
            bits = (draw(words, at.step, z).long()[..., None] >> place) & 1  # (N, words, BITS)
            found: Tensor = (2 * bits.flatten(1)[:, :count] - 1).to(z).view(N, self.k, *shape[1:]) / self.k**0.5
            return found.transpose(0, 1)  # (k, N, P, r)

        return Cotangents(loss.ungroup(loss.mixed(z, y, weight, signs), z), None, loss.gradient(z, y, weight))


@dataclass(frozen=True)
class Fraction(Rows):
    """Rows of a part of the batch only, drawn anew for every step: G in the mean is that of the batch.

    The gradient and the losses are always those of the whole batch. RReLU keeps its slopes; what else is random is
    drawn anew for the part, so that with Dropout G is that of other masks than the losses.

    Args:
        fraction: the part of the batch that has rows, above 0 and at most 1.
        rows: which rows of that part.
        seed: of the choice; every step draws another part.

    >>> opt = mq.LM(model, "mse", rows=mq.Fraction(0.5))
    """

    fraction: float = 0.25
    rows: Rows = Exact()
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"Fraction({self.fraction!r}): the part of the batch, above 0 and at most 1")
        if not hasattr(self.rows, "draw") or isinstance(self.rows, (type, Fraction)):
            raise TypeError(f"Fraction(rows={self.rows!r}): which rows of that part, for example mq.Exact()")
        if self.rows.joined:
            raise ValueError(
                f"Fraction(rows={self.rows!r}): rows of all samples together are not of a part, leave Fraction out"
            )

    @property
    def empirical(self) -> bool:
        return self.rows.empirical

    def pick(self, N: int, seed: int) -> Tensor | None:
        """None of a piece that has no sample among those of the whole batch: a tensor of length 0"""
        at = Seed.of(seed, N)
        order = torch.randperm(at.total or N, generator=_generator(self.seed, at.step), device="cpu")
        found = order[: self._count(at.total or N)].sort().values - at.first
        return found[(found >= 0) & (found < N)]

    def _count(self, N: int) -> int:
        return max(1, round(self.fraction * N))

    def stands_for(self, picked: int, N: int, seed: int) -> float:
        total = Seed.of(seed, N).total or N
        return total / self._count(total)

    def draw(self, loss: Loss, z: Tensor, y: object, weight: Tensor | None, seed: int) -> Cotangents:
        """Of the samples picked: SSᵀ is still that of each, the part's weight comes with the part."""
        return self.rows.draw(loss, z, y, weight, seed)


@dataclass(frozen=True)
class Combined(Rows):
    """The rows of every sample added up with random signs: one row, whose square is the sum of their squares in the
    mean (Chapelle and Erhan, 2011)."""

    rows: Rows

    @property
    def empirical(self) -> bool:
        return self.rows.empirical

    @property
    def spans(self) -> bool:
        return False

    @property
    def joined(self) -> bool:
        return self.rows.joined

    def pick(self, N: int, seed: int) -> Tensor | None:
        return self.rows.pick(N, seed)

    def stands_for(self, picked: int, N: int, seed: int) -> float:
        return self.rows.stands_for(picked, N, seed)

    def draw(self, loss: Loss, z: Tensor, y: object, weight: Tensor | None, seed: int) -> Cotangents:
        S = self.rows.draw(loss, z, y, weight, seed).S  # (R, N, *out)
        if len(S) > 1:
            R, N = S.shape[:2]
            at = Seed.of(seed, N)
            size, generator = (at.total or N, R), torch.Generator("cpu").manual_seed(at.step)
            bits = at.those(torch.randint(0, 2, size, generator=generator, device="cpu"), N)
            S = torch.einsum("nr,rn...->n...", (2 * bits - 1).to(S), S)[None]
        return Cotangents(S, None, None)


def drawn(rows: Rows, loss: Loss, z: Tensor, batch: Batch, seed: int) -> Cotangents:
    """The cotangents, with their shapes checked: a user's Rows may get them wrong."""
    found = rows.draw(loss, z, batch.targets, batch.weight, seed)
    name = type(rows).__name__
    if found.__class__ is not Cotangents and not isinstance(found, Cotangents):
        raise TypeError(f"{name}.draw returned {type(found).__name__}: it returns mq.Cotangents(S, u, v)")
    if found.S.shape[1:] != z.shape:
        raise ValueError(f"{name}.draw: S has the shape {tuple(found.S.shape)}, expected (R, *{tuple(z.shape)})")
    if found.u is not None and found.u.shape != found.S.shape[:2]:
        raise ValueError(f"{name}.draw: u has the shape {tuple(found.u.shape)}, expected {tuple(found.S.shape[:2])}")
    return found


def check_gradient(rows: Rows, cotangents: Cotangents, slope: Tensor) -> None:
    """Su + v must be ∂value/∂z: a step would go another way without a word."""
    difference = (cotangents.slope(slope) - slope).norm()
    if bool(difference > FORMULA[slope.dtype] * slope.norm()):
        raise ValueError(
            f"{type(rows).__name__}.draw: Su + v differs from ∂value/∂z, of length {float(slope.norm()):.3g}, by "
            f"{float(difference):.3g}; rows that do not span it have u = None and v = loss.gradient(z, y, weight)"
        )


def _generator(own: int, seed: int) -> torch.Generator:
    """On the CPU: the global ones are the model's, and every device draws the same numbers."""
    return torch.Generator("cpu").manual_seed((own * 1_000_003 + seed) % 2**63)


# --- What is minimised: the loss of the model's outputs, as a function of θ.


class Totals(NamedTuple):
    """What is added up over the pieces of a batch, in Σ-units."""

    value: float  # Σwℓ
    normaliser: float  # Σ of the weights that the mean divides by
    lower_bound: float
    rounding: float  # of the value: ε·(|value| + ‖∂value/∂z ∘ z‖)


class Level(NamedTuple):
    """The loss at the point where a step begins."""

    f: float
    low: float  # f never falls below it; −∞ if nothing is known
    rounding: float  # by how much f is uncertain
    normaliser: float
    decay: float = 0.0  # what weight decay has of f


class Objective:
    """f(θ) = scale · Σ wℓ(model(x; θ), y) + penalty: the model, the loss, the parameters that train, and weight decay.

    The model runs under the autocast that was on when this was made. `loss` is the user's, or what it is for outputs of
    the form that the model has returned, see `taken`; `given` is always the user's. The penalty is given in the units
    in which the loss is reported, and `decay` has it in those of f.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, params: Sequence[Tensor], weights: Weights = Weights(),
        towards: Tensor | None = None, master: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.model, self.loss, self.parameters = model, loss, Parameters(model, params, master)
        self.penalty = Penalty(self.parameters, weights, towards) if weights.any else None
        self.autocast = Autocast.of_caller(self.parameters.device)
        self.given = loss
        self.eager = False  # whether compiled code is called as it was before, see model.batch.uncompiled
        self.pools = True  # whether there may be max-pools
        self.sums: Tensor | None = None  # what the loss must know of all data, see Loss.sums

    def called(self, inputs: Any, model: Callable[..., Any] | None = None) -> Any:
        """What the model returns, or one that was made of it, in float32 at least."""
        raw = self.raw(inputs, model)
        return raw if raw.__class__ is Tensor and raw.dtype not in COARSE else full(raw)

    def raw(self, inputs: Any, model: Callable[..., Any] | None = None) -> Any:
        """What the model returns, as it is"""
        if self.parameters.shards is not None:
            self._gather(inputs)
        slow = self.pools and self.parameters.device.type == "cpu" and not torch.is_grad_enabled() and model is None
        called = self.model if model is None else model
        if self.eager and not (slow or self.autocast.enabled or torch.is_autocast_enabled(self.autocast.device)):
            if inputs.__class__ is not Tensor:
                return forward(called, inputs)
            torch.clear_autocast_cache()  # see `forward`
            return called(inputs)
        with Largest() if slow else nullcontext(), self.autocast(), nullcontext() if self.eager else uncompiled():
            return forward(called, inputs)

    def _gather(self, inputs: Any) -> None:
        """All ranks are about to pass through the modules whose parameters are sharded: there none can be waited for in
        vain, so that what could fail on one of them alone is looked at here."""
        if (ranks := self.parameters.ranks).several:
            shapes = [(tuple(t.shape[1:]), t.dtype) for t in tensors(inputs)]
            ranks.same(f"a forward pass of inputs of the shapes and dtypes {shapes}, but for the samples")

    def taken(self, raw: Any, batch: Batch) -> tuple[Objective, Tensor]:
        """The objective of outputs of the form that the model has returned, and z: (N, *out)"""
        loss = self.given.bound(raw, batch.targets, batch.weight, self.sums)
        bound = self if loss is self.loss else copy(self)
        bound.loss = loss
        return bound, loss.joined(raw)

    def knowing(self, sums: Tensor) -> Objective:
        """The same, for parts of the data that these sums are over."""
        found = copy(self)
        found.sums = sums
        return found

    def outputs(self, inputs: Any, model: Callable[..., Any] | None = None) -> Tensor:
        """z, also of a model with other parameters: (N, *out)"""
        return self.loss.joined(self.called(inputs, model))

    def value(self, z: Tensor, batch: Batch) -> Tensor:
        """Σwℓ: ()"""
        return self.loss.value(z, batch.targets, batch.weight)

    def slope(self, z: Tensor, batch: Batch) -> Tensor:
        """∂value/∂z: (N, *out)"""
        return self.loss.gradient(z, batch.targets, batch.weight)

    def decay(self, normaliser: float) -> Penalty | None:
        """Weight decay in the units of f; None if there is none"""
        return None if self.penalty is None else self.penalty.scaled(1 / self.loss.report(1.0, normaliser))

    def level(self, totals: Totals, decay: float = 0.0, scale: float | None = None) -> Level:
        """`decay` is the value of the penalty in the units of f, `scale` that of the loss if it is known"""
        scale = self.loss.scale(totals.normaliser) if scale is None else scale
        value, low, rounding = totals.value * scale, totals.lower_bound * scale, totals.rounding * scale
        rounding += torch.finfo(self.parameters.dtype).eps * decay
        return Level(value + decay, low, rounding, totals.normaliser, decay)
