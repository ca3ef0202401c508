"""An exact LM step beside a fused Adam step as the model grows: time, peak memory, and how the memory grows.

    python benchmarks/scale.py --device cuda                          # 1e6 to 818e6 parameters: one GPU of 40 GiB
    python benchmarks/scale.py --parameters 1e6 36e6 --parts mlp
    python benchmarks/scale.py --quick

mlp          nine hidden layers of equal width, batch 128, 10 classes: curvature=mq.Gram(), all rows. A step is whole:
             linearisation, solve, trial forward, θ kept to go back to, acceptance. Once more with momentum and average.
transformer  nn.TransformerEncoder, 12 layers, mean-pooled: one output, 10 classes with one sampled row, with all rows.
memory       the peak of a Gram step over four sizes of n, of m and of the activations, fitted against the prediction
             O(n + m² + c·activations).

Every step sees another batch; labels come from a random linear teacher, so there is something to learn. A contestant
is built, measured and freed before the next one is: peak memory is that of one alone (on CUDA it counts all that is
allocated, the data too). --passes goes through all of them again, so that all see the machine in the same states.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import marquardt as mq
import measure
from measure import Batch, Peak, Step, Timing, Verdict

BATCH, CLASSES, INPUTS, HIDDEN_LAYERS = 128, 10, 1024, 9
PARAMETERS = (1e6, 36e6, 141e6, 818e6)
LARGE = 800e6  # from here on the bounds on time and memory apply
ADAM_RATE = 1e-4
RATIO = 3.0  # LM's step over Adam's, at most
DIFFERENT = 6  # batches, gone through again and again

Loss = Callable[[Tensor, Tensor], Tensor]


# --- models and data, made on the device ---


def mlp(n: float, device: torch.device, inputs: int = INPUTS) -> nn.Sequential:
    """At least n parameters: inputs·w + 8w² + … in nine hidden layers of one width w."""

    def parameters(w: int) -> int:
        return (inputs + 1) * w + (HIDDEN_LAYERS - 1) * (w + 1) * w + (w + 1) * CLASSES

    w = 1
    while parameters(2 * w) < n:
        w *= 2
    w = next(k for k in range(w, 2 * w + 1) if parameters(k) >= n)
    widths = [inputs, *[w] * HIDDEN_LAYERS]
    with device:
        hidden = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(w, CLASSES))


class Pooled(nn.Module):
    """nn.TransformerEncoder, the mean over the sequence, a linear head: (N, T, d) → (N, outputs)"""

    def __init__(self, shape: Shape, outputs: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(shape.d_model, shape.heads, shape.ff, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, shape.layers, enable_nested_tensor=False)
        self.head = nn.Linear(shape.d_model, outputs)
        for p in self.encoder.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)  # the encoder copies one layer, so they would all start alike

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class Shape(NamedTuple):
    layers: int
    d_model: int
    ff: int
    heads: int
    sequence: int
    batch: int

    def words(self) -> str:
        return (
            f"Transformer: {self.layers} layers, d_model {self.d_model}, ff {self.ff}, {self.heads} heads, sequence "
            f"{self.sequence}, batch {self.batch}"
        )


class Tokens(nn.Module):
    """A layer applied at every position, and the mean: activations grow with the sequence, n and m do not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu().mean(1))  # (N, T, width) → (N, 10)


def batches(shape: Sequence[int], outputs: int, device: torch.device, seed: int, count: int = DIFFERENT) -> list[Batch]:
    """Normal inputs (N, …, features); the teacher sees their mean over all dimensions between."""
    generator = torch.Generator(device).manual_seed(seed)
    teacher = torch.randn(shape[-1], outputs, generator=generator, device=device)
    found = []
    for _ in range(count):
        x = torch.randn(*shape, generator=generator, device=device)
        z = x.flatten(1, -2).mean(1) @ teacher if x.dim() > 2 else x @ teacher  # (N, outputs)
        found.append((x, z.tanh() if outputs == 1 else z.argmax(1)))
    return found


# --- one contestant alone ---


