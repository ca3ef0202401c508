"""Checks of the arguments of LM, when it is created and before every step, and short texts for its parts."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from .curvature.contract import Representation
from .jacobian.objective import Rows
from .model.anatomy import held
from .model.checks import check_coupling, check_usable
from .model.parameters import named_parameters
from .model.shards import let_go, sharded
from .ranks import Ranks
from .values import MAX, short

# A learning rate below this one is probably a mistake: it suits Adam and SGD, but LM's is a factor of the full step.
SMALL = 0.05


class Unscaled:
    """An optimizer that torch.amp.GradScaler must not be used with."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """The property that GradScaler.step reads first."""
        raise TypeError(
            "LM takes no GradScaler: that scales the loss for the sake of .backward(), and LM forms its gradients "
            "itself, from cotangents of ordinary size. Call opt.step(inputs, targets), in torch.autocast as it is"
        )


def check_ready(model: nn.Module, params: Sequence[Tensor], lr: float, by_sample: bool, averaged: bool) -> None:
    """Checks for everything that may have changed since the optimizer was created."""
    if averaged:
        raise RuntimeError(
            "a step within `with opt.averaged():` would be lost when the weights are put back: end the block first"
        )
    if by_sample:
        check_coupling(model)
    check_rate(lr)
    if torch.is_inference_mode_enabled():
        raise RuntimeError("a step needs gradients: call it outside torch.inference_mode()")
    check_usable(model, tensors := held(model), params)
    own = {id(p) for p in tensors}
    if not all(id(p) in own for p in params):
        raise ValueError("the model's parameters were replaced since this LM was made: make a new one")
    frozen = {id(p) for p in params if not p.requires_grad}
    for name in [name for name, p in named_parameters(model) if id(p) in frozen] if frozen else []:
        raise ValueError(f"parameter {name!r} was frozen since this LM was made: make a new one, or unfreeze it")


def transformed(call: str, what: str) -> ValueError:
    return ValueError(
        f"{call} is called inside a torch.func transform such as grad, jacrev or vmap, which differentiate or map "
        f"functions, and {what} is none: call it outside"
    )


def check_batch(inputs: Any, targets: Any) -> None:
    """Checks for a closure instead of the batch, as other optimizers take it, or for nothing."""
    if inputs.__class__ is Tensor:
        return
    # Not every callable is a closure: a graph of PyG is callable as well.
    closure = inspect.isroutine(inputs) or isinstance(inputs, (partial, type))
    if closure or (inputs is None and targets is None):
        raise TypeError(
            "LM.step takes the batch, step(inputs, targets), not a closure: it evaluates the model itself, because it "
            "needs the outputs and not only the loss. If a trainer calls the step of an optimizer without the batch, "
            "take marquardt.lightning.LMModule with Lightning, marquardt.huggingface.LMTrainer with transformers, and "
            "prepared.optimizer.step(inputs, targets) with accelerate"
        )


def check_places(call: str, model: Any, loss: Any, data: Any) -> None:
    """Checks for arguments that were exchanged, and for a class, or inputs alone, instead of a model or a loss."""
    if isinstance(model, type):
        raise TypeError(f"{call} takes a model and not its class: make one, {model.__name__}(…)")
    if not isinstance(model, nn.Module):
        swapped = next((name for name, other in (("data", data), ("loss", loss)) if isinstance(other, nn.Module)), None)
        hint = "" if swapped is None else f"; the model seems to be in the place of the {swapped}"
        raise TypeError(f"{call} takes an nn.Module as its model, not a {type(model).__name__}{hint}")
    if holds_data(loss):
        given = "both are tensors" if holds_data(data) else f"and the data are {data!r}"[:80]
        raise TypeError(
            f"{call}: the loss is a {type(loss).__name__}, {given}. Inputs and targets are one argument, the loss "
            'another: data=(x, y), loss="mse"'
        )


def holds_data(item: Any) -> bool:
    """Whether the item is a kind of data and not a loss: a name with its option is a tuple as well."""
    if isinstance(item, (tuple, list)):
        return any(map(holds_data, item))
    return isinstance(item, (Tensor, Dataset, DataLoader)) or hasattr(item, "__array__")


def check_rate(lr: Any) -> None:
    number = isinstance(lr, (int, float)) and not isinstance(lr, bool)
    one = isinstance(lr, Tensor) and lr.numel() == 1 and not (lr.is_meta or lr.is_complex() or lr.dtype == torch.bool)
    if not (number or one):
        raise TypeError(f"lr={short(lr)}: the learning rate must be a number; LM's natural one is 1")
    if not 0 <= lr <= MAX:
        raise ValueError(f"lr={lr!r}: the learning rate must be finite and at least 0; LM's natural one is 1")


def warn_of_small(lr: float) -> None:
    """Warns of a learning rate that is usual for first-order methods, if the user sets it; schedulers may lower it
    later."""
    if 0 < lr < SMALL:
        warnings.warn(
            f"lr={lr:g} makes every step {1 / lr:.3g} times shorter than the step of LM, which has the right length "
            "already: leave lr at 1; λ controls the step length. A scheduler of torch may lower lr later on",
            stacklevel=users(),
        )


def check_options(attempts: Any, capture: Any, radius: Any, ranks: Ranks) -> None:
    if not isinstance(attempts, int) or attempts < 1:
        raise ValueError(f"attempts={attempts!r}: how many λ a step may try, an integer of at least 1")
    if capture is not None and not isinstance(capture, bool):
        raise ValueError(f"capture={capture!r}: True, False, or None to record steps that come again")
    if capture and ranks.several:
        raise ValueError("capture=True: steps of several ranks are not recorded as CUDA graphs, leave it out")
    check_radius(radius)


def check_radius(radius: Any) -> None:
    number = isinstance(radius, (int, float)) and not isinstance(radius, bool)
    if radius is not None and not (number and 0 < radius < math.inf):
        raise ValueError(f"radius={radius!r}: the longest step, a finite number above 0, or None for no bound")


def check_sums(representation: Representation, single: bool, ranks: Ranks, sharded: bool = False) -> None:
    """Refuses several batches if the representation needs all rows at once, and several ranks if the representation
    cannot take sums over them."""
    if sharded:
        check_shared(representation)
        return
    if ranks.several and not representation.adds_up:
        raise ValueError(
            f"{type(representation).__name__} does not add up over the ranks of a process group: take what it adds up "
            "over lin.pieces() through lin.ranks.sum() and say adds_up = True (docs/extending.md), or use mq.Dense()"
        )
    if representation.needs.together and not single:
        raise ValueError(
            f"{type(representation).__name__} needs all rows of a step at once: use curvature=mq.Dense() or "
            "mq.MatrixFree() with step_over"
        )


def check_shards(
    model: nn.Module, parts: Any, groups: Sequence[dict[str, Any]], single: bool = True, towards: object = None
) -> None:
    """If the parameters are sharded: checks for parts that need all of them on one rank, and releases gathered ones."""
    if not any(sharded(p) for group in groups for p in group["params"]):
        return
    let_go(model)
    check_coupling(model)
    check_shared(parts.curvature)
    for name in ("damping", "momentum"):
        part = getattr(parts, name)
        if part is not None and not getattr(part, "shares", False):
            raise ValueError(
                f"{name}={brief(part)} is not known to work with sharded parameters, of which a rank has part of every "
                "layer: use mq.MeanEigenvalue(), mq.Identity() or mq.MaxDiagonal() for damping and "
                "mq.AdaptiveMomentum() or None for momentum; a part of your own that adds up over n by "
                "G.parameters.total says shares = True (docs/sharded.md)"
            )
    if parts.rows is not None and parts.rows.joined:
        raise ValueError(
            f"rows={brief(parts.rows)}: rows of all samples together are not formed with sharded parameters"
        )
    if not isinstance(towards, (str, type(None))):
        raise ValueError('towards= takes "start" or None if the parameters are sharded: other tensors are not cut')
    if any(isinstance(group.get("weight_decay"), Tensor) for group in groups):
        raise ValueError("a group's weight_decay is a tensor, which is not cut if the parameters are sharded: a number")
    if not single:  # ranks that gather weights in every pass might have different numbers of batches
        raise ValueError(
            "step_over does not take a model whose parameters are sharded: take a step on one batch, opt.step(...)"
        )


def check_shared(representation: Representation) -> None:
    """Refuses sharded parameters if the representation needs all parameters on one rank."""
    if not representation.shares:
        raise ValueError(
            f"curvature={brief(representation)} needs all parameters on one rank, and those of the model are sharded: "
            "use mq.Gram() or mq.MatrixFree(), or pass the plain model"
        )
    if representation.needs.chunk is not None:
        raise ValueError(
            f"curvature={brief(representation)}: with sharded parameters all ranks make their passes together, each "
            "with all of its samples; leave chunk out"
        )


def brief(part: Any) -> str:
    """A part as text, with the options that differ from its defaults."""
    if not is_dataclass(part):
        return str(part)
    values = [(f.name, getattr(part, f.name), f.default) for f in fields(part) if f.repr]
    options = [f"{k}={v!r}" for k, v, usual in values if v is not usual and (isinstance(v, Tensor) or v != usual)]
    return f"{type(part).__name__}({', '.join(options)})"


def check_parts(parts: object) -> None:
    for name, part in vars(parts).items():
        if name != "radius":
            check_part(name, part)


def check_part(name: str, part: Any) -> None:
    """Checks that a part is an object: not a name, a class, or a part for another purpose."""
    method, examples, optional = {
        "curvature": ("represent", "mq.Dense() or mq.Gram()", False),
        "rows": ("draw", "mq.Exact() or mq.Sampled(1)", True),
        "damping": ("update", "mq.Identity() or mq.MaxDiagonal()", False),
        "schedule": ("initial", "mq.GainRatio() or mq.Constant(1.0)", False),
        "momentum": ("refine", "mq.AdaptiveMomentum() or None", True),
        "acceptance": ("judge", "mq.Decrease() or mq.Uphill()", False),
        "line_search": ("search", "mq.Grid() or None", True),
        "average": ("restarts", "mq.EMA() or None", True),
    }[name]
    if part is None and optional:
        return
    if isinstance(part, type):
        raise TypeError(f"{name}={part.__name__} is a class: pass an object of it, {part.__name__}()")
    # A schedule and an average also have a method `update`.
    kin = method == "update" and (hasattr(part, "initial") or hasattr(part, "restarts"))
    base = {"curvature": Representation, "rows": Rows}.get(name, object)  # the base classes of these two have defaults
    if not hasattr(part, method) or kin or not isinstance(part, base):
        raise TypeError(f"{name}={part!r} is no {name.replace('_', ' ')}: pass for example {examples}")


def users() -> int:
    """The stack level of the first call outside this package, for a warning: torch and schedulers wrap `step`, and a
    `with` block is entered by contextlib."""
    frame, level, wraps = inspect.currentframe(), 0, ("marquardt", "torch", "contextlib")
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in wraps:
        frame, level = frame.f_back, level + 1
    return level
