"""Classical nonlinear least-squares problems: residuals, the standard start, the known minima.

Most are from J. J. Moré, B. S. Garbow and K. E. Hillstrom, "Testing unconstrained optimization software", ACM TOMS 7
(1981) 17–41, here MGH with the number of the problem; f is theirs, some in another order. Published minima are of Σf²
and stand as printed there. The minimisers are exact where that is possible; the others were computed in 50 digits,
tests/certify.py, and test_classical.py certifies all of them again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, atan2, cat, cos, exp, sin, stack
from torch.fx.experimental.proxy_tensor import make_fx

SOLVED = 1e-6  # of Σf², relative to a minimum
SOLVED_ZERO = 1e-12  # of Σf², absolute, where the minimum is 0


@dataclass(frozen=True)
class Minimum:
    value: str  # Σf² with the digits as printed
    x: tuple[float, ...]
    digits: int = 8  # of every parameter (absolute for zeros) that float64 can be asked for; 0: x is one of many

    def errors(self, x: Tensor) -> Tensor:
        """Of every parameter: relative, absolute for zeros."""
        known = torch.tensor(self.x, dtype=torch.float64)
        return (x - known).abs() / torch.where(known == 0, 1.0, known.abs())


@dataclass(frozen=True)
class Problem:
    name: str
    residuals: Callable[[Any], Any]  # (n,) → (m,)
    start: tuple[float, ...]
    minima: tuple[Minimum, ...]
    source: str
    note: str = ""
    symmetric: bool = False  # every permutation of a minimiser is one, and the sorted one is listed
    far: bool = True  # from multiples of the start as well; not Chebyquad, polynomials far outside their interval

    def x0(self, factor: float = 1.0) -> Tensor:
        """The standard start times a factor; from the origin, as in MINPACK's own tests, all parameters = factor."""
        x = torch.tensor(self.start, dtype=torch.float64)
        return torch.full_like(x, factor) if factor != 1 and not x.any() else factor * x

    def jacobian(self, x: Tensor) -> Tensor:
        """∂f/∂x, exact. (m, n)"""
        return traced_jacobian(self.residuals, len(x))(x)

    def sum_of_squares(self, x: Any) -> float:
        f = self.residuals(torch.as_tensor(x, dtype=torch.float64))
        return float(f @ f)

    def solved(self, x: Any) -> Minimum | None:
        """The known minimum that x has reached by its Σf², the nearest of several; None where it has reached none."""
        x = torch.as_tensor(x, dtype=torch.float64)
        found = self.sum_of_squares(x)

        def reached(minimum: Minimum) -> bool:
            if minimum.value == "0":
                return found <= SOLVED_ZERO
            known = self.sum_of_squares(minimum.x)
            return abs(found - known) <= SOLVED * known

        candidates = [minimum for minimum in self.minima if reached(minimum)]
        return min(candidates, key=lambda minimum: float(minimum.errors(self.ordered(x)).max()), default=None)

    def digits(self, x: Any) -> float:
        """Correct digits of the worst parameter, 16 at most; NaN where no minimum or none in particular is reached."""
        minimum = self.solved(x)
        if minimum is None or not minimum.digits:
            return math.nan
        worst = float(minimum.errors(self.ordered(torch.as_tensor(x, dtype=torch.float64))).max())
        return -math.log10(max(worst, 1e-16))

    def ordered(self, x: Tensor) -> Tensor:
        return x.sort().values if self.symmetric else x


@cache
def traced_jacobian(residuals: Callable[[Any], Any], n: int) -> Callable[[Tensor], Tensor]:
    """torch.func.jacfwd as a plain list of operations: twice as fast."""
    return make_fx(torch.func.jacfwd(residuals))(torch.ones(n, dtype=torch.float64))


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


# --- minimisers that fill more than a line ---

