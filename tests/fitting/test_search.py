"""Hard starts, further attempts, Newton's method at the end, and stationary points that are no minimum."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, exp

import marquardt as mq
from marquardt import least_squares
from support.certify import newton_step
from support.decay.residuals import grid

D = torch.float64


@dataclass(frozen=True)
class Curve:
    name: str
    f: Any  # (b, x) → y
    b: tuple[float, ...]  # the parameters that made the data
    x: Tensor
    noise: float
    starts: tuple[tuple[float, ...], ...]

    @property
    def y(self) -> Tensor:
        """Noise without a random number generator, the same everywhere; eight digits are kept."""
        i = torch.arange(len(self.x), dtype=torch.float64)
        y = self.f(torch.tensor(self.b, dtype=torch.float64), self.x) + self.noise * torch.sin(12.9898 * i * i + 1)
        return torch.tensor([float(f"{v:.8g}") for v in y.tolist()], dtype=torch.float64)

    def residuals(self, b: Any) -> Any:
        return self.f(b, self.x) - self.y


CURVES = (
    Curve("saturation", lambda b, x: b[0] * (1 - exp(-b[1] * x)), (83, 2.1e-3), grid(20, 300, 15), 0.05,
          ((8, 0.02), (3, 3), (8300, 2.1e-5))),
    Curve("saturation, few points", lambda b, x: b[0] * (1 - exp(-b[1] * x)), (31, 0.8), grid(0.5, 6, 6), 2,
          ((3, 12), (300, 0.02))),
    Curve("two exponentials", lambda b, x: b[0] * exp(-b[1] * x) + b[2] * exp(-b[3] * x), (1, 2, 2.5, 0.6),
          grid(0, 3, 30), 1e-3, ((1, 20, 1, 0.01), (0.13, 7.25, 7.04, 1.75))),
    Curve("three exponentials", lambda b, x: b[0] * exp(-b[1] * x) + b[2] * exp(-b[3] * x) + b[4] * exp(-b[5] * x),
          (0.3, 0.7, 1.1, 2.6, 2, 5.5), grid(0, 1.5, 30), 1e-5, ((3, 0.1, 3, 1, 3, 20), (1, 0.1, 1, 2, 1, 20))),
    Curve("peaks on a decay", lambda b, x: b[0] * exp(-b[1] * x) + b[2] * exp(-((x - b[3]) / b[4]) ** 2)
          + b[5] * exp(-((x - b[6]) / b[7]) ** 2), (20, 0.3, 12, 2.5, 0.6, 7, 6.5, 0.9), grid(0, 10, 60), 0.4,
          ((10, 1, 10, 2, 1, 10, 7, 1), (30, 0.1, 5, 3, 1.5, 5, 6, 0.4))),
    Curve("quadratic over cubic", lambda b, x: (b[0] + b[1] * x + b[2] * x**2)
          / (1 + b[3] * x + b[4] * x**2 + b[5] * x**3),
          (5, 3, 2, 0.4, 0.5, 0.1), grid(0, 6, 40), 0.05, ((1, 1, 1, 1, 1, 1), (50, 0, 0, 0, 0, 0.01))),
    Curve("logistic", lambda b, x: b[0] / (1 + exp(b[1] - b[2] * x)), (12, 4, 0.5), grid(0, 20, 11), 0.2,
          ((120, 0.4, 5), (1, 1, 1))),
    Curve("generalised logistic", lambda b, x: b[0] / (1 + exp(b[1] - b[2] * x)) ** (1 / b[3]), (9, 3, 0.6, 2),
          grid(0, 18, 20), 0.15, ((30, 1, 1, 0.3), (90, 0.5, 0.1, 5))),
    Curve("power law", lambda b, x: b[0] * (b[1] + x) ** (-1 / b[2]), (40, 3, 1.4), grid(0, 60, 50), 0.01,
          ((400, 10, 0.5), (1, 1, 1))),
    Curve("shifted reciprocal in an exponential", lambda b, x: b[0] * exp(b[1] / (x + b[2])), (0.03, 900, 120),
          grid(5, 60, 16), 0.2, ((0.3, 300, 60), (1e-3, 3000, 400))),
    Curve("decay over a line", lambda b, x: exp(-b[0] * x) / (b[1] + b[2] * x), (0.4, 0.05, 0.02), grid(0.2, 5, 40),
          0.1, ((0.2, 0.5, 0.2), (0.04, 0.5, 0.002))),
    Curve("growing exponential of tiny scale", lambda b, x: b[0] - b[1] * x * exp(b[2] * x), (7, 3e-7, 0.11),
          grid(50, 110, 30), 0.2, ((14, 3e-5, 0.05), (70, 1e-5, 0.05))),
)  # fmt: skip


@pytest.mark.parametrize(("curve", "x0"), [pytest.param(c, s, id=f"{c.name} {s}") for c in CURVES for s in c.starts])
def test_hard_starts_end_at_the_certified_minimum(curve: Curve, x0: tuple[float, ...]):
    """Newton's method in 80 digits moves no parameter in its first 8 digits, and no lower point is known."""
    known = least_squares(curve.residuals, torch.tensor(curve.b, dtype=torch.float64))
    fit = least_squares(curve.residuals, torch.tensor(x0, dtype=torch.float64))
    assert fit.success, fit.message
    assert fit.cost <= known.cost * (1 + 1e-10)
    left = torch.tensor([float(d) for d in newton_step(curve.residuals, fit.x.tolist())], dtype=torch.float64)
    assert (left / fit.x).abs().max() < 1e-8


