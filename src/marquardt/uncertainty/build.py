"""mq.posterior: the posterior of a trained model, its prior and its noise from what is given or from the evidence."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import brief, check_places, users
from ..curvature import Dense, Gram, Kronecker, Representation
from ..curvature.kronecker import NoFactors
from ..losses import Elementwise, resolve
from ..model.checks import trainable
from ..model.decay import WeightDecay, check_weight
from ..model.parameters import Parameters, named_parameters
from ..model.shards import refuse_sharded
from ..sources import source
from ..surroundings import undisturbed
from .evidence import unit
from .expansion import Expansion
from .likelihood import likelihood_of
from .posterior import Posterior

# −log p(θ|y) that a step would take off θ, in nats, beyond which the posterior is said to be of another θ; or this
# share of γ: a sample of the posterior is γ/2 above the minimum, and a θ that is no further from it than samples are
# has errors of the size that they say.
NATS, SHARE = 1.0, 0.5

# How many times more or less than samples there are weights may add up to, if they are no whole numbers.
FAR = 1.5

TRAIN_ON = "weight decay: train on, and pass the weight_decay of the training"
ONE_NOISE = (
    "noise, σ = {} by output, as the training took all outputs for equally noisy, and has smoothed the quiet ones "
    'too much: train with targets in units of their noise, or pass noise="shared"'
)


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
    """Warns if θ̂ is no minimum, and says whether it did."""
    left = found.decrement() if weight_decay is not None else min(found.decrement(), found.decrement(prior=False))
    if left <= max(NATS, SHARE * found.gamma):
        return False
    warnings.warn(
        f"the parameters are no minimum of the loss with this {why}. A step would lower "
        f"−log p(θ|y) by {left:.3g}, and a sample of the posterior is {0.5 * found.gamma:.3g} above its minimum; "
        "variances are those of a minimum",
        stacklevel=users(),
    )
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
    given = source(data, device=parameters.device, dtype=chosen[0].dtype)
    at = Expansion(model, loss, parameters, given, getattr(curvature, "chunk", None))
    known = known_noise(at, noise)
    if kind.noisy and known is None and not any(weights) and weight_decay is not None:
        check_left(at)
    beta, b = (1.0, None) if known is None else known
    per_w = kind.unit / unit(loss, at.normaliser)  # α = w·β·this
    try:
        G = at.curvature(curvature, all(weights), b)
    except NoFactors as error:
        if curvature is not None or params is not None or isinstance(weight_decay, (list, tuple)):
            raise ValueError(f'{error}, or take params="last"') from error
        return laplace(model, loss, data, weight_decay, noise, None, "last")
    alphas = [w * beta * per_w for w in weights]
    first = Posterior(at, curvature, G, alphas, beta, towards, b, kind.noisy and known is None)
    if weight_decay is None:
        return first.tuned()
    if not first.learns:
        return first
    return first.scaled(first.noise_given(first.gamma))  # α goes with β, and so γ does not depend on it


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
    if isinstance(given, Mapping):
        given = by_name(model, parameters, given)
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


def by_name(model: nn.Module, parameters: Parameters, given: Mapping[str, Any]) -> list[Any]:
    """Of the uncertain parameters; others of the model may be in it"""
    missing = [name for name in parameters.names if name not in given]
    if missing:
        raise ValueError(f"weight_decay= has no number for parameter {missing[0]!r}: one for each; 0 is no prior")
    strange = set(given) - {name for name, _ in named_parameters(model)}
    if strange:
        raise ValueError(
            f"weight_decay= has a number for {min(map(str, strange))!r}, which is none of the parameters of the model: "
            f"{', '.join(parameters.names)}"
        )
    return [given[name] for name in parameters.names]


def known_noise(at: Expansion, given: Any) -> tuple[float, Tensor | None] | None:
    """β of all outputs, and that of each in units of it; None if it is to be learnt"""
    if given is None or (isinstance(given, str) and given == "shared"):
        return None
    assert at.squares is not None
    try:
        sigma = torch.as_tensor(given, dtype=torch.float64, device=at.squares.device)
    except (TypeError, ValueError, RuntimeError):
        sigma = None
    if sigma is None or not bool((sigma > 0).all() & sigma.isfinite().all()) or sigma.numel() == 0:
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


def check_left(at: Expansion) -> None:
    """Residuals without a prior say nothing of the noise if there are as many parameters."""
    if at.normaliser <= at.parameters.n:
        raise ValueError(
            f"{at.normaliser:g} targets for {at.parameters.n} parameters without a prior leave nothing to learn the "
            "noise from: pass noise=σ, or train with weight_decay"
        )


def last_layer(model: nn.Module) -> list[Tensor]:
    """The parameters of the last linear layer"""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    if not layers:
        raise ValueError('params="last": the model has no nn.Linear; pass the parameters of its last layer')
    return list(layers[-1].parameters())