@dataclass
class Result:
    """Time and memory of one contestant over all passes."""

    name: str
    parameters: int = 0
    rows: int = 0  # m, of the curvature
    timing: Timing = field(default_factory=Timing)
    peak: float = math.nan  # bytes, from the building of the model on
    steady: float = math.nan  # bytes, after the warm-up: without what the first step proves once (CUDA only)
    failure: str = ""

    def record(self) -> dict[str, Any]:
        own = {k: getattr(self, k) for k in ("name", "parameters", "rows", "peak", "steady", "failure")}
        return own | {"timing": self.timing.record()}


class Contestant(NamedTuple):
    name: str
    build: Callable[[], tuple[nn.Module, Step]]
    rows: int = 0


def alone(
    contestant: Contestant, data: list[Batch], result: Result, steps: int, warmup: int, device: torch.device
) -> None:
    """Adds the times of some steps to the result, and the peak memory where it is not known yet."""

    def run(timing: Timing | None) -> None:
        model, step = contestant.build()
        result.parameters = sum(p.numel() for p in model.parameters())
        stream = cycle(data)

        def once() -> object:
            return step(*next(stream))

        if timing is None:
            for _ in range(warmup):
                once()
            return
        with Peak(device) if device.type == "cuda" else Unmeasured() as whole:
            for _ in range(warmup):
                once()
        with Peak(device, clear=False) if device.type == "cuda" else Unmeasured() as steady:
            times = measure.interleave({"": once}, steps, device, warmup=0)[""]
        timing.seconds += times.seconds
        timing.plain += times.plain
        result.peak, result.steady = max_known(result.peak, whole.bytes), max_known(result.steady, steady.bytes)
        result.peak = max_known(result.peak, result.steady)

    try:
        run(result.timing)
        if device.type == "cpu" and math.isnan(result.peak):  # apart: the profiler takes time
            with Peak(device) as found:
                run(None)
            result.peak = found.bytes
    except torch.OutOfMemoryError:
        result.failure = "out of memory"
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        result.failure = "out of memory"  # the CPU's allocator has no exception of its own
    finally:
        measure.release(device)


class Unmeasured:
    bytes = math.nan

    def __enter__(self) -> Unmeasured:
        return self

    def __exit__(self, *_: object) -> None: ...


def max_known(a: float, b: float) -> float:
    return b if math.isnan(a) else a if math.isnan(b) else max(a, b)


def measure_all(
    contestants: list[Contestant], data: list[Batch], options: argparse.Namespace, label: str
) -> list[Result]:
    results = [Result(c.name, rows=c.rows) for c in contestants]
    for _ in range(options.passes):
        for contestant, result in zip(contestants, results, strict=True):
            if not result.failure:
                measure.note(f"{label}: {contestant.name}")
                alone(contestant, data, result, options.steps, options.warmup, options.device)
    return results


# --- MLP and transformer ---

ADAM, GRAPH = "Adam, fused", ", CUDA graph"


def adam(make: Callable[[], nn.Module], loss: Loss, batch: Batch | None = None) -> Contestant:
    """As a CUDA graph, if there is a batch to show its shape."""

    def build() -> tuple[nn.Module, Step]:
        model = make()
        step = measure.adam if batch is None else measure.graphed_adam
        return model, step(model, loss, ADAM_RATE, *(batch or ()))

    return Contestant(ADAM if batch is None else ADAM + GRAPH, build)


def lm(name: str, make: Callable[[], nn.Module], loss: str, m: int, **parts: Any) -> Contestant:
    def build() -> tuple[nn.Module, Step]:
        model = make()
        return model, measure.lm(mq.LM(model, loss, **{"capture": False, **parts}))

    return Contestant(name, build, m)


# Decrease: no other vector of the parameters is kept between steps (Uphill compares with the previous step).
BARE: dict[str, Any] = {"momentum": None, "average": None, "acceptance": mq.Decrease()}


