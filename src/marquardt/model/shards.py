"""Parameters sharded by FSDP2 (`torch.distributed.fsdp.fully_shard`): each rank holds some rows of each parameter, and
a forward pass sees the whole parameter while its module is called."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ..ranks import Ranks, of

WAY_OUT = "(docs/sharded.md says which models LM takes in shards)"

# The sharded parameters of a model with their whole versions, by the ids of the sharded ones. FSDP2 keeps the whole
# ones, without memory between two passes.
_seen: WeakKeyDictionary[nn.Module, dict[int, tuple[Any, Tensor]]] = WeakKeyDictionary()


def sharded(p: Any) -> bool:
    """Whether p is a DTensor"""
    return hasattr(p, "to_local")


def own_part(p: Any) -> Tensor:
    """The part of a parameter that this rank holds"""
    part: Tensor = p.to_local() if sharded(p) else p
    return part.detach()


def shard_of(p: Any) -> tuple[int, int] | None:
    """The index of this rank among those that share a parameter, and their number; None if the parameter is whole"""
    return (p.device_mesh.get_local_rank(), p.device_mesh.size()) if sharded(p) else None


def gathering(model: nn.Module) -> list[Any]:
    """The modules whose parameters are gathered by FSDP2"""
    return [m for m in model.modules() if any(kind.__name__ == "FSDPModule" for kind in type(m).__mro__)]


def let_go(model: nn.Module) -> None:
    """Releases gathered parameters, including those gathered by the caller: they are outdated, or occupy memory in
    vain."""
    for module in gathering(model):
        module.reshard()


def refuse_sharded(params: Iterable[Any], what: str) -> None:
    if any(sharded(p) for p in params):
        raise TypeError(
            f"{what} takes no model whose parameters are sharded: train it by mq.LM(model, loss).step(...) {WAY_OUT}"
        )


def check_sharded(model: nn.Module, params: Sequence[Any]) -> None:
    """Checks that all parameters are sharded in rows, over the same ranks, by FSDP2."""
    some, names = [p for p in params if sharded(p)], {id(p): name for name, p in model.named_parameters()}
    if not some and not gathering(model):
        return
    if not some:
        raise TypeError(
            f"the model is sharded by fully_shard, but parameter {names[id(params[0])]!r}, which trains, is not: shard "
            f"all that train {WAY_OUT}"
        )
    first = f"parameter {names[id(some[0])]!r}"
    if not gathering(model):
        raise TypeError(
            f"{first} is a DTensor that nothing gathers for a forward pass: LM takes those that "
            f"torch.distributed.fsdp.fully_shard has sharded {WAY_OUT}, or the plain model"
        )
    for p in params:
        if not sharded(p):
            wrong = f"is not sharded, and {first} is: shard all that train by fully_shard, or leave it out by params="
        elif [(type(place).__name__, getattr(place, "dim", None)) for place in p.placements] != [("Shard", 0)]:
            wrong = (
                f"is placed as {tuple(p.placements)}: LM takes parameters that are sharded in their first dimension, "
                "over a mesh of one dimension"
            )
        elif p.device_mesh != some[0].device_mesh:
            wrong = f"is sharded over other ranks than {first}: shard the whole model over one mesh"
        else:
            continue
        raise TypeError(f"parameter {names[id(p)]!r} {wrong} {WAY_OUT}")


def _whole(model: nn.Module, params: Sequence[Any]) -> list[Tensor | None]:
    """The whole versions, by gathering the parameters of every module once. None for parameters that FSDP2 leaves as
    they are."""
    known = _seen.get(model, {})
    if not all(id(p) in known for p in params):
        places = [(m._parameters, name, p) for m in model.modules() for name, p in m._parameters.items() if sharded(p)]
        for module in gathering(model):
            module.unshard()
            found = [(p, own[name]) for own, name, p in places]
            known = known | {id(p): (p, now) for p, now in found if now is not None and now is not p}
            module.reshard()
        _seen[model] = known
    return [known[id(p)][1] if id(p) in known else None for p in params]


class Shards:
    """The parts of some parameters on this rank, and the parameters as a forward pass sees them."""

    def __init__(self, model: nn.Module, params: Sequence[Any]) -> None:
        let_go(model)
        known = {id(p): name for name, p in model.named_parameters()}
        self.names = names = [known[id(p)] for p in params]
        self.modules = gathering(model)
        self.ranks: Ranks = of(params[0].device_mesh)
        self.local = [own_part(p) for p in params]
        self.whole = [self._seen_as(*each) for each in zip(_whole(model, params), params, names, strict=True)]
        for local, each, name in zip(self.local, self.whole, names, strict=True):
            own = slice(0, 0) if each.ndim == 0 else self.rows(len(each))[self.ranks.rank]
            if len(local) != own.stop - own.start:
                raise TypeError(f"parameter {name!r} of the shape {tuple(each.shape)} has {tuple(local.shape)} on rank "
                                f"{self.ranks.rank}, which is not how torch.chunk cuts it {WAY_OUT}")  # fmt: skip

    @staticmethod
    def _seen_as(whole: Tensor | None, p: Any, name: str) -> Tensor:
        if whole is None or sharded(whole):
            raise TypeError(
                f"parameter {name!r} is a DTensor that FSDP2 does not gather by itself, as with tensor parallelism: LM "
                f"takes those that fully_shard alone has sharded {WAY_OUT}"
            )
        if (whole.dtype, whole.device, whole.shape) != (p.dtype, p.device, p.shape):
            raise TypeError(
                f"parameter {name!r} is {p.dtype} on {p.device} in its shards, and {whole.dtype} on {whole.device} in "
                f"a forward pass: leave mp_policy= and offload_policy= out of fully_shard {WAY_OUT}"
            )
        return whole

    def rows(self, length: int) -> list[slice]:
        """The rows that each rank holds, out of `length`: as torch.chunk divides them, the last rank may have fewer or
        none"""
        each = -(-length // self.ranks.size)
        cuts = [min(length, each * rank) for rank in range(self.ranks.size + 1)]
        return [slice(first, last) for first, last in itertools.pairwise(cuts)]

    def let_go(self) -> None:
        for module in self.modules:
            module.reshard()

    def recover(self) -> None:
        """Restores FSDP2 after an interrupted pass"""
        for module in self._roots():
            if hasattr(module, "reset_iter_state"):
                module.reset_iter_state()
        self.let_go()

    def _roots(self) -> Iterator[Any]:
        within = {id(child) for module in self.modules for child in module.modules() if child is not module}
        return (module for module in self.modules if id(module) not in within)
