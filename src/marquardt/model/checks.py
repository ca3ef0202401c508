"""What no step can work with, found before anything changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..ranks import of
from .anatomy import Anatomy, held
from .batch import wide
from .shards import check_sharded, let_go, sharded

# What keeps several copies or parts of a model, on devices or ranks.
WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


def unwrapped(model: Any, group: Any) -> tuple[Any, Any]:
    """The model within DistributedDataParallel, and its process group, or that of its shards, if none is given: LM adds
    up by itself."""
    if isinstance(model, nn.Module):
        let_go(model)  # before the parameters are looked at
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
    """The parameters that train, after a look at all that no step can work with."""
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
    """Of what the model holds: parameters that no step can change, and buffers that none can put back."""
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
    """A step sees all of the model, once: nothing here adds up over copies, ranks or shards."""
    for module in model.modules():
        for kind in type(module).__mro__:
            if kind.__name__ in WRAPPERS and kind.__module__.startswith("torch."):
                raise TypeError(
                    f"the model is wrapped in {kind.__name__}, and LM does not add up over its copies or shards, which "
                    "would drift apart: pass the plain model, model.module, on every rank of a process group, "
                    "one in DistributedDataParallel, or one that fully_shard has sharded (docs/distributed.md)"
                )


def coupled(model: nn.Module) -> str | None:
    """The name of a layer that makes the samples of a batch depend on each other."""
    return Anatomy(model).coupled


def check_coupling(model: nn.Module) -> None:
    """Samples that depend on each other have no rows of their own."""
    name = coupled(model)
    if name is not None:
        call = f"model.get_submodule({name!r}).eval()" if name else "model.eval()"
        kind = type(model.get_submodule(name)).__name__
        raise ValueError(
            f"layer {name!r} ({kind}) couples the samples of a batch in train mode: call {call} to use its running "
            "statistics, replace it by GroupNorm or LayerNorm, or use curvature=mq.MatrixFree() on the whole batch "
            "(chunk=None, rows=mq.Exact())"
        )