def mlp_contestants(n: float, device: torch.device, seed: int) -> list[Contestant]:
    def make() -> nn.Module:
        torch.manual_seed(seed)
        return mlp(n, device)

    m = BATCH * CLASSES
    return [
        adam(make, F.cross_entropy),
        lm("LM, identity", make, "cross_entropy", m, curvature=mq.Gram(), damping=mq.Identity(), **BARE),
        lm("LM, mean eigenvalue", make, "cross_entropy", m, curvature=mq.Gram(), damping=mq.MeanEigenvalue(), **BARE),
        lm(
            "LM, mean eigenvalue, momentum, average", make, "cross_entropy", m,
            curvature=mq.Gram(), damping=mq.MeanEigenvalue(),
            momentum=mq.AdaptiveMomentum(dP=math.inf, cap=True), average=mq.EMA(),
        ),
    ]  # fmt: skip


def transformer_groups(shape: Shape, device: torch.device, seed: int) -> Iterator[tuple[str, int, list[Contestant]]]:
    """What is trained, its outputs, and the contestants."""

    def maker(outputs: int) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            torch.manual_seed(seed)
            with device:
                return Pooled(shape, outputs)

        return make

    N, parts = shape.batch, {"curvature": mq.Gram(), "damping": mq.MeanEigenvalue(), **BARE}
    one, ten = maker(1), maker(CLASSES)
    exact: dict[str, Any] = {"rows": mq.Exact(), **parts}
    sampled: dict[str, Any] = {"rows": mq.Sampled(1), **parts}
    first = [adam(one, F.mse_loss), lm("LM, exact rows", one, "mse", N, **exact)]
    second = [
        adam(ten, F.cross_entropy),
        lm("LM, one sampled row", ten, "cross_entropy", N, **sampled),
        lm("LM, exact rows", ten, "cross_entropy", N * CLASSES, **exact),
    ]
    if device.type == "cuda":
        shown = [batches((N, shape.sequence, shape.d_model), k, device, seed, 1)[0] for k in (1, CLASSES)]
        first += [
            adam(one, F.mse_loss, shown[0]),
            lm("LM, exact rows" + GRAPH, one, "mse", N, capture=True, **exact),
        ]
        second += [
            adam(ten, F.cross_entropy, shown[1]),
            lm("LM, one sampled row" + GRAPH, ten, "cross_entropy", N, capture=True, **sampled),
        ]
    yield "one output", 1, first
    yield f"{CLASSES} classes", CLASSES, second


HEAD = [
    "one step", "parameters", "median, ms", "quartiles, ms", "plain steps", "× Adam",
    "peak, MiB", "later, MiB", "peak / Adam's", "J would need, GiB",
]  # fmt: skip


def lines(label: str, results: list[Result]) -> list[list[str]]:
    """Rows of the table; the first result is Adam's."""
    found = []
    for r in results:
        cells = [f"{label}: {r.name}", f"{r.parameters:,}"]
        if r.failure:
            found.append([*cells, r.failure, *[""] * 6, jacobian(r)])
            continue
        found.append(
            [
                *cells,
                measure.milliseconds(r.timing.median),
                measure.span(r.timing),
                f"{100 * r.timing.plain_share:.0f} %",
                measure.number(ratio(r, results[0])),
                measure.mib(r.peak),
                measure.mib(r.steady),
                measure.number(r.peak / results[0].peak),
                jacobian(r),
            ]
        )
    return found


def jacobian(r: Result) -> str:
    return measure.number(4 * r.parameters * r.rows / 2**30) if r.rows else ""


def ratio(result: Result, reference: Result) -> float:
    return math.nan if result.failure or reference.failure else result.timing.typical / reference.timing.typical


# --- how the memory grows ---


class Series(NamedTuple):
    """Four models that differ in one size alone."""

    name: str  # of the size
    quantity: str  # what the peak is predicted to be linear in
    points: list[tuple[float, Callable[[], nn.Module], tuple[int, ...]]]  # quantity, model, shape of the inputs


