"""The likelihood behind a loss, −log p(y|z) = β·unit·ℓ + constant; the loss of all data at θ, and what the outputs
of other inputs owe to θ: all that a posterior is made of, whatever its prior and its noise are.

Outputs come in the groups of the loss: means z (N, P, C) and covariances V (N, P, C, C).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..curvature import Dense, Gram, Kronecker, Representation
from ..curvature.auto import free
from ..curvature.cost import Shapes, Work, look
from ..jacobian.linearization import Linearization, Needs
from ..jacobian.objective import Exact, Objective
from ..jacobian.passes import Coupled, Cut, Facts
from ..jacobian.piece import Piece
from ..losses import Loss, Residual
from ..losses.base import Elementwise, weighted
from ..model.anatomy import Chance, Moment, submodules
from ..model.batch import Batch
from ..model.checks import check_coupling
from ..model.parameters import Parameters
from ..sources import Source
from ..surroundings import back_afterwards
from .precision import DataCurvature, DenseData, KroneckerData, RowsData

# Of a target, by output: its mean, the part of its variance that more data would remove, and the part that stays.
Moments = tuple[Tensor, Tensor, Tensor]  # each (N, P)


class Likelihood:
    """Of targets that the loss names in `Loss.likelihood`. Weights of samples are counts: a sample of weight 2 is there
    twice."""

    unit: ClassVar[float] = 1.0
    noisy: ClassVar[bool] = False  # has a noise σ² = 1/β that the model does not return
    classes: ClassVar[bool] = False

    def __init__(self, loss: Loss) -> None:
        self.loss: Any = loss  # bound to outputs, with options of its own

    def constant(self, y: Any, weight: Tensor | None) -> Tensor | float:
        """What −log p has beside ℓ, added up"""
        return 0.0

    def moments(self, z: Tensor, V: Tensor, noise: Tensor) -> Moments:
        raise NotImplementedError

    def averaged(self, z: Tensor, V: Tensor, joint: bool) -> Tensor:
        """Outputs that have the probabilities of uncertain ones, which are a mean: (N, P, C)"""
        raise NotImplementedError

    def sharpened(self, z: Tensor, V: Tensor, s: float) -> tuple[Tensor, Tensor]:
        """Logits times s"""
        return s * z, s**2 * V

    def linked(self, z: Tensor) -> Tensor:
        """Probabilities of the classes (N, P, ·), or of 1 (N, P, 1), for certain outputs"""
        raise NotImplementedError

    def probabilities(self, z: Tensor, V: Tensor, joint: bool) -> Tensor:
        return self.linked(self.averaged(z, V, joint))

    def placed(self, t: Tensor, z: Tensor) -> Tensor:
        """(N, P) → in the shape of the targets"""
        return t.reshape(z.shape)

    def laid_out(self, p: Tensor, z: Tensor) -> Tensor:
        """Probabilities (N, P, C) → like the outputs"""
        found: Tensor = self.loss.ungroup(p, z)
        return found


class Normal(Likelihood):
    """ℓ = r²: −log p = ½βr² + ½ log(2π/β), β one number for all outputs, or one for each."""

    unit: ClassVar[float] = 0.5
    noisy: ClassVar[bool] = True

    def moments(self, z: Tensor, V: Tensor, noise: Tensor) -> Moments:
        model = V[..., 0, 0]
        return z[..., 0], model, noise.square().expand_as(model)


class NormalWithVariance(Likelihood):
    """ℓ = ½(log v + e²/v), v an output too: the noise is that of the model, at its mean value."""

    def constant(self, y: Any, weight: Tensor | None) -> Tensor | float:
        return 0.0 if self.loss.full else 0.5 * math.log(2 * math.pi) * weighted(torch.ones_like(y), weight).sum()

    def moments(self, z: Tensor, V: Tensor, noise: Tensor) -> Moments:
        v = z[..., 1].clamp(min=self.loss.eps) if self.loss.variance else (z[..., 1] + 0.5 * V[..., 1, 1]).exp()
        return z[..., 0], V[..., 0, 0], v

    def placed(self, t: Tensor, z: Tensor) -> Tensor:
        return t.reshape(z.chunk(2, 1)[0].shape)


class LogMean(Likelihood):
    """The mean μ of a target is e^z, log-normal if z is normal; the variance of a target is a + bμ + cμ²."""

    def coefficients(self) -> tuple[float, float]:
        """b and c"""
        raise NotImplementedError

    def moments(self, z: Tensor, V: Tensor, noise: Tensor) -> Moments:
        variance = V[..., 0, 0]
        mean = (z[..., 0] + 0.5 * variance).exp()
        b, c = self.coefficients()
        square = mean.square() * variance.exp()  # of μ, its mean
        return mean, square - mean.square(), b * mean + c * square


class PoissonCounts(LogMean):
    def constant(self, y: Any, weight: Tensor | None) -> Tensor | float:
        return weighted(torch.lgamma(y + 1), weight).sum()

    def coefficients(self) -> tuple[float, float]:
        return 1.0, 0.0


class NegativeBinomialCounts(LogMean):
    def constant(self, y: Any, weight: Tensor | None) -> Tensor | float:
        k = 1 / self.loss.dispersion
        found = torch.lgamma(y + 1) + math.lgamma(k) - torch.lgamma(y + k) - y * math.log(self.loss.dispersion)
        return weighted(found, weight).sum()

    def coefficients(self) -> tuple[float, float]:
        return 1.0, self.loss.dispersion


class GammaSizes(LogMean):
    def constant(self, y: Any, weight: Tensor | None) -> Tensor | float:
        a = self.loss.shape
        return weighted(math.lgamma(a) - a * math.log(a) - (a - 1) * y.log(), weight).sum()

    def coefficients(self) -> tuple[float, float]:
        return 0.0, 1 / self.loss.shape


def softened(z: Tensor, variance: Tensor) -> Tensor:
    """z/√(1 + πv/8), whose sigmoid is nearly the mean of that of a normal z (MacKay, 1992)"""
    return z / (1 + math.pi / 8 * variance).sqrt()


class Categorical(Likelihood):
    """Classes by logits, or by the logarithms of their probabilities.

    `joint`: pₖ ∝ 1/Σⱼ exp(−φₖⱼ), φₖⱼ the softened difference zₖ − zⱼ: that of two classes is the sigmoid of one, and a
    number that is added to all logits changes nothing. Otherwise pₖ ∝ exp φₖ, every logit softened by its own variance.
    """

    classes: ClassVar[bool] = True

    def averaged(self, z: Tensor, V: Tensor, joint: bool) -> Tensor:
        own = V.diagonal(dim1=-2, dim2=-1)  # (N, P, C)
        if not joint:
            return softened(z, own)
        difference = z[..., :, None] - z[..., None, :]  # (N, P, C, C)
        variance = (own[..., :, None] + own[..., None, :] - 2 * V).clamp(min=0)
        return -torch.logsumexp(-softened(difference, variance), -1)

    def linked(self, z: Tensor) -> Tensor:
        return z.softmax(-1)


class Bernoulli(Likelihood):
    """0 and 1, or −1 and 1, by one logit."""

    classes: ClassVar[bool] = True

    def averaged(self, z: Tensor, V: Tensor, joint: bool) -> Tensor:
        return softened(z, V[..., 0])

    def linked(self, z: Tensor) -> Tensor:
        return z.sigmoid()


class BernoulliProbability(Likelihood):
    """By the probability itself: its logit has the variance V/(p(1 − p))²."""

    classes: ClassVar[bool] = True

    def averaged(self, z: Tensor, V: Tensor, joint: bool) -> Tensor:
        return softened(z.logit(eps=1e-12), V[..., 0] / self._slope(z).square()).sigmoid()

    def sharpened(self, z: Tensor, V: Tensor, s: float) -> tuple[Tensor, Tensor]:
        p = (s * z.logit(eps=1e-12)).sigmoid()
        return p, V * (s * self._slope(p) / self._slope(z)).square()[..., None]

    def _slope(self, p: Tensor) -> Tensor:
        return (p * (1 - p)).clamp(min=1e-12)

    def linked(self, z: Tensor) -> Tensor:
        return z


class Ordered(Likelihood):
    """Classes in an order, P(y ≤ k) = σ(zₖ): differences of softened cumulative probabilities."""

    classes: ClassVar[bool] = True

    def averaged(self, z: Tensor, V: Tensor, joint: bool) -> Tensor:
        found: Tensor = softened(z, V.diagonal(dim1=-2, dim2=-1)).cummax(-1).values
        return found

    def linked(self, z: Tensor) -> Tensor:
        end = torch.zeros_like(z[..., :1])
        return torch.cat((end, z.sigmoid(), end + 1), -1).diff(dim=-1)

    def laid_out(self, p: Tensor, z: Tensor) -> Tensor:
        return p[:, 0]


LIKELIHOODS: dict[str, type[Likelihood]] = {
    "normal": Normal,
    "normal with variance": NormalWithVariance,
    "categorical": Categorical,
    "bernoulli": Bernoulli,
    "bernoulli probability": BernoulliProbability,
    "ordered": Ordered,
    "poisson": PoissonCounts,
    "negative binomial": NegativeBinomialCounts,
    "gamma": GammaSizes,
}


def likelihood_of(loss: Loss) -> type[Likelihood]:
    """Raises if the loss is none."""
    if loss.likelihood is None:
        raise ValueError(
            f"{loss.display_name} is no likelihood of the targets, so that there is no posterior: train with 'mse' or "
            "'gaussian_nll' (numbers), 'cross_entropy' or 'bce' (classes), 'poisson', 'negative_binomial' or 'gamma'; "
            "a loss of your own that is −log p(y|z) names p in its class, such as likelihood = 'categorical'"
        )
    if loss.likelihood not in LIKELIHOODS:
        raise ValueError(
            f"{loss.display_name} says likelihood = {loss.likelihood!r}: one of {', '.join(map(repr, LIKELIHOODS))}"
        )
    return LIKELIHOODS[loss.likelihood]


# Samples that are looked at first, before it is known how many numbers their rows have.
LOOK = 1024

# Numbers in rows that are written out at once: 256 MiB.
ROWS = 1 << 25

# Seconds on a machine of the usual speed that a matrix of all parameters may take before layers are taken apart.
LONG = 60.0


@dataclass(frozen=True, kw_only=True, eq=False)
class OutputsAlone(Residual):
    """The outputs that another loss is taken of: its rows are √2 ∂z/∂θ."""

    of: Loss

    def joined(self, raw: Any) -> Tensor:
        return self.of.joined(raw)


@dataclass(frozen=True, kw_only=True, eq=False)
class ByOutput(Elementwise):
    """b·ℓ with one factor b for each output, for outputs whose noise differs in size."""

    of: Elementwise
    b: Tensor  # (*out)

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return self.b.to(z) * self.of.ell(z, y)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return self.b.to(z) * self.of.slope(z, y)

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return self.b.to(z).sqrt() * self.of.s(z, y)

    def faults(self, z: Tensor, y: Any) -> list[Any]:
        return self.of.faults(z, y)


def in_eval_mode(
    model: nn.Module, device: torch.device, move: Callable[[], object] = int, back: Callable[[], object] = int
) -> back_afterwards:
    """The model as it predicts, in eval mode and `move`d; its modes, buffers and the random numbers are afterwards as
    before."""
    modes, grad = [(module, module.training) for module in submodules(model)], torch.is_grad_enabled()
    before = Moment(model, device, Chance(drawn=True))

    def begin() -> None:
        torch.set_grad_enabled(True)
        for module, _ in modes:
            module.training = False
        move()

    def undo() -> None:
        torch.set_grad_enabled(grad)
        for module, training in modes:
            module.training = training
        back()
        before.restore(gently=True)

    return back_afterwards(undo, begin)


@dataclass
class Expansion:
    """Sums over all data at θ, in Σ-units: of ℓ, of its gradient, and of G."""

    model: nn.Module
    loss: Loss
    parameters: Parameters
    source: Source
    chunk: int | None = None  # samples that are linearised at once; None for what has room
    known: Facts = field(default_factory=Facts)

    def __post_init__(self) -> None:
        kind = likelihood_of(self.loss)
        self.theta = self.parameters.vector()  # (n,)
        self.passes = Facts()  # of the outputs alone
        whole = self.source.whole
        self.batches: Iterable[Batch] = self.source.batches() if whole is None else [whole]
        self.single = whole is not None
        chosen = self.chunk is None
        if chosen and whole is not None and whole.samples > LOOK and not whole.opaque:
            self.chunk = LOOK
        with self.at_rest():
            check_coupling(self.model)
            lin = self.linearization()
            self.shapes = s = look(lin, None)
            if chosen and not s.divisible:
                self.chunk = None
            size = max(1, ROWS // (s.R * s.n))  # samples at once whose rows are written out; None for all of a batch
            self.written = self.chunk if size >= s.at_once(self.chunk) or not s.divisible else size
            try:
                self._survey(self.linearization(), kind)
            except Coupled as error:
                raise ValueError(
                    f"the outputs of {type(self.model).__name__} for a sample depend on the other samples of its "
                    "batch also in eval mode, and a posterior is that of a function of single samples: take out what "
                    "mixes them"
                ) from error
            if lin.chance.drawn:
                raise ValueError(
                    f"{type(self.model).__name__} draws random numbers also in eval mode, so that its outputs are no "
                    "function of its parameters: take them out, or pass the model without them"
                )

    def at_rest(self) -> back_afterwards:
        """θ is where it was, for as long as this is looked at."""
        held, assign = self.parameters.vector(), self.parameters.assign
        moved = not torch.equal(held, self.theta)
        there, back = (partial(assign, self.theta), partial(assign, held)) if moved else (int, int)
        return in_eval_mode(self.model, self.parameters.device, there, back)

    def linearization(self, b: Tensor | None = None, written: bool = False) -> Linearization:
        """Of all data, with factors of ℓ by output"""
        loss: Any = self.loss
        loss = loss if b is None else ByOutput(of=loss, b=b)
        objective = Objective(self.model, loss, self.parameters.tensors)
        needs = Needs(self.written if written else self.chunk)
        return Linearization(objective, self.batches, Exact(), needs, known=self.known, single=self.single)

    def _survey(self, lin: Linearization, kind: type[Likelihood]) -> None:
        """One pass over all data: the sums, and by output that of ℓ if there is a noise to learn from it."""
        squares: Any = None
        gradient: Any = 0.0
        constant, weights, samples = 0.0, [], 0
        for piece in lin.pieces():
            if self.chunk is None and piece.divisible:  # in chunks they have been compared
                cut = Cut(piece.batch, -(-piece.N // 2), self.known, samples)
                cut.saw(piece.whole)
                cut.check("a posterior", "", thorough=False)
            loss, y, w = piece.objective.loss, piece.batch.targets, piece.batch.weight
            self.likelihood = kind(loss)
            constant += float(self.likelihood.constant(y, w))
            samples += piece.N
            weights += [] if w is None else [w.flatten().double()]
            if kind.noisy:
                own = weighted(loss.ell(piece.z, y), w).double().sum(0)  # (*out)
                squares = own if squares is None else squares + own
            gradient = gradient + piece.gradient
        totals = lin.totals()
        self.value, self.normaliser, self.rounding = totals.value, totals.normaliser, totals.rounding
        self.constant, self.squares = constant, squares
        self.gradient: Tensor = gradient.double()
        self.total = replace(self.shapes, N=samples)  # of all batches
        w = torch.cat(weights) if weights else torch.ones(1)
        # Of the samples that count; 1 if weights are whole numbers, as counts are
        self.mean_weight = 1.0 if torch.equal(w, w.round()) else float(w[w > 0].mean())

    def pieces(self, b: Tensor | None = None, written: bool = False) -> Iterator[Piece]:
        """All data linearised, one after the other; `b` are factors of ℓ by output"""
        with self.at_rest():
            yield from self.linearization(b, written).pieces()

    # G of all data.

    def curvature(self, kind: Representation | None, proper: bool, b: Tensor | None = None) -> DataCurvature:
        """`proper`: every parameter has a prior, which rows and layers need; `b` are factors of ℓ by output"""
        s = self.total
        rows = isinstance(kind, Gram) or (kind is None and proper and s.m < s.n)
        layers = isinstance(kind, Kronecker) or (kind is None and not fits(s, rows, self.parameters.device))
        with self.at_rest():
            lin = self.linearization(b, written=not layers)
            if rows and not layers:
                return RowsData(torch.cat([piece.dense(torch.float64) for piece in lin.pieces()]))
            chunk = lin.needs.chunk
            G: Any = (Kronecker(decay=0.0, chunk=chunk) if layers else Dense(chunk, double=True)).represent(lin)
            return KroneckerData(G.layers, lin.parameters, lin.scale) if layers else DenseData(G.G / lin.scale)

    # Other inputs.

    def parts(self, batch: Batch) -> list[Batch]:
        """So many samples at once that their rows can be written out"""
        size = max(1, ROWS // (self.shapes.out * self.parameters.n))
        return batch.split(None if batch.opaque or batch.samples <= size else size)

    def functional(self, inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """z (N, *out), and in the groups of the loss the same (N, P, C) and ∂z/∂θ (N, P, C, n)"""
        objective = Objective(self.model, OutputsAlone(of=self.likelihood.loss), self.parameters.tensors)
        with self.at_rest():
            piece = Linearization(objective, [Batch(inputs)], known=self.passes).whole()
            loss, z = self.likelihood.loss, piece.z.double()
            place = loss.group(torch.arange(z[0].numel(), device=z.device).view(1, *z.shape[1:]))[0]  # (P, C)
            rows = piece.dense(torch.float64).unflatten(0, (-1, piece.N)) / 2**0.5  # (outputs, N, n)
            return z, loss.group(z), rows[place].movedim(2, 0)


def fits(s: Shapes, rows: bool, device: torch.device) -> bool:
    """Whether a matrix of all parameters, or all rows of them, have room and time."""
    small, large = sorted((s.m, s.n))
    numbers = 3.0 * small * large + 3.0 * small**2 if rows else 4.0 * s.n**2
    work = Work(products=2.0 * small**2 * large, factor=10.0 * small**3) if rows else Work(
        products=2.0 * s.m * s.n**2, factor=2.0 * s.n**3
    )  # fmt: skip
    memory = free(device)
    return (memory is None or 8 * numbers <= memory) and work.seconds(replace(s, itemsize=8)) <= LONG
