"""The fastest representation that fits into memory, with as many rows as there is time for."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..jacobian.linearization import Linearization, Needs
from ..jacobian.objective import Rows, Sampled
from ..jacobian.passes import Coupled, RowByRow
from ..surroundings import Exhausted, out_of_memory
from ..values import WAY_OUT, short
from .contract import Curvature, Interchangeable, Representation, check_chunk, check_inertia
from .cost import Cost, Plan, Shapes, in_gradients, look, readable, step
from .direct import Dense, Gram
from .matrix_free import MatrixFree

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
         "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip

# The share of the free memory that a step may take, if no amount was given: the rest is left to other programs.
SHARE = 0.8

# How many times a step may be repeated with a smaller plan.
PLANS = 9

# How many gradients a step on changing batches may cost: about twice the cost of a step of the paper's CNN on a CPU.
WORK = 30.0

# The same limit for more than one row per sample of a loss that is not a sum of squares, unless one row costs more:
# there a second row brings next to nothing, see docs/recipe.md. More rows of residuals do help, and so do rows of other
# samples.
WORK_OF_ROWS = 6.0

# A step that takes no more than this many seconds on a machine of the usual speed is allowed in any case: rows of some
# samples with the gradient of all make a fit without noise ten times less accurate, which a tenth of a second seldom
# justifies.
QUICK = 0.1

# The seconds, on a machine of the usual speed, up to which the first two steps keep all rows. Whether the data are
# always the same is only known after them, and in that case all rows are kept anyway.
UNTOLD = 0.5

# Conjugate gradients lose digits and may take ten times as many iterations as expected, so their predicted time must be
# shorter than that of a matrix by this factor.
DIRECT = 30.0

# If no plan is fast enough, fewer rows must make a step cheaper by at least this factor.
SAVES = 1.25

# The least number of samples whose rows are formed, however small the limit is.
FEWEST = 16


@dataclass(frozen=True)
class Auto(Interchangeable):
    """Dense if there are fewer parameters than rows, otherwise Gram; in chunks, or MatrixFree, if these do not fit into
    memory: `memory`, such as "4GiB", or what the device has free. `opt.plan` gives the choice and the reason.

    All three solve the same system, MatrixFree to its tolerance: they differ in speed and memory. If a prediction was
    too low and memory runs out, the step is repeated with the next smaller plan.

    On changing batches a step costs at most `work` gradients, by default 30, or as many as take a tenth of a second on
    a usual machine if these are more. If all rows would cost more, and LM was given no `rows`, fewer are formed:
    `Sampled(k)` with k as large as possible, and finally those of a `Fraction` of the samples. By default more than one
    row per sample is formed only up to 6 gradients, unless it costs no more than one, or the loss is a sum of squares.
    On the same data all rows are formed, whatever they cost, in the fastest way. The cost is predicted from shapes
    alone, so that resumed runs, and processes that work together, make the same choice. If the first step finds that a
    row of one sample takes a backward pass through all samples, as for the nodes of a graph, the rows are `Sampled(k,
    together=True)`. Samples that are coupled by BatchNorm in train mode have no rows, and MatrixFree is chosen. Samples
    that depend on each other in another way stay together, without chunks.

    Args:
        chunk: samples that are linearised at once; None for all, or as many as memory allows.
        inertia: the weight of earlier batches in a running average of G, see Dense.
        memory: bytes that a step may take, a number or such as "4GiB"; None for what the device has free.
        work: gradients that a step on changing batches may cost; `math.inf` for any number.

    >>> opt = mq.LM(model, "mse", curvature=mq.Auto(memory="4GiB"))
    >>> step = opt.step(x, y)
    >>> print(opt.plan.partition(":")[0])
    Dense(chunk=None, inertia=0.0)
    """

    shares = True

    chunk: int | None = None
    inertia: float = 0.0  # see Dense
    memory: str | int | None = None
    work: float | None = None

    def __post_init__(self) -> None:
        check_chunk(self.chunk)
        check_inertia(self.inertia)
        number = isinstance(self.work, (int, float)) and not isinstance(self.work, bool)
        if self.work is not None and not (number and self.work >= 1):
            raise ValueError(f"work={self.work!r}: gradients that a step may cost, at least 1; math.inf for any number")
        if self.memory is not None:
            parse(self.memory)

    @cached_property
    def needs(self) -> Needs:
        return Needs(self.chunk, by_sample=self.chunk is not None)

    @property
    def first_rows(self) -> Rows:
        return Sampled(1)  # for a first look, since all rows may be too many

    def form(self, lin: Linearization) -> Curvature:
        return self.choose(lin, None, lin.rows_kind)[0].represent(lin)

    @property
    def _most(self) -> float:
        """How many gradients a step on changing batches may cost."""
        return WORK if self.work is None else self.work

    @property
    def _options(self) -> tuple[object, ...]:
        return self.chunk, self.inertia, self.memory, self.work

    def of(self, plan: Plan) -> Representation:
        """The representation that a plan has chosen."""
        if plan.kind == "MatrixFree":
            return limited(plan.chunk, plan.iterations)
        return Dense(plan.chunk, self.inertia) if plan.kind == "Dense" else Gram(plan.chunk)

    def choose(
        self, lin: Linearization, plan: Plan | None, rows: Rows | None = None, steady: bool | None = None
    ) -> tuple[Representation, Plan]:
        """The last plan as long as the shapes and `steady` are the same, otherwise a new one."""
        kind = lin.single, lin.start.form.coupled is not None
        other_kind = plan is not None and plan.shapes is not None and (plan.shapes.single, plan.couples) != kind
        if plan is None or plan.options != self._options or other_kind:
            plan = Plan(self._options)
            look_with = self.first_rows if rows is None else None  # not with the rows of the last plan
            lin = lin.made_for(self.needs, look_with)
        plan = replace(plan, couples=kind[1])
        lin.known.may_join = rows is None and lin.single and self.chunk is None and not plan.joined
        if plan.kind is not None and plan.chunk != self.chunk and lin.share.input_size <= plan.input_size:
            shapes = plan.shapes  # a forward pass of the whole batch may not fit
        else:
            shapes = self._shapes(lin, plan, rows is None)
        steady = steady if lin.single else True  # step_over iterates over all data
        if plan.kind is None or plan.steady != steady or shapes != plan.shapes:
            plan = lin.share.ranks.agreed(self._plan(lin, replace(plan, shapes=shapes, steady=steady), rows is None))
        return self.of(plan), plan

    def smaller(self, plan: Plan | None, error: BaseException) -> Plan | None:
        plan = Plan(self._options) if plan is None else plan
        if isinstance(error, RowByRow):
            return replace(plan, kind=None, shapes=None, joined=True)
        if isinstance(error, Coupled) and self.chunk is None and not plan.whole:
            return replace(plan, kind=None, shapes=None, whole=True)
        if not out_of_memory(error) or isinstance(error, Exhausted) or plan.squeeze >= PLANS:
            return None
        return Plan(
            self._options, shapes=plan.shapes, steady=plan.steady, couples=plan.couples, joined=plan.joined,
            whole=plan.whole, squeeze=plan.squeeze + 1,
        )  # fmt: skip

    def restored(self, plan: Plan, device: torch.device) -> Plan | None:
        budget = parse(self.memory) if self.memory is not None else free(device)
        fits = budget is None or plan.bytes <= budget
        if plan.options != self._options or not fits:
            return None
        if plan.kind not in (None, "Dense", "Gram", "MatrixFree"):
            raise ValueError(f"the plan in this state has picked {short(plan.kind)}, which Auto never does: {WAY_OUT}")
        return plan

    def _shapes(self, lin: Linearization, plan: Plan, free_rows: bool) -> Shapes:
        if not plan.squeeze:
            return look(lin, plan, free_rows)
        if plan.shapes is not None:  # there was less memory than predicted
            return plan.shapes
        # There was not enough memory for a forward pass: a pass of some of the samples shows the same shapes.
        whole = lin.parameters.shards is None
        if whole and lin.ranks.all(lin.single and all(batch.divisible(batch.samples) for batch in lin.batches)):
            part = max(1, lin.share.samples // lin.ranks.size // 4**plan.squeeze)
            return look(lin.made_for(Needs(part)), None, free_rows)
        return Shapes(
            lin.n, lin.share.samples, 1, (), lin.theta.element_size(), single=lin.single, ranks=lin.ranks.size,
            shards=lin.parameters.ranks.size, sharded=lin.parameters.shards is not None,
        )  # fmt: skip

    def _plan(self, lin: Linearization, plan: Plan, free_rows: bool) -> Plan:
        """The fastest plan for these shapes that fits, with as many rows as there is time for; after memory ran out
        `squeeze` times, the one that many places further down the list."""
        assert plan.shapes is not None
        budget = plan.budget  # free memory is measured again only for a larger batch
        if plan.kind is None or budget is None or lin.share.input_size > plan.input_size:
            budget = parse(self.memory) if self.memory is not None else free(lin.parameters.device)
        cut = lin.single and plan.shapes.divisible and not any(batch.opaque for batch in lin.batches)
        cut = cut and lin.parameters.shards is None and not plan.whole
        fewer = free_rows and lin.single and not plan.couples
        every = list(_fewer(plan.shapes, self.chunk, plan.joined, plan.whole)) if fewer else [_Share(plan.shapes)]
        free_hand = self.work is not None or lin.objective.loss.sum_of_squares
        most = self._most if free_hand else self._work_of_rows(every, plan)
        ways: list[_Way] = []
        fitting: list[_Way] = []
        found: list[tuple[_Share, _Way]] = []
        for share in every:
            ways = list(self._ways(share.shapes, cut, plan.couples, plan.steady))
            fitting = [way for way in ways if budget is None or way.cost.bytes <= budget]
            if plan.squeeze < len(fitting):
                found.append((share, fitting[plan.squeeze]))
                if self._in_time(*found[-1], plan.shapes, plan.steady, most):
                    return self._picked(lin, plan, *found[-1], budget)
        if found:  # nothing is fast enough: leave out only as many rows as pays
            costs = [in_gradients(share.shapes, way.cost, plan.shapes) for share, way in found]
            enough = next(i for i, cost in enumerate(costs) if cost <= SAVES * min(costs))
            return self._picked(lin, plan, *found[enough], budget)
        smallest = min(ways, key=lambda way: way.cost.bytes)
        if fitting:
            raise Exhausted(
                f"out of memory with every plan, down to {fitting[-1].picked}: use a smaller model or a smaller batch"
            )
        assert budget is not None
        raise ValueError(
            f"no representation of the curvature of {plan.shapes.n:,} parameters fits into {readable(budget)}: the "
            f"smallest, {type(smallest.picked).__name__}, needs about {readable(smallest.cost.bytes)}; allow more "
            "(memory=), or train fewer parameters (params=)"
        )

    def _picked(self, lin: Linearization, plan: Plan, share: _Share, way: _Way, budget: int | None) -> Plan:
        picked = way.picked
        limit = picked.iterations if isinstance(picked, MatrixFree) and picked != MatrixFree(picked.chunk) else None
        plan = replace(
            plan, kind=type(picked).__name__, chunk=picked.needs.chunk, iterations=limit, sampled=share.sampled,
            fraction=share.fraction, name=str(picked), budget=budget, why=way.why + share.why,
            input_size=lin.share.input_size,
        )  # fmt: skip
        plan = plan.with_cost(share.shapes, way.cost)
        if plan.work <= self._most or share.shapes.R == 1:
            return plan
        return replace(plan, faster="rows=mq.Sampled(1) takes fewer rows, and mq.Fraction(0.1) those of fewer samples")

    def _work_of_rows(self, every: Sequence[_Share], plan: Plan) -> float:
        """How many gradients a step with more than one row per sample may cost."""
        assert plan.shapes is not None
        one = next((share.shapes for share in every if share.shapes.R == 1), plan.shapes)
        cost = in_gradients(one, next(self._ways(one, True, plan.couples, plan.steady)).cost, plan.shapes)
        return min(WORK, max(WORK_OF_ROWS, SAVES * cost))

    def _in_time(self, share: _Share, way: _Way, whole: Shapes, steady: bool | None, most: float) -> bool:
        s = share.shapes
        if steady or in_gradients(s, way.cost, whole) <= (self._most if s.R == 1 else most):
            return True
        seconds = step(s, way.cost).seconds(s)
        if self.work is None and s.N == whole.N and (s.R == 1 or most == WORK) and seconds <= QUICK:
            return True
        direct = s is whole and not isinstance(way.picked, MatrixFree)
        return steady is None and direct and seconds <= UNTOLD

    def _ways(self, s: Shapes, cut: bool = True, couples: bool = False, steady: bool | None = True) -> Iterator[_Way]:
        """All ways to represent G, fastest first."""
        why = f"{s.n:,} parameters, {s.m:,} rows" if s.single else f"{s.n:,} parameters, several batches"
        smaller = [s.N // k for k in (4, 16, 64) if s.N // k > 0] if cut and self.chunk is None else []
        if not couples:
            yield from self._direct(s, why, smaller, steady)
        reason = "samples that depend on each other, as in BatchNorm, have no rows" if couples else "no matrix fits"
        for chunk in [None] if couples else dict.fromkeys([self.chunk, *smaller, *([1] if smaller else [])]):
            free_hand = MatrixFree(chunk)
            picked = free_hand if steady or not s.single else self._within(s, chunk)
            words = f"{why}, {reason}" + (f", in chunks of {chunk}" if chunk else "")
            yield _Way(picked, picked.cost(s), words)

    def _direct(self, s: Shapes, why: str, smaller: list[int], steady: bool | None) -> Iterator[_Way]:
        primal = (s.n <= s.m or not s.single) and not s.sharded
        first: Dense | Gram = Dense(self.chunk, self.inertia) if primal else Gram(self.chunk)
        other: Dense | Gram = Gram(self.chunk) if primal else Dense(self.chunk, self.inertia)
        products = MatrixFree(self.chunk)
        either = s.single and not s.sharded  # whether Dense and Gram are both possible
        best = min(step(s, way.cost(s)).seconds(s) for way in ((first, other) if either else (first,)))
        if steady and best > DIRECT * step(s, products.cost(s)).seconds(s):
            yield _Way(products, products.cost(s), f"{why}, a matrix takes too long")
        yield _Way(first, first.cost(s), why)
        for part in smaller if primal else smaller[:2]:  # Gram linearises every pair of chunks
            chunked = replace(first, chunk=part)
            yield _Way(chunked, chunked.cost(s), f"{why}, in chunks of {part}")
        if either:
            yield _Way(other, other.cost(s), f"{why}, the larger matrix does not fit")

    def _within(self, s: Shapes, chunk: int | None) -> MatrixFree:
        """Conjugate gradients limited to the iterations that `work` allows."""
        none, one = (in_gradients(s, limited(chunk, k).cost(s)) for k in (1, 2))
        allowed = int((self._most - none) / (one - none)) + 1 if self._most < math.inf else MatrixFree().iterations
        return limited(chunk, min(max(allowed, 5), MatrixFree().iterations))


def limited(chunk: int | None, iterations: int | None) -> MatrixFree:
    return MatrixFree(chunk) if iterations is None else MatrixFree(chunk, iterations=iterations)


@dataclass(frozen=True)
class _Way:
    picked: Dense | Gram | MatrixFree
    cost: Cost
    why: str


@dataclass(frozen=True)
class _Share:
    """All rows, or some of them."""

    shapes: Shapes
    sampled: int | None = None
    fraction: float | None = None
    why: str = ""


def _fewer(s: Shapes, chunk: int | None = None, joined: bool = False, whole: bool = False) -> Iterator[_Share]:
    """All rows, then fewer and fewer of them. If a chunk size is given, every chunk has at least one row, so that fewer
    samples would not save time; and samples that depend on each other cannot be divided."""
    yield _Share(s)
    k = 1 << (s.R - 1).bit_length() >> 1 if s.R > 1 else 0  # the largest power of two below R
    while k:
        whose = ", each of all samples together" if joined else " per sample"
        yield _Share(replace(s, R=k), k, None, f": {k} of {s.R:,} rows{whose}")
        k //= 2
    part = 2
    while s.N // part >= FEWEST and s.divisible and chunk is None and not whole:
        words = f": 1 of {s.R:,} rows of" if s.R > 1 else ": those of"
        share = replace(s, R=1, N=s.N // part)
        yield _Share(share, 1 if s.R > 1 else None, 1 / part, f"{words} one sample in {part}")
        part *= 2


def free(device: torch.device) -> int | None:
    """The bytes that a step may take on this device, None if they are unknown."""
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