OSBORNE_1_X = (
    0.37541005210695194, 1.9358469127123559, -1.4646871366134115, 0.012867534640057266, 0.02212269966167266,
)  # fmt: skip
OSBORNE_2_X = (
    1.3099771546273007, 0.431553794602989, 0.633661698960724, 0.5994305347859162, 0.7541832263280114,
    0.9042885798596336, 1.3658118352370279, 4.823698817227157, 2.3986848661317546, 4.568874597667672,
    5.6753414705806415,
)  # fmt: skip
WATSON_6 = (
    -0.01572508640145843, 1.0124348693691099, -0.23299162595673695, 1.2604300877996055, -1.5137289227222757,
    0.9929964324311327,
)  # fmt: skip
WATSON_9 = (
    -1.5307036521403266e-05, 0.9997897039319483, 0.014763963693560233, 0.146342328299322, 1.0008211030049168,
    -2.617731140519554, 4.104403164479594, -3.14361227855695, 1.0526264080103054,
)  # fmt: skip
WATSON_12 = (
    -6.638060467758891e-09, 1.0000016441178619, -0.0005639322103110821, 0.3478205405034476, -0.15673150409128733,
    1.052815177185306, -3.2472711534001535, 7.288434897834806, -10.271848241205944, 9.074113646993439,
    -4.541375466659075, 1.01201188854677,
)  # fmt: skip
PENALTY_2_4 = (
    0.1999993333503804, 0.19131670099277245, 0.4801014853326232, 0.5188454043902005,
)  # fmt: skip
PENALTY_2_10 = (
    0.19998360519782363, 0.010350648471292299, 0.019604934480438405, 0.03208906722068565, 0.0499326773996413,
    0.07651399515399361, 0.11862407286950419, 0.1921448723355767, 0.3473205869418436, 0.36916437415935077,
)  # fmt: skip
TRIGONOMETRIC = (
    0.05515090398069129, 0.05684061679473856, 0.058764001762695084, 0.06099060865676081, 0.06362621369585451,
    0.06684317945275879, 0.20816151856988116, 0.16436309588564774, 0.08500689568850744, 0.09143145071470794,
)  # fmt: skip
BROYDEN_TRIDIAGONAL = (
    -0.5707221320112248, -0.681806949984275, -0.7022100760176601, -0.7055106298950804, -0.7049061557287437,
    -0.7014966070298512, -0.6918893223547983, -0.6657965144058537, -0.5960351090263657, -0.4164122575286934,
)  # fmt: skip
BROYDEN_BANDED = (
    -0.4283028635872503, -0.47659642435629024, -0.5196524636468617, -0.5580993248321809, -0.5925061568294574,
    -0.624503682199468, -0.6232394714405911, -0.6213938417965735, -0.6204535966590874, -0.5864692707204351,
)  # fmt: skip
CHEBYQUAD_7 = (
    0.05806914962097548, 0.2351716123574216, 0.3380440947400462, 0.5, 0.6619559052599538, 0.7648283876425784,
    0.9419308503790246,
)  # fmt: skip
CHEBYQUAD_8 = (
    0.04315276015101663, 0.1930908403841861, 0.26632870689027294, 0.5, 0.5, 0.7336712931097271, 0.8069091596158139,
    0.9568472398489833,
)  # fmt: skip
CHEBYQUAD_9 = (
    0.04420534613578276, 0.19949067230988096, 0.23561910847106002, 0.416046907892598, 0.5, 0.583953092107402,
    0.76438089152894, 0.8005093276901191, 0.9557946538642172,
)  # fmt: skip
CHEBYQUAD_10 = (
    0.059619900535812696, 0.1667082818358614, 0.2391706589426085, 0.3988842923060445, 0.3988842923060445,
    0.6011157076939555, 0.6011157076939555, 0.7608293410573915, 0.8332917181641386, 0.9403800994641873,
)  # fmt: skip

# --- the list ---

BATES_WATTS = "D. M. Bates and D. G. Watts, Nonlinear Regression Analysis and Its Applications, Wiley 1988"


def repeat(times: int, *values: float) -> tuple[float, ...]:
    return values * times


def boundary_start(n: int) -> tuple[float, ...]:
    return tuple((grid(n) * (grid(n) - 1)).tolist())


BOUNDARY = (
    -0.04316498251876487, -0.08157715653538689, -0.11448571438052929, -0.14097357686259668, -0.1599086961819831,
    -0.16987720231277492, -0.16908998378120835, -0.15524953522183182, -0.125355891678935, -0.07541653368589209,
)  # fmt: skip
ALMOST_LINEAR = 0.9794303033498625  # α with nα¹⁰ − (n + 1)α⁹ + 1 = 0 for n = 10; the last parameter is α⁻⁹

