"""The residuals, (n,) → (m,), and the data that they are of."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, atan2, cat, cos, exp, sin, stack


def data(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def count(first: int, last: int) -> Tensor:
    """first, …, last"""
    return torch.arange(first, last + 1, dtype=torch.float64)


def last(scalar: Any) -> Any:
    """A number as a vector, to put behind others."""
    return scalar[None]


# --- MGH 1 to 20: a fixed number of parameters ---


def rosenbrock(x: Any) -> Any:
    return stack([10 * (x[1] - x[0] ** 2), 1 - x[0]])


def freudenstein_roth(x: Any) -> Any:
    return stack([-13 + x[0] + ((5 - x[1]) * x[1] - 2) * x[1], -29 + x[0] + ((x[1] + 1) * x[1] - 14) * x[1]])


def powell_badly_scaled(x: Any) -> Any:
    return stack([1e4 * x[0] * x[1] - 1, exp(-x[0]) + exp(-x[1]) - 1.0001])


def brown_badly_scaled(x: Any) -> Any:
    return stack([x[0] - 1e6, x[1] - 2e-6, x[0] * x[1] - 2])


def beale(x: Any) -> Any:
    return stack([y - x[0] * (1 - x[1] ** i) for i, y in ((1, 1.5), (2, 2.25), (3, 2.625))])


def jennrich_sampson(x: Any) -> Any:
    i = count(1, 10)
    return 2 + 2 * i - (exp(i * x[0]) + exp(i * x[1]))


def helical_valley(x: Any) -> Any:
    theta = atan2(-x[0], x[1]) / (2 * math.pi) + 0.25  # from −¼ to ¾, as MGH's
    return stack([10 * (x[2] - 10 * theta), 10 * ((x[0] ** 2 + x[1] ** 2) ** 0.5 - 1), x[2]])


BARD = data(0.14, 0.18, 0.22, 0.25, 0.29, 0.32, 0.35, 0.39, 0.37, 0.58, 0.73, 0.96, 1.34, 2.10, 4.39)


def bard(x: Any) -> Any:
    u = count(1, 15)
    v = 16 - u
    return BARD - (x[0] + u / (v * x[1] + torch.minimum(u, v) * x[2]))


GAUSSIAN = data(
    0.0009, 0.0044, 0.0175, 0.0540, 0.1295, 0.2420, 0.3521, 0.3989,
    0.3521, 0.2420, 0.1295, 0.0540, 0.0175, 0.0044, 0.0009,
)  # fmt: skip


def gaussian(x: Any) -> Any:
    t = (8 - count(1, 15)) / 2
    return x[0] * exp(-x[1] * (t - x[2]) ** 2 / 2) - GAUSSIAN


MEYER = data(
    34780, 28610, 23650, 19630, 16370, 13720, 11540, 9744, 8261, 7030, 6005, 5147, 4427, 3820, 3307, 2872
)  # fmt: skip


def meyer(x: Any) -> Any:
    return x[0] * exp(x[1] / (45 + 5 * count(1, 16) + x[2])) - MEYER


def gulf(x: Any) -> Any:
    t = count(1, 99) / 100
    y = 25 + (-50 * t.log()) ** (2 / 3)
    return exp(-(abs(y - x[1]) ** x[2]) / x[0]) - t


def box(x: Any) -> Any:
    t = count(1, 10) / 10
    return exp(-t * x[0]) - exp(-t * x[1]) - x[2] * (exp(-t) - exp(-10 * t))


def powell_singular(x: Any) -> Any:
    a, b, c, d = x[0::4], x[1::4], x[2::4], x[3::4]
    return cat([a + 10 * b, 5**0.5 * (c - d), (b - 2 * c) ** 2, 10**0.5 * (a - d) ** 2])


def wood(x: Any) -> Any:
    return stack(
        [
            10 * (x[1] - x[0] ** 2),
            1 - x[0],
            90**0.5 * (x[3] - x[2] ** 2),
            1 - x[2],
            10**0.5 * (x[1] + x[3] - 2),
            (x[1] - x[3]) / 10**0.5,
        ]
    )


KOWALIK_Y = data(0.1957, 0.1947, 0.1735, 0.1600, 0.0844, 0.0627, 0.0456, 0.0342, 0.0323, 0.0235, 0.0246)
KOWALIK_U = data(4.0, 2.0, 1.0, 0.5, 0.25, 0.167, 0.125, 0.1, 0.0833, 0.0714, 0.0625)


def kowalik_osborne(x: Any) -> Any:
    u = KOWALIK_U
    return KOWALIK_Y - x[0] * (u**2 + u * x[1]) / (u**2 + u * x[2] + x[3])


def brown_dennis(x: Any) -> Any:
    t = count(1, 20) / 5
    return (x[0] + t * x[1] - exp(t)) ** 2 + (x[2] + x[3] * sin(t) - cos(t)) ** 2


OSBORNE_1 = data(
    0.844, 0.908, 0.932, 0.936, 0.925, 0.908, 0.881, 0.850, 0.818, 0.784, 0.751, 0.718, 0.685, 0.658, 0.628, 0.603,
    0.580, 0.558, 0.538, 0.522, 0.506, 0.490, 0.478, 0.467, 0.457, 0.448, 0.438, 0.431, 0.424, 0.420, 0.414, 0.411,
    0.406,
)  # fmt: skip


def osborne_1(x: Any) -> Any:
    t = 10 * count(0, 32)
    return OSBORNE_1 - (x[0] + x[1] * exp(-t * x[3]) + x[2] * exp(-t * x[4]))


def biggs_exp6(x: Any) -> Any:
    t = count(1, 13) / 10
    y = exp(-t) - 5 * exp(-10 * t) + 3 * exp(-4 * t)
    return x[2] * exp(-t * x[0]) - x[3] * exp(-t * x[1]) + x[5] * exp(-t * x[4]) - y


OSBORNE_2 = data(
    1.366, 1.191, 1.112, 1.013, 0.991, 0.885, 0.831, 0.847, 0.786, 0.725, 0.746, 0.679, 0.608, 0.655, 0.616, 0.606,
    0.602, 0.626, 0.651, 0.724, 0.649, 0.649, 0.694, 0.644, 0.624, 0.661, 0.612, 0.558, 0.533, 0.495, 0.500, 0.423,
    0.395, 0.375, 0.372, 0.391, 0.396, 0.405, 0.428, 0.429, 0.523, 0.562, 0.607, 0.653, 0.672, 0.708, 0.633, 0.668,
    0.645, 0.632, 0.591, 0.559, 0.597, 0.625, 0.739, 0.710, 0.729, 0.720, 0.636, 0.581, 0.428, 0.292, 0.162, 0.098,
    0.054,
)  # fmt: skip


def osborne_2(x: Any) -> Any:
    t = count(0, 64) / 10
    peaks = [x[1 + k] * exp(-((t - x[8 + k]) ** 2) * x[5 + k]) for k in range(3)]
    return OSBORNE_2 - (x[0] * exp(-t * x[4]) + peaks[0] + peaks[1] + peaks[2])


def watson(x: Any) -> Any:
    n = len(x)
    t = (count(1, 29) / 29)[:, None]  # (29, 1)
    j = count(0, n - 1)  # (n,)
    slopes = j * t ** (j - 1).clamp(min=0)  # (29, n)
    return cat([slopes @ x - (t**j @ x) ** 2 - 1, x[:1], last(x[1] - x[0] ** 2 - 1)])


# --- MGH 21 to 35: any number of parameters ---


def extended_rosenbrock(x: Any) -> Any:
    a, b = x[0::2], x[1::2]
    return cat([10 * (b - a**2), 1 - a])


def penalty_1(x: Any) -> Any:
    return cat([1e-5**0.5 * (x - 1), last((x**2).sum() - 0.25)])


def penalty_2(x: Any) -> Any:
    n, e = len(x), exp(x / 10)
    i = count(2, n)
    y = exp(i / 10) + exp((i - 1) / 10)
    pairs, singles = e[1:] + e[:-1] - y, e[1:] - math.exp(-0.1)
    return cat([x[:1] - 0.2, 1e-5**0.5 * pairs, 1e-5**0.5 * singles, last(count(1, n).flip(0) @ x**2 - 1)])


def variably_dimensioned(x: Any) -> Any:
    s = count(1, len(x)) @ (x - 1)
    return cat([x - 1, last(s), last(s**2)])


def trigonometric(x: Any) -> Any:
    n = len(x)
    return n - cos(x).sum() + count(1, n) * (1 - cos(x)) - sin(x)


def brown_almost_linear(x: Any) -> Any:
    n = len(x)
    return cat([(x + x.sum() - (n + 1))[:-1], last(x.prod() - 1)])


def grid(n: int) -> Tensor:
    """The n inner points of an even grid on [0, 1]."""
    return count(1, n) / (n + 1)


def discrete_boundary_value(x: Any) -> Any:
    n = len(x)
    off = torch.diag(torch.ones(n - 1, dtype=torch.float64), 1)
    second = 2 * torch.eye(n, dtype=torch.float64) - off - off.T
    return second @ x + (x + grid(n) + 1) ** 3 / (2 * (n + 1) ** 2)


def discrete_integral(x: Any) -> Any:
    t = grid(len(x))
    kernel = torch.minimum(t[:, None], t) * (1 - torch.maximum(t[:, None], t))
    return x + kernel @ (x + t + 1) ** 3 / (2 * (len(x) + 1))


def broyden_tridiagonal(x: Any) -> Any:
    up = torch.diag(torch.ones(len(x) - 1, dtype=torch.float64), 1)
    return (3 - 2 * x) * x - (up.T + 2 * up) @ x + 1


def broyden_banded(x: Any) -> Any:
    n = len(x)
    offset = torch.arange(n) - torch.arange(n)[:, None]  # j − i
    near = ((offset >= -5) & (offset <= 1) & (offset != 0)).double()
    return x * (2 + 5 * x**2) + 1 - near @ (x * (1 + x))


LINEAR_M = 10


def linear_full_rank(x: Any) -> Any:
    n = len(x)
    return torch.eye(LINEAR_M, n, dtype=torch.float64) @ x - 2 / LINEAR_M * x.sum() - 1


def linear_rank_1(x: Any) -> Any:
    return count(1, LINEAR_M) * (count(1, len(x)) @ x) - 1


def linear_rank_1_zeros(x: Any) -> Any:
    rows, columns = count(0, LINEAR_M - 1), count(1, len(x))
    rows[-1] = columns[0] = columns[-1] = 0
    return rows * (columns @ x) - 1


def chebyquad(x: Any) -> Any:
    n, z = len(x), (2 * x - 1)[None]
    T = cat([z**0, z])
    while len(T) <= n:
        m = len(T) - 1
        T = cat([T, 2 * T[m] * T[1:] - T[:m].flip(0)])  # T_{m+j} = 2·T_m·T_j − T_{m−j}
    integrals = data(*(-1 / (i**2 - 1) if i % 2 == 0 else 0 for i in range(1, n + 1)))
    return T[1 : n + 1] @ torch.full((n,), 1 / n, dtype=torch.float64) - integrals


# --- from textbooks ---


def himmelblau(x: Any) -> Any:
    return stack([x[0] ** 2 + x[1] - 11, x[0] + x[1] ** 2 - 7])


def madsen(x: Any) -> Any:
    return stack([x[0] ** 2 + x[1] ** 2 + x[0] * x[1], sin(x[0]), cos(x[1])])


PUROMYCIN_X = data(0.02, 0.02, 0.06, 0.06, 0.11, 0.11, 0.22, 0.22, 0.56, 0.56, 1.10, 1.10)
PUROMYCIN_Y = data(76, 47, 97, 107, 123, 139, 159, 152, 191, 201, 207, 200)


def puromycin(x: Any) -> Any:
    return x[0] * PUROMYCIN_X / (x[1] + PUROMYCIN_X) - PUROMYCIN_Y


def oxygen_demand(x: Any) -> Any:
    t, y = data(1, 2, 3, 4, 5, 7), data(8.3, 10.3, 19.0, 16.0, 15.6, 19.8)
    return x[0] * (1 - exp(-x[1] * t)) - y


CHLORINE_T = data(
    8, 8, 10, 10, 10, 10, 12, 12, 12, 12, 14, 14, 14, 16, 16, 16, 18, 18, 20, 20, 20, 22,
    22, 22, 24, 24, 24, 26, 26, 26, 28, 28, 30, 30, 30, 32, 32, 34, 36, 36, 38, 38, 40, 42,
)  # fmt: skip
CHLORINE_Y = data(
    0.49, 0.49, 0.48, 0.47, 0.48, 0.47, 0.46, 0.46, 0.45, 0.43, 0.45, 0.43, 0.43, 0.44, 0.43, 0.43, 0.46, 0.45, 0.42,
    0.42, 0.43, 0.41, 0.41, 0.40, 0.42, 0.40, 0.40, 0.41, 0.40, 0.41, 0.41, 0.40, 0.40, 0.40, 0.38, 0.41, 0.40, 0.40,
    0.41, 0.38, 0.40, 0.40, 0.39, 0.39,
)  # fmt: skip


def chlorine(x: Any) -> Any:
    return x[0] + (0.49 - x[0]) * exp(-x[1] * (CHLORINE_T - 8)) - CHLORINE_Y


DNASE_X = data(0.04882812, 0.1953125, 0.390625, 0.78125, 1.5625, 3.125, 6.25, 12.5).repeat_interleave(2).log()
DNASE_Y = data(
    0.017, 0.018, 0.121, 0.124, 0.206, 0.215, 0.377, 0.374, 0.614, 0.609, 1.019, 1.001, 1.334, 1.364, 1.710, 1.730
)  # fmt: skip


def dnase(x: Any) -> Any:
    return x[0] / (1 + exp((x[1] - DNASE_X) / x[2])) - DNASE_Y
