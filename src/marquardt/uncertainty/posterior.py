"""The Laplace approximation: θ is normal around where it was trained to, with the covariance H⁻¹ = (cG + diag α)⁻¹."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..arguments import brief, check_places, users
from ..curvature import Dense, Gram, Kronecker, Representation
from ..curvature.kronecker import NoFactors
from ..jacobian.piece import Piece
from ..losses import Elementwise, resolve
from ..losses.base import weighted
from ..model.batch import Batch
from ..model.checks import trainable
from ..model.decay import WeightDecay, check_weight
from ..model.parameters import Parameters, named_parameters
from ..model.shards import refuse_sharded
from ..sources import source
from ..surroundings import undisturbed
from .evidence import LEAST, MOST, alone, grouped_names, noise_precision, unit
from .expansion import Expansion, fits, likelihood_of
from .precision import DataCurvature, Precision, Scaled

# −log p(θ|y) that a step would take off θ, in nats, beyond which the posterior is said to be of another θ; or this
# share of γ: a sample of the posterior is γ/2 above the minimum, and a θ that is no further from it than samples are
# has errors of the size of theirs.
NATS, SHARE = 1.0, 0.5

# How many times more or less than samples there are weights may add up to, if they are no whole numbers.
FAR = 1.5

NO_MINIMUM = (
    "the parameters are no minimum of the loss with this {}. A step would lower −log p(θ|y) by {:.3g}, and a sample of "
    "the posterior is {:.3g} above its minimum; variances are those of a minimum"
)
TRAIN_ON = "weight decay: train on, and pass the weight_decay of the training"
ONE_NOISE = (
    "noise, σ = {} by output, as the training took all outputs for equally noisy, and has smoothed the quiet ones "
    'too much: train with targets in units of their noise, or pass noise="shared"'
)
UNBOUNDED = (
    "without a prior (weight decay 0) {:,} parameters are as uncertain as {:,.0f} targets leave them, and training "
    "ended before they were fitted: standard deviations are too large. Pass weight_decay=None for a prior that is "
    "found from the data, or train with weight decay"
)

# Rounds in which noise of every output and γ of every output agree to this.
ROUNDS, AGREED = 10, 0.01

# Rounds in which several α, and their γ, agree to this.
TUNED, CLOSE = 50, 1e-3

# Layers that differ in train and eval mode.
RANDOM = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm, nn.RReLU)

# A sample determines its own outputs by less than 1, but for rounding.
OWN = 0.999


class Temper(NamedTuple):
    """What is made of outputs before they become probabilities."""

    temperature: float = 1.0  # the factor of H⁻¹ in the covariance of θ
    sharpness: float = 1.0  # the factor of the logits


# Of which a posterior is calibrated to the best: temperatures of 1e-4 to 10, sharpness of ½ to 4.
TEMPERS = [Temper(10 ** (k / 2), 2 ** (j / 4)) for k in range(-8, 3) for j in range(-4, 9)]


@dataclass(frozen=True)
class Prediction:
    """Of numbers, each (N, *out): the mean, and the standard deviation of a new target."""

    mean: Tensor
    std: Tensor
    model_std: Tensor  # of the mean, for want of data
    noise_std: Tensor  # of a target around the mean

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The bounds between which a target lies with this probability, if it is normal: of counts and sizes that are
        near 0 it is not, and the lower bound may be negative."""
        if not 0 < level < 1:
            raise ValueError(f"level={level!r}: a probability between 0 and 1")
        q = math.sqrt(2) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64)))
        return self.mean - q * self.std, self.mean + q * self.std


