"""The loss that a name or a torch.nn loss stands for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from .base import Loss
from .cross_entropy import CrossEntropy
from .elementwise import BinaryCrossEntropy, Huber, Poisson, Residual, SquaredError
from .outputs import Name
from .tasks import Tasks, Term

NAMES: dict[str, Loss] = {
    "mse": SquaredError(),
    "squared_error": SquaredError(),
    "cross_entropy": CrossEntropy(),
    "bce": BinaryCrossEntropy(),
    "bce_with_logits": BinaryCrossEntropy(),
    "huber": Huber(),
    "smooth_l1": Huber(),
    "poisson": Poisson(),
    "residual": Residual(),
}


def from_smooth_l1(loss: nn.SmoothL1Loss) -> Loss:
    """Smooth-L1 of β is Huber of δ = β, divided by β."""
    if not loss.beta > 0:
        raise ValueError(f"SmoothL1Loss(beta={loss.beta}) has no curvature anywhere: use a positive beta")
    return Huber(delta=loss.beta, factor=1 / loss.beta, reduction=loss.reduction)


def from_bce(loss: nn.BCEWithLogitsLoss) -> Loss:
    if loss.weight is not None:
        raise ValueError("BCEWithLogitsLoss(weight=…) is not supported: use pos_weight, or sample weights")
    return BinaryCrossEntropy(pos_weight=loss.pos_weight, reduction=loss.reduction)


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


MODULES: dict[type[nn.Module], Callable[[Any], Loss]] = {
    nn.MSELoss: lambda loss: SquaredError(reduction=loss.reduction),
    nn.CrossEntropyLoss: from_cross_entropy,
    nn.BCEWithLogitsLoss: from_bce,
    nn.HuberLoss: lambda loss: Huber(delta=loss.delta, reduction=loss.reduction),
    nn.SmoothL1Loss: from_smooth_l1,
    nn.PoissonNLLLoss: from_poisson,
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


INSTEAD: dict[type[Any], str] = {
    nn.BCELoss: "return logits and use nn.BCEWithLogitsLoss",
    nn.NLLLoss: "return logits and use nn.CrossEntropyLoss",
    nn.L1Loss: "it has no curvature; use nn.HuberLoss with a small delta",
}


def resolve(loss: Any) -> Loss:
    """The Loss that a name, a torch.nn loss or a Loss stands for, with its options; of a dict by the names of outputs,
    or a tuple by their positions, the sum of such losses."""
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, (Mapping, tuple, list)):
        return from_outputs(dict(loss if isinstance(loss, Mapping) else enumerate(loss)))
    if isinstance(loss, str):
        if loss in NAMES:
            return NAMES[loss]
        close = difflib.get_close_matches(loss.lower(), NAMES, n=1)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown loss {loss!r}.{meant} The names are {', '.join(NAMES)}")
    if type(loss) in MODULES:  # the type itself: a subclass may compute anything
        return MODULES[type(loss)](loss)
    if isinstance(loss, type):
        raise TypeError(f"loss must be an object, got the class {loss.__name__}: write {loss.__name__}()")
    known = ", ".join(module.__name__ for module in MODULES)
    way_out = INSTEAD.get(type(loss), f"pass a name ({', '.join(NAMES)}), one of torch.nn's {known}, or a losses.Loss")
    raise TypeError(f"{getattr(loss, '__name__', type(loss).__name__)} is not a supported loss: {way_out}")
