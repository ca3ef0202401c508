"""curve_fit: beside SciPy's, its bands, many data sets, bad input."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from marquardt import curve_fit
from marquardt.fitting.student import quantile

X = np.linspace(0, 4, 40)
NOISE = np.random.default_rng(0).standard_normal((1000, 40))
Y = 2.5 * np.exp(-1.3 * X) + 0.5 + 0.05 * NOISE[0]
SIGMA = 0.05 + 0.02 * X
COVARIANCE = np.diag(SIGMA**2) + 0.0005
TIGHT = {"ftol": 1e-14, "xtol": 1e-14, "gtol": 1e-14}


def decay(x: Any, a: Any, b: Any, c: Any) -> Any:
    return a * torch.exp(-b * x) + c


def decay_numpy(x: Any, a: Any, b: Any, c: Any) -> Any:
    return a * np.exp(-b * x) + c


def slopes(x: Any, a: Any, b: Any, c: Any) -> Any:
    e = np.exp(-b * x)
    return np.stack([e, -a * x * e, np.ones_like(x)], 1)


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


@pytest.mark.parametrize("nu", [1, 2, 3, 7, 30, 1000, 1e5, math.inf])
def test_quantiles_of_students_t(nu: float):
    for p in (0.5, 0.6, 0.9, 0.975, 0.9995, 0.2, 1e-6):
        known = stats.t.ppf(p, nu) if nu < math.inf else stats.norm.ppf(p)
        assert quantile(p, nu) == pytest.approx(known, rel=1e-10, abs=1e-15)


def test_bands_of_a_line_are_the_textbooks():
    """y = a + bx: s²(1/m + (x − x̄)²/Sxx), and s² more for an observation."""
    fit = curve_fit(lambda x, a, b: a + b * x, X, 1 + 2 * X + NOISE[1])
    x = np.array([-1.0, 0.3, 9.0])
    s2 = 2 * fit.result.cost / 38
    spread = s2 * (1 / 40 + (x - X.mean()) ** 2 / ((X - X.mean()) ** 2).sum())
    t = stats.t.ppf(0.95, 38)
    for (low, high), variance in ((fit.confidence_band(x, 0.9), spread), (fit.prediction_band(x, 0.9), spread + s2)):
        assert high - low == pytest.approx(2 * t * np.sqrt(variance), rel=1e-9)
        assert (high + low) / 2 == pytest.approx(fit.predict(x), rel=1e-12)


def test_bands_hold_what_they_promise():
    """Over 1000 data sets the curve at x = 1 lies in its 90 % band, and a new point in its own, that often."""
    clean = decay_numpy(X, 2.5, 1.3, 0.5)
    fit = curve_fit(decay, X, clean + 0.05 * NOISE, batched=True)
    assert fit.result.success.all()
    fresh = decay_numpy(1.0, 2.5, 1.3, 0.5) + 0.05 * np.random.default_rng(1).standard_normal(1000)
    low, high = fit.confidence_band([1.0], 0.9)
    hits = (low[:, 0] < decay_numpy(1.0, 2.5, 1.3, 0.5)) & (decay_numpy(1.0, 2.5, 1.3, 0.5) < high[:, 0])
    assert hits.mean() == pytest.approx(0.9, abs=0.03)  # three standard deviations
    low, high = fit.prediction_band([1.0], 0.9)
    assert ((low[:, 0] < fresh) & (fresh < high[:, 0])).mean() == pytest.approx(0.9, abs=0.03)


def test_a_band_beside_known_sigma():
    known = curve_fit(decay, X, Y, sigma=SIGMA, absolute_sigma=True)
    low, high = known.confidence_band([1.0])
    J = slopes(np.array([1.0]), *known.popt)
    assert (high - low)[0] == pytest.approx(
        2 * stats.norm.ppf(0.975) * math.sqrt((J @ known.pcov @ J.T)[0, 0]), rel=1e-6
    )
    with pytest.raises(ValueError, match="sigma="):
        known.prediction_band([1.0])
    wide = known.prediction_band([1.0], sigma=0.3)
    assert (wide[1] - wide[0])[0] > (high - low)[0]


@pytest.mark.parametrize("sigma", [None, SIGMA, np.tile(SIGMA, (5, 1)), np.tile(COVARIANCE, (5, 1, 1))])
def test_many_data_sets(sigma: Any):
    y = decay_numpy(X, 2.5, 1.3, 0.5) + 0.05 * NOISE[:5]
    many = curve_fit(decay, X, y, p0=[1.0, 1.0, 1.0], sigma=sigma, batched=True)
    own = curve_fit(decay, np.tile(X, (5, 1)), y, p0=np.ones((5, 3)), sigma=sigma, batched=True)
    assert own.popt == pytest.approx(many.popt)
    for i in range(5):
        one = curve_fit(decay, X, y[i], sigma=sigma if sigma is None or sigma.ndim == 1 else sigma[i])
        assert many.popt[i] == pytest.approx(one.popt, rel=1e-8)
        assert many.pcov[i] == pytest.approx(one.pcov, rel=1e-6)
        assert many.confidence_band(X)[0][i] == pytest.approx(one.confidence_band(X)[0], rel=1e-6)


def test_two_independent_variables():
    x = torch.tensor(np.stack([X, np.sin(3 * X)]))
    y = 2 * x[0] + 3 * torch.exp(x[1])
    fit = curve_fit(lambda x, a, b: a * x[0] + b * torch.exp(x[1]), x, y)
    assert fit.popt.tolist() == pytest.approx([2, 3])


def test_a_covariance_that_does_not_exist():
    with pytest.warns(UserWarning, match="could not be estimated"):
        fit = curve_fit(lambda x, a, b: (a + b) * x, X, Y)
    assert np.isinf(fit.pcov).all()
    with pytest.warns(UserWarning, match="could not be estimated"):
        short = curve_fit(decay, X[:3], Y[:3])
    with pytest.raises(ValueError, match="as many parameters as points"):
        short.confidence_band(X)


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
        ({"p0": np.array([1, 1, 1])}, TypeError, "floating point"),
        ({"sigma": SIGMA[:39]}, ValueError, r"\(39,\)"),
        ({"sigma": -SIGMA}, ValueError, "positive"),
        ({"sigma": -COVARIANCE}, ValueError, "positive definite"),
        ({"bounds": (2, 1)}, ValueError, "above the upper"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        curve_fit(**{"f": decay, "xdata": X, "ydata": Y, **change})


def test_a_level_is_a_probability():
    with pytest.raises(ValueError, match="level=95"):
        curve_fit(decay, X, Y).confidence_band(X, level=95)