def memory_series(small: bool, device: torch.device) -> list[Series]:
    """Each so that the quantity outweighs the others at its larger sizes."""

    def chain(*widths: int) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            with device:
                parts = [p for a, b in pairwise(widths) for p in (nn.Linear(a, b), nn.ReLU())]
                return nn.Sequential(*parts[:-1])

        return make

    def tokens(width: int) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            with device:
                return Tokens(width)

        return make

    # n by the inputs of the first layer: 32 samples of them weigh little beside the weights.
    width = 256 if small else 2048
    wide = [(float(k * width), chain(k, width, CLASSES), (32, k)) for k in (1024, 2048, 4096, 8192)]
    # m by the batch.
    width, sizes = (64, (50, 100, 150, 200)) if small else (512, (200, 400, 800, 1600))
    tall = [(float(CLASSES * N) ** 2, chain(64, width, width, CLASSES), (N, 64)) for N in sizes]
    # c·activations by the sequence: what flows back at the outputs of both layers, for every row.
    width, sizes = (32, (64, 128, 256, 512)) if small else (128, (256, 512, 1024, 2048))
    long = [(float(CLASSES * 16 * T * width), tokens(width), (16, T, width)) for T in sizes]
    return [Series("n", "n", wide), Series("m", "m²", tall), Series("sequence", "c·activations", long)]


class Fit(NamedTuple):
    """peak = base + slope·quantity, by least squares."""

    base: float
    slope: float
    residual: float  # the largest, relative to the peak
    exponent: float  # of the peak between the two largest sizes: at most 1 where it is O(quantity)


def fit(x: list[float], y: list[float]) -> Fit:
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    slope = covariance / sum((a - mean_x) ** 2 for a in x)
    base = mean_y - slope * mean_x
    residual = max(abs(b - base - slope * a) / b for a, b in zip(x, y, strict=True))
    return Fit(base, slope, residual, math.log(y[-1] / y[-2]) / math.log(x[-1] / x[-2]))


def gram_peak(make: Callable[[], nn.Module], shape: tuple[int, ...], device: torch.device, chunk: int | None) -> float:
    """Bytes of two Gram steps on a new model."""
    data = batches(shape, CLASSES, device, seed=0, count=2)
    with Peak(device) as peak:
        opt = mq.LM(make(), "cross_entropy", curvature=mq.Gram(chunk=chunk), damping=mq.Identity(), **BARE)
        for x, y in data:
            opt.step(x, y)
        del opt
    measure.release(device)
    return peak.bytes