def test_newton_finishes_what_gauss_newton_cannot():
    """Freudenstein and Roth's local minimum: large residuals, J singular, the cost flat to 1e-8 of x."""

    def f(x: Tensor) -> Tensor:
        u, v = x
        return torch.stack([u - 13 + ((5 - v) * v - 2) * v, u - 29 + ((v + 1) * v - 14) * v])

    fit = least_squares(f, torch.tensor([0.5, -2.0]))
    assert fit.success
    assert fit.x.tolist() == pytest.approx([(53 - 4 * math.sqrt(22)) / 3, (2 - math.sqrt(22)) / 3], rel=1e-12)


def hump(p):
    """Two outliers draw it into a peak: the factor grows without end, and its column of J fades."""
    return p[0] * (T / 6) ** p[1] * (1 - T / 6) ** p[2] - Y


T = torch.tensor(
    [0.1148, 0.44, 0.5762, 0.7213, 0.8927, 1.0094, 1.8051, 2.3155, 2.4914, 2.6606, 2.9414, 3.151, 3.6257, 3.8999,
     3.9891, 4.2585, 4.2949, 4.4653, 4.6562, 4.9709], dtype=D)  # fmt: skip
Y = 4 * (T / 6) ** 1.2 * (1 - T / 6) ** 2
Y[6], Y[7] = Y[6] - 1.57, Y[7] + 11.67


@pytest.mark.parametrize("restarts", [False, True])
def test_a_factor_on_its_way_to_infinity_is_no_minimum(restarts):
    result = mq.least_squares(hump, torch.tensor([4.53, 1.95, 2.02], dtype=D), restarts=restarts, max_nfev=800)
    cosines = result.grad.abs() / result.jac.norm(dim=0) / result.fun.norm()
    assert not result.success or cosines.amax() < 1e-6
    assert result.cost < 48 or not restarts  # with the lengths that the columns have now it goes on


def test_a_callback_stops_further_attempts_too():
    calls = []

    def callback(intermediate_result):
        calls.append(intermediate_result.nfev)
        if calls.count(1) > 1:  # the second attempt has begun
            raise StopIteration

    def residuals(q):  # no minimum in reach: the first column never vanishes
        return torch.stack([q[0].abs() + 1, q[1] - 1])

    result = mq.least_squares(residuals, torch.tensor([1.0, 2.0], dtype=D), callback=callback)
    assert calls.count(1) == 2
    assert result.status == -2
    assert not result.success


KINDS = pytest.mark.parametrize("lib", [torch, np], ids=["tensors", "arrays"])
GRID = torch.linspace(0, 4, 40, dtype=torch.float64)


def vector(lib: Any, *residuals: Any) -> Any:
    return torch.stack(residuals) if lib is torch else np.array(residuals)


@KINDS
@pytest.mark.parametrize("at", [0.0, 3.0, -1e-9, 1e6])
@pytest.mark.parametrize("size", [1.0, 1e6, 1e-6, 1e-12])
def test_a_maximum_is_left_wherever_it_is(at: float, size: float, lib: Any):
    fit = least_squares(lambda p: vector(lib, (p[0] / size - at) ** 2 - 1, p[1] - 4), [at * size, 0.0])
    assert fit.success
    assert fit.cost < 1e-12 * max(1.0, at**2)
    assert abs(fit.x[0] / size - at) == pytest.approx(1, rel=1e-3)
    assert fit.x[1] == pytest.approx(4)


HIDDEN = {
    "two": (lambda lib, p: [p[0] ** 2 - 1, p[1] ** 2 - 2], 2),
    "of other units": (lambda lib, p: [(1e6 * p[0]) ** 2 - 1, (1e-6 * p[1]) ** 2 - 2], 2),
    "five": (lambda lib, p: [p[j] ** 2 - 1 - j for j in range(5)], 5),
    "a product": (lambda lib, p: [p[0] * p[1] - 1, p[2] - 4], 3),
    "a negative product": (lambda lib, p: [p[0] * p[1] + 1, p[2] - 4], 3),
    "a difference of squares": (lambda lib, p: [p[0] ** 2 - p[1] ** 2 - 1, p[2] - 4], 3),
    "a product of three": (lambda lib, p: [p[0] * p[1] * p[2] + 1], 3),
    "a cube": (lambda lib, p: [p[0] ** 3 + 8, p[1] - 4], 2),
    "a fourth power": (lambda lib, p: [p[0] ** 4 - 1, p[1] - 4], 2),
    "beside one without influence": (lambda lib, p: [p[0] ** 2 - 1, p[1] - 4 + 0 * p[2]], 3),
    "far down a flank": (lambda lib, p: [lib.exp(-(p[0] + 1e4)) - 0.9, p[1] - 4], 2),
}


