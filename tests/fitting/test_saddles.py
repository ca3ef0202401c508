"""Stationary points that are no minimum are left, wherever they are; what has no influence stays where it is."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import marquardt as mq
from marquardt import least_squares

KINDS = pytest.mark.parametrize("lib", [torch, np], ids=["tensors", "arrays"])
T = torch.linspace(0, 4, 40, dtype=torch.float64)


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
    assert fit.success
    assert fit.cost < 1e-12


@KINDS
@pytest.mark.parametrize(
    ("bounds", "x"),
    [((0, math.inf), 1), (([-math.inf, -9], [0, 9]), -1), (([0, -9], [0.5, 9]), 0.5), (([0, -9], [0, 9]), 0)],
)
def test_a_maximum_on_a_bound(bounds: Any, x: float, lib: Any):
    fit = least_squares(lambda p: vector(lib, p[0] ** 2 - 1, p[1] - 4), [0.0, 0.0], bounds=bounds)
    assert fit.success
    assert fit.x == pytest.approx([x, 4])


@KINDS
@pytest.mark.parametrize("loss", ["huber", "soft_l1", "cauchy", "arctan"])
def test_a_maximum_of_a_loss(loss: str, lib: Any):
    fit = least_squares(lambda p: vector(lib, p[0] ** 2 - 1, p[1] - 4), [0.0, 3.9], loss=loss, f_scale=0.5)
    assert abs(fit.x) == pytest.approx([1, 4], rel=1e-4)


@KINDS
@pytest.mark.parametrize("options", [{"max_nfev": 70}, {"gtol": 1e-8}, {"x_scale": [2.0, 3.0]}])
def test_whatever_the_options(options: dict[str, Any], lib: Any):
    fit = least_squares(lambda p: vector(lib, p[0] ** 2 - 1, p[1] - 4), [0.0, 0.0], **options)
    assert abs(fit.x) == pytest.approx([1, 4])
    assert fit.nfev <= options.get("max_nfev", 1000)


@KINDS
def test_a_peak_of_no_width(lib: Any):
    t = T if lib is torch else T.numpy()
    y = 1.5 * lib.exp(-((1.3 * (t - 2)) ** 2)) + 0.01 * lib.sin(9 * t)
    peak = lambda t, a, w: a * lib.exp(-((w * (t - 2)) ** 2))  # noqa: E731
    known = mq.curve_fit(peak, t, y, p0=[1, 1]).popt
    one = mq.curve_fit(peak, t, y, p0=[1, 0])
    many = mq.curve_fit(peak, t, lib.stack([y, 2 * y]), p0=[1, 0], batched=True)
    for popt, height in ((one.popt, known[0]), (many.popt[1], 2 * known[0])):
        assert np.abs(np.asarray(popt)) == pytest.approx([float(height), float(abs(known[1]))])


def test_some_of_many_problems_are_at_a_saddle():
    y, start = torch.tensor([1.0, 2.0, 4.0, -1.0]), torch.tensor([[0.0, 0], [1, 1], [0, 0], [0, 0]])
    fit = least_squares(lambda p, y: torch.stack([p[0] ** 2 - y, p[1] - 4]), start, args=(y,), batched=True)
    assert fit.success.all()
    assert torch.allclose(fit.x.abs(), torch.tensor([[1, 4], [2**0.5, 4], [2, 4], [0, 4]], dtype=torch.float64))


@KINDS
def test_a_minimum_at_the_origin_stays(lib: Any):
    fit = least_squares(lambda p: vector(lib, p[0] ** 2 + 1, p[1] - 4), [0.0, 0.0])
    assert fit.success
    assert fit.x == pytest.approx([0, 4])


DEAD = {
    "a line": lambda lib, p: [p[0] - 1, p[0] - 4 + 0 * p[1], 0 * p[2]],
    "a cubic": lambda lib, p: [p[0] ** 2 - 1, p[0] ** 3 - 4 + 0 * p[1], 0 * p[2]],
    "no residual left": lambda lib, p: [p[0] ** 3 - 4 + 0 * p[1], 0 * p[2]],
    "beside a maximum": lambda lib, p: [(p[0] - 0.5) ** 2 - 1, 0 * p[1] * p[2]],
}


@KINDS
@pytest.mark.parametrize("bounds", [(-math.inf, math.inf), (-20, 20)])
@pytest.mark.parametrize("dead", DEAD)
def test_parameters_without_influence_stay_where_they_are(dead: str, bounds: Any, lib: Any):
    fit = least_squares(lambda p: vector(lib, *DEAD[dead](lib, p)), [0.5, 7.0, -0.3], bounds=bounds)
    assert fit.success
    assert fit.x[0] != 0.5
    assert fit.x[1:].tolist() == [7.0, -0.3]
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


def test_what_has_no_influence_takes_few_evaluations():
    """Not a search from other starts, which could change nothing."""
    fit = least_squares(lambda p: torch.stack([p[0] ** 2 - 1, p[0] ** 3 - 4 + 0 * p[1]]), [0.5, 7.0])
    assert fit.nfev < 100
    assert fit.njev < 30
