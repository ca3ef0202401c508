"""Print the tables of docs/distributed.md: what ranks send and how long a step takes, predicted from shapes alone.

python docs/figures/ranks.py
"""

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from marquardt import Dense, Gram, Kronecker
from marquardt.curvature.cost import USUAL, Layer, Shapes, factor, factors_together, gathered, reduced, step


class Case(NamedTuple):
    words: str
    sizes: tuple[int, ...]
    N: int  # samples of all ranks
    R: int  # rows per sample
    curvature: Dense | Gram | Kronecker
    ranks: tuple[int, ...]


REPLICATED = [
    Case("2,000 parameters", (30, 40, 20, 1), 1_000_000, 1, Dense(), (1, 8, 64)),
    Case("12,000 parameters", (100, 80, 50, 10), 1_000_000, 1, Dense(), (1, 8, 64)),
    Case("37 million", (784, 4096, 4096, 4096, 10), 8_192, 1, Gram(), (1, 8, 64)),
    Case("818 million", (784, *[16_384] * 4, 10), 8_192, 1, Gram(), (1, 8, 64)),
]
SHARDED = Case("10¹⁰", (4096, *[32_768] * 10, 1000), 8_192, 1, Gram(), (64,))


def shapes(case: Case, ranks: int) -> Shapes:
    """Of linear layers with an activation after each, in float32 on GPUs."""
    layers = tuple(Layer(1, 1, I, O) for I, O in pairwise(case.sizes))
    n, numbers = sum(layer.columns for layer in layers), 2.0 * sum(case.sizes[1:])
    nodes = 4 * len(layers)
    return Shapes(
        n, case.N, case.R, layers, 4, out=case.sizes[-1], numbers=numbers, nodes=nodes, cuda=True, ranks=ranks
    )


def seconds(case: Case, s: Shapes) -> float:
    """Rows and products are shared; the factor is, if that pays; what is sent comes on top."""
    work, rates = step(s, case.curvature.cost(replace(s, ranks=1))), USUAL[True]
    together = factors_together(s.n if isinstance(case.curvature, Dense) else s.m, s.ranks, s.itemsize, s.cuda)
    rows = replace(work, factor=0.0, calls=0.0).seconds(s) / s.ranks + work.calls * rates.call
    return rows + work.factor / rates.factor / (s.ranks if together else 1) + sent(case, s) / rates.network


def sent(case: Case, s: Shapes) -> float:
    return case.curvature.sent(s) if s.ranks > 1 else 0.0


def sharded(case: Case, s: Shapes) -> tuple[float, float]:
    """Bytes that a rank sends, and that it holds: see sharded.md. Parameters are gathered in five passes: forward,
    backward, and three trial points and looks at the outputs."""
    rows = s.N * (s.inputs + s.R * s.outputs / s.ranks)
    total = gathered(s, 5.0 * s.n + rows) + reduced(s, s.m**2) + factor(s, s.m)
    widest = max(layer.columns for layer in s.layers)
    held = s.itemsize * (5 * s.n / s.ranks + 2 * widest + rows + 5.0 * s.m**2)
    return total, held


def readable(size: float, units: tuple[str, ...] = ("kB", "MB", "GB", "TB")) -> str:
    size /= 1e3
    for unit in units[:-1]:
        if size < 1e3:
            return f"{size:.3g} {unit}"
        size /= 1e3
    return f"{size:.3g} {units[-1]}"


def duration(t: float) -> str:
    return f"{1e3 * t:.3g} ms" if t < 1 else f"{t:.2g} s"


def main() -> None:
    print("| parameters | rows | curvature | GPUs | a rank sends | a step takes | efficiency |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    for case in REPLICATED:
        alone = seconds(case, shapes(case, 1))
        for ranks in case.ranks:
            s = shapes(case, ranks)
            took = seconds(case, s)
            cells = [
                case.words, f"{s.m:,}", type(case.curvature).__name__, str(ranks),
                readable(sent(case, s)) if ranks > 1 else "–", duration(took), f"{alone / ranks / took:.2f}",
            ]  # fmt: skip
            print(f"| {' | '.join(cells)} |")
    s = shapes(SHARDED, SHARDED.ranks[0])
    total, held = sharded(SHARDED, s)
    print()
    print(
        f"{s.n:,} parameters in {len(s.layers)} layers, {s.m:,} rows, {s.ranks} GPUs with shards: a rank sends "
        f"{readable(total)} in a step, which take {duration(total / USUAL[True].network)} at 90 GB/s, and holds "
        f"{readable(held)}."
    )


if __name__ == "__main__":
    main()
