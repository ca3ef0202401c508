"""Why a model has failed on a batch: what the layer that failed takes, what it was given, and the way out."""

from __future__ import annotations

import inspect
import math
from typing import Any

from torch import Tensor, nn

from ..memory import out_of_memory
from ..ranks import RankError
from .batch import Batch, tensors

# What a model raises if a batch does not fit; an error of another kind is the model's own.
FAILURES = (RuntimeError, IndexError, ValueError, TypeError)


def explained(error: Exception, model: nn.Module, batch: Batch, p: Tensor) -> Exception | None:
    """The same error with its reason, if the batch is to blame; `p` is one of the parameters."""
    if out_of_memory(error) or isinstance(error, RankError):
        return None
    if isinstance(error, TypeError):
        reason = unbound(model, batch.inputs)
        return None if reason is None else TypeError(f"the model cannot be called: {reason} ({error})")
    reason = unfit(error, model, batch)
    if reason is None and not isinstance(error, ValueError):
        reason = unlike(error, batch.inputs, p) or odd(batch)
    return None if reason is None else ValueError(f"the model failed, since {reason} ({error})")


def unbound(model: nn.Module, inputs: Any) -> str | None:
    """Several inputs, or other names, than the model has arguments"""
    args = tuple(inputs) if isinstance(inputs, (tuple, list)) else ()
    named = inputs if isinstance(inputs, dict) else {}
    if not args and not named:
        return None
    try:
        inspect.signature(model.forward).bind(*args, **named)
    except TypeError:
        call = "model(**inputs)" if named else "model(*inputs)"
        return (
            f"inputs in a {type(inputs).__name__} go to the model as {call}: if this one holds inputs and targets, "
            "write opt.step(inputs, targets)"
        )
    except ValueError:  # a forward without a signature
        return None
    return None


def unlike(error: Exception, inputs: Any, p: Tensor) -> str | None:
    """Inputs on another device, or of another precision"""
    if not isinstance(error, RuntimeError):
        return None
    for t in tensors(inputs):
        if t.device != p.device:
            return f"the inputs are on {t.device}, the parameters on {p.device}: move them with .to()"
        if t.dtype != p.dtype:
            return f"the inputs are {t.dtype}, the parameters {p.dtype}: convert the inputs with .to({p.dtype})"
    return None


def odd(batch: Batch) -> str | None:
    """Inputs that have no row for each sample"""
    x, y = batch.inputs, batch.targets
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    if x.ndim == 1:
        return f"the inputs have the shape {shape(x)}: models take a row for each sample, such as x.unsqueeze(-1)"
    if isinstance(y, Tensor) and y.ndim and len(x) != len(y):
        turned = ", as x.T has" if x.ndim == 2 and x.shape[1] == len(y) else ""
        return f"the inputs have the shape {shape(x)}, the targets {shape(y)}: both need a row for each sample{turned}"
    return None


def unfit(error: Exception, model: nn.Module, batch: Batch) -> str | None:
    """The layer that failed, if it was given what it does not take"""
    layer, given = failed(error)
    if layer is None or not isinstance(given, Tensor):
        return None
    told = takes(layer, given)
    if told is None:
        return None
    name = next((name for name, m in model.named_modules() if m is layer), "")
    kind = f"{type(layer).__name__} {name!r}" if name else type(layer).__name__
    wanted, got = told
    first = isinstance(batch.inputs, Tensor) and given.shape == batch.inputs.shape
    hint = way_out(layer, given, batch.targets) if first else ""
    return f"layer {kind} takes {wanted}, and {'the inputs have' if first else 'it was given'} {got}{hint}"


def failed(error: Exception) -> tuple[nn.Module | None, Any]:
    """The innermost layer of torch.nn that was being called, and its input"""
    found: tuple[nn.Module | None, Any] = None, None
    trace = error.__traceback__
    while trace is not None:
        own = trace.tb_frame.f_locals
        layer = own.get("self")
        if isinstance(layer, nn.Module) and "input" in own:
            found = layer, own["input"]
        trace = trace.tb_next
    return found


def takes(layer: nn.Module, x: Tensor) -> tuple[str, str] | None:
    """What a layer takes, and what of x is something else; None if x is what it takes, or if nobody knows"""
    got = f"the shape {shape(x)}"
    if isinstance(layer, nn.Linear):
        return (f"(N, {layer.in_features})", got) if differs(x, -1, layer.in_features) else None
    if isinstance(layer, nn.modules.conv._ConvNd):
        places = len(layer.kernel_size)
        wanted = ", ".join(["N", str(layer.in_channels), *("L" if places == 1 else "DHW"[-places:])])
        wrong = x.ndim != places + 2 or x.shape[1] != layer.in_channels
        return (f"({wanted})", got) if wrong else None
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return (f"{layer.num_features} channels in dimension 1", got) if differs(x, 1, layer.num_features) else None
    if isinstance(layer, nn.LayerNorm):
        last = tuple(layer.normalized_shape)
        return (f"the last dimensions {last}", got) if tuple(x.shape[-len(last) :]) != last else None
    if isinstance(layer, nn.RNNBase):
        return (f"{layer.input_size} features in the last dimension", got) if differs(x, -1, layer.input_size) else None
    if isinstance(layer, nn.Embedding):
        wanted = f"integers from 0 to {layer.num_embeddings - 1}"
        if x.is_floating_point():
            return wanted, f"the dtype {x.dtype}"
        low, high = (int(v) for v in x.aminmax()) if x.numel() else (0, 0)
        entry = low if low < 0 else high
        return None if 0 <= entry < layer.num_embeddings else (wanted, f"the entry {entry}")
    return None


def differs(x: Tensor, dim: int, size: int) -> bool:
    return not -x.ndim <= dim < x.ndim or x.shape[dim] != size


def way_out(layer: nn.Module, x: Tensor, y: Any) -> str:
    """What to do with the inputs"""
    if isinstance(layer, nn.Linear):
        size = layer.in_features
        if x.ndim == 1:
            return ": pass one row for each sample" + (", x.unsqueeze(-1)" if size == 1 else "")
        if x.ndim == 2 and len(x) == size:
            return ": pass one row for each sample, x.T"
        if x.ndim > 2 and math.prod(x.shape[1:]) == size:
            return ": begin the model with nn.Flatten()"
        if isinstance(y, Tensor) and y.ndim == 2 and y.shape[1] == size:
            return f", the targets {shape(y)}: these two may have changed places"
    if isinstance(layer, nn.modules.conv._ConvNd):
        if x.ndim == len(layer.kernel_size) + 1 and layer.in_channels == 1:
            return ": pass x.unsqueeze(1)"
        if x.ndim == len(layer.kernel_size) + 2 and x.shape[-1] == layer.in_channels:
            return ": pass x.movedim(-1, 1), with the channels before the positions"
    if isinstance(layer, nn.Embedding) and x.is_floating_point():
        return ": pass x.long(), if these are indices"
    return ""


def shape(t: Tensor) -> tuple[int, ...]:
    return tuple(t.shape)
