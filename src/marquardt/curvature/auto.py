"""The fastest exact representation that fits into memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.utils._pytree import tree_leaves

from ..jacobian.linearization import Linearization, Needs
from ..memory import Exhausted, out_of_memory
from .contract import Curvature, Interchangeable, Representation, check_chunk, check_inertia
from .dense import Dense
from .gram import Gram
from .matrix_free import MatrixFree
from .plan import Plan, Shapes, readable

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
         "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip

# What is left to the rest of the world when memory is measured and not given.
SHARE = 0.8

# How often a step is repeated with a smaller plan.
PLANS = 9


@dataclass(frozen=True)
class Auto(Interchangeable):
    """Dense if there are fewer parameters than rows, otherwise Gram; in chunks, or MatrixFree, if these do not fit
    into memory: `memory`, such as "4GiB", or what the device has free. `opt.plan` says what was picked and why.

    All three solve the same system, MatrixFree to its tolerance: they differ in speed and memory. If a prediction was
    too low and memory runs out, the step is repeated with the next smaller plan.
    """

    chunk: int | None = None
    inertia: float = 0.0  # see Dense
    memory: str | int | None = None

    def __post_init__(self) -> None:
        check_chunk(self.chunk)
        check_inertia(self.inertia)
        if self.memory is not None:
            parse(self.memory)

    @property
    def needs(self) -> Needs:
        return Needs(self.chunk)

    def form(self, lin: Linearization) -> Curvature:
        return self.choose(lin, None)[0].represent(lin)

    @property
    def _options(self) -> tuple[object, ...]:
        return self.chunk, self.inertia, self.memory

    def of(self, plan: Plan) -> Representation:
        """What a plan has picked."""
        kinds: dict[str | None, Representation] = {
            "Dense": Dense(plan.chunk, self.inertia), "Gram": Gram(plan.chunk), "MatrixFree": MatrixFree(plan.chunk),
        }  # fmt: skip
        return kinds[plan.kind]

    def choose(self, lin: Linearization, plan: Plan | None) -> tuple[Representation, Plan]:
        """The last plan, while the shapes are the same; otherwise another one."""
        other_kind = plan is not None and plan.shapes is not None and plan.shapes.single != lin.single
        if plan is None or plan.options != self._options or other_kind:
            plan = Plan(self._options)
        known = plan.kind is not None
        if known and plan.chunk != self.chunk and input_size(lin) <= plan.input_size:
            return self.of(plan), plan  # at once: a forward pass of the whole batch may not fit
        shapes = self._shapes(lin, plan)
        if not known or shapes != plan.shapes:
            plan = self._plan(lin, replace(plan, shapes=shapes))
        return self.of(plan), plan

    def smaller(self, plan: Plan | None, error: RuntimeError) -> Plan | None:
        plan = Plan(self._options) if plan is None else plan
        if not out_of_memory(error) or isinstance(error, Exhausted) or plan.squeeze >= PLANS:
            return None
        return Plan(self._options, shapes=plan.shapes, squeeze=plan.squeeze + 1)

    def restored(self, plan: Plan, device: torch.device) -> Plan | None:
        budget = parse(self.memory) if self.memory is not None else free(device)
        fits = budget is None or plan.bytes <= budget
        return plan if plan.options == self._options and fits else None

    def _shapes(self, lin: Linearization, plan: Plan) -> Shapes:
        n, size = lin.n, lin.theta.element_size()
        if plan.squeeze:  # there was not enough memory to find out the shapes, or less than predicted
            return plan.shapes or Shapes(n, lin.samples(), 1, 0, 0, size, single=lin.single)
        if not lin.single:
            return Shapes(n, 1, 1, 0, 0, size, single=False)
        if self.chunk is not None:
            N = lin.samples()
            return Shapes(n, N, max(1, lin.most // N), 0, 0, size)
        piece = lin.whole()  # the forward pass alone: the rows are not formed before they are needed
        R = piece.jacobian.R
        inputs, outputs, others = piece.activations()
        # A ragged batch does not change the representation: the largest so far decides.
        return Shapes(n, max(piece.jacobian.N, lin.most // R), R, inputs, outputs, size, others)

    def _plan(self, lin: Linearization, plan: Plan) -> Plan:
        """For these shapes, the fastest that fits; after memory ran out, so many further down the list."""
        assert plan.shapes is not None
        budget = parse(self.memory) if self.memory is not None else free(lin.parameters.device)
        ways = list(self._ways(plan.shapes))
        if lin.single and any(batch.opaque for batch in lin.batches):  # nothing that a chunk could be cut from
            ways = [way for way in ways if way[0].needs.chunk == self.chunk]
        fitting = [way for way in ways if budget is None or way[1] <= budget]
        if plan.squeeze < len(fitting):
            picked, size, why = fitting[plan.squeeze]
            kind, chunk = type(picked).__name__, picked.needs.chunk
            return replace(
                plan, kind=kind, chunk=chunk, name=str(picked), bytes=size, budget=budget, why=why,
                input_size=input_size(lin),
            )  # fmt: skip
        smallest, least, _ = min(ways, key=lambda way: way[1])
        if fitting:
            raise Exhausted(
                f"out of memory with every plan, down to {fitting[-1][0]}: use a smaller model or a smaller batch"
            )
        assert budget is not None
        raise ValueError(
            f"no representation of the curvature of {plan.shapes.n:,} parameters fits into {readable(budget)}: the "
            f"smallest, {type(smallest).__name__}, needs about {readable(least)}; allow more (memory=), or train "
            "fewer parameters (params=)"
        )

    def _ways(self, s: Shapes) -> Iterator[tuple[Representation, int, str]]:
        """Every way to go, fastest first, with its bytes."""
        dense, gram = Dense(self.chunk, self.inertia), Gram(self.chunk)
        primal = s.n <= s.m or not s.single
        why = f"{s.n:,} parameters, {s.m:,} rows" if s.single else f"{s.n:,} parameters, several batches"
        first: Dense | Gram = dense if primal else gram
        cut = s.single and self.chunk is None
        smaller = [s.N // k for k in (4, 16, 64) if s.N // k > 0] if cut else []
        size = dense_bytes if primal else gram_bytes
        yield first, size(s, self.chunk, self.inertia), why
        for part in smaller if primal else smaller[:2]:  # Gram goes through every pair of chunks
            yield replace(first, chunk=part), size(s, part, self.inertia), f"{why}, in chunks of {part}"
        if s.single:
            other, other_size = (gram, gram_bytes) if primal else (dense, dense_bytes)
            yield other, other_size(s, self.chunk, self.inertia), f"{why}, the larger matrix does not fit"
        for chunk in dict.fromkeys([self.chunk, *smaller, *([1] if cut else [])]):
            size_of = matrix_free_bytes(s, chunk)
            yield (
                MatrixFree(chunk=chunk),
                size_of,
                f"{why}, no matrix fits" + (f", in chunks of {chunk}" if chunk else ""),
            )


def input_size(lin: Linearization) -> int:
    """Numbers in the inputs of the one batch."""
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
    """Bytes that a step may take on this device, None if it does not say."""
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
