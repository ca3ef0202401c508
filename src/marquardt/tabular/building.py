"""A committee from a table: configurations are tried, weighted, and trained on everything."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import files
from .committee import Committee, Inputs, Scale
from .members import Descent, Given, Law, Members, Network, check_entries, part_from, part_state, softened, trained_wide
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
    cost,
)

Watch = Callable[[dict[str, Any]], Any]

# Times the median error of the others, or of those that chose: a member beyond it is lost
FAR, WORSE = 4.0, 2.0

# Floating-point operations of a step of one member from which on several threads are worth it
SEVERAL = 5e8

# Configurations that would count for less are left out.
LEAST = 0.05

# How much of the Laplace variance of a logit counts, tried on the samples that were left out.
SOFTENING = (0.0, 0.1, 0.3, 1.0, 3.0)

# Residuals that the spread of predictions is found from: evenly spaced ones of more.
MOST = 3000

KEPT = r"configuration-\d+"  # the names of files with finished configurations, without their ends


@dataclass(frozen=True)
class Table:
    """What is trained on: scaled inputs (N, d), scaled targets (N, c) or classes (N,), and weights (N,)."""

    x: Tensor
    y: Tensor
    weight: Tensor
    law: Law

    def given(self, chosen: list[Tensor]) -> Given:
        """Some samples for each member. Members have different numbers of them: the last are filled up with weight 0"""
        most = max(map(len, chosen))
        index = torch.stack([torch.cat((c, c.new_zeros(most - len(c)))) for c in chosen])
        real = torch.stack([torch.arange(most) < len(c) for c in chosen])
        return Given(self.x[index], self.law.targets(self.y)[index], self.weight[index] * real)


@torch.no_grad()
def train(
    x: Tensor, y: Tensor, settings: Settings, *, weight: Tensor | None = None,
    checkpoint: str | PathLike[str] | None = None, watch: Watch | None = None,
    classes: int | None = None,
) -> Committee:  # fmt: skip
    """A committee for x (N, d) and y (N, outputs), or classes 0, 1, … (N,); float64.

    The order of the rows does not matter, and a weight that is a whole number counts as that many equal rows; weights
    that are not whole are relative. `checkpoint` is a folder in which every finished configuration is kept: the same
    call again goes on from there, to the same committee.
    """
    if weight is None:
        weight = torch.ones(len(x), dtype=torch.float64)
    elif not bool((weight == weight.round()).all()):
        weight = weight / weight[weight > 0].mean()
    x, y, weight = distinct(x, y, weight)
    inputs = Inputs.of(x, weight, min(DIRECTIONS, max(8, len(x) // 3)))
    generator = torch.Generator().manual_seed(settings.seed)
    targets, frequencies, goal = None, None, y
    if settings.task == "regression":
        targets = Scale.of(y, weight)
        goal, known = targets.apply(y), bool((targets.spread > 0).any())
    else:
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
    law = Law.of(frequencies, outputs)
    configurations, division = settings.arranged(len(x), inputs.width, law.outputs)
    fold = folds(goal, division.folds, generator) if division.folds else torch.zeros(0)
    table = Table(inputs.apply(x), goal, weight, law)
    work = Rounds(found, table, configurations, division, generator, checkpoint, watch)
    if division.choosing:
        inside = [(fold != j).nonzero()[:, 0] for j in range(division.choosing)]
        outside = [(fold == j).nonzero()[:, 0] for j in range(division.choosing)]
        found.parts = work.chosen(table.given(inside), table.given(outside), CHOICE if division.final else 1.0)
        weigh(found, table, outside)
        if not division.final:
            found.parts = [agreeing(part) for part in found.parts]
    if division.final:
        found.parts = work.final(division.final)
    if not division.choosing:
        unweighted(found)
    for w, part, one in zip(found.weights.tolist(), found.parts, configurations, strict=True):
        found.says.append(f"{one}: {len(part.theta)} members of {part.network.n} parameters, weight {w:.2f}")
    return found


def distinct(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same rows once, sorted, with the sum of their weights; those of weight 0 left out."""
    real = weight > 0
    x, y, weight = x[real], y[real], weight[real]
    wide = y[:, None].to(x) if y.ndim == 1 else y
    table, place = torch.unique(torch.cat((x, wide), 1), dim=0, return_inverse=True)
    total = torch.zeros(len(table), dtype=x.dtype).index_add_(0, place, weight)
    found = table[:, x.shape[1] :]
    return table[:, : x.shape[1]].clone(), found[:, 0].to(y.dtype) if y.ndim == 1 else found.clone(), total


