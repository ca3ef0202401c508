"""The conversion of a name, a torch.nn loss or a function into a loss."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
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


def from_smooth_l1(loss: nn.SmoothL1Loss) -> Loss:
    """Smooth-L1 with β is Huber with δ = β, divided by β; with β = 0 it is the absolute error."""
    if loss.beta == 0:
        return AbsoluteError(reduction=loss.reduction)
    if not loss.beta > 0:
        raise ValueError(f"SmoothL1Loss(beta={loss.beta}): beta must not be negative")
    return Huber(delta=loss.beta, factor=1 / loss.beta, reduction=loss.reduction)


def from_poisson(loss: nn.PoissonNLLLoss) -> Loss:
    if not loss.log_input:
        raise ValueError("PoissonNLLLoss(log_input=False) is not supported: return the log of the rate, log_input=True")
    if loss.full:
        raise ValueError("PoissonNLLLoss(full=True) is not supported: its extra term is a constant, leave it out")
    return Poisson(reduction=loss.reduction)


def from_cross_entropy(loss: nn.CrossEntropyLoss) -> Loss:
    return CrossEntropy(
        label_smoothing=loss.label_smoothing,
        class_weight=loss.weight,
        ignore_index=loss.ignore_index,
        reduction=loss.reduction,
        class_dim=1,
    )


def from_nll(loss: nn.NLLLoss) -> Loss:
    return NegativeLogLikelihood(class_weight=loss.weight, ignore_index=loss.ignore_index, reduction=loss.reduction)


def from_kl(loss: nn.KLDivLoss) -> Loss:
    batchmean = loss.reduction == "batchmean"
    reduction = "mean" if batchmean else loss.reduction
    return KLDivergence(log_target=loss.log_target, batchmean=batchmean, reduction=reduction)


def from_multi_label(loss: nn.MultiLabelSoftMarginLoss) -> Loss:
    """The mean over the classes and then over the samples is the mean over all outputs."""
    if loss.reduction == "sum":
        raise ValueError(
            'MultiLabelSoftMarginLoss(reduction="sum") is not supported, for it divides by the number C of classes: '
            'use losses.BinaryCrossEntropy(reduction="sum", factor=1 / C)'
        )
    return BinaryCrossEntropy(output_weight=loss.weight, reduction=loss.reduction)


MODULES: dict[type[nn.Module], Callable[[Any], Loss]] = {
    nn.MSELoss: lambda loss: SquaredError(reduction=loss.reduction),
    nn.CrossEntropyLoss: from_cross_entropy,
    nn.BCEWithLogitsLoss: lambda loss: BinaryCrossEntropy(
        pos_weight=loss.pos_weight, output_weight=loss.weight, reduction=loss.reduction
    ),
    nn.BCELoss: lambda loss: BinaryProbabilities(output_weight=loss.weight, reduction=loss.reduction),
    nn.NLLLoss: from_nll,
    nn.KLDivLoss: from_kl,
    nn.HuberLoss: lambda loss: Huber(delta=loss.delta, reduction=loss.reduction),
    nn.SmoothL1Loss: from_smooth_l1,
    nn.L1Loss: lambda loss: AbsoluteError(reduction=loss.reduction),
    nn.PoissonNLLLoss: from_poisson,
    nn.GaussianNLLLoss: lambda loss: GaussianNLL(variance=True, eps=loss.eps, full=loss.full, reduction=loss.reduction),
    nn.MultiLabelSoftMarginLoss: from_multi_label,
    nn.SoftMarginLoss: lambda loss: SoftMargin(reduction=loss.reduction),
}


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


# Functions of torch.nn.functional have the options of these modules, with the same defaults.
FUNCTIONS: dict[Callable[..., Any], type[nn.Module]] = {
    F.mse_loss: nn.MSELoss,
    F.cross_entropy: nn.CrossEntropyLoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.nll_loss: nn.NLLLoss,
    F.kl_div: nn.KLDivLoss,
    F.huber_loss: nn.HuberLoss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.l1_loss: nn.L1Loss,
    F.poisson_nll_loss: nn.PoissonNLLLoss,
    F.gaussian_nll_loss: nn.GaussianNLLLoss,
    F.multilabel_soft_margin_loss: nn.MultiLabelSoftMarginLoss,
    F.soft_margin_loss: nn.SoftMarginLoss,
}

PAIRS = "it takes several outputs: return them as a tuple, and pass a function of that tuple, with one value per sample"
ONCE = "torch differentiates it only once, and there is no curvature; write it as a function of torch operations"
INSTEAD: dict[Any, str] = {
    nn.CTCLoss: "torch differentiates it only once, and it takes the lengths of inputs and targets beside them",
    nn.MarginRankingLoss: PAIRS,
    nn.CosineEmbeddingLoss: PAIRS,
    nn.TripletMarginLoss: PAIRS,
    nn.TripletMarginWithDistanceLoss: PAIRS,
    nn.MultiMarginLoss: ONCE,
    nn.MultiLabelMarginLoss: ONCE,
    nn.AdaptiveLogSoftmaxWithLoss: "it has parameters that would not train; put it into the model",
    F.ctc_loss: "torch differentiates it only once, and it takes the lengths of inputs and targets beside them",
    F.margin_ranking_loss: PAIRS,
    F.cosine_embedding_loss: PAIRS,
    F.triplet_margin_loss: PAIRS,
    F.triplet_margin_with_distance_loss: PAIRS,
    F.multi_margin_loss: ONCE,
    F.multilabel_margin_loss: ONCE,
}


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
    if type(loss) in MODULES:  # the type itself: a subclass may compute anything
        return MODULES[type(loss)](loss)
    fn = loss.func if isinstance(loss, functools.partial) else loss
    known = _functional(loss)
    if known is not None:
        return resolve(known)
    reason = INSTEAD.get(_hashed(fn), INSTEAD.get(type(fn)))
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


def _functional(loss: Any) -> nn.Module | None:
    """The torch.nn loss that is the same as a function of torch.nn.functional, with the options of a partial; None if
    there is none, or if the function returns something else: one value per output, or a loss with other options."""
    fn, args, options = loss, (), {}
    if isinstance(loss, functools.partial):
        fn, args, options = loss.func, loss.args, loss.keywords
    if _hashed(fn) not in FUNCTIONS or args or options.get("reduction") == "none":
        return None
    try:
        return FUNCTIONS[fn](**options)
    except TypeError:  # an option that the module does not have
        return None


def _hashed(fn: Any) -> Any:
    """fn as a key, or None: a user's object may have no hash."""
    try:
        hash(fn)
    except TypeError:
        return None
    return fn
