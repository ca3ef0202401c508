"""Curves that return lists or constants, and Jacobians written for arrays."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from marquardt import curve_fit
from support.decay.curve import SIGMA, TIGHT, X, Y, decay, decay_numpy, slopes


@pytest.mark.parametrize(
    "listed",
    [
        lambda x, a, b: [a * v + b for v in x],
        lambda x, a, b: [float(a) * float(v) + float(b) for v in x],
        lambda x, a, b: tuple(a * v + b for v in x),
    ],
)
def test_a_model_may_return_a_list(listed: Any):
    known, known_cov = optimize.curve_fit(lambda x, a, b: a * x + b, X, Y)
    fit = curve_fit(listed, X, Y)
    assert fit.popt == pytest.approx(known, rel=1e-6)
    assert fit.pcov == pytest.approx(known_cov, rel=1e-5)
    assert fit.predict(X[:3]) == pytest.approx(known[0] * X[:3] + known[1], rel=1e-6)


@pytest.mark.parametrize("constant", [lambda x, a: a, lambda x, a: float(a)])
def test_a_constant_model(constant: Any):
    fit = curve_fit(constant, X, Y)
    assert fit.popt == pytest.approx([Y.mean()])
    assert fit.pcov == pytest.approx(optimize.curve_fit(constant, X, Y)[1], rel=1e-6)
    assert fit.predict(X[:7]) == pytest.approx(np.full(7, Y.mean()))
    low, high = fit.confidence_band(X[:7])
    assert high - low == pytest.approx(np.full(7, 2 * stats.t.ppf(0.975, 39) * Y.std(ddof=1) / math.sqrt(40)), rel=1e-6)
    many = curve_fit(constant, X, np.stack([Y, Y + 1]), batched=True)
    assert many.predict(X[:7]) == pytest.approx(np.array([[Y.mean()] * 7, [Y.mean() + 1] * 7]))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sigma", [None, SIGMA])
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("function", [decay, decay_numpy])
def test_a_jacobian_of_arrays_gets_arrays(function: Any, as_tensor: bool, sigma: Any):
    known = optimize.curve_fit(decay_numpy, X, Y, jac=slopes, sigma=sigma, **TIGHT)[0]
    x, y = (torch.tensor(X), torch.tensor(Y)) if as_tensor else (X, Y)
    fit = curve_fit(function, x, y, jac=slopes, sigma=sigma)
    assert isinstance(fit.popt, torch.Tensor) == as_tensor
    assert np.asarray(fit.popt) == pytest.approx(known, rel=1e-6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_jacobian_of_arrays_of_many_data_sets(as_tensor: bool):
    kind: Any = torch.tensor if as_tensor else np.array
    x, y = np.stack([X, 1.1 * X]), np.stack([Y, Y])
    fit = curve_fit(decay_numpy, kind(x), kind(y), jac=slopes, batched=True)
    for i in range(2):
        known = optimize.curve_fit(decay_numpy, x[i], y[i], jac=slopes, **TIGHT)[0]
        assert np.asarray(fit.popt[i]) == pytest.approx(known, rel=1e-6)
