"""The fastest exact representation that fits into memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.utils._pytree import tree_leaves

from ..jacobian.linearization import Linearization
from .contract import Curvature, Representation
from .dense import Dense, check_chunk, check_inertia
from .gram import Gram
from .matrix_free import MatrixFree

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
         "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip

# What is left to the rest of the world when memory is measured and not given.
SHARE = 0.8


@dataclass(frozen=True)
class Shapes:
    """What memory depends on. Numbers per sample are those of the layers that have a rule."""

    n: int  # parameters
    N: int  # samples
    R: int  # rows per sample
    inputs: float  # numbers that the weights multiply, per sample
    outputs: float  # numbers at the outputs of these layers, per sample
    itemsize: int
    others: int = 0  # parameters without a rule: their rows are explicit
    single: bool = True  # one batch, not several in step_over

    @property
    def m(self) -> int:
        return self.R * self.N


@dataclass(frozen=True)
class Choice:
    """What Auto picked, and why."""

    representation: Representation
    bytes: int  # predicted for a step, beside the parameters themselves
    budget: int | None
    why: str
    numbers: int = 0  # in the inputs of the batch that it was made for

    def __str__(self) -> str:
        limit = "" if self.budget is None else f" of {readable(self.budget)}"
        return f"{self.representation}: {self.why}; about {readable(self.bytes)}{limit}"


class Exhausted(torch.OutOfMemoryError):
    """There is no smaller plan."""


@dataclass(frozen=True)
class Auto:
    """Dense where there are fewer parameters than rows, Gram elsewhere; in chunks, or MatrixFree, where these do not
    fit into memory: `memory`, such as "4GiB", or what the device has free. `opt.plan` says what was picked and why.

    All three solve the same system, MatrixFree to its tolerance: they differ in speed and memory. Where a prediction
    was too low and memory runs out, the step is repeated with the next smaller plan.
    """

    chunk: int | None = None
    inertia: float = 0.0  # see Dense
    memory: str | int | None = None

    def __post_init__(self) -> None:
        check_chunk(self.chunk)
        check_inertia(self.inertia)
        if self.memory is not None:
            parse(self.memory)

    adapts = True  # to less memory, when it runs out

    @property
    def by_sample(self) -> bool:
        return True

    def represent(self, lin: Linearization) -> Curvature:
        choice = self.choose(lin)
        G = choice.representation.represent(lin)
        if lin.plan.squeeze and lin.plan.choice is not choice:
            G.notes.append(f"out of memory, planned anew: {choice}")
        lin.plan.choice = choice
        return G

    def choose(self, lin: Linearization) -> Choice:
        """The plan for this step: the last one, while the shapes are the same."""
        if lin.plan.shapes is not None and lin.plan.shapes.single != lin.single:  # that was another kind of step
            lin.plan.squeeze, lin.plan.shapes, lin.plan.choice = 0, None, None
        known = lin.plan.choice
        if known is not None and known.representation.chunk != self.chunk and numbers(lin) <= known.numbers:
            lin.split(known.representation.chunk)  # at once: a forward pass of the whole batch may not fit
            return known  # type: ignore[no-any-return]
        size = lin.theta.element_size()
        if lin.plan.squeeze:  # there was not enough memory to find out the shapes, or less than predicted
            shapes = lin.plan.shapes or Shapes(lin.n, lin.samples(), 1, 0, 0, size, single=lin.single)
        elif lin.single:
            lin.totals()  # the forward pass alone: the rows are not formed before they are needed
            shapes = self._shapes(lin)
        else:
            shapes = Shapes(lin.n, 1, 1, 0, 0, size, single=False)
        choice: Choice = known if known is not None and lin.plan.shapes == shapes else self._choose(lin, shapes)
        lin.plan.shapes = shapes
        if choice.representation.chunk != lin.chunk:
            lin.split(choice.representation.chunk)
        return choice

    def _shapes(self, lin: Linearization) -> Shapes:
        size = lin.theta.element_size()
        if lin.chunk is not None:
            N = lin.samples()
            return Shapes(lin.n, N, max(1, lin.most // N), 0, 0, size)
        (chunk,) = lin.open()
        R = chunk.rows.S.shape[0]
        inputs, outputs, others = chunk.numbers()
        # A ragged batch does not change the representation: the largest so far decides.
        return Shapes(lin.n, max(chunk.rows.S.shape[1], lin.most // R), R, inputs, outputs, size, others)

    def _choose(self, lin: Linearization, shapes: Shapes) -> Choice:
        budget = parse(self.memory) if self.memory is not None else free(lin.device)
        plans = list(self._plans(shapes, lin.single))
        if lin.single and any(batch.opaque for batch in lin.batches):  # nothing that a chunk could be cut from
            plans = [plan for plan in plans if plan[0].chunk == self.chunk]
        fitting = [(r, b, why) for r, b, why in plans if budget is None or b <= budget]
        if lin.plan.squeeze < len(fitting):
            representation, size, why = fitting[lin.plan.squeeze]
            return Choice(representation, size, budget, why, numbers(lin))
        smallest, least, _ = min(plans, key=lambda plan: plan[1])
        if fitting:
            raise Exhausted(
                f"out of memory with every plan, down to {fitting[-1][0]}: use a smaller model or a smaller batch"
            )
        assert budget is not None
        raise ValueError(
            f"no representation of the curvature of {shapes.n:,} parameters fits into {readable(budget)}: the "
            f"smallest, {type(smallest).__name__}, needs about {readable(least)}; allow more (memory=), or train "
            "fewer parameters (params=)"
        )

    def _plans(self, s: Shapes, single: bool) -> Iterator[tuple[Representation, int, str]]:
        """Every way to go, fastest first, with its bytes."""
        dense, gram = Dense(self.chunk, self.inertia), Gram(self.chunk)
        primal = s.n <= s.m or not single
        why = f"{s.n:,} parameters, {s.m:,} rows" if single else f"{s.n:,} parameters, several batches"
        first: Dense | Gram = dense if primal else gram
        cut = single and self.chunk is None
        smaller = [s.N // k for k in (4, 16, 64) if s.N // k > 0] if cut else []
        size = dense_bytes if primal else gram_bytes
        yield first, size(s, self.chunk, self.inertia), why
        for part in smaller if primal else smaller[:2]:  # Gram goes through every pair of chunks
            yield replace(first, chunk=part), size(s, part, self.inertia), f"{why}, in chunks of {part}"
        if single:
            other, other_size = (gram, gram_bytes) if primal else (dense, dense_bytes)
            yield other, other_size(s, self.chunk, self.inertia), f"{why}, the larger matrix does not fit"
        for chunk in dict.fromkeys([self.chunk, *smaller, *([1] if cut else [])]):
            size_of = matrix_free_bytes(s, chunk)
            yield (
                MatrixFree(chunk=chunk),
                size_of,
                f"{why}, no matrix fits" + (f", in chunks of {chunk}" if chunk else ""),
            )


def numbers(lin: Linearization) -> int:
    """In the inputs of the one batch."""
    leaves = tree_leaves([batch.inputs for batch in lin.batches]) if lin.single else []
    return sum(t.numel() for t in leaves if isinstance(t, torch.Tensor))


def dense_bytes(s: Shapes, chunk: int | None, inertia: float) -> int:
    """G, G + A, its scaled copy and its factor, the average; the rows and what they are made of."""
    samples = min(s.N, chunk or s.N)
    matrices = (4 + (inertia > 0)) * s.n**2
    return int(s.itemsize * (matrices + s.R * samples * s.n + samples * (s.inputs + 3 * s.R * s.outputs) + 6 * s.n))


def gram_bytes(s: Shapes, chunk: int | None, inertia: float) -> int:
    """K, its copies and its factor; θ, the step and a few more vectors; inputs and gradients of the layers."""
    samples = min(s.N, chunk or s.N) * (2 if chunk else 1)
    rows = samples * (s.inputs + 3 * s.R * s.outputs + 2 * s.R * s.others)
    return int(s.itemsize * (5 * s.m**2 + 4 * s.n + rows))


def matrix_free_bytes(s: Shapes, chunk: int | None) -> int:
    """Vectors of conjugate gradients, iterates that are kept among them, and two graphs."""
    samples = min(s.N, chunk or s.N)
    return int(s.itemsize * (32 * s.n + 4 * samples * (s.inputs + s.outputs)))


def free(device: torch.device) -> int | None:
    """Bytes that a step may take on this device, None where it does not say."""
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(SHARE * (torch.cuda.mem_get_info(device)[0] + idle))
    try:
        return int(SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return None


def parse(memory: str | int) -> int:
    """ "4GiB" → 4·2³⁰"""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", str(memory).lower())
    unit = UNITS.get(found[2].upper()) if found else None
    if isinstance(memory, bool) or found is None or unit is None or float(found[1]) <= 0:
        raise ValueError(f'memory={memory!r}: bytes, as a number or in words such as "4GiB" or "500MB"')
    return int(float(found[1]) * unit)


def readable(size: int) -> str:
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} B"
