"""Checks for what no step can work with, before anything changes; and reasons why a model failed on its inputs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..ranks import RankError, of
from ..surroundings import out_of_memory
from .anatomy import Anatomy, held
from .batch import Batch, tensors, wide
from .shards import check_sharded, let_go, sharded

# Wrappers that keep several copies or parts of a model, on devices or ranks.
WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


def unwrapped(model: Any, group: Any) -> tuple[Any, Any]:
    """The model inside DistributedDataParallel, and its process group, or that of its shards, if none is given: LM
    itself takes the sums over ranks."""
    if isinstance(model, nn.Module):
        let_go(model)  # before the parameters are inspected
        if any(sharded(p) for p in model.parameters()):
            return model, _of_shards(model, group)
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return model, group
    if group is False:
        raise ValueError("a model in DistributedDataParallel is one of several copies: leave group=False out")
    return model.module, model.process_group if group is None else group


def _of_shards(model: nn.Module, group: Any) -> Any:
    given: list[Any] = list(model.parameters())
    mesh = next(p.device_mesh for p in given if sharded(p))
    if group is False:
        raise ValueError("the ranks that share the weights take every step together: leave group=False out")
    if group is not None and of(group) is not of(mesh):
        raise ValueError("group= has other ranks than those that hold the model's shards: leave it out")
    return group if mesh.ndim > 1 else mesh.get_group()


def trainable(model: nn.Module, params: Iterable[Any] | None) -> list[Tensor]:
    """The parameters that train, after checks for everything that no step can work with."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f'mq.LM(model, loss) takes the model itself, not a {type(model).__name__}: mq.LM(model, "mse"), and '
            "params=model.head.parameters() if only some of its parameters are to train"
        )
    check_whole(model)
    given = list(model.parameters() if params is None else params)
    for p in given:
        if not isinstance(p, Tensor):
            raise TypeError(f"params= holds a {type(p).__name__}: pass parameters, such as model.head.parameters()")
    own = {id(p) for p in model.parameters()}
    if any(id(p) not in own for p in given):
        raise ValueError("params= holds a tensor that is not a parameter of the model: pass some of model.parameters()")
    if len({id(p) for p in given}) < len(given):
        raise ValueError("params= holds a parameter twice: pass each of them once")
    chosen = [p for p in given if p.requires_grad]
    if not chosen:
        raise ValueError("no trainable parameters: set requires_grad=True on some, or pass others as params=")
    check_sharded(model, chosen)
    check_usable(model, held(model), chosen)
    wides = {wide(p.dtype) for p in chosen}  # bfloat16 and float16 are the rounding of float32
    dtypes = {p.dtype for p in chosen} if len(wides) > 1 else wides
    for what, found in (("dtypes", dtypes), ("devices", {p.device for p in chosen})):
        if len(found) > 1:
            names = ", ".join(sorted(str(f) for f in found))
            raise ValueError(f"the trainable parameters have several {what} ({names}): bring them to one by model.to()")
    if any(nn.parameter.is_lazy(p) for p in chosen):
        raise ValueError(
            "the model has lazy parameters without a shape: run a forward pass once, then make the optimizer"
        )
    for dtype in wides - {torch.float32, torch.float64}:
        raise TypeError(
            f"the parameters are {dtype}, steps need torch.float32 or torch.float64, or their rounding in "
            "torch.bfloat16 or torch.float16: model.float() or model.double()"
        )
    if chosen[0].device.type == "meta":
        raise ValueError(
            "the parameters are on the meta device, without values: model.to_empty(device=...) and load some"
        )
    return chosen


def check_usable(model: nn.Module, tensors: Iterable[Tensor], params: Sequence[Tensor]) -> None:
    """Checks for parameters that no step can change, and for buffers that no step can restore."""
    for t in [t for t in tensors if t.is_inference()]:
        if not isinstance(t, nn.Parameter) or any(t is p for p in params):
            raise ValueError(
                f"{_called(model, t)} was made under torch.inference_mode(), so that nothing can change it: make or "
                "load the model outside of it, or under torch.no_grad()"
            )
    for p in params:
        if p.layout is not torch.strided and not sharded(p):
            raise TypeError(
                f"{_called(model, p)} is sparse ({p.layout}), and a step changes all numbers of a parameter: make it "
                "dense by .to_dense(), or train the values and make the sparse tensor of them in forward"
            )