PROBLEMS = (
    Problem("Rosenbrock", rosenbrock, (-1.2, 1.0), (Minimum("0", (1.0, 1.0)),), "MGH 1"),
    Problem(
        "Freudenstein–Roth",
        freudenstein_roth,
        (0.5, -2.0),
        (Minimum("0", (5.0, 4.0)), Minimum("48.9842", (11.412778986902094, -0.8968052532744766))),
        "MGH 2",
        note="J is singular at the local minimum, (53 − 4√22)/3 and (2 − √22)/3",
    ),
    Problem(
        "Powell badly scaled",
        powell_badly_scaled,
        (0.0, 1.0),
        (Minimum("0", (1.0981593296998053e-05, 9.106146739866624)),),
        "MGH 3",
    ),
    Problem("Brown badly scaled", brown_badly_scaled, (1.0, 1.0), (Minimum("0", (1e6, 2e-6)),), "MGH 4"),
    Problem("Beale", beale, (1.0, 1.0), (Minimum("0", (3.0, 0.5)),), "MGH 5"),
    Problem(
        "Jennrich–Sampson",
        jennrich_sampson,
        (0.3, 0.4),
        (Minimum("124.362", (0.2578252136703641, 0.2578252136703641)),),
        "MGH 6",
        note="J is singular at the minimum, large residuals",
    ),
    Problem("helical valley", helical_valley, (-1.0, 0.0, 0.0), (Minimum("0", (1.0, 0.0, 0.0)),), "MGH 7"),
    Problem(
        "Bard",
        bard,
        (1.0, 1.0, 1.0),
        (Minimum("8.21487e-3", (0.08241055974978899, 1.1330360920297224, 2.3436951786425366)),),
        "MGH 8",
        note="Σf² falls to 17.4286 as two parameters go to −∞: no minimum, and not counted as one",
    ),
    Problem(
        "Gaussian",
        gaussian,
        (0.4, 1.0, 0.0),
        (Minimum("1.12793e-8", (0.39895613783875666, 1.0000190844878056, 0.0)),),
        "MGH 9",
    ),
    Problem(
        "Meyer",
        meyer,
        (0.02, 4000.0, 250.0),
        (Minimum("87.9458", (0.005609636471028053, 6181.346346286372, 345.2236346241365)),),
        "MGH 10",
    ),
    Problem("Gulf", gulf, (5.0, 2.5, 0.15), (Minimum("0", (50.0, 25.0, 1.5)),), "MGH 11, m = 99"),
    Problem(
        "Box",
        box,
        (0.0, 10.0, 20.0),
        (
            Minimum("0", (1.0, 10.0, 1.0)),
            Minimum("0", (10.0, 1.0, -1.0)),
            Minimum("0", (1.0, 1.0, 0.0), digits=0),
        ),
        "MGH 12, m = 10",
        note="0 also wherever the first two are equal and the third is 0",
    ),
    Problem(
        "Powell singular",
        powell_singular,
        (3.0, -1.0, 0.0, 1.0),
        (Minimum("0", repeat(4, 0.0), digits=4),),
        "MGH 13",
        note="J is singular at the minimum, where Σf² is of order four: convergence is linear",
    ),
    Problem("Wood", wood, (-3.0, -1.0, -3.0, -1.0), (Minimum("0", repeat(4, 1.0)),), "MGH 14"),
    Problem(
        "Kowalik–Osborne",
        kowalik_osborne,
        (0.25, 0.39, 0.415, 0.39),
        (Minimum("3.07505e-4", (0.1928069345790379, 0.1912823287343668, 0.12305650692632074, 0.13606233068379475)),),
        "MGH 15",
        note="Σf² falls to 1.02734e-3 as three parameters go to ±∞: not counted",
    ),
    Problem(
        "Brown–Dennis",
        brown_dennis,
        (25.0, 5.0, -5.0, -1.0),
        (Minimum("85822.2", (-11.594439904762165, 13.203630051207202, -0.4034394881768595, 0.23677877445573628)),),
        "MGH 16",
        note="large residuals: Gauss-Newton converges linearly at best",
    ),
    Problem(
        "Osborne 1",
        osborne_1,
        (0.5, 1.5, -1.0, 0.01, 0.02),
        tuple(
            Minimum("5.46489e-5", tuple(OSBORNE_1_X[i] for i in order)) for order in ((0, 1, 2, 3, 4), (0, 2, 1, 4, 3))
        ),
        "MGH 17",
    ),
    Problem(
        "Biggs EXP6",
        biggs_exp6,
        (1.0, 2.0, 1.0, 1.0, 1.0, 1.0),
        tuple(
            Minimum("0", (a[0], b[0], a[1], -b[1], c[0], c[1]))
            for a, b, c in permutations([(1.0, 1.0), (10.0, -5.0), (4.0, 3.0)])  # rate, coefficient
        ),
        "MGH 18, m = 13",
        note="three exponentials in any order; J is singular at the start; MGH's 5.65565e-3 is a saddle",
    ),
    Problem(
        "Osborne 2",
        osborne_2,
        (1.3, 0.65, 0.65, 0.7, 0.6, 3.0, 5.0, 7.0, 2.0, 4.5, 5.5),
        (Minimum("4.01377e-2", OSBORNE_2_X),),
        "MGH 19",
    ),
    Problem("Watson, n = 6", watson, repeat(6, 0.0), (Minimum("2.28767e-3", WATSON_6),), "MGH 20"),
    Problem("Watson, n = 9", watson, repeat(9, 0.0), (Minimum("1.39976e-6", WATSON_9),), "MGH 20"),
    Problem(
        "Watson, n = 12",
        watson,
        repeat(12, 0.0),
        (Minimum("4.72238e-10", WATSON_12),),
        "MGH 20",
        note="cond J = 8e6",
    ),
    Problem(
        "extended Rosenbrock, n = 10",
        extended_rosenbrock,
        repeat(5, -1.2, 1.0),
        (Minimum("0", repeat(10, 1.0)),),
        "MGH 21",
    ),
    Problem(
        "extended Powell singular, n = 12",
        powell_singular,
        repeat(3, 3.0, -1.0, 0.0, 1.0),
        (Minimum("0", repeat(12, 0.0), digits=4),),
        "MGH 22",
        note="as Powell singular",
    ),
    Problem(
        "penalty I, n = 4",
        penalty_1,
        (1.0, 2.0, 3.0, 4.0),
        (Minimum("2.24997e-5", repeat(4, 0.2500074995875379)),),
        "MGH 23",
    ),
    Problem(
        "penalty I, n = 10",
        penalty_1,
        tuple(range(1, 11)),
        (Minimum("7.08765e-5", repeat(10, 0.15812230111311634)),),
        "MGH 23",
    ),
    Problem("penalty II, n = 4", penalty_2, repeat(4, 0.5), (Minimum("9.37629e-6", PENALTY_2_4),), "MGH 24"),
    Problem(
        "penalty II, n = 10",
        penalty_2,
        repeat(10, 0.5),
        (Minimum("2.93660e-4", PENALTY_2_10),),
        "MGH 24",
        note="cond J = 1.5e4",
    ),
    Problem(
        "variably dimensioned, n = 10",
        variably_dimensioned,
        tuple(1 - j / 10 for j in range(1, 11)),
        (Minimum("0", repeat(10, 1.0)),),
        "MGH 25",
    ),
    Problem(
        "trigonometric, n = 10",
        trigonometric,
        repeat(10, 0.1),
        (
            Minimum("0", repeat(10, 0.0)),
            Minimum("2.79506e-5", TRIGONOMETRIC),
        ),
        "MGH 26",
        note="many local minima; J is singular at the listed one",
    ),
    Problem(
        "Brown almost linear, n = 10",
        brown_almost_linear,
        repeat(10, 0.5),
        (
            Minimum("0", repeat(10, 1.0)),
            Minimum("0", (*repeat(9, ALMOST_LINEAR), ALMOST_LINEAR**-9)),
            Minimum("1", (*repeat(9, 0.0), 11.0), digits=0),
        ),
        "MGH 27",
        note="MGH's third is stationary only: Σf² falls from it, of order nine",
    ),
    Problem(
        "discrete boundary value, n = 10",
        discrete_boundary_value,
        boundary_start(10),
        (Minimum("0", BOUNDARY),),
        "MGH 28",
    ),
    Problem("discrete integral, n = 10", discrete_integral, boundary_start(10), (Minimum("0", BOUNDARY),), "MGH 29"),
    Problem(
        "Broyden tridiagonal, n = 10",
        broyden_tridiagonal,
        repeat(10, -1.0),
        (Minimum("0", BROYDEN_TRIDIAGONAL),),
        "MGH 30",
    ),
    Problem("Broyden banded, n = 10", broyden_banded, repeat(10, -1.0), (Minimum("0", BROYDEN_BANDED),), "MGH 31"),
    Problem("linear, full rank", linear_full_rank, repeat(5, 1.0), (Minimum("5", repeat(5, -1.0)),), "MGH 32"),
    Problem(
        "linear, rank 1",
        linear_rank_1,
        repeat(5, 1.0),
        (Minimum("2.142857143", (3 / 21, 0.0, 0.0, 0.0, 0.0), digits=0),),  # 90/42; Σj·x_j = 3/21
        "MGH 33",
        note="a plane of minimisers",
    ),
    Problem(
        "linear, rank 1, zeros",
        linear_rank_1_zeros,
        repeat(5, 1.0),
        (Minimum("3.647058824", (0.0, 3 / 34, 0.0, 0.0, 0.0), digits=0),),  # 124/34; Σj·x_j = 3/17
        "MGH 34",
        note="a plane of minimisers",
    ),
    Problem(
        "Chebyquad, n = 7",
        chebyquad,
        tuple(grid(7).tolist()),
        (Minimum("0", CHEBYQUAD_7),),
        "MGH 35",
        symmetric=True,
        far=False,
    ),
    Problem(
        "Chebyquad, n = 8",
        chebyquad,
        tuple(grid(8).tolist()),
        (Minimum("3.51687e-3", CHEBYQUAD_8),),
        "MGH 35",
        note="J is singular at the minimum, two parameters being equal",
        symmetric=True,
        far=False,
    ),
    Problem(
        "Chebyquad, n = 9",
        chebyquad,
        tuple(grid(9).tolist()),
        (Minimum("0", CHEBYQUAD_9),),
        "MGH 35",
        symmetric=True,
        far=False,
    ),
    Problem(
        "Chebyquad, n = 10",
        chebyquad,
        tuple(grid(10).tolist()),
        (Minimum("6.50395e-3", CHEBYQUAD_10),),
        "MGH 35",
        note="J is singular at the minimum, two pairs of parameters being equal; not the lowest minimum",
        symmetric=True,
        far=False,
    ),
    Problem(
        "Himmelblau",
        himmelblau,
        (1.0, 1.0),
        (
            Minimum("0", (3.0, 2.0)),
            Minimum("0", (-2.805118086952745, 3.1313125182505728)),
            Minimum("0", (-3.779310253377747, -3.2831859912861694)),
            Minimum("0", (3.5844283403304917, -1.8481265269644036)),
        ),
        "D. M. Himmelblau, Applied Nonlinear Programming, McGraw-Hill 1972",
    ),
    Problem(
        "Madsen",
        madsen,
        (3.0, 1.0),
        tuple(Minimum("0.773199", (-s * 0.15543723585956104, s * 0.6945637753029045)) for s in (1, -1)),
        "K. Madsen, J. Inst. Maths Applics 16 (1975) 321–328; of Σf² the minimum was computed here",
    ),
    Problem(
        "Michaelis–Menten, puromycin",
        puromycin,
        (205.0, 0.08),
        (Minimum("1195", (212.68374314253606, 0.06412128168156707)),),
        BATES_WATTS,
    ),
    Problem(
        "biochemical oxygen demand",
        oxygen_demand,
        (20.0, 0.24),
        (Minimum("25.99", (19.142575284617866, 0.53109137696521)),),
        BATES_WATTS,
    ),
    Problem(
        "exponential decay, chlorine",
        chlorine,
        (0.3, 0.02),
        (Minimum("0.0050", (0.3901400203855584, 0.10163272105947396)),),
        "N. R. Draper and H. Smith, Applied Regression Analysis, 2nd edition, Wiley 1981",
    ),
    Problem(
        "logistic, DNase",
        dnase,
        (3.0, 0.0, 1.0),
        (Minimum("0.00479", (2.3451792972596524, 1.483089318845773, 1.0414546940840521)),),
        "M. Davidian and D. M. Giltinan, Nonlinear Models for Repeated Measurement Data, Chapman & Hall 1995; run 1",
    ),
)
