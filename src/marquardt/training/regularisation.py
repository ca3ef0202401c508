"""Bayesian regularisation: weight decay and noise from the evidence, every few steps (MATLAB's trainbr)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from ..model.checks import trainable
from ..model.parameters import Parameters
from ..optimizer import LM
from ..ranks import of
from ..sources import Source
from ..uncertainty.evidence import Evidence, grouped_names
from ..uncertainty.posterior import laplace, reestimate
from ..uncertainty.precision import SINGULAR
from .history import restored, valid

# Relative changes of α, β and γ, and of −log p(θ|y) in nats for each effective parameter, from one estimate to the next
# that are none; and how many times in a row. An α counts as much as there are parameters that the data determine in its
# group: that of a group without any grows and grows.
CLOSE, TWICE = 1e-3, 2

# From one estimate to the next weight decay at most doubles, or comes to this share of the mean curvature of the loss:
# what a network has not learnt yet counts as noise, and weight decay for so much noise would keep it from learning.
GROWTH, TIMID = 2.0, 1e-5

# Estimates in a row that may differ in α alone: as the α of one layer grows and that of another falls, the model may
# compute the same, without an end.
LONG = 10


# What is saved of a Regularisation beside its estimates.
COUNTS = ("waited", "close", "still", "descent")


@dataclass(frozen=True)
class Regularised:
    """What the evidence came to."""

    alpha: dict[str, float]  # precision of the prior, by parameter
    beta: float  # 1/σ² of the targets; 1 if the loss has no noise
    gamma: float  # effective number of parameters,
    gammas: dict[str, float]  # by parameter
    log_evidence: float
    weight_decay: dict[str, float]  # the same as α, in the units of the loss, by parameter
    objective: float  # the loss with the weight decay that it was found with

    def close_to(self, last: Regularised) -> bool:
        """Whether neither α, β and γ nor the loss have changed since."""
        moved = sum(self.gammas[name] * apart(a, last.alpha[name]) for name, a in self.alpha.items())
        return moved <= CLOSE * max(1.0, self.gamma) and self.as_good_as(last)

    def as_good_as(self, last: Regularised) -> bool:
        """The same for β, γ and the loss alone."""
        nats = max((a / self.weight_decay[name] for name, a in self.alpha.items() if a > 0), default=0.0)
        changed = max(abs(self.objective - last.objective) * nats, abs(self.gamma - last.gamma))
        return changed <= CLOSE * max(1.0, self.gamma) and apart(self.beta, last.beta) <= CLOSE


def apart(a: float, b: float) -> float:
    """|log a/b|, 0 for what is 0"""
    return abs(math.log(a / b)) if a > 0 and b > 0 else 0.0


def plain(found: Regularised | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)


class Regularisation:
    """Writes the weight decay that the evidence asks for into the parameter groups of an optimizer."""

    def __init__(self, evidence: Evidence, opt: LM, data: Source) -> None:
        self.evidence, self.opt, self.data = evidence, opt, data
        self.names = Parameters(opt.model, opt.params).names
        self.descent = 0  # that is under way, by number
        self.last: Regularised | None = None
        self.waited = 0  # accepted steps since, or epochs
        self.close = 0  # estimates in a row without a change
        self.since: Regularised | None = None  # the first of those that differ in α alone,
        self.still = 0  # and how many came after it

    @property
    def settled(self) -> bool:
        return self.close >= TWICE or self.still >= LONG

    @property
    def more(self) -> bool:
        """Whether another descent follows."""
        return self.descent + 1 < len(self.evidence.starts)

    def begin_anew(self) -> None:
        """The next descent."""
        self.descent += 1
        self.waited, self.close, self.since, self.still = 0, 0, None, 0
        self.put(None)

    def update(self, objective: float) -> bool:
        """α and β at θ, from βG + αI without λD. False: rounding leaves no estimate, and the last one stays."""
        self.waited = 0
        found = of(self.opt.group).agreed(self._estimate(objective))  # by every rank, from all data, as rank 0 has it
        stays = self.last is not None and found == replace(self.last, objective=objective)
        self.close = self.close + 1 if self.last is not None and found.close_to(self.last) else 0
        same = self.since is not None and found.as_good_as(self.since)
        self.since, self.still = (self.since, self.still + 1) if same else (found, 0)
        self.put(found)
        return not stays

    def put(self, found: Regularised | None) -> None:
        """This estimate is in force; None: that of the start."""
        self.last, names = found, dict(zip(map(id, self.opt.params), self.names, strict=True))
        for group in self.opt.param_groups:
            name = names[id(group["params"][0])]
            group["weight_decay"] = self.evidence.starts[self.descent] if found is None else found.weight_decay[name]

    def _estimate(self, objective: float) -> Regularised:
        opt = self.opt
        try:
            there = laplace(opt.model, opt.loss, self.data, opt.weight_decays, params=opt.params)
        except ValueError as error:  # rounding is all that is left of H: α and β stay
            if self.last is None or str(error) != SINGULAR:
                raise
            return replace(self.last, objective=objective)
        best, beta = reestimate(there, self.evidence.groups)
        some, one = TIMID * (there.mean_curvature * there.decay_of_one(there.beta)), there.decay_of_one(beta)
        decay = {
            name: min(a * one, max(GROWTH * old, some))
            for name, a, old in zip(there.names, best, opt.weight_decays, strict=True)
        }
        alpha = {name: w / one for name, w in decay.items()}
        return Regularised(alpha, beta, there.gamma, there.gammas, there.log_evidence, decay, objective)

    # As it is saved: the weight decay itself is in the state of the optimizer.

    def state(self) -> dict[str, Any]:
        return {"last": plain(self.last), "since": plain(self.since), **{name: getattr(self, name) for name in COUNTS}}

    def resume(self, state: dict[str, Any]) -> None:
        self.last, self.since = self.restored(state["last"]), self.restored(state["since"])
        for name in COUNTS:
            setattr(self, name, valid(name, state[name], int))
        if self.descent >= len(self.evidence.starts):
            raise ValueError(f"it is damaged: descent is {self.descent}")

    def restored(self, values: dict[str, Any] | None) -> Regularised | None:
        if values is None:
            return None
        found = restored(Regularised, values)
        if any(set(each) != set(self.names) for each in (found.alpha, found.gammas, found.weight_decay)):
            raise ValueError("it is damaged: the evidence is of other parameters")
        return found


def param_groups(
    model: nn.Module, params: Iterable[Any] | None, given: Evidence | Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Parameter groups for LM: one for each α, or one for each parameter, with a weight decay by name."""
    rule = "mq.Evidence(groups=…)" if isinstance(given, Evidence) else "a dict"
    some = None if params is None else list(params)
    if any(isinstance(each, dict) for each in some or ()):
        raise ValueError(f"params= holds groups, and weight_decay={rule} makes its own: pass parameters alone")
    chosen = trainable(model, some)
    names = Parameters(model, chosen).names
    if isinstance(given, Evidence):
        groups = grouped_names(names, given.groups)
        return [{"params": [chosen[i] for i in members], "weight_decay": given.starts[0]} for members in groups]
    missing, unknown = [n for n in names if n not in given], [n for n in given if n not in names]
    if missing or unknown:
        raise ValueError(
            f"weight_decay by name: every parameter that trains has one, and no others. Without one are {missing}, and "
            f"not among them {unknown}"
        )
    return [{"params": [p], "weight_decay": given[name]} for name, p in zip(names, chosen, strict=True)]