# --- training ---


class Rounds:
    """The configurations, one after the other, within the work that is left."""

    def __init__(
        self, found: Committee, table: Table, configurations: tuple[Configuration, ...], division: Division,
        generator: torch.Generator, checkpoint: Any, watch: Watch | None,
    ) -> None:  # fmt: skip
        self.found, self.table, self.generator, self.watch = found, table, generator, watch
        self.configurations = configurations
        self.left = found.settings.work * (MORE if MANY <= len(table.x) < HUGE else 1.0)
        self.folder = None if checkpoint is None else Path(checkpoint)
        self.mark = "" if self.folder is None else fingerprint(table, found.settings)
        self.number = 0  # of trainings so far
        self.count = len(self.configurations) * (bool(division.choosing) + bool(division.final))
        paths = {} if self.folder is None else {number: _path(self.folder, number) for number in range(self.count)}
        # All of it is read before any of it is used.
        self.before = {number: _load_part(path, self.mark) for number, path in paths.items() if os.path.lexists(path)}

    def chosen(self, data: Given, held: Given, share: float) -> list[Members]:
        """Each member without a fold, by which it stops"""
        work, found = share * self.left, []
        for i, one in enumerate(self.configurations):
            part, spent = self.trained(one, data, held, work / (len(self.configurations) - i), None)
            work -= spent
            self.left -= spent
            found.append(part)
        return found

    def final(self, members: int) -> list[Members]:
        """All samples to every member, of configurations that count, for a number of steps that is known before"""
        N = len(self.table.x)
        data = self.table.given([torch.arange(N)] * members)
        before: list[Any] = self.found.parts or [None] * len(self.configurations)
        weights = self.found.weights.tolist() or [1.0] * len(self.configurations)
        steps = [self.steps_of(part) for part in before]
        wanted = [
            (w > 0) * n * cost(self.network(one), members, N)
            for w, n, one in zip(weights, steps, self.configurations, strict=True)
        ]
        found, scarce = [], min(1.0, self.left / sum(wanted))
        for one, old, work, n in zip(self.configurations, before, wanted, steps, strict=True):
            if old is not None and not work:
                found.append(old)
                self.number += 1
                continue
            part, _ = self.trained(one, data, None, scarce * work, n)
            found.append(part if old is None else not_lost(part, old, data))
        return found

    def steps_of(self, before: Members | None) -> int:
        most = self.found.settings.steps
        if before is None:
            return most or SHORTEST
        return min(max(round(LONGER * float(before.best_step.median())), SHORTEST), most or LONGEST)

    def network(self, one: Configuration) -> Network:
        return one.network(self.table.x.shape[1], self.table.law.outputs)

    def trained(
        self, one: Configuration, data: Given, held: Given | None, work: float, steps: int | None
    ) -> tuple[Members, float]:
        """And the work that it took"""
        law, network = self.table.law, self.network(one)
        members, samples = data.weight.shape
        plan = self.found.settings.plan(one, network, members, samples, work, steps)
        own = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=self.generator)))
        part = self.before.pop(self.number, None)
        if part is None:
            seen = None if self.watch is None else partial(self.seen, self.watch, one, plan.steps)
            with threads(plan.work):
                if one.groups == "decay":
                    part = trained_wide(network, law, data, held, plan, own, seen)
                else:
                    part = Descent(network, law, one.groups, data, held, plan, own).run(seen)
            if self.folder is not None:
                save_part(self.folder, self.number, self.mark, part)
        self.number += 1
        return part, sum(map(len, part.steps)) * plan.work

    def seen(self, watch: Watch, one: Configuration, steps: int, step: int, best: Members, last: bool) -> None:
        """What `watch` is given after every step; `member` is a configuration, `loss` the mean over its members"""
        event = {"configuration": str(one), "member": self.number + 1, "members": self.count}
        watch(event | {"step": step, "steps": step if last else steps, "loss": float(best.error.mean())})


