"""Data of a curve: x of all sets or of each, NaN, sigma, any layout."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize

from marquardt import curve_fit
from support.decay.curve import COVARIANCE, NOISE, SIGMA, TIGHT, X, Y, decay, decay_numpy, slopes


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_integers_are_taken_as_scipy_does(kind: Any):
    x, y, p0 = [1, 2, 3, 5], [2, 3, 5, 9], [1, 1]
    fit = curve_fit(lambda x, a, b: a / x + b * x, kind(x), kind(y), kind(p0), sigma=kind([1, 1, 2, 2]))
    known, known_cov = optimize.curve_fit(lambda x, a, b: a / x + b * x, x, y, p0, sigma=[1, 1, 2, 2])
    assert np.asarray(fit.popt) == pytest.approx(known, rel=1e-6)
    assert np.asarray(fit.pcov) == pytest.approx(known_cov, rel=1e-5)


def test_one_number_for_all_points():
    constant = curve_fit(lambda x, a, b: a * x + b, [1, 2, 3], 3).popt
    assert constant == pytest.approx(optimize.curve_fit(lambda x, a, b: a * x + b, [1, 2, 3], 3)[0], abs=1e-7)


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
    assert fit.predict([1.0, 0.0]).tolist() == pytest.approx([5])  # a single point


@pytest.mark.parametrize("function", [decay, decay_numpy])
def test_x_of_each_data_set(function: Any):
    x = np.stack([X, 1.1 * X, 0.9 * X])
    y = decay_numpy(x, 2.5, 1.3, 0.5) + 0.05 * NOISE[:3]
    own, shared = curve_fit(function, x, y, batched=True), curve_fit(function, X, y, batched=True)
    each = [curve_fit(function, x[i], y[i]) for i in range(3)]
    assert own.popt == pytest.approx(np.stack([one.popt for one in each]), rel=1e-6)
    for many in (own, shared):
        for at in (x[:, :7], X[:7]):  # one for each, one for all
            p = many.popt[:, :, None]
            assert many.predict(at) == pytest.approx(decay_numpy(at, p[:, 0], p[:, 1], p[:, 2]))
            assert many.predict(at).shape == (3, 7)
    for band in ("confidence_band", "prediction_band"):
        low, high = getattr(own, band)(x[:, :7])
        for i, one in enumerate(each):
            assert low[i] == pytest.approx(getattr(one, band)(x[i, :7])[0], rel=1e-5)
            assert high[i] == pytest.approx(getattr(one, band)(x[i, :7])[1], rel=1e-5)
    for fit, at in ((own, x[:2]), (own, x[None]), (each[0], x)):
        with pytest.raises(ValueError, match="x has shape"):
            fit.predict(at)


@pytest.mark.parametrize("sets", [1, 2, 3])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_two_variables_of_many_data_sets(sets: int, as_tensor: bool):
    """With two data sets the shape of xdata alone does not say whose it is."""
    x = np.stack([X, X**2])  # (2, 40)
    truth = np.array([[2.0, 1.0], [1.0, 3.0], [-1.0, 0.5]])[:sets]
    kind: Any = torch.tensor if as_tensor else np.array
    plane = lambda x, a, b: a * x[0] + b * x[1]  # noqa: E731
    for given in (x, np.tile(x, (sets, 1, 1))):  # for all, and one for each: (B, 2, 40)
        fit = curve_fit(plane, kind(given), kind(truth @ x), batched=True)
        assert np.asarray(fit.popt) == pytest.approx(truth)
        for at in (x[:, :7], np.tile(x[:, :7], (sets, 1, 1))):
            assert np.asarray(fit.predict(kind(at))) == pytest.approx(truth @ x[:, :7], abs=1e-9)


def test_an_x_that_could_be_of_all_or_of_each():
    grid = torch.tensor(X)
    with pytest.raises(ValueError, match=r"xdata of shape \(2, 40\) may be"):
        curve_fit(lambda x, a, b: a * x[0] + b * grid, np.stack([X, X]), np.stack([X, X]), batched=True)


@pytest.mark.parametrize("sigma", [None, SIGMA, COVARIANCE], ids=["none", "1-D", "2-D"])
def test_points_with_nan(sigma: Any):
    x, y = X.copy(), Y.copy()
    x[3], y[[7, 20]] = np.nan, np.nan
    for options in ({"nan_policy": "omit"}, {"nan_policy": "omit", "check_finite": False}):
        popt, pcov = curve_fit(decay, x, y, sigma=sigma, **options)
        known, known_cov = optimize.curve_fit(decay_numpy, x, y, sigma=sigma, jac=None, **options, **TIGHT)
        assert popt == pytest.approx(known, rel=1e-6)
        assert pcov == pytest.approx(known_cov, rel=1e-4)
    assert curve_fit(decay, X, Y, nan_policy="raise").popt == pytest.approx(curve_fit(decay, X, Y).popt)
    for options in ({"nan_policy": "raise"}, {"nan_policy": "omit", "check_finite": True}, {}):
        with pytest.raises(ValueError, match="contains NaN"):
            curve_fit(decay, x, y, sigma=sigma, **options)
        with pytest.raises(ValueError):  # noqa: PT011, SciPy's words are its own
            optimize.curve_fit(decay_numpy, x, y, sigma=sigma, **options)


def test_points_with_nan_of_two_variables():
    x = np.stack([X, X**2])
    y = 2 * x[0] + 3 * x[1]
    x[1, 4] = np.nan
    assert curve_fit(lambda x, a, b: a * x[0] + b * x[1], x, y, nan_policy="omit").popt == pytest.approx([2, 3])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("layout", ["reversed", "strided", "big-endian", "read-only", "list", "float32"])
def test_arrays_of_any_layout(layout: str):
    def laid(a: np.ndarray) -> Any:
        if layout == "reversed":
            return np.flip(np.flip(a).copy())
        if layout == "strided":
            return np.repeat(a, 2, axis=-1)[..., ::2] if a.ndim == 1 else np.asfortranarray(a)
        if layout == "big-endian":
            return a.astype(">f8")
        if layout == "read-only":
            a = a.copy()
            a.flags.writeable = False
            return a
        return a.tolist() if layout == "list" else a.astype(np.float32)

    for sigma in (SIGMA, COVARIANCE):
        fit = curve_fit(decay, laid(X), laid(Y), laid(np.ones(3)), laid(sigma))
        plain = curve_fit(decay, X, Y, sigma=sigma)
        assert fit.popt == pytest.approx(plain.popt, rel=1e-5 if layout == "float32" else 1e-12)
        assert fit.predict(laid(X)) == pytest.approx(plain.predict(X), rel=1e-5)
        assert fit.prediction_band(laid(X), sigma=laid(SIGMA))[0] == pytest.approx(
            plain.prediction_band(X, sigma=SIGMA)[0], rel=1e-3
        )
    turned = lambda *args: np.flip(np.flip(slopes(*args)).copy())  # noqa: E731
    assert curve_fit(decay_numpy, laid(X), laid(Y), jac=turned).popt == pytest.approx(
        curve_fit(decay, X, Y).popt, rel=1e-5
    )
    x = (laid(X), laid(X**2))
    assert curve_fit(lambda x, a, b: a * x[0] + b * x[1], x, X + 2 * X**2).popt == pytest.approx([1, 2], rel=1e-5)
