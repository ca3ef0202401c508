"""Print the table of docs/choose.md: what a step of some networks is predicted to cost, from shapes alone.

python docs/figures/costs.py
"""

from itertools import pairwise

from marquardt import Dense, Gram
from marquardt.curvature.cost import Layer, Shapes, step

NETWORKS = [  # sizes, samples, rows per sample, bytes of a number
    ((2, 20, 20, 1), 1_000, 1, 8),
    ((8, 32, 32, 1), 2_000, 1, 8),
    ((8, 48, 48, 1), 3_000, 1, 8),
    ((8, 100, 100, 1), 10_000, 1, 8),
    ((784, 128, 64, 10), 600, 9, 4),
    ((784, 1024, 1024, 10), 600, 1, 4),
    ((784, 1024, 1024, 10), 600, 9, 4),
]


def shapes(sizes: tuple[int, ...], N: int, R: int, itemsize: int, cuda: bool) -> Shapes:
    """Of a network of linear layers with an activation after each."""
    layers = tuple(Layer(1, 1, I, O) for I, O in pairwise(sizes))
    n, numbers = sum(layer.columns for layer in layers), 2.0 * sum(sizes[1:])
    return Shapes(n, N, R, layers, itemsize, out=sizes[-1], numbers=numbers, nodes=4 * len(layers), cuda=cuda)


def seconds(s: Shapes) -> str:
    found = step(s, best(s).cost(s)).seconds(s)
    return f"{found:.1f} s" if found > 1 else f"{1e3 * found:.0f} ms"


def best(s: Shapes) -> Dense | Gram:
    return Dense() if s.n <= s.m else Gram()


def main() -> None:
    print("| network | precision | parameters | rows | curvature | memory | two CPU cores | a large GPU |")
    print("| --- | --- | ---: | ---: | --- | ---: | ---: | ---: |")
    for sizes, N, R, itemsize in NETWORKS:
        cpu, gpu = (shapes(sizes, N, R, itemsize, cuda) for cuda in (False, True))
        memory = best(cpu).cost(cpu).bytes / 2**20
        cells = [
            "–".join(map(str, sizes)), f"float{8 * itemsize}", f"{cpu.n:,}", f"{cpu.m:,}", type(best(cpu)).__name__,
            f"{memory:,.0f} MiB", seconds(cpu), seconds(gpu),
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
