"""What the ranks must have in common, looked at before a step: options, λ, the plan, and now and then the weights."""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from .arguments import brief, users
from .model.checks import coupled
from .model.parameters import Parameters
from .ranks import RankError, Ranks
from .step import Parts, State

# Steps from one look at the weights to the next.
EVERY = 10

# Numbers of a checksum at once.
SLICE = 1 << 22


def check_alike(
    ranks: Ranks, model: nn.Module, parameters: Parameters, parts: Parts, state: State, others: Mapping[str, object]
) -> None:
    """Raises RankError on every rank if one has other options, another λ or plan, or other weights than the rest."""
    check_normalisation(ranks, model, state.steps == 0)
    words = ", ".join(f"{name} = {value}" for name, value in others.items())
    words = re.sub(r" at 0x[0-9a-f]+", "", words)  # functions have other addresses in every process
    training = [name for name, m in model.named_modules() if m.training]
    options = ", ".join(brief(part) if hasattr(part, "__dataclass_fields__") else type(part).__name__
                        for name, part in vars(parts).items() if name != "radius")  # fmt: skip
    plan = None if state.plan is None else state.plan.choice
    ranks.same(
        f"step {state.steps}, λ = {state.lam!r}, {words}, radius = {parts.radius!r}, "
        f"{parameters.whole.n} parameters, {options}, plan {plan}, layers in train mode {training}"
    )
    if state.steps % EVERY == 0 and parameters.shards is None:  # of which every rank has its own
        named = dict(zip(parameters.names, parameters.tensors, strict=True))
        rest = {name: t for name, t in [*model.named_parameters(), *model.named_buffers()] if name not in named}
        check_weights(ranks, named | rest)


def check_normalisation(ranks: Ranks, model: nn.Module, first: bool) -> None:
    """Layers that normalise by the samples of a batch see those of their own rank alone, and say so once."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and layer.training:
            raise ValueError(
                f"layer {name!r} (SyncBatchNorm) in train mode adds up over the ranks in a way that cannot be "
                "differentiated twice, which no representation of the curvature can do without: call "
                f"model.get_submodule({name!r}).eval(), replace it by GroupNorm or LayerNorm, or by BatchNorm, which "
                "normalises by the samples of each rank alone"
            )
    name = coupled(model) if first and ranks.size > 1 else None
    if name is not None and ranks.rank == 0:
        warnings.warn(
            f"layer {name!r} normalises by the samples of each rank alone, as in DistributedDataParallel: the step is "
            "that of these losses, not of one batch on one device. GroupNorm, LayerNorm and eval mode know no ranks",
            stacklevel=users(),
        )


def check_weights(ranks: Ranks, tensors: Mapping[str, Tensor]) -> None:
    """The same in every bit, frozen ones and buffers too: what differs now would differ more with every step."""
    own = {name: checksum(t.detach()) for name, t in tensors.items()}
    if len(set(ranks.numbers(zlib.crc32(repr(own).encode())))) == 1:
        return
    found = ranks.every(own)
    names = dict.fromkeys(name for sums in found for name in sums)
    name = next(name for name in names if len({sums.get(name) for sums in found}) > 1)
    unlike = [rank for rank, sums in enumerate(found) if sums.get(name) != found[0].get(name)]
    raise RankError(
        f"parameter {name!r} is not the same on all ranks: that of rank {unlike[0]} is not that of rank "
        "0. Let all begin with the same weights (torch.manual_seed(...) before the model is made, a state_dict that "
        "all load, or DistributedDataParallel, which copies those of rank 0), and change them on all ranks alike"
    )


def checksum(t: Tensor) -> int:
    """Of the bits, and of their order"""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    real = torch.view_as_real(t) if t.is_complex() else t
    bits = real.contiguous().flatten().view(kinds[real.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for first, some in enumerate(bits.split(SLICE)):
        odd = 2 * torch.arange(len(some), device=t.device) + 1 + first
        total += (some.long() * odd).sum()
    return int(total)


def take_buffers(ranks: Ranks, model: nn.Module) -> None:
    """Those of rank 0, as DistributedDataParallel has it: each rank has seen other samples."""
    buffers: Sequence[Tensor] = [b for b in model.buffers() if b is not None]
    with torch.no_grad():
        for b, found in zip(buffers, ranks.ones(buffers), strict=True):
            if found is not b:
                b.copy_(found)
