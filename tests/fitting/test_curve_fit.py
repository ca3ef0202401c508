"""curve_fit: beside SciPy's, its names, bad input."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize

from marquardt import curve_fit
from support.decay.curve import COVARIANCE, NOISE, SIGMA, TIGHT, X, Y, decay, decay_numpy, slopes


@pytest.mark.parametrize("function", [decay, decay_numpy])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"p0": [3.0, 1.0, 0.1]},
        {"sigma": SIGMA},
        {"sigma": SIGMA, "absolute_sigma": True},
        {"sigma": COVARIANCE},
        {"sigma": COVARIANCE, "absolute_sigma": True},
        {"bounds": (0, [3, 2, 1])},
    ],
)
def test_scipys_answers(function: Any, options: dict[str, Any]):
    popt, pcov = curve_fit(function, X, Y, **options)
    known, known_cov = optimize.curve_fit(decay_numpy, X, Y, jac=slopes, **options, **TIGHT)
    assert isinstance(popt, np.ndarray)
    assert popt == pytest.approx(known, rel=1e-7)
    assert pcov == pytest.approx(known_cov, rel=1e-5)


@pytest.mark.parametrize("sigma", [None, SIGMA, COVARIANCE], ids=["none", "1-D", "2-D"])
def test_a_jacobian_of_ones_own(sigma: Any):
    given, found = (curve_fit(decay_numpy, X, Y, sigma=sigma, jac=jac) for jac in (slopes, None))
    assert given.popt == pytest.approx(found.popt, rel=1e-8)
    assert "differences" in found.result.message
    assert "differences" not in given.result.message


def test_tensors_in_tensors_out():
    fit = curve_fit(decay, torch.tensor(X), torch.tensor(Y))
    popt, pcov = fit
    assert isinstance(popt, torch.Tensor)
    assert isinstance(pcov, torch.Tensor)
    assert torch.allclose(fit.perr**2, pcov.diagonal())
    assert torch.allclose(fit.predict(torch.tensor(X)), decay(torch.tensor(X), *popt))


@pytest.mark.parametrize("p0", [None, [1.0, 1.0, 0.5], np.array([[1.0, 1.0, 0.5]] * 3)], ids=["none", "one", "each"])
@pytest.mark.parametrize("kind", [np.array, torch.tensor, np.ndarray.tolist])
def test_bounds_of_each_data_set(kind: Any, p0: Any):
    y = decay_numpy(X, 2.5, 1.3, 0.5) + 0.05 * NOISE[:3]
    lower, upper = np.zeros((3, 3)), np.full((3, 3), 9.0)
    upper[0, 0], lower[1, 2], lower[2, 2] = 2.0, 0.1, 0.5  # the first holds
    many = curve_fit(decay, X, y, p0, bounds=(kind(lower), kind(upper)), batched=True)
    assert many.popt[0, 0] == 2.0
    for i in range(3):
        alone = curve_fit(decay, X, y[i], [1.0, 1.0, 0.5], bounds=(lower[i], upper[i]))
        assert many.popt[i] == pytest.approx(alone.popt, rel=1e-6)
    shared = curve_fit(decay, X, y, p0, bounds=np.stack([lower[0], upper[0]]), batched=True)  # as one array
    assert shared.popt[0] == pytest.approx(many.popt[0])


def test_scipys_names():
    for name in ("maxfev", "max_nfev"):
        with pytest.raises(RuntimeError, match="no fit"):
            curve_fit(decay, X, Y, **{name: 3})
    known = curve_fit(decay, X, Y).popt
    for options in ({"maxfev": 0}, {"method": None}, {"method": "trf"}, {"full_output": False}, {"check_finite": None}):
        assert curve_fit(decay, X, Y, **options).popt == pytest.approx(known, rel=1e-12)


def test_a_fit_that_fails_says_so():
    with pytest.raises(RuntimeError, match="no fit"):
        curve_fit(decay, X, Y, max_nfev=3)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"ydata": np.where(X > 3, np.nan, Y)}, ValueError, "ydata contains NaN"),
        ({"xdata": np.where(X > 3, np.inf, X)}, ValueError, "xdata contains NaN"),
        ({"ydata": Y[:39]}, ValueError, r"\(40,\)"),
        ({"ydata": Y.reshape(2, 20)}, ValueError, "batched"),
        ({"ydata": Y * 1j}, TypeError, "complex"),
        ({"f": lambda x, *p: decay(x, *p)}, ValueError, "p0 is needed"),
        ({"f": lambda x, a: None}, TypeError, "None"),
        ({"p0": [1j, 1, 1]}, TypeError, "p0 is complex"),
        ({"p0": [1.0, 1.0]}, ValueError, r"p0 has length 2, f takes 3 parameters after x \(a, b, c\)"),
        ({"p0": 1.0}, ValueError, "p0 has length 1, f takes 3"),
        ({"p0": [1.0] * 4}, ValueError, "p0 has length 4, f takes 3"),
        ({"p0": [1.0] * 4, "ydata": np.stack([Y, Y]), "batched": True}, ValueError, "p0 has length 4, f takes 3"),
        ({"p0": np.ones((3, 3)), "ydata": np.stack([Y, Y]), "batched": True}, ValueError, r"\(3, 3\) for 2 data sets"),
        ({"f": torch.mul}, ValueError, "p0 is needed"),
        ({"sigma": SIGMA[:39]}, ValueError, r"\(39,\)"),
        ({"sigma": -SIGMA}, ValueError, "positive"),
        ({"sigma": -COVARIANCE}, ValueError, "positive definite"),
        ({"bounds": (2, 1)}, ValueError, "above the upper"),
        ({"bounds": ([0, 0], 9)}, ValueError, r"lower bound has shape \(2,\)"),
        ({"bounds": (0, 1, 2)}, ValueError, r"bounds=\(0, 1, 2\)"),
        ({"method": "dogbox"}, ValueError, "'dogbox'.*'lm'.*'trf'"),
        ({"full_output": True}, ValueError, r"full_output=True.*\.result"),
        ({"nan_policy": "propagate"}, ValueError, "nan_policy='propagate'.*'omit'"),
        ({"ydata": np.stack([Y, Y * np.nan]), "batched": True, "nan_policy": "omit"}, ValueError, "one by one"),
        ({"xdata": 2.0, "ydata": Y * np.nan, "nan_policy": "omit"}, ValueError, "last dimension"),
        ({"maxfev": 9, "max_nfev": 9}, TypeError, "one of them"),
        ({"xdata": [math.nan, *X[1:]]}, ValueError, "xdata contains NaN"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        curve_fit(**{"f": decay, "xdata": X, "ydata": Y, **change})
