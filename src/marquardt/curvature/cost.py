"""The cost of a step, in bytes and work, and the plan of the step. Both follow from shapes alone, so that all processes
with the same shapes agree.

Work is counted by kinds, because a machine does each at a different rate. The cost of a step is measured in gradients:
its time on a machine of the usual speed, divided by that of a forward and a backward pass there. The speed of the
actual machine only affects what is announced, never the choice.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from ..jacobian.linearization import Linearization
from ..jacobian.objective import Exact, Fraction, Rows, Sampled
from ..ranks import BLOCK_ROWS
from ..values import MOST, WAY_OUT, check_fields, short


@dataclass(frozen=True)
class Layer:
    """One use of a weight: P positions per sample, G groups, I inputs and O outputs in each group."""

    P: float
    G: int
    I: int
    O: int
    lookup: bool = False  # whether it looks up a row of a table at every position

    @property
    def inputs(self) -> float:
        """How many numbers the weight multiplies, per sample."""
        return self.P if self.lookup else self.P * self.G * self.I

    @property
    def outputs(self) -> float:
        """How many numbers are at its output, per sample."""
        return self.P * self.G * self.O

    @property
    def patches(self) -> float:
        """How many numbers a convolution gathers into patches, per sample."""
        return self.inputs if self.P > 1 and self.I > 1 else 0.0

    @property
    def columns(self) -> int:
        return self.G * self.O * (self.I + 1)

    @property
    def flops(self) -> float:
        """The operations of its product in a forward pass, per sample."""
        return 0.0 if self.lookup else 2 * self.P * self.G * self.I * self.O


@dataclass(frozen=True)
class Shapes:
    """The sizes that memory and work depend on. Numbers of a forward pass are per sample."""

    n: int  # parameters
    N: int  # samples
    R: int  # rows per sample
    layers: tuple[Layer, ...]  # uses of weights by layers that have a rule
    itemsize: int
    others: int = 0  # parameters without a rule: their rows are explicit
    out: int = 1  # numbers at the output of the model
    numbers: float = 0.0  # numbers at the outputs of all functions that the model calls
    nodes: int = 0  # of the graph of a forward pass
    cuda: bool = False
    single: bool = True  # whether there is one batch, not several as in step_over
    piece: int = 0  # samples in one of several batches
    divisible: bool = True  # whether the batch can be divided into samples
    ranks: int = 1  # number of ranks that share the samples
    shards: int = 1  # number of ranks that share the parameters; then each has the rows of all samples
    sharded: bool = False  # whether parameters are sharded, which is possible on one rank too

    @property
    def m(self) -> int:
        return self.R * self.N

    def with_others(self, found: Shapes) -> Shapes:
        """The larger of each size, if the model is the same: a ragged batch or shorter sequences change nothing."""
        if self._structure() != found._structure():
            return found
        N, R, out, piece = (max(getattr(x, k) for x in (self, found)) for k in ("N", "R", "out", "piece"))
        layers = tuple(a if a.P >= b.P else b for a, b in zip(self.layers, found.layers, strict=True))
        if (N, R, out, piece, layers) == (self.N, self.R, self.out, self.piece, self.layers):
            return self
        numbers, nodes = max(self.numbers, found.numbers), max(self.nodes, found.nodes)
        return replace(found, N=N, R=R, out=out, piece=piece, layers=layers, numbers=numbers, nodes=nodes)

    def _structure(self) -> object:
        layers = [(b.G, b.I, b.O, b.lookup) for b in self.layers]
        ranks = self.ranks, self.shards, self.sharded
        return self.n, self.itemsize, self.others, self.cuda, self.single, self.divisible, ranks, layers

    def at_once(self, chunk: int | None) -> int:
        """How many samples a rank linearises together."""
        own = -(-self.N // self.ranks)
        return min(own if self.single else self.piece, chunk or own)

    def pieces(self, chunk: int | None) -> int:
        return -(-self.N // self.ranks // self.at_once(chunk))

    @property
    def inputs(self) -> float:
        """How many numbers the weights multiply, per sample."""
        return sum(layer.inputs for layer in self.layers)

    @property
    def outputs(self) -> float:
        """How many numbers are at the outputs of these layers, per sample."""
        return sum(layer.outputs for layer in self.layers)


NOTHING = Shapes(1, 1, 1, (), 4)


@dataclass(frozen=True)
class Work:
    """Operations by kind, because each kind has a different rate."""

    products: float = 0.0  # operations of matrix products
    factor: float = 0.0  # operations of a Cholesky factorisation
    numbers: float = 0.0  # numbers read from or written to memory
    calls: float = 0.0  # functions called, whatever they do

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, times: float) -> Work:
        return Work(*(times * a for a in vars(self).values()))

    __rmul__ = __mul__

    def seconds(self, s: Shapes) -> float:
        rates = USUAL[s.cuda]
        wide = s.itemsize / 4  # float64 is half as fast, on GPUs that have it at all
        return (
            wide * (self.products / rates.products + self.factor / rates.factor + self.numbers / rates.numbers)
            + self.calls * rates.call
        )


@dataclass(frozen=True)
class Rates:
    """Operations and numbers per second in float32, and seconds per call."""

    products: float
    factor: float
    numbers: float
    call: float
    network: float  # bytes per second that a rank sends,
    message: float  # and seconds per message


# The rates of two CPU cores and of a large GPU (`cuda`), fitted to the steps of benchmarks/limits.py on an H200 and on
# two cores of its host. Other machines matter little, since only the ratios of these rates count. The network of CPUs
# is gloo within one machine, that of GPUs is a tenth of NVLink's peak (900 GB/s).
USUAL = {
    False: Rates(products=3e11, factor=1.2e11, numbers=3.3e9, call=3.6e-6, network=1e9, message=3e-4),
    True: Rates(products=4e13, factor=4e12, numbers=6e11, call=9e-6, network=9e10, message=5e-5),
}

# How many columns one rank factors at a time, when ranks factor a matrix together.
COLUMNS = 256

# The number of functions that a step calls for any model, that it calls per block of columns, and that a loss calls.
STEP, BLOCK, LOSS = 600, 30, 10


@dataclass(frozen=True)
class Cost:
    bytes: int
    work: Work


# Communication, in bytes that each rank sends on average. Sums are formed in a ring: every number is sent twice, except
# for a rank's own part.


def reduced(s: Shapes, numbers: float) -> float:
    """A sum of this number of numbers over the ranks"""
    return 2 * (s.ranks - 1) / s.ranks * s.itemsize * numbers


def gathered(s: Shapes, numbers: float) -> float:
    """This number of numbers, held by all ranks together or by one of them, after which every rank has them all"""
    return (s.ranks - 1) / s.ranks * s.itemsize * numbers


def half(m: int) -> float:
    """The numbers of a symmetric matrix that are sent"""
    return m * (m + m / BLOCK_ROWS) / 2


def factor(s: Shapes, m: int) -> float:
    """The factor of an m×m matrix, if the ranks compute it together"""
    together = factors_together(m, s.ranks, s.itemsize, s.cuda)
    return gathered(s, m * (m + COLUMNS) / 2) if together else 0.0


def factors_together(m: int, ranks: int, itemsize: int, cuda: bool) -> bool:
    """Whether this number of ranks factor an m×m matrix faster together than each one alone."""
    rates = USUAL[cuda]
    alone = m**3 / 3 / rates.factor * (itemsize / 4)
    sent = itemsize * m**2 / 2 / rates.network + m / COLUMNS * rates.message
    return ranks > 1 and alone / ranks + sent < alone


def sides(s: Shapes) -> float:
    """The numbers in the Kronecker factors of all layers"""
    return sum(b.G * (float(b.O) ** 2 + (b.I + 1.0) ** 2) for b in s.layers if not b.lookup)


def forward(s: Shapes, pieces: int = 1) -> Work:
    """One forward pass; also a backward pass to the inputs of all layers, or to their weights."""
    flops = sum(layer.flops for layer in s.layers)
    numbers = s.numbers + 2 * sum(layer.patches for layer in s.layers)
    return Work(products=s.N * flops, numbers=s.N * numbers, calls=pieces * (s.nodes + LOSS))


def gradient(s: Shapes) -> Work:
    """A forward and a backward pass."""
    return 3 * forward(s)


def deltas(s: Shapes, pieces: int = 1) -> Work:
    """Backward passes of R rows to the outputs of the layers: on a GPU all rows in one pass."""
    one = forward(s, pieces)
    calls = 2 * one.calls + (pieces - 1) * BLOCK * len(s.layers)
    return replace(s.R * one, calls=calls if s.cuda else s.R * calls)


def overhead(s: Shapes) -> Work:
    """Work that belongs neither to the network nor to a matrix: the other parts of the algorithm, vectors of θ, the
    bookkeeping of every layer."""
    return Work(numbers=20.0 * s.n + 2 * s.R * s.N * s.out, calls=STEP + BLOCK * len(s.layers))


def step(s: Shapes, cost: Cost, whole: Shapes | None = None) -> Work:
    """The whole step: linearise, represent, try. `whole` is the batch, if only some of its samples have rows."""
    total = overhead(s) + cost.work
    return total + 2 * forward(s) if whole is None or whole.N == s.N else total + forward(s) + 2 * forward(whole)


def proof(s: Shapes) -> Work:
    """The checks on first use: the rows once more, some backward passes to compare them with, and the loss."""
    return deltas(s) + 5 * gradient(s) + Work(calls=2 * STEP)


def in_gradients(s: Shapes, cost: Cost, whole: Shapes | None = None) -> float:
    return step(s, cost, whole).seconds(s) / gradient(whole or s).seconds(s)


PLAIN = (bool, int, float, str, type(None))

# Numbers of shapes and plans that are not 0.
AT_LEAST_1 = ("N", "R", "itemsize", "out", "ranks", "shards", "chunk", "iterations", "sampled")


@dataclass(frozen=True)
class Plan:
    """What was chosen, for which shapes and options, and how often memory has run out since. It consists of plain
    values, because it is saved with the state and agreed on by the ranks."""

    options: tuple[Any, ...]  # of the representation that made it
    kind: str | None = None  # the class of the representation that was chosen; None: a new choice is needed
    chunk: int | None = None  # how many samples it linearises at once
    iterations: int | None = None  # of conjugate gradients, if they are limited
    sampled: int | None = None  # rows per sample, drawn at random; None: all of them, or those that LM was given
    fraction: float | None = None  # of the samples whose rows are formed; None: all
    steady: bool | None = None  # whether it was made for the same data in every step; None: not known yet
    couples: bool = False  # whether it was made for samples that depend on each other
    joined: bool = False  # whether rows are of all samples together: those of one sample take a backward pass each
    whole: bool = False  # whether samples always stay together, because they depend on each other
    name: str = ""  # of the representation, with its options
    bytes: int = 0  # predicted for a step, beside the parameters themselves
    budget: int | None = None
    work: float = 0.0  # predicted for a step, in gradients
    seconds: float = 0.0  # predicted for a step on a machine of the usual speed,
    proof: float = 0.0  # and for what the first one proves
    why: str = ""
    faster: str = ""  # a faster choice, if this one is slow
    input_size: int = 0  # how many numbers the inputs of its batch have
    shapes: Shapes | None = None
    squeeze: int = 0  # how often memory ran out

    @property
    def choice(self) -> tuple[Any, ...]:
        """What was chosen, without the reasons."""
        return self.kind, self.chunk, self.iterations, self.sampled, self.fraction

    @cached_property
    def rows(self) -> Rows:
        """The rows, if they were chosen."""
        rows: Rows = Exact() if self.sampled is None else Sampled(self.sampled, together=self.joined)
        return rows if self.fraction is None else Fraction(self.fraction, rows)

    def state(self) -> dict[str, Any]:
        return {**asdict(self), "options": list(self.options)}

    @staticmethod
    def restored(state: Any, n: int) -> Plan | None:
        """The plan in a saved state, checked for n parameters. None if an earlier version has saved it: then a new plan
        is made."""
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
        """Raises ValueError if no step can have made this plan"""
        if self.kind is not None and self.shapes is None:
            raise ValueError(f"{where} has picked {short(self.kind)} for no shapes: {WAY_OUT}")
        numbers = [(where, vars(self))]
        if self.shapes is not None:
            within = f"{where}, its shapes,"
            numbers += [(within, vars(part)) for part in (self.shapes, *self.shapes.layers)]
        for whose, values in numbers:
            for name, value in values.items():
                least = int(name in AT_LEAST_1)
                if isinstance(value, (int, float)) and not least <= value <= MOST:
                    raise ValueError(f"{whose} {name} is {value:g}, and must be from {least} to {MOST:.3g}: {WAY_OUT}")
        if self.fraction is not None and not 0 < self.fraction < 1:
            raise ValueError(f"{where}: a fraction of {self.fraction} of the samples: {WAY_OUT}")
        if self.kind is not None and self.budget is not None and self.bytes > self.budget:
            raise ValueError(f"{where} takes {self.bytes:,} bytes of a budget of {self.budget:,}: {WAY_OUT}")
        if self.shapes is not None and self.shapes.others > self.shapes.n:
            raise ValueError(f"{where} has {self.shapes.others:,} others of {self.shapes.n:,} parameters: {WAY_OUT}")
        if self.shapes is not None and self.sampled is not None and self.sampled >= self.shapes.R:
            raise ValueError(f"{where} draws {self.sampled:,} of {self.shapes.R:,} rows: {WAY_OUT}")

    def with_cost(self, s: Shapes, cost: Cost | None) -> Plan:
        """The plan with the cost of rows of these shapes."""
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
    """The shapes of a batch, as seen by rank 0 in a forward pass: that of the step itself, if all samples are
    linearised at once. If the rows are `free` to be chosen, R is the number of all rows per sample. The samples of all
    ranks are counted: a plan is the same however they are shared."""
    known = None if plan is None else plan.shapes
    if not lin.in_one and known is not None and known.single == lin.single:
        # Another forward pass would only show the number of samples.
        return replace(known, N=max(known.N, lin.share.expected(known.piece)))
    found = _seen(lin, plan, free)
    ranks = lin.share.ranks
    return found if ranks.all(found is known) else ranks.agreed(found)


def _seen(lin: Linearization, plan: Plan | None, free: bool) -> Shapes:
    known = None if plan is None else plan.shapes
    piece = lin.whole() if lin.in_one else lin.first()
    together = piece.N if free and plan is not None and plan.joined else 1  # samples that count as one
    watch, N, out = piece.whole.watch, piece.N // together, together * piece.z[0].numel()
    samples = N if free else piece.jacobian.N  # that have rows
    total = sum(lin.share.ranks.numbers(samples)) if lin.in_one else lin.share.expected(samples)
    larger = plan is None or lin.share.input_size > plan.input_size
    alike = known is not None and (len(watch.calls), lin.single) == (len(known.layers), known.single)  # at a quick look
    if known is not None and alike and not larger and total <= known.N and out <= known.out:
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
