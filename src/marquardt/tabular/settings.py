"""What a committee is made of, and how much work it may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .members import ACTIVATIONS, Limits, Network

# Floating-point operations of a whole fit: a few seconds on two cores. It is never the clock that decides, so that two
# fits with one seed are the same.
WORK = 1.8e11

# Distinct samples. Fewer than the first are not divided into folds; with fewer than the second networks are small, with
# fewer than the third each sample is left out by a member that chooses. From the fourth on, members that leave out a
# tenth need not be trained again with it; from the last on steps are worth more than further networks.
FEWEST, SMALL, FEW, MANY, HUGE = 25, 150, 400, 3000, 15_000

# As much work for tables of many samples, whose products several threads share
MORE = 1.4

# Classes of fewer samples have no wide network beside the small ones.
WIDE = 100

# Members train on, all samples, for this many times the steps that were best for one that stops by what it leaves out:
# a committee averages out what each of its members fits too closely, and not what all have not yet learnt.
LONGER, SHORTEST, LONGEST = 2, 15, 250

# Of the work, what is spent on the choice if all samples are trained on afterwards.
CHOICE = 0.4

# A matrix is not larger than this, and allows this number of steps.
LARGEST, FEWEST_STEPS = 3000, 15

# Samples of a step with Kronecker factors, and steps without a lower error that end it.
BATCH, PATIENCE = 5_000, 10

# Inputs beyond this number are replaced by their main directions.
DIRECTIONS = 256

# Rows of G by parameter if it has not all of them.
ROWS = 4


@dataclass(frozen=True)
class Configuration:
    """A network, and which of its weights share a precision."""

    hidden: tuple[int, ...]
    activation: str
    groups: str  # of Network.groups, or "decay" for networks that mq.fit trains

    def network(self, inputs: int, outputs: int) -> Network:
        return Network((inputs, *self.hidden, outputs), self.activation)

    def __str__(self) -> str:
        shape = "×".join(map(str, self.hidden)) or "linear"
        named = {"all": "one precision", "inputs": "precisions by input", "decay": "weight decay"}
        return f"{shape} {self.activation}, {named[self.groups]}"


# Complementary, and each among the best on tables of its kind: curved and additive tables with inputs
# that do not matter; tables in which all inputs do.
AUTO = (
    Configuration((10, 10), "silu", "inputs"),
    Configuration((20,), "silu", "inputs"),
    Configuration((12, 12), "tanh", "all"),
)
LARGE_AUTO = (Configuration((16, 16), "silu", "inputs"), Configuration((16, 16), "tanh", "all"))
WIDE_AUTO = (Configuration((64,), "tanh", "decay"), Configuration((64,), "silu", "decay"))
SMALL_AUTO = (Configuration((12,), "silu", "inputs"), Configuration((12,), "tanh", "all"))


@dataclass(frozen=True)
class Division:
    """Members that choose, each without one of these folds; and members that train on everything afterwards, 0 if
    those that chose are the committee."""

    choosing: int
    folds: int
    final: int


@dataclass(frozen=True)
class Settings:
    """How to train on a table. Everything is decided by the shape of the table and by these."""

    task: str = "regression"
    hidden: str | Sequence[int] = "auto"
    activation: str = "auto"
    members: int | str = "auto"
    steps: int | None = None  # None is 250, or what the work allows
    patience: int | None = 20  # steps without a lower error on what is held out; None goes on to the end
    held_out: bool = True  # whether each member leaves out a part of the samples, to stop by
    work: float = WORK
    seed: int = 0

    def __post_init__(self) -> None:
        if self.task not in ("regression", "classification"):
            raise ValueError(f'task={self.task!r}: "regression" or "classification"')
        if self.activation != "auto" and self.activation not in ACTIVATIONS:
            raise ValueError(f'activation={self.activation!r}: "auto", or one of {", ".join(ACTIVATIONS)}')
        if isinstance(self.hidden, str) and self.hidden != "auto":
            raise ValueError(f'hidden={self.hidden!r}: "auto", or the sizes of the hidden layers')
        for size in () if self.hidden == "auto" else self.hidden:
            check_whole(size, "hidden", 1)
        check_whole(self.members, "members", 1, "auto")
        check_whole(self.steps, "steps", 1, None)
        check_whole(self.patience, "patience", 1, None)
        check_whole(self.seed, "seed", 0)
        if not self.work > 0:
            raise ValueError(f"work={self.work!r}: floating-point operations of the whole fit, above 0")

    def arranged(self, samples: int, inputs: int, outputs: int) -> tuple[tuple[Configuration, ...], Division]:
        """What is trained, and on which parts of the samples. Matrices that are too large leave Kronecker factors."""
        found, division = self._configurations(samples), self._division(samples)
        count = max(division.choosing, division.final)
        networks = [one.network(inputs, outputs) for one in found if one.groups != "decay"]
        steps = [cost(network, count, samples) if network.n <= LARGEST else self.work for network in networks]
        if FEWEST_STEPS * sum(steps) <= self.work:
            return found, division
        wide = found if self.hidden != "auto" else self._activated(WIDE_AUTO if outputs <= 2 else WIDE_AUTO[1:])
        count = self._members(count)
        folds = max(count, 10 if samples >= MANY else 5)
        division = Division(count, folds, 0) if division.folds else Division(0, 0, count)
        return tuple(replace(one, groups="decay") for one in wide), division

    def _configurations(self, samples: int) -> tuple[Configuration, ...]:
        """One if the hidden sizes are given, otherwise several to be stacked"""
        if not isinstance(self.hidden, str):
            return self._activated((Configuration(tuple(self.hidden), "silu", "inputs"),))
        found: tuple[Configuration, ...] = SMALL_AUTO if samples < SMALL else AUTO if samples < MANY else LARGE_AUTO
        found = found if samples < HUGE else LARGE_AUTO[-1:]
        if self.task == "classification" and self.held_out and samples >= WIDE:
            found = (*dict.fromkeys((found[0], found[-1])), WIDE_AUTO[1])
        return self._activated(found)

    def _activated(self, found: tuple[Configuration, ...]) -> tuple[Configuration, ...]:
        """The same with the activation that was asked for"""
        return found if self.activation == "auto" else tuple(replace(one, activation=self.activation) for one in found)

    def _members(self, usual: int) -> int:
        return usual if isinstance(self.members, str) else self.members

    def _division(self, samples: int) -> Division:
        many = samples >= MANY
        members = self._members(5 if not many else 3 if samples < HUGE else 2)
        if not self.held_out or samples < FEWEST:
            return Division(0, 0, members)
        if many or self.task == "classification":
            return Division(members, max(members, 10 if many else 5), 0)
        return Division(members if samples < FEW else min(members, 3), max(members, 5), members)

    def plan(
        self, one: Configuration, network: Network, members: int, samples: int, work: float, steps: int | None = None
    ) -> Limits:
        """The steps, and the samples or rows of G of a step, within some work; without a number of steps, patience ends
        it. With Kronecker factors a step has all samples or a batch."""
        if one.groups == "decay":
            rows = None if samples <= BATCH else BATCH
            factors = sum(20.0 * (a + 1) ** 3 + 20.0 * b**3 for a, b in pairwise(network.sizes))
            once = members * (14.0 * (rows or samples) * network.sizes[-1] * network.n + 2.0 * factors)
            wanted, least = self.steps or (100 if rows is None else 1000), 20
            most, steps = PATIENCE, None
        else:
            rows, once = rows_of(network, samples), cost(network, members, samples)
            wanted, least = steps or self.steps or LONGEST, 5
            most = max(wanted, least)
        count = max(least, min(wanted, int(work / once)))
        patience = count if steps or self.patience is None else min(self.patience, most)
        return Limits(count, patience, once / members, rows)


def cost(network: Network, members: int, samples: int) -> float:
    """Floating-point operations of a step with dense matrices"""
    n, rows = network.n, rows_of(network, samples) or samples * network.sizes[-1]
    return members * (2.0 * rows * n * n + 0.7 * n**3 + 30.0 * samples * n)


def rows_of(network: Network, samples: int) -> int | None:
    """The number of rows of G; None is all of them"""
    some = max(ROWS * network.n, 2000)
    return None if samples * network.sizes[-1] <= 1.5 * some else some


def check_whole(value: object, name: str, least: int, *others: object) -> None:
    if value in others and not isinstance(value, bool):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        more = "".join(f" or {other!r}" for other in others)
        raise ValueError(f"{name}={value!r}: an integer of at least {least}{more}")