def not_lost(part: Members, chosen: Members, data: Given) -> Members:
    """The members that fit what they have seen not much worse than those that chose predict what they had not seen, and
    had as many steps as were best for these; otherwise those that chose"""
    outputs = data.y.shape[2] if data.y.ndim == 3 else 1
    good = part.error <= WORSE * chosen.error.median() / outputs
    enough = max(len(steps) for steps in part.steps) >= int(chosen.best_step.median())
    return part.among(good) if enough and bool(good.any()) else agreeing(chosen)


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


# --- the parts of the samples that members leave out: what each configuration counts, and how wide intervals are ---


def folds(y: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """A fold of each sample, with classes or targets spread evenly over the folds: (N,)"""
    N = len(y)
    mixed = torch.randperm(N, generator=generator)
    order = mixed[torch.argsort(y[mixed], stable=True)] if y.ndim == 1 else torch.argsort(y[:, 0], stable=True)
    within = torch.rand(-(-N // count), count, generator=generator).argsort(1).flatten()[:N]
    found = torch.empty(N, dtype=torch.long)
    found[order] = within
    return found


def weigh(found: Committee, table: Table, outside: list[Tensor]) -> None:
    """Weights of the configurations and the spread of the predictions, from what the members left out"""
    index = torch.cat(outside)
    left = [of_left_out(part, table.x, outside) for part in found.parts]
    z, v = torch.stack([a for a, _ in left]), torch.stack([b for _, b in left])  # (C, N, c)
    y, weight = table.y[index], table.weight[index]
    if found.frequencies is not None:
        soften(found, z, v, y, weight)
        return
    w = stacked(z, y, weight)
    w = torch.where(w >= LEAST, w, 0.0)
    found.weights = w / w.sum()
    mean, variance = (torch.einsum("c,cno->no", found.weights, t) for t in (z, v))
    squares = (y - mean).square()
    pairs = [calibrated(squares[:, o], variance[:, o], weight) for o in range(y.shape[1])]
    found.floor, found.factor = (torch.tensor(t, dtype=torch.float64) for t in zip(*pairs, strict=True))
    error = float((weight[:, None] * squares).sum() / weight.sum() / y.shape[1]) ** 0.5
    found.says.append(f"{error:.3g} of the targets' standard deviation is not explained, on samples left out")


def unweighted(found: Committee) -> None:
    """Nothing was left out: all configurations count alike, and noise and variance are those of the evidence"""
    found.weights = torch.full((len(found.parts),), 1 / len(found.parts), dtype=torch.float64)
    if found.frequencies is not None:
        return
    noise = torch.stack([(1 / part.beta).mean() for part in found.parts]).mean()
    found.floor, found.factor = noise.repeat(len(found.floor)), noise.sqrt().repeat(len(found.floor))


def soften(found: Committee, z: Tensor, v: Tensor, y: Tensor, weight: Tensor) -> None:
    """Weights and softening with the least log loss on what was left out"""
    least = math.inf
    for factor in SOFTENING:
        p = softened(z, factor * v).gather(2, y.long().expand(len(z), -1)[..., None])[..., 0]  # (C, N)
        w = mixed(p, weight)
        loss = -float((weight * (w @ p).clamp(min=1e-300).log()).sum() / weight.sum())
        if loss < least:
            least, found.weights, found.factor = loss, w, torch.full((1,), factor, dtype=torch.float64)
    found.says.append(f"log loss {least:.3g} on samples left out")


def of_left_out(part: Members, x: Tensor, outside: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs and their variance, of every sample by the member that left it out: (N, c) each"""
    member = torch.arange(len(outside))
    alone = [(part.among(member == i), x[index]) for i, index in enumerate(outside)]
    return torch.cat([one.outputs(u)[0] for one, u in alone]), torch.cat([one.variance(u)[0] for one, u in alone])


def stacked(predictions: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """w ≥ 0, Σw = 1, with the least Σ(y − Σwₖpₖ)²: predictions (C, N, c), y (N, c), weight (N,) → (C,)

    Exact: the best weights of every set of configurations, if they are all positive, and of these the best.
    """
    E = (weight.sqrt()[:, None] * (predictions - y)).flatten(1)  # (C, N·c)
    Q, C = E @ E.T / weight.sum(), len(E)  # with Σw = 1 the error is wᵀQw
    best, least = Q.new_full((C,), 1 / C), math.inf
    for chosen in (torch.tensor(some) for size in range(1, C + 1) for some in combinations(range(C), size)):
        part, ones = Q[chosen][:, chosen], Q.new_ones(len(chosen))
        w = torch.linalg.solve(part + (1e-10 * part.diagonal().mean() + 1e-300) * ones.diag(), ones)
        w = w / w.sum()
        error = float(w @ part @ w)
        if bool((w >= 0).all()) and error < least:
            best, least = Q.new_zeros(C).index_copy_(0, chosen, w), error
    return best


def mixed(found: Tensor, weight: Tensor, rounds: int = 200) -> Tensor:
    """w ≥ 0, Σw = 1, with the largest Σ log Σwₖpₖ, by expectation and maximisation: p of the true class (C, N)"""
    w = torch.full((len(found),), 1 / len(found), dtype=found.dtype)
    p, share = found.clamp(min=1e-300), weight / weight.sum()
    for _ in range(rounds):
        part = w[:, None] * p
        w = ((part / part.sum(0)) * share).sum(1)
    return w


def calibrated(squares: Tensor, variance: Tensor, weight: Tensor) -> tuple[float, float]:
    """s² and c with which residuals are most likely of the variance s² + c·v: squares, v and weight (N,)

    On a grid of both, in units of the mean square and of the mean of v. Few residuals say less than they seem to, and
    members have stopped by them: the variance is larger by (N + 2)/(N − 4).
    """
    every = -(-len(squares) // MOST)
    squares, variance, weight = squares[::every], variance[::every], weight[::every]
    w = weight / weight.sum()
    total = float((w * squares).sum())
    if total <= 0:
        return 0.0, 0.0
    mean = float((w * variance).sum())
    if mean <= 0:
        return total, 0.0
    shares = torch.cat((torch.zeros(1), torch.logspace(-3, 0.5, 36, dtype=torch.float64))).double()
    floors = torch.logspace(-4, 0, 41, dtype=torch.float64)
    v = floors[:, None, None] + shares[None, :, None] * (variance / mean)  # (s²/total, c·mean/total, N)
    cost = (w * (v.log() + squares / total / v)).sum(-1)
    at = int(cost.argmin())
    s2, c = float(floors[at // len(shares)]), float(shares[at % len(shares)])
    wider = (len(squares) + 2) / max(len(squares) - 4, 1)
    return wider * s2 * total, wider * c * total / mean


# --- finished configurations in a folder ---


def fingerprint(table: Table, settings: Settings) -> str:
    """Of the samples and the settings: a part that was kept belongs to no others"""
    digest = hashlib.sha256(repr(settings).encode())
    for t in (table.x, table.y, table.weight):
        digest.update(t.contiguous().numpy().tobytes())
    return digest.hexdigest()


def save_part(folder: Path, number: int, mark: str, part: Members) -> None:
    files.save(_path(folder, number), {"mark": mark, "part": part_state(part)})


def _load_part(path: Path, mark: str) -> Members:
    """What was kept for these samples and settings"""
    way = "move it away, and the same command trains these networks again"
    try:
        if path.is_symlink() or not path.is_file():
            raise files.Damaged(f"{path} is no file that marquardt has written")
        state, is_sealed = files.load(path)
        if not is_sealed:
            raise files.Damaged(f"{path} has no checksum: it is damaged, or of an earlier version")
        check_entries(state, {"mark", "part"}, path.name)
        part = part_from(state["part"])
    except files.Damaged as error:
        raise ValueError(f"{error}; {way}") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged, or no file of marquardt ({error}); {way}") from None
    if state["mark"] != mark:
        raise ValueError(f"{path} is of other samples or settings: name another folder, or move this file away")
    return part


def _path(folder: Path, number: int) -> Path:
    return folder / f"configuration-{number + 1}.pt"
