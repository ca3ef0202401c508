"""The conversion of a name, a torch.nn loss or a function into a loss."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import nn

from .base import BinaryCrossEntropy, Huber, Loss, Name, Poisson, Residual, SquaredError
from .classes import (
    BinaryProbabilities,
    CrossEntropy,
    Hinge,
    KLDivergence,
    NegativeLogLikelihood,
    Ordinal,
    SoftMargin,
)
from .function import Function
from .regression import AbsoluteError, Gamma, GaussianNLL, NegativeBinomial, Quantile, StudentT
from .tasks import Tasks, Term

NAMES: dict[str, Loss] = {
    "mse": SquaredError(),
    "squared_error": SquaredError(),
    "cross_entropy": CrossEntropy(),
    "bce": BinaryCrossEntropy(),
    "bce_with_logits": BinaryCrossEntropy(),
    "binary_probabilities": BinaryProbabilities(),
    "nll": NegativeLogLikelihood(),
    "kl_div": KLDivergence(),
    "huber": Huber(),
    "smooth_l1": Huber(),
    "l1": AbsoluteError(),
    "quantile": Quantile(),
    "student_t": StudentT(),
    "poisson": Poisson(),
    "negative_binomial": NegativeBinomial(),
    "gamma": Gamma(),
    "gaussian_nll": GaussianNLL(),
    "ordinal": Ordinal(),
    "hinge": Hinge(),
    "soft_margin": SoftMargin(),
    "residual": Residual(),
}


def converted(loss: Any, kind: type[Loss], **more: Any) -> Loss:
    """The loss of this kind with the options of a loss of torch.nn, whose names are the same, but for the weight."""
    names = {f.name: "weight" if f.name in ("class_weight", "output_weight") else f.name for f in fields(kind)}
    return kind(**{ours: getattr(loss, theirs) for ours, theirs in names.items() if hasattr(loss, theirs)} | more)


def from_smooth_l1(loss: nn.SmoothL1Loss) -> Loss:
    """Smooth-L1 with β is Huber with δ = β, divided by β; with β = 0 it is the absolute error."""
    if loss.beta == 0:
        return converted(loss, AbsoluteError)
    if not loss.beta > 0:
        raise ValueError(f"SmoothL1Loss(beta={loss.beta}): beta must not be negative")
    return converted(loss, Huber, delta=loss.beta, factor=1 / loss.beta)


def from_poisson(loss: nn.PoissonNLLLoss) -> Loss:
    if not loss.log_input:
        raise ValueError("PoissonNLLLoss(log_input=False) is not supported: return the log of the rate, log_input=True")
    if loss.full:
        raise ValueError("PoissonNLLLoss(full=True) is not supported: its extra term is a constant, leave it out")
    return converted(loss, Poisson)


def from_kl(loss: nn.KLDivLoss) -> Loss:
    batchmean = loss.reduction == "batchmean"
    return converted(loss, KLDivergence, batchmean=batchmean, reduction="mean" if batchmean else loss.reduction)


def from_multi_label(loss: nn.MultiLabelSoftMarginLoss) -> Loss:
    """The mean over the classes and then over the samples is the mean over all outputs."""
    if loss.reduction == "sum":
        raise ValueError(
            'MultiLabelSoftMarginLoss(reduction="sum") is not supported, for it divides by the number C of classes: '
            'use losses.BinaryCrossEntropy(reduction="sum", factor=1 / C)'
        )
    return converted(loss, BinaryCrossEntropy)


# The losses of torch.nn, each with the function of torch.nn.functional that has its options and defaults, and with the
# class here, or how it is made.
TORCH: list[tuple[type[nn.Module], Callable[..., Any], Callable[[Any], Loss]]] = [
    (nn.MSELoss, F.mse_loss, partial(converted, kind=SquaredError)),
    (nn.CrossEntropyLoss, F.cross_entropy, partial(converted, kind=CrossEntropy, class_dim=1)),
    (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits, partial(converted, kind=BinaryCrossEntropy)),
    (nn.BCELoss, F.binary_cross_entropy, partial(converted, kind=BinaryProbabilities)),
    (nn.NLLLoss, F.nll_loss, partial(converted, kind=NegativeLogLikelihood)),
    (nn.KLDivLoss, F.kl_div, from_kl),
    (nn.HuberLoss, F.huber_loss, partial(converted, kind=Huber)),
    (nn.SmoothL1Loss, F.smooth_l1_loss, from_smooth_l1),
    (nn.L1Loss, F.l1_loss, partial(converted, kind=AbsoluteError)),
    (nn.PoissonNLLLoss, F.poisson_nll_loss, from_poisson),
    (nn.GaussianNLLLoss, F.gaussian_nll_loss, partial(converted, kind=GaussianNLL, variance=True)),
    (nn.MultiLabelSoftMarginLoss, F.multilabel_soft_margin_loss, from_multi_label),
    (nn.SoftMarginLoss, F.soft_margin_loss, partial(converted, kind=SoftMargin)),
]

# Why others cannot be taken.
INSTEAD: dict[str, tuple[Callable[..., Any], ...]] = {
    "torch differentiates it only once, and it takes the lengths of inputs and targets beside them": (
        nn.CTCLoss, F.ctc_loss,
    ),
    "it takes several outputs: return them as a tuple, and pass a function of that tuple, with one value per sample": (
        nn.MarginRankingLoss, nn.CosineEmbeddingLoss, nn.TripletMarginLoss, nn.TripletMarginWithDistanceLoss,
        F.margin_ranking_loss, F.cosine_embedding_loss, F.triplet_margin_loss, F.triplet_margin_with_distance_loss,
    ),
    "torch differentiates it only once, and there is no curvature; write it as a function of torch operations": (
        nn.MultiMarginLoss, nn.MultiLabelMarginLoss, F.multi_margin_loss, F.multilabel_margin_loss,
    ),
    "it has parameters that would not train; put it into the model": (nn.AdaptiveLogSoftmaxWithLoss,),
}  # fmt: skip


def from_outputs(losses: dict[Name, Any]) -> Loss:
    """{name: loss}, {name: (loss, weight)}, or {name: [several of these]}; an output with None has no loss."""
    tasks = []
    for name, value in losses.items():
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            loss, weight = one if isinstance(one, tuple) and len(one) == 2 else (one, 1.0)
            if isinstance(loss, (Mapping, tuple, list)):
                raise TypeError(
                    f"the loss of output {name!r} is {value!r}: a loss, (loss, weight), or a list of these is needed"
                )
            tasks.append(Term(name, resolve(loss), weight))
    if not tasks:
        raise ValueError(f'loss={losses!r} has no loss in it: name an output, such as {{"logits": "cross_entropy"}}')
    return Tasks(tasks=tuple(tasks))


# Names in other libraries that resemble the name of a different loss.
ELSEWHERE = {"mae": "l1", "absolute_error": "l1", "pinball": "quantile"}


def resolve(loss: Any) -> Loss:
    """The Loss for a name, a torch.nn loss, a function of outputs and targets, or a Loss, with its options; for a dict
    by names of outputs, or a tuple by their positions, the sum of such losses.

    Args:
        loss: a loss as `mq.LM` accepts it.

    Returns:
        An object of `mq.losses`.

    >>> mq.losses.resolve("huber")
    Huber(reduction='mean', factor=1.0, reported=None, delta=1.0)
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, (Mapping, tuple, list)):
        return from_outputs(dict(loss if isinstance(loss, Mapping) else enumerate(loss)))
    if isinstance(loss, str):
        return _named(loss)
    if isinstance(loss, type):
        raise TypeError(f"loss must be an object, got the class {loss.__name__}: write {loss.__name__}()")
    fn, args, options = loss, (), {}
    if isinstance(loss, partial):
        fn, args, options = loss.func, loss.args, loss.keywords
    for module, function, make in TORCH:
        if type(loss) is module:  # the type itself: a subclass may compute anything
            return make(loss)
        if fn is function and not args and options.get("reduction") != "none" and (made := _made(module, options)):
            return make(made)
    reason = next((why for why, they in INSTEAD.items() if any(one is fn or one is type(fn) for one in they)), None)
    if callable(loss) and reason is None:
        return Function(loss)
    way_out = f"pass a name ({', '.join(NAMES)}), a loss of torch.nn, a losses.Loss, or a function fn(outputs, targets)"
    name = getattr(fn, "__name__", type(fn).__name__)
    raise TypeError(f"{name} is not a supported loss: {reason or way_out}")


def _named(name: str) -> Loss:
    if name in NAMES:
        return NAMES[name]
    known = ELSEWHERE.get(name.lower())
    close = [known] if known else difflib.get_close_matches(name.lower(), NAMES, n=1)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"unknown loss {name!r}.{meant} The names are {', '.join(NAMES)}")


def _made(module: type[nn.Module], options: dict[str, Any]) -> nn.Module | None:
    """None for an option that the module does not have, such as a weight of each output."""
    try:
        return module(**options)
    except TypeError:
        return None
