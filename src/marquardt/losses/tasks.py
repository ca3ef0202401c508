"""Several losses at once: one for each output of the model that has a loss, or several for the same output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import (
    WEIGHTS,
    Fault,
    Loss,
    Name,
    OutputLayout,
    Residual,
    Root,
    Target,
    check_weight,
    picked,
    side_by_side,
    spread,
)


class Term(NamedTuple):
    """A loss of one output, and its weight in the sum.

    Attributes:
        name: the name of the output, or its position.
        loss: the loss of this output.
        weight: the weight in the sum.

    >>> term = mq.losses.Term("size", mq.losses.Huber(), 0.1)
    """

    name: Name
    loss: Loss
    weight: float = 1.0


class Placed(NamedTuple):
    """A task with its outputs and targets."""

    name: Name
    loss: Loss
    c: Tensor  # ()
    columns: slice  # of z
    z: Tensor  # (N, *shape)
    y: Target

    def among(self, t: Tensor, like: Tensor) -> Tensor:
        """t (…, N, *shape) beside zeros for the other outputs: (…, N, K)"""
        rows = t.reshape(*t.shape[: t.ndim - self.z.ndim], len(like), -1)
        return F.pad(rows, (self.columns.start, like.shape[1] - self.columns.stop))


@dataclass(frozen=True, kw_only=True, eq=False)
class Tasks(Loss):
    """f = Σₜ weightₜ · fₜ, each fₜ with the reduction and the normaliser νₜ of its own loss.

    z (N, K) is made of the outputs that have a loss, flattened and side by side; the rows of all tasks make one G. In
    Σ-units

        value = Σₜ cₜ Σᵢ wᵢ ℓₜ(zᵢ, yᵢ),  cₜ = weightₜ · factorₜ · Σw / νₜ,

    so that f = value / Σw. Both sums are over all data, see `sums`.

    Args:
        tasks: the losses and their outputs.
        layout: the layout of the outputs; None before the model has been called.
        c: cₜ, (T,); None before all data have been seen.
        kept: νₜ, (T,), 0 if no target of a task counts.

    >>> class Heads(nn.Linear):
    ...     def forward(self, x):
    ...         z = super().forward(x)
    ...         return {"kind": z[:, :3], "size": z[:, 3:]}
    >>> opt = mq.LM(Heads(2, 4), {"kind": ("cross_entropy", 1.0), "size": ("huber", 0.1)})
    >>> type(opt.loss).__name__
    'Tasks'
    >>> step = opt.step(x, {"kind": labels, "size": y})
    """

    surveys: ClassVar[bool] = True
    tasks: tuple[Term, ...]
    layout: OutputLayout | None = None  # of the outputs; None before the model has been called
    c: Tensor | None = None  # (T,)
    kept: Tensor | None = None  # (T,) νₜ: 0 if no target of a task counts

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, loss, weight in self.tasks:
            if not (isinstance(weight, Real) and 0 < weight < math.inf):
                raise ValueError(f"the weight of the loss of output {name!r} must be a positive number, got {weight!r}")
            if loss.reported is not None:
                raise ValueError(f"the loss of output {name!r} is reported in other units: use the loss itself")

    @property
    def sum_of_squares(self) -> bool:  # type: ignore[override]
        return all(task.loss.sum_of_squares for task in self.tasks)

    @property
    def recordable(self) -> bool:  # type: ignore[override]
        return all(task.loss.recordable for task in self.tasks)

    @property
    def curvature_kind(self) -> str:
        kinds = {str(name): loss.curvature_kind for name, loss, _ in self.tasks}
        same = set(kinds.values())
        return same.pop() if len(same) == 1 else ", ".join(f"{name}: {kind}" for name, kind in kinds.items())

    @property
    def names(self) -> tuple[Name, ...]:
        """The names of the outputs that have a loss."""
        return tuple(dict.fromkeys(task.name for task in self.tasks))

    # The outputs.

    def bound(self, raw: Any, y: Target, weight: Tensor | None = None, sums: Tensor | None = None) -> Tasks:
        outputs, targets, tasks = {name: picked(raw, name) for name in self.names}, self._targets(y), []
        for name, loss, factor in self.tasks:
            with _about(name):
                tasks.append(Term(name, loss.bound(outputs[name], targets[name], weight), factor))
        found = replace(self, tasks=tuple(tasks))
        found = replace(found, layout=OutputLayout.like(found._outputs(raw)))
        z = found.joined(raw).detach()
        if weight is not None:
            check_weight(weight, z)
        found.faults(z, y)  # raises if targets do not fit
        total, *counts = found.sums(z, y, weight) if sums is None else sums  # Σw, ν of each
        pairs = zip(found.tasks, counts, strict=True)
        kept = torch.stack([n if task.loss.reduction == "mean" else torch.ones_like(n) for task, n in pairs])
        factors = [task.weight * task.loss.factor * total / n for task, n in zip(found.tasks, kept, strict=True)]
        return replace(found, c=torch.stack(factors), kept=kept)

    def joined(self, raw: Any) -> Tensor:
        return side_by_side(list(self._outputs(raw).values()), raw)

    def _outputs(self, raw: Any) -> dict[Name, Tensor]:
        """The tensor of each output that its loss is taken of, which may be nested in the output: (N, *shape)"""
        found: dict[Name, Tensor] = {}
        for name, loss, _ in self.tasks:
            if name not in found:
                with _about(name):
                    found[name] = loss.joined(picked(raw, name))
        return found

    def sums(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        """Σw and νₜ of every task: (1 + T,)"""
        counts = [part.loss.normaliser(part.z, part.y, weight) for part in self.parts(z, y)]
        return torch.stack([self.normaliser(z, y, weight), *counts])

    def _targets(self, y: Target) -> dict[Name, Target]:
        """The targets by the names of the outputs."""
        names = self.names
        if isinstance(y, Mapping):
            found = dict(y)
        elif isinstance(y, (tuple, list)) and len(y) == len(names):
            found = dict(zip(names, y, strict=True))
        elif len(names) == 1 or y is None:
            found = dict.fromkeys(names, y)
        else:
            got = f"{len(y)} of them" if isinstance(y, (tuple, list)) else type(y).__name__
            raise TypeError(
                f"the targets are {got}, the losses are for {_listed(names)}: pass a dict with these keys, or a tuple "
                "in this order"
            )
        needed = [task.name for task in self.tasks if not isinstance(task.loss, Residual)]
        if not set(needed) <= set(found) <= set(names):
            raise ValueError(
                f"the losses are for the outputs {_listed(names)}, the targets for {_listed(found)}: give every loss "
                "its target, and every target a loss"
            )
        return {name: found.get(name) for name in names}

    def parts(self, z: Tensor, y: Target) -> Iterator[Placed]:
        assert self.layout is not None
        outputs, targets, columns = self.layout.split(z), self._targets(y), self.layout.columns
        factors = z.new_ones(len(self.tasks)) if self.c is None else self.c
        for (name, loss, _), c in zip(self.tasks, factors, strict=True):
            yield Placed(name, loss, c, columns[name], outputs[name], targets[name])

    # The loss.

    def ell(self, z: Tensor, y: Target) -> Tensor:
        """(N, 1)"""
        ells = [p.c * p.loss.ell(p.z, p.y).reshape(len(z), -1).sum(1, True) for p in self.parts(z, y)]
        return torch.stack(ells).sum(0)

    def slope(self, z: Tensor, y: Target) -> Tensor:
        return self.gradient(z, y)

    def factors(self, z: Tensor, y: Target) -> tuple[Tensor, Tensor]:
        S, u, _ = self.root(z, y)
        return S, u

    def value(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        return torch.stack([p.c * p.loss.value(p.z, p.y, weight) for p in self.parts(z, y)]).sum()

    def gradient(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        return torch.stack([p.among(p.c * p.loss.gradient(p.z, p.y, weight), z) for p in self.parts(z, y)]).sum(0)

    def root(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Root:
        return self._together(z, [(p, p.loss.root(p.z, p.y, weight)) for p in self.parts(z, y)])

    def empirical(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Root:
        return self._together(z, [(p, p.loss.empirical(p.z, p.y, weight)) for p in self.parts(z, y)])

    def _together(self, z: Tensor, roots: list[tuple[Placed, Root]]) -> Root:
        """One group of K outputs, with the columns of all tasks: each column is zero outside the outputs of its
        task."""
        rows = [(p, *spread(p.loss, _times(root, p.c), p.z)) for p, root in roots]  # S (R, N, *shape), u (R, N), v
        S, u = torch.cat([p.among(own, z) for p, own, _, _ in rows]), torch.cat([u for _, _, u, _ in rows])
        rest = [p.among(v, z) for p, _, _, v in rows if v is not None]
        v = torch.stack(rest).sum(0)[:, None] if rest else None
        return Root(S.permute(1, 2, 0)[:, None], u.T[:, None], v)

    def mixed(self, z: Tensor, y: Target, weight: Tensor | None, signs: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        """The sum over the tasks, each with different random signs."""
        used, found = 0, []
        for p in self.parts(z, y):

            def own(shape: tuple[int, ...]) -> Tensor:
                nonlocal used
                first, used = used, used + math.prod(shape[1:])  # of one sample
                return signs((len(z), used))[:, :, first:].reshape(-1, *shape)

            rows = p.loss.ungroup(p.loss.mixed(p.z, p.y, weight, own), p.z)  # (k, N, *shape)
            found.append(p.among(p.c.sqrt() * rows, z))
        return torch.stack(found).sum(0)[:, :, None]

    def count(self, z: Tensor, y: Target, weight: Tensor | None = None) -> int:
        return sum(p.loss.count(p.z, p.y, weight) for p in self.parts(z, y))

    def lower_bound(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        return torch.stack([p.c * p.loss.lower_bound(p.z, p.y, weight) for p in self.parts(z, y)]).sum()

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        found = []
        for p in self.parts(z, y):
            with _about(p.name):
                found += [f._replace(name=f"output {p.name!r}: {f.name}") for f in p.loss.faults(p.z, p.y)]
        if self.kept is not None:
            nothing = "every target of the task has weight 0 or is ignored (ignore_index), leave this batch out"
            for task, kept in zip(self.tasks, self.kept, strict=True):
                name = f"output {task.name!r}: the total weight of the targets"
                found += [
                    Fault(kept == 0, kept, name, nothing),
                    Fault(~kept.isfinite() | (kept < 0), kept, name, WEIGHTS),
                ]
        return found


@contextmanager
def _about(name: Name) -> Iterator[None]:
    """Adds the name of the output to errors."""
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"output {name!r}: {error}") from error


def _times(root: Root, c: Tensor) -> Root:
    """The root of c times the loss."""
    S, u, v = root
    return Root(c.sqrt() * S, c.sqrt() * u, None if v is None else c * v)


def _listed(names: Any) -> str:
    return "{" + ", ".join(map(repr, names)) + "}"
