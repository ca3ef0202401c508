"""A committee from a table: configurations are tried, weighted, and trained on everything."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .choosing import Divided, unweighted, weigh
from .committee import Committee, law_of
from .members import Descent, Given, Members
from .network import Network
from .scaling import Inputs, Scale, distinct, folds
from .settings import (
    CHOICE,
    DIRECTIONS,
    HUGE,
    LONGER,
    LONGEST,
    MANY,
    MORE,
    SHORTEST,
    Configuration,
    Division,
    Settings,
)
from .storing import load_parts, save_part
from .wide import trained_wide

Watch = Callable[[dict[str, Any]], Any]

# Times the median error of the others, or of those that chose: a member beyond it is lost
FAR, WORSE = 4.0, 2.0

# Floating-point operations of a step of one member from which on several threads are worth it
SEVERAL = 5e8


@torch.no_grad()
def train(
    x: Tensor, y: Tensor, settings: Settings, *, weight: Tensor | None = None,
    checkpoint: str | PathLike[str] | None = None, watch: Watch | None = None,
    classes: int | None = None,
) -> Committee:  # fmt: skip
    """A committee for x (N, d) and y (N, outputs), or classes 0, 1, … (N,); float64.

    The order of the rows does not matter, and a weight that is a whole number counts as so many equal rows; weights
    that are not whole are relative. `checkpoint` is a folder in which every finished configuration is kept: the same
    call again goes on from there, to the same committee.
    """
    check(x, y, settings, weight)
    weight = torch.ones(len(x), dtype=torch.float64) if weight is None else counts(weight)
    x, y, weight = distinct(x, y, weight)
    inputs = Inputs.of(x, weight, min(DIRECTIONS, max(8, len(x) // 3)))
    generator = torch.Generator().manual_seed(settings.seed)
    if settings.task == "regression":
        targets, frequencies = Scale.of(y, weight), None
        goal, known = targets.apply(y), bool((targets.spread > 0).any())
    else:
        targets, goal = None, y
        frequencies = torch.zeros(classes or int(y.max()) + 1, dtype=torch.float64).index_add_(0, y, weight)
        frequencies = frequencies / frequencies.sum()
        known = bool((frequencies > 0).sum() > 1)
    outputs = len(targets.spread) if targets is not None else 1
    found = Committee(
        settings, inputs, targets, frequencies, [], torch.zeros(0, dtype=torch.float64),
        torch.ones(outputs, dtype=torch.float64), torch.zeros(outputs, dtype=torch.float64), [],
    )  # fmt: skip
    if not known or not inputs.width:
        found.says.append("all targets are the same" if not known else "no input column has two different values")
        return found
    law, count = law_of(frequencies, outputs)
    configurations, division = settings.arranged(len(x), inputs.width, count, law.rank)
    fold = folds(goal, division.folds, generator) if division.folds else None
    table = Divided(inputs.apply(x), goal, weight, fold, division.choosing)
    work = Rounds(found, table, configurations, division, generator, checkpoint, watch)
    if division.choosing:
        found.parts = work.chosen(CHOICE if division.final else 1.0)
        weigh(found, table)
        if not division.final:
            found.parts = [agreeing(part) for part in found.parts]
    if division.final:
        found.parts = work.final(division.final)
    if not division.choosing:
        unweighted(found)
    for w, part, one in zip(found.weights.tolist(), found.parts, work.configurations, strict=True):
        found.says.append(f"{one}: {len(part.theta)} members of {part.network.n} parameters, weight {w:.2f}")
    return found


def counts(weight: Tensor) -> Tensor:
    """Whole numbers as they are, others with a mean of 1 over those that are not 0"""
    if bool((weight == weight.round()).all()):
        return weight
    return weight / weight[weight > 0].mean()


class Rounds:
    """The configurations, one after the other, within the work that is left."""

    def __init__(
        self, found: Committee, table: Divided, configurations: tuple[Configuration, ...], division: Division,
        generator: torch.Generator, checkpoint: Any, watch: Watch | None,
    ) -> None:  # fmt: skip
        self.found, self.table, self.generator, self.watch = found, table, generator, watch
        self.law, self.outputs = law_of(found.frequencies, len(found.floor))
        self.configurations = configurations
        self.left = found.settings.work * (MORE if MANY <= len(table.x) < HUGE else 1.0)
        self.kept = None if checkpoint is None else Path(checkpoint)
        self.mark = "" if self.kept is None else fingerprint(table, found.settings)
        self.number = 0  # of trainings so far
        self.count = len(self.configurations) * (bool(division.choosing) + bool(division.final))
        self.before = load_parts(self.kept, self.count, self.mark, self.law)

    def chosen(self, share: float) -> list[Members]:
        """Each member without a fold, by which it stops"""
        data, held = self.table.given()
        work, found = share * self.left, []
        for i, one in enumerate(self.configurations):
            part, spent = self.trained(one, data, held, work / (len(self.configurations) - i), None)
            work -= spent
            self.left -= spent
            found.append(part)
        return found

    def final(self, members: int) -> list[Members]:
        """All samples to every member, of configurations that count, for a number of steps that is known before"""
        before, N = self.found.parts, len(self.table.x)
        data, _ = replace(self.table, fold=None, members=members).given()
        steps = [self.steps_of(before[i] if before else None) for i in range(len(self.configurations))]
        used = [not before or w > 0 for w in self.found.weights.tolist() or steps]
        wanted = [
            used[i] * steps[i] * self.found.settings.cost(self.network(one), members, N, self.law.rank)
            for i, one in enumerate(self.configurations)
        ]
        found, scarce = [], min(1.0, self.left / sum(wanted))
        for i, one in enumerate(self.configurations):
            if used[i]:
                part = self.trained(one, data, None, scarce * wanted[i], steps[i])[0]
                found.append(not_lost(part, before[i], data) if before else part)
            else:
                found.append(before[i])
                self.number += 1
        return found

    def steps_of(self, before: Members | None) -> int:
        settings = self.found.settings
        if before is None:
            return settings.steps or SHORTEST
        best = LONGER * float(before.best_step.median())
        return min(max(round(best), SHORTEST), settings.steps or LONGEST)

    def network(self, one: Configuration) -> Network:
        return Network((self.table.x.shape[1], *one.hidden, self.outputs), one.activation)

    def trained(
        self, one: Configuration, data: Given, held: Given | None, work: float, steps: int | None
    ) -> tuple[Members, float]:
        """And the work that it took"""
        settings, law = self.found.settings, self.law
        members, samples = data.weight.shape
        network = self.network(one)
        wide = one.groups == "decay"
        plan = settings.plan(network, members, samples, law.rank, work, steps)
        once = settings.cost(network, members, samples, law.rank)
        if wide:
            plan, once = settings.wide_plan(network, members, samples, law.rank, work)
        own = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=self.generator)))
        part = self.before.pop(self.number, None)
        if part is None:
            seen = watcher(one, self.number, self.count, plan.steps, self.watch)
            with threads(once / members):
                if wide:
                    part = trained_wide(network, law, data, held, plan, own, seen)
                else:
                    part = Descent(network, law, one.groups, data, held, plan, own).run(seen)
            save_part(self.kept, self.number, self.mark, part)
        self.number += 1
        taken = sum(len(steps) for steps in part.steps) / members
        return part, taken * once


def not_lost(part: Members, chosen: Members, data: Given) -> Members:
    """The members that fit what they have seen not much worse than those that chose predict what they had not seen, and
    had as many steps as were best for these; otherwise those that chose"""
    outputs = data.y.shape[2] if data.y.ndim == 3 else 1
    kept = part.error <= WORSE * chosen.error.median() / outputs
    enough = max(len(steps) for steps in part.steps) >= int(chosen.best_step.median())
    return part.among(kept) if enough and bool(kept.any()) else agreeing(chosen)


def agreeing(chosen: Members) -> Members:
    """Those whose error on what they left out is not far above that of the others"""
    return chosen.among(chosen.error <= FAR * chosen.error.median())


@contextmanager
def threads(step: float) -> Iterator[None]:
    """One thread for steps of little work: several would wait for each other, for long if the machine is busy"""
    before = torch.get_num_threads()
    torch.set_num_threads(before if step >= SEVERAL else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def watcher(
    configuration: Configuration, i: int, of: int, steps: int, watch: Watch | None
) -> Callable[[int, Members, bool], None] | None:
    """What `watch` is given after every step; `member` is a configuration, `loss` the mean over its members"""
    if watch is None:
        return None

    def seen(step: int, best: Members, last: bool) -> None:
        event = {"configuration": str(configuration), "member": i + 1, "members": of, "step": step}
        watch(event | {"steps": step if last else steps, "loss": float(best.error.mean())})

    return seen


def fingerprint(table: Divided, settings: Settings) -> str:
    """Of the samples and the settings: a part that was kept belongs to no others"""
    digest = hashlib.sha256(repr(settings).encode())
    for t in (table.x, table.y, table.weight):
        digest.update(t.contiguous().numpy().tobytes())
    return digest.hexdigest()


def check(x: Tensor, y: Tensor, settings: Settings, weight: Tensor | None) -> None:
    if x.ndim != 2 or not len(x) or not x.shape[1]:
        raise ValueError(f"x has the shape {tuple(x.shape)}: (samples, columns), one of each at least")
    wanted = 2 if settings.task == "regression" else 1
    if y.ndim != wanted or len(y) != len(x):
        shape = "(samples, outputs)" if wanted == 2 else "(samples,), of classes 0, 1, …"
        raise ValueError(f"y has the shape {tuple(y.shape)} beside {len(x)} samples: {shape}")
    for name, t in (("x", x), ("y", y)):
        if not bool(t.isfinite().all()):
            raise ValueError(f"{name} has NaN or infinite values: leave these samples out, or fill them in")
    if weight is None:
        return
    if weight.shape != (len(x),) or not bool(weight.isfinite().all() & (weight >= 0).all() & (weight.sum() > 0)):
        raise ValueError("weight: a finite number of at least 0 for each sample, and one above 0")
