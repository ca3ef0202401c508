"""Derivatives: differences that suit the function and its bounds, and what is detached."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from marquardt import least_squares
from support.decay.data import BEST, T, Y, decay_numpy, near

DAYS = np.linspace(2450000.0, 2450010.0, 201)
HERTZ = np.linspace(1e9 - 100, 1e9 + 100, 201)
SECONDS = np.linspace(0, 1000, 4001)
STIFF = {
    "Gaussian": (lambda p, t, lib: p[0] * lib.exp(-0.5 * ((t - p[1]) / p[2]) ** 2), DAYS,
                 [2.0, 2450004.3, 0.7], [1.0, 2450004.0, 1.0]),
    "Lorentzian": (lambda p, t, lib: p[0] / (1 + ((t - p[1]) / p[2]) ** 2), HERTZ,
                   [3.0, 1e9 + 7, 12.0], [1.0, 1e9, 20.0]),
    "sine": (lambda p, t, lib: p[0] * lib.sin(p[1] * t + p[2]), SECONDS, [2.0, 100.001, 0.3], [1.0, 100.0003, 0.2]),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["torch", "numpy", "2-point"])
@pytest.mark.parametrize("name", STIFF)
def test_stiff_parameters_are_fitted(name: str, kind: str):
    model, t, true, start = STIFF[name]
    data = model(true, t, np) + 0.01 * np.sin(np.arange(len(t)) ** 2)
    td, tt = torch.tensor(data), torch.tensor(t)
    if kind == "torch":
        fit = least_squares(lambda p: model(p, tt, torch) - td, start)
        assert "differences" not in fit.message
    else:
        fit = least_squares(lambda p: model(p, t, np) - data, start, jac="auto" if kind == "numpy" else kind)
        assert "differences" in fit.message
    assert fit.success, fit.message
    assert np.abs((fit.x - true) / [1, t.max() - t.min() if name != "sine" else 1, true[2]]).max() < 0.01


def test_differences_keep_their_usual_step_where_the_function_is_noisy():
    noisy = lambda p: np.round(decay_numpy(p, T.numpy(), Y.numpy()), 9)  # noqa: E731
    fit = least_squares(noisy, np.ones(3))
    assert near(fit.x, BEST, 1e-2)


@pytest.mark.parametrize("detached", [
    lambda p: torch.cat([p[:1].detach() ** 2 - 2, p[1:] - 3]),
    lambda p: torch.cat([p[:1].detach() ** 2 - 2, 1e4 * (p[1:] - 3)]),
    lambda p: p.detach() ** 2 - 2,
    lambda p: torch.exp(p * (p / p).detach()) * p.detach() - 1,
])  # fmt: skip
def test_what_is_detached_is_noticed(detached: Any):
    fit = least_squares(detached, torch.tensor([1.0, 2.0]))
    assert "detached" in fit.message
    assert fit.success


@pytest.mark.parametrize("x0", [[0.0, 0.0], [0.0, 2.0]])
def test_a_slope_that_is_zero_is_no_wrong_one(x0: list[float]):
    fit = least_squares(lambda p: torch.stack([p[0] ** 2 + 1, p[1] ** 2 + p[0] ** 3 - 2]), x0)
    assert "differences" not in fit.message


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_nothing_is_evaluated_outside_the_bounds(kind: str):
    def f(p: Any) -> Any:
        assert ((p >= 0) & (p <= 9)).all(), "outside"
        return (torch if kind == "torch" else np).log1p(p) - 1

    fit = least_squares(f, np.array([0.0, 9.0]), bounds=(0, 9))
    assert near(fit.x, math.e - 1)
    assert ("differences" in fit.message) == (kind == "numpy")


@pytest.mark.parametrize("jac", ["auto", "2-point", "3-point"])
def test_differences_keep_to_the_bounds_of_each_problem(jac: str):
    low = np.array([[0.0], [5.0]])

    def f(p: Any, low: Any) -> Any:
        p, low = np.asarray(p), np.asarray(low)
        assert (p >= low).all(), "outside"
        return np.sqrt(p - low) - 1

    fit = least_squares(f, low + 1e-6, jac, (low, np.inf), args=(low,), batched=True)
    assert near(fit.x, low + 1)