def _called(model: nn.Module, t: Tensor) -> str:
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, own in named:
            if own is t:
                return f"{kind} {name!r}"
    return "a tensor of the model"


def check_whole(model: nn.Module) -> None:
    """Checks that the model is not wrapped: nothing in a step takes sums over copies or shards."""
    for module in model.modules():
        for kind in type(module).__mro__:
            if kind.__name__ in WRAPPERS and kind.__module__.startswith("torch."):
                raise TypeError(
                    f"the model is wrapped in {kind.__name__}, and LM does not add up over its copies or shards, which "
                    "would drift apart: pass the plain model, model.module, on every rank of a process group, "
                    "one in DistributedDataParallel, or one that fully_shard has sharded (docs/distributed.md)"
                )


def coupled(model: nn.Module) -> str | None:
    """The name of a layer that makes the samples of a batch depend on each other, if there is one."""
    return Anatomy(model).coupled


def check_coupling(model: nn.Module) -> None:
    """Raises ValueError if samples depend on each other, for then rows belong to no single sample."""
    name = coupled(model)
    if name is not None:
        call = f"model.get_submodule({name!r}).eval()" if name else "model.eval()"
        kind = type(model.get_submodule(name)).__name__
        raise ValueError(
            f"layer {name!r} ({kind}) couples the samples of a batch in train mode: call {call} to use its running "
            "statistics, replace it by GroupNorm or LayerNorm, or use curvature=mq.MatrixFree() on the whole batch "
            "(chunk=None, rows=mq.Exact())"
        )


# The errors a model raises if a batch does not fit; errors of other kinds are not explained.
FAILURES = (RuntimeError, IndexError, ValueError, TypeError)


def explained(error: Exception, model: nn.Module, batch: Batch, p: Tensor) -> Exception | None:
    """The same error with its reason, if the batch is the cause; `p` is one of the parameters."""
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
    """Why the inputs do not fit the arguments of the model: too many of them, or unknown names; None if they fit"""
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
    """The reason, if inputs are on another device or have another dtype"""
    if not isinstance(error, RuntimeError):
        return None
    for t in tensors(inputs):
        if t.device != p.device:
            return f"the inputs are on {t.device}, the parameters on {p.device}: move them with .to()"
        if t.dtype != p.dtype:
            return f"the inputs are {t.dtype}, the parameters {p.dtype}: convert the inputs with .to({p.dtype})"
    return None


def odd(batch: Batch) -> str | None:
    """The reason, if the inputs do not have one row per sample"""
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
    """The reason, if a layer was called with an input of the wrong shape or type"""
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
    """What a layer takes, and in what way x differs; None if x is right, or if the layer is not a known one"""
    if isinstance(layer, nn.Embedding):
        wanted = f"integers from 0 to {layer.num_embeddings - 1}"
        if x.is_floating_point():
            return wanted, f"the dtype {x.dtype}"
        low, high = (int(v) for v in x.aminmax()) if x.numel() else (0, 0)
        entry = low if low < 0 else high
        return None if 0 <= entry < layer.num_embeddings else (wanted, f"the entry {entry}")
    wrong = False
    if isinstance(layer, nn.Linear):
        wanted, wrong = f"(N, {layer.in_features})", differs(x, -1, layer.in_features)
    elif isinstance(layer, nn.modules.conv._ConvNd):
        places = len(layer.kernel_size)
        wanted = f"({', '.join(['N', str(layer.in_channels), *('L' if places == 1 else 'DHW'[-places:])])})"
        wrong = x.ndim != places + 2 or x.shape[1] != layer.in_channels
    elif isinstance(layer, nn.modules.batchnorm._BatchNorm):
        wanted, wrong = f"{layer.num_features} channels in dimension 1", differs(x, 1, layer.num_features)
    elif isinstance(layer, nn.LayerNorm):
        last = tuple(layer.normalized_shape)
        wanted, wrong = f"the last dimensions {last}", tuple(x.shape[-len(last) :]) != last
    elif isinstance(layer, nn.RNNBase):
        wanted, wrong = f"{layer.input_size} features in the last dimension", differs(x, -1, layer.input_size)
    return (wanted, f"the shape {shape(x)}") if wrong else None


def differs(x: Tensor, dim: int, size: int) -> bool:
    return not -x.ndim <= dim < x.ndim or x.shape[dim] != size


def way_out(layer: nn.Module, x: Tensor, y: Any) -> str:
    """Advice on how to change the inputs"""
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