def grow(options: argparse.Namespace) -> tuple[str, list[Verdict], list[dict[str, Any]]]:
    device = options.device
    head = ["memory of a Gram step", "size", "peak, MiB", "fit, MiB", "floats each", "worst residual"]
    rows, judged, records = [], [], []
    for series in memory_series(options.quick or device.type == "cpu", device):
        x, y = [], []
        for quantity, make, shape in series.points:
            measure.note(f"memory over {series.name}: {quantity:g}")
            x.append(quantity)
            y.append(gram_peak(make, shape, device, None))
        fitted = fit(x, y)
        for k, (quantity, peak) in enumerate(zip(x, y, strict=True)):
            last = [f"{fitted.slope / 4:.2f}", f"{100 * fitted.residual:.1f} %"] if k == len(x) - 1 else ["", ""]
            at = fitted.base + fitted.slope * quantity
            rows.append(
                [f"{series.quantity} alone grows", f"{quantity:,.0f}", measure.mib(peak), measure.mib(at), *last]
            )
        what = f"peak grows as {series.quantity} to the power"
        judged.append(Verdict(what, fitted.exponent, "≤", 1.05))
        judged.append(Verdict(f"float32 numbers per {series.quantity}", fitted.slope / 4, ""))
        records.append({"series": series.name, "quantity": series.quantity, "x": x, "bytes": y} | fitted._asdict())
    _, make, shape = series.points[-1]  # the longest sequences: there the activations are what counts
    measure.note("memory in chunks")
    chunked = gram_peak(make, shape, device, max(1, shape[0] // 8))
    judged.append(Verdict("peak with an eighth of the samples at a time / all at once", chunked / y[-1], "≤", 0.5))
    records.append({"series": "chunk", "bytes": [y[-1], chunked]})
    return measure.markdown(head, rows), judged, records


# --- the command line ---


def add_shape(parser: argparse.ArgumentParser) -> None:
    """The sizes of the transformer."""
    names = ["--layers", "--d-model", "--ff", "--heads", "--sequence", "--batch"]
    for name, size in zip(names, Shape(12, 768, 3072, 12, 64, 32), strict=True):
        parser.add_argument(name, type=measure.positive, default=size, help="of the transformer")


def shape_of(options: argparse.Namespace) -> Shape:
    if options.quick:
        return Shape(2, 32, 64, 4, 8, 8)
    return Shape(options.layers, options.d_model, options.ff, options.heads, options.sequence, options.batch)


def arguments() -> argparse.Namespace:
    parser = measure.parser(__doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=["mlp", "transformer", "memory"], default=["mlp", "transformer", "memory"])
    add("--parameters", nargs="+", type=float, metavar="N", help="sizes of the MLP (default 1e6 36e6 141e6 818e6)")
    add("--steps", type=measure.positive, help="timed in every pass (default 10)")
    add("--warmup", type=measure.positive, help="steps before (default 3)")
    add("--passes", type=measure.positive, help="over all contestants (default 2)")
    add_shape(parser)
    options = parser.parse_args()
    options.steps = options.steps or (2 if options.quick else 10)
    options.warmup = options.warmup or (1 if options.quick else 3)
    options.passes = options.passes or (1 if options.quick else 2)
    options.parameters = options.parameters or ([1e5] if options.quick else list(PARAMETERS))
    return options


def main() -> None:
    options = arguments()
    described = measure.start(options)
    device, cuda = options.device, options.device.type == "cuda"
    rows: list[list[str]] = []
    judged: list[Verdict] = []
    results: dict[str, Any] = {}

    if "mlp" in options.parts:
        for n in options.parameters:
            label = f"MLP {n / 1e6:g} M"
            data = batches((BATCH, INPUTS), CLASSES, device, options.seed)
            found = measure_all(mlp_contestants(n, device, options.seed), data, options, label)
            rows += lines(label, found)
            results[label] = found
            bound = cuda and n >= LARGE
            for r in found[1:]:
                held = bound and "momentum" not in r.name  # with it the figures are reported, not judged
                value = math.inf if r.failure else ratio(r, found[0])
                judged.append(Verdict(f"{label}: {r.name} / Adam, time", value, "≤" if held else "", RATIO))
                value = math.inf if r.failure else r.peak / found[0].peak
                judged.append(Verdict(f"{label}: {r.name} / Adam, memory", value, "≤" if held else "", 1.0))
    if "transformer" in options.parts:
        shape = shape_of(options)
        for what, outputs, contestants in transformer_groups(shape, device, options.seed):
            label = f"transformer, {what}"
            data = batches((shape.batch, shape.sequence, shape.d_model), outputs, device, options.seed)
            found = measure_all(contestants, data, options, label)
            rows += lines(label, found)
            results[label] = found
            for r in (r for r in found if r.rows):
                held = cuda and not options.quick and r.rows == shape.batch
                like = next(a for a in found if not a.rows and (GRAPH in a.name) == (GRAPH in r.name))
                value = math.inf if r.failure else ratio(r, like)
                judged.append(Verdict(f"{label}: {r.name} / {like.name}, time", value, "≤" if held else "", RATIO))
    if rows:
        print(measure.markdown(HEAD, rows), end="\n\n", flush=True)
    growth = None
    if "memory" in options.parts:
        text, more, growth = grow(options)
        judged += more
        print(text, end="\n\n")
    notes = [
        f"MLP: {INPUTS} inputs, {HIDDEN_LAYERS} hidden layers, batch {BATCH}, {CLASSES} classes. "
        f"{shape_of(options).words()}.",
        "A trial forward, θ kept and the acceptance test are in every LM step; line searches too, where they occur.",
    ]
    if not cuda:
        notes.append("Targets of time and memory are for CUDA. Peak memory on a CPU is what the profiler sees.")
    print(measure.verdicts(judged), "\n".join(notes), sep="\n\n")
    measure.write(options, described, results=results, growth=growth, verdicts=judged, notes=notes)


if __name__ == "__main__":
    main()