@KINDS
@pytest.mark.parametrize("hidden", HIDDEN)
def test_parameters_whose_columns_are_zero_at_the_start(hidden: str, lib: Any):
    f, n = HIDDEN[hidden]
    fit = least_squares(lambda p: vector(lib, *f(lib, p)), [0.0] * n)
    many = least_squares(lambda p: vector(lib, *f(lib, p)), np.array([[0.0] * n, fit.x, [0.0] * n]), batched=True)
    for cost, success in ((fit.cost, fit.success), *zip(many.cost, many.success, strict=True)):
        assert success
        assert cost < 1e-12


SETTINGS: list[tuple[dict[str, Any], Any]] = [
    ({"bounds": (0, math.inf)}, [1, 4]),
    ({"bounds": ([-math.inf, -9], [0, 9])}, [-1, 4]),
    ({"bounds": ([0, -9], [0.5, 9])}, [0.5, 4]),
    ({"bounds": ([0, -9], [0, 9])}, [0, 4]),
    *(({"loss": loss, "f_scale": 0.5}, None) for loss in ("huber", "soft_l1", "cauchy", "arctan")),
    *((options, None) for options in ({"max_nfev": 70}, {"gtol": 1e-8}, {"x_scale": [2.0, 3.0]})),
]


@KINDS
@pytest.mark.parametrize(("options", "x"), SETTINGS, ids=str)
def test_a_maximum_is_left_whatever_the_options(options: dict[str, Any], x: Any, lib: Any):
    start = [0.0, 3.9] if "loss" in options else [0.0, 0.0]
    fit = least_squares(lambda p: vector(lib, p[0] ** 2 - 1, p[1] - 4), start, **options)
    assert fit.success
    assert (abs(fit.x) if x is None else fit.x) == pytest.approx(x or [1, 4], rel=1e-4 if "loss" in options else 1e-6)
    assert fit.nfev <= options.get("max_nfev", 1000)


@KINDS
def test_a_peak_of_no_width(lib: Any):
    t = GRID if lib is torch else GRID.numpy()
    y = 1.5 * lib.exp(-((1.3 * (t - 2)) ** 2)) + 0.01 * lib.sin(9 * t)
    peak = lambda t, a, w: a * lib.exp(-((w * (t - 2)) ** 2))  # noqa: E731
    known = mq.curve_fit(peak, t, y, p0=[1, 1]).popt
    one = mq.curve_fit(peak, t, y, p0=[1, 0])
    many = mq.curve_fit(peak, t, lib.stack([y, 2 * y]), p0=[1, 0], batched=True)
    for popt, height in ((one.popt, known[0]), (many.popt[1], 2 * known[0])):
        assert np.abs(np.asarray(popt)) == pytest.approx([float(height), float(abs(known[1]))])


DEAD = {
    "a line": lambda lib, p: [p[0] - 1, p[0] - 4 + 0 * p[1], 0 * p[2]],
    "a cubic": lambda lib, p: [p[0] ** 2 - 1, p[0] ** 3 - 4 + 0 * p[1], 0 * p[2]],
    "at its minimum": lambda lib, p: [(p[0] - 0.5) ** 2 + 1, 0 * p[1], 0 * p[2]],
    "no residual left": lambda lib, p: [p[0] ** 3 - 4 + 0 * p[1], 0 * p[2]],
    "beside a maximum": lambda lib, p: [(p[0] - 0.5) ** 2 - 1, 0 * p[1] * p[2]],
}


@KINDS
@pytest.mark.parametrize("bounds", [(-math.inf, math.inf), (-20, 20)])
@pytest.mark.parametrize("dead", DEAD)
def test_parameters_without_influence_stay_where_they_are(dead: str, bounds: Any, lib: Any):
    fit = least_squares(lambda p: vector(lib, *DEAD[dead](lib, p)), [0.5, 7.0, -0.3], bounds=bounds)
    assert fit.success
    assert (abs(fit.x[0] - 0.5) < 1e-6) == (dead == "at its minimum")
    assert fit.x[1:].tolist() == [7.0, -0.3]
    assert fit.njev < 40  # no search from other starts, which could change nothing
    many = least_squares(
        lambda p: vector(lib, *DEAD[dead](lib, p)), np.array([[0.5, 7, -0.3]] * 2), bounds=bounds, batched=True
    )
    assert many.x[:, 1:].tolist() == [[7.0, -0.3]] * 2


@KINDS
@pytest.mark.parametrize("bounds", [(0.0, 9.0), (-9.0, 7.0)])
@pytest.mark.parametrize("side", [0, 1])
def test_parameters_without_influence_stay_on_their_bound(side: int, bounds: tuple[float, float], lib: Any):
    """Differences are one-sided there, and rounding in them is no slope."""
    noise = np.sin(np.arange(40.0) ** 2) / 3
    noise = torch.tensor(noise) if lib is torch else noise
    fit = least_squares(lambda p: p[0] ** 2 / 3 + noise + 0 * p[1] - 0.3, [0.7, bounds[side]], bounds=bounds)
    assert fit.success
    assert fit.x[1] == bounds[side]
