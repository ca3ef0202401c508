"""What a step costs: bytes and work, from shapes alone, so that every process that sees the same shapes agrees.

Work is counted by kinds, each of which a machine does at a rate of its own. A step is measured in gradients: its time
on a machine of the usual speed over that of a forward and a backward pass there. How fast the machine at hand is enters
only what is announced, never the choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..plain import WAY_OUT
from ..ranks import BLOCK_ROWS


@dataclass(frozen=True)
class Layer:
    """One use of a weight: P positions per sample, G groups, I inputs and O outputs in each of them."""

    P: float
    G: int
    I: int
    O: int
    lookup: bool = False  # a row of a table at every position

    @property
    def inputs(self) -> float:
        """Numbers that the weight multiplies, per sample."""
        return self.P if self.lookup else self.P * self.G * self.I

    @property
    def outputs(self) -> float:
        """Numbers at its output, per sample."""
        return self.P * self.G * self.O

    @property
    def patches(self) -> float:
        """Numbers that a convolution brings together, per sample."""
        return self.inputs if self.P > 1 and self.I > 1 else 0.0

    @property
    def columns(self) -> int:
        return self.G * self.O * (self.I + 1)

    @property
    def flops(self) -> float:
        """Operations of its product in a forward pass, per sample."""
        return 0.0 if self.lookup else 2 * self.P * self.G * self.I * self.O


@dataclass(frozen=True)
class Shapes:
    """What memory and work depend on. Numbers of a forward pass are per sample."""

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
    single: bool = True  # one batch, not several in step_over
    piece: int = 0  # samples of one of them
    divisible: bool = True  # whether the batch can be cut into samples
    ranks: int = 1  # that share the samples
    shards: int = 1  # ranks that share the parameters; then each has the rows of all samples
    sharded: bool = False  # whether they do, which one rank can too

    @property
    def m(self) -> int:
        return self.R * self.N

    def check(self, where: str) -> None:
        """Raises ValueError if no model and no batch have them"""
        for name in ("N", "R", "itemsize", "out", "ranks", "shards"):
            if getattr(self, name) == 0:
                raise ValueError(f"{where} {name} is 0, and must be at least 1: {WAY_OUT}")
        if self.others > self.n:
            raise ValueError(f"{where} have {self.others:,} others of {self.n:,} parameters: {WAY_OUT}")

    def with_others(self, found: Shapes) -> Shapes:
        """The larger of each, if the model is the same: a ragged batch or shorter sequences change nothing."""
        if self._structure() != found._structure():
            return found
        N, R, out, piece = (max(getattr(x, k) for x in (self, found)) for k in ("N", "R", "out", "piece"))
        layers = tuple(a if a.P >= b.P else b for a, b in zip(self.layers, found.layers, strict=True))
        if (N, R, out, piece, layers) == (self.N, self.R, self.out, self.piece, self.layers):
            return self
        numbers, nodes = max(self.numbers, found.numbers), max(self.nodes, found.nodes)
        return replace(found, N=N, R=R, out=out, piece=piece, layers=layers, numbers=numbers, nodes=nodes)

    def covers(self, N: int, out: int, uses: int, single: bool) -> bool:
        """Whether a batch is no larger, at a glance."""
        return N <= self.N and out <= self.out and uses == len(self.layers) and single == self.single

    def _structure(self) -> object:
        layers = [(b.G, b.I, b.O, b.lookup) for b in self.layers]
        ranks = self.ranks, self.shards, self.sharded
        return self.n, self.itemsize, self.others, self.cuda, self.single, self.divisible, ranks, layers

    def at_once(self, chunk: int | None) -> int:
        """Samples that a rank linearises together."""
        own = -(-self.N // self.ranks)
        return min(own if self.single else self.piece, chunk or own)

    def pieces(self, chunk: int | None) -> int:
        return -(-self.N // self.ranks // self.at_once(chunk))

    @property
    def inputs(self) -> float:
        """Numbers that the weights multiply, per sample."""
        return sum(layer.inputs for layer in self.layers)

    @property
    def outputs(self) -> float:
        """Numbers at the outputs of these layers, per sample."""
        return sum(layer.outputs for layer in self.layers)


NOTHING = Shapes(1, 1, 1, (), 4)


@dataclass(frozen=True)
class Work:
    """Operations by kind: each has a rate of its own."""

    products: float = 0.0  # operations of matrix products
    factor: float = 0.0  # operations of a Cholesky factorisation
    numbers: float = 0.0  # numbers that pass through memory
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


# Of two CPU cores, and of a large GPU (`cuda`), fitted to the steps of benchmarks/limits.py on an H200 and on two cores
# beside it. That machines differ matters little: what counts is the ratio of these rates to each other. The network of
# CPUs is gloo within one machine, that of GPUs is a tenth of NVLink's peak (900 GB/s).
USUAL = {
    False: Rates(products=3e11, factor=1.2e11, numbers=3.3e9, call=3.6e-6, network=1e9, message=3e-4),
    True: Rates(products=4e13, factor=4e12, numbers=6e11, call=9e-6, network=9e10, message=5e-5),
}

# Columns of a matrix that ranks factor together which one of them factors at a time.
COLUMNS = 256

# Functions that a step calls whatever the model is, that it calls for every block of columns, and that a loss calls.
STEP, BLOCK, LOSS = 600, 30, 10


@dataclass(frozen=True)
class Cost:
    bytes: int
    work: Work


# What ranks send, in bytes by each of them in the mean. Sums go round a ring: every number twice, but for a rank's own
# part.


def reduced(s: Shapes, numbers: float) -> float:
    """A sum of so many numbers"""
    return 2 * (s.ranks - 1) / s.ranks * s.itemsize * numbers


def gathered(s: Shapes, numbers: float) -> float:
    """So many numbers that the ranks have in all, sent by each to every other; or that one of them has"""
    return (s.ranks - 1) / s.ranks * s.itemsize * numbers


def half(m: int) -> float:
    """Numbers of a symmetric matrix that are sent"""
    return m * (m + m / BLOCK_ROWS) / 2


def factor(s: Shapes, m: int) -> float:
    """The factor of an m×m matrix, if the ranks form it together"""
    together = factors_together(m, s.ranks, s.itemsize, s.cuda)
    return gathered(s, m * (m + COLUMNS) / 2) if together else 0.0


def factors_together(m: int, ranks: int, itemsize: int, cuda: bool) -> bool:
    """Whether so many ranks factor an m×m matrix faster together than each by itself."""
    rates = USUAL[cuda]
    alone = m**3 / 3 / rates.factor * (itemsize / 4)
    sent = itemsize * m**2 / 2 / rates.network + m / COLUMNS * rates.message
    return ranks > 1 and alone / ranks + sent < alone


def sides(s: Shapes) -> float:
    """Numbers in the Kronecker factors of all layers"""
    return sum(b.G * (float(b.O) ** 2 + (b.I + 1.0) ** 2) for b in s.layers if not b.lookup)


def forward(s: Shapes, pieces: int = 1) -> Work:
    """One forward pass, or a backward pass to the inputs of all layers, or to their weights."""
    flops = sum(layer.flops for layer in s.layers)
    numbers = s.numbers + 2 * sum(layer.patches for layer in s.layers)
    return Work(products=s.N * flops, numbers=s.N * numbers, calls=pieces * (s.nodes + LOSS))


def gradient(s: Shapes) -> Work:
    """A forward and a backward pass."""
    return 3 * forward(s)


def deltas(s: Shapes, pieces: int = 1) -> Work:
    """Backward passes of R rows to the outputs of the layers: on a GPU all of them in one."""
    one = forward(s, pieces)
    calls = 2 * one.calls + (pieces - 1) * BLOCK * len(s.layers)
    return replace(s.R * one, calls=calls if s.cuda else s.R * calls)


def overhead(s: Shapes) -> Work:
    """What is neither network nor matrix: the parts of the algorithm, vectors of θ, bookkeeping of every layer."""
    return Work(numbers=20.0 * s.n + 2 * s.R * s.N * s.out, calls=STEP + BLOCK * len(s.layers))


def step(s: Shapes, cost: Cost, whole: Shapes | None = None) -> Work:
    """All of it: linearise, what the representation does, try. `whole` is the batch, if the rows are of a part."""
    total = overhead(s) + cost.work
    return total + 2 * forward(s) if whole is None or whole.N == s.N else total + forward(s) + 2 * forward(whole)


def proof(s: Shapes) -> Work:
    """What is proven on first use: the rows once more, some backward passes to compare them with, and the loss."""
    return deltas(s) + 5 * gradient(s) + Work(calls=2 * STEP)


def in_gradients(s: Shapes, cost: Cost, whole: Shapes | None = None) -> float:
    return step(s, cost, whole).seconds(s) / gradient(whole or s).seconds(s)