class Posterior:
    """p(θ|y) ≈ N(θ̂, H⁻¹), H = cG + diag α: see `posterior`.

    >>> posterior = mq.fit(model, (x, y), "mse", weight_decay=0.01).posterior()
    >>> prediction = posterior.predict(x)
    >>> prediction.mean.shape, prediction.std.shape
    (torch.Size([64, 1]), torch.Size([64, 1]))
    """

    def __init__(
        self, at: Expansion, kind: Representation | None, data: DataCurvature, alphas: Sequence[float], beta: float,
        towards: Tensor | None, b: Tensor | None, learns: bool, precision: Precision | None = None,
        temper: Temper = Temper(),
    ) -> None:  # fmt: skip
        self.at, self.kind, self.data, self.alphas, self.beta = at, kind, data, tuple(alphas), beta
        self.towards, self.b, self.learns = towards, b, learns  # β by output is β·b
        self.temperature, self.sharpness = temper
        self.parameters, self.names = at.parameters, at.parameters.names
        self.c = self.beta * at.likelihood.unit  # −log p(y|θ) = cΣℓ + …
        repeats = torch.tensor(self.parameters.sizes, device=self.parameters.device)
        alpha = torch.tensor(self.alphas, dtype=torch.float64, device=self.parameters.device)
        self._alpha = alpha.repeat_interleave(repeats)  # (n,)
        self.precision = data.precision(self.c, self._alpha) if precision is None else precision

    # The evidence.

    @cached_property
    def gamma_by_tensor(self) -> list[float]:
        parts = self.parameters.split(self._alpha * self.precision.variances)
        return [float((len(t) - t.sum()).clamp(0, len(t))) for t in parts]

    @property
    def squares_by_tensor(self) -> list[float]:
        """‖θₖ − θ₀ₖ‖²"""
        return [float(t.square().sum()) for t in self.parameters.split(self._from_prior())]

    def _from_prior(self) -> Tensor:
        """θ − θ₀: (n,)"""
        theta = self.at.theta.double()
        return theta if self.towards is None else theta - self.towards.to(theta)

    @property
    def mean_curvature(self) -> float:
        return self.c * self.data.trace() / self.parameters.n

    @property
    def gamma(self) -> float:
        """The effective number of parameters: those that the data determine, and not the prior."""
        return sum(self.gamma_by_tensor)

    @property
    def gammas(self) -> dict[str, float]:
        """γ by parameter"""
        return dict(zip(self.names, self.gamma_by_tensor, strict=True))

    @property
    def alpha(self) -> dict[str, float]:
        """The precision of the prior, by parameter"""
        return dict(zip(self.names, self.alphas, strict=True))

    @property
    def weight_decay(self) -> dict[str, float]:
        """The weight decay for which this prior is right, by parameter"""
        one = self.decay_of_one(self.beta)
        return {name: a * one for name, a in self.alpha.items()}

    @property
    def noise(self) -> Tensor:
        """σ of the targets: (), or (*out) if there is one for each output"""
        if not self.at.likelihood.noisy:
            raise ValueError(f"{self.at.loss.display_name} has no noise beside what the model returns")
        beta = torch.tensor(self.beta, dtype=torch.float64, device=self.parameters.device)
        return (beta if self.b is None else beta * self.b).rsqrt()

    @property
    def sigma(self) -> str:
        """The noise, in words"""
        return ", ".join(f"{x:.3g}" for x in self.noise.flatten().tolist())

    def noise_given(self, gamma: float) -> float:
        """β of all outputs together; the known one, or 1 if the loss has no noise"""
        if not self.learns:
            return self.beta
        total = self._residuals()
        targets, taken = (total.new_tensor(x) for x in (self.at.normaliser, gamma))
        return float(noise_precision(targets, taken, total, self.at.rounding))

    def _residuals(self) -> Tensor:
        """Σr², of every output in units of the noise of all: ()"""
        squares: Tensor = self.at.squares
        return (squares if self.b is None else self.b * squares).sum()

    def decay_of_one(self, beta: float) -> float:
        """Weight decay in the units of the loss, of α = 1"""
        return unit(self.at.loss, self.at.normaliser) / (beta * self.at.likelihood.unit)

    @property
    def log_likelihood(self) -> float:
        """log p(y|θ̂)"""
        at = self.at
        if not at.likelihood.noisy:
            return -self.c * at.value - at.constant
        beta = self.noise.expand_as(at.squares).pow(-2)
        count = at.normaliser / at.squares.numel()
        return float((0.5 * count * (beta / (2 * math.pi)).log() - 0.5 * beta * at.squares).sum()) - at.constant

    @property
    def log_evidence(self) -> float:
        """log p(y) = log p(y|θ̂) + log p(θ̂) − ½ log |H/2π|: of two models of the same targets the larger one is the
        more likely, if both are at their minimum."""
        if not all(self.alphas):
            free = next(name for name, a in self.alpha.items() if not a)
            raise ValueError(
                f"parameter {free!r} has weight decay 0, a prior that does not integrate to 1, and so there is no "
                "evidence: train with weight decay on all parameters, or ask "
                "mq.posterior(model, loss, data, weight_decay=None)"
            )
        prior = (self._alpha.log() - self._alpha * self._from_prior().square()).sum()
        return self.log_likelihood + 0.5 * float(prior) - 0.5 * self.precision.log_determinant

    def tuned(self, groups: str | Sequence[Sequence[str]] | None = None) -> Posterior:
        """The same with the prior precision, and the noise if it is learnt, of the highest evidence at θ̂. `groups` are
        those of mq.Evidence. Parameters without a prior stay so, unless all are."""
        found = self if any(self.alphas) else self.changed([self.mean_curvature] * len(self.alphas), self.beta)
        if groups is None and all(found.alphas):
            at, e = self.at, self.data.eigenvalues() * (self.at.likelihood.unit if self.learns else self.c)
            squares = float(self._residuals()) if self.learns else None
            size = sum(self.squares_by_tensor)
            alpha, beta = alone(e, size, self.parameters.n, at.normaliser, squares, at.rounding)
            return self.changed([alpha] * len(self.alphas), beta if self.learns else self.beta)
        for _ in range(TUNED):
            before = found.alphas
            found = found.changed(*reestimate(found, groups))
            pairs = zip(before, found.alphas, strict=True)
            if all(abs(math.log(b / a)) < CLOSE for a, b in pairs if a > 0):
                break
        return found

    def _but(self, **change: Any) -> Posterior:
        """The same at T = 1 with these arguments, H made anew unless it is among them"""
        names = ("at", "kind", "data", "alphas", "beta", "towards", "b", "learns")
        return Posterior(**{**{name: getattr(self, name) for name in names}, **change})

    def changed(self, alphas: Sequence[float], beta: float, precision: Precision | None = None) -> Posterior:
        """With another prior and another noise"""
        return self._but(alphas=alphas, beta=beta, precision=precision)

    def by_output(self) -> Posterior:
        """With a noise for each output, βₒ = (N − γₒ)/Σrₒ², in the place of one for all. α stays."""
        at, found = self.at, self
        b = torch.ones_like(at.squares)
        for _ in range(ROUNDS):
            gammas = torch.stack([found._determined(piece) for piece in at.pieces(b, written=True)]).sum(0).view_as(b)
            targets = torch.full_like(b, at.normaliser / b.numel())
            after = noise_precision(targets, gammas, at.squares, at.rounding) / self.beta
            close, b = bool(((after / b).log().abs() < AGREED).all()), after
            found = self._but(data=at.curvature(self.kind, all(self.alphas), b), b=b, learns=True)
            if close:
                break
        return found

    def _determined(self, piece: Piece) -> Tensor:
        """Parameters that its targets determine, by output: (R,)"""
        half = self.precision.half(piece.dense(torch.float64))  # (R·N, ·)
        return self.c * half.square().sum(1).view(-1, piece.N).sum(1)

    def tempered(self, temperature: float, sharpness: float = 1.0) -> Posterior:
        """p(θ|y)^(1/T): the same with T times the covariance. Prior, noise, γ and the evidence are those of T = 1. For
        probabilities, logits count `sharpness` times."""
        for name, x in (("temperature", temperature), ("sharpness", sharpness)):
            if not 0 < x < math.inf:
                raise ValueError(f"{name}={x!r}: a finite number above 0; 1 is the posterior itself")
        return self._but(precision=self.precision, temper=Temper(temperature, sharpness))

    @undisturbed
    def calibrated(self, data: Any = None) -> Posterior:
        """Of classes: with the temperature and the sharpness at which every sample is best predicted by the others, or
        those of `data` that have not trained the model. What θ̂ would be without a sample is one Newton step from here,
        with the exact H also if this one has Kronecker factors."""
        if not self.at.likelihood.classes:
            raise ValueError(f"{self.at.loss.display_name} has no classes: its intervals have the noise that is learnt")
        at, place, exact = self.at, self.parameters, None
        new = None if data is None else source(data, place.device, place.tensors[0].dtype).batches()
        if new is None and self.others:
            warnings.warn(
                f"{self.others:,} other parameters are taken as known. If they were trained on these samples, these "
                "seem better predicted by the others than they are, and probabilities become too sure: pass "
                "calibrated(data) samples that have not trained the model, or freeze what was not trained",
                stacklevel=users(),
            )
        if new is None and not self.data.sums:
            if not fits(at.total, at.total.m < at.total.n, place.device):
                raise ValueError(
                    "what a sample has moved does not follow from Kronecker factors, and the exact H of "
                    f"{place.n:,} parameters is too large: pass calibrated(data) samples that have not trained the "
                    "model"
                )
            exact = at.curvature(None, True).precision(self.c, self._alpha)
        found = predicted(at, self.precision, TEMPERS, exact, new)
        best = TEMPERS[found.index(min(found))]
        if best.temperature == TEMPERS[-1].temperature:
            warnings.warn(
                f"temperature {best.temperature:.3g} is the highest that was tried: the model predicts samples that it "
                "does not know so badly that its posterior says little of them; train with more weight decay",
                stacklevel=users(),
            )
        return self.tempered(*best)

    @property
    def others(self) -> int:
        """Trainable parameters of the model that are taken as known"""
        return sum(p.numel() for p in self.at.model.parameters() if p.requires_grad) - self.parameters.n

    def decrement(self, prior: bool = True) -> float:
        """½gᵀH⁻¹g, by how much −log p(θ|y) with this noise would fall from θ̂ in one Newton step, 0 at the minimum; or,
        without the prior, −log p(y|θ)"""
        pieces = [] if self.b is None else [piece.gradient.double() for piece in self.at.pieces(self.b)]
        data = torch.stack(pieces).sum(0) if pieces else self.at.gradient
        g = self.c * data + self._alpha * self._from_prior() * prior
        return 0.5 * float(self.precision.half(g[None]).square().sum())

    # Parameters.

    def sample(self, k: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """k draws of θ: (k, n); `shaped` has them by name"""
        if isinstance(k, bool) or not isinstance(k, int) or k < 0:
            raise ValueError(f"k={k!r}: the number of draws, an integer of at least 0")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator={generator!r}: a torch.Generator, such as torch.Generator().manual_seed(0)")
        device, theta = self.parameters.device, self.at.theta
        where = device if generator is None else generator.device
        E = torch.randn(k, len(theta), generator=generator, dtype=torch.float64, device=where).to(device)
        return theta + math.sqrt(self.temperature) * self.precision.drawn(E).to(theta)

    def shaped(self, theta: Tensor) -> dict[str, Tensor]:
        """θ by the names of the parameters, as torch.func.functional_call takes it"""
        return dict(zip(self.names, self.parameters.shaped(theta), strict=True))

    def covariance(self, params: Any = None) -> Tensor:
        """Of some parameters, by their names or themselves, one after the other, flattened: (k, k)"""
        chosen = [params] if isinstance(params, (str, Tensor)) else self.names if params is None else list(params)
        number = dict(zip(self.names, range(len(self.names)), strict=True)) | self.parameters.index
        columns: list[int] = []
        for p in chosen:
            i = number.get(p if isinstance(p, str) else id(p))
            if i is None:
                shown = repr(p) if isinstance(p, str) else f"a {type(p).__name__}"
                raise ValueError(f"{shown} is none of the parameters of this posterior: {', '.join(self.names)}")
            columns += range(self.parameters.n)[self.parameters.slice_of(i)]
        index = torch.tensor(columns, device=self.parameters.device)
        rows = self._alpha.new_zeros(len(index), self.parameters.n)
        half = self.precision.half(rows.scatter(1, index[:, None], 1.0))
        return (self.temperature * half @ half.T).to(self.at.theta)

    # Predictions.

    def _outputs(self, inputs: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """z (N, *out), and by group its mean (N, P, C) and covariance JH⁻¹Jᵀ (N, P, C, C), some samples at a time"""
        p = self.parameters.tensors[0]
        (batch,) = source((inputs, None), p.device, p.dtype).batches()
        for part in self.at.parts(batch):
            yield outputs(self.at, self.precision, part.inputs, self.temperature)

    @undisturbed
    def predict(self, inputs: Any) -> Prediction:
        """Targets of other inputs, by the model linearised in θ: the mean is the model's own output (of counts and
        sizes, whose logarithm that is, the mean of a log-normal), the variance JH⁻¹Jᵀ and that of the noise."""
        kind = self.at.likelihood
        if kind.classes:
            raise ValueError(f"{self.at.loss.display_name} has classes: use probabilities(inputs)")
        noise = self.noise.flatten() if kind.noisy else self._alpha.new_zeros(1)
        parts = [(z, kind.moments(mean, V, noise)) for z, mean, V in self._outputs(inputs)]
        mean, model, own = (torch.cat([kind.placed(m[i], z) for z, m in parts]).to(self.at.theta) for i in range(3))
        return Prediction(mean, (model + own).sqrt(), model.sqrt(), own.sqrt())

    @undisturbed
    def probabilities(self, inputs: Any, *, joint: bool = True) -> Tensor:
        """Of the classes of other inputs, like the logits, or of 1: the mean over θ, by MacKay's approximation.
        `joint` takes account of what the logits of a sample have in common; otherwise each is softened by itself."""
        kind = self.at.likelihood
        if not kind.classes:
            raise ValueError(f"{self.at.loss.display_name} has no classes: use predict(inputs)")
        parts = [
            kind.laid_out(kind.probabilities(*kind.sharpened(mean, V, self.sharpness), joint), z)
            for z, mean, V in self._outputs(inputs)
        ]
        return torch.cat(parts).to(self.at.theta)

    @property
    def plan(self) -> str:
        """How H is represented, in words"""
        modules = self.at.model.named_modules()
        active = [f"{type(m).__name__} {name!r}" for name, m in modules if m.training and isinstance(m, RANDOM)]
        modes = f"; {', '.join(active)} as in eval mode" if active else ""
        rest = f"; {self.others:,} other parameters are taken as known" if self.others else ""
        return f"{self.data.name}{rest}{modes}"

    def __repr__(self) -> str:
        at = self.at
        priors = ", ".join(f"{a:.3g}" for a in dict.fromkeys(self.alphas))
        noise = f", noise σ = {self.sigma}" if at.likelihood.noisy else ""
        noise += "" if self.temperature == 1 else f", temperature {self.temperature:.3g}"
        noise += "" if self.sharpness == 1 else f", sharpness {self.sharpness:.3g}"
        return (
            f"Posterior of {type(at.model).__name__}, {self.parameters.n:,} parameters, {at.loss.display_name}\n"
            f"    {self.plan}\n"
            f"    prior precision {priors}{noise}, effective parameters {self.gamma:.1f}"
        )


def reestimate(found: Posterior, groups: str | Sequence[Sequence[str]] | None = None) -> tuple[list[float], float]:
    """α by parameter and β for which γ and the residuals of these would be at the highest evidence. Parameters without
    a prior have none afterwards."""
    gammas, sizes = found.gamma_by_tensor, found.squares_by_tensor
    low, high = (found.mean_curvature * bound for bound in (LEAST, MOST))
    alpha = list(found.alphas)
    for members in grouped_names(found.names, groups):
        own = [i for i in members if found.alphas[i] > 0]
        gamma, size = sum(gammas[i] for i in own), sum(sizes[i] for i in own)
        for i in own:
            alpha[i] = min(max(gamma / size, low), high) if size > 0 else high
    return alpha, found.noise_given(found.gamma)


@undisturbed
def posterior(
    model: nn.Module,
    loss: Any,
    data: Any,
    *,
    weight_decay: float | WeightDecay | Sequence[float] | Mapping[str, float] | None = None,
    noise: float | Sequence[float] | Tensor | str | None = None,
    curvature: Representation | None = None,
    params: Iterable[Any] | str | None = None,
) -> Posterior:
    """The Laplace approximation of the posterior of a trained model: θ ~ N(θ̂, H⁻¹), H = −∂² log p(y|θ)p(θ).

    `data` are those it was trained on: (inputs, targets), with a weight for each sample as a third if it had one, which
    then counts as so many samples; a Dataset; or a DataLoader. ∂² is the generalised Gauss-Newton matrix.

    `weight_decay` is that of the training, the precision of a normal prior; also one number for every parameter tensor,
    in their order or by name, as `Posterior.weight_decay` has it. 0 is no prior at all. None: one prior precision
    for all parameters, that of the highest evidence at θ̂.

    `noise` of a squared error: None learns σ from the residuals, one for each output of a model with several (N, k),
    "shared" learns one for all; numbers are known σ.

    `curvature`: mq.Dense(), mq.Gram() or mq.Kronecker(); None is exact (Dense, or Gram with fewer rows than parameters)
    if there is memory and time for that, otherwise Kronecker, or the last linear layer alone if the layers have no such
    factors; `Posterior.plan` says what was taken. Their `chunk` is kept to; other options are for steps. `params` are
    the parameters that are uncertain, the others are taken as known: some of model.parameters(), or "last" for the last
    linear layer.

    The model is taken in eval mode, and left as it was. If θ̂ is further from a minimum of the loss than samples of the
    posterior are, a warning says so.

    Args:
        model: trained, in any mode.
        loss: with which it was trained.
        data: that have trained it.
        weight_decay: with which it was trained; None to find it.
        noise: σ of the targets; None to learn it.
        curvature: how H is represented; None for what fits.
        params: the parameters that are uncertain; None for all that train.

    Returns:
        The posterior, which predicts with standard deviations or probabilities, and samples.

    >>> result = mq.fit(model, (x, y), "mse", weight_decay=0.01)
    >>> posterior = mq.posterior(model, "mse", (x, y), weight_decay=0.01)
    >>> low, high = posterior.predict(x).interval(0.95)
    """
    check_places("mq.posterior(model, loss, data)", model, loss, data)
    found = laplace(model, loss, data, weight_decay, noise, curvature, params)
    if noise is None or isinstance(noise, str):
        check_counts(found.at.mean_weight)
    told = found.b is None and tell(found, weight_decay, TRAIN_ON)
    squares = found.at.squares
    several = isinstance(found.at.loss, Elementwise) and squares is not None and squares.ndim == 1 < squares.numel()
    found = found.by_output() if found.learns and noise is None and several else found
    if found.b is not None and not told:
        tell(found, weight_decay, ONE_NOISE.format(found.sigma))
    return found


def check_counts(mean: float) -> None:
    """Warns of weights that are no counts. Of 1/σ² with known σ they need not be."""
    if 1 / FAR < mean < FAR:
        return
    off = f"{mean:.3g} times too small" if mean > 1 else f"{1 / mean:.3g} times too large"
    warnings.warn(
        f"the weights of the samples have the mean {mean:.3g} and are no counts, but a sample of weight w is taken for "
        f"w samples, so that variances are about {off}: divide the weights by their mean. Weights 1/σ² of targets with "
        "known σ are right with noise=1.0",
        stacklevel=users(),
    )


def tell(found: Posterior, weight_decay: Any, why: str) -> bool:
    """Warns if θ̂ is no minimum; returns whether it did."""
    left = found.decrement() if weight_decay is not None else min(found.decrement(), found.decrement(prior=False))
    n, m = found.at.parameters.n, found.at.normaliser
    if left > max(NATS, SHARE * found.gamma):
        words = NO_MINIMUM.format(why, left, 0.5 * found.gamma)
    elif left > NATS and weight_decay is not None and found.learns and not any(found.alphas) and 2 * n > m:
        words = UNBOUNDED.format(n, m)
    else:
        return False
    warnings.warn(words, stacklevel=users())
    return True


def laplace(
    model: nn.Module, loss: Any, data: Any, weight_decay: Any = None, noise: Any = None,
    curvature: Representation | None = None, params: Iterable[Any] | str | None = None,
) -> Posterior:  # fmt: skip
    """The same with one noise for all outputs if it is learnt, as a mean of squares has it, and wherever θ̂ is: during
    training, for `reestimate`."""
    loss = resolve(loss)
    kind = likelihood_of(loss)
    check_curvature(curvature)
    if not kind.noisy and noise is not None:
        raise ValueError(
            f"noise={noise!r}: {loss.display_name} has no noise beside what the model returns, leave it out"
        )
    chosen = trainable(model, last_layer(model) if isinstance(params, str) and params == "last" else params)
    refuse_sharded(chosen, "mq.posterior")
    parameters = Parameters(model, chosen)
    weights, towards = decays(model, parameters, weight_decay)
    given = source(data, parameters.device, chosen[0].dtype)
    at = Expansion(model, loss, parameters, given, getattr(curvature, "chunk", None))
    beta, b = known_noise(at, noise)
    learns = kind.noisy and (noise is None or isinstance(noise, str))
    if learns and not any(weights) and weight_decay is not None and at.normaliser <= at.parameters.n:
        raise ValueError(
            f"{at.normaliser:g} targets for {at.parameters.n} parameters without a prior leave nothing to learn the "
            "noise from: pass noise=σ, or weight_decay=None for a prior by evidence, or train with weight_decay"
        )
    per_w = kind.unit / unit(loss, at.normaliser)  # α = w·β·this
    try:
        G = at.curvature(curvature, all(weights), b)
    except NoFactors as error:
        if curvature is not None or params is not None or isinstance(weight_decay, (list, tuple)):
            raise ValueError(f'{error}, or take params="last"') from error
        return laplace(model, loss, data, weight_decay, noise, None, "last")
    alphas = [w * beta * per_w for w in weights]
    first = Posterior(at, curvature, G, alphas, beta, towards, b, learns)
    if weight_decay is None:
        return first.tuned()
    if not learns:
        return first
    t = first.noise_given(first.gamma)  # α goes with β, and so γ does not depend on it
    return first.changed([t * a for a in alphas], t * beta, Scaled(first.precision, t))


def check_curvature(given: Any) -> None:
    """H is that of all data at once, by one of three representations: what is about steps alone has no meaning here."""
    if given is None:
        return
    if type(given) not in (Dense, Gram, Kronecker):
        words = repr(given) if isinstance(given, (str, type)) else brief(given)
        raise TypeError(
            f"curvature={words}: a posterior is made of mq.Dense(), mq.Gram(), which are exact, or mq.Kronecker(), "
            "which has factors of each layer; None chooses"
        )
    for option in fields(given):
        if option.repr and option.name != "chunk" and getattr(given, option.name) != option.default:
            raise ValueError(
                f"curvature={brief(given)}: {option.name} is about steps that follow each other, and H is that of all "
                "data at once: leave it out"
            )


def decays(model: nn.Module, parameters: Parameters, given: Any) -> tuple[list[float], Tensor | None]:
    """Weight decay of every parameter, and θ₀"""
    if isinstance(given, Mapping):  # by name, also of parameters that are certain
        missing = [name for name in parameters.names if name not in given]
        if missing:
            raise ValueError(f"weight_decay= has no number for parameter {missing[0]!r}: one for each; 0 is no prior")
        strange = set(given) - {name for name, _ in named_parameters(model)}
        if strange:
            raise ValueError(
                f"weight_decay= has a number for {min(map(str, strange))!r}, which is none of the parameters of the "
                f"model: {', '.join(parameters.names)}"
            )
        given = [given[name] for name in parameters.names]
    if isinstance(given, (list, tuple)):
        for w in given:
            check_weight(w)
        if len(given) != len(parameters):
            raise ValueError(
                f"weight_decay= has {len(given)} numbers, and there are {len(parameters)} parameters: one for each"
            )
        return [float(w) for w in given], None
    rule = WeightDecay.of(1.0 if given is None else given)
    if isinstance(rule.towards, str):
        raise ValueError(f"towards={rule.towards!r}: those weights are gone after training, pass them as tensors")
    spared = rule.spared(model, parameters)
    return [0.0 if free else rule.w for free in spared], rule.anchor(parameters, spared)


def known_noise(at: Expansion, given: Any) -> tuple[float, Tensor | None]:
    """β of all outputs, 1 if it is to be learnt, and that of each in units of it"""
    if given is None or (isinstance(given, str) and given == "shared"):
        return 1.0, None
    try:
        sigma = torch.as_tensor(given, dtype=torch.float64, device=at.squares.device)
    except (TypeError, ValueError, RuntimeError):
        sigma = torch.zeros(1)
    if not bool((sigma > 0).all() & sigma.isfinite().all()) or sigma.numel() == 0:
        raise ValueError(
            f'noise={given!r}: the standard deviation of the targets, above 0, "shared", or None to learn it'
        )
    if sigma.ndim == 0:
        return float(sigma) ** -2, None
    if sigma.shape != at.squares.shape:
        raise ValueError(
            f"noise= has the shape {tuple(sigma.shape)}, the outputs of a sample {tuple(at.squares.shape)}"
        )
    beta = 1 / float(sigma.square().mean())
    return beta, sigma.pow(-2) / beta


def last_layer(model: nn.Module) -> list[Tensor]:
    """The parameters of the last linear layer"""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    if not layers:
        raise ValueError('params="last": the model has no nn.Linear; pass the parameters of its last layer')
    return list(layers[-1].parameters())


# Every sample as the others predict it: one Newton step to where θ̂ and H would be without it.


def predicted(
    at: Expansion, H: Precision, tempers: Sequence[Temper], exact: Precision | None = None,
    new: Iterable[Batch] | None = None,
) -> list[float]:  # fmt: skip
    """−log p of all samples, each left out, of classes and for each of these; or of `new` ones, which H and θ̂ were not
    made of. `exact` is H as a sum over samples, if H is none: what a sample has moved follows from it, while variances
    stay those of H."""
    kind, loss, found = at.likelihood, at.likelihood.loss, []
    for part in (part for batch in (at.batches if new is None else new) for part in at.parts(batch)):
        z, mean, V = outputs(at, H, part.inputs)
        y, w = part.targets.to(z) if part.targets.is_floating_point() else part.targets, part.weight
        if new is None:
            own = V if exact is None else outputs(at, exact, part.inputs)[2]
            shift, others = without(own, loss.root(z, y, w).S, loss.group(loss.gradient(z, y, w)))
            mean, V = mean + shift, others if exact is None else V
        for T, s in tempers:
            likely = loss.ungroup(kind.averaged(*kind.sharpened(mean, T * V, s), True), z)
            found.append(weighted(loss.ell(likely, y), w).double().sum())
    total: list[float] = torch.stack(found).view(-1, len(tempers)).sum(0).tolist()
    return total


def outputs(at: Expansion, H: Precision, inputs: Any, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """z (N, *out), and by group its mean (N, P, C) and covariance JH⁻¹Jᵀ (N, P, C, C)"""
    z, mean, rows = at.functional(inputs)
    half = H.half(rows.flatten(0, 2)).unflatten(0, rows.shape[:3])
    return z, mean, temperature * half @ half.mT


def without(V: Tensor, S: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """By how much outputs move, and their covariance, without their own sample, SSᵀ and g its derivatives:
    (V⁻¹ − SSᵀ)⁻¹ = V + VS(1 − SᵀVS)⁻¹SᵀV (N, P, C, C), and that times g (N, P, C)"""
    VS = V @ S  # (N, P, C, r)
    e, Q = torch.linalg.eigh(S.mT @ VS)
    B = VS @ Q
    found = V + (B / (1 - e.clamp(0, OWN))[..., None, :]) @ B.mT
    return (found @ g[..., None])[..., 0], found
