"""State as it is saved and loaded: plain values and tensors, with a version, checked before anything changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .arguments import check_rate
from .curvature.contract import Representation
from .curvature.plan import Plan
from .groups import check_decay
from .metric import restored
from .model.shards import own_part, shard_of
from .parts.damping import Damping
from .parts.schedule import Schedule
from .state import State

FOREIGN = (
    "it was not made by marquardt.LM. To begin with what another optimizer has trained, load the weights alone, "
    "model.load_state_dict(…), and start without the state of that optimizer: without ckpt_path= in Lightning, without "
    "resume_from_checkpoint= in transformers"
)

# Of the entry "marquardt" in a state_dict. Version 1 had no number (marquardt 0.1.0).
VERSION = 2


def saved(state: State, damping: Damping, curvature: Representation, params: Sequence[Tensor]) -> dict[str, Any]:
    """Copies of everything, as torch.save and torch.load(weights_only=True) take it, and what it was made with."""
    found = dict(vars(state))
    found["D"] = None if state.D is None else state.D.state()
    found["plan"] = None if state.plan is None else state.plan.state()
    made = {"damping": _name(damping), "curvature": _name(curvature), "shapes": [list(p.shape) for p in params]}
    shard = shard_of(params[0])
    return {"version": VERSION, **made, **({} if shard is None else {"shard": list(shard)}), **copied(found)}


def copied(found: dict[str, Any]) -> dict[str, Any]:
    """With copies of all tensors"""
    copies: dict[str, Any] = tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, found)
    return copies


def loaded(
    saved: Any, schedule: Schedule, damping: Damping, curvature: Representation, params: Sequence[Tensor],
    towards: Tensor | None = None,
) -> State:  # fmt: skip
    """The state again, on the device of these parameters, if it can be theirs and that of these parts. `towards` is
    what their weights decay towards now."""
    device = params[0].device
    found = _made_with(_of_this_version(saved), damping, curvature, params)
    found = check_state(found, schedule, curvature, [own_part(p).numel() for p in params])
    if (found.get("towards") is None) != (towards is None):
        here, there = ("0", "other weights") if towards is None else ("other weights", "0")
        raise ValueError(
            f"the state is of weights that decay towards {there}, those of this optimizer towards {here}: make it with "
            "the same weight_decay=mq.WeightDecay(w, towards=…)"
        )
    found = tree_map(lambda v: v.clone().to(device) if isinstance(v, Tensor) else v, found)
    D, plan = found.get("D"), found.get("plan")
    found["D"] = None if D is None else restored(D)
    plan = None if plan is None else Plan.restored(plan)
    found["plan"] = None if plan is None else curvature.restored(plan, device)
    return State(**found)


def _of_this_version(saved: Any) -> dict[str, Any]:
    if not isinstance(saved, dict):
        raise TypeError(f"the entry 'marquardt' of this state_dict is {type(saved).__name__}, not a dict of LM's state")
    version = saved.get("version", 1)
    if version not in (1, VERSION):
        raise ValueError(
            f"the state is of version {version!r}, this marquardt knows 1 to {VERSION}: load it in a newer marquardt"
        )
    found = {k: v for k, v in saved.items() if k != "version"}
    if version == 1 and "rows" in found:
        found["most_rows"] = found.pop("rows")
    return found


def _made_with(
    state: dict[str, Any], damping: Damping, curvature: Representation, params: Sequence[Tensor]
) -> dict[str, Any]:
    """Without what it was made with, which a state of version 1 does not say."""
    made = {key: state.pop(key) for key in ("damping", "curvature", "shapes", "shard") if key in state}
    own, others = shard_of(params[0]), made.get("shard")
    if own != (None if others is None else tuple(others)):
        said = ["all parameters" if s is None else f"shard {s[0]} of {s[1]}" for s in (others, own)]
        raise ValueError(
            f"the state is of {said[0]}, this optimizer has {said[1]}: every rank loads the state that it saved, on "
            "as many ranks (docs/sharded.md)"
        )
    shapes = [list(p.shape) for p in params]
    if made.get("shapes", shapes) != shapes:
        n, here = (sum(math.prod(shape) for shape in some) for some in (made["shapes"], shapes))
        raise ValueError(
            f"the state is of {n} parameters of the shapes {made['shapes']}, this optimizer has {here} of the shapes "
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
    state: dict[str, Any], schedule: Schedule, curvature: Representation, sizes: list[int]
) -> dict[str, Any]:
    """A loaded State, as a dict, of parameters of these sizes; entries with a default may be missing."""
    entries = {f.name: f for f in fields(State)}
    for key in state:
        if key not in entries:
            raise ValueError(f"the state has an entry {key!r} that this version does not know: load it in a newer one")
    for key, entry in entries.items():
        if key not in state and entry.default is MISSING:
            raise ValueError(f"the state has no entry {key!r}: it is not one that marquardt.LM saved")
        if key in state:
            check_entry(key, state[key], entry.default)
    check_lam(state["lam"], schedule)
    n = sum(sizes)
    past = state.get("past")
    if not isinstance(past, (dict, type(None))):
        raise ValueError(f"the state 'past' is {type(past).__name__}: it must be a dict of tensors, or None")
    vectors = [(key, state.get(key)) for key in ("master", "previous", "mean", "haven", "towards")]
    for key, t in [*vectors, *(("past", t) for t in (past or {}).values())]:
        if not isinstance(t, (Tensor, type(None))):
            raise ValueError(f"the state {key!r} is {type(t).__name__}: it must be a tensor, or None")
        if key != "past" and t is not None and len(t) != n:
            raise ValueError(f"the state {key!r} is of {len(t)} parameters, this optimizer has {n}")
    curvature.check(past or {}, n)
    D = state.get("D")
    if D is not None and not (isinstance(D, list) and len(D) == 2 and restored(D).fits(sizes)):
        raise ValueError("the damping D in this state is that of another model: load the state of this one")
    return dict(state)


def check_entry(key: str, value: Any, default: Any) -> None:
    """Counters count, and nothing is NaN."""
    if isinstance(default, int) and (not isinstance(value, int) or value < 0):
        raise ValueError(f"the state {key!r} is {value!r}: it must be an integer of at least 0, load an earlier one")
    for t in tree_leaves(value):
        if isinstance(t, float) and math.isnan(t):
            raise ValueError(f"the state {key!r} is {value!r}: load an earlier one")
        if isinstance(t, Tensor) and not bool(t.isfinite().all()):
            raise ValueError(f"the state {key!r} holds NaN or infinite values: load an earlier one")


def check_lam(lam: Any, schedule: Schedule) -> None:
    if isinstance(lam, bool) or not isinstance(lam, (int, float)) or not 0 <= lam < math.inf:
        raise ValueError(f"the state has λ = {lam!r}: it must be finite and at least 0, load an earlier one")
    if is_dataclass(schedule) and "initial" in {f.name for f in fields(schedule)}:
        try:
            replace(schedule, initial=lam)
        except ValueError as error:
            raise ValueError(f"the state has λ = {lam!r}, which this schedule does not start from: {error}") from None


def check_groups(state_dict: dict[str, Any], groups: Sequence[dict[str, Any]]) -> None:
    """torch's own part of a state_dict for these groups, as far as torch does not look at it."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"this state_dict has no entry {key!r}: {FOREIGN}")
    for i, (group, here) in enumerate(zip(state_dict["param_groups"], groups, strict=False)):  # torch counts them
        if "lr" not in group:
            raise ValueError(f"this state_dict has a parameter group without 'lr': {FOREIGN}")
        check_rate(group["lr"])
        check_decay(group.get("weight_decay", 0.0), i, here)
