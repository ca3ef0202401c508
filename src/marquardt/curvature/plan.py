"""What was planned for a model and its batches: which rows and which representation, what they cost, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from ..jacobian.linearization import Linearization
from ..jacobian.objective import Exact, Fraction, Rows, Sampled
from ..plain import MOST, WAY_OUT, check_fields, short
from .cost import Cost, Layer, Shapes, in_gradients, proof, step

PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Plan:
    """What was picked, for which shapes and options, and how often memory has run out since. All of it plain values:
    a part of the state, to be saved and to be agreed on."""

    options: tuple[Any, ...]  # of the representation that made it
    kind: str | None = None  # the class of the representation that was picked; None: another one is to be picked
    chunk: int | None = None  # its samples at once
    iterations: int | None = None  # of conjugate gradients, if they are limited
    sampled: int | None = None  # rows per sample, drawn at random; None: all of them, or those that LM was given
    fraction: float | None = None  # of the samples whose rows are formed; None: all
    steady: bool | None = None  # whether it is for the same data in every step; None: not known yet
    couples: bool = False  # whether it is for samples that depend on each other
    joined: bool = False  # whether rows are of all samples together: those of one take a backward pass each
    whole: bool = False  # whether a part of the samples is never taken alone: they depend on each other
    name: str = ""  # in words
    bytes: int = 0  # predicted for a step, beside the parameters themselves
    budget: int | None = None
    work: float = 0.0  # predicted for a step, in gradients
    seconds: float = 0.0  # predicted for a step on a machine of the usual speed,
    proof: float = 0.0  # and for what the first one proves
    why: str = ""
    faster: str = ""  # what would be, if it is slow
    input_size: int = 0  # numbers in the inputs of the batch that it was made for
    shapes: Shapes | None = None
    squeeze: int = 0  # how often memory ran out

    @property
    def choice(self) -> tuple[Any, ...]:
        """What was picked, whatever it was picked by."""
        return self.kind, self.chunk, self.iterations, self.sampled, self.fraction

    @cached_property
    def rows(self) -> Rows:
        """The rows, if they are a choice."""
        rows: Rows = Exact() if self.sampled is None else Sampled(self.sampled, together=self.joined)
        return rows if self.fraction is None else Fraction(self.fraction, rows)

    def state(self) -> dict[str, Any]:
        return {**asdict(self), "options": list(self.options)}

    @staticmethod
    def restored(state: Any, n: int) -> Plan | None:
        """From a saved state, if it can be one of n parameters. None if an earlier version has made it: then there will
        be another one."""
        where = "the plan in this state"
        if isinstance(state, dict) and "work" not in state:
            return None
        check_fields(Plan, state, where)
        options = state["options"]
        if not isinstance(options, (list, tuple)) or not all(isinstance(v, PLAIN) for v in options):
            raise ValueError(f"{where} has the options {short(options)}, and a list of plain values is due: {WAY_OUT}")
        shapes = state.get("shapes")
        if shapes is not None:
            shapes = _shapes(shapes, f"{where}, its shapes,")
            if shapes.n != n:
                raise ValueError(f"{where} is for {shapes.n} parameters, this optimizer has {n}: {WAY_OUT}")
        found = Plan(**{**state, "options": tuple(state["options"]), "shapes": shapes})
        found.check(where)
        return found

    def check(self, where: str) -> None:
        """Raises ValueError if it is none that was ever made"""
        if self.kind is not None and self.shapes is None:
            raise ValueError(f"{where} has picked {short(self.kind)} for no shapes: {WAY_OUT}")
        for name in ("chunk", "iterations", "sampled"):
            if getattr(self, name) == 0:
                raise ValueError(f"{where}: {name} is 0, and must be at least 1: {WAY_OUT}")
        layers = () if self.shapes is None else self.shapes.layers
        for part in (self, *(() if self.shapes is None else (self.shapes,)), *layers):
            for name, value in vars(part).items():
                if isinstance(value, (int, float)) and not 0 <= value <= MOST:
                    raise ValueError(f"{where}: {name} is {value:g}, and must be from 0 to {MOST:.3g}: {WAY_OUT}")
        if self.fraction is not None and not 0 < self.fraction < 1:
            raise ValueError(f"{where}: a fraction of {self.fraction} of the samples: {WAY_OUT}")
        if self.kind is not None and self.budget is not None and self.bytes > self.budget:
            raise ValueError(f"{where} takes {self.bytes:,} bytes of a budget of {self.budget:,}: {WAY_OUT}")
        if self.shapes is not None:
            self.shapes.check(f"{where}, its shapes,")
            if self.sampled is not None and self.sampled >= self.shapes.R:
                raise ValueError(f"{where} draws {self.sampled:,} of {self.shapes.R:,} rows: {WAY_OUT}")

    def with_cost(self, s: Shapes, cost: Cost | None) -> Plan:
        """With the cost of rows of these shapes."""
        if cost is None:
            return self
        work = step(s, cost, self.shapes)
        gradients, proven = in_gradients(s, cost, self.shapes), proof(s).seconds(s)
        return replace(self, bytes=cost.bytes, work=gradients, seconds=work.seconds(s), proof=proven)

    def __str__(self) -> str:
        limit = "" if self.budget is None else f" of {readable(self.budget)}"
        work = f"{counted(self.work)} a step, " if self.work else ""
        return f"{self.name}: {self.why}; about {work}{readable(self.bytes)}{limit}"


def _shapes(state: Any, where: str) -> Shapes:
    check_fields(Shapes, state, where)
    if not isinstance(state["layers"], (list, tuple)):
        raise ValueError(f"{where} have {short(state['layers'])} where the layers are due: {WAY_OUT}")
    for layer in state["layers"]:
        check_fields(Layer, layer, f"{where} of a layer,")
    return Shapes(**{**state, "layers": tuple(Layer(**layer) for layer in state["layers"])})


def look(lin: Linearization, plan: Plan | None, free: bool = False) -> Shapes:
    """The shapes of a batch, as rank 0 sees them, by a forward pass: that of the step itself, if all samples are
    linearised at once. If the rows are `free` to be chosen, R is that of all of them. The samples are those of all
    ranks: a plan is the same however they are shared."""
    known = None if plan is None else plan.shapes
    if not lin.in_one and known is not None and known.single == lin.single:
        # Another forward pass would tell no more than how many samples there are.
        return replace(known, N=max(known.N, lin.share.expected(known.piece)))
    found = _seen(lin, plan, free)
    ranks = lin.share.ranks
    return found if ranks.all(found is known) else ranks.agreed(found)


def _seen(lin: Linearization, plan: Plan | None, free: bool) -> Shapes:
    known = None if plan is None else plan.shapes
    piece = lin.whole() if lin.in_one else lin.first()
    together = piece.N if free and plan is not None and plan.joined else 1  # samples that are taken as one
    watch, N, out = piece.whole.watch, piece.N // together, together * piece.z[0].numel()
    samples = N if free else piece.jacobian.N  # whose rows are formed
    total = sum(lin.share.ranks.numbers(samples)) if lin.in_one else lin.share.expected(samples)
    larger = plan is None or lin.share.input_size > plan.input_size
    if not larger and known is not None and known.covers(total, out, len(watch.calls), lin.single):
        return known
    known_R = known.R if known is not None and known.out == out else None
    R = piece.jacobian.R if not free else known_R or together * piece.exact_rows()
    layers = tuple(Layer(*call.sizes(N)) for call in watch.calls)
    found = Shapes(
        lin.n, total, R, layers,
        lin.theta.element_size(), piece.others(), out, watch.numbers / N, piece.whole.nodes(), lin.theta.is_cuda,
        lin.single, N, piece.divisible and together == 1, lin.ranks.size, lin.parameters.ranks.size,
        lin.parameters.shards is not None,
    )  # fmt: skip
    return found if known is None else known.with_others(found)


def readable(size: int) -> str:
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} B"


def counted(gradients: float) -> str:
    found = f"{gradients:.2g}" if gradients < 10 else f"{round(gradients):,}"
    return f"{found} gradient{'' if found == '1' else 's'}"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.2g} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:,.0f} s"
