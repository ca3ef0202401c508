"""What torch.optim asks of an optimizer: parameter groups, which may differ in weight decay alone, and a state that is
saved and loaded, plain values and tensors with a version, checked before anything changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .arguments import check_rate
from .curvature.contract import Representation
from .curvature.cost import Plan
from .deferred import floats
from .metric import check_saved, restored
from .model.batch import wide
from .model.checks import trainable
from .model.decay import check_weight
from .model.parameters import Parameters
from .model.shards import shard_of
from .parts.direction import Damping
from .parts.judging import Schedule
from .step import ENTRIES, RETIRED, VECTORS, State, nested
from .values import WAY_OUT, check_fields, check_tensor, check_value, is_count, is_number, short
from .weights import Weights

KEYS = ("params", "lr", "weight_decay", "name", "initial_lr")  # the last is what schedulers write


def grouped(model: nn.Module, params: Iterable[Any] | None) -> list[dict[str, Any]]:
    """The parameters that train, by groups."""
    given = None if params is None else list(params)
    if given is None or not any(isinstance(group, dict) for group in given):
        return [{"params": trainable(model, given)}]
    for group in given:
        if not isinstance(group, dict) or "params" not in group:
            raise TypeError(
                f"params= holds groups and a {type(group).__name__} without 'params': groups alone, or none"
            )
        for key in group:
            if key not in KEYS:
                raise ValueError(
                    f"a group of params= has the option {key!r}: LM solves for all parameters together, and groups may "
                    "differ in weight_decay alone"
                )
    members = [[g["params"]] if isinstance(g["params"], Tensor) else list(g["params"]) for g in given]
    chosen = {id(p) for p in trainable(model, [p for group in members for p in group])}
    return [
        {**group, "params": [p for p in some if id(p) in chosen]}
        for group, some in zip(given, members, strict=True)
    ]  # fmt: skip


def check_same_rate(groups: Sequence[dict[str, Any]]) -> None:
    """All groups have the same lr, and each a weight decay that is one."""
    rates = [group["lr"] for group in groups]
    for lr in rates:
        check_rate(lr)
    if any(float(lr) != float(rates[0]) for lr in rates):
        raise ValueError(
            f"the groups have the learning rates {[float(lr) for lr in rates]}: LM solves for all parameters together, "
            "and lr is the length of that step; give all groups the same"
        )
    for i, group in enumerate(groups):
        check_decay(group["weight_decay"], i, group)


def check_decay(w: Any, i: int, group: dict[str, Any]) -> None:
    """Of group i: a number, or a tensor that broadcasts to each of its parameters."""
    if not isinstance(w, Tensor):
        return check_weight(w)
    name = f"weight_decay of group {group.get('name', i)!r}, a tensor of the shape {tuple(w.shape)},"
    if w.dtype == torch.bool or w.is_complex() or w.layout != torch.strided or w.is_meta:
        raise TypeError(f"{name} is of {w.dtype} and {w.layout}: real numbers in a dense tensor")
    for p in group["params"]:
        if not _broadcasts(w.shape, p.shape):
            raise ValueError(
                f"{name} does not broadcast to a parameter of the shape {tuple(p.shape)}: a number for every element "
                "of each parameter in the group, or give that parameter a group of its own"
            )
    for p in group["params"][:1]:
        there = _held(w, p)
        bad = w[~((there >= 0) & there.isfinite())]
        if bad.numel():
            raise ValueError(
                f"{name} holds {bad[0].item()}: all must be at least 0, 0 for none, and finite in {there.dtype}"
            )


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def weights(groups: Sequence[dict[str, Any]], spared: Sequence[bool]) -> Weights:
    """Weight decay of every parameter, 0 for those that are excluded: as it is now, in copies. A tensor whose elements
    are all the same is a number."""
    pairs = [(p, group["weight_decay"]) for group in groups for p in group["params"]]
    numbers: list[float] = []
    elements: dict[int, Tensor] = {}
    gaps = False
    for i, ((p, w), free) in enumerate(zip(pairs, spared, strict=True)):
        if free or not isinstance(w, Tensor):
            numbers.append(0.0 if free else float(w))
            continue
        there = _held(w, p)
        low, high = floats(*there.aminmax()) if there.numel() else (0.0, 0.0)
        numbers.append(low if low == high else 1.0)
        if low < high:
            place = torch.empty(p.shape, dtype=there.dtype, device=p.device)
            elements[i] = place.copy_(there.expand(p.shape)).flatten()
            gaps = gaps or low == 0
    return Weights(numbers, elements, gaps)


def _held(w: Tensor, p: Tensor) -> Tensor:
    """In the precision of θ"""
    return w.detach().to(wide(p.dtype))


# The state.

FOREIGN = (
    "it was not made by marquardt.LM. To begin with what another optimizer has trained, load the weights alone, "
    "model.load_state_dict(weights), and start without the state of that optimizer: without ckpt_path= in Lightning, "
    "without resume_from_checkpoint= in transformers"
)

# Of the entry "marquardt" in a state_dict. Version 1 had no number (marquardt 0.1.0).
VERSION = 2


def saved(state: State, damping: Damping, curvature: Representation, params: Sequence[Tensor]) -> dict[str, Any]:
    """Copies of everything, as torch.save and torch.load(weights_only=True) take it, and what it was made with."""
    found = state.flat()
    found["D"] = None if state.D is None else state.D.state()
    found["plan"] = None if state.plan is None else state.plan.state()
    made = {"damping": _name(damping), "curvature": _name(curvature), "shapes": [list(p.shape) for p in params]}
    shard = shard_of(params[0])
    return {"version": VERSION, **made, **({} if shard is None else {"shard": list(shard)}), **copied(found)}


def copied(found: dict[str, Any], device: torch.device | None = None) -> dict[str, Any]:
    """With copies of all tensors"""
    copies: dict[str, Any] = tree_map(lambda v: v.detach().clone().to(device) if isinstance(v, Tensor) else v, found)
    return copies


def loaded(
    saved: Any, schedule: Schedule, damping: Damping, curvature: Representation, parameters: Parameters,
    towards: Tensor | None = None,
) -> State:  # fmt: skip
    """The state again, on the device of these parameters, if it can be theirs and that of these parts. `towards` is
    what their weights decay towards now."""
    found = _made_with(_of_this_version(saved), damping, curvature, parameters)
    check_state(found, schedule, damping, curvature, parameters)
    if (found.get("towards") is None) != (towards is None):
        here, there = ("0", "other weights") if towards is None else ("other weights", "0")
        made = 'mq.WeightDecay(w, towards="start")' if towards is None else "w"
        raise ValueError(
            f"the state is of weights that decay towards {there}, those of this optimizer towards {here}: make it by "
            f"mq.LM(model, loss, weight_decay={made}), w as it was"
        )
    plan = None if found.get("plan") is None else Plan.restored(found["plan"], parameters.whole.n)
    found = copied(found, parameters.device)
    found["D"] = None if found.get("D") is None else restored(found["D"])
    found["plan"] = None if plan is None else curvature.restored(plan, parameters.device)
    return State(**nested(found))


def _of_this_version(saved: Any) -> dict[str, Any]:
    if not isinstance(saved, dict):
        raise TypeError(f"the entry 'marquardt' of this state_dict is {type(saved).__name__}, not a dict of LM's state")
    version = saved.get("version", 1)
    if isinstance(version, bool) or not isinstance(version, int) or version not in (1, VERSION):
        raise ValueError(
            f"the state is of version {short(version)}, this marquardt knows 1 to {VERSION}: load it in a newer "
            "marquardt"
        )
    found = {k: v for k, v in saved.items() if k not in ("version", *RETIRED)}
    if version == 1 and "rows" in found:
        found["most_rows"] = found.pop("rows")
    return found


def _made_with(
    state: dict[str, Any], damping: Damping, curvature: Representation, parameters: Parameters
) -> dict[str, Any]:
    """Without what it was made with, which a state of version 1 does not say."""
    made = {key: state.pop(key) for key in ("damping", "curvature", "shapes", "shard") if key in state}
    for key in ("damping", "curvature"):
        if key in made:
            check_value(made[key], "str", None, f"the state {key!r}")
    own, others = shard_of(parameters.given[0]), made.get("shard")
    if others is not None and not (
        isinstance(others, (list, tuple)) and len(others) == 2 and all(map(is_count, others))
    ):
        raise ValueError(f"the state 'shard' is {short(others)}, not a rank and how many there are: {WAY_OUT}")
    if own != (None if others is None else tuple(others)):
        said = ["all parameters" if s is None else f"shard {s[0]} of {s[1]}" for s in (others, own)]
        raise ValueError(
            f"the state is of {said[0]}, this optimizer has {said[1]}: every rank loads the state that it saved, on "
            "as many ranks (docs/sharded.md)"
        )
    shapes = [list(p.shape) for p in parameters.given]
    there = made.get("shapes", shapes)
    if not isinstance(there, list) or not all(isinstance(s, list) and all(map(is_count, s)) for s in there):
        raise ValueError(f"the state 'shapes' is {short(there)}, not a list of shapes: {WAY_OUT}")
    if there != shapes:
        n, here = (sum(math.prod(shape) for shape in some) for some in (there, shapes))
        raise ValueError(
            f"the state is of {n} parameters of the shapes {there}, this optimizer has {here} of the shapes "
            f"{shapes}: load the state of this model"
        )
    if state.get("D") is not None and made.get("damping", _name(damping)) != _name(damping):
        raise ValueError(
            f"the state was saved with damping={made['damping']}, this optimizer has {_name(damping)}: D is that of "
            "another damping, make the optimizer with the same one"
        )
    if state.get("past") is not None and "curvature" in made and not curvature.takes(made["curvature"]):
        raise ValueError(
            f"the state was saved with curvature={made['curvature']}, this optimizer has {_name(curvature)}, which "
            "cannot go on with what that has kept: make the optimizer with the same one"
        )
    return state


def _name(part: object) -> str:
    return type(part).__name__


def check_state(
    state: dict[str, Any], schedule: Schedule, damping: Damping, curvature: Representation, parameters: Parameters
) -> None:
    """A loaded State, as a flat dict; entries with a default may be missing."""
    check_fields(ENTRIES, state, "the state")
    check_lam(state["lam"], schedule)
    for key in VECTORS:
        if state.get(key) is not None:
            check_tensor(state[key], f"the state {key!r}", (parameters.n,), parameters.dtype)
    past = state.get("past")
    if not isinstance(past, (dict, type(None))):
        raise ValueError(f"the state 'past' is {type(past).__name__}: it must be a dict of tensors, or None")
    for key, t in (past or {}).items():
        if not isinstance(key, str):
            raise ValueError(f"the state 'past' has an entry {short(key)}, which is no name: {WAY_OUT}")
        check_tensor(t, f"the state 'past' {key!r}")
    curvature.check(past or {}, dict(zip(parameters.names, parameters.sizes, strict=True)))
    if state.get("D") is None:
        return
    D, takes = check_saved(state["D"], parameters.sizes, parameters.dtype), getattr(damping, "takes", None)
    if takes is not None and not takes(D):
        raise ValueError(
            f"the damping D in this state is none of {_name(damping)}, which this optimizer has: make it with the same "
            "damping, or load an earlier state"
        )


def check_lam(lam: Any, schedule: Schedule) -> None:
    if not is_number(lam) or lam < 0:
        raise ValueError(f"the state 'lam' has λ = {short(lam)}: it must be finite and at least 0, load an earlier one")
    if is_dataclass(schedule) and "initial" in {f.name for f in fields(schedule)}:
        try:
            replace(schedule, initial=lam)
        except ValueError as error:
            raise ValueError(f"the state has λ = {lam!r}, which this schedule does not start from: {error}") from None


def check_groups(state_dict: dict[str, Any], groups: Sequence[dict[str, Any]]) -> None:
    """torch's own part of a state_dict for these groups, of which torch looks at little."""
    for key, kind in (("state", dict), ("param_groups", list)):
        if key not in state_dict:
            raise ValueError(f"this state_dict has no entry {key!r}: {FOREIGN}")
        if not isinstance(state_dict[key], kind):
            raise ValueError(f"the entry {key!r} of this state_dict is {short(state_dict[key])}, no {kind.__name__}")
    found = state_dict["param_groups"]
    if len(found) != len(groups) or not all(isinstance(group, dict) for group in found):
        raise ValueError(f"this state_dict has {len(found)} parameter groups, this optimizer {len(groups)}: {FOREIGN}")
    for i, (group, here) in enumerate(zip(found, groups, strict=True)):
        if "lr" not in group:
            raise ValueError(f"this state_dict has a parameter group without 'lr': {FOREIGN}")
        members = group.get("params")
        if not isinstance(members, list) or len(members) != len(here["params"]):
            raise ValueError(
                f"parameter group {i} of this state_dict has the parameters {short(members)}, and that of this "
                f"optimizer has {len(here['params'])}: load the state of this model"
            )
        if not all(isinstance(m, str) or is_count(m) for m in members):
            raise ValueError(f"parameter group {i} of this state_dict has the parameters {short(members)}: {WAY_OUT}")
    check_same_rate([here | {k: group[k] for k in ("lr", "weight_decay") if k in group}
                     for group, here in zip(found, groups, strict=True)])  # fmt: skip
